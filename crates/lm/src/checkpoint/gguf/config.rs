//! The metadata of a GGUF file in the terms of the `config.json` that the model was converted from, which is then read
//! like any other ([`crate::model::Dialect`]).

use serde_json::{Map, Value, json};

use super::metadata::Metadata;
use crate::error::{Error, Result};
use crate::model::{Dialect, ModelConfig};

/// The kinds of models that can be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::checkpoint) enum Architecture {
    Llama,
    Qwen3,
    Qwen35,
}

pub(super) const ARCHITECTURE: &str = "general.architecture";

/// Keys, after the architecture and a dot, and what `config.json` calls them.
const NAMES: [(&str, &str); 14] = [
    ("embedding_length", "hidden_size"),
    ("feed_forward_length", "intermediate_size"),
    ("block_count", "num_hidden_layers"),
    ("attention.head_count", "num_attention_heads"),
    ("attention.head_count_kv", "num_key_value_heads"),
    ("attention.key_length", "head_dim"),
    ("attention.layer_norm_rms_epsilon", "rms_norm_eps"),
    ("rope.freq_base", "rope_theta"),
    ("rope.scaling.type", "rope_scaling"),
    ("rope.dimension_count", "partial_rotary_factor"),
    ("ssm.conv_kernel", "linear_conv_kernel_dim"),
    ("ssm.state_size", "linear_key_head_dim"),
    ("ssm.group_count", "linear_num_key_heads"),
    ("ssm.time_step_rank", "linear_num_value_heads"),
];

/// Keys that are read elsewhere below, or say nothing about the computation on text.
const OTHERS: [&str; 18] = [
    "context_length",
    "vocab_size",
    "tensor_data_layout",
    "attention.value_length",
    "attention.causal",
    "attention.layer_norm_epsilon",
    "attention.recurrent_layers",
    "expert_count",
    "expert_used_count",
    "rope.scaling.factor",
    "rope.scaling.finetuned",
    "rope.scaling.original_context_length",
    "rope.scale_linear",
    "rope.dimension_sections",
    "ssm.inner_size",
    "full_attention_interval",
    "nextn_predict_layers",
    "nextn_predict_layer_count",
];

/// What the tensors say about the configuration.
pub(super) struct Facts {
    /// Rows of the embeddings.
    pub vocab_size: usize,
    /// The number of tensors, and the largest dimension that one has.
    pub tensors: usize,
    pub largest: usize,
    /// Whether there is an output head of its own.
    pub has_head: bool,
    /// Whether attention has biases.
    pub has_bias: bool,
    /// The factors by which wavelengths are longer, if they are scaled one by one.
    pub rope_factors: Option<Vec<f32>>,
}

impl Architecture {
    /// The architecture of a file. Rejects files that hold no whole language model.
    pub fn of(metadata: &Metadata) -> Result<Self> {
        let name = metadata.required(ARCHITECTURE, metadata.text(ARCHITECTURE)?)?;
        let architecture = match name {
            "llama" => Self::Llama,
            "qwen3" => Self::Qwen3,
            "qwen35" => Self::Qwen35,
            other => {
                let message = format!(
                    "is \"{other}\", which is not supported; \"llama\", \"qwen3\" and \"qwen35\" can be loaded"
                );
                return Err(metadata.error(ARCHITECTURE, message));
            }
        };
        if let Some(kind) = metadata.text("general.type")?.filter(|kind| *kind != "model") {
            let message =
                format!("is \"{kind}\"; only \"model\" can be loaded: name the file of the language model");
            return Err(metadata.error("general.type", message));
        }
        if let Some(count) = metadata.whole("split.count")?.filter(|count| *count > 1) {
            let message = format!(
                "is {count}: the file is one of several parts; join them with `llama-gguf-split --merge FIRST OUTPUT`"
            );
            return Err(metadata.error("split.count", message));
        }
        Ok(architecture)
    }

