//! Batches, in order and shuffled.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use march_lm::data::recall::{RecallSource, Task};
use march_lm::data::{BatchFile, Loader, Options, ShardSource, Shards, Source, TextSource, builtin, split};
use march_lm::tokenizer::Tokenizer;
use proptest::prelude::*;

use super::{damaged, folder, json_lines, message, prepare_all, tokens, write};

/// All of `count` batches, one after the other.
fn batches(loader: &mut Loader, rows: usize, count: usize) -> Vec<(Vec<u32>, Vec<u32>)> {
    (0..count)
        .map(|_| {
            let (mut inputs, mut targets) = (vec![9], vec![9]);
            loader.next(rows, &mut inputs, &mut targets).unwrap();
            (inputs, targets)
        })
        .collect()
}

#[test]
fn sequences_follow_each_other() {
    let source = TextSource::new((0..32).collect(), 4).unwrap();
    assert_eq!((source.sequences(), source.sequence_length()), (7, 4));
    let mut loader = Loader::new(Box::new(source), None).unwrap();
    let taken = batches(&mut loader, 2, 4);
    assert_eq!(taken[0], ((0..8).collect(), (1..9).collect()));
    assert_eq!(taken[1], ((8..16).collect(), (9..17).collect()));
    // The seventh sequence, and the first of the next epoch.
    let around: Vec<u32> = (24..28).chain(0..4).collect();
    assert_eq!(taken[3].0, around);
    assert_eq!((loader.cursor(), loader.at(7), loader.at(13), loader.at(14)), (8, 0, 6, 0));
}

#[test]
fn every_epoch_has_every_sequence_once_in_another_order() {
    let source = TextSource::new((0..1001).collect(), 4).unwrap();
    let mut loader = Loader::new(Box::new(source), Some(3)).unwrap();
    let mut epochs = Vec::new();
    for epoch in 0..3u64 {
        let order: Vec<u64> = (0..250).map(|place| loader.at(250 * epoch + place)).collect();
        assert_eq!(order.iter().copied().collect::<BTreeSet<u64>>(), (0..250).collect());
        assert_ne!(order, (0..250).collect::<Vec<u64>>());
        // Batches across the border are this order.
        let firsts: Vec<u64> = batches(&mut loader, 10, 25)
            .iter()
            .flat_map(|(i, _)| i.chunks(4))
            .map(|s| u64::from(s[0]) / 4)
            .collect();
        assert_eq!(firsts, order);
        epochs.push(order);
    }
    assert!(epochs[0] != epochs[1] && epochs[1] != epochs[2]);
    let other = Loader::new(Box::new(TextSource::new((0..1001).collect(), 4).unwrap()), Some(4)).unwrap();
    assert_ne!((0..250).map(|place| other.at(place)).collect::<Vec<u64>>(), epochs[0]);
}

proptest! {
    #[test]
    fn a_loader_that_seeks_goes_on_as_if_it_never_stopped(
        tokens in 3usize..200, length in 1usize..9, seed in prop::option::of(0u64..9),
        rows in 1usize..7, before in 0usize..9, after in 1usize..5,
    ) {
        prop_assume!((tokens - 1) / length > 0);
        let make = || {
            let source = TextSource::new((0..tokens as u32).collect(), length).unwrap();
            Loader::new(Box::new(source), seed).unwrap()
        };
        let (mut whole, mut first, mut second) = (make(), make(), make());
        let all = batches(&mut whole, rows, before + after);
        prop_assert_eq!(&batches(&mut first, rows, before)[..], &all[..before]);
        second.seek(first.cursor());
        prop_assert_eq!(&batches(&mut second, rows, after)[..], &all[before..]);
        prop_assert_eq!(second.cursor(), whole.cursor());
        for (inputs, targets) in &all {
            prop_assert_eq!((inputs.len(), targets.len()), (rows * length, rows * length));
            prop_assert!(inputs.iter().zip(targets).all(|(input, target)| input + 1 == *target));
        }
    }
}

#[test]
fn shards_and_memory_give_the_same() {
    let (_keep, folder) = folder();
    let file = write(&folder.join("t.jsonl"), json_lines(&[&builtin()[..5000], &builtin()[5000..9000]]));
    let options = Options { shard_tokens: 700, ..Options::default() };
    let output = folder.join("out");
    prepare_all(&Tokenizer::bytes(), &[file], &output, &options).unwrap();
    let all = tokens(&output);
    let shards = Arc::new(Shards::open(&output).unwrap());
    let (training, validation) = split(shards.tokens(), 0.1).unwrap();
    assert_eq!((training.clone(), validation.clone()), (0..8102, 8102..9002));
    for (range, length) in [(0..9002, 64), (training, 1000), (validation, 33)] {
        let part = all[range.start as usize..range.end as usize].to_vec();
        let memory = Box::new(TextSource::new(part, length).unwrap());
        let disk = Box::new(ShardSource::part(shards.clone(), range, length).unwrap());
        assert_eq!(memory.sequences(), disk.sequences());
        let (mut memory, mut disk) =
            (Loader::new(memory, Some(1)).unwrap(), Loader::new(disk, Some(1)).unwrap());
        assert_eq!(batches(&mut memory, 3, 60), batches(&mut disk, 3, 60));
    }
    assert_eq!(ShardSource::new(shards.clone(), 9001).unwrap().sequences(), 1);
    message(
        ShardSource::new(shards.clone(), 9002).map(|_| ()),
        &["out", "9002 tokens", "one sequence of 9002"],
    );
    message(ShardSource::part(shards.clone(), 5..9003, 8).map(|_| ()), &["5..9003", "9002"]);
    let source = ShardSource::new(shards, 64).unwrap();
    message(source.sequence(source.sequences(), &mut vec![], &mut vec![]), &["140", "there are 140"]);
}

