//! Times of the operations and of training steps, on random inputs.

use std::sync::Arc;

use march_engine::ops::anchor_read::{AnchorRead, AnchorReadOptions};
use march_engine::ops::attention::Attention;
use march_engine::ops::gated_delta::{GatedDelta, GatedDeltaOptions};
use march_engine::{Device, Tape, Tensor};

use super::{Arm, EfficiencyPlan};
use march_lm::Result;
use march_lm::data::{Loader, TextSource};
use march_lm::model::{Model, ModelConfig, Settings};
use march_lm::train::{Schedule, TrainConfig, Trainer, machine_memory};

/// Random numbers; the same in every run.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.0 >> 33
    }

    /// A tensor of numbers between ±scale around a mean.
    fn tensor(&mut self, device: &Device, shape: &[usize], mean: f32, scale: f32) -> Result<Tensor> {
        let count = shape.iter().product();
        let unit = |bits: u64| bits as f32 / (1u64 << 30) as f32 - 1.0;
        let data: Vec<f32> = (0..count).map(|_| mean + scale * unit(self.next())).collect();
        Ok(Tensor::from_slice(&data, shape, device)?)
    }
}

/// The tensors as parameters of a tape.
fn parameters<const N: usize>(tape: &Tape, tensors: [&Tensor; N]) -> [Tensor; N] {
    tensors.map(|tensor| tape.parameter(0, tensor))
}

impl EfficiencyPlan {
    /// The time of an arm's operations, forward and backward, on one sequence.
    pub(super) fn core_time(&self, device: &Device, arm: Arm, length: usize) -> Result<(f64, usize)> {
        if arm == Arm::Attention {
            return self.attention_time(device, length);
        }
        let core = &self.core;
        let (heads, random) = (core.heads, &mut Random(length as u64));
        let mut wide = |width: usize, mean: f32, scale: f32| {
            random.tensor(device, &[1, length, heads * width], mean, scale)
        };
        let (query, key) = (wide(core.head_dim_k, 0.0, 1.0)?, wide(core.head_dim_k, 0.0, 1.0)?);
        let (value, gradient) = (wide(core.head_dim_v, 0.0, 1.0)?, wide(core.head_dim_v, 0.0, 1.0)?);
        let (retention_input, write_input) = (wide(1, 0.0, 0.5)?, wide(1, 0.0, 1.0)?);
        let (routing_query, null_score) = (wide(core.routing_dim, 0.0, 0.5)?, wide(1, 0.0, 1.0)?);
        // Decays as a new layer has them: α = exp(−4 · softplus(−4.6)) ≈ 0.96.
        let a_log = random.tensor(device, &[heads], 1.4, 0.5)?;
        let dt_bias = random.tensor(device, &[heads], -4.6, 0.5)?;
        let (boundaries, plan) = if arm.anchored() { self.read_plan(length) } else { Default::default() };
        let routing_keys = random.tensor(device, &[boundaries.len(), heads * core.routing_dim], 0.0, 0.5)?;
        let options = GatedDeltaOptions {
            key_heads: heads,
            value_heads: heads,
            allow_neg_eigval: false,
            boundaries: Arc::new(vec![boundaries]),
            final_state: false,
            chunk_offset: 0,
        };
        let read_options = AnchorReadOptions {
            key_heads: heads,
            value_heads: heads,
            top_k: arm.top_k(),
            routing_scale: 1.0,
            plan: Arc::new(plan),
        };
        self.best(|| {
            let tape = Tape::new();
            let [query, key, value, retention_input, write_input, a_log, dt_bias] =
                parameters(&tape, [&query, &key, &value, &retention_input, &write_input, &a_log, &dt_bias]);
            let input = GatedDelta {
                query: &query,
                key: &key,
                value: &value,
                retention_input: &retention_input,
                write_input: &write_input,
                a_log: &a_log,
                dt_bias: &dt_bias,
                initial_state: None,
            };
            let out = input.gated_delta(&options)?;
            let mut readout = out.readout;
            if !read_options.plan.segments.is_empty() {
                let [routing_query, routing_keys, null_score] =
                    parameters(&tape, [&routing_query, &routing_keys, &null_score]);
                let read = AnchorRead {
                    query: &query,
                    routing_query: &routing_query,
                    routing_keys: &routing_keys,
                    anchor_states: &out.boundary_states,
                    null_score: Some(&null_score),
                };
                readout = (&readout + &read.anchor_read(&read_options)?)?;
            }
            Ok(tape.backward_from(&[(&readout, gradient.clone())], |_, _| {})?)
        })
    }

