//! `march serve`: a model over HTTP, with OpenAI's interface.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::bail;
use clap::Args;
use march_server::{Access, ConnectionLimits, Options, Origin, RequestLimits, SchedulerLimits};

use super::open::{ModelArgs, newest};
use crate::address::{Address, address};
use crate::display::out::{self, note};
use crate::{interrupt, number};

/// Serve a model over HTTP, with OpenAI's interface, and a chat in the browser.
#[derive(Args)]
#[command(after_help = "Examples:
  march serve                                         # the newest run; open the address in a browser to chat
  march serve --model runs/first-run --sessions conversations
  march serve --model runs/first-run --addr 0.0.0.0:8080 --api-key-file key.txt --weights int8
  curl http://127.0.0.1:8080/v1/completions -H 'content-type: application/json' -d '{\"prompt\": \"Alice was\"}'

Paths: / (a page to chat with the model), /v1/completions, /v1/chat/completions, /v1/models, /v1/sessions,
/tokenize, /detokenize, /tokenizer_info, /health, /metrics and /openapi.json, which describes them. Requests
share the model: each step has one token of every answer and a slice of the prompts that are being read. A
prompt that begins like an earlier text continues from its state, with the same answer as if it had been read
from its beginning. A request may change the memory policy with the key `memory`, in the form of `march inspect
policies --policy`, and continue a conversation with `session`. Ctrl-C and SIGTERM finish the running requests
first, for at most --drain-seconds. Without --api-key-file, the server answers only requests for its address or a
--host-name, and no web page but its own and those of --cors.")]
pub struct Serve {
    #[command(flatten)]
    model: ModelArgs,
    /// The address to listen at, such as localhost:8080; port 0 takes a free one
    #[arg(long, value_name = "HOST:PORT", default_value = "127.0.0.1:8080", value_parser = address)]
    addr: Address,
    /// The model's name for clients [default: the name of its folder]
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
    /// A file with the key that clients must send; without it, everyone who reaches the address may use the server
    #[arg(long, value_name = "FILE")]
    api_key_file: Option<PathBuf>,
    /// A folder that keeps conversations, so that they outlive the server; without it, they are only in memory
    #[arg(long, value_name = "DIR")]
    sessions: Option<PathBuf>,
    /// A name of the server for clients, besides its address; may be given several times. Without a key, requests for
    /// other names are refused
    #[arg(long, value_name = "NAME", value_parser = host_name)]
    host_name: Vec<String>,
    /// The origin of a web page that may use the server from a browser, such as http://localhost:3000; may be given
    /// several times. Without a key, other pages are refused
    #[arg(long, value_name = "ORIGIN")]
    cors: Vec<Origin>,
    /// The most tokens of a prompt and its answer together
    #[arg(long, value_name = "N", default_value_t = 131_072, value_parser = number::count::<usize>)]
    context: usize,
    /// The most texts in one step of the model; others wait
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = number::count::<usize>)]
    batch: usize,
    /// The most prompts that wait; more are refused with status 429
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = number::count::<usize>)]
    queue: usize,
    /// The most prompt tokens per step while answers are being written; fewer are read if answers would falter
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = number::count::<usize>)]
    slice: usize,
    /// Bytes of memory for the states of earlier texts, and as many for those of conversations; 0 keeps none
    #[arg(long, value_name = "N", default_value_t = 1 << 30, value_parser = number::whole::<usize>)]
    cache_bytes: usize,
    /// The largest body of a request, in bytes
    #[arg(long, value_name = "N", default_value_t = 16 << 20, value_parser = number::count::<usize>)]
    body_bytes: usize,
    /// The most connections at once; others are refused with status 503
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = number::count::<usize>)]
    connections: usize,
    /// The longest time that a client may take to send the header of a request, in seconds
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = number::count::<u64>)]
    header_seconds: u64,
    /// The longest time that a connection may stay open without a request, or without reading its answer, in seconds
    #[arg(long, value_name = "N", default_value_t = 60, value_parser = number::count::<u64>)]
    idle_seconds: u64,
    /// The longest time that running requests may take after Ctrl-C or SIGTERM, in seconds
    #[arg(long, value_name = "N", default_value_t = 30, value_parser = number::count::<u64>)]
    drain_seconds: u64,
    /// The longest time that a request may take, in seconds
    #[arg(long, value_name = "N", default_value_t = 600, value_parser = number::count::<u64>)]
    request_seconds: u64,
    /// Print the model's name and the address, as one line of JSON, once the server listens
    #[arg(long)]
    json: bool,
}

impl Serve {
    /// Serves until it is interrupted.
    pub fn run(mut self) -> anyhow::Result<()> {
        self.model.choose()?;
        let api_key = match &self.api_key_file {
            None => None,
            Some(path) => {
                let text = super::open::text(path)?;
                let key = text.trim();
                if key.is_empty() || !key.bytes().all(|byte| byte.is_ascii_graphic()) {
                    bail!("{}: must have one key, of visible ASCII characters", path.display());
                }
                Some(key.to_string())
            }
        };
        let model = &self.model;
        let folder = newest(&model.model);
        let name = match &self.name {
            Some(name) => name.clone(),
            None => {
                let path = model.model.canonicalize().unwrap_or_else(|_| model.model.clone());
                path.file_name().map_or("march".into(), |name| name.to_string_lossy().into_owned())
            }
        };
        let opened = model.open()?;
        let stop = interrupt::listen("finishing the running requests")?;
        let scheduler = SchedulerLimits {
            texts: self.batch,
            queue: self.queue,
            slice: self.slice,
            cache_bytes: self.cache_bytes,
        };
        let host = self.addr.host;
        let options = Options {
            addr: self.addr.addr,
            name: name.clone(),
            folder,
            access: Access {
                key: api_key,
                host_names: self.host_name.into_iter().chain([host.clone()]).collect(),
                origins: self.cors,
            },
            connections: ConnectionLimits {
                connections: self.connections,
                header: Duration::from_secs(self.header_seconds),
                idle: Duration::from_secs(self.idle_seconds),
                drain: Duration::from_secs(self.drain_seconds),
            },
            sessions: self.sessions,
            body_bytes: self.body_bytes,
            request_time: Duration::from_secs(self.request_seconds),
            allowed: RequestLimits { context: self.context, prompts: self.queue },
            scheduler,
        };
        let stop = || stop.load(std::sync::atomic::Ordering::Relaxed);
        let ready = |addr: SocketAddr| {
            let url = format!("http://{host}:{}", addr.port());
            note!("serving {name} at {url}; Ctrl-C stops");
            if self.json {
                out::piece(&format!("{}\n", serde_json::json!({ "name": name, "url": url })));
            }
        };
        march_server::serve(opened.pipeline, options, stop, ready).map_err(anyhow::Error::msg)
    }
}

/// A host's name, without a port.
fn host_name(text: &str) -> Result<String, String> {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_' | b':');
    match !text.is_empty() && text.bytes().all(plain) && !text.contains("://") {
        true => Ok(text.trim_end_matches('.').into()),
        false => Err("a name is a host's name or address without a port, such as march.example".into()),
    }
}
