//! A chart of lines, points and bars as SVG.

use std::fmt::Write;

use super::axis::{Axis, around};
use super::text::{CHARACTER, width, wrapped};
use super::{escape, mark};

/// One line of a chart, or the points or bars of one colour.
#[derive(Default)]
pub struct Line<'a> {
    /// The name in the legend.
    pub name: &'a str,
    /// The points, x ascending; for bars, x is the index of the name below them.
    pub points: &'a [(f64, f64)],
    /// The style class.
    pub class: &'a str,
    /// Line, points or bars.
    pub shape: Shape,
    /// Standard errors of the bars; empty for none.
    pub errors: &'a [f64],
    /// Lower and upper ends of the points' intervals, NaN for none; empty if no point has one.
    pub between: &'a [(f64, f64)],
    /// The place of the series, which gives its marks their shape; `None` for small dots.
    pub mark: Option<usize>,
    /// Whether the line is dashed.
    pub dashed: bool,
    /// How far points are moved to the right, in pixels, so that they do not cover those of other series.
    pub shift: f64,
}

/// How points are drawn.
#[derive(Clone, Copy, Default, PartialEq)]
pub enum Shape {
    /// A line.
    #[default]
    Plain,
    /// A line whose points show their value on hover.
    Marked,
    /// Points without a line.
    Points,
    /// Bars.
    Bars,
}

/// A chart.
#[derive(Default)]
pub struct Chart<'a> {
    /// The title above the chart; its line breaks are kept.
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
/// The least height of the plot itself: a chart with a long legend grows.
const PLOT: f64 = 186.0;
/// The number of characters in a line of the title, and of a name in the legend.
const TITLE: usize = 54;
const NAME: usize = 48;
/// The longest line of a slanted name in characters, and the cosine and sine of its slope.
const SLANTED: usize = 22;
const SLOPE: (f64, f64) = (0.77, 0.64);

/// The space that a chart needs above and below its plot.
#[derive(Clone, Copy, Default)]
pub(super) struct Space {
    top: f64,
    foot: f64,
}

impl Space {
    /// Enough for both.
    pub(super) fn with(self, other: Self) -> Self {
        Self { top: self.top.max(other.top), foot: self.foot.max(other.foot) }
    }

    /// The height of the chart.
    pub(super) fn height(self) -> f64 {
        HEIGHT.max(self.top + PLOT + self.foot)
    }
}

/// Maps the numbers of a chart to the page.
pub(super) struct Frame<'a> {
    chart: &'a Chart<'a>,
    pub(super) x: (f64, f64),
    pub(super) y: (f64, f64),
    left: f64,
    top: f64,
    bottom: f64,
}

impl Frame<'_> {
    pub(super) fn x(&self, value: f64) -> f64 {
        self.left + self.chart.x.place(value, self.x) * self.wide()
    }

    pub(super) fn y(&self, value: f64) -> f64 {
        self.bottom - self.chart.y.place(value, self.y) * (self.bottom - self.top)
    }

    fn wide(&self) -> f64 {
        WIDTH - self.left - RIGHT
    }

    /// The width of a category.
    pub(super) fn slot(&self) -> f64 {
        self.wide() / (self.x.1 - self.x.0)
    }
}

