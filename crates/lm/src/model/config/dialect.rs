//! Other tools' `config.json`, in the terms of this program.
//!
//! A dialect is a family of checkpoints with the same keys and tensor names. [`translate`] replaces its keys by ours; what
//! it does not know stays, and is accepted or rejected by name like any other key. Defaults are those of the classes in
//! transformers 5.23. The names of the tensors are in `checkpoint/names.rs`.

use serde_json::{Map, Value, json};

use super::MOST_LAYERS;
use crate::config::Document;
use crate::error::Result;

/// How a checkpoint's keys and tensors are called.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Dialect {
    /// As flash-linear-attention and this program call them.
    #[default]
    Own,
    /// transformers' Llama and Qwen3: attention in every layer.
    Llama,
    /// transformers' Qwen3.5; `nested` if the language model is one part of a model that also sees.
    Qwen35 {
        /// Whether the text model's tensors are below `model.language_model.`.
        nested: bool,
    },
    /// transformers' Qwen3-Next: like Qwen3.5, with projections fused by head.
    Qwen3Next,
}

/// The values of `model_type` that only [`translate`] knows.
pub(super) const MODEL_TYPES: [&str; 5] = ["llama", "qwen3", "qwen3_5", "qwen3_5_text", "qwen3_next"];

/// Keys of a model that also sees which say nothing about its language model.
const SIGHT: [&str; 6] = [
    "vision_config",
    "image_token_id",
    "video_token_id",
    "vision_start_token_id",
    "vision_end_token_id",
    "architectures",
];

/// Keys that say nothing about the result in these classes; `mtp` is a head for several tokens, which is left out.
const IDLE: [&str; 10] = [
    "architectures",
    "attention_dropout",
    "is_llama_config",
    "mamba_ssm_dtype",
    "mtp_num_hidden_layers",
    "mtp_use_dedicated_embeddings",
    "pretraining_tp",
    "rope_interleaved",
    "language_model_only",
    "transformers.js_config",
];

/// Keys that only matter to a feed-forward layer with experts.
const EXPERTS: [&str; 7] = [
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "num_experts_per_tok",
    "norm_topk_prob",
    "output_router_logits",
    "router_aux_loss_coef",
    "moe_router_dtype",
];

/// Keys of Gated DeltaNet, which a stack of attention alone does not have.
pub(super) const OF_RECURRENCE: [&str; 9] = [
    "num_heads",
    "num_v_heads",
    "head_dim",
    "expand_v",
    "conv_size",
    "allow_neg_eigval",
    "use_gate",
    "output_gate_activation",
    "use_short_conv",
];

/// The layers of a `layer_types` list.
const LINEAR: &str = "linear_attention";
const FULL: &str = "full_attention";

/// Replaces the keys of another tool by ours, and says whose they were.
pub(super) fn translate(document: &mut Document) -> Result<Dialect> {
    let model_type = document.get("model_type").and_then(Value::as_str).unwrap_or_default().to_string();
    match model_type.as_str() {
        "gated_deltanet" => attention_of_fla(document).map(|()| Dialect::Own),
        "llama" => llama(document, &model_type).map(|()| Dialect::Llama),
        "qwen3" => llama(document, &model_type).map(|()| Dialect::Llama),
        "qwen3_5_text" => qwen(document, false).map(|()| Dialect::Qwen35 { nested: false }),
        "qwen3_5" => {
            text_part(document)?;
            qwen(document, false)?;
            Ok(Dialect::Qwen35 { nested: true })
        }
        "qwen3_next" => qwen(document, true).map(|()| Dialect::Qwen3Next),
        _ => Ok(Dialect::Own),
    }
}

/// Keeps the language model of a model that also sees.
fn text_part(document: &mut Document) -> Result<()> {
    let Some(text) = document.take("text_config") else {
        return Err(document.error("text_config", "is missing; the language model is described there"));
    };
    let Value::Object(text) = text else {
        return Err(document.error("text_config", format!("is {text}; it must be an object")));
    };
    for key in SIGHT {
        document.take(key);
    }
    for (key, value) in text {
        match document.get(&key) {
            _ if key == "model_type" => {
                if !matches!(value.as_str(), Some("qwen3_5_text" | "qwen3_5")) {
                    let message = format!("has `model_type` {value}; only \"qwen3_5_text\" can be loaded");
                    return Err(document.error("text_config", message));
                }
            }
            // What an output head is tied to is said in either place.
            Some(outer) if key == "tie_word_embeddings" && *outer != value => {
                let message = format!("is {outer}, but `text_config` says {value}; make both the same");
                return Err(document.error(&key, message));
            }
            Some(_) if key == "tie_word_embeddings" => {}
            _ => document.set(&key, value),
        }
    }
    Ok(())
}

