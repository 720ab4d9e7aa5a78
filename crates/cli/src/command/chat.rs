//! `march chat`: a conversation in which each turn is read once; the state bank carries what was said.

use std::collections::VecDeque;
use std::io::{BufRead, IsTerminal, Write};
use std::ops::ControlFlow;
use std::path::Path;

use clap::Args;
use march_lm::generate::{Generator, Limits, StopReason, Text};
use march_lm::memory::BankFile;

use super::bank::{self, Advice, Place};
use super::open::{ModelArgs, OpenedModel};
use super::writing::{WritingArgs, show, unescape};
use crate::display::Progress;
use crate::display::out::note;
use crate::interrupt;

/// Chat with a model whose memory persists from turn to turn.
#[derive(Args)]
#[command(after_help = "Example:
  march chat --model models/tiny-march --max-tokens 100

Each line is a turn: the model reads the user prefix, the line and the assistant prefix, and writes until the
user prefix, the end of the text or --max-tokens. Earlier turns are not read again: the memory holds them.
Lines that begin with a slash are commands; /help lists them. Ctrl-C ends an answer.")]
pub struct Chat {
    #[command(flatten)]
    model: ModelArgs,
    /// The text before each of your turns; \n, \t and \\ are understood [default: '\nUser: ']
    // The default is written by hand, because clap doubles the backslashes of a default with a space.
    #[arg(
        long, value_name = "TEXT", default_value = r"\nUser: ", hide_default_value = true, value_parser = unescape
    )]
    user_prefix: String,
    /// The text between your turn and the answer [default: '\nAssistant:']
    #[arg(
        long, value_name = "TEXT", default_value = r"\nAssistant:", hide_default_value = true, value_parser = unescape
    )]
    assistant_prefix: String,
    #[command(flatten)]
    writing: WritingArgs,
}

const HELP: &str = "\
/help                 this help
/memory               tokens read so far, kept anchors, and bytes
/undo                 undo the last turn
/rollback N           roll back to the last kept anchor at or before N tokens
/reset                forget everything
/save [--force] FILE  save the memory to a file; --force overwrites that of another text
/load FILE            continue from a saved memory
/quit                 quit; the end of the input does the same";

const ADVICE: Advice = Advice { continue_with: "continue it with /load", replace: "/save --force FILE" };

/// Number of turns that can be undone; each keeps a state of every layer.
const UNDO_TURNS: usize = 8;

impl Chat {
    /// Answers until the input ends.
    pub fn run(mut self) -> anyhow::Result<()> {
        self.model.choose()?;
        let sampling = self.writing.sampling();
        sampling.check()?;
        let opened = self.model.open()?;
        interrupt::listen("ending the answer")?;
        let mut limits = self.writing.limits();
        limits.stop.push(self.user_prefix.trim_end().to_string());
        let generator = opened.generator(bank::empty(&opened)?, sampling)?;
        let (forks, own) = (VecDeque::new(), Vec::new());
        Conversation { chat: &self, opened: &opened, limits, generator, forks, own }.run()
    }
}

/// A conversation.
struct Conversation<'a> {
    chat: &'a Chat,
    opened: &'a OpenedModel,
    limits: Limits,
    generator: Generator,
    /// The text before each of the last turns.
    forks: VecDeque<Text>,
    /// The identities of the files that this text was loaded from or saved to ([`BankFile::identity`]).
    own: Vec<String>,
}

