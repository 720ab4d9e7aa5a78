//! Conversations on disk: what is written of each, and how it is read, replaced and deleted.
//!
//! A conversation is a record (its turns and all tokens, as JSON with a checksum) and the state of the model after its
//! last turn. A folder holds a conversation's record and two files for states. A turn first saves its state to the file
//! that the record does not name, then replaces the record, which names it; so a process that dies at any moment leaves
//! the last finished turn with its state. A state that is missing or damaged costs time, not content: the tokens are
//! read again.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use march_lm::anchors::Policy;
use march_lm::disk::{self, Lock};
use march_lm::generate::Text;
use march_lm::memory::{BankFile, BankTag};
use serde::{Deserialize, Serialize};

use crate::chat::Asked;
use crate::prefix::CachedPrefix;
use crate::scheduler::LoadedModel;

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
    /// What was thought before it, if the client says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<String>,
    /// Calls of tools.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tool_calls: Option<serde_json::Value>,
    /// For what a tool says: the call that it answers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tool_call_id: Option<String>,
}

impl Message {
    /// A message of text alone.
    pub fn new(role: &str, content: String) -> Self {
        Self { role: role.into(), content, reasoning_content: None, tool_calls: None, tool_call_id: None }
    }
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
    /// The answer, as it was written.
    pub answer: String,
    /// The answer with its reasoning and its calls apart, if it has any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub said: Option<Message>,
    /// Tokens of the conversation after the turn; 0 if the chat template has since changed how the turn is written.
    pub tokens: usize,
    /// Bytes of the conversation's text after the turn.
    pub text_bytes: usize,
    /// Bytes of the state after the turn.
    pub bytes: usize,
    /// Anchors in the state after the turn.
    pub anchors: usize,
}

impl Turn {
    fn written(&self) -> Message {
        Message::new("assistant", self.answer.clone())
    }
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
    /// What the next turn asks of the chat template, such as tools.
    #[serde(default)]
    pub asked: Asked,
    /// The turns.
    pub turns: Vec<Turn>,
    /// The text so far, as the model read and wrote it.
    pub text: String,
    /// The tokens so far.
    pub ids: Vec<u32>,
    /// Where the state after the last turn is, if it is on disk.
    pub state: Option<SavedState>,
}

/// Where the state of a conversation is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedState {
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
        self.with_answers(|turn| turn.said.clone().unwrap_or_else(|| turn.written()))
    }

    /// The same, with answers as they were written: reasoning and calls are part of their text.
    pub fn written(&self) -> Vec<Message> {
        self.with_answers(Turn::written)
    }

    fn with_answers(&self, answer: impl Fn(&Turn) -> Message) -> Vec<Message> {
        self.turns.iter().flat_map(|turn| turn.messages.iter().cloned().chain([answer(turn)])).collect()
    }

    /// A conversation without turns.
    pub fn empty(loaded: &LoadedModel, name: &str, now: u64) -> Self {
        let BankTag { model, tokenizer, .. } = loaded.tag.clone();
        Self {
            format: FORMAT,
            model_name: name.into(),
            model,
            tokenizer,
            created: now,
            updated: now,
            kind: None,
            policy: loaded.policy().clone(),
            asked: Asked::default(),
            turns: Vec::new(),
            text: String::new(),
            ids: Vec::new(),
            state: None,
        }
    }
}

/// The folder of all conversations, which no other server uses. Nothing in it is renamed or deleted unless it is the
/// folder of a conversation: one with a valid record, and no file that this program does not write.
pub struct Folder {
    path: PathBuf,
    /// Numbers the folders that are being made or deleted.
    unfinished: AtomicU64,
    _lock: Lock,
}

/// Why something with an id cannot be deleted.
#[derive(Debug)]
pub enum RemoveError {
    /// It is not a conversation of ours, or has something else in it; the message says what.
    Foreign(String),
    /// The disk failed.
    Failed(std::io::Error),
}

impl From<std::io::Error> for RemoveError {
    fn from(error: std::io::Error) -> Self {
        Self::Failed(error)
    }
}

