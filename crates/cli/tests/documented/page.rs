//! A page of the documentation: its `sh` blocks with the test's hints, its prose, its links.

use std::collections::BTreeSet;
use std::process::{Command, Stdio};

/// The content of a comment `<!-- test: … -->`.
pub enum Hint {
    /// Flags for the march commands that begin with `start`.
    Add {
        start: String,
        flags: String,
    },
    Replace {
        from: String,
        to: String,
    },
    Before(String),
    Skip(String),
}

impl Hint {
    fn parse(text: &str) -> Option<Hint> {
        if let Some(command) = text.strip_prefix("before:") {
            return Some(Hint::Before(command.trim().to_string()));
        }
        if let Some(reason) = text.strip_prefix("skip:") {
            return (!reason.trim().is_empty()).then(|| Hint::Skip(reason.trim().to_string()));
        }
        if let Some(rest) = text.strip_prefix('s')
            && let Some(mark) = rest.chars().next().filter(char::is_ascii_punctuation)
        {
            let parts: Vec<&str> = rest.split(mark).collect();
            let ["", from, to, ""] = parts[..] else { return None };
            return Some(Hint::Replace { from: from.to_string(), to: to.to_string() });
        }
        let (start, flags) = text.split_at(text.find("--")?);
        Some(Hint::Add { start: start.trim().to_string(), flags: flags.to_string() })
    }
}

/// A fenced `sh` block.
pub struct Block {
    pub line: usize,
    pub hints: Vec<Hint>,
    /// Each command with its line; a command that continues over several lines is one command.
    pub commands: Vec<(usize, String)>,
}

impl Block {
    /// Shell code that adds the hints' flags to its own arguments.
    pub fn added_flags(&self) -> String {
        let mut code = String::new();
        for hint in &self.hints {
            if let Hint::Add { start, flags } = hint {
                let start = if start.is_empty() { String::new() } else { format!("'{start} '") };
                code += &format!("case \"$* \" in {start}*) set -- \"$@\" {flags};; esac\n");
            }
        }
        code
    }

    pub fn replaced(&self, command: &str) -> String {
        self.hints.iter().fold(command.to_string(), |command, hint| match hint {
            Hint::Replace { from, to } => {
                assert!(!from.is_empty());
                command.replace(from, to)
            }
            _ => command,
        })
    }
}

/// A page; lines count from 1.
pub struct Page {
    pub path: String,
    pub blocks: Vec<Block>,
    /// Lines outside of fenced blocks.
    prose: Vec<(usize, String)>,
}

impl Page {
    pub fn read(path: &str, text: &str) -> Page {
        let mut page = Page { path: path.to_string(), blocks: Vec::new(), prose: Vec::new() };
        let mut hints = Vec::new();
        let mut lines = text.lines().enumerate().map(|(i, line)| (i + 1, line));
        while let Some((number, line)) = lines.next() {
            let trimmed = line.trim();
            if let Some(language) = trimmed.strip_prefix("```") {
                let inside: Vec<(usize, &str)> =
                    lines.by_ref().take_while(|(_, line)| line.trim() != "```").collect();
                if language == "sh" {
                    let hints = std::mem::take(&mut hints);
                    page.blocks.push(Block { line: number, hints, commands: commands(&inside) });
                }
            } else if let Some(comment) = trimmed.strip_prefix("<!-- test:") {
                let text = comment.strip_suffix("-->").map(str::trim);
                let hint = text.and_then(Hint::parse);
                hints
                    .push(hint.unwrap_or_else(|| panic!("{path}:{number}: not a hint for the test: {line}")));
                continue;
            } else {
                page.prose.push((number, line.to_string()));
            }
            assert!(
                hints.is_empty() || trimmed.is_empty(),
                "{path}:{number}: hints belong right before a `sh` block"
            );
        }
        page
    }

