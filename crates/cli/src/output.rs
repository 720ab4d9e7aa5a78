//! Files that commands write. Each is checked before the work begins, so that no work is wasted and no input, and no
//! file of another kind, is overwritten.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use march_lab::eval::{is_report, is_results};
use march_lab::report::{is_page, is_picture};
use march_lm::disk;
use serde_json::Value;

/// The kind of contents of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Written by `march logits`.
    Logits,
    /// A `tokenizer.json`.
    Tokenizer,
    /// The checksum next to a `tokenizer.json`.
    Checksum,
    /// Written by `march eval`.
    Results,
    /// Written by `march eval requests`.
    Answers,
    /// Written by `march inspect policies`.
    Policies,
    /// HTML that this program wrote.
    Page,
    /// SVG that this program wrote.
    Picture,
    /// Text, whose origin cannot be recognised, so it never replaces a file.
    Text,
}

/// Reserved names in the folder of a model or a run, whether or not the folder has such a file.
const OWN_NAMES: [&str; 11] = [
    "checksums.json",
    "config.json",
    "config.toml",
    "environment.json",
    "metrics-discarded.jsonl",
    "metrics.jsonl",
    "optimizer.safetensors",
    "progress.json",
    "run.json",
    "samples.txt",
    "tokenizer.json",
];

/// Larger JSON files are assumed not to be written by this program.
const LARGEST_JSON: u64 = 1 << 30;

/// An output file that passed the checks.
#[derive(Debug)]
pub struct Output {
    path: PathBuf,
}

impl Output {
    /// Rejects a path that is not writable, that is one of the `inputs` (files, or folders of models and runs) or
    /// inside one, or that is an existing file of another kind. A file of the same kind, or an empty one, will be
    /// replaced.
    pub fn check(path: &Path, kind: Kind, inputs: &[&Path]) -> anyhow::Result<Self> {
        let shown = path.display();
        if path.is_dir() || path.as_os_str().as_encoded_bytes().ends_with(b"/") {
            bail!("{shown}: is a folder; name a file in it");
        }
        let Some(name) = path.file_name() else { bail!("{shown}: does not name a file") };
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        if !folder.is_dir() {
            bail!("{shown}: the folder {} does not exist; create it first", folder.display());
        }
        // The real destination: a symbolic link stays, and the file that it points to is replaced.
        let real = if path.is_symlink() || path.exists() {
            fs::canonicalize(path).with_context(|| format!("{shown}: could not follow the link"))?
        } else {
            fs::canonicalize(folder).with_context(|| format!("{shown}: could not be found"))?.join(name)
        };
        for input in inputs {
            if disk::same_file(path, input) {
                bail!(
                    "{shown}: is also an input ({}) and would be overwritten; name another file",
                    input.display()
                );
            }
            let inside =
                input.is_dir() && fs::canonicalize(input).is_ok_and(|folder| real.starts_with(folder));
            if inside && real.file_name().is_some_and(is_own) {
                bail!(
                    "{shown}: is a file of the input {} and would be overwritten; name another file",
                    input.display()
                );
            }
        }
        if real.exists() {
            check_existing(path, kind)?;
        }
        check_writable(path, &real)?;
        Ok(Self { path: path.into() })
    }

    /// Same as [`Output::check`] for an optional output.
    pub fn check_some(path: Option<&Path>, kind: Kind, inputs: &[&Path]) -> anyhow::Result<Option<Self>> {
        path.map(|path| Self::check(path, kind, inputs)).transpose()
    }

    /// The path as given by the user.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Writes the file atomically.
    pub fn write(&self, bytes: &[u8]) -> anyhow::Result<()> {
        Ok(disk::replace(&self.path, bytes)?)
    }
}

/// Rejects an output folder of tokens that contains input files.
pub fn check_tokens_folder(folder: &Path, inputs: &[PathBuf]) -> anyhow::Result<()> {
    let shown = folder.display();
    if folder.exists() && !folder.is_dir() {
        bail!("{shown}: is a file; name a folder for the tokens");
    }
    if let Some(name) = ["config.json", "config.toml"].iter().find(|name| folder.join(name).exists()) {
        bail!(
            "{shown}: has a `{name}`, so it belongs to a model or a run; name another folder for the tokens"
        );
    }
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let own = entry.file_name().to_str().is_some_and(|name| {
            ["meta.json", "progress.json", "tokenizer.json"].contains(&name) || name.starts_with("tokens-")
        });
        let read = inputs.iter().find(|input| own && disk::same_file(input, &entry.path()));
        if let Some(input) = read {
            bail!(
                "{}: is also an input ({}) and would be overwritten; name another folder than {shown}",
                entry.path().display(),
                input.display()
            );
        }
    }
    Ok(())
}

/// Whether a file of this name belongs to the model or run in its folder.
fn is_own(name: &OsStr) -> bool {
    let name = name.to_string_lossy();
    let weights = name.starts_with("model") && (name.contains(".safetensors") || name.ends_with(".bin"));
    weights || OWN_NAMES.contains(&&*name)
}

