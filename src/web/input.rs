//! What JavaScript passes in: plain objects for problems and options, typed arrays for tensors. Everything is
//! checked and copied at once, so that what the page does with its arrays afterwards does not matter.

use super::error::{Failure, Result};
use crate::engine::Element;
use crate::error::Error;
use crate::file::{Forms, decay_gate};
use crate::problem::{Decay, DecayGate, GateForm, Operand, Outputs, Problem, Tensors};
use crate::rule::{DecayKind, Rule};
use crate::slots::Row;
use half::f16;
use half::slice::HalfFloatSliceExt;
use js_sys::{Array, Float32Array, Float64Array, Function, Object, Reflect, Uint16Array};
use send_wrapper::SendWrapper;
use std::cell::RefCell;
use wasm_bindgen::{JsCast, JsValue};

/// A property; `None` where it is absent, undefined or null.
pub(super) fn get(object: &JsValue, key: &str) -> Result<Option<JsValue>> {
    if object.is_undefined() || object.is_null() {
        return Ok(None);
    }
    let value = Reflect::get(object, &key.into()).map_err(|_| {
        Error::unsupported(
            format!("the object that holds `{key}`"),
            kind(object),
            "an object",
        )
    })?;
    Ok((!value.is_undefined() && !value.is_null()).then_some(value))
}

/// Sets a property of an object of ours, which cannot fail.
pub(super) fn set(object: &Object, key: &str, value: impl Into<JsValue>) {
    let _ = Reflect::set(object, &key.into(), &value.into());
}

/// What a value is, for messages.
fn kind(value: &JsValue) -> String {
    if let Some(number) = value.as_f64() {
        return number.to_string();
    }
    if let Some(text) = value.as_string() {
        return format!("`{text}`");
    }
    if value.is_object() {
        let name = value.unchecked_ref::<Object>().constructor().name();
        return format!("a value of type {}", String::from(name));
    }
    if value.is_undefined() {
        return "undefined".into();
    }
    format!("{value:?}")
}

fn bad(what: &str, found: &JsValue, expected: impl std::fmt::Display) -> Failure {
    Error::unsupported(what, kind(found), expected).into()
}

/// A property of some type, told apart by `read`.
fn property<T>(
    object: &JsValue,
    key: &str,
    expected: &str,
    read: impl FnOnce(&JsValue) -> Option<T>,
) -> Result<Option<T>> {
    match get(object, key)? {
        None => Ok(None),
        Some(value) => match read(&value) {
            None => Err(bad(key, &value, expected)),
            found => Ok(found),
        },
    }
}

/// A whole number from 0 up.
pub(super) fn whole(object: &JsValue, key: &str) -> Result<Option<usize>> {
    get(object, key)?
        .map(|value| whole_value(key, &value))
        .transpose()
}

pub(super) fn whole_value(what: &str, value: &JsValue) -> Result<usize> {
    const MOST: f64 = (1u32 << 31) as f64;
    match value.as_f64() {
        Some(x) if x.fract() == 0.0 && (0.0..=MOST).contains(&x) => Ok(x as usize),
        _ => Err(bad(what, value, format!("a whole number from 0 to {MOST}"))),
    }
}

fn number(object: &JsValue, key: &str) -> Result<Option<f32>> {
    property(object, key, "a number", |x| Some(x.as_f64()? as f32))
}

pub(super) fn flag(object: &JsValue, key: &str) -> Result<Option<bool>> {
    property(object, key, "true or false", JsValue::as_bool)
}

pub(super) fn string(object: &JsValue, key: &str) -> Result<Option<String>> {
    property(object, key, "a string", JsValue::as_string)
}

fn function(object: &JsValue, key: &str) -> Result<Option<Function>> {
    property(object, key, "a function", |x| x.dyn_ref().cloned())
}

/// `dtype`: how inputs and outputs are stored on the GPU.
pub(super) fn element(options: &JsValue) -> Result<Element> {
    match string(options, "dtype")?.as_deref() {
        None | Some("f32") => Ok(Element::F32),
        Some("f16") => Ok(Element::F16),
        Some(other) => Err(Error::unsupported("dtype", format!("`{other}`"), "f32 or f16").into()),
    }
}

/// Room in WebAssembly's memory, asked for before it is needed: an allocation that fails later would end the
/// whole module.
pub(super) fn room(what: &str, bytes: usize) -> Result<(), Error> {
    Vec::<u8>::new()
        .try_reserve_exact(bytes)
        .map_err(|_| Error::OutOfMemory {
            what: format!("{what} in WebAssembly's memory"),
            bytes: bytes as u64,
        })
}

