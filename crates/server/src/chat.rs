//! Turns the messages of a chat into a prompt: by the model's own template, or a plain one.

use std::borrow::Cow;
use std::path::Path;
use std::sync::Arc;

use march_lm::Pipeline;
use march_lm::checkpoint::ChatTemplate;
use march_lm::disk::built_in;
use march_lm::tokenizer::Tokenizer;
use minijinja::syntax::SyntaxConfig;
use minijinja::{Environment, UndefinedBehavior};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use serde_json::{Map, Value, json};

use crate::body::{self, ListError};
use crate::error::ApiError;
use crate::parts::ReplyForm;
use crate::record::{Message, Record};

/// How a conversation is written.
pub struct Template {
    /// The model's template, in the Jinja language.
    own: Option<Environment<'static>>,
    /// The spelling of the tokens at the beginning and the end of a text.
    bos: String,
    eos: String,
    text: Option<String>,
}

/// What a request asks of the template besides the messages.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Asked {
    /// Descriptions of tools.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tools: Option<Value>,
    /// Further values for the template, such as `enable_thinking`.
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    pub more: Map<String, Value>,
}

/// The values that the server itself gives to a template.
pub const VALUES: [&str; 5] = ["messages", "tools", "add_generation_prompt", "bos_token", "eos_token"];

/// How templates that are not of the Qwen kind write calls: a mark, and the name of the form.
const OTHER_CALLS: [(&str, &str); 9] = [
    ("[TOOL_CALLS]", "Mistral"),
    ("<|python_tag|>", "Llama"),
    ("<arg_key>", "GLM"),
    ("<｜tool▁calls▁begin｜>", "DeepSeek"),
    ("<|tool_calls_section_begin|>", "Kimi"),
    ("<|channel|>", "gpt-oss"),
    ("<start_function_call>", "Gemma"),
    ("<minimax:tool_call>", "MiniMax"),
    ("<|tool_call|>", "Granite or Phi"),
];

const NAME: &str = "chat";

impl Template {
    /// The template of a model: that in its GGUF file, or else that of its folder. Fails with a message if the template
    /// is not valid.
    pub fn of_model(path: &Path, pipeline: &Pipeline) -> Result<Self, String> {
        match pipeline.chat_template().map_err(|error| error.to_string())? {
            Some(ChatTemplate { text, bos, eos }) => Self::new(path, Some(text), bos, eos),
            None => Self::of_folder(path, pipeline.tokenizer()),
        }
    }

    /// The template of a checkpoint folder: `chat_template.jinja`, or `chat_template` of `tokenizer_config.json`; if
    /// there is none, a plain one. Fails with a message if the template is not valid.
    pub fn of_folder(folder: &Path, tokenizer: &Tokenizer) -> Result<Self, String> {
        let (text, named) = find(folder)?;
        let end_of_text = match tokenizer.end_of_text() {
            Some(id) => tokenizer.decode(&[id]).map_err(|error| error.to_string())?,
            None => String::new(),
        };
        let spelled = |name: &str| match &named[name] {
            Value::String(text) => Some(text.clone()),
            Value::Object(token) => token.get("content").and_then(Value::as_str).map(String::from),
            _ => None,
        };
        let (bos, eos) = (spelled("bos_token"), spelled("eos_token"));
        Self::new(folder, text, bos.unwrap_or_default(), eos.unwrap_or(end_of_text))
    }

    fn new(path: &Path, text: Option<String>, bos: String, eos: String) -> Result<Self, String> {
        let own = match &text {
            None => None,
            Some(text) => {
                let mut environment = Environment::new();
                environment.set_undefined_behavior(UndefinedBehavior::Lenient);
                // As transformers sets up its templates.
                let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
                environment.set_syntax(syntax.map_err(|error| error.to_string())?);
                environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
                environment.add_filter("tojson", to_json);
                environment.add_function("strftime_now", |form: String| strftime(&form));
                environment.add_function(
                    "raise_exception",
                    |message: String| -> Result<String, minijinja::Error> {
                        Err(minijinja::Error::new(minijinja::ErrorKind::InvalidOperation, message))
                    },
                );
                environment.add_template_owned(NAME, text.clone()).map_err(|error| {
                    format!("{}: the chat template is not valid: {error}", path.display())
                })?;
                Some(environment)
            }
        };
        Ok(Self { own, bos, eos, text })
    }

