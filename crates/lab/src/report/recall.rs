//! Recall by memory size: one point per policy, one line per setting that was varied.

use super::axis::Axis;
use super::chart::{Chart, Line, Shape};
use super::mark::CLASSES;
use super::picture::picture;

/// The point of one policy.
#[derive(Clone, Debug)]
pub struct Point {
    /// The setting that was varied, which names the line in the legend.
    pub varied: String,
    /// Bytes kept after a sequence.
    pub bytes: usize,
    /// The fraction of correct answers.
    pub accuracy: f64,
}

/// The most lines.
const LINES: usize = 4;

/// Renders a standalone SVG. At most four settings have a line; the points of others are omitted.
pub fn recall_by_bytes(title: &str, line: &str, points: &[Point]) -> String {
    let mut names: Vec<&str> = Vec::new();
    for point in points {
        if !names.contains(&point.varied.as_str()) && names.len() < LINES {
            names.push(&point.varied);
        }
    }
    let of = |name: &&str| {
        let own = points.iter().filter(|point| point.varied == **name);
        let mut own: Vec<(f64, f64)> =
            own.map(|point| (point.bytes as f64 / 1024.0, point.accuracy)).collect();
        own.sort_by(|a, b| a.0.total_cmp(&b.0));
        own
    };
    let lines: Vec<Vec<(f64, f64)>> = names.iter().map(of).collect();
    let most = points.iter().map(|point| point.bytes).max().unwrap_or(1024) as f64 / 1024.0;
    let chart = Chart {
        title: "Right answers by memory of a sequence",
        lines: names
            .iter()
            .zip(&lines)
            .zip(CLASSES)
            .map(|((name, points), class)| Line {
                name,
                points,
                class,
                shape: Shape::Marked,
                ..Line::default()
            })
            .collect(),
        x: Axis { label: "KiB", range: Some((0.0, 1.05 * most)), ..Axis::default() },
        y: Axis { label: "right answers", range: Some((0.0, 1.0)), percent: true, ..Axis::default() },
        ..Chart::default()
    };
    picture(title, line, &[chart])
}
