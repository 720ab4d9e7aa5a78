//! The files of `configs/reproduce/`, the plans made of them, and means over seeds.

use std::collections::BTreeSet;
use std::path::Path;

use march_lab::corpus;
use march_lab::reproduce::{Corpus, EFFICIENCY, Experiment, Job, Mean, Plan, Scale, Size, names};
use march_lm::model::Model;

#[test]
fn every_file_is_an_experiment() {
    for file in std::fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("configs/reproduce")).unwrap() {
        let path = file.unwrap().path();
        let name = path.file_stem().unwrap().to_str().unwrap();
        assert!(name == "common" || Experiment::open(name).is_ok(), "{name}");
    }
}

/// The plan of an experiment; a corpus that it needs is the built-in book, with a vocabulary of 320.
fn plan(name: &str, size: Size) -> Plan {
    let (experiment, mut scale) = (Experiment::open(name).unwrap(), Scale::new(size));
    let folder = tempfile::tempdir().unwrap();
    if experiment.uses_corpus() {
        corpus::build_tiny(folder.path()).unwrap();
        scale.corpus = Some(Corpus::open(folder.path()).unwrap());
    }
    Plan::new(experiment, scale).unwrap()
}

/// Parameters of a model with the vocabulary that its experiment has. That of a corpus is 4,096.
fn parameters(plan: &Plan, job: &Job) -> usize {
    let model = &job.stages.last().unwrap().model;
    let more = if plan.experiment.uses_corpus() { 4096 - model.vocab_size } else { 0 };
    Model::new(model).parameter_count() + more * model.hidden_size
}

/// Every experiment can be planned, and its arms have the same number of parameters within 2 %, but for those that
/// begin as another.
#[test]
fn arms_have_equally_many_parameters() {
    for name in names().filter(|name| *name != EFFICIENCY) {
        let plan = plan(name, Size::Laptop);
        for course in &plan.experiment.courses {
            let counts: Vec<(String, usize)> = plan
                .entries
                .iter()
                .filter(|entry| {
                    entry.course == *course && plan.experiment.arm[&entry.arm].begins_as.is_none()
                })
                .map(|entry| {
                    let job = plan.job(entry, entry.rates[0], 1).unwrap();
                    (entry.arm.clone(), parameters(&plan, &job))
                })
                .collect();
            let most = counts.iter().map(|count| count.1).max().unwrap() as f64;
            let least = counts.iter().map(|count| count.1).min().unwrap() as f64;
            assert!(plan.experiment.free_parameters || most / least < 1.021, "{name}, {course}: {counts:?}");
        }
    }
}

#[test]
fn runs_are_identified_by_what_determines_them() {
    let plan = plan("capacity", Size::Laptop);
    let entry = |arm: &str| plan.entries.iter().find(|entry| entry.arm == arm).unwrap().clone();
    let job = |arm: &str, rate, seed| plan.job(&entry(arm), rate, seed).unwrap();
    let folder = |job: &Job, stage| job.folder(Path::new("runs"), stage);
    let march = job("MARCH", 1e-3, 1);
    assert_eq!(folder(&march, 2), folder(&job("MARCH", 1e-3, 1), 2));
    for other in [job("MARCH", 2e-3, 1), job("MARCH", 1e-3, 2), job("MARCH, top-2", 1e-3, 1)] {
        assert_ne!(folder(&march, 2), folder(&other, 2));
    }
    // The seeds that choose a rate are none of those of the results.
    let sweep = plan.sweep(&plan.entries).unwrap();
    let results = plan.results(&entry("MARCH"), 1e-3).unwrap();
    assert!(!sweep.is_empty() && results.len() == 5);
    assert!(sweep.iter().all(|job| results.iter().all(|other| other.seed != job.seed)));
}

/// A model that continues another's first stage shares that stage's run.
#[test]
fn upcycled_models_share_their_first_stage() {
    let plan = plan("upcycle", Size::Laptop);
    let job = |arm: &str| {
        let entry = plan.entries.iter().find(|entry| entry.arm == arm).unwrap();
        plan.job(entry, 1e-3, 1).unwrap()
    };
    let (gdn, upcycled) = (job("GDN"), job("GDN continued as MARCH"));
    let folder = |job: &Job, stage| job.folder(Path::new("runs"), stage);
    assert_eq!(folder(&gdn, 0), folder(&upcycled, 0));
    assert_ne!(folder(&gdn, 1), folder(&upcycled, 1));
    assert_eq!(gdn.tokens(), upcycled.tokens());
}

/// The GDN that goes on is the trained one of its seed, whatever it goes on as; a shared run counts once.
#[test]
fn a_trained_model_goes_on() {
    let plan = plan("text", Size::Laptop);
    let job = |arm: &str, course: &str| {
        let entry = plan.entries.iter().find(|entry| entry.arm == arm && entry.course == course).unwrap();
        plan.job(entry, 4e-3, 2).unwrap()
    };
    let folder = |job: &Job, stage| job.folder(Path::new("runs"), stage);
    let trained = folder(&job("GDN", "crates"), 0);
    let mut ends = BTreeSet::new();
    for arm in plan.experiment.arms_of("crates, continued") {
        let continued = job(arm, "crates, continued");
        assert_eq!((folder(&continued, 0), continued.stages.len()), (trained.clone(), 2), "{arm}");
        assert!(ends.insert(folder(&continued, 1)), "{arm}");
        let last = &continued.stages[1].model;
        assert_eq!(last.intermediate_size, continued.stages[0].model.intermediate_size, "{arm}");
    }
    assert_eq!(ends.len(), 5);
    // Sweeps of six arms with four rates on a tenth of the steps, twelve runs, and fifteen that go on.
    let step = 4.0 * 4096.0;
    let steps = 24.0 * 100.0 + 12.0 * 1000.0 + 15.0 * 250.0;
    let scale = Scale { seeds: 3, ..plan.scale.clone() };
    let plan = Plan::new(plan.experiment.clone(), scale).unwrap();
    assert_eq!((plan.tokens().unwrap(), plan.result_runs()), (steps * step, 27));
}

#[test]
fn a_quick_plan_is_small() {
    for name in names().filter(|name| *name != EFFICIENCY) {
        let (quick, laptop) = (plan(name, Size::Quick), plan(name, Size::Laptop));
        assert!(quick.tokens().unwrap() < 0.02 * laptop.tokens().unwrap(), "{name}");
    }
    let refused = Experiment::open("recal").unwrap_err().to_string();
    assert!(refused.contains("did you mean `recall`?") || refused.contains("recall"), "{refused}");
}

#[test]
fn intervals_are_those_of_student() {
    // Mean 3, standard deviation √2.5, standard error √0.5; t with 4 degrees of freedom is 2.776.
    let mean = Mean::of(&[1.0, 2.0, 3.0, 4.0, 5.0]).unwrap();
    assert_eq!((mean.value, mean.seeds), (3.0, 5));
    assert!((mean.half.unwrap() - 2.776 * 0.5f64.sqrt()).abs() < 1e-12);
    assert_eq!(Mean::of(&[]), None);
    assert_eq!(Mean::of(&[2.0]).unwrap().half, None);
}