#[test]
fn sources_that_are_too_short_say_so() {
    let short = |count: u32, length| TextSource::new((0..count).collect(), length).map(|_| ());
    message(short(0, 8), &["0 tokens", "one sequence of 8", "shorter sequences or more text"]);
    message(short(8, 8), &["8 tokens", "one sequence of 8"]);
    message(short(8, 0), &["at least 1"]);
    short(9, 8).unwrap();
    message(split(10, 1.0), &["below 1"]);
    message(split(10, f64::NAN), &["below 1"]);
    assert_eq!(split(10, 0.0).unwrap(), (0..10, 10..10));
    assert_eq!(split(0, 0.5).unwrap(), (0..0, 0..0));
}

#[test]
fn a_failing_source_leaves_the_loader_where_it_was() {
    struct Fails;
    impl Source for Fails {
        fn sequence_length(&self) -> usize {
            1
        }
        fn sequences(&self) -> u64 {
            5
        }
        fn sequence(
            &self,
            index: u64,
            inputs: &mut Vec<u32>,
            targets: &mut Vec<u32>,
        ) -> march_lm::Result<()> {
            inputs.push(index as u32);
            targets.push(index as u32);
            if index == 3 { Err(march_lm::Error::Request("no".into())) } else { Ok(()) }
        }
        fn fingerprint(&self) -> march_lm::Result<String> {
            Ok("fails".into())
        }
    }
    let mut loader = Loader::new(Box::new(Fails), None).unwrap();
    batches(&mut loader, 2, 1);
    assert!(loader.next(2, &mut vec![], &mut vec![]).is_err());
    assert_eq!(loader.cursor(), 2);
}

fn golden(name: &str) -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../cli/golden").join(name).join("training.json")
}

#[test]
fn given_batches_come_as_they_are() {
    let path = golden("march");
    let json: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
    let file = BatchFile::open(&path).unwrap();
    assert_eq!((file.rows(), file.steps(), file.sequence_length(), file.sequences()), (2, 6, 64, 12));
    let mut loader = Loader::new(Box::new(file), None).unwrap();
    for (step, (inputs, targets)) in batches(&mut loader, 2, 6).into_iter().enumerate() {
        for row in 0..2 {
            let ids: Vec<u32> = serde_json::from_value(json["batches"][step][row].clone()).unwrap();
            assert_eq!(inputs[64 * row..64 * row + 64], ids[..64]);
            assert_eq!(targets[64 * row..64 * row + 64], ids[1..]);
        }
    }
}

#[test]
fn files_of_batches_are_checked() {
    let (_keep, folder) = folder();
    let path = folder.join("b.json");
    let open = |text: &str| BatchFile::open(&write(&path, text)).map(|_| ());
    message(open("{\"batches\": []}"), &["b.json", "at least one batch"]);
    message(open("{\"batches\": [[[1]]]}"), &["two ids"]);
    message(open("{\"batches\": [[[1, 2]], []]}"), &["step 1 has 0 rows"]);
    message(open("{\"batches\": [[[1, 2], [1, 2, 3]]]}"), &["step 0, row 1 has 3 ids"]);
    message(open("{\"batches\": [[[1, -2]]]}"), &["not a file of batches"]);
    message(open("{}"), &["batches"]);
    message(BatchFile::open(&folder.join("missing.json")).map(|_| ()), &["missing.json"]);
    let bytes = std::fs::read(golden("march")).unwrap();
    damaged(&bytes[..2000], 3, 500, |bytes| _ = BatchFile::open(&write(&path, bytes)));
}

/// Each source has a fingerprint of its own, the same each time.
#[test]
fn fingerprints_tell_sources_apart() {
    let (_keep, folder) = folder();
    let mut all = BTreeSet::new();
    let mut new = |make: &dyn Fn() -> Box<dyn Source>| {
        let (first, again) = (make().fingerprint().unwrap(), make().fingerprint().unwrap());
        assert_eq!(first, again);
        assert!(first.len() == 64 && first.bytes().all(|digit| digit.is_ascii_hexdigit()), "{first}");
        assert!(all.insert(first));
    };
    let file = write(&folder.join("t.txt"), &builtin()[..5000]);
    let output = folder.join("out");
    prepare_all(&Tokenizer::bytes(), &[file], &output, &Options::default()).unwrap();
    for range in [0..5001, 0..4000, 4000..5001] {
        new(&|| {
            let shards = Arc::new(Shards::open(&output).unwrap());
            Box::new(ShardSource::part(shards, range.clone(), 64).unwrap())
        });
    }
    for tokens in [vec![1, 2, 3], vec![1, 2, 4], vec![1, 2, 3, 4]] {
        new(&|| Box::new(TextSource::new(tokens.clone(), 2).unwrap()));
    }
    for text in ["{\"batches\": [[[1, 2]]]}", "{\"batches\": [[[1, 3]]]}"] {
        new(&|| Box::new(BatchFile::open(&write(&folder.join("b.json"), text)).unwrap()));
    }
    for (text, length, seed) in [
        ("mqar", None, 1),
        ("mqar", None, 2),
        ("mqar:pairs=3", None, 1),
        ("mqar:pairs=3", Some(99), 1),
        ("needle", None, 1),
    ] {
        new(&|| Box::new(RecallSource::lessons(Task::open(text, length).unwrap(), seed)));
    }
    for count in [2, 3, 9] {
        new(&|| Box::new(RecallSource::asked(Task::open("mqar", None).unwrap(), count)));
    }
}
