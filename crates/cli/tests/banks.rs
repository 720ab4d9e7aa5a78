//! Banks from the command line: continuing, rolling back, overwriting other banks, and concurrent writers.

use std::fs;
use std::io::{Read, Write};
use std::path::Path;
use std::process::{Command, Stdio};

use march_lm::checkpoint::Checkpoint;
use march_lm::engine::{CpuOptions, Device, Precision};
use march_lm::memory::BankFile;
use march_lm::model::Model;

#[cfg(unix)]
use crate::common::as_nobody;
use crate::common::writing::{start, trained, with_input};
use crate::common::{self, ok, refused, text};

const PROMPT: &str = "Alice was beginning to get very tired of sitting by her sister on the bank. ";

/// The arguments of `march generate`, greedy.
fn generate<'a>(model: &'a Path, flags: &[&'a str]) -> Vec<&'a str> {
    let mut arguments = vec!["generate", "--model", text(model), "--temperature", "0"];
    arguments.extend(["--repetition-penalty", "1.2", "--penalty-window", "100"]);
    arguments.extend(flags);
    arguments
}

/// Standard output and standard error, with nothing on standard input.
fn run(model: &Path, flags: &[&str]) -> (String, String) {
    with_input(&generate(model, flags), "")
}

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap();
    let mut names: Vec<String> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

fn interrupt(id: u32) {
    assert!(Command::new("kill").args(["-INT", &id.to_string()]).status().unwrap().success());
}

#[test]
fn a_bank_is_continued_by_an_empty_prompt() {
    let folder = tempfile::tempdir().unwrap();
    let model = trained(folder.path());
    let bank = folder.path().join("a.bank");
    let (whole, _) = run(&model, &["--prompt", PROMPT, "--max-tokens", "60"]);
    let (mut parts, _) = run(&model, &["--prompt", PROMPT, "--max-tokens", "20", "--save-bank", text(&bank)]);
    for prompt in [&["--prompt", ""][..], &[]] {
        let flags = ["--bank", text(&bank), "--save-bank", text(&bank), "--max-tokens", "20"];
        let (more, said) = run(&model, &[prompt, &flags].concat());
        assert!(said.contains("read     0 tokens") && said.contains("saved "), "{said}");
        parts += &more;
    }
    assert_eq!(parts, whole);
    assert_eq!(BankFile::open(&bank).unwrap().version(), 2);
    // A file without the end of the text, as earlier versions wrote it.
    let device = Device::cpu(CpuOptions { threads: 1, ..Default::default() }).unwrap();
    let (loaded, _) = Model::load_in(&device, &Checkpoint::open(&model).unwrap(), Precision::F32).unwrap();
    let tag = BankFile::open(&bank).unwrap().tag().clone();
    let old = folder.path().join("old.bank");
    let file = BankFile::open(&bank).unwrap();
    loaded.load_bank(&device, &file, &tag, None).unwrap().save(&old, &tag).unwrap();
    assert_eq!(BankFile::open(&old).unwrap().version(), 1);
    let errors = refused(&generate(&model, &["--bank", text(&old), "--prompt", ""]));
    assert!(errors.contains("old.bank") && errors.contains("no stored logits"), "{errors}");
    assert!(errors.contains("at least one token"), "{errors}");
    run(&model, &["--bank", text(&old), "--prompt", "x", "--max-tokens", "1"]);
}

#[test]
fn a_text_is_rolled_back() {
    let folder = tempfile::tempdir().unwrap();
    let model = trained(folder.path());
    let bank = folder.path().join("a.bank");
    let save = ["--save-bank", text(&bank), "--max-tokens", "1"];
    run(&model, &[&["--prompt", PROMPT][..], &save].concat());
    let length = PROMPT.len() + 1;
    let flags = ["--bank", text(&bank), "--prompt", "Once more", "--max-tokens", "30"];
    let (got, said) = run(&model, &[&flags[..], &["--rollback", "50", "--save-bank", text(&bank)]].concat());
    assert!(
        said.contains(&format!("back from {length} to 48 tokens, anchor 2, exactly as it was")),
        "{said}"
    );
    let again = format!("{}Once more", &PROMPT[..48]);
    // The penalty only sees the tokens since the rollback.
    let plain = ["--repetition-penalty", "1", "--max-tokens", "30"];
    let bare = |flags: &[&str]| {
        let all = [&["generate", "--model", text(&model), "--temperature", "0"][..], flags, &plain].concat();
        with_input(&all, "").0
    };
    assert_eq!(BankFile::open(&bank).unwrap().timeline().position, 48 + "Once more".len() + 30);
    assert!(!got.is_empty());
    let fresh = folder.path().join("fresh.bank");
    run(&model, &["--prompt", PROMPT, "--save-bank", text(&fresh), "--max-tokens", "1"]);
    let back = bare(&["--bank", text(&fresh), "--rollback", "71", "--prompt", "Once more"]);
    assert_eq!(back, bare(&["--prompt", &again]));
    // Rolling back to the end changes nothing; positions before the first anchor or after the end are
    // rejected.
    let refused_at = |tokens: &str, prompt: &str| {
        refused(&generate(&model, &["--bank", text(&fresh), "--rollback", tokens, "--prompt", prompt]))
    };
    let (_, said) = run(&model, &["--bank", text(&fresh), "--rollback", &length.to_string(), "--prompt", ""]);
    assert!(said.contains(&format!("already ends at {length} tokens")), "{said}");
    assert!(refused_at("10", "x").contains("at or before 10 tokens"), "too early");
    assert!(refused_at("1000", "x").contains(&format!("the text has {length}")), "too late");
    assert!(refused_at("50", "").contains("no logits after a rollback"), "without a prompt");
    assert!(refused_at("-1", "x").contains("a whole number from 0"), "below 0");
    assert!(refused(&generate(&model, &["--prompt", "x", "--rollback", "3"])).contains("--bank"));
}

#[test]
fn another_text_is_not_saved_over() {
    let folder = tempfile::tempdir().unwrap();
    let model = trained(folder.path());
    let (one, other) = (folder.path().join("one.bank"), folder.path().join("other.bank"));
    run(&model, &["--prompt", PROMPT, "--max-tokens", "3", "--save-bank", text(&one)]);
    run(&model, &["--prompt", "Else", "--max-tokens", "3", "--save-bank", text(&other)]);
    let before = fs::read(&one).unwrap();
    for flags in [&[][..], &["--bank", text(&other)]] {
        let save = ["--prompt", "More", "--max-tokens", "3", "--save-bank", text(&one)];
        let errors = refused(&generate(&model, &[&save[..], flags].concat()));
        assert!(
            errors.contains("one.bank: holds the bank of another text (79 tokens, model march "),
            "{errors}"
        );
        assert!(errors.contains("--bank") && errors.contains("--force"), "{errors}");
        assert!(fs::read(&one).unwrap() == before);
    }
    // The text's own bank, also through a symbolic link, which stays a link.
    let save = ["--bank", text(&one), "--prompt", "More", "--max-tokens", "3"];
    #[cfg(unix)]
    {
        let link = folder.path().join("link.bank");
        std::os::unix::fs::symlink("one.bank", &link).unwrap();
        run(&model, &[&save[..], &["--save-bank", text(&link)]].concat());
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(BankFile::open(&one).unwrap().timeline().position, 86);
        fs::remove_file(&link).unwrap();
    }
    run(&model, &[&save[..], &["--save-bank", text(&one)]].concat());
    let force = ["--prompt", "More", "--max-tokens", "3", "--force", "--save-bank", text(&one)];
    run(&model, &force);
    assert_eq!(BankFile::open(&one).unwrap().timeline().position, 7);
    // A file that is not a bank, or a damaged bank, is never overwritten.
    let mut damaged = before.clone();
    let last = damaged.len() - 100;
    damaged[last] ^= 1;
    for bytes in [&b"notes that somebody wants to keep"[..], &damaged] {
        fs::write(&one, bytes).unwrap();
        let errors = refused(&generate(&model, &force));
        assert!(errors.contains("one.bank") && errors.contains("delete it first"), "{errors}");
        assert!(fs::read(&one).unwrap() == bytes);
    }
    assert!(refused(&generate(&model, &["--prompt", "x", "--force"])).contains("--save-bank"));
    assert_eq!(
        names(folder.path()),
        ["one.bank", "other.bank", "run", "small.toml"],
        "nothing is left beside them"
    );
}

#[test]
#[cfg(unix)]
fn two_writers_of_one_bank() {
    let folder = tempfile::tempdir().unwrap();
    let model = trained(folder.path());
    let (bank, link) = (folder.path().join("a.bank"), folder.path().join("link.bank"));
    run(&model, &["--prompt", PROMPT, "--max-tokens", "3", "--save-bank", text(&bank)]);
    std::os::unix::fs::symlink("a.bank", &link).unwrap();
    let continue_from = |at: &Path, count: &str| {
        let flags = ["--bank", text(at), "--save-bank", text(at), "--prompt", "x", "--max-tokens", count];
        generate(&model, &flags).iter().map(|flag| flag.to_string()).collect::<Vec<String>>()
    };
    let arguments = continue_from(&bank, "100000000");
    let mut first = start(&arguments.iter().map(String::as_str).collect::<Vec<_>>());
    first.stdout.as_mut().unwrap().read_exact(&mut [0; 64]).unwrap();
    for path in [&bank, &link] {
        let arguments = continue_from(path, "3");
        let errors = refused(&arguments.iter().map(String::as_str).collect::<Vec<_>>());
        assert!(
            errors.contains("another process is writing this bank") && errors.contains("a.bank.lock"),
            "{errors}"
        );
    }
    let (_, said) = with_input(&["chat", "--model", text(&model)], &format!("/save {}\n", text(&bank)));
    assert!(said.contains("another process is writing this bank"), "{said}");
    interrupt(first.id());
    let out = first.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&out.stderr);
    assert_eq!(out.status.code(), Some(130), "{said}");
    assert!(said.contains("saved "), "{said}");
    let position = BankFile::open(&bank).unwrap().timeline().position;
    assert!(position > 79 + 50, "{position}");
    let arguments = continue_from(&link, "3");
    with_input(&arguments.iter().map(String::as_str).collect::<Vec<_>>(), "");
    assert_eq!(BankFile::open(&bank).unwrap().timeline().position, position + 4);
    assert!(!names(folder.path()).iter().any(|name| name.contains(".lock")));
}

