//! A chart of lines and bars as SVG.

use std::fmt::Write;

use super::escape;

/// One line of a chart, or the bars of one colour.
#[derive(Default)]
pub struct Line<'a> {
    /// The name in the legend.
    pub name: &'a str,
    /// The points, x ascending; for bars, x is the index of the name below them.
    pub points: &'a [(f64, f64)],
    /// The style class.
    pub class: &'a str,
    /// Line or bars.
    pub shape: Shape,
    /// Standard errors of the bars; empty for none.
    pub errors: &'a [f64],
}

/// How points are drawn.
#[derive(Clone, Copy, Default, PartialEq)]
pub enum Shape {
    /// A line.
    #[default]
    Plain,
    /// A line whose points show their value on hover.
    Marked,
    /// Bars.
    Bars,
}

/// One axis of a chart.
#[derive(Default)]
pub struct Axis<'a> {
    /// The text next to the axis.
    pub label: &'a str,
    /// The range; if not given, it is computed from the points.
    pub range: Option<(f64, f64)>,
    /// Whether fractions of 1 are shown as percentages.
    pub percent: bool,
    /// Names to show instead of numbers, at 0, 1, …
    pub names: Vec<String>,
}

/// A chart with linear axes.
#[derive(Default)]
pub struct Chart<'a> {
    /// The title above the chart.
    pub title: &'a str,
    /// The lines, in drawing order.
    pub lines: Vec<Line<'a>>,
    /// Names and heights of dashed horizontal lines.
    pub levels: Vec<(&'a str, f64)>,
    /// The horizontal axis.
    pub x: Axis<'a>,
    /// The vertical axis.
    pub y: Axis<'a>,
}

pub(super) const WIDTH: f64 = 440.0;
pub(super) const HEIGHT: f64 = 300.0;
const LEFT: f64 = 60.0;
const RIGHT: f64 = 20.0;
/// Approximate width of a 12-pixel character.
const CHARACTER: f64 = 6.8;

/// Maps the numbers of a chart to the page.
struct Frame {
    x: (f64, f64),
    y: (f64, f64),
    top: f64,
    bottom: f64,
}

impl Frame {
    fn x(&self, value: f64) -> f64 {
        LEFT + (value - self.x.0) / (self.x.1 - self.x.0) * (WIDTH - LEFT - RIGHT)
    }

    fn y(&self, value: f64) -> f64 {
        self.bottom - (value - self.y.0) / (self.y.1 - self.y.0) * (self.bottom - self.top)
    }
}

impl<'a> Chart<'a> {
    /// A chart with a single line.
    pub fn one(title: &'a str, points: &'a [(f64, f64)]) -> Self {
        let line = Line { points, class: "main", ..Line::default() };
        Self { title, lines: vec![line], ..Self::default() }
    }

    /// Whether there is nothing to draw.
    pub fn is_empty(&self) -> bool {
        self.points().next().is_none()
    }

    fn points(&self) -> impl Iterator<Item = (f64, f64)> {
        self.lines.iter().flat_map(|line| line.points.iter().copied()).filter(finite)
    }

    /// Renders the chart.
    pub fn to_svg(&self) -> String {
        let title = escape(self.title);
        let inside = self.inside();
        format!("<svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-label=\"{title}\">{inside}</svg>\n")
    }

    /// The contents of the chart, `WIDTH` by `HEIGHT` from the origin.
    pub(super) fn inside(&self) -> String {
        let (legend, rows) = self.legend();
        let frame = Frame {
            x: self.x.range.unwrap_or_else(|| around(self.points().map(|point| point.0))),
            y: self.y.range.unwrap_or_else(|| around(self.points().map(|point| point.1))),
            top: 36.0 + 17.0 * rows as f64,
            bottom: HEIGHT - if self.x.label.is_empty() { 26.0 } else { 44.0 },
        };
        let mut svg = format!("<text class=\"title\" x=\"{LEFT}\" y=\"14\">{}</text>", escape(self.title));
        svg += &self.axes(&frame);
        let of = self.lines.iter().filter(|line| line.shape == Shape::Bars).count();
        let mut bars = 0;
        for line in self.lines.iter().filter(|line| !line.points.is_empty()) {
            if line.shape == Shape::Bars {
                svg += &self.bars(line, (bars, of), &frame);
                bars += 1;
            } else {
                svg += &self.line(line, &frame);
            }
        }
        for &(name, level) in &self.levels {
            let (y, end) = (frame.y(level), WIDTH - RIGHT);
            let _ = write!(
                svg,
                "<line class=\"level\" x1=\"{LEFT}\" x2=\"{end}\" y1=\"{y:.1}\" y2=\"{y:.1}\">\
                 <title>{}: {}</title></line>",
                escape(name),
                self.y.value(level)
            );
        }
        svg + &legend
    }

