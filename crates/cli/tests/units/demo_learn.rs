//! Tests of `command/demo_learn.rs`.

use march_cli::command::demo_learn::*;

fn steps(total: u64) -> Vec<u64> {
    stages("march", 0, total, false).unwrap().iter().map(|stage| stage.train.steps).collect()
}

/// The demo trains what `march reproduce capacity` trains.
#[test]
fn stages_are_those_of_the_experiment() {
    use march_lab::reproduce::{Experiment, Plan, Scale, Size};
    let plan = Plan::new(Experiment::open("capacity").unwrap(), Scale::new(Size::Laptop)).unwrap();
    for (name, arm) in [("march", "MARCH"), ("gdn-wide", "GDN, equal memory"), ("gdn", "GDN")] {
        let mut own = stages(name, 3, STEPS, false).unwrap();
        let entry = plan.entries.iter().find(|entry| entry.arm == arm).unwrap();
        let job = plan.job(entry, own[0].train.learning_rate, 3).unwrap();
        for (own, other) in own.iter_mut().zip(&job.stages) {
            // What does not determine the weights.
            own.train.validate_every = other.train.validate_every;
            own.train.keep = other.train.keep;
            own.train.prompts.clone_from(&other.train.prompts);
            assert_eq!(own.data.task, other.data.task);
            assert_eq!(own.data.sequence_length, other.data.sequence_length);
            own.data = other.data.clone();
            assert_eq!(own.to_toml(), other.to_toml(), "{name}");
        }
    }
}

#[test]
fn steps_are_divided_among_stages() {
    assert_eq!(steps(STEPS), [2000, 3500, 2500]);
    assert_eq!(steps(80), [20, 35, 25]);
    assert_eq!(steps(1), [1, 1, 1]);
    assert_eq!(steps(u64::MAX).iter().map(|&steps| u128::from(steps)).sum::<u128>(), u128::from(u64::MAX));
}