    /// The prose split at backticks: line, whether it is code, text. A blank line ends an unclosed part.
    fn pieces(&self) -> Vec<(usize, bool, String)> {
        let (mut pieces, mut code) = (Vec::new(), false);
        for (number, line) in &self.prose {
            code &= !line.is_empty();
            for (i, piece) in line.split('`').enumerate() {
                code ^= i > 0;
                match pieces.last_mut() {
                    Some((_, true, text)) if code && i == 0 => *text = format!("{text} {piece}"),
                    _ => pieces.push((*number, code, piece.to_string())),
                }
            }
        }
        pieces
    }

    /// The words after `march` of every command of the page, in blocks or in prose.
    pub fn march_commands(&self) -> Vec<(usize, Vec<String>)> {
        let spans =
            self.pieces().into_iter().filter(|(_, code, _)| *code).map(|(line, _, text)| (line, text));
        let blocks = self.blocks.iter().flat_map(|block| block.commands.clone());
        spans.chain(blocks).flat_map(|(line, text)| march_words(line, &text)).collect()
    }

    /// Links to files of the repository.
    pub fn links(&self) -> Vec<(usize, String)> {
        let mut links = Vec::new();
        for (number, _, text) in self.pieces().iter().filter(|(_, code, _)| !code) {
            for (start, end) in [("](", ')'), ("src=\"", '"'), ("href=\"", '"')] {
                let parts = text.split(start).skip(1).filter_map(|part| part.split(end).next());
                let here = parts.filter(|link| !link.contains("://") && !link.starts_with("mailto:"));
                links.extend(here.map(|link| (*number, link.to_string())));
            }
        }
        links
    }

    /// Valid link fragments (`#…`): the headings in lower case, words joined by hyphens.
    pub fn anchors(&self) -> BTreeSet<String> {
        let headings = self.prose.iter().filter(|(_, line)| line.starts_with('#'));
        let texts = headings.map(|(_, line)| line.trim_start_matches('#').trim().to_lowercase());
        let kept = |c: &char| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_');
        texts
            .map(|text| text.chars().filter(kept).map(|c| if c == ' ' { '-' } else { c }).collect())
            .collect()
    }
}

/// A command on one line, without the comment after `#`.
pub fn on_one_line(command: &str) -> String {
    let lines = command.lines().map(|line| match line.split_once(" #") {
        Some((code, _)) => code,
        None => line.trim_end_matches('\\'),
    });
    lines.flat_map(str::split_whitespace).collect::<Vec<_>>().join(" ")
}

/// The commands of a block. A command ends with the first line at which a shell can parse it.
fn commands(lines: &[(usize, &str)]) -> Vec<(usize, String)> {
    let mut commands = Vec::new();
    let mut open: Option<(usize, String)> = None;
    for (number, line) in lines {
        let so_far = match open.take() {
            Some((start, text)) => (start, format!("{text}\n{line}")),
            None if line.trim().is_empty() || line.trim_start().starts_with('#') => continue,
            None => (*number, line.trim_start().to_string()),
        };
        if line.ends_with('\\') || !is_complete(&so_far.1) {
            open = Some(so_far);
        } else {
            commands.push(so_far);
        }
    }
    commands.extend(open); // the shell will say what is missing
    commands
}

fn is_complete(command: &str) -> bool {
    let status = Command::new("sh").args(["-n", "-c", command]).stderr(Stdio::null()).status();
    status.unwrap().success()
}

/// The words after each `march` of a line of commands.
fn march_words(line: usize, text: &str) -> Vec<(usize, Vec<String>)> {
    let text = on_one_line(text).replace("cargo run --release -- ", "march ");
    let words: Vec<&str> = text.split(' ').collect();
    let commands = words.split(|word| ["|", "||", "&&", ";", "&", ">", ">>", "<"].contains(word));
    let after_march = commands.filter_map(|words| {
        let march = words.iter().position(|word| *word == "march" || word.ends_with("release/march"))?;
        (march + 1 < words.len()).then(|| &words[march + 1..])
    });
    let unquoted =
        |words: &[&str]| words.iter().map(|word| word.trim_matches(['"', '\'']).to_string()).collect();
    after_march.map(|words| (line, unquoted(words))).collect()
}
