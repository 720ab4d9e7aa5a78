//! Multi-head softmax attention with rotary positions: the Transformer baseline, and the attention layers of other
//! people's models.
//!
//! ```text
//! q, k, v = W x (+ b);   q, k rotated by their position;   o_t = Vᵀ softmax(K q_t / sqrt(d))   over positions ≤ t;   W_o o
//! with `conv_size`, first:              p ← p + SiLU(conv(p))          for p = q, k, v
//! with `qk_norm`, before the rotation:  q ← rms_norm(q), k ← rms_norm(k)   per head
//! with `num_kv_heads`:                  several query heads read the same keys and values
//! with `window_size` w:                 positions t − w + 1 to t only
//! with `attn_output_gate`:              o ← o ∘ σ(W_g x)
//! ```
//! The convolutions make for a fair comparison with recurrent models, which have them; the paper's Transformer has none.
//! Memory: every key and value of the text, in blocks that are shared between forks of the text, and the last inputs of
//! the convolutions.

use march_engine::Tensor;
use march_engine::ops::anchor_read::Storage;
use march_engine::ops::attention::{Attention as Inputs, AttentionOptions, BLOCK_TOKENS, KeyValues};
use march_engine::ops::rotary::{Frequencies, Rotary, Scaling};
use march_engine::ops::short_conv::{ShortConv, short_conv_each};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::gated_delta_net::TAILS;
use super::{Contradiction, Layer, Mixer, MixerSpec, Streams};
use crate::anchors::{Anchor, Policy};
use crate::config::{Document, keys_of};
use crate::error::{Error, Result};
use crate::memory::{LayerReader, LayerWriter, Memory};
use crate::model::{Builder, Init, Parameter, Pass, Projection};

/// Configuration of attention. Only the first two keys have no default; a key that has its default is not written. Keys
/// that flash-linear-attention has as well mean the same there; the others have names that it does not use.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AttentionConfig {
    /// Number of query heads.
    pub num_heads: usize,
    /// Base of the rotary wavelengths.
    pub rope_theta: f64,
    /// Number of key and value heads, a divisor of `num_heads` and by default equal to it.
    #[serde(default)]
    pub num_kv_heads: Option<usize>,
    /// The width of a head; by default `hidden_size / num_heads`.
    #[serde(default)]
    pub head_width: Option<usize>,
    /// The share of a head's elements that are rotated.
    #[serde(default = "whole")]
    pub rotary_factor: f64,
    /// How the rotary frequencies are changed for longer texts; `None` for not at all.
    #[serde(default)]
    pub rotary_scaling: Option<RotaryScaling>,
    /// Whether queries and keys are normalised per head, with learned weights.
    #[serde(default)]
    pub qk_norm: bool,
    /// The constant added to the mean square in these norms.
    #[serde(default = "usual_eps")]
    pub qk_norm_eps: f64,
    /// Whether queries, keys, values and the gate have a bias.
    #[serde(default)]
    pub qkv_bias: bool,
    /// Whether W_o has a bias.
    #[serde(default)]
    pub output_bias: bool,
    /// Whether the readout is multiplied by a sigmoid gate.
    #[serde(default)]
    pub attn_output_gate: bool,
    /// The number of positions that a token sees, its own included; `None` for all.
    #[serde(default)]
    pub window_size: Option<usize>,
    /// Number of tokens that the convolutions of queries, keys and values see; `None` for no convolutions.
    #[serde(default)]
    pub conv_size: Option<usize>,
}

/// A change of the rotary frequencies, with the keys that transformers' `rope_parameters` has for it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "rope_type", rename_all = "lowercase", deny_unknown_fields)]
pub enum RotaryScaling {
    /// Frequencies divided by a factor.
    Linear {
        /// The factor.
        factor: f64,
    },
    /// Low frequencies divided by a factor, high ones unchanged.
    Llama3 {
        /// The factor.
        factor: f64,
        /// Pairs that turn less often than this in the original length are divided.
        low_freq_factor: f64,
        /// Pairs that turn more often than this stay.
        high_freq_factor: f64,
        /// The original length, in tokens.
        original_max_position_embeddings: f64,
    },
}

