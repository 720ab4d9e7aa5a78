//! Interrupted runs go on and write what they would have written.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use march_lm::Result;
use march_lm::data::{Options, PrepareOutcome, Status, builtin, prepare};
use march_lm::tokenizer::Tokenizer;
use parquet::basic::Compression;

use super::{contents, damaged, folder, gzip, json_lines, learnt, message, parquet_file, prepare_all, write};

/// Files of every format: some 2 MB of text in about 1,500 documents, one of them long enough to be cut.
fn files(folder: &Path) -> Vec<PathBuf> {
    let texts: Vec<&str> = builtin().split("\n\n").collect();
    let rows: Vec<Option<&[u8]>> = texts.iter().map(|text| Some(text.as_bytes())).collect();
    let long = builtin().repeat(5);
    vec![
        write(&folder.join("a.jsonl"), json_lines(&texts)),
        write(&folder.join("b.txt"), &long),
        write(&folder.join("c.jsonl.gz"), gzip(json_lines(&[&long[..300_000], "x", texts[3]]).as_bytes())),
        parquet_file(&folder.join("d.parquet"), &rows, 300, Compression::SNAPPY),
        write(&folder.join("e.txt"), "end"),
    ]
}

/// Runs until `batches` batches are written; whether it finished.
fn run(
    tokenizer: &Tokenizer,
    files: &[PathBuf],
    output: &Path,
    options: &Options,
    batches: usize,
) -> Result<bool> {
    let mut left = batches;
    let mut last = Status::default();
    let mut watch = |status: &Status| {
        assert!(status.tokens >= last.tokens && status.bytes <= status.total_bytes);
        last = *status;
        left = left.saturating_sub(1);
        if left == 0 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    };
    match prepare(tokenizer, files, output, options, &mut watch)? {
        PrepareOutcome::Finished(..) => Ok(true),
        PrepareOutcome::Stopped(status) => {
            assert!(output.join("progress.json").exists() && !output.join("meta.json").exists());
            assert!(status.tokens >= status.resumed_tokens);
            Ok(false)
        }
    }
}

#[test]
fn a_run_that_is_stopped_again_and_again_writes_the_same_bytes() {
    let (_keep, folder) = folder();
    let files = files(&folder);
    for (tokenizer, shard_tokens) in [(&Tokenizer::bytes(), 150_000), (learnt(), 70_001), (learnt(), 1 << 40)]
    {
        let whole = folder.join(format!("{}-{shard_tokens}", tokenizer.name()));
        let options = Options { shard_tokens, ..Options::default() };
        prepare_all(tokenizer, &files, &whole, &options).unwrap();
        for (batches, threads) in [(1, 1), (1, 2), (2, 3), (5, 2)] {
            let output = folder.join("stopped");
            let options = Options { threads, ..options.clone() };
            let mut runs = 1;
            while !run(tokenizer, &files, &output, &options, batches + runs % 2).unwrap() {
                runs += 1;
                assert!(runs < 100, "it does not come to an end");
            }
            assert!(runs > 1);
            assert_eq!(
                contents(&output),
                contents(&whole),
                "{batches} batches, {threads} threads, {runs} runs"
            );
            std::fs::remove_dir_all(&output).unwrap();
        }
    }
}

#[test]
fn what_was_written_after_the_last_progress_is_written_again() {
    let (_keep, folder) = folder();
    let files = files(&folder);
    let (whole, output) = (folder.join("whole"), folder.join("out"));
    let options = Options { shard_tokens: 200_000, ..Options::default() };
    prepare_all(&Tokenizer::bytes(), &files, &whole, &options).unwrap();
    let bytes = Tokenizer::bytes();
    assert!(!run(&bytes, &files, &output, &options, 3).unwrap());
    // A process that dies leaves more than `progress.json` knows: longer, later and unfinished files.
    let names: Vec<String> =
        contents(&output).into_keys().filter(|name| name.starts_with("tokens-")).collect();
    let last = output.join(names.last().unwrap());
    let mut longer = std::fs::read(&last).unwrap();
    longer.extend([1; 999]);
    write(&last, longer);
    write(&output.join("tokens-00009.bin"), [1; 77]);
    write(&output.join("prepare.lock"), "");
    assert!(run(&bytes, &files, &output, &options, usize::MAX).unwrap());
    assert_eq!(contents(&output), contents(&whole));
}

#[test]
fn another_command_is_refused_by_its_difference() {
    let (_keep, folder) = folder();
    let mut files = files(&folder);
    let output = folder.join("out");
    let options = Options { shard_tokens: 200_000, ..Options::default() };
    let bytes = Tokenizer::bytes();
    assert!(!run(&bytes, &files, &output, &options, 2).unwrap());
    let before = contents(&output);
    let again = |tokenizer, files: &[PathBuf], options| run(tokenizer, files, &output, options, 1);
    message(again(learnt(), &files, &options), &["out", "--tokenizer bytes", "tokenizer.json", "--force"]);
    let other = Options { shard_tokens: 5, ..options.clone() };
    message(again(&bytes, &files, &other), &["--shard-tokens 200000", "not 5"]);
    let other = Options { text_column: "body".into(), ..options.clone() };
    message(again(&bytes, &files, &other), &["--text-column text", "not body"]);
    message(again(&bytes, &files[..4], &options), &["5 files, not 4"]);
    files.swap(0, 1);
    message(again(&bytes, &files, &options), &["file 1", "a.jsonl", "b.txt"]);
    files.swap(0, 1);
    assert_eq!(contents(&output), before, "a refusal changes nothing");
    write(&files[4], "other end");
    message(again(&bytes, &files, &options), &["e.txt", "3 bytes", "9"]);
    write(&files[4], "end");
    // Broken shards are not gone on with.
    let first = output.join("tokens-00000.bin");
    let good = std::fs::read(&first).unwrap();
    write(&first, &good[..100]);
    message(again(&bytes, &files, &options), &["tokens-00000.bin", "100 bytes", "--force"]);
    std::fs::remove_file(&first).unwrap();
    message(again(&bytes, &files, &options), &["tokens-00000.bin"]);
    write(&first, &good);
    assert!(run(&bytes, &files, &output, &options, usize::MAX).unwrap());
    // Where lines were left out, the flag must stay.
    let bad = write(&folder.join("bad.jsonl"), format!("x\n{}", json_lines(&[&builtin().repeat(3), "y"])));
    let (skip, output) = (Options { skip_bad: true, ..options.clone() }, folder.join("skip"));
    assert!(!run(&bytes, &[bad.clone(), bad.clone()], &output, &skip, 2).unwrap());
    message(run(&bytes, &[bad.clone(), bad], &output, &options, 1), &["--skip-bad", "1 invalid"]);
}

