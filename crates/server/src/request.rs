//! What a request asks for: OpenAI's keys, checked. A key that could change an answer and is not supported is refused
//! by name.

use std::borrow::Cow;
use std::sync::Arc;

use march_lm::anchors::Policy;
use march_lm::generate::{Limits, Sampling};
use march_lm::tokenizer::Tokenizer;
use serde_json::value::RawValue;
use serde_json::{Map, Value};

use crate::body::{self, Keys, ListError};
use crate::chat::{self, Asked, Continuation, Template, VALUES};
use crate::error::ApiError;
use crate::parts::ReplyForm;
use crate::record::{Kind, Message};
use crate::sessions::{NewTurn, OpenSession, SessionRequest, Sessions};

type Result<T> = std::result::Result<T, ApiError>;

/// The most choices of one prompt.
const MOST_CHOICES: usize = 16;

/// The most alternatives that are reported with each token.
const MOST_TOP: usize = 20;

/// The most strings at which an answer ends. Every token is compared with all of them.
const MOST_STOPS: usize = 32;

/// The most bytes of such a string.
const LONGEST_STOP: usize = 1024;

/// Keys that clients send and that change no answer.
const NEUTRAL: [&str; 6] =
    ["user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"];

/// Keys that are not supported, and the values at which they have no effect.
fn has_no_effect(key: &str, value: &Value) -> Option<bool> {
    let zero = || value.as_f64() == Some(0.0);
    let one = || value.as_u64() == Some(1);
    let empty =
        || value.as_array().is_some_and(Vec::is_empty) || value.as_object().is_some_and(Map::is_empty);
    Some(match key {
        "presence_penalty" | "frequency_penalty" => zero(),
        "best_of" => one(),
        "logit_bias" | "functions" | "tools" => empty(),
        "suffix" => value.as_str() == Some(""),
        "function_call" | "tool_choice" => value.as_str() == Some("none"),
        "parallel_tool_calls" => true,
        "response_format" => value["type"] == "text",
        _ => return None,
    })
}

/// A request, as the scheduler needs it.
#[derive(Debug)]
pub struct ParsedRequest {
    /// The model's name, as the client gave it.
    pub model: Option<String>,
    /// The prompts.
    pub prompts: Vec<Vec<u32>>,
    /// The parts that the answers of a chat have.
    pub form: ReplyForm,
    /// Of the prompt of a chat, the numbers of tokens after which a message ends.
    pub ends: Vec<usize>,
    /// The sampling of each choice of a prompt; empty if no token is wanted.
    pub choices: Vec<Sampling>,
    /// When a text ends.
    pub limits: Limits,
    /// Whether answers begin with the prompt.
    pub echo: bool,
    /// The number of alternatives to report with each token, if log-probabilities are wanted.
    pub logprobs: Option<usize>,
    /// Whether the answer is sent as it is written.
    pub stream: bool,
    /// Whether a stream ends with the number of tokens.
    pub stream_usage: bool,
    /// The memory policy.
    pub policy: Policy,
    /// Whether it is wanted which anchors the answer read.
    pub recall: bool,
    /// The conversation that the request continues.
    pub conversation: Option<(OpenSession, NewTurn)>,
}

/// What a server allows.
#[derive(Clone, Debug)]
pub struct RequestLimits {
    /// The most tokens of a prompt and its answer together.
    pub context: usize,
    /// The most prompts of one request.
    pub prompts: usize,
}

/// Refuses what was not taken.
fn end(keys: Keys<'_>) -> Result<()> {
    keys.end(|key, value| match has_no_effect(key, value) {
        _ if NEUTRAL.contains(&key) => Ok(true),
        Some(false) => Err(ApiError::key(key, format!("`{key}` is not supported; leave it out"))),
        known => Ok(known.is_some()),
    })
}

/// The strings at which an answer ends.
fn stops(keys: &mut Keys<'_>) -> Result<Vec<String>> {
    let Some(text) = keys.raw("stop") else { return Ok(Vec::new()) };
    let wrong = |what: &str| {
        let message = format!(
            "{what}: `stop` must be a string or a list of at most {MOST_STOPS} strings, each of at most {LONGEST_STOP} \
             bytes"
        );
        ApiError::key("stop", message)
    };
    let list = match text.starts_with('[') {
        true => body::list::<Cow<'_, str>>(text, MOST_STOPS),
        false => body::list(&format!("[{text}]"), 1)
            .map(|one: Vec<String>| one.into_iter().map(Cow::Owned).collect()),
    };
    let list = list.map_err(|error| match error {
        ListError::Long => wrong("there are too many stop strings"),
        ListError::Entry => wrong("a stop string is not a string"),
    })?;
    if list.iter().any(|stop| stop.len() > LONGEST_STOP) {
        return Err(wrong("a stop string is too long"));
    }
    Ok(list.into_iter().map(Cow::into_owned).collect())
}

