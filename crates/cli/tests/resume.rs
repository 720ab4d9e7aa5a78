//! Runs that are damaged, changed or shared: the result is correct, or there is none.

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

#[cfg(unix)]
use crate::common::as_nobody;
use crate::common::{ok, refused, text};

const MARCH: &str = env!("CARGO_BIN_EXE_march");

/// A configuration that trains in a few seconds.
fn small(folder: &Path) -> PathBuf {
    let path = folder.join("small.toml");
    let config = "extends = \"tiny/march\"\n[model]\nhidden_size = 16\nnum_hidden_layers = 2\nintermediate_size = 24\n\
         num_heads = 2\nhead_dim = 4\nanchor_interval = 8\nrouting_dim = 4\n[data]\nsequence_length = 40\n\
         [train]\nsteps = 12\ntokens_per_step = 160\nmicro_batch = 2\nvalidate_every = 5\nvalidation_sequences = 3\n\
         sample_every = 0\nsave_every = 4\nkeep = 3\nprompts = []\n";
    fs::write(&path, config).unwrap();
    path
}

fn train(config: &Path, run: &Path, more: &[&str]) -> String {
    ok(&[&["train", text(config), "--run", text(run), "--threads", "1"][..], more].concat())
}

fn resume(run: &Path) -> String {
    ok(&["train", "--resume", text(run), "--threads", "1"])
}

fn step(run: &Path, step: u64) -> PathBuf {
    run.join("checkpoints").join(format!("step-{step}"))
}

/// Every file below a folder and its bytes.
fn contents(folder: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    let mut list = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            list.extend(contents(&path));
        } else {
            let name = path.file_name().unwrap().into();
            list.push((name, fs::read(&path).unwrap()));
        }
    }
    list.sort();
    list
}

fn flip(file: &Path, at: usize) {
    let mut bytes = fs::read(file).unwrap();
    let place = at % bytes.len();
    bytes[place] ^= 1;
    fs::write(file, bytes).unwrap();
}

#[test]
fn a_flipped_bit_of_a_checkpoint_is_noticed() {
    let folder = tempfile::tempdir().unwrap();
    let (config, whole) = (small(folder.path()), folder.path().join("whole"));
    train(&config, &whole, &[]);
    let want = contents(&step(&whole, 12));
    for (number, file) in ["model", "optimizer"].iter().enumerate() {
        let run = folder.path().join(file);
        train(&config, &run, &["--stop-at", "8"]);
        flip(&step(&run, 8).join(format!("{file}.safetensors")), 30_000 + 77 * number);
        if *file == "model" {
            let errors = refused(&["generate", "--model", text(&run), "--prompt", "a", "--max-tokens", "2"]);
            assert!(errors.contains("model.safetensors") && errors.contains("checksum"), "{errors}");
        }
        let said = resume(&run);
        assert!(said.contains("set aside") && said.contains("checksum") && said.contains("step-4"), "{said}");
        assert!(contents(&step(&run, 12)) == want, "{file}");
        assert!(run.join("checkpoints/step-8.damaged-1").is_dir());
    }
}

/// A damaged header can look like the checkpoint of another model.
#[test]
fn a_tensor_of_another_name_is_damage() {
    let folder = tempfile::tempdir().unwrap();
    let (config, run) = (small(folder.path()), folder.path().join("run"));
    train(&config, &run, &["--stop-at", "8"]);
    let file = step(&run, 8).join("model.safetensors");
    let mut bytes = fs::read(&file).unwrap();
    let at = bytes.windows(17).position(|window| window == b"model.norm.weight").unwrap();
    bytes[at + 7] ^= 1;
    fs::write(&file, bytes).unwrap();
    let said = resume(&run);
    assert!(said.contains("set aside") && said.contains("checksum") && said.contains("step-4"), "{said}");
}

#[test]
fn a_step_that_is_not_the_folder_s_is_noticed() {
    let folder = tempfile::tempdir().unwrap();
    let (config, run) = (small(folder.path()), folder.path().join("run"));
    train(&config, &run, &["--stop-at", "8"]);
    let file = step(&run, 8).join("progress.json");
    let changed = fs::read_to_string(&file).unwrap().replace("\"step\": 8,", "\"step\": 9,");
    fs::write(&file, changed).unwrap();
    // Also without the list of checksums.
    fs::remove_file(step(&run, 8).join("checksums.json")).unwrap();
    let said = resume(&run);
    assert!(said.contains("says step 9") && said.contains("step-4"), "{said}");
}

