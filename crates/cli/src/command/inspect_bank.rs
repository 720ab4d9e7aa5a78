//! `march inspect bank`: the contents of a state bank's file.

use std::collections::BTreeMap;
use std::path::PathBuf;

use clap::Args;
use march_lm::anchors::Anchor;
use march_lm::memory::{BankFile, FilePart};
use serde_json::Value;

use crate::display::out::say;
use crate::display::{bytes, thousands};

/// Which model a bank belongs to, the length of its text, which anchors it keeps, and whether the file is valid.
#[derive(Args)]
#[command(after_help = "Example:
  march inspect bank notes.safetensors")]
pub struct InspectBank {
    /// The file
    #[arg(value_name = "FILE")]
    file: PathBuf,
}

/// Number of anchors listed at either end.
const SHOWN: usize = 8;

impl InspectBank {
    /// Prints the contents of the file. A damaged file is an error, after everything that could still be read.
    pub fn run(self) -> anyhow::Result<()> {
        let file = BankFile::open(&self.file)?;
        let (tag, timeline) = (file.tag(), file.timeline());
        say!("{}: state bank, format version {}", self.file.display(), file.version());
        let line = |label: &str, text: &str| say!("  {label:<14} {text}");
        line("model", &format!("{}, {}", tag.model_type, tag.model));
        line("tokenizer", &format!("{}, {}", tag.tokenizer_name, tag.tokenizer));
        line("policy", &policy(&file)?);
        line("position", &format!("{} tokens", thousands(timeline.position)));
        let kept = thousands(timeline.kept.len());
        line("anchors", &format!("{kept} kept of {}", thousands(timeline.complete)));
        if !timeline.kept.is_empty() {
            line("", &anchors(&timeline.kept));
        }
        // Bytes by part, over all layers.
        let mut parts: BTreeMap<(&str, String), (usize, usize)> = BTreeMap::new();
        let list = file.parts();
        for part in &list {
            let name = part.name.splitn(3, '.').nth(2).unwrap_or(&part.name);
            let (count, size) = parts.entry((name, part.dtype.to_lowercase())).or_default();
            *count += 1;
            *size += part.bytes;
        }
        say!("\n  {:<24} {:<5} {:>7} {:>10}", "part", "type", "layers", "bytes");
        for ((name, dtype), (count, size)) in &parts {
            say!("  {name:<24} {dtype:<5} {count:>7} {:>10}", bytes(*size));
        }
        let total = list.iter().map(|part| part.bytes).sum();
        say!("  {:<38} {:>10}", "total", bytes(total));
        // The tails of anchors: no token reads them.
        let only = |part: &&FilePart| part.name.contains(".anchors.") && part.name.contains("_tail");
        let rollback = list.iter().filter(only).map(|part| part.bytes).sum();
        say!("  {:<38} {:>10}\n", "of it only for rollback", bytes(rollback));
        let times = match file.appended() {
            0 => "written at once".into(),
            1 => "appended to once".into(),
            times => format!("appended to {} times", thousands(times)),
        };
        line("file", &format!("{}, {times}", bytes(file.bytes())));
        let sound = file.verify();
        let (count, found) =
            (thousands(file.checksums()), if sound.is_ok() { "all right" } else { "DAMAGED" });
        line("checksums", &format!("{count}, {found}"));
        Ok(sound?)
    }
}

/// The policy's keys and values.
fn policy(file: &BankFile) -> anyhow::Result<String> {
    let keys = serde_json::to_value(file.policy())?;
    let plain = |value: &Value| match value {
        Value::String(text) => text.clone(),
        Value::Null => "none".into(),
        other => other.to_string(),
    };
    let keys = keys.as_object().into_iter().flatten();
    Ok(keys.map(|(key, value)| format!("{key} {}", plain(value))).collect::<Vec<_>>().join(", "))
}

/// Numbers and positions of anchors; if there are many, the first and the last.
fn anchors(kept: &[Anchor]) -> String {
    let show = |list: &[Anchor]| {
        let one = |anchor: &Anchor| format!("{} at {}", anchor.ordinal, thousands(anchor.position));
        list.iter().map(one).collect::<Vec<_>>().join(", ")
    };
    if kept.len() <= 2 * SHOWN {
        return show(kept);
    }
    format!("{}, …, {}", show(&kept[..SHOWN]), show(&kept[kept.len() - SHOWN..]))
}
