//! The JavaScript interface (feature `web`, wasm32): what the npm package in `web/` exports.
//!
//! An engine is an `Eda`; it makes `StatePool`s. Inputs are typed arrays by the names of [`Problem::name`], options
//! are plain objects, errors are `Error` objects with a `code`. The types are in `types.d.ts`.

mod bench;
mod device;
mod error;
mod input;

use crate::engine::{
    Backend, DecodeOptions, Description, Element, Engine, Pool, PrefillOptions, Run, Tier,
};
use crate::error::Error;
use crate::file::ReadOptions;
use crate::generate::{Decays, Gates, Keys, Recipe};
use crate::gpu::engine::GpuEngine;
use crate::problem::{Operand, Outputs, Problem, Tensors};
use crate::{battery, cpu::CpuEngine, file, generate, parts, reference};
use device::{About, Opened};
use error::{Failure, Result, text};
use futures::lock::Mutex;
use input::{Control, Input, get, set};
use js_sys::{Array, Float32Array, Float64Array, Function, Object, Promise, Uint8Array};
use std::cell::{Cell, RefCell};
use std::future::Future;
use std::io::Cursor;
use std::path::Path;
use std::rc::{Rc, Weak};
use wasm_bindgen::prelude::*;
use wasm_bindgen_futures::{JsFuture, future_to_promise, spawn_local};

#[wasm_bindgen(typescript_custom_section)]
const TYPES: &'static str = include_str!("types.d.ts");

/// Floating-point operations that the CPU engine does at a time before it lets the page have a turn: about a tenth
/// of a second.
const TURN_FLOPS: f64 = 1e8;

/// The event of an error outside of error scopes.
const UNCAPTURED: &str = "uncapturederror";

#[wasm_bindgen(start)]
fn start() {
    // A panic is a mistake of this crate. It ends the module; at least it says why.
    std::panic::set_hook(Box::new(|panic| {
        let console = get(&js_sys::global(), "console").ok().flatten();
        let message = format!("eda-wgpu: {panic}");
        if let Some(console) = console {
            let _ = device::call(&console, "error", &[message.into()]);
        }
    }));
}

fn promise(work: impl Future<Output = Result<JsValue>> + 'static) -> Promise {
    future_to_promise(async move { work.await.map_err(JsValue::from) })
}

/// Options, or what stands for their absence.
fn given(options: Option<Object>) -> JsValue {
    options.map_or(JsValue::UNDEFINED, JsValue::from)
}

/// Lets the page have a turn.
async fn turn() -> Result<()> {
    sleep(0).await
}

async fn sleep(ms: u32) -> Result<()> {
    let wait = Promise::new(&mut |resolve, _| {
        // Every browsing context and worker has timers.
        let arguments = [resolve.into(), ms.into()];
        let _ = device::call(&js_sys::global(), "setTimeout", &arguments);
    });
    JsFuture::from(wait).await.map_err(Failure::Thrown)?;
    Ok(())
}

fn json(value: &impl serde::Serialize) -> Result<JsValue> {
    let text = serde_json::to_string(value).map_err(|e| Error::Device(e.to_string()))?;
    js_sys::JSON::parse(&text).map_err(Failure::Thrown)
}

type Listener = Closure<dyn FnMut(JsValue)>;

/// What an `Eda` is, shared with the calls that are under way.
struct Shared {
    engine: RefCell<Option<Rc<Engine>>>,
    info: Object,
    /// Whether there is a `GPUDevice`, and then whether it is ours.
    device: Option<Ownership>,
    options: JsValue,
    pools: RefCell<Vec<Weak<PoolState>>>,
    lost: Promise,
    resolve: Function,
    /// The device, and what listens to its errors outside of error scopes.
    listener: RefCell<Option<(JsValue, Listener)>>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Ownership {
    Ours,
    Page,
}

struct PoolState {
    /// One call at a time; the others wait their turn. `None` once freed.
    pool: Mutex<Option<Pool>>,
    freed: Cell<bool>,
    slots: usize,
    /// `HV`, `K`, `V`.
    shape: [usize; 3],
    owner: Rc<Shared>,
}

/// An opened engine: a WebGPU device with the kernels, or the CPU engine.
#[wasm_bindgen]
pub struct Eda {
    shared: Rc<Shared>,
}

/// States kept by an engine, one for each slot, `[slots, HV, K, V]` float32. Calls on one pool run one after the
/// other, in the order in which they were made.
#[wasm_bindgen]
pub struct StatePool {
    state: Rc<PoolState>,
}

impl Shared {
    fn engine(&self) -> Result<Rc<Engine>> {
        self.engine
            .borrow()
            .clone()
            .ok_or_else(|| Error::DeviceLost("destroyed by destroy()".into()).into())
    }

