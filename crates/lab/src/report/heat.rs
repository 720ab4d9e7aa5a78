//! A heat map: right answers by the needle's depth and the prompt's length.

use std::fmt::Write;

use super::escape;
use super::picture::beginning;

/// A heat map, a column for each length and a row for each depth.
pub struct Heat<'a> {
    /// The heading.
    pub title: &'a str,
    /// The lengths of the prompts in tokens.
    pub lengths: &'a [usize],
    /// The names of the depths, such as `0–10`, in percent of the prompt.
    pub depths: &'a [String],
    /// Fractions of right answers from 0 to 1, row by row; `None` where nothing was asked.
    pub cells: &'a [Option<f64>],
}

/// The size of a cell, the space around the cells, and the least width, which leaves room for the line of
/// text.
const CELL: (f64, f64) = (64.0, 26.0);
const TOP: f64 = 84.0;
const BOTTOM: f64 = 56.0;
const RIGHT: f64 = 28.0;
const LEAST: f64 = 520.0;

/// Cells are shades of one colour, so that the order of the values is visible with any colour vision.
const STYLE: &str = "svg rect.cell { fill: var(--heat); }
svg rect.edge { fill: none; stroke: var(--grid); }
svg rect.none { fill: none; stroke: var(--faint); stroke-dasharray: 3 3; opacity: .7; }
svg .none-value { fill: var(--soft); }
";

impl Heat<'_> {
    /// Renders a standalone SVG.
    pub fn svg(&self) -> String {
        let longest = self.depths.iter().map(|depth| depth.chars().count()).max().unwrap_or(0);
        let left = 64.0 + 6.8 * longest as f64;
        let (columns, rows) = (self.lengths.len(), self.depths.len());
        let wide = ((LEAST - left - RIGHT) / columns.max(1) as f64).clamp(CELL.0, 1.5 * CELL.0);
        let (right, bottom) = (left + wide * columns as f64, TOP + CELL.1 * rows as f64);
        let (width, height) = ((right + RIGHT).max(LEAST), bottom + BOTTOM);
        let line = "right answers in percent, by depth and length";
        let mut svg = beginning(self.title, line, (width, height), STYLE);
        for (row, depth) in self.depths.iter().enumerate() {
            let top = TOP + CELL.1 * row as f64;
            let _ = write!(
                svg,
                "<text class=\"tick\" text-anchor=\"end\" x=\"{:.1}\" y=\"{:.1}\">{}</text>",
                left - 8.0,
                top + CELL.1 / 2.0 + 4.0,
                escape(depth)
            );
            for (column, &length) in self.lengths.iter().enumerate() {
                let x = left + wide * column as f64;
                let value = self.cells.get(row * columns + column).copied().flatten();
                let said = format!("depth {depth}, length {}", short(length));
                svg += &cell((x, top), (wide, CELL.1), &said, value.filter(|value| value.is_finite()));
            }
            svg.push('\n');
        }
        for (column, &length) in self.lengths.iter().enumerate() {
            let _ = write!(
                svg,
                "<text class=\"tick\" text-anchor=\"middle\" x=\"{:.1}\" y=\"{:.1}\">{}</text>",
                left + wide * (column as f64 + 0.5),
                bottom + 18.0,
                short(length)
            );
        }
        let _ = writeln!(
            svg,
            "<text class=\"tick\" text-anchor=\"middle\" x=\"{:.1}\" y=\"{:.1}\">length, tokens</text>\
             <text class=\"tick\" text-anchor=\"middle\" transform=\"translate(32 {:.1}) rotate(-90)\">\
             depth, %</text>",
            (left + right) / 2.0,
            bottom + 38.0,
            (TOP + bottom) / 2.0
        );
        svg + "</svg>\n"
    }
}

/// A cell with its value in percent, or an empty one.
fn cell((x, y): (f64, f64), (width, height): (f64, f64), said: &str, value: Option<f64>) -> String {
    let place = format!(
        "x=\"{:.1}\" y=\"{:.1}\" width=\"{:.1}\" height=\"{:.1}\" rx=\"3\"",
        x + 1.5,
        y + 1.5,
        width - 3.0,
        height - 3.0
    );
    let (rects, class, text, said) = match value {
        Some(value) => (
            format!(
                "<rect class=\"cell\" {place} fill-opacity=\"{:.3}\"/><rect class=\"edge\" {place}/>",
                value.clamp(0.0, 1.0)
            ),
            "",
            format!("{:.0}", 100.0 * value),
            format!("{said}: {:.1} %", 100.0 * value),
        ),
        None => (
            format!("<rect class=\"none\" {place}/>"),
            " class=\"none-value\"",
            "–".into(),
            format!("{said}: not asked"),
        ),
    };
    format!(
        "<g><title>{}</title>{rects}\
         <text{class} text-anchor=\"middle\" x=\"{:.1}\" y=\"{:.1}\">{text}</text></g>",
        escape(&said),
        x + width / 2.0,
        y + height / 2.0 + 4.0
    )
}

/// A length in K if it is a whole number of them.
pub(super) fn short(length: usize) -> String {
    if length.is_multiple_of(1024) { format!("{}K", length / 1024) } else { length.to_string() }
}
