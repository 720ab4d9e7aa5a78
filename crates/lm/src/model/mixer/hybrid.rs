//! Hybrid: a stack whose layers have different mixers, with anchors on any of its layers of Gated DeltaNet.
//!
//! ```text
//! layers = "3 gated_delta_net, 1 attention"     a pattern that repeats, or a list with one name per layer
//! anchors = "every 2nd gated_delta_net"         which of the layers of Gated DeltaNet are layers of MARCH; or a list of
//!                                               layers, counted from 0; without the key none is
//! ```
//! The layers of one kind have the same keys. Those of attention begin with `attention_`, because both kinds have a
//! `num_heads`; the others have their usual names.
//!
//! The anchor stream runs from the first layer to the last layer of MARCH. In a layer of Gated DeltaNet without anchors
//! it reads the state at its boundary as in MARCH; in a layer of attention, which has no state, it goes past the mixer
//! unchanged.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::attention::AttentionConfig;
use super::gated_delta_net::GatedDeltaNetConfig;
use super::log_linear::LogLinearConfig;
use super::march::{MarchConfig, RoutingConfig};
use super::memory_caching::MemoryCachingConfig;
use super::{Contradiction, Extension, Layer, Mixer, MixerConfig, MixerSpec};
use crate::anchors::Policy;
use crate::config::{Document, choice, keys_of};
use crate::error::Result;
use crate::model::Builder;

/// A mixer for each layer.
#[derive(Clone, Debug, PartialEq)]
pub struct HybridConfig {
    /// In order, from the first layer. A layer of MARCH is one of Gated DeltaNet with anchors.
    pub mixers: Vec<MixerConfig>,
}

/// Before the names of the keys of attention.
pub(crate) const ATTENTION: &str = "attention_";

/// The keys that say which layer has which mixer.
#[derive(Serialize, Deserialize)]
struct Stack {
    layers: TextOrList<String>,
    #[serde(default)]
    anchors: Option<TextOrList<usize>>,
}

/// The number of layers, which all models have.
#[derive(Serialize, Deserialize)]
struct Count {
    num_hidden_layers: usize,
}

#[derive(Clone, Serialize, Deserialize)]
#[serde(untagged)]
enum TextOrList<T> {
    Text(String),
    List(Vec<T>),
}

/// What a layer of a stack can be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Attention,
    GatedDeltaNet,
    LogLinear,
    MemoryCaching,
}

const KINDS: [(&str, Kind); 4] = [
    ("attention", Kind::Attention),
    ("gated_delta_net", Kind::GatedDeltaNet),
    ("log_linear", Kind::LogLinear),
    ("memory_caching", Kind::MemoryCaching),
];

/// More layers than this are a mistake; the model's own check says so.
const MOST_LAYERS: usize = 10_000;

impl Kind {
    fn named(name: &str) -> std::result::Result<Self, String> {
        let found = KINDS.iter().find(|(known, _)| *known == name);
        found.map(|(_, kind)| *kind).ok_or_else(|| {
            let choice = choice(name, "a layer can be", KINDS.iter().map(|(name, _)| *name));
            format!("has `{name}`; {choice}")
        })
    }

    fn of(mixer: &MixerConfig) -> Self {
        match mixer {
            MixerConfig::Attention(_) => Self::Attention,
            MixerConfig::LogLinear(_) => Self::LogLinear,
            MixerConfig::MemoryCaching(_) => Self::MemoryCaching,
            MixerConfig::GatedDeltaNet(_) | MixerConfig::March(_) | MixerConfig::Hybrid(_) => {
                Self::GatedDeltaNet
            }
        }
    }

    fn name(self) -> &'static str {
        KINDS.iter().find(|(_, kind)| *kind == self).map_or("", |(name, _)| name)
    }
}