    /// The promise of a call on the engine. On a device that is lost things fail in many ways, and a browser may tell
    /// of the loss after what followed from it; so a device error waits a moment for that.
    fn promise(self: &Rc<Self>, work: impl Future<Output = Result<JsValue>> + 'static) -> Promise {
        let shared = self.clone();
        promise(async move {
            // The engine stays what it was when the call was made.
            let engine = shared.engine();
            let result = work.await;
            if let (Err(Failure::Eda(Error::Device(_))), Ok(engine)) = (&result, &engine)
                && let Engine::Gpu(engine) = &**engine
            {
                for _ in 0..10 {
                    if let Some(reason) = engine.lost() {
                        return Err(Error::DeviceLost(reason).into());
                    }
                    sleep(20).await?;
                }
            }
            // What a call still got from an engine that was destroyed meanwhile is not told: `destroy()` rejects.
            let value = result?;
            shared.engine()?;
            Ok(value)
        })
    }

    /// The device is gone: the engine's calls say so, and so does `lost`.
    fn is_lost(&self, reason: &str, message: &str) {
        if let Some(Engine::Gpu(engine)) = self.engine.borrow().as_deref() {
            engine.report(Error::DeviceLost(format!("{reason}: {message}")));
        }
        let out = Object::new();
        set(&out, "reason", reason);
        set(&out, "message", message);
        // Only the first call settles the promise.
        let _ = self.resolve.call1(&JsValue::UNDEFINED, &out);
    }

    fn destroy(&self) {
        let Some(engine) = self.engine.borrow_mut().take() else {
            return;
        };
        for pool in self.pools.borrow_mut().drain(..) {
            if let Some(pool) = pool.upgrade() {
                pool.free();
            }
        }
        if let Engine::Gpu(engine) = &*engine {
            let message = "destroyed by destroy()".to_owned();
            engine.report(Error::DeviceLost(message));
            if self.device == Some(Ownership::Ours) {
                engine.kernels().device().destroy();
            }
        }
        // The page may keep this object; it should not keep what the browser has for the device.
        drop(engine);
        if let Some((device, listener)) = self.listener.borrow_mut().take() {
            let arguments = [UNCAPTURED.into(), listener.as_ref().clone()];
            let _ = device::call(&device, "removeEventListener", &arguments);
        }
        self.is_lost("destroyed", "destroy() was called");
    }