fn whole() -> f64 {
    1.0
}

/// That of flash-linear-attention's RMSNorm.
fn usual_eps() -> f64 {
    1e-5
}

impl AttentionConfig {
    /// So many heads, each with keys of its own; nothing else.
    fn plain(num_heads: usize, rope_theta: f64) -> Self {
        Self {
            num_heads,
            rope_theta,
            num_kv_heads: None,
            head_width: None,
            rotary_factor: whole(),
            rotary_scaling: None,
            qk_norm: false,
            qk_norm_eps: usual_eps(),
            qkv_bias: false,
            output_bias: false,
            attn_output_gate: false,
            window_size: None,
            conv_size: None,
        }
    }

    /// The number of key and value heads.
    fn kv_heads(&self) -> usize {
        self.num_kv_heads.unwrap_or(self.num_heads)
    }

    /// The width of a head.
    pub(crate) fn width_of_head(&self, hidden_size: usize) -> usize {
        self.head_width.unwrap_or(hidden_size / self.num_heads.max(1))
    }

    /// The elements of a head that are rotated.
    pub(crate) fn turned(&self, hidden_size: usize) -> usize {
        (self.width_of_head(hidden_size) as f64 * self.rotary_factor) as usize
    }

    /// The angles of the rotary positions.
    pub(crate) fn frequencies(&self, hidden_size: usize) -> Frequencies {
        let scaling = match self.rotary_scaling {
            None => Scaling::Default,
            Some(RotaryScaling::Linear { factor }) => Scaling::Linear { factor },
            Some(RotaryScaling::Llama3 {
                factor,
                low_freq_factor: low,
                high_freq_factor: high,
                original_max_position_embeddings: original,
            }) => Scaling::Llama3 { factor, low, high, original },
        };
        Frequencies { theta: self.rope_theta, turned: Some(self.turned(hidden_size)), scaling }
    }
}

impl RotaryScaling {
    fn check(self) -> std::result::Result<(), String> {
        let positive = |name: &str, value: f64| match value.is_finite() && value > 0.0 {
            true => Ok(()),
            false => Err(format!("has `{name}` {value}; it must be a positive number")),
        };
        match self {
            Self::Linear { factor } => positive("factor", factor),
            Self::Llama3 {
                factor,
                low_freq_factor: low,
                high_freq_factor: high,
                original_max_position_embeddings: original,
            } => {
                positive("factor", factor)?;
                positive("original_max_position_embeddings", original)?;
                positive("low_freq_factor", low)?;
                match high.is_finite() && high > low {
                    true => Ok(()),
                    false => Err(format!(
                        "has `high_freq_factor` {high}; it must be above `low_freq_factor`, {low}"
                    )),
                }
            }
        }
    }
}

impl MixerSpec for AttentionConfig {
    const MODEL_TYPE: &'static str = "transformer";

    fn read(document: &mut Document) -> Result<Self> {
        document.keys()
    }

    fn write(&self) -> Map<String, Value> {
        let usual = keys_of(&Self::plain(self.num_heads, self.rope_theta));
        let changed = |key: &str, value: &Value| usual.get(key) != Some(value);
        let always = ["num_heads", "rope_theta"];
        let keys = keys_of(self).into_iter();
        keys.filter(|(key, value)| always.contains(&key.as_str()) || changed(key, value)).collect()
    }