    /// The legend and its number of rows.
    fn legend(&self) -> (String, usize) {
        let lines = self.lines.iter().filter(|line| !line.points.is_empty() && !line.name.is_empty());
        let lines = lines.map(|line| (line.name, line.class, line.shape));
        let levels = self.levels.iter().map(|&(name, _)| (name, "level", Shape::Plain));
        let (mut svg, mut x, mut row) = (String::new(), LEFT, 1);
        for (name, class, shape) in lines.chain(levels) {
            let width = 22.0 + CHARACTER * name.chars().count() as f64;
            if x > LEFT && x + width > WIDTH {
                (x, row) = (LEFT, row + 1);
            }
            let y = 15.0 + 17.0 * row as f64;
            let _ = if shape == Shape::Bars {
                write!(
                    svg,
                    "<rect class=\"{class}\" x=\"{x:.1}\" y=\"{}\" width=\"14\" height=\"9\"/>",
                    y - 9.0
                )
            } else {
                let (end, y) = (x + 16.0, y - 4.0);
                write!(svg, "<line class=\"{class}\" x1=\"{x:.1}\" x2=\"{end:.1}\" y1=\"{y}\" y2=\"{y}\"/>")
            };
            let _ = write!(svg, "<text x=\"{:.1}\" y=\"{y}\">{}</text>", x + 21.0, escape(name));
            x += width + 18.0;
        }
        (svg, row)
    }

    fn axes(&self, frame: &Frame) -> String {
        let mut svg = String::new();
        for tick in ticks(frame.y) {
            let at = frame.y(tick);
            let _ = write!(
                svg,
                "<line class=\"grid\" x1=\"{LEFT}\" x2=\"{}\" y1=\"{at:.1}\" y2=\"{at:.1}\"/>\
                 <text class=\"tick\" text-anchor=\"end\" x=\"{}\" y=\"{:.1}\">{}</text>",
                WIDTH - RIGHT,
                LEFT - 6.0,
                at + 4.0,
                self.y.tick(tick)
            );
        }
        let across = if self.is_empty() { Vec::new() } else { self.x.ticks(frame.x) };
        for (at, name) in across {
            let _ = write!(
                svg,
                "<text class=\"tick\" text-anchor=\"middle\" x=\"{:.1}\" y=\"{:.1}\">{}</text>",
                frame.x(at),
                frame.bottom + 16.0,
                escape(&name)
            );
        }
        if !self.x.label.is_empty() {
            let _ = write!(
                svg,
                "<text class=\"tick\" text-anchor=\"middle\" x=\"{}\" y=\"{}\">{}</text>",
                (LEFT + WIDTH - RIGHT) / 2.0,
                HEIGHT - 8.0,
                escape(self.x.label)
            );
        }
        if !self.y.label.is_empty() {
            let _ = write!(
                svg,
                "<text class=\"tick\" text-anchor=\"middle\" transform=\"translate(12 {:.1}) rotate(-90)\">{}</text>",
                (frame.top + frame.bottom) / 2.0,
                escape(self.y.label)
            );
        }
        svg
    }

    /// A line, thinned to what is visible; a few points are marked, many only show their value on hover.
    fn line(&self, line: &Line<'_>, frame: &Frame) -> String {
        let every = line.points.len().div_ceil(1000).max(1);
        let last = line.points.len() - 1;
        let shown = line.points.iter().enumerate().filter(|(i, _)| i % every == 0 || *i == last);
        let mut text = format!("<polyline class=\"{}\" points=\"", line.class);
        let mut marks = String::new();
        let hidden = if line.points.len() <= 60 { "" } else { " hidden" };
        for (_, point) in shown.filter(|(_, point)| finite(point)) {
            let (x, y) = (frame.x(point.0), frame.y(point.1));
            let _ = write!(text, "{x:.1},{y:.1} ");
            if line.shape == Shape::Marked {
                let _ = write!(
                    marks,
                    "<circle class=\"{}{hidden}\" cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"2.6\"><title>{}</title></circle>",
                    line.class,
                    self.say(line, *point)
                );
            }
        }
        text + "\"/>" + &marks
    }

    /// The bars of one colour, the `place`-th of `of`, with their errors and values.
    fn bars(&self, line: &Line<'_>, (place, of): (usize, usize), frame: &Frame) -> String {
        let slot = 0.8 * (frame.x(1.0) - frame.x(0.0));
        let width = slot / of as f64;
        let mut svg = String::new();
        for (i, point) in line.points.iter().enumerate().filter(|(_, point)| finite(point)) {
            let left = frame.x(point.0) - slot / 2.0 + width * place as f64;
            let (top, bottom) = (frame.y(point.1), frame.y(frame.y.0));
            let mut said = self.say(line, *point);
            let error = line.errors.get(i).copied().filter(|error| error.is_finite());
            if let Some(error) = error {
                let _ = write!(said, " ± {}", self.y.value(error));
            }
            let _ = write!(
                svg,
                "<g><title>{said}</title>\
                 <rect class=\"{}\" x=\"{:.1}\" y=\"{top:.1}\" width=\"{:.1}\" height=\"{:.1}\"/>",
                line.class,
                left + 0.5,
                (width - 1.0).max(0.5),
                (bottom - top).max(0.5)
            );
            let middle = left + width / 2.0;
            let mut above = top;
            if let Some(error) = error.filter(|&error| error > 0.0) {
                let high = frame.y((point.1 + error).min(frame.y.1));
                let low = frame.y((point.1 - error).max(frame.y.0));
                above = high;
                let _ = write!(
                    svg,
                    "<path class=\"error\" d=\"M{middle:.1} {low:.1}V{high:.1}M{0:.1} {low:.1}H{1:.1}\
                     M{0:.1} {high:.1}H{1:.1}\"/>",
                    middle - 2.5,
                    middle + 2.5
                );
            }
            if self.y.percent && width >= 20.0 {
                let _ = write!(
                    svg,
                    "<text class=\"value\" text-anchor=\"middle\" x=\"{middle:.1}\" y=\"{:.1}\">{:.0}</text>",
                    above - 3.0,
                    100.0 * point.1
                );
            }
            svg += "</g>";
        }
        svg
    }

