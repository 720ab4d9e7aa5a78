//! The training loop of a run: validate, sample, save, step, log.

use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use serde_json::{Value, json};

use super::{Event, Run, StepLine};
use crate::error::Result;
use crate::generate::{Generator, Sampling};
use crate::train::Validation;

impl Run {
    /// Makes the remaining steps, or fewer: once `stop` is set, the current state is saved. A single process abandons
    /// the step or validation in progress; several processes finish it together. An abandoned validation or sample is
    /// repeated when the run resumes. Returns whether the run is complete.
    pub fn train(&mut self, stop: &AtomicBool, watch: &mut dyn FnMut(Event)) -> Result<bool> {
        let train = self.config.train.clone();
        let writes = self.trainer.rank().0 == 0;
        let started = (Instant::now(), self.trainer.step());
        let mut saved = self.restored.then_some(self.trainer.step());
        // What was due at the step of a checkpoint was done before the checkpoint was written, unless it was
        // interrupted.
        let begun = (self.trainer.step() > 0 || train.steps > 0) && !self.progress.pending;
        let mut done = begun.then_some(self.trainer.step());
        loop {
            let step = self.trainer.step();
            let complete = step >= train.steps;
            let due = |every: u64| complete || (every > 0 && step.is_multiple_of(every));
            if done.replace(step) != Some(step) {
                let due = (due(train.validate_every), due(train.sample_every) && writes);
                self.progress.pending = !self.validate_and_sample(due, stop, watch)?;
            }
            let asked = stop.load(Ordering::Relaxed) || self.options.stop_at.is_some_and(|at| step >= at);
            // All processes stop after the same step.
            let mut any = [f64::from(u8::from(asked))];
            self.trainer.sum(&mut any)?;
            let asked = any[0] > 0.0;
            if step > 0 && saved != Some(step) && (asked || due(train.save_every)) && writes {
                watch(Event::Saved(self.save()?));
                self.note_saved()?;
                self.folder.prune(train.keep)?;
                saved = Some(step);
            }
            if complete || asked {
                return Ok(complete && !self.progress.pending);
            }
            let began = Instant::now();
            let Some(report) = self.trainer.advance_unless(&mut self.loader, stop)? else { continue };
            let seconds = began.elapsed().as_secs_f64();
            self.progress.cursor = self.loader.cursor();
            self.progress.tokens += report.tokens as u64;
            let step = self.trainer.step();
            let pace = started.0.elapsed().as_secs_f64() / (step - started.1) as f64;
            let tokens_per_second = report.tokens as f64 / seconds;
            let mut line = json!({
                "step": step, "loss": report.loss, "gradient_norm": report.gradient_norm,
                "learning_rate": report.rate, "tokens": self.progress.tokens,
                "tokens_per_second": tokens_per_second.round(),
            });
            if let Some(overlap) = &report.overlap {
                line["summing_hidden"] = json!(overlap.hidden());
            }
            self.log(&line)?;
            let seconds_left = pace * (train.steps - step) as f64;
            let steps = train.steps;
            watch(Event::Step(StepLine { step, steps, report, tokens_per_second, seconds_left }));
        }
    }

    /// Appends a line to the metrics, in the process that writes.
    fn log(&mut self, line: &Value) -> Result<()> {
        if self.trainer.rank().0 > 0 {
            return Ok(());
        }
        *self.progress.metric_lines.get_or_insert(0) += 1;
        self.folder.log(line)
    }

    /// Validates and samples, if due, and logs both. Returns whether that was done; otherwise `stop` was set in the
    /// meantime, and nothing was logged.
    fn validate_and_sample(
        &mut self,
        (validate, sample): (bool, bool),
        stop: &AtomicBool,
        watch: &mut dyn FnMut(Event),
    ) -> Result<bool> {
        let step = self.trainer.step();
        let validation = match &self.validation {
            Some(loader) if validate => {
                let sequences = self.config.train.validation_sequences;
                match self.trainer.validate(loader, sequences, stop)? {
                    Some(validation) => Some(validation),
                    None => return Ok(false),
                }
            }
            _ => None,
        };
        let samples = match sample {
            true => match self.samples(stop)? {
                Some(samples) => samples,
                None => return Ok(false),
            },
            false => Vec::new(),
        };
        if let Some(validation) = validation {
            let Validation { loss, accuracy } = validation;
            let lowest = self.progress.best.is_none_or(|(_, best)| loss < best);
            if lowest {
                self.progress.best = Some((step, loss));
            }
            self.log(&json!({ "step": step, "validation_loss": loss, "validation_accuracy": accuracy }))?;
            watch(Event::Validated(step, validation, lowest));
        }
        for (prompt, text) in samples {
            self.log(&json!({ "step": step, "prompt": prompt, "sample": text }))?;
            self.folder.log_sample(step, &prompt, &text)?;
            watch(Event::Sampled(step, prompt, text));
        }
        Ok(true)
    }

    /// Each prompt and the text that follows it; `None` if `stop` was set in the meantime.
    fn samples(&self, stop: &AtomicBool) -> Result<Option<Vec<(String, String)>>> {
        let mut samples = Vec::new();
        if !self.config.data.kind.is_text() {
            return Ok(Some(samples));
        }
        let (train, step, model) = (&self.config.train, self.trainer.step(), self.trainer.model());
        let stopped = || stop.load(Ordering::Relaxed);
        for (i, prompt) in train.prompts.iter().enumerate() {
            let ids = self.tokenizer.encode(prompt)?;
            if ids.is_empty() {
                continue;
            }
            let seed = train.seed.wrapping_add(step << 8).wrapping_add(i as u64);
            let sampling = Sampling { temperature: 0.8, seed, ..Sampling::default() };
            let bank = model.bank(self.trainer.settings().policy.clone())?;
            let mut generator = Generator::new(model, self.trainer.parameters(), bank, sampling)?;
            let keep_going = |_| if stopped() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) };
            generator.read(&ids, &mut { keep_going })?;
            let mut tokens = Vec::new();
            for _ in 0..train.sample_tokens {
                if stopped() {
                    return Ok(None);
                }
                tokens.push(generator.next_token()?);
            }
            samples.push((prompt.clone(), self.tokenizer.decode(&tokens)?));
        }
        Ok(Some(samples))
    }

    /// Records in `run.json` that the run has a checkpoint: from then on it does not start over without one.
    fn note_saved(&mut self) -> Result<()> {
        match &mut self.record {
            Some(record) if record.saved != Some(true) => {
                record.saved = Some(true);
                record.write(self.folder.path())
            }
            _ => Ok(()),
        }
    }

    /// Writes a checkpoint.
    pub(super) fn save(&self) -> Result<PathBuf> {
        let folder = self.folder.checkpoint(self.trainer.step());
        let tokenizer = self.config.data.kind.has_tokenizer().then(|| self.tokenizer.to_json());
        self.trainer.save(&folder, &self.progress, tokenizer.as_deref())?;
        Ok(folder)
    }
}
