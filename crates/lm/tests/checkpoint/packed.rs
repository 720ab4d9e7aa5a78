//! Folders whose matrices are in q8 and q4: written, mapped, and refused with a reason.

use std::fs;
use std::path::{Path, PathBuf};

use march_lm::Error;
use march_lm::checkpoint::{Checkpoint, NewFolder, SHARD_BYTES, Values};
use march_lm::engine::{Device, Precision, Tensor};
use march_lm::model::{Batch, Model, ModelConfig};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::common::damage::damaged;
use crate::common::{Case, invariant, small, tokens};

const BOTH: [Precision; 2] = [Precision::Q8, Precision::Q4];

/// Rows that are no multiple of 16, and a width that is none of 32 and more than 256; a head that is the embeddings.
fn tied() -> ModelConfig {
    let keys = json!({
        "model_type": "transformer", "vocab_size": 61, "hidden_size": 300, "num_hidden_layers": 1, "num_heads": 3,
        "intermediate_size": 41, "norm_eps": 1e-6, "tie_word_embeddings": true, "initializer_range": 0.02,
        "rope_theta": 10000.0, "qkv_bias": true
    });
    ModelConfig::from_json(&keys.to_string(), "test").unwrap()
}

fn configs() -> [ModelConfig; 4] {
    [tied(), small("march"), small("hybrid_anchors"), small("transformer_conv")]
}

/// A folder in f32, and the path of another one.
fn plain(config: &ModelConfig) -> (TempDir, PathBuf, PathBuf) {
    let folder = TempDir::new().unwrap();
    let (from, to) = (folder.path().join("plain"), folder.path().join("packed"));
    let model = Model::new(config);
    march_lm::checkpoint::save(&from, config, model.layout(), SHARD_BYTES, |i| Ok(model.initial(i, 7)))
        .unwrap();
    (folder, from, to)
}

fn convert(from: &Path, to: &Path, weights: Precision) {
    Checkpoint::open(from).unwrap().convert(from, to, weights, &mut |_| {}).unwrap();
}

/// A folder in q4 or q8 without checksums.
fn unchecked(config: &ModelConfig, weights: Precision) -> (TempDir, PathBuf) {
    let (folder, from, to) = plain(config);
    convert(&from, &to, weights);
    fs::remove_file(to.join("checksums.json")).unwrap();
    (folder, to)
}

fn load(device: &Device, folder: &Path, weights: Precision) -> march_lm::Result<Case> {
    let (model, parameters) = Model::load_in(device, &Checkpoint::open(folder)?, weights)?;
    Ok(Case { model, parameters })
}

/// The types of parameters and their bytes in a file.
fn bytes(case: &Case) -> Vec<(String, Vec<u8>)> {
    let of = |tensor: &Tensor| (tensor.dtype().to_string(), tensor.file_bytes().unwrap().into_owned());
    case.parameters.iter().map(of).collect()
}

fn values(case: &Case) -> Vec<Vec<f64>> {
    case.parameters.iter().map(|tensor| tensor.unpack().unwrap().to_f64()).collect()
}

fn logits(case: &Case) -> Vec<f64> {
    case.extend(&tokens(20, case.model.config().vocab_size as u32, 3), &case.model.policy(), &[7, 1])
}

#[test]
fn the_bits_are_those_of_packing_while_loading() {
    for config in configs() {
        for weights in BOTH {
            let (_folder, from, to) = plain(&config);
            convert(&from, &to, weights);
            let checkpoint = Checkpoint::open(&to).unwrap();
            assert_eq!(checkpoint.config(), &config);
            assert_eq!(checkpoint.precision(&invariant()), weights);
            assert_eq!(checkpoint.precision(&Device::reference()), weights);
            let (wanted, found) =
                (load(&invariant(), &from, weights).unwrap(), load(&invariant(), &to, weights).unwrap());
            assert!(bytes(&found) == bytes(&wanted), "{weights}");
            assert!(logits(&found) == logits(&wanted), "{weights}");
            assert_eq!(checkpoint.bytes(), found.model.parameter_bytes(weights));
            // What stays in the file takes no memory of the device.
            let device = invariant();
            let case = load(&device, &to, weights).unwrap();
            let own: usize = case
                .model
                .layout()
                .iter()
                .filter(|spec| !spec.is_matrix())
                .map(|spec| 4 * spec.count())
                .sum();
            let room = 64 * case.parameters.len() + own;
            assert!(device.live_bytes() <= room, "{} bytes live, {room} expected", device.live_bytes());
            // The reference device has the same numbers.
            let rounded = load(&Device::reference(), &to, weights).unwrap();
            assert!(values(&rounded) == values(&found), "{weights}");
        }
    }
}

