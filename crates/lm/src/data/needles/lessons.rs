//! Needle prompts with their answers as training sequences, mixed with plain text.

use march_engine::ops::cross_entropy::IGNORE;

use super::super::loader::fingerprint;
use super::super::recall::Random;
use super::super::{Source, builtin, split};
use super::words::Items;
use super::{Drawn, Essay, Haystack, Needles, Place, Task, listed, seed_of};
use crate::error::{Error, Result};
use crate::tokenizer::Tokenizer;

/// What lessons are made of.
#[derive(Clone, Debug)]
pub struct LessonOptions {
    /// The tasks, each as likely as the others.
    pub tasks: Vec<Task>,
    /// T, the number of tokens per sequence.
    pub sequence_length: usize,
    /// The share of sequences that are plain text, from 0 to 1.
    pub text_share: f64,
    /// The fraction of the built-in text, its last part, that no sequence shows.
    pub validation_fraction: f64,
}

/// Sequences of needle lessons, or of plain text.
///
/// A lesson is a prompt of [`Needles`] and its answer, ` 1234567.` or ` 1234567, 2345678, and 3456789.`; only the
/// answer's tokens are targets. Its length is drawn uniformly from the shortest possible to T, so that short and long
/// haystacks occur. A sequence holds as many lessons as fit, one after the other with a line break between them; the
/// rest is line breaks. A haystack of text begins with a random sentence of the book. A sequence of plain text is a
/// random window of the book, and all of its tokens are targets.
///
/// Needles are drawn from streams of their own: one for training and one for validation, neither of them that of
/// evaluation ([`Needles::fit`]).
pub struct NeedleSource {
    options: LessonOptions,
    /// For each task, the tokens that a word or a line adds to a prompt, about.
    rates: Vec<f64>,
    tokenizer: Tokenizer,
    essay: Essay,
    /// The tokens of the book's part for training.
    text: Vec<u32>,
    /// A line break.
    blank: u32,
    /// The stream of sequences, and that of the needles in them.
    streams: [u64; 2],
    sequences: u64,
    targets: usize,
}

/// A lesson as tokens.
struct Lesson {
    prompt: Vec<u32>,
    answer: Vec<u32>,
}

/// How many prompts are drawn to find out what length the tasks need.
const TRIED: u64 = 50;

/// How many sequences are drawn to estimate the number of targets.
const COUNTED: u64 = 32;

/// How often a prompt is drawn again because even with the smallest haystack it is longer than T.
const AGAIN: usize = 1000;

/// The seed of a stream of random numbers. Those of evaluation are hashes of texts that begin with a haystack.
fn stream(what: &str, seed: u64) -> u64 {
    seed_of(&format!("needle lessons: {what} {seed}"))
}

impl NeedleSource {
    /// An endless source of training sequences. Fails if a task does not fit the sequence length.
    pub fn lessons(options: LessonOptions, tokenizer: Tokenizer, seed: u64) -> Result<Self> {
        if options.tasks.is_empty() || !(0.0..=1.0).contains(&options.text_share) {
            let message = "lessons need at least one task, and a share of text from 0 to 1";
            return Err(Error::Request(message.into()));
        }
        let (training, _) = split(builtin().len() as u64, options.validation_fraction)?;
        let text = &builtin()[..builtin().floor_char_boundary(training.end as usize)];
        let streams = [stream("sequences", seed), stream("needles", seed)];
        let mut source = Self {
            rates: Vec::new(),
            essay: Essay::new(text)?,
            text: tokenizer.encode(text)?,
            blank: tokenizer.encode("\n")?.last().copied().unwrap_or(0),
            tokenizer,
            options,
            streams,
            sequences: u64::MAX,
            targets: 0,
        };
        let (tokens, length) = (source.text.len(), source.options.sequence_length);
        if source.options.text_share > 0.0 && tokens <= length {
            return Err(Error::Request(format!(
                "`sequence_length` of [data] is {length}, but the built-in text has only {tokens} tokens for training; \
                 use shorter sequences, or set `text_share` to 0"
            )));
        }
        for task in &source.options.tasks {
            let rate = source.measure(task)?;
            source.rates.push(rate);
        }
        source.targets = source.expected()?;
        Ok(source)
    }