#[test]
fn a_folder_without_checksums_loads_and_other_files_are_compared() {
    let folder = tempfile::tempdir().unwrap();
    let (config, run) = (small(folder.path()), folder.path().join("run"));
    train(&config, &run, &["--stop-at", "4"]);
    let model = step(&run, 4);
    let write =
        ["generate", "--model", text(&model), "--prompt", "a", "--max-tokens", "4", "--temperature", "0"];
    let want = ok(&write);
    // Messages on standard error come after the text.
    let text = |said: String| said.split("read  ").next().unwrap_or_default().to_string();
    flip(&model.join("config.json"), 40);
    assert!(refused(&write).contains("config.json"));
    flip(&model.join("config.json"), 40);
    fs::remove_file(model.join("checksums.json")).unwrap();
    assert_eq!(text(ok(&write)), text(want));
    fs::write(model.join("checksums.json"), "").unwrap();
    assert!(refused(&write).contains("checksums.json"));
}

#[test]
fn a_run_without_a_usable_checkpoint_is_refused_and_kept() {
    let folder = tempfile::tempdir().unwrap();
    let (config, run) = (small(folder.path()), folder.path().join("run"));
    train(&config, &run, &["--stop-at", "8"]);
    for number in [4, 8] {
        let file = step(&run, number).join("model.safetensors");
        let bytes = fs::read(&file).unwrap();
        fs::write(&file, &bytes[..bytes.len() / 2]).unwrap();
    }
    let before = contents(&run);
    let errors = refused(&["train", "--resume", text(&run)]);
    assert!(errors.contains("no checkpoint can be used"), "{errors}");
    assert!(errors.contains("step-8") && errors.contains("step-4"), "{errors}");
    assert!(contents(&run) == before);
    // All checkpoints are gone: the run had saved steps, so it does not start over.
    fs::remove_dir_all(run.join("checkpoints")).unwrap();
    let before = contents(&run);
    assert!(refused(&["train", "--resume", text(&run)]).contains("is at step 8"));
    assert!(contents(&run) == before);
}

/// A run that ever wrote a checkpoint does not start over without one.
#[test]
fn a_run_that_lost_its_checkpoints_does_not_start_over() {
    let folder = tempfile::tempdir().unwrap();
    let config = small(folder.path());
    for (name, every, stop) in [("rare", "100", "3"), ("never", "0", "3"), ("first", "4", "4")] {
        let run = folder.path().join(name);
        let every = format!("train.save_every={every}");
        train(&config, &run, &["--set", &every, "--stop-at", stop]);
        let lost = run.join("checkpoints");
        fs::rename(&lost, run.join("away")).unwrap();
        let before = contents(&run);
        let errors = refused(&["train", "--resume", text(&run)]);
        assert!(errors.contains("no checkpoint can be used: there is none"), "{errors}");
        assert!(errors.contains(&format!("is at step {stop} and has written a checkpoint")), "{errors}");
        assert!(contents(&run) == before, "{name}");
        fs::rename(run.join("away"), &lost).unwrap();
        resume(&run);
    }
    // A run that was stopped before its first checkpoint does start over.
    let run = folder.path().join("none");
    train(&config, &run, &["--stop-at", "0"]);
    resume(&run);
    assert!(step(&run, 12).exists());
}

/// Following the advice about a damaged line works.
#[test]
fn metrics_with_a_damaged_line_are_moved_away() {
    let folder = tempfile::tempdir().unwrap();
    let (config, run) = (small(folder.path()), folder.path().join("run"));
    train(&config, &run, &["--stop-at", "8"]);
    let file = run.join("metrics.jsonl");
    flip(&file, 100);
    let errors = refused(&["train", "--resume", text(&run)]);
    assert!(errors.contains("line 1 is damaged") && errors.contains("move it away"), "{errors}");
    assert!(!errors.contains("remove the line"), "{errors}");
    fs::rename(&file, run.join("damaged.jsonl")).unwrap();
    resume(&run);
    assert!(step(&run, 12).exists());
    ok(&["report", text(&run)]);
}