/// The parts of a request that completions and chats share.
struct Common {
    recall: bool,
    model: Option<String>,
    choices: Vec<Sampling>,
    limits: Limits,
    stream: bool,
    stream_usage: bool,
    policy: Policy,
}

fn common(
    keys: &mut Keys<'_>,
    max_tokens: usize,
    context: &Context<'_>,
    open: Option<&OpenSession>,
) -> Result<Common> {
    let n = keys.whole("n", Some((MOST_CHOICES, "")))?.unwrap_or(1);
    if n == 0 {
        return Err(ApiError::key("n", format!("`n` is 0; it must be from 1 to {MOST_CHOICES}")));
    }
    let seed = match keys.take("seed")? {
        None => 0,
        Some(value) => match value.as_i64().map(|seed| seed as u64).or(value.as_u64()) {
            Some(seed) => seed,
            None => {
                return Err(ApiError::key("seed", format!("`seed` is {value}; it must be a whole number")));
            }
        },
    };
    let sampling = Sampling {
        temperature: keys.number("temperature")?.unwrap_or(1.0),
        top_p: keys.number("top_p")?.unwrap_or(1.0),
        top_k: keys.whole("top_k", None)?.filter(|&k| k > 0),
        repetition_penalty: keys.number("repetition_penalty")?.unwrap_or(1.0),
        seed,
        ..Sampling::default()
    };
    sampling.check_keys().map_err(|(key, message)| ApiError::key(key, message))?;
    let choices = (0..n as u64).map(|i| Sampling { seed: seed.wrapping_add(i), ..sampling }).collect();
    let stream_usage = match keys.take("stream_options")? {
        None => false,
        Some(value) => match (&value, &value["include_usage"]) {
            (Value::Object(_), Value::Bool(usage)) => *usage,
            (Value::Object(_), Value::Null) => false,
            _ => {
                let message = "`stream_options` must be an object, and its `include_usage` true or false";
                return Err(ApiError::key("stream_options", message));
            }
        },
    };
    let own = open.map_or(context.policy, |open| &open.record.policy);
    let policy = match keys.string("memory")? {
        None => own.clone(),
        Some(changes) => own.with(&changes).map_err(|error| ApiError::key("memory", error.to_string()))?,
    };
    Ok(Common {
        model: keys.string("model")?,
        choices: if max_tokens == 0 { Vec::new() } else { choices },
        limits: Limits { max_tokens, stop: stops(keys)? },
        stream: keys.flag("stream")?,
        stream_usage,
        policy,
        recall: keys.flag("recall")?,
    })
}

/// The most bytes of the descriptions of tools.
const LONGEST_TOOLS: usize = 1 << 20;

/// What a request asks of the chat template, and whether the answer may call tools. A conversation keeps what was asked
/// before.
fn asked(keys: &mut Keys<'_>, template: &Template, before: Option<&Asked>) -> Result<(Asked, bool)> {
    let mut asked = before.cloned().unwrap_or_default();
    if let Some(tools) = keys.take_within("tools", LONGEST_TOOLS)? {
        let is_tool = |tool: &Value| tool["type"] == "function" && tool["function"]["name"].is_string();
        let Some(list) = tools.as_array().filter(|list| list.iter().all(is_tool)) else {
            let message =
                "`tools` must be a list of objects with `type` \"function\" and a `function` with a `name`";
            return Err(ApiError::key("tools", message));
        };
        asked.tools = (!list.is_empty()).then_some(tools);
    }
    if asked.tools.is_some() {
        template.check_calls().map_err(|message| ApiError::key("tools", message))?;
    }
    let choice = keys.take("tool_choice")?;
    let choice = choice.as_ref().map_or(Some("auto"), Value::as_str);
    if !matches!(choice, Some("auto" | "none")) {
        let message = "`tool_choice` can be \"auto\" or \"none\"; an answer cannot be forced to be a call";
        return Err(ApiError::key("tool_choice", message));
    }
    match keys.take("chat_template_kwargs")? {
        None => {}
        Some(Value::Object(more)) => {
            if let Some(own) = VALUES.into_iter().find(|own| more.contains_key(*own)) {
                let message = format!("`chat_template_kwargs` has `{own}`, which the server itself sets");
                return Err(ApiError::key("chat_template_kwargs", message));
            }
            asked.more = more;
        }
        Some(_) => {
            return Err(ApiError::key("chat_template_kwargs", "`chat_template_kwargs` must be an object"));
        }
    }
    Ok((asked, choice == Some("auto")))
}

