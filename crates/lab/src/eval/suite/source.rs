//! The documents of a data set, from local files in the layouts of the Hugging Face hub. Nothing is downloaded.

use std::collections::VecDeque;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use parquet::errors::ParquetError;
use parquet::file::reader::SerializedFileReader;
use parquet::record::reader::RowIter;
use parquet::record::{Field, Row};
use regex::Regex;
use serde_json::{Map, Value};

use march_lm::data::text::{Compression, guarded, kind, lines};
use march_lm::{Error, Result};

/// A split of a data set of the hub.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DataSet {
    /// The name on the hub: `organisation/name`.
    pub hub: &'static str,
    /// The configuration; empty or `default` if the data set has only one.
    pub config: &'static str,
    /// The split.
    pub split: &'static str,
    /// Where else the files may be: paths relative to the data root, with `*` for any part of a name.
    pub files: &'static [&'static str],
}

/// The extensions of files of documents. If a layout is there in several, the first counts.
const EXTENSIONS: [&str; 5] = [".jsonl", ".json", ".parquet", ".jsonl.gz", ".jsonl.zst"];

/// Where a document stands.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place {
    /// The file.
    pub file: PathBuf,
    /// The line, or the number of the row or of the element, from 1; 0 if the file could not be opened.
    pub line: u64,
    /// What is numbered: `line`, `row` or `element`.
    pub unit: &'static str,
}

impl Place {
    /// As in `line 3`.
    pub fn line_text(&self) -> String {
        format!("{} {}", self.unit, self.line)
    }

    /// An error at the place.
    fn wrong(&self, message: impl std::fmt::Display) -> Error {
        Error::file(&self.file, format!("{}: {message}", self.line_text()))
    }
}

impl DataSet {
    /// A split, and where else its files may be.
    pub const fn new(
        hub: &'static str,
        config: &'static str,
        split: &'static str,
        files: &'static [&'static str],
    ) -> Self {
        Self { hub, config, split, files }
    }

    /// The page from which people get the data set.
    pub fn address(&self) -> String {
        format!("https://huggingface.co/datasets/{}", self.hub)
    }

    /// The name without the organisation.
    fn name(&self) -> &'static str {
        self.hub.rsplit('/').next().unwrap_or(self.hub)
    }

    /// Finds the files of the split under a folder of data sets, in order. The first layout that is there counts.
    pub fn find(&self, root: &Path) -> Result<Vec<PathBuf>> {
        if !root.is_dir() {
            let message = "is not a folder; the data root is the folder that holds the data sets";
            return Err(Error::file(root, message));
        }
        let mut folders = vec![root.join(self.hub), root.join(self.name())];
        // The cache of the hub's own tools.
        let cache = format!("datasets--{}/snapshots/*", self.hub.replace('/', "--"));
        folders.extend(matching(root, &cache)?);
        for folder in folders.iter().filter(|folder| folder.is_dir()) {
            for layout in self.layouts() {
                for extension in EXTENSIONS {
                    let files = matching(folder, &format!("{layout}{extension}"))?;
                    if !files.is_empty() {
                        return self.complete(files);
                    }
                }
            }
        }
        for pattern in self.files {
            let mut files = matching(root, pattern)?;
            files.retain(|file| EXTENSIONS.iter().any(|extension| name_of(file).ends_with(extension)));
            if !files.is_empty() {
                return self.complete(files);
            }
        }
        let first = root.join(self.hub).join(format!("{}{}", self.layouts()[0], EXTENSIONS[0]));
        let message = format!(
            "does not exist, and neither do the other layouts in which the data set {}{} is published (folders \
             {} and {}, shards, {}); get it from {} and put it there",
            self.hub,
            if self.is_named() { format!(" ({})", self.config) } else { String::new() },
            self.hub,
            self.name(),
            EXTENSIONS.join(", "),
            self.address(),
        );
        Err(Error::file(&first, message))
    }

    /// Whether there are several configurations, so that a path must name the one.
    fn is_named(&self) -> bool {
        !matches!(self.config, "" | "default")
    }

    /// The paths in the data set's folder, without their extension.
    fn layouts(&self) -> Vec<String> {
        let (name, config, split) = (self.name(), self.config, self.split);
        let shards = format!("{split}-*-of-*");
        if self.is_named() {
            return vec![
                format!("{config}/{split}"),
                format!("{config}/{shards}"),
                format!("{config}/{name}_{split}"),
                format!("{config}/{config}-{split}"),
                format!("{config}/{config}-{shards}"),
                format!("{config}/{split}/*"),
                format!("data/{config}/{split}"),
                format!("data/{config}/{shards}"),
                format!("{config}-{split}"),
                format!("{config}_{split}"),
                format!("data/{config}-{split}"),
                format!("data/{config}_{split}"),
                format!("data/{config}"),
                config.into(),
            ];
        }
        let mut layouts = Vec::new();
        for folder in ["", "data/", "default/", "plain_text/", &format!("{name}/")] {
            layouts.push(format!("{folder}{split}"));
            layouts.push(format!("{folder}{shards}"));
            layouts.push(format!("{folder}{name}_{split}"));
            layouts.push(format!("{folder}{split}/*"));
        }
        layouts
    }

    /// Rejects shards of which some are missing, because their scores would be those of another data set.
    fn complete(&self, files: Vec<PathBuf>) -> Result<Vec<PathBuf>> {
        let total = |file: &PathBuf| -> Option<usize> {
            let name = name_of(file);
            let (_, total) = name.split_once("-of-")?;
            total.split(['.', '-']).next()?.parse().ok()
        };
        if let Some(file) = files.iter().find(|file| total(file).is_some_and(|total| total != files.len())) {
            let message = format!(
                "is one of {} shards, but {} are there; get the others from {}",
                total(file).unwrap_or_default(),
                files.len(),
                self.address()
            );
            return Err(Error::file(file, message));
        }
        Ok(files)
    }
}