/// A checkpoint without the files that only training needs is a valid model, but a run does not resume from
/// it.
#[test]
fn a_copy_without_the_optimizer_is_a_model() {
    let folder = tempfile::tempdir().unwrap();
    let (config, run) = (small(folder.path()), folder.path().join("run"));
    train(&config, &run, &["--stop-at", "8"]);
    for file in ["optimizer.safetensors", "progress.json"] {
        fs::remove_file(step(&run, 8).join(file)).unwrap();
        ok(&["generate", "--model", text(&run), "--prompt", "a", "--max-tokens", "2"]);
        ok(&["inspect", "model", text(&run)]);
    }
    flip(&step(&run, 4).join("progress.json"), 30);
    let errors = refused(&["train", "--resume", text(&run)]);
    assert!(errors.contains("optimizer.safetensors: is missing"), "{errors}");
    assert!(errors.contains("progress.json: does not have the checksum"), "{errors}");
}

#[test]
fn an_edited_configuration_is_refused_by_its_key() {
    let folder = tempfile::tempdir().unwrap();
    let (config, run) = (small(folder.path()), folder.path().join("run"));
    train(&config, &run, &["--stop-at", "8"]);
    let file = run.join("config.toml");
    let original = fs::read_to_string(&file).unwrap();
    fs::write(&file, original.replace("anchor_interval = 8", "anchor_interval = 16")).unwrap();
    let before = contents(&run);
    let errors = refused(&["train", "--resume", text(&run)]);
    assert!(errors.contains("`model.anchor_interval` is 16, and was 8"), "{errors}");
    assert!(contents(&run) == before);
    // If it is deleted, it is restored from the record.
    fs::remove_file(&file).unwrap();
    resume(&run);
    assert_eq!(fs::read_to_string(&file).unwrap(), original);
    assert!(step(&run, 12).exists());
    // Settings that cannot change within a run are rejected; the others are accepted.
    let set = |setting: &str| ["train", "--resume", text(&run), "--set", setting].map(String::from);
    let refused_set = set("train.learning_rate=1");
    let errors = refused(&refused_set.each_ref().map(String::as_str));
    assert!(errors.contains("cannot change within a run"), "{errors}");
    ok(&set("train.save_every=3").each_ref().map(String::as_str));
    assert!(fs::read_to_string(&file).unwrap().contains("save_every = 3"));
}

/// A file that cannot be read at the moment is not damage, and the previous checkpoint is not used instead.
#[cfg(unix)]
#[test]
fn a_checkpoint_that_may_not_be_read_is_an_error() {
    use std::os::unix::fs::PermissionsExt;
    let folder = tempfile::tempdir().unwrap();
    let (config, run) = (small(folder.path()), folder.path().join("run"));
    train(&config, &run, &["--stop-at", "8"]);
    // Files that a resume writes must belong to the user.
    for name in ["run.json", "config.toml", "metrics.jsonl", "environment.json"] {
        fs::set_permissions(run.join(name), fs::Permissions::from_mode(0o666)).unwrap();
    }
    let file = step(&run, 8).join("model.safetensors");
    fs::set_permissions(&file, fs::Permissions::from_mode(0o000)).unwrap();
    let out = as_nobody(folder.path(), &["train", "--resume", text(&run)]).output().unwrap();
    let errors = String::from_utf8_lossy(&out.stderr).into_owned();
    assert!(!out.status.success() && errors.contains("ermission denied"), "{errors}");
    assert!(step(&run, 8).exists() && !step(&run, 12).exists());
    // The same user can resume once the file is readable.
    fs::set_permissions(&file, fs::Permissions::from_mode(0o644)).unwrap();
    let out = as_nobody(folder.path(), &["train", "--resume", text(&run)]).output().unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    assert!(step(&run, 12).exists());
}

#[test]
fn first_weights_are_in_the_folder_before_the_first_step() {
    let folder = tempfile::tempdir().unwrap();
    let config = small(folder.path());
    let (first, whole, run) =
        (folder.path().join("first"), folder.path().join("whole"), folder.path().join("run"));
    train(&config, &first, &[]);
    // A run folder is treated as its newest checkpoint.
    train(&config, &whole, &["--init-from", text(&first), "--set", "train.seed=3"]);
    train(&config, &run, &["--init-from", text(&first), "--set", "train.seed=3", "--stop-at", "0"]);
    assert!(step(&run, 0).join("model.safetensors").exists());
    fs::remove_dir_all(&first).unwrap();
    resume(&run);
    assert!(contents(&step(&run, 12)) == contents(&step(&whole, 12)));
    // Without them there are no initial weights.
    let lost = folder.path().join("lost");
    train(&config, &lost, &["--init-from", text(&whole), "--stop-at", "0"]);
    fs::remove_dir_all(step(&lost, 0)).unwrap();
    assert!(refused(&["train", "--resume", text(&lost)]).contains("no checkpoint can be used"));
}

