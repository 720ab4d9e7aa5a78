//! Chats with a template of the Qwen kind: what the model reads of tools, reasoning and results, and what a client gets of
//! an answer.

use std::path::Path;
use std::sync::Arc;

use march_lm::anchors::Policy;
use march_lm::generate::{StopReason, Text};
use march_lm::tokenizer::Tokenizer;
use serde_json::{Value, json};

use super::{WITHOUT_ANCHORS, checkpoint, load};
use crate::answer::{Answer, Form, Head};
use crate::chat::Template;
use crate::job::{Event, FinishedChoice, ScoredToken};
use crate::prefix::CachedPrefix;
use crate::request::{Context, ParsedRequest, RequestLimits};
use crate::scheduler::LoadedModel;
use crate::sessions::{SessionRequest, Sessions};

/// Messages between marks, tools in the first one, reasoning only after the last question, and a prompt that begins the
/// reasoning.
const TEMPLATE: &str = include_str!("chat_template.jinja");

/// How tools are described in the prompt by one kind of template, and how answers call them.
const JSON_CALL: &str =
    "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Rome\", \"days\": 3}}\n</tool_call>";
const TAGS_CALL: &str = "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n\
                         <parameter=days>\n3\n</parameter>\n</function>\n</tool_call>";

struct Chats {
    _folder: tempfile::TempDir,
    loaded: Arc<LoadedModel>,
    template: Template,
    sessions: Arc<Sessions>,
    allowed: RequestLimits,
    policy: Policy,
}

fn template(folder: &Path, text: &str) -> Template {
    std::fs::write(folder.join("chat_template.jinja"), text).unwrap();
    Template::of_folder(folder, &Tokenizer::bytes()).unwrap()
}

impl Chats {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let model = folder.path().join("model");
        checkpoint(&model, "tiny/hybrid", &WITHOUT_ANCHORS);
        let loaded = Arc::new(load(&model));
        let template = template(&model, TEMPLATE);
        let sessions = Arc::new(Sessions::open(None, Arc::clone(&loaded), "tiny", 1 << 30).unwrap());
        let allowed = RequestLimits { context: 1 << 16, prompts: 4 };
        Self { _folder: folder, policy: loaded.policy().clone(), loaded, template, sessions, allowed }
    }

    fn try_read(&self, body: &Value) -> Result<ParsedRequest, String> {
        let context = Context {
            tokenizer: self.loaded.tokenizer(),
            template: &self.template,
            vocabulary: 257,
            policy: &self.policy,
            allowed: &self.allowed,
            sessions: &self.sessions,
        };
        let read = ParsedRequest::chat(body.to_string().as_bytes(), &context);
        read.map_err(|error| error.body()["error"]["message"].as_str().unwrap().into())
    }

    fn read(&self, body: &Value) -> (String, ParsedRequest) {
        let request = self.try_read(body).unwrap();
        (self.loaded.tokenizer().decode(&request.prompts[0]).unwrap(), request)
    }

    /// What a client gets if the model writes these texts, one for each choice, in pieces of so many characters: the parts
    /// of the stream, and the whole answer.
    fn answer(&self, request: &ParsedRequest, texts: &[&str], size: usize) -> (Vec<Value>, Value) {
        let head = Head { form: Form::Chat, id: "chatcmpl-1-2".into(), created: 0, model: "tiny".into() };
        let mut answer = Answer::new(head, request, self.loaded.tokenizer());
        let mut parts = answer.add(0, Event::PromptRead { cached: 0, scores: Vec::new() }).unwrap();
        let mut piece = |choice, text: String, ended| {
            let token = Some(ScoredToken { id: 1, logprob: 0.0, top: Vec::new() });
            parts.extend(answer.add(0, Event::Piece { choice, text, token, ended }).unwrap());
        };
        for (choice, text) in texts.iter().enumerate() {
            let characters: Vec<char> = text.chars().collect();
            characters.chunks(size).for_each(|chunk| piece(choice, chunk.iter().collect(), None));
            piece(choice, String::new(), Some(StopReason::EndOfText));
        }
        (parts, answer.whole())
    }

    /// Ends the turn of a request as if the model had written a text.
    fn finish(&self, request: &mut ParsedRequest, text: &str) {
        let (mut open, turn) = request.conversation.take().unwrap();
        let (_, whole) = self.answer(request, &[text], 7);
        let mut message = whole["choices"][0]["message"].clone();
        // Beside calls, no content is `null` for clients.
        message["content"] = message["content"].as_str().unwrap_or_default().into();
        let said = serde_json::from_value(message).unwrap();
        let tokenizer = self.loaded.tokenizer();
        let ids = [&request.prompts[0][..], &tokenizer.encode(text).unwrap()].concat();
        let empty = || Text::new(self.loaded.model().bank(self.policy.clone()).unwrap());
        let finished = FinishedChoice {
            prefix: CachedPrefix { ids, text: empty() },
            departure: None,
            exact: false,
            bytes: 0,
            recall: None,
            anchors: Vec::new(),
        };
        open.finish(&turn, (text, Some(said)), &self.policy, &finished, (&self.template, tokenizer)).unwrap();
    }
}

