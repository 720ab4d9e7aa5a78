//! The retrieval tasks: the model writes an answer that stands in the prompt, or that it knows by heart.

use serde_json::Value;

use super::field::{list, required, text, text_or_number, texts, value};
use super::metric::{Metric, Normalisation};
use super::python::strip;
use super::source::DataSet;
use super::{Gold, Sample, Suite};

// One line for the task, one for its data set.
#[rustfmt::skip]
pub(super) const TASKS: &[Suite] = &[
    // The harness means to stop at a newline after 48 tokens, as in the two tasks that follow, but its defaults
    // come first: it really stops at an empty line after 256 tokens. The numbers are comparable only if it is so here.
    Suite::of_files("retrieval", "squad_completion", Some("SQuAD"), "answers from a paragraph (SQuAD)", &[Metric::Contains], squad_completion,
        DataSet::new("hazyresearch/based-squad", "default", "validation", &["retrieval/xquad.en.json"])),
    Suite::of_files("retrieval", "swde", Some("SWDE"), "values from the text of web pages", &[Metric::Contains], completion,
        DataSet::new("hazyresearch/based-swde-v2", "default", "validation", &[])),
    Suite::of_files("retrieval", "fda", Some("FDA"), "values from reports on medical devices", &[Metric::Contains], completion,
        DataSet::new("hazyresearch/based-fda", "default", "validation", &[])),
    Suite::of_files("retrieval", "triviaqa", Some("TriviaQA"), "trivia without a text to find the answer in", &[Metric::ExactMatch(Normalisation::Plain)], triviaqa,
        DataSet::new("mandarjoshi/trivia_qa", "rc.nocontext", "validation", &[])),
    Suite::of_files("retrieval", "drop", Some("DROP"), "questions about a paragraph that need counting or arithmetic", &[Metric::Em, Metric::F1], drop,
        DataSet::new("EleutherAI/drop", "", "validation", &[])),
    Suite::of_files("retrieval", "nq_open", Some("NQ"), "questions of searchers without a text to find the answer in", &[Metric::ExactMatch(Normalisation::Articles)], nq_open,
        DataSet::new("google-research-datasets/nq_open", "", "validation", &[])),
    Suite::of_files("retrieval_cloze", "triviaqa_cloze", None, "trivia as cloze, with a text that has the answer", &[Metric::Contains], completion,
        DataSet::new("hazyresearch/based_triviaqa", "default", "validation", &[])),
    Suite::of_files("retrieval_cloze", "drop_cloze", None, "DROP as cloze", &[Metric::Contains], completion,
        DataSet::new("hazyresearch/based_drop", "default", "validation", &[])),
    Suite::of_files("retrieval_cloze", "nq_cloze", None, "questions of searchers as cloze, with a text that has the answer", &[Metric::Contains], completion,
        DataSet::new("hazyresearch/based_nq_2048", "default", "validation", &[])),
];

/// A prompt to continue up to one of `until`, with the answers of which any is right.
fn written(context: String, until: &[&str], max_tokens: usize, answers: Vec<String>) -> Sample {
    Sample::generated(context, until, max_tokens, Gold::Texts { answers, classes: Vec::new() })
}

/// A text to continue (`text`) and the continuation (`value`). SQuAD's own form has neither, so that there the text is
/// the context, a line `Question:` with the question, and a line `Answer:`, and the value is the first answer.
fn squad_completion(document: &Value) -> Result<Sample, String> {
    let (prompt, answer) = if value(document, "text").is_none() && value(document, "context").is_some() {
        let (context, question) = (text(document, "context")?, text(document, "question")?);
        (format!("{context}\nQuestion: {question}\nAnswer:"), answers(document)?.swap_remove(0))
    } else {
        (text(document, "text")?.into(), text(document, "value")?.into())
    };
    Ok(written(strip(&prompt).into(), &["\n\n"], 256, vec![strip(&answer).into()]))
}

