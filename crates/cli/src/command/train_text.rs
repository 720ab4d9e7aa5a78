//! `march train` on text files: their tokens are prepared in the run's folder, so that the run can resume without the
//! files.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use march_lm::Config;
use march_lm::data::shards::META_FILE;
use march_lm::data::text::Format;
use march_lm::data::{DataKind, Options, PrepareOutcome, Shards, prepare, split};
use march_lm::run::DATA_FOLDER;
use march_lm::tokenizer::Tokenizer;
use march_lm::train::ranks::Ranks;

use super::data::progress_line;
use super::open::is_run;
use crate::display::out::say;
use crate::display::{Progress, thousands};
use crate::interrupt;

/// The configuration for a text without one.
const PRESET: &str = "tiny/march";

/// Sequences are not made shorter than this for a short text.
const SHORTEST: usize = 64;

/// Keys that a text given on the command line takes the place of.
const REPLACED: [&str; 4] = ["data.kind", "data.path", "data.task", "data.text_share"];

/// What a new run is made of.
pub struct Request {
    /// The name of a preset or a TOML file.
    pub config: String,
    /// The text file, or the folder of text files or tokens, in place of the data of the configuration.
    pub data: Option<PathBuf>,
    /// What the run's folder is named after.
    pub name: String,
}

impl Request {
    /// Reads the first argument, which can also be a text, and `--data`.
    pub fn new(config: Option<&str>, data: Option<&Path>, settings: &[String]) -> anyhow::Result<Self> {
        let preset = config.is_some_and(|name| Config::presets().any(|preset| preset == name));
        let own = config.map(Path::new).filter(|_| !preset);
        let text = own.filter(|path| Format::of(path).is_ok());
        if let Some(folder) = own.filter(|path| path.is_dir()) {
            let shown = folder.display();
            match is_run(folder) {
                true => bail!("{shown}: is a run; continue it with `march train --resume {shown}`"),
                false => bail!(
                    "{shown}: is a folder; name a preset or a TOML file, or train on the texts in the folder with \
                     `march train --data {shown}`"
                ),
            }
        }
        let request = match (config, text, data) {
            (_, Some(text), Some(data)) => {
                bail!("{} and --data {} both name a text; give one of them", text.display(), data.display())
            }
            (Some(config), None, None) => return Ok(Self::of(config)),
            (Some(config), None, Some(data)) => Self { data: Some(data.into()), ..Self::of(config) },
            (None, _, Some(data)) | (_, Some(data), None) => {
                Self { data: Some(data.into()), name: stem(data), ..Self::of(PRESET) }
            }
            (None, None, None) => bail!("give a configuration, a text, or a run to resume with --resume"),
        };
        let key = |setting: &String| setting.split('=').next().unwrap_or_default().trim().to_string();
        if let Some(key) = settings.iter().map(key).find(|key| REPLACED.contains(&key.as_str())) {
            bail!("--set {key} and a text are both given, and both say what to train on; give one of them");
        }
        Ok(request)
    }

    fn of(config: &str) -> Self {
        Self { config: config.into(), data: None, name: config.into() }
    }

    /// Prepares the text, if there is one, in the folder of the run, and makes the configuration point to its tokens.
    /// The first of several processes prepares it for all.
    pub fn prepare(
        &self,
        config: &mut Config,
        run: &Path,
        settings: &[String],
        ranks: &mut dyn Ranks,
    ) -> anyhow::Result<Option<NewFolders>> {
        let Some(data) = &self.data else { return Ok(None) };
        let tokens = run.join(DATA_FOLDER);
        let mut fresh = None;
        let path = if data.join(META_FILE).exists() {
            data
        } else {
            // All have chosen the run's folder before it is created.
            ranks.sum(&mut [0.0])?;
            if ranks.rank() == 0 {
                fresh = Some(write(&config.data.tokenizer, data, run, &tokens)?);
            }
            ranks.sum(&mut [0.0])?;
            &tokens
        };
        config.data.kind = DataKind::Shards;
        config.data.path = Some(path.to_string_lossy().into_owned());
        (config.data.task, config.data.text_share) = (None, None);
        let set = settings.iter().any(|setting| setting.trim_start().starts_with("data.sequence_length"));
        if !set && Config::presets().any(|preset| preset == self.config) {
            let shorter = shorten(config, Shards::open(path)?.tokens())?;
            if let Some(length) = shorter.filter(|_| ranks.rank() == 0) {
                say!("sequences     of {length} tokens, because the text is short");
            }
        }
        Ok(fresh)
    }
}