    fn check(&self, hidden_size: usize) -> std::result::Result<(), Contradiction> {
        let heads = self.num_heads;
        if heads == 0 || self.head_width.is_none() && !hidden_size.is_multiple_of(heads) {
            let message =
                format!("is {heads}, which must divide `hidden_size` ({hidden_size}); use a divisor of it");
            return Err(("num_heads", message));
        }
        if !(1..=1 << 16).contains(&heads) {
            return Err(("num_heads", format!("is {heads}; it must be from 1 to 65536")));
        }
        let kv_heads = self.kv_heads();
        if kv_heads == 0 || !heads.is_multiple_of(kv_heads) {
            let message = format!("is {kv_heads}; it must divide `num_heads` ({heads})");
            return Err(("num_kv_heads", message));
        }
        if let Some(width) = self.head_width.filter(|width| !(1..=1 << 16).contains(width)) {
            return Err(("head_width", format!("is {width}; it must be from 1 to 65536")));
        }
        let width = self.width_of_head(hidden_size);
        if !(self.rotary_factor > 0.0 && self.rotary_factor <= 1.0) {
            let message = format!("is {}; it must be above 0 and at most 1", self.rotary_factor);
            return Err(("rotary_factor", message));
        }
        let turned = self.turned(hidden_size);
        if turned == 0 || !turned.is_multiple_of(2) {
            let (key, value) = match (self.rotary_factor, self.head_width) {
                (1.0, None) => ("num_heads", heads.to_string()),
                (1.0, Some(_)) => ("head_width", width.to_string()),
                (factor, _) => ("rotary_factor", factor.to_string()),
            };
            let of = if self.head_width.is_some() && key != "head_width" { " (`head_width`)" } else { "" };
            let message = format!(
                "is {value}, so {turned} of the {width} elements of a head{of} are rotated; rotary positions need an \
                 even number above 0"
            );
            return Err((key, message));
        }
        for (key, value) in [("rope_theta", self.rope_theta), ("qk_norm_eps", self.qk_norm_eps)] {
            if !(value.is_finite() && value > 0.0) {
                return Err((key, format!("is {value}; it must be a positive number")));
            }
        }
        if let Some(scaling) = self.rotary_scaling {
            scaling.check().map_err(|message| ("rotary_scaling", message))?;
        }
        if self.window_size == Some(0) {
            let message = "is 0; it must be at least 1, or not be set to see the whole past".into();
            return Err(("window_size", message));
        }
        if self.conv_size == Some(0) {
            let message = "is 0; it must be at least 1, or not be set for no convolutions".into();
            return Err(("conv_size", message));
        }
        Ok(())
    }

    fn build(&self, hidden_size: usize, _: Layer, builder: &mut Builder<'_>) -> Box<dyn Mixer> {
        let (heads, kv_heads, head) = (self.num_heads, self.kv_heads(), self.width_of_head(hidden_size));
        let (width, kv_width) = (heads * head, kv_heads * head);
        let conv1d = self.conv_size.map(|size| {
            let mut conv = |name, width| builder.add(name, &[width, 1, size], Init::Normal);
            [
                conv("q_conv1d.weight", width),
                conv("k_conv1d.weight", kv_width),
                conv("v_conv1d.weight", kv_width),
            ]
        });
        let norms = self.qk_norm.then(|| {
            ["q_norm.weight", "k_norm.weight"].map(|name| builder.add(name, &[head], Init::Constant(1.0)))
        });
        let mut linear = |name, rows, columns, biased: bool| match biased {
            true => builder.linear_bias(name, rows, columns, 0.0),
            false => builder.linear(name, rows, columns),
        };
        Box::new(Attention {
            conv1d,
            conv_size: self.conv_size.unwrap_or(1),
            options: AttentionOptions { heads, kv_heads, window: self.window_size },
            frequencies: self.frequencies(hidden_size),
            norms,
            norm_eps: self.qk_norm_eps,
            width,
            kv_width,
            q_proj: linear("q_proj", width, hidden_size, self.qkv_bias),
            k_proj: linear("k_proj", kv_width, hidden_size, self.qkv_bias),
            v_proj: linear("v_proj", kv_width, hidden_size, self.qkv_bias),
            o_proj: linear("o_proj", hidden_size, width, self.output_bias),
            g_proj: self.attn_output_gate.then(|| linear("g_proj", width, hidden_size, self.qkv_bias)),
        })
    }
}

