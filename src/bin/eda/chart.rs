//! The picture of `eda bench compare --svg`: a bar for each file in a group for each case, on a logarithmic axis.
//! Colours follow the reader's light or dark setting.

use crate::compare::Comparison;
use crate::table::{number, printable, time};
use eda_wgpu::bench::report::Report;
use svg::Document;
use svg::node::element::{Group, Line, Rectangle, Style, Text, Title};

/// There are as many colours.
pub(crate) const MOST_FILES: usize = 8;

/// Fills that differ in lightness too (after Okabe and Ito), on light and on dark.
const FILLS: [(&str, &str); MOST_FILES] = [
    ("#0072b2", "#56b4e9"),
    ("#d55e00", "#ff8c42"),
    ("#009e73", "#2fd3a3"),
    ("#b8589a", "#e69fcb"),
    ("#b58900", "#f0c74a"),
    ("#4b4b9f", "#9d9df0"),
    ("#7a5230", "#c99a6b"),
    ("#5f6b73", "#aab6be"),
];
const FONT: &str = "font-family:system-ui,-apple-system,'Segoe UI',Roboto,sans-serif";

/// Pixels.
const BAR: f64 = 14.0;
const BAR_STEP: f64 = 18.0;
const GROUP_GAP: f64 = 16.0;
const PLOT: f64 = 460.0;
const VALUES: f64 = 150.0;
const MARGIN: f64 = 20.0;
const LINE: f64 = 20.0;

/// The width of text in the larger of the usual fonts, about.
fn width(text: &str) -> f64 {
    text.chars().count() as f64 * 7.0
}

/// Text that XML can hold (which is more than what is printed), no longer than `most` characters.
fn fit(text: &str, most: usize) -> String {
    let mut out = printable(text);
    if let Some((at, _)) = out.char_indices().nth(most) {
        out.truncate(at);
        out.push('…');
    }
    out
}

/// What a bar stands for.
fn legend(report: &Report) -> String {
    format!(
        "{} ({}, tier {}), {}",
        report.adapter.name,
        report.adapter.backend,
        report.tier,
        // A checked date has no other form.
        report.date.get(..10).unwrap_or_default()
    )
}

/// A logarithmic axis of times in milliseconds.
struct Axis {
    /// Powers of ten at either end.
    low: i32,
    high: i32,
    left: f64,
}

impl Axis {
    fn new(times: impl Iterator<Item = f64>, left: f64) -> Self {
        let (mut low, mut high) = (f64::MAX, f64::MIN_POSITIVE);
        for ms in times {
            low = low.min(ms);
            high = high.max(ms);
        }
        // The shortest bar still shows.
        let low = (low.log10() - 0.2).floor() as i32;
        Self {
            low,
            high: (high.log10().ceil() as i32).max(low + 1),
            left,
        }
    }

    fn x(&self, ms: f64) -> f64 {
        let decades = f64::from(self.high - self.low);
        self.left + PLOT * (ms.log10() - f64::from(self.low)) / decades
    }
}

/// `1 us`, `10 ms`.
fn tick(power: i32) -> String {
    let (unit, zero) = match power {
        ..-3 => ("ns", -6),
        -3..0 => ("us", -3),
        0..3 => ("ms", 0),
        _ => ("s", 3),
    };
    format!("{} {unit}", 10f64.powi(power - zero))
}

fn text(content: impl Into<String>, x: f64, y: f64, class: &str) -> Text {
    Text::new(content)
        .set("x", x)
        .set("y", y)
        .set("class", class)
}

fn line(from: (f64, f64), to: (f64, f64), class: &str) -> Line {
    Line::new()
        .set("x1", from.0)
        .set("y1", from.1)
        .set("x2", to.0)
        .set("y2", to.1)
        .set("class", class)
}

fn style() -> Style {
    let rules = |colour: &dyn Fn(usize) -> &'static str,
                 paper: &str,
                 ink: &str,
                 faint: &str,
                 grid: &str| {
        let mut css = format!(
            ".paper{{fill:{paper}}}.ink{{fill:{ink}}}.faint{{fill:{faint}}}.axis{{stroke:{faint}}}.grid{{stroke:{grid}}}"
        );
        for i in 0..MOST_FILES {
            css += &format!(".f{i}{{fill:{}}}", colour(i));
        }
        css
    };
    let light = rules(&|i| FILLS[i].0, "#ffffff", "#1f2328", "#59636e", "#e4e8ec");
    let dark = rules(&|i| FILLS[i].1, "#0d1117", "#e6edf3", "#9198a1", "#2a313a");
    Style::new(format!(
        "text{{{FONT};font-size:12px}}.title{{font-size:15px;font-weight:600}}.end{{text-anchor:end}}\
         .middle{{text-anchor:middle}}line{{stroke-width:1}}{light}@media(prefers-color-scheme:dark){{{dark}}}"
    ))
}

