use march_lm::train::{Recompute, Schedule, TrainConfig};

#[test]
fn rates_rise_stay_and_fall() {
    let config =
        TrainConfig { steps: 100, learning_rate: 1.0, warmup: 0.1, decay: 0.2, ..TrainConfig::default() };
    assert!((config.rate(0) - 0.1).abs() < 1e-12 && (config.rate(9) - 1.0).abs() < 1e-12);
    assert!((config.rate(50) - 1.0).abs() < 1e-12 && (config.rate(80) - 1.0).abs() < 1e-12);
    assert!((config.rate(90) - 0.5).abs() < 1e-12 && config.rate(99) > 0.0 && config.rate(99) < 0.06);
    let cosine = TrainConfig { schedule: Schedule::Cosine, final_rate: 0.1, ..config };
    assert!((cosine.rate(55) - 0.55).abs() < 1e-12 && cosine.rate(99) > 0.1);
}

#[test]
fn what_cannot_be_is_refused() {
    let good = TrainConfig::default();
    assert!(good.check(2048).is_ok());
    let bad = |config: TrainConfig| config.check(2048).unwrap_err().0;
    assert_eq!(bad(TrainConfig { steps: 0, ..good.clone() }), "steps");
    assert_eq!(bad(TrainConfig { steps: 1 << 41, ..good.clone() }), "steps");
    assert_eq!(bad(TrainConfig { keep: 0, ..good.clone() }), "keep");
    assert_eq!(bad(TrainConfig { micro_batch: 1 << 40, ..good.clone() }), "micro_batch");
    let error = TrainConfig { tokens_per_step: 2048 << 26, ..good.clone() }.check(2048).unwrap_err();
    assert_eq!(error, ("tokens_per_step", "is 137438953472; it must be from 1 to 4294967296".into()));
    assert_eq!(bad(TrainConfig { tokens_per_step: 1000, ..good.clone() }), "tokens_per_step");
    assert_eq!(bad(TrainConfig { decay: 0.99, ..good.clone() }), "decay");
    assert_eq!(bad(TrainConfig { betas: [0.9, 1.0], ..good.clone() }), "betas");
    assert_eq!(bad(TrainConfig { routing_rate: 0.0, ..good.clone() }), "routing_rate");
    assert_eq!(bad(TrainConfig { learning_rate: f64::NAN, ..good }), "learning_rate");
}

#[test]
fn recompute_follows_memory() {
    assert!(Recompute::Auto.resolve(71, Some(100)) && !Recompute::Auto.resolve(70, Some(100)));
    assert!(!Recompute::Auto.resolve(usize::MAX, None));
    assert!(Recompute::On.resolve(1, Some(100)) && !Recompute::Off.resolve(100, Some(100)));
}
