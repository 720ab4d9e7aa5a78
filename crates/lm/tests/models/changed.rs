//! Checkpoints whose keys or tensors are dropped, renamed or changed: what cannot be computed is refused by name, and what
//! is accepted computes the same. A key that has another valid value describes another model, which no test can refuse.

use march_lm::model::Batch;
use proptest::prelude::*;
use serde_json::{Map, Value, json};

use super::{Copy, fixture};
use crate::common::{golden, tokens};

/// Keys that a model computes with and whose value the tensors do not show, with the value that its class has for a
/// missing one.
const COMPUTED_WITH: [(&str, fn() -> Value); 6] = [
    ("rope_parameters", || json!({"rope_theta": 10_000.0})),
    ("rms_norm_eps", || json!(1e-6)),
    ("norm_eps", || json!(1e-6)),
    ("rope_theta", || json!(10_000.0)),
    ("window_size", || json!(null)),
    ("sliding_window", || json!(4096)),
];

/// Other such keys, of which another value may fit the tensors.
const NOT_IN_TENSORS: [&str; 5] =
    ["num_heads", "num_attention_heads", "num_hidden_layers", "max_window_layers", "factor"];

/// A model of attention alone, with these keys and tensors' names for each layer.
fn attention(keys: Value, names: &[(&str, &str)]) -> Copy {
    let mut copy = Copy::at(&golden("transformer"));
    copy.config = keys;
    let rename =
        |name: String| names.iter().fold(name, |name, (ours, theirs)| name.replacen(ours, theirs, 1));
    copy.tensors = std::mem::take(&mut copy.tensors).into_iter().map(|(n, t)| (rename(n), t)).collect();
    copy
}

const LLAMA: [(&str, &str); 4] = [
    ("embeddings", "embed_tokens"),
    ("mlp_norm", "post_attention_layernorm"),
    ("attn_norm", "input_layernorm"),
    (".attn.", ".self_attn."),
];

impl Copy {
    /// Adds a tensor to each layer.
    fn with(mut self, name: &str, shape: &[usize]) -> Self {
        let count: usize = shape.iter().product();
        for layer in 0..3 {
            let numbers = (0..count).map(|n| 0.5 + ((n * 7 + layer) % 11) as f32 / 10.0);
            let bytes = numbers.flat_map(f32::to_le_bytes).collect();
            self.tensors.insert(format!("model.layers.{layer}.{name}"), (shape.to_vec(), bytes));
        }
        self
    }
}

/// One small checkpoint of each architecture.
fn all() -> Vec<(&'static str, Copy)> {
    let llama = json!({
        "model_type": "llama", "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 4, "rms_norm_eps": 1e-5, "tie_word_embeddings": false,
        "rope_theta": 500_000.0, "rope_scaling": null, "hidden_act": "silu", "attention_bias": true, "mlp_bias": false,
        "max_position_embeddings": 512, "torch_dtype": "float32", "use_cache": true, "bos_token_id": 1,
    });
    let qwen3 = json!({
        "model_type": "qwen3", "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8, "rms_norm_eps": 1e-5,
        "tie_word_embeddings": false, "hidden_act": "silu", "attention_bias": false, "use_sliding_window": true,
        "sliding_window": 6, "max_window_layers": 0, "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention"],
        "rope_parameters": {"rope_type": "linear", "rope_theta": 500_000.0, "factor": 2.0},
    });
    let transformer = json!({
        "model_type": "transformer", "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 3, "num_heads": 4, "norm_eps": 1e-5, "tie_word_embeddings": false, "hidden_act": "swish",
        "rope_theta": 500_000.0, "qk_norm": true, "qkv_bias": true, "window_size": 6,
    });
    let mut hybrid = Copy::at(&golden("gated_deltanet"));
    hybrid.config["attn"] = json!({"layers": [1], "num_heads": 4, "rope_theta": 500_000.0, "window_size": 6});
    hybrid.tensors.retain(|name, _| !name.starts_with("model.layers.1.attn."));
    for (name, tensor) in Copy::at(&golden("transformer")).tensors {
        if name.starts_with("model.layers.1.attn.") {
            hybrid.tensors.insert(name, tensor);
        }
    }
    let biases = ["q_proj", "k_proj", "v_proj", "o_proj"];
    let biased = |copy: Copy, part: &str, count: usize| {
        biases[..count].iter().fold(copy, |copy, name| copy.with(&format!("{part}.{name}.bias"), &[32]))
    };
    let norms = |copy: Copy, part: &str| {
        ["q_norm", "k_norm"].iter().fold(copy, |copy, name| copy.with(&format!("{part}.{name}.weight"), &[8]))
    };
    vec![
        ("qwen3_5", Copy::at(&fixture("qwen3_5"))),
        ("qwen3_5_grouped", Copy::at(&fixture("qwen3_5_grouped"))),
        ("nested", Copy::at(&fixture("qwen3_5_grouped")).nested()),
        ("qwen3_next", Copy::at(&fixture("qwen3_5_grouped")).fused()),
        ("llama", biased(attention(llama, &LLAMA), "self_attn", 4)),
        ("qwen3", norms(attention(qwen3, &LLAMA), "self_attn")),
        ("fla gated_deltanet", Copy::at(&golden("gated_deltanet"))),
        ("fla hybrid", hybrid),
        ("fla transformer", norms(biased(attention(transformer, &[]), "attn", 3), "attn")),
    ]
}

