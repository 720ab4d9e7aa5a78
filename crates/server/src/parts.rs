//! The parts of an answer: reasoning, content, and calls of tools, told apart while the answer is written.
//!
//! ```text
//! <think>                                   may be in the prompt already
//! …                                         reasoning
//! </think>
//! …                                         content
//! <tool_call>                               a call, in one of two forms:
//! {"name": "f", "arguments": {"a": 1}}      as in Qwen3's template
//! <function=f> <parameter=a> 1 </parameter> </function>      as in Qwen3.5's
//! </tool_call>
//! ```
//! A template that does not have such a form has answers of content alone.

use std::sync::Arc;

use serde_json::{Map, Value, json};

const THINK: [&str; 2] = ["<think>", "</think>"];
const CALL: [&str; 2] = ["<tool_call>", "</tool_call>"];

/// The forms that an answer can have.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ReplyForm {
    /// Whether answers have reasoning.
    pub reasons: bool,
    /// Whether the prompt ends within the reasoning.
    pub begins_with_reasoning: bool,
    /// The tools that answers can call.
    pub tools: Option<Arc<Value>>,
}

/// A part of an answer that became final.
#[derive(Clone, Debug, PartialEq)]
pub enum Part {
    /// Text of the reasoning.
    Reasoning(String),
    /// Text for the user.
    Content(String),
    /// A call of a tool: its name, and its arguments as JSON.
    Call(String, String),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// Nothing but white space was written yet.
    Begin,
    Reasoning,
    Content,
    Call,
}

/// Divides the text of an answer into its parts.
#[derive(Debug)]
pub struct Splitter {
    form: ReplyForm,
    place: Place,
    /// What was written and is in no part yet: it may be the beginning of a mark, white space before one, or a call.
    held: String,
    /// Whether the part has text already; white space at its beginning is dropped.
    begun: bool,
}

impl Splitter {
    /// A divider for a new answer.
    pub fn new(form: ReplyForm) -> Self {
        let place = match form.begins_with_reasoning {
            true => Place::Reasoning,
            false if form.reasons => Place::Begin,
            false => Place::Content,
        };
        Self { form, place, held: String::new(), begun: place == Place::Content }
    }

    /// Adds text. Returns what became final.
    pub fn push(&mut self, text: &str) -> Vec<Part> {
        self.held += text;
        let mut parts = Vec::new();
        while self.step(&mut parts) {}
        parts
    }

    /// Ends the answer. Returns the rest; a call that is not whole is content.
    pub fn finish(&mut self) -> Vec<Part> {
        let mut parts = Vec::new();
        let rest = std::mem::take(&mut self.held);
        match self.place {
            Place::Reasoning => self.text(rest.trim_end_matches('\n'), &mut parts),
            Place::Call => parts.push(Part::Content(CALL[0].to_string() + &rest)),
            Place::Begin | Place::Content => {
                self.place = Place::Content;
                self.text(&rest, &mut parts);
            }
        }
        parts
    }

    /// Takes what is certain from the held text. Returns whether there may be more.
    fn step(&mut self, parts: &mut Vec<Part>) -> bool {
        match self.place {
            Place::Begin => {
                let text = self.held.trim_start();
                if text.is_empty() || THINK[0].starts_with(text) && text != THINK[0] {
                    return false;
                }
                match text.strip_prefix(THINK[0]) {
                    Some(rest) => {
                        (self.held, self.place, self.begun) = (rest.into(), Place::Reasoning, false)
                    }
                    None => (self.place, self.begun) = (Place::Content, true),
                }
                true
            }
            Place::Reasoning => self.until(THINK[1], Place::Content, parts),
            Place::Content if self.form.tools.is_some() => self.until(CALL[0], Place::Call, parts),
            Place::Content => {
                let all = std::mem::take(&mut self.held);
                self.text(&all, parts);
                false
            }
            Place::Call => {
                let Some((call, rest)) = self.held.split_once(CALL[1]) else { return false };
                parts.push(match parse(call.trim(), self.form.tools.as_deref()) {
                    Some((name, arguments)) => Part::Call(name, arguments),
                    None => Part::Content(format!("{}{call}{}", CALL[0], CALL[1])),
                });
                (self.held, self.place, self.begun) = (rest.into(), Place::Content, false);
                true
            }
        }
    }

    /// Passes on the text before a mark; without the mark, all that cannot belong to it.
    fn until(&mut self, mark: &str, next: Place, parts: &mut Vec<Part>) -> bool {
        if let Some((text, rest)) = self.held.split_once(mark) {
            let (text, rest) = (text.trim_end_matches('\n').to_string(), rest.to_string());
            self.text(&text, parts);
            (self.held, self.place, self.begun) = (rest, next, false);
            return true;
        }
        // The longest end that could be white space and a beginning of the mark.
        let starts = |text: &str| (1..mark.len()).any(|n| mark.is_char_boundary(n) && text == &mark[..n]);
        let places = self.held.char_indices().map(|(at, _)| at).rev().take(mark.len());
        let begun = places.filter(|&at| starts(&self.held[at..])).min().unwrap_or(self.held.len());
        let end = self.held[..begun].trim_end_matches('\n').len();
        let rest = self.held.split_off(end);
        let text = std::mem::replace(&mut self.held, rest);
        self.text(&text, parts);
        false
    }