/// A text to continue (`text`) and the continuation (`value`), or a context with the beginning of a sentence that an
/// answer completes (`question`), which may stand at the end of the context already.
fn completion(document: &Value) -> Result<Sample, String> {
    if value(document, "text").is_some() || value(document, "context").is_none() {
        let (text, value) = (strip(text(document, "text")?), strip(text(document, "value")?));
        return Ok(written(text.into(), &["\n"], 48, vec![value.into()]));
    }
    let mut context = text(document, "context")?.to_string();
    // The marks of paragraphs, documents and titles in TriviaQA.
    for mark in ["[PAR]", "[DOC]", "[TLE]"] {
        context = context.replace(mark, "");
    }
    let question = strip(text(document, "question")?);
    let mut context = strip(&context);
    while !question.is_empty()
        && let Some(rest) = without_end(context, question)
    {
        context = rest;
    }
    let prompt = format!("{}. {question}", strip(context).trim_matches('.'));
    Ok(written(prompt, &["\n"], 48, answers(document)?))
}

/// A text without an end that may differ in case.
fn without_end<'t>(text: &'t str, end: &str) -> Option<&'t str> {
    let (rest, last) = text.split_at_checked(text.len().checked_sub(end.len())?)?;
    (last.to_lowercase() == end.to_lowercase()).then_some(rest)
}

/// The answers: texts, objects with a text as in SQuAD's files, or an object with a list of texts as on the hub. There
/// is at least one.
fn answers(document: &Value) -> Result<Vec<String>, String> {
    if value(document, "answers.text").is_some() {
        return texts(document, "answers.text", false);
    }
    let list = list(document, "answers")?;
    if list.first().is_some_and(Value::is_object) {
        let answer =
            |answer| text(answer, "text").map_err(|message| format!("an element of `answers` {message}"));
        return list.iter().map(|value| answer(value).map(String::from)).collect();
    }
    texts(document, "answers", false)
}

/// A question mark is always added, also to questions that have one.
fn triviaqa(document: &Value) -> Result<Sample, String> {
    let context = format!("Question: {}?\nAnswer:", text(document, "question")?);
    Ok(written(context, &["\n", ".", ","], 256, texts(document, "answer.aliases", false)?))
}

/// As [`triviaqa`], after an instruction.
fn nq_open(document: &Value) -> Result<Sample, String> {
    let context = format!("Answer these questions:\n\nQ: {}?\nA:", text(document, "question")?);
    Ok(written(context, &["\n", ".", ","], 256, texts(document, "answer", false)?))
}

/// The question stands after the passage, and nothing asks for the answer. Any of the annotators' answers is right.
fn drop(document: &Value) -> Result<Sample, String> {
    let context = format!("{} {}", text(document, "passage")?, text(document, "question")?);
    let mut answers = vec![spans(required(document, "answer", "the answer")?, "answer")?];
    match value(document, "validated_answers") {
        None => {}
        Some(Value::Array(list)) => {
            for answer in list {
                answers.push(spans(answer, "validated_answers")?);
            }
        }
        // A list for each field.
        Some(fields) => {
            for number in 0..list(fields, "number")?.len() {
                let field = |name| list(fields, name).map(|list| list.get(number).unwrap_or(&Value::Null));
                let answer = serde_json::json!({
                    "number": field("number")?, "date": field("date")?, "spans": field("spans")?,
                });
                answers.push(spans(&answer, "validated_answers")?);
            }
        }
    }
    Ok(Sample::generated(context, &["."], 256, Gold::Spans(answers)))
}

/// The spans of an answer of DROP: its number, else its texts, else its date.
fn spans(answer: &Value, field: &str) -> Result<Vec<String>, String> {
    let wrong = |message| format!("`{field}` {message}");
    let number = text_or_number(answer, "number").map_err(wrong)?;
    if !number.is_empty() {
        return Ok(vec![number]);
    }
    let spans = texts(answer, "spans", true).map_err(wrong)?;
    if !spans.is_empty() {
        return Ok(spans);
    }
    let part = |name| text_or_number(answer, name).map_err(wrong);
    let date = [part("date.day")?, part("date.month")?, part("date.year")?].join(" ");
    Ok(vec![strip(&date).into()])
}
