//! The page of measured times: which of the paper's claims hold.

use march_lab::report::efficiency::page;
use march_lab::reproduce::efficiency::{Kind, Timing};

/// Made-up speeds: tokens per second by arm, the same for all kinds and lengths.
pub fn timings(speeds: &[(&str, f64)]) -> Vec<Timing> {
    let mut all = Vec::new();
    for length in [32_768, 131_072] {
        for kind in [Kind::Core, Kind::EndToEnd] {
            all.extend(speeds.iter().map(|&(arm, tokens_per_second)| Timing {
                arm: arm.into(),
                kind,
                length,
                seconds: length as f64 / tokens_per_second,
                tokens_per_second,
                flop: 1e9,
                repeats: 1,
            }));
        }
    }
    all
}

fn said(timings: &[Timing]) -> (Vec<String>, Vec<String>) {
    let page = page(timings, Vec::new(), &[]);
    let claims = &page.sections[1].tables[0];
    let cells = claims.rows.iter().map(|row| row[3].text.clone()).collect();
    (page.summary[2..].to_vec(), cells)
}

#[test]
fn claims_that_hold() {
    let (summary, cells) =
        said(&timings(&[("attention", 10.0), ("MARCH dense", 20.0), ("MARCH top-4", 200.0)]));
    assert_eq!(cells, ["holds"; 4]);
    assert_eq!(summary.len(), 1, "{summary:?}");
    assert!(summary[0].starts_with("**4 of the paper's 4 claims hold in this run**"), "{summary:?}");
    assert!(summary[0].contains("(ratio 10.00, at least 8 wanted)"), "{summary:?}");
}

#[test]
fn claims_that_do_not_hold_are_reported_as_such() {
    // Top-4 is only four times as fast as dense, and dense slower than attention.
    let (summary, cells) =
        said(&timings(&[("attention", 30.0), ("MARCH dense", 20.0), ("MARCH top-4", 80.0)]));
    assert_eq!(cells, ["does not hold", "does not hold", "holds", "holds"]);
    assert_eq!(summary.len(), 2, "{summary:?}");
    assert!(summary[0].starts_with("**2 of the paper's 4 claims hold in this run**"), "{summary:?}");
    assert!(summary[1].starts_with("**2 of the paper's 4 claims do not hold in this run**"), "{summary:?}");
    assert!(summary[1].contains("at 32K tokens (ratio 0.67, at least 1 wanted)"), "{summary:?}");
    assert!(summary[1].contains("at 128K (ratio 4.00, at least 8 wanted)"), "{summary:?}");
}

#[test]
fn what_was_not_measured_is_not_judged() {
    let mut some = timings(&[("attention", 10.0), ("MARCH dense", 20.0), ("MARCH top-4", 200.0)]);
    // A skipped measurement has a predicted time, which is no measurement.
    some.iter_mut().filter(|timing| timing.arm == "attention").for_each(|timing| timing.repeats = 0);
    let (summary, cells) = said(&some);
    assert_eq!(cells, ["not measured", "holds", "holds", "not measured"]);
    assert!(summary[1].starts_with("**2 of the paper's 4 claims were not measured**"), "{summary:?}");
    let (summary, _) = said(&[]);
    assert!(summary.len() == 1 && summary[0].contains("4 claims were not measured"), "{summary:?}");
}