/// The names below a chart, each in its lines.
struct AxisNames {
    names: Vec<Vec<String>>,
    slanted: bool,
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
        self.to_svg_below(Space::default())
    }

    /// Renders the chart with its plot as far down as that of a chart beside it.
    pub(super) fn to_svg_below(&self, beside: Space) -> String {
        let title = escape(&self.titles().join(" "));
        let own = self.space();
        let space = Space { top: own.top.max(beside.top), ..own };
        let (inside, height) = (self.inside(space), space.height());
        format!(
            "<svg viewBox=\"0 0 {WIDTH} {height:.0}\" role=\"img\" aria-label=\"{title}\">{inside}</svg>\n"
        )
    }

    /// The space that the chart needs.
    pub(super) fn space(&self) -> Space {
        let titles = self.titles().len().max(1);
        let below = self.below();
        let deepest = below.names.iter().map(Vec::len).max().unwrap_or(1).max(1) as f64;
        let longest = below.names.iter().flatten().map(|line| width(line)).fold(0.0, f64::max);
        let names = if below.slanted { SLOPE.1 * longest + 5.0 } else { 14.0 * (deepest - 1.0) };
        let label = match self.label_below().len() {
            0 => 26.0,
            lines => 29.0 + 15.0 * lines as f64,
        };
        Space { top: 19.0 + 17.0 * (titles + self.legend().1) as f64, foot: label + names }
    }

    /// The contents of the chart, `WIDTH` by the height of the space, from the origin.
    pub(super) fn inside(&self, space: Space) -> String {
        let frame = self.frame(space);
        let mut svg = String::new();
        for (i, line) in self.titles().iter().enumerate() {
            let y = 14 + 17 * i;
            let _ = write!(svg, "<text class=\"title\" x=\"{LEFT}\" y=\"{y}\">{}</text>", escape(line));
        }
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
        for (i, &(name, level)) in self.levels.iter().enumerate() {
            let (y, end) = (frame.y(level), WIDTH - RIGHT);
            let _ = write!(
                svg,
                "<line class=\"{}\" x1=\"{}\" x2=\"{end}\" y1=\"{y:.1}\" y2=\"{y:.1}\">\
                 <title>{}: {}</title></line>",
                level_class(i),
                frame.left,
                escape(name),
                self.y.value(level)
            );
        }
        svg + &self.legend().0
    }

    fn frame(&self, space: Space) -> Frame<'_> {
        let x = self.x.range.unwrap_or_else(|| around(self.points().map(|point| point.0)));
        let y = self.y.range.unwrap_or_else(|| around(self.points().map(|point| point.1)));
        let (top, bottom) = (space.top, space.height() - space.foot);
        let longest = self.y.up(y).iter().map(|&tick| width(&self.y.tick(tick))).fold(0.0, f64::max);
        let label = match self.label_left(bottom - top).len() {
            0 => 0.0,
            lines => 6.0 + 14.0 * lines as f64,
        };
        let below = self.below();
        // The first name, which ends below the middle of its category, begins further to the left.
        let first = below.names.first().into_iter().flatten().map(|line| width(line)).fold(0.0, f64::max);
        let half = (WIDTH - LEFT - RIGHT) / below.names.len().max(1) as f64 / 2.0;
        let names = if below.slanted { SLOPE.0 * first - half + 12.0 } else { 0.0 };
        let left = LEFT.max(longest + 6.0 + label).max(names);
        Frame { chart: self, x, y, left, top, bottom }
    }

    /// The names below the chart, if all are shown: over several lines, or slanted if a word is too long for that.
    fn below(&self) -> AxisNames {
        if !self.x.all || self.is_empty() {
            return AxisNames { names: Vec::new(), slanted: false };
        }
        let room = (WIDTH - LEFT - RIGHT) / self.x.names.len().max(1) as f64 - 0.8 * CHARACTER;
        let room = (room / CHARACTER).max(0.0) as usize;
        let words = self.x.names.iter().flat_map(|name| name.split_whitespace());
        let fits = words.into_iter().all(|word| word.chars().count() <= room);
        let over = |most: usize| self.x.names.iter().map(|name| wrapped(name, most)).collect::<Vec<_>>();
        let names = over(room);
        if fits && names.iter().all(|lines| lines.len() <= 3) {
            return AxisNames { names, slanted: false };
        }
        AxisNames { names: over(SLANTED), slanted: true }
    }

    fn titles(&self) -> Vec<String> {
        self.title.lines().flat_map(|line| wrapped(line, TITLE)).collect()
    }

    fn label_below(&self) -> Vec<String> {
        wrapped(self.x.label, ((WIDTH - LEFT - RIGHT) / CHARACTER) as usize)
    }

    fn label_left(&self, room: f64) -> Vec<String> {
        wrapped(self.y.label, (room / CHARACTER) as usize)
    }

    /// The legend and its number of rows.
    fn legend(&self) -> (String, usize) {
        let lines = self.lines.iter().filter(|line| !line.points.is_empty() && !line.name.is_empty());
        let lines = lines.map(|line| (line.name, Ok(line)));
        let levels = self.levels.iter().enumerate().map(|(i, &(name, _))| (name, Err(level_class(i))));
        let above = 17.0 * self.titles().len().saturating_sub(1) as f64;
        let (mut svg, mut x, mut row) = (String::new(), LEFT, 1);
        for (name, key) in lines.chain(levels) {
            let parts = wrapped(name, NAME);
            let key_width = if matches!(key, Ok(Line { mark: Some(_), .. })) { 27.0 } else { 21.0 };
            let wide = 1.0 + key_width + parts.iter().map(|part| width(part)).fold(0.0, f64::max);
            if x > LEFT && x + wide > WIDTH {
                (x, row) = (LEFT, row + 1);
            }
            let y = above + 15.0 + 17.0 * row as f64;
            svg += &match key {
                Ok(line) => line.key(x, y),
                Err(class) => stroke(class, (x, x + 16.0), y - 4.0),
            };
            for (i, part) in parts.iter().enumerate() {
                let (x, y) = (x + key_width, y + 17.0 * i as f64);
                let _ = write!(svg, "<text x=\"{x:.1}\" y=\"{y}\">{}</text>", escape(part));
            }
            x += wide + 18.0;
            if parts.len() > 1 {
                (x, row) = (WIDTH, row + parts.len() - 1);
            }
        }
        (svg, row)
    }

    fn axes(&self, frame: &Frame<'_>) -> String {
        let mut svg = String::new();
        for tick in self.y.up(frame.y) {
            let at = frame.y(tick);
            let _ = write!(
                svg,
                "<line class=\"grid\" x1=\"{}\" x2=\"{}\" y1=\"{at:.1}\" y2=\"{at:.1}\"/>\
                 <text class=\"tick\" text-anchor=\"end\" x=\"{}\" y=\"{:.1}\">{}</text>",
                frame.left,
                WIDTH - RIGHT,
                frame.left - 6.0,
                at + 4.0,
                self.y.tick(tick)
            );
        }
        if !self.is_empty() {
            svg += &self.names(frame);
        }
        let middle = (frame.left + WIDTH - RIGHT) / 2.0;
        let lines = self.label_below();
        let foot = frame.bottom + self.space().foot - 8.0;
        for (i, line) in lines.iter().rev().enumerate() {
            let _ = write!(
                svg,
                "<text class=\"tick\" text-anchor=\"middle\" x=\"{middle}\" y=\"{}\">{}</text>",
                foot - 15.0 * i as f64,
                escape(line)
            );
        }
        for (i, line) in self.label_left(frame.bottom - frame.top).iter().enumerate() {
            let _ = write!(
                svg,
                "<text class=\"tick\" text-anchor=\"middle\" transform=\"translate({} {:.1}) rotate(-90)\">{}</text>",
                12 + 14 * i,
                (frame.top + frame.bottom) / 2.0,
                escape(line)
            );
        }
        svg
    }

    /// The numbers or names below the chart.
    fn names(&self, frame: &Frame<'_>) -> String {
        let below = self.below();
        let mut svg = String::new();
        for (i, (at, name)) in self.x.across(frame.x, frame.wide()).into_iter().enumerate() {
            let (x, y) = (frame.x(at), frame.bottom + 16.0);
            let lines = below.names.get(i).cloned().unwrap_or_else(|| vec![name]);
            for (line, text) in lines.iter().enumerate() {
                let (down, text) = (14.0 * line as f64, escape(text));
                let _ = if below.slanted {
                    let (x, y) = (x + 3.0, y - 6.0);
                    write!(
                        svg,
                        "<text class=\"tick\" text-anchor=\"end\" \
                         transform=\"translate({x:.1} {y:.1}) rotate(-40)\" y=\"{:.1}\">{text}</text>",
                        down + 4.0
                    )
                } else {
                    // The last number ends within the chart.
                    let x = x.min(WIDTH - 0.5 * width(&text));
                    let y = y + down;
                    write!(
                        svg,
                        "<text class=\"tick\" text-anchor=\"middle\" x=\"{x:.1}\" y=\"{y:.1}\">{text}</text>"
                    )
                };
            }
        }
        svg
    }
}