    /// The model's own template, if it has one.
    pub fn text(&self) -> Option<&str> {
        self.text.as_deref()
    }

    /// Where an answer ends by the template's form.
    pub fn stop(&self) -> Option<String> {
        self.own.is_none().then(|| "\nUser:".into())
    }

    /// The prompt that asks for the next message.
    pub fn render(&self, messages: &[Message]) -> Result<String, String> {
        self.render_with(messages, &Asked::default())
    }

    /// The prompt that asks for the next message, with tools and other values.
    pub fn render_with(&self, messages: &[Message], asked: &Asked) -> Result<String, String> {
        self.written(messages, asked, true)
    }

    /// How a conversation begins that has these messages, if the template can write them.
    pub fn begun(&self, messages: &[Message], asked: &Asked) -> Option<String> {
        self.written(messages, asked, false).ok()
    }

    /// Refuses tools, by the name of the template's form, unless calls are written in a form that `parts.rs` knows.
    pub fn check_calls(&self) -> Result<(), String> {
        let text = self.text.as_deref().unwrap_or_default();
        let known =
            "the forms of Qwen (`<tool_call>` with JSON, or with `<function=…>`) are read; leave `tools` out";
        if let Some((mark, name)) = OTHER_CALLS.iter().find(|(mark, _)| text.contains(mark)) {
            return Err(format!(
                "the model's chat template writes calls as {name} does, with `{mark}`; {known}"
            ));
        }
        match text.contains("<tool_call>") && ["arguments", "<function="].iter().any(|it| text.contains(it)) {
            true => Ok(()),
            false => Err(format!("the model's chat template has no form for calls of tools; {known}")),
        }
    }

    /// The parts that the answer to a prompt has, which calls some `tools`.
    pub fn reply_form(&self, prompt: &str, tools: Option<&Value>) -> ReplyForm {
        let reasons = self.text.as_ref().is_some_and(|text| text.contains("<think>"));
        let begins_with_reasoning = reasons && prompt.trim_end().ends_with("<think>");
        ReplyForm { reasons, begins_with_reasoning, tools: tools.cloned().map(Arc::new) }
    }

    fn written(&self, messages: &[Message], asked: &Asked, asks: bool) -> Result<String, String> {
        let Some(environment) = &self.own else {
            refuse_calls(messages)?;
            let text = plain(messages);
            return Ok(if asks { text } else { text.trim_end_matches("Assistant:").into() });
        };
        let mut values = asked.more.clone();
        values.insert("messages".into(), messages.iter().map(|message| self.for_template(message)).collect());
        values.insert("add_generation_prompt".into(), asks.into());
        values.insert("bos_token".into(), self.bos.as_str().into());
        values.insert("eos_token".into(), self.eos.as_str().into());
        if let Some(tools) = &asked.tools {
            values.insert("tools".into(), tools.clone());
        }
        let values: minijinja::Value =
            serde_json::from_value(Value::Object(values)).map_err(|error| error.to_string())?;
        let rendered = environment.get_template(NAME).and_then(|template| template.render(values));
        rendered.map_err(|error| format!("the model's chat template refused the messages: {error}"))
    }

