//! Where a parameter is in a checkpoint: the name of a tensor there, which of its rows, and what is added to its numbers.
//!
//! Checkpoints of this program and of flash-linear-attention have one tensor for each parameter, under its name. Those of
//! transformers have other names; some of their projections hold several of ours, and some of their norms store w − 1:
//!
//! ```text
//! Qwen3.5     in_proj_qkv, conv1d            rows of q, then of k, then of v
//!             self_attn.q_proj               for each head the rows of its query, then those of its gate
//!             norms but linear_attn.norm     w − 1
//! Qwen3-Next  in_proj_qkvz                   for each key head the rows of q, k, its value heads' v, and their z
//!             in_proj_ba                     for each key head the rows of its value heads' b, then of a
//! ```

use std::ops::Range;

use crate::model::mixer::MixerConfig;
use crate::model::mixer::gated_delta_net::GatedDeltaNetConfig;
use crate::model::{Dialect, ModelConfig, ParameterSpec};

/// Where a parameter is.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Source {
    /// The name of the tensor.
    pub name: String,
    /// The tensor's shape.
    pub shape: Vec<usize>,
    /// The parameter's rows there, in order; `None` for all of them.
    pub rows: Option<Vec<Range<usize>>>,
    /// What is added to each number.
    pub shift: f32,
}

impl Source {
    /// Where a parameter is in a checkpoint with this configuration.
    pub fn of(spec: &ParameterSpec, dialect: Dialect, config: &ModelConfig) -> Self {
        let (name, shape) = (spec.name.clone(), spec.shape.clone());
        let own = Self { name, shape, rows: None, shift: 0.0 };
        match dialect {
            Dialect::Own => own,
            _ => own.translated(dialect, config),
        }
    }

    fn translated(mut self, dialect: Dialect, config: &ModelConfig) -> Self {
        let base = match dialect {
            Dialect::Qwen35 { nested: true } => "model.language_model.",
            _ => "model.",
        };
        let centred = matches!(dialect, Dialect::Qwen35 { .. } | Dialect::Qwen3Next);
        let Some((layer, own)) =
            self.name.strip_prefix("model.layers.").and_then(|rest| rest.split_once('.'))
        else {
            let (name, is_norm) = match self.name.as_str() {
                "model.embeddings.weight" => (format!("{base}embed_tokens.weight"), false),
                "model.norm.weight" => (format!("{base}norm.weight"), true),
                other => (other.to_string(), false),
            };
            self.name = name;
            self.shift = if centred && is_norm { 1.0 } else { 0.0 };
            return self;
        };
        let mixer = match &config.mixer {
            MixerConfig::Hybrid(stack) => layer.parse().ok().and_then(|at: usize| stack.mixers.get(at)),
            mixer => Some(mixer),
        };
        let (name, rows, is_norm) = match own {
            "attn_norm.weight" => ("input_layernorm.weight".to_string(), None, true),
            "mlp_norm.weight" => ("post_attention_layernorm.weight".to_string(), None, true),
            own => match (own.strip_prefix("attn."), mixer) {
                (Some(own), Some(MixerConfig::GatedDeltaNet(keys))) => {
                    let (name, rows) = linear(own, keys, dialect);
                    (format!("linear_attn.{name}"), rows, false)
                }
                (Some(own), mixer) => {
                    let gated = mixer.and_then(MixerConfig::attention).filter(|keys| keys.attn_output_gate);
                    let gated = gated.map(|keys| (keys.num_heads, keys.width_of_head(config.hidden_size)));
                    let (name, rows) = attention(own, gated);
                    let is_norm = matches!(own, "q_norm.weight" | "k_norm.weight");
                    (format!("self_attn.{name}"), rows, is_norm)
                }
                (None, _) => (own.to_string(), None, false),
            },
        };
        self.name = format!("{base}layers.{layer}.{name}");
        self.shift = if centred && is_norm { 1.0 } else { 0.0 };
        if let Some((rows, all)) = rows {
            self.shape[0] = all;
            self.rows = Some(rows);
        }
        self
    }

    /// The parameter's numbers in the tensor, as ranges of their indices.
    pub fn ranges(&self) -> Vec<Range<usize>> {
        let width: usize = self.shape.iter().skip(1).product();
        match &self.rows {
            None => one(0..self.shape.iter().product()),
            Some(rows) => rows.iter().map(|rows| rows.start * width..rows.end * width).collect(),
        }
    }

