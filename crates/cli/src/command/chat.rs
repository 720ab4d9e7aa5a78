//! `march chat`: a conversation in which each turn is read once; the state bank carries what was said.

use std::collections::VecDeque;
use std::io::{BufRead, IsTerminal, Write};
use std::ops::ControlFlow;
use std::path::Path;

use anyhow::anyhow;
use clap::Args;
use march_lm::Error;
use march_lm::disk::{BUILT_IN, EXAMPLE};
use march_lm::generate::{Generator, Limits, StopReason, Text};
use march_lm::memory::BankFile;
use march_server::{Message, Template};

use super::bank::{self, Advice, Place};
use super::open::{ModelArgs, OpenedModel, RUNS, newest};
use super::writing::{WritingArgs, show, unescape};
use crate::display::out::note;
use crate::display::{Progress, thousands};
use crate::interrupt;

/// Chat with a model whose memory persists from turn to turn.
#[derive(Args)]
#[command(after_help = "Examples:
  march chat --example                                # asks the model inside the program about a diary
  march chat --model models/tiny-march --max-tokens 100

Each line is a turn. It is written as the model's chat template says; a model without one reads the user prefix,
the line and the assistant prefix, and writes until the user prefix. An answer also ends at the end of the text
or at --max-tokens. Earlier turns are not read again: the memory holds them. Lines that begin with a slash are
commands; /help lists them. Ctrl-C ends an answer.")]
pub struct Chat {
    #[command(flatten)]
    model: ModelArgs,
    /// Begin with a diary of 60 days; without --model, chat with the model inside the program
    #[arg(long)]
    example: bool,
    /// The text before each of your turns, instead of the model's chat template; \n, \t and \\ are understood [default
    /// without a template: '\nUser: ']
    #[arg(long, value_name = "TEXT", value_parser = unescape)]
    user_prefix: Option<String>,
    /// The text between your turn and the answer, instead of the model's chat template [default without a template:
    /// '\nAssistant:']
    #[arg(long, value_name = "TEXT", value_parser = unescape)]
    assistant_prefix: Option<String>,
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
        if self.example && self.model.model == Path::new(RUNS) {
            self.model.model = BUILT_IN.into();
        }
        self.model.choose()?;
        let sampling = self.writing.sampling();
        sampling.check()?;
        let opened = self.model.open()?;
        interrupt::listen("ending the answer")?;
        let form = self.form(&opened)?;
        let mut limits = self.writing.limits();
        if let Form::Prefixes { user, .. } = &form {
            limits.stop.push(user.trim_end().to_string());
        }
        let generator = opened.generator(bank::empty(&opened)?, sampling)?;
        let (said, forks, own) = (Transcript::default(), VecDeque::new(), Vec::new());
        let mut chat = Conversation { form, opened: &opened, limits, generator, said, forks, own };
        if self.example {
            chat.begin_with(EXAMPLE)?;
        }
        chat.run()
    }

    /// How the turns of a model are written.
    fn form(&self, opened: &OpenedModel) -> anyhow::Result<Form> {
        let Self { user_prefix, assistant_prefix, .. } = self;
        let template = Template::of_model(&newest(&self.model.model), &opened.pipeline);
        let template = template.map_err(|error| anyhow!(error))?;
        let or = |given: &Option<String>, usual: &str| given.clone().unwrap_or_else(|| usual.into());
        Ok(match template.text() {
            Some(_) if user_prefix.is_none() && assistant_prefix.is_none() => {
                Form::Template(Box::new(template))
            }
            _ => Form::Prefixes {
                user: or(user_prefix, "\nUser: "),
                assistant: or(assistant_prefix, "\nAssistant:"),
            },
        })
    }
}

/// How turns are written.
enum Form {
    /// With a text before a turn, and one between it and its answer.
    Prefixes { user: String, assistant: String },
    /// As the model's template says.
    Template(Box<Template>),
}

/// What was said so far, for models with a template.
#[derive(Clone, Default)]
struct Transcript {
    messages: Vec<Message>,
    /// The messages as text.
    text: String,
}