/// The names of a problem's tensors, in every form.
const NAMES: [&str; 18] = [
    "q",
    "k",
    "v",
    "e",
    "p",
    "a",
    "b",
    "w",
    "g",
    "A_log",
    "dt_bias",
    "beta",
    "gamma",
    "beta_logit",
    "gamma_logit",
    "initial_state",
    "expected_o",
    "expected_final_state",
];

/// A problem with its tensors, by the names in files.
pub(super) struct Input {
    pub(super) problem: Problem,
    pub(super) tensors: Tensors<Vec<f32>>,
}

impl Input {
    pub(super) fn read(problem: &JsValue, tensors: &JsValue) -> Result<Self> {
        check_problem(problem)?;
        if !tensors.is_object() {
            return Err(
                Error::tensor("tensors", "an object of typed arrays", kind(tensors)).into(),
            );
        }
        let given: Vec<String> = Object::keys(tensors.unchecked_ref::<Object>())
            .iter()
            .filter_map(|key| key.as_string())
            .collect();
        let mut found = Vec::new();
        for name in given {
            let Some(value) = get(tensors, &name)? else {
                continue;
            };
            if !NAMES.contains(&name.as_str()) {
                return Err(
                    Error::tensor(name, "a name of a tensor", "one that no rule has").into(),
                );
            }
            found.push((name, value));
        }
        let problem = read_problem(problem, &found)?;
        problem.validate()?;
        let mut out = Tensors::new();
        for (name, value) in &found {
            let operand = Operand::ALL
                .into_iter()
                .find(|&o| problem.uses(o) && problem.name(o) == name);
            match operand {
                Some(operand) => {
                    let values = floats(name, value, &problem, operand)?;
                    out.set(operand, values);
                }
                // As in files: what a result should be may lie beside the inputs.
                None if name.starts_with("expected_") => {}
                None => {
                    return Err(Error::tensor(
                        name,
                        format!("no such tensor for rule {} in this form", problem.rule),
                        "one",
                    )
                    .into());
                }
            }
        }
        Ok(Self {
            problem,
            tensors: out,
        })
    }
}

/// The values of a typed array, checked against the operand's shape before they are copied.
fn floats(name: &str, value: &JsValue, problem: &Problem, operand: Operand) -> Result<Vec<f32>> {
    let expected = || {
        format!(
            "{} values, shape {:?}",
            problem.len(operand),
            problem.shape(operand)
        )
    };
    check_attached(name, value, &expected)?;
    let length = number_of_values(value);
    if length.is_some_and(|n| n != problem.len(operand)) {
        let found = format!("{} values", length.unwrap_or_default());
        return Err(Error::tensor(name, expected(), found).into());
    }
    copy_floats(name, value)
}

/// A detached array has no values, which may look like a wrong length.
fn check_attached(name: &str, value: &JsValue, expected: &dyn Fn() -> String) -> Result<()> {
    if !value.is_object() {
        return Ok(());
    }
    let buffer = get(value, "buffer")?.unwrap_or_default();
    match flag(&buffer, "detached") {
        Ok(Some(true)) => {
            Err(Error::tensor(name, expected(), "an array whose buffer is detached").into())
        }
        _ => Ok(()),
    }
}

fn number_of_values(value: &JsValue) -> Option<usize> {
    let length = Reflect::get(value, &"length".into()).ok()?.as_f64()?;
    Some(length as usize)
}

/// The values of a Float32Array, or of float16 in a Uint16Array or Float16Array, as float32.
pub(super) fn copy_floats(name: &str, value: &JsValue) -> Result<Vec<f32>> {
    if let Some(array) = value.dyn_ref::<Float32Array>() {
        room(name, array.length() as usize * 4)?;
        return Ok(array.to_vec());
    }
    let halves = match value.dyn_ref::<Uint16Array>() {
        Some(array) => Some(array.clone()),
        // Float16Array is newer than some browsers.
        None if is_float16_array(value) => {
            let array: &Float32Array = value.unchecked_ref();
            let (buffer, at) = (array.buffer(), array.byte_offset());
            Some(Uint16Array::new_with_byte_offset_and_length(
                &buffer,
                at,
                array.length(),
            ))
        }
        None => None,
    };
    let Some(halves) = halves else {
        return Err(Error::tensor(
            name,
            "a Float32Array, or float16 in a Uint16Array or Float16Array",
            kind(value),
        )
        .into());
    };
    room(name, halves.length() as usize * 6)?;
    let halves: Vec<f16> = halves.to_vec().into_iter().map(f16::from_bits).collect();
    let mut values = vec![0.0; halves.len()];
    halves.convert_to_f32_slice(&mut values);
    Ok(values)
}

