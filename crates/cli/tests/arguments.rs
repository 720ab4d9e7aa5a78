//! Invalid arguments, and results that would be meaningless.

use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use march_lm::checkpoint::{Checkpoint, SHARD_BYTES, save};
use march_lm::model::Model;

use crate::common::{BOOK, few_steps, ok, refused, text};

/// Each is rejected immediately, with the flag and its valid values, and leaves no files behind.
#[test]
fn numbers_that_make_no_sense_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out");
    let logits = "logits --model m --tokens t --output OUT";
    let routing = "inspect routing --model m --text t --html OUT";
    let threads = "a whole number from 0 to 4096";
    let count = "a whole number from 1 to 1000000000000";
    let length = "a whole number from 1 to 16777216";
    let seed = "a whole number from 0 to 18446744073709551615 (2^64 - 1)";
    for (command, flag, values, part) in [
        ("doctor", "--threads", "1000000 -1 4097 1e3 x", threads),
        (logits, "--threads", "1000000 -1", threads),
        (logits, "--interval", "-1 1e30 99999999999999999999", "a whole number from 0 to"),
        ("train tiny/march --run OUT", "--threads", "1000000 -4", threads),
        ("generate --model m --prompt x", "--threads", "1000000", threads),
        ("generate --model m --prompt x", "--seed", "-1 1.5", seed),
        ("generate --model m --prompt x", "--max-tokens", "-1 1e30", "a whole number from 0 to"),
        ("train tiny/march --run OUT", "--stop-at", "-1 x", "a whole number from 0 to"),
        ("chat --model m", "--seed", "-1", seed),
        ("eval --model m --tasks mqar", "--threads", "1000000", threads),
        ("eval --model m --tasks mqar", "--samples", "0 -1 nan 1e30 18446744073709551615", count),
        ("eval --model m --tasks mqar", "--lengths", "0 -1 96,0 99999999999999", length),
        ("eval policies --model m --tasks mqar", "--samples", "0 -1", count),
        ("eval policies --model m --tasks mqar", "--lengths", "0 -1", length),
        ("inspect policies --model m", "--lengths", "0 5,-1", count),
        ("inspect policies --model m", "--decode", "-1", "a whole number from 0 to"),
        (routing, "--tokens", "0 -1", count),
        ("inspect precision --model m --text t", "--tokens", "0 -1", count),
        ("inspect training tiny/march", "--processes", "0 1,0 -1 nan", count),
        ("inspect training tiny/march", "--days", "0 -1 nan inf 1e999", "a number above 0"),
        ("init --config tiny/march --output OUT", "--seed", "-1 18446744073709551616 x", seed),
        ("data prepare --tokenizer bytes --output OUT t", "--threads", "1000000", threads),
        ("data prepare --tokenizer bytes --output OUT t", "--shard-tokens", "0 -1", count),
        (
            "data train-tokenizer --output OUT t",
            "--vocab-size",
            "-1 1e30 9999999999999",
            "a whole number from 0 to",
        ),
        ("demo --run OUT", "--steps", "0 -1", count),
        ("demo --run OUT", "--seed", "-1", seed),
    ] {
        for value in values.split_whitespace() {
            let command = command.replace("OUT", text(&out));
            let words: Vec<&str> = command.split_whitespace().chain([flag, value]).collect();
            let began = Instant::now();
            let said = refused(&words);
            assert!(said.starts_with("error: invalid value"), "{words:?}: {said}");
            assert!(said.contains(flag) && said.contains(part), "{words:?}: {said}");
            assert!(began.elapsed() < Duration::from_secs(10), "{words:?}");
            assert!(!out.exists(), "{words:?}");
        }
    }
}

/// Arguments that the command itself rejects are also rejected before any work.
#[test]
fn settings_that_make_no_sense_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let (model, book, output) = (path("model"), path("book.txt"), path("t.json"));
    ok(&["init", "--config", "tiny/march", "--output", text(&model)]);
    std::fs::write(&book, BOOK).unwrap();
    let precision =
        ["inspect", "precision", "--model", text(&model), "--text", text(&book), "--interval", "0"];
    assert!(refused(&precision).starts_with("error: the anchor interval of 0 tokens"));
    let learn = ["data", "train-tokenizer", "--output", text(&output), "--vocab-size", "0", text(&book)];
    assert!(refused(&learn).contains("it must be between 257"));
    assert!(!output.exists());
}