impl Copy {
    /// The logits of a text, or the error.
    fn logits(&self) -> Result<Vec<f64>, String> {
        let case = self.load().map_err(|error| error.to_string())?;
        Ok(case.forward(Batch::one(&tokens(24, 61, 3)), &case.model.policy()))
    }

    /// The object that holds a key: the configuration, or one in it.
    fn object(&mut self, place: &str) -> &mut Map<String, Value> {
        let object = match place {
            "" => &mut self.config,
            place => self.config.pointer_mut(place).unwrap(),
        };
        object.as_object_mut().unwrap()
    }

    /// All keys, with the objects that hold them.
    fn keys(&self) -> Vec<(&'static str, String)> {
        let places = ["", "/rope_parameters", "/attn", "/text_config", "/text_config/rope_parameters"];
        let keys = |place: &&'static str| {
            let object = if place.is_empty() { Some(&self.config) } else { self.config.pointer(place) };
            let keys = object.and_then(Value::as_object).into_iter().flat_map(Map::keys).cloned();
            keys.map(|key| (*place, key)).collect::<Vec<_>>()
        };
        places.iter().flat_map(keys).collect()
    }
}

/// What is wrong if a changed model is neither refused with one of these names nor computes what the original does.
fn wrong(what: &str, changed: &Copy, names: &[&str], wanted: &[f64]) -> Option<String> {
    match changed.logits() {
        Ok(found) => (found != wanted).then(|| format!("{what}: another result")),
        // A key that is wrong for the tensors is reported as the tensor that it is wrong for.
        Err(error) => {
            let named = names.iter().any(|name| error.contains(name)) || error.contains("tensor");
            (!named).then(|| format!("{what}: the error does not name it: {error}"))
        }
    }
}

fn none(wrong: Vec<String>) {
    assert!(wrong.is_empty(), "{} are wrong:\n{}", wrong.len(), wrong.join("\n"));
}

#[test]
fn a_key_that_is_dropped_or_renamed_is_refused_or_makes_no_difference() {
    let mut all_wrong = Vec::new();
    for (kind, original) in all() {
        let wanted = original.logits().unwrap_or_else(|error| panic!("{kind}: {error}"));
        for (place, key) in original.keys() {
            let mut changed = original.clone();
            let value = changed.object(place).remove(&key).unwrap();
            let default = COMPUTED_WITH.iter().find(|(name, _)| *name == key);
            match (default, changed.logits()) {
                (Some((_, default)), Ok(found)) if found != wanted => {
                    let mut explicit = original.clone();
                    explicit.object(place).insert(key.clone(), default());
                    if explicit.logits() != Ok(found) {
                        all_wrong.push(format!("{kind} without {place} {key}: not its default"));
                    }
                }
                _ => all_wrong.extend(wrong(
                    &format!("{kind} without {place} {key}"),
                    &changed,
                    &[&key],
                    &wanted,
                )),
            }
            let renamed = format!("{key}s_");
            changed.object(place).insert(renamed.clone(), value);
            let what = format!("{kind} with {place} {renamed} for {key}");
            all_wrong.extend(wrong(&what, &changed, &[&renamed, &key], &wanted));
        }
    }
    none(all_wrong);
}

