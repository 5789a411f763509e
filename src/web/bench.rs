//! Times whole calls of an engine: how long the passes take, and how long it is from typed arrays to typed arrays.

use super::error::Result;
use super::input::{self, Control, Input, set};
use super::turn;
use crate::engine::{DecodeOptions, Element, Engine, PrefillOptions};
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

/// Milliseconds of each sample.
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
        let mut sorted = self.compute.clone();
        sorted.sort_by(f64::total_cmp);
        let median = sorted.get(sorted.len() / 2).copied().unwrap_or(0.0);
        let tokens = problem.total_tokens() as f64;
        set(&out, "tokensPerSecond", tokens / median.max(1e-6) * 1e3);
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
    // The calls themselves tell nothing: samples are counted here.
    let quiet = Control::read(&JsValue::UNDEFINED)?;
    let mut report = Report::default();
    let begun = Instant::now();
    let mut warm = false;
    while report.compute.len() < what.samples {
        let phase = if warm { "" } else { "warm-up" };
        control.tell(report.compute.len(), what.samples, phase);
        turn().await?;
        control.check()?;
        let start = Instant::now();
        let ms = match &mut pool {
            Some(pool) => {
                let options = DecodeOptions {
                    element: what.element,
                    ..DecodeOptions::default()
                };
                let tensors = input.tensors.slices();
                let call = engine.decode(problem, &tensors, pool, &rows, &options);
                call.await?.1
            }
            None => {
                let options = PrefillOptions {
                    element: what.element,
                    ..PrefillOptions::default()
                };
                let run = super::prefill(engine, &input, &options, &quiet).await?;
                run.compute_ms
            }
        };
        if warm {
            report.compute.push(ms);
            report.total.push(start.elapsed().as_secs_f64() * 1e3);
        }
        warm |= begun.elapsed() >= what.warm_up;
    }
    control.tell(what.samples, what.samples, "");
    Ok(report)
}
