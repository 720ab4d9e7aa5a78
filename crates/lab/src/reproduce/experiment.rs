//! An experiment as a file: `configs/reproduce/NAME.toml`, embedded in the program.
//!
//! ```text
//! courses    what a model is trained on: stages, each of which starts from the weights of the one before
//! arms       the models: a preset and what differs from it
//! ask        what a trained model is measured on
//! variants   the same weights under another memory policy
//! compare    pairs of arms whose difference is tested
//! ```
//! Courses and arms that several experiments share are in `common.toml`, so that runs are shared, too.

use std::collections::BTreeMap;
use std::path::Path;

use serde::Deserialize;

use march_lm::config::choice;
use march_lm::{Error, Result};

macro_rules! embed {
    ($($name:literal),* $(,)?) => {
        &[$(($name, include_str!(concat!("../../configs/reproduce/", $name, ".toml")))),*]
    };
}

/// Names and texts of the experiments that train models.
const RECIPES: &[(&str, &str)] = embed![
    "recall",
    "mqar",
    "capacity",
    "frontier",
    "length",
    "interval",
    "routing",
    "placement",
    "upcycle",
    "text",
];

/// Courses and arms that experiments share.
const COMMON: &str = include_str!("../../configs/reproduce/common.toml");

/// The setting of a course that trains on a corpus.
pub(super) const CORPUS: &str = "data.path=corpus";

/// The experiment that measures speed instead of training models.
pub const EFFICIENCY: &str = "efficiency";

/// The names of all experiments.
pub fn names() -> impl Iterator<Item = &'static str> + Clone {
    RECIPES.iter().map(|(name, _)| *name).chain([EFFICIENCY])
}

/// The size of an experiment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Size {
    /// A few steps of each run: shows that everything works, but no result.
    Quick,
    /// What two cores can carry in half an hour.
    Laptop,
}

impl Size {
    /// The name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Quick => "quick",
            Self::Laptop => "laptop",
        }
    }
}

/// An experiment.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Experiment {
    /// Its name, that of the file.
    #[serde(skip)]
    pub name: String,
    /// The heading of its page.
    pub title: String,
    /// The question, in a paragraph.
    pub question: String,
    /// What it stands for in the paper.
    pub paper: String,
    /// Seeds per result, if not as many as usual.
    pub seeds: Option<u64>,
    /// The courses of `common.toml` and of this file that it uses.
    pub courses: Vec<String>,
    /// The arms that it uses, in the order of the tables.
    pub arms: Vec<String>,
    /// Courses of this experiment alone.
    #[serde(default)]
    pub course: BTreeMap<String, Course>,
    /// Arms of this experiment alone.
    #[serde(default)]
    pub arm: BTreeMap<String, Arm>,
    /// What trained models are measured on.
    #[serde(default, rename = "ask")]
    pub evaluations: Vec<Evaluation>,
    /// Trained models under another memory policy.
    #[serde(default)]
    pub variant: Vec<Variant>,
    /// When a seed counts as a success; without it, none is counted.
    pub success: Option<Success>,
    /// Pairs whose difference is tested: first and second.
    #[serde(default)]
    pub compare: Vec<[String; 2]>,
    /// The figures.
    #[serde(default)]
    pub figure: Vec<FigureSpec>,
    /// Numbers of the paper, for comparison.
    pub published: Option<Published>,
    /// What differs from the paper's setting.
    #[serde(default)]
    pub scaled: Vec<String>,
    /// What was tried before this setting was chosen.
    #[serde(default)]
    pub tried: Vec<String>,
    /// The paper's experiment: presets to train, and commands to evaluate them.
    #[serde(default)]
    pub full: PaperExperiment,
    /// Trained models that are kept in a form that can be published.
    pub release: Option<Release>,
    /// Arms need not have the same number of parameters; one that begins as another never needs to.
    #[serde(default)]
    pub free_parameters: bool,
}

/// What a model is trained on.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Course {
    /// One sentence.
    pub about: String,
    /// Settings for all stages.
    #[serde(default)]
    pub set: Vec<String>,
    /// The course that comes before this one; runs of that are continued.
    pub after: Option<String>,
    /// The stages.
    pub stage: Vec<Stage>,
    /// The learning rates to choose from, each tried with two seeds.
    #[serde(default)]
    pub rates: Vec<f64>,
    /// The share of the steps, and the seeds, with which rates are tried, if not all and two.
    #[serde(default)]
    pub sweep: Sweep,
    /// Further rates for single arms, whose best rate was at the end of the list.
    #[serde(default)]
    pub more_rates: BTreeMap<String, Vec<f64>>,
    /// Use the rate that was chosen on this course instead of choosing one.
    pub rates_of: Option<String>,
    /// The arms that take the course; all if not given.
    pub arms: Option<Vec<String>>,
}

