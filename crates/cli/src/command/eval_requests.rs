//! `march eval requests`: answers requests from a file, for harnesses written in another language.

use std::ops::ControlFlow;
use std::path::PathBuf;

use anyhow::{Context, bail};
use clap::Args;
use march_lab::eval::{Answer, Encoded, Entry, Event, Journal, Request, Scheduler};

use super::open::ModelArgs;
use crate::display::out::{note, say};
use crate::display::{Progress, thousands};
use crate::interrupt;
use crate::output::{Kind, Output};

/// Answer requests from a file, one per line, in order.
#[derive(Args)]
#[command(after_help = "Requests, one JSON object per line:
  {\"kind\": \"loglikelihood\", \"context\": \"The sky is\", \"continuations\": [\" blue\", \" green\"]}
  {\"kind\": \"loglikelihood_rolling\", \"text\": \"Once upon a time\"}
  {\"kind\": \"generate_until\", \"context\": \"Q: 1 + 1?\\nA:\", \"until\": [\"\\n\"], \"max_tokens\": 16}

Answers, one per line, in the order of the requests:
  {\"loglikelihood\": [{\"loglikelihood\": -2.1, \"is_greedy\": false, \"tokens\": 1}, …]}
  {\"loglikelihood_rolling\": {\"loglikelihood\": -31.7, \"is_greedy\": false, \"tokens\": 16}}
  {\"generate_until\": \" 2\"}

Generated text is greedy and contains neither the prompt nor the stop string. Spaces at the end of a context are scored
with the continuation. After an interruption the same command resumes.")]
pub struct EvalRequests {
    /// The requests
    #[arg(value_name = "FILE.jsonl")]
    requests: PathBuf,
    #[command(flatten)]
    model: ModelArgs,
    /// The answers
    #[arg(long, value_name = "FILE.jsonl")]
    output: PathBuf,
    /// Answer an invalid request with {"error": "…"} instead of stopping
    #[arg(long)]
    skip_bad: bool,
}

impl EvalRequests {
    /// Answers all requests.
    pub fn run(mut self) -> anyhow::Result<()> {
        self.model.choose()?;
        let shown = self.requests.display();
        let text = super::open::text(&self.requests)?;
        let mut inputs = self.model.inputs();
        inputs.push(&self.requests);
        let output = Output::check(&self.output, Kind::Answers, &inputs)?;
        let opened = self.model.open()?;
        let vocabulary = opened.model().config().vocab_size;
        let mut lines = Vec::new();
        for (number, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
            let read = serde_json::from_str::<Request>(line).context("is not a valid request");
            let encoded = read.and_then(|request| {
                let encoded = Encoded::new(&request, opened.tokenizer(), vocabulary)?;
                Ok((request, encoded))
            });
            match encoded {
                Ok((request, encoded)) => lines.push(Ok((request, encoded))),
                Err(error) if self.skip_bad => lines.push(Err(format!("line {}: {error:#}", number + 1))),
                Err(error) => {
                    bail!("{shown}: line {}: {error:#}; fix it, or use --skip-bad", number + 1);
                }
            }
        }
        if lines.is_empty() {
            bail!("{shown}: has no requests");
        }
        let asked_of = format!(
            "model {}, tokenizer {}, policy {:?}",
            opened.fingerprint()?,
            &opened.tokenizer().hash()[..16],
            opened.policy()
        );
        let mut journal = Journal::open(&Journal::path_of(&self.output), &asked_of)?;
        if !journal.is_empty() {
            note!("resuming: {} requests were answered before", thousands(journal.len()));
        }
        let mut answers: Vec<Option<Answer>> = vec![None; lines.len()];
        let mut requests = Vec::new();
        for (i, line) in lines.iter().enumerate() {
            let Ok((request, encoded)) = line else { continue };
            match journal.answers("requests", i, std::slice::from_ref(request))? {
                Some(known) => answers[i] = known.first().cloned(),
                None => requests.push((i, encoded.clone())),
            }
        }
        let total: usize = requests.iter().map(|(_, request)| request.tokens()).sum();
        let mut progress = Progress::new("read", "tokens", total);
        interrupt::listen("stopping after these requests")?;
        let inference = opened.inference().clone();
        let scheduler = Scheduler::new(inference, opened.tokenizer(), opened.policy());
        let finished = scheduler.run(&requests, &mut |event| {
            let (i, answer) = match event {
                Event::Read(tokens) => {
                    progress.at(tokens.min(total));
                    let stop = interrupt::asked();
                    return Ok(if stop { ControlFlow::Break(()) } else { ControlFlow::Continue(()) });
                }
                Event::Answered(i, answer) => (i, answer),
            };
            let Ok((request, _)) = &lines[i] else { unreachable!("invalid requests are not asked") };
            journal.record(Entry::new("requests", i, std::slice::from_ref(request), vec![answer.clone()]))?;
            answers[i] = Some(answer);
            Ok(ControlFlow::Continue(()))
        })?;
        progress.finish();
        if !finished {
            note!("stopped; run the same command again to resume");
            interrupt::leave();
        }
        let mut text = String::new();
        for (line, answer) in lines.iter().zip(&answers) {
            text += &match (line, answer) {
                (Err(error), _) => serde_json::json!({ "error": error }).to_string(),
                (_, answer) => serde_json::to_string(answer)?,
            };
            text.push('\n');
        }
        output.write(text.as_bytes())?;
        journal.remove()?;
        let bad = lines.iter().filter(|line| line.is_err()).count();
        let skipped = if bad > 0 { format!(" ({} invalid)", thousands(bad)) } else { String::new() };
        say!("{} requests{skipped}: {}", thousands(lines.len()), output.path().display());
        Ok(())
    }
}