#[test]
fn other_data_is_refused_and_the_same_data_is_found_from_anywhere() {
    let folder = tempfile::tempdir().unwrap();
    let config = small(folder.path());
    let here = |place: &Path, arguments: &[&str]| {
        let out = Command::new(MARCH).args(arguments).current_dir(place).output().unwrap();
        (out.status.success(), String::from_utf8_lossy(&out.stderr).into_owned())
    };
    let prepare = |first: usize| {
        let lines: String = (first..first + 200).map(|i| format!("line {i} of {}\n", i * i % 13)).collect();
        fs::write(folder.path().join("book.txt"), lines).unwrap();
        let arguments =
            ["data", "prepare", "--tokenizer", "bytes", "--output", "tokens", "--force", "book.txt"];
        let (fine, errors) = here(folder.path(), &arguments);
        assert!(fine, "{errors}");
    };
    prepare(100);
    let set = ["--set", "data.kind=shards", "--set", "data.path=tokens", "--stop-at", "5"];
    let (fine, errors) = here(folder.path(), &[&["train", text(&config), "--run", "run"][..], &set].concat());
    assert!(fine, "{errors}");
    let run = folder.path().join("run");
    prepare(500);
    let (fine, errors) = here(&run, &["train", "--resume", "."]);
    assert!(!fine && errors.contains("fingerprint") && errors.contains("tokens"), "{errors}");
    prepare(100);
    let (fine, errors) = here(&run, &["train", "--resume", "."]);
    assert!(fine, "{errors}");
    // Validation data is identified by its own path.
    let held_back = ["data", "prepare", "--tokenizer", "bytes", "--output", "held-back", "--force"];
    let hold_back = |file: &str| {
        let (fine, errors) = here(folder.path(), &[&held_back[..], &[file]].concat());
        assert!(fine, "{errors}");
    };
    hold_back("book.txt");
    let validated = [&set[..], &["--set", "data.validation=held-back"]].concat();
    let (fine, errors) =
        here(folder.path(), &[&["train", text(&config), "--run", "other"][..], &validated].concat());
    assert!(fine, "{errors}");
    fs::write(folder.path().join("other.txt"), "Another text to be validated on. ".repeat(20)).unwrap();
    hold_back("other.txt");
    let (fine, errors) = here(&folder.path().join("other"), &["train", "--resume", "."]);
    assert!(!fine && errors.contains("is validated on (") && errors.contains("held-back)"), "{errors}");
}

fn spawn(arguments: &[&str]) -> Child {
    Command::new(MARCH).args(arguments).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()
}

fn wait_for(path: &Path) {
    let began = Instant::now();
    while !path.exists() {
        assert!(began.elapsed() < Duration::from_secs(60), "{} does not appear", path.display());
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[cfg(unix)]
#[test]
fn one_process_owns_a_run_and_ctrl_c_ends_it_with_130() {
    let folder = tempfile::tempdir().unwrap();
    let (config, run) = (small(folder.path()), folder.path().join("run"));
    let mut child =
        spawn(&["train", text(&config), "--run", text(&run), "--threads", "1", "--steps", "1000000"]);
    wait_for(&step(&run, 4));
    for arguments in [&["train", "--resume", text(&run)][..], &["train", text(&config), "--run", text(&run)]]
    {
        let errors = refused(arguments);
        assert!(errors.contains("another process") || errors.contains("already holds a run"), "{errors}");
    }
    assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success());
    assert_eq!(child.wait().unwrap().code(), Some(130));
    let mut errors = String::new();
    child.stderr.take().unwrap().read_to_string(&mut errors).unwrap();
    assert!(errors.contains("saving a checkpoint"), "{errors}");
    // Whatever a dead process was writing is removed.
    let partial = run.join("checkpoints/.step-9.partial-99999");
    fs::create_dir_all(&partial).unwrap();
    ok(&["train", "--resume", text(&run), "--stop-at", "1"]);
    assert!(!partial.exists());
}

/// Interrupts a command some time after `path` exists; returns how long it took to exit, with code 130.
#[cfg(unix)]
fn interrupted(arguments: &[&str], path: &Path) -> (Duration, String) {
    let mut child = spawn(arguments);
    wait_for(path);
    std::thread::sleep(Duration::from_millis(1500));
    let mut errors = String::new();
    if let Some(status) = child.try_wait().unwrap() {
        child.stderr.take().unwrap().read_to_string(&mut errors).unwrap();
        panic!("{arguments:?} ended by itself with {status}: {errors}");
    }
    assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success());
    let began = Instant::now();
    let code = child.wait().unwrap().code();
    child.stderr.take().unwrap().read_to_string(&mut errors).unwrap();
    assert_eq!(code, Some(130), "{arguments:?}: {errors}");
    (began.elapsed(), errors)
}

