//! Files that are damaged, forged, or of something else.

use std::fs;
use std::path::Path;

use march_lm::anchors::{Policy, Retention};
use march_lm::engine::checksum;
use march_lm::memory::{BankFile, BankTag, FORMAT_VERSION, Rollback};

use super::{Trial, folder};
use crate::common::{invariant, tokens};

/// Whatever is done to a file: an error, or the logits of the whole one where a call does not read what is damaged.
#[test]
fn damage_is_refused() {
    let device = invariant();
    let (_folder, path) = folder();
    let next = tokens(3, 37, 9);
    for kind in ["march", "log_linear_gated_deltanet", "transformer"] {
        let trial = Trial::new(&device, kind);
        let mut bank = trial.bank(&trial.case.model.policy(), &tokens(59, 37, 1));
        trial.save(&bank, &path);
        let want = trial.extend(&mut bank, &next).unwrap();
        let whole = fs::read(&path).unwrap();
        let header = u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
        let attempt = |bytes: &[u8]| -> march_lm::Result<()> {
            fs::remove_file(&path).unwrap();
            fs::write(&path, bytes).unwrap();
            let mut bank = trial.load(&path)?;
            match trial.extend(&mut bank, &next) {
                Ok(got) => assert!(got == want, "{kind}: wrong logits"),
                Err(error) => {
                    assert!(error.to_string().contains("is damaged"), "{error}");
                    let again = trial.extend(&mut bank, &next).unwrap_err().to_string();
                    assert!(again.contains("incomplete"), "{again}");
                    assert!(bank.save(&path, &trial.tag).is_err() && bank.rollback(1).is_err());
                    return Err(error);
                }
            }
            BankFile::open(&path)?.verify()
        };
        attempt(&whole).unwrap();
        let flips = (0..header + 200).step_by(3).chain((header + 200..whole.len()).step_by(101));
        for (i, at) in flips.enumerate() {
            let mut bytes = whole.clone();
            bytes[at] ^= 1 << (i % 8);
            let error =
                attempt(&bytes).expect_err(&format!("{kind}: bit {} of byte {at} was flipped", i % 8));
            assert!(error.to_string().contains("bank.safetensors"), "{error}");
        }
        let cuts = (0..header).step_by(61).chain((header..whole.len()).step_by(997)).chain([whole.len() - 1]);
        for at in cuts {
            assert!(attempt(&whole[..at]).is_err(), "{kind}: cut to {at} bytes");
        }
        assert!(attempt(&[&whole[..], &[1]].concat()).is_err(), "{kind}: a byte was added");
        assert!(
            attempt(&[&whole[..whole.len() - 4096], &[0; 4096]].concat()).is_err(),
            "{kind}: a torn page"
        );
    }
}

