//! `march chat`: a conversation in which each turn is read once; the state bank carries what was said.

use std::collections::VecDeque;
use std::io::{BufRead, IsTerminal, Write};
use std::ops::ControlFlow;
use std::path::Path;
use std::time::Instant;

use anyhow::anyhow;
use clap::Args;
use march_lm::Error;
use march_lm::disk::{BUILT_IN, EXAMPLE};
use march_lm::generate::{Generator, Limits, StopReason, Text};
use march_lm::memory::BankFile;
use march_server::{Asked, Message, Part, PrefixCache, Reason, Splitter, Template};

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
or at --max-tokens. Earlier turns are not read again: the memory holds them. What a model thinks before it answers is folded
away. Lines that begin with a slash are commands; /help lists them. Ctrl-C ends an answer.")]
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
/reasoning            what the model thought before its last answer
/undo                 undo the last turn
/rollback N           roll back to the last kept anchor at or before N tokens
/reset                forget everything
/save [--force] FILE  save the memory to a file; --force overwrites that of another text
/load FILE            continue from a saved memory
/quit                 quit; the end of the input does the same";

const ADVICE: Advice = Advice { continue_with: "continue it with /load", replace: "/save --force FILE" };

/// Number of turns that can be undone; each keeps a state of every layer.
const UNDO_TURNS: usize = 8;

/// Bytes of states from which a conversation continues if its template writes it in another way than it was written.
const CACHE_BYTES: usize = 1 << 30;

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
        let mut chat = Conversation {
            form,
            opened: &opened,
            limits,
            generator,
            said: Transcript::default(),
            cache: PrefixCache::new(CACHE_BYTES),
            forks: VecDeque::new(),
            own: Vec::new(),
            terminal: std::io::stdin().is_terminal(),
        };
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
    /// The same with answers as they were written: reasoning is part of their text.
    written: Vec<Message>,
    /// The messages as text, and as tokens.
    text: String,
    ids: Vec<u32>,
}

/// What the model must read of a turn.
struct Unread {
    /// Its tokens, divided where the message ends.
    parts: Vec<Vec<u32>>,
    /// What the answer has besides text.
    splitter: Splitter,
}

/// A conversation.
struct Conversation<'a> {
    form: Form,
    opened: &'a OpenedModel,
    limits: Limits,
    generator: Generator,
    said: Transcript,
    /// States of earlier parts of the conversation.
    cache: PrefixCache,
    /// The text before each of the last turns.
    forks: VecDeque<(Text, Transcript)>,
    /// The identities of the files that this text was loaded from or saved to ([`BankFile::identity`]).
    own: Vec<String>,
    /// Whether somebody types.
    terminal: bool,
}

