//! Conversations that `march serve` keeps: turns, forks, what they survive, and what is reported of their memory.

use std::io::{Read, Write};
use std::path::Path;

use serde_json::{Value, json};

use crate::server::{Server, checkpoint};

fn say(server: &Server, id: &str, said: &str, more: &Value) -> Value {
    let mut body = json!({
        "session": id, "messages": [{ "role": "user", "content": said }], "max_tokens": 30, "seed": 7,
        "logprobs": true, "top_logprobs": 2,
    });
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    let answer = server.post("/v1/chat/completions", &body);
    assert_eq!(answer.0, 200, "{}", answer.1);
    answer.json()
}

fn put(server: &Server, id: &str, body: &Value) -> (u16, Value) {
    let json = "content-type: application/json\r\n";
    let answer = server.send("PUT", &format!("/v1/sessions/{id}"), json, &body.to_string());
    (answer.0, answer.json())
}

fn history(server: &Server, id: &str) -> Value {
    let answer = server.get(&format!("/v1/sessions/{id}"));
    assert_eq!(answer.0, 200, "{}", answer.1);
    answer.json()["history"].take()
}

fn cached(answer: &Value) -> u64 {
    answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap()
}

const SAID: [&str; 4] = [
    "There was a table set out under a tree in front of the house, and the March Hare had tea.",
    "And then?",
    "The Hatter opened his eyes very wide on hearing this; but all he said was a riddle.",
    "Why is a raven like a writing-desk?",
];

/// A conversation continues after `kill -9` with the bits of one that was never interrupted, and with those of a model
/// that reads the whole text anew.
#[test]
fn conversations_survive_a_kill() {
    for preset in [
        "tiny/march",
        "tiny/gdn",
        "tiny/log-linear",
        "tiny/transformer",
        "tiny/memory-caching",
        "tiny/hybrid",
    ] {
        let folder = tempfile::tempdir().unwrap();
        let model = checkpoint(folder.path(), preset);
        let saved = folder.path().join("sessions");
        let flags = ["--sessions", saved.to_str().unwrap()];
        let (whole, cold) = (Server::start(&model, &[]), Server::start(&model, &["--cache-bytes", "0"]));
        for server in [&whole, &cold] {
            assert_eq!(put(server, "talk", &json!({})).0, 201);
        }
        assert_eq!(put(&Server::start(&model, &flags), "talk", &json!({})).0, 201);
        for (turn, said) in SAID.into_iter().enumerate() {
            // Dropping a server kills it.
            let server = Server::start(&model, &flags);
            let answer = say(&server, "talk", said, &json!({}));
            let expected = say(&whole, "talk", said, &json!({}));
            assert_eq!(answer["choices"], expected["choices"], "{preset}, turn {turn}");
            assert_eq!(answer["march"]["turn"], turn + 1);
            let anew = say(&cold, "talk", said, &json!({}));
            assert_eq!(answer["choices"], anew["choices"], "{preset}, turn {turn}, read anew");
            if preset != "tiny/log-linear" {
                let before = answer["usage"]["prompt_tokens"].as_u64().unwrap() - cached(&answer);
                assert!(turn == 0 || before < 120, "{preset}: {} tokens were read again", before);
            }
        }
        let server = Server::start(&model, &flags);
        assert_eq!(history(&server, "talk"), history(&whole, "talk"), "{preset}");
    }
}

