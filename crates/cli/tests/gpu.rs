//! The command on a GPU: the losses, texts and banks of the processor, and runs that move between both. A software device
//! is enough.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use march_lm::run::Session;
use safetensors::SafeTensors;
use serde_json::Value;

use crate::common::writing::{trained, with_input};
use crate::common::{ok, refused, text};

/// The arguments of a run of the demo's model with a small batch.
fn train<'a>(run: &'a Path, device: &'a str, steps: &'a str) -> Vec<&'a str> {
    let mut arguments = vec!["train", "demo/march", "--run", text(run), "--device", device];
    arguments.extend(["--threads", "1", "--steps", steps]);
    for setting in [
        "data.task=diary:days=2:facts=8:things=8:places=64:dates=64:questions=16",
        "data.sequence_length=84",
        "train.tokens_per_step=168",
        "train.micro_batch=2",
        "train.validation_sequences=2",
    ] {
        arguments.extend(["--set", setting]);
    }
    arguments
}

fn resume<'a>(run: &'a Path, device: &'a str, flags: &[&'a str]) -> Vec<&'a str> {
    [&["train", "--resume", text(run), "--device", device, "--threads", "1"], flags].concat()
}

/// A cache folder of a test's own, which keeps compiled kernels but no notes of devices that passed.
fn cache(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = fs::remove_dir_all(folder.join("march"));
    folder
}

/// Same as [`ok`], with a cache folder.
fn ok_in(cache: &Path, arguments: &[&str]) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_march"));
    let out = command.args(arguments).env("XDG_CACHE_HOME", cache).output().unwrap();
    let errors = String::from_utf8_lossy(&out.stderr).into_owned();
    assert!(out.status.success(), "march {arguments:?}: {errors}");
    String::from_utf8(out.stdout).unwrap() + &errors
}

/// The losses of all steps.
fn losses(run: &Path) -> Vec<f64> {
    let lines = fs::read_to_string(run.join("metrics.jsonl")).unwrap();
    let values = lines.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    values.filter_map(|line| line["loss"].as_f64()).collect()
}

/// The files of a checkpoint and their bytes.
fn checkpoint(run: &Path, step: u64) -> Vec<(PathBuf, Vec<u8>)> {
    let folder = run.join("checkpoints").join(format!("step-{step}"));
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let mut files: Vec<_> =
        entries.map(|path| (path.file_name().unwrap().into(), fs::read(&path).unwrap())).collect();
    files.sort();
    files
}

fn assert_close(found: &[f64], want: &[f64]) {
    assert_eq!(found.len(), want.len(), "{found:?}, {want:?}");
    for (found, want) in found.iter().zip(want) {
        assert!((found - want).abs() < 1e-4, "{found} instead of {want}");
    }
}

/// What a command says before it tests a device.
const TESTING: &str = "note          testing ";

/// The losses are those of the processor, a stopped run ends with the bytes of an unbroken one, and a run can move from
/// device to device. The device is tested before its first training, and not again.
#[test]
fn training() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let (cpu, gpu, stopped, moved) = (path("cpu"), path("gpu"), path("stopped"), path("moved"));
    let cache = cache("gpu-training");
    let ok = |arguments: &[&str]| ok_in(&cache, arguments);
    ok(&train(&cpu, "cpu", "5"));
    let said = ok(&train(&gpu, "gpu", "5"));
    assert!(said.contains("device        "), "{said}");
    assert!(said.contains(TESTING), "{said}");
    let want = losses(&cpu);
    assert_close(&losses(&gpu), &want);

    let said = ok(&[&train(&stopped, "gpu", "5")[..], &["--stop-at", "3"]].concat());
    assert!(said.contains(&format!("march train --resume {} --device gpu\n", text(&stopped))), "{said}");
    let said = ok(&resume(&stopped, "gpu", &[]));
    assert!(!said.contains(TESTING), "{said}");
    assert_eq!(losses(&stopped), losses(&gpu));
    assert!(checkpoint(&stopped, 5) == checkpoint(&gpu, 5), "stopped and resumed");

    ok(&[&train(&moved, "cpu", "5")[..], &["--stop-at", "2"]].concat());
    let said = ok(&resume(&moved, "gpu", &["--stop-at", "4"]));
    assert!(said.contains("; until now the run was on cpu"), "{said}");
    let said = ok(&resume(&moved, "cpu", &[]));
    assert!(said.contains("device        cpu; until now the run was on "), "{said}");
    assert_close(&losses(&moved), &want);
    let devices: Vec<String> =
        Session::all(&moved).unwrap().into_iter().map(|session| session.device).collect();
    assert_eq!((devices[0].as_str(), devices[2].as_str()), ("cpu", "cpu"));
    assert!(devices.len() == 3 && devices[1] != "cpu" && !devices[1].is_empty(), "{devices:?}");
}

const PROMPT: &str = "Alice was beginning to get very tired of sitting by her sister on the bank. ";

