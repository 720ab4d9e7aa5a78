//! Tests of `command/doctor.rs`.

use march_cli::command::doctor::*;

/// The result of [`steady`] for peaks in this order, and how many of them it took.
fn of(peaks: &[f64]) -> (f64, f64, usize) {
    let mut taken = 0;
    let measure = || {
        taken += 1;
        [peaks[taken - 1], 10.0, 20.0]
    };
    let (limits, scatter) = steady(measure, |limits| limits.each_mut());
    (limits[0], scatter, taken)
}

#[test]
fn scattered_measurements_are_repeated() {
    let (peak, scatter, taken) = of(&[100.0, 98.0]);
    assert!(peak == 100.0 && scatter < STEADY && taken == 2);
    let (peak, scatter, taken) = of(&[60.0, 100.0, 97.0]);
    assert!(peak == 100.0 && scatter < STEADY && taken == 3);
    let (peak, scatter, taken) = of(&[60.0, 100.0, 50.0, 90.0, 45.0]);
    assert!(peak == 100.0 && (scatter - 0.5).abs() < 1e-9 && taken == MOST_MEASUREMENTS);
}
