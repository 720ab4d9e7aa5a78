//! Recall tasks from the command line: training on them, `march eval`, `march eval compare`, `march demo`.

use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

/// What the demo's models are trained for.
const DEMO_TASK: &str = "diary:days=8:facts=8:things=8:places=64:dates=64:questions=16";

fn run(folder: &Path, arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_march"));
    command.current_dir(folder).args(arguments).output().unwrap()
}

fn ok(folder: &Path, arguments: &[&str]) -> String {
    let output = run(folder, arguments);
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "{arguments:?}: {}{}", text(&output.stdout), text(&output.stderr));
    text(&output.stdout)
}

fn refused(folder: &Path, arguments: &[&str]) -> String {
    let output = run(folder, arguments);
    assert!(!output.status.success(), "{arguments:?} was not refused");
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(text.starts_with("error: "), "{text}");
    text
}

fn read(path: &Path) -> Value {
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

/// A run of a few steps on 4 pairs in 16 tokens, with an anchor every 4.
fn train(folder: &Path, preset: &str, name: &str) {
    let mut arguments = vec!["train", preset, "--run", name];
    for setting in [
        "data.task=mqar:pairs=4:vocabulary=64",
        "model.vocab_size=64",
        "data.sequence_length=16",
        "train.tokens_per_step=128",
        "train.micro_batch=8",
        "train.steps=3",
        "train.validate_every=2",
    ] {
        arguments.extend(["--set", setting]);
    }
    if preset == "demo/march" {
        arguments.extend(["--set", "model.anchor_interval=4"]);
    }
    let said = ok(folder, &arguments);
    assert!(said.contains("% right"), "{said}");
}

#[test]
fn whole_sequences_and_decoding_answer_alike() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    train(folder, "demo/march", "march");
    train(folder, "demo/gdn", "gdn");
    let task = ["--tasks", "mqar:pairs=4", "--samples", "40", "--lengths", "16,37"];
    let asked = |model: &str, flags: &[&str]| {
        let arguments = [&["eval", "--model", model][..], &task, flags, &["--output", "out.json"]].concat();
        let said = ok(folder, &arguments);
        assert!(said.contains("accuracy") && said.contains("age 0 to 3"), "{said}");
        read(&folder.join("out.json"))
    };
    let policies: [&[&str]; 7] = [
        &[],
        &["--interval", "5", "--routing-top-k", "1"],
        &["--retention", "fenwick"],
        &["--retention", "recent:1", "--storage", "bf16"],
        &["--retention", "budget:20KB"],
        &["--placement", "adaptive:2"],
        &["--weights", "int8", "--storage", "int8"],
    ];
    for (i, flags) in policies.iter().enumerate() {
        let whole = asked("march", flags);
        let decoded = asked("march", &[flags, &["--decode"][..]].concat());
        for (one, other) in [0, 1].map(|n| (&whole["results"][n], &decoded["results"][n])) {
            assert_eq!(one["answers"], other["answers"], "{flags:?}");
            assert_eq!(one["memory_bytes"], other["memory_bytes"], "{flags:?}");
            assert_eq!(one["answers"].as_array().unwrap().len(), 40, "{flags:?}");
        }
        assert_eq!(whole["read"], "whole");
        std::fs::rename(folder.join("out.json"), folder.join(format!("{i}.json"))).unwrap();
    }
    let gdn = asked("gdn", &[]);
    assert!(
        gdn["results"][0]["memory_bytes"].as_u64()
            < read(&folder.join("0.json"))["results"][0]["memory_bytes"].as_u64()
    );
    let said = ok(folder, &["eval", "compare", "out.json", "0.json"]);
    assert!(said.contains("95 % interval") && said.matches("mqar:pairs=4").count() == 2, "{said}");
    let said = ok(folder, &["eval", "compare", "0.json", "0.json"]);
    assert!(said.contains("+0.0 to +0.0 %"), "{said}");
}

