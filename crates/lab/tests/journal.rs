//! The journal of an evaluation, cut and damaged.

use march_lab::eval::{Answer, Entry, Journal, Request};

fn requests(text: &str) -> Vec<Request> {
    vec![Request::LoglikelihoodRolling { text: text.into() }]
}

fn entry(index: usize) -> Entry {
    let answers = vec![Answer::GenerateUntil(format!("answer {index} \"}}\n"))];
    Entry::new("piqa", index, &requests("x"), answers)
}

#[test]
fn a_journal_goes_on_where_it_was_cut() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.json.journal");
    let mut journal = Journal::open(&path, "m").unwrap();
    (0..3).for_each(|index| journal.record(entry(index)).unwrap());
    drop(journal);
    let bytes = std::fs::read(&path).unwrap();
    for end in 0..=bytes.len() {
        std::fs::write(&path, &bytes[..end]).unwrap();
        let whole = bytes[..end].iter().filter(|&&byte| byte == b'\n').count();
        let mut journal = Journal::open(&path, "m").unwrap();
        assert_eq!(journal.len(), whole.saturating_sub(1));
        let missing: Vec<usize> =
            (0..3).filter(|&i| journal.answers("piqa", i, &requests("x")).unwrap().is_none()).collect();
        missing.into_iter().for_each(|index| journal.record(entry(index)).unwrap());
        drop(journal);
        assert_eq!(std::fs::read(&path).unwrap(), bytes);
    }
}

#[test]
fn damage_and_other_questions_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.json.journal");
    let mut journal = Journal::open(&path, "m").unwrap();
    (0..2).for_each(|index| journal.record(entry(index)).unwrap());
    let error = journal.answers("piqa", 1, &requests("y")).unwrap_err().to_string();
    assert!(error.contains("has changed"), "{error}");
    drop(journal);
    let error = Journal::open(&path, "n").err().unwrap().to_string();
    assert!(error.contains("something else"), "{error}");
    let mut bytes = std::fs::read(&path).unwrap();
    let second = bytes.iter().position(|&byte| byte == b'\n').unwrap() + 20;
    bytes[second] ^= 1;
    std::fs::write(&path, &bytes).unwrap();
    let error = Journal::open(&path, "m").err().unwrap().to_string();
    assert!(error.contains("line 2"), "{error}");
}