impl Line<'_> {
    /// The key of the line in the legend; the text next to it stands on `y`.
    fn key(&self, x: f64, y: f64) -> String {
        let (class, middle) = (self.class, y - 4.0);
        let mut svg = match self.shape {
            Shape::Bars if self.mark.is_some() => {
                let top = y - 10.5;
                format!("<rect class=\"{class}\" x=\"{x:.1}\" y=\"{top}\" width=\"20\" height=\"13\"/>")
            }
            Shape::Bars => {
                let top = y - 9.0;
                format!("<rect class=\"{class}\" x=\"{x:.1}\" y=\"{top}\" width=\"14\" height=\"9\"/>")
            }
            Shape::Points => String::new(),
            _ if self.mark.is_some() => stroke(&self.stroke_class(), (x, x + 22.0), middle),
            _ => stroke(&self.stroke_class(), (x, x + 16.0), middle),
        };
        if let Some(series) = self.mark {
            let (class, at) = if self.shape == Shape::Bars {
                ("on", (x + 10.0, middle))
            } else {
                (class, (x + 11.0, middle))
            };
            svg += &mark::mark(series, class, at);
        }
        svg
    }

    pub(super) fn stroke_class(&self) -> String {
        format!("{}{}", self.class, if self.dashed { " dashed" } else { "" })
    }
}

/// A horizontal line.
fn stroke(class: &str, (start, end): (f64, f64), y: f64) -> String {
    format!("<line class=\"{class}\" x1=\"{start:.1}\" x2=\"{end:.1}\" y1=\"{y}\" y2=\"{y}\"/>")
}

/// The class of the `i`-th level, each with its own dashes.
fn level_class(i: usize) -> &'static str {
    ["level", "level dots", "level long"][i % 3]
}

pub(super) fn finite(point: &(f64, f64)) -> bool {
    point.0.is_finite() && point.1.is_finite()
}