/// Keys that are read under another name, or checked.
struct Keys<'a> {
    document: &'a mut Document,
    /// What the class has for a key that is missing.
    defaults: Map<String, Value>,
}

impl Keys<'_> {
    /// Takes a key; null counts as missing, where [`Keys::common`] lets it pass.
    fn take(&mut self, key: &str) -> Value {
        let found = self.document.take(key).filter(|value| !value.is_null());
        found.unwrap_or_else(|| self.defaults.get(key).cloned().unwrap_or(Value::Null))
    }

    /// Gives a key our name for it.
    fn rename(&mut self, theirs: &str, ours: &str) {
        let value = self.take(theirs);
        self.document.set_from(ours, value, theirs);
    }

    fn error(&self, key: &str, message: String) -> crate::error::Error {
        self.document.error(key, message)
    }

    /// A whole number.
    fn number(&mut self, key: &str) -> Result<usize> {
        let value = self.take(key);
        let whole = value.as_f64().filter(|number| number.fract() == 0.0 && (0.0..1e9).contains(number));
        match whole {
            Some(number) => Ok(number as usize),
            None => Err(self.error(key, format!("is {value}; it must be a whole number, 0 or more"))),
        }
    }

    /// Number of layers, as far as it is a number at all; bounded, because lists of as many entries follow.
    fn layers(&self) -> Result<usize> {
        let count = self.document.get("num_hidden_layers").and_then(Value::as_u64).unwrap_or(0);
        match count <= MOST_LAYERS as u64 {
            true => Ok(count as usize),
            false => {
                let message = format!("is {count}; it must be from 1 to {MOST_LAYERS}");
                Err(self.error("num_hidden_layers", message))
            }
        }
    }

    fn flag(&mut self, key: &str) -> Result<bool> {
        let value = self.take(key);
        value.as_bool().ok_or_else(|| self.error(key, format!("is {value}; it must be true or false")))
    }

    /// Takes a key that must have one value.
    fn demand(&mut self, key: &str, only: &Value, why: &str) -> Result<()> {
        let value = self.take(key);
        if value.is_null() || value == *only {
            return Ok(());
        }
        Err(self.error(key, format!("is {value}, which is not supported: {why}; only {only} can be loaded")))
    }

    /// The keys that all of these classes have.
    fn common(&mut self) -> Result<()> {
        for key in IDLE {
            self.document.take(key);
        }
        // These classes have a null as it is, or reject it; only of a window it is a value.
        let null = |key: &&String| {
            *key != "sliding_window" && self.document.has(key) && self.document.get(key).is_none()
        };
        if let Some(key) = self.defaults.keys().find(null) {
            return Err(self.error(key, "is null; give it a value, or remove it for the default".into()));
        }
        let activation = self.take("hidden_act");
        if !matches!(activation.as_str(), Some("silu" | "swish")) {
            return Err(self.error("hidden_act", format!("is {activation}; only \"silu\" can be loaded")));
        }
        for key in
            ["vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size", "initializer_range"]
        {
            self.rename(key, key);
        }
        self.rename("tie_word_embeddings", "tie_word_embeddings");
        self.rename("rms_norm_eps", "norm_eps");
        Ok(())
    }

    /// Heads, biases and positions of attention; `prefix` comes before our names.
    fn attention(&mut self, prefix: &str) -> Result<()> {
        let ours = |key: &str| format!("{prefix}{key}");
        let heads = self.take("num_attention_heads");
        let kv_heads = Some(self.take("num_key_value_heads")).filter(|value| !value.is_null());
        self.document.set_from(
            &ours("num_kv_heads"),
            kv_heads.unwrap_or(heads.clone()),
            "num_key_value_heads",
        );
        self.document.set_from(&ours("num_heads"), heads, "num_attention_heads");
        let width = self.take("head_dim");
        if !width.is_null() {
            self.document.set_from(&ours("head_width"), width, "head_dim");
        }
        let biased = self.flag("attention_bias")?;
        for key in ["qkv_bias", "output_bias"] {
            self.document.set_from(&ours(key), biased.into(), "attention_bias");
        }
        self.positions(prefix)
    }

    /// Rotary positions, from `rope_parameters` or its older form, `rope_theta` and `rope_scaling`.
    fn positions(&mut self, prefix: &str) -> Result<()> {
        let theta = self.take("rope_theta");
        let share = self.take("partial_rotary_factor");
        let [newer, older] = ["rope_parameters", "rope_scaling"].map(|key| self.take(key));
        let key = if newer.is_null() { "rope_scaling" } else { "rope_parameters" };
        if !newer.is_null() && !older.is_null() && newer != older {
            let message = format!("is {older}, but `rope_parameters` is {newer}; remove one of the two");
            return Err(self.error("rope_scaling", message));
        }
        let value = if newer.is_null() { older } else { newer };
        let mut settings = match value.clone() {
            Value::Null => Map::new(),
            Value::Object(settings) => settings,
            _ => return Err(self.error(key, format!("is {value}; it must be an object"))),
        };
        let refuse = |this: &Self, what: String| {
            let message = format!(
                "is {value}, which is not supported: {what}; rope_type can be \"default\", \"linear\" or \"llama3\""
            );
            Err(this.error(key, message))
        };
        if let Some((name, _)) = settings.iter().find(|(_, value)| value.is_null()) {
            return refuse(self, format!("`{name}` is null"));
        }
        let older = settings.remove("type");
        let kind = settings.remove("rope_type").or(older).unwrap_or(json!("default"));
        let theta = settings.remove("rope_theta").unwrap_or(theta);
        let share = settings.remove("partial_rotary_factor").unwrap_or(share);
        // For text, positions along three axes are equal, so their order does not matter.
        for axes in ["mrope_section", "mrope_interleaved"] {
            settings.remove(axes);
        }
        let scaling = match kind.as_str() {
            Some("default") => None,
            Some("linear") => Some(vec!["factor"]),
            Some("llama3") => {
                if !settings.contains_key("original_max_position_embeddings") {
                    let usual = self.document.get("max_position_embeddings").cloned();
                    settings.insert("original_max_position_embeddings".into(), usual.unwrap_or(Value::Null));
                }
                let of_class =
                    ["factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"];
                Some(of_class.to_vec())
            }
            _ => return refuse(self, format!("`rope_type` is {kind}")),
        };
        if let Some(other) = settings.keys().find(|key| !scaling.iter().flatten().any(|known| known == key)) {
            return refuse(self, format!("`{other}` is not known for `rope_type` {kind}"));
        }
        if let Some(numbers) = scaling {
            for number in &numbers {
                if !settings.get(*number).is_some_and(Value::is_number) {
                    return refuse(self, format!("`{number}` is missing or no number"));
                }
            }
            settings.insert("rope_type".into(), kind);
            self.document.set_from(&format!("{prefix}rotary_scaling"), Value::Object(settings), key);
        }
        if theta.is_null() {
            return Err(self.error("rope_theta", "is missing, also in `rope_parameters`; add it".into()));
        }
        self.document.set_from(&format!("{prefix}rope_theta"), theta, "rope_theta");
        if !share.is_null() {
            self.document.set_from(&format!("{prefix}rotary_factor"), share, "partial_rotary_factor");
        }
        Ok(())
    }
}

