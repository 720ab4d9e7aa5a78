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

use std::borrow::Cow;
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
    /// The parameter's columns there, in order; `None` if they are the tensor's.
    pub columns: Option<Vec<Range<usize>>>,
    /// What is done to each number.
    pub change: Change,
}

/// What is done to a number of a file.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Change {
    Add(f32),
    LogOfNegative,
}

impl Change {
    pub const NONE: Self = Self::Add(0.0);

    pub fn apply(self, number: f32) -> f32 {
        match self {
            // A sum with 0 would change the sign of -0.
            Self::NONE => number,
            Self::Add(shift) => number + shift,
            Self::LogOfNegative => (-number).ln(),
        }
    }
}

impl Source {
    /// Where a parameter is in a checkpoint with this configuration.
    pub fn of(spec: &ParameterSpec, dialect: Dialect, config: &ModelConfig) -> Self {
        match dialect {
            Dialect::Own => Self::own(spec),
            _ => Self::own(spec).translated(dialect, config),
        }
    }

    /// The tensor that has the parameter's name and shape.
    pub fn own(spec: &ParameterSpec) -> Self {
        let (name, shape) = (spec.name.clone(), spec.shape.clone());
        Self { name, shape, rows: None, columns: None, change: Change::NONE }
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
            self.change = Change::Add(if centred && is_norm { 1.0 } else { 0.0 });
            return self;
        };
        let mixer = mixer_of(config, layer);
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
        self.change = Change::Add(if centred && is_norm { 1.0 } else { 0.0 });
        if let Some((rows, all)) = rows {
            self.shape[0] = all;
            self.rows = Some(rows);
        }
        self
    }

    /// The parameter's numbers in the tensor, as ranges of their indices.
    pub fn ranges(&self) -> Vec<Range<usize>> {
        self.ranges_of(0..usize::MAX)
    }

    /// The numbers of some of the parameter's rows in the tensor, as ranges of their indices; in the order of the tensor's
    /// columns.
    pub fn ranges_of(&self, wanted: Range<usize>) -> Vec<Range<usize>> {
        let width = self.width();
        let whole = 0..self.shape.first().copied().unwrap_or(1);
        let mut before = 0;
        let mut found = Vec::new();
        for rows in self.rows.as_deref().unwrap_or(std::slice::from_ref(&whole)) {
            let inside = |row: usize| rows.start + row.saturating_sub(before).min(rows.len());
            let own = inside(wanted.start)..inside(wanted.end);
            before += rows.len();
            if !own.is_empty() {
                found.push(own.start * width..own.end * width);
            }
        }
        if found.is_empty() {
            found.push(0..0);
        }
        found
    }

    /// Whole rows of the tensor with their columns in the parameter's order.
    pub fn ordered<'a>(&self, rows: Cow<'a, [f32]>) -> Cow<'a, [f32]> {
        let Some(columns) = &self.columns else { return rows };
        let mut all = Vec::with_capacity(rows.len());
        for row in rows.chunks(self.width().max(1)) {
            columns.iter().for_each(|own| all.extend_from_slice(&row[own.clone()]));
        }
        Cow::Owned(all)
    }

    /// The indices in the tensor of some of the parameter's numbers.
    pub fn places(&self, wanted: &[usize]) -> Vec<usize> {
        let width = self.width().max(1);
        let place = |ranges: &[Range<usize>], starts: &[usize], at: usize| {
            let range = starts.partition_point(|start| *start <= at).saturating_sub(1);
            ranges.get(range).map_or(usize::MAX, |own| own.start + at - starts[range])
        };
        let starts = |ranges: &[Range<usize>]| -> Vec<usize> {
            ranges.iter().scan(0, |end, range| Some(std::mem::replace(end, *end + range.len()))).collect()
        };
        let ranges = self.ranges();
        let first = starts(&ranges);
        let columns = self.columns.as_ref().map(|columns| (columns, starts(columns)));
        let of = |&at: &usize| {
            let column = columns.as_ref().map_or(at % width, |(own, first)| place(own, first, at % width));
            place(&ranges, &first, at / width * width + column)
        };
        wanted.iter().map(of).collect()
    }

    /// Whether the numbers of a row are the parameter's as they are.
    pub fn is_plain(&self) -> bool {
        self.columns.is_none() && self.change == Change::NONE
    }

    /// Numbers in a row of the tensor.
    pub fn width(&self) -> usize {
        self.shape.iter().skip(1).product()
    }
}

/// The mixer of a layer, whose number is in the name of a tensor.
pub(super) fn mixer_of<'a>(config: &'a ModelConfig, layer: &str) -> Option<&'a MixerConfig> {
    match &config.mixer {
        MixerConfig::Hybrid(stack) => layer.parse().ok().and_then(|at: usize| stack.mixers.get(at)),
        mixer => Some(mixer),
    }
}

/// Rows of a tensor, and how many it has in all.
type Rows = Option<(Vec<Range<usize>>, usize)>;

/// A list of one range.
pub(super) fn one(range: Range<usize>) -> Vec<Range<usize>> {
    std::iter::once(range).collect()
}

/// The same rows of each of `count` equal parts of a tensor.
pub(super) fn of_each(count: usize, part: usize, rows: Range<usize>) -> (Vec<Range<usize>>, usize) {
    let rows = (0..count).map(|n| n * part + rows.start..n * part + rows.end);
    (rows.collect(), count * part)
}

/// A tensor of attention; `gated` are heads and their width if each query's rows are followed by those of its gate.
fn attention(own: &str, gated: Option<(usize, usize)>) -> (&str, Rows) {
    match (own, gated) {
        ("q_proj.weight" | "q_proj.bias", Some((heads, width))) => {
            (own, Some(of_each(heads, 2 * width, 0..width)))
        }
        ("g_proj.weight", Some((heads, width))) => {
            ("q_proj.weight", Some(of_each(heads, 2 * width, width..2 * width)))
        }
        ("g_proj.bias", Some((heads, width))) => {
            ("q_proj.bias", Some(of_each(heads, 2 * width, width..2 * width)))
        }
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
        Some(of_each(heads, ends[4], ends[i]..ends[i + 1]))
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
        "b_proj.weight" if next => ("in_proj_ba.weight", Some(of_each(heads, 2 * sharing, 0..sharing))),
        "a_proj.weight" if next => {
            ("in_proj_ba.weight", Some(of_each(heads, 2 * sharing, sharing..2 * sharing)))
        }
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
