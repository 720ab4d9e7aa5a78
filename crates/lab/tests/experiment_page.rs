//! The page of an experiment: its verdicts and its costs.

use march_lab::report::evidence::Page;
use march_lab::report::experiment::page;

use march_lab::reproduce::{
    Arm, Experiment, Measured, Outcome, Plan, Results, Scale as Sizes, Size, Success, key,
};

/// The experiment `capacity` with made-up answers: each arm's value by seed, the same at every evaluation.
fn made_up(values: impl Fn(&str) -> Vec<f64>) -> Results {
    let plan = Plan::new(Experiment::open("capacity").unwrap(), Sizes::new(Size::Laptop)).unwrap();
    let arm = |name: &String| {
        let run = |value: f64| {
            let measured = plan.experiment.evaluations.iter().map(|evaluation| Measured {
                key: key(evaluation, &plan.scale, ""),
                value,
                memory_bytes: 3072,
                rollback_bytes: (name == "MARCH").then_some(1024),
                flop_per_token: 1e6,
                positions: Vec::new(),
                groups: Vec::new(),
            });
            Outcome { parameters: 1, measured: measured.collect(), ..Outcome::default() }
        };
        Arm {
            arm: name.clone(),
            course: "diary".into(),
            rate: 1e-3,
            tried: Vec::new(),
            runs: values(name).into_iter().map(run).collect(),
        }
    };
    let arms = plan.experiment.arms.iter().map(arm).collect();
    Results { plan, arms }
}

fn text(page: &Page) -> String {
    let lists = page.sections.iter().flat_map(|section| section.list.clone());
    page.summary.iter().cloned().chain(lists).collect::<Vec<_>>().join("\n")
}

#[test]
fn verdicts_follow_the_results() {
    // MARCH loses against everything: nothing on the page may say that it wins.
    let lost = text(&page(
        &made_up(|arm| if arm == "MARCH" { vec![0.1, 0.11, 0.12] } else { vec![0.9, 0.91, 0.93] }),
        Vec::new(),
    ));
    assert!(lost.contains("MARCH against GDN, equal memory: worse at 2 days, 5 days"), "{lost}");
    assert!(lost.contains("MARCH, top-2 against MARCH: better at 2 days"), "{lost}");
    assert!(lost.contains("Of 36 differences between models, 36 are significant with"), "{lost}");
    assert!(!lost.contains("MARCH wins") && !lost.contains("MARCH against GDN: better"), "{lost}");
    let same = text(&page(&made_up(|_| vec![0.1, 0.5, 0.9]), Vec::new()));
    assert!(same.contains("MARCH against GDN: not significant at 2 days"), "{same}");
    assert!(same.contains("Of 36 differences between models, 0 are significant with"), "{same}");
}

#[test]
fn bytes_for_rollback_are_listed_apart() {
    let page = page(&made_up(|_| vec![0.5, 0.5]), Vec::new());
    let costs = page.sections.iter().find(|section| section.heading == "Costs").unwrap();
    let table = &costs.tables[0];
    assert_eq!(table.columns[2..4], ["memory, 2 days", "for rollback, 2 days"]);
    let row = |name: &str| {
        let row = table.rows.iter().find(|row| row[0].text == name).unwrap();
        [row[2].text.clone(), row[3].text.clone()]
    };
    assert_eq!(row("MARCH"), ["3.0 KiB", "1.0 KiB"]);
    assert_eq!(row("GDN"), ["3.0 KiB", "–"]);
}

#[test]
fn nothing_measured_gives_no_verdict() {
    let none = text(&page(&made_up(|_| Vec::new()), Vec::new()));
    assert!(!none.contains("significant") && !none.contains("against"), "{none}");
}

#[test]
fn seeds_that_succeed_are_counted() {
    let mut results =
        made_up(|arm| if arm == "MARCH" { vec![0.9, 0.95, 0.1, 0.6] } else { vec![0.5, 0.1, 0.2, 0.3] });
    let success = Success { evaluation: "32 days".into(), accuracy: 0.6, drop: 0.3 };
    results.plan.experiment.success = Some(success);
    // The same weights without anchors: the first seed does not need them.
    let without: Vec<String> =
        results.plan.experiment.evaluations.iter().map(|it| key(it, &results.plan.scale, "none")).collect();
    let march = results.arms.iter_mut().find(|arm| arm.arm == "MARCH").unwrap();
    for (run, value) in march.runs.iter_mut().zip([0.85, 0.1, 0.1, 0.1]) {
        let more = run.measured[0].clone();
        run.measured.extend(without.iter().map(|key| Measured { key: key.clone(), value, ..more.clone() }));
    }
    let page = page(&results, Vec::new());
    let section = page.sections.iter().find(|section| section.heading == "Seeds that succeed").unwrap();
    let row = section.tables[0].rows.iter().find(|row| row[0].text == "MARCH").unwrap();
    assert_eq!((row[1].text.as_str(), row[2].text.as_str()), ("2 of 4", "7 to 93 %"));
    assert!(section.list.iter().any(|line| line.contains("MARCH 2 of 4, GDN 0 of 4: not significant")));
}