/// The most probable text is that of the processor, and each device continues the other's banks. The prompt ends inside a
/// chunk of the processor's recurrence.
#[test]
fn texts_and_banks() {
    let folder = tempfile::tempdir().unwrap();
    let model = trained(folder.path());
    let write = |device: &str, flags: &[&str]| {
        let arguments = ["generate", "--model", text(&model), "--temperature", "0", "--device", device];
        with_input(&[&arguments[..], flags].concat(), "").0
    };
    let whole = ["--prompt", PROMPT, "--max-tokens", "24"];
    let want = write("cpu", &whole);
    assert_eq!(write("gpu", &whole), want);
    for weights in ["bf16", "int8"] {
        let flags = [&whole[..], &["--weights", weights]].concat();
        assert_eq!(write("gpu", &flags), write("cpu", &flags), "{weights}");
    }
    for storage in ["f32", "bf16", "int8"] {
        let policy = ["--storage", storage];
        let want = write("cpu", &[&whole[..], &policy].concat());
        for (first, then) in [("cpu", "gpu"), ("gpu", "cpu"), ("gpu", "gpu")] {
            let bank = folder.path().join(format!("{storage}-{first}-{then}.safetensors"));
            let begin = ["--prompt", PROMPT, "--max-tokens", "8", "--save-bank", text(&bank)];
            let beginning = write(first, &[&begin[..], &policy].concat());
            let end = write(then, &["--bank", text(&bank), "--prompt", "", "--max-tokens", "16"]);
            assert_eq!(beginning + &end, want, "{storage} anchors, from {first} to {then}");
        }
    }
}

/// The logits are those of the processor, read at once and one token at a time.
#[test]
fn logits() {
    let folder = tempfile::tempdir().unwrap();
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("golden");
    for name in ["march", "march_topk", "gated_deltanet", "log_linear", "transformer"] {
        let model = golden.join(name);
        let tokens = folder.path().join("tokens.json");
        let ids: Vec<u32> = (0..70).map(|i| i * i % 61).collect();
        fs::write(&tokens, serde_json::to_string(&ids).unwrap()).unwrap();
        let compute = |device: &str, flags: &[&str]| {
            let output = folder.path().join(format!("{name}-{device}-{}.safetensors", flags.len()));
            let arguments = ["logits", "--model", text(&model), "--tokens", text(&tokens)];
            ok(&[&arguments[..], &["--output", text(&output), "--device", device], flags].concat());
            let bytes = fs::read(output).unwrap();
            let file = SafeTensors::deserialize(&bytes).unwrap();
            let data = file.tensor("logits").unwrap();
            let numbers = data.data().chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]));
            numbers.collect::<Vec<f32>>()
        };
        let want = compute("cpu", &[]);
        let largest = want.iter().fold(0.0f32, |most, logit| most.max(logit.abs()));
        for flags in [&[][..], &["--decode"]] {
            let found = compute("gpu", flags);
            let error = found.iter().zip(&want).fold(0.0f32, |most, (a, b)| most.max((a - b).abs()));
            assert!(found.len() == want.len() && error <= 1e-4 * largest, "{name} {flags:?}: {error}");
        }
    }
}

/// The doctor lists the devices, tests one of them, and measures it. Training does not repeat the test.
#[test]
fn doctor() {
    let cache = cache("gpu-doctor");
    let said = ok(&["doctor", "--threads", "1"]);
    assert!(said.contains("gpu:0 "), "{said}");
    // A driver may write a line of its own.
    let said = ok_in(&cache, &["doctor", "--device", "gpu", "--json"]);
    let json = said.find('{').zip(said.rfind('}')).map(|(from, to)| &said[from..=to]).unwrap_or(&said);
    let report: Value = serde_json::from_str(json).unwrap();
    assert_eq!(report["passed"], true, "{report}");
    assert_eq!(report["failures"], Value::Array(Vec::new()));
    let list = |key: &str| report[key].as_array().unwrap().clone();
    assert!(list("operations").iter().all(|operation| operation["passed"] == true));
    let models = list("models");
    let names: Vec<&str> = models.iter().map(|model| model["model"].as_str().unwrap()).collect();
    let golden = ["transformer", "gated_deltanet", "log_linear", "march", "march_topk"];
    assert_eq!(names, [&golden[..], &["memory_caching"]].concat());
    for check in models.iter().flat_map(|model| model["checks"].as_array().unwrap()) {
        assert!(check["error"].as_f64().unwrap() <= check["allowed"].as_f64().unwrap(), "{check}");
    }
    for speed in list("speeds") {
        let share = speed["gbs"].as_f64().unwrap() / speed["gbs_share"].as_f64().unwrap();
        let peaks = ["copy_gbs", "add_gbs"].map(|key| report["peaks"][key].as_f64().unwrap());
        assert!((share / peaks[0].max(peaks[1]) - 1.0).abs() < 1e-9, "{speed}");
    }
    let folder = tempfile::tempdir().unwrap();
    let said = ok_in(&cache, &train(&folder.path().join("run"), "gpu", "1"));
    assert!(!said.contains(TESTING), "{said}");
    let message = refused(&["doctor", "--device", "gpu:999"]);
    // Lines before it are the driver's.
    assert!(message.lines().last().unwrap().starts_with("error: there is no GPU 999"), "{message}");
}
