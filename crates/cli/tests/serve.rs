//! `march serve` over a real socket: answers, batches, the prefix cache, streams, refusals, and how it stops.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Command, Stdio};
use std::time::Duration;

use serde_json::{Value, json};

use crate::server::{Server, checkpoint};

fn text(answer: &Value) -> &str {
    answer["choices"][0]["text"].as_str().unwrap()
}

fn cached(answer: &Value) -> u64 {
    answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap()
}

/// The parts of a stream, which must end as streams do.
fn events(stream: &str) -> Vec<Value> {
    let mut parts: Vec<&str> = stream.lines().filter_map(|line| line.strip_prefix("data: ")).collect();
    assert_eq!(parts.pop(), Some("[DONE]"));
    parts.into_iter().map(|part| serde_json::from_str(part).unwrap()).collect()
}

#[test]
fn completions_chats_and_tokens() {
    let folder = tempfile::tempdir().unwrap();
    let server = Server::start(&checkpoint(folder.path(), "tiny/march"), &[]);
    let answer =
        server.complete(json!({ "model": "tiny", "prompt": "Alice was", "max_tokens": 12, "seed": 3 }));
    assert_eq!(answer["object"], "text_completion");
    assert_eq!(answer["choices"][0]["finish_reason"], "length");
    assert_eq!(
        (&answer["usage"]["prompt_tokens"], &answer["usage"]["completion_tokens"]),
        (&json!(9), &json!(12))
    );
    // The same seed gives the same text, by ids, too; another seed another.
    let ids = server.post("/tokenize", &json!({ "prompt": "Alice was", "add_special_tokens": false })).json();
    assert_eq!(ids["tokens"], json!("Alice was".bytes().collect::<Vec<_>>()));
    let same = server.complete(json!({ "prompt": [ids["tokens"]], "max_tokens": 12, "seed": 3 }));
    assert_eq!(text(&same), text(&answer));
    let other = server.complete(json!({ "prompt": "Alice was", "max_tokens": 12, "seed": 4 }));
    assert_ne!(text(&other), text(&answer));
    assert_eq!(server.post("/detokenize", &json!({ "tokens": [65, 108] })).json(), json!({ "prompt": "Al" }));
    // Several prompts and choices, in order; the choices of a prompt have seeds of their own.
    let many = server.complete(json!({ "prompt": ["Alice was", "x"], "n": 2, "max_tokens": 12, "seed": 3 }));
    let texts: Vec<&str> =
        many["choices"].as_array().unwrap().iter().map(|c| c["text"].as_str().unwrap()).collect();
    assert_eq!((texts.len(), texts[0], texts[1]), (4, text(&answer), text(&other)));
    // A stop string ends the text before it.
    let whole = text(&answer);
    let cut = whole.char_indices().nth(4).unwrap().0;
    let stop: String = whole[cut..].chars().take(2).collect();
    let stopped =
        server.complete(json!({ "prompt": "Alice was", "max_tokens": 12, "seed": 3, "stop": [stop] }));
    assert_eq!(text(&stopped), &whole[..whole.find(&stop).unwrap()]);
    assert_eq!(stopped["choices"][0]["finish_reason"], "stop");

    let chat = json!({ "messages": [{ "role": "user", "content": "Hi" }], "max_tokens": 5, "logprobs": true, "top_logprobs": 2 });
    let chat = server.post("/v1/chat/completions", &chat).json();
    assert_eq!(
        (&chat["object"], &chat["choices"][0]["message"]["role"]),
        (&json!("chat.completion"), &json!("assistant"))
    );
    let tokens = chat["choices"][0]["logprobs"]["content"].as_array().unwrap();
    assert!(
        !tokens.is_empty() && tokens.iter().all(|token| token["top_logprobs"].as_array().unwrap().len() == 2)
    );
    let models = server.get("/v1/models").json();
    assert_eq!(models["data"][0]["id"], "tiny");
    assert_eq!(server.get("/v1/models/tiny").json(), models["data"][0]);
    let other = server.get("/v1/models/an/other");
    assert_eq!((other.0, &other.json()["error"]["type"]), (404, &json!("not_found_error")));
    assert_eq!(server.get("/tokenizer_info").json()["eos_token"], "<|endoftext|>");
    assert_eq!(server.get("/health").json()["status"], "ok");
    let metrics = server.get("/metrics").1;
    assert!(
        metrics.contains("march_answers_total{status=\"2xx\"}")
            && metrics.contains("march_generated_tokens_total")
    );
}