#[test]
fn two_runs_do_not_share_a_folder() {
    let (_keep, folder) = folder();
    let files = files(&folder);
    let output = folder.join("out");
    let options = Options::default();
    let bytes = Tokenizer::bytes();
    let mut inner = None;
    let mut watch = |_: &Status| {
        inner.get_or_insert_with(|| prepare_all(&bytes, &files, &output, &options).map(|_| ()));
        ControlFlow::Continue(())
    };
    prepare(&bytes, &files, &output, &options, &mut watch).unwrap();
    message(inner.unwrap(), &["out", "another `march data prepare`"]);
}

/// Whatever is damaged in an unfinished folder is noticed when it is gone on with, and the folder stays as it is.
#[test]
fn damage_in_an_unfinished_folder_is_noticed() {
    let (_keep, folder) = folder();
    let file = write(&folder.join("a.jsonl"), json_lines(&["one", &"two ".repeat(200_000), "three"]));
    let output = folder.join("out");
    let options = Options { shard_tokens: 300_000, ..Options::default() };
    let bytes = Tokenizer::bytes();
    let files = [file.clone(), file.clone()];
    assert!(!run(&bytes, &files, &output, &options, 4).unwrap());
    let before = contents(&output);
    let shards: Vec<&String> = before.keys().filter(|name| name.starts_with("tokens-")).collect();
    assert!(shards.len() > 1, "{shards:?}");
    let last = shards[shards.len() - 1].as_str();
    let mut names = shards.iter().map(|name| name.as_str()).collect::<Vec<_>>();
    names.push("progress.json");
    for (seed, name) in names.iter().enumerate() {
        let good = &before[*name];
        let times = if *name == "progress.json" { 400 } else { 40 };
        let (mut tried, mut refused) = (0, 0);
        damaged(good, 77 + seed as u64, times, |damage| {
            // What stands after the end of the last shard is cut off, as after a kill.
            if damage.trim_ascii_end() == good.trim_ascii_end() || (*name == last && damage.starts_with(good))
            {
                return;
            }
            tried += 1;
            write(&output.join(name), damage);
            let damaged_folder = contents(&output);
            let result = run(&bytes, &files, &output, &options, 2);
            assert!(result.is_err(), "{name}");
            assert!(matches!(result.unwrap_err(), march_lm::Error::Damaged { .. }));
            refused += 1;
            assert!(contents(&output) == damaged_folder, "a refusal changes nothing");
        });
        assert!(refused == tried && tried > times / 2, "{name}: {refused} of {tried}");
        write(&output.join(name), good);
    }
    let mut flipped = before[shards[0].as_str()].clone();
    flipped[5] ^= 1;
    write(&output.join(shards[0]), flipped);
    message(run(&bytes, &files, &output, &options, 1), &["tokens-00000.bin", "progress.json", "--force"]);
    write(&output.join(shards[0]), &before[shards[0].as_str()]);
    // The copy of the tokenizer is written again.
    write(&output.join("tokenizer.json"), "{");
    assert!(run(&bytes, &files, &output, &options, usize::MAX).unwrap());
    let whole = folder.join("whole");
    prepare_all(&bytes, &files, &whole, &options).unwrap();
    assert_eq!(contents(&output), contents(&whole));
}

/// Blocks that end exactly where a run was stopped, and blocks that go on over several runs.
#[test]
fn blocks_go_on_where_they_were_left() {
    let (_keep, folder) = folder();
    // 256 KiB of text become half a MiB of tokens: every second batch ends a block.
    let line = "x".repeat((1 << 18) - 1);
    let file = write(&folder.join("a.jsonl"), json_lines(&[line.as_str(); 9]));
    let bytes = Tokenizer::bytes();
    for shard_tokens in [1 << 40, 1 << 20, (1 << 19) + 1, 100_000] {
        let options = Options { shard_tokens, threads: 1, ..Options::default() };
        let (whole, output) = (folder.join("whole"), folder.join("out"));
        prepare_all(&bytes, std::slice::from_ref(&file), &whole, &options).unwrap();
        while !run(&bytes, std::slice::from_ref(&file), &output, &options, 1).unwrap() {}
        assert_eq!(contents(&output), contents(&whole), "{shard_tokens}");
        super::tokens(&output);
        std::fs::remove_dir_all(&output).unwrap();
        std::fs::remove_dir_all(&whole).unwrap();
    }
}
