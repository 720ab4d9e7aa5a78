//! The commands as a user runs them.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use march_lm::checkpoint::Checkpoint;
use march_lm::engine::{CpuOptions, Device};
use march_lm::memory::BankTag;
use march_lm::model::{Batch, Model};
use march_lm::tokenizer::Tokenizer;
use safetensors::SafeTensors;

use crate::common::{few_steps, ok, refused};

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("golden").join(name)
}

type Tensors = BTreeMap<String, (Vec<usize>, Vec<f64>)>;

fn read(path: &Path) -> Tensors {
    let bytes = std::fs::read(path).unwrap();
    let number = |b: &[u8]| match b.len() {
        8 => i64::from_le_bytes(b.try_into().unwrap()) as f64,
        _ => f64::from(f32::from_le_bytes(b.try_into().unwrap())),
    };
    let file = SafeTensors::deserialize(&bytes).unwrap();
    file.iter()
        .map(|(name, view)| {
            let size = view.dtype().bitsize() / 8;
            let numbers = view.data().chunks_exact(size).map(number).collect();
            (name.to_string(), (view.shape().to_vec(), numbers))
        })
        .collect()
}

fn assert_close(label: &str, a: &Tensors, b: &Tensors, name: &str, other: &str, limit: f64) {
    let ((shape, a), (other_shape, b)) = (&a[name], &b[other]);
    assert_eq!(shape, other_shape, "{label} {name}");
    let largest = b.iter().fold(0.0f64, |m, v| m.max(v.abs()));
    let difference = a.iter().zip(b).fold(0.0f64, |m, (a, b)| m.max((a - b).abs()));
    assert!(difference <= limit * largest.max(1e-30), "{label} {name}: {:e}", difference / largest);
}

fn logits(model: &str, tokens: &Path, folder: &Path, flags: &[&str]) -> Tensors {
    let output = folder.join("out.safetensors");
    let mut arguments = vec!["logits", "--model", model, "--tokens", tokens.to_str().unwrap()];
    arguments.extend(["--output", output.to_str().unwrap()]);
    arguments.extend(flags);
    ok(&arguments);
    read(&output)
}

#[test]
fn logits_are_the_golden_ones() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["transformer", "gated_deltanet", "log_linear", "march", "march_topk"] {
        let (model, tokens) = (golden(name), golden(name).join("tokens.json"));
        let model = model.to_str().unwrap();
        let expected = read(&golden(name).join("expected.safetensors"));
        let run = |flags: &[&str]| logits(model, &tokens, folder.path(), flags);
        assert_close(name, &run(&[]), &expected, "logits", "logits", 1e-4);
        assert_close(name, &run(&["--decode"]), &expected, "logits", "logits", 1e-4);
        if !name.starts_with("march") {
            continue;
        }
        for (key, flags) in [
            ("logits.interval_20", ["--interval", "20"]),
            ("logits.top_k_2", ["--routing-top-k", "2"]),
            ("logits.fenwick", ["--retention", "fenwick"]),
        ] {
            assert_close(key, &run(&flags), &expected, "logits", key, 1e-4);
            assert_close(key, &run(&[&flags[..], &["--decode"]].concat()), &expected, "logits", key, 1e-4);
        }
        for flags in [&["--trace"][..], &["--trace", "--decode"]] {
            let traced = run(flags);
            for layer in 0..3 {
                let key = format!("routing_weights.{layer}");
                assert_close(name, &traced, &expected, &key, &key, 1e-4);
            }
            let interval = if name == "march" { 16.0 } else { 8.0 };
            let (shape, boundaries) = &traced["boundaries"];
            assert_eq!(shape[0], boundaries.len());
            assert!(boundaries.iter().enumerate().all(|(m, &b)| b == (m + 1) as f64 * interval));
        }
    }
}

#[test]
fn decoding_equals_the_forward_pass() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["transformer", "gated_deltanet", "log_linear", "march", "march_topk"] {
        for length in [1, 7, 131, 5000] {
            let ids: Vec<usize> = (0..length).map(|i| (i * i * 31 + i * 7 + length) % 61).collect();
            let tokens = folder.path().join("tokens.json");
            std::fs::write(&tokens, serde_json::to_string(&ids).unwrap()).unwrap();
            let model = golden(name);
            let run = |flags: &[&str]| logits(model.to_str().unwrap(), &tokens, folder.path(), flags);
            let label = format!("{name}, {length} tokens");
            assert_close(&label, &run(&["--decode"]), &run(&[]), "logits", "logits", 1e-5);
        }
    }
}

