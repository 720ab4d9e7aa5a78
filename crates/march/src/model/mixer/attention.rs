//! Multi-head softmax attention with rotary positions: the Transformer baseline.
//!
//! ```text
//! q, k, v = W x;   q, k turned by their position;   o_t = Vᵀ softmax(K q_t / sqrt(d))   over positions ≤ t;   W_o o
//! ```
//! Memory: every key and value of the text.

use march_engine::Engine;
use march_engine::ops::attention::Attention as Inputs;
use march_engine::ops::rotary::Rotary;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::{Contradiction, Layer, Mixer, MixerSpec, Streams};
use crate::anchors::Policy;
use crate::config::{Document, keys_of};
use crate::error::Result;
use crate::memory::LayerMemory;
use crate::model::{Builder, Parameter, Pass};

/// Configuration of the Transformer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AttentionConfig {
    /// Heads; each is `hidden_size / num_heads` wide.
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
                format!("is {heads}, which must divide `hidden_size` ({hidden_size}); take a divisor of it");
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

    fn build<E: Engine>(&self, hidden_size: usize, _: Layer, builder: &mut Builder<'_>) -> Box<dyn Mixer<E>> {
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

impl<E: Engine> Mixer<E> for Attention {
    fn forward(
        &self,
        pass: &Pass<'_, '_, E>,
        input: &Streams<E::Tensor>,
        memory: &mut [&mut LayerMemory<E>],
    ) -> Result<Streams<E::Tensor>> {
        let query = pass.linear(&input.text, self.q_proj)?;
        let key = pass.linear(&input.text, self.k_proj)?;
        let value = pass.linear(&input.text, self.v_proj)?;
        let readout =
            pass.each_row([&query, &key, &value], memory, |[query, key, value], plan, memory| {
                let rotary = Rotary { heads: self.heads, theta: self.theta, offset: plan.position };
                let query = pass.tape.rotary(query, rotary)?;
                let mut key = pass.tape.rotary(key, rotary)?;
                let mut value = value.clone();
                if let Some(memory) = memory {
                    key = pass.tape.constant(memory.append(pass.engine(), "keys", key.into_value(), 1)?);
                    value =
                        pass.tape.constant(memory.append(pass.engine(), "values", value.into_value(), 1)?);
                }
                let input = Inputs { query: &query, key: &key, value: &value };
                Ok([pass.tape.attention(input, self.heads)?])
            })?;
        let [readout] = readout;
        Ok(Streams { text: pass.linear(&readout, self.o_proj)?, anchors: None })
    }

    /// A score and a weighted value, two operations a dimension each, for each token at or before each token.
    fn work(&self, tokens: usize, _: &Policy) -> f64 {
        2.0 * (tokens * (tokens + 1) * self.width) as f64
    }

    fn memory_bytes(&self, tokens: usize, _: &Policy) -> usize {
        2 * tokens * self.width * size_of::<f32>()
    }
}
