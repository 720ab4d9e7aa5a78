//! `--device` without a GPU: names of devices, programs without GPU support, and runs that were on another device.

#[cfg(not(feature = "gpu"))]
use std::fs;

use march_lm::engine::Instructions;
use march_lm::run::Session;

#[cfg(not(feature = "gpu"))]
use crate::common::BOOK;
use crate::common::{few_steps, ok, refused, text};

#[test]
fn names_of_devices() {
    for command in [
        "train tiny/march",
        "generate --model m --prompt x",
        "chat --model m",
        "eval --model m --tasks mqar",
        "logits --model m --tokens t.json --output o.safetensors",
        #[cfg(feature = "serve")]
        "serve --model m",
        "doctor",
    ] {
        for wrong in ["tpu", "gpu:x", "gpu:-1", ""] {
            let arguments: Vec<&str> = command.split(' ').chain(["--device", wrong]).collect();
            let message = refused(&arguments);
            assert!(message.contains("expected cpu, gpu, or gpu:N"), "{command}: {message}");
        }
    }
}

/// A program without GPU support says in one line how to build one with it, and changes nothing.
#[cfg(not(feature = "gpu"))]
#[test]
fn built_without() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let model = path("model");
    ok(&["init", "--config", "tiny/march", "--output", text(&model)]);
    fs::write(path("tokens.json"), "[1, 2, 3]").unwrap();
    fs::write(path("book.txt"), BOOK).unwrap();
    let (run, tokens, output) = (path("run"), path("tokens.json"), path("logits.safetensors"));
    let book = path("book.txt");
    let model = ["--model", text(&model)];
    let with = |command: &[&'static str], rest: &[&str]| {
        [command, rest].concat().into_iter().map(String::from).collect::<Vec<String>>()
    };
    let commands = [
        with(&["train", "tiny/march"], &["--run", text(&run)]),
        with(&["generate", "--prompt", "x"], &model),
        with(&["chat"], &model),
        with(&["eval", "--tasks", "mqar"], &model),
        with(&["logits"], &[&model[..], &["--tokens", text(&tokens), "--output", text(&output)]].concat()),
        with(&["inspect", "routing"], &[&model[..], &["--text", text(&book)]].concat()),
        #[cfg(feature = "serve")]
        with(&["serve", "--addr", "127.0.0.1:0"], &model),
        with(&["doctor"], &[]),
    ];
    for command in commands {
        for device in ["gpu", "gpu:1"] {
            let mut arguments: Vec<&str> = command.iter().map(String::as_str).collect();
            arguments.extend(["--device", device]);
            let message = refused(&arguments);
            assert!(message.contains("cargo build --release --features gpu"), "{command:?}: {message}");
            assert_eq!(message.lines().count(), 1, "{message}");
        }
    }
    assert!(!run.exists() && !output.exists());
    assert!(ok(&["doctor", "--threads", "1"]).contains("--features gpu"));
}

#[test]
fn the_report_of_the_processor() {
    let said = ok(&["doctor", "--threads", "1", "--json"]);
    let report: serde_json::Value = serde_json::from_str(&said).unwrap();
    assert_eq!(report["threads"]["in_use"], 1, "{said}");
    // The names that are printed are those of instructions that the processor has.
    let name = report["peak"]["instructions"].as_str().unwrap();
    let present = Instructions::ALL.iter().any(|set| set.present() && set.name() == name);
    assert!(present, "{said}");
    for measured in [&report["peak"]["gflops"], &report["read_gbs"], &report["copy_gbs"]] {
        assert!(measured.as_f64().unwrap() > 0.0, "{said}");
    }
}

/// The speed of a model: every figure is there, as a table and as JSON.
#[test]
fn the_speed_of_a_model() {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("model");
    ok(&["init", "--config", "tiny/gdn", "--output", text(&model)]);
    let few = ["--lengths", "64,100", "--streams", "2", "--seconds", "0.01", "--threads", "1"];
    let said = ok(&[&["bench", "--model", text(&model)], &few[..]].concat());
    for line in ["prefill of 64", "prefill of 100", "decoding", "2 texts, sum", "peak memory"] {
        assert!(said.contains(line), "{line}: {said}");
    }
    for (model, weights) in [(text(&model), "bf16"), ("tiny/march", "q8")] {
        let flags = ["bench", "--json", "--model", model, "--weights", weights];
        let said = ok(&[&flags[..], &few[..]].concat());
        let report: serde_json::Value = serde_json::from_str(&said).unwrap_or_else(|e| panic!("{e}: {said}"));
        assert_eq!(report["weights"], weights, "{said}");
        assert_eq!(report["machine"]["numbers"], if weights == "q8" { "integers" } else { "f32" });
        assert_eq!(report["prefill"][1]["tokens"], 100, "{said}");
        for part in [&report["prefill"][0], &report["decode"], &report["streams"]["sum"]] {
            let positive = |key: &str| part[key].as_f64().unwrap() > 0.0;
            assert!(positive("tokens_per_second") && positive("share"), "{said}");
        }
    }
    for (flag, value) in [("--lengths", "0"), ("--streams", "0"), ("--seconds", "-1"), ("--weights", "q5")] {
        assert!(refused(&["bench", "--model", "tiny/gdn", flag, value]).contains(flag));
    }
    let missing = folder.path().join("nothing");
    assert!(refused(&["bench", "--model", text(&missing)]).contains("nothing"));
}

/// Each session names its device, and a run that moves to another one says so.
#[test]
fn a_run_that_was_on_another_device() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    let said =
        ok(&[&few_steps("demo/march", text(&run))[..], &["--stop-at", "1", "--device", "cpu"]].concat());
    assert!(!said.contains("device "), "{said}");
    let resume = ["train", "--resume", text(&run), "--threads", "1", "--stop-at", "2"];
    assert!(!ok(&resume).contains("device "));
    let mut sessions = Session::all(&run).unwrap();
    assert_eq!(sessions.iter().map(|session| session.device.as_str()).collect::<Vec<_>>(), ["cpu", "cpu"]);

    let other = Session { device: "A GPU on Vulkan".into(), ..sessions.pop().unwrap() };
    other.record(&run).unwrap();
    let said = ok(&["train", "--resume", text(&run), "--threads", "1"]);
    assert!(said.contains("device        cpu; until now the run was on A GPU on Vulkan"), "{said}");
    // A session of an earlier version was on the processor.
    Session { device: String::new(), ..other }.record(&run).unwrap();
    let said = ok(&["train", "--resume", text(&run), "--threads", "1", "--steps", "4"]);
    assert!(!said.contains("device "), "{said}");
}