/// The template drops the reasoning of earlier answers, so that the next turn departs before the last answer: a server that
/// was killed reads no more than what is written in another way, and what is new.
#[test]
fn conversations_with_reasoning_survive_a_kill() {
    let template = Path::new(env!("CARGO_MANIFEST_DIR")).join("../server/src/tests/chat_template.jinja");
    for preset in ["tiny/hybrid", "tiny/gdn", "tiny/transformer"] {
        let folder = tempfile::tempdir().unwrap();
        let model = checkpoint(folder.path(), preset);
        std::fs::copy(&template, model.join("chat_template.jinja")).unwrap();
        let saved = folder.path().join("sessions");
        let flags = ["--sessions", saved.to_str().unwrap()];
        let cold = Server::start(&model, &["--cache-bytes", "0"]);
        let (server, warm) = (Server::start(&model, &flags), Server::start(&model, &[]));
        let mut messages = Vec::new();
        for each in [&server, &cold] {
            assert_eq!(put(each, "talk", &json!({})).0, 201);
        }
        drop(server);
        for (turn, said) in SAID.into_iter().enumerate() {
            // Dropping a server kills it.
            let server = Server::start(&model, &flags);
            let answer = say(&server, "talk", said, &json!({}));
            let message = &answer["choices"][0]["message"];
            // A model with random weights does not come to an end of what it thinks.
            assert!(message["content"] == "" && message["reasoning_content"].is_string(), "{message}");
            assert_eq!(
                answer["choices"],
                say(&cold, "talk", said, &json!({}))["choices"],
                "{preset}, {turn}"
            );
            let prompt = answer["usage"]["prompt_tokens"].as_u64().unwrap();
            let (read, new) = (prompt - cached(&answer), said.len() as u64 + 110);
            assert!(turn == 0 || read < new, "{preset}, turn {turn}: {read} tokens were read");
            // A client that sends all messages gets the same, and it is read only once.
            messages.push(json!({ "role": "user", "content": said }));
            let body = json!({
                "messages": messages, "max_tokens": 30, "seed": 7, "logprobs": true, "top_logprobs": 2,
            });
            let stateless = warm.post("/v1/chat/completions", &body).json();
            assert_eq!(answer["choices"], stateless["choices"], "{preset}, turn {turn}, without a session");
            let read = prompt - cached(&stateless);
            assert!(
                turn == 0 || read < new,
                "{preset}, turn {turn}: {read} tokens were read without a session"
            );
            messages.push(json!({ "role": "assistant", "content": "" }));
        }
    }
}

#[test]
fn conversations_are_forked_undone_listed_and_deleted() {
    let folder = tempfile::tempdir().unwrap();
    let model = checkpoint(folder.path(), "tiny/march");
    let saved = folder.path().join("sessions");
    let server = Server::start(&model, &["--sessions", saved.to_str().unwrap()]);
    let (status, made) = put(&server, "a", &json!({ "memory": "interval=16" }));
    assert_eq!(
        (status, &made["policy"], &made["saved"]),
        (201, &json!("interval=16 top-k=dense"), &json!(true))
    );
    let answers: Vec<Value> = SAID.iter().map(|said| say(&server, "a", said, &json!({}))).collect();
    // A fork has the first turns, and continues as the original did.
    let (status, fork) = put(&server, "b", &json!({ "from": "a", "turns": 2 }));
    assert_eq!((status, &fork["turns"]), (201, &json!(2)));
    assert_eq!(say(&server, "b", SAID[2], &json!({}))["choices"], answers[2]["choices"]);
    // So does the original after two turns were undone, also if the server was killed in between.
    let (status, undone) = put(&server, "a", &json!({ "turns": 2 }));
    assert_eq!((status, &undone["turns"]), (200, &json!(2)));
    drop(server);
    let server = Server::start(&model, &["--sessions", saved.to_str().unwrap()]);
    let again = say(&server, "a", SAID[2], &json!({}));
    assert_eq!(again["choices"], answers[2]["choices"]);
    assert!(cached(&again) >= 128, "an anchor is enough to continue from: {}", cached(&again));
    assert_eq!(say(&server, "a", SAID[3], &json!({}))["choices"], answers[3]["choices"]);
    // An empty conversation may become a text.
    assert_eq!(put(&server, "b", &json!({ "turns": 0 })).1["kind"], Value::Null);
    let text = json!({ "session": "b", "prompt": "Once upon", "max_tokens": 5, "seed": 1 });
    let text = server.complete(text)["choices"][0]["text"].take();
    assert_eq!(history(&server, "b")[0]["answer"], text);
    let list = server.get("/v1/sessions").json();
    let mut ids: Vec<&str> =
        list["data"].as_array().unwrap().iter().map(|session| session["id"].as_str().unwrap()).collect();
    ids.sort_unstable();
    assert_eq!(ids, ["a", "b"]);
    let deleted = server.send("DELETE", "/v1/sessions/a", "", "");
    assert_eq!((deleted.0, &deleted.json()["deleted"]), (200, &json!(true)));
    assert_eq!(server.get("/v1/sessions/a").0, 404);
    assert!(!saved.join("a").exists());
}