    /// What follows the text of a conversation when new messages are added; or, if the template writes the conversation
    /// in another way than it was, the whole new prompt.
    pub fn continued(&self, record: &Record, new: &[Message], asked: &Asked) -> Result<Continuation, String> {
        if self.own.is_none() {
            refuse_calls(new)?;
            return Ok(Continuation::After(plain(new)));
        }
        // As it was written, the conversation may be continued without reading it again.
        let written = self.render_with(&[record.written(), new.to_vec()].concat(), asked);
        if let Some(rest) = written.as_ref().ok().and_then(|whole| whole.strip_prefix(&record.text)) {
            return Ok(Continuation::After(rest.into()));
        }
        let whole = self.render_with(&[record.messages(), new.to_vec()].concat(), asked)?;
        Ok(match whole.strip_prefix(&record.text) {
            Some(rest) => Continuation::After(rest.into()),
            None => Continuation::Instead(whole),
        })
    }

    /// A message as templates read it. The arguments of calls, which clients write as text, become values; a role that the
    /// template does not know is that of the system.
    fn for_template(&self, message: &Message) -> Value {
        let mut value = json!(message);
        let knows = |role| self.text.as_ref().is_some_and(|text| text.contains(role));
        if message.role == "developer" && !knows("developer") {
            value["role"] = "system".into();
        }
        let calls = value.get_mut("tool_calls").and_then(Value::as_array_mut);
        for call in calls.into_iter().flatten() {
            let parsed =
                call["function"]["arguments"].as_str().and_then(|text| serde_json::from_str(text).ok());
            if let Some(arguments @ Value::Object(_)) = parsed {
                call["function"]["arguments"] = arguments;
            }
        }
        value
    }
}

/// How a prompt continues a conversation.
pub enum Continuation {
    /// With this after its text.
    After(String),
    /// With this instead of its text.
    Instead(String),
}

/// JSON as Python writes it, which is what models were trained on: a space after each comma and colon, and no escapes for
/// HTML.
fn to_json(
    value: minijinja::Value,
    options: minijinja::value::Kwargs,
) -> Result<minijinja::Value, minijinja::Error> {
    let wrong = |error: serde_json::Error| {
        minijinja::Error::new(minijinja::ErrorKind::BadSerialization, error.to_string())
    };
    let indent: Option<usize> = options.get("indent")?;
    let value = serde_json::to_value(&value).map_err(wrong)?;
    let text = match indent {
        None => python_json(&value),
        Some(width) => {
            let spaces = " ".repeat(width);
            let form = serde_json::ser::PrettyFormatter::with_indent(spaces.as_bytes());
            let mut bytes = Vec::new();
            serde::Serialize::serialize(
                &value,
                &mut serde_json::Serializer::with_formatter(&mut bytes, form),
            )
            .map_err(wrong)?;
            String::from_utf8_lossy(&bytes).into_owned()
        }
    };
    Ok(minijinja::Value::from_safe_string(text))
}

fn python_json(value: &Value) -> String {
    match value {
        Value::Array(list) => format!("[{}]", list.iter().map(python_json).collect::<Vec<_>>().join(", ")),
        Value::Object(map) => {
            let entry = |(key, value): (&String, &Value)| format!("{}: {}", json!(key), python_json(value));
            format!("{{{}}}", map.iter().map(entry).collect::<Vec<_>>().join(", "))
        }
        other => other.to_string(),
    }
}

/// The date, for templates that begin with it: of the fields of Python's `strftime` those that they use.
fn strftime(form: &str) -> String {
    const MONTHS: [&str; 12] = [
        "January",
        "February",
        "March",
        "April",
        "May",
        "June",
        "July",
        "August",
        "September",
        "October",
        "November",
        "December",
    ];
    let days = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(0, |time| time.as_secs()) as i64
        / 86_400;
    // The civil calendar of days since 1970, in years that begin with March.
    let shifted = days + 719_468;
    let (era, day) = (shifted.div_euclid(146_097), shifted.rem_euclid(146_097));
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let of_year = day - (365 * year + year / 4 - year / 100);
    let month = (5 * of_year + 2) / 153;
    let (date, month) = (of_year - (153 * month + 2) / 5 + 1, if month < 10 { month + 3 } else { month - 9 });
    let year = year + era * 400 + i64::from(month <= 2);
    let name = MONTHS[(month - 1) as usize];
    form.replace("%Y", &year.to_string())
        .replace("%m", &format!("{month:02}"))
        .replace("%d", &format!("{date:02}"))
        .replace("%B", name)
        .replace("%b", &name[..3])
}