impl Conversation<'_> {
    fn run(mut self) -> anyhow::Result<()> {
        let mut stdin = std::io::stdin().lock();
        if self.terminal {
            note!("/help lists the commands; /quit or Ctrl-D quits");
        }
        let mut line = Vec::new();
        loop {
            if self.terminal {
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

    /// What the model must read for a message. If the template writes the conversation in another way than before, the
    /// memory goes back to the last state of it that is known.
    fn prompt(&mut self, role: &str, content: &str) -> march_lm::Result<Unread> {
        let tokenizer = self.opened.tokenizer();
        let plain = |text: &str| {
            Ok(Unread { parts: vec![tokenizer.encode(text)?], splitter: Splitter::new(Default::default()) })
        };
        let template = match &self.form {
            Form::Prefixes { .. } if role == "system" => return plain(content),
            Form::Prefixes { user, assistant } => return plain(&format!("{user}{content}{assistant}")),
            Form::Template(template) => template,
        };
        let (asked, said) = (Asked::default(), &mut self.said);
        for list in [&mut said.messages, &mut said.written] {
            list.push(Message::new(role, content.into()));
        }
        let written = template.render(&said.written).ok();
        let rest = written.as_ref().and_then(|whole| whole.strip_prefix(&said.text));
        let (ids, ended, whole) = match (rest, written.as_ref()) {
            (Some(rest), Some(whole)) => {
                let ended = template.begun(&said.written, &asked);
                let ended = ended.as_ref().and_then(|text| text.strip_prefix(&said.text));
                (tokenizer.encode(rest)?, tokenizer.encode(ended.unwrap_or_default())?, whole.clone())
            }
            _ => {
                let whole = template.render(&said.messages).map_err(Error::Request)?;
                let mut ids = tokenizer.encode(&whole)?;
                let mut ended =
                    tokenizer.encode(&template.begun(&said.messages, &asked).unwrap_or_default())?;
                let found = self.cache.find(&ids, self.opened.policy());
                let text = match found.text {
                    Some(text) => text,
                    None => Text::new(self.opened.model().bank(self.opened.policy().clone())?),
                };
                self.generator.set_text(text);
                said.ids = ids.drain(..found.tokens).collect();
                ended.drain(..found.tokens.min(ended.len()));
                (ids, ended, whole)
            }
        };
        let end = ids.iter().zip(&ended).take_while(|(a, b)| a == b).count();
        let (message, opening) = ids.split_at(end);
        let parts = [message, opening].into_iter().filter(|part| !part.is_empty());
        let splitter = Splitter::new(template.reply_form(&whole, None));
        said.text = whole;
        Ok(Unread { parts: parts.map(<[u32]>::to_vec).collect(), splitter })
    }

    /// Returns why the answer ended; `None` if reading was interrupted before it.
    fn read_and_answer(&mut self, turn: &str) -> march_lm::Result<Option<StopReason>> {
        let mut unread = self.prompt("user", turn)?;
        let (known, began) = (self.generator.text().tokens(), Instant::now());
        if !self.read(&unread)? {
            return Ok(None);
        }
        let (read, reading) = (self.generator.text().tokens() - known, began.elapsed());
        let (mut answer, mut message) = (String::new(), Message::new("assistant", String::new()));
        let trims = matches!(self.form, Form::Template(_));
        let mut thoughts = String::new();
        let mut add = |parts: Vec<Part>| {
            let mut shown = String::new();
            for part in parts {
                match part {
                    Part::Reasoning(text) => thoughts += &text,
                    Part::Content(text) => shown += &text,
                    Part::Call(name, arguments) => shown += &format!("{name}({arguments})"),
                }
            }
            // A template's answer begins a line, whatever the tokenizer puts between words.
            let begins = trims && message.content.trim_start().is_empty();
            message.content += &shown;
            show(if begins { shown.trim_start() } else { &shown })
        };
        let (tokenizer, began, mut written) = (self.opened.tokenizer(), Instant::now(), 0);
        self.generator.begin(tokenizer, &self.limits)?;
        let ended = loop {
            let piece = self.generator.advance(tokenizer)?;
            written += usize::from(piece.token.is_some());
            self.said.ids.extend(piece.token.filter(|_| piece.ended.is_none()));
            answer += &piece.text;
            let asked = add(unread.splitter.push(&piece.text)).is_break();
            match piece.ended {
                None if asked => {
                    let rest = self.generator.finish(tokenizer)?;
                    answer += &rest;
                    let _ = add(unread.splitter.push(&rest));
                    break StopReason::Requested;
                }
                None => {}
                Some(ended) => break ended,
            }
        };
        let _ = add(unread.splitter.finish());
        let _ = show("\n");
        // Before a stop string, the last tokens are others than those that were sampled.
        let text = self.generator.text();
        self.said.ids.truncate(text.tokens() - text.unread().len());
        self.said.ids.extend(text.unread());
        self.said.text += &answer;
        self.said.written.push(Message::new("assistant", answer));
        message.reasoning_content = Some(thoughts).filter(|text| !text.is_empty());
        if self.terminal {
            let rate =
                |tokens: usize, time: std::time::Duration| tokens as f64 / time.as_secs_f64().max(1e-9);
            let folded =
                if message.reasoning_content.is_some() { "; /reasoning shows what it thought" } else { "" };
            note!(
                "{} tokens, {:.1} per second; {} read, {:.0} per second, {} known{folded}",
                thousands(written),
                rate(written, began.elapsed()),
                thousands(read),
                rate(read, reading),
                thousands(known)
            );
        }
        self.said.messages.push(message);
        Ok(Some(ended))
    }

    /// Reads a turn; whether it was not interrupted. States are kept where its parts end.
    fn read(&mut self, unread: &Unread) -> march_lm::Result<bool> {
        let mut left: usize = unread.parts.iter().map(Vec::len).sum();
        let mut progress = Progress::new("read", "tokens", left);
        let all = left;
        for part in &unread.parts {
            left -= part.len();
            let whole = self.generator.read(part, &mut |of_part| {
                progress.at(all.saturating_sub(left + of_part));
                if interrupt::asked() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
            })?;
            if !whole {
                return Ok(false);
            }
            self.said.ids.extend(part);
            if matches!(self.form, Form::Template(_)) {
                self.cache.keep(&self.said.ids, &self.generator.text().without_logits(), Reason::End);
            }
        }
        progress.finish();
        Ok(true)
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
            "reasoning" => {
                let last =
                    self.said.messages.iter().rev().find_map(|message| message.reasoning_content.clone());
                return Ok(last.unwrap_or_else(|| "no answer of this conversation has any reasoning".into()));
            }
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