    fn name(self) -> &'static str {
        match self {
            Self::Llama => "llama",
            Self::Qwen3 => "qwen3",
            Self::Qwen35 => "qwen35",
        }
    }
}

/// The layers of a file: those of the model, and those after them that predict further tokens.
pub(super) fn layers(metadata: &Metadata, architecture: Architecture) -> Result<(u64, u64)> {
    let keys = Keys { metadata, architecture };
    let all = keys.needed("block_count")?;
    let ahead = keys.whole("nextn_predict_layers")?.unwrap_or(0);
    match all.checked_sub(ahead) {
        Some(own) if own > 0 => Ok((own, ahead)),
        _ => Err(keys.error("nextn_predict_layers", format!("is {ahead} of {all} layers (`block_count`)"))),
    }
}

/// The configuration of a file's model.
pub(super) fn read(metadata: &Metadata, architecture: Architecture, facts: &Facts) -> Result<ModelConfig> {
    let keys = Keys { metadata, architecture };
    keys.refuse_unknown()?;
    let json = Value::Object(keys.translate(facts)?).to_string();
    let origin = metadata.file.path().display().to_string();
    let translated = ModelConfig::from_any_json(&json, &origin).map_err(|error| keys.renamed(error));
    let (config, dialect) = translated?;
    debug_assert!(matches!(dialect, Dialect::Llama | Dialect::Qwen35 { nested: false }));
    Ok(config)
}

struct Keys<'a> {
    metadata: &'a Metadata,
    architecture: Architecture,
}

