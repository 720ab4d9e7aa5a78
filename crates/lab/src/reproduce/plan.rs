//! The training runs of an experiment, before any of them starts.
//!
//! For each course and arm: two runs per learning rate, with seeds of their own, to choose the rate; then one run per
//! seed at the chosen rate. The rate with the lowest mean loss on validation questions is chosen; if it is the lowest
//! or the highest that was tried, further ones are tried. Results come from other questions. A run is identified by
//! everything that determines its weights, so experiments share runs.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::Instant;

use march_engine::{CpuOptions, Device};
use sha2::{Digest, Sha256};

use super::experiment::{CORPUS, Course, Evaluation, Experiment, Size, Stage, Sweep};
use super::job::policy;
use super::passages::count_passages;
use crate::corpus::PARTS;
use march_lm::Config;
use march_lm::data::recall::Task;
use march_lm::data::{DataKind, Loader, Shards, Sources};
use march_lm::model::{Model, Settings};
use march_lm::tokenizer::Tokenizer;
use march_lm::train::Trainer;
use march_lm::{Error, Result};

/// The first seed of the runs that choose a learning rate. Results use the seeds from 1.
const FIRST_SWEEP_SEED: u64 = 1000;

/// The range of learning rates that a choice may extend to.
const RATES: std::ops::RangeInclusive<f64> = 1e-5..=0.1;

/// The speed of reading a text as a share of that of training, per FLOP.
const READING: f64 = 0.7;

/// Tokens of the two definitions of a copy.
const DEFINITIONS: usize = 200;

/// A preset that trains on text; its `[data]` is what courses start from.
const TEXT_PRESET: &str = "tiny/gdn";

/// Options that apply to all runs.
#[derive(Clone, Debug)]
pub struct Scale {
    /// The size.
    pub size: Size,
    /// Seeds per result.
    pub seeds: u64,
    /// The corpus, for courses that use it.
    pub corpus: Option<Corpus>,
}

/// A corpus as `march data corpus` writes it.
#[derive(Clone, Debug, PartialEq)]
pub struct Corpus {
    /// The folder of the training tokens; the others are beside it.
    training: PathBuf,
    /// Identifies the tokens.
    fingerprint: String,
    vocabulary: usize,
}

impl Corpus {
    /// Opens the corpus in a folder.
    pub fn open(folder: &Path) -> Result<Self> {
        let training = folder.join(PARTS[0]);
        let shards = Shards::open(&training)?;
        let vocabulary = shards.meta().vocabulary as usize;
        Ok(Self { fingerprint: shards.fingerprint()?, training, vocabulary })
    }
}

impl Scale {
    /// The scale of a size, with its usual number of seeds.
    pub fn new(size: Size) -> Self {
        let seeds = if size == Size::Quick { 2 } else { 5 };
        Self { size, seeds, corpus: None }
    }

    /// Steps of a stage, its sequences per step, or sequences of an evaluation.
    pub fn samples(&self, samples: u64) -> u64 {
        if self.size == Size::Quick { samples.min(2) } else { samples }
    }

    /// Tokens of a sequence of text or needles in an evaluation.
    pub fn length(&self, length: usize) -> usize {
        if self.size == Size::Quick { length.min(2048) } else { length }
    }

    /// Whether this is more than a quick run.
    pub fn is_full(&self) -> bool {
        self.size != Size::Quick
    }

    /// The rates to choose from.
    fn rates<'a>(&self, rates: &'a [f64]) -> &'a [f64] {
        if self.size == Size::Quick { &rates[..rates.len().min(1)] } else { rates }
    }
}

/// A training run: its stages, each a complete configuration.
#[derive(Clone, Debug, PartialEq)]
pub struct Job {
    /// The arm.
    pub arm: String,
    /// The course.
    pub course: String,
    /// The learning rate.
    pub rate: f64,
    /// The seed.
    pub seed: u64,
    /// The stages.
    pub stages: Vec<Config>,
    /// The course of each stage.
    courses: Vec<String>,
    /// Identifies the corpus that the stages are trained on, if any.
    corpus: Option<String>,
    /// The initial bias of the null where a Gated DeltaNet continues as MARCH, if not the usual one.
    pub upcycle_null_bias: Option<f64>,
}