impl Folder {
    /// Opens a folder of conversations, or makes one: a new or empty folder is marked as one, and any other is refused.
    /// Returns the conversations in it with their ids, as far as `is_id` accepts these; what is damaged or something
    /// else is left alone, with a warning.
    pub fn open(path: PathBuf, is_id: impl Fn(&str) -> bool) -> Result<(Self, Vec<(String, Record)>)> {
        let wrong = |error: std::io::Error| {
            format!("{}: cannot be used as the folder for conversations: {error}", path.display())
        };
        std::fs::create_dir_all(&path).map_err(wrong)?;
        if path.join(LOCK).symlink_metadata().is_ok_and(|metadata| !metadata.is_file()) {
            return Err(format!(
                "{}: its {LOCK} is not a file of this program; give another folder",
                path.display()
            ));
        }
        mark(&path, &is_id).map_err(|what| format!("{}: {what}", path.display()))?;
        let Some(lock) = Lock::take(&path.join(LOCK)).map_err(|error| error.to_string())? else {
            return Err(format!("{}: another server uses this folder", path.display()));
        };
        private(&path, FOLDER_MODE).and_then(|()| private(&path.join(LOCK), FILE_MODE)).map_err(wrong)?;
        let mut records = Vec::new();
        for entry in std::fs::read_dir(&path).map_err(wrong)? {
            let entry = entry.map_err(wrong)?;
            let (path, name) = (entry.path(), entry.file_name().to_string_lossy().into_owned());
            if [MARK, LOCK].contains(&name.as_str()) {
                continue;
            }
            let unfinished = name.starts_with(UNFINISHED);
            match owned_record(&path) {
                Ok(_) if unfinished => delete(&path).map_err(wrong)?,
                Ok(record) if is_id(&name) => {
                    private_all(&path).map_err(wrong)?;
                    records.push((name, record));
                }
                Ok(_) => tracing::warn!("{}: is left alone: its name is not an id", path.display()),
                Err(what) => tracing::warn!("{}: is left alone: {what}", path.display()),
            }
        }
        Ok((Self { path, unfinished: AtomicU64::new(0), _lock: lock }, records))
    }

    fn of(&self, id: &str) -> PathBuf {
        self.path.join(id)
    }

    /// A name that nothing in the folder has.
    fn unfinished(&self, id: &str) -> PathBuf {
        loop {
            let number = self.unfinished.fetch_add(1, Ordering::Relaxed);
            let path = self.of(&format!("{UNFINISHED}{id}-{}-{number}", std::process::id()));
            if !is_there(&path) {
                return path;
            }
        }
    }

    /// Whether there is something with this id, which may be damaged or no conversation.
    pub fn has(&self, id: &str) -> bool {
        is_there(&self.of(id))
    }

    /// Writes a new conversation. Its folder gets its name when it is whole.
    pub fn create(
        &self,
        id: &str,
        loaded: &LoadedModel,
        record: &mut Record,
        prefix: Option<&CachedPrefix>,
    ) -> Result<()> {
        let new = self.unfinished(id);
        let error = |error: std::io::Error| error.to_string();
        std::fs::create_dir(&new).and_then(|()| private(&new, FOLDER_MODE)).map_err(error)?;
        // With a record, the folder is known to be ours if the process dies now.
        let saved = save(&new, loaded, record, None)
            .and_then(|()| save(&new, loaded, record, prefix))
            .and_then(|()| std::fs::rename(&new, self.of(id)).map_err(error));
        if saved.is_err() {
            // Report the original error.
            let _ = delete(&new);
        }
        saved?;
        disk::sync_folder(&self.path).map_err(|error| error.to_string())
    }

    /// Writes a conversation again. `record` names the state that is on disk now, and then the new one.
    pub fn replace(
        &self,
        id: &str,
        loaded: &LoadedModel,
        record: &mut Record,
        prefix: Option<&CachedPrefix>,
    ) -> Result<()> {
        save(&self.of(id), loaded, record, prefix)
    }

    /// Deletes a conversation. The folder is renamed first, so that it is never half a conversation.
    pub fn remove(&self, id: &str) -> std::result::Result<(), RemoveError> {
        let (path, old) = (self.of(id), self.unfinished(id));
        if !is_there(&path) {
            // Someone else deleted it.
            return Ok(());
        }
        owned_record(&path).map_err(RemoveError::Foreign)?;
        std::fs::rename(&path, &old)?;
        Ok(delete(&old)?)
    }

