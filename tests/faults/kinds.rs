//! Every kind of file that the program writes and reads again, and GGUF files: how one is made, and what reads it.

use std::fs;
use std::path::{Path, PathBuf};

use crate::{Kind, Outcome, march};

/// A model that trains in a moment, on the built-in book.
const SMALL: &str = "extends = \"tiny/march\"
[model]
hidden_size = 16
num_hidden_layers = 2
intermediate_size = 24
num_heads = 2
head_dim = 4
anchor_interval = 8
routing_dim = 4
[data]
sequence_length = 40
[train]
steps = 100
tokens_per_step = 160
micro_batch = 2
validate_every = 3
validation_sequences = 3
sample_every = 5
sample_tokens = 5
save_every = 2
keep = 3
";

/// All kinds, made in a folder.
pub fn all(base: &Path) -> Vec<Kind> {
    let made = |name: &str| {
        let folder = base.join(name);
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("small.toml"), SMALL).unwrap();
        fs::write(folder.join("text.txt"), text()).unwrap();
        folder
    };
    let run = made("run");
    must(&run, &["train", "small.toml", "--run", "r", "--threads", "1", "--stop-at", "6"]);
    // A run with the weights of another, before its first step: it has no other checkpoint to go on from.
    let begun = made("begun");
    must(&begun, &["init", "--config", "small.toml", "--output", "m"]);
    let first = ["train", "small.toml", "--run", "r", "--init-from", "m", "--threads", "1", "--stop-at", "0"];
    must(&begun, &first);
    let model = made("model");
    must(&model, &["init", "--config", "small.toml", "--output", "m"]);
    let bank = made("bank");
    must(&bank, &["init", "--config", "small.toml", "--output", "m"]);
    must(&bank, &generate(&["--prompt-file", "text.txt", "--save-bank", "b"]));
    must(&bank, &generate(&["--prompt", "and more of it", "--bank", "b", "--save-bank", "b"]));
    let shards = made("shards");
    must(&shards, &["data", "prepare", "--tokenizer", "bytes", "--output", "tokens", "text.txt"]);
    let unfinished = made("unfinished");
    begin_shards(&unfinished);
    let tokenizer = made("tokenizer");
    must(&tokenizer, &["data", "train-tokenizer", "--vocab-size", "300", "--output", "t.json", "text.txt"]);
    let results = made("results");
    must(&results, &["train", "demo/march", "--run", "r", "--steps", "2", "--threads", "1"]);
    for (interval, file) in [("16", "a.json"), ("1000", "b.json")] {
        let task = "diary:days=8:facts=8:things=8:places=64:dates=64:questions=16";
        let flags = ["--tasks", task, "--samples", "8", "--interval", interval, "--output", file];
        must(&results, &[&["eval", "--model", "r", "--threads", "1"][..], &flags].concat());
    }
    let packed = made("packed");
    must(&packed, &["init", "--config", "small.toml", "--weights", "q4", "--output", "m"]);
    let gguf = made("gguf");
    for name in ["qwen3.gguf", "qwen3.gguf.sha256"] {
        let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../lm/tests/fixtures/gguf");
        fs::copy(fixtures.join(name), gguf.join(name)).unwrap();
    }

    let mut kinds = Vec::new();
    let mut add = |name, folder: &Path, file: &str, read: fn(&Path) -> Outcome| {
        assert!(folder.join(file).is_file(), "{file} was not made");
        let place = base.join("expected");
        crate::copy(folder, &place);
        let Outcome::Done(expected) = read(&place) else { panic!("{name}: the undamaged file was refused") };
        fs::remove_dir_all(&place).unwrap();
        kinds.push(Kind { name, folder: folder.into(), file: PathBuf::from(file), read, expected });
    };
    add("checkpoint: model.safetensors", &run, "r/checkpoints/step-6/model.safetensors", resume);
    add("checkpoint: optimizer.safetensors", &run, "r/checkpoints/step-6/optimizer.safetensors", resume);
    add("checkpoint: config.json", &run, "r/checkpoints/step-6/config.json", resume);
    add("checkpoint: progress.json", &run, "r/checkpoints/step-6/progress.json", resume);
    add("checkpoint: tokenizer.json", &run, "r/checkpoints/step-6/tokenizer.json", resume);
    add("checkpoint: checksums.json", &run, "r/checkpoints/step-6/checksums.json", resume);
    add("first weights: model.safetensors", &begun, "r/checkpoints/step-0/model.safetensors", begin);
    add("first weights: config.json", &begun, "r/checkpoints/step-0/config.json", begin);
    add("first weights: progress.json", &begun, "r/checkpoints/step-0/progress.json", begin);
    add("first weights: checksums.json", &begun, "r/checkpoints/step-0/checksums.json", begin);
    add("run: config.toml", &run, "r/config.toml", resume);
    add("run: run.json", &run, "r/run.json", resume);
    add("run: metrics.jsonl", &run, "r/metrics.jsonl", resume);
    add("run: environment.json", &run, "r/environment.json", report);
    add("run: samples.txt", &run, "r/samples.txt", resume);
    add("model: model.safetensors", &model, "m/model.safetensors", write);
    add("model: config.json", &model, "m/config.json", write);
    add("model: checksums.json", &model, "m/checksums.json", write);
    add("bank", &bank, "b", continue_bank);
    add("tokens: meta.json", &shards, "tokens/meta.json", learn);
    add("tokens: tokens-00000.bin", &shards, "tokens/tokens-00000.bin", learn);
    add("tokens: tokenizer.json", &shards, "tokens/tokenizer.json", learn);
    add("unfinished tokens: progress.json", &unfinished, "tokens/progress.json", finish_shards);
    add("unfinished tokens: tokens-00000.bin", &unfinished, "tokens/tokens-00000.bin", finish_shards);
    add("tokenizer", &tokenizer, "t.json", encode);
    add("tokenizer: .sha256", &tokenizer, "t.json.sha256", encode);
    add("results of eval", &results, "a.json", compare);
    add("GGUF file with a checksum", &gguf, "qwen3.gguf", write_of_gguf);
    add("model in q4: model.safetensors", &packed, "m/model.safetensors", write);
    kinds
}