    /// The lessons for validation, without plain text; they are the same for every seed of the training.
    pub fn held_out(options: LessonOptions, tokenizer: Tokenizer, count: u64) -> Result<Self> {
        let mut source = Self::lessons(LessonOptions { text_share: 0.0, ..options }, tokenizer, 0)?;
        source.streams = [stream("validation sequences", 0), stream("validation needles", 0)];
        source.sequences = count;
        Ok(source)
    }

    /// The tokens that a word or a line adds to a task's prompts. Fails if a prompt and its answer do not fit.
    fn measure(&self, task: &Task) -> Result<f64> {
        let needles = &task.needles;
        needles.check()?;
        let (least, more) = (needles.count(), if needles.haystack == Haystack::Essay { 64 } else { 4 });
        let mut longest = 0;
        for index in 0..TRIED {
            let drawn = needles.draw(self.place(0), least, Random::new(self.streams[1], index))?;
            longest = longest.max(drawn.tokens + self.answer(needles, &drawn)?.len());
        }
        let length = self.options.sequence_length;
        if longest > length {
            return Err(Error::Request(format!(
                "`sequence_length` of [data] is {length}, but a prompt of the task `{}` and its answer take up to \
                 {longest} tokens even in the smallest haystack; use sequences of {longest} tokens or more, or leave \
                 the task out of `task`",
                task.name
            )));
        }
        let sizes = [least, least + more]
            .map(|units| needles.draw(self.place(0), units, Random::new(self.streams[1], 0)));
        let [small, large] = sizes;
        Ok((large?.tokens.saturating_sub(small?.tokens) as f64 / more as f64).max(1e-3))
    }

    /// The mean number of targets per sequence, estimated from the first sequences of lessons.
    fn expected(&self) -> Result<usize> {
        let LessonOptions { text_share, sequence_length, .. } = self.options;
        let mut targets = Vec::new();
        for index in 0..COUNTED {
            self.append_lessons(&mut self.random(index), &mut Vec::new(), &mut targets)?;
        }
        let lessons = targets.iter().filter(|&&id| id != IGNORE).count() as f64 / COUNTED as f64;
        let mean = text_share * sequence_length as f64 + (1.0 - text_share) * lessons;
        Ok((mean.round() as usize).max(1))
    }

    /// The random numbers of a sequence.
    fn random(&self, index: u64) -> Random {
        Random::new(self.streams[0], index)
    }

