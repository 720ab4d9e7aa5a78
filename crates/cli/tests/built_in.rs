//! The model inside the program: it answers without a run or a checkpoint, as often as its page says.

use std::path::Path;
use std::process::{Command, Stdio};

use march_lm::disk::EXAMPLE;

use crate::common::ok;
use crate::common::writing::with_input;

/// A program in an empty folder.
fn march(folder: &Path, arguments: &[&str]) -> (bool, String, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_march"));
    let output = command.current_dir(folder).args(arguments).stdin(Stdio::null()).output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (output.status.success(), text(&output.stdout), text(&output.stderr))
}

/// The example's facts: date, thing, place.
fn facts() -> Vec<[String; 3]> {
    let mut facts = Vec::new();
    for line in EXAMPLE.lines() {
        let (date, rest) = line.split_once(": ").unwrap();
        for part in rest.split(". ").next().unwrap().split(", ") {
            let words: Vec<&str> = part.split(' ').collect();
            facts.push([date, words[1], words[words.len() - 1]].map(String::from));
        }
    }
    facts
}

#[test]
fn a_chat_answers_about_its_diary() {
    let facts = facts();
    assert_eq!(EXAMPLE.lines().count(), 60);
    let asked: Vec<&[String; 3]> = facts.iter().step_by(facts.len() / 40).collect();
    let lines: String =
        asked.iter().map(|[date, thing, _]| format!("Where was the {thing} on {date}?\n")).collect();
    let (answers, said) = with_input(&["chat", "--example"], &lines);
    assert!(said.contains("60 lines"), "{said}");
    let right = answers.lines().zip(&asked).filter(|(answer, fact)| **answer == fact[2]).count();
    assert_eq!(answers.lines().count(), asked.len(), "{answers}");
    assert!(right * 10 >= asked.len() * 9, "{right} of {} right: {answers}", asked.len());
}

/// A diary that is told in turns: the model writes nothing after a day.
#[test]
fn a_chat_reads_days_and_questions() {
    let turns = "1 May: the key is in the barn, the lamp in the mill. That was 1 May.\n\
                 Where was the key on 1 May?\n\
                 2 May: the key is in the inn, the lamp in the park. That was 2 May.\n\
                 Where was the lamp on 1 May?\nThe yacht?\nWhere was the key on 2 May?\n";
    let (answers, said) = with_input(&["chat", "--model", "diary"], turns);
    assert_eq!(answers, "\nbarn\n\nmill\ninn\n", "{said}");
    assert!(said.contains("the word `yacht` is not in the model's vocabulary"), "{said}");
}

#[test]
fn a_text_is_continued_without_a_model() {
    let folder = tempfile::tempdir().unwrap();
    let prompt = "1 May: the key is in the barn. That was 1 May. Where was the key on 1 May?";
    let (done, text, said) = march(folder.path(), &["generate", "--prompt", prompt]);
    assert!(done && text.trim() == "barn", "{text}{said}");
    assert!(said.contains("using the model inside the program"), "{said}");
    // A folder of that name comes first.
    std::fs::create_dir(folder.path().join("diary")).unwrap();
    let (done, _, said) = march(folder.path(), &["generate", "--model", "diary", "--prompt", prompt]);
    assert!(!done && said.contains("diary"), "{said}");
}

/// The accuracy on its page is what the program measures.
#[test]
fn its_accuracy_is_what_its_page_says() {
    let page = include_str!("../../lm/assets/diary/README.md");
    let command = page.lines().find_map(|line| line.strip_prefix("march eval --model diary ")).unwrap();
    let arguments: Vec<&str> = ["eval", "--model", "diary"].into_iter().chain(command.split(' ')).collect();
    let said = ok(&arguments);
    let row = said.lines().find(|line| line.starts_with("diary:days")).unwrap_or(&said);
    let words: Vec<&str> = row.split(" %").next().unwrap_or(row).split_whitespace().collect();
    let accuracy = format!("{} %", words[words.len().saturating_sub(3)..].join(" "));
    assert!(page.contains(&accuracy), "{accuracy}");
}
