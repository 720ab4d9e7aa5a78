//! Multi-head softmax attention with rotary positions: the Transformer baseline.
//!
//! ```text
//! q, k, v = W x;   q, k rotated by their position;   o_t = Vᵀ softmax(K q_t / sqrt(d))   over positions ≤ t;   W_o o
//! with `conv_size`, before the rotation:   p ← p + SiLU(conv(p))   for p = q, k, v
//! ```
//! The convolutions make for a fair comparison with recurrent models, which have them; the paper's Transformer has none.
//! Memory: every key and value of the text, in blocks that are shared between forks of the text, and the last inputs of
//! the convolutions.

use march_engine::Tensor;
use march_engine::ops::attention::{Attention as Inputs, BLOCK_TOKENS, KeyValues};
use march_engine::ops::rotary::Rotary;
use march_engine::ops::short_conv::{ShortConv, short_conv_each};
use serde::{Deserialize, Serialize};

use super::gated_delta_net::TAILS;
use super::{Contradiction, Layer, Mixer, MixerSpec, Streams};
use crate::anchors::Policy;
use crate::error::Result;
use crate::memory::{LayerReader, LayerWriter, Memory};
use crate::model::{Builder, Init, Parameter, Pass, Projection};

/// Configuration of the Transformer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AttentionConfig {
    /// Number of heads; each is `hidden_size / num_heads` wide.
    pub num_heads: usize,
    /// Base of the rotary wavelengths.
    pub rope_theta: f64,
    /// Number of tokens that the convolutions of queries, keys and values see; `None` for no convolutions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub conv_size: Option<usize>,
}

impl MixerSpec for AttentionConfig {
    const MODEL_TYPE: &'static str = "transformer";

    fn check(&self, hidden_size: usize) -> std::result::Result<(), Contradiction> {
        let heads = self.num_heads;
        if heads == 0 || !hidden_size.is_multiple_of(heads) {
            let message =
                format!("is {heads}, which must divide `hidden_size` ({hidden_size}); use a divisor of it");
            return Err(("num_heads", message));
        }
        if !(hidden_size / heads).is_multiple_of(2) {
            let message = format!(
                "is {heads}, so a head is {} wide; rotary positions need an even width",
                hidden_size / heads
            );
            return Err(("num_heads", message));
        }
        if !(self.rope_theta.is_finite() && self.rope_theta > 0.0) {
            return Err(("rope_theta", format!("is {}; it must be a positive number", self.rope_theta)));
        }
        if self.conv_size == Some(0) {
            let message = "is 0; it must be at least 1, or not be set for no convolutions".into();
            return Err(("conv_size", message));
        }
        Ok(())
    }

    fn build(&self, hidden_size: usize, _: Layer, builder: &mut Builder<'_>) -> Box<dyn Mixer> {
        let conv1d = self.conv_size.map(|size| {
            ["q_conv1d.weight", "k_conv1d.weight", "v_conv1d.weight"]
                .map(|name| builder.add(name, &[hidden_size, 1, size], Init::Normal))
        });
        let mut square = |name| builder.linear(name, hidden_size, hidden_size);
        Box::new(Attention {
            conv1d,
            conv_size: self.conv_size.unwrap_or(1),
            heads: self.num_heads,
            theta: self.rope_theta,
            width: hidden_size,
            q_proj: square("q_proj"),
            k_proj: square("k_proj"),
            v_proj: square("v_proj"),
            o_proj: square("o_proj"),
        })
    }
}

struct Attention {
    /// Convolutions of q, k and v.
    conv1d: Option<[Parameter; 3]>,
    conv_size: usize,
    heads: usize,
    theta: f64,
    width: usize,
    q_proj: Projection,
    k_proj: Projection,
    v_proj: Projection,
    o_proj: Projection,
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

    fn bytes(&self) -> usize {
        let blocks = self.blocks.iter().map(|block| block.key.bytes() + block.value.bytes());
        blocks.chain(self.tails.iter().flatten().map(Tensor::bytes)).sum()
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

    fn forward(&self, pass: &Pass, input: &Streams, memory: &mut [&mut dyn Memory]) -> Result<Streams> {
        let qkv = pass.project(&input.text, [self.q_proj, self.k_proj, self.v_proj])?;
        let mixed = pass.each_row(qkv, memory, |qkv, row, memory| {
            let mut memory: Option<&mut KeyValueCache> = memory;
            let [query, key, value] = self.convolve(pass, qkv, memory.as_deref_mut())?;
            let rotary = Rotary { heads: self.heads, theta: self.theta, offset: row.position };
            let (query, key) = (query.rotary(rotary)?, key.rotary(rotary)?);
            let Some(memory) = memory else {
                let input = Inputs { query: &query, key: &key, value: &value };
                return Ok(input.attention(self.heads)?);
            };
            memory.append(&key, &value)?;
            Ok(query.attention_blocks(&memory.blocks, self.heads)?)
        })?;
        Ok(mixed.readout.into())
    }

    /// Operations for a score and a weighted value, two each per dimension, for every pair of a token and one at or
    /// before it.
    fn work(&self, tokens: usize, _: &Policy) -> f64 {
        2.0 * (tokens * (tokens + 1) * self.width) as f64
    }

    fn memory_bytes(&self, tokens: usize, _: &Policy) -> usize {
        (2 * tokens + 3 * (self.conv_size - 1)) * self.width * size_of::<f32>()
    }
}
