//! The commonsense tasks: the model's likelihood decides between given endings.

use std::sync::LazyLock;

use regex::Regex;
use serde_json::Value;

use super::field::{index, list, required, text, text_or_number, texts, value};
use super::metric::Metric;
use super::python::{capitalize, is_space, strip};
use super::source::DataSet;
use super::{Gold, Sample, Suite};
use crate::eval::request::Request;

// One line for the task, one for its data set.
#[rustfmt::skip]
pub(super) const TASKS: &[Suite] = &[
    Suite::of_files("commonsense", "lambada_openai", Some("LMB."), "the last word of a passage", &[Metric::Acc, Metric::Perplexity], lambada,
        DataSet::new("EleutherAI/lambada_openai", "default", "test", &["EleutherAI/lambada_openai/data/lambada_test.jsonl", "commonsense/lambada_openai_test.jsonl"])),
    Suite::of_files("commonsense", "piqa", Some("PIQA"), "which of two solutions works in the physical world", &[Metric::Acc, Metric::AccNorm], piqa,
        DataSet::new("baber/piqa", "", "validation", &["ybisk/piqa/plain_text/validation-*.parquet", "ybisk/piqa/valid.jsonl", "commonsense/piqa_valid.jsonl"])),
    Suite::of_files("commonsense", "hellaswag", Some("Hella."), "which of four endings continues a description", &[Metric::Acc, Metric::AccNorm], hellaswag,
        DataSet::new("Rowan/hellaswag", "", "validation", &["Rowan/hellaswag/data/hellaswag_val.jsonl", "commonsense/hellaswag_val.jsonl"])),
    Suite::of_files("commonsense", "winogrande", Some("Wino."), "which of two names a gap stands for", &[Metric::Acc], winogrande,
        DataSet::new("allenai/winogrande", "winogrande_xl", "validation", &["commonsense/winogrande_dev.jsonl"])),
    Suite::of_files("commonsense", "arc_easy", Some("ARC-e"), "science questions of a school, the easy ones", &[Metric::AccNorm, Metric::Acc], arc,
        DataSet::new("allenai/ai2_arc", "ARC-Easy", "test", &["commonsense/ARC-Easy-Test.jsonl"])),
    Suite::of_files("commonsense", "arc_challenge", Some("ARC-c"), "science questions of a school, the hard ones", &[Metric::AccNorm, Metric::Acc], arc,
        DataSet::new("allenai/ai2_arc", "ARC-Challenge", "test", &["commonsense/ARC-Challenge-Test.jsonl"])),
    Suite::of_files("commonsense", "openbookqa", Some("OBQA"), "questions about elementary science", &[Metric::AccNorm, Metric::Acc], openbookqa,
        DataSet::new("allenai/openbookqa", "main", "test", &[])),
    Suite::of_files("commonsense", "commonsense_qa", Some("CSQA"), "questions about everyday things, answered by a letter", &[Metric::Acc], commonsense_qa,
        DataSet::new("tau/commonsense_qa", "", "validation", &[])),
];

/// A context with several continuations, of which `index` is right. An empty one has no length to divide by.
fn choice(context: String, choices: &[String], index: usize) -> Result<Sample, String> {
    if let Some(empty) = choices.iter().position(|choice| strip(choice).is_empty()) {
        return Err(format!("choice {} is empty; a text was expected", empty + 1));
    }
    Ok(Sample {
        requests: vec![Request::Loglikelihood {
            context,
            continuations: choices.iter().map(|choice| format!(" {choice}")).collect(),
        }],
        gold: Gold::Choice { index, lengths: lengths(choices) },
    })
}

/// Lengths in characters.
fn lengths(choices: &[String]) -> Vec<usize> {
    choices.iter().map(|choice| choice.chars().count()).collect()
}

/// The last word is what follows the last space; punctuation belongs to it.
fn lambada(document: &Value) -> Result<Sample, String> {
    let text = text(document, "text")?;
    let (context, word) = text.rsplit_once(' ').unwrap_or(("", text));
    let (context, continuations) = (context.into(), vec![format!(" {word}")]);
    Ok(Sample { requests: vec![Request::Loglikelihood { context, continuations }], gold: Gold::Greedy })
}

fn piqa(document: &Value) -> Result<Sample, String> {
    let choices = [text(document, "sol1")?.to_string(), text(document, "sol2")?.to_string()];
    let context = format!("Question: {}\nAnswer:", text(document, "goal")?);
    choice(context, &choices, index(document, "label", 2)?)
}

