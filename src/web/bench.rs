//! A whole benchmark run as `eda bench` makes it, and the reader of what such a run has left.

use super::error::{Failure, Result};
use super::input::{self, Control, get};
use super::turn;
use crate::bench::report::{
    Adapter, Case, Ceilings, FORMAT, Key, Op, Report, Samples, Skipped, Timing, tier_of,
};
use crate::bench::run::{self, Plan, Spec};
use crate::bench::{ceilings, count, random_values};
use crate::cpu::{self, CpuEngine};
use crate::engine::{DecodeOptions, Element, Engine, PrefillOptions};
use crate::error::Error;
use crate::problem::{Operand, Tensors};
use crate::rule::Rule;
use crate::slots::Row;
use js_sys::{Array, Date};
use std::time::Duration;
use wasm_bindgen::JsValue;
use web_time::Instant;

/// What is measured.
pub(super) struct What {
    quick: bool,
    operations: Vec<Op>,
    rules: Vec<Rule>,
    /// The engine's own where there are none.
    shapes: Vec<[usize; 6]>,
    element: Element,
}

/// The members of an array that is a property; none where it is absent.
fn list(options: &JsValue, key: &str) -> Result<Vec<JsValue>> {
    match get(options, key)? {
        None => Ok(Vec::new()),
        Some(value) if Array::is_array(&value) => Ok(Array::from(&value).to_vec()),
        Some(_) => Err(Error::unsupported(key, "no array", "an array").into()),
    }
}

fn names(options: &JsValue, key: &str) -> Result<Vec<String>> {
    let name = |value: JsValue| {
        value
            .as_string()
            .ok_or_else(|| Error::unsupported(key, "a value of another type", "names").into())
    };
    list(options, key)?.into_iter().map(name).collect()
}

/// `[B, T, H, HV, K, V]`.
fn shape(value: JsValue) -> Result<[usize; 6]> {
    let sizes: Option<Vec<usize>> = Array::is_array(&value).then(|| {
        let size = |x: JsValue| match x.as_f64() {
            Some(x) if x.fract() == 0.0 && (1.0..=1e9).contains(&x) => x as usize,
            _ => 0,
        };
        Array::from(&value).iter().map(size).collect()
    });
    match sizes.and_then(|s| <[usize; 6]>::try_from(s).ok()) {
        Some(sizes) if !sizes.contains(&0) => Ok(sizes),
        _ => {
            let limit = "six whole numbers above 0, [B, T, H, HV, K, V]";
            Err(Error::unsupported("shapes", "something else", limit).into())
        }
    }
}

impl What {
    pub(super) fn read(options: &JsValue) -> Result<Self> {
        let operation = |name: String| match name.as_str() {
            "prefill" => Ok(Op::Prefill),
            "decode" => Ok(Op::Decode),
            _ => {
                let found = format!("`{name}`");
                Err(Error::unsupported("operations", found, "prefill or decode").into())
            }
        };
        let operations: Result<Vec<Op>> = names(options, "operations")?
            .into_iter()
            .map(operation)
            .collect();
        let mut operations = operations?;
        if operations.is_empty() {
            operations = vec![Op::Prefill, Op::Decode];
        }
        let mut rules = names(options, "rules")?;
        if rules.is_empty() {
            rules = vec!["eda".into()];
        }
        let rules: std::result::Result<_, Error> =
            rules.iter().map(|name| Rule::from_name(name, 2)).collect();
        let shapes: Result<_> = list(options, "shapes")?.into_iter().map(shape).collect();
        Ok(Self {
            quick: input::flag(options, "quick")?.unwrap_or(false),
            operations,
            rules: rules?,
            shapes: shapes?,
            element: input::element(options)?,
        })
    }

    fn specs(&self, engine: &Engine) -> Vec<Spec> {
        let mut specs: Vec<Spec> = Vec::new();
        for &rule in &self.rules {
            for &op in &self.operations {
                let shapes = if self.shapes.is_empty() {
                    run::default_shapes(engine, op, self.quick).1
                } else {
                    self.shapes.clone()
                };
                for shape in shapes {
                    let spec = Spec {
                        op,
                        rule,
                        shape,
                        element: self.element,
                        chunk: None,
                        segments: None,
                    };
                    // What was asked for twice is measured once.
                    if !specs.contains(&spec) {
                        specs.push(spec);
                    }
                }
            }
        }
        specs
    }
}

/// The browser, as it names itself.
fn browser() -> Result<String> {
    let navigator = get(&js_sys::global(), "navigator")?.unwrap_or_default();
    Ok(input::string(&navigator, "userAgent")?.unwrap_or_default())
}