    /// Loads the state of a conversation. One that cannot be used is reported, and costs time only.
    pub fn load(&self, id: &str, loaded: &LoadedModel, record: &Record) -> Option<CachedPrefix> {
        let SavedState { file, tokens, identity } = record.state.as_ref()?;
        let (tokens, path) = (*tokens, self.of(id).join(STATES.get(*file)?));
        let load = || -> march_lm::Result<Option<Text>> {
            let file = BankFile::open(&path)?;
            file.verify()?;
            if file.identity() != identity {
                return Ok(None);
            }
            let text = Text::load(loaded.device(), loaded.model(), &file, &loaded.tag, None)?;
            Ok((text.tokens() == tokens && tokens <= record.ids.len()).then_some(text))
        };
        match load() {
            Ok(Some(text)) => {
                let ids = record.ids[..tokens].to_vec();
                Some(CachedPrefix { text: text.with_recent(&ids), ids })
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

/// The file that marks a folder of conversations, and what it says.
const MARK: &str = "march-sessions.json";
const MARK_TEXT: &str = "{\"march\": \"sessions\", \"format\": 1}\n";

const LOCK: &str = ".lock";

const FOLDER_MODE: u32 = 0o700;
const FILE_MODE: u32 = 0o600;

/// Marks a folder as one of conversations if it is empty, or has nothing but conversations because an earlier program
/// did not mark it. Says what else is in it.
fn mark(path: &Path, is_id: impl Fn(&str) -> bool) -> Result<()> {
    let mark = path.join(MARK);
    match std::fs::read_to_string(&mark) {
        Ok(text) if text == MARK_TEXT => return Ok(()),
        Ok(_) => return Err(format!("its {MARK} is not one of this program; give another folder")),
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        Err(error) => return Err(format!("its {MARK} could not be read: {error}")),
    }
    for entry in std::fs::read_dir(path).map_err(|error| error.to_string())? {
        let entry = entry.map_err(|error| error.to_string())?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let is_ours = (is_id(&name) || name.starts_with(UNFINISHED)) && owned_record(&entry.path()).is_ok();
        if !is_ours && ![LOCK, &format!(".{MARK}.partial")].contains(&name.as_str()) {
            return Err(format!(
                "is not a folder of conversations: it has `{name}`; give --sessions a new or empty folder"
            ));
        }
    }
    disk::replace(&mark, MARK_TEXT.as_bytes()).map_err(|error| error.to_string())?;
    private(&mark, FILE_MODE).map_err(|error| error.to_string())
}

/// Whether there is something at a path, also a link that leads nowhere.
fn is_there(path: &Path) -> bool {
    path.symlink_metadata().is_ok()
}

/// The names of the files in a conversation's folder.
fn is_file_of_ours(name: &str) -> bool {
    let name = name.strip_prefix('.').and_then(|name| name.strip_suffix(".partial")).unwrap_or(name);
    name == RECORD || STATES.contains(&name)
}

/// The record of a folder that is a conversation of ours and nothing else; or what it is instead.
fn owned_record(folder: &Path) -> Result<Record> {
    let metadata = folder.symlink_metadata().map_err(|error| error.to_string())?;
    if !metadata.is_dir() {
        return Err("it is not a folder, so it is not a conversation".into());
    }
    let record = read(folder).map_err(|error| error.to_string())?;
    for entry in std::fs::read_dir(folder).map_err(|error| error.to_string())? {
        let entry = entry.map_err(|error| error.to_string())?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let is_file = entry.file_type().is_ok_and(|kind| kind.is_file());
        if !is_file || !is_file_of_ours(&name) {
            return Err(format!("it has `{name}`, which is not a file of a conversation"));
        }
    }
    Ok(record)
}

/// Deletes a conversation's folder; the record last, so that the folder stays known as one of ours until the end.
fn delete(folder: &Path) -> std::io::Result<()> {
    let mut files: Vec<PathBuf> =
        std::fs::read_dir(folder)?.map(|entry| Ok(entry?.path())).collect::<std::io::Result<_>>()?;
    files.sort_by_key(|path| path.ends_with(RECORD));
    files.into_iter().try_for_each(std::fs::remove_file)?;
    std::fs::remove_dir(folder)
}

/// Gives a file or folder to its owner alone.
fn private(path: &Path, mode: u32) -> std::io::Result<()> {
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode))?;
    }
    let _ = (path, mode);
    Ok(())
}

/// Gives a conversation's folder and its files to their owner alone.
fn private_all(folder: &Path) -> std::io::Result<()> {
    private(folder, FOLDER_MODE)?;
    std::fs::read_dir(folder)?.try_for_each(|entry| private(&entry?.path(), FILE_MODE))
}

/// Writes a conversation to its folder: the state to the file that the old record does not name, then the record.
fn save(
    folder: &Path,
    loaded: &LoadedModel,
    record: &mut Record,
    prefix: Option<&CachedPrefix>,
) -> Result<()> {
    let used = record.state.take().map(|state| state.file);
    if let Some(prefix) = prefix {
        let file = if used == Some(0) { 1 } else { 0 };
        let path = folder.join(STATES[file]);
        let save = || prefix.text.save(&path, &loaded.tag).map_err(|error| error.to_string());
        // A damaged file is not continued, but written again.
        save().or_else(|error| std::fs::remove_file(&path).map_err(|_| error).and_then(|()| save()))?;
        private(&path, FILE_MODE).map_err(|error| error.to_string())?;
        let identity = BankFile::open(&path).map_err(|error| error.to_string())?.identity().into();
        let tokens = prefix.text.tokens() - prefix.text.unread().len();
        record.state = Some(SavedState { file, tokens, identity });
    }
    let text = serde_json::to_string(record).map_err(|error| error.to_string())?;
    let path = folder.join(RECORD);
    disk::replace(&path, disk::seal(&text).as_bytes()).map_err(|error| error.to_string())?;
    private(&path, FILE_MODE).map_err(|error| error.to_string())
}

/// Reads a record.
fn read(folder: &Path) -> march_lm::Result<Record> {
    let path = folder.join(RECORD);
    let (text, sealed) = disk::read_sealed(&path, "remove its folder by hand to use its id again")?;
    let record: Record = serde_json::from_str(&text).map_err(|error| {
        march_lm::Error::damaged(&path, format!("is not the record of a session: {error}"))
    })?;
    if !sealed {
        return Err(march_lm::Error::damaged(&path, "has no checksum"));
    }
    if record.format > FORMAT {
        return Err(march_lm::Error::damaged(&path, "was written by a newer program"));
    }
    Ok(record)
}
