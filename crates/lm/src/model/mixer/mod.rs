//! Sequence mixers: the part of a block that passes information between positions of the text.
//!
//! A mixer is one file in this folder and two lines below: its module and its entry in [`mixers!`]; see
//! `docs/add-a-mixer.md`. The file also defines what the mixer keeps of a text between calls, its [`Memory`].

pub(super) mod adaptive;
mod anchored;
pub mod attention;
pub mod gated_delta_net;
pub mod hybrid;
pub mod log_linear;
pub mod march;
pub mod memory_caching;

use std::any::Any;

use march_engine::Tensor;
use serde_json::{Map, Value};

use crate::anchors::{Policy, Storage};
pub use crate::config::Contradiction;
use crate::config::Document;
use crate::error::Result;
use crate::memory::Memory;
use crate::model::{Builder, Pass, Projection};

/// The layer that a mixer belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layer {
    /// The layer's index, from 0.
    pub index: usize,
    /// The number of layers in the model.
    pub count: usize,
    /// The number of layers that keep anchors, if the model has any.
    pub anchored: usize,
    /// Whether all anchors are still equal when they arrive: no layer before this one reads their states.
    pub equal_anchors: bool,
    /// Whether nothing reads the anchor stream after this layer's routing keys.
    pub ends_anchors: bool,
}

impl Layer {
    /// A layer of a stack whose layers all have the same mixer.
    pub fn of(index: usize, count: usize) -> Self {
        Self { index, count, anchored: count, equal_anchors: index == 0, ends_anchors: index + 1 == count }
    }

    /// Whether this is the first layer.
    pub fn first(self) -> bool {
        self.index == 0
    }
}

/// The two streams that pass through every layer.
#[derive(Clone, Debug)]
pub struct Streams {
    /// Text, [B, n, D]; with memories, the concatenated sequences, [1, N, D].
    pub text: Tensor,
    /// The call's new anchors, those of all rows concatenated, [N, D]; [1, D] while they are all equal; `None` if there
    /// are no anchors or nothing reads them any more.
    pub anchors: Option<Tensor>,
}

impl Streams {
    /// The text, and the anchors if there are any.
    pub(crate) fn list(&self) -> Vec<&Tensor> {
        [&self.text].into_iter().chain(&self.anchors).collect()
    }

    /// The streams of a list of one or two.
    pub(crate) fn of(list: Vec<Tensor>) -> Self {
        let mut list = list.into_iter();
        let Some(text) = list.next() else { unreachable!("the text is always there") };
        Self { text, anchors: list.next() }
    }
}

/// A text without anchors.
impl From<Tensor> for Streams {
    fn from(text: Tensor) -> Self {
        Self { text, anchors: None }
    }
}

/// A sequence mixer, with the handles of its parameters.
pub trait Mixer: Any + Send + Sync {
    /// Creates what the mixer keeps of a text between calls, for an empty text.
    fn memory(&self) -> Box<dyn Memory>;

    /// W_o, with which the block multiplies the readout before it adds it to its input.
    fn output(&self) -> Projection;

    /// Computes the readout of both streams from their normalised inputs. `memory` has one entry for each sequence,
    /// which the call continues; if it is empty, the call starts from the beginning and keeps nothing.
    fn forward(&self, pass: &Pass, input: &Streams, memory: &mut [&mut dyn Memory]) -> Result<Streams>;

    /// Whether the anchor stream goes past this mixer unchanged, because the mixer has no state that an anchor could read.
    fn passes_anchors(&self) -> bool {
        false
    }

    /// Floating-point operations of a forward pass over one text of `tokens` tokens from its beginning, counting the
    /// products along the text: everything except the mixer's linear layers.
    fn work(&self, tokens: usize, policy: &Policy) -> f64;

    /// Size of one layer's memory after `tokens` tokens, in bytes.
    fn memory_bytes(&self, tokens: usize, policy: &Policy) -> usize;

    /// Of [`Mixer::memory_bytes`], those that only a rollback uses: no token reads them.
    fn rollback_bytes(&self, _tokens: usize, _: &Policy) -> usize {
        0
    }

    /// Size of an anchor in one layer, in bytes; 0 for a mixer without anchors.
    fn anchor_bytes(&self, _: Storage) -> usize {
        0
    }
}

/// What a mixer adds to another one whose checkpoints it can continue.
#[derive(Clone, Debug, PartialEq)]
pub struct Extension {
    /// The mixer that it extends.
    pub base: MixerConfig,
    /// The parameters that it adds: each name, after the layer's prefix if there is one.
    pub parameters: &'static [&'static str],
}

impl Extension {
    /// Whether a parameter of the model is an addition.
    pub fn adds(&self, name: &str) -> bool {
        let own = name.split_once(".attn.").map_or(name, |(_, own)| own);
        self.parameters.contains(&own)
    }
}

