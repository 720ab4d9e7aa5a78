//! Progress displays, and number formats.

pub mod dashboard;
pub mod lines;
pub mod models;
pub mod out;
pub mod progress;
pub mod screen;
pub mod view;

pub use dashboard::Dashboard;
pub use models::ModelsProgress;
pub use progress::{Progress, left};
pub use view::RunInfo;

/// 1234567 as 1,234,567.
pub fn thousands(number: usize) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// A number of bytes with three digits and a unit: 1.23 GiB.
pub fn bytes(count: usize) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let (mut value, mut unit) = (count as f64, 0);
    while value >= 1000.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    let digits = if unit == 0 || value >= 100.0 {
        0
    } else if value >= 10.0 {
        1
    } else {
        2
    };
    format!("{value:.digits$} {}", UNITS[unit])
}

/// A number above 0 with at least three significant digits: 1,880.0, 12.3, 0.759, 2.01e-5.
pub fn figure(number: f64) -> String {
    if number >= 99.95 {
        let tenths = (10.0 * number).round() as usize;
        return format!("{}.{}", thousands(tenths / 10), tenths % 10);
    }
    match number {
        9.995.. => format!("{number:.1}"),
        0.9995.. => format!("{number:.2}"),
        0.09995.. => format!("{number:.3}"),
        0.009995.. => format!("{number:.4}"),
        _ => format!("{number:.2e}"),
    }
}

/// Operations per second, with a unit: 108.8 TFLOP/s.
pub fn flops(rate: f64) -> String {
    const UNITS: [&str; 6] = ["", "k", "M", "G", "T", "P"];
    let (mut value, mut unit) = (rate, 0);
    while value >= 999.95 && unit + 1 < UNITS.len() {
        value /= 1000.0;
        unit += 1;
    }
    format!("{} {}FLOP/s", figure(value), UNITS[unit])
}
