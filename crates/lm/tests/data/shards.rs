//! Folders of tokens: reading, refusing, surviving damage.

use std::path::Path;

use march_lm::data::shards::TokenType;
use march_lm::data::{Meta, Options, Shards};
use march_lm::disk::seal;
use march_lm::tokenizer::Tokenizer;
use serde_json::{Value, json};

use super::{damaged, folder, learnt, message, prepare_all, tokens, write};

/// A folder of 60 tokens in shards of 16.
fn small(folder: &Path) -> std::path::PathBuf {
    let file = write(&folder.join("t.txt"), "Sixty tokens: fifty-nine bytes, and one for the text's end.");
    let output = folder.join("out");
    let options = Options { shard_tokens: 16, ..Options::default() };
    prepare_all(&Tokenizer::bytes(), &[file], &output, &options).unwrap();
    output
}

#[test]
fn ranges_cross_the_borders_of_shards() {
    let (_keep, folder) = folder();
    let shards = Shards::open(&small(&folder)).unwrap();
    let all = tokens(&folder.join("out"));
    assert_eq!((shards.tokens(), all.len(), shards.meta().shards.len()), (60, 60, 4));
    for start in 0..=60 {
        for end in start..=60 {
            let mut out = vec![7];
            shards.read(start..end, &mut out).unwrap();
            assert_eq!(out[1..], all[start as usize..end as usize]);
        }
    }
    message(shards.read(3..61, &mut vec![]), &["3..61", "60"]);
    #[allow(clippy::reversed_empty_ranges)]
    let reversed = 4..3;
    message(shards.read(reversed, &mut vec![]), &["4..3"]);
    assert_eq!(shards.tokenizer().unwrap().hash(), Tokenizer::bytes().hash());
    learnt().save(&folder.join("out/tokenizer.json")).unwrap();
    message(shards.tokenizer(), &["tokenizer.json", "is not the tokenizer", "bytes"]);
}

/// Changes `meta.json`, with a right checksum of what it becomes.
fn edit(output: &Path, change: impl FnOnce(&mut Value)) {
    let path = output.join("meta.json");
    let mut meta: Value = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
    meta.as_object_mut().unwrap().remove("checksum");
    change(&mut meta);
    write(&path, seal(&meta.to_string()));
}

/// Makes a folder one of version 1, which had no checksums.
fn without_checksums(output: &Path) {
    let path = output.join("meta.json");
    let mut meta: Value = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
    meta.as_object_mut().unwrap().remove("checksum");
    meta["format_version"] = json!(1);
    for shard in meta["shards"].as_array_mut().unwrap() {
        shard.as_object_mut().unwrap().remove("checksums");
    }
    write(&path, meta.to_string());
}

#[test]
fn wrong_folders_are_refused_by_name() {
    let (_keep, folder) = folder();
    message(Shards::open(&folder.join("none")), &["none", "does not exist"]);
    message(Shards::open(&folder), &["meta.json", "march data prepare"]);
    let output = small(&folder);
    message(Shards::open(&output.join("meta.json")), &["is not a folder"]);
    let meta = std::fs::read(output.join("meta.json")).unwrap();
    let changes: [(fn(&mut Value), &[&str]); 15] = [
        (|meta| meta["format_version"] = json!(3), &["format version 3", "reads 1 and 2"]),
        (|meta| meta["format_version"] = json!(1), &["checksums of `tokens-00000.bin`"]),
        (|meta| meta["shards"][1]["checksums"] = json!("0"), &["checksums of `tokens-00001.bin`"]),
        (|meta| meta["shards"][1]["checksums"] = Value::Null, &["checksums of `tokens-00001.bin`"]),
        (|meta| meta["type"] = json!("u8"), &["u8"]),
        (|meta| meta["type"] = json!("u32"), &["tokens-00000.bin", "32 bytes", "16 tokens of 4 bytes"]),
        (|meta| meta["vocabulary"] = json!(0), &["vocabulary of 0"]),
        (|meta| meta["vocabulary"] = json!(65_537), &["65537", "u16"]),
        (|meta| meta["tokens"] = json!(61), &["61 tokens", "60"]),
        (|meta| meta["shards"][1]["tokens"] = json!(15), &["tokens-00001.bin", "15 tokens"]),
        (|meta| meta["shards"][1]["tokens"] = json!(u64::MAX), &["tokens-00001.bin"]),
        (|meta| meta["shards"][1]["file"] = json!("gone.bin"), &["gone.bin", "is missing"]),
        (|meta| meta["shards"][1]["file"] = json!("../t.txt"), &["../t.txt", "not a file name"]),
        (|meta| _ = meta.as_object_mut().unwrap().remove("shards"), &["meta.json", "shards"]),
        (|meta| *meta = json!([]), &["meta.json", "does not describe token shards"]),
    ];
    for (change, names) in changes {
        write(&output.join("meta.json"), &meta);
        edit(&output, change);
        message(Shards::open(&output), names);
    }
    write(&output.join("meta.json"), &meta);
    write(&output.join("tokens-00002.bin"), [0; 31]);
    message(Shards::open(&output), &["tokens-00002.bin", "31 bytes"]);
    std::fs::remove_file(output.join("tokens-00002.bin")).unwrap();
    message(Shards::open(&output), &["tokens-00002.bin", "is missing"]);
    std::fs::rename(output.join("meta.json"), output.join("progress.json")).unwrap();
    message(Shards::open(&output), &["not finished", "again"]);
}