/// The name of a file, without its folder.
fn name_of(file: &Path) -> String {
    file.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// The paths under a folder that match a relative pattern, sorted.
fn matching(folder: &Path, pattern: &str) -> Result<Vec<PathBuf>> {
    let mut paths = vec![folder.to_path_buf()];
    for part in pattern.split('/') {
        let mut next = Vec::new();
        for path in paths {
            if !part.contains('*') {
                let path = path.join(part);
                if path.exists() {
                    next.push(path);
                }
                continue;
            }
            let entries = match fs::read_dir(&path) {
                Ok(entries) => entries,
                Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
                    continue;
                }
                Err(error) => return Err(Error::io(&path, "read")(error)),
            };
            for entry in entries {
                let entry = entry.map_err(Error::io(&path, "read"))?.path();
                if fits(part, &name_of(&entry)) {
                    next.push(entry);
                }
            }
        }
        next.sort();
        paths = next;
    }
    Ok(paths)
}

/// Whether a name is as a pattern with `*` says.
pub fn fits(pattern: &str, name: &str) -> bool {
    let pattern = regex::escape(pattern).replace(r"\*", ".*");
    Regex::new(&format!("(?s)^{pattern}$")).is_ok_and(|regex| regex.is_match(name))
}

/// The documents of files, in order. A broken document is an error, after which the next ones follow; if a file cannot
/// be read further, the next file follows.
pub fn documents(files: &[PathBuf]) -> impl Iterator<Item = (Place, Result<Value>)> {
    files.iter().cloned().flat_map(|file| match open(&file) {
        Ok(documents) => documents,
        Err(error) => Box::new(std::iter::once((Place { file, line: 0, unit: "line" }, Err(error)))),
    })
}

/// An iterator over the documents of one file.
type File = Box<dyn Iterator<Item = (Place, Result<Value>)>>;

fn open(file: &Path) -> Result<File> {
    let name = name_of(file).to_ascii_lowercase();
    Ok(if name.ends_with(".parquet") {
        rows(file)?
    } else if name.ends_with(".json") {
        json(file)?
    } else if name.ends_with(".gz") {
        per_line(file, Compression::Gzip)?
    } else if name.ends_with(".zst") {
        per_line(file, Compression::Zstd)?
    } else {
        per_line(file, Compression::None)?
    })
}