/// An arm on a course: how its rate is chosen.
#[derive(Clone, Debug, PartialEq)]
pub struct Entry {
    /// The arm.
    pub arm: String,
    /// The course.
    pub course: String,
    /// The rates to choose from; a single one needs no runs.
    pub rates: Vec<f64>,
    /// The arm and course whose choice is used instead.
    pub rate_of: Option<(String, String)>,
}

/// The runs of an experiment.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The experiment.
    pub experiment: Experiment,
    /// The scale.
    pub scale: Scale,
    /// All arms on all their courses.
    pub entries: Vec<Entry>,
}

impl Plan {
    /// Plans an experiment; every configuration is checked.
    pub fn new(experiment: Experiment, scale: Scale) -> Result<Self> {
        let mut entries = Vec::new();
        for name in &experiment.courses {
            let course = &experiment.course[name];
            for arm in experiment.arms_of(name) {
                let own = &experiment.arm[arm];
                let of_arm = own.rates_of.clone().filter(|other| experiment.arms.contains(other));
                let of_course = course.rates_of.clone().filter(|other| experiment.courses.contains(other));
                let rate_of = (of_arm.is_some() || of_course.is_some()).then(|| {
                    (of_arm.unwrap_or_else(|| arm.clone()), of_course.unwrap_or_else(|| name.clone()))
                });
                let mut rates = own.rates.clone().unwrap_or_else(|| course.rates.clone());
                rates.extend(course.more_rates.get(arm).into_iter().flatten());
                let rates = scale.rates(&rates).to_vec();
                if rates.is_empty() {
                    return Err(Error::Request(format!("course `{name}` has no learning rates")));
                }
                entries.push(Entry { arm: arm.clone(), course: name.clone(), rates, rate_of });
            }
        }
        let plan = Self { experiment, scale, entries };
        for entry in &plan.entries {
            plan.job(entry, entry.rates[0], 1)?;
        }
        Ok(plan)
    }

    /// Whether this is more than a quick run.
    pub fn is_full(&self) -> bool {
        self.scale.is_full()
    }

    /// The runs that choose the rates of these entries.
    pub fn sweep(&self, entries: &[Entry]) -> Result<Vec<Job>> {
        let mut jobs = Vec::new();
        for entry in entries.iter().filter(|entry| entry.is_swept()) {
            let Sweep { share, seeds } = self.experiment.course[&entry.course].sweep;
            for &rate in &entry.rates {
                for seed in FIRST_SWEEP_SEED..FIRST_SWEEP_SEED + seeds {
                    let mut job = self.job(entry, rate, seed)?;
                    for stage in &mut job.stages {
                        stage.train.steps = ((stage.train.steps as f64 * share) as u64).max(1);
                        stage.train.validate_every = stage.train.steps.div_ceil(8);
                    }
                    jobs.push(job);
                }
            }
        }
        Ok(jobs)
    }

    /// The runs of the results of one entry, at a rate.
    pub fn results(&self, entry: &Entry, rate: f64) -> Result<Vec<Job>> {
        (1..=self.seeds_of(entry)).map(|seed| self.job(entry, rate, seed)).collect()
    }

    /// Seeds of an entry's results.
    fn seeds_of(&self, entry: &Entry) -> u64 {
        let most = self.experiment.arm[&entry.arm].seeds;
        self.scale.seeds.min(most.unwrap_or(u64::MAX))
    }