/// Settings that only apply to a bank: reading token by token gives the same result as reading at once.
#[test]
fn every_setting_of_the_bank_can_be_chosen() {
    let folder = tempfile::tempdir().unwrap();
    let ids: Vec<usize> = (0..131).map(|i| (i * i * 31 + i * 7) % 61).collect();
    let tokens = folder.path().join("tokens.json");
    std::fs::write(&tokens, serde_json::to_string(&ids).unwrap()).unwrap();
    let model = golden("march");
    let run = |flags: &[&str]| logits(model.to_str().unwrap(), &tokens, folder.path(), flags);
    for flags in [
        &["--retention", "recent:2", "--storage", "int8"][..],
        &["--retention", "budget:50kB", "--routing-top-k", "2", "--interval", "5"],
        &["--placement", "adaptive:4", "--storage", "bf16", "--retention", "fenwick"],
        &["--placement", "adaptive:2", "--retention", "budget:0.1 MiB", "--interval", "7"],
    ] {
        let flags = [flags, &["--trace"]].concat();
        let (at_once, decoded) = (run(&flags), run(&[&flags[..], &["--decode"]].concat()));
        for key in ["logits", "routing_weights.0", "routing_weights.1", "boundaries"] {
            assert_close(&format!("{flags:?}"), &decoded, &at_once, key, key, 1e-5);
        }
        assert!(!at_once["boundaries"].1.is_empty());
    }
}

#[test]
fn the_paper_s_sizes() {
    for (preset, count) in [
        ("paper/transformer-21", "692,912,640"),
        ("paper/transformer-24", "777,856,512"),
        ("paper/gdn", "792,785,532"),
        ("paper/log-linear", "795,690,462"),
        ("paper/march", "817,753,338"),
    ] {
        let text = ok(&["inspect", "model", preset]);
        assert!(text.lines().any(|l| l.trim_start().starts_with("total") && l.contains(count)), "{text}");
    }
    let text = ok(&["inspect", "model", "--list"]);
    assert!(text.contains("tiny/march") && text.contains("ablation/top-4"), "{text}");
}

#[test]
fn a_checkpoint_from_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("deep/model");
    let model = model.to_str().unwrap();
    let text = ok(&["init", "--config", "tiny/march", "--seed", "3", "--output", model]);
    assert!(text.contains("2,627,108 parameters"), "{text}");
    let text = ok(&["inspect", "model", model, "--interval", "128"]);
    assert!(text.contains("2,627,108") && text.contains("every 128 tokens"), "{text}");
    assert!(text.contains("of it only for rollback"), "{text}");
    let again = folder.path().join("again");
    ok(&["init", "--config", "tiny/march", "--seed", "3", "--output", again.to_str().unwrap()]);
    let file = |folder: &Path| std::fs::read(folder.join("model.safetensors")).unwrap();
    assert!(file(Path::new(model)) == file(&again), "the same seed gives the same bytes");
    let errors = refused(&["init", "--config", "tiny/march", "--output", model]);
    assert!(errors.contains("already exists"), "{errors}");
    let tokens = folder.path().join("tokens.json");
    std::fs::write(&tokens, "[1, 2, 3]").unwrap();
    let traced = logits(model, &tokens, folder.path(), &["--trace"]);
    assert_eq!(traced["logits"].0, [3, 257]);
    assert_eq!(traced["routing_weights.3"].0, [3, 3, 0]);
}

