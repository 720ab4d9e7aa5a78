//! The results of recall tasks: shares with their errors, files, paired differences.

use march_lab::eval::{Answers, RecallAnswer as Answer, Report, TaskReport, compare};
use march_lm::Error;
use march_lm::anchors::Policy;
use march_lm::data::recall::Task;

fn answers(samples: &[&[(usize, bool)]]) -> Answers {
    let one = |sample: &&[(usize, bool)]| sample.iter().map(|&(age, right)| Answer { age, right }).collect();
    Answers {
        samples: samples.iter().map(one).collect(),
        memory_bytes: 0,
        rollback_bytes: 0,
        tokens_per_second: 0.0,
    }
}

#[test]
fn shares_have_the_error_of_their_sequences() {
    let got = answers(&[&[(1, true), (2, true)], &[(1, false), (2, false)], &[(1, true), (2, true)]]);
    let share = got.accuracy();
    assert_eq!((share.asked, share.right), (6, 4));
    // All answers of a sequence agree: three draws of 1, 0, 1, whose mean has the error √(1/3 / 3).
    let error = share.error.unwrap();
    assert!((error - (1.0f64 / 9.0).sqrt()).abs() < 1e-12, "{error}");
    let none = answers(&[]).accuracy();
    assert_eq!((none.value(), none.error), (0.0, None));
    // A single draw says nothing about the variance.
    assert_eq!(answers(&[&[(3, true), (4, false)]]).accuracy().error, None);
}

#[test]
fn ages_are_counted_apart() {
    let got = answers(&[&[(1, true), (20, false), (95, true)], &[(15, false), (17, true)]]);
    let ages = got.by_age(96);
    let seen: Vec<_> = ages.iter().map(|age| (age.from, age.to, age.share.asked, age.share.right)).collect();
    assert_eq!(seen, [(0, 16, 2, 1), (16, 32, 2, 1), (80, 96, 1, 1)]);
    assert_eq!(answers(&[&[(1, true)]]).by_age(2).len(), 1);
}

fn report(rights: &[&str]) -> Report {
    let task = Task::open("mqar:pairs=4:vocabulary=16", None).unwrap();
    let sample = |text: &&str| text.chars().map(|c| Answer { age: 1, right: c == '1' }).collect();
    let samples = rights.iter().map(sample).collect();
    let answers = Answers { samples, memory_bytes: 10, rollback_bytes: 4, tokens_per_second: 1.0 };
    let mut report = Report::new("m".into(), "march", 1, "f32".into(), Policy::default(), false);
    report.results.push(TaskReport::new(&task, &answers));
    report
}

#[test]
fn differences_are_paired() {
    let (a, b) = (report(&["0000", "1100", "1111"]), report(&["1100", "1111", "1111"]));
    let got = &compare(&a, &b).unwrap()[0];
    assert_eq!(got.samples, 3);
    assert!((got.accuracy[0] - 0.5).abs() < 1e-12 && (got.difference - 1.0 / 3.0).abs() < 1e-12);
    // Differences 0.5, 0.5, 0: their deviation is √(1/12), over √3.
    assert!((got.error - (1.0f64 / 36.0).sqrt()).abs() < 1e-12);
    assert!((got.interval[1] - got.difference - 4.303 * got.error).abs() < 1e-9);
    let same = &compare(&a, &a).unwrap()[0];
    assert_eq!((same.difference, same.error), (0.0, 0.0));
    let mut other = b.clone();
    other.results[0].length = 17;
    assert!(compare(&a, &other).unwrap_err().to_string().contains("17 tokens"));
}

#[test]
fn files_are_written_and_read() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.json");
    let a = report(&["0110", "1111"]);
    a.write(&path).unwrap();
    assert_eq!(Report::read(&path).unwrap(), a);
    std::fs::write(&path, "{\"format\": 1}").unwrap();
    assert!(Report::read(&path).unwrap_err().to_string().contains("march eval"));
    let text = serde_json::to_string(&a).unwrap().replace("\"format\":2", "\"format\":9");
    std::fs::write(&path, text).unwrap();
    assert!(Report::read(&path).unwrap_err().to_string().contains("format 9"));
}

