//! Losses by group of tokens: which tokens profit from a memory.

use super::evidence::{Cell, Section, Table};
use crate::eval::{Difference, paired_bootstrap};
use crate::reproduce::{Evaluation, GROUPS, Group, Measured, Results, holm};

/// The losses by group of tokens, and differences between models, for each part of a corpus.
pub(super) fn groups(results: &Results) -> Section {
    let experiment = &results.plan.experiment;
    let mut section = Section { heading: "By group of tokens".into(), ..Section::default() };
    let by_group = |evaluation: &&Evaluation| evaluation.text.is_some() && evaluation.copy.is_none();
    let evaluations: Vec<&Evaluation> = experiment.evaluations.iter().filter(by_group).collect();
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
    let tests = Tests::of(results, &evaluations);
    section.text.push(format!(
        "Differences: first minus second in nats per token; the losses of a document are means over seeds. 95 % intervals \
         by bootstrap over documents, paired by document. Bold: significant, with a p-value below 5 % after Holm's \
         correction for the {} tests of these tables.",
        tests.0.len()
    ));
    for evaluation in &evaluations {
        section.tables.extend(tests.table(evaluation));
    }
    section
}

/// The mean loss of each model on each group.
fn losses(results: &Results, evaluation: &Evaluation) -> Table {
    let mut columns = vec!["model".to_string()];
    columns.extend(GROUPS.map(String::from));
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
    Table { caption: format!("{}: loss", evaluation.name), columns, rows }
}

/// A group of a measurement.
fn find<'a>(measured: &'a Measured, name: &str) -> Option<&'a Group> {
    measured.groups.iter().find(|group| group.name == name)
}

/// A difference of two models on one group of tokens.
struct Test<'a> {
    pair: &'a [String; 2],
    evaluation: &'a str,
    group: &'static str,
    difference: Difference,
    significant: bool,
}

/// All tests of the section, corrected together.
struct Tests<'a>(Vec<Test<'a>>);

impl<'a> Tests<'a> {
    fn of(results: &'a Results, evaluations: &[&'a Evaluation]) -> Self {
        let mut tests = Vec::new();
        for evaluation in evaluations {
            for pair in &results.plan.experiment.compare {
                for group in GROUPS {
                    let Some(difference) = by_document(results, pair, evaluation, group) else { continue };
                    let evaluation = evaluation.name.as_str();
                    tests.push(Test { pair, evaluation, group, difference, significant: false });
                }
            }
        }
        let corrected = holm(&tests.iter().map(|test| test.difference.p).collect::<Vec<_>>());
        tests.iter_mut().zip(corrected).for_each(|(test, p)| test.significant = p < 0.05);
        Self(tests)
    }

    /// The differences of one evaluation.
    fn table(&self, evaluation: &Evaluation) -> Option<Table> {
        let own: Vec<&Test<'_>> = self.0.iter().filter(|test| test.evaluation == evaluation.name).collect();
        let mut columns = vec!["first – second".to_string()];
        columns.extend(GROUPS.map(String::from));
        let rows: Vec<Vec<Cell>> = own
            .chunk_by(|a, b| a.pair == b.pair)
            .map(|tests| {
                let mut row = vec![Cell::of(tests[0].pair.join(" – "))];
                row.extend(GROUPS.map(|group| {
                    let test = tests.iter().find(|test| test.group == group);
                    test.map_or(Cell::of("–"), |test| test.cell())
                }));
                row
            })
            .collect();
        (!rows.is_empty()).then(|| Table {
            caption: format!("{}: differences", evaluation.name),
            columns,
            rows,
        })
    }
}

impl Test<'_> {
    fn cell(&self) -> Cell {
        let Difference { value, interval: [low, high], .. } = self.difference;
        let title = if self.significant { "significant" } else { "not significant" }.into();
        Cell { text: format!("{value:+.4} ({low:+.4} to {high:+.4})"), title, strong: self.significant }
    }
}

/// The difference of two rows, first minus second, with intervals over documents. Each row's losses are means over its
/// seeds.
pub(super) fn by_document(
    results: &Results,
    pair: &[String; 2],
    evaluation: &Evaluation,
    group: &str,
) -> Option<Difference> {
    // For each row, the mean over seeds of the sum of losses, by document; and the number of tokens.
    let sums = |row: &String| {
        let seeds = results.measured(row, evaluation);
        let groups: Vec<&Group> = seeds.iter().filter_map(|measured| find(measured, group)).collect();
        let first = groups.first()?;
        let mean = |document: usize| {
            groups.iter().filter_map(|group| group.sums.get(document)).sum::<f64>() / groups.len() as f64
        };
        Some(((0..first.counts.len()).map(mean).collect::<Vec<f64>>(), first.counts.clone()))
    };
    let (a, counts) = sums(&pair[0])?;
    let (b, _) = sums(&pair[1])?;
    let used: Vec<usize> = (0..counts.len().min(b.len())).filter(|&document| counts[document] > 0).collect();
    let mean = |of: &[f64], drawn: &[usize]| {
        let tokens: u64 = drawn.iter().map(|&i| counts[used[i]]).sum();
        drawn.iter().map(|&i| of[used[i]]).sum::<f64>() / tokens as f64
    };
    (used.len() > 1).then(|| paired_bootstrap(used.len(), |drawn| [mean(&b, drawn), mean(&a, drawn)]))
}
