//! Charts as one standalone SVG, for light and dark pages.

use std::fmt::Write;

use super::chart::{Chart, HEIGHT, Space, WIDTH};
use super::text::wrapped;
use super::{CHART_STYLE, COLOURS, PICTURE_BEGINS, PICTURE_IS, escape};

/// Margins, the gap between two charts, and the space above them.
const MARGIN: f64 = 24.0;
const GAP: f64 = 32.0;
const TOP: f64 = 94.0;
/// The scale of the charts, such that two of them make a picture 1,000 wide.
const SCALE: f64 = (1000.0 - 2.0 * MARGIN - GAP) / (2.0 * WIDTH);
/// The distances of two lines of the heading, and of the text below it.
const HEAD: f64 = 25.0;
const RESULT: f64 = 21.0;

/// Charts side by side under a heading and a text, which may need several lines; the plots of all charts are level.
pub(super) fn picture(title: &str, line: &str, charts: &[Chart<'_>]) -> String {
    let count = charts.len().max(1) as f64;
    let width = 2.0 * MARGIN + count * SCALE * WIDTH + (count - 1.0) * GAP;
    let heads = wrapped(title, heading_room(width));
    let results = wrapped(line, line_room(width));
    let more = |lines: &[String], each: f64| each * (lines.len() as f64 - 1.0);
    let top = TOP + more(&heads, HEAD).max(0.0) + more(&results, RESULT);
    let space = charts.iter().map(Chart::space).fold(Space::default(), Space::with);
    let height = top + SCALE * space.height().max(HEIGHT) + 12.0;
    let mut svg = opening(&heads, &results, (width, height), "");
    for (i, chart) in charts.iter().enumerate() {
        let left = MARGIN + i as f64 * (SCALE * WIDTH + GAP);
        let inside = chart.inside(space);
        let _ =
            writeln!(svg, "<g transform=\"translate({left:.1} {top:.1}) scale({SCALE:.4})\">{inside}</g>");
    }
    svg + "</svg>\n"
}

/// The number of characters in a line of the heading.
fn heading_room(width: f64) -> usize {
    (0.082 * width) as usize
}

/// The number of characters in a line of the text below the heading.
fn line_room(width: f64) -> usize {
    (0.115 * width) as usize
}

/// The beginning of a picture: its style, to which `more` is added, and its card with a heading and a line of text.
/// Both are shortened to one line.
pub(super) fn beginning(title: &str, line: &str, (width, height): (f64, f64), more: &str) -> String {
    let title = shortened(title, heading_room(width));
    let line = shortened(line, line_room(width));
    opening(&[title], &[line], (width, height), more)
}

/// The beginning of a picture whose heading and text have the given lines.
fn opening(heads: &[String], results: &[String], (width, height): (f64, f64), more: &str) -> String {
    let style = |dark: bool| {
        COLOURS.iter().fold([CHART_STYLE, STYLE, more].concat(), |style, &(name, light, night)| {
            style.replace(&format!("var(--{name})"), if dark { night } else { light })
        })
    };
    let (light, dark) = (style(false), style(true));
    let (title, line) = (escape(&heads.join(" ")), escape(&results.join(" ")));
    let mut svg = format!(
        "{PICTURE_BEGINS}{width:.0} {height:.0}\" width=\"{width:.0}\" \
         height=\"{height:.0}\"{PICTURE_IS}{title}. {line}\">\n<style>\n{light}\
         @media (prefers-color-scheme: dark) {{\n{dark}}}\n</style>\n\
         <rect class=\"card\" x=\"0.5\" y=\"0.5\" width=\"{:.0}\" height=\"{:.0}\" rx=\"10\"/>\n",
        width - 1.0,
        height - 1.0
    );
    let mut y = 40.0;
    for (class, lines, step) in [("head", heads, HEAD), ("result", results, RESULT)] {
        for (i, text) in lines.iter().enumerate() {
            y += if i > 0 { step } else { 0.0 };
            let _ = writeln!(svg, "<text class=\"{class}\" x=\"28\" y=\"{y}\">{}</text>", escape(text));
        }
        y += HEAD;
    }
    svg
}

/// The style of the picture, in addition to that of its charts.
const STYLE: &str = "svg .card { fill: var(--back); stroke: var(--grid); }
svg .head { font-size: 19px; font-weight: 600; }
svg .result { font-size: 15px; fill: var(--soft); }
";

/// Truncates a text to `characters` characters.
fn shortened(text: &str, characters: usize) -> String {
    if text.chars().count() <= characters {
        return text.into();
    }
    text.chars().take(characters.saturating_sub(1)).chain(['…']).collect()
}
