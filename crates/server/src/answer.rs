//! Answers in OpenAI's shapes.

use std::collections::BTreeMap;

use march_lm::generate::{StopReason, TextStream};
use march_lm::tokenizer::Tokenizer;
use serde_json::{Map, Value, json};

use crate::job::{Event, FinishedChoice, ScoredToken};
use crate::parts::{Part, Splitter};
use crate::record::Message;
use crate::request::ParsedRequest;

/// Which interface the answer is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// `/v1/completions`.
    Completion,
    /// `/v1/chat/completions`.
    Chat,
}

/// What all parts of an answer share.
pub struct Head {
    /// The form.
    pub form: Form,
    /// The answer's id.
    pub id: String,
    /// When it was begun, in seconds since 1970.
    pub created: u64,
    /// The model's name.
    pub model: String,
}

/// Numbers of tokens.
#[derive(Clone, Copy, Debug, Default)]
pub struct Usage {
    /// Of the prompts.
    pub prompt: usize,
    /// Of the prompts, those that were not read again.
    pub cached: usize,
    /// Of the answers.
    pub completion: usize,
}

impl Usage {
    /// As clients read it.
    pub fn json(self) -> Value {
        json!({
            "prompt_tokens": self.prompt, "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": { "cached_tokens": self.cached },
        })
    }
}

impl Head {
    /// An answer, or a part of one, with these choices.
    pub fn with(&self, choices: Vec<Value>, part: bool) -> Value {
        let object = match (self.form, part) {
            (Form::Completion, _) => "text_completion",
            (Form::Chat, true) => "chat.completion.chunk",
            (Form::Chat, false) => "chat.completion",
        };
        json!({
            "id": self.id, "object": object, "created": self.created, "model": self.model, "choices": choices,
        })
    }
}

/// Why a text ended, in OpenAI's words.
fn finish_reason(ended: Option<StopReason>, calls: bool) -> Value {
    match ended {
        Some(StopReason::MaxTokens) => "length".into(),
        Some(_) if calls => "tool_calls".into(),
        Some(_) => "stop".into(),
        None => Value::Null,
    }
}

/// A token as a string. Tokens that are not text on their own are told apart by their number.
fn spelled(tokenizer: &Tokenizer, id: u32) -> String {
    match tokenizer.decode(&[id]) {
        Ok(text) if !text.contains('\u{FFFD}') => text,
        _ => format!("token_id:{id}"),
    }
}

/// The tokens of a choice with their log-probabilities.
#[derive(Default)]
struct Tokens {
    list: Vec<(u32, Option<f32>, Vec<(u32, f32)>)>,
    /// Characters of the text before each token.
    offsets: Vec<usize>,
}

impl Tokens {
    fn push(&mut self, scored: &ScoredToken, offset: usize) {
        self.list.push((scored.id, Some(scored.logprob), scored.top.clone()));
        self.offsets.push(offset);
    }

    fn json(&self, form: Form, tokenizer: &Tokenizer, top: usize) -> Value {
        let spelled = |id: u32| spelled(tokenizer, id);
        match form {
            Form::Completion => {
                let alternatives = |top: &[(u32, f32)]| -> Map<String, Value> {
                    top.iter().map(|&(id, logprob)| (spelled(id), json!(logprob))).collect()
                };
                json!({
                    "tokens": self.list.iter().map(|token| spelled(token.0)).collect::<Vec<_>>(),
                    "token_logprobs": self.list.iter().map(|token| token.1).collect::<Vec<_>>(),
                    "top_logprobs": self.list.iter().map(|token| match token.1 {
                        Some(_) => Value::Object(alternatives(&token.2)),
                        None => Value::Null,
                    }).collect::<Vec<_>>(),
                    "text_offset": self.offsets,
                })
            }
            Form::Chat => {
                let entry = |id: u32, logprob: f32| json!({ "token": spelled(id), "logprob": logprob, "bytes": tokenizer.token_bytes(id) });
                let content = self.list.iter().map(|(id, logprob, found)| {
                    let mut own = entry(*id, logprob.unwrap_or(0.0));
                    let found = found.iter().take(top).map(|&(id, logprob)| entry(id, logprob));
                    own["top_logprobs"] = found.collect();
                    own
                });
                json!({ "content": content.collect::<Vec<_>>(), "refusal": null })
            }
        }
    }
}

/// A choice of an answer that is being put together.
struct Choice {
    text: String,
    /// Characters of the text.
    characters: usize,
    tokens: Tokens,
    ended: Option<StopReason>,
    /// Divides the text of a chat into its parts; these follow.
    splitter: Splitter,
    reasoning: String,
    content: String,
    calls: Vec<Value>,
}

