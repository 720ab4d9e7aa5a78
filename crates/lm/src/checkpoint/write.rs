//! Writing a checkpoint folder: into a temporary folder next to its destination, synced to the disk, then renamed.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io::{self, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};

use march_engine::{Precision, Tensor, to_bf16};
use serde_json::{Map, Value, json};

use super::checksums::{CHECKSUMS_FILE, ChecksumWriter, Checksums, FileSum};
use super::{CONFIG_FILE, INDEX_FILE, MODEL_FILE, packed};
use crate::disk::header::LENGTH_BYTES;
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

/// What a parameter is written from.
pub enum Values {
    /// Numbers, which are written in f32 or rounded to bf16.
    Numbers(Vec<f32>),
    /// A tensor of the CPU that has the precision already.
    Tensor(Tensor),
}

impl From<Vec<f32>> for Values {
    fn from(numbers: Vec<f32>) -> Self {
        Self::Numbers(numbers)
    }
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

    /// Writes a model: `config.json` and the tensors. `tensor(i)` returns the numbers of `parameters[i]`, or for matrices in
    /// q8 and q4 a tensor in this precision; it is called once for each. Other tensors than matrices are small, and in f32.
    pub fn model<V: Into<Values>>(
        &self,
        config: &ModelConfig,
        parameters: &[ParameterSpec],
        shard_bytes: usize,
        weights: Precision,
        mut tensor: impl FnMut(usize) -> Result<V>,
    ) -> Result<()> {
        if weights == Precision::Int8 {
            let message = "weights in int8 are not stored; choose f32, bf16, q8 or q4";
            return Err(Error::file(&self.folder, message));
        }
        let bytes = count_bytes(&self.folder, parameters, weights)?;
        let shards = cut(&bytes, shard_bytes);
        self.file(CONFIG_FILE, config.to_json().as_bytes())?;
        let mut weight_map = Map::new();
        for (number, shard) in shards.iter().enumerate() {
            let name = file_name(number, shards.len());
            let own = (&parameters[shard.clone()], &bytes[shard.clone()]);
            self.write_tensors(&name, own, weights, |i| Ok(tensor(shard.start + i)?.into()))?;
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
        mut tensor: impl FnMut(usize) -> Result<Vec<f32>>,
    ) -> Result<()> {
        let bytes = count_bytes(&self.folder, parameters, Precision::F32)?;
        self.write_tensors(name, (parameters, &bytes), Precision::F32, |i| Ok(tensor(i)?.into()))
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
        mut tensor: impl FnMut(usize) -> Result<Values>,
    ) -> Result<()> {
        let (header, order) = tensors_header(parameters, bytes, weights);
        self.write(name, |path, file| {
            file.write_all(&(header.len() as u64).to_le_bytes()).map_err(Error::io(path, "write"))?;
            file.write_all(&header).map_err(Error::io(path, "write"))?;
            for i in order {
                let (parameter, own) = (&parameters[i], written(&parameters[i], weights));
                let wrong = |given: String| {
                    let ParameterSpec { name, shape, .. } = parameter;
                    let count = parameter.count();
                    let message = format!(
                        "tensor `{name}` of shape {shape:?} has {count} numbers, in {own}, but {given} were given"
                    );
                    Error::file(path, message)
                };
                match tensor(i)? {
                    Values::Tensor(tensor) if *tensor.shape() != parameter.shape || tensor.dtype() != own.into() => {
                        return Err(wrong(format!("{:?} in {}", tensor.shape(), tensor.dtype())));
                    }
                    Values::Tensor(tensor) => file.write_all(&tensor.file_bytes()?),
                    Values::Numbers(numbers) if numbers.len() != parameter.count() => {
                        return Err(wrong(numbers.len().to_string()));
                    }
                    Values::Numbers(numbers) => match own {
                        Precision::F32 => file.write_all(&file_bytes(&numbers)),
                        Precision::Bf16 => write_bf16(file, &numbers),
                        _ => return Err(wrong("numbers in f32".into())),
                    },
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

/// Precision in which a parameter is written.
fn written(parameter: &ParameterSpec, weights: Precision) -> Precision {
    if parameter.is_matrix() { weights } else { Precision::F32 }
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
        if !names.insert(name) {
            return Err(Error::file(folder, format!("tensor `{name}` would be written twice")));
        }
        let size = match (written(parameter, weights), &shape[..]) {
            (own @ (Precision::Q8 | Precision::Q4), &[rows, width]) => {
                own.blocks_shape(rows, width).map(|[groups, group]| groups * group)
            }
            (own, _) => {
                let width = if own == Precision::Bf16 { size_of::<u16>() } else { size_of::<f32>() };
                shape.iter().try_fold(width, |bytes, &size| bytes.checked_mul(size))
            }
        };
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

/// The header of a safetensors file, and the order of the parameters in it; `bytes` has the size of each.
fn tensors_header(
    parameters: &[ParameterSpec],
    bytes: &[usize],
    weights: Precision,
) -> (Vec<u8>, Vec<usize>) {
    let blocks = |i: usize| match (written(&parameters[i], weights), &parameters[i].shape[..]) {
        (own, &[rows, width]) => own.blocks_shape(rows, width).map(|bytes| ([rows, width], bytes)),
        _ => None,
    };
    let mut order: Vec<usize> = (0..parameters.len()).collect();
    // Blocks first: they stay aligned to cache lines there.
    order.sort_by_key(|&i| blocks(i).is_none());
    let matrices = order.iter().filter_map(|&i| Some((parameters[i].name.as_str(), blocks(i)?.0)));
    let metadata = match weights {
        Precision::Q8 | Precision::Q4 => packed::metadata(weights, matrices),
        // The value that Hugging Face tools expect: numbers in the layout of PyTorch.
        _ => json!({ "format": "pt" }),
    };
    let mut header = Map::new();
    header.insert("__metadata__".into(), metadata);
    let mut start = 0;
    for &i in &order {
        let (parameter, end) = (&parameters[i], start + bytes[i]);
        let (dtype, shape) = match (blocks(i), written(parameter, weights)) {
            (Some((_, bytes)), _) => ("U8", json!(bytes)),
            (None, Precision::Bf16) => ("BF16", json!(parameter.shape)),
            (None, _) => ("F32", json!(parameter.shape)),
        };
        let entry = json!({ "dtype": dtype, "shape": shape, "data_offsets": [start, end] });
        header.insert(parameter.name.clone(), entry);
        start = end;
    }
    let mut header = Value::Object(header).to_string().into_bytes();
    // Pad with spaces, so that what follows begins at a cache line.
    let length = (LENGTH_BYTES + header.len()).next_multiple_of(64) - LENGTH_BYTES;
    header.resize(length, b' ');
    (header, order)
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
