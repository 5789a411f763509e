//! `eda check`.

use crate::progress::Progress;
use crate::{BackendName, Failure, print, print_json};
use eda_wgpu::adapter::{self, AdapterReport};
use eda_wgpu::battery::{self, Outcome, Verdict};
use eda_wgpu::engine::Description;
use eda_wgpu::{Backend, Engine, EngineOptions};
use std::path::PathBuf;

/// Flags of `eda check`.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Runs built-in cases (every rule, prefill and decode, odd sizes, extreme gates, slots, float16) on every
adapter found, with each of its tiers, and on the CPU engine, and compares with the recurrence in float64. Where an
engine has another limit than the column \"at most\" (prefill on matrix units), it stands behind its error; n/a
marks what an engine does not offer. The table is what to paste into a bug report about a GPU.")]
pub(crate) struct Args {
    /// Check the adapters of this backend alone (cpu: the CPU engine alone; auto: everything).
    #[arg(
        long,
        value_enum,
        default_value = "auto",
        hide_possible_values = true,
        value_name = "auto|cpu|vulkan|metal|dx12|gl"
    )]
    backend: BackendName,
    /// Check this adapter alone: part of its name, or its index in `eda adapters`.
    #[arg(long, value_name = "NAME|INDEX")]
    adapter: Option<String>,
    /// Print one JSON object instead of the table.
    #[arg(long)]
    json: bool,
}

/// One engine's part of the report.
#[derive(serde::Serialize)]
struct Checked {
    #[serde(flatten)]
    description: Description,
    /// Why the engine could not be opened, if it could not.
    error: Option<String>,
    verdicts: Vec<Verdict>,
}

impl Checked {
    /// Cases that failed.
    fn failed(&self) -> usize {
        let wrong = |v: &&Verdict| v.outcome == Outcome::Failed;
        self.verdicts.iter().filter(wrong).count()
    }
}

/// What `--json` prints.
#[derive(serde::Serialize)]
struct Report {
    version: &'static str,
    passed: bool,
    engines: Vec<Checked>,
}

fn wanted(args: &Args, a: &AdapterReport) -> bool {
    let backend = match Backend::from(args.backend) {
        Backend::Auto => None,
        Backend::Cpu => return false,
        Backend::Vulkan => Some("vulkan"),
        Backend::Metal => Some("metal"),
        Backend::Dx12 => Some("dx12"),
        Backend::Gl => Some("gl"),
        Backend::WebGpu => Some("webgpu"),
    };
    let named = args
        .adapter
        .as_ref()
        .is_none_or(|name| match name.parse::<usize>() {
            Ok(index) => index == a.index,
            Err(_) => a
                .description
                .adapter
                .to_lowercase()
                .contains(&name.to_lowercase()),
        });
    named && backend.is_none_or(|b| b == a.description.backend) && !a.tiers.is_empty()
}

/// Checks every engine asked for.
pub(crate) fn check(args: &Args, pipeline_cache: Option<PathBuf>) -> Result<(), Failure> {
    if Backend::from(args.backend) == Backend::Cpu && args.adapter.is_some() {
        return Err(Failure::Usage(
            "--adapter: expected a GPU backend, found --backend cpu".into(),
        ));
    }
    let mut options: Vec<(Option<Description>, EngineOptions)> =
        pollster::block_on(adapter::list())
            .into_iter()
            .filter(|a| wanted(args, a))
            .flat_map(|a| {
                a.tiers
                    .clone()
                    .into_iter()
                    .map(move |tier| (a.clone(), tier))
            })
            .map(|(a, tier)| {
                let options = EngineOptions {
                    adapter: Some(a.index.to_string()),
                    tier: Some(tier),
                    // The battery is the test; an adapter that fails it should still be reported in full.
                    skip_self_test: true,
                    pipeline_cache: pipeline_cache.clone(),
                    ..EngineOptions::default()
                };
                (Some(a.description), options)
            })
            .collect();
    let backend = Backend::from(args.backend);
    if matches!(backend, Backend::Auto | Backend::Cpu) && args.adapter.is_none() {
        let options_cpu = EngineOptions {
            backend: Backend::Cpu,
            ..EngineOptions::default()
        };
        options.push((None, options_cpu));
    }
    if options.is_empty() {
        return Err(eda_wgpu::Error::NoAdapter(format!(
            "nothing to check for backend {}{}; `eda adapters` lists what there is",
            backend.name(),
            args.adapter
                .as_ref()
                .map_or(String::new(), |a| format!(" and adapter `{a}`"))
        ))
        .into());
    }

    let bar = Progress::start();
    let total = options.len();
    let mut engines = Vec::with_capacity(total);
    for (i, (description, options)) in options.into_iter().enumerate() {
        let checked = match pollster::block_on(Engine::open(&options)) {
            Ok(engine) => Checked {
                description: engine.description(),
                error: None,
                verdicts: pollster::block_on(battery::run(&engine, &|done, cases, _| {
                    bar.update(i * cases + done, total * cases);
                })),
            },
            Err(error) => Checked {
                description: description.unwrap_or_else(|| Description {
                    adapter: "cpu".into(),
                    backend: "cpu".into(),
                    tier: "cpu".into(),
                    kind: "cpu".into(),
                    driver: String::new(),
                }),
                error: Some(error.to_string()),
                verdicts: Vec::new(),
            },
        };
        engines.push(checked);
    }
    drop(bar);

    // An adapter that was asked for has to open. One that was merely found (OpenGL without a display, say) is
    // reported as not checked, and the others decide.
    let asked = backend != Backend::Auto || args.adapter.is_some();
    let report = Report {
        version: env!("CARGO_PKG_VERSION"),
        passed: engines.iter().all(|e| e.failed() == 0)
            && !(asked && engines.iter().any(|e| e.error.is_some())),
        engines,
    };
    if args.json {
        print_json(&report)?;
    } else {
        print(&table(&report))?;
    }
    if report.passed {
        Ok(())
    } else {
        Err(Failure::CheckFailed)
    }
}

