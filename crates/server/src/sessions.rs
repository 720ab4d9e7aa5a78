//! Conversations that are kept: in memory, and on disk if the server has a folder for them.
//!
//! A conversation is a record (its turns and all tokens, as JSON with a checksum) and the state of the model after its
//! last turn. A folder holds a conversation's record and two files for states. A turn first saves its state to the file
//! that the record does not name, then replaces the record, which names it; so a process that dies at any moment leaves
//! the last finished turn with its state. A state that is missing or damaged costs time, not content: the tokens are
//! read again.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use axum::http::StatusCode;
use march::anchors::Policy;
use march::disk::{self, Lock};
use march::engine::Engine;
use march::generate::Text;
use march::memory::{BankFile, BankTag};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::error::ApiError;
use crate::prefix::Known;
use crate::scheduler::{Kept, Loaded};

type Result<T> = std::result::Result<T, ApiError>;

/// The format of records that this program writes.
const FORMAT: u32 = 1;

/// The most characters of an id.
const LONGEST_ID: usize = 64;

/// The most conversations of a server.
const MOST: usize = 10_000;

/// How long a conversation's state stays in memory after its last turn.
const IDLE: Duration = Duration::from_secs(600);

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
    text_bytes: usize,
    /// Bytes of the state after the turn.
    bytes: usize,
    /// Anchors in the state after the turn.
    anchors: usize,
}

/// A conversation, as it is on disk.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Record {
    format: u32,
    model_name: String,
    model: String,
    tokenizer: String,
    created: u64,
    updated: u64,
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
    state: Option<Saved>,
}

/// Where the state of a conversation is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Saved {
    /// The number of the file.
    file: usize,
    /// How many tokens it has read.
    tokens: usize,
    /// The file's identity, so that no other one is taken for it.
    identity: String,
}

/// A conversation in memory.
struct Slot<E: Engine> {
    record: Arc<Record>,
    /// The state after the last turn, unless it was idle for long.
    known: Option<Known<E>>,
    bytes: usize,
    used: Instant,
    busy: bool,
}

/// What a client wants of a conversation: the body of a `PUT`.
#[derive(Debug, Default)]
pub struct Wanted {
    /// The memory policy of the next turn.
    pub policy: Option<Policy>,
    /// The conversation to fork.
    pub from: Option<String>,
    /// How many turns to keep.
    pub turns: Option<usize>,
}

/// All conversations.
pub struct Sessions<E: Engine> {
    folder: Option<PathBuf>,
    _lock: Option<Lock>,
    loaded: Arc<Loaded<E>>,
    name: String,
    /// The most bytes of states in memory.
    limit: usize,
    slots: Mutex<HashMap<String, Slot<E>>>,
    /// Held while a conversation is being made.
    making: Mutex<()>,
}

/// A conversation that a request continues. No other request can use it until this is dropped.
pub struct Open<E: Engine> {
    sessions: Arc<Sessions<E>>,
    /// Its id.
    pub id: String,
    /// The conversation before the request.
    pub record: Arc<Record>,
    /// Its state, if there is one.
    pub known: Option<Known<E>>,
}

impl<E: Engine> std::fmt::Debug for Open<E> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Open").field("id", &self.id).finish_non_exhaustive()
    }
}

impl<E: Engine> Drop for Open<E> {
    fn drop(&mut self) {
        if let Some(slot) = self.sessions.lock().get_mut(&self.id) {
            (slot.busy, slot.used) = (false, Instant::now());
        }
    }
}

fn seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}

/// Rejects an id that is not made of a few plain characters. Ids become names of folders.
fn check_id(id: &str) -> Result<()> {
    let plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-' || byte == b'_';
    if id.is_empty() || id.len() > LONGEST_ID || !id.bytes().all(plain) {
        let message = format!(
            "a session's id must have 1 to {LONGEST_ID} characters, each of them a to z, 0 to 9, `-` or `_`"
        );
        return Err(ApiError::key("session", message));
    }
    Ok(())
}

fn conflict(message: String) -> ApiError {
    ApiError::new(StatusCode::CONFLICT, message)
}

/// A failure of the server's disk. What is wrong is in the log; the client does not learn the server's paths.
fn failed(id: &str, doing: &str, error: &dyn std::fmt::Display) -> ApiError {
    tracing::error!("session {id}: {doing} failed: {error}");
    let message = format!("{doing} session `{id}` failed; the server's log says why");
    ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, message)
}