/// Rejects an existing file unless a file of this kind may replace it.
fn check_existing(path: &Path, kind: Kind) -> anyhow::Result<()> {
    let shown = path.display();
    let metadata = fs::metadata(path).with_context(|| format!("{shown}: could not be inspected"))?;
    if !metadata.is_file() {
        bail!("{shown}: is a device or a pipe; name a file");
    }
    if metadata.len() == 0 {
        return Ok(());
    }
    let file = File::open(path);
    let mut file = file.with_context(|| format!("{shown}: exists but could not be read"))?;
    if kind.describes(&mut file, metadata.len()) {
        return Ok(());
    }
    let remedy = match kind {
        Kind::Tokenizer => "name another file (is the value of --output missing?)",
        _ => "name another file, or remove this one",
    };
    bail!("{shown}: exists and {}; it would be overwritten: {remedy}", kind.other())
}

/// Rejects a destination that is not writable, by creating the temporary file that is written first.
fn check_writable(path: &Path, real: &Path) -> anyhow::Result<()> {
    let mut name = std::ffi::OsString::from(".");
    name.push(real.file_name().unwrap_or_default());
    name.push(".partial");
    let partial = real.with_file_name(name);
    match File::options().write(true).create_new(true).open(&partial) {
        Ok(_) => fs::remove_file(&partial),
        // Left by a dead process.
        Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(()),
        Err(error) => Err(error),
    }
    .with_context(|| format!("{}: could not be written", path.display()))
}

impl Kind {
    /// Whether a non-empty file is of this kind.
    fn describes(self, file: &mut File, size: u64) -> bool {
        match self {
            Self::Logits => safetensors_header(file, size).is_some_and(|header| is_logits(&header)),
            Self::Tokenizer => json(file, size).is_some_and(|object| is_tokenizer(&object)),
            Self::Checksum => {
                let bytes = beginning(file);
                bytes.len() > 64 && bytes[..64].iter().all(u8::is_ascii_hexdigit) && bytes[64] == b' '
            }
            Self::Results => json_text(file, size).is_some_and(|text| is_report(&text) || is_results(&text)),
            Self::Answers => {
                let bytes = beginning(file);
                ["loglikelihood", "loglikelihood_rolling", "generate_until", "error"]
                    .iter()
                    .any(|kind| bytes.starts_with(format!("{{\"{kind}\":").as_bytes()))
            }
            Self::Policies => json(file, size)
                .is_some_and(|object| object["lengths"].is_array() && object["rows"].is_array()),
            Self::Page => is_page(&beginning(file)),
            Self::Picture => is_picture(&beginning(file)),
            Self::Text => false,
        }
    }

    /// The message for a file of another kind.
    fn other(self) -> &'static str {
        match self {
            Self::Logits => "does not contain logits",
            Self::Tokenizer => "is not a tokenizer.json",
            Self::Checksum => "is not the checksum of a tokenizer.json",
            Self::Results => "does not contain results of `march eval`",
            Self::Answers => "does not contain answers of `march eval requests`",
            Self::Policies => "does not contain results of `march inspect policies`",
            Self::Page => "is not a page written by this program",
            Self::Picture => "is not a picture written by this program",
            Self::Text => "may not be from this program",
        }
    }
}

/// Reads the beginning of a file.
fn beginning(file: &mut File) -> Vec<u8> {
    let mut bytes = Vec::new();
    let _ = file.take(4096).read_to_end(&mut bytes);
    bytes
}

/// Reads the text of a JSON file.
fn json_text(file: &mut File, size: u64) -> Option<String> {
    if size > LARGEST_JSON {
        return None;
    }
    let mut text = String::new();
    file.read_to_string(&mut text).ok()?;
    Some(text)
}

/// Reads the object of a JSON file.
fn json(file: &mut File, size: u64) -> Option<Value> {
    serde_json::from_str::<Value>(&json_text(file, size)?).ok().filter(Value::is_object)
}

/// Whether the header of a safetensors file is that of `march logits`: it has only these tensors, and names no format.
/// Banks and models have other tensors, or name their format.
fn is_logits(header: &Value) -> bool {
    let Some(tensors) = header.as_object() else { return false };
    let own = |name: &str| {
        matches!(name, "__metadata__" | "logits" | "boundaries") || name.starts_with("routing_weights.")
    };
    tensors.contains_key("logits")
        && header["__metadata__"].get("format").is_none()
        && tensors.keys().all(|name| own(name))
}

/// Whether a JSON object is a `tokenizer.json`: it lists added tokens, and its model has a vocabulary.
fn is_tokenizer(object: &Value) -> bool {
    let vocabulary = &object["model"]["vocab"];
    object["added_tokens"].is_array() && (vocabulary.is_object() || vocabulary.is_array())
}

/// Reads the header of a safetensors file: its tensors by name.
fn safetensors_header(file: &mut File, size: u64) -> Option<Value> {
    let mut length = [0; 8];
    file.read_exact(&mut length).ok()?;
    let length = u64::from_le_bytes(length);
    if length > size {
        return None;
    }
    let mut header = Vec::new();
    file.take(length).read_to_end(&mut header).ok()?;
    serde_json::from_slice(&header).ok()
}
