//! What the tests of the model share.

pub mod damage;

use std::path::PathBuf;

use march_lm::anchors::Policy;
use march_lm::engine::{CpuOptions, Device, Products, Tape, Tensor};
use march_lm::memory::StateBank;
use march_lm::model::{Batch, Model, ModelConfig, Parameters, Settings, Weights};

/// A fixture folder. Tests of other crates use it too.
pub fn golden(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../cli/golden").join(name)
}

/// The CPU as training uses it.
pub fn cpu() -> Device {
    Device::cpu(CpuOptions { threads: 2, ..Default::default() }).unwrap()
}

/// The CPU as inference uses it; one thread, because tests run side by side.
pub fn invariant() -> Device {
    Device::cpu(CpuOptions { threads: 1, products: Products::BatchInvariant, ..Default::default() }).unwrap()
}

/// The largest difference as a share of the largest wanted value.
pub fn error(got: &[f64], want: &[f64]) -> f64 {
    assert_eq!(got.len(), want.len());
    assert!(got.iter().all(|v| v.is_finite()), "a number that is not finite");
    let largest = want.iter().fold(0.0f64, |m, v| m.max(v.abs()));
    let difference = got.iter().zip(want).fold(0.0f64, |m, (a, b)| m.max((a - b).abs()));
    if largest == 0.0 { difference } else { difference / largest }
}

/// Fails with a name where [`error`] is above `limit`.
pub fn assert_close(name: &str, got: &[f64], want: &[f64], limit: f64) {
    let error = error(got, want);
    assert!(error <= limit, "{name}: differs by {error:.2e} of its largest value; {limit:.0e} is allowed");
}

/// A small model of each kind. Heads, widths and intervals that divide nothing.
pub const KINDS: [&str; 14] = [
    "transformer",
    "transformer_conv",
    "transformer_grouped",
    "gated_deltanet",
    "gated_deltanet_sigmoid",
    "log_linear_gated_deltanet",
    "march",
    "march_top_k",
    "march_no_null",
    "memory_caching",
    "memory_caching_top_k",
    "hybrid",
    "hybrid_anchors",
    "hybrid_all_anchors",
];