    /// The text that describes a point.
    fn say(&self, line: &Line<'_>, (x, y): (f64, f64)) -> String {
        let x = self.x.names.get(x.max(0.0) as usize).cloned().unwrap_or_else(|| number(x));
        let name = if line.name.is_empty() { String::new() } else { format!("{}, ", line.name) };
        escape(&format!("{name}{x}: {}", self.y.value(y)))
    }
}

impl Axis<'_> {
    /// Tick positions and labels; if there are many names, only as many as fit.
    fn ticks(&self, range: (f64, f64)) -> Vec<(f64, String)> {
        if self.names.is_empty() {
            return ticks(range).into_iter().map(|at| (at, self.tick(at))).collect();
        }
        let longest = self.names.iter().map(|name| name.chars().count() + 1).max().unwrap_or(1);
        let room = (WIDTH - LEFT - RIGHT) / (CHARACTER * longest as f64);
        let every = self.names.len().div_ceil((room as usize).max(1)).max(1);
        let places = (0..self.names.len()).step_by(every);
        places.map(|i| (i as f64, self.names[i].clone())).collect()
    }

    fn tick(&self, value: f64) -> String {
        if self.percent { format!("{:.0} %", 100.0 * value) } else { number(value) }
    }

    fn value(&self, value: f64) -> String {
        if self.percent { format!("{:.1} %", 100.0 * value) } else { number(value) }
    }
}

fn finite(point: &(f64, f64)) -> bool {
    point.0.is_finite() && point.1.is_finite()
}

/// The range from minimum to maximum, widened if they are equal.
fn around(values: impl Iterator<Item = f64>) -> (f64, f64) {
    let (low, high) = values.fold((f64::INFINITY, f64::NEG_INFINITY), |(l, h), v| (l.min(v), h.max(v)));
    match (low, high) {
        _ if high > low => (low, high),
        _ if low.is_finite() => (low - 0.5, low + 0.5),
        _ => (0.0, 1.0),
    }
}

/// About five round numbers in the range.
fn ticks((low, high): (f64, f64)) -> Vec<f64> {
    let rough = (high - low) / 5.0;
    let power = 10f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].iter().map(|m| m * power).find(|&s| s >= rough).unwrap_or(power);
    let first = (low / step).ceil() as i64;
    let last = (high / step).floor() as i64;
    (first..=last.min(first + 20)).map(|i| i as f64 * step).collect()
}

/// Formats a number without unnecessary digits.
pub(super) fn number(value: f64) -> String {
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
        assert_eq!(ticks((0.0, 10.0)), [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]);
        assert_eq!(number(0.5), "0.5");
        assert_eq!(number(120.0), "120");
        assert_eq!(number(4e-4), "4.0e-4");
        let flat = Chart::one("flat", &[(1.0, 2.0)]).to_svg();
        assert!(flat.contains("<polyline") && !flat.contains("NaN"));
        assert!(Chart::one("none", &[(f64::NAN, 1.0)]).is_empty());
        let empty = Chart::default().to_svg();
        assert!(!empty.contains("NaN") && !empty.contains("inf"), "{empty}");
    }

    #[test]
    fn bars_stand_beside_each_other() {
        let (a, b) = ([(0.0, 0.5), (1.0, 1.0)], [(0.0, 0.25), (1.0, f64::NAN)]);
        let bars = |name, points, errors| Line { name, points, errors, shape: Shape::Bars, class: "main" };
        let chart = Chart {
            lines: vec![bars("a", &a, &[0.1]), bars("b", &b, &[])],
            x: Axis { range: Some((-0.5, 1.5)), names: vec!["1–2".into(), "<3".into()], ..Axis::default() },
            y: Axis { range: Some((0.0, 1.0)), percent: true, ..Axis::default() },
            ..Chart::default()
        };
        let svg = chart.to_svg();
        // Two in the legend, three bars.
        assert_eq!(svg.matches("<rect").count(), 5, "{svg}");
        assert!(svg.contains("a, 1–2: 50.0 % ± 10.0 %") && svg.contains("a, &lt;3: 100.0 %<"), "{svg}");
        assert!(!svg.contains("NaN"));
    }
}
