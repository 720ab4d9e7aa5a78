//! The lines, points and bars of a chart.

use std::fmt::Write;

use super::chart::{Chart, Frame, Line, Shape, finite};
use super::escape;
use super::mark::{mark, whisker};
use super::text::width;

/// Up to this number of points, all of a line are marked; the second is for lines with marks of their own shape.
const MARKED: [usize; 2] = [60, 25];
/// The most points of a line.
const SHOWN: [usize; 2] = [1000, 250];

impl Chart<'_> {
    /// A line, thinned to what is visible; a few points are marked, many only show their value on hover.
    pub(super) fn line(&self, line: &Line<'_>, frame: &Frame<'_>) -> String {
        let count = line.points.len();
        let own = usize::from(line.mark.is_some());
        let every = count.div_ceil(SHOWN[own]).max(1);
        let shown = line.points.iter().enumerate().filter(|(i, _)| i % every == 0 || *i + 1 == count);
        let mut text = format!("<polyline class=\"{}\" points=\"", line.stroke_class());
        let mut marks = String::new();
        for (nth, (i, point)) in shown.filter(|(_, point)| finite(point)).enumerate() {
            let (x, y) = (frame.x(point.0) + line.shift, frame.y(point.1));
            let _ = write!(text, "{x:.1},{y:.1} ");
            let inside = frame.y.0 <= point.1 && point.1 <= frame.y.1;
            // Of many points, some have a mark, and not those at which other lines have theirs.
            let stride = (count / every / 8).max(1);
            let some = line.mark.is_some_and(|series| (nth + series * stride / 8) % stride == stride / 2);
            let visible = inside && (count <= MARKED[own] || line.shape == Shape::Points || some);
            if line.shape != Shape::Plain {
                marks += &self.point(line, i, (x, y), visible, frame);
            }
        }
        if line.shape == Shape::Points { marks } else { text + "\"/>" + &marks }
    }

    /// A point with its mark and interval, and its value on hover.
    fn point(
        &self,
        line: &Line<'_>,
        i: usize,
        (x, y): (f64, f64),
        visible: bool,
        frame: &Frame<'_>,
    ) -> String {
        let (class, said) = (line.class, self.say(line, i));
        let hidden = if visible { "" } else { " hidden" };
        let Some(series) = line.mark else {
            return format!(
                "<circle class=\"{class}{hidden}\" cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"2.6\"><title>{said}</title></circle>"
            );
        };
        let mut svg = format!("<g><title>{said}</title>");
        if let Some(interval) = line.interval(i).filter(|_| visible) {
            let ends = (frame.y(interval.0), frame.y(interval.1));
            svg += &whisker(&format!("whisker {class}"), x, ends, 3.0);
        }
        if visible {
            svg += &mark(series, class, (x, y));
        }
        // A larger target for the pointer.
        let _ = write!(svg, "<circle class=\"hidden\" cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"6\"/></g>");
        svg
    }

    /// The bars of one colour, the `place`-th of `of`, with their errors and values.
    pub(super) fn bars(&self, line: &Line<'_>, (place, of): (usize, usize), frame: &Frame<'_>) -> String {
        let slot = 0.8 * frame.slot();
        let width = slot / of as f64;
        let base = frame.y(if self.y.log { frame.y.0 } else { 0.0 });
        let mut svg = String::new();
        for (i, point) in line.points.iter().enumerate().filter(|(_, point)| finite(point)) {
            let left = frame.x(point.0) - slot / 2.0 + width * place as f64;
            let end = frame.y(point.1);
            let (top, bottom) = (end.min(base), end.max(base));
            let _ = write!(
                svg,
                "<g><title>{}</title>\
                 <rect class=\"{}\" x=\"{:.1}\" y=\"{top:.1}\" width=\"{:.1}\" height=\"{:.1}\"/>",
                self.say(line, i),
                line.class,
                left + 0.5,
                (width - 1.0).max(0.5),
                (bottom - top).max(0.5)
            );
            let middle = left + width / 2.0;
            let mut above = top;
            if let Some((low, high)) = line.interval(i).filter(|interval| interval.1 > interval.0) {
                let ends = (frame.y(low), frame.y(high));
                above = above.min(ends.1);
                if self.x.all {
                    // Some colours of bars are as dark as the interval.
                    svg += &whisker("halo", middle, ends, 2.5);
                }
                svg += &whisker("error", middle, ends, 2.5);
            }
            if let Some(series) = line.mark.filter(|_| of > 1 && width >= 11.0 && bottom - top >= 16.0) {
                svg += &mark(series, "on", (middle, bottom - 8.0));
            }
            if let Some(text) = self.above(point.1, width) {
                let y = above - 3.0;
                let _ = write!(
                    svg,
                    "<text class=\"value\" text-anchor=\"middle\" x=\"{middle:.1}\" y=\"{y:.1}\">{text}</text>"
                );
            }
            svg += "</g>";
        }
        svg
    }

    /// The value above a bar, if it fits.
    fn above(&self, value: f64, room: f64) -> Option<String> {
        if self.y.percent {
            return (room >= 20.0).then(|| format!("{:.0}", 100.0 * value));
        }
        let text = self.y.value(value);
        (self.x.all && 0.88 * width(&text) <= room).then_some(text)
    }

    /// The text that describes a point.
    fn say(&self, line: &Line<'_>, i: usize) -> String {
        let (x, y) = line.points[i];
        let x = self.x.names.get(x.max(0.0) as usize).cloned().unwrap_or_else(|| self.x.value(x));
        let name = if line.name.is_empty() { String::new() } else { format!("{}, ", line.name) };
        let mut said = format!("{name}{x}: {}", self.y.value(y));
        if let Some(error) = line.errors.get(i).filter(|error| error.is_finite()) {
            let _ = write!(said, " ± {}", self.y.value(*error));
        } else if let Some((low, high)) = line.interval(i) {
            let _ = write!(said, " ({}–{})", self.y.bare(low), self.y.bare(high));
        }
        escape(&said)
    }
}

impl Line<'_> {
    /// The ends of a point's interval.
    fn interval(&self, i: usize) -> Option<(f64, f64)> {
        let y = self.points.get(i)?.1;
        let around = self.errors.get(i).map(|error| (y - error, y + error));
        around.or_else(|| self.between.get(i).copied()).filter(finite)
    }
}