    /// A run of an entry.
    pub fn job(&self, entry: &Entry, rate: f64, seed: u64) -> Result<Job> {
        let all = self.experiment.stages_of(&entry.course);
        let stages = all.iter().enumerate().map(|(i, (course, stage))| {
            self.stage(entry, &self.experiment.course[*course], (i, stage), rate, seed)
        });
        let stages = stages.collect::<Result<Vec<Config>>>()?;
        let courses = all.iter().map(|(course, _)| course.to_string()).collect();
        let arm = &self.experiment.arm[&entry.arm];
        let upcycle_null_bias = arm.begins_as.as_ref().and(arm.upcycle_null_bias);
        Ok(Job {
            arm: entry.arm.clone(),
            course: entry.course.clone(),
            rate,
            seed,
            stages,
            courses,
            corpus: self.scale.corpus.as_ref().map(|corpus| corpus.fingerprint.clone()),
            upcycle_null_bias,
        })
    }

    fn stage(
        &self,
        entry: &Entry,
        course: &Course,
        (number, stage): (usize, &Stage),
        rate: f64,
        seed: u64,
    ) -> Result<Config> {
        let arm = &self.experiment.arm[&entry.arm];
        let arm = match &arm.begins_as {
            Some(other) if number == 0 => self.experiment.arm.get(other).unwrap_or(arm),
            _ => arm,
        };
        let (mut data, mut settings): (Vec<String>, Vec<String>) = [&arm.set[..], &course.set, &stage.set]
            .concat()
            .into_iter()
            .partition(|set| set.starts_with("data."));
        let task = stage.task.as_ref().map(|task| Task::open(task, stage.length)).transpose()?;
        let given = data.iter().position(|set| set == CORPUS).map(|at| data.remove(at)).is_some();
        let corpus = match (given, &self.scale.corpus) {
            (false, _) => None,
            (true, Some(corpus)) => Some(corpus),
            (true, None) => {
                let message = "needs a corpus: make one with `march data corpus --output data/corpus`, or name its \
                               folder with --corpus";
                return Err(Error::Request(format!("course `{}` {message}", entry.course)));
            }
        };
        let vocabulary = match (&task, corpus) {
            (Some(task), _) => task.vocabulary().len(),
            (None, Some(corpus)) => corpus.vocabulary,
            (None, None) => Tokenizer::load("bytes")?.vocabulary(),
        };
        settings.push(format!("model.vocab_size={vocabulary}"));
        let mut config = Config::load_with(&arm.base, &settings)?;
        // The arms' presets have data of their own, which a course replaces as a whole.
        let given = stage.length.map(|length| self.scale.length(length));
        let Some(length) = task.map(|task| task.length()).or(given) else {
            return Err(Error::Request(format!("course `{}`: a stage needs a `length`", entry.course)));
        };
        data.push(format!("data.sequence_length={length}"));
        data.push(format!("train.tokens_per_step={length}"));
        if let Some(task) = &stage.task {
            data.extend(["data.kind=recall".into(), format!("data.task=\"{task}\"")]);
        }
        config.data = Config::load_with(TEXT_PRESET, &data)?.data;
        if let Some(Corpus { training, .. }) = corpus {
            (config.data.kind, config.data.path) = (DataKind::Shards, Some(training.display().to_string()));
            if self.scale.size == Size::Quick {
                config.data.validation_fraction = 0.3; // a sequence of the corpus that a quick run makes
            }
        }
        let train = &mut config.train;
        train.steps = self.scale.samples(stage.steps);
        let rows = self.scale.samples(stage.rows as u64) as usize;
        (train.micro_batch, train.tokens_per_step) = (rows, rows * length);
        train.validate_every = train.steps.div_ceil(8);
        train.learning_rate = rate;
        // Stages of a run see different sequences.
        train.seed = seed + 1_000_000 * number as u64;
        (train.save_every, train.keep, train.prompts) = (0, 1, Vec::new());
        train.validation_sequences = self.scale.samples(train.validation_sequences as u64) as usize;
        train.check(length).map_err(|(key, message)| Error::config(&entry.course, key, message))?;
        Ok(config)
    }

    /// Estimated seconds of all runs and measurements on one thread, if none exists yet: their work at the speed of some
    /// steps of the first run.
    pub fn estimate(&self) -> Result<f64> {
        let first = self.entries.first().map(|entry| self.job(entry, entry.rates[0], 1)).transpose()?;
        let speed = first.as_ref().and_then(|job| job.stages.last()).map_or(Ok(1e10), measured_speed)?;
        Ok((self.total(work)? + self.measurements()?.1 / READING) / speed)
    }

