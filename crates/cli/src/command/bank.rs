//! Loading and saving a command's bank.

use std::ffi::OsString;
use std::fs::File;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use march_lm::disk::Lock;
use march_lm::generate::{Generator, Text};
use march_lm::memory::{BankFile, Rollback, StateBank};

use super::open::OpenedModel;
use crate::display::{bytes, thousands};

/// The bank of an empty text.
pub fn empty(opened: &OpenedModel) -> anyhow::Result<StateBank> {
    Ok(opened.model().bank(opened.policy().clone())?)
}

/// Loads the text of a file, with the bank's own policy except for what the flags change.
pub fn load(opened: &OpenedModel, file: &BankFile) -> anyhow::Result<Text> {
    let policy = opened.flags.over(file.policy().clone());
    Ok(Text::load(opened.device(), opened.model(), file, &opened.tag()?, Some(&policy))?)
}

/// What a command suggests if a file holds the bank of another text.
pub struct Advice {
    pub continue_with: &'static str,
    pub replace: &'static str,
}

/// The destination of a bank. No other process writes to it while this is held.
pub struct Place {
    path: PathBuf,
    real: PathBuf,
    _lock: Lock,
}

impl Place {
    /// Takes the destination before any work is done. Rejects one that another process writes to.
    pub fn take(path: &Path) -> anyhow::Result<Self> {
        let shown = path.display();
        let real = real(path)?;
        let (Some(name), false) = (real.file_name(), real.is_dir()) else {
            bail!("{shown}: is a folder; name a file for the memory")
        };
        let mut lock = OsString::from(".");
        lock.push(name);
        lock.push(".lock");
        let held = real.with_file_name(lock);
        let Some(lock) = Lock::take(&held)? else {
            bail!(
                "{shown}: another process is writing this bank (it holds the lock {}); wait until \
                 it ends, or name another file",
                held.display()
            );
        };
        Ok(Self { path: path.into(), real, _lock: lock })
    }

    /// Rejects a file that is not a valid bank and, unless `force` is given, a bank that is not one of `own`: those
    /// that the text to be saved continues ([`BankFile::identity`]).
    pub fn check(&self, own: &[String], force: bool, advice: &Advice) -> anyhow::Result<()> {
        let Ok(metadata) = self.real.metadata() else { return Ok(()) };
        let shown = self.path.display();
        if !metadata.is_file() {
            bail!("{shown}: is not a regular file; name another file for the memory");
        }
        // Opening it this way does not change it.
        File::options()
            .append(true)
            .open(&self.real)
            .with_context(|| format!("{shown}: could not be written; name another file for the memory"))?;
        if metadata.len() == 0 {
            return Ok(());
        }
        let file = BankFile::open(&self.path).and_then(|file| file.verify().map(|()| file));
        let file = file.context(
            "the file exists but is not a valid bank, so it is not overwritten; delete it first or choose another path",
        )?;
        if force || own.iter().any(|own| own == file.identity()) {
            return Ok(());
        }
        bail!("{shown}: {}", other_text(&file, advice))
    }

    /// Writes the text's bank; if the file holds its beginning, only the new part.
    pub fn save(&self, opened: &OpenedModel, generator: &mut Generator) -> anyhow::Result<()> {
        Ok(generator.save(&self.path, &opened.tag()?)?)
    }

    /// The path as given by the user.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

fn other_text(file: &BankFile, advice: &Advice) -> String {
    let (tag, tokens) = (file.tag(), thousands(file.timeline().position));
    let model: String = tag.model.chars().take(12).collect();
    format!(
        "holds the bank of another text ({tokens} tokens, model {} {model}…); {}, choose another path, or {} to replace it",
        tag.model_type, advice.continue_with, advice.replace
    )
}

/// The file that a path leads to, or would lead to if it existed.
fn real(path: &Path) -> anyhow::Result<PathBuf> {
    if let Ok(real) = std::fs::canonicalize(path) {
        return Ok(real);
    }
    if std::fs::symlink_metadata(path).is_ok_and(|metadata| metadata.is_symlink()) {
        bail!("{}: is a symbolic link to a missing file; remove it, or name another file", path.display());
    }
    let Some(name) = path.file_name() else { bail!("{}: does not name a file", path.display()) };
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    match std::fs::canonicalize(folder) {
        Ok(folder) if folder.is_dir() => Ok(folder.join(name)),
        _ => bail!("{}: the folder {} does not exist; create it first", path.display(), folder.display()),
    }
}

/// Rolls back to the last kept anchor that is at most `tokens` tokens into the text; returns a message.
pub fn rollback(generator: &mut Generator, tokens: usize) -> anyhow::Result<String> {
    let before = generator.text().tokens();
    Ok(match generator.rollback(tokens)? {
        None => format!("the text already ends at {} tokens", thousands(before)),
        Some((anchor, rollback)) => {
            let exactness = match rollback {
                Rollback::Exact => "exactly as it was".into(),
                Rollback::Approximate(why) => format!("approximately as it was: {why}"),
            };
            format!(
                "back from {} to {} tokens, anchor {}, {exactness}",
                thousands(before),
                thousands(anchor.position),
                anchor.ordinal
            )
        }
    })
}

/// A one-line description of a bank.
pub fn line(bank: &StateBank) -> String {
    let timeline = bank.timeline();
    let anchors = match bank.policy().interval {
        Some(_) => {
            format!("{} of {} anchors, ", thousands(timeline.kept.len()), thousands(timeline.complete))
        }
        None => String::new(),
    };
    format!("{} tokens, {anchors}{}", thousands(timeline.position), bytes(bank.bytes()))
}
