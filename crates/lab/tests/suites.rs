//! Every task with a document in the form that the hub has.

use march_lab::eval::Request;
use march_lab::eval::suite::{Documents, Gold, Sample, suites};
use serde_json::{Value, json};

/// How a task converts documents.
fn sample(task: &str, document: &Value) -> Result<Sample, String> {
    let suite = suites().find(|suite| suite.name == task).unwrap_or_else(|| panic!("no task {task}"));
    match &suite.documents {
        Documents::Files { sample, .. } => sample(document),
        _ => panic!("{task} has no files"),
    }
}

/// The context and the continuations.
fn scored(task: &str, document: &Value) -> (String, Vec<String>, Gold) {
    let sample = sample(task, document).unwrap();
    let [Request::Loglikelihood { context, continuations }] = sample.requests.as_slice() else {
        panic!("{sample:?}")
    };
    (context.clone(), continuations.clone(), sample.gold)
}

/// The prompt, where the answer ends, the maximum of tokens, and the answers.
fn written(task: &str, document: &Value) -> (String, Vec<String>, usize, Gold) {
    let sample = sample(task, document).unwrap();
    let [Request::GenerateUntil { context, until, max_tokens }] = sample.requests.as_slice() else {
        panic!("{sample:?}")
    };
    (context.clone(), until.clone(), *max_tokens, sample.gold)
}

fn strings(texts: &[&str]) -> Vec<String> {
    texts.iter().map(|text| text.to_string()).collect()
}

fn texts(answers: &[&str]) -> Gold {
    Gold::Texts { answers: strings(answers), classes: Vec::new() }
}

fn wrong(task: &str, document: Value, expected: &[&str]) {
    let message = sample(task, &document).unwrap_err();
    for part in expected {
        assert!(message.contains(part), "{task}: {message:?} lacks {part:?}");
    }
}

#[test]
fn names_are_unique_and_groups_are_complete() {
    let names: Vec<&str> = suites().map(|suite| suite.name).collect();
    for (i, name) in names.iter().enumerate() {
        assert!(!names[..i].contains(name), "{name}");
    }
    for (group, count) in [("commonsense", 8), ("retrieval", 6), ("retrieval_cloze", 3), ("longbench", 12)] {
        assert_eq!(suites().filter(|suite| suite.group == group).count(), count, "{group}");
    }
    assert!(suites().all(|suite| !suite.metrics.is_empty() && !suite.about.is_empty()));
}

#[test]
fn lambada_is_the_last_word() {
    let document = json!({"text": "Two  words,\nhe said, \"don't care"});
    let (context, continuations, gold) = scored("lambada_openai", &document);
    assert_eq!((context.as_str(), gold), ("Two  words,\nhe said, \"don't", Gold::Greedy));
    assert_eq!(continuations, [" care"]);
    assert_eq!(scored("lambada_openai", &json!({"text": "one"})).0, "");
    wrong("lambada_openai", json!({"txt": "x"}), &["no `text`", "it has `txt`"]);
    wrong("lambada_openai", json!({"text": ["x"]}), &["`text` is a list, not a text"]);
    wrong("lambada_openai", json!([1]), &["not an object"]);
}

#[test]
fn piqa_and_arc_ask_a_question() {
    let document = json!({"goal": "g", "sol1": "naïve", "sol2": "b c", "label": 1});
    let (context, continuations, gold) = scored("piqa", &document);
    assert_eq!(context, "Question: g\nAnswer:");
    assert_eq!(continuations, [" naïve", " b c"]);
    assert_eq!(gold, Gold::Choice { index: 1, lengths: vec![5, 3] });
    wrong(
        "piqa",
        json!({"goal": "g", "sol1": "", "sol2": "b", "label": -1}),
        &["`label`", "\"-1\"", "0 to 1"],
    );
    wrong("piqa", json!({"goal": "g", "sol1": "a", "sol2": "b"}), &["no `label`"]);

    let choices = json!({"text": ["x", "yy", "z"], "label": ["1", "2", "3"]});
    let document = json!({"id": "i", "question": "q?", "choices": choices, "answerKey": "3"});
    for task in ["arc_easy", "arc_challenge"] {
        let (context, continuations, gold) = scored(task, &document);
        assert_eq!(context, "Question: q?\nAnswer:");
        assert_eq!(continuations, [" x", " yy", " z"]);
        assert_eq!(gold, Gold::Choice { index: 2, lengths: vec![1, 2, 1] });
    }
    let list = json!([{"text": "x", "label": "A"}, {"text": "y", "label": "B"}]);
    let original = json!({"question": {"stem": "q?", "choices": list}, "answerKey": "B"});
    assert_eq!(scored("arc_easy", &original).0, "Question: q?\nAnswer:");
    for (choices, key, expected) in [
        (choices.clone(), "A", &["`answerKey` of \"i\" is \"A\"", "1, 2, 3"][..]),
        (json!({"text": [], "label": []}), "A", &["`choices.label` is an empty list"]),
        (json!([]), "A", &["`choices` has 0 labels"]),
        (json!({"text": ["x"], "label": ["A", "B"]}), "A", &["2 labels and 1 texts"]),
        (json!({"text": [3], "label": ["A"]}), "A", &["`choices.text` holds a number"]),
        (Value::Null, "A", &["no `choices`"]),
    ] {
        let document = json!({"id": "i", "question": "q?", "choices": choices, "answerKey": key});
        wrong("arc_easy", document, expected);
    }
}

