//! Tests of `display/mod.rs`.

use march_cli::display::*;

#[test]
fn small_numbers_keep_their_digits() {
    let shown = [1880.04, 19290.1, 99.96, 99.94, 12.34, 2.5, 0.7586, 0.0123, 2.01e-5].map(figure);
    assert_eq!(shown, ["1,880.0", "19,290.1", "100.0", "99.9", "12.3", "2.50", "0.759", "0.0123", "2.01e-5"]);
    let shown = [1.088e14, 6.8007e12, 4.25e11, 1.997e7, 999.96, 0.5].map(flops);
    let expected =
        ["108.8 TFLOP/s", "6.80 TFLOP/s", "425.0 GFLOP/s", "20.0 MFLOP/s", "1.00 kFLOP/s", "0.500 FLOP/s"];
    assert_eq!(shown, expected);
}

#[test]
fn numbers_are_readable() {
    assert_eq!(thousands(0), "0");
    assert_eq!(thousands(999), "999");
    assert_eq!(thousands(692_912_640), "692,912,640");
    assert_eq!(bytes(0), "0 B");
    assert_eq!(bytes(999), "999 B");
    assert_eq!(bytes(1023), "1.00 KiB");
    assert_eq!(bytes(1536), "1.50 KiB");
    assert_eq!(bytes(38_654_705_664), "36.0 GiB");
}
