//! Checks of an engine against the golden checkpoints: logits, routing weights, other policies, gradients, and six steps
//! of AdamW. A test includes it beside `common`.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use march::anchors::{Policy, Retention};
use march::checkpoint::Checkpoint;
use march::engine::ops::adamw::{AdamW, Step, clip_factor};
use march::engine::{Engine, Tape};
use march::model::{Batch, Model, Settings, Trace};
use safetensors::SafeTensors;
use serde_json::Value;

use crate::common::{Case, assert_close, golden};

/// Every golden checkpoint.
pub const NAMES: [&str; 5] = ["transformer", "gated_deltanet", "log_linear", "march", "march_topk"];

/// The tensors of a file of f32.
fn tensors(name: &str, file: &str) -> BTreeMap<String, (Vec<usize>, Vec<f64>)> {
    let bytes = std::fs::read(golden(name).join(file)).unwrap();
    let number = |b: &[u8]| f64::from(f32::from_le_bytes([b[0], b[1], b[2], b[3]]));
    let read = SafeTensors::deserialize(&bytes).unwrap();
    read.iter()
        .map(|(name, view)| {
            (name.to_string(), (view.shape().to_vec(), view.data().chunks_exact(4).map(number).collect()))
        })
        .collect()
}

fn json(name: &str, file: &str) -> Value {
    serde_json::from_slice(&std::fs::read(golden(name).join(file)).unwrap()).unwrap()
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

fn open<'e, E: Engine>(engine: &'e E, name: &str) -> Case<'e, E> {
    let checkpoint = Checkpoint::open(&golden(name)).unwrap();
    let (model, parameters) = Model::load(engine, &checkpoint).unwrap();
    Case { engine, model, parameters }
}

/// Logits under the checkpoint's own policy and the others of the fixture, from the forward pass and from a bank,
/// and the routing weights of both. A bank gets the tokens in calls of the given sizes.
pub fn logits<E: Engine>(engine: &E, names: &[&str], calls: &[&[usize]]) {
    for &name in names {
        let case = open(engine, name);
        let tokens = ids(&json(name, "tokens.json"));
        let expected = tensors(name, "expected.safetensors");
        let own = case.model.policy();
        let policies = [
            ("logits", own.clone()),
            ("logits.interval_20", Policy { interval: Some(20), ..own.clone() }),
            ("logits.top_k_2", Policy { top_k: Some(2), ..own.clone() }),
            ("logits.fenwick", Policy { retention: Retention::Fenwick, ..own.clone() }),
        ];
        let mut compared = 0;
        for (key, policy) in policies {
            let Some((_, want)) = expected.get(key) else { continue };
            compared += 1;
            let label = format!("{name} {key}");
            assert_close(&label, &case.forward(Batch::one(&tokens), &policy), want, 1e-4);
            for calls in calls {
                let label = format!("{label}, calls of {calls:?}");
                assert_close(&label, &case.extend(&tokens, &policy, calls), want, 1e-4);
            }
        }
        assert_eq!(compared, if name.starts_with("march") { 4 } else { 1 });
        let Some((shape, _)) = expected.get("routing_weights.0") else { continue };
        let (heads, anchors) = (shape[1], shape[2]);
        for calls in [None, Some(150), Some(1), Some(11)] {
            let trace = Arc::new(Mutex::new(Trace::default()));
            let tape = Tape::inference(engine);
            let weights = case.model.bind(&tape, &case.parameters);
            match calls {
                None => {
                    let settings = Settings { policy: own.clone(), recompute: false };
                    let batch = Batch::one(&tokens);
                    case.model.forward(&tape, &weights, batch, &settings, Some(&trace)).unwrap();
                }
                Some(size) => {
                    let mut bank = case.model.bank(own.clone()).unwrap();
                    for part in tokens.chunks(size) {
                        let batch = Batch::one(part);
                        case.model.extend(&tape, &weights, batch, &mut [&mut bank], Some(&trace)).unwrap();
                    }
                }
            }
            for layer in 0..3 {
                let (found, got) = trace.lock().unwrap().weights(engine, layer, tokens.len(), anchors);
                assert_eq!(found, heads);
                let got: Vec<f64> = got.into_iter().map(f64::from).collect();
                let want = &expected[&format!("routing_weights.{layer}")].1;
                assert_close(&format!("{name} routing weights of layer {layer}"), &got, want, 1e-4);
            }
        }
    }
}

