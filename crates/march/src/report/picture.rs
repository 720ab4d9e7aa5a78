//! Charts as one standalone SVG, for light and dark pages.

use std::fmt::Write;

use super::chart::{Chart, HEIGHT, WIDTH};
use super::{CHART_STYLE, COLOURS, PICTURE_BEGINS, PICTURE_IS, escape};

/// Margins, the gap between two charts, and the space above them.
const MARGIN: f64 = 24.0;
const GAP: f64 = 32.0;
const TOP: f64 = 94.0;
/// The scale of the charts, such that two of them make a picture 1,000 wide.
const SCALE: f64 = (1000.0 - 2.0 * MARGIN - GAP) / (2.0 * WIDTH);

/// Charts side by side under a heading and a line of text.
pub(super) fn picture(title: &str, line: &str, charts: &[Chart<'_>]) -> String {
    let count = charts.len().max(1) as f64;
    let (width, height) =
        (2.0 * MARGIN + count * SCALE * WIDTH + (count - 1.0) * GAP, TOP + SCALE * HEIGHT + 12.0);
    let mut svg = beginning(title, line, (width, height), "");
    for (i, chart) in charts.iter().enumerate() {
        let left = MARGIN + i as f64 * (SCALE * WIDTH + GAP);
        let inside = chart.inside();
        let _ =
            writeln!(svg, "<g transform=\"translate({left:.1} {TOP:.1}) scale({SCALE:.4})\">{inside}</g>");
    }
    svg + "</svg>\n"
}

/// The beginning of a picture: its style, to which `more` is added, and its card with a heading and a line of text.
pub(super) fn beginning(title: &str, line: &str, (width, height): (f64, f64), more: &str) -> String {
    let style = |dark: bool| {
        COLOURS.iter().fold([CHART_STYLE, STYLE, more].concat(), |style, &(name, light, night)| {
            style.replace(&format!("var(--{name})"), if dark { night } else { light })
        })
    };
    let (light, dark) = (style(false), style(true));
    let room = width / 1000.0;
    let title = escape(&shortened(title, (82.0 * room) as usize));
    let line = escape(&shortened(line, (115.0 * room) as usize));
    format!(
        "{PICTURE_BEGINS}{width:.0} {height:.0}\" width=\"{width:.0}\" \
         height=\"{height:.0}\"{PICTURE_IS}{title}. {line}\">\n<style>\n{light}\
         @media (prefers-color-scheme: dark) {{\n{dark}}}\n</style>\n\
         <rect class=\"card\" x=\"0.5\" y=\"0.5\" width=\"{:.0}\" height=\"{:.0}\" rx=\"10\"/>\n\
         <text class=\"head\" x=\"28\" y=\"40\">{title}</text>\n\
         <text class=\"result\" x=\"28\" y=\"65\">{line}</text>\n",
        width - 1.0,
        height - 1.0
    )
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
