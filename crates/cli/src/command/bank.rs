//! Where a command's bank comes from and where it goes.

use std::path::Path;

use anyhow::{Context, bail};
use march::engine::Cpu;
use march::memory::{BankFile, BankTag, StateBank};

use super::open::Opened;
use crate::display::{bytes, thousands};

/// The bank of an empty text.
pub fn empty(opened: &Opened) -> anyhow::Result<StateBank<Cpu>> {
    Ok(opened.model.bank(opened.policy.clone())?)
}

/// A bank from a file, with its own policy but for what the flags change.
pub fn load(opened: &Opened, path: &Path) -> anyhow::Result<StateBank<Cpu>> {
    let file = BankFile::open(path)?;
    let policy = opened.flags.over(file.policy().clone());
    Ok(file.load(&opened.engine, &opened.model, &tag(opened)?, Some(&policy))?)
}

/// Refuses a place where a bank cannot be written, before there is one to lose.
pub fn check_place(path: &Path) -> anyhow::Result<()> {
    if path.is_dir() {
        bail!("{}: is a folder; name a file for the memory", path.display());
    }
    if let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty() && !folder.is_dir()) {
        bail!("{}: there is no folder {}; make it first", path.display(), folder.display());
    }
    if path.metadata().is_ok_and(|file| file.len() > 0) {
        BankFile::open(path).context("the file is there and is no sound bank to write over; name another")?;
    }
    Ok(())
}

/// Writes a bank to a file; only what is new, where the file holds its beginning.
pub fn save(opened: &Opened, bank: &StateBank<Cpu>, path: &Path) -> anyhow::Result<()> {
    Ok(bank.append(&opened.engine, path, &tag(opened)?)?)
}

/// What the model's banks belong to.
fn tag(opened: &Opened) -> anyhow::Result<BankTag> {
    Ok(BankTag::new(&opened.model, opened.fingerprint()?, &opened.tokenizer))
}

/// A bank in a line.
pub fn line(opened: &Opened, bank: &StateBank<Cpu>) -> String {
    let timeline = bank.timeline();
    let anchors = match bank.policy().interval {
        Some(_) => {
            format!("{} of {} anchors, ", thousands(timeline.kept.len()), thousands(timeline.complete))
        }
        None => String::new(),
    };
    format!("{} tokens, {anchors}{}", thousands(timeline.position), bytes(bank.bytes(&opened.engine)))
}
