//! Where a command's bank comes from and where it goes.

use std::path::Path;

use anyhow::bail;
use march::engine::Cpu;
use march::memory::StateBank;

use super::open::Opened;
use crate::display::{bytes, thousands};

/// The bank of an empty text.
pub fn empty(opened: &Opened) -> anyhow::Result<StateBank<Cpu>> {
    Ok(opened.model.bank(opened.policy.clone())?)
}

/// A bank from a file.
pub fn load(_opened: &Opened, path: &Path) -> anyhow::Result<StateBank<Cpu>> {
    bail!("{}: banks cannot be read from files yet", path.display());
}

/// Writes a bank to a file.
pub fn save(_opened: &Opened, _bank: &StateBank<Cpu>, path: &Path) -> anyhow::Result<()> {
    bail!("{}: banks cannot be written to files yet", path.display());
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