#[test]
fn wrong_uses_of_conversations_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let model = checkpoint(folder.path(), "tiny/march");
    let saved = folder.path().join("sessions");
    let flags = ["--sessions", saved.to_str().unwrap()];
    let server = Server::start(&model, &flags);
    put(&server, "chat", &json!({}));
    say(&server, "chat", SAID[0], &json!({}));
    for (id, body, status, said) in [
        ("No", json!({}), 400, "a to z"),
        ("..%2fx", json!({}), 400, "a to z"),
        ("%ff", json!({}), 400, "UTF-8"),
        ("new", json!({ "turns": 1 }), 400, "`from`"),
        ("new", json!({ "from": "none" }), 404, "`none`"),
        ("new", json!({ "from": "chat", "turns": 2 }), 400, "has 1 turns"),
        ("chat", json!({ "from": "chat" }), 409, "exists"),
        ("chat", json!({ "turns": 5 }), 400, "has 1 turns"),
        ("chat", json!({ "memory": "x=1" }), 400, "x"),
        ("chat", json!({ "turn": 1 }), 400, "`turn`"),
    ] {
        let (got, answer) = put(&server, id, &body);
        let message = answer["error"]["message"].as_str().unwrap_or_default();
        assert!(got == status && message.contains(said), "{id} {body}: {got} {message}");
    }
    let chat = |more: Value| {
        let mut body =
            json!({ "session": "chat", "messages": [{ "role": "user", "content": "x" }], "max_tokens": 2 });
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let answer = server.post("/v1/chat/completions", &body);
        (answer.0, answer.1)
    };
    assert_eq!(chat(json!({ "session": "none" })).0, 404);
    assert_eq!(chat(json!({ "n": 2 })).0, 400);
    let text = server.post("/v1/completions", &json!({ "session": "chat", "prompt": "x" }));
    assert!(text.0 == 400 && text.1.contains("is a chat"), "{}", text.1);
    // While one request continues a conversation, another one cannot, and cannot change it.
    let body = json!({
        "session": "chat", "messages": [{ "role": "user", "content": "x" }], "max_tokens": 3000, "stream": true,
    })
    .to_string();
    let mut slow = server.connect();
    let head = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nconnection: close\r\n\
         content-length: {}\r\n\r\n",
        body.len()
    );
    slow.write_all((head + &body).as_bytes()).unwrap();
    // An answer has begun.
    slow.read_exact(&mut [0; 20]).unwrap();
    assert_eq!(put(&server, "chat", &json!({ "turns": 0 })).0, 409);
    assert_eq!(server.send("DELETE", "/v1/sessions/chat", "", "").0, 409);
    assert_eq!(chat(json!({})).0, 409);
    // If its client goes away, the turn is not kept, and the conversation is free again.
    drop(slow);
    let mut status = 409;
    while status == 409 {
        std::thread::sleep(std::time::Duration::from_millis(5));
        status = chat(json!({})).0;
    }
    assert_eq!((status, history(&server, "chat").as_array().unwrap().len()), (200, 2));
    // A second server may not use the folder.
    let second = std::process::Command::new(env!("CARGO_BIN_EXE_march"))
        .args(["serve", "--addr", "127.0.0.1:0", "--model"])
        .arg(&model)
        .args(flags)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&second.stderr).into_owned();
    assert!(!second.status.success() && said.contains("another server"), "{said}");
    drop(server);
    // Another model refuses the conversation and names its own.
    let other = Server::start(&checkpoint(folder.path(), "tiny/gdn"), &flags);
    let body = json!({ "session": "chat", "messages": [{ "role": "user", "content": "x" }] });
    let refused = other.post("/v1/chat/completions", &body);
    assert!(refused.0 == 409 && refused.1.contains("belongs to another model"), "{}", refused.1);
}

