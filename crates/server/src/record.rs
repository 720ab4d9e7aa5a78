//! Conversations on disk: what is written of each, and how it is read, replaced and deleted.
//!
//! A conversation is a record (its turns and all tokens, as JSON with a checksum) and the state of the model after its
//! last turn. A folder holds a conversation's record and two files for states. A turn first saves its state to the file
//! that the record does not name, then replaces the record, which names it; so a process that dies at any moment leaves
//! the last finished turn with its state. A state that is missing or damaged costs time, not content: the tokens are
//! read again.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use march::anchors::Policy;
use march::disk::{self, Lock};
use march::engine::Engine;
use march::generate::Text;
use march::memory::{BankFile, BankTag};
use serde::{Deserialize, Serialize};

use crate::prefix::Known;
use crate::scheduler::Loaded;

/// What went wrong with a file.
type Result<T> = std::result::Result<T, String>;

/// The format of records that this program writes.
const FORMAT: u32 = 1;

const RECORD: &str = "conversation.json";

/// The files for states, which turns use alternately.
const STATES: [&str; 2] = ["memory-0.safetensors", "memory-1.safetensors"];

/// The name of a conversation's folder while it is being made or deleted begins with this, which no id does.
const UNFINISHED: &str = ".unfinished-";

/// A message of a chat.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Message {
    /// Who says it.
    pub role: String,
    /// What is said.
    pub content: String,
}

/// How a conversation is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// By `/v1/chat/completions`.
    Chat,
    /// By `/v1/completions`.
    Text,
}

/// What was said and what was answered.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Turn {
    /// The new messages; of a text, the prompt.
    pub messages: Vec<Message>,
    /// The answer.
    pub answer: String,
    /// Tokens of the conversation after the turn; 0 if the chat template has since changed how the turn is written.
    pub tokens: usize,
    /// Bytes of the conversation's text after the turn.
    pub text_bytes: usize,
    /// Bytes of the state after the turn.
    pub bytes: usize,
    /// Anchors in the state after the turn.
    pub anchors: usize,
}

/// A conversation, as it is on disk.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Record {
    format: u32,
    /// The name of the model that wrote it.
    pub model_name: String,
    /// Identifies the model.
    pub model: String,
    /// Identifies the tokenizer.
    pub tokenizer: String,
    /// When it was begun, in seconds since 1970.
    pub created: u64,
    /// When it was changed last.
    pub updated: u64,
    /// How it is written; decided by its first turn.
    pub kind: Option<Kind>,
    /// The memory policy of the next turn.
    pub policy: Policy,
    /// The turns.
    pub turns: Vec<Turn>,
    /// The text so far, as the model read and wrote it.
    pub text: String,
    /// The tokens so far.
    pub ids: Vec<u32>,
    /// Where the state after the last turn is, if it is on disk.
    pub state: Option<Saved>,
}

/// Where the state of a conversation is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Saved {
    /// The number of the file.
    file: usize,
    /// How many tokens it has read.
    tokens: usize,
    /// The file's identity, so that no other one is taken for it.
    identity: String,
}

impl Record {
    /// All that was said, in order.
    pub fn messages(&self) -> Vec<Message> {
        let all = self.turns.iter().flat_map(|turn| {
            let answer = Message { role: "assistant".into(), content: turn.answer.clone() };
            turn.messages.iter().cloned().chain([answer])
        });
        all.collect()
    }

    /// A conversation without turns.
    pub fn empty<E: Engine>(loaded: &Loaded<E>, name: &str, now: u64) -> Self {
        let BankTag { model, tokenizer, .. } = loaded.tag.clone();
        Self {
            format: FORMAT,
            model_name: name.into(),
            model,
            tokenizer,
            created: now,
            updated: now,
            kind: None,
            policy: loaded.policy.clone(),
            turns: Vec::new(),
            text: String::new(),
            ids: Vec::new(),
            state: None,
        }
    }
}

/// The folder of all conversations, which no other server uses.
pub struct Folder {
    path: PathBuf,
    _lock: Lock,
}

impl Folder {
    /// Opens a folder, which is created if it is not there. Returns the conversations in it with their ids, as far as
    /// `is_id` accepts these; a damaged one is left out with a warning.
    pub fn open(path: PathBuf, is_id: impl Fn(&str) -> bool) -> Result<(Self, Vec<(String, Record)>)> {
        let wrong = |error: std::io::Error| {
            format!("{}: cannot be used as the folder for conversations: {error}", path.display())
        };
        std::fs::create_dir_all(&path).map_err(wrong)?;
        let Some(lock) = Lock::take(&path.join(".lock")).map_err(|error| error.to_string())? else {
            return Err(format!("{}: another server uses this folder", path.display()));
        };
        let mut records = Vec::new();
        for entry in std::fs::read_dir(&path).map_err(wrong)? {
            let path = entry.map_err(wrong)?.path();
            let Some(id) = path.file_name().and_then(|name| name.to_str()).map(String::from) else {
                continue;
            };
            if id.starts_with(UNFINISHED) {
                std::fs::remove_dir_all(&path).map_err(wrong)?;
            } else if is_id(&id) && path.is_dir() {
                match read(&path) {
                    Ok(record) => records.push((id, record)),
                    Err(error) => tracing::warn!("session {id} is left out: {error}"),
                }
            }
        }
        Ok((Self { path, _lock: lock }, records))
    }

