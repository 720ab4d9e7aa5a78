//! A line chart as SVG.

use std::fmt::Write;

use super::escape;

/// One line of a chart.
pub struct Line<'a> {
    /// What the legend calls it.
    pub name: &'a str,
    /// x ascending.
    pub points: &'a [(f64, f64)],
    /// Its look: a class of the page's style.
    pub class: &'a str,
}

/// A chart with linear axes.
pub struct Chart<'a> {
    /// Above the chart.
    pub title: &'a str,
    /// Drawn in this order.
    pub lines: Vec<Line<'a>>,
}

const WIDTH: f64 = 520.0;
const HEIGHT: f64 = 270.0;
/// Left, top, right, bottom.
const MARGIN: [f64; 4] = [58.0, 40.0, 14.0, 26.0];

impl<'a> Chart<'a> {
    /// A chart of one line.
    pub fn one(title: &'a str, points: &'a [(f64, f64)]) -> Self {
        Self { title, lines: vec![Line { name: "", points, class: "main" }] }
    }

    /// Whether there is nothing to draw.
    pub fn is_empty(&self) -> bool {
        self.points().next().is_none()
    }

    fn points(&self) -> impl Iterator<Item = (f64, f64)> {
        let finite = |point: &(f64, f64)| point.0.is_finite() && point.1.is_finite();
        self.lines.iter().flat_map(|line| line.points.iter().copied()).filter(finite)
    }

    /// The chart.
    pub fn to_svg(&self) -> String {
        let range = |values: &mut dyn Iterator<Item = f64>| {
            let (low, high) =
                values.fold((f64::INFINITY, f64::NEG_INFINITY), |(l, h), v| (l.min(v), h.max(v)));
            if high > low { (low, high) } else { (low - 0.5, low + 0.5) }
        };
        let (left, right) = range(&mut self.points().map(|point| point.0));
        let (low, high) = range(&mut self.points().map(|point| point.1));
        let [margin_left, top, margin_right, bottom] = MARGIN;
        let x = |v: f64| margin_left + (v - left) / (right - left) * (WIDTH - margin_left - margin_right);
        let y = |v: f64| HEIGHT - bottom - (v - low) / (high - low) * (HEIGHT - top - bottom);
        let mut svg = format!("<svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\">");
        let title = escape(self.title);
        let _ = write!(svg, "<text class=\"title\" x=\"{margin_left}\" y=\"16\">{title}</text>");
        for tick in ticks(low, high) {
            let at = y(tick);
            let _ = write!(
                svg,
                "<line class=\"grid\" x1=\"{margin_left}\" x2=\"{}\" y1=\"{at:.1}\" y2=\"{at:.1}\"/>\
                 <text class=\"tick\" text-anchor=\"end\" x=\"{}\" y=\"{:.1}\">{}</text>",
                WIDTH - margin_right,
                margin_left - 6.0,
                at + 4.0,
                number(tick)
            );
        }
        for tick in ticks(left, right) {
            let _ = write!(
                svg,
                "<text class=\"tick\" text-anchor=\"middle\" x=\"{:.1}\" y=\"{}\">{}</text>",
                x(tick),
                HEIGHT - 8.0,
                number(tick)
            );
        }
        let mut legend = margin_left;
        for line in self.lines.iter().filter(|line| !line.points.is_empty()) {
            svg += &draw(line, x, y);
            if !line.name.is_empty() {
                let name = escape(line.name);
                let _ = write!(
                    svg,
                    "<line class=\"{}\" stroke-width=\"2\" x1=\"{legend}\" x2=\"{}\" y1=\"28\" y2=\"28\"/>\
                     <text x=\"{}\" y=\"32\">{name}</text>",
                    line.class,
                    legend + 16.0,
                    legend + 21.0
                );
                legend += 40.0 + 6.2 * line.name.chars().count() as f64;
            }
        }
        svg + "</svg>\n"
    }
}

/// A line, thinned to what the eye can tell apart; few points are marked.
fn draw(line: &Line<'_>, x: impl Fn(f64) -> f64, y: impl Fn(f64) -> f64) -> String {
    let every = line.points.len().div_ceil(1000).max(1);
    let last = line.points.len() - 1;
    let shown = line.points.iter().enumerate().filter(|(i, _)| i % every == 0 || *i == last);
    let mut text = format!("<polyline class=\"{}\" points=\"", line.class);
    let mut marks = String::new();
    for (_, &(a, b)) in shown.filter(|(_, point)| point.0.is_finite() && point.1.is_finite()) {
        let _ = write!(text, "{:.1},{:.1} ", x(a), y(b));
        if line.points.len() <= 60 && line.class == "other" {
            let _ = write!(
                marks,
                "<circle class=\"{}\" cx=\"{:.1}\" cy=\"{:.1}\" r=\"2.6\"><title>{}: {}</title></circle>",
                line.class,
                x(a),
                y(b),
                number(a),
                number(b)
            );
        }
    }
    text + "\"/>" + &marks
}

/// About five round numbers.
fn ticks(low: f64, high: f64) -> Vec<f64> {
    let rough = (high - low) / 5.0;
    let power = 10f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].iter().map(|m| m * power).find(|&s| s >= rough).unwrap_or(power);
    let first = (low / step).ceil() as i64;
    let last = (high / step).floor() as i64;
    (first..=last.min(first + 20)).map(|i| i as f64 * step).collect()
}

/// A number without needless digits.
fn number(value: f64) -> String {
    let size = value.abs();
    if size != 0.0 && !(1e-3..1e6).contains(&size) {
        return format!("{value:.1e}");
    }
    let text = format!("{value:.4}");
    text.trim_end_matches('0').trim_end_matches('.').to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round() {
        assert_eq!(ticks(0.0, 10.0), [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]);
        assert_eq!(number(0.5), "0.5");
        assert_eq!(number(120.0), "120");
        assert_eq!(number(4e-4), "4.0e-4");
        let flat = Chart::one("flat", &[(1.0, 2.0)]).to_svg();
        assert!(flat.contains("<polyline") && !flat.contains("NaN"));
        assert!(Chart::one("none", &[(f64::NAN, 1.0)]).is_empty());
    }
}
