//! The table and the conclusion that `march demo` prints about its trained models.

use march_lab::eval::TaskReport;

use super::demo::MODELS;
use super::demo_learn::{DOCUMENTS, TrainedModel, facts, most_in_training};
use super::eval::percent;
use crate::display::out::say;
use crate::display::{bytes, lines, thousands};

/// Prints the results, one column per model.
pub fn table(learned: &[TrainedModel]) {
    let line = |label: &str, cell: &dyn Fn(&TrainedModel) -> String| {
        let cells: Vec<String> = learned.iter().map(|model| format!("{:>19}", cell(model))).collect();
        say!("{label:<30}{}", cells.concat());
    };
    let right = |result: Option<&TaskReport>| {
        result.map_or("–".into(), |result| percent(result.accuracy, result.standard_error))
    };
    let (most, longest) = (most_in_training(), DOCUMENTS[DOCUMENTS.len() - 1]);
    say!("\n{:<30}{}", "right answers", MODELS.map(|(name, _)| format!("{name:>19}")).concat());
    for documents in DOCUMENTS {
        let note = if documents == most { " (most in training)" } else { "" };
        line(&format!("  {} facts{note}", facts(documents)), &|model| right(model.result(documents)));
    }
    line(&format!("  {} facts, without anchors", facts(most)), &|model| right(model.without(most)));
    line("  guessing", &|model| {
        model.result(most).map_or("–".into(), |result| format!("{:.1} %", 100.0 * result.chance))
    });
    for documents in [most, longest] {
        line(&format!("memory after {} facts", facts(documents)), &|model| {
            model.result(documents).map_or("–".into(), |result| bytes(result.memory_bytes))
        });
        line("  of it only for rollback", &|model| {
            let rollback = model.result(documents).and_then(|result| result.rollback_bytes);
            rollback.map_or("–".into(), bytes)
        });
    }
    line("parameters", &|model| thousands(model.parameters));
    line("learning rate", &|model| format!("{}", model.learning_rate));
    line("training", &|model| lines::duration(model.seconds));
}

/// A conclusion from the numbers, whichever model is ahead.
pub fn verdict(learned: &[TrainedModel], quick: bool) -> String {
    if quick {
        return "A quick run learns almost nothing; without --quick the models train for several minutes."
            .into();
    }
    let (most, longest, least) = (most_in_training(), DOCUMENTS[DOCUMENTS.len() - 1], DOCUMENTS[0]);
    let [march, wide, ..] = learned else { return String::new() };
    let all = [march.result(longest), wide.result(longest), march.result(most), wide.result(most)];
    let [Some(march_longest), Some(wide_longest), Some(march_most), Some(wide_most)] = all else {
        return String::new();
    };
    let numbers = Numbers {
        facts: (facts(longest), facts(most)),
        longest: [march_longest, wide_longest].map(|it| (it.accuracy, it.standard_error.unwrap_or(f64::NAN))),
        memory: [march_longest, wide_longest].map(|it| it.memory_bytes),
        memory_most: [march_most, wide_most].map(|it| it.memory_bytes),
    };
    let mut text = numbers.conclusion();
    // Who knows the values of a key but not whose they are is right once in as many as there are documents.
    let learns = 0.5 + 0.5 / least as f64;
    for ((name, _), model) in MODELS.iter().zip(learned) {
        if let Some(result) = model.result(least).filter(|result| result.accuracy < learns) {
            text += &format!(
                "\nWith this seed {name} learned little: with {} facts it answers {:.0} %.",
                facts(least),
                100.0 * result.accuracy
            );
        }
    }
    text + "\nOne seed is an example, and seeds differ: docs/results/capacity.md has ten, with intervals."
}

/// What MARCH is compared by with the Gated DeltaNet of equal memory.
pub struct Numbers {
    /// The most facts asked about and the most in training.
    pub facts: (usize, usize),
    /// Accuracy and standard error with the most facts asked about.
    pub longest: [(f64, f64); 2],
    /// Bytes of memory there.
    pub memory: [usize; 2],
    /// Bytes of memory after the most facts in training.
    pub memory_most: [usize; 2],
}

impl Numbers {
    pub fn conclusion(&self) -> String {
        let [(march, march_error), (wide, wide_error)] = self.longest;
        let (longest, most) = self.facts;
        let points = 100.0 * (march - wide);
        // Two standard errors of the difference; with an unknown error no difference counts.
        let error = 200.0 * march_error.hypot(wide_error);
        let result = match points {
            _ if error.is_nan() || points.abs() <= error => "no difference beyond two standard errors".into(),
            _ if points > 0.0 => format!("MARCH is {points:.0} points ahead"),
            _ => format!("MARCH is {:.0} points behind", -points),
        };
        format!(
            "With {longest} facts, {} times as many as in training, MARCH answers {:.0} % and keeps {}; the GDN that \
             keeps\nabout as much after {most} facts ({} and {}) answers {:.0} % and keeps {}: {result}.",
            longest / most.max(1),
            100.0 * march,
            bytes(self.memory[0]),
            bytes(self.memory_most[0]),
            bytes(self.memory_most[1]),
            100.0 * wide,
            bytes(self.memory[1]),
        )
    }
}