/// The contract of lm-evaluation-harness: as many entries as prompt tokens and one more; the best alternative is there.
#[test]
fn echoed_prompts_have_log_probabilities() {
    let folder = tempfile::tempdir().unwrap();
    let server = Server::start(&checkpoint(folder.path(), "tiny/gdn"), &["--slice", "64"]);
    let prompt: Vec<u64> = (0..150).map(|i| (i * 7 + i / 3) % 256).collect();
    for length in [1, 2, 64, 65, 150] {
        let body = json!({
            "model": "tiny", "prompt": [prompt[..length]], "temperature": 0, "max_tokens": 1, "logprobs": 1,
            "seed": 1234, "echo": true,
        });
        let answer = server.complete(body);
        let logprobs = &answer["choices"][0]["logprobs"];
        let list = |key: &str| logprobs[key].as_array().unwrap().clone();
        for key in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
            assert_eq!(list(key).len(), length + 1, "{key}");
        }
        assert!(list("token_logprobs")[0].is_null());
        for (own, top) in list("token_logprobs").iter().zip(list("top_logprobs")).skip(1) {
            let best = top
                .as_object()
                .unwrap()
                .values()
                .map(|value| value.as_f64().unwrap())
                .fold(f64::MIN, f64::max);
            assert!(own.as_f64().unwrap() <= best, "{own} {top}");
        }
        // The last token is the most probable one.
        let last = list("top_logprobs")[length].as_object().unwrap().values().next().unwrap().clone();
        assert_eq!(list("token_logprobs")[length], last);
    }
    let only = server.complete(json!({ "prompt": "abc", "max_tokens": 0, "echo": true }));
    assert_eq!((text(&only), &only["usage"]["completion_tokens"]), ("abc", &json!(0)));
}

/// A prompt that begins like an earlier text is not read again, and gets the same answer as from a server without cache.
#[test]
fn warm_answers_equal_cold_ones() {
    let folder = tempfile::tempdir().unwrap();
    let story: String = (0..60).map(|i| format!("Sentence {i} of the story. ")).collect();
    for preset in [
        "tiny/march",
        "tiny/gdn",
        "tiny/log-linear",
        "tiny/transformer",
        "tiny/memory-caching",
        "tiny/hybrid",
    ] {
        let model = checkpoint(folder.path(), preset);
        let (warm, cold) = (Server::start(&model, &[]), Server::start(&model, &["--cache-bytes", "0"]));
        let ask = |server: &Server, prompt: &str| {
            server.complete(json!({ "prompt": prompt, "max_tokens": 9, "logprobs": 1, "seed": 5 }))
        };
        let prompts = [
            story.clone(),
            // The same, longer, and two that part from it in the middle.
            story.clone(),
            format!("{story}And then?"),
            format!("{} But now", &story[..900]),
            format!("{} And so", &story[..900]),
        ];
        let mut hits = Vec::new();
        for prompt in &prompts {
            let (first, second) = (ask(&warm, prompt), ask(&cold, prompt));
            assert_eq!(first["choices"], second["choices"], "{preset}: {:?}", &prompt[prompt.len() - 20..]);
            assert_eq!(cached(&second), 0);
            hits.push(cached(&first));
        }
        assert_eq!(hits[0], 0, "{preset}");
        assert!(hits[1] >= 1472 && hits[2] >= 1472 && hits[4] >= 896, "{preset}: {hits:?}");
        if preset == "tiny/march" {
            assert!(hits[3] >= 832, "an anchor is enough to continue from: {hits:?}");
        }
    }
}