fn hellaswag(document: &Value) -> Result<Sample, String> {
    let field = |name| text(document, name);
    let rest = capitalize(field("ctx_b")?);
    let context = format!("{}: {} {rest}", field("activity_label")?, field("ctx_a")?);
    let endings: Vec<String> =
        texts(document, "endings", false)?.iter().map(|ending| without_brackets(ending)).collect();
    choice(without_brackets(&context), &endings, index(document, "label", endings.len())?)
}

/// Removes the marks of the WikiHow part, such as `[title]`. Double spaces become one, once.
fn without_brackets(text: &str) -> String {
    static BRACKETS: LazyLock<Option<Regex>> = LazyLock::new(|| Regex::new(r"\[.*?\]").ok());
    let text = strip(text).replace(" [title]", ". ");
    let text = BRACKETS.as_ref().map_or(text.as_str().into(), |brackets| brackets.replace_all(&text, ""));
    text.replace("  ", " ")
}

/// The two names are put into the gap, and what follows the gap is scored after each.
fn winogrande(document: &Value) -> Result<Sample, String> {
    let sentence = text(document, "sentence")?;
    let (before, after) = sentence.split_once('_').ok_or("`sentence` has no gap; one `_` was expected")?;
    let index = match text_or_number(document, "answer")?.as_str() {
        "1" => 0,
        "2" => 1,
        other => return Err(format!("`answer` is {other:?}, not \"1\" or \"2\"")),
    };
    let contexts =
        [text(document, "option1")?, text(document, "option2")?].map(|name| format!("{before}{name}"));
    let gold = Gold::Choice { index, lengths: lengths(&contexts) };
    let continuation = format!(" {}", strip(after));
    let request = |context| Request::Loglikelihood { context, continuations: vec![continuation.clone()] };
    Ok(Sample { requests: contexts.map(request).into(), gold })
}

/// The labels and texts of the choices: an object of two lists on the hub, a list of objects within `question` in the
/// original files.
fn choices(document: &Value) -> Result<(Vec<String>, Vec<String>), String> {
    let field = if value(document, "question.choices").is_some() { "question.choices" } else { "choices" };
    let (labels, choices) = if required(document, field, "the choices")?.is_array() {
        let choices = list(document, field)?.iter().map(|choice| {
            let field =
                |name| text(choice, name).map_err(|message| format!("an element of `{field}` {message}"));
            Ok((field("label")?.to_string(), field("text")?.to_string()))
        });
        choices.collect::<Result<Vec<_>, String>>()?.into_iter().unzip()
    } else {
        (
            texts(document, &format!("{field}.label"), false)?,
            texts(document, &format!("{field}.text"), false)?,
        )
    };
    if labels.is_empty() || labels.len() != choices.len() {
        let (labels, choices) = (labels.len(), choices.len());
        return Err(format!(
            "`{field}` has {labels} labels and {choices} texts; as many of both were expected"
        ));
    }
    Ok((labels, choices))
}

/// The position of `answerKey` among labels.
fn answer(document: &Value, labels: &[String], key: &str) -> Result<usize, String> {
    let position = labels.iter().position(|label| label == key);
    position.ok_or_else(|| {
        let whose = value(document, "id").map_or(String::new(), |id| format!(" of {id}"));
        format!("`answerKey`{whose} is {key:?}, not one of the labels {}", labels.join(", "))
    })
}

/// The question: a text on the hub, `question.stem` in the original files.
fn question<'d>(document: &'d Value, field: &str) -> Result<&'d str, String> {
    if value(document, "question.stem").is_some() {
        text(document, "question.stem")
    } else {
        text(document, field)
    }
}

fn arc(document: &Value) -> Result<Sample, String> {
    let (labels, choices) = choices(document)?;
    let index = answer(document, &labels, text(document, "answerKey")?)?;
    choice(format!("Question: {}\nAnswer:", question(document, "question")?), &choices, index)
}

/// The context is the question alone, which is often the beginning of a sentence.
fn openbookqa(document: &Value) -> Result<Sample, String> {
    let (labels, choices) = choices(document)?;
    let index = answer(document, &labels, text(document, "answerKey")?.trim_start_matches(is_space))?;
    choice(question(document, "question_stem")?.into(), &choices, index)
}

/// The prompt lists five choices, and their letters are scored.
fn commonsense_qa(document: &Value) -> Result<Sample, String> {
    let letters = ["A", "B", "C", "D", "E"].map(String::from);
    let (_, choices) = choices(document)?;
    let [a, b, c, d, e, ..] = choices.as_slice() else {
        return Err(format!("`choices` has {} choices; five were expected", choices.len()));
    };
    let question = strip(question(document, "question")?);
    let context = format!("Question: {question}\nA. {a}\nB. {b}\nC. {c}\nD. {d}\nE. {e}\nAnswer:");
    choice(context, &letters, answer(document, &letters, text(document, "answerKey")?)?)
}
