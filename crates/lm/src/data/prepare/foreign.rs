//! Files of others in the folder that tokens are to be written to: none is replaced, and none is mixed with shards.

use std::fs;
use std::path::Path;

use serde_json::Value;

use super::{LOCK_FILE, META_FILE, PROGRESS_FILE, TOKENIZER_FILE, shard_number};
use crate::error::{Error, Result};

/// The files that mark a folder of tokens, with keys that only they have together.
const MARKS: [(&str, [&str; 3]); 2] = [
    (META_FILE, ["format_version", "tokenizer_hash", "shards"]),
    (PROGRESS_FILE, ["format_version", "part_bytes", "command"]),
];

/// Rejects a folder with a `meta.json` or `progress.json` of another program, and a folder with other files but no
/// tokens. Names that begin with a dot do not count.
pub(super) fn refuse(folder: &Path) -> Result<()> {
    if !folder.is_dir() {
        return Ok(());
    }
    let mut names = Vec::new();
    for entry in fs::read_dir(folder).map_err(Error::io(folder, "read"))? {
        names.push(entry.map_err(Error::io(folder, "read"))?.file_name().to_string_lossy().into_owned());
    }
    let shards = names.iter().any(|name| shard_number(name).is_some());
    let mut tokens = shards;
    for (name, keys) in MARKS {
        let path = folder.join(name);
        if !path.exists() {
            continue;
        }
        if !is_own(&path, &keys, shards)? {
            let message = "is not from `march data prepare`, or is damaged, and is not replaced, not even with \
                           --force; name another folder for the tokens, or move this file away";
            return Err(Error::damaged(&path, message));
        }
        tokens = true;
    }
    let is_other = |name: &&String| {
        let own = name.strip_suffix(".sha256").unwrap_or(name) == TOKENIZER_FILE || *name == LOCK_FILE;
        !own && !name.starts_with('.')
    };
    match names.iter().filter(is_other).min() {
        Some(name) if !tokens => {
            let message =
                format!("has other files, such as `{name}`; name a new or empty folder for the tokens");
            Err(Error::file(folder, message))
        }
        _ => Ok(()),
    }
}

/// Whether a file is from this program: a JSON object with these keys, or the remains of one, which also a file beside
/// `shards` can be.
fn is_own(path: &Path, keys: &[&str], shards: bool) -> Result<bool> {
    let bytes = fs::read(path).map_err(Error::io(path, "read"))?;
    let text = String::from_utf8_lossy(&bytes);
    let named = |key: &&&str| text.contains(&format!("\"{key}\""));
    Ok(match serde_json::from_str::<Value>(&text) {
        Ok(value) => keys.iter().all(|key| value.get(*key).is_some()),
        Err(_) => shards || text.is_empty() || keys.iter().filter(named).count() > 1,
    })
}
