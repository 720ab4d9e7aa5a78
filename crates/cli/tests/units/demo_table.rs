//! Tests of `command/demo_table.rs`.

use march_cli::command::demo_table::*;

/// The conclusion follows the numbers, also if they are not in MARCH's favour.
#[test]
fn the_conclusion_follows_the_numbers() {
    let said = |march: f64, wide: f64, error: f64, without: f64| {
        let model = |name, accuracy| Compared { name, accuracy, error, bytes: 160_000 };
        let others = vec![model("GDN, equal memory", wide), model("GDN", 0.02)];
        Numbers { days: (32, 8), facts: 256, march: model("MARCH", march), others, without }.conclusion()
    };
    let ahead = said(0.97, 0.2, 0.01, 0.02);
    assert!(
        ahead.contains("256 facts in 32 days, 4 times") && ahead.contains("MARCH answers 97 %"),
        "{ahead}"
    );
    assert!(ahead.contains("MARCH is 77 points ahead of GDN, equal memory."), "{ahead}");
    assert!(ahead.contains("MARCH is 95 points ahead of GDN."), "{ahead}");
    assert!(ahead.ends_with("answers 2 %: with this seed it learned to use them."), "{ahead}");
    assert!(said(0.1, 0.3, 0.01, 0.1).contains("MARCH is 20 points behind GDN, equal memory."));
    assert!(said(0.1, 0.3, 0.01, 0.1).ends_with("with this seed it did not learn to use them."));
    assert!(
        said(0.12, 0.1, 0.01, 0.1).contains("GDN, equal memory: no difference beyond two standard errors.")
    );
    assert!(said(0.9, 0.1, f64::NAN, 0.1).contains("GDN: no difference beyond two standard errors."));
}