#[test]
fn what_loading_refuses_is_not_shown() {
    let folder = tempfile::tempdir().unwrap();
    let tokens = folder.path().join("tokens.json");
    std::fs::write(&tokens, "[1, 2, 3]").unwrap();
    let output = folder.path().join("out.safetensors");
    let changed = |name: &str, key: &str, value: serde_json::Value| {
        let model = folder.path().join(format!("{name}-{key}"));
        std::fs::create_dir(&model).unwrap();
        std::fs::copy(golden(name).join("model.safetensors"), model.join("model.safetensors")).unwrap();
        let text = std::fs::read_to_string(golden(name).join("config.json")).unwrap();
        let mut keys: serde_json::Value = serde_json::from_str(&text).unwrap();
        keys[key] = value;
        std::fs::write(model.join("config.json"), keys.to_string()).unwrap();
        model.to_str().unwrap().to_string()
    };
    for (name, key, value, part) in [
        ("gated_deltanet", "hidden_size", 64.into(), "has shape"),
        ("gated_deltanet", "num_hidden_layers", 4.into(), "missing"),
        ("gated_deltanet", "tie_word_embeddings", true.into(), "`lm_head.weight`"),
        ("gated_deltanet", "output_gate_activation", "relu".into(), "output_gate_activation"),
        ("transformer", "attnres_block_size", 4.into(), "`attnres_block_size` is 4"),
        ("march", "null_route", false.into(), "null_proj"),
    ] {
        let model = changed(name, key, value);
        let shown = refused(&["inspect", "model", &model]);
        assert!(shown.contains(part), "{shown}");
        let (tokens, output) = (tokens.to_str().unwrap(), output.to_str().unwrap());
        assert_eq!(refused(&["logits", "--model", &model, "--tokens", tokens, "--output", output]), shown);
    }
    ok(&["inspect", "model", &changed("transformer", "use_cache", true.into())]);
}

/// `inspect model` accepts a run folder and rejects damage, as other commands do.
#[test]
fn a_run_is_shown_and_a_damaged_one_is_not() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    let run = run.to_str().unwrap();
    ok(&few_steps("demo/march", run));
    let newest = format!("{run}/checkpoints/step-3");
    let table = |name: &str| ok(&["inspect", "model", name]).replace(name, "MODEL");
    assert_eq!(table(run), table(&newest));
    let file = format!("{newest}/model.safetensors");
    let sound = std::fs::read(&file).unwrap();
    let mut flipped = sound.clone();
    *flipped.last_mut().unwrap() ^= 1;
    std::fs::write(&file, flipped).unwrap();
    assert!(refused(&["inspect", "model", run]).contains("checksum"));
    // Without the list of checksums, a number that is NaN.
    std::fs::remove_file(format!("{newest}/checksums.json")).unwrap();
    let mut broken = sound.clone();
    let end = broken.len();
    broken[end - 4..].copy_from_slice(&f32::NAN.to_le_bytes());
    std::fs::write(&file, broken).unwrap();
    for model in [run, &newest] {
        let errors = refused(&["inspect", "model", model]);
        assert!(errors.contains("model.safetensors: tensor `") && errors.contains("not finite"), "{errors}");
    }
}

#[test]
fn a_bank_is_shown() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("notes.safetensors");
    let device = Device::cpu(CpuOptions { threads: 1, ..Default::default() }).unwrap();
    let checkpoint = Checkpoint::open(&golden("march")).unwrap();
    let (model, parameters) = Model::load(&device, &checkpoint).unwrap();
    let mut bank = model.bank(model.policy()).unwrap();
    let ids: Vec<u32> = (0..16 * 20 + 5).map(|i| i % 61).collect();
    model.extend(&parameters.into(), Batch::one(&ids), &mut [&mut bank], None).unwrap();
    let fingerprint = model.checkpoint_fingerprint(&checkpoint).unwrap();
    let tag = BankTag::new(model.config().mixer.model_type(), fingerprint.clone(), &Tokenizer::bytes());
    bank.save(&path, &tag).unwrap();
    let file = path.to_str().unwrap();
    let text = ok(&["inspect", "bank", file]);
    for part in [
        "format version 1",
        &fingerprint,
        "bytes, ",
        "interval 16, top_k none, retention all",
        "325 tokens",
        "20 kept of 20",
        "1 at 16, 2 at 32",
        "…, 13 at 208",
        "20 at 320",
        "anchors.states",
        "all right",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    // What only a rollback uses, listed apart: the same bytes as those of the bank in memory.
    let line = text.lines().find(|line| line.contains("of it only for rollback")).expect("no such line");
    let words: Vec<&str> = line.split_whitespace().rev().take(2).collect();
    let unit = ["B", "KiB", "MiB"].iter().position(|unit| *unit == words[0]).unwrap();
    let shown = words[1].parse::<f64>().unwrap() * 1024f64.powi(unit as i32);
    let kept = bank.rollback_bytes() as f64;
    assert!(kept > 0.0 && (shown / kept - 1.0).abs() < 0.01, "{kept}: {text}");
    let mut bytes = std::fs::read(&path).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&path, &bytes).unwrap();
    let errors = refused(&["inspect", "bank", file]);
    assert!(errors.contains("is damaged: tensor `layers."), "{errors}");
    bytes.truncate(5000);
    std::fs::write(&path, &bytes).unwrap();
    assert!(refused(&["inspect", "bank", file]).contains("notes.safetensors"));
    let checkpoint = golden("march").join("model.safetensors");
    let errors = refused(&["inspect", "bank", checkpoint.to_str().unwrap()]);
    assert!(errors.contains("is not a state bank"), "{errors}");
}