/// Damage in what was appended is refused, wherever it is; what an append did not finish is not there.
#[test]
fn damage_of_what_was_appended_is_refused() {
    let device = invariant();
    let trial = Trial::new(&device, "march");
    let (_folder, path) = folder();
    let policy = Policy { interval: Some(4), ..trial.case.model.policy() };
    let mut bank = trial.bank(&policy, &tokens(150, 37, 1));
    trial.save(&bank, &path);
    let first = BankFile::open(&path).unwrap().bytes();
    let older = bank.timeline().clone();
    trial.extend(&mut bank, &tokens(20, 37, 2)).unwrap();
    trial.append(&bank, &path);
    let whole = fs::read(&path).unwrap();
    let file = BankFile::open(&path).unwrap();
    assert_eq!((file.appended(), file.bytes()), (1, whole.len()));
    let start = first.next_multiple_of(64);
    let header = u64::from_le_bytes(whole[start..start + 8].try_into().unwrap()) as usize;
    let put = |bytes: &[u8]| {
        fs::remove_file(&path).unwrap();
        fs::write(&path, bytes).unwrap();
    };
    let flips = (start..start + header + 200).step_by(5);
    for (i, at) in flips.chain((start + header + 200..whole.len()).step_by(211)).enumerate() {
        let mut bytes = whole.clone();
        bytes[at] ^= 1 << (i % 8);
        put(&bytes);
        let found = BankFile::open(&path).and_then(|file| file.verify());
        let error = found.expect_err(&format!("bit {} of byte {at}", i % 8)).to_string();
        assert!(error.contains("bank.safetensors"), "{error}");
        if at < start + header {
            let says = format!("first {first} bytes of the file are the bank after 150 tokens");
            assert!(error.contains(&format!("appended at byte {start}")) && error.contains(&says), "{error}");
        }
    }
    for at in (start + 8..whole.len()).step_by(499).chain([whole.len() - 1]) {
        put(&whole[..at]);
        assert!(BankFile::open(&path).is_err(), "cut to {at} bytes");
    }
    // Its beginning is another one's.
    put(&[&whole[start..]].concat());
    assert!(BankFile::open(&path).unwrap_err().to_string().contains("its beginning is missing"));
    // A process that died on the way: its mark is there, or not yet.
    let mut marked = whole.clone();
    marked[start..start + 64].copy_from_slice(UNFINISHED);
    let zeros = [&whole[..first], &vec![0; start + 64 - first][..]].concat();
    for bytes in [
        &marked[..],
        &marked[..start + 64 + header / 2],
        &marked[..start + 64],
        &marked[..start + 20],
        &whole[..start],
        &whole[..first],
        &zeros,
        &zeros[..start + 3],
    ] {
        put(bytes);
        let file = BankFile::open(&path).unwrap();
        file.verify().unwrap();
        assert_eq!((file.timeline(), file.appended(), file.bytes()), (&older, 0, first));
        trial.append(&bank, &path);
        assert!(fs::read(&path).unwrap() == whole);
    }
    // A finished section that has lost its first bytes is not taken for one that was never finished.
    for zeroed in [start..start + 8, start..start + 64, start..start + header + 8, start..whole.len()] {
        let mut bytes = whole.clone();
        bytes[zeroed.clone()].fill(0);
        put(&bytes);
        let error = BankFile::open(&path).unwrap_err().to_string();
        let says = format!("are the bank after 150 tokens; extract them with `head -c {first} FILE");
        assert!(error.contains("its length is zero") && error.contains(&says), "{zeroed:?}: {error}");
        assert!(bank.append(None, &path, &trial.tag).is_err());
        assert!(fs::read(&path).unwrap() == bytes, "{zeroed:?}");
        put(&bytes[..first]);
        assert_eq!(BankFile::open(&path).unwrap().timeline(), &older);
    }
}

/// What stands at the beginning of a section that is not finished.
const UNFINISHED: &[u8; 64] = b"march state bank: what follows here has not been written whole.\n";

/// Nothing is appended to a file with damage anywhere, and it stays as it is.
#[test]
fn nothing_is_appended_to_damage() {
    let device = invariant();
    let trial = Trial::new(&device, "march");
    let (_folder, path) = folder();
    let policy = Policy { interval: Some(4), ..trial.case.model.policy() };
    let mut bank = trial.bank(&policy, &tokens(150, 37, 1));
    trial.save(&bank, &path);
    trial.extend(&mut bank, &tokens(20, 37, 2)).unwrap();
    trial.append(&bank, &path);
    let whole = fs::read(&path).unwrap();
    let sections: Vec<usize> =
        (64..whole.len()).step_by(64).filter(|&at| whole[at + 8..].starts_with(b"{\"__m")).collect();
    assert_eq!(sections.len(), 1);
    trial.extend(&mut bank, &tokens(5, 37, 3)).unwrap();
    let mut refused = 0;
    for (i, at) in (0..whole.len()).step_by(97).enumerate() {
        let mut bytes = whole.clone();
        bytes[at] ^= 1 << (i % 8);
        fs::remove_file(&path).unwrap();
        fs::write(&path, &bytes).unwrap();
        let error = bank.append(None, &path, &trial.tag).expect_err(&format!("byte {at}")).to_string();
        assert!(error.contains("bank.safetensors"), "{error}");
        assert!(fs::read(&path).unwrap() == bytes, "byte {at}: it was written to");
        // Where the damage is in what was appended, the beginning is sound.
        assert_eq!(error.contains("head -c"), at >= sections[0], "byte {at}: {error}");
        refused += 1;
    }
    assert!(refused > 300);
}

