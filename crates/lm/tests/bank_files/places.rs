//! Files of earlier versions, and what stays of a file that is written over.

use std::fs;
use std::path::{Path, PathBuf};

use march_lm::anchors::Policy;
use march_lm::memory::{BankFile, BankTag, Ending};
use march_lm::model::ModelConfig;
use march_lm::model::{Batch, Model};

use super::{Trial, folder};
use crate::common::{invariant, tokens};

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

/// A file that was written before the format had version 2.
#[test]
fn a_file_of_version_1_goes_on() {
    let device = invariant();
    let json = r#"{"model_type": "march", "vocab_size": 16, "hidden_size": 8, "num_hidden_layers": 1,
        "intermediate_size": 8, "norm_eps": 1e-6, "tie_word_embeddings": true, "initializer_range": 0.12,
        "num_heads": 1, "head_dim": 4, "expand_v": 1.0, "conv_size": 2, "anchor_interval": 2, "routing_dim": 2}"#;
    let model = Model::new(&ModelConfig::from_json(json, "fixture").unwrap());
    let parameters = model.init(&device, 7).unwrap();
    let tag = BankTag {
        model_type: "march".into(),
        model: "a model of one layer".into(),
        tokenizer_name: "bytes".into(),
        tokenizer: "a tokenizer".into(),
    };
    let weights = parameters.into();
    let ids: Vec<u32> = (0..40).map(|i| i * 7 % 16).collect();
    let file = BankFile::open(&fixture("bank-version-1.safetensors")).unwrap();
    file.verify().unwrap();
    assert_eq!((file.version(), file.timeline().position, file.timeline().kept.len()), (1, 36, 18));
    assert!(file.ending(model.config().vocab_size).unwrap().is_none());
    let mut old = model.load_bank(&device, &file, &tag, None).unwrap();
    let mut new = model.bank(model.policy()).unwrap();
    model.extend(&weights, Batch::one(&ids[..36]), &mut [&mut new], None).unwrap();
    let [got, want] = [&mut old, &mut new].map(|bank| {
        let hidden = model.extend(&weights, Batch::one(&ids[36..]), &mut [bank], None).unwrap();
        hidden.to_f32()
    });
    let largest = want.iter().fold(0.0f32, |most, value| most.max(value.abs()));
    assert!(got.iter().zip(&want).all(|(a, b)| (a - b).abs() < 1e-5 * largest), "{got:?}, {want:?}");
    // With what was appended to it then, and what is appended now.
    let file = BankFile::open(&fixture("bank-version-1-appended.safetensors")).unwrap();
    file.verify().unwrap();
    assert_eq!((file.version(), file.appended(), file.timeline().position), (1, 1, 77));
    let (_folder, path) = folder();
    fs::copy(fixture("bank-version-1.safetensors"), &path).unwrap();
    let ending = Ending { logits: vec![0.5; 16], recent: vec![3, 1, 2] };
    old.append(Some(&ending), &path, &tag).unwrap();
    let file = BankFile::open(&path).unwrap();
    assert_eq!((file.version(), file.timeline().position), (2, 40));
    assert_eq!(file.ending(model.config().vocab_size).unwrap(), Some(ending));
}

/// The end of the text is there bit for bit, also behind others.
#[test]
fn the_end_of_the_text_is_kept() {
    let device = invariant();
    let trial = Trial::new(&device, "march");
    let (_folder, path) = folder();
    let policy = Policy { interval: Some(4), ..trial.case.model.policy() };
    let mut bank = trial.bank(&policy, &tokens(150, 37, 1));
    let ending = |n: u32| Ending {
        logits: (0..37).map(|i| (i as f32 * 0.37 + n as f32).sin()).collect(),
        recent: (0..n).collect(),
    };
    bank.append(Some(&ending(5)), &path, &trial.tag).unwrap();
    trial.extend(&mut bank, &tokens(9, 37, 2)).unwrap();
    bank.append(Some(&ending(9)), &path, &trial.tag).unwrap();
    let file = BankFile::open(&path).unwrap();
    assert_eq!((file.version(), file.appended()), (2, 1));
    assert_eq!(file.ending(trial.case.model.config().vocab_size).unwrap(), Some(ending(9)));
    assert_eq!(trial.load(&path).unwrap().timeline(), bank.timeline());
    // Without an end the last one is not taken for it.
    trial.extend(&mut bank, &tokens(4, 37, 3)).unwrap();
    trial.append(&bank, &path);
    let file = BankFile::open(&path).unwrap();
    assert_eq!(
        (file.version(), file.appended(), file.ending(trial.case.model.config().vocab_size).unwrap()),
        (1, 2, None)
    );
}

/// Saving and appending keep a file's mode and the link that leads to it.
#[test]
#[cfg(unix)]
fn mode_and_link_stay() {
    use std::os::unix::fs::PermissionsExt;
    let device = invariant();
    let trial = Trial::new(&device, "march");
    let (folder, path) = folder();
    let link = folder.path().join("link");
    let policy = Policy { interval: Some(4), ..trial.case.model.policy() };
    let mut bank = trial.bank(&policy, &tokens(150, 37, 1));
    trial.save(&bank, &path);
    std::os::unix::fs::symlink("bank.safetensors", &link).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
    let check = |appended: usize| {
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o640);
        assert_eq!(BankFile::open(&path).unwrap().appended(), appended);
    };
    trial.extend(&mut bank, &tokens(9, 37, 2)).unwrap();
    trial.append(&bank, &link);
    check(1);
    trial.save(&bank, &link);
    check(0);
    // Another text, which is written whole.
    trial.append(&trial.bank(&policy, &tokens(90, 37, 5)), &link);
    check(0);
    assert_eq!(BankFile::open(&path).unwrap().timeline().position, 90);
}