#[test]
fn mistakes_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_string();
    let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
    let gdn = golden("gated_deltanet");
    let gdn = gdn.to_str().unwrap();
    write("good.json", "[1, 2, 3]");
    let run = |model: &str, tokens: &str, flags: &[&str]| {
        let (tokens, output) = (path(tokens), path("out.safetensors"));
        let mut all = vec!["logits", "--model", model, "--tokens", &tokens, "--output", &output];
        all.extend(flags);
        refused(&all)
    };
    for (text, part) in [
        ("[1, -2]", "entry 1 is -2"),
        ("{}", "not a list"),
        ("[1, 2", "not JSON"),
        ("[]", "the list is empty"),
        ("[3, 61]", "token id 61 at position 1"),
    ] {
        write("bad.json", text);
        let errors = run(gdn, "bad.json", &[]);
        assert!(errors.contains(part), "{errors}");
    }
    assert!(run(gdn, "absent.json", &[]).contains("absent.json"));
    assert!(run("/no/such/model", "good.json", &[]).contains("/no/such/model"));
    assert!(run(gdn, "good.json", &["--interval", "4"]).contains("has no anchors"));
    assert!(run(gdn, "good.json", &["--trace"]).contains("does not route"));
    assert!(run(gdn, "good.json", &["--routing-top-k", "0"]).contains("above 0, or `dense`"));
    assert!(run(gdn, "good.json", &["--retention", "some"]).contains("`all`, `fenwick`, `recent:N`"));
    assert!(run(gdn, "good.json", &["--storage", "f16"]).contains("`f32`, `bf16` or `int8`"));
    assert!(run(gdn, "good.json", &["--placement", "random"]).contains("`adaptive:MIN`"));
    assert!(run(gdn, "good.json", &["--weights", "fp8"]).contains("`int8`, `q8` or `q4`"));
    let march = golden("march");
    let errors = run(march.to_str().unwrap(), "good.json", &["--interval", "0"]);
    assert!(errors.contains("interval of 0"), "{errors}");
    let output = path("no/such/folder/out.safetensors");
    let good = path("good.json");
    let errors = refused(&["logits", "--model", gdn, "--tokens", &good, "--output", &output]);
    assert!(errors.contains("does not exist; create it first"), "{errors}");
    assert!(!folder.path().join("out.safetensors").exists());
    let errors = refused(&["inspect", "model", "paper/marhc"]);
    assert!(errors.contains("paper/march"), "{errors}");
    write("bad.toml", "extends = \"tiny/march\"\n[model]\nanchor_intervall = 8\n");
    let errors = refused(&["init", "--config", &path("bad.toml"), "--output", &path("new")]);
    assert!(errors.contains("`anchor_intervall`") && errors.contains("`anchor_interval`"), "{errors}");
    assert!(!folder.path().join("new").exists());
    // The parts of a tokenizer are named as in the file.
    let broken = "{\"version\": \"1.0\", \"added_tokens\": [], \"model\": {\"vocab\": 7}}";
    write("tokenizer.json", broken);
    write("text.txt", "a text");
    let (tokenizer, tokens, file) = (path("tokenizer.json"), path("tokens"), path("text.txt"));
    let errors = refused(&["data", "prepare", "--tokenizer", &tokenizer, "--output", &tokens, &file]);
    assert!(errors.contains("its `model` is not valid") && !errors.contains("enum"), "{errors}");
    write("list.json", "[1, 2]");
    let errors = refused(&["eval", "compare", &path("list.json"), &path("list.json")]);
    assert!(errors.contains("is not a file of results") && errors.contains("not a JSON object"), "{errors}");
}

