//! The suites from the command line: documents in, tables and files out, interruptions, bad input.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use serde_json::{Value, json};

use crate::common::writing::trained;
use crate::common::{self, ok, refused, text};

/// A data root with two tasks in the hub's shape.
fn data(folder: &Path, documents: usize) -> String {
    let root = folder.join("data");
    let (piqa, lambada) = (root.join("baber/piqa"), root.join("EleutherAI/lambada_openai"));
    fs::create_dir_all(&piqa).unwrap();
    fs::create_dir_all(&lambada).unwrap();
    let lines = |one: &dyn Fn(usize) -> Value| -> String {
        (0..documents).map(|i| one(i).to_string() + "\n").collect()
    };
    let question = |i: usize| {
        json!({ "goal": format!("How are {i} things counted?"), "sol1": "One by one.",
                "sol2": format!("All {i} at once, in a great hurry."), "label": i % 2 })
    };
    let passage = |i: usize| json!({ "text": format!("{i} times the cat sat on the mat and saw the cat") });
    fs::write(piqa.join("validation.jsonl"), lines(&question)).unwrap();
    fs::write(lambada.join("test.jsonl"), lines(&passage)).unwrap();
    text(&root).to_string()
}

fn read(path: &Path) -> Value {
    serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap()
}

/// The results without what differs from run to run.
fn stable(path: &Path) -> Value {
    let mut value = read(path);
    let object = value.as_object_mut().unwrap();
    object.remove("seconds");
    object.remove("checksum");
    value
}

#[test]
fn results_have_every_document_and_compare() {
    let folder = tempfile::tempdir().unwrap();
    let (model, root) = (trained(folder.path()), data(folder.path(), 9));
    let file = |name: &str| folder.path().join(name);
    let eval = ["eval", "--model", text(&model), "--data-root", &root, "--threads", "2"];
    let run = |more: &[&str]| ok(&[&eval[..], more].concat());
    let (a, b) = (file("a.json"), file("b.json"));
    let said = run(&["--tasks", "piqa,lambada_openai", "--output", text(&a), "--samples"]);
    assert!(said.contains("PIQA") && said.contains("Avg."), "{said}");
    assert!(!file("a.json.journal").exists());
    let results = read(&a);
    let tasks = results["tasks"].as_array().unwrap();
    let samples = tasks[0]["samples"].as_array().unwrap();
    assert_eq!((tasks.len(), samples.len()), (2, 9));
    assert_eq!(samples[3]["target"], 1);
    assert_eq!(samples[3]["answers"][0]["loglikelihood"].as_array().unwrap().len(), 2);
    let values = tasks[0]["metrics"][0]["values"].as_array().unwrap();
    let mean = values.iter().map(|v| v["value"].as_f64().unwrap()).sum::<f64>() / 9.0;
    assert!((tasks[0]["metrics"][0]["value"].as_f64().unwrap() - mean).abs() < 1e-12);

    run(&["--tasks", "commonsense", "--limit", "5", "--skip-bad", "--output", text(&b)]
        .map(|flag| if flag == "commonsense" { "piqa,lambada_openai" } else { flag }));
    let said = ok(&["eval", "compare", text(&a), text(&b)]);
    assert!(
        said.contains("piqa") && said.contains("+0.0000 to +0.0000") || said.contains("0.0000"),
        "{said}"
    );

    let lm = file("lm.json");
    run(&["--tasks", "piqa", "--format", "lm-eval", "--output", text(&lm)]);
    let lm = read(&lm);
    let value = |of: &Value, key: &str| of["results"]["piqa"][key].as_f64().unwrap();
    assert_eq!(value(&lm, "acc,none"), tasks[0]["metrics"][0]["value"].as_f64().unwrap());
    assert_eq!(value(&lm, "acc_stderr,none"), tasks[0]["metrics"][0]["standard_error"].as_f64().unwrap());
    assert_eq!(lm["n-samples"]["piqa"]["effective"], 9);
    assert_eq!(lm["higher_is_better"]["piqa"]["acc"], true);
}