    /// Follows the device: its loss, and errors outside of error scopes where the device is ours.
    fn watch(self: &Rc<Self>, raw: &JsValue, whose: Ownership) -> Result<()> {
        let lost = get(raw, "lost")?.unwrap_or_default();
        let weak = Rc::downgrade(self);
        spawn_local(async move {
            let Ok(info) = JsFuture::from(Promise::resolve(&lost)).await else {
                return;
            };
            let word = |key| {
                let value = get(&info, key).ok().flatten();
                value.and_then(|v| v.as_string()).unwrap_or_default()
            };
            let reason = match word("reason").as_str() {
                "destroyed" => "destroyed",
                _ => "unknown",
            };
            if let Some(shared) = weak.upgrade() {
                shared.is_lost(reason, &word("message"));
            }
        });
        if whose == Ownership::Page {
            return Ok(());
        }
        let weak = Rc::downgrade(self);
        let listener = Listener::new(move |event: JsValue| {
            let error = get(&event, "error").ok().flatten().unwrap_or_default();
            let memory =
                error.unchecked_ref::<Object>().constructor().name() == "GPUOutOfMemoryError";
            let Some(shared) = weak.upgrade() else { return };
            if let Some(Engine::Gpu(engine)) = shared.engine.borrow().as_deref() {
                engine.report(if memory {
                    Error::OutOfMemory {
                        what: "a transfer".into(),
                        bytes: 0,
                    }
                } else {
                    Error::Device(text(&error))
                });
            }
        });
        let arguments = [UNCAPTURED.into(), listener.as_ref().clone()];
        device::call(raw, "addEventListener", &arguments)?;
        *self.listener.borrow_mut() = Some((raw.clone(), listener));
        Ok(())
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.destroy();
    }
}

impl PoolState {
    /// Frees the states, after the call that is using them if there is one.
    fn free(self: &Rc<Self>) {
        self.freed.set(true);
        if let Some(mut pool) = self.pool.try_lock() {
            pool.take();
            return;
        }
        let this = self.clone();
        spawn_local(async move {
            this.pool.lock().await.take();
        });
    }
}

impl Drop for StatePool {
    fn drop(&mut self) {
        self.state.free();
    }
}

/// Opens what the options ask for.
async fn open(options: JsValue) -> Result<Eda> {
    let backend = match input::string(&options, "backend")?.as_deref() {
        None | Some("auto") => Backend::Auto,
        Some("webgpu") => Backend::WebGpu,
        Some("cpu") => Backend::Cpu,
        Some(other) => {
            let limit = "auto, webgpu or cpu";
            return Err(Error::unsupported("backend", format!("`{other}`"), limit).into());
        }
    };
    let skip_self_test = input::flag(&options, "skipSelfTest")?.unwrap_or(false);
    let of_page = get(&options, "device")?;
    if backend == Backend::Cpu {
        return Ok(on_cpu(options, None));
    }
    let whose = match of_page {
        Some(_) => Ownership::Page,
        None => Ownership::Ours,
    };
    let opened = match of_page {
        Some(raw) => device::adopt(raw).await?,
        None => {
            let adapter = match device::adapter(&options).await? {
                Ok(adapter) => adapter,
                Err(why) if backend == Backend::Auto => {
                    return Ok(on_cpu(options, Some(why.into())));
                }
                Err(why) => return Err(device::no_adapter(backend, why).into()),
            };
            let about = About::read(&adapter)?;
            if backend == Backend::Auto && about.software {
                let why = format!(
                    "the browser's adapter ({}) is a software one; backend `webgpu` takes it all the same",
                    about.name
                );
                return Ok(on_cpu(options, Some(why)));
            }
            device::open(&adapter).await?
        }
    };
    let Opened {
        raw,
        device,
        queue,
        about,
    } = opened;
    let description = Description {
        adapter: about.name.clone(),
        backend: Backend::WebGpu.name().into(),
        tier: Tier::Portable.name().into(),
        kind: if about.software { "software" } else { "other" }.into(),
        driver: String::new(),
    };
    let info = info(&description, &about.elements, about.timestamps, None);
    let limits = Object::new();
    for &(name, value) in &about.limits {
        set(&limits, name, value);
    }
    set(&info, "limits", limits);
    let engine = Engine::Gpu(Box::new(GpuEngine::watched(&device, &queue, description)));
    let eda = shared(engine, info, Some(whose), options);
    eda.shared.watch(&raw, whose)?;
    if !skip_self_test {
        let engine = eda.shared.engine()?;
        // Dropping the engine frees what it has.
        engine.self_test().await?;
    }
    Ok(eda)
}

fn on_cpu(options: JsValue, reason: Option<String>) -> Eda {
    let engine = CpuEngine::new();
    let elements = [Element::F32, Element::F16];
    let info = info(&engine.description(), &elements, false, reason);
    shared(Engine::Cpu(engine), info, None, options)
}

fn info(
    description: &Description,
    elements: &[Element],
    timestamps: bool,
    reason: Option<String>,
) -> Object {
    let out = Object::new();
    set(&out, "version", env!("CARGO_PKG_VERSION"));
    set(&out, "adapter", &*description.adapter);
    set(&out, "backend", &*description.backend);
    set(&out, "tier", &*description.tier);
    set(&out, "kind", &*description.kind);
    if let Some(reason) = reason {
        set(&out, "reason", reason);
    }
    let elements: Array = elements.iter().map(|e| JsValue::from(e.name())).collect();
    set(&out, "elements", elements);
    set(&out, "timestamps", timestamps);
    set(&out, "limits", Object::new());
    out
}

fn shared(engine: Engine, info: Object, device: Option<Ownership>, options: JsValue) -> Eda {
    let mut resolve = None;
    let lost = Promise::new(&mut |f, _| resolve = Some(f));
    Eda {
        shared: Rc::new(Shared {
            engine: RefCell::new(Some(Rc::new(engine))),
            info,
            device,
            options,
            pools: RefCell::default(),
            lost,
            // A promise calls its executor at once.
            resolve: resolve.unwrap_or_default(),
            listener: RefCell::default(),
        }),
    }
}

/// A prefill on the CPU engine in pieces, with turns for the page between them. Pieces end at chunks of any size, so
/// that the result has the same bits as in one go.
async fn prefill_in_turns(
    engine: &Engine,
    problem: &Problem,
    tensors: &Tensors<&[f32]>,
    options: &PrefillOptions,
    control: &Control,
) -> Result<Run> {
    problem.validate_host(tensors, options.allow_non_finite)?;
    let lengths = (0..problem.sequences()).map(|n| problem.sequence(n).len());
    let longest = lengths.max().unwrap_or(0);
    let update = problem.rule.update();
    let token_flops = (problem.sequences() * problem.value_heads) as f64
        * 4.0
        * (update.substeps() + 1) as f64
        * (problem.state_len() + 32 * (problem.key_dim + problem.value_dim)) as f64;
    let piece = ((TURN_FLOPS / token_flops.max(1.0)) as usize).max(64) / 64 * 64;
    let mut run = Run {
        outputs: Outputs {
            o: vec![0.0; problem.output_len()],
            final_state: tensors
                .get(Operand::InitialState)
                .map_or_else(|| vec![0.0; problem.states_len()], |s| s.to_vec()),
        },
        compute_ms: 0.0,
        tier: None,
        segments: 0,
    };
    for at in (0..longest).step_by(piece) {
        turn().await?;
        control.check()?;
        let ranges: Vec<_> = (0..problem.sequences())
            .map(|n| problem.sequence(n))
            .map(|s| (s.start + at).min(s.end)..(s.start + at + piece).min(s.end))
            .collect();
        let (part, mut selected) = parts::select(problem, tensors, &ranges);
        selected.set(Operand::InitialState, run.outputs.final_state);
        let done = engine
            .prefill(&part, &selected.slices(), options, &|_, _| {})
            .await?;
        parts::place(problem, &ranges, &done.outputs.o, &mut run.outputs.o);
        run.outputs.final_state = done.outputs.final_state;
        run.compute_ms += done.compute_ms;
        let so_far: usize = (0..problem.sequences())
            .map(|n| problem.sequence(n).len().min(at + piece))
            .sum();
        control.tell(so_far, problem.total_tokens(), "");
    }
    Ok(run)
}

async fn prefill(
    engine: &Engine,
    input: &Input,
    options: &PrefillOptions,
    control: &Control,
) -> Result<Run> {
    let problem = &input.problem;
    let values = problem
        .output_len()
        .saturating_add(problem.states_len().saturating_mul(3));
    input::room("the outputs", values.saturating_mul(4))?;
    control.check()?;
    let tensors = input.tensors.slices();
    if let Engine::Cpu(_) = engine {
        return prefill_in_turns(engine, problem, &tensors, options, control).await;
    }
    let progress = control.progress();
    let run = engine
        .prefill(problem, &tensors, options, &progress)
        .await?;
    control.check()?;
    Ok(run)
}

#[wasm_bindgen]
impl Eda {
    /// Opens an engine. Rejected with `no-adapter` for backend `webgpu` where the browser has none, `device`,
    /// `self-test`.
    #[wasm_bindgen(unchecked_return_type = "Promise<Eda>")]
    pub fn open(
        #[wasm_bindgen(unchecked_optional_param_type = "OpenOptions")] options: Option<Object>,
    ) -> Promise {
        let options = given(options);
        promise(async move { Ok(open(options).await?.into()) })
    }

