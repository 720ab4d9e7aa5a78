//! GGUF files. Those in `fixtures/gguf`, and what must be found in them, were made with the Python package gguf by
//! `tests/gguf/make.py`.

use std::fs;
use std::path::{Path, PathBuf};

use march_lm::Result;
use march_lm::checkpoint::Checkpoint;
use march_lm::engine::Precision;
use march_lm::model::{Batch, Model, Settings};
use march_lm::pipeline::{OpenOptions, Pipeline};
use march_lm::tokenizer::Tokenizer;
use serde_json::Value;
use sha2::{Digest, Sha256};
use tempfile::TempDir;

use crate::common::invariant;

mod refusals;

const FILES: [&str; 4] = ["types.gguf", "pieces.gguf", "qwen3.gguf", "qwen35.gguf"];

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/gguf").join(name)
}

/// What a file must hold.
fn expected(name: &str) -> Value {
    let text = fs::read_to_string(fixture("expected.json")).unwrap();
    serde_json::from_str::<Value>(&text).unwrap()[name].clone()
}

/// Reads everything of a file: configuration, tensors, tokenizer and chat template.
fn read(path: &Path) -> Result<()> {
    let checkpoint = Checkpoint::open(path)?;
    checkpoint.tokenizer(path, None)?;
    checkpoint.chat_template()?;
    Model::load_in(&invariant(), &checkpoint, Precision::Bf16)?;
    Ok(())
}

/// A file with these bytes.
fn file(bytes: &[u8]) -> (TempDir, PathBuf) {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("model.gguf");
    fs::write(&path, bytes).unwrap();
    (folder, path)
}

/// Every format of blocks, and every order of rows.
#[test]
fn parameters_are_those_that_were_written() {
    for name in FILES {
        let checkpoint = Checkpoint::open(&fixture(name)).unwrap();
        let model = Model::new(checkpoint.config());
        checkpoint.check(model.layout()).unwrap();
        checkpoint.verify().unwrap();
        let expected = &expected(name)["parameters"];
        assert_eq!(expected.as_object().unwrap().len(), model.layout().len(), "{name}");
        for spec in model.layout() {
            let numbers = checkpoint.tensor(spec).unwrap();
            let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
            let sum: String = Sha256::digest(&bytes)[..8].iter().map(|byte| format!("{byte:02x}")).collect();
            assert_eq!(expected[&spec.name], sum.as_str(), "{name}: {}", spec.name);
            let rows = spec.shape[0];
            let by_rows: Vec<f32> = (0..rows)
                .step_by(3)
                .flat_map(|row| checkpoint.rows(spec, row..rows.min(row + 3)).unwrap().into_owned())
                .collect();
            assert_eq!(by_rows, *numbers, "{name}: {}", spec.name);
        }
        // Individual numbers are read in another way.
        let (model, parameters) = Model::load(&invariant(), &checkpoint).unwrap();
        let fingerprint = model.checkpoint_fingerprint(&checkpoint).unwrap();
        assert_eq!(fingerprint, model.fingerprint(&parameters).unwrap(), "{name}");
    }
}

#[test]
fn configurations_are_those_of_config_json() {
    let of = |name: &str| -> Value {
        serde_json::from_str(&Checkpoint::open(&fixture(name)).unwrap().config().to_json()).unwrap()
    };
    let llama = of("types.gguf");
    for (key, value) in [
        ("model_type", "transformer".into()),
        ("vocab_size", 64.into()),
        ("hidden_size", 256.into()),
        ("num_hidden_layers", 1.into()),
        ("intermediate_size", 32.into()),
        ("num_heads", 2.into()),
        ("num_kv_heads", 1.into()),
        ("head_width", 16.into()),
        // An f32 there, and the number that it was made from here.
        ("norm_eps", Value::from(1e-6)),
        ("rope_theta", 10_000.0.into()),
        ("tie_word_embeddings", true.into()),
    ] {
        assert_eq!(llama[key], value, "{key}");
    }
    let qwen3 = of("qwen3.gguf");
    assert_eq!((&qwen3["qk_norm"], &qwen3["tie_word_embeddings"]), (&true.into(), &false.into()));
    let qwen35 = of("qwen35.gguf");
    for (key, value) in [
        ("model_type", Value::from("hybrid")),
        ("layers", "1 gated_delta_net, 1 attention".into()),
        ("num_heads", 2.into()),
        ("num_v_heads", 4.into()),
        ("head_dim", 8.into()),
        ("expand_v", 1.0.into()),
        ("attention_rotary_factor", 0.5.into()),
        ("attention_attn_output_gate", true.into()),
    ] {
        assert_eq!(qwen35[key], value, "{key}");
    }
}

