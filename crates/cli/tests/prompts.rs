//! Prompts that are long, slow or endless: memory stays small, and Ctrl-C works.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use march_lm::memory::BankFile;

use crate::common::writing::start;
use crate::common::{self, ok, text};

const WORD: &str = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ\n";

/// A small model, and a tokenizer that encodes a line of [`WORD`] as two tokens.
fn model(folder: &Path) -> (PathBuf, PathBuf) {
    let config = "extends = \"tiny/gdn\"\n[model]\nvocab_size = 320\nhidden_size = 8\nnum_hidden_layers = 1\n\
         intermediate_size = 8\nnum_heads = 1\nhead_dim = 4\nexpand_v = 1.0\nconv_size = 2\n";
    let [file, model, words, tokenizer] =
        ["small.toml", "model", "words.txt", "tokenizer.json"].map(|name| folder.join(name));
    fs::write(&file, config).unwrap();
    fs::write(&words, WORD.repeat(100)).unwrap();
    ok(&["init", "--config", text(&file), "--output", text(&model)]);
    ok(&["data", "train-tokenizer", "--vocab-size", "308", "--output", text(&tokenizer), text(&words)]);
    (model, tokenizer)
}

/// A process that ends when it is interrupted, with its messages.
fn interrupt(child: Child) -> String {
    let started = Instant::now();
    assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success());
    let out = child.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&out.stderr).into_owned();
    assert_eq!(out.status.code(), Some(130), "{said}");
    assert!(started.elapsed() < Duration::from_secs(20), "{:?}: {said}", started.elapsed());
    assert!(said.contains("interrupted before the end of the prompt"), "{said}");
    said
}

/// The peak memory of a process, in bytes.
fn peak(child: &Child) -> usize {
    let status = fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.split_whitespace().next().unwrap().parse::<usize>().unwrap() << 10
}

/// A prompt's ids are never all in memory at once, and its text is not either.
#[test]
fn memory_does_not_grow_with_the_prompt() {
    let folder = tempfile::tempdir().unwrap();
    let (model, tokenizer) = model(folder.path());
    let bank = folder.path().join("a.bank");
    let arguments =
        ["generate", "--model", text(&model), "--tokenizer", text(&tokenizer), "--save-bank", text(&bank)];
    let mut child = start(&arguments);
    let mut stdin = child.stdin.take().unwrap();
    let mut send = |bytes: usize| {
        let block = WORD.repeat(1 << 10);
        (0..bytes.div_ceil(block.len())).for_each(|_| stdin.write_all(block.as_bytes()).unwrap());
    };
    // Pipe, pieces and buffers are full.
    send(4 << 20);
    let before = peak(&child);
    send(20 << 20);
    let after = peak(&child);
    assert!(after < before + (8 << 20), "{before} bytes after 4 MiB, {after} after 24 MiB");
    // Everything except what is still in the buffers has been read; the process waits for more, and is
    // interrupted.
    let said = interrupt(child);
    let read = BankFile::open(&bank).unwrap().timeline().position;
    assert!(read > (20 << 20) / WORD.len() * 2, "{said}");
    assert!(said.contains("saved "), "{said}");
}

#[test]
fn an_endless_prompt_is_interrupted() {
    let folder = tempfile::tempdir().unwrap();
    let (model, tokenizer) = model(folder.path());
    for tokenizer in [text(&tokenizer), "bytes"] {
        let mut child = start(&["generate", "--model", text(&model), "--tokenizer", tokenizer]);
        let mut stdin = child.stdin.take().unwrap();
        let yes = std::thread::spawn(move || while stdin.write_all(&b"y\n".repeat(5000)).is_ok() {});
        std::thread::sleep(Duration::from_secs(2));
        interrupt(child);
        yes.join().unwrap();
    }
}

/// The words of a word-level vocabulary are read as they arrive.
#[test]
fn an_endless_prompt_of_words_begins() {
    let folder = tempfile::tempdir().unwrap();
    let (run, bank) = (folder.path().join("run"), folder.path().join("a.bank"));
    ok(&common::few_steps("demo/gdn", text(&run)));
    let mut child = start(&["generate", "--model", text(&run), "--save-bank", text(&bank)]);
    let mut stdin = child.stdin.take().unwrap();
    let block = "k1 v1\n".repeat(20_000);
    (0..8).for_each(|_| stdin.write_all(block.as_bytes()).unwrap());
    let said = interrupt(child);
    assert!(BankFile::open(&bank).unwrap().timeline().position > 1000, "{said}");
}

/// No input, or only half a call: nothing is saved before the first token.
#[test]
fn a_slow_prompt_is_interrupted() {
    let folder = tempfile::tempdir().unwrap();
    let (model, tokenizer) = model(folder.path());
    let bank = folder.path().join("a.bank");
    for sent in ["", "a few words\nof a text"] {
        let arguments = [
            "generate",
            "--model",
            text(&model),
            "--tokenizer",
            text(&tokenizer),
            "--save-bank",
            text(&bank),
        ];
        let mut child = start(&arguments);
        let mut stdin = child.stdin.take().unwrap();
        stdin.write_all(sent.as_bytes()).unwrap();
        std::thread::sleep(Duration::from_secs(2));
        let said = interrupt(child);
        assert!(said.contains("nothing was read") && !bank.exists(), "{said}");
    }
}

/// The ids and calls of a prompt do not depend on how it arrives.
#[test]
fn a_prompt_in_bits_is_the_whole_prompt() {
    let folder = tempfile::tempdir().unwrap();
    let (model, tokenizer) = model(folder.path());
    let file = folder.path().join("prompt.txt");
    let prompt = format!("{}é 🦀 and\n\n some more <|endoftext|>\nwords", WORD.repeat(50)).repeat(3);
    fs::write(&file, &prompt).unwrap();
    let common = ["generate", "--model", text(&model), "--tokenizer", text(&tokenizer), "--max-tokens", "20"];
    let whole = start(&[&common[..], &["--prompt-file", text(&file)]].concat()).wait_with_output().unwrap();
    let mut child = start(&common);
    let mut stdin = child.stdin.take().unwrap();
    for bit in prompt.as_bytes().chunks(701) {
        stdin.write_all(bit).unwrap();
        std::thread::sleep(Duration::from_millis(5));
    }
    drop(stdin);
    let bits = child.wait_with_output().unwrap();
    assert!(whole.status.success() && bits.status.success());
    assert_eq!(whole.stdout, bits.stdout);
    let tokens = |said: &[u8]| String::from_utf8_lossy(said).split(" in ").next().unwrap().to_string();
    assert_eq!(tokens(&whole.stderr), tokens(&bits.stderr));
}