    /// Opens another engine with the options of this one, for instance after its device was lost.
    /// Rejected with `unsupported` where the device was the page's.
    #[wasm_bindgen(unchecked_return_type = "Promise<Eda>")]
    pub fn reopen(&self) -> Promise {
        let options = self.shared.options.clone();
        let of_page = self.shared.device == Some(Ownership::Page);
        promise(async move {
            if of_page {
                let limit =
                    "a device of the engine's own: open one with another device of the page";
                return Err(Error::unsupported("device", "the page's", limit).into());
            }
            Ok(open(options).await?.into())
        })
    }

    /// What runs.
    #[wasm_bindgen(getter, unchecked_return_type = "Info")]
    pub fn info(&self) -> Object {
        self.shared.info.clone()
    }

    /// Resolves when the engine is gone: after `destroy()`, or when its device is lost. Never rejected.
    #[wasm_bindgen(getter, unchecked_return_type = "Promise<LostInfo>")]
    pub fn lost(&self) -> Promise {
        self.shared.lost.clone()
    }

    /// Frees what the engine and its pools hold on the GPU, at once. Calls under way are rejected with
    /// `device-lost`, and so is every later one.
    pub fn destroy(&self) {
        self.shared.destroy();
    }

    /// The chunked form over whole sequences.
    #[wasm_bindgen(unchecked_return_type = "Promise<PrefillResult>")]
    pub fn prefill(
        &self,
        #[wasm_bindgen(unchecked_param_type = "Problem")] problem: JsValue,
        #[wasm_bindgen(unchecked_param_type = "Tensors")] tensors: JsValue,
        #[wasm_bindgen(unchecked_optional_param_type = "PrefillOptions")] options: Option<Object>,
    ) -> Promise {
        let engine = self.shared.engine();
        let input = Input::read(&problem, &tensors);
        let options = given(options);
        let control = Control::read(&options);
        let options = prefill_options(&options);
        self.shared.promise(async move {
            let (engine, input, control, options) = (engine?, input?, control?, options?);
            let run = prefill(&engine, &input, &options, &control).await?;
            let out = Object::new();
            set(&out, "o", Float32Array::from(&run.outputs.o[..]));
            let state = Float32Array::from(&run.outputs.final_state[..]);
            set(&out, "final_state", state);
            set(&out, "computeMs", run.compute_ms);
            Ok(out.into())
        })
    }

