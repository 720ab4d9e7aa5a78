//! Folders of tokens: what is written, and what is refused.

use std::path::Path;

use march_lm::data::{Meta, Options, builtin};
use march_lm::tokenizer::Tokenizer;
use parquet::basic::Compression;

use super::{
    contents, folder, gzip, json_lines, learnt, message, parquet_file, prepare_all, tokens, write, zstandard,
};

const DOCUMENTS: [&str; 4] = ["First document.", "naïve 中 🦀", "x", "The last\none.\n"];

/// The tokens that documents must become.
fn expected(tokenizer: &Tokenizer, documents: &[&str]) -> Vec<u32> {
    let document = |text: &&str| tokenizer.encode(text).unwrap().into_iter().chain(tokenizer.end_of_text());
    documents.iter().flat_map(document).collect()
}

#[test]
fn every_format_gives_the_same_tokens() {
    let (_keep, folder) = folder();
    let lines = json_lines(&DOCUMENTS);
    let rows: Vec<Option<&[u8]>> = DOCUMENTS.iter().map(|text| Some(text.as_bytes())).collect();
    let text = |i: usize| write(&folder.join(format!("{i}.txt")), DOCUMENTS[i]);
    let inputs = [
        vec![write(&folder.join("a.jsonl"), &lines)],
        vec![write(&folder.join("a.jsonl.gz"), gzip(lines.as_bytes()))],
        vec![write(&folder.join("a.jsonl.zst"), zstandard(lines.as_bytes()))],
        vec![parquet_file(&folder.join("a.parquet"), &rows, 3, Compression::SNAPPY)],
        (0..4).map(text).collect(),
    ];
    for tokenizer in [&Tokenizer::bytes(), learnt()] {
        for (number, files) in inputs.iter().enumerate() {
            let output = folder.join(format!("{}-{number}", tokenizer.name()));
            let meta = prepare_all(tokenizer, files, &output, &Options::default()).unwrap();
            let expected = expected(tokenizer, &DOCUMENTS);
            assert_eq!(tokens(&output), expected);
            assert_eq!((meta.documents, meta.tokens), (4, expected.len() as u64));
        }
    }
}

#[test]
fn meta_tells_all() {
    let (_keep, folder) = folder();
    let files =
        [write(&folder.join("a.jsonl"), json_lines(&DOCUMENTS)), write(&folder.join("b.txt"), "More.")];
    let output = folder.join("deep/er/out");
    let options = Options { shard_tokens: 20, ..Options::default() };
    let meta = prepare_all(&Tokenizer::bytes(), &files, &output, &options).unwrap();
    let written: Meta = serde_json::from_slice(&std::fs::read(output.join("meta.json")).unwrap()).unwrap();
    assert_eq!(written, meta);
    let count = expected(&Tokenizer::bytes(), &DOCUMENTS).len() as u64;
    assert_eq!((meta.format_version, meta.vocabulary, meta.end_of_text), (2, 257, Some(256)));
    assert_eq!((meta.tokenizer.as_str(), meta.tokenizer_hash), ("bytes", Tokenizer::bytes().hash()));
    assert_eq!((meta.documents, meta.tokens), (5, count + 6));
    let sources: Vec<_> =
        meta.sources.iter().map(|source| (source.documents, source.tokens, source.skipped)).collect();
    assert_eq!(sources, [(4, count, 0), (1, 6, 0)]);
    assert_eq!(meta.sources[1].file, files[1].display().to_string());
    let shards: Vec<_> = meta.shards.iter().map(|shard| (shard.file.as_str(), shard.tokens)).collect();
    let last = (count + 6) % 20;
    assert_eq!(shards.last(), Some(&("tokens-00002.bin", last)));
    assert_eq!(shards[0], ("tokens-00000.bin", 20));
    let names: Vec<String> = contents(&output).into_keys().collect();
    let expected =
        ["meta.json", "tokenizer.json", "tokens-00000.bin", "tokens-00001.bin", "tokens-00002.bin"];
    assert_eq!(names, expected);
}

/// Documents of very different lengths, the longest cut on its way.
fn documents() -> Vec<String> {
    let mut documents: Vec<String> = builtin().split("\n\n").map(Into::into).collect();
    documents.insert(100, builtin().repeat(4));
    documents.insert(7, builtin().replace('\n', " ").repeat(3));
    documents.push("中文 🦀\n".repeat(50_000));
    documents
}

