//! A plot as a chart: ranges, colours and marks.

use super::super::axis::Axis;
use super::super::chart::{Chart, Line, Shape};
use super::super::mark;
use super::super::text::wrapped;
use super::inline::plain;
use super::{Plot, Point, Scale, Series, SeriesStyle};

/// The number of characters in a line of a title, also with a wide font.
const TITLE: usize = 46;

/// The names of series in the order of their colours.
pub(super) type Names<'a> = Vec<&'a str>;

/// Adds the names of series that are not in the list.
pub(super) fn add_names<'a>(names: &mut Names<'a>, plots: &'a [Plot]) {
    for series in plots.iter().flat_map(|plot| &plot.series) {
        if !names.contains(&series.name.as_str()) {
            names.push(&series.name);
        }
    }
}

/// What a plot's chart borrows.
#[derive(Default)]
pub(super) struct Drawn {
    title: String,
    labels: [String; 2],
    ranges: [(f64, f64); 2],
    names: Vec<String>,
    binary: [bool; 2],
    log: [bool; 2],
    lines: Vec<Points>,
    levels: Vec<(String, f64)>,
}

/// The points of a series that can be drawn.
struct Points {
    name: String,
    points: Vec<(f64, f64)>,
    between: Vec<(f64, f64)>,
    place: usize,
    style: SeriesStyle,
}

impl Drawn {
    /// Omits what is not a number, is not above 0 on a logarithmic axis, or is outside of the horizontal range.
    pub(super) fn new(plot: &Plot, colours: &[&str]) -> Self {
        let bars = plot.series.iter().any(|series| series.style == SeriesStyle::Bars);
        let places = places(plot, bars);
        let names: Vec<String> = if places.is_empty() {
            plot.x.names.iter().map(|name| plain(name)).collect()
        } else {
            places.iter().map(|&x| plot.x.axis(true).value(x)).collect()
        };
        let log = [plot.x.log && names.is_empty(), plot.y.log];
        let usable = |value: f64, log: bool| value.is_finite() && (!log || value > 0.0);
        let given = plot.x.range.filter(|&range| names.is_empty() && proper(range, log[0]));
        let draw = |series: &Series| {
            let own = series.points.iter().map(|point| Point { x: category(&places, point.x), ..*point });
            let own = own.filter(|point| usable(point.x, log[0]) && usable(point.y, log[1]));
            let own = own.filter(|point| given.is_none_or(|(low, high)| low <= point.x && point.x <= high));
            let last = names.len() as f64 - 0.5;
            let own = own.filter(|point| names.is_empty() || (-0.5 <= point.x && point.x <= last));
            let mut own: Vec<Point> = own.collect();
            if !matches!(series.style, SeriesStyle::Points) {
                own.sort_by(|a, b| a.x.total_cmp(&b.x));
            }
            let place = colours.iter().position(|name| *name == series.name).unwrap_or(0);
            Points {
                name: plain(&series.name),
                points: own.iter().map(|point| (point.x, point.y)).collect(),
                between: own.iter().map(|point| (point.low, point.high)).collect(),
                place,
                style: series.style,
            }
        };
        let lines: Vec<Points> = plot.series.iter().map(draw).collect();
        let levels = plot.levels.iter().filter(|level| usable(level.1, log[1]));
        let levels: Vec<(String, f64)> = levels.map(|(name, level)| (plain(name), *level)).collect();
        let mut drawn = Self {
            title: wrapped(&plain(&plot.title), TITLE).join("\n"),
            labels: [plain(&plot.x.label), plain(&plot.y.label)],
            ranges: [(0.0, 1.0); 2],
            binary: [false; 2],
            names,
            log,
            lines,
            levels,
        };
        drawn.fit(plot, given, bars);
        drawn
    }

    /// Sets the ranges, and whether ticks are at powers of two.
    fn fit(&mut self, plot: &Plot, given: Option<(f64, f64)>, bars: bool) {
        let xs: Vec<f64> = self.lines.iter().flat_map(|line| &line.points).map(|point| point.0).collect();
        let mut ys: Vec<f64> = self.lines.iter().flat_map(|line| &line.points).map(|point| point.1).collect();
        let power = |value: &f64| *value >= 1.0 && value.log2().fract() == 0.0;
        self.binary = [
            self.log[0] && (plot.x.bytes || (!xs.is_empty() && xs.iter().all(power))),
            self.log[1] && (plot.y.bytes || (!ys.is_empty() && ys.iter().all(power))),
        ];
        let ends = self.lines.iter().flat_map(|line| &line.between).flat_map(|&(low, high)| [low, high]);
        let log = self.log[1];
        ys.extend(ends.filter(|end| end.is_finite() && (!log || *end > 0.0)));
        ys.extend(self.levels.iter().map(|level| level.1));
        if bars && !log {
            ys.push(0.0);
        }
        self.ranges[0] = match self.names.len() {
            0 => given.unwrap_or_else(|| around(&xs, self.log[0], false)),
            names => (-0.5, names as f64 - 0.5),
        };
        let given = plot.y.range.filter(|&range| proper(range, log));
        self.ranges[1] = given.unwrap_or_else(|| around(&ys, log, plot.y.percent));
        let (low, high) = self.ranges[1];
        self.levels.retain(|level| low <= level.1 && level.1 <= high);
    }