fn is_float16_array(value: &JsValue) -> bool {
    value.is_object() && value.unchecked_ref::<Object>().constructor().name() == "Float16Array"
}

fn check_problem(object: &JsValue) -> Result<()> {
    if object.is_object() {
        return Ok(());
    }
    Err(bad(
        "the problem",
        object,
        "an object with a rule and sizes",
    ))
}

/// Rule, sizes and forms. What form the inputs have is told by their names, as in files; sizes alone (for a pool)
/// need no tensors.
pub(super) fn read_problem(object: &JsValue, found: &[(String, JsValue)]) -> Result<Problem> {
    check_problem(object)?;
    let size = |key| {
        whole(object, key)?.ok_or_else(|| {
            let limit = "a whole number: the sizes are B, T, H, HV, K and V";
            Failure::from(Error::unsupported(key, "absent", limit))
        })
    };
    let name = string(object, "rule")?
        .ok_or_else(|| Error::unsupported("rule", "absent", "the name of a rule"))?;
    let sizes = [
        size("B")?,
        size("T")?,
        size("H")?,
        size("HV")?,
        size("K")?,
        size("V")?,
    ];
    let rule = Rule::from_name(&name, whole(object, "householders")?.unwrap_or(1))?;
    let mut problem = Problem::new(rule, sizes);
    problem.scale = number(object, "scale")?;
    if let Some(offsets) = get(object, "cu_seqlens")? {
        problem.cu_seqlens = Some(whole_numbers("cu_seqlens", &offsets)?);
    }

    let forms = Forms {
        has: |name: &str| found.iter().any(|(n, _)| n == name),
        allow_neg_eigval: flag(object, "allow_neg_eigval")?.unwrap_or(false),
        raw: flag(object, "raw")?,
    };
    forms.set(&mut problem, || -> Result<_> {
        let name = string(object, "decay_gate")?;
        let lower_bound = number(object, "lower_bound")?;
        Ok(decay_gate(rule, name.as_deref(), lower_bound)?)
    })?;
    if rule.update().decay == DecayKind::Channel {
        let g = found.iter().find(|(n, _)| n == problem.name(Operand::G));
        let length = g.and_then(|(_, value)| number_of_values(value));
        let per_head = sizes[0].saturating_mul(sizes[1]).saturating_mul(sizes[3]);
        problem.decay_per_head = match flag(object, "decay_per_head")? {
            Some(per_head) => per_head,
            None => sizes[4] > 1 && per_head > 0 && length == Some(per_head),
        };
    }
    Ok(problem)
}

/// Whole numbers from an array or typed array.
fn whole_numbers(name: &str, value: &JsValue) -> Result<Vec<usize>> {
    check_attached(name, value, &|| "offsets".into())?;
    if !(Array::is_array(value)
        || value.is_instance_of::<js_sys::Int32Array>()
        || value.is_instance_of::<js_sys::Uint32Array>())
    {
        return Err(Error::tensor(name, "an array or Int32Array of numbers", kind(value)).into());
    }
    Array::from(value)
        .iter()
        .map(|x| {
            whole_value(name, &x)
                .map_err(|_| Error::tensor(name, "whole numbers from 0 up", kind(&x)).into())
        })
        .collect()
}

/// Rows of a decode batch: slots, or objects with a `slot` and a `reset`.
pub(super) fn rows(value: &JsValue) -> Result<Vec<Row>> {
    check_attached("slots", value, &|| "a slot for each batch row".into())?;
    if !(Array::is_array(value) || value.is_instance_of::<js_sys::Int32Array>()) {
        let expected = "an array of slots or of { slot, reset }, or an Int32Array";
        return Err(Error::tensor("slots", expected, kind(value)).into());
    }
    let slot = |value: &JsValue| match value.as_f64() {
        Some(x) if x.fract() == 0.0 && (f64::from(i32::MIN)..=f64::from(i32::MAX)).contains(&x) => {
            Ok(x as i32)
        }
        _ => {
            let expected = "-1 (padding) or the number of a slot";
            Err(Failure::from(Error::tensor("slots", expected, kind(value))))
        }
    };
    Array::from(value)
        .iter()
        .map(|row| {
            if row.as_f64().is_some() {
                return Ok(Row::continues(slot(&row)?));
            }
            let at = get(&row, "slot")?.unwrap_or_default();
            Ok(Row {
                slot: slot(&at)?,
                reset: flag(&row, "reset")?.unwrap_or(false),
            })
        })
        .collect()
}