/// The prompts of a request.
fn prompts(text: Option<&str>, context: &Context<'_>) -> Result<Vec<Vec<u32>>> {
    let text = text.ok_or_else(|| ApiError::key("prompt", "`prompt` is missing"))?;
    let wrong = |error: ListError| match error {
        ListError::Entry => ApiError::key(
            "prompt",
            format!(
                "`prompt` must be a string, a list of strings, a list of ids, or a list of lists of ids; ids are from 0 \
                 to {}",
                context.vocabulary - 1
            ),
        ),
        ListError::Long => {
            let most = context.allowed.context;
            ApiError::key(
                "prompt",
                format!("the prompt has more than {most} tokens, the most that the server takes (--context)"),
            )
        }
    };
    let one = |text: &str| match text.starts_with('"') {
        true => {
            let text: Cow<'_, str> = serde_json::from_str(text).map_err(|_| wrong(ListError::Entry))?;
            context.encode(&text, "prompt")
        }
        false => body::list(text, context.allowed.context).map_err(wrong),
    };
    let Some(entries) = text.strip_prefix('[') else { return Ok(vec![one(text)?]) };
    match entries.trim_start().chars().next() {
        Some(']') => Err(ApiError::key("prompt", "`prompt` is an empty list; it needs at least one token")),
        Some('"' | '[') => {
            let most = context.allowed.prompts;
            let list = body::list::<&RawValue>(text, most).map_err(|error| match error {
                ListError::Long => ApiError::key(
                    "prompt",
                    format!("the request has more than {most} prompts, the most that the server takes"),
                ),
                other => wrong(other),
            })?;
            list.into_iter().map(|entry| one(entry.get())).collect()
        }
        _ => Ok(vec![one(text)?]),
    }
}

/// The number of tokens that an answer gets if the request does not say.
const DEFAULT_TOKENS: usize = 16;

/// The number of tokens that a message of a chat gets if the request does not say, and the context has room.
const CHAT_TOKENS: usize = 1024;

/// What a request is read against.
pub struct Context<'a> {
    /// The model's tokenizer.
    pub tokenizer: &'a Tokenizer,
    /// How chats are written.
    pub template: &'a Template,
    /// The number of the model's tokens.
    pub vocabulary: usize,
    /// The memory policy of requests that name none.
    pub policy: &'a Policy,
    /// What the server allows.
    pub allowed: &'a RequestLimits,
    /// The conversations.
    pub sessions: &'a Arc<Sessions>,
}

impl Context<'_> {
    /// The largest number of tokens that an answer may ask for.
    fn most_tokens(&self) -> Option<(usize, &'static str)> {
        Some((self.allowed.context, ", the server's context (--context)"))
    }

    fn encode(&self, text: &str, key: &str) -> Result<Vec<u32>> {
        self.tokenizer.encode(text).map_err(|error| ApiError::key(key, error.to_string()))
    }

    /// Where a later chat may depart from this one: before the last message and before the one that it answers, after the
    /// first, and before the answer. These are the numbers of tokens that the prompt shares with the prompts of fewer
    /// messages. The prompt's first `known.1` tokens are the text `known.0`, if all of that is kept already.
    fn ends(&self, messages: &[Message], asked: &Asked, ids: &[u32], known: (&str, usize)) -> Vec<usize> {
        /// A shorter prompt is read again.
        const SHORT: usize = 64;
        if ids.len() < SHORT {
            return Vec::new();
        }
        let count = messages.len();
        let mut counts = vec![1, count.saturating_sub(2), count - 1, count];
        counts.retain(|&count| count > 0);
        counts.sort_unstable();
        counts.dedup();
        let shared = |count: usize| {
            let text = self.template.begun(&messages[..count], asked)?;
            let beginning = self.tokenizer.encode(text.strip_prefix(known.0)?).ok()?;
            Some(known.1 + beginning.iter().zip(&ids[known.1..]).take_while(|(a, b)| a == b).count())
        };
        let mut ends: Vec<usize> = counts.into_iter().filter_map(shared).collect();
        ends.retain(|&at| at > known.1 && at < ids.len());
        ends.sort_unstable();
        ends.dedup();
        ends
    }

    /// Opens the conversation that a request continues, if it names one.
    fn conversation(&self, keys: &mut Keys<'_>, kind: Kind) -> Result<Option<OpenSession>> {
        let Some(id) = keys.string("session")? else { return Ok(None) };
        let open = self.sessions.begin(&id)?;
        match (open.record.kind, kind) {
            (Some(Kind::Text), Kind::Chat) => {
                Err(ApiError::key("session", "this session is a text; continue it with /v1/completions"))
            }
            (Some(Kind::Chat), Kind::Text) => {
                Err(ApiError::key("session", "this session is a chat; continue it with /v1/chat/completions"))
            }
            _ => Ok(Some(open)),
        }
    }
}