#[test]
fn a_token_outside_of_the_vocabulary_is_found_when_it_is_read() {
    let (_keep, folder) = folder();
    let output = small(&folder);
    without_checksums(&output);
    let path = output.join("tokens-00001.bin");
    let mut bytes = std::fs::read(&path).unwrap();
    bytes[6..8].copy_from_slice(&300u16.to_le_bytes());
    write(&path, bytes);
    let shards = Shards::open(&output).unwrap();
    let mut out = vec![1];
    message(shards.read(10..30, &mut out), &["tokens-00001.bin", "token 3 is 300", "257"]);
    assert_eq!(out, [1]);
    shards.read(20..60, &mut out).unwrap();
}

#[test]
fn large_vocabularies_take_four_bytes() {
    assert_eq!(TokenType::of(65_536), TokenType::U16);
    assert_eq!(TokenType::of(65_537), TokenType::U32);
    let (_keep, folder) = folder();
    let path = folder.join("tokenizer.json");
    // The last merge becomes an id that needs more than two bytes.
    let text = String::from_utf8(learnt().to_json()).unwrap();
    let last = text.lines().find(|line| line.trim_end().ends_with(": 599")).unwrap();
    write(&path, text.replace(last, &last.replace(": 599", ": 70000")));
    let tokenizer = Tokenizer::load(path.to_str().unwrap()).unwrap();
    assert_eq!(tokenizer.vocabulary(), 70_001);
    let file = write(&folder.join("t.txt"), march_lm::data::builtin());
    let (two, four) = (folder.join("two"), folder.join("four"));
    let options = Options { shard_tokens: 10_000, ..Options::default() };
    prepare_all(learnt(), std::slice::from_ref(&file), &two, &options).unwrap();
    let meta = prepare_all(&tokenizer, &[file], &four, &options).unwrap();
    assert_eq!(meta.token_type, TokenType::U32);
    let four = tokens(&four);
    assert!(four.contains(&70_000));
    let expected: Vec<u32> = tokens(&two).into_iter().map(|id| if id == 599 { 70_000 } else { id }).collect();
    assert_eq!(four, expected);
}

/// What was damaged by chance is refused, whatever is read of it.
#[test]
fn damage_is_always_noticed() {
    let (_keep, folder) = folder();
    let output = small(&folder);
    let read = |output: &Path| -> march_lm::Result<Vec<u32>> {
        let shards = Shards::open(output)?;
        let mut out = Vec::new();
        for range in [10..40, 59..60, 0..shards.tokens()] {
            out.clear();
            shards.read(range, &mut out)?;
        }
        Ok(out)
    };
    let whole = read(&output).unwrap();
    for name in ["meta.json", "tokens-00001.bin", "tokens-00003.bin"] {
        let path = output.join(name);
        let bytes = std::fs::read(&path).unwrap();
        let mut refused = 0;
        damaged(&bytes, 21, 2000, |damage| {
            write(&path, damage);
            match read(&output) {
                Ok(read) => {
                    assert_eq!(damage.trim_ascii_end(), bytes.trim_ascii_end(), "{name}");
                    assert_eq!(read, whole);
                }
                Err(_) => refused += 1,
            }
        });
        assert!(refused > 1900, "{refused}");
        write(&path, &bytes);
        read(&output).unwrap();
    }
    let meta: Meta = serde_json::from_slice(&std::fs::read(output.join("meta.json")).unwrap()).unwrap();
    assert_eq!(meta.tokens, 60);
}

/// A folder of two shards of 3 MiB and 1.2 MiB.
fn large(folder: &Path) -> std::path::PathBuf {
    let text = march_lm::data::builtin().repeat(15);
    let file = write(&folder.join("t.txt"), &text[..2_200_000]);
    let output = folder.join("out");
    let options = Options { shard_tokens: 3 << 19, ..Options::default() };
    prepare_all(&Tokenizer::bytes(), &[file], &output, &options).unwrap();
    output
}