/// A checkpoint stores the policy that it was trained with; a flag overrides it.
#[test]
fn a_checkpoint_remembers_its_policy() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let set = ["--set", "train.steps=2", "--set", "memory.retention=fenwick", "--set", "memory.storage=int8"];
    let said = ok(folder, &[&["train", "demo/march", "--run", "run"][..], &set].concat());
    assert!(said.contains("retention=fenwick storage=int8"), "{said}");
    let checkpoint = folder.join("run/checkpoints/step-2");
    let config = read(&checkpoint.join("config.json"));
    assert_eq!((&config["retention"], &config["placement"]), (&"fenwick".into(), &"periodic".into()));
    let task = ["--tasks", DEMO_TASK, "--samples", "3", "--output", "out.json"];
    let policy = |flags: &[&str]| {
        let said = ok(folder, &[&["eval", "--model", "run"][..], &task, flags].concat());
        let policy = read(&folder.join("out.json"))["policy"].clone();
        let shown = format!("retention {}", policy["retention"].as_str().unwrap());
        assert!(said.contains(&shown), "{said}");
        ["retention", "storage"].map(|key| policy[key].as_str().unwrap().to_string())
    };
    assert_eq!(policy(&[]), ["fenwick", "int8"]);
    assert_eq!(policy(&["--retention", "all"]), ["all", "int8"]);
    assert_eq!(policy(&["--retention", "recent:2", "--storage", "f32"]), ["recent:2", "f32"]);
    let inspected = ok(folder, &["inspect", "model", "run/checkpoints/step-2"]);
    assert!(inspected.contains("retention fenwick") && inspected.contains("(int8)"), "{inspected}");
    // A run whose checkpoints do not store the policy resumes with that of its configuration.
    ok(folder, &[&["train", "demo/march", "--run", "old"][..], &set].concat());
    let config = folder.join("old/checkpoints/step-2/config.json");
    let text = std::fs::read_to_string(&config).unwrap();
    let lines =
        text.lines().filter(|line| !["retention", "placement", "storage"].iter().any(|k| line.contains(k)));
    let without = lines.collect::<Vec<_>>().join("\n").replace(",\n}", "\n}");
    std::fs::write(&config, without).unwrap();
    std::fs::remove_file(config.with_file_name("checksums.json")).unwrap();
    ok(folder, &["train", "--resume", "old", "--steps", "3"]);
    assert_eq!(read(&folder.join("old/checkpoints/step-3/config.json"))["retention"], "fenwick");
}

/// `march eval policies` accepts tasks and lengths as `march eval` does.
#[test]
fn policies_are_asked_for_lists() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    train(folder, "demo/march", "march");
    let asked = ["eval", "policies", "--model", "march", "--tasks", "mqar:pairs=4,mqar:pairs=2", "--lengths"];
    let flags = ["16,37", "--samples", "2", "--policy", "", "--policy", "retention=fenwick"];
    let said = ok(folder, &[&asked[..], &flags].concat());
    for (task, length) in [(4, 16), (4, 37), (2, 16), (2, 37)] {
        let heading = (format!("mqar:pairs={task}:"), format!(", {length} tokens, 2 sequences"));
        let found = |line: &str| line.starts_with(&heading.0) && line.contains(&heading.1);
        assert_eq!(said.lines().filter(|line| found(line)).count(), 1, "{said}");
    }
    assert_eq!(said.matches("retention=fenwick").count(), 4, "{said}");
    let several = refused(folder, &[&asked[..], &flags, &["--plot", "plot.svg"]].concat());
    assert!(several.contains("--plot shows one task at one length"), "{several}");
    assert!(!folder.join("plot.svg").exists());
}

#[test]
fn what_cannot_be_asked_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    ok(folder, &["init", "--config", "tiny/march", "--output", "bytes"]);
    let asked = |flags: &[&str]| refused(folder, &[&["eval", "--model", "bytes"][..], flags].concat());
    assert!(asked(&["--tasks", "mqar"]).contains("not one token"));
    assert!(asked(&["--tasks", "mqra"]).contains("did you mean `mqar`"));
    assert!(asked(&["--tasks", "mqar:pairs=99"]).contains("vocabulary"));
    assert!(asked(&["--tasks", "mqar", "--lengths", "5"]).contains("96 tokens or more"));
    assert!(asked(&["--tasks", "mqar", "--samples", "0"]).contains("from 1 to"));
    assert!(refused(folder, &["eval", "compare", "a.json", "b.json"]).contains("a.json"));
    let training = |setting: &str| refused(folder, &["train", "demo/march", "--run", "r", "--set", setting]);
    assert!(training("data.task=mqar:pairs=99").contains("task"));
    assert!(training("data.kind=builtin").contains("task"));
    assert!(training("data.sequence_length=7").contains("192"));
    assert!(ok(folder, &["eval", "tasks"]).contains("diary"));
}