/// A prompt gets the same answer whatever kind of request has read it before, in every combination: where scoring,
/// streams, stop strings, several choices and conversations end their calls must not show.
#[test]
fn answers_do_not_depend_on_what_was_asked_before() {
    let kinds: [(&str, Value); 8] = [
        ("plain", json!({ "max_tokens": 8 })),
        ("scored", json!({ "max_tokens": 3, "echo": true })),
        ("alternatives", json!({ "max_tokens": 2, "echo": true, "logprobs": 5 })),
        ("only scored", json!({ "max_tokens": 0, "echo": true })),
        ("stream", json!({ "max_tokens": 3, "stream": true })),
        ("choices", json!({ "max_tokens": 3, "n": 2 })),
        ("stop", json!({ "max_tokens": 20, "stop": ["e", "t", "a", "\u{0}"] })),
        ("session", json!({ "max_tokens": 3, "session": "s" })),
    ];
    let folder = tempfile::tempdir().unwrap();
    for preset in [
        "tiny/log-linear",
        "tiny/march",
        "tiny/gdn",
        "tiny/transformer",
        "tiny/memory-caching",
        "tiny/hybrid",
    ] {
        let model = checkpoint(folder.path(), preset);
        let (warm, cold) = (Server::start(&model, &[]), Server::start(&model, &["--cache-bytes", "0"]));
        let ask = |server: &Server, prompt: &[usize], (kind, changes): &(&str, Value)| {
            let mut body = json!({ "prompt": prompt, "temperature": 0, "logprobs": 1 });
            for (key, value) in changes.as_object().unwrap() {
                body[key] = value.clone();
            }
            if *kind == "session" {
                server.send("DELETE", "/v1/sessions/s", "", "");
                assert_eq!(server.send("PUT", "/v1/sessions/s", "", "").0, 201);
            }
            let answer = server.post("/v1/completions", &body);
            assert_eq!(answer.0, 200, "{}", answer.1);
            match *kind {
                "stream" => {
                    json!(events(&answer.1).iter().map(|event| &event["choices"]).collect::<Vec<_>>())
                }
                _ => answer.json()["choices"].take(),
            }
        };
        for (i, first) in kinds.iter().enumerate() {
            for (j, second) in kinds.iter().enumerate() {
                // On the grid of calls, and between two of its points.
                for length in [128, 130] {
                    // Anything but a repeated pattern: its states would be alike wherever calls end.
                    let prompt: Vec<usize> =
                        (0..length).map(|k| (k * k * 31 + k * (7 * i + 3) + 17 * j) % 127 + 1).collect();
                    ask(&warm, &prompt, first);
                    let (got, expected) = (ask(&warm, &prompt, second), ask(&cold, &prompt, second));
                    assert_eq!(got, expected, "{preset}, {length}: {} after {}", second.0, first.0);
                }
            }
        }
    }
}