#[test]
fn other_precisions_are_made_of_the_numbers() {
    for weights in BOTH {
        let (folder, from, to) = plain(&tied());
        convert(&from, &to, weights);
        let device = invariant();
        let packed = load(&device, &to, weights).unwrap();
        let whole = load(&device, &to, Precision::F32).unwrap();
        assert!(values(&whole) == values(&packed));
        for other in [Precision::Bf16, Precision::Int8, Precision::Q8, Precision::Q4] {
            let found = load(&device, &to, other).unwrap();
            let rounded = whole.model.quantize(whole.parameters.clone(), other).unwrap();
            let rounded = Case { model: whole.model.clone(), parameters: rounded };
            // Numbers that are rounded already need not stay what they are.
            let wanted = if other == weights { &packed } else { &rounded };
            assert!(values(&found) == values(wanted), "{other} of {weights}");
        }
        // Rows and single numbers are read in other ways.
        let checkpoint = Checkpoint::open(&to).unwrap();
        for (spec, tensor) in whole.model.layout().iter().zip(&whole.parameters) {
            let (rows, numbers) = (spec.shape[0], tensor.to_f32());
            let by_rows: Vec<f32> = (0..rows)
                .step_by(7)
                .flat_map(|row| checkpoint.rows(spec, row..rows.min(row + 7)).unwrap().into_owned())
                .collect();
            assert!(by_rows == numbers, "{}", spec.name);
        }
        let fingerprint = whole.model.checkpoint_fingerprint(&checkpoint).unwrap();
        assert_eq!(fingerprint, whole.model.fingerprint(&whole.parameters).unwrap());
        // Written again, it is the same file; in f32, it has the same numbers.
        let path = |name: &str| folder.path().join(name);
        convert(&to, &path("again"), weights);
        let file = |folder: &Path| fs::read(folder.join("model.safetensors")).unwrap();
        assert!(file(&path("again")) == file(&to));
        convert(&to, &path("f32"), Precision::F32);
        assert!(values(&load(&device, &path("f32"), Precision::F32).unwrap()) == values(&whole));
    }
}

#[test]
fn shards() {
    for (config, weights) in [(tied(), Precision::Q4), (small("march"), Precision::Q8)] {
        let (folder, from, _) = plain(&config);
        let case = load(&invariant(), &from, weights).unwrap();
        let to = folder.path().join("shards");
        let new = NewFolder::create(&to).unwrap();
        let tensor = |i: usize| Ok(Values::Tensor(case.parameters[i].clone()));
        new.model(&config, case.model.layout(), 20_000, weights, tensor).unwrap();
        new.finish().unwrap();
        assert!(to.join("model.safetensors.index.json").is_file());
        assert!(bytes(&load(&invariant(), &to, weights).unwrap()) == bytes(&case));
    }
}

/// A folder in int8 cannot be written, nor one of tensors that are not what was promised.
#[test]
fn what_is_not_packed_is_not_written() {
    let (folder, from, to) = plain(&tied());
    let case = load(&invariant(), &from, Precision::Q4).unwrap();
    let message = |weights: Precision, tensor: &dyn Fn(usize) -> Values| {
        let new = NewFolder::create(&to).unwrap();
        let written = new.model(&tied(), case.model.layout(), SHARD_BYTES, weights, |i| Ok(tensor(i)));
        written.unwrap_err().to_string()
    };
    let q4 = |i: usize| Values::Tensor(case.parameters[i].clone());
    let numbers = |i: usize| Values::Numbers(case.model.initial(i, 7));
    let refused = message(Precision::Int8, &numbers);
    assert!(refused.contains("int8 are not stored; choose f32, bf16, q8 or q4"), "{refused}");
    let refused = message(Precision::Q4, &numbers);
    assert!(refused.contains("in q4, but numbers in f32 were given"), "{refused}");
    for other in [Precision::Q8, Precision::F32] {
        let refused = message(other, &q4);
        assert!(refused.contains(&format!("in {other}, but [")) && refused.contains("in q4"), "{refused}");
    }
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
}

