//! Times whole calls of an engine: how long the passes take, and how long it is from typed arrays to typed arrays.

use super::error::Result;
use super::input::{self, Control, Input, set};
use super::turn;
use crate::engine::{DecodeOptions, Element, Engine, Pool, PrefillOptions};
use crate::error::Error;
use crate::generate::{self, Decays, Recipe};
use crate::problem::Problem;
use crate::slots::Row;
use js_sys::{Array, Object};
use std::time::Duration;
use wasm_bindgen::JsValue;
use web_time::Instant;

/// What is timed, and how often.
pub(super) struct What {
    decode: bool,
    element: Element,
    samples: usize,
    warm_up: Duration,
}

impl What {
    pub(super) fn read(options: &JsValue) -> Result<Self> {
        let decode = match input::string(options, "operation")?.as_deref() {
            Some("prefill") => false,
            Some("decode") => true,
            other => {
                let found = other.map_or("absent".into(), |o| format!("`{o}`"));
                return Err(Error::unsupported("operation", found, "prefill or decode").into());
            }
        };
        Ok(Self {
            decode,
            element: input::element(options)?,
            samples: input::whole(options, "samples")?.unwrap_or(10).max(1),
            warm_up: Duration::from_millis(input::whole(options, "warmUpMs")?.unwrap_or(300) as u64),
        })
    }
}

/// A sample takes at least so long.
const SHORTEST: Duration = Duration::from_millis(20);

/// Milliseconds of a call, for each sample.
#[derive(Default)]
pub(super) struct Report {
    compute: Vec<f64>,
    total: Vec<f64>,
}

impl Report {
    pub(super) fn object(&self, problem: &Problem, what: &What) -> Object {
        let out = Object::new();
        let operation = if what.decode { "decode" } else { "prefill" };
        set(&out, "operation", operation);
        set(&out, "problem", input::problem_object(problem));
        set(&out, "dtype", what.element.name());
        let numbers = |x: &[f64]| -> Array { x.iter().map(|&x| JsValue::from(x)).collect() };
        set(&out, "computeMs", numbers(&self.compute));
        set(&out, "totalMs", numbers(&self.total));
        // The mean, since times may be whole milliseconds.
        let mean = |x: &[f64]| x.iter().sum::<f64>() / x.len().max(1) as f64;
        let ms = match mean(&self.compute) {
            0.0 => mean(&self.total),
            ms => ms,
        };
        let tokens = problem.total_tokens() as f64;
        set(&out, "tokensPerSecond", tokens / ms.max(1e-6) * 1e3);
        out
    }
}

/// Runs the warm-up and the samples.
pub(super) async fn run(
    engine: &Engine,
    problem: &Problem,
    what: &What,
    control: &Control,
) -> Result<Report> {
    problem.validate()?;
    let values: usize = crate::problem::Operand::ALL
        .into_iter()
        .filter(|&o| problem.uses(o))
        .map(|o| problem.len(o))
        .sum();
    input::room("the inputs", values.saturating_mul(4))?;
    let recipe = Recipe {
        decays: Decays::Weak,
        ..Recipe::default()
    };
    let input = Input {
        problem: problem.clone(),
        tensors: generate::tensors(problem, &recipe),
    };
    let mut pool = match what.decode {
        true => Some(engine.pool(problem, problem.batch).await?),
        false => None,
    };
    let rows: Vec<Row> = (0..problem.batch as i32).map(Row::continues).collect();
    let mut report = Report::default();
    let begun = Instant::now();
    let mut warm = false;
    while report.compute.len() < what.samples {
        let phase = if warm { "" } else { "warm-up" };
        control.tell(report.compute.len(), what.samples, phase);
        turn().await?;
        control.check()?;
        let start = Instant::now();
        let (mut compute, mut calls) = (0.0, 0.0);
        // Browsers round their clock to a millisecond or so: a short call is repeated.
        while calls == 0.0 || start.elapsed() < SHORTEST {
            compute += call(engine, problem, &input, what, pool.as_mut(), &rows).await?;
            calls += 1.0;
        }
        let total = start.elapsed().as_secs_f64() * 1e3 / calls;
        if warm {
            report.compute.push(compute / calls);
            report.total.push(total);
        }
        warm |= begun.elapsed() >= what.warm_up;
    }
    control.tell(what.samples, what.samples, "");
    Ok(report)
}

/// One call; its time of the passes, milliseconds.
async fn call(
    engine: &Engine,
    problem: &Problem,
    input: &Input,
    what: &What,
    pool: Option<&mut Pool>,
    rows: &[Row],
) -> Result<f64> {
    match pool {
        Some(pool) => {
            let tensors = input.tensors.slices();
            let options = DecodeOptions {
                element: what.element,
                ..DecodeOptions::default()
            };
            let call = engine.decode(problem, &tensors, pool, rows, &options);
            Ok(call.await?.1)
        }
        None => {
            let options = PrefillOptions {
                element: what.element,
                ..PrefillOptions::default()
            };
            // It tells nothing: samples are counted.
            let quiet = Control::read(&JsValue::UNDEFINED)?;
            let run = super::prefill(engine, input, &options, &quiet).await?;
            Ok(run.compute_ms)
        }
    }
}