#[test]
fn the_version_is_the_program_s() {
    assert_eq!(ok(&["--version"]).trim(), concat!("march ", env!("CARGO_PKG_VERSION")));
}

/// A command without the flag `--resume` does not suggest it.
#[test]
fn only_training_speaks_of_resuming() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    let stage = run.join("stages/gdn-1");
    std::fs::create_dir_all(&stage).unwrap();
    std::fs::write(stage.join("run.json"), "{}").unwrap();
    let said = refused(&["demo", "--quick", "--run", text(&run)]);
    assert!(said.contains("already holds a run") && said.contains("another folder with --run"), "{said}");
    assert!(said.contains("gdn-1") && !said.contains("--resume"), "{said}");
}

/// No number is rounded to 0 because the model is small.
#[test]
fn the_work_of_a_small_model_is_not_zero() {
    for preset in ["tiny/march", "demo/gdn"] {
        let said = ok(&["inspect", "training", preset, "--processes", "1,2"]);
        let words: Vec<&str> = said.split_whitespace().collect();
        assert!(!words.iter().any(|word| ["0", "0.0", "(0.0"].contains(word)), "{said}");
        assert!(said.contains("FLOP/s"), "{said}");
    }
}

/// The resources of a run as JSON, for scripts.
#[test]
fn the_resources_of_a_run_as_json() {
    // 100 processes are more than a step has sequences.
    let arguments = ["inspect", "training", "tiny/march", "--processes", "1,2,100", "--json"];
    let report: serde_json::Value = serde_json::from_str(&ok(&arguments)).unwrap();
    let number = |value: &serde_json::Value| value.as_f64().unwrap();
    let work = &report["flop_per_token"];
    assert_eq!(number(&work["training"]), 3.0 * number(&work["forward"]), "{report}");
    assert_eq!(number(&report["flop"]), number(&work["training"]) * number(&report["tokens"]), "{report}");
    let shares = report["per_process"].as_array().unwrap();
    assert_eq!(
        shares.iter().map(|share| share["processes"].as_u64()).collect::<Vec<_>>(),
        [Some(1), Some(2)]
    );
    for share in shares {
        assert!(number(&share["flop_per_second"]) > 0.0, "{share}");
        assert!(number(&share["bytes"]) > number(&share["bytes_with_recomputation"]), "{share}");
    }
}

/// A run folder is treated as its newest checkpoint.
#[test]
fn logits_of_a_run_are_those_of_its_newest_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    ok(&few_steps("demo/march", text(&path("run"))));
    std::fs::write(path("tokens.json"), "[1, 2, 3]").unwrap();
    let logits = |model: &str, output: &str| {
        let (model, tokens, output) = (path(model), path("tokens.json"), path(output));
        ok(&["logits", "--model", text(&model), "--tokens", text(&tokens), "--output", text(&output)]);
        std::fs::read(output).unwrap()
    };
    assert!(logits("run", "a.safetensors") == logits("run/checkpoints/step-3", "b.safetensors"));
}