impl Choice {
    /// The answer's message.
    fn message(&self) -> Message {
        Message {
            reasoning_content: Some(self.reasoning.clone()).filter(|text| !text.is_empty()),
            tool_calls: (!self.calls.is_empty()).then(|| self.calls.clone().into()),
            ..Message::new("assistant", self.content.clone())
        }
    }

    /// Notes new text. Returns what it adds to a stream. Calls get ids that begin with `id`.
    fn add(&mut self, id: &str, text: &str, ended: Option<StopReason>) -> Map<String, Value> {
        self.text += text;
        let mut parts = self.splitter.push(text);
        if ended.is_some() {
            parts.extend(self.splitter.finish());
        }
        let (mut reasoning, mut content, mut calls) = (String::new(), String::new(), Vec::new());
        for part in parts {
            match part {
                Part::Reasoning(text) => reasoning += &text,
                Part::Content(text) => content += &text,
                Part::Call(name, arguments) => {
                    let index = self.calls.len();
                    let call = json!({
                        "id": format!("{id}-{index}"),
                        "type": "function", "function": { "name": name, "arguments": arguments },
                    });
                    let mut part = call.clone();
                    part["index"] = index.into();
                    calls.push(part);
                    self.calls.push(call);
                }
            }
        }
        self.reasoning += &reasoning;
        self.content += &content;
        let mut delta = Map::new();
        if !reasoning.is_empty() {
            delta.insert("reasoning_content".into(), reasoning.into());
        }
        if !calls.is_empty() {
            delta.insert("tool_calls".into(), calls.into());
        }
        if !content.is_empty() || delta.is_empty() {
            delta.insert("content".into(), content.into());
        }
        delta
    }
}

/// Puts an answer together from the events of its jobs.
pub struct Answer<'a> {
    head: Head,
    request: &'a ParsedRequest,
    tokenizer: &'a Tokenizer,
    choices: BTreeMap<usize, Choice>,
    /// The numbers of tokens so far.
    pub usage: Usage,
    /// What is left of the last choice, if it was asked for.
    pub finished: Option<Box<FinishedChoice>>,
    /// The key `march` of the answer: what OpenAI's interface has no place for.
    pub more: Option<Value>,
}

impl<'a> Answer<'a> {
    /// An answer without any text.
    pub fn new(head: Head, request: &'a ParsedRequest, tokenizer: &'a Tokenizer) -> Self {
        let prompt = request.prompts.iter().map(Vec::len).sum();
        let usage = Usage { prompt, ..Usage::default() };
        Self { head, request, tokenizer, choices: BTreeMap::new(), usage, finished: None, more: None }
    }

    /// The number of choices for each prompt.
    fn per_prompt(&self) -> usize {
        self.request.choices.len().max(1)
    }

    /// Adds an event of a prompt. Returns the parts of a stream that it gives.
    pub fn add(&mut self, prompt: usize, event: Event) -> march_lm::Result<Vec<Value>> {
        match event {
            Event::PromptRead { cached, scores } => {
                self.usage.cached += cached;
                let first = prompt * self.per_prompt();
                for index in first..first + self.per_prompt() {
                    let choice = self.begin(prompt, &scores)?;
                    self.choices.insert(index, choice);
                }
                let parts = (first..first + self.per_prompt()).map(|index| self.opening(index));
                Ok(parts.flatten().collect())
            }
            Event::Piece { choice, text, token, ended } => {
                let index = prompt * self.per_prompt() + choice;
                let Some(choice) = self.choices.get_mut(&index) else { return Ok(Vec::new()) };
                let mut new = Tokens::default();
                if let Some(token) = &token {
                    self.usage.completion += 1;
                    // A token that ends a text is not part of the answer.
                    if matches!(ended, None | Some(StopReason::MaxTokens)) && self.request.logprobs.is_some()
                    {
                        new.push(token, choice.characters);
                        choice.tokens.push(token, choice.characters);
                    }
                }
                choice.characters += text.chars().count();
                choice.ended = ended;
                let id = self.head.id.replacen("chatcmpl", "call", 1);
                let delta = choice.add(&format!("{id}-{index}"), &text, ended);
                if !self.request.stream {
                    return Ok(Vec::new());
                }
                Ok(vec![self.part(index, &text, delta, &new, ended)])
            }
            Event::Finished(finished) => {
                self.finished = Some(finished);
                Ok(Vec::new())
            }
            Event::Failed(_) => Ok(Vec::new()),
        }
    }