/// How learning rates are tried.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Sweep {
    /// The share of each stage's steps.
    pub share: f64,
    /// Seeds.
    pub seeds: u64,
}

impl Default for Sweep {
    fn default() -> Self {
        Self { share: 1.0, seeds: 2 }
    }
}

/// A part of a course.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Stage {
    /// The recall task; sequences are as short as it allows unless `length` is given.
    pub task: Option<String>,
    /// Tokens per sequence.
    pub length: Option<usize>,
    /// Sequences per step.
    pub rows: usize,
    /// Steps.
    pub steps: u64,
    /// Further settings.
    #[serde(default)]
    pub set: Vec<String>,
}

/// A model.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Arm {
    /// The preset that it starts from.
    pub base: String,
    /// What differs from the preset.
    #[serde(default)]
    pub set: Vec<String>,
    /// The arm whose model takes the first stage; this one continues with its weights.
    pub begins_as: Option<String>,
    /// For `begins_as`: the initial bias of the null, as for `march train --upcycle-null-bias`.
    pub upcycle_null_bias: Option<f64>,
    /// Rates to choose from, if not those of the course.
    pub rates: Option<Vec<f64>>,
    /// Use the rate that was chosen for this arm instead of choosing one.
    pub rates_of: Option<String>,
    /// The most seeds; as many as the experiment has if not given.
    pub seeds: Option<u64>,
}

/// What a trained model is measured on: one of `task`, `needles` and `text`.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Evaluation {
    /// The course of the models that are evaluated.
    pub course: String,
    /// The column's heading.
    pub name: String,
    /// The position on the horizontal axis of figures.
    pub x: Option<f64>,
    /// A recall task.
    pub task: Option<String>,
    /// Needle tasks of the evaluation suites, with commas between them; the mean of their scores counts.
    pub needles: Option<String>,
    /// The loss on a part of the corpus that no model was trained on: `held-out` or `books`.
    pub text: Option<String>,
    /// For `text`: the loss on definitions that occurred this many tokens before.
    pub copy: Option<usize>,
    /// Tokens per sequence; for recall, as short as possible if not given.
    pub length: Option<usize>,
    /// Number of sequences; for `text`, passages of each document.
    pub samples: u64,
    /// The stage of the course, from 1, after which the models are evaluated; the last if not given.
    pub stage: Option<usize>,
    /// The arms and variants that are evaluated; all if not given.
    pub only: Option<Vec<String>>,
}

/// The weights of an arm under another memory policy.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Variant {
    /// The row's heading.
    pub name: String,
    /// The arm.
    pub of: String,
    /// Changes to its policy, as in `march inspect policies --policy`; `none` removes all anchors, and `permuted keys`
    /// gives each the routing key of another.
    pub policy: String,
}

/// When a seed counts as a success. It is decided before the runs.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Success {
    /// The evaluation, by name.
    #[serde(rename = "ask")]
    pub evaluation: String,
    /// The least accuracy there, 0 to 1.
    pub accuracy: f64,
    /// For a model with anchors: by how much accuracy falls at least without them.
    #[serde(default)]
    pub drop: f64,
}

/// A figure: a line or a group of bars for each arm, over the evaluations of a course.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FigureSpec {
    /// The name of its file.
    pub name: String,
    /// Its title.
    pub title: String,
    /// Its plots, side by side.
    pub plot: Vec<PlotSpec>,
}

/// A plot.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PlotSpec {
    /// The title.
    pub title: String,
    /// The course whose evaluations it shows.
    pub course: String,
    /// The quantity on the horizontal axis.
    pub x: Quantity,
    /// The label of the horizontal axis.
    pub label: String,
    /// The evaluations that it shows, by name; all of the course if not given.
    #[serde(rename = "asks")]
    pub evaluations: Option<Vec<String>>,
    /// The arms and variants that it shows; all if not given.
    pub rows: Option<Vec<String>>,
    /// Whether the horizontal axis is linear instead of logarithmic.
    #[serde(default)]
    pub linear: bool,
}