/// Every command that takes a model takes the newest run without one, and says which; a report lists the runs.
#[test]
fn the_newest_run_is_the_default_model() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let march = |words: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_march"));
        command.args(words.split_whitespace()).current_dir(&folder).stdin(Stdio::null());
        let out = command.output().unwrap();
        (out.status.success(), String::from_utf8_lossy(&out.stderr).into_owned())
    };
    let (success, said) = march("generate --prompt x");
    assert!(
        !success && said.contains("using the model inside the program") && said.contains("`x`"),
        "{said}"
    );
    let (success, said) = march("report runs/nope");
    assert!(!success && said.contains("runs/nope: does not exist, and there are no runs"), "{said}");
    ok(&few_steps("demo/gdn", text(&path("runs/older"))));
    std::thread::sleep(Duration::from_millis(20));
    ok(&few_steps("demo/march", text(&path("runs/newer"))));
    let tokenizer = path("runs/newer/checkpoints/step-3/tokenizer.json");
    let tokenizer = march_lm::tokenizer::Tokenizer::load(text(&tokenizer)).unwrap();
    let ids: Vec<u32> = (1..20).collect();
    std::fs::write(path("text.txt"), tokenizer.decode(&ids).unwrap()).unwrap();
    std::fs::write(path("tokens.json"), serde_json::to_string(&ids).unwrap()).unwrap();
    std::fs::write(path("requests.jsonl"), "").unwrap();
    for words in [
        "generate --prompt-file text.txt --max-tokens 1",
        "chat",
        "logits --tokens tokens.json --output l.safetensors",
        "inspect routing --text text.txt",
        "inspect precision --text text.txt",
        "inspect policies --text text.txt --lengths 16 --decode 0 --policy top-k=1",
        "eval --tasks mqar:pairs=4 --samples 2",
        "eval policies --tasks mqar:pairs=4 --samples 2 --policy top-k=1",
        "eval requests requests.jsonl --output answers.jsonl",
    ] {
        let (success, said) = march(&format!("{words} --threads 1"));
        assert!(said.contains("no --model was given: using runs/newer\n"), "{words}: {said}");
        assert!(success || words.starts_with("eval requests"), "{words}: {said}");
    }
    let list = "the runs are\n  runs/newer\n  runs/older";
    for (run, wrong) in
        [("runs/nope", "does not exist"), ("runs", "is not a run"), ("text.txt", "not a folder")]
    {
        let (success, said) = march(&format!("report {run}"));
        assert!(!success && said.contains(wrong) && said.contains(list), "{run}: {said}");
        assert!(!said.contains("create it first"), "{said}");
    }
}

/// A single sequence has no standard error.
#[test]
fn one_sequence_has_no_standard_error() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let (run, output) = (path("run"), path("one.json"));
    ok(&few_steps("demo/march", text(&run)));
    let eval = |samples: &str| {
        let task = ["--tasks", "mqar:pairs=4", "--samples", samples, "--output", text(&output)];
        let said = ok(&[&["eval", "--model", text(&run)][..], &task].concat());
        let file: serde_json::Value = serde_json::from_slice(&std::fs::read(&output).unwrap()).unwrap();
        (said, file["results"][0].clone())
    };
    let (said, one) = eval("1");
    assert!(said.contains(" ± – %") && !said.contains("± 0.0"), "{said}");
    assert!(one["standard_error"].is_null() && one["by_age"][0]["standard_error"].is_null(), "{one}");
    assert!(one["accuracy"].is_f64());
    let (said, several) = eval("3");
    assert!(!said.contains("± – %") || several["by_age"].as_array().unwrap().len() > 1, "{said}");
    assert!(several["standard_error"].is_f64(), "{several}");
    // Both can be read again.
    refused(&["eval", "compare", text(&output), text(&path("absent.json"))]);
    ok(&["eval", "compare", text(&output), text(&output)]);
}

/// The checkpoint of a run with a head so large that logits are not finite; its weights are. `infinite` ones are the
/// product of a single number each, so that none is NaN.
fn with_large_head(run: &Path, output: &Path, infinite: bool) {
    let checkpoint = run.join("checkpoints/step-3");
    let config = Checkpoint::open(&checkpoint).unwrap().config().clone();
    let model = Model::new(&config);
    assert!(model.layout().iter().any(|spec| spec.name == "lm_head.weight"));
    save(output, &config, model.layout(), SHARD_BYTES, |i| {
        let mut values = model.initial(i, 0);
        let width = config.hidden_size;
        match model.layout()[i].name.as_str() {
            "lm_head.weight" => values.iter_mut().enumerate().for_each(|(at, value)| {
                let counts = !infinite || at % width == 0;
                *value = if counts { 3e38f32.copysign(*value) } else { 0.0 };
            }),
            "model.norm.weight" if infinite => values.fill(1e6),
            _ => {}
        }
        Ok(values)
    })
    .unwrap();
    std::fs::copy(checkpoint.join("tokenizer.json"), output.join("tokenizer.json")).unwrap();
}

