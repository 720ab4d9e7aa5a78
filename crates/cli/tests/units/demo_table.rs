//! Tests of `command/demo_table.rs`.

use march_cli::command::demo_table::*;

/// The conclusion follows the numbers, also if they are not in MARCH's favour.
#[test]
fn the_conclusion_follows_the_numbers() {
    let said = |march: f64, wide: f64, error: f64| {
        let longest = [(march, error), (wide, error)];
        let memory = [240_000, 80_000];
        Numbers { facts: (128, 32), longest, memory, memory_most: [84_000, 80_000] }.conclusion()
    };
    let ahead = said(0.87, 0.1, 0.01);
    assert!(ahead.contains("128 facts, 4 times") && ahead.contains("MARCH answers 87 %"), "{ahead}");
    assert!(ahead.ends_with("MARCH is 77 points ahead."), "{ahead}");
    assert!(said(0.1, 0.3, 0.01).ends_with("MARCH is 20 points behind."));
    assert!(said(0.12, 0.1, 0.01).ends_with("no difference beyond two standard errors."));
    assert!(said(0.9, 0.1, f64::NAN).ends_with("no difference beyond two standard errors."));
}