/// One document per line. The labels, one per document, may be in a file of their own.
fn per_line(file: &Path, compression: Compression) -> Result<File> {
    let (mut input, mut labels) = (lines(file, compression)?, labels(file)?);
    let mut place = Place { file: file.into(), line: 0, unit: "line" };
    let (mut buffer, mut failed) = (Vec::new(), false);
    Ok(Box::new(std::iter::from_fn(move || {
        while !failed {
            buffer.clear();
            let read = input.read_until(b'\n', &mut buffer);
            place.line += 1;
            match read {
                Ok(0) => return None,
                Ok(_) => {}
                Err(error) => {
                    failed = true;
                    let message = format!("could not read further: {error}; the file may be truncated");
                    return Some((place.clone(), Err(place.wrong(message))));
                }
            }
            let line = if place.line == 1 { without_mark(&buffer) } else { &buffer }.trim_ascii();
            if !line.is_empty() {
                let label = labels.as_mut().map(VecDeque::pop_front);
                return Some((place.clone(), document(line, label).map_err(|message| place.wrong(message))));
            }
        }
        None
    })))
}

/// The document of a line; `label` is its label in a file of labels, which may be too short.
fn document(line: &[u8], label: Option<Option<Value>>) -> std::result::Result<Value, String> {
    let mut document: Value = serde_json::from_slice(line).map_err(|error| unreadable(&error))?;
    if let (Some(label), Some(fields)) = (label, document.as_object_mut())
        && !fields.contains_key("label")
    {
        let label = label.ok_or("has no label in the neighbouring file of labels, which is shorter")?;
        fields.insert("label".into(), label);
    }
    Ok(document)
}

/// The labels that stand in a file beside the documents: `x_labels.lst` or `x-labels.lst` for `x.jsonl`.
fn labels(file: &Path) -> Result<Option<VecDeque<Value>>> {
    let name = name_of(file);
    let Some((stem, _)) = name.split_once(".jsonl") else { return Ok(None) };
    for labels in [format!("{stem}_labels.lst"), format!("{stem}-labels.lst")] {
        let labels = file.with_file_name(labels);
        if labels.is_file() {
            let text = fs::read_to_string(&labels).map_err(Error::io(&labels, "read"))?;
            return Ok(Some(text.lines().map(|line| Value::from(line.trim())).collect()));
        }
    }
    Ok(None)
}

/// What is wrong with JSON; the line is said elsewhere.
fn unreadable(error: &serde_json::Error) -> String {
    let message = error.to_string();
    let message = message.rsplit_once(" at line ").map_or(message.as_str(), |(message, _)| message);
    format!("is not JSON: {message} (column {})", error.column())
}

/// Without the byte order mark that some editors write.
fn without_mark(bytes: &[u8]) -> &[u8] {
    bytes.strip_prefix(b"\xEF\xBB\xBF").unwrap_or(bytes)
}

/// The documents of a file that is one JSON value: a list, a list under `data`, SQuAD's form, or an object whose keys
/// are the documents' numbers. Other objects are one document. A file whose first line is an object has one per line.
fn json(file: &Path) -> Result<File> {
    let bytes = fs::read(file).map_err(Error::io(file, "read"))?;
    let bytes = without_mark(&bytes);
    let value: Value = match serde_json::from_slice(bytes) {
        Ok(value) => value,
        Err(error) => {
            let first = bytes.trim_ascii_start().split(|&byte| byte == b'\n').next().unwrap_or_default();
            if serde_json::from_slice::<Map<String, Value>>(first).is_ok() {
                return per_line(file, Compression::None);
            }
            return Err(Error::file(file, format!("line {}: {}", error.line(), unreadable(&error))));
        }
    };
    let is_number = |key: &String| key.bytes().all(|byte| byte.is_ascii_digit());
    let documents: Vec<std::result::Result<Value, String>> = match value {
        Value::Array(list) => list.into_iter().map(Ok).collect(),
        Value::Object(mut object) => match object.remove("data") {
            Some(Value::Array(list)) if list.iter().any(|entry| entry.get("paragraphs").is_some()) => {
                list.iter().flat_map(questions).collect()
            }
            Some(Value::Array(list)) => list.into_iter().map(Ok).collect(),
            None if !object.is_empty() && object.keys().all(is_number) => {
                object.into_iter().map(|(_, document)| Ok(document)).collect()
            }
            data => {
                object.extend(data.map(|data| ("data".into(), data)));
                vec![Ok(Value::Object(object))]
            }
        },
        other => {
            let message = format!("is {}; a list or an object of documents was expected", kind(&other));
            return Err(Error::file(file, message));
        }
    };
    let file = file.to_path_buf();
    Ok(Box::new((1..).zip(documents).map(move |(line, document)| {
        let place = Place { file: file.clone(), line, unit: "element" };
        let document = document.map_err(|message| place.wrong(message));
        (place, document)
    })))
}