/// The SVG text.
pub(crate) fn draw(comparison: &Comparison) -> String {
    let files = comparison.reports.len();
    let names: Vec<String> = comparison
        .rows
        .iter()
        .map(|row| fit(&row.key.to_string(), 80))
        .collect();
    let legends: Vec<String> = comparison
        .reports
        .iter()
        .map(|r| fit(&legend(r), 110))
        .collect();
    let label = names.iter().map(|n| width(n)).fold(0.0, f64::max);
    let left = MARGIN + label + 10.0;
    let widest = legends.iter().map(|l| width(l) + LINE).fold(0.0, f64::max);
    let full = (left + PLOT + VALUES).max(widest + 2.0 * MARGIN);
    let top = MARGIN + 2.0 * LINE + LINE * files as f64 + 10.0;
    let group = files as f64 * BAR_STEP + GROUP_GAP;
    let bottom = top + group * names.len() as f64;
    let height = bottom + 2.0 * LINE + MARGIN;
    let times = comparison.rows.iter().flat_map(|row| &row.median_ms);
    let axis = Axis::new(times.copied().flatten(), left);

    let mut page = Document::new()
        .set("viewBox", (0.0, 0.0, full, height))
        .set("width", full)
        .set("height", height)
        .set("role", "img")
        .add(Title::new(
            "Erase-then-Delta Attention: times by case and adapter",
        ))
        .add(style())
        .add(
            Rectangle::new()
                .set("width", full)
                .set("height", height)
                .set("class", "paper"),
        )
        .add(text(
            "Time of each case (median)",
            MARGIN,
            MARGIN + 12.0,
            "ink title",
        ));
    for (i, name) in legends.into_iter().enumerate() {
        let y = MARGIN + LINE * (i as f64 + 1.0) + 6.0;
        page = page.add(square(MARGIN, y, 12.0, 12.0, i)).add(text(
            name,
            MARGIN + LINE,
            y + 10.5,
            "ink",
        ));
    }
    for power in axis.low..=axis.high {
        let x = axis.x(10f64.powi(power));
        // At most a label every 45 pixels.
        let every = (45.0 * f64::from(axis.high - axis.low) / PLOT).ceil() as i32;
        page = page.add(line((x, top - 6.0), (x, bottom), "grid"));
        if (power - axis.low) % every.max(1) == 0 {
            page = page.add(text(tick(power), x, bottom + 16.0, "faint middle"));
        }
    }
    page = page
        .add(line((left, bottom), (left + PLOT, bottom), "axis"))
        .add(line((left, top - 6.0), (left, bottom), "axis"))
        .add(text(
            "time, logarithmic; shorter is faster",
            left + PLOT / 2.0,
            bottom + 36.0,
            "faint middle",
        ))
        .add(text(
            "operation, rule, B,T,H,HV,K,V, type",
            left - 10.0,
            bottom + 36.0,
            "faint end",
        ));
    for ((name, row), i) in names.into_iter().zip(&comparison.rows).zip(0..) {
        let y = top + group * f64::from(i);
        let middle = y + files as f64 * BAR_STEP / 2.0 + 2.0;
        page = page.add(text(name, left - 10.0, middle, "ink end"));
        page = page.add(bars(&axis, &row.median_ms, y));
    }
    page.to_string()
}

fn square(x: f64, y: f64, width: f64, height: f64, file: usize) -> Rectangle {
    Rectangle::new()
        .set("x", x)
        .set("y", y)
        .set("width", width)
        .set("height", height)
        .set("rx", 1.5)
        .set("class", format!("f{file}"))
}

/// The bars of one case, from `y` down.
fn bars(axis: &Axis, times: &[Option<f64>], y: f64) -> Group {
    let base = times.first().copied().flatten();
    let mut group = Group::new();
    for (i, ms) in times.iter().enumerate() {
        let y = y + BAR_STEP * i as f64;
        group = match *ms {
            None => group.add(text("not in this file", axis.left + 6.0, y + 11.0, "faint")),
            Some(ms) => {
                let end = axis.x(ms);
                let value = match base {
                    Some(base) if i > 0 => format!("{} ({} x)", time(ms), number(ms / base)),
                    _ => time(ms),
                };
                group
                    .add(square(axis.left, y, end - axis.left, BAR, i))
                    .add(text(value, end + 6.0, y + 11.0, "ink"))
            }
        };
    }
    group
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_and_bars_stay_on_the_plot() {
        let names: Vec<String> = (-6..5).map(tick).collect();
        let right = [
            "1 ns", "10 ns", "100 ns", "1 us", "10 us", "100 us", "1 ms", "10 ms", "100 ms", "1 s",
            "10 s",
        ];
        assert_eq!(names, right);
        for times in [
            vec![1.0],
            vec![1e-9, 8.64e7],
            vec![0.999, 1.001],
            vec![10.0, 100.0],
        ] {
            let axis = Axis::new(times.iter().copied(), 100.0);
            for &ms in &times {
                let x = axis.x(ms);
                assert!(x > 100.0 && x <= 100.0 + PLOT + 1e-9, "{ms}: {x}");
            }
        }
    }
}
