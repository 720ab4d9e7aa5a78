//! Models written in another precision: what they compute, and what other commands do with them.

use std::fs;
use std::path::Path;

use crate::common::{ok, refused, text};

/// The file that `march logits` writes for a model.
fn logits(folder: &Path, model: &str, flags: &[&str]) -> Vec<u8> {
    let (ids, output) = (folder.join("ids.json"), folder.join("logits.safetensors"));
    fs::write(&ids, "[72, 101, 108, 108, 111, 32, 72, 101]").unwrap();
    let own = ["logits", "--model", model, "--tokens", text(&ids), "--output", text(&output)];
    ok(&[&own[..], flags].concat());
    fs::read(&output).unwrap()
}

#[test]
fn a_folder_in_fewer_bits() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_string();
    let model = path("tiny");
    ok(&["init", "--config", "tiny/march", "--output", &model]);
    fs::write(folder.path().join("tiny/generation_config.json"), "{\"eos_token_id\": 7}").unwrap();
    let size = |name: &str| fs::metadata(folder.path().join(name).join("model.safetensors")).unwrap().len();
    for weights in ["f32", "bf16", "q8", "q4"] {
        let (new, flags) = (path(weights), ["--weights", weights]);
        let said = ok(&[&["convert", "--model", &model, "--output", &new], &flags[..]].concat());
        assert!(
            said.contains(&format!("parameters in {weights}, ")) && said.contains(" instead of "),
            "{said}"
        );
        assert!(folder.path().join(weights).join("generation_config.json").is_file());
        let logits = |model: &str, flags: &[&str]| logits(folder.path(), model, flags);
        for decode in [&[][..], &["--decode"]] {
            let flags = [&flags[..], decode].concat();
            assert!(logits(&new, &flags) == logits(&model, &flags), "{weights}");
        }
        // Not the numbers of the model that was not rounded.
        assert_eq!(logits(&new, &[]) == logits(&model, &[]), weights == "f32");
        // The same file from the beginning.
        let begun = path(&format!("{weights}-begun"));
        ok(&[&["init", "--config", "tiny/march", "--output", &begun], &flags[..]].concat());
        let file = |folder: &str| fs::read(Path::new(folder).join("model.safetensors")).unwrap();
        assert!(file(&begun) == file(&new), "{weights}");
        ok(&["inspect", "model", &new]);
    }
    assert!(5 * size("q4") < size("f32") && 3 * size("q8") < size("f32") && size("q4") < size("q8"));
    // It is computed in the precision that it has.
    let few = ["--max-tokens", "5", "--temperature", "0", "--prompt", "Hello"];
    let text = |model: &str, more: &[&str]| ok(&[&["generate", "--model", model], &few[..], more].concat());
    let words = |said: String| said.split("read     ").next().unwrap_or_default().to_string();
    assert_eq!(words(text(&path("q4"), &[])), words(text(&model, &["--weights", "q4"])));
    assert_ne!(words(text(&path("q4"), &[])), words(text(&model, &["--weights", "q8"])));

    let errors = refused(&["convert", "--model", &model, "--weights", "q4", "--output", &path("q8")]);
    assert!(errors.contains("already exists; choose another folder or delete it"), "{errors}");
    for command in [&["convert", "--model", &model][..], &["init", "--config", "tiny/march"]] {
        let errors = refused(&[command, &["--weights", "int8", "--output", &path("int8")]].concat());
        assert!(errors.contains("`f32`, `bf16`, `q8` or `q4`"), "{errors}");
    }
    assert!(!folder.path().join("int8").exists());
    let file = folder.path().join("q4/model.safetensors");
    let mut bytes = fs::read(&file).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 16;
    fs::write(&file, bytes).unwrap();
    for command in [
        &["generate", "--prompt", "x"][..],
        &["convert", "--weights", "f32", "--output", &path("of damaged")],
    ] {
        let errors = refused(&[command, &["--model", &path("q4")]].concat());
        assert!(errors.contains("model.safetensors") && errors.contains("checksum"), "{errors}");
    }
    assert!(!folder.path().join("of damaged").exists());
}

/// Weights in fewer bits are widened to be trained, and to get anchors.
#[test]
fn training_goes_on_from_them() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_string();
    let (model, packed, wide, march) = (path("gdn"), path("q4"), path("f32"), path("march"));
    ok(&["init", "--config", "tiny/gdn", "--output", &model]);
    ok(&["convert", "--model", &model, "--weights", "q4", "--output", &packed]);
    ok(&["convert", "--model", &packed, "--weights", "f32", "--output", &wide]);
    // The first checkpoint has the numbers of the folder.
    let run = path("run");
    let short = ["--set", "data.sequence_length=64", "--set", "train.tokens_per_step=64", "--stop-at", "0"];
    ok(&[&["train", "tiny/gdn", "--run", &run, "--init-from", &packed, "--threads", "1"], &short[..]]
        .concat());
    let first = format!("{run}/checkpoints/step-0");
    assert!(logits(folder.path(), &first, &[]) == logits(folder.path(), &wide, &[]));
    assert!(logits(folder.path(), &first, &[]) == logits(folder.path(), &packed, &[]));
    let layers = ["--layers", "every gated_delta_net", "--anchor-interval", "16"];
    ok(&[&["upcycle", "--model", &packed, "--output", &march], &layers[..]].concat());
    ok(&["generate", "--model", &march, "--prompt", "Hello", "--max-tokens", "2"]);
}

/// The model inside the program, and a GGUF file, with their tokenizers and chat templates.
#[test]
fn any_model_becomes_a_folder() {
    let folder = tempfile::tempdir().unwrap();
    let gguf = Path::new(env!("CARGO_MANIFEST_DIR")).join("../lm/tests/fixtures/gguf/qwen35.gguf");
    for (from, name) in [("diary", "of diary"), (text(&gguf), "of gguf")] {
        let new = folder.path().join(name);
        ok(&["convert", "--model", from, "--weights", "q8", "--output", text(&new)]);
        for file in ["tokenizer.json", "chat_template.jinja"] {
            assert!(new.join(file).is_file(), "{name}: {file}");
        }
        let few = ["--prompt", "the sea", "--max-tokens", "5", "--temperature", "0"];
        if name == "of gguf" {
            ok(&[&["generate", "--model", text(&new)], &few[..]].concat());
        }
    }
}