/// What a killed process left next to a new folder is removed; what a running process is writing is not.
#[cfg(unix)]
#[test]
fn leftovers_of_dead_processes_are_removed() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let (dead, alive, other) =
        (path(".new.partial-99999"), path(".new.partial-77777"), path(".older.partial-99999"));
    for left in [&dead, &alive, &other] {
        std::fs::create_dir(left).unwrap();
        std::fs::write(left.join("config.json"), "{}").unwrap();
    }
    let held = std::fs::File::open(&alive).unwrap();
    held.lock().unwrap();
    ok(&["init", "--config", "tiny/march", "--output", path("new").to_str().unwrap()]);
    assert!(!dead.exists() && alive.exists() && other.exists());
    assert!(path("new").join("config.json").exists());
}

/// Logits with weights in fewer bits are close to those of f32, and `inspect precision` reports how close.
#[test]
fn weights_in_fewer_bits() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["transformer", "march"] {
        let (model, tokens) = (golden(name), golden(name).join("tokens.json"));
        let expected = read(&golden(name).join("expected.safetensors"));
        for (weights, limit) in [("bf16", 0.05), ("int8", 0.3), ("q8", 0.3), ("q4", 1.0)] {
            let flags = ["--weights", weights, "--decode"];
            let found = logits(model.to_str().unwrap(), &tokens, folder.path(), &flags);
            assert_close(name, &found, &expected, "logits", "logits", limit);
        }
    }
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_string();
    let (model, text) = (path("tiny"), path("text.txt"));
    ok(&["init", "--config", "tiny/march", "--output", &model]);
    std::fs::write(&text, "One checkpoint, any memory policy.").unwrap();
    let inspect = |model: &str, flags: &[&str]| {
        ok(&[&["inspect", "precision", "--model", model, "--text", &text], flags].concat())
    };
    let report = inspect(&model, &[]);
    for part in [
        "34 tokens",
        "f32",
        "bf16",
        "int8",
        "q8",
        "q4",
        "perplexity",
        "largest logit error",
        "too short for an anchor",
    ] {
        assert!(report.contains(part), "{report}");
    }
    // A second table if a token can see an anchor; its first row equals the first row of the first table.
    let report = inspect(&model, &["--interval", "5"]);
    let rows: Vec<Vec<&str>> = report.lines().map(|line| line.split_whitespace().collect()).collect();
    let row = |name: &str, n: usize| rows.iter().filter(|row| row.first() == Some(&name)).nth(n).unwrap();
    assert_eq!(row("f32", 0)[3..7], row("f32", 1)[3..7], "{report}");
    assert!(row("anchors", 0)[1] == "bytes" && row("int8", 1)[6] != "0.00000", "{report}");
    let baseline = path("gdn");
    ok(&["init", "--config", "tiny/gdn", "--output", &baseline]);
    assert!(!inspect(&baseline, &[]).contains("anchor"));
    std::fs::write(&text, "").unwrap();
    assert!(refused(&["inspect", "precision", "--model", &model, "--text", &text]).contains("at least two"));
}