/// After any number of `kill -9`, the same command gives the numbers of an uninterrupted run, and no document is asked
/// twice: the journal only grows.
#[test]
fn a_killed_evaluation_resumes() {
    let folder = tempfile::tempdir().unwrap();
    let (model, root) = (trained(folder.path()), data(folder.path(), 400));
    let (whole, cut) = (folder.path().join("whole.json"), folder.path().join("cut.json"));
    let flags = |output: &Path| -> Vec<String> {
        let all = ["eval", "--model", text(&model), "--data-root", &root, "--tasks", "piqa,lambada_openai"];
        let more = ["--threads", "1", "--samples", "--output", text(output)];
        all.iter().chain(&more).map(ToString::to_string).collect()
    };
    let journal = folder.path().join("cut.json.journal");
    let mut lines: Vec<String> = Vec::new();
    let mut kills = 0;
    for wait in (1..).map(|i| Duration::from_millis(15 * i)) {
        let mut child = Command::new(env!("CARGO_BIN_EXE_march"))
            .args(flags(&cut))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        std::thread::sleep(wait);
        child.kill().unwrap();
        if child.wait().unwrap().success() || cut.exists() {
            break;
        }
        kills += 1;
        let Ok(now) = fs::read_to_string(&journal) else { continue };
        let whole: Vec<String> =
            now.split_inclusive('\n').filter(|l| l.ends_with('\n')).map(Into::into).collect();
        assert!(whole.len() >= lines.len() && whole[..lines.len()] == lines, "the journal lost lines");
        lines = whole;
    }
    let list = |flags: Vec<String>| ok(&flags.iter().map(String::as_str).collect::<Vec<_>>());
    // Or killed between writing the results and removing the journal.
    if !cut.exists() || journal.exists() {
        list(flags(&cut));
    }
    let documents = lines.len().saturating_sub(1);
    assert!(kills > 0 && documents > 0, "{kills} kills, {documents} documents before the end");
    let asked: std::collections::HashSet<&str> =
        lines.iter().skip(1).map(|line| line.split("\"requests\"").next().unwrap()).collect();
    assert_eq!(asked.len(), documents, "a document was asked twice");
    list(flags(&whole));
    assert_eq!(stable(&cut), stable(&whole));
    assert!(!journal.exists());
}

#[test]
fn a_journal_of_something_else_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let (model, root) = (trained(folder.path()), data(folder.path(), 3));
    let output = folder.path().join("a.json");
    let journal = folder.path().join("a.json.journal");
    let eval =
        ["eval", "--model", text(&model), "--data-root", &root, "--tasks", "piqa", "--output", text(&output)];
    fs::write(&journal, "something else\nand more\n").unwrap();
    assert!(refused(&eval).contains("line 1"));
    fs::remove_file(&journal).unwrap();
    ok(&eval);
    fs::write(&output, "{\"mine\": 1}").unwrap();
    assert!(refused(&eval).contains("would be overwritten"));
}

#[test]
fn bad_documents_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let (model, root) = (trained(folder.path()), data(folder.path(), 4));
    let file = folder.path().join("data/baber/piqa/validation.jsonl");
    let eval = ["eval", "--model", text(&model), "--data-root", &root, "--tasks", "piqa"];
    let good = fs::read_to_string(&file).unwrap();
    for (line, said) in [
        ("{\"goal\": \"x\", \"sol1\": \"a\", \"sol2\": \"b\", \"label\": 7}", "label"),
        ("{\"goal\": \"x\", \"sol1\": \"a\", \"label\": 0}", "sol2"),
        ("{\"goal\": \"x\", \"sol1\": \"a\", \"sol2\": \" \", \"label\": 0}", "choice 2 is empty"),
        ("{\"goal\": \"x\", ", "line 5"),
        ("17", "line 5"),
    ] {
        fs::write(&file, format!("{good}{line}\n")).unwrap();
        let error = refused(&eval);
        assert!(error.contains("validation.jsonl") && error.contains("line 5"), "{error}");
        assert!(error.contains(said) && error.contains("--skip-bad"), "{error}");
        let said = ok(&[&eval[..], &["--skip-bad"]].concat());
        assert!(said.contains("(1 skipped)"), "{said}");
    }
    let error = refused(&["eval", "--model", text(&model), "--data-root", &root, "--tasks", "hellaswag"]);
    assert!(error.contains("Rowan/hellaswag") && error.contains("https://"), "{error}");
    let error = refused(&["eval", "--model", text(&model), "--tasks", "piqa"]);
    assert!(error.contains("--data-root"), "{error}");
    let error = refused(&["eval", "--model", text(&model), "--tasks", "piqa", "--lengths", "100"]);
    assert!(error.contains("--lengths"), "{error}");
    let error = refused(&["eval", "--model", text(&model), "--tasks", "piqa,mqar", "--data-root", &root]);
    assert!(error.contains("command of their own"), "{error}");
    let error = refused(&["eval", "--model", text(&model), "--tasks", "mqar", "--data-root", &root]);
    assert!(error.contains("--data-root is not for recall tasks"), "{error}");
}