/// A bank that is truncated while a process reads from it.
#[test]
#[cfg(unix)]
fn a_bank_that_is_cut_short_in_use() {
    let folder = tempfile::tempdir().unwrap();
    let model = trained(folder.path());
    let bank = folder.path().join("a.bank");
    run(&model, &["--prompt", PROMPT, "--max-tokens", "3", "--save-bank", text(&bank)]);
    let mut child = start(&generate(&model, &["--bank", text(&bank)]));
    let mut stdin = child.stdin.take().unwrap();
    // It waits for its prompt with the bank open.
    let open = |id: u32| {
        let files = fs::read_dir(format!("/proc/{id}/fd")).unwrap();
        files.filter_map(|file| fs::read_link(file.ok()?.path()).ok()).any(|file| file == bank)
    };
    while !open(child.id()) {
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    std::thread::sleep(std::time::Duration::from_millis(500));
    fs::OpenOptions::new().write(true).open(&bank).unwrap().set_len(5000).unwrap();
    stdin.write_all(b"And then").unwrap();
    drop(stdin);
    let out = child.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&out.stderr);
    assert_eq!(out.status.code(), Some(1), "{said}");
    assert!(said.contains("a.bank: is damaged") && said.contains("cut short"), "{said}");
}

#[test]
#[cfg(unix)]
fn outputs_that_take_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let model = trained(folder.path());
    let (full, closed) = (folder.path().join("full.bank"), folder.path().join("closed.bank"));
    let march = |bank: &Path, out: Stdio| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_march"));
        command.args(generate(
            &model,
            &["--prompt", PROMPT, "--max-tokens", "100000", "--save-bank", text(bank)],
        ));
        command.stdin(Stdio::null()).stdout(out).stderr(Stdio::piped()).spawn().unwrap()
    };
    let device = fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let out = march(&full, device.into()).wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&out.stderr);
    assert_eq!(out.status.code(), Some(1), "{said}");
    assert!(said.contains("saved ") && said.contains("standard output: could not write"), "{said}");
    assert!(said.contains("the output could not be written") && !said.contains("closed"), "{said}");
    let mut child = march(&closed, Stdio::piped());
    let mut first = [0; 10];
    child.stdout.take().unwrap().read_exact(&mut first).unwrap();
    let out = child.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&out.stderr);
    assert_eq!(out.status.code(), Some(0), "{said}");
    assert!(said.contains("the output was closed") && !said.contains("error"), "{said}");
    for bank in [full, closed] {
        let position = BankFile::open(&bank).unwrap().timeline().position;
        assert!((PROMPT.len()..PROMPT.len() + 90_000).contains(&position), "{position}");
    }
}

