use std::cell::Cell;

use march_lm::data::needles::{Essay, Needles, TASKS, largest};
use march_lm::tokenizer::Tokenizer;

/// One number of one key in a text.
const NUMBER: Needles = TASKS[1].needles;

#[test]
fn sizes_are_found_with_few_counts() {
    // Texts that have more tokens per unit first, or last, and lines of 90 tokens.
    let slow = |units: usize| 90 + units + (units as f64).sqrt() as usize * 7;
    let fast = |units: usize| 90 + units + units * units / 100_000;
    let lines = |units: usize| 120 + 90 * units;
    let texts: [&dyn Fn(usize) -> usize; 3] = [&slow, &fast, &lines];
    for (i, text) in texts.iter().enumerate() {
        for budget in [300, 384, 896, 3968, 32_640, 130_944] {
            let counted = Cell::new(0);
            let count = |units| {
                counted.set(counted.get() + 1);
                Ok(text(units))
            };
            let size = largest((1, text(1)), 4 * budget, budget, count).unwrap();
            assert_eq!(size.tokens, text(size.units));
            assert!(size.tokens <= budget);
            let room = (budget - size.tokens) as f64;
            let next = text(size.units + 1);
            assert!(
                room <= budget as f64 / 256.0 || room < size.rate || next > budget,
                "{i} {budget} {size:?}"
            );
            assert!(counted.get() <= 8, "{i} {budget}: counted {} times", counted.get());
        }
    }
    // A tokenizer that makes nothing of the text.
    assert_eq!(largest((1, 5), 1000, 100, |_| Ok(5)).unwrap().units, 1000);
    // Nothing more fits.
    assert_eq!(largest((1, 99), 1000, 100, |units| Ok(90 + 9 * units)).unwrap().units, 1);
}

#[test]
fn impossible_tasks_are_refused() {
    let (tokenizer, essay) = (Tokenizer::bytes(), Essay::builtin());
    let refused = |needles: Needles, length| {
        needles.fit(&tokenizer, &essay, length, 0, 1).err().map(|error| error.to_string()).unwrap_or_default()
    };
    assert!(refused(Needles { keys: 41, ..NUMBER }, 9000).contains("1 to 40 needles"));
    assert!(refused(Needles { keys: usize::MAX, values: 3, ..NUMBER }, 9000).contains("1 to 40 needles"));
    assert!(refused(Needles { queries: 0, ..NUMBER }, 9000).contains("at least one question"));
    assert!(refused(NUMBER, usize::MAX).contains("too long"));
    assert!(refused(NUMBER, 0).contains("the smallest length that fits is"));
    let words = Tokenizer::words(&["a".into()]).unwrap();
    assert!(NUMBER.fit(&words, &essay, 4096, 0, 1).is_err());
}
