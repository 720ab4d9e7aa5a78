//! Conversations that are kept: in memory, and on disk (`record`) if the server has a folder for them.

use std::collections::{HashMap, HashSet};
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use axum::http::StatusCode;
use march_lm::anchors::Policy;
use march_lm::memory::BankTag;
use march_lm::tokenizer::Tokenizer;
use serde_json::{Value, json};

use crate::chat::{Asked, Continuation, Template};
use crate::error::ApiError;
use crate::job::FinishedChoice;
use crate::prefix::CachedPrefix;
use crate::record::{Folder, Kind, Message, Record, RemoveError, Turn};
use crate::scheduler::LoadedModel;

type Result<T> = std::result::Result<T, ApiError>;

/// The most characters of an id.
const LONGEST_ID: usize = 64;

/// The most conversations of a server.
const MOST: usize = 10_000;

/// How long a conversation's state stays in memory after its last turn.
const IDLE: Duration = Duration::from_secs(600);

/// A conversation in memory.
struct Slot {
    record: Arc<Record>,
    /// The state after the last turn, unless it was idle for long.
    prefix: Option<CachedPrefix>,
    bytes: usize,
    used: Instant,
    busy: bool,
}

/// What a client wants of a conversation: the body of a `PUT`.
#[derive(Debug, Default)]
pub struct SessionRequest {
    /// The memory policy of the next turn.
    pub policy: Option<Policy>,
    /// The conversation to fork.
    pub from: Option<String>,
    /// How many turns to keep.
    pub turns: Option<usize>,
}

/// All conversations.
pub struct Sessions {
    folder: Option<Folder>,
    loaded: Arc<LoadedModel>,
    name: String,
    /// The most bytes of states in memory.
    limit: usize,
    slots: Mutex<HashMap<String, Slot>>,
    /// The ids that are being made, changed or deleted: one request at a time for each.
    changing: Mutex<HashSet<String>>,
    changed: Condvar,
}

/// The right to make, change or delete a conversation.
struct ExclusiveAccess<'a> {
    sessions: &'a Sessions,
    id: String,
}

impl Drop for ExclusiveAccess<'_> {
    fn drop(&mut self) {
        self.sessions.changing().remove(&self.id);
        self.sessions.changed.notify_all();
    }
}

/// A conversation that a request continues. No other request can use it until this is dropped.
pub struct OpenSession {
    sessions: Arc<Sessions>,
    /// Its id.
    pub id: String,
    /// The conversation before the request.
    pub record: Arc<Record>,
    /// Its state, if there is one.
    pub prefix: Option<CachedPrefix>,
}

impl std::fmt::Debug for OpenSession {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("OpenSession").field("id", &self.id).finish_non_exhaustive()
    }
}

impl Drop for OpenSession {
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

impl Sessions {
    /// The conversations of a folder; without a folder, none, and those to come are only in memory. States take at most
    /// `limit` bytes of memory. Fails with a message if another server uses the folder.
    pub fn open(
        folder: Option<PathBuf>,
        loaded: Arc<LoadedModel>,
        name: &str,
        limit: usize,
    ) -> std::result::Result<Self, String> {
        let (folder, records) = match folder {
            Some(path) => {
                let (folder, records) = Folder::open(path, |id| check_id(id).is_ok())?;
                (Some(folder), records)
            }
            None => (None, Vec::new()),
        };
        let slots = records.into_iter().map(|(id, record)| (id, Slot::new(record, None, 0)));
        let slots = Mutex::new(slots.collect());
        Ok(Self {
            folder,
            loaded,
            name: name.into(),
            limit,
            slots,
            changing: Mutex::default(),
            changed: Condvar::new(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, Slot>> {
        // The map is changed by single calls, each of which leaves it whole.
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn changing(&self) -> MutexGuard<'_, HashSet<String>> {
        self.changing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until no other request makes, changes or deletes this conversation.
    fn wait_for_turn(&self, id: &str) -> ExclusiveAccess<'_> {
        let mut changing = self.changing();
        while !changing.insert(id.into()) {
            changing = self.changed.wait(changing).unwrap_or_else(PoisonError::into_inner);
        }
        ExclusiveAccess { sessions: self, id: id.into() }
    }

    /// Whether a folder of the disk has this id although its record could not be read.
    fn is_damaged(&self, id: &str) -> bool {
        self.folder.as_ref().is_some_and(|folder| folder.has(id))
    }

    fn missing(&self, id: &str) -> ApiError {
        if self.is_damaged(id) {
            return conflict(format!(
                "the server's folder has something named `{id}` that is not a session it can use: damaged, of a newer \
                 program, or not a session at all; the server's log says which. The server leaves it alone: move or \
                 remove it by hand to use its id"
            ));
        }
        ApiError::new(StatusCode::NOT_FOUND, format!("there is no session `{id}`; create it with PUT"))
    }

    fn check_model(&self, id: &str, record: &Record) -> Result<()> {
        let BankTag { model, tokenizer, .. } = &self.loaded.tag;
        if (&record.model, &record.tokenizer) != (model, tokenizer) {
            return Err(conflict(format!(
                "session `{id}` belongs to another model, `{}` ({}); this server has `{}` ({model}). Only the model \
                 that wrote a conversation can continue it",
                record.model_name, record.model, self.name
            )));
        }
        Ok(())
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
        let mut all: Vec<(&String, &Slot)> = slots.iter().collect();
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
                    "messages": turn.messages, "answer": turn.answer, "said": turn.said, "tokens": turn.tokens,
                    "bytes": turn.bytes, "anchors": turn.anchors,
                })
            })
            .collect();
        Ok(session)
    }

