//! Writing a checkpoint folder: into a temporary folder next to its destination, synced to the disk, then renamed.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io::{self, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};

use march_engine::{Precision, to_bf16};
use serde_json::{Map, Value, json};

use super::checksums::{CHECKSUMS_FILE, ChecksumWriter, Checksums, FileSum};
use super::{CONFIG_FILE, INDEX_FILE, MODEL_FILE};
use crate::disk::{file_bytes, parent, sync_folder};
use crate::error::{Error, Result};
use crate::model::{ModelConfig, ParameterSpec};

/// Writes a new checkpoint folder, with at most `shard_bytes` of tensors per file unless a single tensor is larger.
///
/// `tensor(i)` returns the numbers of `parameters[i]`; it is called in order, so that only one tensor is held at a
/// time. If anything fails, nothing is left behind. Only one save of a folder may run at a time.
pub fn save(
    folder: &Path,
    config: &ModelConfig,
    parameters: &[ParameterSpec],
    shard_bytes: usize,
    mut tensor: impl FnMut(usize) -> Result<Vec<f32>>,
) -> Result<()> {
    let new = NewFolder::create(folder)?;
    new.model(config, parameters, shard_bytes, Precision::F32, &mut tensor)?;
    new.finish()
}

/// A checkpoint folder that is being written next to its destination. It is moved there by [`NewFolder::finish`]; if
/// dropped earlier, it leaves nothing behind.
pub struct NewFolder {
    partial: Partial,
    folder: PathBuf,
    /// Sizes and checksums of the files written so far.
    sums: RefCell<BTreeMap<String, FileSum>>,
}

impl NewFolder {
    /// Begins a folder, whose destination must be free.
    pub fn create(folder: &Path) -> Result<Self> {
        refuse_existing(folder)?;
        Ok(Self { partial: Partial::create(folder)?, folder: folder.into(), sums: RefCell::default() })
    }

    /// Writes a model: `config.json` and the tensors. `tensor(i)` returns the numbers of `parameters[i]`. Matrices can be
    /// written in bf16; the other tensors are small, and in f32.
    pub fn model(
        &self,
        config: &ModelConfig,
        parameters: &[ParameterSpec],
        shard_bytes: usize,
        weights: Precision,
        mut tensor: impl FnMut(usize) -> Result<Vec<f32>>,
    ) -> Result<()> {
        let bytes = count_bytes(&self.folder, parameters, weights)?;
        let shards = cut(&bytes, shard_bytes);
        self.file(CONFIG_FILE, config.to_json().as_bytes())?;
        let mut weight_map = Map::new();
        for (number, shard) in shards.iter().enumerate() {
            let name = file_name(number, shards.len());
            let own = (&parameters[shard.clone()], &bytes[shard.clone()]);
            self.write_tensors(&name, own, weights, |i| tensor(shard.start + i))?;
            for parameter in &parameters[shard.clone()] {
                weight_map.insert(parameter.name.clone(), Value::from(name.as_str()));
            }
        }
        if shards.len() > 1 {
            let total_size: usize = bytes.iter().sum();
            let index = json!({ "metadata": { "total_size": total_size }, "weight_map": weight_map });
            self.file(INDEX_FILE, format!("{index:#}\n").as_bytes())?;
        }
        Ok(())
    }

    /// Writes one file of tensors.
    pub fn tensors(
        &self,
        name: &str,
        parameters: &[ParameterSpec],
        tensor: impl FnMut(usize) -> Result<Vec<f32>>,
    ) -> Result<()> {
        let bytes = count_bytes(&self.folder, parameters, Precision::F32)?;
        self.write_tensors(name, (parameters, &bytes), Precision::F32, tensor)
    }

    /// Writes one file.
    pub fn file(&self, name: &str, bytes: &[u8]) -> Result<()> {
        self.write(name, |path, file| file.write_all(bytes).map_err(Error::io(path, "write")))
    }

    /// Writes the list of checksums and moves the folder to its destination.
    pub fn finish(self) -> Result<()> {
        let list = Checksums::new(self.sums.take());
        self.file(CHECKSUMS_FILE, list.to_json().as_bytes())?;
        self.partial.rename_to(&self.folder)
    }

