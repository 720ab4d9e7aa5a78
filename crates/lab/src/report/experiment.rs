//! The page of an experiment: results with intervals over seeds, differences that are significant or not, costs, the
//! learning rates that were tried, and the paper's numbers beside ours.

use std::iter;

use super::evidence::{Cell, Figure, Page, Section, Table};
use super::experiment_groups::{differences_by_seed, groups, positions};
use super::experiment_plot::plotted;
use super::experiment_tests::{CountTest, Drawn, Sign, Tests, difference, successes};
use super::release::place;
use super::text::thousands;
use crate::reproduce::{Evaluation, GROUPS, Mean, Measured, Published, Release, Results, Sweep};

/// The page of an experiment's results. `facts` are its first table: command, date, machine, duration.
pub fn page(results: &Results, facts: Vec<(String, String)>) -> Page {
    let experiment = &results.plan.experiment;
    let tests = &Tests::of(results);
    let mut summary = vec![experiment.question.clone(), format!("In the paper: {}.", experiment.paper)];
    if !results.plan.is_full() {
        summary.push(
            "**This is a quick run: it shows that everything works, and says nothing about the models.**"
                .into(),
        );
    } else {
        summary.extend(verdict(tests));
    }
    let mut sections = vec![
        outcome(results),
        counted(results, tests),
        groups(results, tests),
        positions(results),
        differences(results, tests),
    ];
    sections.extend(experiment.published.as_ref().map(|published| beside_paper(results, published)));
    sections.extend([by_seed(results), costs(results), rates(results)]);
    sections.extend(experiment.release.as_ref().map(kept));
    sections.push(list("What differs from the paper", &experiment.scaled));
    sections.push(list("What was tried before this setting was chosen", &experiment.tried));
    sections.retain(|section| {
        let Section { tables, figures, list, text, .. } = section;
        !(tables.is_empty() && figures.is_empty() && list.is_empty() && text.is_empty())
    });
    Page { title: experiment.title.clone(), summary, facts, sections }
}

/// Where the trained models are.
fn kept(release: &Release) -> Section {
    let folders = release.arms.iter().map(|arm| format!("`{}`", place(arm).display())).collect::<Vec<_>>();
    let text = format!(
        "The command of this page also writes {}, beside its report: the models of seed 1 as they would be published, with \
         matrices in bf16, tokenizer, model card and the report of their training.",
        folders.join(" and ")
    );
    Section { heading: "The trained models".into(), text: vec![text], ..Section::default() }
}

fn list(heading: &str, items: &[String]) -> Section {
    Section { heading: heading.into(), list: items.to_vec(), ..Section::default() }
}

/// A table with a row for each of `rows` and a column for each evaluation of a course.
fn table<R>(
    results: &Results,
    (course, caption, first): (&str, String, &str),
    rows: impl IntoIterator<Item = (String, R)>,
    value: impl Fn(&R, &Evaluation) -> Cell,
) -> Table {
    let evaluations: Vec<&Evaluation> = results.plan.experiment.evaluations_of(course).collect();
    let names = evaluations.iter().map(|evaluation| evaluation.name.clone());
    let row = |(name, row): (String, R)| {
        let cells = evaluations.iter().map(|evaluation| value(&row, evaluation));
        iter::once(Cell::of(name)).chain(cells).collect()
    };
    let columns = iter::once(first.to_string()).chain(names).collect();
    Table { caption, columns, rows: rows.into_iter().map(row).collect() }
}

/// The rows that were asked something on a course.
pub(super) fn rows_of<'a>(results: &'a Results, course: &str) -> Vec<&'a str> {
    let experiment = &results.plan.experiment;
    let rows = experiment.rows().into_iter().map(|(name, _)| name);
    rows.filter(|row| {
        experiment.evaluations_of(course).any(|evaluation| !results.measured(row, evaluation).is_empty())
    })
    .collect()
}

