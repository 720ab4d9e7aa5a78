//! Folders of tokens: reading, refusing, surviving damage.

use std::path::Path;

use march::data::shards::TokenType;
use march::data::{Meta, Options, Shards};
use march::tokenizer::Tokenizer;
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

/// Changes `meta.json`.
fn edit(output: &Path, change: impl FnOnce(&mut Value)) {
    let path = output.join("meta.json");
    let mut meta: Value = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
    change(&mut meta);
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
    let changes: [(fn(&mut Value), &[&str]); 12] = [
        (|meta| meta["format_version"] = json!(2), &["format version 2", "reads 1"]),
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
    learnt().save(&path).unwrap();
    // The last merge becomes an id that needs more than two bytes.
    let text = std::fs::read_to_string(&path).unwrap();
    let last = text.lines().find(|line| line.trim_end().ends_with(": 599")).unwrap();
    write(&path, text.replace(last, &last.replace(": 599", ": 70000")));
    let tokenizer = Tokenizer::load(path.to_str().unwrap()).unwrap();
    assert_eq!(tokenizer.vocabulary(), 70_001);
    let file = write(&folder.join("t.txt"), march::data::builtin());
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

#[test]
fn damage_never_panics() {
    let (_keep, folder) = folder();
    let output = small(&folder);
    let read = |output: &Path| -> march::Result<()> {
        let shards = Shards::open(output)?;
        let mut out = Vec::new();
        for range in [0..shards.tokens(), 10..40, 59..60] {
            let _ = shards.read(range, &mut out);
        }
        Ok(())
    };
    for name in ["meta.json", "tokens-00001.bin", "tokens-00003.bin"] {
        let path = output.join(name);
        let bytes = std::fs::read(&path).unwrap();
        damaged(&bytes, 21, 2000, |bytes| {
            // A mapped file must not be rewritten in place.
            std::fs::remove_file(&path).unwrap();
            write(&path, bytes);
            let _ = read(&output);
        });
        write(&path, &bytes);
        read(&output).unwrap();
    }
    let meta: Meta = serde_json::from_slice(&std::fs::read(output.join("meta.json")).unwrap()).unwrap();
    assert_eq!(meta.tokens, 60);
}