/// A text of a few kB in which nothing is twice.
fn text() -> String {
    (0..300).map(|i| format!("line {i} of a small book with {} words\n", i * i % 97)).collect()
}

fn must(folder: &Path, arguments: &[&str]) {
    match march(folder, arguments) {
        Ok(_) => {}
        Err(Outcome::Crashed(how)) => panic!("{how}"),
        Err(_) => panic!("march {arguments:?} failed"),
    }
}

/// Runs commands one after the other; gives what `result` makes of it.
fn all_of(folder: &Path, commands: &[&[&str]], result: impl FnOnce(&Path, Vec<u8>) -> Vec<u8>) -> Outcome {
    let mut printed = Vec::new();
    for command in commands {
        match march(folder, command) {
            Ok(out) => printed.extend(out),
            Err(outcome) => return outcome,
        }
    }
    Outcome::Done(result(folder, printed))
}

/// The files of a folder with their names.
fn contents(folder: &Path) -> Vec<u8> {
    crate::snapshot(folder)
        .into_iter()
        .flat_map(|(path, bytes)| {
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            [name.into_bytes(), bytes].concat()
        })
        .collect()
}

/// Training goes on and is reported.
fn resume(folder: &Path) -> Outcome {
    let resume = ["train", "--resume", "r", "--threads", "1", "--stop-at", "9"];
    all_of(folder, &[&resume, &["report", "r"]], |folder, _| {
        let metrics = fs::read_to_string(folder.join("r/metrics.jsonl")).unwrap_or_default();
        let lines = metrics.lines().map(|line| {
            let mut line: serde_json::Value = serde_json::from_str(line).unwrap_or_default();
            for key in ["tokens_per_second", "checksum"] {
                line.as_object_mut().map(|line| line.remove(key));
            }
            line.to_string()
        });
        let lines: String = lines.collect();
        let samples = fs::read(folder.join("r/samples.txt")).unwrap_or_default();
        [contents(&folder.join("r/checkpoints/step-9")), lines.into_bytes(), samples].concat()
    })
}