/// A file that is cut short while a bank reads from it: an error at the first state that is gone.
#[test]
fn a_file_that_is_cut_short_in_use_is_an_error() {
    let device = invariant();
    let trial = Trial::new(&device, "march");
    let (_folder, path) = folder();
    let policy = Policy { interval: Some(4), ..trial.case.model.policy() };
    let whole = trial.bank(&policy, &tokens(150, 37, 1));
    trial.save(&whole, &path);
    let length = fs::metadata(&path).unwrap().len();
    for left in [length - 1, length / 2, 1000, 0] {
        trial.save(&whole, &path);
        let [mut bank, mut back] = [(); 2].map(|()| trial.load(&path).unwrap());
        let mut read = trial.load(&path).unwrap();
        // Of what was read before, a copy is kept.
        trial.extend(&mut read, &[1]).unwrap();
        fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(left).unwrap();
        trial.extend(&mut read, &[2]).unwrap();
        let failed = trial.extend(&mut bank, &[1]).and_then(|_| bank.save(&path, &trial.tag));
        let error = failed.unwrap_err().to_string();
        assert!(error.contains("bank.safetensors: is damaged") && error.contains("cut short"), "{error}");
        let error = back.save(&path, &trial.tag).unwrap_err().to_string();
        assert!(error.contains("cut short"), "{error}");
        assert_eq!(fs::metadata(&path).unwrap().len(), left);
        if left < length / 2 {
            assert!(back.rollback(30).is_err());
        }
    }
}

/// What is no bank, or a damaged one, is not written over by an append; an empty file is.
#[test]
fn what_is_no_bank_stays() {
    let device = invariant();
    let trial = Trial::new(&device, "march");
    let (_folder, path) = folder();
    let bank = trial.bank(&trial.case.model.policy(), &tokens(50, 37, 1));
    trial.save(&bank, &path);
    let whole = fs::read(&path).unwrap();
    let mut damaged = whole.clone();
    damaged[20] ^= 1;
    for bytes in [&b"notes that somebody wants to keep"[..], &damaged, &whole[..whole.len() / 2]] {
        fs::remove_file(&path).unwrap();
        fs::write(&path, bytes).unwrap();
        let error = bank.append(None, &path, &trial.tag).unwrap_err().to_string();
        assert!(error.contains("bank.safetensors"), "{error}");
        assert!(fs::read(&path).unwrap() == bytes);
    }
    fs::write(&path, b"").unwrap();
    trial.append(&bank, &path);
    assert!(fs::read(&path).unwrap() == whole);
}

/// What nobody reads while decoding is checked when a bank goes back to it, or is saved again.
#[test]
fn damaged_tails_are_refused_when_they_are_read() {
    let device = invariant();
    let trial = Trial::new(&device, "march");
    let (_folder, path) = folder();
    trial.save(&trial.bank(&trial.case.model.policy(), &tokens(59, 37, 1)), &path);
    let mut bytes = fs::read(&path).unwrap();
    let (header, metadata) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
    let tails = metadata.info("layers.1.anchors.k_tail").unwrap();
    let (start, end) = tails.data_offsets;
    // In the second of three anchors.
    bytes[8 + header + (start + end) / 2] ^= 4;
    fs::remove_file(&path).unwrap();
    fs::write(&path, bytes).unwrap();
    let mut bank = trial.load(&path).unwrap();
    let error = BankFile::open(&path).unwrap().verify().unwrap_err().to_string();
    assert!(error.contains("`layers.1.anchors.k_tail`, kept anchor 1 (counted from 0)"), "{error}");
    assert!(bank.save(&path, &trial.tag).unwrap_err().to_string().contains("is damaged"));
    assert!(bank.rollback(2).unwrap_err().to_string().contains("is damaged"));
    assert_eq!(bank.rollback(1).unwrap(), Rollback::Exact);
}

/// A saved file with another text in its header, of the same length, and the header's checksum made right.
fn forge(path: &Path, from: &str, to: &str) {
    let mut bytes = fs::read(path).unwrap();
    let end = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header = String::from_utf8(bytes[8..end].to_vec()).unwrap();
    assert!(header.contains(from) && from.len() == to.len(), "{header}");
    let digits = r#"{"__metadata__":{"header_checksum":""#.len();
    bytes[8..end].copy_from_slice(header.replace(from, to).as_bytes());
    bytes[8 + digits..8 + digits + 16].fill(b'0');
    let sum = format!("{:016x}", checksum(&bytes[..end]));
    bytes[8 + digits..8 + digits + 16].copy_from_slice(sum.as_bytes());
    fs::remove_file(path).unwrap();
    fs::write(path, bytes).unwrap();
}

