//! `march serve`: a model over HTTP, with OpenAI's interface.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, bail};
use clap::Args;
use march::engine::{Engine, Products};
use march_server::{Allowed, Loaded, Options, Share};

use super::bank;
use super::open::{ModelArgs, Opened, newest};
use crate::device::on_device;
use crate::display::out::{self, note};
use crate::{interrupt, number};

/// Serve a model over HTTP, with OpenAI's interface, and a chat in the browser.
#[derive(Args)]
#[command(mut_arg("model", |arg| {
    let help = "A checkpoint folder, or the folder of a run, whose newest checkpoint is used [default: the newest run \
                in runs/, or the demo's model]";
    arg.required(false).default_value(RUNS).hide_default_value(true).help(help)
}))]
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
first.")]
pub struct Serve {
    #[command(flatten)]
    model: ModelArgs,
    /// The address to listen at; port 0 takes a free one
    #[arg(long, value_name = "HOST:PORT", default_value = "127.0.0.1:8080")]
    addr: SocketAddr,
    /// The model's name for clients [default: the name of its folder]
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
    /// A file with the key that clients must send; without it, everyone who reaches the address may use the server
    #[arg(long, value_name = "FILE")]
    api_key_file: Option<PathBuf>,
    /// A folder that keeps conversations, so that they outlive the server; without it, they are only in memory
    #[arg(long, value_name = "DIR")]
    sessions: Option<PathBuf>,
    /// The web page that may use the server from a browser, such as http://localhost:3000, or `*` [default: none]
    #[arg(long, value_name = "ORIGIN")]
    cors: Option<String>,
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
    /// The longest time that a request may take, in seconds
    #[arg(long, value_name = "N", default_value_t = 600, value_parser = number::count::<u64>)]
    request_seconds: u64,
    /// Print the model's name and the address, as one line of JSON, once the server listens
    #[arg(long)]
    json: bool,
}

impl Serve {
    /// Serves until it is interrupted.
    pub fn run(self) -> anyhow::Result<()> {
        on_device!(self.model.engine, Products::BatchInvariant, |engine| self.serve(engine))
    }

    fn serve<E: Engine>(self, engine: E) -> anyhow::Result<()> {
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
        let model = match self.model.model == Path::new(RUNS) && newest(Path::new(RUNS)) == Path::new(RUNS) {
            true => self.model.of(&newest_run(Path::new(RUNS))?),
            false => self.model.clone(),
        };
        let folder = newest(&model.model);
        let name = match &self.name {
            Some(name) => name.clone(),
            None => {
                let path = model.model.canonicalize().unwrap_or_else(|_| model.model.clone());
                path.file_name().map_or("march".into(), |name| name.to_string_lossy().into_owned())
            }
        };
        let opened = model.open(&engine)?;
        let stop = interrupt::listen("finishing the running requests")?;
        let tag = bank::tag(&opened)?;
        let Opened { model, parameters, tokenizer, policy, .. } = opened;
        let loaded = Loaded { engine, model, parameters, tokenizer, policy, tag };
        let share =
            Share { texts: self.batch, queue: self.queue, slice: self.slice, cache_bytes: self.cache_bytes };
        let options = Options {
            addr: self.addr,
            name: name.clone(),
            folder,
            api_key,
            cors: self.cors,
            sessions: self.sessions,
            body_bytes: self.body_bytes,
            request_time: Duration::from_secs(self.request_seconds),
            allowed: Allowed { context: self.context, prompts: self.queue },
            share,
        };
        let stop = || stop.load(std::sync::atomic::Ordering::Relaxed);
        let ready = |addr| {
            note!("serving {name} at http://{addr}; Ctrl-C stops");
            if self.json {
                let line = serde_json::json!({ "name": name, "url": format!("http://{addr}") });
                out::piece(&format!("{line}\n"));
            }
        };
        march_server::serve(loaded, options, stop, ready)
            .map_err(anyhow::Error::msg)
            .context("the server stopped")
    }
}

/// Where `march train` and `march demo` write.
const RUNS: &str = "runs";

/// The run with the newest checkpoint; the demo's model only if there is no other.
fn newest_run(runs: &Path) -> anyhow::Result<PathBuf> {
    let folders = |folder: &Path| -> Vec<PathBuf> {
        std::fs::read_dir(folder).into_iter().flatten().filter_map(|entry| Some(entry.ok()?.path())).collect()
    };
    let written = |run: &PathBuf| {
        let checkpoint = Some(newest(run)).filter(|checkpoint| checkpoint != run)?;
        checkpoint.metadata().and_then(|metadata| metadata.modified()).ok()
    };
    let latest = |runs: Vec<PathBuf>| runs.into_iter().filter_map(|run| Some((written(&run)?, run))).max();
    let own = folders(runs);
    let demos = own.iter().map(|folder| folder.join("march")).collect();
    match latest(own.clone()).or_else(|| latest(demos)) {
        Some((_, run)) => {
            note!("no --model was given: serving {}", run.display());
            Ok(run)
        }
        None => bail!(
            "there is no model in {RUNS}/: train one with `march train tiny/march`, or name one with --model"
        ),
    }
}