/// Values for missing keys, of all these classes.
fn defaults(more: Value) -> Map<String, Value> {
    let mut all = json!({
        "hidden_act": "silu", "initializer_range": 0.02, "rms_norm_eps": 1e-6, "tie_word_embeddings": false,
        "attention_bias": false,
    });
    if let (Some(all), Value::Object(more)) = (all.as_object_mut(), more) {
        all.extend(more);
    }
    all.as_object().cloned().unwrap_or_default()
}

fn llama(document: &mut Document, model_type: &str) -> Result<()> {
    let qwen3 = model_type == "qwen3";
    let defaults = match qwen3 {
        false => defaults(json!({
            "vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 11_008, "num_hidden_layers": 32,
            "num_attention_heads": 32, "rope_theta": 10_000.0,
        })),
        true => defaults(json!({
            "vocab_size": 151_936, "hidden_size": 4096, "intermediate_size": 22_016, "num_hidden_layers": 32,
            "num_attention_heads": 32, "head_dim": 128, "use_sliding_window": false, "sliding_window": 4096,
            "max_window_layers": 28, "rope_theta": 10_000.0,
        })),
    };
    let explicit_kv = document.has("num_key_value_heads");
    let mut keys = Keys { document, defaults };
    keys.common()?;
    keys.demand("mlp_bias", &json!(false), "feed-forward layers have no bias here")?;
    if qwen3 {
        if !explicit_kv {
            keys.defaults.insert("num_key_value_heads".into(), json!(32));
        }
        keys.document.set("qk_norm", json!(true));
        let eps = keys.document.get("norm_eps").cloned().unwrap_or_default();
        keys.document.set_from("qk_norm_eps", eps, "rms_norm_eps");
        let slides = keys.flag("use_sliding_window")?;
        // Null is no window; only a missing key is the class's default.
        let unset = keys.document.has("sliding_window") && keys.document.get("sliding_window").is_none();
        let (window, first) = (keys.take("sliding_window"), keys.number("max_window_layers")?);
        let types = keys.take("layer_types");
        let count = keys.layers()?;
        let sliding: Vec<bool> = match &types {
            Value::Array(types) if types.len() == count => types.iter().map(|kind| kind != FULL).collect(),
            Value::Array(types) => {
                let message = format!("has {} names for {count} layers (`num_hidden_layers`)", types.len());
                return Err(keys.error("layer_types", message));
            }
            Value::Null => (0..count).map(|layer| slides && !unset && layer >= first).collect(),
            other => return Err(keys.error("layer_types", format!("is {other}; it must be a list of texts"))),
        };
        let known = |kind: &Value| kind == FULL || kind == "sliding_attention";
        if let Some(other) = types.as_array().and_then(|types| types.iter().find(|kind| !known(kind))) {
            return Err(keys.error("layer_types", format!("has {other}, which is not known")));
        }
        if sliding.iter().any(|slides| *slides) && (unset || !slides) {
            let key = if unset { "sliding_window" } else { "use_sliding_window" };
            let message = "says that there is no window, but `layer_types` has \"sliding_attention\"";
            return Err(keys.error(key, message.into()));
        }
        match (sliding.iter().any(|slides| *slides), sliding.iter().all(|slides| *slides)) {
            (false, _) => {}
            (true, true) => keys.document.set_from("window_size", window, "sliding_window"),
            (true, false) => {
                let message =
                    "gives some layers a window and others none, which is not supported".to_string();
                let key = if types.is_null() { "max_window_layers" } else { "layer_types" };
                return Err(keys.error(key, message));
            }
        }
    }
    keys.attention("")?;
    // These classes do not read the key.
    if let Some(share) = keys.document.get("rotary_factor").filter(|share| share.as_f64() != Some(1.0)) {
        let message =
            format!("is {share}, which is not supported: heads are rotated whole in `{model_type}`");
        return Err(keys.error("rotary_factor", message));
    }
    keys.document.set("model_type", json!("transformer"));
    Ok(())
}