/// One row per policy; the same numbers in the output file and in Markdown.
#[test]
fn policies_are_compared() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_string();
    let (model, output) = (path("tiny"), path("out.json"));
    ok(&["init", "--config", "tiny/march", "--output", &model]);
    let own = |flags: &[&'static str]| [&["inspect", "policies", "--model", &model], flags].concat();
    let report = ok(&[&own(&["--lengths", "130,40", "--decode", "8"])[..], &["--output", &output]].concat());
    for part in [
        "the last 130 tokens of the built-in book",
        "bytes after 40",
        "interval=64 top-k=dense ",
        "interval=32 top-k=dense ",
        "interval=512 top-k=dense ",
        "interval=64 top-k=16 ",
        "interval=64 top-k=dense retention=recent:64 ",
        "interval=64 top-k=dense placement=adaptive:32 ",
        "interval=64 top-k=4 storage=int8 ",
        "interval=64 top-k=4 retention=budget:7MB storage=int8 ",
    ] {
        assert!(report.contains(part), "{part}: {report}");
    }
    let found: serde_json::Value = serde_json::from_slice(&std::fs::read(&output).unwrap()).unwrap();
    let rows = found["rows"].as_array().unwrap();
    let printed = |report: &str, name: &str| report.lines().filter(|line| line.starts_with(name)).count();
    assert_eq!(
        (rows.len(), printed(&report, "interval="), printed(&report, "no anchors")),
        (17, 16, 1),
        "{report}"
    );
    for row in &rows[..16] {
        let measured = &row["measured"];
        let bytes: Vec<u64> = (0..2).map(|i| measured["bank_bytes"][i].as_u64().unwrap()).collect();
        assert!(bytes[0] > 0 && (bytes[1] > bytes[0] || row["settings"]["interval"] == 512), "{row}");
        let (loss, change) = (measured["loss"].as_f64().unwrap(), row["change"].as_f64().unwrap());
        assert!((loss - 5.5).abs() < 1.0 && change.abs() < 0.5, "{row}");
        assert!(measured["read_speed"].as_f64() > Some(0.0) && measured["decode_speed"].as_f64() > Some(0.0));
    }
    assert_eq!(rows[0]["change"].as_f64(), Some(0.0));
    let short =
        ["--lengths", "1", "--decode", "0", "--markdown", "--policy", "", "--policy", "interval=1 top-k=2"];
    let report = ok(&own(&short));
    let lines: Vec<&str> = report.lines().collect();
    assert_eq!(
        lines[..2],
        ["| policy | bytes after 1 | loss | change | read/s | decoded/s |", "|---|--:|--:|--:|--:|--:|"]
    );
    assert!(lines[3].starts_with("| `interval=1 top-k=2` | "), "{report}");
    assert!(lines[2].contains(" | – | – | ") && lines[2].ends_with(" | – |"), "{report}");
    for (flags, part) in [
        (&["--lengths", "4096,999999"][..], "the built-in book has 1"),
        (&["--lengths", "0,5"], "from 1 to"),
        (&["--lengths", "5", "--policy", "topk=4"], "`topk` is not a setting"),
        (&["--lengths", "5", "--policy", "retention=budget:1kB"], "is too small: one anchor"),
        (&["--lengths", "5", "--output", "/no/such/folder/out.json"], "/no/such/folder"),
    ] {
        let errors = refused(&own(flags));
        assert!(errors.contains(part), "{errors}");
    }
    let (march, model, text) = (model, path("gdn"), path("text.txt"));
    ok(&["init", "--config", "tiny/gdn", "--output", &model]);
    let flags = ["--lengths", "40", "--decode", "0", "--policy", "", "--policy", "none", "--beside", &model];
    let report = ok(&[&["inspect", "policies", "--model", &march], &flags[..]].concat());
    let printed_rows = ["interval=64", "no anchors", "gdn "].map(|name| printed(&report, name));
    assert_eq!(printed_rows, [1; 3], "{report}");
    std::fs::write(&text, "One checkpoint, any memory policy.").unwrap();
    let flags = ["inspect", "policies", "--model", &model, "--text", &text, "--lengths"];
    let report = ok(&[&flags[..], &["34"]].concat());
    assert!(printed(&report, "no anchors") == 1, "{report}");
    let errors = refused(&[&flags[..], &["35"]].concat());
    assert!(errors.contains("text.txt has 34 tokens") && errors.contains("asks for 35"), "{errors}");
    let errors = refused(&[&flags[..], &["34", "--policy", "top-k=4"]].concat());
    assert!(errors.contains("has no anchors"), "{errors}");
}

#[test]
fn every_command_explains_itself() {
    for command in [
        &["doctor"][..],
        &["init"],
        &["inspect", "bank"],
        &["inspect", "model"],
        &["inspect", "policies"],
        &["inspect", "precision"],
        &["logits"],
        &["report"],
        &["train"],
    ] {
        let text = ok(&[command, &["--help"]].concat());
        assert!(text.contains("Example"), "{command:?}: {text}");
    }
}