impl ParsedRequest {
    /// Reads the body of `/v1/completions`.
    pub fn completion(body: &[u8], context: &Context<'_>) -> Result<Self> {
        let mut keys = Keys::of_body(body)?;
        let open = context.conversation(&mut keys, Kind::Text)?;
        let mut prompts = prompts(keys.raw("prompt"), context)?;
        let echo = keys.flag("echo")?;
        let logprobs = keys.whole("logprobs", Some((MOST_TOP, "")))?;
        let max_tokens = keys.whole("max_tokens", context.most_tokens())?.unwrap_or(DEFAULT_TOKENS);
        if max_tokens == 0 && !echo {
            return Err(ApiError::key(
                "max_tokens",
                "`max_tokens` is 0, and `echo` is not set: there is nothing to answer",
            ));
        }
        let common = common(&mut keys, max_tokens, context, open.as_ref())?;
        end(keys)?;
        let mut conversation = None;
        if let Some(open) = open {
            if echo {
                return Err(ApiError::key("echo", "`echo` cannot be used with `session`"));
            }
            let [prompt] = &mut prompts[..] else {
                return Err(ApiError::key("prompt", "a session continues with one prompt"));
            };
            let decode = |ids: &[u32]| context.tokenizer.decode(ids);
            let said = decode(prompt).map_err(|error| ApiError::key("prompt", error.to_string()))?;
            let turn = NewTurn {
                kind: Kind::Text,
                text: format!("{}{said}", open.record.text),
                messages: vec![Message::new("user", said)],
                asked: Asked::default(),
                rewritten: false,
            };
            prompt.splice(..0, open.record.ids.iter().copied());
            conversation = Some((open, turn));
        }
        Self::new(prompts, common, echo, logprobs, conversation, context)
    }

    /// Reads the body of `/v1/chat/completions`.
    pub fn chat(body: &[u8], context: &Context<'_>) -> Result<Self> {
        let mut keys = Keys::of_body(body)?;
        let open = context.conversation(&mut keys, Kind::Chat)?;
        let messages = chat::messages(keys.raw("messages"))?;
        let before = open.as_ref().map(|open| &open.record.asked);
        let (asked, calls) = asked(&mut keys, context.template, before)?;
        let refused = |message: String| ApiError::key("messages", message);
        let form = |prompt: &str| context.template.reply_form(prompt, asked.tools.as_ref().filter(|_| calls));
        let (ids, form, ends, conversation) = match open {
            None => {
                let prompt = context.template.render_with(&messages, &asked).map_err(refused)?;
                let ids = context.encode(&prompt, "messages")?;
                let ends = context.ends(&messages, &asked, &ids, ("", 0));
                (ids, form(&prompt), ends, None)
            }
            Some(open) => {
                let record = &open.record;
                let next = context.template.continued(record, &messages, &asked).map_err(refused)?;
                let (ids, text, ends, rewritten) = match next {
                    Continuation::After(rest) => {
                        let ids = [&record.ids[..], &context.encode(&rest, "messages")?].concat();
                        let all = [record.written(), messages.clone()].concat();
                        let ends = context.ends(&all, &asked, &ids, (&record.text, record.ids.len()));
                        (ids, format!("{}{rest}", record.text), ends, false)
                    }
                    Continuation::Instead(whole) => {
                        let ids = context.encode(&whole, "messages")?;
                        let all = [record.messages(), messages.clone()].concat();
                        let ends = context.ends(&all, &asked, &ids, ("", 0));
                        (ids, whole, ends, true)
                    }
                };
                let form = form(&text);
                let turn = NewTurn { kind: Kind::Chat, messages, text, asked, rewritten };
                (ids, form, ends, Some((open, turn)))
            }
        };
        let top = keys.whole("top_logprobs", Some((MOST_TOP, "")))?;
        let logprobs = match keys.flag("logprobs")? {
            true => Some(top.unwrap_or(0)),
            false if top.is_some() => {
                return Err(ApiError::key("top_logprobs", "`top_logprobs` needs `logprobs` to be true"));
            }
            false => None,
        };
        let most = keys.whole("max_completion_tokens", context.most_tokens())?;
        let old = keys.whole("max_tokens", context.most_tokens())?;
        if most == Some(0) || old == Some(0) {
            return Err(ApiError::key("max_tokens", "`max_tokens` is 0: there is nothing to answer"));
        }
        let left = context.allowed.context.saturating_sub(ids.len());
        let open = conversation.as_ref().map(|(open, _)| open);
        let mut common =
            common(&mut keys, most.or(old).unwrap_or(left.clamp(1, CHAT_TOKENS)), context, open)?;
        common.limits.stop.extend(context.template.stop());
        end(keys)?;
        let request = Self::new(vec![ids], common, false, logprobs, conversation, context)?;
        Ok(Self { ends, form, ..request })
    }