/// A bank that cannot be written is rejected before anything is read.
#[test]
#[cfg(unix)]
fn a_read_only_bank_is_refused_before_the_work() {
    let folder = tempfile::tempdir().unwrap();
    let model = trained(folder.path());
    let bank = folder.path().join("a.bank");
    run(&model, &["--prompt", PROMPT, "--max-tokens", "3", "--save-bank", text(&bank)]);
    fs::set_permissions(&bank, std::os::unix::fs::PermissionsExt::from_mode(0o444)).unwrap();
    let before = fs::read(&bank).unwrap();
    let flags = ["--prompt", "x", "--max-tokens", "3", "--bank", text(&bank), "--save-bank", text(&bank)];
    let out = as_nobody(folder.path(), &generate(&model, &flags)).output().unwrap();
    let said = String::from_utf8_lossy(&out.stderr);
    assert_eq!(out.status.code(), Some(1), "{said}");
    assert!(said.contains("a.bank: could not be written") && said.contains("ermission denied"), "{said}");
    assert!(out.stdout.is_empty() && !said.contains("read  "), "{said}");
    assert!(fs::read(&bank).unwrap() == before);
}

/// A read error ends the turn, not the chat.
#[test]
fn a_chat_goes_on_after_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let model = trained(folder.path());
    let bank = folder.path().join("a.bank");
    run(&model, &["--prompt", &PROMPT.repeat(3), "--max-tokens", "3", "--save-bank", text(&bank)]);
    // An anchor, which is verified against its checksum when it is first read.
    let file = BankFile::open(&bank).unwrap();
    assert!(file.timeline().kept.len() > 3);
    drop(file);
    let mut bytes = fs::read(&bank).unwrap();
    let start = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: serde_json::Value = serde_json::from_slice(&bytes[8..start]).unwrap();
    let states = header.as_object().unwrap().iter().find(|(name, _)| name.ends_with("anchors.states"));
    let offset = states.unwrap().1["data_offsets"][0].as_u64().unwrap() as usize;
    bytes[start + offset + 5] ^= 1;
    let damaged = folder.path().join("damaged.bank");
    fs::write(&damaged, bytes).unwrap();
    let chat = ["chat", "--model", text(&model), "--temperature", "0", "--max-tokens", "4"];
    let input = format!("/load {}\nWho?\nAnd?\n/reset\n/memory\nWho?\n/memory\n", text(&damaged));
    let (answers, said) = with_input(&chat, &input);
    assert!(said.contains("damaged.bank: is damaged") && said.contains("the turn was undone"), "{said}");
    assert!(said.contains("\n0 tokens") && !answers.is_empty(), "{said}");
    // A word that is not in a vocabulary of words.
    let words = folder.path().join("words");
    ok(&common::few_steps("demo/march", text(&words)));
    let chat = ["chat", "--model", text(&words), "--user-prefix", r"\n", "--assistant-prefix", r"\n"];
    let (answers, said) = with_input(&chat, "hello\nk1 v1 k2 v2\n/memory\n");
    assert!(said.contains("the word `hello` is not in the model's vocabulary"), "{said}");
    assert!(!answers.is_empty() && said.contains(" anchors, "), "{said}");
}