/// Ceilings, then each case. A call between them ends where the signal says so.
pub(super) async fn measure(engine: &Engine, what: &What, control: &Control) -> Result<Report> {
    let date = String::from(Date::new_0().to_iso_string());
    let specs = what.specs(engine);
    let plan = Plan::of(engine, what.quick);
    let total = specs.len() + 1;
    control.tell(0, total, "ceilings");
    turn().await?;
    control.check()?;
    let ceilings = ceilings::measure(engine, &plan).await?;
    let mut cases: Vec<Case> = Vec::new();
    let mut skipped = Vec::new();
    for (i, spec) in specs.iter().enumerate() {
        let name = Key::new(spec.op, &spec.problem(), spec.element).to_string();
        control.tell(i + 1, total, &name);
        turn().await?;
        control.check()?;
        let case = match engine {
            Engine::Cpu(engine) => on_cpu(engine, spec, &plan, &ceilings, control).await,
            Engine::Gpu(_) => {
                let case = run::case(engine, spec, &plan, &ceilings).await;
                case.map_err(Failure::from)
            }
        };
        match case {
            Ok(case) => cases.push(case),
            Err(Failure::Eda(e @ (Error::Unsupported { .. } | Error::OutOfMemory { .. }))) => {
                skipped.push(Skipped {
                    case: name,
                    reason: e.to_string(),
                });
            }
            Err(e) => return Err(e),
        }
    }
    control.tell(total, total, "");
    if let (true, Some(first)) = (cases.is_empty(), skipped.first()) {
        let (case, reason) = (first.case.clone(), first.reason.clone());
        return Err(Error::unsupported(case, reason, "what this engine runs").into());
    }
    let mut adapter = Adapter::of(engine);
    if adapter.driver_info.is_empty() {
        adapter.driver_info = browser()?;
    }
    Ok(Report {
        format: FORMAT.into(),
        crate_version: env!("CARGO_PKG_VERSION").into(),
        commit: option_env!("EDA_COMMIT").map(Into::into),
        // Whole seconds, as natively.
        date: format!("{}Z", date.split('.').next().unwrap_or_default()),
        os: "browser".into(),
        arch: std::env::consts::ARCH.into(),
        quick: what.quick,
        tier: tier_of(&cases, &engine.description().tier),
        adapter,
        ceilings,
        // Browsers build pipelines when they like, and do not say how long it took.
        pipelines: None,
        cases,
        skipped,
    })
}

/// A sample takes at least so long: browsers round their clock to a millisecond.
const SAMPLE: Duration = Duration::from_millis(50);

/// As natively, but that a sample is the mean of as many calls as the clock can tell, and that the page has a turn
/// before each.
async fn on_cpu(
    engine: &CpuEngine,
    spec: &Spec,
    plan: &Plan,
    ceilings: &Ceilings,
    control: &Control,
) -> Result<Case> {
    let problem = spec.problem();
    problem.validate()?;
    let bytes = count::bytes(spec.op, &problem, Element::F32, Element::F32);
    input::room("the inputs and outputs", bytes as usize)?;
    let mut tensors = Tensors::new();
    for operand in Operand::ALL {
        if problem.uses(operand) && operand != Operand::InitialState {
            let values = random_values(&problem, operand, problem.len(operand), 7);
            tensors.set(operand, values);
        }
    }
    let tensors = tensors.slices();
    let rows: Vec<Row> = (0..problem.batch as i32).map(Row::continues).collect();
    let mut pool = match spec.op {
        Op::Prefill => None,
        Op::Decode => Some(engine.pool(&problem, problem.batch)?),
    };
    let mut call = || -> Result<(), Error> {
        match &mut pool {
            None => {
                let options = PrefillOptions {
                    element: spec.element,
                    ..PrefillOptions::default()
                };
                engine.prefill(&problem, &tensors, &options, &|_, _| {})?;
            }
            Some(pool) => {
                let options = DecodeOptions {
                    element: spec.element,
                    ..DecodeOptions::default()
                };
                engine.decode(&problem, &tensors, pool, &rows, &options)?;
            }
        }
        Ok(())
    };
    // How many calls a sample needs; and a warm-up.
    let begun = Instant::now();
    let mut calls = 0;
    while begun.elapsed() < SAMPLE.max(plan.effort.warm_up) {
        call()?;
        calls += 1;
    }
    let call_seconds = begun.elapsed().as_secs_f64() / f64::from(calls);
    let repetitions = (SAMPLE.as_secs_f64() / call_seconds).ceil() as usize;
    let fit = plan.budget.as_secs_f64() / (call_seconds * repetitions as f64);
    let samples = plan.effort.samples.min((fit as usize).max(5));
    let mut samples_ms = Vec::with_capacity(samples);
    for _ in 0..samples {
        turn().await?;
        control.check()?;
        let begun = Instant::now();
        for _ in 0..repetitions {
            call()?;
        }
        samples_ms.push(begun.elapsed().as_secs_f64() * 1e3 / repetitions as f64);
    }
    let times = Samples {
        timing: Timing::Wall,
        repetitions,
        samples_ms,
    };
    Ok(Case {
        chunk: (spec.op == Op::Prefill).then_some(cpu::DEFAULT_CHUNK),
        warm_up_ms: plan.effort.warm_up.as_secs_f64() * 1e3,
        ..Case::new(spec.op, &problem, spec.element, times, ceilings)
    })
}

/// Reads a report and checks that it can be that of a run.
pub(super) fn read(text: &str) -> Result<Report> {
    let bad = |message: String| Error::File {
        path: "the report".into(),
        message,
    };
    // A byte order mark, which some editors put first, is none of JSON's.
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let report: Report = serde_json::from_str(text)
        .map_err(|e| bad(format!("expected a report of `eda bench` ({FORMAT}): {e}")))?;
    report.check().map_err(|e| bad(e.to_string()))?;
    Ok(report)
}