/// The text of a folder's template, and its `tokenizer_config.json`.
fn find(folder: &Path) -> Result<(Option<String>, Value), String> {
    let read = |name: &str| {
        if let Some(bytes) = built_in(folder, name) {
            return Ok(Some(String::from_utf8_lossy(bytes).into_owned()));
        }
        let path = folder.join(name);
        match path.exists() {
            true => std::fs::read_to_string(&path)
                .map(Some)
                .map_err(|error| format!("{}: could not read: {error}", path.display())),
            false => Ok(None),
        }
    };
    let config = match read("tokenizer_config.json")? {
        None => Value::Null,
        Some(text) => serde_json::from_str(&text).map_err(|error| {
            format!("{}: is not JSON: {error}", folder.join("tokenizer_config.json").display())
        })?,
    };
    let text = match read("chat_template.jinja")? {
        Some(text) => Some(text),
        None => config["chat_template"].as_str().map(Into::into),
    };
    Ok((text, config))
}

/// The most messages of a request, and the most parts of a message.
const MOST: usize = 16_384;

/// The messages of a request.
pub fn messages(text: Option<&str>) -> Result<Vec<Message>, ApiError> {
    let wrong = |message: String| ApiError::key("messages", message);
    let list = text.map(|text| body::list::<RawMessage<'_>>(text, MOST));
    match list {
        Some(Ok(messages)) if !messages.is_empty() => {
            messages.into_iter().map(RawMessage::message).collect::<Result<Vec<_>, _>>().map_err(wrong)
        }
        Some(Err(ListError::Long)) => Err(wrong(format!("`messages` has more than {MOST} messages"))),
        _ => Err(wrong(
            "`messages` must be a list of at least one message, each with a `role` and a `content` that is text".into(),
        )),
    }
}

/// A message as clients write it. Other keys, such as a name, change no answer.
#[derive(Deserialize)]
struct RawMessage<'a> {
    #[serde(borrow, default)]
    role: Option<Cow<'a, str>>,
    #[serde(borrow, default)]
    content: Option<&'a RawValue>,
    #[serde(default)]
    reasoning_content: Option<String>,
    #[serde(default)]
    tool_calls: Option<Value>,
    #[serde(default)]
    tool_call_id: Option<String>,
}

/// A part of a message's content.
#[derive(Deserialize)]
struct Part<'a> {
    #[serde(borrow, rename = "type")]
    kind: Cow<'a, str>,
    #[serde(borrow, default)]
    text: Option<Cow<'a, str>>,
}

impl RawMessage<'_> {
    fn message(self) -> Result<Message, String> {
        let role = self.role.ok_or("a message has no `role`")?;
        if !["system", "developer", "user", "assistant", "tool"].contains(&&*role) {
            let role: String = role.chars().take(60).collect();
            return Err(format!("the role `{role}` is not supported; use system, user, assistant or tool"));
        }
        let is_call = |call: &Value| {
            let function = &call["function"];
            let named = function["name"].is_string() && function["arguments"].is_string();
            let id = call["id"].is_string() || call["id"].is_null();
            named && id && call.get("type").is_none_or(|kind| kind == "function")
        };
        if !self.tool_calls.iter().all(|calls| calls.as_array().is_some_and(|list| list.iter().all(is_call)))
        {
            let form = "objects with a `function`, which has a `name` and `arguments` as text";
            return Err(format!("a message has `tool_calls` that are not a list of {form}"));
        }
        let calls = self.tool_calls.filter(|calls| calls.as_array().is_some_and(|list| !list.is_empty()));
        let text = match self.content.map(RawValue::get).filter(|text| *text != "null") {
            Some(text) => text,
            None if calls.is_some() => "\"\"",
            None => return Err("a message has no `content`".into()),
        };
        let content = match text.starts_with('"') {
            true => serde_json::from_str(text).map_err(|error| error.to_string())?,
            false => {
                let not_text = "a message has a part that is not text; only text is supported";
                let parts = body::list::<Part<'_>>(text, MOST).map_err(|_| not_text)?;
                let texts = parts.into_iter().map(|part| part.text.filter(|_| part.kind == "text"));
                texts.collect::<Option<Vec<_>>>().ok_or(not_text)?.concat()
            }
        };
        Ok(Message {
            reasoning_content: self.reasoning_content,
            tool_calls: calls,
            tool_call_id: self.tool_call_id,
            ..Message::new(&role, content)
        })
    }
}

