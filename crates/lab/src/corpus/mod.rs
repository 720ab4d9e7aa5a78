//! A corpus of source code that anyone can rebuild: Rust crates from the package registry, by a lock file with versions
//! and checksums, and books that such packages carry.
//!
//! ```text
//! crates.toml, crates.lock   the packages                    → cargo vendor
//! corpus.toml                which are used, which held out  → train.jsonl, held-out.jsonl, books.jsonl
//! train.jsonl                                                → tokenizer.json
//! tokenizer.json and texts                                   → train/, held-out/, books/: shards of tokens
//! ```
//! One document per crate or book. Each step is skipped if what it makes exists, so an interrupted build resumes.

mod sources;

use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

pub use self::sources::FileCounts;
use self::sources::{SeenLines, crate_text};
use march_lm::data::{Options, PrepareOutcome, Status, builtin, prepare, train_tokenizer};
use march_lm::disk;
use march_lm::tokenizer::Tokenizer;
use march_lm::{Error, Result};

const MANIFEST: &str = include_str!("../../configs/corpus/crates.toml");
const LOCK: &str = include_str!("../../configs/corpus/crates.lock");
const RECIPE: &str = include_str!("../../configs/corpus/corpus.toml");

/// The parts of the corpus; each becomes a folder of tokens and a file of texts.
pub const PARTS: [&str; 3] = ["train", "held-out", "books"];

/// The file that describes a complete corpus.
pub const SUMMARY: &str = "corpus.json";

/// How many source files were used.
const FILES: &str = "files.json";

/// The progress of [`build`].
pub enum Progress<'a> {
    /// A step began.
    Step(&'a str),
    /// Packages read, of all.
    Packages(usize, usize),
    /// The tokenizer's training: phase, done, of.
    Tokenizer(&'static str, u64, u64),
    /// The encoding of a part.
    Encoding(&'a str, &'a Status),
}

/// `corpus.toml`.
#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Recipe {
    vocabulary: usize,
    exclude: Vec<String>,
    least_bytes: usize,
    held_out: Vec<String>,
    book: Vec<Book>,
    /// SHA-256 of the texts, by part.
    sha256: BTreeMap<String, String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Book {
    name: String,
    file: PathBuf,
}

/// One document of the corpus.
#[derive(Serialize)]
struct Document<'a> {
    name: &'a str,
    text: &'a str,
}

/// What a corpus has.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Summary {
    /// Its parts, by name.
    pub parts: BTreeMap<String, PartSummary>,
    /// The files of all used packages.
    pub files: FileCounts,
}

/// What a part of a corpus has.
#[derive(Clone, Debug, Default, Serialize)]
pub struct PartSummary {
    /// Documents.
    pub documents: u64,
    /// Bytes of text.
    pub bytes: u64,
    /// Tokens.
    pub tokens: u64,
    /// SHA-256 of the file of texts.
    pub sha256: String,
    /// Whether that is the SHA-256 of the corpus that the results are about.
    pub expected: bool,
}