    fn of(&self, id: &str) -> PathBuf {
        self.path.join(id)
    }

    /// Whether there is something with this id, which may be damaged.
    pub fn has(&self, id: &str) -> bool {
        self.of(id).exists()
    }

    /// Writes a new conversation. Its folder gets its name when it is whole.
    pub fn create<E: Engine>(
        &self,
        id: &str,
        loaded: &Loaded<E>,
        record: &mut Record,
        known: Option<&Known<E>>,
    ) -> Result<()> {
        let new = self.of(&format!("{UNFINISHED}{id}"));
        match std::fs::remove_dir_all(&new) {
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(error.to_string()),
            _ => {}
        }
        std::fs::create_dir(&new).map_err(|error| error.to_string())?;
        save(&new, loaded, record, known)?;
        std::fs::rename(&new, self.of(id)).map_err(|error| error.to_string())?;
        disk::sync_folder(&self.path).map_err(|error| error.to_string())
    }

    /// Writes a conversation again. `record` names the state that is on disk now, and then the new one.
    pub fn replace<E: Engine>(
        &self,
        id: &str,
        loaded: &Loaded<E>,
        record: &mut Record,
        known: Option<&Known<E>>,
    ) -> Result<()> {
        save(&self.of(id), loaded, record, known)
    }

    /// Deletes a conversation. The folder is renamed first, so that it is never half a conversation.
    pub fn remove(&self, id: &str) -> std::io::Result<()> {
        let old = self.of(&format!("{UNFINISHED}{id}"));
        match std::fs::rename(self.of(id), &old).and_then(|()| std::fs::remove_dir_all(&old)) {
            // Someone else deleted it.
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
            removed => removed,
        }
    }

    /// Loads the state of a conversation. One that cannot be used is reported, and costs time only.
    pub fn load<E: Engine>(&self, id: &str, loaded: &Loaded<E>, record: &Record) -> Option<Known<E>> {
        let Saved { file, tokens, identity } = record.state.as_ref()?;
        let (tokens, path) = (*tokens, self.of(id).join(STATES.get(*file)?));
        let load = || -> march::Result<Option<Text<_>>> {
            let file = BankFile::open(&path)?;
            file.verify()?;
            if file.identity() != identity {
                return Ok(None);
            }
            let Loaded { engine, model, .. } = loaded;
            let text = Text::load(engine, model, &file, &loaded.tag, None)?;
            Ok((text.tokens() == tokens && tokens <= record.ids.len()).then_some(text))
        };
        match load() {
            Ok(Some(text)) => {
                let ids = record.ids[..tokens].to_vec();
                Some(Known { text: text.with_recent(&ids), ids })
            }
            Ok(None) => {
                tracing::warn!("session {id}: its state is that of another text; its text is read again");
                None
            }
            Err(error) => {
                tracing::warn!("session {id}: its state cannot be used, its text is read again: {error}");
                None
            }
        }
    }
}

/// Writes a conversation to its folder: the state to the file that the old record does not name, then the record.
fn save<E: Engine>(
    folder: &Path,
    loaded: &Loaded<E>,
    record: &mut Record,
    known: Option<&Known<E>>,
) -> Result<()> {
    let used = record.state.take().map(|state| state.file);
    if let Some(known) = known {
        let file = if used == Some(0) { 1 } else { 0 };
        let path = folder.join(STATES[file]);
        let save = || known.text.save(&loaded.engine, &path, &loaded.tag).map_err(|error| error.to_string());
        // A damaged file is not continued, but written again.
        save().or_else(|error| std::fs::remove_file(&path).map_err(|_| error).and_then(|()| save()))?;
        let identity = BankFile::open(&path).map_err(|error| error.to_string())?.identity().into();
        let tokens = known.text.tokens() - known.text.unread().len();
        record.state = Some(Saved { file, tokens, identity });
    }
    let text = serde_json::to_string(record).map_err(|error| error.to_string())?;
    disk::replace(&folder.join(RECORD), disk::seal(&text).as_bytes()).map_err(|error| error.to_string())
}

/// Reads a record.
fn read(folder: &Path) -> march::Result<Record> {
    let path = folder.join(RECORD);
    let (text, sealed) = disk::read_sealed(&path, "delete the session")?;
    let record: Record = serde_json::from_str(&text)
        .map_err(|error| march::Error::damaged(&path, format!("is not the record of a session: {error}")))?;
    if !sealed {
        return Err(march::Error::damaged(&path, "has no checksum"));
    }
    if record.format > FORMAT {
        return Err(march::Error::damaged(&path, "was written by a newer program"));
    }
    Ok(record)
}
