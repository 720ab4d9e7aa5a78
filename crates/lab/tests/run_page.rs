//! The page of a run, its machines, and its metrics while it continues.

use std::fs;
use std::path::Path;

use march_lab::report::{Follow, Metrics, render};
use march_lm::disk::seal;
use march_lm::run::Session;

#[test]
fn a_run_becomes_a_page() {
    let run = tempfile::tempdir().unwrap();
    assert!(render(run.path()).is_err());
    fs::write(run.path().join("config.toml"), "[model]\nname = \"<b>\"\n").unwrap();
    let lines = "{\"step\":1,\"loss\":3.5,\"gradient_norm\":1,\"learning_rate\":0.1,\"tokens\":10}\n\
                 {\"step\":2,\"loss\":2.5,\"gradient_norm\":2,\"learning_rate\":0.1,\"tokens\":20}\n\
                 {\"step\":2,\"validation_loss\":2.75}\n\
                 {\"step\":2,\"prompt\":\"A\",\"sample\":\"<script>\"}\n{\"step\":3,\"lo";
    fs::write(run.path().join("metrics.jsonl"), lines).unwrap();
    let metrics = Metrics::read(run.path()).unwrap();
    assert_eq!((metrics.loss.len(), metrics.tokens), (2, 20));
    let page = render(run.path()).unwrap();
    assert!(page.contains("2 steps") && page.contains("2.7500 at step 2") && page.contains("<svg"));
    assert!(page.contains("&lt;script&gt;") && !page.contains("<script"));
    assert!(page.contains("&lt;b&gt;"));
    fs::write(run.path().join("metrics.jsonl"), "nonsense\n{}\n").unwrap();
    assert!(Metrics::read(run.path()).unwrap_err().to_string().contains("line 1"));
}

/// The page of a run without metrics.
fn bare(run: &Path) -> String {
    fs::write(run.join("config.toml"), "").unwrap();
    fs::write(run.join("metrics.jsonl"), "").unwrap();
    render(run).unwrap()
}

#[test]
fn sessions_become_rows() {
    let run = tempfile::tempdir().unwrap();
    assert!(!bare(run.path()).contains("Machine"));
    let session = Session {
        started: "2026-01-02T03:04:05Z".into(),
        arguments: vec!["train".into(), "<b>".into()],
        processor: Some("A processor".into()),
        memory: Some(3 << 29),
        ..Default::default()
    };
    session.record(run.path()).unwrap();
    Session { step: 40, device: "A GPU".into(), ..session }.record(run.path()).unwrap();
    let page = bare(run.path());
    assert_eq!(page.matches("<tr>").count(), 3);
    for part in
        ["2026-01-02T03:04:05Z", "<td>40</td>", "A processor", "train &lt;b&gt;", "1.5 GiB", "; A GPU</td>"]
    {
        assert!(page.contains(part), "{page}");
    }
}

#[test]
fn a_damaged_file_is_named() {
    let run = tempfile::tempdir().unwrap();
    fs::write(run.path().join("environment.json"), "<").unwrap();
    assert!(bare(run.path()).contains("environment.json"));
}

#[test]
fn only_what_was_added_is_read() {
    let run = tempfile::tempdir().unwrap();
    let path = run.path().join("metrics.jsonl");
    let mut follow = Follow::new(run.path());
    assert!(!follow.read_on().unwrap());
    let line = |text: &str| seal(text) + "\n";
    let (first, second) = (line("{\"step\":1,\"loss\":3.5}"), line("{\"step\":2,\"loss\":2.5}"));
    let mut text = first.clone() + &second[..15];
    fs::write(&path, &text).unwrap();
    assert!(follow.read_on().unwrap());
    assert_eq!(follow.metrics().loss, [(1.0, 3.5)]);
    assert!(!follow.read_on().unwrap());
    text = first + &second + &line("{\"step\":2,\"validation_loss\":2.75}");
    fs::write(&path, &text).unwrap();
    assert!(follow.read_on().unwrap());
    assert_eq!(follow.metrics().loss, [(1.0, 3.5), (2.0, 2.5)]);
    assert_eq!(follow.metrics().validation, [(2.0, 2.75)]);
    // A damaged line is reported each time, and nothing is consumed twice.
    fs::write(&path, text + &second + &second.replace("2.5", "2.6")).unwrap();
    for _ in 0..2 {
        assert!(follow.read_on().unwrap_err().to_string().contains("line 5 is damaged"));
        assert_eq!(follow.metrics().loss.len(), 2);
    }
}