/// Many requests at once, some of which go away: every answer is that of a server with nothing else to do.
#[test]
fn answers_do_not_depend_on_the_batch() {
    let folder = tempfile::tempdir().unwrap();
    let model = checkpoint(folder.path(), "tiny/march");
    let server = Server::start(&model, &["--batch", "5"]);
    let body = |i: usize| {
        let prompt = "It was the best of times. ".repeat(1 + i * i % 23);
        json!({ "prompt": prompt, "max_tokens": 4 + i, "seed": i, "temperature": 0.5 + i as f64 / 8.0, "logprobs": 0 })
    };
    let alone: Vec<Value> = (0..12).map(|i| server.complete(body(i))["choices"].take()).collect();
    let server = Server::start(&model, &["--batch", "5"]);
    std::thread::scope(|scope| {
        for round in 0..3 {
            for (i, expected) in alone.iter().enumerate() {
                let server = &server;
                scope.spawn(move || {
                    if (i + round) % 4 == 0 {
                        // A client that goes away.
                        let text = body(i).to_string();
                        let head = format!(
                            "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n\
                             content-length: {}\r\n\r\n",
                            text.len()
                        );
                        let mut stream = server.connect();
                        stream.write_all((head + &text).as_bytes()).unwrap();
                    }
                    assert_eq!(&server.complete(body(i))["choices"], expected);
                });
            }
        }
    });
    // The places of those that went away become free again.
    let free =
        |text: &str| text.contains("march_active_texts 0\n") && text.contains("march_waiting_requests 0\n");
    let mut metrics = String::new();
    for _ in 0..100 {
        metrics = server.get("/metrics").1;
        if free(&metrics) {
            break;
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    assert!(free(&metrics), "{metrics}");
}

#[test]
fn streams_give_the_same_text() {
    let folder = tempfile::tempdir().unwrap();
    let server = Server::start(&checkpoint(folder.path(), "tiny/march"), &[]);
    let mut body = json!({ "prompt": "Alice was", "max_tokens": 20, "seed": 1, "n": 2, "logprobs": 1 });
    let whole = server.complete(body.clone());
    body["stream"] = json!(true);
    body["stream_options"] = json!({ "include_usage": true });
    let stream = server.post("/v1/completions", &body).1;
    let (mut texts, mut reasons, mut usage) = ([String::new(), String::new()], 0, Value::Null);
    for part in events(&stream) {
        for choice in part["choices"].as_array().unwrap() {
            texts[choice["index"].as_u64().unwrap() as usize] += choice["text"].as_str().unwrap();
            reasons += usize::from(choice["finish_reason"] == "length");
        }
        if !part["usage"].is_null() {
            usage = part["usage"].clone();
        }
    }
    assert_eq!((&texts[0][..], &texts[1][..]), (text(&whole), whole["choices"][1]["text"].as_str().unwrap()));
    assert_eq!((reasons, &usage["completion_tokens"]), (2, &json!(40)));
    let chat = json!({ "messages": [{ "role": "user", "content": "Hi" }], "max_tokens": 3, "stream": true });
    let stream = server.post("/v1/chat/completions", &chat).1;
    assert!(
        stream.contains("\"role\":\"assistant\"") && stream.trim_end().ends_with("data: [DONE]"),
        "{stream}"
    );
}

#[test]
fn wrong_requests_are_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let key = folder.path().join("key");
    std::fs::write(&key, "secret\n").unwrap();
    let flags = ["--api-key-file", key.to_str().unwrap(), "--context", "100", "--body-bytes", "4096"];
    let server = Server::start(&checkpoint(folder.path(), "tiny/march"), &flags);
    assert_eq!(server.get("/v1/models").0, 401);
    assert_eq!(server.send("GET", "/v1/models", "authorization: Bearer Secret\r\n", "").0, 401);
    assert_eq!(server.get("/health").0, 200);
    let ask = |method: &str, path: &str, body: &str| {
        let answer = server.send(method, path, "authorization: Bearer secret\r\n", body);
        let error = if answer.0 == 200 { Value::Null } else { answer.json()["error"].take() };
        (
            answer.0,
            error["param"].as_str().unwrap_or("").to_string(),
            error["message"].as_str().unwrap_or("").to_string(),
        )
    };
    assert_eq!(ask("GET", "/v1/models", "").0, 200);
    assert_eq!(server.send("GET", "/v1/models", "authorization: bearer secret\r\n", "").0, 200);
    assert_eq!(ask("POST", "/detokenize", r#"{"tokens": [65, 99999]}"#).0, 400);
    assert_eq!(ask("GET", "/nothing", "").0, 404);
    assert_eq!(ask("GET", "/v1/completions", "").0, 405);
    let long = format!("{{\"prompt\": \"{}\"}}", "x".repeat(5000));
    assert_eq!(ask("POST", "/v1/completions", &long).0, 413);
    for (body, key, said) in [
        ("{", "body", "not JSON"),
        ("[]", "body", "JSON object"),
        ("{}", "prompt", "is missing"),
        (r#"{"prompt": []}"#, "prompt", "empty list"),
        (r#"{"prompt": [1, 999]}"#, "prompt", "999"),
        (r#"{"prompt": [[1], 2]}"#, "prompt", "must be a string"),
        (r#"{"prompt": "a", "max_tokens": 100}"#, "prompt", "--context"),
        (r#"{"prompt": "a", "max_tokens": 0}"#, "max_tokens", "nothing to answer"),
        (r#"{"prompt": "a", "max_tokens": -1}"#, "max_tokens", "whole number from 0 to 100"),
        (r#"{"prompt": "a", "max_tokens": 1e30}"#, "max_tokens", "--context"),
        (r#"{"prompt": "a", "prompt": "b"}"#, "body", "twice"),
        (r#"{"prompt": "a", "temperature": -1}"#, "temperature", "0 or more"),
        (r#"{"prompt": "a", "top_p": 2}"#, "top_p", "at most 1"),
        (r#"{"prompt": "a", "repetition_penalty": 0}"#, "repetition_penalty", "above 0"),
        (r#"{"prompt": "a", "memory": "interval=1 interval=2"}"#, "memory", "`interval` is given twice"),
        (r#"{"prompt": "a", "n": 0}"#, "n", "from 1"),
        (r#"{"prompt": "a", "stop": 3}"#, "stop", "strings"),
        (
            &format!(r#"{{"prompt": "a", "stop": [{}"a"]}}"#, r#""a","#.repeat(32)),
            "stop",
            "at most 32 strings",
        ),
        (&format!(r#"{{"prompt": "a", "stop": "{}"}}"#, "a".repeat(1025)), "stop", "1024 bytes"),
        (r#"{"prompt": "a", "seed": 1.5}"#, "seed", "whole number"),
        (r#"{"prompt": "a", "suffix": "b"}"#, "suffix", "not supported"),
        (r#"{"prompt": "a", "logit_bias": {"1": 2}}"#, "logit_bias", "not supported"),
        (r#"{"prompt": "a", "temprature": 1}"#, "temprature", "not a key"),
        (r#"{"prompt": "a", "memory": "interval=x"}"#, "memory", "interval"),
    ] {
        let (status, param, message) = ask("POST", "/v1/completions", body);
        assert_eq!((status, param.as_str()), (400, key), "{body}: {message}");
        assert!(message.contains(said), "{body}: {message}");
    }
    let (status, _, message) = ask("POST", "/v1/completions", r#"{"prompt": "a", "model": "other"}"#);
    assert!(status == 404 && message.contains("`other`"), "{message}");
    let (status, ..) = ask(
        "POST",
        "/v1/completions",
        r#"{"prompt": "a", "user": "u", "presence_penalty": 0, "memory": "interval=8"}"#,
    );
    assert_eq!(status, 200);
    for (body, key, said) in [
        (r#"{"messages": [{"role": "robot", "content": "x"}]}"#, "messages", "`robot`"),
        (r#"{"messages": [{"role": "tool", "content": "x"}]}"#, "messages", "no chat template"),
        (r#"{"messages": [{"role": "assistant", "tool_calls": [1]}]}"#, "messages", "`tool_calls`"),
        (
            r#"{"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function", "function": {"name": "f"}}]}"#,
            "tools",
            "chat template has no form",
        ),
    ] {
        let (status, param, message) = ask("POST", "/v1/chat/completions", body);
        assert_eq!((status, param.as_str()), (400, key), "{body}: {message}");
        assert!(message.contains(said), "{body}: {message}");
    }
}

/// Without a key, web pages of other origins, forms, and names that lead here without being the server's are refused.
#[test]
fn other_origins_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let model = checkpoint(folder.path(), "tiny/march");
    let flags =
        ["--cors", "http://localhost:3000", "--cors", "https://app.example", "--host-name", "my.host"];
    let server = Server::start(&model, &flags);
    let host = |host: &str| server.send("GET", "/v1/sessions", &format!("host: {host}\r\n"), "").0;
    for own in ["127.0.0.1", "127.0.0.1:1", "localhost:8080", "LOCALHOST", "my.host", "My.Host:80"] {
        assert_eq!(host(own), 200, "{own}");
    }
    for other in ["evil.example", "127.0.0.1.evil.example", "127.0.0.2", "localhost.evil:80", ""] {
        assert!([400, 403].contains(&host(other)), "{other}");
    }
    let body = r#"{"prompt": "a", "max_tokens": 1}"#;
    let post = |headers: &str| server.send("POST", "/v1/completions", headers, body).0;
    assert_eq!(post("content-type: application/json; charset=utf-8\r\n"), 200);
    for other in ["", "content-type: text/plain\r\n", "content-type: text/plain; x=application/json\r\n"] {
        assert_eq!(post(other), 415, "{other}");
    }
    let page = |origin: &str| post(&format!("content-type: application/json\r\norigin: {origin}\r\n"));
    for own in ["http://localhost", "http://localhost:3000", "https://app.example"] {
        assert_eq!(page(own), 200, "{own}");
    }
    for other in ["https://evil.example", "null", "http://localhost:3001", "http://app.example", "localhost"]
    {
        assert_eq!(page(other), 403, "{other}");
        let asked = server.send("OPTIONS", "/v1/completions", &format!("origin: {other}\r\n"), "");
        assert_eq!(asked.0, 403, "{other}");
    }
    assert_eq!(server.send("OPTIONS", "/v1/completions", "origin: https://app.example\r\n", "").0, 204);
    for wrong in ["*", "localhost", "http://x/path"] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_march"));
        let refused = command.args(["serve", "--cors", wrong, "--model"]).arg(&model).output().unwrap();
        let said = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(!refused.status.success() && said.contains("not an origin"), "{said}");
    }
}

/// A client that hangs in its header is disconnected, does not keep the server from ending, and one that only closes its
/// sending side gets its answer.
#[cfg(unix)]
#[test]
fn clients_that_hang_are_disconnected() {
    let folder = tempfile::tempdir().unwrap();
    let model = checkpoint(folder.path(), "tiny/march");
    let mut server = Server::start(&model, &["--header-seconds", "1", "--idle-seconds", "2"]);
    let hang = |text: &str| {
        let mut stream = server.connect();
        stream.write_all(text.as_bytes()).unwrap();
        stream
    };
    let mut half = hang("GET /health HTTP/1.1\r\nhos");
    let mut idle = hang("GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n");
    let body = json!({ "prompt": "a", "max_tokens": 2500 }).to_string();
    let head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json";
    let mut closed = hang(&format!("{head}\r\ncontent-length: {}\r\n\r\n{body}", body.len()));
    closed.shutdown(std::net::Shutdown::Write).unwrap();
    let read = |stream: &mut TcpStream| {
        let mut text = Vec::new();
        stream.read_to_end(&mut text).unwrap();
        String::from_utf8(text).unwrap()
    };
    assert!(read(&mut half).contains("408"));
    assert!(read(&mut idle).contains("\"status\":\"ok\""));
    let answer = read(&mut closed);
    assert!(answer.contains("\"completion_tokens\":2500"), "{answer}");
    let _hanging: Vec<_> = (0..50).map(|_| hang("GET / HT")).collect();
    let id = server.process.id().to_string();
    assert!(Command::new("kill").args(["-TERM", &id]).status().unwrap().success());
    assert!(server.process.wait().unwrap().success());
}

/// A host name is looked up; the server names it.
#[test]
fn the_address_may_be_a_host_name() {
    let folder = tempfile::tempdir().unwrap();
    let model = checkpoint(folder.path(), "tiny/gdn");
    let serve = |addr: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_march"));
        command.args(["serve", "--addr", addr, "--threads", "1", "--model"]).arg(&model);
        command.stderr(Stdio::piped()).spawn().unwrap()
    };
    let mut process = serve("localhost:0");
    let mut line = String::new();
    let read = BufReader::new(process.stderr.take().unwrap()).read_line(&mut line);
    let port = line.split("http://localhost:").nth(1).and_then(|rest| rest.split(';').next()?.parse().ok());
    let connected = port.map(|port: u16| TcpStream::connect(("127.0.0.1", port)));
    process.kill().unwrap();
    process.wait().unwrap();
    assert!(read.is_ok() && connected.is_some_and(|connected| connected.is_ok()), "{line}");
    let out = serve("no-such-host.invalid:0").wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&out.stderr);
    assert!(!out.status.success(), "{said}");
    assert!(said.contains("the host `no-such-host.invalid` is not known"), "{said}");
}

/// A full queue is answered with 429, and a signal lets running requests finish.
#[cfg(unix)]
#[test]
fn queues_are_limited_and_signals_drain() {
    let folder = tempfile::tempdir().unwrap();
    let model = checkpoint(folder.path(), "tiny/march");
    let mut server = Server::start(&model, &["--batch", "1", "--queue", "1"]);
    let statuses: Vec<u16> = std::thread::scope(|scope| {
        let server = &server;
        let ask = move || server.post("/v1/completions", &json!({ "prompt": "a", "max_tokens": 400 })).0;
        let all: Vec<_> = (0..8).map(|_| scope.spawn(ask)).collect();
        all.into_iter().map(|one| one.join().unwrap()).collect()
    });
    assert!(statuses.contains(&200) && statuses.contains(&429), "{statuses:?}");
    assert!(statuses.iter().all(|status| [200, 429].contains(status)), "{statuses:?}");
    let too_many = server.post("/v1/completions", &json!({ "prompt": ["a", "b"], "max_tokens": 1 }));
    assert_eq!(too_many.0, 400, "{}", too_many.1);
    let id = server.process.id().to_string();
    let answer = std::thread::scope(|scope| {
        let server = &server;
        let body = json!({ "prompt": "a", "max_tokens": 2000 });
        let running = scope.spawn(move || server.post("/v1/completions", &body));
        std::thread::sleep(Duration::from_millis(300));
        assert!(Command::new("kill").args(["-TERM", &id]).status().unwrap().success());
        running.join().unwrap()
    });
    assert_eq!(answer.json()["usage"]["completion_tokens"], 2000);
    assert!(server.process.wait().unwrap().success());
}
