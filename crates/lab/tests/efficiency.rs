//! What a plan measures, skips and refuses, and how the lines of the peers are read.

use std::ops::ControlFlow;

use march_lab::reproduce::efficiency::{Arm, CoreShape, EfficiencyPlan, Kind, Timing, composed};

fn tiny() -> EfficiencyPlan {
    EfficiencyPlan { lengths: vec![128, 256], core_seconds: 0.0, threads: 1, ..EfficiencyPlan::quick() }
}

#[test]
fn a_quick_plan_measures_every_arm() {
    let plan = tiny();
    let mut watched = Vec::new();
    let mut watch = |timing: &Timing| {
        watched.push(timing.clone());
        ControlFlow::Continue(())
    };
    let all = plan.run(Vec::new(), &mut watch).unwrap();
    assert_eq!(all, watched);
    let found: Vec<_> = all.iter().map(|t| (t.length, t.kind, t.arm.as_str())).collect();
    let mut expected = Vec::new();
    for length in [128, 256] {
        for kind in [Kind::Core, Kind::EndToEnd] {
            expected.extend(Arm::ALL.map(|arm| (length, kind, arm.name())));
        }
    }
    assert_eq!(found, expected);
    for timing in &all {
        let numbers = [timing.seconds, timing.tokens_per_second, timing.flop];
        assert!(numbers.iter().all(|n| n.is_finite() && *n > 0.0) && !timing.is_skipped(), "{timing:?}");
    }
    let text = serde_json::to_string(&all).unwrap();
    assert_eq!(serde_json::from_str::<Vec<Timing>>(&text).unwrap(), all);
    assert!(plan.estimate_seconds() > 0.0 && plan.estimate_peer_seconds() > 0.0);
}

/// A run that was stopped goes on where it was, and steps of all layers follow from the parts.
#[test]
fn steps_are_composed_of_parts_that_resume() {
    let plan = EfficiencyPlan { threads: 1, core_seconds: 0.0, ..EfficiencyPlan::quick_shapes() };
    let mut count = 0;
    let mut stop = |_: &Timing| {
        count += 1;
        if count == 5 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    };
    let some = plan.run(Vec::new(), &mut stop).unwrap();
    assert_eq!(some.len(), 5);
    let all = plan.run(some.clone(), &mut |_| ControlFlow::Continue(())).unwrap();
    assert_eq!(all[..5], some[..], "what is known is not measured again");
    assert_eq!(all.len(), 4 * (2 + plan.lengths.len()));
    assert_eq!(all.iter().filter(|timing| timing.kind == Kind::TwoLayers).count(), 4);

    // Made-up times per token: 3 outside of layers, a layer of 10 with a core of 1 at 256 tokens and of 8 at 1,024.
    let timing = |kind, length: usize, seconds: f64| Timing {
        arm: "GDN".into(),
        kind,
        length,
        seconds: seconds * length as f64,
        tokens_per_second: 1.0 / seconds,
        flop: 1.0,
        repeats: 1,
    };
    let parts = [
        timing(Kind::OneLayer, 256, 13.0),
        timing(Kind::TwoLayers, 256, 23.0),
        timing(Kind::Core, 256, 1.0),
        timing(Kind::Core, 1024, 8.0),
    ];
    let step = composed(&parts, "GDN", 1024).unwrap();
    assert!((step - (3.0 + 21.0 * 17.0)).abs() < 1e-9, "{step}");
    assert_eq!(composed(&parts, "GDN", 512), None);
    assert_eq!(composed(&parts[1..], "GDN", 1024), None);
}

#[test]
fn what_would_take_too_long_is_skipped() {
    let plan = EfficiencyPlan { limit_seconds: 0.0, ..tiny() };
    let all = plan.run(Vec::new(), &mut |_| ControlFlow::Continue(())).unwrap();
    for timing in &all {
        // The first length is measured: nothing predicts it.
        assert_eq!(timing.is_skipped(), timing.length > 128, "{timing:?}");
        assert!(timing.seconds > 0.0);
    }
    let core = |length| all.iter().find(|t| t.length == length && t.kind == Kind::Core).unwrap();
    let ratio = core(256).seconds / core(128).seconds;
    assert!((ratio - 4.0).abs() < 1e-9, "attention is quadratic, not {ratio}");
}