fn qwen(document: &mut Document, next: bool) -> Result<()> {
    let defaults = match next {
        false => defaults(json!({
            "vocab_size": 248_320, "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 32,
            "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256, "partial_rotary_factor": 0.25,
            "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
            "linear_num_key_heads": 16, "linear_num_value_heads": 32, "full_attention_interval": 4,
        })),
        true => defaults(json!({
            "vocab_size": 151_936, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 48,
            "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "partial_rotary_factor": 0.25,
            "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
            "linear_num_key_heads": 16, "linear_num_value_heads": 32, "full_attention_interval": 4,
            "num_experts": 512, "decoder_sparse_step": 1,
        })),
    };
    let mut keys = Keys { document, defaults };
    keys.common()?;
    keys.demand("attn_output_gate", &json!(true), "the readout of attention is always gated")?;
    keys.demand("output_gate_type", &json!("swish"), "the readout of the recurrence is gated by SiLU")?;
    let count = keys.layers()?;
    if next {
        let (experts, step) = (keys.number("num_experts")?, keys.number("decoder_sparse_step")?.max(1));
        let dense = keys.take("mlp_only_layers");
        let dense = |layer: usize| dense.as_array().is_some_and(|list| list.iter().any(|at| *at == layer));
        let sparse = (0..count).any(|layer| experts > 0 && (layer + 1) % step == 0 && !dense(layer));
        if sparse {
            let message = format!(
                "is {experts}; feed-forward layers with experts are not supported: only 0 can be loaded"
            );
            return Err(keys.error("num_experts", message));
        }
        EXPERTS.iter().for_each(|key| drop(keys.document.take(key)));
    } else {
        keys.demand("mlp_only_layers", &json!([]), "no layer has experts")?;
    }
    let interval = keys.number("full_attention_interval")?.max(1);
    let types = match keys.take("layer_types") {
        Value::Array(types) => types,
        Value::Null => (1..=count).map(|n| json!(if n % interval == 0 { FULL } else { LINEAR })).collect(),
        other => return Err(keys.error("layer_types", format!("is {other}; it must be a list of texts"))),
    };
    if types.len() != count {
        let message = format!("has {} names for {count} layers (`num_hidden_layers`)", types.len());
        return Err(keys.error("layer_types", message));
    }
    let mut layers = Vec::with_capacity(count);
    for kind in &types {
        layers.push(match kind.as_str() {
            Some(LINEAR) => json!("gated_delta_net"),
            Some(FULL) => json!("attention"),
            _ => {
                let message = format!("has {kind}; a layer can be \"{LINEAR}\" or \"{FULL}\"");
                return Err(keys.error("layer_types", message));
            }
        });
    }
    keys.document.set_from("layers", Value::Array(layers.clone()), "layer_types");
    keys.document.set("model_type", json!("hybrid"));
    // Both kinds have a `head_dim` among their keys: theirs is that of attention, ours that of the recurrence.
    keys.attention("attention_")?;
    let (key_dim, value_dim) = (keys.number("linear_key_head_dim")?, keys.number("linear_value_head_dim")?);
    let of_linear = [
        ("num_heads", "linear_num_key_heads"),
        ("num_v_heads", "linear_num_value_heads"),
        ("conv_size", "linear_conv_kernel_dim"),
    ];
    for (ours, theirs) in of_linear {
        keys.rename(theirs, ours);
    }
    if key_dim == 0 {
        return Err(keys.error("linear_key_head_dim", "is 0; it must be at least 1".into()));
    }
    keys.document.set_from("head_dim", key_dim.into(), "linear_key_head_dim");
    keys.document.set_from("expand_v", (value_dim as f64 / key_dim as f64).into(), "linear_value_head_dim");
    keys.document.set("attention_qk_norm", json!(true));
    let eps = keys.document.get("norm_eps").cloned().unwrap_or_default();
    keys.document.set_from("attention_qk_norm_eps", eps, "rms_norm_eps");
    keys.document.set("attention_attn_output_gate", json!(true));
    // A stack of one kind has no keys of the other.
    for (kind, other) in [("gated_delta_net", "attention_"), ("attention", "")] {
        if layers.iter().all(|layer| layer == kind) {
            keys.document.drop_keys(|key| match other {
                "" => OF_RECURRENCE.contains(&key),
                prefix => key.starts_with(prefix),
            });
        }
    }
    Ok(())
}

