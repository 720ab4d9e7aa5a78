//! The numbers of an axis.

use march_lab::report::axis::Axis;

#[test]
fn ticks_are_round() {
    let axis = Axis::default();
    assert_eq!(axis.up((0.0, 10.0)), [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]);
    assert_eq!([0.5, 120.0, 4e-4].map(|value| axis.value(value)), ["0.5", "120", "4.0e-4"]);
}

#[test]
fn logarithmic_ticks_are_powers_that_fit() {
    let said = |axis: &Axis<'_>, range, room| {
        axis.across(range, room).into_iter().map(|tick| tick.1).collect::<Vec<_>>()
    };
    let two = Axis { log: true, binary: true, ..Axis::default() };
    assert_eq!(said(&two, (8.0, 1024.0), 360.0), ["8", "16", "32", "64", "128", "256", "512", "1K"]);
    assert_eq!(said(&two, (900.0, 140_000.0), 120.0), ["1K", "4K", "16K", "64K"]);
    let bytes = Axis { log: true, binary: true, bytes: true, ..Axis::default() };
    assert_eq!(said(&bytes, (8192.0, 1048576.0), 200.0), ["8 KiB", "32 KiB", "128 KiB", "512 KiB"]);
    let ten = Axis { log: true, ..Axis::default() };
    assert_eq!(said(&ten, (0.9, 21.0), 360.0), ["1", "2", "5", "10", "20"]);
    assert_eq!(said(&ten, (1e-4, 1e6), 900.0)[..2], ["1e-4", "0.001"]);
    assert_eq!(said(&ten, (3.1, 3.9), 360.0), ["3.2", "3.4", "3.6", "3.8"]);
    assert_eq!(ten.up((1.0, 1e8)).len(), 5);
    let percent = Axis { percent: true, ..Axis::default() };
    assert_eq!(percent.tick(0.985), "98.5 %");
    assert_eq!((ten.place(10.0, (1.0, 100.0)), ten.place(-1.0, (1.0, 100.0))), (0.5, 0.0));
}

#[test]
fn bytes_have_units() {
    let axis = Axis { bytes: true, ..Axis::default() };
    let said = [0.0, 512.0, 1536.0, 1048576.0].map(|value| axis.value(value));
    assert_eq!(said, ["0 B", "512 B", "1.5 KiB", "1 MiB"]);
    let said: Vec<String> = axis.up((0.0, 5120.0)).into_iter().map(|at| axis.tick(at)).collect();
    assert_eq!(said, ["0 B", "1 KiB", "2 KiB", "3 KiB", "4 KiB", "5 KiB"]);
    let axis = Axis { binary: true, ..Axis::default() };
    let said = [1000.0, 1024.0, 1536.0, 2097152.0].map(|value| axis.value(value));
    assert_eq!(said, ["1000", "1K", "1536", "2M"]);
}