/// The values of a row's evaluation by seed.
pub(super) fn values(results: &Results, row: &str, evaluation: &Evaluation) -> Vec<f64> {
    results.measured(row, evaluation).iter().map(|measured| measured.value).collect()
}

/// The mean over seeds of a row's evaluation.
pub(super) fn mean(results: &Results, row: &str, evaluation: &Evaluation) -> Option<Mean> {
    Mean::of(&values(results, row, evaluation))
}

/// A value with half of its interval: 93.1 ± 2.4, in percent, or a loss in nats.
fn shown(evaluation: &Evaluation, mean: &Mean) -> String {
    let (factor, digits) = scale_of(evaluation);
    let value = format!("{:.digits$}", factor * mean.value);
    mean.half.map_or(value.clone(), |half| format!("{value} ± {:.digits$}", factor * half))
}

/// The factor and the digits of an evaluation's values.
pub(super) fn scale_of(evaluation: &Evaluation) -> (f64, usize) {
    if evaluation.text.is_some() { (1.0, 3) } else { (100.0, 1) }
}

fn outcome(results: &Results) -> Section {
    let experiment = &results.plan.experiment;
    let mut section = Section { heading: "Results".into(), ..Section::default() };
    let seeds = results.plan.scale.seeds;
    section.text.push(format!(
        "Mean over {seeds} seeds, ± half of the 95 % interval over seeds (Student's t). {}",
        if experiment.evaluations.iter().any(|evaluation| evaluation.text.is_some()) {
            "Losses are in nats per token; lower is better."
        } else {
            "Accuracies are in percent."
        }
    ));
    for course in &experiment.courses {
        let caption = format!("{}: {}", course, experiment.course[course].about);
        let rows = rows_of(results, course).into_iter().map(|row| (row.to_string(), row));
        let cell = |row: &&str, evaluation: &Evaluation| value_cell(results, row, evaluation);
        section.tables.push(table(results, (course, caption, "model"), rows, cell));
    }
    section.figures = experiment
        .figure
        .iter()
        .map(|figure| Figure {
            name: format!("{}-{}", experiment.name, figure.name),
            title: figure.title.clone(),
            line: format!("Mean over {seeds} seeds; whiskers: 95 % intervals over seeds."),
            charts: figure.plot.iter().map(|plot| plotted(results, plot)).collect(),
        })
        .collect();
    section
}

/// A cell with the mean; the values of the seeds show on hover.
fn value_cell(results: &Results, row: &str, evaluation: &Evaluation) -> Cell {
    let Some(mean) = mean(results, row, evaluation) else { return Cell::of("–") };
    let seeds = seeds(results, row, evaluation, scale_of(evaluation).1);
    Cell { text: shown(evaluation, &mean), title: format!("by seed: {seeds}"), strong: false }
}

/// The values of the seeds.
fn seeds(results: &Results, row: &str, evaluation: &Evaluation, digits: usize) -> String {
    let factor = scale_of(evaluation).0;
    let all = values(results, row, evaluation).into_iter();
    all.map(|value| format!("{:.digits$}", factor * value)).collect::<Vec<_>>().join(", ")
}

/// The values of all seeds: means hide that some seeds learn a task and others do not.
fn by_seed(results: &Results) -> Section {
    let experiment = &results.plan.experiment;
    let mut section = Section { heading: "By seed".into(), ..Section::default() };
    for course in &experiment.courses {
        // The whole list of a long experiment would be unreadable.
        if !(1..=8).contains(&experiment.evaluations_of(course).count()) {
            continue;
        }
        let rows = rows_of(results, course).into_iter().map(|row| (row.to_string(), row));
        section.tables.push(table(results, (course, course.clone(), "model"), rows, |row, evaluation| {
            let digits = scale_of(evaluation).1;
            Cell::of(seeds(results, row, evaluation, digits - usize::from(digits == 1)))
        }));
    }
    section.tables.extend(differences_by_seed(results));
    section
}