#[test]
fn a_chat_saves_and_goes_back() {
    let folder = tempfile::tempdir().unwrap();
    let model = trained(folder.path());
    let (one, other) = (folder.path().join("one.bank"), folder.path().join("other.bank"));
    run(&model, &["--prompt", PROMPT, "--max-tokens", "3", "--save-bank", text(&other)]);
    let chat = |input: &str| {
        let arguments = ["chat", "--model", text(&model), "--temperature", "0", "--max-tokens", "20"];
        let input = input.replace("ONE", text(&one)).replace("OTHER", text(&other));
        with_input(&arguments, &input)
    };
    let (_, said) =
        chat("Who?\n/save ONE\nAnd?\n/save ONE\n/save OTHER\n/load OTHER\nMore\n/save OTHER\n/save ONE\n");
    assert_eq!(said.matches("holds the bank of another text").count(), 2, "{said}");
    assert!(said.contains("continue it with /load") && said.contains("/save --force FILE"), "{said}");
    let position = |path: &Path| BankFile::open(path).unwrap().timeline().position;
    assert!(position(&other) > 79);
    let before = position(&one);
    let (_, said) = chat("Who?\n/reset\nHm\n/save ONE\n/save --force ONE\n/save --force\n");
    assert_eq!(said.matches("another text").count(), 1, "{said}");
    assert!(said.contains("name a file") && position(&one) < before, "{said}");
    // The same answer from the same position.
    let (text, said) =
        chat("/load OTHER\nWho?\n/rollback 79\nWho?\n/undo\n/undo\n/memory\n/rollback 5\n/rollback x\n");
    assert!(!text.is_empty());
    assert!(said.contains("back from ") && said.contains(" to 72 tokens, anchor 3, exactly"), "{said}");
    assert!(said.contains("at or before 5 tokens") && said.contains("name a number of tokens"), "{said}");
    let help = ok(&["chat", "--help"]);
    assert!(help.contains(r"\n, \t and \\ are understood") && !help.contains(r"\\n"), "{help}");
}