impl<E: Engine> Sessions<E> {
    /// The conversations of a folder; without a folder, none, and those to come are only in memory. States take at most
    /// `limit` bytes of memory. Fails with a message if another server uses the folder.
    pub fn open(
        folder: Option<PathBuf>,
        loaded: Arc<Loaded<E>>,
        name: &str,
        limit: usize,
    ) -> std::result::Result<Self, String> {
        let mut sessions = Self {
            folder,
            _lock: None,
            loaded,
            name: name.into(),
            limit,
            slots: Mutex::default(),
            making: Mutex::default(),
        };
        let Some(folder) = sessions.folder.clone() else { return Ok(sessions) };
        let wrong = |error: std::io::Error| {
            format!("{}: cannot be used as the folder for conversations: {error}", folder.display())
        };
        std::fs::create_dir_all(&folder).map_err(wrong)?;
        let lock = Lock::take(&folder.join(".lock")).map_err(|error| error.to_string())?;
        if lock.is_none() {
            return Err(format!("{}: another server uses this folder", folder.display()));
        }
        sessions._lock = lock;
        for entry in std::fs::read_dir(&folder).map_err(wrong)? {
            let path = entry.map_err(wrong)?.path();
            let Some(id) = path.file_name().and_then(|name| name.to_str()).map(String::from) else {
                continue;
            };
            if id.starts_with(UNFINISHED) {
                std::fs::remove_dir_all(&path).map_err(wrong)?;
            } else if check_id(&id).is_ok() && path.is_dir() {
                match read(&path) {
                    Ok(record) => drop(sessions.lock().insert(id, Slot::new(record, None, 0))),
                    Err(error) => tracing::warn!("session {id} is left out: {error}"),
                }
            }
        }
        Ok(sessions)
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, Slot<E>>> {
        // The map is changed by single calls, each of which leaves it whole.
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn tag(&self) -> &BankTag {
        &self.loaded.tag
    }

    fn path(&self, id: &str) -> Option<PathBuf> {
        self.folder.as_ref().map(|folder| folder.join(id))
    }

    /// Whether a folder of the disk has this id although its record could not be read.
    fn is_damaged(&self, id: &str) -> bool {
        self.path(id).is_some_and(|path| path.exists())
    }

    fn missing(&self, id: &str) -> ApiError {
        if self.is_damaged(id) {
            let message = format!(
                "session `{id}` is damaged: its record does not have its checksum, or is of a newer program; the \
                 server's log has more. Delete the session to use its id again"
            );
            return conflict(message);
        }
        ApiError::new(StatusCode::NOT_FOUND, format!("there is no session `{id}`; create it with PUT"))
    }

    fn check_model(&self, id: &str, record: &Record) -> Result<()> {
        let BankTag { model, tokenizer, .. } = self.tag();
        if (&record.model, &record.tokenizer) != (model, tokenizer) {
            return Err(conflict(format!(
                "session `{id}` belongs to another model, `{}` ({}); this server has `{}` ({model}). Only the model \
                 that wrote a conversation can continue it",
                record.model_name, record.model, self.name
            )));
        }
        Ok(())
    }

    /// A conversation without turns.
    fn empty(&self) -> Record {
        let BankTag { model, tokenizer, .. } = self.tag().clone();
        Record {
            format: FORMAT,
            model_name: self.name.clone(),
            model,
            tokenizer,
            created: seconds(),
            updated: seconds(),
            kind: None,
            policy: self.loaded.policy.clone(),
            turns: Vec::new(),
            text: String::new(),
            ids: Vec::new(),
            state: None,
        }
    }

    /// Describes a conversation.
    fn describe(&self, id: &str, record: &Record) -> Value {
        json!({
            "id": id, "object": "session", "kind": record.kind, "model": record.model_name,
            "created": record.created, "updated": record.updated, "turns": record.turns.len(),
            "tokens": record.ids.len(), "policy": record.policy.to_string(),
            "bytes": record.turns.last().map_or(0, |turn| turn.bytes), "saved": self.folder.is_some(),
        })
    }

    /// All conversations, the last used one first.
    pub fn list(&self) -> Value {
        let slots = self.lock();
        let mut all: Vec<(&String, &Slot<E>)> = slots.iter().collect();
        all.sort_by(|a, b| b.1.record.updated.cmp(&a.1.record.updated).then(a.0.cmp(b.0)));
        let data: Vec<Value> = all.into_iter().map(|(id, slot)| self.describe(id, &slot.record)).collect();
        json!({ "object": "list", "data": data })
    }

    /// A conversation with all that was said.
    pub fn get(&self, id: &str) -> Result<Value> {
        check_id(id)?;
        let record = match self.lock().get(id) {
            Some(slot) => Arc::clone(&slot.record),
            None => return Err(self.missing(id)),
        };
        let mut session = self.describe(id, &record);
        session["messages"] = json!(record.messages());
        session["history"] = record
            .turns
            .iter()
            .map(|turn| {
                json!({
                    "messages": turn.messages, "answer": turn.answer, "tokens": turn.tokens,
                    "bytes": turn.bytes, "anchors": turn.anchors,
                })
            })
            .collect();
        Ok(session)
    }

    /// Creates a conversation, or changes one. Returns whether it is new, and its description.
    pub fn put(self: &Arc<Self>, id: &str, wanted: Wanted) -> Result<(bool, Value)> {
        check_id(id)?;
        let _making = self.making.lock().unwrap_or_else(PoisonError::into_inner);
        let exists = self.lock().contains_key(id);
        if !exists && self.is_damaged(id) {
            return Err(self.missing(id));
        }
        let (record, known) = match (exists, &wanted.from) {
            (true, Some(_)) => {
                let message = format!("session `{id}` exists; fork into a new id, or delete it first");
                return Err(conflict(message));
            }
            (true, None) => {
                let mut open = self.begin(id)?;
                let mut record = Record::clone(&open.record);
                let known = self.change(&mut record, open.known.take(), &wanted)?;
                if record != *open.record {
                    record.updated = seconds();
                    open.replace(record, known)?;
                }
                return Ok((false, self.describe(id, &open.record)));
            }
            (false, Some(from)) => {
                let mut open = self.begin(from).map_err(|error| error.of("from"))?;
                let now = seconds();
                let mut record = Record { created: now, updated: now, ..Record::clone(&open.record) };
                let known = self.change(&mut record, open.known.take(), &wanted)?;
                (record, known)
            }
            (false, None) if wanted.turns.is_some() => {
                let message = format!("session `{id}` is new; `turns` needs `from`, the session to fork");
                return Err(ApiError::key("turns", message));
            }
            (false, None) => {
                let mut record = self.empty();
                let known = self.change(&mut record, None, &wanted)?;
                (record, known)
            }
        };
        self.create(id, record, known)
    }

    /// Applies what a client wants to a record; returns the state that still belongs to it.
    fn change(
        &self,
        record: &mut Record,
        known: Option<Known<E>>,
        wanted: &Wanted,
    ) -> Result<Option<Known<E>>> {
        if let Some(policy) = &wanted.policy {
            record.policy = policy.clone();
        }
        let Some(turns) = wanted.turns.filter(|&turns| turns != record.turns.len()) else { return Ok(known) };
        let Some(last) = record.turns.get(..turns) else {
            let message = format!("`turns` is {turns}; the session has {} turns", record.turns.len());
            return Err(ApiError::key("turns", message));
        };
        let (tokens, bytes) = last.last().map_or((0, 0), |turn| (turn.tokens, turn.text_bytes));
        record.turns.truncate(turns);
        record.ids.truncate(tokens);
        record.text.truncate(bytes);
        if turns == 0 {
            record.kind = None;
        }
        // A model with anchors returns to the last one before the end; others read the rest again.
        let known = known.and_then(|known| {
            let usable = known.usable(known.common(&record.ids), record.ids.len() + 1);
            let text = known.at(&self.loaded.engine, usable).filter(|_| usable > 0)?;
            Some(Known { ids: record.ids[..usable].to_vec(), text })
        });
        record.state = None;
        Ok(known)
    }

    /// Adds a new conversation.
    fn create(&self, id: &str, mut record: Record, known: Option<Known<E>>) -> Result<(bool, Value)> {
        if self.lock().len() >= MOST {
            let message = format!("there are already {MOST} sessions; delete some");
            return Err(ApiError::new(StatusCode::TOO_MANY_REQUESTS, message));
        }
        record.state = None;
        if let (Some(folder), Some(path)) = (&self.folder, self.path(id)) {
            let new = folder.join(format!("{UNFINISHED}{id}"));
            let mut write = || -> std::result::Result<(), String> {
                match std::fs::remove_dir_all(&new) {
                    Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                        return Err(error.to_string());
                    }
                    _ => {}
                }
                std::fs::create_dir(&new).map_err(|error| error.to_string())?;
                self.save(&new, &mut record, known.as_ref())?;
                std::fs::rename(&new, &path).map_err(|error| error.to_string())?;
                disk::sync_folder(folder).map_err(|error| error.to_string())
            };
            write().map_err(|error| failed(id, "saving", &error))?;
        }
        let described = self.describe(id, &record);
        let bytes = known.as_ref().map_or(0, |known| known.text.bank().bytes(&self.loaded.engine));
        self.lock().insert(id.into(), Slot::new(record, known, bytes));
        self.shrink();
        Ok((true, described))
    }

    /// Deletes a conversation.
    pub fn delete(self: &Arc<Self>, id: &str) -> Result<Value> {
        check_id(id)?;
        let known = {
            let mut slots = self.lock();
            match slots.get_mut(id) {
                Some(slot) if slot.busy => return Err(busy(id)),
                Some(slot) => slot.busy = true,
                None if self.is_damaged(id) => {}
                None => return Err(self.missing(id)),
            }
            slots.contains_key(id)
        };
        let removed = match (&self.folder, self.path(id)) {
            (Some(folder), Some(path)) => {
                // Renamed first, so that a folder is never half a conversation.
                let old = folder.join(format!("{UNFINISHED}{id}"));
                match std::fs::rename(&path, &old).and_then(|()| std::fs::remove_dir_all(&old)) {
                    // Someone else deleted it.
                    Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
                    removed => removed,
                }
            }
            _ => Ok(()),
        };
        let mut slots = self.lock();
        match removed {
            Ok(()) => drop(slots.remove(id)),
            Err(error) => {
                if let Some(slot) = slots.get_mut(id).filter(|_| known) {
                    slot.busy = false;
                }
                return Err(failed(id, "deleting", &error));
            }
        }
        Ok(json!({ "id": id, "object": "session.deleted", "deleted": true }))
    }

    /// Opens a conversation for a request that continues it.
    pub fn begin(self: &Arc<Self>, id: &str) -> Result<Open<E>> {
        check_id(id)?;
        let mut open = {
            let mut slots = self.lock();
            let Some(slot) = slots.get_mut(id) else {
                drop(slots);
                return Err(self.missing(id));
            };
            if slot.busy {
                return Err(busy(id));
            }
            self.check_model(id, &slot.record)?;
            slot.busy = true;
            let (record, known) = (Arc::clone(&slot.record), slot.known.clone());
            Open { sessions: Arc::clone(self), id: id.into(), record, known }
        };
        if open.known.is_none() {
            open.known = self.load(id, &open.record);
        }
        Ok(open)
    }

    /// Loads the state of a conversation from the disk. One that cannot be used is reported, and costs time only.
    fn load(&self, id: &str, record: &Record) -> Option<Known<E>> {
        let Saved { file, tokens, identity } = record.state.as_ref()?;
        let (tokens, path) = (*tokens, self.path(id)?.join(STATES.get(*file)?));
        let load = || -> march::Result<Option<Text<_>>> {
            let file = BankFile::open(&path)?;
            file.verify()?;
            if file.identity() != identity {
                return Ok(None);
            }
            let Loaded { engine, model, .. } = &*self.loaded;
            let text = Text::load(engine, model, &file, self.tag(), None)?;
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

    /// Writes a conversation to its folder: the state to the file that the old record does not name, then the record.
    fn save(
        &self,
        folder: &Path,
        record: &mut Record,
        known: Option<&Known<E>>,
    ) -> std::result::Result<(), String> {
        let used = record.state.take().map(|state| state.file);
        if let Some(known) = known {
            let file = if used == Some(0) { 1 } else { 0 };
            let path = folder.join(STATES[file]);
            let save =
                || known.text.save(&self.loaded.engine, &path, self.tag()).map_err(|error| error.to_string());
            // A damaged file is not continued, but written again.
            save().or_else(|error| std::fs::remove_file(&path).map_err(|_| error).and_then(|()| save()))?;
            let identity = BankFile::open(&path).map_err(|error| error.to_string())?.identity().into();
            let tokens = known.text.tokens() - known.text.unread().len();
            record.state = Some(Saved { file, tokens, identity });
        }
        let text = serde_json::to_string(record).map_err(|error| error.to_string())?;
        disk::replace(&folder.join(RECORD), disk::seal(&text).as_bytes()).map_err(|error| error.to_string())
    }

    /// Drops states from memory: those that were idle for long, and the oldest if there are too many bytes.
    fn shrink(&self) {
        let mut slots = self.lock();
        let now = Instant::now();
        let mut held: Vec<(Instant, String, usize)> = Vec::new();
        for (id, slot) in slots.iter_mut().filter(|(_, slot)| slot.known.is_some()) {
            match now.duration_since(slot.used) > IDLE && !slot.busy {
                true => (slot.known, slot.bytes) = (None, 0),
                false => held.push((slot.used, id.clone(), slot.bytes)),
            }
        }
        held.sort();
        let mut bytes: usize = held.iter().map(|(_, _, bytes)| bytes).sum();
        for (_, id, own) in held {
            if bytes <= self.limit {
                break;
            }
            if let Some(slot) = slots.get_mut(&id) {
                (slot.known, slot.bytes) = (None, 0);
                bytes -= own;
            }
        }
    }

    /// The number of conversations, and the bytes of their states in memory.
    pub fn size(&self) -> (usize, usize) {
        let slots = self.lock();
        (slots.len(), slots.values().map(|slot| slot.bytes).sum())
    }
}

fn busy(id: &str) -> ApiError {
    conflict(format!("session `{id}` is being used by another request; wait until it has ended"))
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

impl<E: Engine> Slot<E> {
    fn new(record: Record, known: Option<Known<E>>, bytes: usize) -> Self {
        Self { record: Arc::new(record), known, bytes, used: Instant::now(), busy: false }
    }
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
}

/// A turn that was asked for and is not answered yet.
#[derive(Debug)]
pub struct NewTurn {
    /// How it is written.
    pub kind: Kind,
    /// The new messages.
    pub messages: Vec<Message>,
    /// The text of the whole conversation up to the answer.
    pub text: String,
    /// Whether the text does not begin with the conversation so far, because the chat template writes it in another way.
    pub rewritten: bool,
}

impl<E: Engine> Open<E> {
    /// Adds a turn with its answer. When this returns, the turn is on the disk, if the server has a folder.
    pub fn finish(&mut self, turn: &NewTurn, answer: &str, policy: &Policy, kept: &Kept<E>) -> Result<()> {
        let mut record = Record::clone(&self.record);
        if turn.rewritten {
            for turn in &mut record.turns {
                (turn.tokens, turn.text_bytes) = (0, 0);
            }
        }
        record.kind = Some(turn.kind);
        record.policy = policy.clone();
        record.updated = seconds();
        record.ids.clone_from(&kept.known.ids);
        record.text = format!("{}{answer}", turn.text);
        record.turns.push(Turn {
            messages: turn.messages.clone(),
            answer: answer.into(),
            tokens: record.ids.len(),
            text_bytes: record.text.len(),
            bytes: kept.bytes,
            anchors: kept.known.text.bank().timeline().kept.len(),
        });
        self.replace(record, kept.exact.then(|| kept.known.clone()))
    }

    /// Replaces the conversation, first on the disk, then in memory.
    fn replace(&mut self, mut record: Record, known: Option<Known<E>>) -> Result<()> {
        let Self { sessions, id, .. } = self;
        if let Some(folder) = sessions.path(id) {
            record.state = self.record.state.clone();
            sessions
                .save(&folder, &mut record, known.as_ref())
                .map_err(|error| failed(id, "saving", &error))?;
        }
        let bytes = known.as_ref().map_or(0, |known| known.text.bank().bytes(&sessions.loaded.engine));
        self.record = Arc::new(record);
        if let Some(slot) = sessions.lock().get_mut(id) {
            (slot.record, slot.known, slot.bytes) = (Arc::clone(&self.record), known, bytes);
            slot.used = Instant::now();
        }
        sessions.shrink();
        Ok(())
    }
}