    /// Creates a conversation, or changes one. Returns whether it is new, and its description.
    pub fn put(self: &Arc<Self>, id: &str, request: SessionRequest) -> Result<(bool, Value)> {
        check_id(id)?;
        let _turnstile = self.wait_for_turn(id);
        let exists = self.lock().contains_key(id);
        if !exists && self.is_damaged(id) {
            return Err(self.missing(id));
        }
        let (record, prefix) = match (exists, &request.from) {
            (true, Some(_)) => {
                let message = format!("session `{id}` exists; fork into a new id, or delete it first");
                return Err(conflict(message));
            }
            (true, None) => {
                let mut open = self.begin(id)?;
                let mut record = Record::clone(&open.record);
                let prefix = self.change(&mut record, open.prefix.take(), &request)?;
                if record != *open.record {
                    record.updated = seconds();
                    open.replace(record, prefix)?;
                }
                return Ok((false, self.describe(id, &open.record)));
            }
            (false, Some(from)) => {
                let mut open = self.begin(from).map_err(|error| error.of("from"))?;
                let mut record = Record::clone(&open.record);
                record.created = seconds();
                record.updated = record.created;
                let prefix = self.change(&mut record, open.prefix.take(), &request)?;
                (record, prefix)
            }
            (false, None) if request.turns.is_some() => {
                let message = format!("session `{id}` is new; `turns` needs `from`, the session to fork");
                return Err(ApiError::key("turns", message));
            }
            (false, None) => {
                let mut record = Record::empty(&self.loaded, &self.name, seconds());
                let prefix = self.change(&mut record, None, &request)?;
                (record, prefix)
            }
        };
        self.create(id, record, prefix)
    }

    /// Applies what a client wants to a record; returns the state that still belongs to it.
    fn change(
        &self,
        record: &mut Record,
        prefix: Option<CachedPrefix>,
        request: &SessionRequest,
    ) -> Result<Option<CachedPrefix>> {
        if let Some(policy) = &request.policy {
            record.policy = policy.clone();
        }
        let Some(turns) = request.turns.filter(|&turns| turns != record.turns.len()) else {
            return Ok(prefix);
        };
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
        let prefix = prefix.and_then(|prefix| {
            let usable = prefix.usable(prefix.common(&record.ids), record.ids.len() + 1);
            let text = prefix.at(usable).filter(|_| usable > 0)?;
            Some(CachedPrefix { ids: record.ids[..usable].to_vec(), text })
        });
        record.state = None;
        Ok(prefix)
    }

    /// Adds a new conversation.
    fn create(&self, id: &str, mut record: Record, prefix: Option<CachedPrefix>) -> Result<(bool, Value)> {
        if self.lock().len() >= MOST {
            let message = format!("there are already {MOST} sessions; delete some");
            return Err(ApiError::new(StatusCode::TOO_MANY_REQUESTS, message));
        }
        record.state = None;
        if let Some(folder) = &self.folder {
            let created = folder.create(id, &self.loaded, &mut record, prefix.as_ref());
            created.map_err(|error| failed(id, "saving", &error))?;
        }
        let described = self.describe(id, &record);
        let bytes = prefix.as_ref().map_or(0, |prefix| prefix.text.bank().bytes());
        self.lock().insert(id.into(), Slot::new(record, prefix, bytes));
        self.shrink();
        Ok((true, described))
    }

    /// Deletes a conversation.
    pub fn delete(self: &Arc<Self>, id: &str) -> Result<Value> {
        check_id(id)?;
        let _turnstile = self.wait_for_turn(id);
        match self.lock().get_mut(id) {
            Some(slot) if slot.busy => return Err(busy(id)),
            Some(slot) => slot.busy = true,
            None => return Err(self.missing(id)),
        }
        let removed = self.folder.as_ref().map_or(Ok(()), |folder| folder.remove(id));
        let mut slots = self.lock();
        if removed.is_ok() {
            slots.remove(id);
        } else if let Some(slot) = slots.get_mut(id) {
            slot.busy = false;
        }
        drop(slots);
        match removed {
            Ok(()) => {}
            Err(RemoveError::Foreign(what)) => {
                tracing::warn!("session {id} was not deleted: {what}");
                return Err(conflict(format!(
                    "session `{id}` cannot be deleted: its folder is damaged, or has something in it that is not the \
                     server's; the server's log says what"
                )));
            }
            Err(RemoveError::Failed(error)) => return Err(failed(id, "deleting", &error)),
        }
        Ok(json!({ "id": id, "object": "session.deleted", "deleted": true }))
    }

