//! Files that version 0.1 wrote, before memories belonged to their mixers, still load and continue as they did then. The
//! texts beside the banks are what that version wrote after ` Now`, with the most probable token each time.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use march_lm::checkpoint::Checkpoint;
use march_lm::engine::{Device, Tensor};
use march_lm::generate::{Generator, Limits, Sampling, Text};
use march_lm::memory::{BankFile, BankTag};
use march_lm::model::{Model, ModelConfig};
use march_lm::tokenizer::Tokenizer;

use crate::common::invariant;

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/version-0.1").join(name)
}

/// The models that the banks belong to; their weights are those of seed 7.
fn config(model_type: &str) -> ModelConfig {
    let common = r#""vocab_size": 257, "hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 24,
        "norm_eps": 1e-6, "tie_word_embeddings": false, "initializer_range": 0.3"#;
    let recurrence = r#""num_heads": 1, "num_v_heads": 2, "head_dim": 6, "expand_v": 1.5, "conv_size": 4"#;
    let own = match model_type {
        "march" => format!(r#"{recurrence}, "anchor_interval": 7, "routing_dim": 5"#),
        "log_linear_gated_deltanet" => format!(r#"{recurrence}, "num_levels": 12"#),
        "transformer" => r#""num_heads": 2, "rope_theta": 500000.0"#.into(),
        _ => recurrence.into(),
    };
    let json = format!(r#"{{"model_type": "{model_type}", {common}, {own}}}"#);
    ModelConfig::from_json(&json, model_type).unwrap()
}

/// What a model writes after a bank's text and ` Now`.
fn continued(device: &Device, model: &Model, parameters: &[Tensor], bank: &str) -> String {
    let (tokenizer, file) = (Tokenizer::bytes(), BankFile::open(&fixture(bank)).unwrap());
    file.verify().unwrap();
    let fingerprint = model.fingerprint(parameters).unwrap();
    let tag = BankTag::new(model.config().mixer.model_type(), fingerprint, &tokenizer);
    let text = Text::load(device, model, &file, &tag, None).unwrap();
    assert_eq!(text.tokens(), file.timeline().position);
    let sampling = Sampling { temperature: 0.0, ..Sampling::default() };
    let empty = model.bank(file.policy().clone()).unwrap();
    let mut generator = Generator::new(model, parameters, empty, sampling).unwrap();
    generator.set_text(text);
    let now = tokenizer.encode(" Now").unwrap();
    assert!(generator.read(&now, &mut |_| ControlFlow::Continue(())).unwrap());
    let (mut written, limits) = (String::new(), Limits { max_tokens: 40, stop: Vec::new() });
    let show = &mut |piece: &str| {
        written += piece;
        ControlFlow::Continue(())
    };
    generator.write(&tokenizer, &limits, show).unwrap();
    written
}

#[test]
fn banks_continue_as_they_did() {
    let device = invariant();
    for (bank, model_type) in [
        ("march", "march"),
        // Rolled back into a chunk: this version put tokens that write nothing in the place of those before it.
        ("march-rolled-back", "march"),
        ("march-budget", "march"),
        ("gated_deltanet", "gated_deltanet"),
        ("log_linear_gated_deltanet", "log_linear_gated_deltanet"),
        ("transformer", "transformer"),
    ] {
        let model = Model::new(&config(model_type));
        let parameters = model.init(&device, 7).unwrap();
        let want = std::fs::read_to_string(fixture(&format!("{bank}.text"))).unwrap();
        let got = continued(&device, &model, &parameters, &format!("{bank}.bank"));
        assert_eq!(got.trim_end_matches('\n'), want.trim_end_matches('\n'), "{bank}");
    }
}

#[test]
fn a_checkpoint_loads_as_it_was() {
    let device = invariant();
    let checkpoint = Checkpoint::open(&fixture("checkpoint")).unwrap();
    checkpoint.verify().unwrap();
    let (model, parameters) = Model::load(&device, &checkpoint).unwrap();
    assert_eq!(model.policy(), Model::new(&config("march")).policy());
    let want = std::fs::read_to_string(fixture("march.text")).unwrap();
    let got = continued(&device, &model, &parameters, "march.bank");
    assert_eq!(got.trim_end_matches('\n'), want.trim_end_matches('\n'));
}