    fn attention_time(&self, device: &Device, length: usize) -> Result<(f64, usize)> {
        let (heads, random) = (self.core.attention_heads, &mut Random(length as u64));
        let mut wide = || random.tensor(device, &[1, length, heads * self.core.attention_head_dim], 0.0, 1.0);
        let (query, key, value, gradient) = (wide()?, wide()?, wide()?, wide()?);
        self.best(|| {
            let tape = Tape::new();
            let [query, key, value] = parameters(&tape, [&query, &key, &value]);
            let readout = Attention { query: &query, key: &key, value: &value }.attention(heads)?;
            Ok(tape.backward_from(&[(&readout, gradient.clone())], |_, _| {})?)
        })
    }

    /// The time of a training step of a model with so many layers.
    pub(super) fn step_time(
        &self,
        device: &Device,
        arm: Arm,
        layers: usize,
        length: usize,
    ) -> Result<(f64, usize)> {
        let rows = self.rows(length);
        let random = &mut Random(length as u64);
        let tokens =
            (0..=rows * length).map(|_| (random.next() % self.model.vocabulary as u64) as u32).collect();
        let mut loader = Loader::new(Box::new(TextSource::new(tokens, length)?), None)?;
        let model = Model::new(&self.model_config(arm, layers)?);
        let parameters = model.init(device, 1)?;
        let settings = Settings { policy: model.policy(), ..Default::default() };
        let config = TrainConfig {
            tokens_per_step: rows * length,
            micro_batch: rows,
            learning_rate: 1e-4,
            schedule: Schedule::Constant,
            warmup: 0.0,
            ..TrainConfig::default()
        };
        let mut trainer = Trainer::new(model, parameters, settings, config, length)?;
        // Recomputes activations where the memory is short.
        trainer.plan_memory(device, None, machine_memory().map(|[_, available]| available))?;
        device.trim();
        self.best(|| trainer.advance(&mut loader).map(drop))
    }

    /// The model of an arm, with so many layers.
    pub(super) fn model_config(&self, arm: Arm, layers: usize) -> Result<ModelConfig> {
        let core = &self.core;
        let mut keys = serde_json::json!({
            "vocab_size": self.model.vocabulary,
            "hidden_size": core.attention_heads * core.attention_head_dim,
            "num_hidden_layers": layers,
            "intermediate_size": self.model.feed_forward,
            "norm_eps": 1e-6,
            "tie_word_embeddings": false,
            "initializer_range": 0.02,
        });
        let own = if arm == Arm::Attention {
            serde_json::json!({
                "model_type": "transformer",
                "num_heads": core.attention_heads,
                "rope_theta": 500_000.0,
            })
        } else {
            serde_json::json!({
                "model_type": if arm == Arm::Gdn { "gated_deltanet" } else { "march" },
                "num_heads": core.heads,
                "head_dim": core.head_dim_k,
                "expand_v": core.head_dim_v as f64 / core.head_dim_k as f64,
                "conv_size": 4,
            })
        };
        let routing = serde_json::json!({
            "anchor_interval": core.interval,
            "routing_dim": core.routing_dim,
            "routing_top_k": arm.top_k(),
        });
        for more in [Some(own), arm.anchored().then_some(routing)].into_iter().flatten() {
            if let (Some(keys), Some(more)) = (keys.as_object_mut(), more.as_object()) {
                keys.extend(more.clone());
            }
        }
        ModelConfig::from_json(&keys.to_string(), arm.name())
    }
}
