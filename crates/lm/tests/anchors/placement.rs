use march_lm::anchors::{Candidate, Placement, Timeline, movement};

#[test]
fn texts_and_back() {
    for (text, want) in [("periodic", Placement::Periodic), ("adaptive:64", Placement::Adaptive(64))] {
        assert_eq!(text.parse(), Ok(want));
        assert_eq!(want.to_string(), text);
    }
    for text in ["adaptive", "adaptive:0", "adaptive:x", "periodic:3", "random"] {
        assert!(text.parse::<Placement>().unwrap_err().contains("`adaptive:MIN`"));
    }
}

#[test]
fn movement_is_a_share() {
    let a: Vec<f32> = (0..19).map(|i| (i as f32 * 0.7).sin()).collect();
    let b: Vec<f32> = (0..19).map(|i| (i as f32 * 1.3).cos()).collect();
    let norm = |x: &[f32]| x.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>().sqrt();
    let difference: Vec<f32> = a.iter().zip(&b).map(|(a, b)| a - b).collect();
    let want = norm(&difference) / (norm(&a) + norm(&b));
    assert!((movement(&a, Some(&b)) - want).abs() < 1e-6);
    assert_eq!(movement(&a, Some(&a)), 0.0);
    assert_eq!(movement(&[0.0; 3], Some(&[0.0; 3])), 0.0);
    assert_eq!(movement(&a, None), 1.0);
}

/// The count stays near the target whatever the state does.
#[test]
fn the_count_is_held() {
    let noise = |t: usize| ((t as f64 * 12.9898).sin() * 43758.5453).fract().abs();
    let kinds: [(&str, &dyn Fn(usize, usize) -> f64); 5] = [
        ("grows", &|_, since| 1.0 - (-(since as f64) / 300.0).exp()),
        ("is still", &|_, _| 0.0),
        ("jumps", &|_, _| 1.0),
        ("is noise", &|t, _| noise(t)),
        ("changes", &|t, since| {
            (since as f64 / 4000.0).min(1.0) * if t / 16384 % 2 == 0 { 1.0 } else { 1e-3 }
        }),
    ];
    for (name, kind) in kinds {
        for (interval, min) in [(512, 16), (512, 512), (100, 7), (2048, 64), (64, 1)] {
            let (mut timeline, mut last) = (Timeline::default(), 0);
            for position in Placement::Adaptive(min).candidates(0, 65536) {
                let movement = kind(position, position - last);
                if (Candidate { position, movement }).is_placed(interval, &mut timeline) {
                    timeline.complete += 1;
                    last = position;
                }
                let off = (timeline.complete as f64 - position as f64 / interval as f64).abs();
                assert!(off <= 9.0 + min as f64 / interval as f64, "{name}: {off} off at {position}");
            }
            let (count, wanted) = (timeline.complete as f64, 65536.0 / interval as f64);
            assert!((count / wanted - 1.0).abs() < 0.1, "{name}, {interval}, {min}: {count} of {wanted}");
        }
    }
}
