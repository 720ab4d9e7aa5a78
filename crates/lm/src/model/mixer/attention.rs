//! Multi-head softmax attention with rotary positions: the Transformer baseline.
//!
//! ```text
//! q, k, v = W x;   q, k rotated by their position;   o_t = Vᵀ softmax(K q_t / sqrt(d))   over positions ≤ t;   W_o o
//! ```
//! Memory: every key and value of the text, in blocks that are shared between forks of the text.

use march_engine::Engine;
use march_engine::ops::attention::{Attention as Inputs, BLOCK_TOKENS, KeyValues};
use march_engine::ops::rotary::Rotary;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::{AnyMixer, Contradiction, Layer, Mixer, MixerSpec, Streams};
use crate::anchors::Policy;
use crate::config::{Document, keys_of};
use crate::error::Result;
use crate::memory::{LayerReader, LayerWriter, Memory, tensor_bytes};
use crate::model::{Builder, MixerOutput, Parameter, Pass};

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

    fn read(document: &mut Document) -> Result<Self> {
        document.keys()
    }

    fn write(&self) -> Map<String, Value> {
        keys_of(self)
    }

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

    fn build<E: Engine>(
        &self,
        hidden_size: usize,
        _: Layer,
        builder: &mut Builder<'_>,
    ) -> Box<dyn AnyMixer<E>> {
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
    q_proj: Parameter,
    k_proj: Parameter,
    v_proj: Parameter,
    o_proj: Parameter,
}

/// The keys and values of a text, in blocks of [`BLOCK_TOKENS`] tokens, the last of which is open. Appending to a fork
/// copies at most the open block.
pub struct KeyValueCache<E: Engine> {
    blocks: Vec<KeyValues<E::Tensor>>,
}

impl<E: Engine> KeyValueCache<E> {
    /// Appends the keys and values of the next tokens, [1, n, width].
    fn append(&mut self, engine: &E, key: &E::Tensor, value: &E::Tensor) -> Result<()> {
        let (count, mut done) = (engine.shape(key)[1], 0);
        while done < count {
            let filled = self.blocks.last().map_or(BLOCK_TOKENS, |block| engine.shape(&block.key)[1]);
            let open = self.blocks.last_mut().filter(|_| filled < BLOCK_TOKENS);
            let room = if open.is_some() { BLOCK_TOKENS - filled } else { BLOCK_TOKENS };
            let end = count.min(done + room);
            let cut = |x: &E::Tensor| match done == 0 && end == count {
                true => Ok(x.clone()),
                false => engine.slice(x, 1, done..end),
            };
            let new = KeyValues { key: cut(key)?, value: cut(value)? };
            match open {
                Some(open) => {
                    engine.append(&mut open.key, &new.key, 1)?;
                    engine.append(&mut open.value, &new.value, 1)?;
                }
                None => self.blocks.push(new),
            }
            done = end;
        }
        Ok(())
    }
}

impl<E: Engine> Memory<E> for KeyValueCache<E> {
    fn fork(&self) -> Box<dyn Memory<E>> {
        Box::new(Self { blocks: self.blocks.clone() })
    }

    fn bytes(&self, engine: &E) -> usize {
        let block = |block: &KeyValues<E::Tensor>| {
            tensor_bytes(engine, &block.key) + tensor_bytes(engine, &block.value)
        };
        self.blocks.iter().map(block).sum()
    }

    fn save<'a>(&'a self, engine: &E, file: &mut LayerWriter<'a, E>) -> Result<()> {
        file.tokens(engine, "keys", self.blocks.iter().map(|block| &block.key).collect());
        file.tokens(engine, "values", self.blocks.iter().map(|block| &block.value).collect());
        Ok(())
    }

    fn load(&mut self, engine: &E, file: &LayerReader<'_>) -> Result<()> {
        self.append(engine, &file.required(engine, "keys")?, &file.required(engine, "values")?)
    }
}

impl<E: Engine> Mixer<E> for Attention {
    type Memory = KeyValueCache<E>;

    fn memory(&self) -> KeyValueCache<E> {
        KeyValueCache { blocks: Vec::new() }
    }

    fn output(&self) -> Parameter {
        self.o_proj
    }

    fn forward(
        &self,
        pass: &Pass<'_, '_, E>,
        input: &Streams<E::Tensor>,
        memory: &mut [&mut KeyValueCache<E>],
    ) -> Result<Streams<E::Tensor>> {
        let [query, key, value] = pass.linear_each(&input.text, [self.q_proj, self.k_proj, self.v_proj])?;
        let mixed =
            pass.each_row([&query, &key, &value], memory, |pass, [query, key, value], row, memory| {
                let rotary = Rotary { heads: self.heads, theta: self.theta, offset: row.position };
                let query = pass.tape.rotary(query, rotary)?;
                let key = pass.tape.rotary(key, rotary)?;
                let readout = match memory {
                    Some(memory) => {
                        let engine = pass.engine();
                        memory.append(engine, key.value(), value.value())?;
                        let readout = engine.attention_blocks(query.value(), &memory.blocks, self.heads)?;
                        pass.tape.constant(readout)
                    }
                    None => {
                        let input = Inputs { query: &query, key: &key, value };
                        pass.tape.attention(input, self.heads)?
                    }
                };
                Ok(MixerOutput { readout, states: None })
            })?;
        Ok(Streams { text: mixed.readout, anchors: None })
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