#[test]
fn hellaswag_is_cleaned() {
    let document = json!({
        "activity_label": " Baking",
        "ctx_a": "[header] How to bake [title] Mix.",
        "ctx_b": "THEN it",
        "endings": ["rises   [step] high.", "c", "a", "b"],
        "label": "3",
    });
    let (context, continuations, gold) = scored("hellaswag", &document);
    assert_eq!(context, "Baking: How to bake. Mix. Then it");
    assert_eq!(continuations, [" rises  high.", " c", " a", " b"]);
    assert_eq!(gold, Gold::Choice { index: 3, lengths: vec![12, 1, 1, 1] });
    let mut test = document.clone();
    test["label"] = json!("");
    wrong("hellaswag", test, &["`label` is \"\"", "0 to 3"]);
    let mut blank = document.clone();
    blank["endings"][1] = json!("[step]");
    wrong("hellaswag", blank, &["choice 2 is empty"]);
    let mut empty = document;
    empty["endings"] = json!([]);
    wrong("hellaswag", empty, &["`endings` is an empty list"]);
}

#[test]
fn winogrande_has_two_contexts() {
    let sentence = "Sarah was better than Maria so _ always won.";
    let document = json!({"sentence": sentence, "option1": "Sarah", "option2": "Maria", "answer": "2"});
    let sample = sample("winogrande", &document).unwrap();
    let expected = ["Sarah", "Maria"].map(|name| Request::Loglikelihood {
        context: format!("Sarah was better than Maria so {name}"),
        continuations: vec![" always won.".into()],
    });
    assert_eq!(sample.requests, expected);
    assert!(matches!(sample.gold, Gold::Choice { index: 1, .. }));
    for (sentence, answer, expected) in
        [("no gap", "1", "`_`"), ("a _", "", "`answer` is \"\""), ("_", "3", "\"3\"")]
    {
        let document = json!({"sentence": sentence, "option1": "a", "option2": "b", "answer": answer});
        wrong("winogrande", document, &[expected]);
    }
}

#[test]
fn openbookqa_and_commonsense_qa() {
    let choices = json!({"text": ["v", "w", "x", "y", "z"], "label": ["A", "B", "C", "D", "E"]});
    let document = json!({"question_stem": "The sun", "choices": choices, "answerKey": " B"});
    let (context, continuations, gold) = scored("openbookqa", &document);
    assert_eq!((context.as_str(), continuations[1].as_str()), ("The sun", " w"));
    assert!(matches!(gold, Gold::Choice { index: 1, .. }));
    let document = json!({"question": " Where? ", "choices": choices, "answerKey": "E"});
    let (context, continuations, gold) = scored("commonsense_qa", &document);
    assert_eq!(context, "Question: Where?\nA. v\nB. w\nC. x\nD. y\nE. z\nAnswer:");
    assert_eq!(continuations, [" A", " B", " C", " D", " E"]);
    assert_eq!(gold, Gold::Choice { index: 4, lengths: vec![1; 5] });
    let few = json!({"question": "?", "choices": {"text": ["v"], "label": ["A"]}, "answerKey": "A"});
    wrong("commonsense_qa", few, &["1 choices; five"]);
}

#[test]
fn completions_continue_a_text() {
    let document = json!({"text": " The panel\nName: ", "value": " Joe\n", "context": "c", "question": "q"});
    for task in ["swde", "fda", "triviaqa_cloze", "drop_cloze", "nq_cloze"] {
        let (context, until, max_tokens, gold) = written(task, &document);
        assert_eq!((context.as_str(), max_tokens, gold), ("The panel\nName:", 48, texts(&["Joe"])));
        assert_eq!(until, ["\n"]);
    }
    let (context, until, max_tokens, gold) = written("squad_completion", &document);
    assert_eq!((context.as_str(), max_tokens, gold), ("The panel\nName:", 256, texts(&["Joe"])));
    assert_eq!(until, ["\n\n"]);
    let answers = json!([{"text": "308 ", "answer_start": 3}, {"text": "x", "answer_start": 3}]);
    for answers in [answers, json!({"text": ["308", "x"], "answer_start": [3, 3]})] {
        let document = json!({"context": "It was 308.", "question": "How many?", "answers": answers});
        let (context, .., gold) = written("squad_completion", &document);
        assert_eq!(context, "It was 308.\nQuestion: How many?\nAnswer:");
        assert_eq!(gold, texts(&["308"]));
    }
    wrong("swde", json!({"text": "x"}), &["no `value`"]);
    wrong(
        "squad_completion",
        json!({"context": "c", "question": "q", "answers": []}),
        &["`answers` is an empty"],
    );
    let context = "[DOC] [TLE] A title. [PAR] It is red. The colour IS";
    let document = json!({"context": context, "question": " The colour is ", "answers": ["red", "Red"]});
    let (context, .., gold) = written("triviaqa_cloze", &document);
    assert_eq!(context, "A title.  It is red. The colour is");
    assert_eq!(gold, texts(&["red", "Red"]));
}