impl Keys<'_> {
    fn full(&self, key: &str) -> String {
        format!("{}.{key}", self.architecture.name())
    }

    fn error(&self, key: &str, message: impl Into<String>) -> Error {
        self.metadata.error(&self.full(key), message)
    }

    fn whole(&self, key: &str) -> Result<Option<u64>> {
        self.metadata.whole(&self.full(key))
    }

    fn needed(&self, key: &str) -> Result<u64> {
        let found = self.whole(key)?;
        self.metadata.required(&self.full(key), found)
    }

    fn number(&self, key: &str) -> Result<Option<f64>> {
        self.metadata.number(&self.full(key))
    }

    /// Rejects keys of the architecture that are not known: they could change the result.
    fn refuse_unknown(&self) -> Result<()> {
        let prefix = self.full("");
        let known = |key: &str| NAMES.iter().any(|(known, _)| *known == key) || OTHERS.contains(&key);
        let own = self.metadata.values.keys().filter_map(|key| key.strip_prefix(&prefix));
        match own.into_iter().find(|key| !known(key)) {
            None => Ok(()),
            Some(key) => {
                Err(self
                    .error(key, "is not known and may change what the model computes; it cannot be loaded"))
            }
        }
    }

    /// An error about a key of `config.json` as one about the key that it came from.
    fn renamed(&self, error: Error) -> Error {
        let Error::Config { origin, key, message } = error else { return error };
        let theirs = NAMES.iter().find(|(_, ours)| *ours == key).map(|(theirs, _)| self.full(theirs));
        Error::Config { origin, key: theirs.unwrap_or(key), message }
    }

    /// The keys of `config.json`.
    fn translate(&self, facts: &Facts) -> Result<Map<String, Value>> {
        let (own_layers, _) = layers(self.metadata, self.architecture)?;
        let hidden = self.needed("embedding_length")?;
        let heads = self.needed("attention.head_count")?;
        let kv_heads = self.whole("attention.head_count_kv")?.unwrap_or(heads);
        let epsilon = self.number("attention.layer_norm_rms_epsilon")?;
        let epsilon = self.metadata.required(&self.full("attention.layer_norm_rms_epsilon"), epsilon)?;
        let model_type = match self.architecture {
            Architecture::Llama => "llama",
            Architecture::Qwen3 => "qwen3",
            Architecture::Qwen35 => "qwen3_5_text",
        };
        let mut json = json!({
            "model_type": model_type,
            "vocab_size": facts.vocab_size,
            "hidden_size": hidden,
            "num_hidden_layers": own_layers,
            "intermediate_size": self.needed("feed_forward_length")?,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "rms_norm_eps": epsilon,
            "rope_theta": self.number("rope.freq_base")?.unwrap_or(10_000.0),
            "tie_word_embeddings": !facts.has_head,
            "attention_bias": facts.has_bias,
            "max_position_embeddings": self.whole("context_length")?,
        });
        if own_layers > facts.tensors as u64 {
            let message = format!("is {own_layers}, but the file has {} tensors in all", facts.tensors);
            return Err(self.error("block_count", message));
        }
        let width = self.head_width(hidden, heads, &mut json)?;
        self.fits("attention.head_count", heads, width, facts)?;
        self.fits("attention.head_count_kv", kv_heads, width, facts)?;
        let turned = self.whole("rope.dimension_count")?.unwrap_or(width);
        if turned != width {
            if self.architecture == Architecture::Llama || turned == 0 || turned > width {
                let message = format!("is {turned}, but heads are {width} wide; both must be the same");
                return Err(self.error("rope.dimension_count", message));
            }
            json["partial_rotary_factor"] = json!(turned as f64 / width as f64);
        }
        if let Some(scaling) = self.scaling(facts)? {
            json["rope_scaling"] = scaling;
        }
        for (key, only) in [("expert_count", 0), ("expert_used_count", 0)] {
            if let Some(found) = self.whole(key)?.filter(|found| *found != only) {
                let message = format!("is {found}; feed-forward layers with experts are not supported");
                return Err(self.error(key, message));
            }
        }
        if self.metadata.flag(&self.full("attention.causal"))? == Some(false) {
            return Err(
                self.error("attention.causal", "is false; only models that read forwards can be loaded")
            );
        }
        if self.architecture == Architecture::Qwen35 {
            self.linear(own_layers, facts, &mut json)?;
        }
        Ok(json.as_object().cloned().unwrap_or_default())
    }

    /// Rejects heads whose rows no tensor of the file has.
    fn fits(&self, key: &str, heads: u64, width: u64, facts: &Facts) -> Result<()> {
        match heads.checked_mul(width) {
            Some(rows) if rows <= facts.largest as u64 => Ok(()),
            _ => {
                Err(self.error(key, format!("is {heads}; no tensor of the file has rows for so many heads")))
            }
        }
    }

    /// The width of a head of attention.
    fn head_width(&self, hidden: u64, heads: u64, json: &mut Value) -> Result<u64> {
        let Some(width) = self.whole("attention.key_length")? else {
            return match hidden.checked_div(heads).filter(|width| width * heads == hidden) {
                Some(width) => {
                    json["head_dim"] = json!(width);
                    Ok(width)
                }
                None => {
                    let message = format!("is {heads}, which does not divide `embedding_length`, {hidden}");
                    Err(self.error("attention.head_count", message))
                }
            };
        };
        let value = self.whole("attention.value_length")?.unwrap_or(width);
        if value != width {
            let message = format!("is {value}, but keys are {width} wide; both must be the same");
            return Err(self.error("attention.value_length", message));
        }
        json["head_dim"] = json!(width);
        Ok(width)
    }

    /// How positions are scaled, as `rope_scaling` says it.
    fn scaling(&self, facts: &Facts) -> Result<Option<Value>> {
        let key = "rope.scaling.type";
        let kind = self.metadata.text(&self.full(key))?.unwrap_or("none");
        let factor = self.number("rope.scaling.factor")?.or(self.number("rope.scale_linear")?);
        let linear = match (kind, factor) {
            ("none" | "linear", None) => None,
            // Without a type, a factor counts too.
            ("none" | "linear", Some(factor)) => {
                Some(factor).filter(|factor| *factor != 1.0 && *factor != 0.0)
            }
            (other, _) => {
                let message =
                    format!("is \"{other}\", which is not supported; \"none\" and \"linear\" can be loaded");
                return Err(self.error(key, message));
            }
        };
        match (&facts.rope_factors, linear) {
            (None, None) => Ok(None),
            (None, Some(factor)) => Ok(Some(json!({ "rope_type": "linear", "factor": factor }))),
            (Some(_), Some(factor)) => {
                let message = format!("is {factor}, but `rope_freqs.weight` scales positions as well");
                Err(self.error("rope.scaling.factor", message))
            }
            (Some(factors), None) => self.llama3(factors).map(Some),
        }
    }

    /// The scaling of Llama 3 that gives these factors.
    fn llama3(&self, factors: &[f32]) -> Result<Value> {
        /// The values of Llama 3.1 to 3.3, which differ in the largest factor.
        const LOW: f64 = 1.0;
        const HIGH: f64 = 4.0;
        const ORIGINAL: f64 = 8192.0;
        let factor = f64::from(factors.iter().copied().fold(1.0, f32::max));
        let theta = self.number("rope.freq_base")?.unwrap_or(10_000.0);
        let expected = |i: usize| {
            let wavelength = std::f64::consts::TAU * theta.powf(i as f64 / factors.len() as f64);
            let smooth = (ORIGINAL / wavelength - LOW) / (HIGH - LOW);
            match wavelength {
                short if short < ORIGINAL / HIGH => 1.0,
                long if long > ORIGINAL / LOW => factor,
                _ => 1.0 / ((1.0 - smooth) / factor + smooth),
            }
        };
        let same = |(i, found): (usize, &f32)| (f64::from(*found) / expected(i) - 1.0).abs() < 1e-3;
        if !factors.iter().enumerate().all(same) {
            let message = "tensor `rope_freqs.weight` scales positions in another way than Llama 3.1 to 3.3, which is \
                           not supported";
            return Err(Error::file(self.metadata.file.path(), message));
        }
        Ok(json!({
            "rope_type": "llama3", "factor": factor, "low_freq_factor": LOW, "high_freq_factor": HIGH,
            "original_max_position_embeddings": ORIGINAL,
        }))
    }

    /// The keys of Gated DeltaNet, and which layers have it.
    fn linear(&self, layers: u64, facts: &Facts, json: &mut Value) -> Result<()> {
        let (heads, inner) = (self.needed("ssm.time_step_rank")?, self.needed("ssm.inner_size")?);
        let key_heads = self.needed("ssm.group_count")?;
        if heads == 0 || inner % heads != 0 {
            let message =
                format!("is {inner}, not a multiple of the {heads} value heads (`ssm.time_step_rank`)");
            return Err(self.error("ssm.inner_size", message));
        }
        if key_heads == 0 || heads % key_heads != 0 {
            let message = format!(
                "is {key_heads}, which does not divide the {heads} value heads (`ssm.time_step_rank`)"
            );
            return Err(self.error("ssm.group_count", message));
        }
        let key_width = self.needed("ssm.state_size")?;
        self.fits("ssm.time_step_rank", heads, inner / heads, facts)?;
        self.fits("ssm.group_count", key_heads, key_width, facts)?;
        json["linear_conv_kernel_dim"] = json!(self.needed("ssm.conv_kernel")?);
        json["linear_key_head_dim"] = json!(key_width);
        json["linear_num_key_heads"] = json!(key_heads);
        json["linear_num_value_heads"] = json!(heads);
        json["linear_value_head_dim"] = json!(inner / heads);
        let listed = "attention.recurrent_layers";
        let Some(recurrent) = self.metadata.flags(&self.full(listed))? else {
            json["full_attention_interval"] = json!(self.whole("full_attention_interval")?.unwrap_or(4));
            return Ok(());
        };
        if (recurrent.len() as u64) < layers {
            let message = format!("has {} entries for {layers} layers", recurrent.len());
            return Err(self.error(listed, message));
        }
        let kind = |recurrent: &bool| if *recurrent { "linear_attention" } else { "full_attention" };
        json["layer_types"] = recurrent.iter().take(layers as usize).map(kind).collect();
        Ok(())
    }
}