    /// A pool of `slots` zero states for problems with these heads and sizes (`B` and `T` do not matter).
    #[wasm_bindgen(unchecked_return_type = "Promise<StatePool>")]
    pub fn pool(
        &self,
        #[wasm_bindgen(unchecked_param_type = "Problem")] problem: JsValue,
        #[wasm_bindgen(unchecked_param_type = "number")] slots: JsValue,
    ) -> Promise {
        let shared = self.shared.clone();
        let engine = shared.engine();
        let problem = input::read_problem(&problem, &[]);
        let slots = input::whole_value("slots", &slots);
        self.shared.promise(async move {
            let (engine, problem, slots) = (engine?, problem?, slots?);
            let pool = engine.pool(&problem, slots).await?;
            let state = Rc::new(PoolState {
                pool: Mutex::new(Some(pool)),
                freed: Cell::new(false),
                slots,
                shape: [problem.value_heads, problem.key_dim, problem.value_dim],
                owner: shared.clone(),
            });
            let mut pools = shared.pools.borrow_mut();
            pools.retain(|p| p.strong_count() > 0);
            pools.push(Rc::downgrade(&state));
            Ok(StatePool { state }.into())
        })
    }

    /// Continues the states in a pool by `T` tokens (one, or a few) for each of the `B` rows; `rows` names the slot
    /// of each. Where the call is rejected before anything ran, the pool is as it was.
    #[wasm_bindgen(unchecked_return_type = "Promise<DecodeResult>")]
    pub fn decode(
        &self,
        pool: &StatePool,
        #[wasm_bindgen(unchecked_param_type = "Problem")] problem: JsValue,
        #[wasm_bindgen(unchecked_param_type = "Tensors")] tensors: JsValue,
        #[wasm_bindgen(unchecked_param_type = "Row[] | Int32Array")] rows: JsValue,
        #[wasm_bindgen(unchecked_optional_param_type = "DecodeOptions")] options: Option<Object>,
    ) -> Promise {
        let engine = self.shared.engine();
        let input = Input::read(&problem, &tensors);
        let rows = input::rows(&rows);
        let options = given(options);
        let options = decode_options(&options);
        let pool = pool.state.clone();
        self.shared.promise(async move {
            let (engine, input, rows, options) = (engine?, input?, rows?, options?);
            input::room("the outputs", input.problem.output_len().saturating_mul(4))?;
            let mut lock = pool.pool.lock().await;
            let states = there(&pool, lock.as_mut())?;
            let tensors = input.tensors.slices();
            let (o, ms) = engine
                .decode(&input.problem, &tensors, states, &rows, &options)
                .await?;
            let out = Object::new();
            set(&out, "o", Float32Array::from(&o[..]));
            set(&out, "computeMs", ms);
            Ok(out.into())
        })
    }