/// The kinds of `count` layers.
fn kinds(layers: &TextOrList<String>, count: usize) -> std::result::Result<Vec<Kind>, String> {
    match layers {
        TextOrList::List(names) if names.len() != count => {
            Err(format!("has {} names for {count} layers (`num_hidden_layers`)", names.len()))
        }
        TextOrList::List(names) => names.iter().map(|name| Kind::named(name)).collect(),
        TextOrList::Text(text) => {
            let mut pattern = Vec::new();
            for part in text.split(',').map(str::trim) {
                let (times, name) = match part.split_once(char::is_whitespace) {
                    Some((times, name)) => (times, name.trim()),
                    None => ("1", part),
                };
                let times = times.parse().ok().filter(|times| (1..=MOST_LAYERS).contains(times));
                let Some(times) = times else {
                    return Err(format!(
                        "has `{part}`; a part is a number and a name, such as `3 gated_delta_net`"
                    ));
                };
                pattern.extend(std::iter::repeat_n(Kind::named(name)?, times));
            }
            Ok(pattern.into_iter().cycle().take(count).collect())
        }
    }
}

/// The layers that have anchors.
fn anchored(anchors: &TextOrList<usize>, kinds: &[Kind]) -> std::result::Result<Vec<usize>, String> {
    let chosen = match anchors {
        TextOrList::List(list) => list.clone(),
        TextOrList::Text(text) => {
            let form = "it has the form `every 2nd gated_delta_net` or `every gated_delta_net`, or is a list of layers \
                        counted from 0";
            let words: Vec<&str> = text.split_whitespace().collect();
            let (step, name) = match words[..] {
                ["every", name] => (1, name),
                ["every", number, name] => {
                    let digits = number.trim_end_matches(|c: char| c.is_ascii_alphabetic());
                    (digits.parse().unwrap_or(0), name)
                }
                _ => (0, ""),
            };
            if step == 0 {
                return Err(format!("is `{text}`; {form}"));
            }
            let kind = Kind::named(name)?;
            let all = kinds.iter().enumerate().filter(|(_, found)| **found == kind).map(|(at, _)| at);
            all.skip(step - 1).step_by(step).collect()
        }
    };
    for &layer in &chosen {
        match kinds.get(layer) {
            Some(Kind::GatedDeltaNet) => {}
            Some(kind) => {
                let name = kind.name();
                return Err(format!(
                    "names layer {layer}, which is `{name}`; only gated_delta_net has anchors"
                ));
            }
            None => {
                return Err(format!(
                    "names layer {layer}, but the last of {} is {}",
                    kinds.len(),
                    kinds.len() - 1
                ));
            }
        }
    }
    if chosen.is_empty() {
        return Err("names no layer; leave the key out for a stack without anchors".into());
    }
    Ok(chosen)
}

/// The number of items after which a list repeats.
fn period<T: PartialEq>(list: &[T]) -> usize {
    let fits = |length: &usize| list[*length..].iter().zip(list).all(|(a, b)| a == b);
    (1..list.len()).find(fits).unwrap_or(list.len())
}

/// The shortest pattern that gives these names when it repeats.
fn pattern(names: &[&str]) -> String {
    let parts = names[..period(names)].chunk_by(|a, b| a == b);
    parts.map(|part| format!("{} {}", part.len(), part[0])).collect::<Vec<_>>().join(", ")
}

/// The keys of attention that messages name, as they are called in a stack.
const ATTENTION_KEYS: [&str; 8] = [
    "attention_num_heads",
    "attention_num_kv_heads",
    "attention_head_width",
    "attention_rotary_factor",
    "attention_rope_theta",
    "attention_rotary_scaling",
    "attention_window_size",
    "attention_qk_norm_eps",
];