#[test]
fn the_bytes_do_not_depend_on_threads() {
    let (_keep, folder) = folder();
    let documents = documents();
    let texts: Vec<&str> = documents.iter().map(String::as_str).collect();
    let files = [
        write(&folder.join("a.jsonl"), json_lines(&texts)),
        write(&folder.join("b.txt"), &documents[100]),
        write(&folder.join("c.jsonl.zst"), zstandard(json_lines(&texts[200..300]).as_bytes())),
    ];
    for tokenizer in [&Tokenizer::bytes(), learnt()] {
        let mut first = None;
        for threads in [1, 2, 5] {
            let output = folder.join(format!("{}-{threads}", tokenizer.name()));
            let options = Options { threads, shard_tokens: 100_000, ..Options::default() };
            prepare_all(tokenizer, &files, &output, &options).unwrap();
            if first.is_none() {
                let all: Vec<&str> =
                    texts.iter().chain([&texts[100]]).chain(&texts[200..300]).copied().collect();
                assert_eq!(tokens(&output), expected(tokenizer, &all));
            }
            let contents = contents(&output);
            assert_eq!(*first.get_or_insert_with(|| contents.clone()), contents, "{threads} threads");
        }
    }
}

#[test]
fn broken_lines_stop_or_are_counted() {
    let (_keep, folder) = folder();
    let file =
        write(&folder.join("a.jsonl"), "{\"text\": \"one\"}\n\n{\"text\": 2}\n{\"text\": \"three\"}\nfour\n");
    let table = parquet_file(&folder.join("b.parquet"), &[Some(b"five"), None], 8, Compression::SNAPPY);
    let text = write(&folder.join("c.txt"), b"\xFF");
    let empty = write(&folder.join("d.txt"), "");
    let output = folder.join("out");
    let files = [file, table, text, empty];
    let options = Options::default();
    let run = |options: &Options| prepare_all(&Tokenizer::bytes(), &files, &output, options);
    message(run(&options), &["a.jsonl", "line 3", "`text` is a number"]);
    message(run(&options), &["a.jsonl", "line 3"]);
    // Nothing was left out so far: the flag can be added.
    let meta = run(&Options { skip_bad: true, ..options.clone() }).unwrap();
    let counts: Vec<_> = meta.sources.iter().map(|source| (source.documents, source.skipped)).collect();
    assert_eq!(counts, [(2, 2), (1, 1), (0, 1), (0, 0)]);
    assert_eq!(tokens(&output), expected(&Tokenizer::bytes(), &["one", "three", "five"]));
    let column = |name: &str| Options { text_column: name.into(), ..options.clone() };
    let other = folder.join("other");
    let lines = write(&folder.join("e.jsonl"), "{\"body\": \"one\"}\n");
    message(
        prepare_all(&Tokenizer::bytes(), std::slice::from_ref(&lines), &other, &options),
        &["e.jsonl", "line 1", "`body`"],
    );
    prepare_all(&Tokenizer::bytes(), &[lines], &folder.join("third"), &column("body")).unwrap();
}