/// The questions of an entry of SQuAD, each with its context.
fn questions(entry: &Value) -> Vec<std::result::Result<Value, String>> {
    let Some(paragraphs) = entry.get("paragraphs").and_then(Value::as_array) else {
        return vec![Err("has no list `paragraphs`, as the other elements of `data`".into())];
    };
    let mut documents = Vec::new();
    for paragraph in paragraphs {
        match (paragraph.get("context"), paragraph.get("qas").and_then(Value::as_array)) {
            (Some(context), Some(questions)) => documents.extend(questions.iter().map(|question| {
                let mut document =
                    question.as_object().cloned().ok_or("`qas` holds what is not an object")?;
                document.insert("context".into(), context.clone());
                Ok(Value::Object(document))
            })),
            _ => documents.push(Err("a paragraph has no `context` or no list `qas`".into())),
        }
    }
    documents
}

/// The rows of a Parquet file.
fn rows(file: &Path) -> Result<File> {
    let input = fs::File::open(file).map_err(Error::io(file, "open"))?;
    let wrong =
        |error: ParquetError| Error::file(file, format!("is not a Parquet file that can be read: {error}"));
    let reader = guarded(|| SerializedFileReader::new(input)).map_err(wrong)?;
    let mut rows = guarded(|| Ok(RowIter::from_file_into(Box::new(reader)))).map_err(wrong)?;
    let mut place = Place { file: file.into(), line: 0, unit: "row" };
    let mut failed = false;
    Ok(Box::new(std::iter::from_fn(move || {
        if failed {
            return None;
        }
        place.line += 1;
        let row = guarded(|| rows.next().transpose()).transpose()?;
        failed = row.is_err();
        let wrong = |error| place.wrong(format!("could not read further: {error}; the file may be damaged"));
        Some((place.clone(), row.map(object).map_err(wrong)))
    })))
}

fn object(row: Row) -> Value {
    Value::Object(row.into_columns().into_iter().map(|(name, field)| (name, plain(&field))).collect())
}

/// A field of a table as JSON. Bytes are a text if they are UTF-8, otherwise a list of numbers.
fn plain(field: &Field) -> Value {
    match field {
        Field::Null => Value::Null,
        Field::Bool(value) => (*value).into(),
        Field::Byte(value) => (*value).into(),
        Field::Short(value) => (*value).into(),
        Field::Int(value) | Field::Date(value) | Field::TimeMillis(value) => (*value).into(),
        Field::Long(value)
        | Field::TimeMicros(value)
        | Field::TimestampMillis(value)
        | Field::TimestampMicros(value) => (*value).into(),
        Field::UByte(value) => (*value).into(),
        Field::UShort(value) => (*value).into(),
        Field::UInt(value) => (*value).into(),
        Field::ULong(value) => (*value).into(),
        // JSON has no NaN and no infinity: they become null.
        Field::Float16(value) => value.to_f64().into(),
        Field::Float(value) => f64::from(*value).into(),
        Field::Double(value) => (*value).into(),
        Field::Str(text) => text.as_str().into(),
        Field::Bytes(bytes) => match std::str::from_utf8(bytes.data()) {
            Ok(text) => text.into(),
            Err(_) => bytes.data().into(),
        },
        Field::Group(row) => object(row.clone()),
        Field::ListInternal(list) => list.elements().iter().map(plain).collect(),
        Field::MapInternal(map) => {
            let key = |field: &Field| match plain(field) {
                Value::String(text) => text,
                other => other.to_string(),
            };
            Value::Object(map.entries().iter().map(|(name, value)| (key(name), plain(value))).collect())
        }
        decimal @ Field::Decimal(_) => decimal.to_string().into(),
    }
}