/// The keys of a mixer in `config.json` and `[model]`, and the mixer that they describe.
pub trait MixerSpec: Sized {
    /// The value of `model_type`.
    const MODEL_TYPE: &'static str;
    /// Whether anchors run through the layers as a second stream, which starts with the learned `anchor_embedding`.
    fn has_anchor_stream(&self) -> bool {
        false
    }
    /// Whether a text has the same bits however it is divided into calls. Otherwise that holds only for calls that end
    /// at multiples of 64 tokens.
    fn has_same_bits_in_any_calls(&self) -> bool {
        true
    }
    /// Takes the mixer's keys from a document.
    fn read(document: &mut Document) -> Result<Self>;
    /// Returns the keys and their values, with defaults filled in.
    fn write(&self) -> Map<String, Value>;
    /// Rejects invalid values.
    fn check(&self, hidden_size: usize) -> std::result::Result<(), Contradiction>;
    /// The anchor policy that a checkpoint of this kind was trained with; `None` for a mixer without anchors.
    fn policy(&self) -> Option<Policy> {
        None
    }
    /// The number of layers after which the mixers repeat.
    fn period(&self) -> usize {
        1
    }
    /// Whether anchors can be placed where the first layer's state moves most.
    fn places_adaptively(&self) -> bool {
        self.policy().is_some()
    }
    /// What the mixer adds to another one; `None` if it extends none.
    fn extension(&self) -> Option<Extension> {
        None
    }
    /// Sets the keys that determine the additions' initial values such that the model computes nearly what its base
    /// computes. `null_bias` is the initial score of reading nothing. Rejects keys with which that is impossible.
    fn start_as_base(&mut self, _null_bias: f64) -> std::result::Result<(), Contradiction> {
        Ok(())
    }
    /// Lays out the parameters and creates the mixer.
    fn build(&self, hidden_size: usize, layer: Layer, builder: &mut Builder<'_>) -> Box<dyn Mixer>;
}

/// Generates the list of mixers: for each, a variant of [`MixerConfig`] and an arm in each of its methods.
macro_rules! mixers {
    ($($(#[$doc:meta])* $variant:ident($keys:ty),)*) => {
        /// The configuration of a model's mixer.
        #[derive(Clone, Debug, PartialEq)]
        pub enum MixerConfig {
            $($(#[$doc])* $variant($keys),)*
        }

        impl MixerConfig {
            /// The known values of `model_type`.
            pub const MODEL_TYPES: &'static [&'static str] = &[$(<$keys>::MODEL_TYPE),*];

            /// Reads the keys of a mixer by its `model_type`; `None` if there is no such mixer.
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

            /// Returns the keys and their values, with defaults filled in.
            pub fn write(&self) -> Map<String, Value> {
                match self { $(Self::$variant(keys) => keys.write(),)* }
            }

            /// Rejects invalid values.
            pub fn check(&self, hidden_size: usize) -> std::result::Result<(), Contradiction> {
                match self { $(Self::$variant(keys) => keys.check(hidden_size),)* }
            }

            /// The anchor policy that the model was trained with; `None` for a mixer without anchors.
            pub fn policy(&self) -> Option<Policy> {
                match self { $(Self::$variant(keys) => keys.policy(),)* }
            }

            /// The number of layers after which the mixers repeat.
            pub fn period(&self) -> usize {
                match self { $(Self::$variant(keys) => keys.period(),)* }
            }

            /// Whether anchors can be placed where the first layer's state moves most.
            pub fn places_adaptively(&self) -> bool {
                match self { $(Self::$variant(keys) => keys.places_adaptively(),)* }
            }

            /// What the mixer adds to another one; `None` if it extends none.
            pub fn extension(&self) -> Option<Extension> {
                match self { $(Self::$variant(keys) => keys.extension(),)* }
            }

            /// Makes the additions start such that the model computes nearly what its base computes.
            pub fn start_as_base(&mut self, null_bias: f64) -> std::result::Result<(), Contradiction> {
                match self { $(Self::$variant(keys) => keys.start_as_base(null_bias),)* }
            }

            /// Whether anchors run through the layers as a second stream.
            pub fn has_anchor_stream(&self) -> bool {
                match self { $(Self::$variant(keys) => keys.has_anchor_stream(),)* }
            }

            /// Whether a text has the same bits however it is divided into calls.
            pub fn has_same_bits_in_any_calls(&self) -> bool {
                match self { $(Self::$variant(keys) => keys.has_same_bits_in_any_calls(),)* }
            }

            /// Lays out the parameters of one layer and creates its mixer.
            pub fn build(
                &self,
                hidden_size: usize,
                layer: Layer,
                builder: &mut Builder<'_>,
            ) -> Box<dyn Mixer> {
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
    /// The gated delta rule with cached segments.
    MemoryCaching(memory_caching::MemoryCachingConfig),
    /// A mixer for each layer.
    Hybrid(hybrid::HybridConfig),
}

impl MixerConfig {
    /// The configuration of the attention layers, if there are any.
    pub fn attention(&self) -> Option<&attention::AttentionConfig> {
        match self {
            Self::Attention(config) => Some(config),
            Self::Hybrid(stack) => stack.mixers.iter().find_map(Self::attention),
            _ => None,
        }
    }
}