    pub(super) fn chart<'a>(&'a self, plot: &Plot) -> Chart<'a> {
        let [mut x, mut y] = [plot.x.axis(false), plot.y.axis(false)];
        (x.label, y.label) = (&self.labels[0], &self.labels[1]);
        (x.range, y.range) = (Some(self.ranges[0]), Some(self.ranges[1]));
        (x.log, y.log) = (self.log[0], self.log[1]);
        (x.binary, y.binary) = (self.binary[0], self.binary[1]);
        (x.names, x.all) = (self.names.clone(), !self.names.is_empty());
        let lines = self.lines.iter().enumerate().map(|(i, line)| self.line(i, line)).collect();
        let levels = self.levels.iter().map(|(name, level)| (name.as_str(), *level)).collect();
        Chart { title: &self.title, lines, levels, x, y }
    }

    fn line<'a>(&self, i: usize, line: &'a Points) -> Line<'a> {
        let bars = self.lines.iter().filter(|line| line.style == SeriesStyle::Bars).count();
        Line {
            name: &line.name,
            points: &line.points,
            class: mark::class(line.place),
            shape: match line.style {
                SeriesStyle::Line | SeriesStyle::Dashed => Shape::Marked,
                SeriesStyle::Points => Shape::Points,
                SeriesStyle::Bars => Shape::Bars,
            },
            errors: &[],
            between: &line.between,
            mark: Some(line.place).filter(|_| line.style != SeriesStyle::Bars || bars > 1),
            dashed: line.style == SeriesStyle::Dashed,
            shift: self.shift(i),
        }
    }

    /// How far the points of a series are moved: side by side at a category, and very little at a number if several
    /// series have intervals.
    fn shift(&self, i: usize) -> f64 {
        let no_bars =
            |lines: &[Points]| lines.iter().filter(|line| line.style != SeriesStyle::Bars).count() as f64;
        let (count, before) = (no_bars(&self.lines), no_bars(&self.lines[..i]));
        let step = match self.lines[i].style {
            SeriesStyle::Points if !self.names.is_empty() => {
                (200.0 / self.names.len() as f64 / count).min(14.0)
            }
            SeriesStyle::Points | SeriesStyle::Line | SeriesStyle::Dashed
                if self.names.is_empty() && self.intervals() =>
            {
                1.6
            }
            _ => 0.0,
        };
        step * (before - (count - 1.0) / 2.0)
    }

    /// Whether several series have intervals.
    fn intervals(&self) -> bool {
        let has = |line: &&Points| line.between.iter().any(|(low, high)| (high - low).is_finite());
        self.lines.iter().filter(has).count() > 1
    }
}

impl Scale {
    /// The axis, without what is computed from the points.
    fn axis(&self, binary: bool) -> Axis<'static> {
        Axis { percent: self.percent, bytes: self.bytes, binary, ..Axis::default() }
    }
}

/// The numbers below bars without names, ascending, which become categories.
fn places(plot: &Plot, bars: bool) -> Vec<f64> {
    if !bars || !plot.x.names.is_empty() {
        return Vec::new();
    }
    let points = plot.series.iter().flat_map(|series| &series.points);
    let mut places: Vec<f64> = points.map(|point| point.x).filter(|x| x.is_finite()).collect();
    places.sort_by(f64::total_cmp);
    places.dedup();
    places
}

/// The index of a number among the categories; the number itself if there are none.
fn category(places: &[f64], x: f64) -> f64 {
    if places.is_empty() {
        return x;
    }
    places.iter().position(|&place| place == x).map_or(f64::NAN, |place| place as f64)
}

/// Whether a range can be drawn.
fn proper((low, high): (f64, f64), log: bool) -> bool {
    low.is_finite() && high.is_finite() && low < high && (!log || low > 0.0)
}

/// A range around the values with some space; fractions stay within 0 and 1.
fn around(values: &[f64], log: bool, percent: bool) -> (f64, f64) {
    let low = values.iter().copied().fold(f64::INFINITY, f64::min);
    let high = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    if low > high {
        return if log { (1.0, 10.0) } else { (0.0, 1.0) };
    }
    if log {
        let space = (high / low).powf(0.04).max(1.05);
        let range = (low / space, high * space);
        return if proper(range, true) { range } else { (low.max(1e-300), high.clamp(1e-299, 1e300)) };
    }
    let space = 0.04 * (high - low).max(1e-9 * high.abs()).max(if high == low { 1.0 } else { 0.0 });
    // A range that begins at 0 has its axis there.
    let below = if low == 0.0 { 0.0 } else { low - space };
    let above = if high == 0.0 && low < 0.0 { 0.0 } else { high + space };
    match (below, above) {
        (below, above) if percent && low >= 0.0 && high <= 1.0 => (below.max(0.0), above.min(1.0)),
        range if proper(range, false) => range,
        _ => (0.0, 1.0),
    }
}
