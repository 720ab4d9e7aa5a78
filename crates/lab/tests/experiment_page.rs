//! The page of an experiment: its verdicts and its costs.

use march_lab::corpus;
use march_lab::report::evidence::Page;
use march_lab::report::experiment::page;

use march_lab::reproduce::{
    Arm, Corpus, Entry, Evaluation, Experiment, GROUPS, Group, Measured, Outcome, Plan, REPETITIONS, Results,
    Scale as Sizes, Size, Success, key,
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

/// The experiment `text` with made-up losses: in every document MARCH and its variants are better than the others.
fn made_up_losses(documents: usize) -> Results {
    let folder = tempfile::tempdir().unwrap();
    corpus::build_tiny(folder.path()).unwrap();
    let scale = Sizes { corpus: Some(Corpus::open(folder.path()).unwrap()), ..Sizes::new(Size::Laptop) };
    let plan = Plan::new(Experiment::open("text").unwrap(), scale).unwrap();
    let mut arms = Vec::new();
    for Entry { arm, course, .. } in &plan.entries {
        let mut runs = vec![Outcome { parameters: 1, ..Outcome::default() }; 2];
        for (name, variant) in plan.experiment.rows() {
            let (of, policy) = variant.map_or((name, ""), |variant| (&variant.of, &variant.policy));
            let asked =
                plan.experiment.evaluations_of(course).filter(|asked| of == arm && asked.concerns(name));
            for asked in asked {
                for (seed, run) in runs.iter_mut().enumerate() {
                    let loss = if name.contains("MARCH") { 1.0 } else { 1.2 } + 0.001 * seed as f64;
                    run.measured.push(loss_of(asked, key(asked, &plan.scale, policy), loss, documents));
                }
            }
        }
        arms.push(Arm { arm: arm.clone(), course: course.clone(), rate: 1e-3, tried: Vec::new(), runs });
    }
    Results { plan, arms }
}

/// A loss that grows from document to document; `loss` in the first.
fn loss_of(evaluation: &Evaluation, key: String, loss: f64, documents: usize) -> Measured {
    let names = if evaluation.copy.is_some() { vec![REPETITIONS] } else { GROUPS.to_vec() };
    let group = |name: &str| Group {
        name: name.into(),
        sums: (0..documents).map(|document| loss * (100 + document) as f64).collect(),
        counts: vec![100; documents],
    };
    Measured {
        key,
        value: loss,
        memory_bytes: 1,
        rollback_bytes: None,
        flop_per_token: 1.0,
        positions: vec![(64, 2.0), (128, loss)],
        groups: names.into_iter().map(group).collect(),
    }
}

#[test]
fn losses_are_compared_by_document() {
    let made = page(&made_up_losses(16), Vec::new());
    let section = |heading: &str| made.sections.iter().find(|section| section.heading == heading).unwrap();
    let groups = section("By group of tokens");
    assert!(
        groups.text[1].contains(
            "for the 203 tests of `crates` and, apart from them, for the 126 tests of `crates, continued`"
        ),
        "{:?}",
        groups.text
    );
    // Of the 203: MARCH against GDN, its wide form, Memory Caching, Log-Linear and the Transformer.
    let text = text(&made);
    assert!(text.contains("Of 329 differences between models, 181 are significant with"), "{text}");
    assert!(
        text.contains("crates: MARCH against GDN: better at 4,096 tokens, 16,384 tokens, books"),
        "{text}"
    );
    assert!(text.contains("crates, continued: GDN as MARCH, bias 0 against GDN: better at 4,096"), "{text}");
    let table = |heading: &str, caption: &str| {
        section(heading).tables.iter().find(|table| table.caption == caption).unwrap().clone()
    };
    let differences = table("By group of tokens", "crates: 4,096 tokens: differences");
    assert_eq!(differences.rows[0][0].text, "MARCH – GDN");
    assert!(
        differences.rows[0][5].strong && differences.rows[0][5].text.starts_with("-0.2150 ("),
        "{differences:?}"
    );
    let seeds = table("By seed", "crates: 4,096 tokens: differences by seed");
    assert_eq!(seeds.rows[0][5].text, "-0.2150, -0.2150");
    let positions = table("By position in the text", "crates: 16,384 tokens");
    let first: Vec<&str> = positions.rows[0].iter().map(|cell| cell.text.as_str()).collect();
    assert_eq!(
        (&positions.columns[1..], &first[..]),
        (&["to 64".into(), "to 128".into()][..], &["GDN", "2.0000", "1.2005"][..])
    );
}

/// That three documents agree is no evidence, although every resample of them agrees as well.
#[test]
fn few_documents_decide_nothing() {
    let text = text(&page(&made_up_losses(3), Vec::new()));
    assert!(text.contains("Of 329 differences between models, 0 are significant with"), "{text}");
}