/// flash-linear-attention's key `attn`: attention in some layers of a Gated DeltaNet.
fn attention_of_fla(document: &mut Document) -> Result<()> {
    let Some(attn) = document.get("attn").cloned() else { return Ok(()) };
    let wrong = |document: &Document, what: &str| {
        Err(document.error("attn", format!("is {attn}, which is not supported: {what}")))
    };
    let specs: Vec<&Map<String, Value>> = match &attn {
        Value::Object(spec) => vec![spec],
        Value::Array(specs) => specs.iter().filter_map(Value::as_object).collect(),
        _ => return wrong(document, "it must be null or an object"),
    };
    let mut layers: Vec<u64> = Vec::new();
    let mut shared: Option<Map<String, Value>> = None;
    for spec in specs {
        let mut spec = spec.clone();
        let Some(own) = spec
            .remove("layers")
            .and_then(|list| list.as_array()?.iter().map(Value::as_u64).collect::<Option<Vec<u64>>>())
        else {
            return wrong(document, "`layers` must be a list of layers, counted from 0");
        };
        if own.is_empty() {
            continue;
        }
        layers.extend(own);
        if spec.get("rope_theta").is_some_and(Value::is_null) {
            return wrong(document, "`rope_theta` is null; give it a value, or remove it");
        }
        spec.retain(|_, value| !value.is_null());
        if shared.get_or_insert_with(|| spec.clone()) != &spec {
            return wrong(document, "all layers of attention must have the same keys");
        }
    }
    document.take("attn");
    let Some(shared) = shared else { return Ok(()) };
    let count = document.get("num_hidden_layers").and_then(Value::as_u64).unwrap_or(21);
    if let Some(other) = layers.iter().find(|layer| **layer >= count) {
        return wrong(
            document,
            &format!("layer {other} is not one of the {count} (`num_hidden_layers`), counted from 0"),
        );
    }
    if !shared.contains_key("num_heads") {
        return wrong(document, "`num_heads` is missing");
    }
    for (key, value) in shared {
        if !["num_heads", "num_kv_heads", "qkv_bias", "window_size", "rope_theta"].contains(&key.as_str()) {
            return wrong(document, &format!("`{key}` is not known"));
        }
        document.set_from(&format!("attention_{key}"), value, &format!("attn.{key}"));
    }
    if document.get("attention_rope_theta").is_none() {
        document.set("attention_rope_theta", json!(10_000.0));
    }
    let name = |layer: u64| json!(if layers.contains(&layer) { "attention" } else { "gated_delta_net" });
    document.set_from("layers", (0..count).map(name).collect(), "attn");
    document.set("model_type", json!("hybrid"));
    Ok(())
}
