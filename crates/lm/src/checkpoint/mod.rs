//! Checkpoint folders: a model on disk, in the layout that Hugging Face tools read.
//!
//! - `config.json`: the [`ModelConfig`]
//! - `model.safetensors`: the tensors; or, above [`SHARD_BYTES`], shards `model-00001-of-0000N.safetensors`
//!   and `model.safetensors.index.json`, `{"metadata": {"total_size": bytes}, "weight_map": {tensor: file}}`
//! - `tokenizer.json`, if the model has one
//! - `checksums.json`: the size and checksum of every other file, if this program wrote the folder
//!
//! Or a single GGUF file, which has all of this (`gguf/`).
//!
//! Tensors are read from the memory-mapped file; f32, bf16 and f16 are accepted, and matrices in q8 and q4 as this
//! program packs them (`packed`). A folder is written next to its destination and then renamed, so that it is there completely or not at all.

mod checksums;
mod convert;
mod extra;
mod gguf;
mod load;
mod names;
mod packed;
mod read;
mod verify;
mod write;

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet, btree_map};
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};
use crate::model::{Dialect, ModelConfig, ParameterSpec};

use self::checksums::Checksums;
pub use self::checksums::{CHECKSUMS_FILE, verify_folder};
pub use self::gguf::{ChatTemplate, is_gguf};
use self::names::{Change, Source};
use self::read::{Stored, TensorFile};
pub use self::write::{NewFolder, Values, save};
use crate::disk::{Mapped, built_in, is_built_in, is_file_name};

/// Maximum bytes of tensors per file, unless a single tensor is larger.
pub const SHARD_BYTES: usize = 5_000_000_000;

const CONFIG_FILE: &str = "config.json";
const MODEL_FILE: &str = "model.safetensors";
const INDEX_FILE: &str = "model.safetensors.index.json";

/// An opened checkpoint folder: its configuration, and its memory-mapped tensors.
#[derive(Debug)]
pub struct Checkpoint {
    config: ModelConfig,
    /// How its tensors are called.
    dialect: Dialect,
    /// `model.safetensors` or the index: the file that should list every tensor.
    listing: PathBuf,
    files: Vec<TensorFile>,
    /// For each tensor name, the index in `files` of the file that holds it, and its entry there.
    tensors: BTreeMap<String, (usize, Stored)>,
    /// The recorded checksums of the folder's files, if it has a list.
    checksums: Option<Checksums>,
    /// What a GGUF file has besides tensors.
    gguf: Option<gguf::Contents>,
}

/// The part of `model.safetensors.index.json` that is read.
#[derive(serde::Deserialize)]
struct Index {
    /// File name by tensor name.
    weight_map: BTreeMap<String, String>,
}

impl Checkpoint {
    /// Reads the configuration, maps the files, and checks that they are complete and their headers valid. If the
    /// folder has a list of checksums, all files except tensor files are verified; tensor files are verified while they
    /// are loaded, by [`Checkpoint::read_all`]. The optimizer state and the progress of a run may be missing.
    pub fn open(folder: &Path) -> Result<Self> {
        Self::open_folder(folder, false)
    }

    /// Same as [`Checkpoint::open`], for resuming a run: the files that only training needs are verified as well.
    pub fn open_for_training(folder: &Path) -> Result<Self> {
        Self::open_folder(folder, true)
    }

    fn open_folder(folder: &Path, training: bool) -> Result<Self> {
        if is_built_in(folder) {
            return Self::open_built_in(folder);
        }
        if is_gguf(folder) {
            return Self::open_gguf(folder);
        }
        if !folder.is_dir() {
            let wrong = if folder.exists() { "is not a folder" } else { "does not exist" };
            let message = format!(
                "{wrong}; a checkpoint is a folder with `{CONFIG_FILE}` and `{MODEL_FILE}`, or a GGUF file"
            );
            return Err(Error::file(folder, message));
        }
        let checksums = Checksums::read(folder)?;
        if let Some(checksums) = &checksums {
            checksums.check(folder, false, training)?;
        }
        let (config, dialect) = read_config(&folder.join(CONFIG_FILE))?;
        let model = folder.join(MODEL_FILE);
        let whole = model.is_file();
        let listing = if whole { model } else { folder.join(INDEX_FILE) };
        if !listing.is_file() {
            let message = format!(
                "has neither `{MODEL_FILE}` nor `{INDEX_FILE}`; tensors in another format must be converted \
                 to safetensors first"
            );
            return Err(Error::file(folder, message));
        }
        let (files, tensors) = (Vec::new(), BTreeMap::new());
        let mut checkpoint = Self { config, dialect, listing, files, tensors, checksums, gguf: None };
        if whole {
            checkpoint.add(TensorFile::open(&folder.join(MODEL_FILE))?)?;
        } else {
            checkpoint.add_shards(folder)?;
        }
        Ok(checkpoint)
    }