/// The gradient of every parameter.
pub fn gradients<E: Engine>(engine: &E, names: &[&str]) {
    for &name in names {
        let case = open(engine, name);
        let tokens = ids(&json(name, "tokens.json"));
        let expected = tensors(name, "gradients.safetensors");
        let (inputs, targets) = (&tokens[..tokens.len() - 1], &tokens[1..]);
        for recompute in [false, true] {
            let settings = Settings { policy: case.model.policy(), recompute };
            let (_, gradients) = case.gradients(Batch::one(inputs), targets, &settings);
            assert_eq!(case.model.layout().len(), expected.len());
            for (spec, gradient) in case.model.layout().iter().zip(gradients) {
                let (shape, want) = &expected[&spec.name];
                assert_eq!(&spec.shape, shape);
                let gradient = gradient.unwrap_or_else(|| panic!("{name}: no gradient for {}", spec.name));
                assert_close(&format!("{name} {}", spec.name), &engine.to_f64(&gradient), want, 1e-3);
            }
        }
    }
}

/// The losses of six steps of AdamW.
pub fn training<E: Engine>(engine: &E, names: &[&str]) {
    for &name in names {
        let mut case = open(engine, name);
        let run = json(name, "training.json");
        let number = |value: &Value| value.as_f64().unwrap();
        let settings = Settings { policy: case.model.policy(), recompute: false };
        let zeros = |case: &Case<'_, E>| -> Vec<E::Tensor> {
            case.model.layout().iter().map(|spec| engine.full(&spec.shape, 0.0).unwrap()).collect()
        };
        let (mut first, mut second) = (zeros(&case), zeros(&case));
        for (step, batch) in run["batches"].as_array().unwrap().iter().enumerate() {
            let rows: Vec<Vec<u32>> = batch.as_array().unwrap().iter().map(ids).collect();
            let inputs: Vec<u32> = rows.iter().flat_map(|row| row[..64].to_vec()).collect();
            let targets: Vec<u32> = rows.iter().flat_map(|row| row[1..].to_vec()).collect();
            let (loss, gradients) = case.gradients(Batch { ids: &inputs, rows: 2 }, &targets, &settings);
            let want = number(&run["losses"][step]);
            assert!((loss - want).abs() < 1e-4, "{name} step {step}: loss {loss}, {want} expected");
            let squared = engine.squared_norm(&gradients.iter().flatten().collect::<Vec<_>>()).unwrap();
            let want = number(&run["gradient_norms"][step]);
            assert!((squared.sqrt() / want - 1.0).abs() < 1e-3, "{name} step {step}: gradient norm");
            for (i, gradient) in gradients.iter().enumerate() {
                let decayed = case.model.layout()[i].shape.len() >= 2;
                let settings = Step {
                    learning_rate: number(&run["learning_rates"][step]),
                    betas: [number(&run["betas"][0]), number(&run["betas"][1])],
                    eps: number(&run["eps"]),
                    weight_decay: if decayed { number(&run["weight_decay"]) } else { 0.0 },
                    clip: clip_factor(squared, number(&run["clip_norm"])),
                    step: step as u64 + 1,
                };
                let state = AdamW {
                    parameter: &mut case.parameters[i],
                    first_moment: &mut first[i],
                    second_moment: &mut second[i],
                };
                engine.adamw(state, gradient.as_ref().unwrap(), &settings).unwrap();
            }
        }
    }
}

/// Tokens that come one by one give the logits of all at once, closer than either need be to the expected ones.
pub fn decoding<E: Engine>(engine: &E, names: &[&str]) {
    for &name in names {
        let case = open(engine, name);
        let tokens = ids(&json(name, "tokens.json"));
        let policy = case.model.policy();
        let whole = case.forward(Batch::one(&tokens), &policy);
        assert_close(&format!("{name}, decoded"), &case.extend(&tokens, &policy, &[1]), &whole, 1e-5);
    }
}