/// The template drops what the model thought before an earlier answer; the text goes on from a state before that answer.
#[test]
fn a_chat_folds_reasoning_away() {
    let folder = tempfile::tempdir().unwrap();
    let model = crate::server::checkpoint(folder.path(), "tiny/hybrid");
    let template = Path::new(env!("CARGO_MANIFEST_DIR")).join("../server/src/tests/chat_template.jinja");
    fs::copy(template, model.join("chat_template.jinja")).unwrap();
    let chat = ["chat", "--model", text(&model), "--temperature", "0", "--max-tokens", "12"];
    let first = "There was a table set out under a tree in front of the house, and the March Hare had tea.";
    let turns = "/memory\nWho?\n/reasoning\n/memory\n/undo\nWho?\n/reasoning\n/memory\n";
    let (answers, said) = with_input(&chat, &format!("/reasoning\n{first}\n{turns}"));
    // With random weights, what it thinks does not come to an end.
    assert!(answers.trim().is_empty(), "{answers}");
    assert!(said.contains("no answer of this conversation has any reasoning"), "{said}");
    let opening = "<|im_start|>assistant\n<think>\n";
    let asked = format!("<|im_start|>user\n{first}<|im_end|>\n");
    let again =
        format!("{asked}<|im_start|>assistant\n<|im_end|>\n<|im_start|>user\nWho?<|im_end|>\n{opening}");
    let [first, again] = [asked + opening, again].map(|text| format!("\n{} tokens, ", text.len() + 12));
    assert_eq!((said.matches(&first).count(), said.matches(&again).count()), (2, 2), "{said}");
    // The same turn again has the same thoughts, which come after the line about the memory before it.
    let turns: Vec<&str> =
        said.split(&again).filter_map(|part| part.rsplit_once(&first)).map(|it| it.1).collect();
    assert!(turns.len() == 2 && turns[0] == turns[1] && turns[0].len() > 30, "{said}");
}