/// The configuration of a small model.
pub fn small(kind: &str) -> ModelConfig {
    let common = r#""vocab_size": 37, "hidden_size": 24, "num_hidden_layers": 3, "intermediate_size": 40,
        "norm_eps": 1e-6, "tie_word_embeddings": false, "initializer_range": 0.12"#;
    let recurrence = r#""num_heads": 2, "num_v_heads": 4, "head_dim": 6, "expand_v": 1.5, "conv_size": 4"#;
    let routing = r#""anchor_interval": 16, "routing_dim": 5"#;
    let attention = r#""attention_num_heads": 4, "attention_num_kv_heads": 2, "attention_head_width": 8,
        "attention_rope_theta": 10000, "attention_qk_norm": true, "attention_rotary_factor": 0.5,
        "attention_attn_output_gate": true"#;
    let march = r#""model_type": "march", "anchor_interval": 16, "routing_dim": 5"#;
    let caching = r#""model_type": "memory_caching", "anchor_interval": 16, "routing_dim": 5"#;
    let keys = match kind {
        "transformer" => r#""model_type": "transformer", "num_heads": 3, "rope_theta": 500000"#.to_string(),
        "transformer_conv" => {
            r#""model_type": "transformer", "num_heads": 3, "rope_theta": 500000, "conv_size": 3"#.to_string()
        }
        "transformer_grouped" => r#""model_type": "transformer", "num_heads": 4, "num_kv_heads": 2, "head_width": 10,
            "rope_theta": 10000, "rotary_factor": 0.65, "qk_norm": true, "qk_norm_eps": 1e-6, "qkv_bias": true,
            "output_bias": true, "attn_output_gate": true, "window_size": 40,
            "rotary_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64}"#
            .to_string(),
        "gated_deltanet" => format!(r#""model_type": "gated_deltanet", {recurrence}"#),
        "gated_deltanet_sigmoid" => format!(
            r#""model_type": "gated_deltanet", {recurrence}, "output_gate_activation": "sigmoid", "use_short_conv": false"#
        ),
        // A stack without anchors and without gates.
        "hybrid" => format!(
            r#""model_type": "hybrid", {attention}, {recurrence}, "use_gate": false,
            "layers": "1 gated_delta_net, 1 attention""#
        ),
        // Anchors that pass a recurrence without anchors, then attention.
        "hybrid_anchors" => format!(
            r#""model_type": "hybrid", {attention}, {recurrence}, {routing}, "anchors": [2],
            "layers": ["gated_delta_net", "attention", "gated_delta_net"]"#
        ),
        // Anchors that are all equal until the second layer.
        "hybrid_all_anchors" => format!(
            r#""model_type": "hybrid", {attention}, {recurrence}, {routing}, "anchors": "every gated_delta_net",
            "layers": "1 attention, 2 gated_delta_net""#
        ),
        "log_linear_gated_deltanet" => {
            format!(r#""model_type": "log_linear_gated_deltanet", {recurrence}, "num_levels": 14"#)
        }
        "march" => format!("{march}, {recurrence}"),
        "march_top_k" => format!(r#"{march}, {recurrence}, "routing_top_k": 2, "routing_scale": 0.7"#),
        "march_no_null" => {
            format!(r#"{march}, {recurrence}, "null_route": false, "allow_neg_eigval": true"#)
        }
        "memory_caching" => format!(r#"{caching}, {recurrence}"#),
        "memory_caching_top_k" => format!(r#"{caching}, {recurrence}, "routing_top_k": 2"#),
        _ => panic!("no model {kind}"),
    };
    ModelConfig::from_json(&format!("{{{common}, {keys}}}"), kind).unwrap()
}

/// Token ids that depend on the seed only.
pub fn tokens(count: usize, vocabulary: u32, seed: u64) -> Vec<u32> {
    let mut x = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    (0..count)
        .map(|_| {
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
            ((x >> 33) % u64::from(vocabulary)) as u32
        })
        .collect()
}

/// A model with its parameters.
pub struct Case {
    pub model: Model,
    pub parameters: Parameters,
}

impl Case {
    pub fn new(device: &Device, config: &ModelConfig) -> Self {
        let model = Model::new(config);
        let parameters = model.init(device, 7).unwrap();
        Self { model, parameters }
    }

    pub fn weights(&self) -> Weights {
        self.parameters[..].into()
    }

    pub fn settings(&self) -> Settings {
        Settings { policy: self.model.policy(), ..Settings::default() }
    }

    /// Logits of sequences from their beginning, as training computes them.
    pub fn forward(&self, batch: Batch<'_>, policy: &Policy) -> Vec<f64> {
        self.forward_with(batch, &Settings { policy: policy.clone(), ..Settings::default() })
    }

    pub fn forward_with(&self, batch: Batch<'_>, settings: &Settings) -> Vec<f64> {
        let weights = self.weights();
        let hidden = self.model.forward(&weights, batch, settings, None).unwrap();
        self.model.logits(&weights, &hidden).unwrap().to_f64()
    }

    /// Logits of tokens that continue a bank, in calls of the given sizes (the last repeats). `watch` sees the bank after
    /// each call.
    pub fn continued(
        &self,
        bank: &mut StateBank,
        ids: &[u32],
        calls: &[usize],
        mut watch: impl FnMut(&StateBank),
    ) -> Vec<f64> {
        let weights = self.weights();
        let (mut logits, mut rest, mut sizes, mut size) = (Vec::new(), ids, calls.iter(), 1);
        while !rest.is_empty() {
            size = sizes.next().copied().unwrap_or(size);
            let (part, later) = rest.split_at(size.min(rest.len()));
            let hidden = self.model.extend(&weights, Batch::one(part), &mut [bank], None).unwrap();
            logits.extend(self.model.logits(&weights, &hidden).unwrap().to_f64());
            watch(bank);
            rest = later;
        }
        logits
    }

    /// Logits of one sequence from its beginning through a bank, in calls of the given sizes (the last repeats).
    pub fn extend(&self, ids: &[u32], policy: &Policy, calls: &[usize]) -> Vec<f64> {
        let mut bank = self.model.bank(policy.clone()).unwrap();
        let all = self.continued(&mut bank, ids, calls, |_| {});
        assert_eq!(bank.bytes(), self.model.memory_bytes(ids.len(), policy));
        assert_eq!(bank.rollback_bytes(), self.model.rollback_bytes(ids.len(), policy));
        all
    }

    /// The mean next-token loss and the gradients of all parameters (none where nothing reached one).
    pub fn gradients(
        &self,
        inputs: Batch<'_>,
        targets: &[u32],
        settings: &Settings,
    ) -> (f64, Vec<Option<Tensor>>) {
        let tape = Tape::new();
        let weights = self.model.bind(&tape, &self.parameters);
        let hidden = self.model.forward(&weights, inputs, settings, None).unwrap();
        let loss = self.model.loss(&weights, &hidden, targets, None).unwrap();
        let mut gradients = vec![None; self.parameters.len()];
        tape.backward(&loss, |key, gradient| gradients[key] = Some(gradient)).unwrap();
        (loss.to_f64()[0], gradients)
    }
}
