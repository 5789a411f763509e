//! `eda bench compare`.

use crate::table::{Table, markdown, number, printable, time};
use crate::{Failure, chart, output_file, print};
use eda_wgpu::Error;
use eda_wgpu::bench::report::{self, Key, Report};
use serde::Deserialize;
use std::collections::HashMap;
use std::io::Read;
use std::path::{Path, PathBuf};

/// A longer file is no report of ours.
const MOST_BYTES: u64 = 64 << 20;

/// Flags of `eda bench compare`.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Cases are those with the same operation, rule, shape and types of inputs and outputs and of states; times are
medians. A ratio is a file's time over the first file's: below 1 is faster.

Examples:
  eda bench compare before.json after.json
  eda bench compare h200.json m4.json radeon.json --svg cards.svg --markdown > cards.md")]
pub(crate) struct Args {
    /// Files of `eda bench --json`.
    #[arg(required = true, value_name = "FILE.json")]
    files: Vec<PathBuf>,
    /// Draw the times into this file, none of those compared, written beside and renamed.
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// Print Markdown, for an issue or a README.
    #[arg(long)]
    markdown: bool,
}

/// The files, and each case that is in any of them, in the order in which they name it.
pub(crate) struct Comparison {
    pub(crate) reports: Vec<Report>,
    pub(crate) rows: Vec<Row>,
}

/// A case in all files.
pub(crate) struct Row {
    pub(crate) key: Key,
    /// Its median time in each file, milliseconds; `None` where it is not in it.
    pub(crate) median_ms: Vec<Option<f64>>,
}

impl Comparison {
    fn new(reports: Vec<Report>) -> Self {
        let mut rows: Vec<Row> = Vec::new();
        let mut by_key: HashMap<Key, usize> = HashMap::new();
        for (file, report) in reports.iter().enumerate() {
            for case in &report.cases {
                let row = *by_key.entry(case.key()).or_insert_with_key(|key| {
                    rows.push(Row {
                        key: key.clone(),
                        median_ms: vec![None; reports.len()],
                    });
                    rows.len() - 1
                });
                rows[row].median_ms[file] = Some(case.median_ms);
            }
        }
        Self { reports, rows }
    }
}

/// Reads, compares, draws.
pub(crate) fn compare(args: &Args) -> Result<(), Failure> {
    if args.svg.is_some() && args.files.len() > chart::MOST_FILES {
        return Err(Failure::Usage(format!(
            "--svg: expected at most {} files, found {}",
            chart::MOST_FILES,
            args.files.len()
        )));
    }
    let inputs = args.files.iter().map(PathBuf::as_path);
    let svg = output_file(args.svg.as_deref(), inputs)?;
    let reports: Result<Vec<Report>, Error> = args.files.iter().map(|path| read(path)).collect();
    let comparison = Comparison::new(reports?);
    if let Some(svg) = svg {
        let picture = chart::draw(&comparison);
        svg.finish_with(|sink| sink.write_all(picture.as_bytes()))?;
    }
    print(&text(&comparison, args.markdown))
}

fn file_error(path: &Path, message: impl std::fmt::Display) -> Error {
    Error::File {
        path: path.display().to_string(),
        message: message.to_string(),
    }
}