/// `onProgress` and `signal` of a call.
pub(super) struct Control {
    progress: SendWrapper<Option<Function>>,
    signal: Option<JsValue>,
    /// What the callback threw.
    thrown: SendWrapper<RefCell<Option<JsValue>>>,
}

impl Control {
    pub(super) fn read(options: &JsValue) -> Result<Self> {
        Ok(Self {
            progress: SendWrapper::new(function(options, "onProgress")?),
            signal: get(options, "signal")?,
            thrown: SendWrapper::new(RefCell::new(None)),
        })
    }

    /// Tells how far the work is.
    pub(super) fn tell(&self, done: usize, total: usize, what: &str) {
        let Some(f) = &*self.progress else { return };
        let arguments: [JsValue; 3] = [(done as f64).into(), (total as f64).into(), what.into()];
        if let Err(thrown) = f.call3(
            &JsValue::UNDEFINED,
            &arguments[0],
            &arguments[1],
            &arguments[2],
        ) {
            self.thrown.borrow_mut().get_or_insert(thrown);
        }
    }

    /// Calls `f` with a progress function for the engines.
    pub(super) fn progress(&self) -> impl Fn(usize, usize) + Sync + '_ {
        let this = SendWrapper::new(self);
        move |done, total| this.tell(done, total, "")
    }

    /// Ends the call where the page has aborted it or its callback has thrown.
    pub(super) fn check(&self) -> Result<()> {
        if let Some(thrown) = self.thrown.borrow_mut().take() {
            return Err(Failure::Thrown(thrown));
        }
        if let Some(signal) = &self.signal
            && flag(signal, "aborted")? == Some(true)
        {
            let reason = get(signal, "reason")?.unwrap_or_default();
            return Err(Failure::Thrown(reason));
        }
        Ok(())
    }
}

/// A problem as an object, to be passed back in.
pub(super) fn problem_object(problem: &Problem) -> Object {
    let out = Object::new();
    set(&out, "rule", problem.rule.name());
    for (key, value) in [
        ("B", problem.batch),
        ("T", problem.tokens),
        ("H", problem.heads),
        ("HV", problem.value_heads),
        ("K", problem.key_dim),
        ("V", problem.value_dim),
    ] {
        set(&out, key, value as f64);
    }
    if let Rule::DeltaProduct { factors } = problem.rule {
        set(&out, "householders", f64::from(factors));
    }
    if let Some(scale) = problem.scale {
        set(&out, "scale", f64::from(scale));
    }
    if let Some(offsets) = &problem.cu_seqlens {
        let array: Array = offsets.iter().map(|&x| JsValue::from(x as f64)).collect();
        set(&out, "cu_seqlens", array);
    }
    let (gate, bound) = match problem.decay {
        Decay::Log => (None, None),
        Decay::Gate(DecayGate::Safe { lower_bound }) => (Some("safe"), Some(lower_bound)),
        Decay::Gate(DecayGate::Sigmoid { lower_bound }) => (Some("sigmoid"), Some(lower_bound)),
        Decay::Gate(DecayGate::Softplus) => (Some("softplus"), None),
    };
    if let Some(gate) = gate {
        set(&out, "decay_gate", gate);
    }
    if let Some(bound) = bound {
        set(&out, "lower_bound", f64::from(bound));
    }
    if [problem.beta, problem.gamma].contains(&GateForm::TwiceSigmoid) {
        set(&out, "allow_neg_eigval", true);
    }
    if problem.rule.update().decay == DecayKind::Channel {
        set(&out, "decay_per_head", problem.decay_per_head);
    }
    set(&out, "raw", problem.normalize);
    out
}

/// Tensors as an object of Float32Arrays.
pub(super) fn tensors_object(problem: &Problem, tensors: &Tensors<Vec<f32>>) -> Object {
    let out = Object::new();
    for (operand, values) in tensors.iter() {
        set(&out, problem.name(operand), Float32Array::from(&values[..]));
    }
    out
}

/// `o` and `final_state` as Float64Arrays.
pub(super) fn exact_object(outputs: &Outputs<f64>) -> Object {
    let out = Object::new();
    set(&out, "o", Float64Array::from(&outputs.o[..]));
    set(
        &out,
        "final_state",
        Float64Array::from(&outputs.final_state[..]),
    );
    out
}