#[test]
fn a_value_of_another_kind_is_refused_or_makes_no_difference() {
    let mut all_wrong = Vec::new();
    let values =
        [json!("many"), json!(-1), json!(0), json!(2.5), json!(true), json!([]), json!([1]), json!({"a": 1})];
    for (kind, original) in all() {
        let wanted = original.logits().unwrap();
        for (place, key) in original.keys() {
            let mut changed = original.clone();
            let own = changed.object(place)[&key].clone();
            let more = own.as_u64().map(|number| json!(number + 1));
            for value in values.iter().chain(&more).filter(|value| !(own.is_object() && value.is_object())) {
                let described = COMPUTED_WITH.iter().any(|(name, _)| *name == key)
                    || NOT_IN_TENSORS.contains(&key.as_str());
                changed.object(place).insert(key.clone(), value.clone());
                if described && value.is_number() && changed.logits().is_ok() {
                    continue;
                }
                let what = format!("{kind} with {place} {key} = {value}");
                all_wrong.extend(wrong(&what, &changed, &[&key], &wanted));
            }
        }
    }
    none(all_wrong);
}

#[test]
fn a_tensor_that_is_dropped_renamed_or_of_another_shape_is_refused_by_name() {
    for (kind, original) in all() {
        let wanted = original.logits().unwrap();
        let mut all_wrong = Vec::new();
        for name in original.tensors.keys() {
            let left_out = name.starts_with("mtp.") || name.contains(".visual.");
            let mut refused = |what: &str, change: &dyn Fn(&mut Copy)| {
                let mut changed = original.clone();
                change(&mut changed);
                match changed.logits() {
                    Ok(found) if left_out && found == wanted => {}
                    Ok(_) => all_wrong.push(format!("{kind} with {what} {name} loads")),
                    Err(error) if error.contains(name.as_str()) => {}
                    Err(error) => all_wrong.push(format!("{kind}, {what} {name}: {error}")),
                }
            };
            refused("without", &|copy| drop(copy.tensors.remove(name)));
            refused("renamed", &|copy| {
                let tensor = copy.tensors.remove(name).unwrap();
                copy.tensors.insert(format!("{name}_"), tensor);
            });
            refused("one row less of", &|copy| {
                let (shape, bytes) = copy.tensors.get_mut(name).unwrap();
                bytes.truncate(bytes.len() / shape[0] * (shape[0] - 1));
                shape[0] -= 1;
            });
            refused("one more dimension of", &|copy| copy.tensors.get_mut(name).unwrap().0.insert(0, 1));
            refused("no finite number in", &|copy| {
                let bytes = &mut copy.tensors.get_mut(name).unwrap().1;
                bytes[..4].copy_from_slice(&f32::NAN.to_le_bytes());
            });
        }
        none(all_wrong);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 100, ..ProptestConfig::default() })]

    /// Several such changes together.
    #[test]
    fn several_changes_are_refused_or_make_no_difference(
        kind in 0..9usize,
        changes in prop::collection::vec((any::<prop::sample::Index>(), 0..4u8), 2..5),
    ) {
        let (kind, original) = all().swap_remove(kind);
        let wanted = original.logits().unwrap();
        let mut changed = original.clone();
        let mut names = Vec::new();
        for (index, how) in changes {
            let keys: Vec<_> = changed.keys().into_iter().filter(|(_, key)| {
                !COMPUTED_WITH.iter().any(|(name, _)| name == key)
            }).collect();
            let tensors: Vec<String> = changed.tensors.keys().cloned().collect();
            match how {
                0 | 1 if !keys.is_empty() => {
                    let (place, key) = index.get(&keys).clone();
                    let value = changed.object(place).remove(&key).unwrap();
                    if how == 1 {
                        changed.object(place).insert(format!("_{key}"), value);
                    }
                    names.push(key);
                }
                _ => {
                    let name = index.get(&tensors).clone();
                    let tensor = changed.tensors.remove(&name).unwrap();
                    if how == 3 {
                        changed.tensors.insert(format!("{name}2"), tensor);
                    }
                    names.push(name);
                }
            }
        }
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        none(wrong(&format!("{kind} with changes of {names:?}"), &changed, &names, &wanted).into_iter().collect());
    }
}