fn tools() -> Value {
    json!([{ "type": "function", "function": {
        "name": "weather", "description": "Tells it", "parameters": {
            "type": "object", "properties": { "city": { "type": "string" }, "days": { "type": "integer" } },
        },
    } }])
}

/// The joined pieces of a key of a stream's choice.
fn joined(parts: &[Value], index: usize, key: &str) -> String {
    let own = parts.iter().map(|part| &part["choices"][0]).filter(|choice| choice["index"] == index);
    own.filter_map(|choice| choice["delta"][key].as_str()).collect()
}

#[test]
fn prompts_have_tools_reasoning_and_results() {
    let chats = Chats::new();
    let call = json!({ "id": "1", "type": "function", "function": {
        "name": "weather", "arguments": "{\"city\":\"Rome\",\"days\":3}",
    } });
    let messages = json!([
        { "role": "developer", "content": "Be brief." },
        { "role": "user", "content": "Hi" },
        { "role": "assistant", "content": "Hello", "reasoning_content": "A greeting." },
        { "role": "user", "content": "Rome?" },
        { "role": "assistant", "content": null, "reasoning_content": "A tool.", "tool_calls": [call] },
        { "role": "tool", "tool_call_id": "1", "content": [{ "type": "text", "text": "Sunny" }] },
    ]);
    let (prompt, request) = chats.read(&json!({ "messages": messages, "tools": tools() }));
    let described = "{\"type\": \"function\", \"function\": {\"name\": \"weather\", \"description\": \"Tells it\", \
                     \"parameters\": {\"type\": \"object\", \"properties\": {\"city\": {\"type\": \"string\"}, \"days\": \
                     {\"type\": \"integer\"}}}}}";
    let expected = format!(
        "<|im_start|>system\nBe brief.\n\nTools:\n{described}\nWrite a call as <tool_call>\n{{\"name\": …, \"arguments\": \
         …}}\n</tool_call><|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n\
         <|im_start|>user\nRome?<|im_end|>\n<|im_start|>assistant\n<think>\nA tool.\n</think>\n\n{JSON_CALL}<|im_end|>\n\
         <|im_start|>user\n<tool_response>\nSunny\n</tool_response><|im_end|>\n<|im_start|>assistant\n<think>\n"
    );
    assert_eq!(prompt, expected);
    assert!(request.form.begins_with_reasoning && request.form.tools.is_some());
    // Later chats depart before the answer, and where its messages end.
    let ends: Vec<&str> = request
        .ends
        .iter()
        .map(|&at| &prompt.as_bytes()[..at])
        .map(|it| std::str::from_utf8(it).unwrap())
        .collect();
    assert!(ends.last().unwrap().ends_with("</tool_response><|im_end|>\n"), "{ends:?}");
    assert!(ends.iter().all(|end| end.ends_with("<|im_end|>\n")), "{ends:?}");

    let user = json!([{ "role": "user", "content": "Hi" }]);
    let (prompt, request) =
        chats.read(&json!({ "messages": user, "chat_template_kwargs": { "enable_thinking": false } }));
    assert_eq!(prompt, "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n");
    assert!(request.form.reasons && !request.form.begins_with_reasoning && request.form.tools.is_none());
    // The model sees the tools, and may not call them.
    let (prompt, request) = chats.read(&json!({ "messages": user, "tools": tools(), "tool_choice": "none" }));
    assert!(prompt.contains("Tools:") && request.form.tools.is_none());

    for (key, value, words) in [
        ("tool_choice", json!("required"), "cannot be forced"),
        ("tool_choice", json!({ "type": "function" }), "cannot be forced"),
        ("tools", json!([{ "type": "web_search" }]), "`function` with a `name`"),
        ("tools", json!({}), "must be a list"),
        ("chat_template_kwargs", json!(1), "must be an object"),
        ("chat_template_kwargs", json!({ "messages": [] }), "`messages`"),
    ] {
        let refused = chats.try_read(&json!({ "messages": user, key: value })).unwrap_err();
        assert!(refused.contains(words), "{key}: {refused}");
    }
}