/// A damaged state is not used, and a damaged record is reported.
#[test]
fn damaged_conversations_never_give_wrong_text() {
    let folder = tempfile::tempdir().unwrap();
    let model = checkpoint(folder.path(), "tiny/march");
    let saved = folder.path().join("sessions");
    let flags = ["--sessions", saved.to_str().unwrap()];
    let server = Server::start(&model, &flags);
    put(&server, "talk", &json!({}));
    let expected: Vec<Value> = SAID.iter().map(|said| say(&server, "talk", said, &json!({}))).collect();
    put(&server, "talk", &json!({ "turns": 3 }));
    say(&server, "talk", SAID[3], &json!({}));
    put(&server, "copy", &json!({ "from": "talk", "turns": 3 }));
    drop(server);
    let copy = saved.join("copy");
    let names: Vec<String> = std::fs::read_dir(&copy)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    assert!(names.len() >= 2, "{names:?}");
    for name in names {
        for damage in [flip as fn(&Path), cut] {
            let whole = std::fs::read(copy.join(&name)).unwrap();
            damage(&copy.join(&name));
            let server = Server::start(&model, &flags);
            if name == "conversation.json" {
                let answer = server.get("/v1/sessions/copy");
                assert!(answer.0 == 409 && answer.1.contains("damaged"), "{}", answer.1);
                assert_eq!(put(&server, "copy", &json!({})).0, 409);
            } else {
                let answer = say(&server, "copy", SAID[3], &json!({}));
                assert_eq!(answer["choices"], expected[3]["choices"], "{name}");
                assert_eq!(cached(&answer), 0, "{name}: the text was read again, and that is reported");
                put(&server, "copy", &json!({ "turns": 3 }));
            }
            drop(server);
            if name == "conversation.json" {
                std::fs::write(copy.join(&name), &whole).unwrap();
            }
        }
    }
    cut(&copy.join("conversation.json"));
    let server = Server::start(&model, &flags);
    // Without a valid record nothing shows that the folder is the server's.
    assert_eq!(server.send("DELETE", "/v1/sessions/copy", "", "").0, 409);
    assert_eq!(put(&server, "copy", &json!({})).0, 409);
    std::fs::remove_dir_all(&copy).unwrap();
    assert_eq!(put(&server, "copy", &json!({})).0, 201);
    // A folder that someone else deleted can be deleted, too.
    std::fs::remove_dir_all(&copy).unwrap();
    assert_eq!(server.send("DELETE", "/v1/sessions/copy", "", "").0, 200);
    assert_eq!(put(&server, "copy", &json!({})).0, 201);
}

/// Only a new or empty folder, or one that a server made, is used; what others put there is not changed.
#[test]
fn nothing_that_is_not_a_conversation_is_touched() {
    let folder = tempfile::tempdir().unwrap();
    let model = checkpoint(folder.path(), "tiny/march");
    let runs = folder.path().join("runs");
    std::fs::create_dir_all(runs.join("first-run")).unwrap();
    std::fs::write(runs.join("first-run/config.toml"), "x").unwrap();
    let refused = std::process::Command::new(env!("CARGO_BIN_EXE_march"))
        .args(["serve", "--addr", "127.0.0.1:0", "--model"])
        .arg(&model)
        .arg("--sessions")
        .arg(&runs)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && said.contains("not a folder of conversations"), "{said}");
    assert_eq!(std::fs::read_dir(&runs).unwrap().count(), 1);

    let saved = folder.path().join("sessions");
    let flags = ["--sessions", saved.to_str().unwrap()];
    let server = Server::start(&model, &flags);
    put(&server, "talk", &json!({}));
    say(&server, "talk", SAID[0], &json!({}));
    drop(server);
    let strange = ["run/config.toml", ".unfinished-x/notes.txt", "notes", "talk/notes.txt"];
    for path in strange {
        std::fs::create_dir_all(saved.join(path).parent().unwrap()).unwrap();
        std::fs::write(saved.join(path), "mine").unwrap();
    }
    // Twice: what a server leaves behind must not keep the next one from starting.
    for _ in 0..2 {
        let server = Server::start(&model, &flags);
        for id in ["run", "notes", "talk"] {
            assert_eq!(server.send("DELETE", &format!("/v1/sessions/{id}"), "", "").0, 409, "{id}");
            assert_eq!(put(&server, id, &json!({})).0, 409, "{id}");
        }
        drop(server);
        for path in strange {
            assert_eq!(std::fs::read_to_string(saved.join(path)).unwrap(), "mine", "{path}");
        }
    }
    std::fs::remove_file(saved.join("talk/notes.txt")).unwrap();
    let server = Server::start(&model, &flags);
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        let mode = |path: &str| saved.join(path).metadata().unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(""), mode("talk")), (0o700, 0o700));
        assert_eq!((mode("talk/conversation.json"), mode("march-sessions.json")), (0o600, 0o600));
    }
    assert_eq!(history(&server, "talk").as_array().unwrap().len(), 1);
    assert_eq!(server.send("DELETE", "/v1/sessions/talk", "", "").0, 200);
    assert!(!saved.join("talk").exists());
}

fn flip(path: &Path) {
    let mut bytes = std::fs::read(path).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 4;
    std::fs::write(path, bytes).unwrap();
}

fn cut(path: &Path) {
    let bytes = std::fs::read(path).unwrap();
    std::fs::write(path, &bytes[..bytes.len() * 2 / 3]).unwrap();
}

