//! Tests of `display/view.rs`.

use std::fs;
use std::path::Path;

use march_lm::run::{Event, StepLine};
use march_lm::train::StepReport;
use ratatui::Terminal;
use ratatui::backend::TestBackend;

use march_cli::display::view::*;

fn view(folder: &Path) -> View {
    let folder = folder.to_path_buf();
    View::new(RunInfo { folder, model: "march".into(), parameters: 1_234_567, step: 40, steps: 120 })
}

fn screen(view: &View, width: u16, height: u16) -> String {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
    terminal.draw(|frame| view.draw(frame)).unwrap();
    if width > 0 { terminal.backend().to_string() } else { String::new() }
}

fn step(step: u64) -> Event {
    let report = StepReport { loss: 2.5, gradient_norm: 1.0, rate: 1e-3, tokens: 10, overlap: None };
    Event::Step(StepLine { step, steps: 120, report, tokens_per_second: 1234.0, seconds_left: 3725.0 })
}

/// Draws at every size, with no data and with much data.
#[test]
fn any_size_is_drawn() {
    let run = tempfile::tempdir().unwrap();
    let (empty, mut full) = (view(run.path()), view(run.path()));
    let mut lines: String = (1..=3000)
        .map(|step| {
            format!("{{\"step\":{step},\"loss\":{},\"gradient_norm\":1e30}}\n", 9.0 / f64::from(step))
        })
        .collect();
    lines += "{\"step\":3000,\"validation_loss\":1e300}\n{\"step\":3000,\"prompt\":\"A\",\"sample\":\"\\u001b[2J\\n\\u6f22\"}\n";
    fs::write(run.path().join("metrics.jsonl"), lines).unwrap();
    full.take(step(300));
    (0..200).for_each(|n| full.take(Event::Saved(format!("a/long/folder/step-{n}").into())));
    full.read_on();
    let mut stopping = view(run.path());
    stopping.stopping = true;
    for (width, height) in [(0, 0), (1, 1), (2, 30), (300, 1), (20, 5), (39, 12), (40, 11), (400, 100)] {
        for view in [&empty, &full, &stopping] {
            screen(view, width, height);
        }
    }
    for width in (1..=120).step_by(7) {
        for height in 1..=40 {
            let text = screen(&full, width, height);
            assert!(!text.contains('\u{1b}'));
        }
    }
}

#[test]
fn what_happened_is_shown() {
    let run = tempfile::tempdir().unwrap();
    let mut view = view(run.path());
    assert!(screen(&view, 120, 40).contains("step 40/120, 33 %"));
    // From before the run was resumed.
    let lines = "{\"step\":1,\"loss\":5.5,\"gradient_norm\":1.25,\"learning_rate\":0.001,\"tokens\":4096,\
                 \"tokens_per_second\":2048}\n{\"step\":40,\"loss\":3.25}\n\
                 {\"step\":20,\"validation_loss\":3.5}\n{\"step\":40,\"validation_loss\":3.75}\n\
                 {\"step\":40,\"prompt\":\"Once\",\"sample\":\" upon\\na time\"}\n";
    fs::write(run.path().join("metrics.jsonl"), lines).unwrap();
    view.take(Event::Resumed("runs/a/checkpoints/step-40".into()));
    view.take(step(41));
    view.take(Event::Saved("runs/a/checkpoints/step-41".into()));
    view.read_on();
    let large = screen(&view, 120, 40);
    for part in [
        "1,234,567 parameters",
        "step 41/120, 34 %, 1 h 02 m left",
        "3.2500",
        "3.5000 at step 20",
        "1.00e-3",
        "2,048",
        "4,096",
        "sample, step 40",
        "Once upon",
        "a time",
        "resumed       from",
        "step-41",
        "training, smoothed",
        "q or Ctrl-C",
    ] {
        assert!(large.contains(part), "{part}: {large}");
    }
    assert!(large.contains(run.path().to_str().unwrap()));
    let small = screen(&view, 30, 5);
    assert!(small.contains("step 41/120") && small.contains("loss 3.2500"), "{small}");
    view.stopping = true;
    assert!(screen(&view, 120, 40).contains("then saving"));
    assert!(screen(&view, 60, 5).contains("then saving"));
}

#[test]
fn curves_are_thinned() {
    let points: Vec<(f64, f64)> = (0..1001).map(|x| (f64::from(x), 1.0)).collect();
    let thin = thinned(&points, 100);
    assert!(thin.len() <= 101 && thin.last() == Some(&(1000.0, 1.0)));
    assert_eq!(thin[..2], [(0.0, 1.0), (11.0, 1.0)]);
    assert_eq!(thinned(&points[..3], 100), points[..3]);
    assert!(thinned(&[], 0).is_empty() && thinned(&points, 0).len() == 2);
}