/// The plain form has none for calls.
fn refuse_calls(messages: &[Message]) -> Result<(), String> {
    match messages.iter().any(|message| message.role == "tool" || message.tool_calls.is_some()) {
        true => {
            Err("the model has no chat template, so there is no form for calls and results of tools".into())
        }
        false => Ok(()),
    }
}

/// The form of `march chat`.
fn plain(messages: &[Message]) -> String {
    let mut text = String::new();
    for Message { role, content, .. } in messages {
        match role.as_str() {
            "user" => text.extend(["\nUser: ", content]),
            // An answer usually begins with the space.
            "assistant" if content.starts_with(char::is_whitespace) => text.extend(["\nAssistant:", content]),
            "assistant" => text.extend(["\nAssistant: ", content]),
            _ => text.extend([content.as_str()]),
        }
    }
    text + "\nAssistant:"
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn rendered(template: &Template, messages: Value) -> Result<String, String> {
        let rendered = super::messages(Some(&messages.to_string())).map_err(|error| error.body().to_string());
        rendered.and_then(|messages| template.render(&messages))
    }

    #[test]
    fn the_plain_form_is_that_of_the_chat_command() {
        let folder = tempfile::tempdir().unwrap();
        let template = Template::of_folder(folder.path(), &Tokenizer::bytes()).unwrap();
        let messages = json!([
            { "role": "system", "content": "Be brief." },
            { "role": "user", "content": "Hi" },
            { "role": "assistant", "content": "Hello" },
            { "role": "user", "content": [{ "type": "text", "text": "Bye" }] },
        ]);
        let text = rendered(&template, messages).unwrap();
        assert_eq!(text, "Be brief.\nUser: Hi\nAssistant: Hello\nUser: Bye\nAssistant:");
        assert_eq!(template.stop().as_deref(), Some("\nUser:"));
        for wrong in [
            json!([]),
            json!("Hi"),
            json!([{ "role": "robot", "content": "x" }]),
            json!([{ "role": "user" }]),
        ] {
            rendered(&template, wrong).unwrap_err();
        }
    }

    #[test]
    fn a_folders_template_is_used() {
        let folder = tempfile::tempdir().unwrap();
        let jinja = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}{{ eos_token }}{% endfor %}\
                     {% if messages[0].role == 'assistant' %}{{ raise_exception('begin as the user') }}{% endif %}\
                     {% if add_generation_prompt %}<assistant>{% endif %}";
        let config = json!({ "chat_template": jinja }).to_string();
        std::fs::write(folder.path().join("tokenizer_config.json"), config).unwrap();
        let template = Template::of_folder(folder.path(), &Tokenizer::bytes()).unwrap();
        let user = json!([{ "role": "user", "content": " Hi " }]);
        assert_eq!(rendered(&template, user).unwrap(), "<user>Hi<|endoftext|><assistant>");
        let refused = rendered(&template, json!([{ "role": "assistant", "content": "x" }])).unwrap_err();
        assert!(refused.contains("begin as the user"), "{refused}");
        std::fs::write(folder.path().join("chat_template.jinja"), "{% for %}").unwrap();
        let refused = Template::of_folder(folder.path(), &Tokenizer::bytes()).err().unwrap();
        assert!(refused.contains("is not valid"), "{refused}");
    }
}