    /// Runs the built-in cases and compares them with float64. An engine's error fails its case and the next one
    /// runs.
    #[wasm_bindgen(unchecked_return_type = "Promise<Verdict[]>")]
    pub fn check(
        &self,
        #[wasm_bindgen(unchecked_optional_param_type = "Control")] options: Option<Object>,
    ) -> Promise {
        let engine = self.shared.engine();
        let control = Control::read(&given(options));
        self.shared.promise(async move {
            let (engine, control) = (engine?, control?);
            let cases = battery::cases();
            let mut verdicts = Vec::new();
            for (i, case) in cases.iter().enumerate() {
                control.tell(i, cases.len(), &case.name);
                turn().await?;
                control.check()?;
                verdicts.push(case.run(&engine).await);
            }
            control.tell(cases.len(), cases.len(), "");
            control.check()?;
            json(&verdicts)
        })
    }

    /// A whole benchmark run: the ceilings of this engine, then each case, as `eda bench --json` leaves it. The CPU
    /// engine lets the page have a turn between samples.
    #[wasm_bindgen(unchecked_return_type = "Promise<Report>")]
    pub fn bench(
        &self,
        #[wasm_bindgen(unchecked_optional_param_type = "BenchOptions")] options: Option<Object>,
    ) -> Promise {
        let engine = self.shared.engine();
        let options = given(options);
        let control = Control::read(&options);
        let what = bench::What::read(&options);
        self.shared.promise(async move {
            let (engine, control, what) = (engine?, control?, what?);
            json(&bench::measure(&engine, &what, &control).await?)
        })
    }

    /// Reads a report from its JSON text and checks that its values can be those of a run.
    #[wasm_bindgen(js_name = readReport, unchecked_return_type = "Report")]
    pub fn read_report(text: &str) -> Result<JsValue, JsValue> {
        let read = || json(&bench::read(text)?);
        Ok(read()?)
    }

    /// Version of this package.
    #[wasm_bindgen(getter)]
    pub fn version() -> String {
        env!("CARGO_PKG_VERSION").into()
    }

    /// Names and shapes of the tensors that a problem takes, in the forms that `names` tell (`["a", "A_log", …]`
    /// for raw inputs). `initial_state` may be left out.
    #[wasm_bindgen(unchecked_return_type = "Record<string, number[]>")]
    pub fn shapes(
        #[wasm_bindgen(unchecked_param_type = "Problem")] problem: JsValue,
        #[wasm_bindgen(unchecked_optional_param_type = "string[]")] names: Option<Vec<String>>,
    ) -> Result<Object, JsValue> {
        let found: Vec<_> = names
            .unwrap_or_default()
            .into_iter()
            .map(|name| (name, JsValue::UNDEFINED))
            .collect();
        let problem = input::read_problem(&problem, &found)?;
        problem.validate().map_err(Failure::from)?;
        let out = Object::new();
        for operand in Operand::ALL.into_iter().filter(|&o| problem.uses(o)) {
            let shape: Array = problem
                .shape(operand)
                .into_iter()
                .map(|n| JsValue::from(n as f64))
                .collect();
            set(&out, problem.name(operand), shape);
        }
        Ok(out)
    }

    /// Random inputs for a problem, the same for a seed everywhere.
    #[wasm_bindgen(unchecked_return_type = "Tensors")]
    pub fn generate(
        #[wasm_bindgen(unchecked_param_type = "Problem")] problem: JsValue,
        #[wasm_bindgen(unchecked_optional_param_type = "Recipe")] recipe: Option<Object>,
    ) -> Result<Object, JsValue> {
        let problem = input::read_problem(&problem, &[])?;
        problem.validate().map_err(Failure::from)?;
        let recipe = read_recipe(&given(recipe))?;
        let values = Operand::ALL.into_iter().filter(|&o| problem.uses(o));
        let values: usize = values.map(|o| problem.len(o)).sum();
        input::room("the inputs", values.saturating_mul(4)).map_err(Failure::from)?;
        let tensors = generate::tensors(&problem, &recipe);
        Ok(input::tensors_object(&problem, &tensors))
    }