/// What a horizontal axis shows.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum Quantity {
    /// The `x` of the evaluations.
    #[serde(rename = "ask")]
    Evaluation,
    /// The names of the evaluations, as groups of bars.
    Name,
    /// Bytes of memory after a sequence.
    Bytes,
    /// FLOP per token of the forward pass.
    Flop,
    /// The position in the text, for losses.
    Position,
}

/// Numbers of the paper.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Published {
    /// What they are.
    pub about: String,
    /// The columns.
    pub columns: Vec<String>,
    /// Rows: the arm or variant here that corresponds, if any, the paper's name, and the numbers.
    pub row: Vec<PublishedRow>,
    /// The column, from 0, whose order is compared with that of our first evaluation.
    #[serde(default)]
    pub order: usize,
    /// The course whose first evaluation is compared.
    pub course: Option<String>,
    /// The evaluation that is compared, if not the first.
    #[serde(rename = "ask")]
    pub evaluation: Option<String>,
}

/// A row of the paper's numbers.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PublishedRow {
    /// The name in the paper.
    pub name: String,
    /// The arm or variant here.
    pub ours: Option<String>,
    /// The numbers.
    pub values: Vec<f64>,
}

/// Trained models that are kept as folders that can be published.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Release {
    /// The course.
    pub course: String,
    /// The arms; the model of the first seed is kept.
    pub arms: Vec<String>,
    /// For the model card: what the models were trained on, and its licences.
    pub data: String,
    /// For the model card: what the models cannot do.
    pub limits: String,
    /// For the model card: a text to begin with.
    pub prompt: String,
}

/// The paper's own experiment.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PaperExperiment {
    /// Presets to train.
    #[serde(default)]
    pub train: Vec<String>,
    /// Commands to evaluate a trained model, with `MODEL` for its folder.
    #[serde(default)]
    pub eval: Vec<String>,
}

/// The shared courses and arms.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Common {
    course: BTreeMap<String, Course>,
    arm: BTreeMap<String, Arm>,
}

impl Experiment {
    /// Opens an experiment by its name, or reads one from a file in the same format.
    pub fn open(name: &str) -> Result<Self> {
        let path = Path::new(name);
        if path.extension().is_some_and(|ending| ending == "toml") && path.exists() {
            let text = std::fs::read_to_string(path).map_err(Error::io(path, "read"))?;
            let stem = path.file_stem().unwrap_or_default().to_string_lossy();
            return Self::read(&stem, &text, name);
        }
        let Some((name, text)) = RECIPES.iter().find(|(known, _)| *known == name) else {
            let choice = choice(name, "the experiments are", names());
            return Err(Error::Request(format!("`{name}` is not an experiment; {choice}")));
        };
        Self::read(name, text, &format!("configs/reproduce/{name}.toml"))
    }

    /// Reads an experiment; `origin` names the file in errors.
    fn read(name: &str, text: &str, origin: &str) -> Result<Self> {
        let wrong = |origin: &str, error: toml::de::Error| Error::file(origin.as_ref(), error.to_string());
        let mut experiment: Self = toml::from_str(text).map_err(|error| wrong(origin, error))?;
        let common: Common =
            toml::from_str(COMMON).map_err(|error| wrong("configs/reproduce/common.toml", error))?;
        experiment.name = name.into();
        for (name, course) in common.course {
            experiment.course.entry(name).or_insert(course);
        }
        for (name, arm) in common.arm {
            experiment.arm.entry(name).or_insert(arm);
        }
        experiment.add_rows_without_anchors()?;
        experiment.check().map_err(|message| Error::file(origin.as_ref(), message))?;
        Ok(experiment)
    }

    /// Every arm with anchors gets a row without them, which shows whether they are used.
    fn add_rows_without_anchors(&mut self) -> Result<()> {
        let mut rows = Vec::new();
        for name in &self.arms {
            let Some(arm) = self.arm.get(name) else { continue };
            let config = march_lm::Config::load_with(&arm.base, &arm.set)?;
            let has_anchors = config.model.policy().is_some_and(|policy| policy.interval.is_some());
            if has_anchors && !self.variant.iter().any(|other| other.of == *name && other.policy == "none") {
                let (of, policy) = (name.clone(), "none".into());
                rows.push(Variant { name: format!("{name}, without anchors"), of, policy });
            }
        }
        self.variant.extend(rows);
        Ok(())
    }

