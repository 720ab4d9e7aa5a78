//! Release folders: a trained model of an experiment as it would be published and downloaded.
//!
//! ```text
//! config.json, tokenizer.json
//! model-00001-of-0000N.safetensors, model.safetensors.index.json    matrices in bf16
//! README.md                                                         the model card
//! report.html                                                       the page of the training run
//! checksums.json
//! ```

use std::fs;
use std::path::{Path, PathBuf};

use march_engine::Precision;

use super::render;
use super::text::thousands;
use crate::reproduce::{Arm, Entry, Job, Release, Results, Variant, checkpoint, key, plain_name};
use march_lm::checkpoint::{Checkpoint, NewFolder};
use march_lm::model::Model;
use march_lm::{Error, Result};

/// Bytes of a file of tensors: small models have several files, too, as large ones do.
const SHARD_BYTES: usize = 2_000_000;

/// The seed whose models are kept.
const SEED: u64 = 1;

/// Where a model is kept, below the folder of the experiment.
pub fn place(arm: &str) -> PathBuf {
    Path::new("release").join(plain_name(arm))
}

/// Writes the release folders of an experiment, if it has any; `output` has its runs, and `command` made them. A folder
/// that exists is replaced by a complete one, or stays.
pub fn release(results: &Results, output: &Path, command: &str) -> Result<Vec<PathBuf>> {
    let experiment = &results.plan.experiment;
    let Some(release) = &experiment.release else { return Ok(Vec::new()) };
    let mut folders = Vec::new();
    for arm in results.arms.iter().filter(|arm| arm.course == release.course) {
        let same = |entry: &&Entry| entry.arm == arm.arm && entry.course == arm.course;
        let kept = release.arms.contains(&arm.arm);
        let Some(entry) = results.plan.entries.iter().find(same).filter(|_| kept) else { continue };
        let job = results.plan.job(entry, arm.rate, SEED)?;
        let folder = output.join(&experiment.name).join(place(&arm.arm));
        let new = folder.with_extension("new");
        remove(&new)?;
        write(&new, &job, output, |model| card(results, release, arm, &job, model, command))?;
        remove(&folder)?;
        fs::rename(&new, &folder).map_err(Error::io(&folder, "rename the finished folder to this name"))?;
        folders.push(folder);
    }
    Ok(folders)
}

fn remove(folder: &Path) -> Result<()> {
    if folder.exists() { fs::remove_dir_all(folder).map_err(Error::io(folder, "replace")) } else { Ok(()) }
}

/// Writes the model at the end of a run's training.
fn write(new: &Path, job: &Job, output: &Path, card: impl FnOnce(&Model) -> String) -> Result<()> {
    let last = job.stages.len() - 1;
    let from = checkpoint(job, last, output);
    if !from.is_dir() {
        return Err(Error::file(&from, "is missing; delete the run's measurements to train again"));
    }
    let trained = Checkpoint::open(&from)?;
    let model = Model::new(trained.config());
    trained.check(model.layout())?;
    trained.verify()?;
    let folder = NewFolder::create(new)?;
    folder.model(trained.config(), model.layout(), SHARD_BYTES, Precision::Bf16, |i| {
        Ok(trained.tensor(&model.layout()[i])?.into_owned())
    })?;
    let tokenizer = from.join("tokenizer.json");
    let json = fs::read(&tokenizer).map_err(Error::io(&tokenizer, "read"))?;
    folder.file("tokenizer.json", &json)?;
    folder.file("README.md", card(&model).as_bytes())?;
    let page = render(&job.folder(&output.join("runs"), last))?;
    folder.file("report.html", without_folders(page, job).as_bytes())?;
    folder.finish()
}

/// A page without the names of the folders above the training data.
fn without_folders(mut page: String, job: &Job) -> String {
    for data in job.stages.iter().filter_map(|stage| stage.data.path.as_ref()) {
        // The run's configuration has the absolute path.
        let absolute = std::path::absolute(data).unwrap_or_else(|_| data.into());
        if let Some(folder) = absolute.parent().and_then(Path::to_str) {
            page = page.replace(folder, "corpus");
        }
    }
    page
}

/// The model card.
fn card(results: &Results, release: &Release, arm: &Arm, job: &Job, model: &Model, command: &str) -> String {
    let Some(stage) = job.stages.last() else { return String::new() };
    let config = model.config();
    let parameters = thousands(model.parameter_count() as f64);
    let anchors = match config.policy().and_then(|policy| policy.interval) {
        Some(interval) => format!(
            "It saves an anchor, a copy of its recurrent state, every {interval} tokens, and each token reads the anchors \
             that it needs."
        ),
        None => "It has no anchors.".into(),
    };
    let name = &arm.arm;
    let kind = config.mixer.model_type();
    let (layers, width, vocabulary) = (config.num_hidden_layers, config.hidden_size, config.vocab_size);
    let length = stage.data.sequence_length;
    let tokens = job.tokens() / 1e6;
    let (steps, rows) = (stage.train.steps, stage.train.tokens_per_step / length);
    let version = env!("CARGO_PKG_VERSION");
    let quick = match results.plan.is_full() {
        true => "",
        false => "\n**This model took a few steps of a quick run: it knows nothing.**\n",
    };
    format!(
        "---
library_name: march
pipeline_tag: text-generation
---

# {name}, {parameters} parameters, trained on source code
{quick}
A `{kind}` of {layers} layers and width {width}, with a vocabulary of {vocabulary} tokens. {anchors} It is a model of an \
experiment and was made to be compared with others, not to be used.

## Use

```sh
march generate --model . --prompt '{prompt}' --max-tokens 100
march inspect model .
```

The folder has what other tools expect: `config.json`, `tokenizer.json`, and weights in safetensors, with
`model.safetensors.index.json` beside them. Matrices are in bf16, all else in f32. `march` verifies `checksums.json` when
it opens the folder.

## Training

`{command}` (march {version}): {tokens:.1} million tokens, {steps} steps of {rows} sequences of {length} tokens, AdamW with a \
learning rate of {rate} chosen on other data, seed {SEED}. `report.html` has the curves and the whole configuration.

{data}

## Measured

Mean loss in nats per token of this one model, with its weights in f32, before they were rounded to bf16.

{table}
## Limits

{limits}
",
        prompt = release.prompt,
        rate = arm.rate,
        data = release.data.trim(),
        table = measured(results, arm),
        limits = release.limits.trim(),
    )
}

/// What was measured of the model of the first seed: a row for each policy.
fn measured(results: &Results, arm: &Arm) -> String {
    let experiment = &results.plan.experiment;
    let evaluations: Vec<_> = experiment.evaluations_of(&arm.course).collect();
    let names = evaluations.iter().map(|evaluation| format!(" {} |", evaluation.name));
    let mut table =
        format!("| |{}\n|:---|{}\n", names.collect::<String>(), "---:|".repeat(evaluations.len()));
    let own = |variant: &Option<&Variant>, name: &str| match variant {
        Some(variant) => variant.of == arm.arm,
        None => name == arm.arm,
    };
    for (name, variant) in experiment.rows().into_iter().filter(|(name, variant)| own(variant, name)) {
        let policy = variant.map_or("", |variant| &variant.policy);
        let cells = evaluations.iter().map(|evaluation| {
            let found =
                arm.runs.first().and_then(|run| run.find(&key(evaluation, &results.plan.scale, policy)));
            found.map_or(" – |".into(), |measured| format!(" {:.4} |", measured.value))
        });
        table += &format!("| {name} |{}\n", cells.collect::<String>());
    }
    table
}