fn differences(results: &Results, tests: &Tests<'_>) -> Section {
    let experiment = &results.plan.experiment;
    let mut section = Section { heading: "Differences".into(), ..Section::default() };
    if experiment.compare.is_empty() {
        return section;
    }
    let paired = match experiment.uses_corpus() {
        true => {
            "by document, with means over seeds. The mean and its 95 % interval (paired bootstrap over documents)"
        }
        false => {
            "by seed: both train on the same sequences. The mean and its 95 % interval (paired bootstrap over \
             seeds); p-values are the larger of the bootstrap's and a paired t-test's"
        }
    };
    section.text.push(format!(
        "First minus second, paired {paired}. A difference is significant (bold) if its p-value is below 5 % after Holm's correction \
         {}.",
        tests.corrected()
    ));
    section.list = tests.decisions(results);
    for course in &experiment.courses {
        let rows = experiment.compare.iter().map(|pair| (pair.join(" – "), pair));
        let mut table =
            table(results, (course, course.clone(), "first – second"), rows, |pair, evaluation| {
                let found = tests.whole().find(|test| test.is(pair, evaluation));
                found.map_or(Cell::of("–"), |test| test.cell(0))
            });
        table.rows.retain(|row| row[1..].iter().any(|cell| cell.text != "–"));
        if !table.rows.is_empty() {
            section.tables.push(table);
        }
    }
    section
}

/// How many of the differences are significant with these seeds; `None` if nothing was compared.
fn verdict(tests: &Tests<'_>) -> Option<String> {
    let all = &tests.differences;
    let significant = all.iter().filter(|test| test.sign != Sign::NotSignificant).count();
    let line = format!(
        "**Of {} differences between models, {significant} {} significant with the seeds of this run.** The section on \
         differences lists them.",
        all.len(),
        if significant == 1 { "is" } else { "are" }
    );
    (!all.is_empty()).then_some(line)
}

/// The numbers of seeds that succeed, with exact intervals and tests.
fn counted(results: &Results, tests: &Tests<'_>) -> Section {
    let experiment = &results.plan.experiment;
    let mut section = Section { heading: "Seeds that succeed".into(), ..Section::default() };
    let Some(success) = &experiment.success else { return section };
    section.text.push(format!(
        "A seed succeeds if it answers at least {:.0} % of {}{}. The 95 % interval of the rate is exact (Clopper and \
         Pearson).",
        100.0 * success.accuracy,
        success.evaluation,
        match success.drop {
            drop if drop > 0.0 => format!(
                ", and, for a model with anchors, if the same weights without anchors answer at least {:.0} points less",
                100.0 * drop
            ),
            _ => String::new(),
        }
    ));
    for course in &experiment.courses {
        let rows = experiment.arms_of(course).filter_map(|arm| {
            let count = successes(results, arm, course)?;
            let (low, high) = count.interval();
            let shown = format!("{} of {}", count.successes, count.trials);
            let interval = format!("{:.0} to {:.0} %", 100.0 * low, 100.0 * high);
            Some(vec![Cell::of(arm.clone()), Cell::of(shown), Cell::of(interval)])
        });
        let columns = ["model", "seeds that succeed", "95 % interval of the rate"].map(String::from).to_vec();
        section.tables.push(Table { caption: course.clone(), columns, rows: rows.collect() });
    }
    for CountTest { course, pair: [first, second], counts: [a, b], p } in &tests.counts {
        section.list.push(format!(
            "{course}: {first} {} of {}, {second} {} of {}: {} (Fisher's exact test, p = {p:.3} after Holm's \
             correction).",
            a.successes,
            a.trials,
            b.successes,
            b.trials,
            if *p < 0.05 { "significant" } else { "not significant" }
        ));
    }
    section
}