#[test]
fn every_task_is_learned_from_and_asked() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    for (task, length) in [("versioned:documents=2:keys=3:questions=4", "22"), ("needle:depth=50", "20")] {
        let name = task.split(':').next().unwrap();
        let mut arguments = vec!["train".to_string(), "demo/march".into(), "--run".into(), name.into()];
        let tokens = (8 * length.parse::<usize>().unwrap()).to_string();
        for (key, value) in [
            ("data.task", task),
            ("model.vocab_size", "64"),
            ("data.sequence_length", length),
            ("train.tokens_per_step", &tokens),
            ("train.steps", "2"),
        ] {
            arguments.extend(["--set".into(), format!("{key}={value}")]);
        }
        ok(folder, &arguments.iter().map(String::as_str).collect::<Vec<_>>());
        let said =
            ok(folder, &["eval", "--model", name, "--tasks", task, "--samples", "5", "--interval", "7"]);
        assert!(said.contains("chance"), "{said}");
    }
}

/// A run that is stopped and resumed is bit-identical to one that was not: the task's sequences continue
/// where they stopped.
#[test]
fn lessons_go_on_where_they_stopped() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let set =
        ["--set", "train.steps=4", "--set", "train.tokens_per_step=384", "--set", "train.micro_batch=1"];
    ok(folder, &[&["train", "demo/march", "--run", "whole"][..], &set].concat());
    ok(folder, &[&["train", "demo/march", "--run", "parts", "--stop-at", "2"][..], &set].concat());
    ok(folder, &["train", "--resume", "parts"]);
    let weights =
        |run: &str| std::fs::read(folder.join(run).join("checkpoints/step-4/model.safetensors")).unwrap();
    assert!(weights("whole") == weights("parts"));
}

#[test]
fn the_demo_leaves_what_it_says() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let said = ok(folder, &["demo", "--quick"]);
    let parts = [
        "right answers",
        "  2 days, 16 facts ",
        "  8 days, 64 facts (most in training)",
        "  32 days, 256 facts ",
        "  32 days, anchors in int8",
        "memory read after 32 days",
        "  also kept, only for rollback",
        "GDN, equal memory",
        "A quick run learns almost nothing",
        "report.html",
        "Next:",
    ];
    for part in parts {
        assert!(said.contains(part), "{part} is missing: {said}");
    }
    for stage in ["march", "gdn-wide", "gdn", "stages/march-1", "stages/march-2", "stages/gdn-2"] {
        assert!(folder.join("runs/demo").join(stage).join("run.json").exists(), "{stage}");
    }
    let page = std::fs::read_to_string(folder.join("runs/demo/report.html")).unwrap();
    assert!(
        page.contains("</html>")
            && !page.contains("NaN")
            && !page.contains("http://")
            && !page.contains("https://")
    );
    assert!(page.contains("What MARCH reads in one example") && page.contains("most read"));
    assert!(!page.contains("<td>0.000</td><td>0.00</td>"), "the map shows what the anchors gave");
    assert!(std::fs::read_to_string(folder.join("runs/demo/picture.svg")).unwrap().contains("</svg>"));
    // The commands that it suggests work, and give the accuracy of its table.
    let commands: Vec<&str> =
        said.lines().filter(|line| line.starts_with("  ") && line.contains(" --model ")).collect();
    assert_eq!(commands.len(), 3, "{said}");
    for command in commands {
        let (_, arguments) = command.trim().split_once(' ').unwrap();
        let mut words: Vec<String> = Vec::new();
        for (i, part) in arguments.split('\'').enumerate() {
            match i % 2 {
                0 => words.extend(part.split_whitespace().map(Into::into)),
                _ => words.push(part.into()),
            }
        }
        ok(folder, &words.iter().map(String::as_str).collect::<Vec<_>>());
    }
    let whole = ["eval", "--model", "runs/demo/march", "--tasks", DEMO_TASK, "--samples", "8"];
    ok(folder, &[&whole[..], &["--output", "whole.json"]].concat());
    let accuracy = read(&folder.join("whole.json"))["results"][0]["accuracy"].as_f64().unwrap();
    let row = said.lines().find(|line| line.starts_with("  8 days, 64 facts (")).unwrap();
    let march = row.split(')').nth(1).unwrap().trim_start();
    assert!(march.starts_with(&format!("{:.1} ±", 100.0 * accuracy)), "{row}: {accuracy}");
    let again = refused(folder, &["demo", "--quick", "--run", "runs/demo"]);
    assert!(again.contains("already holds a run"), "{again}");
}