    fn text(&mut self, text: &str, parts: &mut Vec<Part>) {
        let text = if self.begun { text } else { text.trim_start_matches('\n') };
        if text.is_empty() {
            return;
        }
        self.begun = true;
        parts.push(match self.place {
            Place::Reasoning => Part::Reasoning(text.into()),
            _ => Part::Content(text.into()),
        });
    }
}

/// The name and the arguments of a call.
fn parse(call: &str, tools: Option<&Value>) -> Option<(String, String)> {
    if let Some(rest) = call.strip_prefix("<function=") {
        let (name, mut rest) = rest.split_once('>')?;
        let name = name.trim();
        let mut arguments = Map::new();
        while let Some((_, after)) = rest.split_once("<parameter=") {
            let (key, after) = after.split_once('>')?;
            let (value, after) = after.split_once("</parameter>")?;
            let value = value.strip_prefix('\n').unwrap_or(value);
            let value = value.strip_suffix('\n').unwrap_or(value);
            arguments.insert(key.trim().into(), typed(value, declared(tools, name, key.trim())));
            rest = after;
        }
        return Some((name.into(), Value::Object(arguments).to_string()));
    }
    let call: Value = serde_json::from_str(call).ok()?;
    let arguments = match &call["arguments"] {
        Value::Null => "{}".into(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    };
    Some((call["name"].as_str()?.into(), arguments))
}

/// What the description of a tool says about an argument.
fn declared<'a>(tools: Option<&'a Value>, name: &str, key: &str) -> Option<&'a Value> {
    let mut functions = tools?.as_array()?.iter().map(|tool| &tool["function"]);
    let function = functions.find(|function| function["name"] == name)?;
    function["parameters"]["properties"].get(key)
}

/// An argument that is written as plain text: text if that is its declared type, or if it is no other JSON.
fn typed(text: &str, declared: Option<&Value>) -> Value {
    let is_text =
        declared.is_some_and(|it| it["type"] == "string" || it["enum"].get(0).is_some_and(Value::is_string));
    let parsed = serde_json::from_str(text).ok().filter(|value: &Value| !is_text && !value.is_string());
    parsed.unwrap_or_else(|| json!(text))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The parts of an answer that comes in pieces of so many characters, those of one kind joined.
    fn parts(form: ReplyForm, answer: &str, size: usize) -> Vec<Part> {
        let characters: Vec<char> = answer.chars().collect();
        let mut splitter = Splitter::new(form);
        let pieces = characters.chunks(size).map(|piece| piece.iter().collect::<String>());
        let mut found: Vec<Part> = pieces.flat_map(|piece| splitter.push(&piece)).collect();
        found.extend(splitter.finish());
        let mut joined: Vec<Part> = Vec::new();
        for part in found {
            match (joined.last_mut(), part) {
                (Some(Part::Reasoning(text)), Part::Reasoning(more)) => *text += &more,
                (Some(Part::Content(text)), Part::Content(more)) => *text += &more,
                (_, part) => joined.push(part),
            }
        }
        joined
    }

    #[test]
    fn answers_have_the_same_parts_in_any_pieces() {
        let tools = json!([{ "type": "function", "function": { "name": "weather", "parameters": {
            "type": "object", "properties": { "code": { "type": "string" }, "days": { "type": "integer" } },
        } } }]);
        let all = ReplyForm { reasons: true, begins_with_reasoning: false, tools: Some(Arc::new(tools)) };
        let all = || all.clone();
        let inside = || ReplyForm { begins_with_reasoning: true, ..all() };
        let reasoning = |text: &str| Part::Reasoning(text.into());
        let content = |text: &str| Part::Content(text.into());
        let call = |arguments: &str| Part::Call("weather".into(), arguments.into());
        let json = "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Rome\"}}\n</tool_call>";
        let tags = "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n3\n\
                    </parameter>\n<parameter=code>\n3\n</parameter>\n</function>\n</tool_call>";
        for (form, answer, wanted) in [
            (ReplyForm::default(), "<think>a</think>", vec![content("<think>a</think>")]),
            (all(), "Hello", vec![content("Hello")]),
            (all(), "<think>\nHm.\n</think>\n\nYes <b", vec![reasoning("Hm."), content("Yes <b")]),
            (inside(), "Hm.\n\nWell.\n</think>\n\nYes", vec![reasoning("Hm.\n\nWell."), content("Yes")]),
            (inside(), "Never ends", vec![reasoning("Never ends")]),
            (all(), json, vec![call("{\"city\":\"Rome\"}")]),
            (
                all(),
                &format!("One moment.\n{tags}"),
                vec![content("One moment."), call("{\"city\":\"Rome\",\"days\":3,\"code\":\"3\"}")],
            ),
            (
                all(),
                &format!("{json}\n{json}"),
                vec![call("{\"city\":\"Rome\"}"), call("{\"city\":\"Rome\"}")],
            ),
            (all(), "<tool_call>{\"name\"", vec![content("<tool_call>{\"name\"")]),
            (all(), "<tool_call>no</tool_call>", vec![content("<tool_call>no</tool_call>")]),
        ] {
            for size in [1, 2, 3, 7, 1000] {
                assert_eq!(parts(form.clone(), answer, size), wanted, "{answer:?} in pieces of {size}");
            }
        }
    }
}
