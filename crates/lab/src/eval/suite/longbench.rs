//! LongBench: questions about long texts, summaries, and examples to continue.
//!
//! A prompt is sent whole: these models have no maximum length at which it would have to be cut.

use serde_json::Value;

use super::field::{text, texts, value};
use super::metric::Metric;
use super::source::DataSet;
use super::{Gold, Sample, Suite};

/// A task: its name, its column in the paper, its metric, the maximum of tokens, where the answer ends, what it is
/// about, and its prompt.
macro_rules! task {
    ($name:literal, $paper:literal, $metric:ident, $tokens:literal, $until:expr, $about:literal, $prompt:expr) => {
        Suite::of_files(
            "longbench",
            concat!("longbench_", $name),
            Some($paper),
            $about,
            &[Metric::$metric],
            |document| sample(document, Metric::$metric, $tokens, $until, $prompt),
            DataSet::new(
                "Xnhyacinth/LongBench",
                $name,
                "test",
                &[
                    concat!("THUDM/LongBench/data/", $name, ".jsonl"),
                    concat!("zai-org/LongBench/data/", $name, ".jsonl"),
                    concat!("longbench/", $name, ".jsonl"),
                    concat!("longbench/MiniLongBench_", $name, ".json"),
                ],
            ),
        )
    };
}

/// The prompt of the three tasks whose answer is spread over several passages.
const PASSAGES: &str = "Answer the question based on the given passages. Only give me the answer and do not output any other words.\n\nThe following are given passages.\n{context}\n\nAnswer the question based on the given passages. Only give me the answer and do not output any other words.\n\nQuestion: {question}\nAnswer:";

/// No text ends an answer: only the model or the number of tokens does.
const NOTHING: &[&str] = &[];

// A prompt is one line here, however long, and exact: some of them have odd spelling and spaces.
#[rustfmt::skip]
pub(super) const TASKS: &[Suite] = &[
    task!("narrativeqa", "NQA", QaF1, 128, NOTHING, "questions about a story", "You are given a story, which can be either a novel or a movie script, and a question. Answer the question asconcisely as you can, using a single phrase if possible. Do not provide any explanation.\n\nStory: {context}\n\nNow, answer the question based on the story asconcisely as you can, using a single phrase if possible. Do not provide any explanation.\n\nQuestion: {question}\n\nAnswer:"),
    task!("qasper", "QQA", QaF1, 128, NOTHING, "questions about a scientific article", "You are given a scientific article and a question. Answer the question as concisely as you can, using a single phrase or sentence if possible. If the question cannot be answered based on the information in the article, write \"unanswerable\". If the question is a yes/no question, answer \"yes\", \"no\", or \"unanswerable\". Do not provide any explanation.\n\nArticle: {context}\n\n Answer the question based on the above article as concisely as you can, using a single phrase or sentence if possible. If the question cannot be answered based on the information in the article, write \"unanswerable\". If the question is a yes/no question, answer \"yes\", \"no\", or \"unanswerable\". Do not provide any explanation.\n\nQuestion: {question}\n\nAnswer:"),
    task!("multifieldqa_en", "MFQ", QaF1, 64, NOTHING, "questions about texts of several fields", "Read the following text and answer briefly.\n\n{context}\n\nNow, answer the following question based on the above text, only give me the answer and do not output any other words.\n\nQuestion: {question}\nAnswer:"),
    task!("hotpotqa", "HQA", QaF1, 32, NOTHING, "questions that need two passages of several", PASSAGES),
    task!("2wikimqa", "2WM", QaF1, 32, NOTHING, "questions that need several passages of Wikipedia", PASSAGES),
    task!("musique", "Mus", QaF1, 32, NOTHING, "questions that need up to four passages", PASSAGES),
    task!("gov_report", "GvR", Rouge, 512, NOTHING, "summaries of reports of the government", "You are given a report by a government agency. Write a one-page summary of the report.\n\nReport:\n{context}\n\nNow, write a one-page summary of the report.\n\nSummary:"),
    task!("qmsum", "QMS", Rouge, 512, NOTHING, "summaries of a meeting for a question", "You are given a meeting transcript and a query containing a question or instruction. Answer the query in one or more sentences.\n\nTranscript:\n{context}\n\nNow, answer the query based on the above meeting transcript in one or more sentences.\n\nQuery: {question}\nAnswer:"),
    task!("multi_news", "MNs", Rouge, 512, NOTHING, "summaries of several news articles", "You are given several news passages. Write a one-page summary of all news. \n\nNews:\n{context}\n\nNow, write a one-page summary of all the news.\n\nSummary:"),
    task!("trec", "TRC", Classification, 64, &["\n"], "kinds of questions, after examples", "Please determine the type of the question below. Here are some examples of questions.\n\n{context}\n{question}"),
    task!("triviaqa", "TQA", QaF1, 32, &["\n"], "trivia with a passage, after examples", "Answer the question based on the given passage. Only give me the answer and do not output any other words. The following are some examples.\n\n{context}\n{question}"),
    task!("samsum", "SSM", Rouge, 128, &["\n"], "summaries of dialogues, after examples", "Summarize the dialogue into a few short sentences. The following are some examples.\n\n{context}\n{question}"),
];

/// A document has a context, a question (`input` in the original files) and answers, or a whole prompt as in
/// MiniLongBench.
fn sample(
    document: &Value,
    metric: Metric,
    max_tokens: usize,
    until: &[&str],
    template: &str,
) -> Result<Sample, String> {
    let (context, gold) = if value(document, "origin_prompt").is_some() {
        (text(document, "origin_prompt")?.to_string(), "gold")
    } else {
        (prompt(template, document)?, "")
    };
    // MiniLongBench has the answers of a classification, with the classes, in an object.
    let (answers, classes) = match gold {
        "" => ("answers", "all_classes"),
        _ if value(document, "gold.answers").is_some() => ("gold.answers", "gold.all_classes"),
        gold => (gold, "all_classes"),
    };
    let answers = texts(document, answers, false)?;
    let classes = match metric {
        Metric::Classification => texts(document, classes, false)?,
        _ => Vec::new(),
    };
    Ok(Sample::generated(context, until, max_tokens, Gold::Texts { answers, classes }))
}

/// Puts a document into a template. What the document itself says in braces stays.
fn prompt(template: &str, document: &Value) -> Result<String, String> {
    let (head, tail) = template.split_once("{context}").unwrap_or((template, ""));
    let mut prompt = format!("{head}{}", text(document, "context")?);
    match tail.split_once("{question}") {
        None => prompt += tail,
        Some((before, after)) => {
            let field = if value(document, "question").is_some() { "question" } else { "input" };
            let question = text(document, field).map_err(|message| {
                if field == "input" { format!("has no `question`, and {message}") } else { message }
            })?;
            prompt.extend([before, question, after]);
        }
    }
    Ok(prompt)
}