/// The header of a file as JSON, and its data.
fn parts(file: &[u8]) -> (Value, Vec<u8>) {
    let length = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
    (serde_json::from_slice(&file[8..8 + length]).unwrap(), file[8 + length..].to_vec())
}

/// A file whose data begin at a multiple of 64, or `skip` bytes after it.
fn whole(header: &Value, data: &[u8], skip: usize) -> Vec<u8> {
    let mut header = header.to_string().into_bytes();
    header.resize((header.len() + 8).next_multiple_of(64) - 8 + skip, b' ');
    [&(header.len() as u64).to_le_bytes(), &header[..], data].concat()
}

/// Blocks that do not begin where they can be read in place are copied.
#[test]
fn unaligned_blocks_are_read() {
    for weights in BOTH {
        let (_folder, path) = unchecked(&small("march"), weights);
        let file = path.join("model.safetensors");
        let (header, data) = parts(&fs::read(&file).unwrap());
        let wanted = load(&invariant(), &path, weights).unwrap();
        let wanted = (bytes(&wanted), logits(&wanted));
        for skip in [0, 1, 2, 4, 8, 32] {
            fs::write(&file, whole(&header, &data, skip)).unwrap();
            let device = invariant();
            let found = load(&device, &path, weights).unwrap();
            assert!((bytes(&found), logits(&found)) == wanted, "{weights}, {skip}");
            let copied = device.live_bytes() > found.model.parameter_bytes(weights) / 2;
            assert_eq!(copied, skip > 0, "{weights}, {skip}");
        }
    }
}

#[test]
fn wrong_headers_are_refused() {
    const NAME: &str = "model.layers.0.mlp.gate_proj.weight";
    let (_folder, path) = unchecked(&tied(), Precision::Q4);
    let file = path.join("model.safetensors");
    let (sound, data) = parts(&fs::read(&file).unwrap());
    let listed: Value = serde_json::from_str(sound["__metadata__"]["packed"].as_str().unwrap()).unwrap();
    assert_eq!(listed["q4"][NAME], json!([41, 300]));
    assert_eq!((&sound[NAME]["dtype"], &sound[NAME]["shape"]), (&json!("U8"), &json!([3, 3072])));
    let refused = |header: &Value, wanted: &[&str]| {
        fs::write(&file, whole(header, &data, 0)).unwrap();
        let error = load(&invariant(), &path, Precision::Q4).err().expect("it should be refused");
        assert!(matches!(error, Error::File { .. } | Error::Damaged { .. }), "{error}");
        for part in wanted.iter().chain(&["model.safetensors"]) {
            assert!(error.to_string().contains(part), "`{part}` is not in: {error}");
        }
    };
    let metadata = |key: &str, value: Value| {
        let mut header = sound.clone();
        header["__metadata__"][key] = value;
        header
    };
    refused(&metadata("version", json!("2")), &["version `2`", "reads version 1"]);
    refused(&metadata("version", json!(1)), &["version ``"]);
    refused(&metadata("format", json!("pt")), &["has shape [4, 3072], but `config.json` requires [61, 300]"]);
    refused(&metadata("packed", json!("[]")), &["`packed` is not a list of matrices"]);
    refused(&metadata("packed", json!(listed)), &["`packed` is not a list of matrices"]);
    let lists = |change: &dyn Fn(&mut Value)| {
        let mut lists = listed.clone();
        change(&mut lists);
        metadata("packed", json!(lists.to_string()))
    };
    let shape = |shape: Value| lists(&|lists| lists["q4"][NAME] = shape.clone());
    refused(&shape(json!([49, 300])), &[NAME, "takes U8 of shape [4, 3072]", "it is U8 of shape [3, 3072]"]);
    refused(&shape(json!([41, 321])), &[NAME, "takes U8 of shape [3, 3328]"]);
    refused(&shape(json!([u64::MAX, 32])), &[NAME, "no such number of bytes"]);
    refused(&shape(json!([41, u64::MAX])), &[NAME, "no such number of bytes"]);
    // As many bytes, of another matrix.
    refused(&shape(json!([42, 300])), &[NAME, "has shape [42, 300], but `config.json` requires [41, 300]"]);
    refused(&shape(json!([41, 301])), &[NAME, "[41, 301]"]);
    refused(&shape(json!([41])), &["`packed` is not a list"]);
    refused(&shape(json!([-1, 300])), &["`packed` is not a list"]);
    refused(&lists(&|lists| lists["q4"]["other"] = json!([1, 1])), &["`other`, which it does not have"]);
    refused(&lists(&|lists| lists["q8"] = json!({ NAME: [41, 300] })), &[NAME, "twice"]);
    refused(&lists(&|lists| *lists = json!({ "q3": lists["q4"] })), &["`q3`", "q8 and q4"]);
    refused(&lists(&|lists| lists["bf16"] = json!({})), &["`bf16`", "q8 and q4"]);
    refused(&lists(&|lists| *lists = json!({ "q8": lists["q4"] })), &["q8 of shape", "takes U8 of shape"]);
    refused(&lists(&|lists| _ = lists["q4"].as_object_mut().unwrap().remove(NAME)), &[NAME, "[3, 3072]"]);
    let mut header = sound.clone();
    header[NAME]["dtype"] = json!("I8");
    refused(&header, &[NAME, "it is I8"]);
    // The file itself is sound.
    fs::write(&file, whole(&sound, &data, 0)).unwrap();
    load(&invariant(), &path, Precision::Q4).unwrap();
    fs::write(&file, whole(&sound, &data[..data.len() - 1], 0)).unwrap();
    let error = load(&invariant(), &path, Precision::Q4).err().unwrap().to_string();
    assert!(error.contains("cut short"), "{error}");
}

