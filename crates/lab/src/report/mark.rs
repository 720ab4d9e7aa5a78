//! The marks of points: a shape for each series, so that colour is not the only difference.

use std::fmt::Write;

/// The style classes of series, in the order of their marks.
pub const CLASSES: [&str; 8] = ["main", "other", "third", "fourth", "fifth", "sixth", "seventh", "eighth"];

/// Outlines of the marks around the origin, and whether they are filled, open, or only strokes.
const MARKS: [(&str, &str); 8] = [
    ("M-3.4 0A3.4 3.4 0 1 0 3.4 0A3.4 3.4 0 1 0 -3.4 0Z", "full"),
    ("M-3 -3H3V3H-3Z", "full"),
    ("M0 -4L3.9 3H-3.9Z", "full"),
    ("M0 -4.4L4.4 0L0 4.4L-4.4 0Z", "full"),
    ("M-3.2 0A3.2 3.2 0 1 0 3.2 0A3.2 3.2 0 1 0 -3.2 0Z", "open"),
    ("M-3.2 -3.2L3.2 3.2M-3.2 3.2L3.2 -3.2", "stroke"),
    ("M0 4L3.9 -3H-3.9Z", "open"),
    ("M-4 0H4M0 -4V4", "stroke"),
];

/// The class of the `series`-th series.
pub fn class(series: usize) -> &'static str {
    CLASSES[series % CLASSES.len()]
}

/// The mark of the `series`-th series at (x, y). A series with a repeated colour has another mark.
pub fn mark(series: usize, class: &str, (x, y): (f64, f64)) -> String {
    let (outline, kind) = MARKS[(series + series / CLASSES.len()) % MARKS.len()];
    format!("<path class=\"mark {kind} {class}\" transform=\"translate({x:.1} {y:.1})\" d=\"{outline}\"/>")
}

/// A vertical line with a foot and a head, `half` to either side.
pub(super) fn whisker(class: &str, x: f64, (low, high): (f64, f64), half: f64) -> String {
    let (left, right) = (x - half, x + half);
    let mut path = format!("<path class=\"{class}\" d=\"M{x:.1} {low:.1}V{high:.1}");
    for y in [low, high] {
        let _ = write!(path, "M{left:.1} {y:.1}H{right:.1}");
    }
    path + "\"/>"
}