#[test]
fn tokenizers_give_the_ids_of_tokenizer_json() {
    for name in FILES {
        let path = fixture(name);
        let checkpoint = Checkpoint::open(&path).unwrap();
        let tokenizer = checkpoint.tokenizer(&path, None).unwrap();
        let expected = expected(name);
        for (text, ids) in expected["ids"].as_object().unwrap() {
            let ids: Vec<u32> = serde_json::from_value(ids.clone()).unwrap();
            assert_eq!(tokenizer.encode(text).unwrap(), ids, "{name}: {text}");
            // The others lack characters; characters are composed, or a space is put after a special token.
            let changes = if name == "pieces.gguf" { "<|" } else { "\u{301}" };
            if ["pieces.gguf", "qwen35.gguf"].contains(&name) && !text.contains(changes) {
                assert_eq!(&tokenizer.decode(&ids).unwrap(), text);
            }
        }
        // It is a `tokenizer.json` like any other.
        let folder = TempDir::new().unwrap();
        let saved = folder.path().join("tokenizer.json");
        tokenizer.save(&saved).unwrap();
        let again = Tokenizer::load(&saved.display().to_string()).unwrap();
        assert_eq!(again.hash(), tokenizer.hash());
        let id = |text: &str| tokenizer.encode(text).unwrap()[0];
        assert!(tokenizer.is_end(id("<|im_end|>")) && !tokenizer.is_end(id("the")), "{name}");
        if name != "pieces.gguf" {
            for (token, ends) in [("<|endoftext|>", true), ("<think>", false)] {
                assert_eq!(tokenizer.is_end(id(token)), ends, "{name}: {token}");
            }
            // Ids without a token are not part of it.
            assert_eq!(tokenizer.vocabulary(), 5 + id("<|endoftext|>") as usize, "{name}");
        }
        let template = checkpoint.chat_template().unwrap().unwrap();
        assert!(template.text.contains("<|im_start|>"));
        let begin = if name == "pieces.gguf" { "<s>" } else { "<|im_start|>" };
        assert_eq!((template.bos.as_str(), template.eos.as_str()), (begin, "<|im_end|>"));
    }
}

/// A matrix in bf16 is converted block by block of rows, and is the same as one converted whole.
#[test]
fn weights_in_bf16_are_rounded_from_f32() {
    for name in FILES {
        let checkpoint = Checkpoint::open(&fixture(name)).unwrap();
        let device = invariant();
        let (model, parameters) = Model::load(&device, &checkpoint).unwrap();
        let (_, loaded) = Model::load_in(&device, &checkpoint, Precision::Bf16).unwrap();
        let rounded = model.quantize(parameters, Precision::Bf16).unwrap();
        for ((spec, a), b) in model.layout().iter().zip(&loaded).zip(&rounded) {
            let numbers = |tensor: &march_lm::engine::Tensor| tensor.unpack().unwrap().to_f32();
            assert_eq!(numbers(a), numbers(b), "{name}: {}", spec.name);
        }
        let batch = Batch::one(&[1, 2, 3, 4]);
        let hidden = model.forward(&loaded.into(), batch, &Settings::default(), None).unwrap();
        assert!(hidden.to_f32().iter().all(|number| number.is_finite()));
    }
}

#[test]
fn a_pipeline_opens_a_file() {
    let path = fixture("qwen35.gguf");
    let options = OpenOptions { device: Some(invariant()), ..OpenOptions::default() };
    let march = Pipeline::open_with(&path, options.clone()).unwrap();
    // Most of it is in bf16 or fewer bits.
    assert_eq!(march.weights(), Precision::Bf16);
    assert!(march.generate("the sea", 3).unwrap().all(|piece| piece.is_ok()));
    assert!(march.chat_template().unwrap().is_some());
    // The name need not tell.
    let folder = TempDir::new().unwrap();
    let other = folder.path().join("model");
    fs::copy(&path, &other).unwrap();
    assert_eq!(
        Pipeline::open_with(&other, options).unwrap().fingerprint().unwrap(),
        march.fingerprint().unwrap()
    );
}

/// Converted to a folder, a file has the weights that loading makes, and its tokenizer and template.
#[test]
fn a_file_becomes_a_folder() {
    for name in FILES {
        let (path, folder) = (fixture(name), TempDir::new().unwrap());
        let file = Checkpoint::open(&path).unwrap();
        for weights in [Precision::F32, Precision::Bf16, Precision::Q8, Precision::Q4] {
            let to = folder.path().join(weights.to_string());
            file.convert(&path, &to, weights, &mut |_| {}).unwrap();
            let checkpoint = Checkpoint::open(&to).unwrap();
            assert_eq!(checkpoint.precision(&invariant()), weights);
            let bytes = |checkpoint: &Checkpoint| -> Vec<Vec<u8>> {
                let (_, parameters) = Model::load_in(&invariant(), checkpoint, weights).unwrap();
                parameters.iter().map(|tensor| tensor.file_bytes().unwrap().into_owned()).collect()
            };
            assert!(bytes(&checkpoint) == bytes(&file), "{name} in {weights}");
            let tokenizers =
                [(&file, &path), (&checkpoint, &to)].map(|(of, path)| of.tokenizer(path, None).unwrap());
            assert_eq!(tokenizers[0].hash(), tokenizers[1].hash(), "{name}");
            let ends =
                |of: &Tokenizer| (0..of.vocabulary() as u32).filter(|&id| of.is_end(id)).collect::<Vec<_>>();
            assert_eq!(ends(&tokenizers[0]), ends(&tokenizers[1]), "{name}");
            let template = file.chat_template().unwrap().unwrap();
            assert_eq!(fs::read_to_string(to.join("chat_template.jinja")).unwrap(), template.text);
        }
    }
}

/// The checksum beside a file is compared.
#[test]
fn a_checksum_beside_the_file() {
    let mut bytes = fs::read(fixture("qwen3.gguf")).unwrap();
    let (_folder, path) = file(&bytes);
    let sum: String = Sha256::digest(&bytes).iter().map(|byte| format!("{byte:02x}")).collect();
    fs::write(path.with_file_name("model.gguf.sha256"), format!("{sum}  model.gguf\n")).unwrap();
    read(&path).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&path, &bytes).unwrap();
    let error = read(&path).unwrap_err();
    assert!(error.is_damage() && error.to_string().contains("model.gguf.sha256"), "{error}");
}