    fn new(
        mut prompts: Vec<Vec<u32>>,
        common: Common,
        echo: bool,
        logprobs: Option<usize>,
        conversation: Option<(OpenSession, NewTurn)>,
        context: &Context<'_>,
    ) -> Result<Self> {
        let Common { model, choices, limits, stream, stream_usage, policy, recall } = common;
        let Context { tokenizer, vocabulary, allowed, .. } = *context;
        let single = if conversation.is_some() { "session" } else { "recall" };
        if (conversation.is_some() || recall) && (prompts.len() > 1 || choices.len() != 1) {
            let message = format!("`{single}` needs one prompt, `n` of 1, and `max_tokens` above 0");
            return Err(ApiError::key(single, message));
        }
        for prompt in &mut prompts {
            check_prompt(prompt, &limits, tokenizer, vocabulary, allowed)?;
        }
        Ok(Self {
            model,
            prompts,
            form: ReplyForm::default(),
            ends: Vec::new(),
            choices,
            limits,
            echo,
            logprobs,
            stream,
            stream_usage,
            policy,
            recall,
            conversation,
        })
    }
}

/// Reads the body of a `PUT` of a conversation.
pub fn session_request(body: &[u8], own: &Policy) -> Result<SessionRequest> {
    let mut keys = Keys::of_body(body)?;
    let policy = match keys.string("memory")? {
        None => None,
        Some(changes) => {
            Some(own.with(&changes).map_err(|error| ApiError::key("memory", error.to_string()))?)
        }
    };
    let request = SessionRequest { policy, from: keys.string("from")?, turns: keys.whole("turns", None)? };
    keys.end(|_, _| Ok(false))?;
    Ok(request)
}

/// Rejects a prompt that is too long or has tokens that the model does not have; an empty one begins after the end of
/// another text.
fn check_prompt(
    prompt: &mut Vec<u32>,
    limits: &Limits,
    tokenizer: &Tokenizer,
    vocabulary: usize,
    allowed: &RequestLimits,
) -> Result<()> {
    if prompt.is_empty() {
        match tokenizer.end_of_text().filter(|&id| (id as usize) < vocabulary) {
            Some(id) => prompt.push(id),
            None => return Err(ApiError::key("prompt", "a prompt is empty; it needs at least one token")),
        }
    }
    // A tokenizer may have more tokens than the model.
    if let Some(id) = prompt.iter().find(|&&id| id as usize >= vocabulary) {
        let message = format!("the prompt has the token {id}; the model has {vocabulary} tokens");
        return Err(ApiError::key("prompt", message));
    }
    let tokens = prompt.len().saturating_add(limits.max_tokens);
    if tokens > allowed.context {
        return Err(ApiError::key(
            "prompt",
            format!(
                "the prompt has {} tokens and the answer may have {}; together the server takes {} (--context)",
                prompt.len(),
                limits.max_tokens,
                allowed.context
            ),
        ));
    }
    Ok(())
}
