//! The axis of a chart: its numbers, where they stand and how they are written.

use super::text::{CHARACTER, width};

/// One axis of a chart.
#[derive(Default)]
pub struct Axis<'a> {
    /// The text next to the axis.
    pub label: &'a str,
    /// The range; if not given, it is computed from the points.
    pub range: Option<(f64, f64)>,
    /// Whether fractions of 1 are shown as percentages.
    pub percent: bool,
    /// Whether numbers are bytes, shown as KiB, MiB, …
    pub bytes: bool,
    /// Whether the axis is logarithmic; its range is above 0.
    pub log: bool,
    /// Whether a logarithmic axis has its ticks at powers of two.
    pub binary: bool,
    /// Names to show instead of numbers, at 0, 1, …
    pub names: Vec<String>,
    /// Whether all names are shown, over several lines or slanted, and not only as many as fit side by side.
    pub all: bool,
}

impl Axis<'_> {
    /// Where a value is in the range, from 0 to 1; values outside are at its ends.
    pub fn place(&self, value: f64, (low, high): (f64, f64)) -> f64 {
        let place = if self.log {
            (value.max(low).ln() - low.ln()) / (high.ln() - low.ln())
        } else {
            (value - low) / (high - low)
        };
        place.clamp(0.0, 1.0)
    }

    /// Tick positions and labels of a horizontal axis `room` wide; if there are many names, only as many as fit.
    pub fn across(&self, range: (f64, f64), room: f64) -> Vec<(f64, String)> {
        if self.names.is_empty() {
            let fit = |ticks: &[f64]| {
                let all = ticks.iter().map(|&at| width(&self.tick(at)) + 1.6 * CHARACTER);
                all.fold(0.0, f64::max) * ticks.len() as f64 <= room + 40.0
            };
            return self.ticks(range, &fit).into_iter().map(|at| (at, self.tick(at))).collect();
        }
        let longest = self.names.iter().map(|name| name.chars().count() + 1).max().unwrap_or(1);
        let fit = room / (CHARACTER * longest as f64);
        let every = if self.all { 1 } else { self.names.len().div_ceil((fit as usize).max(1)).max(1) };
        let places = (0..self.names.len()).step_by(every);
        places.map(|i| (i as f64, self.names[i].clone())).collect()
    }

    /// Tick positions of a vertical axis.
    pub fn up(&self, range: (f64, f64)) -> Vec<f64> {
        self.ticks(range, &|ticks| ticks.len() <= 8)
    }

    fn ticks(&self, (low, high): (f64, f64), fit: &dyn Fn(&[f64]) -> bool) -> Vec<f64> {
        if self.log {
            let all = if self.binary { powers(2.0, &[1.0], (low, high)) } else { tens((low, high), fit) };
            return if all.len() < 2 { ticks((low, high)) } else { thinned(&all, fit) };
        }
        let unit = if self.bytes { unit(low.abs().max(high.abs())).0 } else { 1.0 };
        ticks((low / unit, high / unit)).into_iter().map(|tick| tick * unit).collect()
    }

    /// A value as the label of a tick.
    pub fn tick(&self, value: f64) -> String {
        let percent = 100.0 * value;
        match value {
            _ if self.percent && (percent - percent.round()).abs() < 1e-6 => format!("{percent:.0} %"),
            _ if self.percent => format!("{} %", number(percent)),
            _ if self.log && !self.bytes && !self.binary => number(value).replace(".0e", "e"),
            _ => self.value(value),
        }
    }

    /// A value with its unit.
    pub fn value(&self, value: f64) -> String {
        let unit = if self.percent { " %" } else { "" };
        format!("{}{unit}", self.bare(value))
    }

    /// A value without the percent sign.
    pub(super) fn bare(&self, value: f64) -> String {
        match value {
            _ if self.percent => format!("{:.1}", 100.0 * value),
            _ if self.bytes => bytes(value),
            _ if self.binary => thousands_of_two(value),
            _ => number(value),
        }
    }
}

/// Every n-th tick, with the least n for which they fit.
fn thinned(ticks: &[f64], fit: &dyn Fn(&[f64]) -> bool) -> Vec<f64> {
    let every = |n: usize| ticks.iter().copied().step_by(n).collect::<Vec<f64>>();
    (1..=ticks.len()).map(every).find(|some| fit(some)).unwrap_or_default()
}

/// Powers of ten, and twice and five times them if all fit.
fn tens(range: (f64, f64), fit: &dyn Fn(&[f64]) -> bool) -> Vec<f64> {
    let all = powers(10.0, &[1.0, 2.0, 5.0], range);
    let some = powers(10.0, &[1.0], range);
    if fit(&all) || some.len() < 2 { all } else { some }
}

/// The multiples of powers of `base` in the range, ascending.
fn powers(base: f64, multiples: &[f64], (low, high): (f64, f64)) -> Vec<f64> {
    let first = low.log(base).floor() as i32 - 1;
    let last = (high.log(base).ceil() as i32).min(first.saturating_add(400));
    let all = (first..=last).flat_map(|power| multiples.iter().map(move |m| m * base.powi(power)));
    // A power that is an end of the range may be rounded to a number outside of it.
    all.filter(|&tick| tick >= low * (1.0 - 1e-9) && tick <= high * (1.0 + 1e-9)).collect()
}

/// The range from minimum to maximum, widened if they are equal.
pub(super) fn around(values: impl Iterator<Item = f64>) -> (f64, f64) {
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
    (first..=last.min(first.saturating_add(20))).map(|i| i as f64 * step).collect()
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

/// The largest unit of bytes that is not above the size.
fn unit(size: f64) -> (f64, &'static str) {
    let units =
        [(1024f64.powi(4), "TiB"), (1024f64.powi(3), "GiB"), (1024f64.powi(2), "MiB"), (1024.0, "KiB")];
    units.into_iter().find(|&(unit, _)| size >= unit).unwrap_or((1.0, "B"))
}

/// 1536 as 1.5 KiB.
fn bytes(value: f64) -> String {
    let (unit, name) = unit(value.abs());
    let text = format!("{:.1}", value / unit);
    format!("{} {name}", text.strip_suffix(".0").unwrap_or(&text))
}

/// 131072 as 128K; a number that is not a multiple of 1024 is as it is.
fn thousands_of_two(value: f64) -> String {
    let (unit, name) = unit(value.abs());
    if unit > 1.0 && (value / unit).fract() == 0.0 {
        return format!("{}{}", value / unit, name.chars().next().unwrap_or_default());
    }
    number(value)
}