/// The paper's numbers, and where our order of two models differs from the paper's.
fn beside_paper(results: &Results, published: &Published) -> Section {
    let experiment = &results.plan.experiment;
    let course = published.course.as_ref().or(experiment.courses.first());
    let evaluations: Vec<&Evaluation> =
        course.map(|course| experiment.evaluations_of(course).collect()).unwrap_or_default();
    let chosen = evaluations
        .iter()
        .find(|evaluation| published.evaluation.as_ref().is_none_or(|name| *name == evaluation.name));
    let mut columns = vec!["model in the paper".to_string()];
    columns.extend(published.columns.iter().cloned());
    columns.push("here".into());
    columns.extend(chosen.map(|evaluation| format!("here: {}", evaluation.name)));
    let rows = published.row.iter().map(|row| {
        let mut cells = vec![Cell::of(row.name.clone())];
        cells.extend(row.values.iter().map(|value| Cell::of(value.to_string())));
        cells.push(Cell::of(row.ours.clone().unwrap_or_else(|| "–".into())));
        if let Some(evaluation) = chosen {
            cells.push(row.ours.as_ref().map_or(Cell::of("–"), |ours| value_cell(results, ours, evaluation)));
        }
        cells
    });
    let mut section = Section {
        heading: "The paper's numbers beside ours".into(),
        text: vec![published.about.clone()],
        ..Section::default()
    };
    section.tables.push(Table { caption: String::new(), columns, rows: rows.collect() });
    if let Some(evaluation) = chosen {
        section.list = orders(results, published, evaluation);
    }
    section
}

/// For each pair of models: whether our order is the paper's.
fn orders(results: &Results, published: &Published, evaluation: &Evaluation) -> Vec<String> {
    let rows: Vec<(&str, f64)> = published
        .row
        .iter()
        .filter_map(|row| Some((row.ours.as_deref()?, *row.values.get(published.order)?)))
        .collect();
    let mut said = Vec::new();
    for (i, &(a, of_a)) in rows.iter().enumerate() {
        for &(b, of_b) in &rows[i + 1..] {
            if a == b || of_a == of_b {
                continue;
            }
            let group = evaluation.text.as_ref().map(|_| GROUPS[0]);
            let pair = [a, b].map(String::from);
            let Some(difference) = difference(results, &pair, (evaluation, group), &mut Drawn::new()) else {
                continue;
            };
            // A lower loss is better.
            let better = (difference.value > 0.0) != evaluation.text.is_some();
            let (first, second) = if of_a > of_b { (a, b) } else { (b, a) };
            let ours = match difference.p {
                p if p >= 0.05 => "is not significant here",
                _ if better == (of_a > of_b) => "is the order here, too",
                _ => "is **reversed here**",
            };
            said.push(format!("{first} above {second} {ours}."));
        }
    }
    said
}