impl Conversation<'_> {
    fn run(mut self) -> anyhow::Result<()> {
        let mut stdin = std::io::stdin().lock();
        let terminal = stdin.is_terminal();
        if terminal {
            note!("/help lists the commands; /quit or Ctrl-D quits");
        }
        let mut line = Vec::new();
        loop {
            if terminal {
                // The prompt is optional, so ignore errors.
                let mut aside = std::io::stderr();
                let _ = write!(aside, "> ").and_then(|()| aside.flush());
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
                    Ok(said) => note!("{said}"),
                    Err(error) => note!("{error:#}"),
                },
                None if text.is_empty() => {}
                None => match self.turn(text) {
                    // The reader of the answers is gone.
                    Ok(StopReason::Requested) if !interrupt::asked() => return Ok(()),
                    Ok(_) => {}
                    // Such a model cannot answer any turn.
                    Err(error @ march_lm::Error::Diverged(_)) => return Err(error.into()),
                    Err(error) => note!("{error}; the turn was undone"),
                },
            }
        }
    }

    /// Reads a turn and answers. After an error the text is unchanged.
    fn turn(&mut self, said: &str) -> march_lm::Result<StopReason> {
        let before = self.generator.text().clone();
        match self.read_and_answer(said) {
            Ok(Some(ended)) => {
                self.remember(before);
                Ok(ended)
            }
            Ok(None) => {
                self.generator.set_text(before);
                note!("interrupted while reading the turn; the turn was undone");
                Ok(StopReason::Requested)
            }
            Err(error) => {
                self.generator.set_text(before);
                Err(error)
            }
        }
    }

    /// Returns why the answer ended; `None` if reading was interrupted before it.
    fn read_and_answer(&mut self, said: &str) -> march_lm::Result<Option<StopReason>> {
        let Chat { user_prefix, assistant_prefix, .. } = self.chat;
        let ids = self.opened.tokenizer().encode(&format!("{user_prefix}{said}{assistant_prefix}"))?;
        let mut progress = Progress::new("read", "tokens", ids.len());
        let whole = self.generator.read(&ids, &mut |left| {
            progress.at(ids.len().saturating_sub(left));
            if interrupt::asked() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        })?;
        progress.finish();
        if !whole {
            return Ok(None);
        }
        let written = self.generator.write(self.opened.tokenizer(), &self.limits, &mut show)?;
        let _ = show("\n");
        Ok(Some(written.ended))
    }

    /// Keeps a text for `/undo`.
    fn remember(&mut self, before: Text) {
        self.forks.push_back(before);
        if self.forks.len() > UNDO_TURNS {
            self.forks.pop_front();
        }
    }

    /// Runs a command; returns its message.
    fn command(&mut self, command: &str) -> anyhow::Result<String> {
        let (name, file) = command.split_once(' ').unwrap_or((command, ""));
        let file = file.trim();
        match name {
            "help" => return Ok(HELP.into()),
            "memory" => {}
            "undo" => match self.forks.pop_back() {
                Some(text) => self.generator.set_text(text),
                None => {
                    return Ok(format!("no turn to undo; only the last {UNDO_TURNS} turns can be undone"));
                }
            },
            "rollback" => {
                let Ok(tokens) = file.parse() else {
                    return Ok("name a number of tokens: /rollback N".into());
                };
                let before = self.generator.text().clone();
                let said = bank::rollback(&mut self.generator, tokens)?;
                self.remember(before);
                return Ok(said);
            }
            "reset" => {
                self.forks.clear();
                self.own.clear();
                self.generator.set_text(Text::new(bank::empty(self.opened)?));
            }
            "save" => {
                let (force, file) = match file.strip_prefix("--force") {
                    Some(rest) if rest.is_empty() || rest.starts_with(' ') => (true, rest.trim_start()),
                    _ => (false, file),
                };
                if file.is_empty() {
                    return Ok("name a file: /save FILE".into());
                }
                let place = Place::take(Path::new(file))?;
                place.check(&self.own, force, &ADVICE)?;
                place.save(self.opened, &mut self.generator)?;
                self.own.push(BankFile::open(place.path())?.identity().into());
            }
            "load" if file.is_empty() => return Ok("name a file: /load FILE".into()),
            "load" => {
                let file = BankFile::open(Path::new(file))?;
                self.generator.set_text(bank::load(self.opened, &file)?);
                self.forks.clear();
                self.own = vec![file.identity().into()];
            }
            _ => return Ok(format!("unknown command /{name}; /help lists the commands")),
        }
        Ok(bank::line(self.generator.bank()?))
    }
}
