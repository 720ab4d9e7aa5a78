//! Training with several processes: `mpirun -n 2 march train …`. Needs the feature `mpi` and a launcher.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::common::{ok, text};

/// `mpirun -n RANKS march ARGUMENTS…`, one thread each.
fn mpirun(ranks: usize, arguments: &[&str]) -> Command {
    let mut command = Command::new("mpirun");
    // Without these, running as root or with more processes than cores is rejected.
    command.env("OMPI_ALLOW_RUN_AS_ROOT", "1").env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
    command.args(["-n", &ranks.to_string(), "--oversubscribe", env!("CARGO_BIN_EXE_march")]);
    command.args(arguments).args(["--threads", "1"]);
    command
}

fn together(ranks: usize, arguments: &[&str]) -> String {
    let output = mpirun(ranks, arguments).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// A small model whose gradients fill more than one bucket.
fn small(folder: &Path, steps: usize) -> std::path::PathBuf {
    let path = folder.join("small.toml");
    let config = format!(
        "extends = \"tiny/march\"\n[model]\nhidden_size = 96\nnum_hidden_layers = 3\nanchor_interval = 24\n\
         [data]\nsequence_length = 96\n\
         [train]\nsteps = {steps}\ntokens_per_step = 576\nmicro_batch = 2\nvalidate_every = 10\nsample_every = 0\n\
         sample_tokens = 5\nsave_every = 5\nlearning_rate = 1e-3\n"
    );
    std::fs::write(&path, config).unwrap();
    path
}

fn numbers(run: &Path, key: &str) -> Vec<f64> {
    let text = std::fs::read_to_string(run.join("metrics.jsonl")).unwrap();
    let lines = text.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
    lines.filter_map(|line| line[key].as_f64()).collect()
}

fn close(a: &[f64], b: &[f64]) {
    assert!(!a.is_empty() && a.len() == b.len(), "{} and {} numbers", a.len(), b.len());
    for (step, (a, b)) in a.iter().zip(b).enumerate() {
        assert!((a - b).abs() < 1e-5, "{step}: {a} and {b}");
    }
}

#[test]
fn ranks_equal_one_process() {
    let folder = tempfile::tempdir().unwrap();
    let config = small(folder.path(), 20);
    let alone = folder.path().join("alone");
    ok(&["train", text(&config), "--run", text(&alone), "--threads", "1"]);
    // Three processes do not divide six sequences of micro-batches of two evenly into calls; two processes
    // do.
    for ranks in [2, 3] {
        let run = folder.path().join(format!("ranks-{ranks}"));
        let said = together(ranks, &["train", text(&config), "--run", text(&run), "--stop-at", "8"]);
        assert!(said.contains(&format!("processes     {ranks} of 1 threads")), "{said}");
        assert!(said.contains("hidden"), "{said}");
        assert_eq!(said.matches("stopped after step 8").count(), 1, "{said}");
        // All processes resume from the same checkpoint.
        let said = together(ranks, &["train", "--resume", text(&run)]);
        assert_eq!(said.matches("resumed       from").count(), 1, "{said}");
        for key in ["loss", "gradient_norm", "validation_loss"] {
            close(&numbers(&run, key), &numbers(&alone, key));
        }
        let hidden = numbers(&run, "summing_hidden");
        assert!(hidden.len() == 20 && hidden.iter().all(|share| (0.0..=1.0).contains(share)), "{hidden:?}");
    }
}

#[test]
fn a_dead_rank_ends_the_job_and_loses_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let config = small(folder.path(), 100_000);
    let run = folder.path().join("run");
    let mut command = mpirun(2, &["train", text(&config), "--run", text(&run)]);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let began = Instant::now();
    while !run.join("checkpoints/step-10").exists() {
        assert!(began.elapsed() < Duration::from_secs(60) && child.try_wait().unwrap().is_none());
        std::thread::sleep(Duration::from_millis(10));
    }
    // The second process, identified by the launcher's environment variables.
    let second = std::fs::read_dir("/proc").unwrap().find_map(|entry| {
        let path = entry.unwrap().path();
        let environment = std::fs::read(path.join("environ")).ok()?;
        let command = std::fs::read(path.join("cmdline")).ok()?;
        let has = |bytes: &[u8], part: &str| bytes.windows(part.len()).any(|at| at == part.as_bytes());
        let ours = has(&environment, "OMPI_COMM_WORLD_RANK=1\0") && has(&command, text(&run));
        ours.then(|| path.file_name().unwrap().to_str().unwrap().to_string())
    });
    assert!(Command::new("kill").args(["-KILL", &second.unwrap()]).status().unwrap().success());
    let output = child.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success());
    assert!(said.contains("rank 1"), "{said}");
    let said = together(2, &["train", "--resume", text(&run), "--stop-at", "30"]);
    assert!(said.contains("resumed       from") && said.contains("stopped after step"), "{said}");
}

#[test]
fn mistakes_end_the_job() {
    let folder = tempfile::tempdir().unwrap();
    let config = small(folder.path(), 10);
    let run = folder.path().join("run");
    let arguments = ["train", text(&config), "--run", text(&run)];
    let output =
        mpirun(2, &[&arguments[..], &["--set", "train.tokens_per_step=96"]].concat()).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains("too few for 2 processes"), "{said}");
    together(2, &arguments);
    let output = mpirun(2, &arguments).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains("already holds a run"), "{said}");
}