#[test]
fn closed_books_and_drop() {
    let document = json!({"question": "Who wrote it?", "answer": {"aliases": ["A", "B"], "value": "A"}});
    let (context, until, max_tokens, gold) = written("triviaqa", &document);
    assert_eq!(
        (context.as_str(), max_tokens, gold),
        ("Question: Who wrote it??\nAnswer:", 256, texts(&["A", "B"]))
    );
    assert_eq!(until, ["\n", ".", ","]);
    wrong(
        "triviaqa",
        json!({"question": "x", "answer": {"aliases": []}}),
        &["`answer.aliases` is an empty list"],
    );
    let (context, .., gold) = written("nq_open", &json!({"question": "who", "answer": ["A", "B"]}));
    assert_eq!((context.as_str(), gold), ("Answer these questions:\n\nQ: who?\nA:", texts(&["A", "B"])));

    let date = |day| json!({"day": day, "month": "May", "year": ""});
    let document = json!({
        "passage": "p.",
        "question": "q?",
        "answer": {"number": "3", "date": date(""), "spans": []},
        "validated_answers": {"number": ["", ""], "date": [date("1"), date("")], "spans": [["x", "y"], []]},
    });
    let (context, until, max_tokens, gold) = written("drop", &document);
    assert_eq!((context.as_str(), max_tokens), ("p. q?", 256));
    assert_eq!(until, ["."]);
    assert_eq!(gold, Gold::Spans(vec![strings(&["3"]), strings(&["x", "y"]), strings(&["May"])]));
    let mut list = document.clone();
    list["validated_answers"] = json!([{"number": 7, "date": date("1"), "spans": []}]);
    assert_eq!(written("drop", &list).3, Gold::Spans(vec![strings(&["3"]), strings(&["7"])]));
    let mut broken = document;
    broken["answer"] = json!({"number": "", "spans": []});
    wrong("drop", broken, &["`answer` has no `date.day`"]);
}

#[test]
fn longbench_fills_its_templates() {
    let document = json!({"context": "{question}", "question": "{context}", "answers": ["A"], "all_classes": ["A", "B"]});
    for suite in suites().filter(|suite| suite.group == "longbench") {
        let (context, until, max_tokens, gold) = written(suite.name, &document);
        let Gold::Texts { answers, classes } = gold else { panic!("{}", suite.name) };
        assert_eq!(answers, ["A"]);
        assert_eq!(classes.len(), if suite.name == "longbench_trec" { 2 } else { 0 });
        assert_eq!(context.matches("{question}").count(), 1, "{}", suite.name);
        let asks = !["longbench_gov_report", "longbench_multi_news"].contains(&suite.name);
        assert_eq!(context.matches("{context}").count(), usize::from(asks), "{}", suite.name);
        let examples = ["longbench_trec", "longbench_triviaqa", "longbench_samsum"].contains(&suite.name);
        assert_eq!(until, if examples { vec!["\n"] } else { vec![] }, "{}", suite.name);
        assert!([32, 64, 128, 512].contains(&max_tokens));
    }
    let original = json!({"context": "c", "input": "q", "answers": ["A"], "all_classes": null});
    let expected = "Answer the question based on the given passage. Only give me the answer and do not output any \
                    other words. The following are some examples.\n\nc\nq";
    assert_eq!(written("longbench_triviaqa", &original).0, expected);
    wrong("longbench_trec", original, &["no `all_classes`"]);
    wrong("longbench_qasper", json!({"context": "c", "answers": ["A"]}), &["no `question`", "no `input`"]);
    wrong(
        "longbench_qasper",
        json!({"context": "c", "question": "q", "answers": []}),
        &["`answers` is an empty"],
    );
    let mini = json!({"origin_prompt": "whole", "gold": {"answers": ["A"], "all_classes": ["A"]}});
    let (context, .., gold) = written("longbench_trec", &mini);
    assert_eq!(
        (context.as_str(), gold),
        ("whole", Gold::Texts { answers: strings(&["A"]), classes: strings(&["A"]) })
    );
    let mini = json!({"origin_prompt": "whole", "gold": ["A"]});
    assert_eq!(written("longbench_hotpotqa", &mini).3, texts(&["A"]));
}

#[test]
fn wikitext_is_joined_and_counted_apart() {
    let page = " = Robert = \n \n Robert is an actor . He had a role in 2000 @,@ 1 . \n";
    let sample = sample("wikitext", &json!({"page": page})).unwrap();
    let text = " = Robert =\n\nRobert is an actor. He had a role in 2000,1.\n".into();
    assert_eq!(sample.requests, [Request::LoglikelihoodRolling { text }]);
    assert_eq!(sample.gold, Gold::Sizes { words: 19, bytes: 68 });
    assert_eq!(Sample::of_text("é b").gold, Gold::Sizes { words: 2, bytes: 4 });
}