#[test]
fn a_damaged_block_is_refused_by_name_and_the_others_are_read() {
    let (_keep, folder) = folder();
    let output = large(&folder);
    let sums = |number: usize| {
        let meta: Meta = serde_json::from_slice(&std::fs::read(output.join("meta.json")).unwrap()).unwrap();
        meta.shards[number].checksums.as_ref().unwrap().len()
    };
    assert_eq!((sums(0), sums(1)), (3 * 16, 2 * 16));
    let all = tokens(&output);
    let path = output.join("tokens-00000.bin");
    let mut bytes = std::fs::read(&path).unwrap();
    // Still a token of the vocabulary.
    bytes[(1 << 20) + 500] ^= 1;
    write(&path, bytes);
    let shards = Shards::open(&output).unwrap();
    let mut out = Vec::new();
    for range in [0..1 << 19, 1 << 20..2_000_000, (1 << 19) - 9..1 << 19, 7..8] {
        out.clear();
        shards.read(range.clone(), &mut out).unwrap();
        assert_eq!(out, all[range.start as usize..range.end as usize]);
    }
    for range in [(1 << 19) - 1..(1 << 19) + 1, (1 << 20) - 1..1 << 20, 0..shards.tokens()] {
        let said = message(
            shards.read(range, &mut out),
            &["tokens-00000.bin", "bytes 1048576 to 2097152", "meta.json", "prepare the data again"],
        );
        assert!(said.contains("copy it again"), "{said}");
    }
    // Many threads at once see the same.
    std::thread::scope(|scope| {
        for start in 0..8u64 {
            let (shards, all) = (&shards, &all);
            scope.spawn(move || {
                for step in 0..200 {
                    let from = (start * 7919 + step * 104_729) % 2_000_000;
                    let range = from..from + 1000;
                    let mut out = Vec::new();
                    let touches = range.end > 1 << 19 && range.start < 1 << 20;
                    let read = shards.read(range.clone(), &mut out);
                    assert_eq!(read.is_err(), touches, "{range:?}");
                    assert!(touches || out == all[range.start as usize..range.end as usize]);
                }
            });
        }
    });
}

/// A file that is cut while it is in use is an error; a map would end the process.
#[test]
fn a_shard_that_is_cut_while_in_use_is_an_error() {
    let (_keep, folder) = folder();
    let output = large(&folder);
    let shards = Shards::open(&output).unwrap();
    let mut out = Vec::new();
    shards.read(0..shards.tokens(), &mut out).unwrap();
    let file = std::fs::OpenOptions::new().write(true).open(output.join("tokens-00000.bin")).unwrap();
    file.set_len(1000).unwrap();
    shards.read(0..500, &mut out).unwrap();
    message(shards.read(499..501, &mut out), &["tokens-00000.bin", "ends before byte 1002"]);
}

#[test]
fn more_shards_than_a_process_may_open() {
    let (_keep, folder) = folder();
    let file = write(&folder.join("t.txt"), &march_lm::data::builtin()[..3000]);
    let output = folder.join("out");
    let options = Options { shard_tokens: 2, ..Options::default() };
    prepare_all(&Tokenizer::bytes(), &[file], &output, &options).unwrap();
    let shards = Shards::open(&output).unwrap();
    assert_eq!(shards.meta().shards.len(), 1501);
    let mut out = Vec::new();
    for _ in 0..2 {
        out.clear();
        shards.read(0..3001, &mut out).unwrap();
        assert!(
            out[..3000]
                .iter()
                .zip(march_lm::data::builtin().bytes())
                .all(|(&id, byte)| id == u32::from(byte))
        );
    }
}

#[test]
fn fingerprints_tell_tokens_apart() {
    let (_keep, folder) = folder();
    let output = small(&folder);
    let print = |output: &Path| Shards::open(output).unwrap().fingerprint().unwrap();
    let first = print(&output);
    assert!(first.len() == 64 && first.bytes().all(|digit| digit.is_ascii_hexdigit()), "{first}");
    // The same tokens of a folder without checksums.
    without_checksums(&output);
    assert_eq!(print(&output), first);
    let path = output.join("tokens-00002.bin");
    let mut bytes = std::fs::read(&path).unwrap();
    bytes[4] ^= 1;
    write(&path, bytes);
    assert_ne!(print(&output), first);
    let other = write(&folder.join("o.txt"), "Sixty tokens: fifty-nine bytes, and one for the text's End.");
    let options = Options { shard_tokens: 16, ..Options::default() };
    prepare_all(&Tokenizer::bytes(), &[other], &folder.join("other"), &options).unwrap();
    assert_ne!(print(&folder.join("other")), first);
}