#[test]
fn requests_are_answered_in_order() {
    let folder = tempfile::tempdir().unwrap();
    let model = trained(folder.path());
    let (file, out) = (folder.path().join("r.jsonl"), folder.path().join("a.jsonl"));
    let lines = [
        json!({ "kind": "loglikelihood", "context": "One ", "continuations": ["checkpoint", "mat"] }),
        json!({ "kind": "generate_until", "context": "One", "until": [","], "max_tokens": 6 }),
        json!({ "kind": "loglikelihood_rolling", "text": "again, and again" }),
        json!({ "kind": "loglikelihood", "context": "", "continuations": ["A"] }),
    ];
    fs::write(&file, lines.map(|line| line.to_string()).join("\n")).unwrap();
    let asked = ["eval", "requests", text(&file), "--model", text(&model), "--output", text(&out)];
    ok(&asked);
    let answers: Vec<Value> =
        fs::read_to_string(&out).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(answers.len(), 4);
    assert_eq!(answers[0]["loglikelihood"][0]["tokens"], 11);
    assert!(answers[1]["generate_until"].is_string());
    assert_eq!(answers[2]["loglikelihood_rolling"]["tokens"], 16);
    assert!(answers[3]["loglikelihood"][0]["loglikelihood"].as_f64().unwrap() < 0.0);
    // The same again replaces the answers; another file is not replaced.
    ok(&asked);
    fs::write(&file, "{\"kind\": \"loglikelihood\", \"context\": \"a\", \"continuations\": []}\n").unwrap();
    assert!(refused(&asked).contains("line 1") && refused(&asked).contains("no continuations"));
    ok(&[&asked[..], &["--skip-bad"]].concat());
    assert!(fs::read_to_string(&out).unwrap().starts_with("{\"error\":"));
    let book = folder.path().join("book.jsonl");
    fs::write(&book, "{\"text\": \"mine\"}\n").unwrap();
    assert!(
        refused(&["eval", "requests", text(&file), "--model", text(&model), "--output", text(&book)])
            .contains("would be overwritten")
    );
}

#[test]
fn needles_and_perplexity_run_on_any_model() {
    let folder = tempfile::tempdir().unwrap();
    let model = trained(folder.path());
    let (svg, book) = (folder.path().join("heat.svg"), folder.path().join("book.txt"));
    fs::write(&book, common::BOOK.repeat(5)).unwrap();
    let eval = ["eval", "--model", text(&model), "--threads", "2"];
    let more = ["--tasks", "niah_single_1,niah_multivalue", "--lengths", "1600,2000", "--limit", "2"];
    let said = ok(&[&eval[..], &more, &["--heat-map", text(&svg), "--haystack", text(&book)]].concat());
    assert!(said.contains("niah_single_1@1600") && said.contains("niah_multivalue@2000"), "{said}");
    assert!(fs::read_to_string(&svg).unwrap().starts_with("<svg"));
    let said = ok(&[&eval[..], &["--tasks", "perplexity", "--text", text(&book)]].concat());
    assert!(said.contains("word_perplexity") && said.contains("byte_perplexity"), "{said}");
    let error = refused(&[&eval[..], &["--tasks", "niah_single_1", "--lengths", "200"]].concat());
    assert!(error.contains("smallest length that fits"), "{error}");
}

/// A needle in 32,768 tokens takes less than 2 GiB on the tiny model, whatever is kept.
#[cfg(target_os = "linux")]
#[test]
fn a_long_needle_fits_in_two_gigabytes() {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("tiny");
    ok(&["init", "--config", "tiny/march", "--output", text(&model)]);
    for flags in
        [&[][..], &["--retention", "fenwick"], &["--retention", "recent:8"], &["--retention", "budget:8MB"]]
    {
        let mut child = Command::new(env!("CARGO_BIN_EXE_march"))
            .args(["eval", "--model", text(&model), "--tasks", "niah_single_2", "--lengths", "32768"])
            .args(["--limit", "1", "--threads", "2"])
            .args(flags)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let status = format!("/proc/{}/status", child.id());
        let mut peak = 0;
        let ended = loop {
            if let Some(line) = fs::read_to_string(&status)
                .ok()
                .and_then(|text| text.lines().find(|line| line.starts_with("VmHWM")).map(String::from))
            {
                peak = peak.max(line.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap());
            }
            match child.try_wait().unwrap() {
                Some(ended) => break ended,
                None => std::thread::sleep(Duration::from_millis(20)),
            }
        };
        assert!(ended.success(), "{flags:?}");
        assert!((1..2 << 20).contains(&peak), "{flags:?}: {peak} kB");
    }
}