    /// Opens a conversation for a request that continues it.
    pub fn begin(self: &Arc<Self>, id: &str) -> Result<OpenSession> {
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
            let (record, prefix) = (Arc::clone(&slot.record), slot.prefix.clone());
            OpenSession { sessions: Arc::clone(self), id: id.into(), record, prefix }
        };
        if open.prefix.is_none() {
            open.prefix = self.folder.as_ref().and_then(|folder| folder.load(id, &self.loaded, &open.record));
        }
        Ok(open)
    }

    /// Drops states from memory: those that were idle for long, and the oldest if there are too many bytes.
    fn shrink(&self) {
        let mut slots = self.lock();
        let now = Instant::now();
        let mut held: Vec<(Instant, String, usize)> = Vec::new();
        for (id, slot) in slots.iter_mut().filter(|(_, slot)| slot.prefix.is_some()) {
            match now.duration_since(slot.used) > IDLE && !slot.busy {
                true => (slot.prefix, slot.bytes) = (None, 0),
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
                (slot.prefix, slot.bytes) = (None, 0);
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

impl Slot {
    fn new(record: Record, prefix: Option<CachedPrefix>, bytes: usize) -> Self {
        Self { record: Arc::new(record), prefix, bytes, used: Instant::now(), busy: false }
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
    /// What was asked of the chat template.
    pub asked: Asked,
    /// Whether the text does not begin with the conversation so far, because the chat template writes it in another way.
    pub rewritten: bool,
}

/// Whether the next turn of a conversation continues from `departure` and not from the end of the last answer, because the
/// chat template then writes that answer in another way, usually without its reasoning.
fn departs(
    record: &Record,
    departure: &CachedPrefix,
    (template, tokenizer): (&Template, &Tokenizer),
) -> bool {
    let calls =
        record.turns.last().is_some_and(|turn| turn.said.as_ref().is_some_and(|it| it.tool_calls.is_some()));
    let next = Message::new(if calls { "tool" } else { "user" }, String::new());
    match template.continued(record, &[next], &record.asked) {
        Ok(Continuation::Instead(whole)) => {
            tokenizer.encode(&whole).is_ok_and(|ids| ids.starts_with(&departure.ids))
        }
        _ => false,
    }
}

impl OpenSession {
    /// Adds a turn with its answer, and, if that has parts, with these as a message. When this returns, the turn is on the
    /// disk, if the server has a folder.
    pub fn finish(
        &mut self,
        turn: &NewTurn,
        (answer, said): (&str, Option<Message>),
        policy: &Policy,
        finished: &FinishedChoice,
        context: (&Template, &Tokenizer),
    ) -> Result<()> {
        let mut record = Record::clone(&self.record);
        if turn.rewritten {
            for turn in &mut record.turns {
                (turn.tokens, turn.text_bytes) = (0, 0);
            }
        }
        record.kind = Some(turn.kind);
        record.policy = policy.clone();
        record.asked = turn.asked.clone();
        record.updated = seconds();
        record.ids.clone_from(&finished.prefix.ids);
        record.text = format!("{}{answer}", turn.text);
        record.turns.push(Turn {
            messages: turn.messages.clone(),
            answer: answer.into(),
            said,
            tokens: record.ids.len(),
            text_bytes: record.text.len(),
            bytes: finished.bytes,
            anchors: finished.prefix.text.bank().timeline().kept.len(),
        });
        let prefix = match &finished.departure {
            Some(departure) if departs(&record, departure, context) => departure,
            _ => &finished.prefix,
        };
        self.replace(record, finished.exact.then(|| prefix.clone()))
    }

    /// Replaces the conversation, first on the disk, then in memory.
    fn replace(&mut self, mut record: Record, prefix: Option<CachedPrefix>) -> Result<()> {
        let Self { sessions, id, .. } = self;
        if let Some(folder) = &sessions.folder {
            record.state = self.record.state.clone();
            let saved = folder.replace(id, &sessions.loaded, &mut record, prefix.as_ref());
            saved.map_err(|error| failed(id, "saving", &error))?;
        }
        let bytes = prefix.as_ref().map_or(0, |prefix| prefix.text.bank().bytes());
        self.record = Arc::new(record);
        if let Some(slot) = sessions.lock().get_mut(id) {
            (slot.record, slot.prefix, slot.bytes) = (Arc::clone(&self.record), prefix, bytes);
            slot.used = Instant::now();
        }
        sessions.shrink();
        Ok(())
    }
}
