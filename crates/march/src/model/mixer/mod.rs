//! Sequence mixers: what lets one position of the text know of others.
//!
//! A mixer is one file here and one line in [`mixers!`] below; `docs/add-a-mixer.md` shows it.

pub mod attention;
pub mod gated_delta_net;
pub mod log_linear;
pub mod march;

use march_engine::{Engine, Var};
use serde_json::{Map, Value};

use crate::anchors::{AnchorPlan, Policy, Storage};
pub use crate::config::Contradiction;
use crate::config::Document;
use crate::error::Result;
use crate::memory::LayerMemory;
use crate::model::{Builder, Pass};

/// Which layer a mixer stands in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layer {
    /// From 0.
    pub index: usize,
    /// How many the model has.
    pub count: usize,
}

impl Layer {
    /// Whether it is the first.
    pub fn first(self) -> bool {
        self.index == 0
    }

    /// Whether it is the last.
    pub fn last(self) -> bool {
        self.index + 1 == self.count
    }
}

/// The two streams that every layer carries.
#[derive(Clone, Debug)]
pub struct Streams<T> {
    /// Text, [B, n, D].
    pub text: Var<T>,
    /// The call's new anchors, all rows' one after the other, [N, D]; [1, D] while they are all equal; none where
    /// there are none or nothing reads them any more.
    pub anchors: Option<Var<T>>,
}

/// A sequence mixer with its parameters' places.
pub trait Mixer<E: Engine> {
    /// The readout of both streams, from their normalised inputs. `memory` has one entry for each row of the
    /// text, which the call continues; without entries it starts from nothing and keeps nothing.
    fn forward(
        &self,
        pass: &Pass<'_, '_, E>,
        input: &Streams<E::Tensor>,
        memory: &mut [&mut LayerMemory<E>],
    ) -> Result<Streams<E::Tensor>>;

    /// Floating-point operations of a forward pass over one text of `tokens` tokens from its beginning, counted over
    /// the products along the text: all but the mixer's linear layers.
    fn work(&self, tokens: usize, policy: &Policy) -> f64;

    /// Bytes that one layer's memory takes after `tokens` tokens.
    fn memory_bytes(&self, tokens: usize, policy: &Policy) -> usize;

    /// Bytes of an anchor in one layer; 0 for a mixer without anchors.
    fn anchor_bytes(&self, _: Storage) -> usize {
        0
    }

    /// The states at the plan's boundaries, [N, value_heads, d_k, d_v], of one text that continues `memory`, which is
    /// brought up to date; nothing else is computed. None for a mixer without anchors.
    fn states(
        &self,
        _: &Pass<'_, '_, E>,
        _text: &Var<E::Tensor>,
        _: &AnchorPlan,
        _memory: &mut LayerMemory<E>,
    ) -> Result<Option<E::Tensor>> {
        Ok(None)
    }
}

/// The keys of a mixer in `config.json` and `[model]`, and the mixer that they describe.
pub trait MixerSpec: Sized {
    /// The value of `model_type`.
    const MODEL_TYPE: &'static str;
    /// Takes the mixer's keys from a document.
    fn read(document: &mut Document) -> Result<Self>;
    /// The keys and their values, defaults filled in.
    fn write(&self) -> Map<String, Value>;
    /// Refuses what cannot be.
    fn check(&self, hidden_size: usize) -> std::result::Result<(), Contradiction>;
    /// What anchors a checkpoint of this kind was made for; none for a mixer without anchors.
    fn policy(&self) -> Option<Policy> {
        None
    }
    /// Lays out the parameters and makes the mixer.
    fn build<E: Engine>(
        &self,
        hidden_size: usize,
        layer: Layer,
        builder: &mut Builder<'_>,
    ) -> Box<dyn Mixer<E>>;
}

/// Makes the list of mixers: for each a variant of [`MixerConfig`] and an arm in each of its methods.
macro_rules! mixers {
    ($($(#[$doc:meta])* $variant:ident($keys:ty),)*) => {
        /// The mixer of a model, with its keys.
        #[derive(Clone, Debug, PartialEq)]
        pub enum MixerConfig {
            $($(#[$doc])* $variant($keys),)*
        }

        impl MixerConfig {
            /// The values of `model_type` that are known.
            pub const MODEL_TYPES: &'static [&'static str] = &[$(<$keys>::MODEL_TYPE),*];

            /// Reads the keys of a mixer by its `model_type`; none if there is no such mixer.
            pub fn read(model_type: &str, document: &mut Document) -> Option<Result<Self>> {
                match model_type {
                    $(<$keys>::MODEL_TYPE => Some(<$keys>::read(document).map(Self::$variant)),)*
                    _ => None,
                }
            }

            /// The value of `model_type`.
            pub fn model_type(&self) -> &'static str {
                match self { $(Self::$variant(_) => <$keys>::MODEL_TYPE,)* }
            }

            /// The keys and their values, defaults filled in.
            pub fn write(&self) -> Map<String, Value> {
                match self { $(Self::$variant(keys) => keys.write(),)* }
            }

            /// Refuses what cannot be.
            pub fn check(&self, hidden_size: usize) -> std::result::Result<(), Contradiction> {
                match self { $(Self::$variant(keys) => keys.check(hidden_size),)* }
            }

            /// What anchors the model was made for; none for a mixer without anchors.
            pub fn policy(&self) -> Option<Policy> {
                match self { $(Self::$variant(keys) => keys.policy(),)* }
            }

            /// Lays out the parameters of one layer and makes its mixer.
            pub fn build<E: Engine>(
                &self,
                hidden_size: usize,
                layer: Layer,
                builder: &mut Builder<'_>,
            ) -> Box<dyn Mixer<E>> {
                match self { $(Self::$variant(keys) => keys.build(hidden_size, layer, builder),)* }
            }
        }
    };
}

mixers! {
    /// Softmax attention: the Transformer baseline.
    Attention(attention::AttentionConfig),
    /// The gated delta rule.
    GatedDeltaNet(gated_delta_net::GatedDeltaNetConfig),
    /// The gated delta rule on a logarithmic number of states.
    LogLinear(log_linear::LogLinearConfig),
    /// The gated delta rule with content-routed state anchors.
    March(march::MarchConfig),
}
