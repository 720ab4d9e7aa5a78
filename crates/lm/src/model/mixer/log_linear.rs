//! Log-Linear Gated DeltaNet: one state per power of two of the past, each with its own weight.
//!
//! ```text
//! o_t = Σ_l λ_t^l S_t^(l)ᵀ q_t,   λ = softplus(L ∘ W_l x),   level(t, s) = bit_length(t XOR s)
//! ```
//! Everything else is as in Gated DeltaNet. Memory: one state per level in use, at most log2 of the text's length + 1.

use std::sync::Once;

use march_engine::Tensor;
use march_engine::ops::log_linear::{LogLinear as Inputs, LogLinearOptions};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::gated_delta_net::{DeltaMemory, GatedDeltaNet, GatedDeltaNetConfig, TAILS};
use super::{Contradiction, Layer, Mixer, MixerSpec, Streams};
use crate::anchors::Policy;
use crate::config::{Document, keys_of};
use crate::error::Result;
use crate::memory::{LayerReader, LayerWriter, Memory};
use crate::model::{Builder, Init, Parameter, Pass, Projection};

/// Configuration of Log-Linear Gated DeltaNet.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LogLinearConfig {
    /// The recurrence.
    #[serde(flatten)]
    pub base: GatedDeltaNetConfig,
    /// The levels, which this mixer adds.
    #[serde(flatten)]
    pub levels: LevelConfig,
}

/// The keys that Log-Linear Gated DeltaNet adds to the configuration of Gated DeltaNet.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LevelConfig {
    /// Number of levels with their own weights: ceil(log2 of the longest text) + 1.
    pub num_levels: usize,
}

impl MixerSpec for LogLinearConfig {
    const MODEL_TYPE: &'static str = "log_linear_gated_deltanet";

    /// One token reads the levels one by one; a chunk of tokens adds them up in another order.
    fn has_same_bits_in_any_calls(&self) -> bool {
        false
    }

    fn read(document: &mut Document) -> Result<Self> {
        Ok(Self { base: document.keys()?, levels: document.keys()? })
    }

    fn write(&self) -> Map<String, Value> {
        let mut keys = self.base.write();
        keys.extend(keys_of(&self.levels));
        keys
    }

    fn check(&self, hidden_size: usize) -> std::result::Result<(), Contradiction> {
        let levels = self.levels.num_levels;
        if !(1..=64).contains(&levels) {
            let message = format!(
                "is {levels}; it must be from 1 to 64: ceil(log2 of the longest text) + 1, 15 for 16,384 tokens"
            );
            return Err(("num_levels", message));
        }
        self.base.check(hidden_size)
    }

    fn build(&self, hidden_size: usize, _: Layer, builder: &mut Builder<'_>) -> Box<dyn Mixer> {
        let base = GatedDeltaNet::new(&self.base, hidden_size, builder);
        let (heads, levels) = (base.value_heads, self.levels.num_levels);
        Box::new(LogLinear {
            base,
            levels,
            l_proj: builder.linear("l_proj", heads * levels, hidden_size),
            level_scale: builder.add("L", &[heads, levels], Init::Constant(1.0)),
        })
    }
}

struct LogLinear {
    base: GatedDeltaNet,
    levels: usize,
    l_proj: Projection,
    level_scale: Parameter,
}

impl LogLinear {
    /// Warns once that the text is longer than the levels cover.
    fn warn_past_levels(&self, end: usize) {
        static WARNED: Once = Once::new();
        let longest = 1usize.checked_shl(self.levels as u32 - 1).unwrap_or(usize::MAX);
        if end > longest {
            WARNED.call_once(|| {
                tracing::warn!(
                    "the text is longer than {longest} tokens, the limit of num_levels = {}; \
                     all older levels share the last weight",
                    self.levels
                );
            });
        }
    }
}

/// What Log-Linear Gated DeltaNet keeps of a text.
#[derive(Clone, Default)]
pub struct LevelMemory {
    /// The states of the levels; `None` before the first token.
    levels: Option<Tensor>,
    /// The memory of Gated DeltaNet, of which only the convolution tails are used.
    base: DeltaMemory,
}

impl Memory for LevelMemory {
    fn fork(&self) -> Box<dyn Memory> {
        Box::new(self.clone())
    }

    fn tensors(&self) -> Vec<&Tensor> {
        self.levels.iter().chain(self.base.tensors()).collect()
    }

    fn save<'a>(&'a self, file: &mut LayerWriter<'a>) -> Result<()> {
        if let Some(levels) = &self.levels {
            file.tensor("levels", levels);
        }
        for (name, tail) in TAILS.into_iter().zip(self.base.tails.iter().flatten()) {
            file.tensor(name, tail);
        }
        Ok(())
    }

    fn load(&mut self, file: &LayerReader<'_>) -> Result<()> {
        self.levels = Some(file.required("levels")?);
        let [q, k, v] = TAILS.map(|name| file.required(name));
        self.base.tails = Some([q?, k?, v?]);
        Ok(())
    }
}

impl Mixer for LogLinear {
    fn memory(&self) -> Box<dyn Memory> {
        Box::new(LevelMemory::default())
    }

    fn output(&self) -> Projection {
        self.base.o_proj
    }

    fn passes_anchors(&self) -> bool {
        true
    }

    fn forward(&self, pass: &Pass, input: &Streams, memory: &mut [&mut dyn Memory]) -> Result<Streams> {
        let base = &self.base;
        let layers = (self.l_proj, base.projections(), base.g_proj);
        let (level_input, recurrence, gate) = pass.project(&input.text, layers)?;
        let inputs = (recurrence, level_input);
        let mixed = pass.each_row(inputs, memory, |([q, k, v, a, b], level_input), row, memory| {
            let mut memory: Option<&mut LevelMemory> = memory;
            let base_memory = memory.as_deref_mut().map(|memory| &mut memory.base);
            let [query, key, value] = base.convolve(pass, [&q, &k, &v], base_memory)?;
            self.warn_past_levels(row.position + row.tokens);
            let options = LogLinearOptions {
                key_heads: base.key_heads,
                value_heads: base.value_heads,
                allow_neg_eigval: base.allow_neg_eigval,
                position: row.position,
                want_state: memory.is_some(),
            };
            let inputs = Inputs {
                query: &query,
                key: &key,
                value: &value,
                retention_input: &a,
                write_input: &b,
                a_log: pass.weight(base.a_log),
                dt_bias: pass.weight(base.dt_bias),
                level_input: &level_input,
                level_scale: pass.weight(self.level_scale),
            };
            let initial = memory.as_ref().and_then(|memory| memory.levels.as_ref());
            let (readout, levels) = inputs.log_linear_delta(&options, initial)?;
            if let Some(memory) = memory {
                memory.levels = levels;
            }
            Ok(readout)
        })?;
        base.gated(pass, &[&mixed.readout], &[gate.as_ref()])
    }

    /// Operations for the update of one state, and one read per level.
    fn work(&self, tokens: usize, _: &Policy) -> f64 {
        let levels = (usize::BITS - tokens.leading_zeros()) as f64 + 1.0;
        self.base.recurrence_work(tokens) * (2.0 + levels) / 3.0
    }

    fn memory_bytes(&self, tokens: usize, _: &Policy) -> usize {
        let levels = (usize::BITS - tokens.leading_zeros()) as usize + 1;
        levels * self.base.state_bytes() + self.base.tail_bytes()
    }
}