    fn place(&self, first: usize) -> Place<'_> {
        Place { tokenizer: &self.tokenizer, essay: &self.essay, first }
    }

    /// The answer as tokens: what the prompt is continued with, so it is encoded on its own as in generation. Values
    /// are in the order of the questions, and those of one key in the order of the text, which a model can know.
    fn answer(&self, needles: &Needles, drawn: &Drawn) -> Result<Vec<u32>> {
        let mut answers: Vec<&str> = drawn.answers.iter().map(String::as_str).collect();
        for values in answers.chunks_mut(needles.values) {
            values.sort_by_key(|value| drawn.needles.iter().position(|needle| needle.value == **value));
        }
        self.tokenizer.encode(&format!(" {}.", listed(&answers)))
    }

    /// Draws a lesson of at most T tokens; `None` if it is longer than `left`.
    fn lesson(&self, random: &mut Random, left: usize) -> Result<Option<Lesson>> {
        let length = self.options.sequence_length;
        let mut found = None;
        for _ in 0..AGAIN {
            let kind = random.below(self.options.tasks.len());
            let needles = &self.options.tasks[kind].needles;
            let place = self.place(random.below(self.essay.count()));
            let own = random.below(usize::MAX) as u64;
            let draw = move |units| needles.draw(place, units, Random::new(self.streams[1], own));
            let smallest = draw(needles.count())?;
            let answer = self.answer(needles, &smallest)?;
            // The longest of many was compared with T; a longer one is rare.
            if smallest.tokens + answer.len() <= length {
                found = Some((kind, draw, smallest, answer));
                break;
            }
        }
        let Some((kind, draw, mut drawn, answer)) = found else {
            return Err(Error::Request(format!(
                "none of {AGAIN} needle prompts fits `sequence_length` of [data], {length} tokens; use longer \
                 sequences"
            )));
        };
        let needles = &self.options.tasks[kind].needles;
        let (least, smallest) = (needles.count(), drawn.tokens + answer.len());
        let wanted = smallest + random.below(length - smallest + 1);
        if smallest > left {
            return Ok(None);
        }
        let rate = self.rates[kind];
        let most = match needles.haystack {
            Haystack::Needles => Items::most(needles.key).min(Items::most(needles.value)) - least,
            _ => usize::MAX,
        };
        let mut units = least.saturating_add(((wanted - smallest) as f64 / rate) as usize).min(most);
        while units > least {
            let larger = draw(units)?;
            let excess = (larger.tokens + answer.len()).saturating_sub(wanted);
            if excess == 0 {
                drawn = larger;
                break;
            }
            units = units.saturating_sub((excess as f64 / rate).ceil().max(1.0) as usize).max(least);
        }
        if drawn.tokens + answer.len() > left {
            return Ok(None);
        }
        Ok(Some(Lesson { prompt: self.tokenizer.encode(&drawn.prompt)?, answer }))
    }

    /// Appends a sequence of lessons.
    fn append_lessons(
        &self,
        random: &mut Random,
        inputs: &mut Vec<u32>,
        targets: &mut Vec<u32>,
    ) -> Result<()> {
        let end = inputs.len() + self.options.sequence_length;
        let mut all = vec![IGNORE; self.options.sequence_length];
        let mut at = 0;
        while let Some(Lesson { prompt, answer }) = self.lesson(random, all.len() - at)? {
            // The first token of the answer is predicted after the last one of the prompt.
            let first = at + prompt.len() - 1;
            all[first..first + answer.len()].copy_from_slice(&answer);
            at += prompt.len() + answer.len();
            inputs.extend(prompt.into_iter().chain(answer));
            if at == all.len() {
                break;
            }
            inputs.push(self.blank);
            at += 1;
        }
        inputs.resize(end, self.blank);
        targets.append(&mut all);
        Ok(())
    }

    /// Appends a random window of the text.
    fn append_text(&self, random: &mut Random, inputs: &mut Vec<u32>, targets: &mut Vec<u32>) {
        let length = self.options.sequence_length;
        let start = random.below(self.text.len() - length);
        inputs.extend_from_slice(&self.text[start..start + length]);
        targets.extend_from_slice(&self.text[start + 1..start + length + 1]);
    }
}

impl Source for NeedleSource {
    fn sequence_length(&self) -> usize {
        self.options.sequence_length
    }

    fn sequences(&self) -> u64 {
        self.sequences
    }

    /// The expected number: sequences of text have T targets, and those of lessons have few. Gradients are divided by
    /// the expected number, so that every target weighs the same whatever else is in its step.
    fn targets(&self) -> usize {
        self.targets
    }

    fn sequence(&self, index: u64, inputs: &mut Vec<u32>, targets: &mut Vec<u32>) -> Result<()> {
        let mut random = self.random(index);
        if random.unit() < self.options.text_share {
            self.append_text(&mut random, inputs, targets);
            return Ok(());
        }
        self.append_lessons(&mut random, inputs, targets)
    }

    fn fingerprint(&self) -> Result<String> {
        let LessonOptions { tasks, sequence_length, text_share, .. } = &self.options;
        let names: Vec<&str> = tasks.iter().map(|task| task.name).collect();
        let [stream, _] = self.streams;
        let about =
            format!("needles {} {sequence_length} {text_share} {stream} {}", names.join(","), self.sequences);
        // Some sequences, so that a change in how they are drawn is detected.
        let (mut inputs, mut targets) = (Vec::new(), Vec::new());
        for index in 0..self.sequences.min(4) {
            self.append_lessons(&mut self.random(index), &mut inputs, &mut targets)?;
        }
        Ok(fingerprint(&about, &[&inputs, &targets, &self.text]))
    }
}