/// Training checks for signals between micro-batches, while it validates and while it samples. What was
/// abandoned is repeated when the run resumes, and the result is that of a run that was never stopped.
#[cfg(unix)]
#[test]
fn an_interrupt_is_noticed_whatever_a_run_does() {
    let folder = tempfile::tempdir().unwrap();
    let config = small(folder.path());
    let begin = |name: &str, settings: &[&str]| {
        let run = folder.path().join(name);
        let mut all = vec!["train".to_string(), text(&config).into(), "--run".into(), text(&run).into()];
        all.extend(["--threads".into(), "1".into()]);
        all.extend(settings.iter().flat_map(|setting| ["--set".into(), setting.to_string()]));
        (run, all)
    };
    let limit = Duration::from_secs(20);
    // A single step that would take hours.
    let (run, all) = begin("step", &["train.tokens_per_step=400000000", "train.micro_batch=1"]);
    let all: Vec<&str> = all.iter().map(String::as_str).collect();
    let (took, _) = interrupted(&all, &run.join("environment.json"));
    assert!(took < limit, "a step: {took:?}");
    // Minutes of validation or of sampling after the first step.
    let large = ["model.hidden_size=128", "model.num_hidden_layers=12", "train.micro_batch=1"];
    let many = ["train.validation_sequences=1000000", "data.validation_fraction=0.9"];
    let samples = ["train.sample_every=1", "train.sample_tokens=10000000", "train.prompts=['a', 'b']"];
    for (name, slow, quick) in [
        (
            "validation",
            [&["train.validate_every=1"][..], &large, &many].concat(),
            "train.validation_sequences=3",
        ),
        ("samples", samples.to_vec(), "train.sample_tokens=3"),
    ] {
        let (run, all) = begin(name, &slow);
        let all: Vec<&str> = all.iter().map(String::as_str).collect();
        let (took, _) = interrupted(&all, &run.join("metrics.jsonl"));
        assert!(took < limit, "{name}: {took:?}");
        assert!(step(&run, 1).exists());
        let lines = |run: &Path| -> Vec<String> {
            let lines = fs::read_to_string(run.join("metrics.jsonl")).unwrap();
            let named = |line: &str| line.contains("validation_loss") || line.contains("sample");
            lines.lines().filter(|line| named(line)).map(String::from).collect()
        };
        assert!(lines(&run).is_empty());
        // Twice: the lines of abandoned work do not appear twice.
        let resume = ["train", "--resume", text(&run), "--threads", "1", "--set", quick];
        ok(&[&resume[..], &["--stop-at", "1"]].concat());
        let first = lines(&run);
        assert!(!first.is_empty());
        ok(&[&resume[..], &["--stop-at", "2"]].concat());
        assert!(lines(&run).starts_with(&first));
        let whole = folder.path().join(format!("{name}-whole"));
        let mut all: Vec<String> = slow.iter().map(|setting| setting.to_string()).collect();
        all.push(quick.into());
        let set: Vec<&str> = all.iter().flat_map(|setting| ["--set", setting]).collect();
        train(&config, &whole, &[&set[..], &["--stop-at", "2"]].concat());
        assert_eq!(lines(&run), lines(&whole), "{name}");
        assert!(contents(&step(&run, 2)) == contents(&step(&whole, 2)), "{name}");
    }
}

