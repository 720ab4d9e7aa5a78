//! Starts `march serve` and talks to it over a socket.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use serde_json::Value;

/// A running server, which is killed when it goes out of scope.
pub struct Server {
    pub process: Child,
    addr: String,
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// An answer: its status and its body.
pub struct Answer(pub u16, pub String);

impl Answer {
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.1).unwrap_or_else(|error| panic!("{error}: {}", self.1))
    }
}

/// A checkpoint with random weights, and without an end-of-text token, so that texts end where requests say.
pub fn checkpoint(folder: &Path, preset: &str) -> PathBuf {
    let output = folder.join(preset.replace('/', "-"));
    let config =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs").join(preset).with_extension("toml");
    let text = std::fs::read_to_string(config).unwrap().replace("vocab_size = 257", "vocab_size = 256");
    let config = output.with_extension("toml");
    std::fs::write(&config, text).unwrap();
    let made = Command::new(env!("CARGO_BIN_EXE_march"))
        .args(["init", "--config"])
        .arg(&config)
        .arg("--output")
        .arg(&output)
        .output()
        .unwrap();
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    output
}

impl Server {
    pub fn start(model: &Path, flags: &[&str]) -> Self {
        let mut process = Command::new(env!("CARGO_BIN_EXE_march"))
            .args(["serve", "--addr", "127.0.0.1:0", "--threads", "1", "--name", "tiny", "--model"])
            .arg(model)
            .args(flags)
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        let mut said = BufReader::new(process.stderr.take().unwrap());
        while !line.contains("http://") {
            line.clear();
            assert!(said.read_line(&mut line).unwrap() > 0, "the server did not start");
        }
        // Keep reading, so that the server never waits for its log.
        std::thread::spawn(move || std::io::copy(&mut said, &mut std::io::sink()));
        let addr = line.split("http://").nth(1).unwrap().split(';').next().unwrap().to_string();
        Self { process, addr }
    }

    pub fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(&self.addr).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
        stream
    }

    pub fn send(&self, method: &str, path: &str, headers: &str, body: &str) -> Answer {
        let mut stream = self.connect();
        let length = body.len();
        let host = if headers.starts_with("host:") { "" } else { "host: localhost\r\n" };
        let request = format!(
            "{method} {path} HTTP/1.1\r\n{host}connection: close\r\n{headers}content-length: {length}\r\n\r\n{body}"
        );
        stream.write_all(request.as_bytes()).unwrap();
        let mut answer = Vec::new();
        // A server that refuses a large body closes the connection before it has read it.
        let _ = stream.read_to_end(&mut answer);
        let answer = String::from_utf8(answer).unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap_or_else(|| panic!("no answer: {answer:?}"));
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        let body = if head.to_lowercase().contains("transfer-encoding: chunked") {
            unchunked(body)
        } else {
            body.into()
        };
        Answer(status, body)
    }

    pub fn post(&self, path: &str, body: &Value) -> Answer {
        self.send("POST", path, "content-type: application/json\r\n", &body.to_string())
    }

    pub fn get(&self, path: &str) -> Answer {
        self.send("GET", path, "", "")
    }

    /// The answer to a completion that must succeed.
    pub fn complete(&self, body: Value) -> Value {
        let answer = self.post("/v1/completions", &body);
        assert_eq!(answer.0, 200, "{}", answer.1);
        answer.json()
    }
}

/// The content of a body in chunks.
fn unchunked(mut body: &str) -> String {
    let mut text = String::new();
    while let Some((size, rest)) = body.split_once("\r\n") {
        let size = usize::from_str_radix(size.trim(), 16).unwrap();
        text += &rest[..size];
        body = rest[size..].strip_prefix("\r\n").unwrap_or("");
    }
    text
}