/// Builds the corpus in a folder. The fetched packages are deleted at the end unless `keep_packages`. `watch` can stop
/// it; the same call resumes. `None` if it was stopped.
pub fn build(
    output: &Path,
    keep_packages: bool,
    watch: &mut dyn FnMut(Progress<'_>) -> ControlFlow<()>,
) -> Result<Option<Summary>> {
    let recipe: Recipe = toml::from_str(RECIPE)
        .map_err(|error| Error::file(Path::new("configs/corpus/corpus.toml"), error.to_string()))?;
    fs::create_dir_all(output).map_err(Error::io(output, "create the folder"))?;
    let texts = PARTS.map(|part| output.join(part).with_extension("jsonl"));
    let mut summary = Summary::default();
    let counted = output.join(FILES);
    let packages = output.join("packages");
    if !counted.exists() || !texts.iter().all(|text| text.exists()) {
        if watch(Progress::Step("fetching the packages with `cargo vendor`")).is_break() {
            return Ok(None);
        }
        vendor(&packages)?;
        if watch(Progress::Step("reading their sources")).is_break() {
            return Ok(None);
        }
        match collect(&recipe, &packages.join("vendor"), &texts, watch)? {
            Some(files) => write(&counted, &files)?,
            None => return Ok(None),
        }
    }
    let text = fs::read_to_string(&counted).map_err(Error::io(&counted, "read"))?;
    summary.files = serde_json::from_str(&text).map_err(|error| Error::file(&counted, error.to_string()))?;
    match prepared(output, &texts, &recipe, watch)? {
        Some(parts) => summary.parts = parts,
        None => return Ok(None),
    }
    write(&output.join(SUMMARY), &summary)?;
    if !keep_packages && packages.exists() {
        fs::remove_dir_all(&packages).map_err(Error::io(&packages, "delete"))?;
    }
    Ok(Some(summary))
}

/// A corpus made of the built-in book, to see that everything works.
pub fn build_tiny(output: &Path) -> Result<()> {
    let recipe = Recipe { vocabulary: 320, ..Recipe::default() };
    fs::create_dir_all(output).map_err(Error::io(output, "create the folder"))?;
    let texts = PARTS.map(|part| output.join(part).with_extension("jsonl"));
    let chapters: Vec<&str> = builtin().split("CHAPTER ").collect();
    let share = chapters.len() / 3;
    let parts = [&chapters[..share], &chapters[share..2 * share], &chapters[2 * share..]];
    for (path, chapters) in texts.iter().zip(parts) {
        let mut part = Vec::new();
        for (number, chapter) in chapters.iter().enumerate() {
            // With a function, which the book lacks, for the measurement of copies.
            push(&mut part, "chapter", &format!("{chapter}\n{}", function(number)))?;
        }
        if !path.exists() {
            disk::replace(path, &part)?;
        }
    }
    prepared(output, &texts, &recipe, &mut |_| ControlFlow::Continue(())).map(|_| ())
}

/// A function of source code, for a text that has none.
fn function(number: usize) -> String {
    format!(
        "pub fn pages_of_chapter_{number}(lines: usize, page: usize) -> usize {{\n    let whole = lines / page;\n    \
         if lines % page == 0 {{ whole }} else {{ whole + 1 }}\n}}\n"
    )
}

/// Trains the tokenizer on the first part, and encodes all. `None` if `watch` stopped it.
fn prepared(
    output: &Path,
    texts: &[PathBuf; 3],
    recipe: &Recipe,
    watch: &mut dyn FnMut(Progress<'_>) -> ControlFlow<()>,
) -> Result<Option<BTreeMap<String, PartSummary>>> {
    let mut parts = BTreeMap::new();
    let path = output.join("tokenizer.json");
    if !path.exists() {
        if watch(Progress::Step("training the tokenizer")).is_break() {
            return Ok(None);
        }
        let mut stopped = false;
        let mut watch = |phase: &'static str, done: u64, of: u64| {
            stopped |= watch(Progress::Tokenizer(phase, done, of)).is_break();
        };
        let tokenizer = train_tokenizer(&texts[..1], "text", recipe.vocabulary, false, &mut watch)?;
        tokenizer.save(&path)?;
        if stopped {
            return Ok(None);
        }
    }
    let tokenizer = Tokenizer::load(&path.to_string_lossy())?;
    for (part, text) in PARTS.into_iter().zip(texts) {
        let folder = output.join(part);
        let bytes = fs::read(text).map_err(Error::io(text, "read"))?;
        let sha256 = hex(&Sha256::digest(&bytes));
        let mut found = PartSummary {
            expected: recipe.sha256.get(part) == Some(&sha256),
            sha256,
            bytes: bytes.len() as u64,
            ..PartSummary::default()
        };
        drop(bytes);
        if !folder.join("meta.json").exists() {
            if watch(Progress::Step(&format!("encoding {part}"))).is_break() {
                return Ok(None);
            }
            let mut watch = |status: &Status| watch(Progress::Encoding(part, status));
            let files = std::slice::from_ref(text);
            if let PrepareOutcome::Stopped(_) =
                prepare(&tokenizer, files, &folder, &Options::default(), &mut watch)?
            {
                return Ok(None);
            }
        }
        let shards = march_lm::data::Shards::open(&folder)?;
        (found.documents, found.tokens) = (shards.meta().documents, shards.tokens());
        parts.insert(part.into(), found);
    }
    Ok(Some(parts))
}

/// Writes a file of JSON.
fn write(path: &Path, contents: &impl Serialize) -> Result<()> {
    let json =
        serde_json::to_string_pretty(contents).map_err(|error| Error::file(path, error.to_string()))?;
    disk::replace(path, (json + "\n").as_bytes())
}

/// Fetches the packages into `packages/vendor`.
fn vendor(packages: &Path) -> Result<()> {
    let done = packages.join("complete");
    if done.exists() {
        return Ok(());
    }
    let source = packages.join("src");
    fs::create_dir_all(&source).map_err(Error::io(&source, "create the folder"))?;
    disk::replace(&packages.join("Cargo.toml"), MANIFEST.as_bytes())?;
    disk::replace(&packages.join("Cargo.lock"), LOCK.as_bytes())?;
    disk::replace(&source.join("lib.rs"), b"")?;
    let mut cargo = Command::new("cargo");
    cargo.args(["vendor", "--locked", "--quiet", "vendor"]).current_dir(packages).stdout(Stdio::null());
    let status = cargo.stderr(Stdio::piped()).output().map_err(|error| {
        Error::Request(format!(
            "cargo could not be started: {error}; the corpus is fetched with `cargo vendor`"
        ))
    })?;
    if !status.status.success() {
        let message = String::from_utf8_lossy(&status.stderr);
        let message = format!("`cargo vendor` failed there: {}", message.trim());
        return Err(Error::file(packages, message));
    }
    disk::replace(&done, b"")
}

/// Writes the texts of the parts.
fn collect(
    recipe: &Recipe,
    vendor: &Path,
    texts: &[PathBuf; 3],
    watch: &mut dyn FnMut(Progress<'_>) -> ControlFlow<()>,
) -> Result<Option<FileCounts>> {
    let mut counts = FileCounts::default();
    let mut seen = SeenLines::default();
    let [mut train, mut held_out, mut books] = [(); 3].map(|()| Vec::new());
    let names = packages();
    for (number, name) in names.iter().enumerate() {
        if watch(Progress::Packages(number, names.len())).is_break() {
            return Ok(None);
        }
        if recipe.exclude.iter().any(|pattern| matches(pattern, name)) {
            continue;
        }
        let text = crate_text(name, &vendor.join(name), &mut seen, &mut counts)?;
        if text.len() < recipe.least_bytes {
            continue;
        }
        let part = match recipe.held_out.iter().any(|pattern| matches(pattern, name)) {
            true => &mut held_out,
            false => &mut train,
        };
        push(part, name, &text)?;
    }
    push(&mut books, "Alice's Adventures in Wonderland", builtin())?;
    for book in &recipe.book {
        let path = vendor.join(&book.file);
        let text = fs::read_to_string(&path).map_err(Error::io(&path, "read"))?;
        push(&mut books, &book.name, without_licence(&text.replace("\r\n", "\n")))?;
    }
    for (path, part) in texts.iter().zip([train, held_out, books]) {
        disk::replace(path, &part)?;
    }
    Ok(Some(counts))
}

/// Appends a document as a line of JSON.
fn push(part: &mut Vec<u8>, name: &str, text: &str) -> Result<()> {
    let line = serde_json::to_string(&Document { name, text })
        .map_err(|error| Error::Request(format!("{name}: {error}")))?;
    writeln!(part, "{line}").map_err(|error| Error::Request(format!("{name}: {error}")))
}

/// The names of the packages in the lock file, in an order that has nothing to do with what they are.
fn packages() -> Vec<&'static str> {
    let names = LOCK.lines().filter_map(|line| line.strip_prefix("name = \"")?.strip_suffix('"'));
    let mut names: Vec<&str> = names.filter(|name| *name != "corpus").collect();
    names.sort_by_cached_key(|name| Sha256::digest(name));
    names.dedup();
    names
}

/// Whether a name matches a pattern, in which `*` at one end stands for anything.
fn matches(pattern: &str, name: &str) -> bool {
    match (pattern.strip_prefix('*'), pattern.strip_suffix('*')) {
        (Some(end), _) => name.ends_with(end),
        (_, Some(start)) => name.starts_with(start),
        _ => name == pattern,
    }
}

/// A book without what Project Gutenberg puts around it.
fn without_licence(text: &str) -> &str {
    let start = text.find("*** START OF").and_then(|at| Some(at + text[at..].find('\n')? + 1)).unwrap_or(0);
    let end = text.find("*** END OF").unwrap_or(text.len());
    text[start.min(end)..end].trim()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
