//! How much of a prompt is read in a step in which texts are being written: as much as makes the step less than about
//! twice as long as it would be without. That depends on the model and the machine, so it is measured while they run.
//! Results do not depend on it.

use std::time::Duration;

use march_lm::generate::{GRID, Inference};

/// The shortest slice.
const SHORTEST: usize = 4;

/// Slices become shorter if a step takes more than this many times what it takes without a prompt.
const LONG: f64 = 1.6;

/// Slices become longer if steps take less than this many times what they take without a prompt.
const SHORT: f64 = 1.25;

/// The number of short steps in a row after which slices become longer.
const PATIENCE: usize = 8;

/// Every so many steps, one without a prompt is measured.
const PROBE: usize = 16;

/// The weight of the newest step in the mean.
const NEW: f64 = 0.25;

/// Chooses slices.
pub struct Slices {
    /// The model with slices of increasing length.
    choices: Vec<Inference>,
    now: usize,
    /// The mean time of a step without a prompt, in seconds.
    plain: Option<f64>,
    short: usize,
    since_probe: usize,
}

impl Slices {
    /// Slices of at most `most` tokens; not shorter than a chunk if the model's bits depend on calls.
    pub fn new(inference: &Inference, most: usize, any_calls: bool) -> Self {
        let shortest = if any_calls { SHORTEST } else { GRID };
        let lengths = std::iter::successors(Some(shortest), |&length| Some(2 * length));
        let choices: Vec<Inference> = lengths
            .take_while(|&length| length <= most.max(shortest))
            .map(|length| inference.clone().with_call_tokens(length))
            .collect();
        Self { choices, now: 0, plain: None, short: 0, since_probe: 0 }
    }

    /// The model to run a step with, and the number of prompt tokens in it, which may be 0.
    pub fn next(&mut self) -> (&Inference, usize) {
        let inference = &self.choices[self.now];
        self.since_probe += 1;
        let probe = self.plain.is_none() || self.since_probe >= PROBE;
        (inference, if probe { 0 } else { inference.call_tokens() })
    }

    /// Notes how long a step took in which texts were written.
    pub fn record_step_time(&mut self, time: Duration, with_prompts: bool) {
        let time = time.as_secs_f64();
        let Some(plain) = self.plain.filter(|_| with_prompts) else {
            let before = self.plain.unwrap_or(time);
            // One step that the system delayed says little.
            self.plain = Some(before + NEW * (time.min(2.0 * before) - before));
            self.since_probe = 0;
            return;
        };
        if time > LONG * plain {
            (self.now, self.short) = (self.now.saturating_sub(1), 0);
        } else if time < SHORT * plain {
            self.short += 1;
        }
        if self.short >= PATIENCE {
            (self.now, self.short) = ((self.now + 1).min(self.choices.len() - 1), 0);
        }
    }
}
