//! Checkpoint folders of other tools: which tensors must be there, which may be, and which may not.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use march_lm::checkpoint::{Checkpoint, SHARD_BYTES, save};
use march_lm::model::Model;
use march_lm::model::ModelConfig;
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::common::{self, invariant, small};

type Tensors = BTreeMap<String, (Vec<usize>, Vec<f32>)>;

/// The folder of a small model of this kind, with keys and tensors changed.
fn folder(kind: &str, keys: &[(&str, Value)], change: impl FnOnce(&mut Tensors)) -> TempDir {
    let temporary = TempDir::new().unwrap();
    let path = temporary.path().join("model");
    let config = small(kind);
    let model = Model::new(&config);
    save(&path, &config, model.layout(), SHARD_BYTES, |i| Ok(model.initial(i, 5))).unwrap();
    // What follows is another tool's folder, which has no checksums.
    fs::remove_file(path.join("checksums.json")).unwrap();
    let mut json: Value = serde_json::from_slice(&fs::read(path.join("config.json")).unwrap()).unwrap();
    for (key, value) in keys {
        json[key] = value.clone();
    }
    fs::write(path.join("config.json"), json.to_string()).unwrap();
    let file = path.join("model.safetensors");
    let mut tensors = read(&file);
    change(&mut tensors);
    write(&file, &tensors);
    temporary
}

fn read(path: &Path) -> Tensors {
    let bytes = fs::read(path).unwrap();
    let number = |b: &[u8]| f32::from_le_bytes([b[0], b[1], b[2], b[3]]);
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let tensor =
        |view: TensorView<'_>| (view.shape().to_vec(), view.data().chunks_exact(4).map(number).collect());
    file.iter().map(|(name, view)| (name.to_string(), tensor(view))).collect()
}

fn write(path: &Path, tensors: &Tensors) {
    let bytes: Vec<Vec<u8>> =
        tensors.values().map(|(_, n)| n.iter().flat_map(|number| number.to_le_bytes()).collect()).collect();
    let views = tensors.iter().zip(&bytes).map(|((name, (shape, _)), bytes)| {
        (name, TensorView::new(Dtype::F32, shape.clone(), bytes).unwrap())
    });
    fs::write(path, safetensors::serialize(views, None).unwrap()).unwrap();
}

fn load(folder: &TempDir) -> march_lm::Result<ModelConfig> {
    let checkpoint = Checkpoint::open(&folder.path().join("model"))?;
    let (model, _) = Model::load(&invariant(), &checkpoint)?;
    Ok(model.config().clone())
}

#[track_caller]
fn refused(folder: &TempDir, parts: &[&str]) {
    let message = load(folder).expect_err("it should be refused").to_string();
    for part in parts {
        assert!(message.contains(part), "`{part}` is not in: {message}");
    }
}

#[test]
fn what_is_saved_loads() {
    for kind in common::KINDS {
        assert_eq!(load(&folder(kind, &[], |_| ())).unwrap(), small(kind));
    }
}

#[test]
fn a_tied_head_must_be_the_embeddings() {
    let tied = [("tie_word_embeddings", json!(true))];
    for kind in ["transformer", "gated_deltanet", "march"] {
        refused(
            &folder(kind, &tied, |_| ()),
            &["model.safetensors", "`lm_head.weight`", "`model.embeddings.weight`", "set it to false"],
        );
        let same = |tensors: &mut Tensors| {
            tensors.insert("lm_head.weight".into(), tensors["model.embeddings.weight"].clone());
        };
        load(&folder(kind, &tied, same)).unwrap();
        // One bit at the end is enough, and so is another shape.
        refused(
            &folder(kind, &tied, |tensors| {
                same(tensors);
                let numbers = &mut tensors.get_mut("lm_head.weight").unwrap().1;
                *numbers.last_mut().unwrap() += 1.0;
            }),
            &["`lm_head.weight`", "other numbers"],
        );
        refused(
            &folder(kind, &tied, |tensors| {
                same(tensors);
                tensors.get_mut("lm_head.weight").unwrap().0.reverse();
            }),
            &["`lm_head.weight`"],
        );
        let without = |tensors: &mut Tensors| drop(tensors.remove("lm_head.weight"));
        load(&folder(kind, &tied, without)).unwrap();
        refused(&folder(kind, &[], without), &["tensor `lm_head.weight` is missing"]);
    }
}

#[test]
fn extra_tensors_are_refused_by_name() {
    let extra = |names: &'static [&'static str]| {
        move |tensors: &mut Tensors| {
            for name in names {
                tensors.insert(name.to_string(), (vec![1], vec![0.5]));
            }
        }
    };
    refused(
        &folder("gated_deltanet", &[], extra(&["model.layers.0.attn.q_proj.bias"])),
        &["tensor `model.layers.0.attn.q_proj.bias` is not part of the model", "config.json", "remove"],
    );
    refused(
        &folder("transformer", &[], extra(&["a", "b", "c", "d", "e"])),
        &["5 tensors are not part of the model", "`a`, `b`, `c` and 2 others"],
    );
    // Fewer layers than the file has.
    refused(
        &folder("march", &[("num_hidden_layers", json!(2))], |_| ()),
        &["are not part of the model", "`model.layers.2.attn.A_log`"],
    );
    // The same tensors in another model: what it does not know is not left out.
    refused(
        &folder("march", &[("null_route", json!(false))], |_| ()),
        &["`model.layers.0.attn.null_proj.bias`", "`null_route` is false"],
    );
}

#[test]
fn a_table_of_wavelengths_must_follow_from_rope_theta() {
    // Three heads of 8 of 24, wavelengths of 500,000.
    let table = |theta: f64| -> Vec<f32> { (0..4).map(|i| theta.powf(-f64::from(i) / 4.0) as f32).collect() };
    let with = |kind: &str, name: &'static str, numbers: Vec<f32>| {
        folder(kind, &[], move |tensors| drop(tensors.insert(name.into(), (vec![numbers.len()], numbers))))
    };
    for name in ["model.layers.1.attn.rotary.inv_freq", "model.rotary_emb.inv_freq"] {
        load(&with("transformer", name, table(5e5))).unwrap();
        refused(&with("transformer", name, table(1e4)), &[name, "not part of the model"]);
        refused(&with("transformer", name, vec![1.0; 3]), &[name]);
        refused(&with("gated_deltanet", name, table(5e5)), &[name]);
    }
}