    /// Rejects names that do not exist.
    fn check(&self) -> std::result::Result<(), String> {
        let known = |what: &str, name: &String, exists: bool| match exists {
            true => Ok(()),
            false => Err(format!("{what} `{name}` does not exist")),
        };
        let course = |name: &String| known("course", name, self.courses.contains(name));
        let row = |name: &String| {
            let variant = self.variant.iter().any(|variant| variant.name == *name);
            known("row", name, self.arms.contains(name) || variant)
        };
        self.courses.iter().try_for_each(|name| known("course", name, self.course.contains_key(name)))?;
        for course in self.course.values() {
            let Some(before) = &course.after else { continue };
            let first = self.course.get(before);
            known("course", before, first.is_some_and(|first| first.after.is_none()))?;
        }
        self.arms.iter().try_for_each(|name| known("arm", name, self.arm.contains_key(name)))?;
        self.evaluations.iter().try_for_each(|evaluation| course(&evaluation.course))?;
        for evaluation in &self.evaluations {
            let kinds = [&evaluation.task, &evaluation.needles, &evaluation.text];
            if kinds.iter().filter(|kind| kind.is_some()).count() != 1 {
                return Err(format!("ask `{}` needs one of `task`, `needles` and `text`", evaluation.name));
            }
            if evaluation.copy.is_some() && evaluation.text.is_none() {
                return Err(format!("ask `{}`: `copy` needs `text`", evaluation.name));
            }
            let stages = self.stages_of(&evaluation.course).len();
            if evaluation.stage.is_some_and(|stage| !(1..=stages).contains(&stage)) {
                return Err(format!("ask `{}`: `stage` is from 1 to {stages}", evaluation.name));
            }
            evaluation.only.iter().flatten().try_for_each(row)?;
        }
        if let Some(Success { evaluation: name, .. }) = &self.success {
            known("ask", name, self.evaluations.iter().any(|evaluation| evaluation.name == *name))?;
        }
        self.variant
            .iter()
            .try_for_each(|variant| known("arm", &variant.of, self.arms.contains(&variant.of)))?;
        self.compare.iter().flatten().try_for_each(row)?;
        if let Some(release) = &self.release {
            course(&release.course)?;
            release.arms.iter().try_for_each(|name| known("arm", name, self.arms.contains(name)))?;
        }
        for plot in self.figure.iter().flat_map(|figure| &figure.plot) {
            course(&plot.course)?;
            plot.rows.iter().flatten().try_for_each(row)?;
        }
        let published = self.published.iter().flat_map(|published| &published.row);
        published.filter_map(|row| row.ours.as_ref()).try_for_each(row)
    }

    /// The rows of the tables, in order: each arm, then its variants.
    pub fn rows(&self) -> Vec<(&str, Option<&Variant>)> {
        let of = |name: &'_ String| {
            let variants = self.variant.iter().filter(move |variant| variant.of == *name);
            variants.map(|variant| (variant.name.as_str(), Some(variant))).collect::<Vec<_>>()
        };
        let arms = self.arms.iter();
        arms.flat_map(|name| std::iter::once((name.as_str(), None)).chain(of(name))).collect()
    }

    /// The stages of a course, after those of the course before it, with the names of their courses.
    pub fn stages_of<'a>(&'a self, name: &'a str) -> Vec<(&'a str, &'a Stage)> {
        let Some(course) = self.course.get(name) else { return Vec::new() };
        let before = course.after.as_deref().map(|before| self.stages_of(before)).unwrap_or_default();
        before.into_iter().chain(course.stage.iter().map(|stage| (name, stage))).collect()
    }

    /// Whether a course trains on a corpus.
    pub fn uses_corpus(&self) -> bool {
        let of = |name: &String| self.course[name].set.iter().any(|set| set == CORPUS);
        self.courses.iter().any(of)
    }

    /// The arms that take a course.
    pub fn arms_of(&self, course: &str) -> impl Iterator<Item = &String> {
        let chosen = self.course.get(course).and_then(|course| course.arms.as_ref());
        self.arms.iter().filter(move |name| chosen.is_none_or(|chosen| chosen.contains(name)))
    }

    /// The evaluations of a course.
    pub fn evaluations_of(&self, course: &str) -> impl Iterator<Item = &Evaluation> {
        self.evaluations.iter().filter(move |evaluation| evaluation.course == course)
    }
}

impl Evaluation {
    /// Whether a row is asked this.
    pub fn concerns(&self, row: &str) -> bool {
        self.only.as_ref().is_none_or(|only| only.iter().any(|name| name == row))
    }
}