struct Attention {
    /// Convolutions of q, k and v.
    conv1d: Option<[Parameter; 3]>,
    conv_size: usize,
    options: AttentionOptions,
    frequencies: Frequencies,
    /// Weights of the norms of queries and keys.
    norms: Option<[Parameter; 2]>,
    norm_eps: f64,
    /// Widths of all query heads, and of all key heads.
    width: usize,
    kv_width: usize,
    q_proj: Projection,
    k_proj: Projection,
    v_proj: Projection,
    o_proj: Projection,
    g_proj: Option<Projection>,
}

/// The keys and values of a text, in blocks of [`BLOCK_TOKENS`] tokens, the last of which is open. Appending to a fork
/// copies at most the open block.
#[derive(Clone, Default)]
pub struct KeyValueCache {
    blocks: Vec<KeyValues<Tensor>>,
    /// The last inputs of the convolutions of q, k and v, [1, conv_size − 1, width].
    tails: Option<[Tensor; 3]>,
}

impl KeyValueCache {
    /// Appends the keys and values of the next tokens, [1, n, width].
    fn append(&mut self, key: &Tensor, value: &Tensor) -> Result<()> {
        let (count, mut done) = (key.shape()[1], 0);
        while done < count {
            let filled = self.blocks.last().map_or(BLOCK_TOKENS, |block| block.key.shape()[1]);
            let open = self.blocks.last_mut().filter(|_| filled < BLOCK_TOKENS);
            let room = if open.is_some() { BLOCK_TOKENS - filled } else { BLOCK_TOKENS };
            let end = count.min(done + room);
            let cut = |x: &Tensor| match done == 0 && end == count {
                true => Ok(x.clone()),
                false => x.slice(1, done..end),
            };
            let new = KeyValues { key: cut(key)?, value: cut(value)? };
            match open {
                Some(open) => {
                    open.key.append(&new.key, 1)?;
                    open.value.append(&new.value, 1)?;
                }
                None => self.blocks.push(new),
            }
            done = end;
        }
        Ok(())
    }
}

impl Memory for KeyValueCache {
    fn fork(&self) -> Box<dyn Memory> {
        Box::new(self.clone())
    }

    fn tensors(&self) -> Vec<&Tensor> {
        let blocks = self.blocks.iter().flat_map(|block| [&block.key, &block.value]);
        blocks.chain(self.tails.iter().flatten()).collect()
    }

    /// The inputs of convolutions before the last tokens are not kept.
    fn can_truncate(&self) -> bool {
        self.tails.is_none()
    }

    fn truncate(&mut self, tokens: usize) -> Result<()> {
        let (whole, rest) = (tokens / BLOCK_TOKENS, tokens % BLOCK_TOKENS);
        self.blocks.truncate(whole + usize::from(rest > 0));
        if let Some(last) = self.blocks.get_mut(whole) {
            for tensor in [&mut last.key, &mut last.value] {
                *tensor = tensor.slice(1, 0..rest)?;
            }
        }
        Ok(())
    }

    fn save<'a>(&'a self, file: &mut LayerWriter<'a>) -> Result<()> {
        file.tokens("keys", self.blocks.iter().map(|block| &block.key).collect());
        file.tokens("values", self.blocks.iter().map(|block| &block.value).collect());
        for (name, tail) in TAILS.into_iter().zip(self.tails.iter().flatten()) {
            file.tensor(name, tail);
        }
        Ok(())
    }

    fn load(&mut self, file: &LayerReader<'_>) -> Result<()> {
        let [q, k, v] = TAILS.map(|name| file.tensor(name));
        self.tails = match (q?, k?, v?) {
            (Some(q), Some(k), Some(v)) => Some([q, k, v]),
            _ => None,
        };
        self.append(&file.required("keys")?, &file.required("values")?)
    }

    fn rollback(&mut self, anchor: Anchor, _: usize) -> Result<Storage> {
        if !self.can_truncate() {
            let message =
                "an attention layer with convolutions cannot be rolled back: their inputs are not kept";
            return Err(Error::Request(message.into()));
        }
        self.truncate(anchor.position)?;
        Ok(Storage::F32)
    }
}