    /// Writes a new file, records its checksum, and waits until it is on the disk.
    fn write(
        &self,
        name: &str,
        write: impl FnOnce(&Path, &mut ChecksumWriter<File>) -> Result<()>,
    ) -> Result<()> {
        let path = self.partial.path.join(name);
        let mut file = ChecksumWriter::new(File::create_new(&path).map_err(Error::io(&path, "create"))?);
        write(&path, &mut file)?;
        let (file, sum) = file.finish().map_err(Error::io(&path, "write"))?;
        file.sync_all().map_err(Error::io(&path, "write to the disk"))?;
        self.sums.borrow_mut().insert(name.into(), sum);
        Ok(())
    }

    /// Writes one safetensors file; `bytes` has the size of each parameter.
    fn write_tensors(
        &self,
        name: &str,
        (parameters, bytes): (&[ParameterSpec], &[usize]),
        weights: Precision,
        mut tensor: impl FnMut(usize) -> Result<Vec<f32>>,
    ) -> Result<()> {
        let header = tensors_header(parameters, bytes, weights);
        self.write(name, |path, file| {
            file.write_all(&(header.len() as u64).to_le_bytes()).map_err(Error::io(path, "write"))?;
            file.write_all(&header).map_err(Error::io(path, "write"))?;
            for (i, parameter) in parameters.iter().enumerate() {
                let numbers = tensor(i)?;
                let expected = parameter.count();
                if numbers.len() != expected {
                    let message = format!(
                        "tensor `{}` of shape {:?} has {expected} numbers, but {} were given",
                        parameter.name,
                        parameter.shape,
                        numbers.len()
                    );
                    return Err(Error::file(path, message));
                }
                match is_half(parameter, weights) {
                    true => write_bf16(file, &numbers),
                    false => file.write_all(&file_bytes(&numbers)),
                }
                .map_err(Error::io(path, "write"))?;
            }
            Ok(())
        })
    }
}

/// Rejects an existing folder that is not empty: it is never touched.
fn refuse_existing(folder: &Path) -> Result<()> {
    let empty = match fs::symlink_metadata(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => true,
        Err(error) => return Err(Error::io(folder, "inspect")(error)),
        Ok(metadata) if metadata.is_dir() => {
            fs::read_dir(folder).map_err(Error::io(folder, "read"))?.next().is_none()
        }
        Ok(_) => false,
    };
    if empty {
        Ok(())
    } else {
        Err(Error::file(folder, "already exists; choose another folder or delete it"))
    }
}

/// Whether a parameter is written in bf16.
fn is_half(parameter: &ParameterSpec, weights: Precision) -> bool {
    weights == Precision::Bf16 && parameter.is_matrix()
}

/// Writes numbers in bf16, rounded to the nearest.
fn write_bf16(file: &mut impl Write, numbers: &[f32]) -> io::Result<()> {
    for part in numbers.chunks(1 << 16) {
        let bytes: Vec<u8> = part.iter().flat_map(|&number| to_bf16(number).to_le_bytes()).collect();
        file.write_all(&bytes)?;
    }
    Ok(())
}

/// Size of each parameter, in bytes. Rejects duplicate names.
fn count_bytes(folder: &Path, parameters: &[ParameterSpec], weights: Precision) -> Result<Vec<usize>> {
    let mut names = BTreeSet::new();
    let mut total = 0usize;
    let mut bytes = Vec::with_capacity(parameters.len());
    for parameter in parameters {
        let ParameterSpec { name, shape, .. } = parameter;
        let width = if is_half(parameter, weights) { size_of::<u16>() } else { size_of::<f32>() };
        if !names.insert(name) {
            return Err(Error::file(folder, format!("tensor `{name}` would be written twice")));
        }
        let size = shape.iter().try_fold(width, |bytes, &size| bytes.checked_mul(size));
        match size.and_then(|size| Some((size, total.checked_add(size)?))) {
            Some((size, sum)) => {
                bytes.push(size);
                total = sum;
            }
            None => {
                let message = format!("tensor `{name}` of shape {shape:?} is too large to be written");
                return Err(Error::file(folder, message));
            }
        }
    }
    Ok(bytes)
}

/// Splits the parameters into files: a file is closed before it would exceed `shard_bytes`. There is at least one file.
fn cut(bytes: &[usize], shard_bytes: usize) -> Vec<Range<usize>> {
    let mut shards = Vec::new();
    let (mut start, mut size) = (0, 0);
    for (i, &bytes) in bytes.iter().enumerate() {
        if i > start && bytes > shard_bytes.saturating_sub(size) {
            shards.push(start..i);
            (start, size) = (i, 0);
        }
        size += bytes;
    }
    shards.push(start..bytes.len());
    shards
}

