//! `march chat`: turns of a conversation, each read once; the state bank carries what was said.

use std::collections::VecDeque;
use std::io::{BufRead, IsTerminal, Write};
use std::ops::ControlFlow;
use std::path::Path;

use clap::Args;
use march::engine::Cpu;
use march::generate::{Ended, Generator, Limits, Text};

use super::bank;
use super::open::{ModelArgs, Opened};
use super::writing::{WritingArgs, show, unescape};
use crate::display::Progress;
use crate::interrupt;

/// Talk with a model whose memory stays from turn to turn.
#[derive(Args)]
#[command(after_help = "Example:
  march chat --model models/tiny-march --max-tokens 100

A line is a turn: the model reads the user prefix, the line and the assistant prefix, and writes until the user prefix,
the end of a text or --max-tokens. What was said before is not read again: the memory holds it. Lines that begin with a
slash are commands; /help lists them. Ctrl-C ends an answer.")]
pub struct Chat {
    #[command(flatten)]
    model: ModelArgs,
    /// What stands before what you say; \\n, \\t and \\\\ are understood
    #[arg(long, value_name = "TEXT", default_value = r"\nUser: ", value_parser = unescape)]
    user_prefix: String,
    /// What stands between that and the answer
    #[arg(long, value_name = "TEXT", default_value = r"\nAssistant:", value_parser = unescape)]
    assistant_prefix: String,
    #[command(flatten)]
    writing: WritingArgs,
}

const HELP: &str = "\
/help         these lines
/memory       how much was said, and what is kept of it
/undo         take the last turn back
/reset        forget everything
/save FILE    write the memory to a file
/load FILE    go on from such a file
/quit         end; so does the end of the input";

/// Turns that can be taken back; each keeps a state of every layer.
const UNDO_TURNS: usize = 8;

impl Chat {
    /// Answers until the input ends.
    pub fn run(self) -> anyhow::Result<()> {
        let sampling = self.writing.sampling();
        sampling.check()?;
        let opened = self.model.open()?;
        interrupt::listen("ending the answer")?;
        let mut limits = self.writing.limits();
        limits.stop.push(self.user_prefix.trim_end().to_string());
        let generator = opened.generator(bank::empty(&opened)?, sampling)?;
        let talk = Talk { chat: &self, opened: &opened, limits, generator, forks: VecDeque::new() };
        talk.run()
    }
}

/// A conversation.
struct Talk<'a> {
    chat: &'a Chat,
    opened: &'a Opened,
    limits: Limits,
    generator: Generator<'a, Cpu>,
    /// The text before each of the last turns.
    forks: VecDeque<Text<Cpu>>,
}

impl Talk<'_> {
    fn run(mut self) -> anyhow::Result<()> {
        let mut stdin = std::io::stdin().lock();
        let terminal = stdin.is_terminal();
        if terminal {
            eprintln!("/help lists the commands; /quit or Ctrl-D ends");
        }
        let mut line = Vec::new();
        loop {
            if terminal {
                eprint!("> ");
                // The prompt is a courtesy.
                let _ = std::io::stderr().flush();
            }
            line.clear();
            if stdin.read_until(b'\n', &mut line)? == 0 {
                return Ok(());
            }
            interrupt::forget();
            let text = String::from_utf8_lossy(&line);
            let text = text.trim_end_matches(['\n', '\r']);
            match text.strip_prefix('/') {
                Some("quit") => return Ok(()),
                Some(command) => match self.command(command) {
                    Ok(said) => eprintln!("{said}"),
                    Err(error) => eprintln!("{error:#}"),
                },
                None if text.is_empty() => {}
                None => {
                    if self.turn(text)? == Ended::Asked && !interrupt::asked() {
                        // Nobody reads the answers.
                        return Ok(());
                    }
                }
            }
        }
    }

    fn turn(&mut self, said: &str) -> anyhow::Result<Ended> {
        let Chat { user_prefix, assistant_prefix, .. } = self.chat;
        let ids = self.opened.tokenizer.encode(&format!("{user_prefix}{said}{assistant_prefix}"))?;
        let before = self.generator.text().clone();
        let mut progress = Progress::new("read", "tokens", ids.len());
        let whole = self.generator.read(&ids, &mut |left| {
            progress.at(ids.len().saturating_sub(left));
            if interrupt::asked() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        })?;
        progress.finish();
        if !whole {
            self.generator.set_text(before);
            eprintln!("the turn was not read to its end and is taken back");
            return Ok(Ended::Asked);
        }
        let written = self.generator.write(&self.opened.tokenizer, &self.limits, &mut show)?;
        let _ = show("\n");
        self.forks.push_back(before);
        if self.forks.len() > UNDO_TURNS {
            self.forks.pop_front();
        }
        Ok(written.ended)
    }

    /// Does what a command asks for; gives what there is to say.
    fn command(&mut self, command: &str) -> anyhow::Result<String> {
        let (name, file) = command.split_once(' ').unwrap_or((command, ""));
        let file = file.trim();
        match name {
            "help" => return Ok(HELP.into()),
            "memory" => {}
            "undo" => match self.forks.pop_back() {
                Some(text) => self.generator.set_text(text),
                None => return Ok(format!("no turn to take back; the last {UNDO_TURNS} can be")),
            },
            "reset" => {
                self.forks.clear();
                self.generator.set_text(Text::new(bank::empty(self.opened)?));
            }
            "save" | "load" if file.is_empty() => return Ok(format!("name a file: /{name} FILE")),
            "save" => {
                bank::check_place(Path::new(file))?;
                bank::save(self.opened, self.generator.bank()?, Path::new(file))?;
            }
            "load" => {
                let bank = bank::load(self.opened, Path::new(file))?;
                self.forks.clear();
                self.generator.set_text(Text::new(bank));
            }
            _ => return Ok(format!("there is no /{name}; /help lists the commands")),
        }
        Ok(bank::line(self.opened, self.generator.bank()?))
    }
}