#[test]
fn one_sequence_has_no_standard_error() {
    let (one, two) = (report(&["0110"]), report(&["0110", "1111"]));
    assert_eq!((one.results[0].standard_error, one.results[0].by_age[0].standard_error), (None, None));
    assert!(two.results[0].standard_error.unwrap() > 0.0);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.json");
    one.write(&path).unwrap();
    assert!(std::fs::read_to_string(&path).unwrap().contains("\"standard_error\": null"));
    assert_eq!(Report::read(&path).unwrap(), one);
}

#[test]
fn any_changed_byte_is_noticed() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.json");
    let a = report(&["0110", "1111"]);
    a.write(&path).unwrap();
    let text = std::fs::read_to_string(&path).unwrap();
    for at in 0..text.len() {
        for byte in [b'0', b'1', b'2', b'"', b' ', b'x', text.as_bytes()[at] ^ 1] {
            let mut bytes = text.clone().into_bytes();
            bytes[at] = byte;
            std::fs::write(&path, &bytes).unwrap();
            if bytes.trim_ascii_end() != text.trim_ascii_end().as_bytes() {
                assert!(Report::read(&path).is_err(), "{}", String::from_utf8_lossy(&bytes));
            }
        }
        std::fs::write(&path, &text[..at]).unwrap();
        assert!(at + 1 == text.len() || Report::read(&path).is_err());
    }
    // A file without a checksum is accepted only in the format that had none.
    let plain = serde_json::to_string(&a).unwrap();
    std::fs::write(&path, &plain).unwrap();
    let error = Report::read(&path).unwrap_err();
    assert!(matches!(error, Error::Damaged { .. }) && error.to_string().contains("no checksum"), "{error}");
    std::fs::write(&path, plain.replace("\"format\":2", "\"format\":1")).unwrap();
    assert_eq!(Report::read(&path).unwrap().results, a.results);
}

#[test]
fn results_that_contradict_themselves_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.json");
    let changes: [(fn(&mut TaskReport), &str); 8] = [
        (|result| result.samples = 3, "`samples` is 3, but there are 2"),
        (|result| result.accuracy = 0.625, "accuracy of 0.625"),
        (|result| result.accuracy = 75.0, "accuracy of 75"),
        (|result| result.answers[1] = "111".into(), "sequence 1"),
        (|result| result.answers[0] = "0112".into(), "sequence 0"),
        (|result| result.by_age[0].asked = 7, "by age"),
        (|result| result.by_age[0].to = 0, "by age"),
        (|result| result.standard_error = Some(-1.0), "out of range"),
    ];
    for (change, said) in changes {
        let mut report = report(&["0110", "1111"]);
        change(&mut report.results[0]);
        report.write(&path).unwrap();
        let error = Report::read(&path).unwrap_err().to_string();
        assert!(error.contains(said), "{error}");
    }
}

#[test]
fn numbers_keep_their_last_digit() {
    for number in (1..2000).map(|i| f64::from(i) / 1999.0 + 1e-17) {
        let text = serde_json::to_string(&number).unwrap();
        assert_eq!(serde_json::from_str::<f64>(&text).unwrap(), number, "{text}");
    }
}

#[test]
fn student_is_between_its_table_and_the_normal() {
    for (freedom, point, close) in [(9, 2.262, 2e-3), (30, 2.042, 1e-3), (100_000, 1.96, 1e-3)] {
        let (a, mut rights) = (report(&vec!["0000"; freedom + 1]), vec!["0000"; freedom + 1]);
        rights[0] = "1111";
        let got = &compare(&a, &report(&rights)).unwrap()[0];
        let student = (got.interval[1] - got.difference) / got.error;
        assert!((student - point).abs() < close, "{freedom}: {student}");
    }
}
