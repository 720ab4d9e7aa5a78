//! The table that `march demo` prints about its trained models.

use super::demo::{Learned, MODELS};
use super::eval::percent;
use crate::display::out::say;
use crate::display::{bytes, lines, thousands};

/// Prints the results, one column per model.
pub fn table(learned: &[Learned]) {
    let line = |label: &str, cell: &dyn Fn(&Learned) -> String| {
        let cells: Vec<String> = learned.iter().map(|model| format!("{:>16}", cell(model))).collect();
        say!("{label:<30}{}", cells.concat());
    };
    say!("\n{:<30}{}", "", MODELS.map(|(name, _)| format!("{name:>16}")).concat());
    line("right answers", &|model| percent(model.result.accuracy, model.result.standard_error));
    for (i, age) in learned[0].result.by_age.iter().enumerate() {
        line(&format!("  fact {} to {} tokens old", age.from, age.to - 1), &|model| {
            model.result.by_age.get(i).map_or(String::new(), |age| percent(age.accuracy, age.standard_error))
        });
    }
    line("the same, without anchors", &|model| match &model.without {
        Some(without) => percent(without.accuracy, without.standard_error),
        None => "–".into(),
    });
    line("guessing", &|model| format!("{:.1} %", 100.0 * model.result.chance));
    line("memory of a sequence", &|model| bytes(model.result.memory_bytes));
    line("decoding, tokens per second", &|model| thousands(model.result.tokens_per_second as usize));
    line("parameters", &|model| thousands(model.parameters));
    line("learning rate", &|model| format!("{}", model.learning_rate));
    line("training", &|model| lines::duration(model.seconds));
}

/// Prints a one-sentence conclusion.
pub fn verdict(learned: &[Learned], quick: bool) {
    let [march, gdn] = learned else { return };
    let points = 100.0 * (march.result.accuracy - gdn.result.accuracy);
    if quick {
        say!("\nA quick run learns almost nothing; without --quick both models train for several minutes.");
    } else {
        say!(
            "\nMARCH's accuracy is {:.0} points {} than GDN's. With the same weights but no anchors it is \
             {:.0} %.",
            points.abs(),
            if points >= 0.0 { "higher" } else { "lower" },
            100.0 * march.without.as_ref().map_or(march.result.accuracy, |result| result.accuracy)
        );
    }
}