    /// The index in the tensor of one of the parameter's numbers.
    pub fn place(&self, mut at: usize) -> usize {
        for range in self.ranges() {
            if at < range.len() {
                return range.start + at;
            }
            at -= range.len();
        }
        usize::MAX
    }
}

/// Rows of a tensor, and how many it has in all.
type Rows = Option<(Vec<Range<usize>>, usize)>;

/// A list of one range.
fn one(range: Range<usize>) -> Vec<Range<usize>> {
    std::iter::once(range).collect()
}

/// The same rows of each of `count` equal parts of a tensor.
fn of_each(count: usize, part: usize, rows: Range<usize>) -> Rows {
    let rows = (0..count).map(|n| n * part + rows.start..n * part + rows.end);
    Some((rows.collect(), count * part))
}

/// A tensor of attention; `gated` are heads and their width if each query's rows are followed by those of its gate.
fn attention(own: &str, gated: Option<(usize, usize)>) -> (&str, Rows) {
    match (own, gated) {
        ("q_proj.weight" | "q_proj.bias", Some((heads, width))) => (own, of_each(heads, 2 * width, 0..width)),
        ("g_proj.weight", Some((heads, width))) => {
            ("q_proj.weight", of_each(heads, 2 * width, width..2 * width))
        }
        ("g_proj.bias", Some((heads, width))) => ("q_proj.bias", of_each(heads, 2 * width, width..2 * width)),
        _ => (own, None),
    }
}

/// A tensor of Gated DeltaNet.
fn linear<'a>(own: &'a str, keys: &GatedDeltaNetConfig, dialect: Dialect) -> (&'a str, Rows) {
    let (heads, sharing) = (keys.num_heads, keys.value_heads() / keys.num_heads.max(1));
    let (key, value) = (keys.head_dim, sharing * keys.value_dim());
    // Rows of q, k and v of all heads, one after the other.
    let in_turn = |i: usize| {
        let ends = [0, heads * key, 2 * heads * key, 2 * heads * key + heads * value];
        Some((one(ends[i]..ends[i + 1]), ends[3]))
    };
    // Rows of q, k, v and z of one key head after the other.
    let by_head = |i: usize| {
        let ends = [0, key, 2 * key, 2 * key + value, 2 * key + 2 * value];
        of_each(heads, ends[4], ends[i]..ends[i + 1])
    };
    let next = dialect == Dialect::Qwen3Next;
    match own {
        "q_conv1d.weight" => ("conv1d.weight", in_turn(0)),
        "k_conv1d.weight" => ("conv1d.weight", in_turn(1)),
        "v_conv1d.weight" => ("conv1d.weight", in_turn(2)),
        "o_norm.weight" => ("norm.weight", None),
        "o_proj.weight" => ("out_proj.weight", None),
        "q_proj.weight" if next => ("in_proj_qkvz.weight", by_head(0)),
        "k_proj.weight" if next => ("in_proj_qkvz.weight", by_head(1)),
        "v_proj.weight" if next => ("in_proj_qkvz.weight", by_head(2)),
        "g_proj.weight" if next => ("in_proj_qkvz.weight", by_head(3)),
        "b_proj.weight" if next => ("in_proj_ba.weight", of_each(heads, 2 * sharing, 0..sharing)),
        "a_proj.weight" if next => ("in_proj_ba.weight", of_each(heads, 2 * sharing, sharing..2 * sharing)),
        "q_proj.weight" => ("in_proj_qkv.weight", in_turn(0)),
        "k_proj.weight" => ("in_proj_qkv.weight", in_turn(1)),
        "v_proj.weight" => ("in_proj_qkv.weight", in_turn(2)),
        "g_proj.weight" => ("in_proj_z.weight", None),
        "b_proj.weight" => ("in_proj_b.weight", None),
        "a_proj.weight" => ("in_proj_a.weight", None),
        own => (own, None),
    }
}

/// Whether a tensor belongs to a part of the model that is left out: what it sees with, and the head that predicts
/// several tokens.
pub(super) fn is_left_out(name: &str, dialect: Dialect) -> bool {
    match dialect {
        Dialect::Qwen35 { .. } => {
            ["mtp.", "model.visual.", "visual."].iter().any(|part| name.starts_with(part))
        }
        Dialect::Qwen3Next => name.starts_with("mtp."),
        Dialect::Own | Dialect::Llama => false,
    }
}
