//! The table and the conclusion that `march demo` prints about its trained models.

use march_lab::eval::TaskReport;

use super::demo::MODELS;
use super::demo_learn::{DAYS, TrainedModel, facts, most_in_training};
use super::eval::percent;
use crate::display::out::say;
use crate::display::{bytes, lines, thousands};

/// Prints the results, one column per model.
pub fn table(learned: &[TrainedModel]) {
    let line = |label: &str, cell: &dyn Fn(&TrainedModel) -> String| {
        let cells: Vec<String> = learned.iter().map(|model| format!("{:>19}", cell(model))).collect();
        say!("{label:<38}{}", cells.concat());
    };
    let right = |result: Option<&TaskReport>| {
        result.map_or("–".into(), |result| percent(result.accuracy, result.standard_error))
    };
    let (most, longest) = (most_in_training(), DAYS[DAYS.len() - 1]);
    say!("\n{:<38}{}", "right answers", MODELS.map(|(name, _)| format!("{name:>19}")).concat());
    for days in DAYS {
        let note = if days == most { " (most in training)" } else { "" };
        line(&format!("  {days} days, {} facts{note}", facts(days)), &|model| right(model.result(days)));
    }
    line(&format!("  {longest} days, anchors in int8"), &|model| right(model.int8.as_ref()));
    line(&format!("  {longest} days, without anchors"), &|model| right(model.without(longest)));
    line("  guessing", &|model| {
        model.result(most).map_or("–".into(), |result| format!("{:.1} %", 100.0 * result.chance))
    });
    let reading = |result: Option<&TaskReport>| result.map_or("–".into(), |it| bytes(for_reading(it)));
    line(&format!("memory read after {most} days"), &|model| reading(model.result(most)));
    line(&format!("memory read after {longest} days"), &|model| reading(model.result(longest)));
    line("  with anchors in int8", &|model| reading(model.int8.as_ref()));
    line("  also kept, only for rollback", &|model| {
        let rollback = model.result(longest).and_then(|result| result.rollback_bytes);
        rollback.map_or("–".into(), bytes)
    });
    line("parameters", &|model| thousands(model.parameters));
    line("learning rate", &|model| format!("{}", model.learning_rate));
    line("training", &|model| lines::duration(model.seconds));
}

/// Bytes of memory that reading needs.
fn for_reading(result: &TaskReport) -> usize {
    result.memory_bytes - result.rollback_bytes.unwrap_or(0)
}

/// A conclusion from the numbers, whichever model is ahead.
pub fn verdict(learned: &[TrainedModel], quick: bool) -> String {
    if quick {
        return "A quick run learns almost nothing; without --quick the models train for a few minutes."
            .into();
    }
    let (most, longest) = (most_in_training(), DAYS[DAYS.len() - 1]);
    let [march, others @ ..] = learned else { return String::new() };
    let compared = |(name, model): (&'static str, &TrainedModel)| {
        model.result(longest).map(|result| Compared {
            name,
            accuracy: result.accuracy,
            error: result.standard_error.unwrap_or(f64::NAN),
            bytes: for_reading(result),
        })
    };
    let names = MODELS.map(|(name, _)| name);
    let others = names[1..].iter().copied().zip(others).filter_map(compared).collect();
    let (Some(march), Some(without)) = (compared((names[0], march)), march.without(longest)) else {
        return String::new();
    };
    let numbers =
        Numbers { days: (longest, most), facts: facts(longest), march, others, without: without.accuracy };
    numbers.conclusion() + "\nOne seed is an example, and seeds differ: docs/results/demo.md."
}

/// A model with the longest diary.
pub struct Compared {
    pub name: &'static str,
    pub accuracy: f64,
    pub error: f64,
    /// Bytes that reading needs.
    pub bytes: usize,
}

/// What MARCH is compared by with the others.
pub struct Numbers {
    /// The most days asked about and the most in training.
    pub days: (usize, usize),
    /// Facts of the longest diary.
    pub facts: usize,
    pub march: Compared,
    pub others: Vec<Compared>,
    /// MARCH's accuracy without its anchors.
    pub without: f64,
}

/// A drop by this much without anchors means that a model uses them.
const USES_ANCHORS: f64 = 0.3;

impl Numbers {
    pub fn conclusion(&self) -> String {
        let Self { days: (longest, most), facts, march, others, without } = self;
        let answers = |model: &Compared| {
            let Compared { name, accuracy, bytes: kept, .. } = model;
            format!("{name} answers {:.0} % and reads {}", 100.0 * accuracy, bytes(*kept))
        };
        let all: Vec<String> = std::iter::once(march).chain(others).map(answers).collect();
        let mut text = format!(
            "With {facts} facts in {longest} days, {} times as many as in training:\n  {}.",
            longest / most.max(&1),
            all.join(";\n  ")
        );
        for other in others {
            let points = 100.0 * (march.accuracy - other.accuracy);
            // Two standard errors of the difference; with an unknown error no difference counts.
            let error = 200.0 * march.error.hypot(other.error);
            text += &match points {
                _ if error.is_nan() || points.abs() <= error => {
                    format!("\nMARCH and {}: no difference beyond two standard errors.", other.name)
                }
                _ if points > 0.0 => format!("\nMARCH is {points:.0} points ahead of {}.", other.name),
                _ => format!("\nMARCH is {:.0} points behind {}.", -points, other.name),
            };
        }
        let share = 100.0 * without;
        text + &match march.accuracy - without >= USES_ANCHORS {
            true => format!(
                "\nWithout its anchors it answers {share:.0} %: with this seed it learned to use them."
            ),
            false => format!(
                "\nWithout its anchors it answers {share:.0} %: with this seed it did not learn to use them."
            ),
        }
    }
}