#[test]
fn wrong_tags_are_refused_with_both_values() {
    let device = invariant();
    let trial = Trial::new(&device, "march");
    let (_folder, path) = folder();
    let policy = trial.case.model.policy();
    let bank = trial.bank(&policy, &tokens(50, 37, 1));
    trial.save(&bank, &path);
    let names = |error: String, values: &[&str]| {
        assert!(values.iter().all(|value| error.contains(value)), "{error}: {values:?}");
        assert!(error.contains("bank.safetensors"), "{error}");
    };
    // The same configuration with other numbers.
    let parameters = trial.case.model.init(&device, 8).unwrap();
    let other = trial.case.model.fingerprint(&parameters).unwrap();
    let tag = BankTag { model: other.clone(), ..trial.tag.clone() };
    names(trial.refused(&path, &tag, None), &["model", &trial.tag.model, &other]);
    let tag = BankTag { tokenizer: "0123".into(), tokenizer_name: "mine".into(), ..trial.tag.clone() };
    let found = trial.refused(&path, &tag, None);
    names(found, &["tokenizer", &trial.tag.tokenizer, "0123", "bytes", "mine"]);
    let asked = Policy { interval: Some(32), ..policy.clone() };
    names(trial.refused(&path, &trial.tag, Some(&asked)), &["interval 16", "interval 32"]);
    // What may change does.
    let asked = Policy { top_k: Some(1), retention: Retention::Fenwick, ..policy.clone() };
    let mut changed = trial
        .case
        .model
        .load_bank(&device, &BankFile::open(&path).unwrap(), &trial.tag, Some(&asked))
        .unwrap();
    assert_eq!(changed.policy(), &asked);
    trial.decode(&mut changed, &tokens(20, 37, 2));
    assert_eq!(changed.timeline().kept.len(), 1, "four complete intervals leave one");
    let new = (FORMAT_VERSION + 1).to_string();
    forge(&path, r#""version":"1""#, &format!(r#""version":"{new}""#));
    let error = trial.refused(&path, &trial.tag, None);
    names(error, &[&format!("version {new}"), &format!("reads 1 to {FORMAT_VERSION}")]);
}

/// Files with right checksums that no bank wrote are errors too.
#[test]
fn forged_headers_are_errors() {
    let device = invariant();
    let trial = Trial::new(&device, "march");
    let (_folder, path) = folder();
    let bank = trial.bank(&trial.case.model.policy(), &tokens(50, 37, 1));
    for (from, to) in [
        (r#""format":"march state bank""#, r#""format":"march state pond""#),
        (r#"layers.1.state""#, r#"layers.7.state""#),
        (r#"layers.2.anchors.k_tail""#, r#"layers.2.anchors.k_tale""#),
        (r#"[3,4,6,9]"#, r#"[3,4,9,6]"#),
        (r#"[3,4,6,9]"#, r#"[1,4,6,9]"#),
        (r#"\"position\":50"#, r#"\"position\":20"#),
        (r#"\"interval\":16"#, r#"\"interval\":-6"#),
        (r#"\"interval\":16"#, r#"\"interval\":00"#),
        (r#""checksums":"#, r#""checksame":"#),
    ] {
        trial.save(&bank, &path);
        forge(&path, from, to);
        let result = trial.load(&path).and_then(|mut bank| trial.extend(&mut bank, &[1, 2, 3]));
        let error = result.expect_err(&format!("{from} → {to}")).to_string();
        assert!(!error.contains("Timeline"), "a structure of the program: {error}");
        if from.contains("position") {
            assert!(error.contains("20 tokens, 3 anchors placed, 3 kept"), "{error}");
        }
    }
    for bytes in [&b""[..], b"short", &[0xFF; 64], &b"\x02\0\0\0\0\0\0\0{}"[..]] {
        fs::remove_file(&path).unwrap();
        fs::write(&path, bytes).unwrap();
        assert!(trial.load(&path).is_err());
    }
    assert!(trial.load(&path.with_file_name("none")).is_err());
    assert!(trial.load(path.parent().unwrap()).is_err());
}

/// Not the model of the file.
#[test]
fn a_bank_of_another_kind_is_refused() {
    let device = invariant();
    let (_folder, path) = folder();
    let [march, base] = ["march", "gated_deltanet"].map(|kind| Trial::new(&device, kind));
    base.save(&base.bank(&Policy::default(), &tokens(20, 37, 1)), &path);
    let error = march.load(&path).unwrap_err().to_string();
    assert!(error.contains("(gated_deltanet)") && error.contains("(march)"), "{error}");
}