#[test]
fn answers_have_reasoning_content_and_calls() {
    let chats = Chats::new();
    let body = json!({ "messages": [{ "role": "user", "content": "Rome?" }], "tools": tools(), "n": 2, "stream": true });
    let (_, request) = chats.read(&body);
    let json_answer = format!("A tool.\n</think>\n\nI look.\n{JSON_CALL}");
    let tags_answer = format!("</think>\n\n{TAGS_CALL}\n{TAGS_CALL}");
    for size in [1, 5, 1000] {
        let (parts, whole) = chats.answer(&request, &[&json_answer, &tags_answer], size);
        let [first, second] = [0, 1].map(|index| whole["choices"][index]["message"].clone());
        assert_eq!((&first["content"], &first["reasoning_content"]), (&json!("I look."), &json!("A tool.")));
        assert_eq!((&second["content"], &second["reasoning_content"]), (&Value::Null, &Value::Null));
        let (one, two) = (first["tool_calls"].as_array().unwrap(), second["tool_calls"].as_array().unwrap());
        assert_eq!((one.len(), two.len()), (1, 2));
        let mut ids = Vec::new();
        for call in one.iter().chain(two) {
            assert_eq!(call["type"], "function");
            assert_eq!(
                call["function"],
                json!({ "name": "weather", "arguments": "{\"city\":\"Rome\",\"days\":3}" })
            );
            ids.push(call["id"].as_str().unwrap());
        }
        ids.dedup();
        assert_eq!(ids.len(), 3, "{ids:?}");
        assert!(whole["choices"].as_array().unwrap().iter().all(|it| it["finish_reason"] == "tool_calls"));
        // The stream has the same.
        assert_eq!(joined(&parts, 0, "content"), "I look.");
        assert_eq!(joined(&parts, 0, "reasoning_content"), "A tool.");
        assert_eq!(joined(&parts, 1, "content"), "");
        let streamed: Vec<Value> = parts
            .iter()
            .filter_map(|part| part["choices"][0]["delta"]["tool_calls"].as_array())
            .flatten()
            .map(|call| {
                let mut call = call.clone();
                call.as_object_mut().unwrap().remove("index");
                call
            })
            .collect();
        assert_eq!(streamed, [&one[..], two].concat());
        let reasons =
            parts.iter().map(|part| &part["choices"][0]["finish_reason"]).filter(|it| !it.is_null());
        assert_eq!(reasons.collect::<Vec<_>>(), [&json!("tool_calls"); 2]);
    }
    // Without tools, what looks like a call is text.
    let (_, request) = chats.read(&json!({ "messages": [{ "role": "user", "content": "Rome?" }] }));
    let (_, whole) = chats.answer(&request, &[&json_answer], 3);
    assert_eq!(whole["choices"][0]["message"]["content"], format!("I look.\n{JSON_CALL}"));
    assert_eq!(whole["choices"][0]["finish_reason"], "stop");
}

/// A conversation keeps its tools. While a call is answered it goes on as it was written; after the next question the
/// template leaves the reasoning out.
#[test]
fn conversations_keep_reasoning_and_calls() {
    let chats = Chats::new();
    chats.sessions.put("s", SessionRequest::default()).unwrap();
    let body = |message: Value| json!({ "session": "s", "messages": [message] });
    let mut first = body(json!({ "role": "user", "content": "Rome?" }));
    first["tools"] = tools();
    let (begun, mut request) = chats.read(&first);
    let answer = format!("A tool.\n</think>\n\n{JSON_CALL}");
    chats.finish(&mut request, &answer);

    let kept = chats.sessions.get("s").unwrap();
    assert_eq!(kept["messages"][1]["reasoning_content"], "A tool.");
    assert_eq!(kept["messages"][1]["tool_calls"][0]["function"]["name"], "weather");
    assert_eq!(kept["history"][0]["answer"], answer);

    let (prompt, mut request) = chats.read(&body(json!({ "role": "tool", "content": "Sunny" })));
    let result = "<|im_end|>\n<|im_start|>user\n<tool_response>\nSunny\n</tool_response><|im_end|>\n<|im_start|>assistant\n<think>\n";
    assert_eq!(prompt, format!("{begun}{answer}{result}"));
    assert!(request.form.tools.is_some());
    let end = prompt.len() - "<|im_start|>assistant\n<think>\n".len();
    // Before and after the new message.
    assert_eq!(request.ends, [begun.len() + answer.len() + "<|im_end|>\n".len(), end]);
    chats.finish(&mut request, "Good.\n</think>\n\nIt is sunny.");

    let (prompt, request) = chats.read(&body(json!({ "role": "user", "content": "And then?" })));
    assert!(prompt.starts_with(begun.strip_suffix("<think>\n").unwrap()), "{prompt}");
    let rest = &prompt[begun.len() - "<think>\n".len()..];
    let expected = format!(
        "{JSON_CALL}<|im_end|>\n<|im_start|>user\n<tool_response>\nSunny\n</tool_response><|im_end|>\n\
         <|im_start|>assistant\nIt is sunny.<|im_end|>\n<|im_start|>user\nAnd then?<|im_end|>\n<|im_start|>assistant\n<think>\n"
    );
    assert_eq!(rest, expected);
    drop(request);
    // Other tools, or none, replace those of the conversation.
    let mut without = body(json!({ "role": "user", "content": "And then?" }));
    without["tools"] = json!([]);
    assert!(!chats.read(&without).0.contains("Tools:"));
}

#[test]
fn other_forms_of_calls_are_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let check = |text: &str| template(folder.path(), text).check_calls();
    for (text, name) in [
        ("{{ messages }}[TOOL_CALLS]", "Mistral"),
        ("{{ messages }}<|python_tag|>", "Llama"),
        ("<tool_call>{{ name }}<arg_key>", "GLM"),
        ("{{ messages }}", "no form for calls"),
        ("<tool_call>{{ messages }}", "no form for calls"),
    ] {
        let refused = check(text).unwrap_err();
        assert!(refused.contains(name) && refused.contains("Qwen"), "{text}: {refused}");
    }
    check(TEMPLATE).unwrap();
    check("<tool_call>\n<function=f>").unwrap();
}
