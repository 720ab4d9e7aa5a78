//! Other people's models: the tensors and keys of transformers' checkpoints.

mod changed;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use march_lm::checkpoint::Checkpoint;
use march_lm::engine::{Device, Precision};
use march_lm::model::{Batch, Model, ModelConfig};
use safetensors::SafeTensors;
use serde_json::{Value, json};

use crate::common::{Case, assert_close, cpu, invariant};

fn fixture(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

/// The model of a folder.
fn load(folder: &Path, device: &Device) -> Case {
    let (model, parameters) = Model::load(device, &Checkpoint::open(folder).unwrap()).unwrap();
    Case { model, parameters }
}

/// Token ids, by row, and transformers' logits.
fn expected(folder: &Path) -> (Vec<Vec<u32>>, Vec<f64>) {
    let bytes = fs::read(folder.join("expected.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let tokens = file.tensor("tokens").unwrap();
    let width = tokens.data().len() / tokens.shape().iter().product::<usize>();
    let ids: Vec<u32> =
        tokens.data().chunks(width).map(|id| u32::from(id[0]) + 256 * u32::from(id[1])).collect();
    let logits = file.tensor("logits").unwrap();
    let number = |bytes: &[u8]| f64::from(f32::from_le_bytes(bytes.try_into().unwrap()));
    let rows = ids.chunks(tokens.shape()[1]).map(<[u32]>::to_vec).collect();
    (rows, logits.data().chunks(4).map(number).collect())
}

/// In one pass, and through a bank in calls of several sizes; on all devices.
#[test]
fn the_logits_of_qwen3_5_are_those_of_transformers() {
    for name in ["qwen3_5", "qwen3_5_grouped"] {
        let folder = fixture(name);
        let (rows, wanted) = expected(&folder);
        for device in [cpu(), invariant(), Device::reference()] {
            let case = load(&folder, &device);
            let policy = case.model.policy();
            let all: Vec<u32> = rows.concat();
            let found = case.forward(Batch { ids: &all, rows: rows.len() }, &policy);
            assert_close(&format!("{name} on {device}"), &found, &wanted, 5e-5);
            for calls in [&[70][..], &[1], &[7, 30, 1, 20]] {
                let found: Vec<f64> = rows.iter().flat_map(|ids| case.extend(ids, &policy, calls)).collect();
                assert_close(&format!("{name} on {device} in calls {calls:?}"), &found, &wanted, 5e-5);
            }
        }
    }
}

/// A folder with the same model in another form.
#[derive(Clone)]
struct Copy {
    folder: Arc<tempfile::TempDir>,
    config: Value,
    tensors: BTreeMap<String, (Vec<usize>, Vec<u8>)>,
}

impl Copy {
    fn of(name: &str) -> Self {
        Self::at(&fixture(name))
    }

    fn at(path: &Path) -> Self {
        let config = serde_json::from_slice(&fs::read(path.join("config.json")).unwrap()).unwrap();
        let bytes = fs::read(path.join("model.safetensors")).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let tensors = file
            .iter()
            .map(|(name, view)| (name.to_string(), (view.shape().to_vec(), view.data().to_vec())))
            .collect();
        Self { folder: Arc::new(tempfile::TempDir::new().unwrap()), config, tensors }
    }

    fn write(&self) -> &Path {
        let path = self.folder.path();
        fs::write(path.join("config.json"), self.config.to_string()).unwrap();
        let views = self.tensors.iter().map(|(name, (shape, bytes))| {
            (
                name,
                safetensors::tensor::TensorView::new(safetensors::Dtype::F32, shape.clone(), bytes).unwrap(),
            )
        });
        fs::write(path.join("model.safetensors"), safetensors::serialize(views, None).unwrap()).unwrap();
        path
    }

    fn load(&self) -> march_lm::Result<Case> {
        let (model, parameters) = Model::load(&invariant(), &Checkpoint::open(self.write())?)?;
        Ok(Case { model, parameters })
    }

    /// The model as one part of a model that also sees, with the tensors of other parts.
    fn nested(mut self) -> Self {
        let text = std::mem::take(&mut self.config);
        self.config = json!({
            "model_type": "qwen3_5", "architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": text,
            "vision_config": {"depth": 12}, "image_token_id": 9, "video_token_id": 8, "vision_start_token_id": 7,
            "vision_end_token_id": 6, "tie_word_embeddings": text["tie_word_embeddings"],
        });
        let nested = |name: String| match name.strip_prefix("model.") {
            Some(rest) => format!("model.language_model.{rest}"),
            None => name,
        };
        self.tensors = std::mem::take(&mut self.tensors).into_iter().map(|(n, t)| (nested(n), t)).collect();
        for extra in ["mtp.fc.weight", "model.visual.patch_embed.proj.weight"] {
            self.tensors.insert(extra.into(), (vec![2], vec![0; 8]));
        }
        self
    }

    /// The model as Qwen3-Next arranges it: projections fused by head.
    fn fused(mut self) -> Self {
        let number = |key: &str| self.config[key].as_u64().unwrap() as usize;
        let (heads, sharing) = (number("linear_num_key_heads"), number("linear_num_value_heads"));
        let sharing = sharing / heads;
        let (dk, dv) = (number("linear_key_head_dim"), sharing * number("linear_value_head_dim"));
        self.config["model_type"] = json!("qwen3_next");
        self.config["num_experts"] = json!(0);
        for layer in 0..3 {
            let name = |own: &str| format!("model.layers.{layer}.linear_attn.{own}.weight");
            let mut take = |own: &str| self.tensors.remove(&name(own)).unwrap();
            let [(shape, qkv), (_, z), (_, b), (_, a)] =
                ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"].map(&mut take);
            let bytes = 4 * shape[1];
            let rows =
                |of: &[u8], start: usize, count: usize| of[start * bytes..(start + count) * bytes].to_vec();
            let (mut qkvz, mut ba) = (Vec::new(), Vec::new());
            for head in 0..heads {
                qkvz.extend(rows(&qkv, head * dk, dk));
                qkvz.extend(rows(&qkv, heads * dk + head * dk, dk));
                qkvz.extend(rows(&qkv, 2 * heads * dk + head * dv, dv));
                qkvz.extend(rows(&z, head * dv, dv));
                ba.extend(rows(&b, head * sharing, sharing));
                ba.extend(rows(&a, head * sharing, sharing));
            }
            for (own, data) in [("in_proj_qkvz", qkvz), ("in_proj_ba", ba)] {
                self.tensors.insert(name(own), (vec![data.len() / bytes, shape[1]], data));
            }
        }
        self
    }
}

/// The language model of a model that also sees, with the parts that are left out.
#[test]
fn the_text_part_of_a_larger_model_is_read() {
    for name in ["qwen3_5", "qwen3_5_grouped"] {
        let (rows, wanted) = expected(&fixture(name));
        let mut copy = Copy::of(name).nested();
        let tied = copy.config["tie_word_embeddings"].as_bool().unwrap();
        let case = copy.load().unwrap();
        let found = case.forward(Batch { ids: &rows.concat(), rows: 2 }, &case.model.policy());
        assert_close(name, &found, &wanted, 5e-5);
        copy.config["tie_word_embeddings"] = json!(!tied);
        assert!(copy.load().err().unwrap().to_string().contains("tie_word_embeddings"));
    }
}

/// Qwen3-Next's arrangement of the same projections.
#[test]
fn projections_fused_by_head_are_taken_apart() {
    for name in ["qwen3_5", "qwen3_5_grouped"] {
        let (rows, wanted) = expected(&fixture(name));
        let mut copy = Copy::of(name).fused();
        let case = copy.load().unwrap();
        let found = case.forward(Batch { ids: &rows.concat(), rows: 2 }, &case.model.policy());
        assert_close(name, &found, &wanted, 5e-5);
        copy.config["num_experts"] = json!(8);
        assert!(copy.load().err().unwrap().to_string().contains("num_experts"));
    }
}

/// What is written is a folder of this program, and computes the same.
#[test]
fn what_is_saved_is_ours() {
    let folder = fixture("qwen3_5_grouped");
    let (rows, wanted) = expected(&folder);
    let checkpoint = Checkpoint::open(&folder).unwrap();
    let case = load(&folder, &invariant());
    let temporary = tempfile::TempDir::new().unwrap();
    let path = temporary.path().join("ours");
    let numbers: Vec<Vec<f32>> = case.parameters.iter().map(|tensor| tensor.to_f32()).collect();
    march_lm::checkpoint::save(&path, checkpoint.config(), case.model.layout(), usize::MAX, |i| {
        Ok(numbers[i].clone())
    })
    .unwrap();
    let ours = load(&path, &invariant());
    assert_eq!(ours.model.config().mixer, case.model.config().mixer);
    let found = ours.forward(Batch { ids: &rows.concat(), rows: 2 }, &ours.model.policy());
    assert_close("saved", &found, &wanted, 5e-5);
    let fingerprint = |folder: &Path, case: &Case| {
        case.model.checkpoint_fingerprint(&Checkpoint::open(folder).unwrap()).unwrap()
    };
    assert_eq!(fingerprint(&path, &ours), ours.model.fingerprint(&ours.parameters).unwrap());
    assert_eq!(fingerprint(&folder, &case), case.model.fingerprint(&case.parameters).unwrap());
}

/// Weights in bf16 that stay in the file compute what the same weights packed by the program do.
#[test]
fn mapped_weights_are_the_packed_ones() {
    let mut copy = Copy::of("qwen3_5");
    let (rows, _) = expected(&fixture("qwen3_5"));
    let path = copy.folder.path().to_path_buf();
    // The matrices in bf16, the rest in f32, as such checkpoints have it.
    let mut halves: BTreeMap<String, (Vec<usize>, Vec<u8>)> = BTreeMap::new();
    for (name, (shape, bytes)) in &copy.tensors {
        let upper: Vec<u8> = bytes.chunks(4).flat_map(|number| [number[2], number[3]]).collect();
        halves.insert(name.clone(), (shape.clone(), upper));
    }
    copy.config["dtype"] = json!("bfloat16");
    fs::write(path.join("config.json"), copy.config.to_string()).unwrap();
    let views = halves.iter().map(|(name, (shape, bytes))| {
        (name, safetensors::tensor::TensorView::new(safetensors::Dtype::BF16, shape.clone(), bytes).unwrap())
    });
    fs::write(path.join("model.safetensors"), safetensors::serialize(views, None).unwrap()).unwrap();
    let checkpoint = Checkpoint::open(&path).unwrap();
    assert!(checkpoint.precision(&invariant()) == Precision::Bf16);
    let (model, mapped) = Model::load_in(&invariant(), &checkpoint, Precision::Bf16).unwrap();
    let (_, whole) = Model::load(&invariant(), &checkpoint).unwrap();
    let packed = model.quantize(whole, Precision::Bf16).unwrap();
    let logits = |parameters| {
        let case = Case { model: model.clone(), parameters };
        case.forward(Batch::one(&rows[0]), &case.model.policy())
    };
    assert!(logits(mapped) == logits(packed));
}

/// Llama and Qwen3 have attention in every layer; their keys and names are read.
#[test]
fn transformers_of_other_tools_are_read() {
    let read = |keys: Value| ModelConfig::from_json(&keys.to_string(), "config.json");
    let llama = json!({
        "model_type": "llama", "vocab_size": 90, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "tie_word_embeddings": true,
        "rope_theta": 100000, "hidden_act": "silu", "max_position_embeddings": 8192, "attention_bias": false,
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    });
    let config = read(llama.clone()).unwrap();
    let keys = config.mixer.attention().unwrap();
    assert_eq!((keys.num_heads, keys.num_kv_heads, keys.rope_theta), (4, Some(2), 100_000.0));
    assert_eq!(config.norm_eps, 1e-5);
    assert!(format!("{:?}", keys.rotary_scaling).contains("original_max_position_embeddings: 8192"));
    let written = ModelConfig::from_json(&config.to_json(), "again").unwrap();
    assert_eq!(written.mixer, config.mixer);
    for (key, value) in [
        ("mlp_bias", json!(true)),
        ("hidden_act", json!("gelu")),
        ("rope_scaling", json!({"rope_type": "yarn", "factor": 4.0})),
        ("rope_scaling", json!({"rope_type": "linear"})),
        ("num_key_value_heads", json!(3)),
        ("quantization_config", json!({"bits": 4})),
        ("logit_scale", json!(2)),
    ] {
        let mut other = llama.clone();
        other[key] = value;
        assert!(read(other).unwrap_err().to_string().contains(key));
    }
    let mut qwen3 = llama;
    qwen3["model_type"] = json!("qwen3");
    qwen3["head_dim"] = json!(16);
    qwen3["rope_scaling"] = Value::Null;
    let keys = read(qwen3.clone()).unwrap().mixer.attention().unwrap().clone();
    assert!(keys.qk_norm && keys.qk_norm_eps == 1e-5 && keys.head_width == Some(16));
    qwen3["use_sliding_window"] = json!(true);
    qwen3["sliding_window"] = json!(64);
    qwen3["max_window_layers"] = json!(1);
    assert!(read(qwen3.clone()).unwrap_err().to_string().contains("max_window_layers"));
    qwen3["max_window_layers"] = json!(0);
    assert_eq!(read(qwen3).unwrap().mixer.attention().unwrap().window_size, Some(64));
}