    /// Tokens that all runs train on, if none exists yet.
    pub fn tokens(&self) -> Result<f64> {
        self.total(tokens)
    }

    /// Tokens that are read to measure all runs of the results, and the FLOP of reading them.
    pub fn measurements(&self) -> Result<(f64, f64)> {
        let (mut tokens, mut flop) = (0.0, 0.0);
        for evaluation in &self.experiment.evaluations {
            let (count, length) = self.sequences(evaluation)?;
            for (name, variant) in self.experiment.rows() {
                let (arm, changes) = variant.map_or((name, ""), |variant| (&variant.of, &variant.policy));
                let own = |entry: &&Entry| entry.arm == arm && entry.course == evaluation.course;
                let Some(entry) = self.entries.iter().find(own).filter(|_| evaluation.concerns(name)) else {
                    continue;
                };
                let stages = self.job(entry, entry.rates[0], 1)?.stages;
                let model = Model::new(&stages[evaluation.stage.unwrap_or(stages.len()) - 1].model);
                let sequences = count as f64 * self.seeds_of(entry) as f64;
                tokens += sequences * length as f64;
                flop += sequences * model.work(length, &policy(&model.policy(), changes)?);
            }
        }
        Ok((tokens, flop))
    }

    /// The sequences of an evaluation and the tokens of each; of copies, the most that there can be.
    fn sequences(&self, evaluation: &Evaluation) -> Result<(usize, usize)> {
        let samples = self.scale.samples(evaluation.samples) as usize;
        let Some(part) = &evaluation.text else {
            let task =
                evaluation.task.as_ref().map(|task| Task::open(task, evaluation.length)).transpose()?;
            let length = task.map_or(evaluation.length.unwrap_or(1024), |task| task.length());
            let tasks = evaluation.needles.iter().map(|tasks| tasks.split(',').count()).sum::<usize>();
            return Ok((samples * tasks.max(1), length));
        };
        let Some(corpus) = &self.scale.corpus else { return Ok((0, 0)) };
        let shards = Shards::open(&corpus.training.with_file_name(part))?;
        let (length, count) = match evaluation.copy {
            Some(distance) => {
                (self.scale.length(distance) + DEFINITIONS, count_passages(&shards, 1, samples)?)
            }
            None => {
                let length = self.scale.length(evaluation.length.unwrap_or(4096));
                (length, count_passages(&shards, length, samples)?)
            }
        };
        Ok((count, length))
    }

    /// The runs of the results.
    pub fn result_runs(&self) -> u64 {
        self.entries.iter().map(|entry| self.seeds_of(entry)).sum()
    }

    /// The sum of a quantity over the stages of all runs. A stage that several share counts once.
    fn total(&self, of: impl Fn(&Config) -> f64) -> Result<f64> {
        let mut jobs = self.sweep(&self.entries)?;
        for entry in &self.entries {
            let (arm, course) =
                entry.rate_of.as_ref().map_or((&entry.arm, &entry.course), |of| (&of.0, &of.1));
            let chosen = self.entries.iter().find(|other| (&other.arm, &other.course) == (arm, course));
            jobs.extend(self.results(entry, chosen.unwrap_or(entry).rates[0])?);
        }
        let (mut counted, mut sum) = (BTreeSet::new(), 0.0);
        for job in &jobs {
            for (number, stage) in job.stages.iter().enumerate() {
                if counted.insert(job.folder(Path::new(""), number)) {
                    sum += of(stage);
                }
            }
        }
        Ok(sum)
    }
}

impl Entry {
    /// Whether runs choose its rate.
    fn is_swept(&self) -> bool {
        self.rate_of.is_none() && self.rates.len() > 1
    }

