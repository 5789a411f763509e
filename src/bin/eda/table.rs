//! Tables of text, plain or Markdown, and how numbers look in them.

/// Rows below a head; the first column is flush left, the others right.
pub(crate) struct Table {
    rows: Vec<Vec<String>>,
}

impl Table {
    pub(crate) fn new(head: impl IntoIterator<Item = impl Into<String>>) -> Self {
        Self {
            rows: vec![head.into_iter().map(Into::into).collect()],
        }
    }

    pub(crate) fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        self.rows.push(cells.into_iter().collect());
    }

    fn widths(&self) -> Vec<usize> {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let width = |c: usize| {
            self.rows
                .iter()
                .filter_map(move |r| r.get(c))
                .map(|cell| cell.chars().count())
        };
        (0..columns).map(|c| width(c).max().unwrap_or(0)).collect()
    }

    /// Columns two spaces apart.
    pub(crate) fn plain(&self) -> String {
        let widths = self.widths();
        let mut text = String::new();
        for row in &self.rows {
            let mut line = String::new();
            for (i, (cell, width)) in row.iter().zip(&widths).enumerate() {
                match i {
                    0 => line += &format!("{cell:width$}"),
                    _ => line += &format!("  {cell:>width$}"),
                }
            }
            text += line.trim_end();
            text.push('\n');
        }
        text
    }

    /// A table in GitHub's Markdown.
    pub(crate) fn markdown(&self) -> String {
        let mut text = String::new();
        for (i, row) in self.rows.iter().enumerate() {
            let cells: Vec<String> = row.iter().map(|cell| markdown(cell)).collect();
            text += &format!("| {} |\n", cells.join(" | "));
            if i == 0 {
                let rule = (0..row.len()).map(|c| if c == 0 { "---|" } else { "---:|" });
                text += &format!("|{}\n", rule.collect::<String>());
            }
        }
        text
    }
}

/// Text in one line, from left to right, whatever a path or an adapter's name contains: controls, format characters
/// (which turn the direction, or end a line) and what Unicode does not assign become spaces.
pub(crate) fn printable(text: &str) -> String {
    let shown = |c: char| {
        // Strings escape these three, which are to be seen, and else what is not; a mark that combines with the
        // character before it is escaped at their beginning alone.
        matches!(c, '\\' | '"' | '\'') || format!("a{c}").escape_debug().count() == 2
    };
    text.chars()
        .map(|c| if shown(c) { c } else { ' ' })
        .collect()
}

/// Text that Markdown shows as it is.
pub(crate) fn markdown(text: &str) -> String {
    let mut out = String::new();
    for c in printable(text).chars() {
        if matches!(c, '|' | '\\' | '`' | '*' | '_' | '<' | '>' | '[' | ']') {
            out.push('\\');
        }
        out.push(c);
    }
    out
}

/// Three digits, of which none is after the point in large numbers: 0.0123, 1.23, 123, 12,345.
pub(crate) fn number(x: f64) -> String {
    if x <= 0.0 || !x.is_finite() {
        return format!("{x}");
    }
    let before = x.log10().floor() as i32;
    let decimals = (2 - before).clamp(0, 12) as usize;
    let text = format!("{x:.decimals$}");
    let (whole, rest) = text
        .split_once('.')
        .map_or((text.as_str(), ""), |(w, r)| (w, r));
    let mut grouped = String::new();
    for (i, digit) in whole.chars().enumerate() {
        if i > 0 && (whole.len() - i).is_multiple_of(3) {
            grouped.push(',');
        }
        grouped.push(digit);
    }
    match rest {
        "" => grouped,
        rest => format!("{grouped}.{rest}"),
    }
}

/// A time given in milliseconds, in a unit that fits it.
pub(crate) fn time(ms: f64) -> String {
    let (factor, unit) = match ms {
        ms if ms < 1e-3 => (1e6, "ns"),
        ms if ms < 1.0 => (1e3, "us"),
        ms if ms < 1e3 => (1.0, "ms"),
        _ => (1e-3, "s"),
    };
    format!("{} {unit}", number(ms * factor))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_three_digits_and_times_a_unit() {
        for (x, text) in [
            (0.012_345, "0.0123"),
            (1.234, "1.23"),
            (12.34, "12.3"),
            (123.4, "123"),
            (12_345.6, "12,346"),
            (1_234_567.0, "1,234,567"),
            (0.0, "0"),
        ] {
            assert_eq!(number(x), text);
        }
        for (ms, text) in [
            (2e-6, "2.00 ns"),
            (0.002, "2.00 us"),
            (12.0, "12.0 ms"),
            (90_000.0, "90.0 s"),
        ] {
            assert_eq!(time(ms), text);
        }
    }

    #[test]
    fn what_cannot_be_seen_is_not_printed() {
        assert_eq!(
            printable("a\u{202e}b\u{2028}c\u{200b}d\u{feff}e\r\n\x1b\x7ff\u{fffe}"),
            "a b c d e    f "
        );
        let seen = "\\ \"Größe\" 'e\u{301}' 显卡 ® 🦀";
        assert_eq!(printable(seen), seen);
    }

    #[test]
    fn markdown_is_escaped() {
        let mut table = Table::new(["a", "b"]);
        table.row(["x|y".into(), "1".into()]);
        assert_eq!(table.markdown(), "| a | b |\n|---|---:|\n| x\\|y | 1 |\n");
        assert_eq!(table.plain(), "a    b\nx|y  1\n");
    }
}