impl Attention {
    /// p + SiLU(conv(p)) for queries, keys and values, if there are convolutions. With a memory, its tails precede the
    /// first token and are updated.
    fn convolve(
        &self,
        pass: &Pass,
        qkv: [Tensor; 3],
        memory: Option<&mut KeyValueCache>,
    ) -> Result<[Tensor; 3]> {
        let Some(conv1d) = &self.conv1d else { return Ok(qkv) };
        let tails = memory.as_ref().and_then(|memory| memory.tails.clone());
        let conv = |i: usize| {
            let (weight, tail) = (pass.weight(conv1d[i]), tails.as_ref().map(|tails| &tails[i]));
            ShortConv { x: &qkv[i], weight, tail }
        };
        let [q, k, v] = short_conv_each([conv(0), conv(1), conv(2)])?;
        if let Some(memory) = memory {
            memory.tails = Some([q.1, k.1, v.1]);
        }
        Ok([(&qkv[0] + &q.0)?, (&qkv[1] + &k.0)?, (&qkv[2] + &v.0)?])
    }
}

impl Mixer for Attention {
    fn memory(&self) -> Box<dyn Memory> {
        Box::new(KeyValueCache::default())
    }

    fn output(&self) -> Projection {
        self.o_proj
    }

    fn passes_anchors(&self) -> bool {
        true
    }

    fn forward(&self, pass: &Pass, input: &Streams, memory: &mut [&mut dyn Memory]) -> Result<Streams> {
        let (qkv, gate) =
            pass.project(&input.text, ([self.q_proj, self.k_proj, self.v_proj], self.g_proj))?;
        let mixed = pass.each_row(qkv, memory, |qkv, row, memory| {
            let mut memory: Option<&mut KeyValueCache> = memory;
            let [mut query, mut key, value] = self.convolve(pass, qkv, memory.as_deref_mut())?;
            if let Some([q_norm, k_norm]) = self.norms {
                query = query.rms_norm(pass.weight(q_norm), self.norm_eps)?;
                key = key.rms_norm(pass.weight(k_norm), self.norm_eps)?;
            }
            let rotary = |heads| Rotary { heads, offset: row.position, frequencies: self.frequencies };
            let query = query.rotary(rotary(self.options.heads))?;
            let key = key.rotary(rotary(self.options.kv_heads))?;
            let Some(memory) = memory else {
                let input = Inputs { query: &query, key: &key, value: &value };
                return Ok(input.attention(self.options)?);
            };
            memory.append(&key, &value)?;
            Ok(query.attention_blocks(&memory.blocks, self.options)?)
        })?;
        match gate {
            Some(gate) => Ok((&mixed.readout * &gate.sigmoid()?)?.into()),
            None => Ok(mixed.readout.into()),
        }
    }

    /// Operations for a score and a weighted value, two each per dimension, for every pair of a token and one that it
    /// sees.
    fn work(&self, tokens: usize, _: &Policy) -> f64 {
        let seen = self.options.window.map_or(tokens, |window| window.min(tokens));
        // Tokens before the window is full see as many as there are.
        let pairs = seen * (seen + 1) / 2 + (tokens - seen) * seen;
        4.0 * (pairs * self.width) as f64
    }

    fn memory_bytes(&self, tokens: usize, _: &Policy) -> usize {
        let tails = (self.conv_size - 1) * (self.width + 2 * self.kv_width);
        (2 * tokens * self.kv_width + tails) * size_of::<f32>()
    }
}
