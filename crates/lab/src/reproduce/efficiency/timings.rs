//! Times of the operations and of training steps, on random inputs.

use std::sync::Arc;

use march_engine::ops::anchor_read::{AnchorRead, AnchorReadOptions};
use march_engine::ops::attention::Attention;
use march_engine::ops::gated_delta::{GatedDelta, GatedDeltaGradient, GatedDeltaOptions};
use march_engine::{Cpu, Engine, Tensor};

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
    fn tensor(&mut self, engine: &Cpu, shape: &[usize], mean: f32, scale: f32) -> Result<Tensor<f32>> {
        let count = shape.iter().product();
        let unit = |bits: u64| bits as f32 / (1u64 << 30) as f32 - 1.0;
        let data: Vec<f32> = (0..count).map(|_| mean + scale * unit(self.next())).collect();
        Ok(engine.from_f32(&data, shape)?)
    }
}

impl EfficiencyPlan {
    /// The time of an arm's operations, forward and backward, on one sequence.
    pub(super) fn core_time(&self, engine: &Cpu, arm: Arm, length: usize) -> Result<(f64, usize)> {
        if arm == Arm::Attention {
            return self.attention_time(engine, length);
        }
        let core = &self.core;
        let (heads, random) = (core.heads, &mut Random(length as u64));
        let mut wide = |width: usize, mean: f32, scale: f32| {
            random.tensor(engine, &[1, length, heads * width], mean, scale)
        };
        let (query, key) = (wide(core.head_dim_k, 0.0, 1.0)?, wide(core.head_dim_k, 0.0, 1.0)?);
        let (value, gradient) = (wide(core.head_dim_v, 0.0, 1.0)?, wide(core.head_dim_v, 0.0, 1.0)?);
        let (retention_input, write_input) = (wide(1, 0.0, 0.5)?, wide(1, 0.0, 1.0)?);
        let (routing_query, null_score) = (wide(core.routing_dim, 0.0, 0.5)?, wide(1, 0.0, 1.0)?);
        // Decays as a new layer has them: α = exp(−4 · softplus(−4.6)) ≈ 0.96.
        let a_log = random.tensor(engine, &[heads], 1.4, 0.5)?;
        let dt_bias = random.tensor(engine, &[heads], -4.6, 0.5)?;
        let (boundaries, plan) = if arm.anchored() { self.read_plan(length) } else { Default::default() };
        let routing_keys = random.tensor(engine, &[boundaries.len(), heads * core.routing_dim], 0.0, 0.5)?;
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
            let (mut out, kept) = engine.gated_delta(input, &options, true)?;
            let upstream =
                GatedDeltaGradient { readout: Some(&gradient), final_state: None, boundary_states: None };
            if read_options.plan.segments.is_empty() {
                engine.gated_delta_backward(input, &options, &kept, upstream)?;
                return Ok(());
            }
            let read = AnchorRead {
                query: &query,
                routing_query: &routing_query,
                routing_keys: &routing_keys,
                anchor_states: &out.boundary_states,
                null_score: Some(&null_score),
            };
            let (history, read_kept) = engine.anchor_read(read, &read_options, true)?;
            engine.accumulate(&mut out.readout, &history)?;
            let d_read =
                engine.anchor_read_backward(read, &read_options, &history, read_kept.as_ref(), &gradient)?;
            drop((history, read_kept));
            let upstream = GatedDeltaGradient { boundary_states: Some(&d_read.anchor_states), ..upstream };
            let mut d = engine.gated_delta_backward(input, &options, &kept, upstream)?;
            engine.accumulate(&mut d.query, &d_read.query)?;
            Ok(())
        })
    }

    fn attention_time(&self, engine: &Cpu, length: usize) -> Result<(f64, usize)> {
        let (heads, random) = (self.core.attention_heads, &mut Random(length as u64));
        let mut wide = || random.tensor(engine, &[1, length, heads * self.core.attention_head_dim], 0.0, 1.0);
        let (query, key, value, gradient) = (wide()?, wide()?, wide()?, wide()?);
        let input = Attention { query: &query, key: &key, value: &value };
        self.best(|| {
            let (_, saved) = engine.attention(input, heads, true)?;
            engine.attention_backward(input, heads, &saved, &gradient)?;
            Ok(())
        })
    }

    /// The time of a training step.
    pub(super) fn step_time(&self, engine: &Cpu, arm: Arm, length: usize) -> Result<(f64, usize)> {
        let rows = self.rows(length);
        let random = &mut Random(length as u64);
        let tokens =
            (0..=rows * length).map(|_| (random.next() % self.model.vocabulary as u64) as u32).collect();
        let mut loader = Loader::new(Box::new(TextSource::new(tokens, length)?), None)?;
        let model: Model<Cpu> = Model::new(&self.model_config(arm)?);
        let parameters = model.init(engine, 1)?;
        let settings = Settings { policy: model.policy(), recompute: false };
        let config = TrainConfig {
            tokens_per_step: rows * length,
            micro_batch: rows,
            learning_rate: 1e-4,
            schedule: Schedule::Constant,
            warmup: 0.0,
            ..TrainConfig::default()
        };
        let mut trainer = Trainer::new(engine, model, parameters, settings, config, length)?;
        // Recomputes activations where the memory is short.
        trainer.plan_memory(engine, machine_memory().map(|[_, available]| available))?;
        engine.trim();
        self.best(|| trainer.advance(&mut loader).map(drop))
    }

    /// The model of an arm.
    pub(super) fn model_config(&self, arm: Arm) -> Result<ModelConfig> {
        let core = &self.core;
        let mut keys = serde_json::json!({
            "vocab_size": self.model.vocabulary,
            "hidden_size": core.attention_heads * core.attention_head_dim,
            "num_hidden_layers": self.model.layers,
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