    /// Adds a rate beyond the best one if that is the lowest or the highest; whether it did.
    pub(super) fn extend(&mut self, best: f64) -> bool {
        if !self.is_swept() {
            return false;
        }
        self.rates.sort_by(f64::total_cmp);
        let more = match self.rates.iter().position(|&rate| rate == best) {
            Some(0) => best / 2.0,
            Some(at) if at + 1 == self.rates.len() => best * 2.0,
            _ => return false,
        };
        if RATES.contains(&more) {
            self.rates.push(more);
        }
        RATES.contains(&more)
    }
}

/// A name for a folder: letters in lower case and digits, with hyphens in place of all else.
pub fn plain_name(name: &str) -> String {
    let plain = name.to_lowercase();
    let words = plain.split(|c: char| !c.is_ascii_alphanumeric()).filter(|word| !word.is_empty());
    words.collect::<Vec<_>>().join("-")
}

/// Tokens that a stage trains on.
fn tokens(stage: &Config) -> f64 {
    stage.train.steps as f64 * stage.train.tokens_per_step as f64
}

/// FLOP of the matrix products of a stage.
fn work(stage: &Config) -> f64 {
    let model = Model::new(&stage.model);
    let length = stage.data.sequence_length;
    let one = model.work(length, &stage.model.policy().unwrap_or_default());
    3.0 * one / length as f64 * stage.train.tokens_per_step as f64 * stage.train.steps as f64
}

/// FLOP per second of some steps of a stage on one thread.
fn measured_speed(stage: &Config) -> Result<f64> {
    const STEPS: u64 = 4;
    let device = Device::cpu(CpuOptions { threads: 1, ..CpuOptions::default() })?;
    let Sources { training, .. } = Sources::open(&stage.data, 0, 1)?;
    let mut loader = Loader::new(training, None)?;
    let model = Model::new(&stage.model);
    let parameters = model.init(&device, 0)?;
    let settings = Settings { policy: stage.model.policy().unwrap_or_default(), ..Default::default() };
    let length = stage.data.sequence_length;
    let mut trainer = Trainer::new(model, parameters, settings, stage.train.clone(), length)?;
    trainer.advance(&mut loader)?;
    let began = Instant::now();
    for _ in 0..STEPS {
        trainer.advance(&mut loader)?;
    }
    let seconds = began.elapsed().as_secs_f64() / STEPS as f64;
    Ok(work(stage) / stage.train.steps as f64 / seconds.max(1e-9))
}

impl Job {
    /// Tokens that it trains on.
    pub fn tokens(&self) -> f64 {
        self.stages.iter().map(tokens).sum()
    }

    /// Tokens of its own course, without those of a course that it continues, which other runs train on as well.
    pub fn own_tokens(&self) -> f64 {
        let own = self.stages.iter().zip(&self.courses).filter(|(_, course)| **course == self.course);
        own.map(|(stage, _)| tokens(stage)).sum()
    }

    /// Identifies the weights that the first `stages` stages give.
    fn hash(&self, stages: usize) -> String {
        let mut hash = Sha256::new();
        for stage in &self.stages[..stages] {
            // The same tokens in another folder give the same weights.
            let mut stage = stage.clone();
            if let (Some(_), Some(corpus)) = (&stage.data.path, &self.corpus) {
                stage.data.path = Some(corpus.clone());
            }
            hash.update(stage.to_toml());
        }
        // The first stage is that of the model which is continued.
        if let Some(bias) = self.upcycle_null_bias.filter(|_| stages > 1) {
            hash.update(bias.to_le_bytes());
        }
        hash.finalize().iter().take(6).map(|byte| format!("{byte:02x}")).collect()
    }

    /// The folder of a stage's run. Its name begins with what a person looks for; runs that share their first stages
    /// share those folders.
    pub fn folder(&self, all: &Path, stage: usize) -> PathBuf {
        let config = &self.stages[stage];
        let kind = plain_name(config.model.mixer.model_type());
        let name = format!(
            "{}-stage-{}-{kind}-rate-{}-seed-{}-{}",
            plain_name(&self.courses[stage]),
            stage + 1,
            self.rate,
            self.seed,
            self.hash(stage + 1)
        );
        all.join(name)
    }
}