/// A conversation.
struct Conversation<'a> {
    form: Form,
    opened: &'a OpenedModel,
    limits: Limits,
    generator: Generator,
    said: Transcript,
    /// The text before each of the last turns.
    forks: VecDeque<(Text, Transcript)>,
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
                    Err(error @ Error::Diverged(_)) => return Err(error.into()),
                    Err(error) => note!("{error}; the turn was undone"),
                },
            }
        }
    }

    /// Begins with a text before the first turn.
    fn begin_with(&mut self, text: &str) -> anyhow::Result<()> {
        let prompt = self.prompt("system", text)?;
        if !self.read(&prompt)? {
            interrupt::leave();
        }
        let lines: Vec<&str> = text.lines().collect();
        if let [first, second, .., last] = lines[..] {
            let tokens = thousands(self.generator.text().tokens());
            note!("{first}\n{second}\n… ({tokens} tokens in {} lines)\n{last}", lines.len());
        }
        Ok(())
    }

    /// Reads a turn and answers. After an error the text is unchanged.
    fn turn(&mut self, turn: &str) -> march_lm::Result<StopReason> {
        let before = (self.generator.text().clone(), self.said.clone());
        match self.read_and_answer(turn) {
            Ok(Some(ended)) => {
                self.remember(before);
                Ok(ended)
            }
            Ok(None) => {
                self.set(before);
                note!("interrupted while reading the turn; the turn was undone");
                Ok(StopReason::Requested)
            }
            Err(error) => {
                self.set(before);
                Err(error)
            }
        }
    }

    fn set(&mut self, (text, said): (Text, Transcript)) {
        self.generator.set_text(text);
        self.said = said;
    }

    /// What the model reads of a message: its text, and all that was said until then. If the template writes the
    /// conversation in another way than before, the text is that of the whole conversation, and the memory is emptied.
    fn prompt(&mut self, role: &str, content: &str) -> march_lm::Result<String> {
        let template = match &self.form {
            Form::Prefixes { .. } if role == "system" => return Ok(content.into()),
            Form::Prefixes { user, assistant } => return Ok(format!("{user}{content}{assistant}")),
            Form::Template(template) => template,
        };
        self.said.messages.push(Message::new(role, content.into()));
        let whole = template.render(&self.said.messages).map_err(Error::Request)?;
        let rest = match whole.strip_prefix(&self.said.text) {
            Some(rest) => rest.to_string(),
            None => {
                self.generator.set_text(Text::new(self.opened.model().bank(self.opened.policy().clone())?));
                whole.clone()
            }
        };
        self.said.text = whole;
        Ok(rest)
    }

    /// Returns why the answer ended; `None` if reading was interrupted before it.
    fn read_and_answer(&mut self, turn: &str) -> march_lm::Result<Option<StopReason>> {
        let prompt = self.prompt("user", turn)?;
        if !self.read(&prompt)? {
            return Ok(None);
        }
        let (mut answer, trims) = (String::new(), matches!(self.form, Form::Template(_)));
        let mut show_and_keep = |piece: &str| {
            // A template's answer begins a line, whatever the tokenizer puts between words.
            let begins = trims && answer.trim_start().is_empty();
            answer += piece;
            show(if begins { piece.trim_start() } else { piece })
        };
        let written = self.generator.write(self.opened.tokenizer(), &self.limits, &mut show_and_keep)?;
        let _ = show("\n");
        self.said.text += &answer;
        self.said.messages.push(Message::new("assistant", answer));
        Ok(Some(written.ended))
    }

    /// Reads a text; whether it was not interrupted.
    fn read(&mut self, text: &str) -> march_lm::Result<bool> {
        let ids = self.opened.tokenizer().encode(text)?;
        let mut progress = Progress::new("read", "tokens", ids.len());
        let whole = self.generator.read(&ids, &mut |left| {
            progress.at(ids.len().saturating_sub(left));
            if interrupt::asked() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        })?;
        progress.finish();
        Ok(whole)
    }

    /// Keeps a text for `/undo`.
    fn remember(&mut self, before: (Text, Transcript)) {
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
                Some(before) => self.set(before),
                None => {
                    return Ok(format!("no turn to undo; only the last {UNDO_TURNS} turns can be undone"));
                }
            },
            "rollback" => {
                let Ok(tokens) = file.parse() else {
                    return Ok("name a number of tokens: /rollback N".into());
                };
                let before = (self.generator.text().clone(), self.said.clone());
                let said = bank::rollback(&mut self.generator, tokens)?;
                // A template would write turns that are no longer in the text.
                self.said = Transcript::default();
                self.remember(before);
                return Ok(said);
            }
            "reset" => {
                self.forks.clear();
                self.own.clear();
                self.set((Text::new(bank::empty(self.opened)?), Transcript::default()));
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
                self.set((bank::load(self.opened, &file)?, Transcript::default()));
                self.forks.clear();
                self.own = vec![file.identity().into()];
            }
            _ => return Ok(format!("unknown command /{name}; /help lists the commands")),
        }
        Ok(bank::line(self.generator.bank()?))
    }
}
