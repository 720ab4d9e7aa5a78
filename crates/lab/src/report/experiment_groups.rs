//! Losses by group of tokens and by position: which tokens profit from a memory.

use super::evidence::{Cell, Section, Table};
use super::experiment::rows_of;
use super::experiment_tests::{Tests, find};
use crate::reproduce::{Evaluation, GROUPS, Results};

/// The evaluations that measure the loss on passages.
fn passages(results: &Results) -> Vec<&Evaluation> {
    let of_passages = |evaluation: &&Evaluation| evaluation.text.is_some() && evaluation.copy.is_none();
    results.plan.experiment.evaluations.iter().filter(of_passages).collect()
}

/// The caption of an evaluation's table; other courses may have one of the same name.
fn caption(results: &Results, evaluation: &Evaluation, what: &str) -> String {
    let course = match results.plan.experiment.courses.len() {
        1 => String::new(),
        _ => format!("{}: ", evaluation.course),
    };
    format!("{course}{}{what}", evaluation.name)
}

/// The columns of a table with one for each group.
fn columns(first: &str) -> Vec<String> {
    std::iter::once(first).chain(GROUPS).map(String::from).collect()
}

/// The losses by group of tokens, and differences between models, for each part of a corpus.
pub(super) fn groups(results: &Results, tests: &Tests<'_>) -> Section {
    let mut section = Section { heading: "By group of tokens".into(), ..Section::default() };
    let evaluations = passages(results);
    if evaluations.is_empty() {
        return section;
    }
    section.text.push(
        "A repeated rare pair: a token and the one before it occurred before in this text, in this order, and at most 100 \
         times in all training texts; by the distance to their last occurrence. An identifier seen once: it has at least \
         six letters and occurred exactly once before. Other tokens: neither. Mean loss in nats per token, over documents \
         and seeds."
            .into(),
    );
    for evaluation in &evaluations {
        section.tables.push(losses(results, evaluation));
    }
    section.text.push(format!(
        "Differences: first minus second in nats per token; the losses of a document are means over seeds. 95 % intervals \
         by bootstrap over documents, paired by document. Bold: significant, with a p-value below 5 % after Holm's \
         correction {}; no p-value is below 2 / 2ⁿ with n documents.",
        tests.corrected()
    ));
    for evaluation in &evaluations {
        section.tables.extend(differences(results, tests, evaluation));
    }
    section
}

/// The mean loss of each model on each group.
fn losses(results: &Results, evaluation: &Evaluation) -> Table {
    let experiment = &results.plan.experiment;
    let mut rows = Vec::new();
    let mut share = Vec::new();
    for (name, _) in experiment.rows() {
        let measured = results.measured(name, evaluation);
        let Some(first) = measured.first() else { continue };
        if share.is_empty() {
            let count = |group: &str| find(first, group).map_or(0, |group| group.counts.iter().sum::<u64>());
            let all = count(GROUPS[0]).max(1) as f64;
            share.push(Cell::of("share of the tokens"));
            share.extend(GROUPS.map(|group| Cell::of(format!("{:.1} %", 100.0 * count(group) as f64 / all))));
        }
        let mut row = vec![Cell::of(name)];
        for group in GROUPS {
            let seeds: Vec<f64> =
                measured.iter().filter_map(|measured| find(measured, group)?.mean()).collect();
            let mean = seeds.iter().sum::<f64>() / seeds.len() as f64;
            let shown: Vec<String> = seeds.iter().map(|loss| format!("{loss:.4}")).collect();
            let text = if seeds.is_empty() { "–".into() } else { format!("{mean:.4}") };
            row.push(Cell { text, title: format!("by seed: {}", shown.join(", ")), strong: false });
        }
        rows.push(row);
    }
    rows.push(share);
    Table { caption: caption(results, evaluation, ": loss"), columns: columns("model"), rows }
}

/// The differences of one evaluation; `None` without any.
fn differences(results: &Results, tests: &Tests<'_>, evaluation: &Evaluation) -> Option<Table> {
    let own = tests.differences.iter().filter(|test| std::ptr::eq(test.evaluation, evaluation));
    let own: Vec<_> = own.collect();
    let pairs = own.chunk_by(|a, b| a.pair == b.pair).map(|tests| {
        let cells = GROUPS.map(|group| {
            let test = tests.iter().find(|test| test.group == Some(group));
            test.map_or(Cell::of("–"), |test| test.cell(1))
        });
        std::iter::once(Cell::of(tests[0].pair.join(" – "))).chain(cells).collect()
    });
    let rows: Vec<Vec<Cell>> = pairs.collect();
    let caption = caption(results, evaluation, ": differences");
    (!rows.is_empty()).then(|| Table { caption, columns: columns("first – second"), rows })
}

/// The differences of each seed, for pairs of which both have several.
pub(super) fn differences_by_seed(results: &Results) -> Vec<Table> {
    let table = |evaluation: &Evaluation| {
        let row = |pair: &[String; 2]| {
            let [a, b] = [&pair[0], &pair[1]].map(|row| results.measured(row, evaluation));
            let cells = GROUPS.map(|group| {
                let mean = |measured| find(measured, group)?.mean();
                let seeds = a.iter().zip(&b).filter_map(|(a, b)| Some(mean(a)? - mean(b)?));
                Cell::of(seeds.map(|seed| format!("{seed:+.4}")).collect::<Vec<_>>().join(", "))
            });
            let several = a.len() > 1 && b.len() > 1;
            several.then(|| std::iter::once(Cell::of(pair.join(" – "))).chain(cells).collect())
        };
        let rows: Vec<Vec<Cell>> = results.plan.experiment.compare.iter().filter_map(row).collect();
        let caption = caption(results, evaluation, ": differences by seed");
        (!rows.is_empty()).then(|| Table { caption, columns: columns("first – second"), rows })
    };
    passages(results).into_iter().filter_map(table).collect()
}

/// The losses by position in the text.
pub(super) fn positions(results: &Results) -> Section {
    let table = |evaluation: &Evaluation| {
        let mut columns = vec!["model".to_string()];
        let rows = rows_of(results, &evaluation.course).into_iter().filter_map(|row| {
            let seeds = results.measured(row, evaluation);
            let places = &seeds.first()?.positions;
            if columns.len() == 1 {
                columns.extend(places.iter().map(|(end, _)| format!("to {end}")));
            }
            let mean = |i: usize| {
                let losses: Vec<f64> =
                    seeds.iter().filter_map(|seed| Some(seed.positions.get(i)?.1)).collect();
                losses.iter().sum::<f64>() / losses.len() as f64
            };
            let cells = (0..places.len()).map(|i| Cell::of(format!("{:.4}", mean(i))));
            Some(std::iter::once(Cell::of(row)).chain(cells).collect())
        });
        let rows: Vec<Vec<Cell>> = rows.collect();
        (!rows.is_empty()).then(|| Table { caption: caption(results, evaluation, ""), columns, rows })
    };
    let tables: Vec<Table> = passages(results).into_iter().filter_map(table).collect();
    let text =
        "Mean loss in nats per token, over passages and seeds. Each column begins where the one before ends.";
    let text = if tables.is_empty() { Vec::new() } else { vec![text.to_string()] };
    Section { heading: "By position in the text".into(), text, tables, ..Section::default() }
}