/// The name of tensor file `number`, from 0.
fn file_name(number: usize, count: usize) -> String {
    if count == 1 { MODEL_FILE.into() } else { format!("model-{:05}-of-{count:05}.safetensors", number + 1) }
}

/// The header of a safetensors file; `bytes` has the size of each parameter.
fn tensors_header(parameters: &[ParameterSpec], bytes: &[usize], weights: Precision) -> Vec<u8> {
    let mut header = Map::new();
    // The value that Hugging Face tools expect: numbers in the layout of PyTorch.
    header.insert("__metadata__".into(), json!({ "format": "pt" }));
    let mut start = 0;
    for (parameter, bytes) in parameters.iter().zip(bytes) {
        let end = start + bytes;
        let dtype = if is_half(parameter, weights) { "BF16" } else { "F32" };
        let entry = json!({ "dtype": dtype, "shape": parameter.shape, "data_offsets": [start, end] });
        header.insert(parameter.name.clone(), entry);
        start = end;
    }
    let mut header = Value::Object(header).to_string().into_bytes();
    // Pad with spaces, so that the numbers are aligned for any type.
    header.resize(header.len().next_multiple_of(8), b' ');
    header
}

/// A folder next to its final destination, removed unless it is renamed.
struct Partial {
    path: PathBuf,
    /// The folder itself, locked while this process writes to it; `None` if folders cannot be locked.
    _lock: Option<File>,
    renamed: bool,
}

impl Partial {
    /// Creates `.<name>.partial-<process>` next to the folder; missing parent folders are created.
    fn create(folder: &Path) -> Result<Self> {
        let Some(name) = folder.file_name() else {
            return Err(Error::file(folder, "does not name a new folder"));
        };
        let mut partial = OsString::from(".");
        partial.push(name);
        partial.push(".partial-");
        create_parents(parent(folder))?;
        remove_abandoned(parent(folder), &partial);
        partial.push(std::process::id().to_string());
        let path = folder.with_file_name(partial);
        // Left by an earlier process with the same process id, which died while writing.
        if let Err(error) = fs::remove_dir_all(&path)
            && error.kind() != io::ErrorKind::NotFound
        {
            return Err(Error::io(&path, "remove")(error));
        }
        fs::create_dir(&path).map_err(Error::io(&path, "create"))?;
        let lock = File::open(&path).ok().filter(|folder| folder.try_lock().is_ok());
        Ok(Self { path, _lock: lock, renamed: false })
    }

    /// Moves the folder to its destination, which is free or an empty folder.
    fn rename_to(mut self, folder: &Path) -> Result<()> {
        sync_folder(&self.path)?;
        // On other systems, a rename replaces an empty folder.
        if cfg!(windows) && folder.exists() {
            fs::remove_dir(folder).map_err(Error::io(folder, "replace"))?;
        }
        fs::rename(&self.path, folder)
            .map_err(Error::io(folder, "rename the finished checkpoint to this name"))?;
        self.renamed = true;
        sync_folder(parent(folder))
    }
}

/// Removes the temporary folders that dead processes left next to a destination: their names begin with `prefix` and
/// end with a process id, and nobody holds their lock. One that cannot be removed is harmless.
fn remove_abandoned(parent: &Path, prefix: &OsStr) {
    for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let number = name.as_encoded_bytes().strip_prefix(prefix.as_encoded_bytes());
        if !number.is_some_and(|number| !number.is_empty() && number.iter().all(u8::is_ascii_digit)) {
            continue;
        }
        if File::open(entry.path()).is_ok_and(|folder| folder.try_lock().is_ok()) {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

impl Drop for Partial {
    fn drop(&mut self) {
        if !self.renamed {
            // Report the original error instead.
            let _ = fs::remove_dir_all(&self.path);
        }
    }
}

/// Creates a folder and its parents, synced to the disk.
fn create_parents(folder: &Path) -> Result<()> {
    let missing: Vec<&Path> =
        folder.ancestors().take_while(|above| !above.as_os_str().is_empty() && !above.exists()).collect();
    fs::create_dir_all(folder).map_err(Error::io(folder, "create"))?;
    missing.into_iter().try_for_each(|made| sync_folder(parent(made)))
}