/// Cases down, engines across, errors relative to float64.
fn table(report: &Report) -> String {
    let mut text = format!("eda-wgpu {}\n", report.version);
    for (i, e) in report.engines.iter().enumerate() {
        let d = &e.description;
        text += &format!(
            "[{i}] {} ({}, {}, tier {}), driver {}\n",
            d.adapter, d.backend, d.kind, d.tier, d.driver
        );
        if let Some(error) = &e.error {
            text += &format!("    not checked, cannot be opened: {error}\n");
        }
    }
    let cases: Vec<&Verdict> = report
        .engines
        .iter()
        .find(|e| !e.verdicts.is_empty())
        .map(|e| e.verdicts.iter().collect())
        .unwrap_or_default();
    let width = cases
        .iter()
        .map(|v| v.case.chars().count())
        .max()
        .unwrap_or(0);
    // The strictest limit that any engine has; others are written beside the errors that they apply to.
    let limit = |row: usize| -> f64 {
        let verdicts = report.engines.iter().filter_map(|e| e.verdicts.get(row));
        verdicts.map(|v| v.limit).fold(f64::INFINITY, f64::min)
    };
    let cell = |e: &Checked, row: usize| match e.verdicts.get(row) {
        None => "-".to_owned(),
        Some(v) => {
            let text = match (v.outcome, v.error) {
                (Outcome::NotOffered, _) => return "n/a".to_owned(),
                (Outcome::Failed, None) => return "FAILED".to_owned(),
                (Outcome::Passed, None) => return "ok".to_owned(),
                (Outcome::Failed, Some(error)) => format!("{error:.1e} !"),
                (Outcome::Passed, Some(error)) => format!("{error:.1e}"),
            };
            match v.limit > limit(row) {
                true => format!("{text} (<= {:.0e})", v.limit),
                false => text,
            }
        }
    };
    let columns: Vec<Vec<String>> = report
        .engines
        .iter()
        .map(|e| (0..cases.len()).map(|row| cell(e, row)).collect())
        .collect();
    let widths: Vec<usize> = columns
        .iter()
        .map(|cells| cells.iter().map(String::len).fold(10, usize::max))
        .collect();
    text += &format!("\n{:width$}   at most", "relative l2 error");
    for (i, width) in widths.iter().enumerate() {
        text += &format!("  {:>width$}", format!("[{i}]"));
    }
    text.push('\n');
    for (row, case) in cases.iter().enumerate() {
        text += &format!("{:width$}   {:7.0e}", case.case, limit(row));
        for (cells, width) in columns.iter().zip(&widths) {
            text += &format!("  {:>width$}", cells[row]);
        }
        text.push('\n');
    }
    for (i, e) in report.engines.iter().enumerate() {
        for v in e.verdicts.iter().filter(|v| v.outcome == Outcome::Failed) {
            text += &format!("\nfailed on [{i}]: {}: {}", v.case, v.detail);
        }
    }
    let failed: usize = report.engines.iter().map(Checked::failed).sum();
    let unopened = report.engines.iter().filter(|e| e.error.is_some()).count();
    let opened = report.engines.len() - unopened;
    let verdict = match failed {
        0 if report.passed => "passed".to_owned(),
        0 => "FAILED".to_owned(),
        n => format!("{n} FAILED"),
    };
    let left_out = match unopened {
        0 => String::new(),
        n => format!(" ({n} could not be opened)"),
    };
    text + &format!(
        "\n{} cases on {opened} engine{}: {verdict}{left_out}\n",
        cases.len(),
        if opened == 1 { "" } else { "s" }
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checked(tier: &str, limit: f64, error: f64) -> Checked {
        Checked {
            description: Description {
                adapter: "A".into(),
                backend: "vulkan".into(),
                tier: tier.into(),
                kind: "discrete".into(),
                driver: "1".into(),
            },
            error: None,
            verdicts: vec![Verdict {
                case: "eda, prefill".into(),
                error: Some(error),
                limit,
                outcome: Outcome::Passed,
                detail: String::new(),
            }],
        }
    }

    /// An error never stands beside a limit that it need not keep.
    #[test]
    fn each_error_stands_beside_the_limit_that_applies() {
        for matrix_first in [false, true] {
            let mut engines = vec![
                checked("portable", 1e-5, 2e-7),
                checked("matrix", 2e-3, 4e-4),
            ];
            if matrix_first {
                engines.reverse();
            }
            let text = table(&Report {
                version: "0",
                passed: true,
                engines,
            });
            let row = text.lines().find(|l| l.starts_with("eda, prefill"));
            let cells: Vec<&str> = row.expect("a row").split("  ").collect();
            let cells: Vec<&str> = cells
                .into_iter()
                .map(str::trim)
                .filter(|c| !c.is_empty())
                .collect();
            let (strict, loose) = match matrix_first {
                false => (cells[2], cells[3]),
                true => (cells[3], cells[2]),
            };
            assert_eq!(
                (cells[1], strict, loose),
                ("1e-5", "2.0e-7", "4.0e-4 (<= 2e-3)"),
                "{text}"
            );
        }
    }
}