#[test]
fn breaking_keeps_what_was_measured() {
    let plan = EfficiencyPlan { arms: vec![Arm::TopFour, Arm::Gdn], end_to_end: false, ..tiny() };
    let all = plan.run(Vec::new(), &mut |t| {
        if t.arm == "GDN" { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    let arms: Vec<_> = all.unwrap().into_iter().map(|t| t.arm).collect();
    assert_eq!(arms, ["MARCH top-4", "GDN"]);
}

#[test]
fn plans_that_cannot_be_measured_are_refused() {
    let refused = |plan: EfficiencyPlan| {
        plan.run(Vec::new(), &mut |_| ControlFlow::Continue(())).map(drop).unwrap_err().to_string()
    };
    assert!(refused(EfficiencyPlan { lengths: vec![], ..tiny() }).contains("no sequence length"));
    assert!(refused(EfficiencyPlan { lengths: vec![100], ..tiny() }).contains("multiple of 64"));
    assert!(refused(EfficiencyPlan { lengths: vec![128, 64], ..tiny() }).contains("ascend"));
    assert!(refused(EfficiencyPlan { limit_seconds: f64::NAN, ..tiny() }).contains("limit_seconds"));
    let core = CoreShape { interval: 0, ..tiny().core };
    assert!(refused(EfficiencyPlan { core, ..tiny() }).contains("`interval`"));
}

#[test]
fn lines_of_the_peers_are_read() {
    let plan = tiny();
    let timing = plan.peer_timing(r#"{"arm": "GDN", "length": 128, "seconds": 0.5, "repeats": 3}"#).unwrap();
    assert_eq!((timing.arm.as_str(), timing.kind, timing.repeats), ("PyTorch GDN", Kind::Core, 3));
    assert_eq!(timing.tokens_per_second, 256.0);
    assert_eq!(timing.flop, plan.flop(Arm::Gdn, Kind::Core, 128).unwrap());
    for line in [
        "Traceback (most recent call last):",
        r#"{"arm": "RNN", "length": 128, "seconds": 0.5, "repeats": 3}"#,
        r#"{"arm": "GDN", "length": 128, "seconds": 0, "repeats": 3}"#,
    ] {
        assert!(plan.peer_timing(line).unwrap_err().to_string().contains("PyTorch printed"), "{line}");
    }
}

/// The shell stands in for Python: it ignores the arguments after `-s` and runs what it reads.
#[cfg(unix)]
#[test]
fn a_peer_that_fails_says_why() {
    let folder = tempfile::tempdir().unwrap();
    let python = folder.path().join("python");
    std::fs::write(&python, "#!/bin/sh\nexec sh -s\n").unwrap();
    let permissions = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(&python, permissions).unwrap();
    let python = python.to_str().unwrap();
    let line = |arm: &str| format!(r#"echo '{{"arm": "{arm}", "length": 128, "seconds": 1, "repeats": 1}}'"#);
    let script = format!("{}\n{}\n", line("attention"), line("GDN"));
    let go = &mut |_: &Timing| ControlFlow::Continue(());
    let arms = |all: Vec<Timing>| all.into_iter().map(|t| t.arm).collect::<Vec<_>>();
    let all = tiny().peers_with(python, &script, go).unwrap();
    assert_eq!(arms(all), ["PyTorch attention", "PyTorch GDN"]);
    let all = tiny().peers_with(python, &script, &mut |_| ControlFlow::Break(())).unwrap();
    assert_eq!(arms(all), ["PyTorch attention"]);
    let error = tiny().peers_with(python, "echo 'out of memory' >&2; exit 3", go).unwrap_err().to_string();
    assert!(error.contains("out of memory") && error.contains('3'), "{error}");
}
