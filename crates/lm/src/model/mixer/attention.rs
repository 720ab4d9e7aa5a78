//! Multi-head softmax attention with rotary positions: the Transformer baseline.
//!
//! ```text
//! q, k, v = W x;   q, k rotated by their position;   o_t = Vᵀ softmax(K q_t / sqrt(d))   over positions ≤ t;   W_o o
//! ```
//! Memory: every key and value of the text, in blocks that are shared between forks of the text.

use march_engine::Tensor;
use march_engine::ops::attention::{Attention as Inputs, BLOCK_TOKENS, KeyValues};
use march_engine::ops::rotary::Rotary;
use serde::{Deserialize, Serialize};

use super::{Contradiction, Layer, Mixer, MixerSpec, Streams};
use crate::anchors::Policy;
use crate::error::Result;
use crate::memory::{LayerReader, LayerWriter, Memory};
use crate::model::{Builder, Pass, Projection};

/// Configuration of the Transformer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AttentionConfig {
    /// Number of heads; each is `hidden_size / num_heads` wide.
    pub num_heads: usize,
    /// Base of the rotary wavelengths.
    pub rope_theta: f64,
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
        Ok(())
    }

    fn build(&self, hidden_size: usize, _: Layer, builder: &mut Builder<'_>) -> Box<dyn Mixer> {
        let mut square = |name| builder.linear(name, hidden_size, hidden_size);
        Box::new(Attention {
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
        self.blocks.iter().map(|block| block.key.bytes() + block.value.bytes()).sum()
    }

    fn save<'a>(&'a self, file: &mut LayerWriter<'a>) -> Result<()> {
        file.tokens("keys", self.blocks.iter().map(|block| &block.key).collect());
        file.tokens("values", self.blocks.iter().map(|block| &block.value).collect());
        Ok(())
    }

    fn load(&mut self, file: &LayerReader<'_>) -> Result<()> {
        self.append(&file.required("keys")?, &file.required("values")?)
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
        let mixed = pass.each_row(qkv, memory, |[query, key, value], row, memory| {
            let rotary = Rotary { heads: self.heads, theta: self.theta, offset: row.position };
            let (query, key) = (query.rotary(rotary)?, key.rotary(rotary)?);
            let memory: Option<&mut KeyValueCache> = memory;
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
        2 * tokens * self.width * size_of::<f32>()
    }
}