/// The name of a text without its extensions.
fn stem(data: &Path) -> String {
    let real = data.canonicalize().unwrap_or_else(|_| data.into());
    let name = data.file_name().or(real.file_name()).unwrap_or_default().to_string_lossy().into_owned();
    let mut stem = name.as_str();
    for extension in [".gz", ".zst", ".jsonl", ".parquet", ".txt"] {
        stem = stem.strip_suffix(extension).unwrap_or(stem);
    }
    let stem = stem.trim_matches(['.', '-']);
    if stem.is_empty() { "text".into() } else { stem.into() }
}

/// Folders that were created for a run, and are removed again unless the run starts.
pub struct NewFolders {
    tokens: PathBuf,
    /// The innermost first.
    folders: Vec<PathBuf>,
    started: bool,
}

impl NewFolders {
    /// Keeps the folders.
    pub fn keep(mut self) {
        self.started = true;
    }
}

impl Drop for NewFolders {
    fn drop(&mut self) {
        if self.started {
            return;
        }
        // What cannot be removed does no harm. Folders with anything else in them stay.
        let _ = std::fs::remove_dir_all(&self.tokens);
        for folder in &self.folders {
            let _ = std::fs::remove_dir(folder);
        }
    }
}

/// Writes the tokens of a text.
fn write(tokenizer: &str, data: &Path, run: &Path, tokens: &Path) -> anyhow::Result<NewFolders> {
    if is_run(run) {
        bail!(
            "{}: already holds a run; continue it with --resume, or choose another folder with --run",
            run.display()
        );
    }
    if tokens.exists() {
        bail!("{}: already exists; choose another folder with --run", tokens.display());
    }
    let files = files(data)?;
    let tokenizer = Tokenizer::load(tokenizer)?;
    let missing = |folder: &&Path| !folder.as_os_str().is_empty() && !folder.exists();
    let folders = run.ancestors().take_while(missing).map(Path::to_path_buf).collect();
    let fresh = NewFolders { tokens: tokens.into(), folders, started: false };
    let mut progress = Progress::new("preparing", "bytes", 0);
    let result = prepare(&tokenizer, &files, tokens, &Options::default(), &mut |status| {
        progress.show(|seconds| progress_line(status, seconds));
        if interrupt::asked() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    progress.finish();
    match result? {
        PrepareOutcome::Finished(meta, _) => {
            say!(
                "data          {}: {} tokens ({})",
                data.display(),
                thousands(meta.tokens as usize),
                meta.tokenizer
            );
            Ok(fresh)
        }
        PrepareOutcome::Stopped(_) => {
            drop(fresh);
            interrupt::leave()
        }
    }
}

/// The text files that a path names: itself, or, for a folder, those in it and in its folders, by name.
fn files(data: &Path) -> anyhow::Result<Vec<PathBuf>> {
    if !data.is_dir() {
        return Ok(vec![data.into()]);
    }
    let (mut folders, mut files) = (vec![data.to_path_buf()], Vec::new());
    while let Some(folder) = folders.pop() {
        let read = || format!("{}: could not read", folder.display());
        for entry in std::fs::read_dir(&folder).with_context(read)? {
            let entry = entry.with_context(read)?;
            let hidden = entry.file_name().as_encoded_bytes().starts_with(b".");
            if hidden {
                continue;
            }
            // A link to a folder could lead back here.
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                folders.push(entry.path());
            } else if entry.path().is_file() && Format::of(&entry.path()).is_ok() {
                files.push(entry.path());
            }
        }
    }
    if files.is_empty() {
        bail!(
            "{}: has no text files; they end in .txt, .jsonl, .jsonl.gz, .jsonl.zst or .parquet",
            data.display()
        );
    }
    files.sort();
    Ok(files)
}

/// Halves the length of sequences until one fits into the held-out part of the text, and into the rest. Returns the new
/// length, if it changed.
fn shorten(config: &mut Config, tokens: u64) -> anyhow::Result<Option<usize>> {
    let data = &config.data;
    let (training, held_out) = match data.validation {
        Some(_) => (tokens, tokens),
        None => {
            let (training, held_out) = split(tokens, data.validation_fraction)?;
            (training.end, held_out.end - held_out.start)
        }
    };
    let part = if held_out == 0 { training } else { training.min(held_out) };
    let mut length = data.sequence_length;
    while length as u64 >= part && length.is_multiple_of(2) && length / 2 >= SHORTEST {
        length /= 2;
    }
    if length as u64 >= part {
        bail!(
            "the text is too short: it has {} tokens, of which {} would be held out for validation, and a sequence of \
             {length} tokens and its last target must fit into each part; train on more text, or set \
             data.sequence_length",
            thousands(tokens as usize),
            thousands(held_out as usize)
        );
    }
    let changed = length != data.sequence_length;
    config.data.sequence_length = length;
    Ok(changed.then_some(length))
}