/// A demo stops as other commands do, also before its first step.
#[cfg(unix)]
#[test]
fn an_interrupted_demo_exits_with_130() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("plain");
    let all = ["demo", "--run", text(&run), "--steps", "100000"];
    let (_, errors) = interrupted(&all, &run.join("stages/march-1/metrics.jsonl"));
    assert!(!errors.contains("error"), "{errors}");
    assert!(fs::read_dir(run.join("stages/march-1/checkpoints")).unwrap().count() > 0);
    // Immediately: there is no completed step yet.
    let run = folder.path().join("at-once");
    let mut child = spawn(&["demo", "--run", text(&run), "--steps", "100000"]);
    wait_for(&run.join("stages/march-1/run.json"));
    assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success());
    let code = child.wait().unwrap().code();
    let mut errors = String::new();
    child.stderr.take().unwrap().read_to_string(&mut errors).unwrap();
    assert_eq!(code, Some(130), "{errors}");
    assert!(!errors.contains("error"), "{errors}");
}

#[test]
fn a_finished_run_is_made_longer() {
    let folder = tempfile::tempdir().unwrap();
    let config = small(folder.path());
    let (run, whole) = (folder.path().join("run"), folder.path().join("whole"));
    let constant = ["--set", "train.schedule=constant", "--set", "train.warmup=0"];
    train(&config, &run, &constant);
    ok(&["train", "--resume", text(&run), "--steps", "20", "--threads", "1"]);
    train(&config, &whole, &[&constant[..], &["--steps", "20"]].concat());
    for file in ["model.safetensors", "optimizer.safetensors"] {
        let [a, b] = [&run, &whole].map(|run| fs::read(step(run, 20).join(file)).unwrap());
        assert!(a == b, "{file}");
    }
    let errors = refused(&["train", "--resume", text(&run), "--steps", "7"]);
    assert!(errors.contains("already at step 20") && errors.contains("--steps 20"), "{errors}");
    assert!(!errors.contains("--set"), "{errors}");
}

/// Lines of repeated steps are kept, not lost.
#[test]
fn metrics_are_never_thrown_away() {
    let folder = tempfile::tempdir().unwrap();
    let (config, run) = (small(folder.path()), folder.path().join("run"));
    train(&config, &run, &["--stop-at", "8"]);
    let lines = |file: &str| fs::read_to_string(run.join(file)).unwrap_or_default();
    let before = lines("metrics.jsonl");
    fs::remove_dir_all(step(&run, 8)).unwrap();
    resume(&run);
    let discarded = lines("metrics-discarded.jsonl");
    assert!(
        discarded.lines().count() >= 4 && discarded.lines().all(|line| before.contains(line)),
        "{discarded}"
    );
    assert!(before.lines().all(|line| lines("metrics.jsonl").contains(line) || discarded.contains(line)));
}

#[test]
fn weights_that_are_not_numbers_are_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let (config, run) = (small(folder.path()), folder.path().join("run"));
    train(&config, &run, &["--stop-at", "4"]);
    let model = step(&run, 4);
    fs::remove_file(model.join("checksums.json")).unwrap();
    let file = model.join("model.safetensors");
    let mut bytes = fs::read(&file).unwrap();
    let end = bytes.len();
    bytes[end - 8..end - 4].copy_from_slice(&f32::NAN.to_le_bytes());
    fs::write(&file, bytes).unwrap();
    let ids = folder.path().join("ids.json");
    fs::write(&ids, "[1, 2, 3]").unwrap();
    let output = folder.path().join("out.safetensors");
    for arguments in [
        &["logits", "--model", text(&model), "--tokens", text(&ids), "--output", text(&output)][..],
        &["generate", "--model", text(&model), "--prompt", "a"],
        &[
            "logits",
            "--weights",
            "int8",
            "--model",
            text(&model),
            "--tokens",
            text(&ids),
            "--output",
            text(&output),
        ],
        &["inspect", "precision", "--model", text(&model), "--text", text(&config)],
        &["eval", "--model", text(&model), "--tasks", "mqar:pairs=4", "--samples", "2"],
        &["eval", "policies", "--model", text(&model), "--tasks", "mqar:pairs=4", "--samples", "2"],
    ] {
        let errors = refused(arguments);
        assert!(errors.contains("lm_head.weight") && errors.contains("not finite"), "{errors}");
        assert!(errors.contains("model.safetensors"), "{errors}");
    }
    assert!(!output.exists());
}