/// A report that is one.
fn read(path: &Path) -> Result<Report, Error> {
    /// What every version has.
    #[derive(Deserialize)]
    struct Head {
        format: String,
    }

    let mut bytes = Vec::new();
    std::fs::File::open(path)
        .and_then(|file| file.take(MOST_BYTES + 1).read_to_end(&mut bytes))
        .map_err(|e| file_error(path, e))?;
    if bytes.len() as u64 > MOST_BYTES {
        return Err(file_error(
            path,
            format!("expected at most {MOST_BYTES} bytes, found more"),
        ));
    }
    // A byte order mark, which some editors put first, is none of JSON's.
    let bytes = bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(&bytes);
    // (An array would pass for an object whose keys have no names.)
    if bytes.trim_ascii_start().first() != Some(&b'{') {
        return Err(file_error(
            path,
            "expected the JSON object of `eda bench --json`, found something else",
        ));
    }
    // Another version may lack what this one has, so its name comes first. Other mistakes are found below, where
    // the key that they are at is known.
    if let Ok(head) = parse::<Head>(path, bytes)
        && head.format != report::FORMAT
    {
        let (expected, found) = (report::FORMAT, head.format);
        return Err(file_error(
            path,
            format!("`format`: expected `{expected}`, found `{found}`"),
        ));
    }
    let report: Report = parse(path, bytes)?;
    report.check().map_err(|fault| file_error(path, fault))?;
    Ok(report)
}

/// JSON, with the key at which it is not what was expected.
fn parse<'a, T: Deserialize<'a>>(path: &Path, bytes: &'a [u8]) -> Result<T, Error> {
    let mut json = serde_json::Deserializer::from_slice(bytes);
    let value = serde_path_to_error::deserialize(&mut json).map_err(|e| {
        let key = e.path().to_string();
        let what = e.into_inner();
        match key.as_str() {
            "." => file_error(
                path,
                format!("expected the JSON object of `eda bench --json`: {what}"),
            ),
            key => file_error(path, format!("`{key}`: {what}")),
        }
    })?;
    json.end().map_err(|e| file_error(path, e))?;
    Ok(value)
}

/// What ran, in one line.
pub(crate) fn headline(r: &Report) -> String {
    let commit = r.commit.as_deref().map_or(String::new(), |c| {
        let (hash, modified) = match c.strip_suffix("-modified") {
            Some(hash) => (hash, ", modified"),
            None => (c, ""),
        };
        let short: String = hash.chars().take(10).collect();
        format!(" ({short}{modified})")
    });
    let a = &r.adapter;
    let driver = [a.driver.as_str(), a.driver_info.as_str()]
        .into_iter()
        .filter(|s| !s.is_empty())
        .collect::<Vec<_>>()
        .join(" ");
    let line = format!(
        "{} ({}, {}, tier {}), driver {driver}, eda-wgpu {}{commit}, {} {}, {}{}",
        a.name,
        a.backend,
        a.device_type,
        r.tier,
        r.crate_version,
        r.os,
        r.arch,
        r.date,
        if r.quick { ", quick" } else { "" },
    );
    printable(&line)
}

fn text(comparison: &Comparison, as_markdown: bool) -> String {
    let mut out = String::new();
    for (i, report) in comparison.reports.iter().enumerate() {
        match as_markdown {
            true => out += &format!("- **{i}** {}\n", markdown(&headline(report))),
            false => out += &format!("[{i}] {}\n", headline(report)),
        }
    }
    out.push('\n');
    let file = |i: usize| match as_markdown {
        true => i.to_string(),
        false => format!("[{i}]"),
    };
    let count = comparison.reports.len();
    let times = (0..count).map(file);
    let ratios = (1..count).map(|i| format!("{} / {}", file(i), file(0)));
    let head = std::iter::once("case".to_owned())
        .chain(times)
        .chain(ratios);
    let mut table = Table::new(head);
    for Row {
        key,
        median_ms: medians,
    } in &comparison.rows
    {
        let times = medians
            .iter()
            .map(|ms| ms.map_or("missing".to_owned(), time));
        let ratios = medians
            .iter()
            .skip(1)
            .map(|ms| match (ms, medians.first()) {
                (Some(ms), Some(Some(base))) => number(ms / base),
                _ => "-".to_owned(),
            });
        let name = std::iter::once(key.to_string());
        table.row(name.chain(times).chain(ratios));
    }
    out += &match as_markdown {
        true => table.markdown(),
        false => table.plain(),
    };
    if count > 1 {
        out += &format!(
            "\nTimes are medians; a ratio below 1 is faster than {}.\n",
            file(0)
        );
    }
    out
}
