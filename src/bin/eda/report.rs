//! What `eda run` reports.

use eda_wgpu::Problem;
use eda_wgpu::engine::Description;
use serde::{Serialize, Serializer};
use std::collections::BTreeMap;
use std::fmt::{self, Write};
use std::path::Path;

/// One run; as JSON, the keys of `--json` in this order.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    pub(crate) adapter: String,
    pub(crate) backend: String,
    pub(crate) tier: String,
    pub(crate) rule: &'static str,
    pub(crate) mode: &'static str,
    /// Segments of sequences computed at the same time; 0 where none was cut.
    pub(crate) segments: usize,
    pub(crate) batch: usize,
    pub(crate) tokens: usize,
    pub(crate) heads: usize,
    pub(crate) value_heads: usize,
    pub(crate) key_dim: usize,
    pub(crate) value_dim: usize,
    pub(crate) dtype: &'static str,
    /// Device or engine time of the passes.
    pub(crate) compute_ms: f64,
    /// From inputs in host memory to outputs in host memory.
    pub(crate) wall_ms: f64,
    /// Relative l2 error, where the file has `expected_o`.
    #[serde(serialize_with = "finite")]
    pub(crate) error_o: Option<f64>,
    /// Relative l2 error, where the file has `expected_final_state`.
    #[serde(serialize_with = "finite")]
    pub(crate) error_final_state: Option<f64>,
}

/// JSON has no infinity, and `null` would say that nothing was expected.
fn finite<S: Serializer>(error: &Option<f64>, serializer: S) -> Result<S::Ok, S::Error> {
    error.map(|e| e.min(f64::MAX)).serialize(serializer)
}

impl Report {
    /// Everything but times and errors.
    pub(crate) fn new(
        problem: &Problem,
        ran: Description,
        mode: &'static str,
        dtype: &'static str,
    ) -> Self {
        Self {
            adapter: ran.adapter,
            backend: ran.backend,
            tier: ran.tier,
            rule: problem.rule.name(),
            mode,
            segments: 0,
            batch: problem.batch,
            tokens: problem.tokens,
            heads: problem.heads,
            value_heads: problem.value_heads,
            key_dim: problem.key_dim,
            value_dim: problem.value_dim,
            dtype,
            compute_ms: 0.0,
            wall_ms: 0.0,
            error_o: None,
            error_final_state: None,
        }
    }

    /// Metadata of the output file: what made it.
    pub(crate) fn metadata(&self, problem: &Problem) -> BTreeMap<String, String> {
        [
            ("rule", self.rule.to_string()),
            ("scale", problem.scale().to_string()),
            ("adapter", self.adapter.clone()),
            ("backend", self.backend.clone()),
            ("tier", self.tier.clone()),
            ("mode", self.mode.to_string()),
            ("dtype", self.dtype.to_string()),
            ("eda_version", env!("CARGO_PKG_VERSION").to_string()),
        ]
        .into_iter()
        .map(|(key, value)| (key.to_string(), value))
        .collect()
    }

    /// The summary for people.
    pub(crate) fn summary(
        &self,
        problem: &Problem,
        input: &Path,
        output: Option<&Path>,
    ) -> Result<String, fmt::Error> {
        let mut text = String::new();
        writeln!(text, "input    {}", input.display())?;
        write!(text, "problem  {}", self.rule)?;
        let factors = problem.rule.update().factors;
        if factors > 1 {
            write!(text, " with {factors} factors")?;
        }
        write!(text, ", B {}, T {}", self.batch, self.tokens)?;
        if problem.cu_seqlens.is_some() {
            write!(text, " in {} packed sequences", problem.sequences())?;
        }
        writeln!(
            text,
            ", H {}, HV {}, K {}, V {}, scale {}",
            self.heads,
            self.value_heads,
            self.key_dim,
            self.value_dim,
            problem.scale()
        )?;
        write!(
            text,
            "ran on   {} ({}, tier {}), mode {}, {}",
            self.adapter, self.backend, self.tier, self.mode, self.dtype
        )?;
        match self.segments {
            0 => writeln!(text)?,
            n => writeln!(text, ", {n} segments at a time")?,
        }
        writeln!(
            text,
            "time     {:.3} ms compute, {:.3} ms from host to host{}",
            self.compute_ms,
            self.wall_ms,
            rate(problem.total_tokens(), self.wall_ms)
        )?;
        match (self.error_o, self.error_final_state) {
            (None, None) => writeln!(
                text,
                "error    unknown: the file holds no expected_o or expected_final_state"
            )?,
            (o, state) => {
                let show = |e: Option<f64>| e.map_or("not expected".into(), |e| format!("{e:.1e}"));
                writeln!(
                    text,
                    "error    o {}, final_state {} (relative l2, against the file's expectations)",
                    show(o),
                    show(state)
                )?;
            }
        }
        if let Some(output) = output {
            writeln!(text, "output   {}", output.display())?;
        }
        Ok(text)
    }
}

/// `, 12.3 k tokens/s`, or nothing for an empty problem.
fn rate(tokens: usize, ms: f64) -> String {
    if tokens == 0 || ms <= 0.0 {
        return String::new();
    }
    match tokens as f64 / ms * 1e3 {
        r if r < 1e4 => format!(", {r:.0} tokens/s"),
        r if r < 1e7 => format!(", {:.1} k tokens/s", r / 1e3),
        r => format!(", {:.1} M tokens/s", r / 1e6),
    }
}