    /// Opens the checkpoint inside the program.
    fn open_built_in(folder: &Path) -> Result<Self> {
        let file = |name| (folder.join(name), built_in(folder, name).unwrap_or_default());
        let ((path, text), (listing, tensors)) = (file(CONFIG_FILE), file(MODEL_FILE));
        let text = String::from_utf8_lossy(text);
        let (config, dialect) = ModelConfig::from_any_json(&text, &path.display().to_string())?;
        let file = Mapped::fixed(&listing, tensors);
        let (files, tensors) = (Vec::new(), BTreeMap::new());
        let mut checkpoint = Self { config, dialect, listing, files, tensors, checksums: None, gguf: None };
        checkpoint.add(TensorFile::of(file)?)?;
        Ok(checkpoint)
    }

    /// Opens another tensor file in a checkpoint's folder.
    pub fn open_beside(&self, folder: &Path, name: &str) -> Result<Self> {
        let path = folder.join(name);
        let mut beside = Self {
            config: self.config.clone(),
            dialect: self.dialect,
            listing: path.clone(),
            files: vec![],
            tensors: BTreeMap::new(),
            checksums: self.checksums.clone(),
            gguf: None,
        };
        beside.add(TensorFile::open(&path)?)?;
        Ok(beside)
    }

    /// Opens the files that the index names, and checks that they hold what it lists.
    fn add_shards(&mut self, folder: &Path) -> Result<()> {
        let listing = self.listing.clone();
        let text = fs::read_to_string(&listing).map_err(Error::io(&listing, "read"))?;
        let index: Index = serde_json::from_str(&text)
            .map_err(|error| Error::file(&listing, format!("is not an index of tensors: {error}")))?;
        let mut opened: BTreeMap<&str, usize> = BTreeMap::new();
        for (tensor, name) in &index.weight_map {
            let place = match opened.get(name.as_str()) {
                Some(&place) => place,
                None => {
                    let path = folder.join(name);
                    let plain = is_file_name(name);
                    if !plain || !path.is_file() {
                        let wrong = if plain { "is missing" } else { "is not a file name in the folder" };
                        let message = format!("names `{name}` for tensor `{tensor}`, which {wrong}");
                        return Err(Error::file(&listing, message));
                    }
                    let place = self.add(TensorFile::open(&path)?)?;
                    opened.insert(name, place);
                    place
                }
            };
            if self.tensors.get(tensor).is_none_or(|(found, _)| *found != place) {
                let message = format!("says that tensor `{tensor}` is in `{name}`, which does not have it");
                return Err(Error::file(&listing, message));
            }
        }
        Ok(())
    }

    /// Adds an opened tensor file and returns its index in `files`.
    fn add(&mut self, (file, entries): (TensorFile, Vec<(String, Stored)>)) -> Result<usize> {
        let place = self.files.len();
        self.files.push(file);
        for (name, entry) in entries {
            match self.tensors.entry(name) {
                btree_map::Entry::Vacant(vacant) => {
                    vacant.insert((place, entry));
                }
                btree_map::Entry::Occupied(occupied) => {
                    let other = self.files[occupied.get().0].path().display();
                    let message = format!("has tensor `{}`, which {other} has as well", occupied.key());
                    return Err(Error::file(self.files[place].path(), message));
                }
            }
        }
        Ok(place)
    }

    /// The configuration.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Rejects the checkpoint unless it has every parameter, in its shape, and no other tensor that could affect the
    /// computation.
    pub fn check(&self, parameters: &[ParameterSpec]) -> Result<()> {
        let sources: Vec<Source> = parameters.iter().map(|parameter| self.source(parameter)).collect();
        let asked: BTreeSet<&str> = sources.iter().map(|source| source.name.as_str()).collect();
        let missing: Vec<&str> =
            asked.iter().copied().filter(|name| !self.tensors.contains_key(*name)).collect();
        if !missing.is_empty() {
            return Err(self.missing(&missing, asked.len()));
        }
        for parameter in parameters {
            self.find(parameter)?;
        }
        self.refuse_extra(&asked)
    }