/// Without checksums, a scale that is NaN or infinite is found.
#[test]
fn scales_that_are_not_finite_are_refused() {
    for weights in BOTH {
        let (_folder, path) = unchecked(&tied(), weights);
        let file = path.join("model.safetensors");
        let (header, data) = parts(&fs::read(&file).unwrap());
        let name = "model.layers.0.mlp.down_proj.weight";
        let start = header[name]["data_offsets"][0].as_u64().unwrap() as usize;
        let mut data = data;
        data[start + 2..start + 4].copy_from_slice(&0x7E00u16.to_le_bytes());
        fs::write(&file, whole(&header, &data, 0)).unwrap();
        for asked in [weights, Precision::F32] {
            let error = load(&invariant(), &path, asked).err().expect("it should be refused");
            assert!(error.is_damage() && error.to_string().contains(name), "{error}");
            assert!(error.to_string().contains("not finite"), "{error}");
        }
    }
}

/// With checksums, nothing that is damaged loads; without them, nothing panics.
#[test]
fn damaged_files_do_not_load() {
    let (_folder, from, path) = plain(&small("march"));
    convert(&from, &path, Precision::Q4);
    let file = path.join("model.safetensors");
    let sound = fs::read(&file).unwrap();
    for checked in [true, false] {
        damaged(&sound, 5, 100, |bytes| {
            fs::write(&file, bytes).unwrap();
            match load(&invariant(), &path, Precision::Q4) {
                Ok(_) => assert!(!checked || bytes == sound),
                Err(error) => assert!(matches!(error, Error::File { .. } | Error::Damaged { .. }), "{error}"),
            }
        });
        let length = 8 + u64::from_le_bytes(sound[..8].try_into().unwrap()) as usize;
        damaged(&sound[..length], 6, 300, |header| {
            fs::write(&file, [header, &sound[length..]].concat()).unwrap();
            let loaded = load(&invariant(), &path, Precision::Q4);
            assert!(loaded.is_err() || !checked || header == &sound[..length]);
        });
        if checked {
            fs::remove_file(path.join("checksums.json")).unwrap();
        }
    }
}

/// The model computes the same in one pass over several rows.
#[test]
fn a_pass_over_rows() {
    let (_folder, from, to) = plain(&tied());
    convert(&from, &to, Precision::Q8);
    let ids = tokens(40, 61, 5);
    let pass = |folder: &Path| {
        let case = load(&invariant(), folder, Precision::Q8).unwrap();
        case.forward(Batch { ids: &ids, rows: 2 }, &case.model.policy())
    };
    assert!(pass(&from) == pass(&to));
}
