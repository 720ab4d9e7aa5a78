//! Turns the messages of a chat into a prompt: by the model's own template, or a plain one.

use std::borrow::Cow;
use std::path::Path;

use march_lm::disk::built_in;
use march_lm::tokenizer::Tokenizer;
use minijinja::{Environment, UndefinedBehavior, context};
use serde::Deserialize;
use serde_json::Value;
use serde_json::value::RawValue;

use crate::body::{self, ListError};
use crate::error::ApiError;
use crate::record::{Message, Record};

/// How a conversation is written.
pub struct Template {
    /// The model's template, in the Jinja language.
    own: Option<Environment<'static>>,
    end_of_text: String,
    text: Option<String>,
}

const NAME: &str = "chat";

impl Template {
    /// The template of a checkpoint folder: `chat_template.jinja`, or `chat_template` of `tokenizer_config.json`; if
    /// there is none, a plain one. Fails with a message if the template is not valid.
    pub fn of_folder(folder: &Path, tokenizer: &Tokenizer) -> Result<Self, String> {
        let text = find(folder)?;
        let end_of_text = match tokenizer.end_of_text() {
            Some(id) => tokenizer.decode(&[id]).map_err(|error| error.to_string())?,
            None => String::new(),
        };
        let own = match &text {
            None => None,
            Some(text) => {
                let mut environment = Environment::new();
                environment.set_undefined_behavior(UndefinedBehavior::Lenient);
                environment.add_function(
                    "raise_exception",
                    |message: String| -> Result<String, minijinja::Error> {
                        Err(minijinja::Error::new(minijinja::ErrorKind::InvalidOperation, message))
                    },
                );
                environment.add_template_owned(NAME, text.clone()).map_err(|error| {
                    format!("{}: the chat template is not valid: {error}", folder.display())
                })?;
                Some(environment)
            }
        };
        Ok(Self { own, end_of_text, text })
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
        let Some(environment) = &self.own else { return Ok(plain(messages)) };
        let list: Vec<minijinja::Value> = messages
            .iter()
            .map(|Message { role, content }| context! { role => role, content => content })
            .collect();
        let values = context! {
            messages => list, add_generation_prompt => true, eos_token => self.end_of_text.clone(), bos_token => "",
        };
        let rendered = environment.get_template(NAME).and_then(|template| template.render(values));
        rendered.map_err(|error| format!("the model's chat template refused the messages: {error}"))
    }

    /// What follows the text of a conversation when new messages are added; or, if the template writes the conversation
    /// in another way than it was, the whole new prompt.
    pub fn continued(&self, record: &Record, new: &[Message]) -> Result<Continuation, String> {
        if self.own.is_none() {
            return Ok(Continuation::After(plain(new)));
        }
        let mut messages = record.messages();
        messages.extend_from_slice(new);
        let whole = self.render(&messages)?;
        Ok(match whole.strip_prefix(&record.text) {
            Some(rest) => Continuation::After(rest.into()),
            None => Continuation::Instead(whole),
        })
    }
}

/// How a prompt continues a conversation.
pub enum Continuation {
    /// With this after its text.
    After(String),
    /// With this instead of its text.
    Instead(String),
}

/// The text of a folder's template.
fn find(folder: &Path) -> Result<Option<String>, String> {
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
    if let Some(text) = read("chat_template.jinja")? {
        return Ok(Some(text));
    }
    let Some(text) = read("tokenizer_config.json")? else { return Ok(None) };
    let config: Value = serde_json::from_str(&text).map_err(|error| {
        format!("{}: is not JSON: {error}", folder.join("tokenizer_config.json").display())
    })?;
    Ok(config["chat_template"].as_str().map(Into::into))
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
        if !["system", "developer", "user", "assistant"].contains(&&*role) {
            let role: String = role.chars().take(60).collect();
            return Err(format!("the role `{role}` is not supported; use system, user or assistant"));
        }
        let text = self.content.map(RawValue::get).ok_or("a message has no `content`")?;
        let content = match text.starts_with('"') {
            true => serde_json::from_str(text).map_err(|error| error.to_string())?,
            false => {
                let not_text = "a message has a part that is not text; only text is supported";
                let parts = body::list::<Part<'_>>(text, MOST).map_err(|_| not_text)?;
                let texts = parts.into_iter().map(|part| part.text.filter(|_| part.kind == "text"));
                texts.collect::<Option<Vec<_>>>().ok_or(not_text)?.concat()
            }
        };
        Ok(Message { role: role.into_owned(), content })
    }
}

/// The form of `march chat`.
fn plain(messages: &[Message]) -> String {
    let mut text = String::new();
    for Message { role, content } in messages {
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
        for wrong in
            [json!([]), json!("Hi"), json!([{ "role": "tool", "content": "x" }]), json!([{ "role": "user" }])]
        {
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