/// The most probable token among logits that are not finite is meaningless, so commands reject them.
#[test]
fn logits_that_are_not_finite_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let (run, model, words, tokens) = (path("run"), path("large"), path("text.txt"), path("tokens.json"));
    ok(&few_steps("demo/march", text(&run)));
    with_large_head(&run, &model, false);
    let only_infinite = path("infinite");
    with_large_head(&run, &only_infinite, true);
    let infinite = ["--model", text(&only_infinite)];
    // A text in the task's vocabulary.
    let tokenizer = march_lm::tokenizer::Tokenizer::load(text(&model.join("tokenizer.json"))).unwrap();
    let ids: Vec<u32> = (1..20).collect();
    std::fs::write(&words, tokenizer.decode(&ids).unwrap()).unwrap();
    std::fs::write(&tokens, serde_json::to_string(&ids).unwrap()).unwrap();
    let (logits, results) = (path("l.safetensors"), path("e.json"));
    let task = ["--tasks", "mqar:pairs=4", "--samples", "2"];
    let model = ["--model", text(&model)];
    let read = ["--text", text(&words)];
    for command in [
        [&["eval"], &model[..], &task, &["--output", text(&results)]].concat(),
        [&["eval", "--decode"], &model[..], &task].concat(),
        [&["eval", "policies", "--policy", "top-k=1"], &model[..], &task].concat(),
        [&["inspect", "precision"], &model[..], &read].concat(),
        [&["inspect", "policies", "--lengths", "16", "--policy", ""], &model[..], &read].concat(),
        [&["logits"], &model[..], &["--tokens", text(&tokens), "--output", text(&logits)]].concat(),
        [&["generate", "--temperature", "0"], &model[..], &["--prompt-file", text(&words)]].concat(),
        [&["generate"], &model[..], &["--prompt-file", text(&words)]].concat(),
        [&["generate", "--temperature", "0"], &infinite[..], &["--prompt-file", text(&words)]].concat(),
    ] {
        let said = refused(&command);
        assert!(said.contains("not finite") && said.contains("diverged"), "{command:?}: {said}");
    }
    assert!(!logits.exists() && !results.exists());
    // A turn of a chat, with prefixes of white space.
    let spaces = ["--user-prefix", r"\n", "--assistant-prefix", r"\n"];
    let mut chat = Command::new(env!("CARGO_BIN_EXE_march"))
        .args([&["chat"], &infinite[..], &spaces].concat())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let said = tokenizer.decode(&ids).unwrap() + "\n";
    chat.stdin.take().unwrap().write_all(said.as_bytes()).unwrap();
    let out = chat.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&out.stderr);
    assert_eq!(out.status.code(), Some(1), "{said}");
    assert!(said.contains("not finite") && said.contains("diverged"), "{said}");
}

/// A request that exceeds the machine's memory is rejected before any file is created.
#[cfg(target_os = "linux")]
#[test]
fn more_memory_than_the_machine_has_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let (run, small) = (path("run"), path("small"));
    let mut large = vec!["train", "tiny/march", "--run", text(&run)];
    for setting in
        ["train.micro_batch=16777216", "train.tokens_per_step=4294967296", "data.sequence_length=256"]
    {
        large.extend(["--set", setting]);
    }
    let said = refused(&large);
    assert!(said.contains("a step would take about") && said.contains("lower train.micro_batch"), "{said}");
    assert!(!run.exists());
    ok(&few_steps("demo/march", text(&small)));
    let eval = ["eval", "--model", text(&small), "--tasks", "mqar:pairs=4", "--lengths", "16777216"];
    let said = refused(&[&eval[..], &["--samples", "1"]].concat());
    assert!(said.contains("would take about") && said.contains("lower --lengths"), "{said}");
    assert!(!said.contains("--samples"), "{said}");
}