#[test]
fn answers_tell_what_they_read() {
    let folder = tempfile::tempdir().unwrap();
    let server = Server::start(&checkpoint(folder.path(), "tiny/march"), &[]);
    put(&server, "talk", &json!({ "memory": "interval=16" }));
    for said in &SAID[..2] {
        let answer = say(&server, "talk", said, &json!({ "recall": true }));
        let recall = &answer["march"]["recall"];
        let anchors = recall["anchors"].as_array().unwrap();
        let numbers = |value: &Value| -> Vec<f64> {
            value.as_array().unwrap().iter().map(|number| number.as_f64().unwrap()).collect()
        };
        let (mut sums, mut at) = (numbers(&recall["null"]), 0);
        assert_eq!(sums.len(), 4);
        for (i, anchor) in anchors.iter().enumerate() {
            assert_eq!((&anchor["ordinal"], &anchor["from"]), (&json!(i + 1), &json!(at)));
            at += 16;
            assert_eq!(anchor["to"], at);
            numbers(&anchor["weights"]).iter().zip(&mut sums).for_each(|(weight, sum)| *sum += weight);
        }
        assert!(anchors.len() >= 6 && sums.iter().all(|sum| (sum - 1.0).abs() < 1e-5), "{sums:?}");
        assert!(anchors[0]["text"].as_str().unwrap().starts_with("\nUser: There"), "{}", anchors[0]);
        // What is reported does not change what is answered.
        put(
            &server,
            "plain",
            &json!({ "from": "talk", "turns": answer["march"]["turn"].as_u64().unwrap() - 1 }),
        );
        assert_eq!(say(&server, "plain", said, &json!({}))["choices"], answer["choices"]);
        server.send("DELETE", "/v1/sessions/plain", "", "");
    }
    // Another policy reads the text again and stays.
    let other = say(&server, "talk", SAID[2], &json!({ "memory": "interval=8 top-k=2", "recall": true }));
    assert_eq!(cached(&other), 0);
    assert_eq!(other["march"]["memory"]["policy"], "interval=8 top-k=2");
    assert_eq!(say(&server, "talk", SAID[3], &json!({}))["march"]["memory"]["policy"], "interval=8 top-k=2");
    // A model that does not route says so.
    let server = Server::start(&checkpoint(folder.path(), "tiny/gdn"), &[]);
    let answer = server.complete(json!({ "prompt": "x".repeat(200), "max_tokens": 9, "recall": true }));
    assert_eq!(answer["march"]["recall"], Value::Null);
    assert_eq!(server.get("/v1/models").json()["data"][0]["march"]["routes"], false);
}

#[test]
fn the_page_and_the_description_are_served() {
    let folder = tempfile::tempdir().unwrap();
    let key = folder.path().join("key");
    std::fs::write(&key, "secret").unwrap();
    let flags = ["--api-key-file", key.to_str().unwrap()];
    let server = Server::start(&checkpoint(folder.path(), "tiny/march"), &flags);
    let page = server.get("/");
    assert!(page.0 == 200 && page.1.contains("page.js") && page.1.contains("page.css"));
    assert_eq!((server.get("/page.js").0, server.get("/page.css").0), (200, 200));
    let description = server.get("/openapi.json").json();
    let paths = description["paths"].as_object().unwrap();
    for path in [
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/models",
        "/v1/sessions",
        "/v1/sessions/{id}",
        "/tokenize",
        "/detokenize",
        "/tokenizer_info",
        "/health",
        "/metrics",
    ] {
        assert!(paths.contains_key(path), "{path}");
    }
    // What was said is behind the key.
    assert_eq!(server.get("/v1/sessions").0, 401);
}

/// Without `--model`, the newest run is served; without any, one line says what to do.
#[test]
fn a_server_without_a_model_says_what_to_do() {
    let folder = tempfile::tempdir().unwrap();
    let serve = || {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_march"));
        command.args(["serve", "--addr", "192.0.2.1:1"]).current_dir(folder.path());
        String::from_utf8(command.output().unwrap().stderr).unwrap()
    };
    let said = serve();
    assert!(said.contains("using the model inside the program") && said.lines().count() <= 2, "{said}");
    for run in ["demo/march", "mine"] {
        let checkpoint = checkpoint(folder.path(), "tiny/march");
        let place = folder.path().join("runs").join(run).join("checkpoints");
        std::fs::create_dir_all(&place).unwrap();
        std::fs::rename(checkpoint, place.join("step-1")).unwrap();
        let said = serve();
        assert!(said.contains(&format!("using {}", Path::new("runs").join(run).display())), "{said}");
    }
}