fn costs(results: &Results) -> Section {
    let experiment = &results.plan.experiment;
    let mut section = Section { heading: "Costs".into(), ..Section::default() };
    section.text.push(
        "Memory: bytes that a sequence's bank holds after the shortest and the longest of the asks. For rollback: those of \
         these bytes that no token reads; they are kept to continue the text at an anchor. Work: FLOP per token \
         of the forward pass there. Training: tokens per second on one thread, median of the last stage, with other runs \
         on the other cores."
            .into(),
    );
    for course in &experiment.courses {
        let evaluations: Vec<&Evaluation> = experiment.evaluations_of(course).collect();
        let (Some(first), Some(last)) = (evaluations.first(), evaluations.last()) else { continue };
        let ends: Vec<&Evaluation> = if evaluations.len() > 1 { vec![first, last] } else { vec![first] };
        let mut columns: Vec<String> = ["model", "parameters"].map(String::from).to_vec();
        for evaluation in &ends {
            columns.extend(
                ["memory", "for rollback", "MFLOP per token"].map(|of| format!("{of}, {}", evaluation.name)),
            );
        }
        columns.push("training tokens/s".into());
        let rows = rows_of(results, course).into_iter().map(|row| {
            let arm = results.arms.iter().find(|arm| arm.arm == row && arm.course == *course);
            let run = arm.and_then(|arm| arm.runs.first());
            let mut cells = vec![Cell::of(row)];
            cells.push(Cell::of(run.map_or("–".into(), |run| thousands(run.parameters as f64))));
            for evaluation in &ends {
                let found = results.measured(row, evaluation);
                let shown = |show: &dyn Fn(&Measured) -> String| {
                    Cell::of(found.first().map_or("–".into(), |measured| show(measured)))
                };
                cells.push(shown(&|measured| in_bytes(measured.memory_bytes as f64)));
                cells.push(shown(&|measured| {
                    measured.rollback_bytes.map_or("–".into(), |bytes| in_bytes(bytes as f64))
                }));
                cells.push(shown(&|measured| format!("{:.3}", measured.flop_per_token / 1e6)));
            }
            let speeds: Vec<f64> =
                arm.iter().flat_map(|arm| &arm.runs).map(|run| run.tokens_per_second).collect();
            cells.push(Cell::of(Mean::of(&speeds).map_or("–".into(), |mean| thousands(mean.value.round()))));
            cells
        });
        section.tables.push(Table { caption: course.clone(), columns, rows: rows.collect() });
    }
    section
}

fn rates(results: &Results) -> Section {
    let mut section = Section { heading: "Learning rates".into(), ..Section::default() };
    let mut all: Vec<f64> = results.arms.iter().flat_map(|arm| &arm.tried).map(|tried| tried.0).collect();
    all.sort_by(f64::total_cmp);
    all.dedup();
    if all.is_empty() {
        return section;
    }
    let experiment = &results.plan.experiment;
    let swept = experiment
        .courses
        .iter()
        .filter(|course| results.arms.iter().any(|arm| arm.course == **course && !arm.tried.is_empty()));
    let how = swept.map(|course| {
        let Sweep { share, seeds } = experiment.course[course].sweep;
        let share =
            if share < 1.0 { format!(" and {:.0} % of the steps", 100.0 * share) } else { String::new() };
        format!("`{course}` with {seeds} {}{share}", if seeds == 1 { "seed" } else { "seeds" })
    });
    section.text.push(format!(
        "Each rate was tried with other seeds than those of the results: {}. Cells: mean loss and accuracy on validation \
         data, which are not those of the results. The rate with the lowest loss (bold) was used for all seeds; where that \
         was the lowest or the highest rate, further ones were tried.",
        how.collect::<Vec<_>>().join(", ")
    ));
    let mut columns: Vec<String> = ["model", "course"].map(String::from).to_vec();
    columns.extend(all.iter().map(|rate| rate.to_string()));
    let mut rows = Vec::new();
    for arm in &results.arms {
        let mut cells = vec![Cell::of(arm.arm.clone()), Cell::of(arm.course.clone())];
        for rate in &all {
            let tried = arm.tried.iter().find(|tried| tried.0 == *rate);
            cells.push(match tried {
                Some((_, loss, accuracy)) => Cell {
                    text: format!("{loss:.3}, {:.1} %", 100.0 * accuracy),
                    strong: arm.rate == *rate,
                    title: String::new(),
                },
                None if arm.tried.is_empty() && arm.rate == *rate => {
                    Cell { strong: true, ..Cell::of("used") }
                }
                None => Cell::of("–"),
            });
        }
        rows.push(cells);
    }
    section.tables.push(Table { caption: String::new(), columns, rows });
    section
}

/// 49152 as 48.0 KiB.
fn in_bytes(bytes: f64) -> String {
    match bytes {
        _ if bytes < 1024.0 => format!("{bytes:.0} B"),
        _ if bytes < 1024.0 * 1024.0 => format!("{:.1} KiB", bytes / 1024.0),
        _ => format!("{:.1} MiB", bytes / 1024.0 / 1024.0),
    }
}