    /// The recurrence in float64, token by token: what is right. It runs in this thread until it is done.
    #[wasm_bindgen(unchecked_return_type = "ReferenceResult")]
    pub fn reference(
        #[wasm_bindgen(unchecked_param_type = "Problem")] problem: JsValue,
        #[wasm_bindgen(unchecked_param_type = "Tensors")] tensors: JsValue,
    ) -> Result<Object, JsValue> {
        let input = Input::read(&problem, &tensors)?;
        let exact = || -> Result<_> {
            let problem = &input.problem;
            let values = problem.output_len().saturating_add(problem.states_len());
            input::room("the outputs", values.saturating_mul(16))?;
            let tensors = input.tensors.slices();
            problem.validate_host(&tensors, false)?;
            Ok(reference::recurrence::<f64>(problem, &tensors)?)
        };
        Ok(input::exact_object(&exact()?))
    }

    /// Reads a problem from the bytes of a safetensors file, in the form that the command line reads. `name` is
    /// used in messages.
    #[wasm_bindgen(unchecked_return_type = "FileContent")]
    pub fn read(
        #[wasm_bindgen(unchecked_param_type = "Uint8Array | ArrayBuffer")] bytes: JsValue,
        name: Option<String>,
    ) -> Result<Object, JsValue> {
        let array = if bytes.is_instance_of::<Uint8Array>() {
            bytes.unchecked_into::<Uint8Array>()
        } else if bytes.is_instance_of::<js_sys::ArrayBuffer>() {
            Uint8Array::new(&bytes)
        } else {
            let found = format!("{bytes:?}");
            let error = Error::tensor("bytes", "a Uint8Array or an ArrayBuffer", found);
            return Err(Failure::from(error).into());
        };
        let read = || -> Result<_> {
            // Float16 expectations become float64: four times what is there, and the bytes themselves.
            input::room("the file", (array.length() as usize).saturating_mul(5))?;
            let path = name.unwrap_or_else(|| "the file".into());
            let bytes = array.to_vec();
            let (length, options) = (bytes.len() as u64, ReadOptions::default());
            Ok(file::read_from(
                Cursor::new(bytes),
                length,
                Path::new(&path),
                &options,
            )?)
        };
        let content = read()?;
        let expected = Object::new();
        for (name, values) in [
            ("o", &content.expected.o),
            ("final_state", &content.expected.final_state),
        ] {
            if let Some(values) = values {
                set(&expected, name, Float64Array::from(&values[..]));
            }
        }
        let out = Object::new();
        set(&out, "problem", input::problem_object(&content.problem));
        let tensors = input::tensors_object(&content.problem, &content.tensors);
        set(&out, "tensors", tensors);
        set(&out, "expected", expected);
        Ok(out)
    }
}

fn prefill_options(options: &JsValue) -> Result<PrefillOptions> {
    Ok(PrefillOptions {
        chunk: input::whole(options, "chunk")?,
        segments: input::whole(options, "segments")?,
        element: input::element(options)?,
        allow_non_finite: input::flag(options, "allowNonFinite")?.unwrap_or(false),
    })
}

fn decode_options(options: &JsValue) -> Result<DecodeOptions> {
    Ok(DecodeOptions {
        element: input::element(options)?,
        allow_non_finite: input::flag(options, "allowNonFinite")?.unwrap_or(false),
    })
}

fn read_recipe(recipe: &JsValue) -> Result<Recipe> {
    let unknown = |what: &str, found: &str, limit: &str| -> Failure {
        Error::unsupported(what, format!("`{found}`"), limit).into()
    };
    Ok(Recipe {
        seed: input::whole(recipe, "seed")?.unwrap_or(0) as u64,
        decays: match input::string(recipe, "decays")?.as_deref() {
            None | Some("mixed") => Decays::Mixed,
            Some("none") => Decays::None,
            Some("weak") => Decays::Weak,
            Some("floor") => Decays::Floor,
            Some("cliff") => Decays::Cliff,
            Some("full") => Decays::Full,
            Some(other) => {
                let limit = "mixed, none, weak, floor, cliff or full";
                return Err(unknown("decays", other, limit));
            }
        },
        gates: match input::string(recipe, "gates")?.as_deref() {
            None | Some("mixed") => Gates::Mixed,
            Some("near-one") => Gates::NearOne,
            Some(other) => return Err(unknown("gates", other, "mixed or near-one")),
        },
        keys: match input::string(recipe, "keys")?.as_deref() {
            None | Some("clustered") => Keys::Clustered,
            Some("repeated") => Keys::Repeated,
            Some("same-address") => Keys::SameAddress,
            Some(other) => {
                let limit = "clustered, repeated or same-address";
                return Err(unknown("keys", other, limit));
            }
        },
        initial_state: input::flag(recipe, "initialState")?.unwrap_or(false),
    })
}

fn freed() -> Failure {
    Error::tensor("the state pool", "one that is there", "one that was freed").into()
}

#[wasm_bindgen]
impl StatePool {
    /// Number of slots.
    #[wasm_bindgen(getter)]
    pub fn slots(&self) -> usize {
        self.state.slots
    }