    /// A choice whose prompt was read.
    fn begin(&self, prompt: usize, scores: &[ScoredToken]) -> march_lm::Result<Choice> {
        let mut choice = Choice {
            text: String::new(),
            characters: 0,
            tokens: Tokens::default(),
            ended: None,
            splitter: Splitter::new(self.request.form.clone()),
            reasoning: String::new(),
            content: String::new(),
            calls: Vec::new(),
        };
        if !self.request.echo {
            return Ok(choice);
        }
        let ids = &self.request.prompts[prompt];
        choice.text = self.tokenizer.decode(ids)?;
        choice.characters = choice.text.chars().count();
        if self.request.logprobs.is_none() {
            return Ok(choice);
        }
        let (mut stream, mut at) = (TextStream::new(self.tokenizer, &[])?, 0);
        for (i, &id) in ids.iter().enumerate() {
            match i.checked_sub(1).and_then(|before| scores.get(before)) {
                Some(scored) => choice.tokens.push(scored, at),
                None => {
                    choice.tokens.list.push((id, None, Vec::new()));
                    choice.tokens.offsets.push(at);
                }
            }
            at += stream.push(self.tokenizer, id)?.chars().count();
        }
        Ok(choice)
    }

    /// The first part of a stream's choice: the role of a chat, or the prompt.
    fn opening(&self, index: usize) -> Option<Value> {
        match self.head.form {
            Form::Chat => {
                let delta = json!({ "role": "assistant", "content": "" });
                Some(
                    self.head
                        .with(vec![json!({ "index": index, "delta": delta, "finish_reason": null })], true),
                )
            }
            Form::Completion if self.request.echo => {
                let choice = self.choices.get(&index)?;
                // A prompt that is only read ends with itself.
                let ended = self.request.choices.is_empty().then_some(StopReason::MaxTokens);
                Some(self.part(index, &choice.text, Map::new(), &choice.tokens, ended))
            }
            Form::Completion => None,
        }
    }

    fn logprobs(&self, tokens: &Tokens) -> Value {
        let top = self.request.logprobs.filter(|_| !tokens.list.is_empty());
        top.map_or(Value::Null, |top| tokens.json(self.head.form, self.tokenizer, top))
    }

    /// A part of a stream.
    fn part(
        &self,
        index: usize,
        text: &str,
        delta: Map<String, Value>,
        tokens: &Tokens,
        ended: Option<StopReason>,
    ) -> Value {
        let calls = self.choices.get(&index).is_some_and(|choice| !choice.calls.is_empty());
        let (logprobs, finish_reason) = (self.logprobs(tokens), finish_reason(ended, calls));
        let choice = match self.head.form {
            Form::Completion => {
                json!({ "index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason })
            }
            Form::Chat => json!({
                "index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason,
            }),
        };
        self.head.with(vec![choice], true)
    }

    /// The last part of a stream, if the client wants the numbers of tokens.
    pub fn usage_part(&self) -> Value {
        let mut part = self.head.with(Vec::new(), true);
        part["usage"] = self.usage.json();
        self.add_more(&mut part);
        part
    }

    fn add_more(&self, answer: &mut Value) {
        if let Some(more) = &self.more {
            answer["march"] = more.clone();
        }
    }

    /// The text of the first choice.
    pub fn text(&self) -> &str {
        self.choices.get(&0).map_or("", |choice| &choice.text)
    }

    /// The message of the first choice, if it has more parts than its content.
    pub fn said(&self) -> Option<Message> {
        let message = self.choices.get(&0)?.message();
        Some(message).filter(|it| it.reasoning_content.is_some() || it.tool_calls.is_some())
    }

    /// Whether every choice has ended.
    pub fn is_complete(&self) -> bool {
        let wanted = self.request.prompts.len() * self.per_prompt();
        let reads_only = self.request.choices.is_empty();
        self.choices.len() == wanted
            && self.choices.values().all(|choice| reads_only || choice.ended.is_some())
    }

    /// The whole answer.
    pub fn whole(&self) -> Value {
        let choices = self.choices.iter().map(|(index, choice)| {
            let ended = choice.ended.or(Some(StopReason::MaxTokens));
            let calls = !choice.calls.is_empty();
            let (logprobs, reason) = (self.logprobs(&choice.tokens), finish_reason(ended, calls));
            match self.head.form {
                Form::Completion => {
                    json!({ "index": index, "text": choice.text, "logprobs": logprobs, "finish_reason": reason })
                }
                Form::Chat => {
                    let mut message = json!(choice.message());
                    message["refusal"] = Value::Null;
                    if calls && choice.content.is_empty() {
                        message["content"] = Value::Null;
                    }
                    json!({ "index": index, "message": message, "logprobs": logprobs, "finish_reason": reason })
                }
            }
        });
        let mut whole = self.head.with(choices.collect(), false);
        whole["usage"] = self.usage.json();
        self.add_more(&mut whole);
        whole
    }
}