/// A run takes its first steps.
fn begin(folder: &Path) -> Outcome {
    let resume = ["train", "--resume", "r", "--threads", "1", "--stop-at", "2"];
    all_of(folder, &[&resume], |folder, _| contents(&folder.join("r/checkpoints/step-2")))
}

/// The run as a page, which tells when and where it ran.
fn report(folder: &Path) -> Outcome {
    all_of(folder, &[&["report", "r"]], |folder, _| {
        fs::read(folder.join("r/report.html")).unwrap_or_default()
    })
}

fn generate<'a>(flags: &[&'a str]) -> Vec<&'a str> {
    let common = ["generate", "--model", "m", "--temperature", "0", "--max-tokens", "8", "--threads", "1"];
    [&common[..], flags].concat()
}

/// A model writes.
fn write(folder: &Path) -> Outcome {
    all_of(folder, &[&generate(&["--prompt", "Once upon a time there"])], |_, printed| printed)
}

/// The model of a GGUF file writes.
fn write_of_gguf(folder: &Path) -> Outcome {
    let flags = ["--model", "qwen3.gguf", "--temperature", "0", "--max-tokens", "8", "--threads", "1"];
    all_of(folder, &[&[&["generate", "--prompt", "the sea"][..], &flags].concat()], |_, printed| printed)
}

/// A text goes on from its bank, which is saved again and inspected.
fn continue_bank(folder: &Path) -> Outcome {
    let goes_on = generate(&["--bank", "b", "--prompt", " and then", "--save-bank", "b"]);
    all_of(folder, &[&goes_on, &["inspect", "bank", "b"]], |_, printed| printed)
}

/// A model learns from a folder of tokens.
fn learn(folder: &Path) -> Outcome {
    let set = ["--set", "data.kind=shards", "--set", "data.path=tokens", "--stop-at", "4", "--threads", "1"];
    let train = [&["train", "small.toml", "--run", "r"][..], &set].concat();
    all_of(folder, &[&train], |folder, _| contents(&folder.join("r/checkpoints/step-4")))
}

const PREPARE: [&str; 10] = [
    "data",
    "prepare",
    "--tokenizer",
    "bytes",
    "--shard-tokens",
    "4000",
    "--output",
    "tokens",
    "a.jsonl",
    "b.jsonl",
];

/// Begins what [`PREPARE`] asks for: it stops at a broken line of the second file, which is fixed then.
fn begin_shards(folder: &Path) {
    let line = |i: usize| format!("{{\"text\": \"document {i} of many\"}}\n");
    fs::write(folder.join("a.jsonl"), (0..300).map(line).collect::<String>()).unwrap();
    let second: String = (300..400).map(line).collect();
    fs::write(folder.join("b.jsonl"), second.replacen('}', "]", 1)).unwrap();
    assert!(matches!(march(folder, &PREPARE), Err(Outcome::Refused)));
    fs::write(folder.join("b.jsonl"), second).unwrap();
}

fn finish_shards(folder: &Path) -> Outcome {
    all_of(folder, &[&PREPARE], |folder, _| contents(&folder.join("tokens")))
}

/// A trained tokenizer encodes a text.
fn encode(folder: &Path) -> Outcome {
    let prepare = ["data", "prepare", "--tokenizer", "t.json", "--output", "tokens", "text.txt"];
    all_of(folder, &[&prepare], |folder, _| {
        fs::read(folder.join("tokens/tokens-00000.bin")).unwrap_or_default()
    })
}

/// Two evaluations are compared.
fn compare(folder: &Path) -> Outcome {
    all_of(folder, &[&["eval", "compare", "a.json", "b.json"]], |_, printed| printed)
}