    /// Reads one tensor as f32: borrowed from the file if it holds aligned f32, otherwise converted.
    pub fn tensor(&self, parameter: &ParameterSpec) -> Result<Cow<'_, [f32]>> {
        self.rows(parameter, 0..usize::MAX)
    }

    /// Reads some rows of one tensor as f32: borrowed from the file if it holds aligned f32, otherwise converted from
    /// f32, bf16, f16 or blocks.
    pub fn rows(&self, parameter: &ParameterSpec, rows: Range<usize>) -> Result<Cow<'_, [f32]>> {
        let (file, entry, source) = self.find(parameter)?;
        read_rows(file, entry, &source, rows)
    }

    /// A function that reads numbers of a tensor as f32, from the beginning of a row on, so that the tensor need not be
    /// in memory as a whole.
    pub(crate) fn reader(
        &self,
        parameter: &ParameterSpec,
    ) -> Result<impl Fn(usize, &mut [f32]) -> Result<()> + Sync + '_> {
        let (file, entry, source) = self.find(parameter)?;
        let width = source.width().max(1);
        Ok(move |at: usize, to: &mut [f32]| {
            let rows = at / width..(at + to.len()).div_ceil(width);
            to.copy_from_slice(&read_rows(file, entry, &source, rows)?);
            Ok(())
        })
    }

    /// Reads individual numbers of a tensor, given their indices.
    pub(crate) fn sample(&self, parameter: &ParameterSpec, places: &[usize]) -> Result<Vec<f32>> {
        let (file, entry, source) = self.find(parameter)?;
        let numbers = file.sample(&source.name, entry, &source.places(places))?;
        Ok(numbers.into_iter().map(|number| source.change.apply(number)).collect())
    }

    /// Releases the memory of a tensor that was read. It can be read again.
    pub fn release(&self, parameter: &ParameterSpec) {
        if let Some((place, entry)) = self.tensors.get(&self.source(parameter).name) {
            self.files[*place].release(entry);
        }
    }

    /// Where a parameter is.
    fn source(&self, parameter: &ParameterSpec) -> Source {
        match &self.gguf {
            None => Source::of(parameter, self.dialect, &self.config),
            Some(own) => own.source(parameter, &self.config),
        }
    }

    /// What describes the model, in messages.
    fn described(&self) -> String {
        if self.gguf.is_some() { "its metadata".into() } else { format!("`{CONFIG_FILE}`") }
    }

    /// Finds the file and entry of a parameter, and checks the tensor's shape and data type.
    fn find(&self, parameter: &ParameterSpec) -> Result<(&TensorFile, &Stored, Source)> {
        let source = self.source(parameter);
        let Some((place, entry)) = self.tensors.get(&source.name) else {
            return Err(self.missing(&[&source.name], 1));
        };
        let file = &self.files[*place];
        // A GGUF file leaves out dimensions of 1.
        let plain = |shape: &[usize]| shape.iter().copied().filter(|size| *size != 1).collect::<Vec<_>>();
        let same =
            entry.shape == source.shape || self.gguf.is_some() && plain(&entry.shape) == plain(&source.shape);
        if !same {
            let message = format!(
                "tensor `{}` has shape {:?}, but {} requires {:?}",
                source.name,
                entry.shape,
                self.described(),
                source.shape
            );
            return Err(Error::file(file.path(), message));
        }
        file.check_kind(&source.name, entry)?;
        Ok((file, entry, source))
    }

    /// The error for missing tensors, out of `asked` requested ones.
    fn missing(&self, names: &[&str], asked: usize) -> Error {
        let named = first_names(names);
        let what = match names.len() {
            1 => format!("tensor {named} is missing"),
            count => format!("{count} of {asked} tensors are missing: {named}"),
        };
        let remedy = format!("it is incomplete, or of another model than {} describes", self.described());
        Error::file(&self.listing, format!("{what}; {remedy}"))
    }
}

/// Some rows of a parameter as f32.
fn read_rows<'a>(
    file: &'a TensorFile,
    entry: &Stored,
    source: &Source,
    rows: Range<usize>,
) -> Result<Cow<'a, [f32]>> {
    let mut numbers = match &source.ranges_of(rows)[..] {
        [range] => file.numbers(&source.name, entry, range.clone())?,
        ranges => {
            let mut all = Vec::with_capacity(ranges.iter().map(ExactSizeIterator::len).sum());
            for range in ranges {
                all.extend_from_slice(&file.numbers(&source.name, entry, range.clone())?);
            }
            Cow::Owned(all)
        }
    };
    numbers = source.ordered(numbers);
    if source.change != Change::NONE {
        numbers.to_mut().iter_mut().for_each(|number| *number = source.change.apply(*number));
        if source.change == Change::LogOfNegative && !numbers.iter().all(|number| number.is_finite()) {
            let message =
                format!("tensor `{}` has a number that is not below 0, as all of it must be", source.name);
            return Err(Error::damaged(file.path(), message));
        }
    }
    Ok(numbers)
}

/// The newest checkpoint of a run's folder; any other folder is returned unchanged.
pub fn newest(folder: &Path) -> PathBuf {
    let Ok(entries) = fs::read_dir(folder.join("checkpoints")) else { return folder.into() };
    let steps = entries.filter_map(|entry| {
        let path = entry.ok()?.path();
        let step: u64 = path.file_name()?.to_str()?.strip_prefix("step-")?.parse().ok()?;
        Some((step, path))
    });
    steps.max().map_or(folder.into(), |(_, path)| path)
}

/// The first few of the names, and how many more there are.
fn first_names(names: &[&str]) -> String {
    const NAMED: usize = 3;
    let named: Vec<String> = names.iter().take(NAMED).map(|name| format!("`{name}`")).collect();
    let others = match names.len().saturating_sub(NAMED) {
        0 => String::new(),
        1 => " and 1 other".into(),
        count => format!(" and {count} others"),
    };
    named.join(", ") + &others
}

/// Reads `config.json`.
fn read_config(path: &Path) -> Result<(ModelConfig, Dialect)> {
    if !path.is_file() {
        return Err(Error::file(path, "is missing; a checkpoint folder describes its model there"));
    }
    let text = fs::read_to_string(path).map_err(Error::io(path, "read"))?;
    ModelConfig::from_any_json(&text, &path.display().to_string())
}