/// A key of attention as it is called in a stack.
fn attention_key(key: &'static str) -> &'static str {
    ATTENTION_KEYS.into_iter().find(|known| known.strip_prefix(ATTENTION) == Some(key)).unwrap_or(key)
}

/// A message of attention with its keys as they are called in a stack.
fn with_attention_keys(message: String) -> String {
    ATTENTION_KEYS.into_iter().fold(message, |message, key| {
        message.replace(&format!("`{}`", &key[ATTENTION.len()..]), &format!("`{key}`"))
    })
}

impl HybridConfig {
    /// A mixer for each layer; layers with the same mixer may be of any one kind.
    pub(crate) fn stack(mixers: Vec<MixerConfig>) -> MixerConfig {
        match mixers.first() {
            Some(first) if mixers.iter().all(|mixer| mixer == first) => first.clone(),
            _ => MixerConfig::Hybrid(Self { mixers }),
        }
    }

    /// A model's mixers with some of its layers of Gated DeltaNet as layers of MARCH: `layers` is a text as for the key
    /// `anchors`, or numbers with commas between them. Also returns the numbers of these layers.
    pub(crate) fn with_anchors(
        mixer: &MixerConfig,
        count: usize,
        layers: &str,
        routing: &RoutingConfig,
    ) -> std::result::Result<(MixerConfig, Vec<usize>), String> {
        let mut mixers = match mixer {
            MixerConfig::Hybrid(stack) => stack.mixers.clone(),
            single => vec![single.clone(); count],
        };
        if mixers.iter().any(|mixer| mixer.policy().is_some()) {
            return Err("the model has anchors already; other policies are chosen when it is used".into());
        }
        let numbers: Option<Vec<usize>> =
            layers.split(',').map(|number| number.trim().parse().ok()).collect();
        let wanted = numbers.map_or_else(|| TextOrList::Text(layers.into()), TextOrList::List);
        let kinds: Vec<Kind> = mixers.iter().map(Kind::of).collect();
        let layers = anchored(&wanted, &kinds)?;
        for &layer in &layers {
            if let MixerConfig::GatedDeltaNet(base) = &mixers[layer] {
                mixers[layer] =
                    MixerConfig::March(MarchConfig { base: base.clone(), routing: routing.clone() });
            }
        }
        Ok((Self::stack(mixers), layers))
    }

    /// The layers with anchors.
    fn anchored(&self) -> Vec<usize> {
        let march = |(at, mixer): (usize, &MixerConfig)| matches!(mixer, MixerConfig::March(_)).then_some(at);
        self.mixers.iter().enumerate().filter_map(march).collect()
    }

    /// One mixer of each kind.
    fn each_kind(&self) -> impl Iterator<Item = &MixerConfig> {
        let first = |kind: Kind, march: bool| {
            let is = move |mixer: &&MixerConfig| {
                Kind::of(mixer) == kind && matches!(mixer, MixerConfig::March(_)) == march
            };
            self.mixers.iter().find(is)
        };
        KINDS.into_iter().flat_map(move |(_, kind)| [first(kind, false), first(kind, true)]).flatten()
    }

    /// What a layer needs to know of the others.
    fn layer(&self, layer: Layer) -> Layer {
        let reads =
            |mixer: &MixerConfig| matches!(mixer, MixerConfig::GatedDeltaNet(_) | MixerConfig::March(_));
        let (before, after) = self.mixers.split_at(layer.index.min(self.mixers.len()));
        Layer {
            anchored: self.mixers.iter().filter(|mixer| mixer.policy().is_some()).count(),
            equal_anchors: !before.iter().any(reads),
            ends_anchors: !after.iter().skip(1).any(|mixer| matches!(mixer, MixerConfig::March(_))),
            ..layer
        }
    }
}

impl MixerSpec for HybridConfig {
    const MODEL_TYPE: &'static str = "hybrid";

    fn read(document: &mut Document) -> Result<Self> {
        let Stack { layers, anchors } = document.keys()?;
        let Count { num_hidden_layers: count } = document.keys()?;
        let count = count.min(MOST_LAYERS);
        let kinds = kinds(&layers, count).map_err(|message| document.error("layers", message))?;
        let with_anchors = anchors.map(|anchors| anchored(&anchors, &kinds)).transpose();
        let with_anchors =
            with_anchors.map_err(|message| document.error("anchors", message))?.unwrap_or_default();
        let mut mixers: Vec<MixerConfig> = Vec::with_capacity(count);
        for (at, kind) in kinds.into_iter().enumerate() {
            let march = with_anchors.contains(&at);
            let same = |mixer: &&MixerConfig| {
                Kind::of(mixer) == kind && matches!(mixer, MixerConfig::March(_)) == march
            };
            let mixer = match mixers.iter().find(same) {
                Some(mixer) => mixer.clone(),
                None => match kind {
                    Kind::Attention => {
                        MixerConfig::Attention(document.within(ATTENTION, AttentionConfig::read)?)
                    }
                    Kind::GatedDeltaNet if march => MixerConfig::March(MarchConfig::read(document)?),
                    Kind::GatedDeltaNet => MixerConfig::GatedDeltaNet(GatedDeltaNetConfig::read(document)?),
                    Kind::LogLinear => MixerConfig::LogLinear(LogLinearConfig::read(document)?),
                    Kind::MemoryCaching => MixerConfig::MemoryCaching(MemoryCachingConfig::read(document)?),
                },
            };
            mixers.push(mixer);
        }
        Ok(Self { mixers })
    }

    fn write(&self) -> Map<String, Value> {
        let names: Vec<&str> = self.mixers.iter().map(|mixer| Kind::of(mixer).name()).collect();
        let anchors = self.anchored();
        let anchors = (!anchors.is_empty()).then_some(TextOrList::List(anchors));
        let mut keys = keys_of(&Stack { layers: TextOrList::Text(pattern(&names)), anchors });
        if keys.get("anchors").is_some_and(Value::is_null) {
            keys.remove("anchors");
        }
        for mixer in self.each_kind() {
            let own = mixer.write().into_iter();
            match mixer {
                MixerConfig::Attention(_) => {
                    keys.extend(own.map(|(key, value)| (format!("{ATTENTION}{key}"), value)));
                }
                _ => keys.extend(own),
            }
        }
        keys
    }

    fn check(&self, hidden_size: usize) -> std::result::Result<(), Contradiction> {
        for mixer in self.each_kind() {
            mixer.check(hidden_size).map_err(|(key, message)| match mixer {
                MixerConfig::Attention(_) => (attention_key(key), with_attention_keys(message)),
                _ => (key, message),
            })?;
        }
        let caching = self.mixers.iter().any(|mixer| matches!(mixer, MixerConfig::MemoryCaching(_)));
        if caching && !self.anchored().is_empty() {
            let message = "is set, and there are layers of memory_caching, which have anchors of their own; use one of \
                           the two kinds";
            return Err(("anchors", message.into()));
        }
        Ok(())
    }

    fn has_anchor_stream(&self) -> bool {
        self.mixers.iter().any(MixerConfig::has_anchor_stream)
    }

    fn has_same_bits_in_any_calls(&self) -> bool {
        self.mixers.iter().all(MixerConfig::has_same_bits_in_any_calls)
    }

    /// All layers with anchors have the same.
    fn policy(&self) -> Option<Policy> {
        self.mixers.iter().find_map(MixerConfig::policy)
    }

    fn period(&self) -> usize {
        period(&self.mixers).max(1)
    }

    fn places_adaptively(&self) -> bool {
        self.mixers.first().is_some_and(|mixer| mixer.policy().is_some())
    }

    fn extension(&self) -> Option<Extension> {
        let own = self.mixers.iter().find_map(MixerConfig::extension)?;
        let base = |mixer: &MixerConfig| mixer.extension().map_or_else(|| mixer.clone(), |own| own.base);
        Some(Extension { base: Self::stack(self.mixers.iter().map(base).collect()), ..own })
    }

    fn start_as_base(&mut self, null_bias: f64) -> std::result::Result<(), Contradiction> {
        self.mixers.iter_mut().try_for_each(|mixer| mixer.start_as_base(null_bias))
    }

    fn build(&self, hidden_size: usize, layer: Layer, builder: &mut Builder<'_>) -> Box<dyn Mixer> {
        let Some(mixer) = self.mixers.get(layer.index) else { unreachable!("one mixer for each layer") };
        mixer.build(hidden_size, self.layer(layer), builder)
    }
}