#[test]
fn wrong_requests_are_refused() {
    let (_keep, folder) = folder();
    let output = folder.join("out");
    let options = Options::default();
    let run = |files: &[&Path], options: &Options| {
        let files: Vec<_> = files.iter().map(|file| file.to_path_buf()).collect();
        prepare_all(&Tokenizer::bytes(), &files, &output, options)
    };
    let good = write(&folder.join("good.txt"), "good");
    message(run(&[], &options), &["no input files"]);
    message(run(&[&good, &folder.join("gone.txt")], &options), &["gone.txt", "does not exist"]);
    message(run(&[&good, &folder], &options), &["is a folder"]);
    message(run(&[&write(&folder.join("a.csv"), "a")], &options), &["a.csv", "extension", ".jsonl.zst"]);
    message(run(&[&good], &Options { shard_tokens: 0, ..options.clone() }), &["0 tokens"]);
    assert!(!output.exists(), "nothing is written before the request is sound");
    let empty = write(&folder.join("empty.txt"), "");
    message(run(&[&empty], &options), &["empty.txt", "no text", "--skip-bad"]);
    let skip = Options { skip_bad: true, ..options.clone() };
    message(run(&[&empty], &skip), &["no documents"]);
    let blank = write(&folder.join("blank.jsonl"), "\n\n{\"text\": \"\"}\n");
    message(run(&[&blank], &Options { force: true, ..options.clone() }), &["blank.jsonl", "no text"]);
    message(run(&[&good], &options), &["blank.jsonl", "good.txt", "--force"]);
    run(&[&good], &Options { force: true, ..options.clone() }).unwrap();
    message(run(&[&good], &options), &["out", "already complete", "--force"]);
    run(&[&good, &good], &Options { force: true, ..options.clone() }).unwrap();
    assert_eq!(tokens(&output), expected(&Tokenizer::bytes(), &["good", "good"]));
    // A folder that another program filled is left alone.
    std::fs::remove_file(output.join("meta.json")).unwrap();
    message(run(&[&good], &options), &["tokens-00000.bin", "--force"]);
    std::fs::remove_file(output.join("tokens-00000.bin")).unwrap();
    learnt().save(&output.join("tokenizer.json")).unwrap();
    message(run(&[&good], &options), &["tokenizer.json", "another tokenizer"]);
    // The checksum beside a tokenizer that was replaced goes with it.
    assert!(output.join("tokenizer.json.sha256").exists());
    run(&[&good], &Options { force: true, ..options.clone() }).unwrap();
    assert!(!output.join("tokenizer.json.sha256").exists());
    march_lm::data::Shards::open(&output).unwrap().tokenizer().unwrap();
    // A `meta.json` and files of others are never replaced or added to.
    for text in ["{\"title\": \"my notes\"}", "{\"format_version\": 2, \"shards\": []}", "notes"] {
        for name in ["meta.json", "progress.json"] {
            let other = folder.join("other");
            std::fs::create_dir(&other).unwrap();
            write(&other.join(name), text);
            for force in [false, true] {
                let options = Options { force, ..options.clone() };
                let refused = prepare_all(&Tokenizer::bytes(), std::slice::from_ref(&good), &other, &options);
                message(refused, &[name, "is not from `march data prepare`", "another folder"]);
                assert_eq!(std::fs::read_to_string(other.join(name)).unwrap(), text);
                assert_eq!(std::fs::read_dir(&other).unwrap().count(), 1);
            }
            std::fs::remove_dir_all(&other).unwrap();
        }
    }
    let mixed = folder.join("mixed");
    std::fs::create_dir(&mixed).unwrap();
    write(&mixed.join("notes.md"), "mine");
    for force in [false, true] {
        let options = Options { force, ..options.clone() };
        let refused = prepare_all(&Tokenizer::bytes(), std::slice::from_ref(&good), &mixed, &options);
        message(refused, &["mixed", "other files, such as `notes.md`", "a new or empty folder"]);
        assert_eq!(std::fs::read_dir(&mixed).unwrap().count(), 1);
    }
    // Notes beside tokens are no reason not to make the tokens again.
    write(&output.join("notes.md"), "mine");
    run(&[&good], &Options { force: true, ..options.clone() }).unwrap();
    assert!(output.join("notes.md").exists());
    let file = write(&folder.join("file"), "");
    message(prepare_all(&Tokenizer::bytes(), &[good], &file, &options), &["file"]);
}

#[test]
fn a_tokenizer_without_an_end_joins_documents() {
    let (_keep, folder) = folder();
    let path = folder.join("tokenizer.json");
    let json = String::from_utf8(learnt().to_json()).unwrap();
    write(&path, json.replace("<|endoftext|>", "<|x|>"));
    let tokenizer = Tokenizer::load(path.to_str().unwrap()).unwrap();
    let file = write(&folder.join("a.jsonl"), json_lines(&DOCUMENTS));
    let meta = prepare_all(&tokenizer, &[file], &folder.join("out"), &Options::default()).unwrap();
    assert_eq!(meta.end_of_text, None);
    assert_eq!(tokens(&folder.join("out")), expected(&tokenizer, &DOCUMENTS));
}

#[test]
fn the_built_in_text_is_small_and_whole() {
    let text = builtin();
    assert!((100_000..=200_000).contains(&text.len()));
    assert!(text.contains("White Rabbit"));
    assert!(text.ends_with('\n') && !text.ends_with("\n\n") && !text.contains("Gutenberg"));
}