    /// `[HV, K, V]`, the shape of a state.
    #[wasm_bindgen(getter, unchecked_return_type = "[number, number, number]")]
    pub fn shape(&self) -> Array {
        let shape = self.state.shape.into_iter();
        shape.map(|n| JsValue::from(n as f64)).collect()
    }

    /// The state in a slot, `[HV, K, V]`.
    #[wasm_bindgen(unchecked_return_type = "Promise<Float32Array>")]
    pub fn read(&self, #[wasm_bindgen(unchecked_param_type = "number")] slot: JsValue) -> Promise {
        let (state, slot) = (self.state.clone(), slot_number(slot));
        self.state.owner.promise(async move {
            let slot = slot?;
            input::room("the state", state.shape.iter().product::<usize>() * 4)?;
            let lock = state.pool.lock().await;
            let values = there(&state, lock.as_ref())?.read(slot).await?;
            Ok(Float32Array::from(&values[..]).into())
        })
    }

    /// Replaces the state in a slot by `state [HV, K, V]`.
    #[wasm_bindgen(unchecked_return_type = "Promise<void>")]
    pub fn write(
        &self,
        #[wasm_bindgen(unchecked_param_type = "number")] slot: JsValue,
        #[wasm_bindgen(unchecked_param_type = "Values")] state: JsValue,
    ) -> Promise {
        let values = input::copy_floats("state", &state);
        let (state, slot) = (self.state.clone(), slot_number(slot));
        self.state.owner.promise(async move {
            let (slot, values) = (slot?, values?);
            let mut lock = state.pool.lock().await;
            there(&state, lock.as_mut())?.write(slot, &values).await?;
            Ok(JsValue::UNDEFINED)
        })
    }

    /// Copies the state in slot `from` to slot `to` (prefix reuse).
    #[wasm_bindgen(unchecked_return_type = "Promise<void>")]
    pub fn copy(
        &self,
        #[wasm_bindgen(unchecked_param_type = "number")] from: JsValue,
        #[wasm_bindgen(unchecked_param_type = "number")] to: JsValue,
    ) -> Promise {
        let (from, to) = (slot_number(from), slot_number(to));
        let state = self.state.clone();
        self.state.owner.promise(async move {
            let (from, to) = (from?, to?);
            let mut lock = state.pool.lock().await;
            there(&state, lock.as_mut())?.copy(from, to).await?;
            Ok(JsValue::UNDEFINED)
        })
    }

    /// Frees the states: at once, or after the call that is using them.
    pub fn destroy(&self) {
        self.state.free();
    }
}

/// The pool, unless it was freed or its engine is gone.
fn there<T>(state: &PoolState, pool: Option<T>) -> Result<T> {
    state.owner.engine()?;
    match pool {
        Some(pool) if !state.freed.get() => Ok(pool),
        _ => Err(freed()),
    }
}

fn slot_number(slot: JsValue) -> Result<usize> {
    match slot.as_f64() {
        Some(x) if x.fract() == 0.0 && (0.0..1e9).contains(&x) => Ok(x as usize),
        _ => {
            let found = slot
                .as_f64()
                .map_or_else(|| format!("{slot:?}"), |x| x.to_string());
            Err(Error::tensor("slot", "the number of a slot", found).into())
        }
    }
}
