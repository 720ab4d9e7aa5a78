//! The defaults that flash-linear-attention 0.6.0 uses for keys missing from a `config.json`, and the other places
//! where it looks for a value.
//!
//! The defaults are those of its classes `GatedDeltaNetConfig` and `TransformerConfig`. Model types that it does not
//! have only have the defaults of their own keys.

use serde_json::{Map, Value, json};

use super::dialect::{Dialect, OF_RECURRENCE};
use crate::config::Document;
use crate::error::Result;

/// `model_type` of the classes whose defaults are filled in.
const GATED_DELTANET: &str = "gated_deltanet";
const TRANSFORMER: &str = "transformer";

/// Ratio of a feed-forward network's width to `hidden_size`, before the factor of two thirds.
const HIDDEN_RATIO: f64 = 4.0;

/// Keys for the scaling of positions.
pub(super) const ROPE_KEYS: [&str; 2] = ["rope_scaling", "rope_parameters"];

/// Whether a `model_type` is softmax attention.
pub(super) fn is_attention(model_type: &str) -> bool {
    model_type == TRANSFORMER
}

/// Fills in the defaults of keys missing from a `config.json`.
pub(super) fn fill(document: &mut Document, dialect: Dialect) -> Result<()> {
    if dialect != Dialect::Own {
        return Ok(()); // its own defaults are there already
    }
    let model_type = document.get("model_type").and_then(Value::as_str).unwrap_or_default().to_string();
    read_rope(document, is_attention(&model_type))?;
    if !is_attention(&model_type) {
        // In Python, null counts as false.
        for key in ["use_gate", "use_short_conv"] {
            if document.has(key) && document.get(key).is_none() {
                document.set(key, false.into());
            }
        }
    }
    let hybrid_of_fla = model_type == "hybrid" && document.is_renamed("layers");
    let defaults = of_class(if hybrid_of_fla { GATED_DELTANET } else { &model_type });
    let with_default = !defaults.is_empty();
    for (key, value) in defaults {
        // A null is not replaced: only for `tie_word_embeddings` does it stand for the default.
        if !document.has(&key) || key == "tie_word_embeddings" && document.get(&key).is_none() {
            document.set(&key, value);
        }
    }
    let layers = document.get("layers").and_then(Value::as_array);
    if hybrid_of_fla && layers.is_some_and(|layers| layers.iter().all(|layer| layer == "attention")) {
        document.drop_keys(|key| OF_RECURRENCE.contains(&key));
    }
    fill_intermediate_size(document, with_default)
}

/// The defaults of a class, except for keys whose own default is the same.
fn of_class(model_type: &str) -> Map<String, Value> {
    let (keys, own) = match model_type {
        GATED_DELTANET => (
            json!({"num_hidden_layers": 21, "num_heads": 6}),
            json!({"head_dim": 256, "expand_v": 2.0, "conv_size": 4}),
        ),
        TRANSFORMER => (json!({"num_hidden_layers": 24, "num_heads": 32}), json!({"rope_theta": 10_000.0})),
        _ => return Map::new(),
    };
    let common = json!({
        "vocab_size": 32_000,
        "hidden_size": 2048,
        "norm_eps": 1e-6,
        "tie_word_embeddings": false,
        "initializer_range": 0.02,
    });
    [common, keys, own].into_iter().filter_map(|keys| keys.as_object().cloned()).flatten().collect()
}

/// Computes `intermediate_size` if only `hidden_ratio` is given, as flash-linear-attention does: two thirds of
/// `hidden_size` · `hidden_ratio`, rounded up to a multiple of 256. With `with_default`, also without a ratio.
fn fill_intermediate_size(document: &mut Document, with_default: bool) -> Result<()> {
    let ratio = match (document.get("intermediate_size"), document.get("hidden_ratio")) {
        (Some(_), _) => return Ok(()),
        (None, None) if with_default => HIDDEN_RATIO.into(),
        (None, None) => return Ok(()), // its own error comes when it is read
        (None, Some(ratio)) => ratio.clone(),
    };
    let Some(hidden_size) = document.get("hidden_size").and_then(Value::as_f64) else {
        return Ok(()); // as above
    };
    let size = ratio.as_f64().map(|ratio| (hidden_size * ratio * 2.0 / 3.0).trunc());
    let Some(size) = size.filter(|size| (1.0..=1e9).contains(size)) else {
        let message = format!(
            "is {ratio}, which does not give a valid `intermediate_size`; set `intermediate_size`, or \
             use a positive number such as 4"
        );
        return Err(document.error("hidden_ratio", message));
    };
    document.set("intermediate_size", (size as u64).next_multiple_of(256).into());
    Ok(())
}

/// Rejects scaled positions. Reads `rope_theta` also from the place where newer versions of transformers write it, and
/// rejects conflicting values.
fn read_rope(document: &mut Document, attention: bool) -> Result<()> {
    for key in ROPE_KEYS {
        let Some(value) = document.get(key).cloned() else { continue };
        let refuse = |what: String| {
            let message = format!(
                "is {value}, which is not supported: {what}; only null, or rope_type \"default\" with \
                 no other key than `rope_theta`, can be loaded"
            );
            Err(document.error(key, message))
        };
        let Some(settings) = value.as_object() else { return refuse("it is not an object".into()) };
        for (name, value) in settings.iter().filter(|(_, value)| !value.is_null()) {
            match name.as_str() {
                "rope_theta" if value.is_number() => {}
                "rope_type" | "type" if value == "default" => {}
                "rope_type" | "type" => return refuse(format!("`{name}` is {value}")),
                "factor" | "partial_rotary_factor" if value.as_f64() == Some(1.0) => {}
                _ => return refuse(format!("`{name}` is {value}")),
            }
        }
        let Some(theta) = settings.get("rope_theta").filter(|theta| attention && !theta.is_null()) else {
            continue;
        };
        match document.get("rope_theta") {
            Some(other) if other.as_f64() != theta.as_f64() => {
                let message = format!(
                    "is {other}, but `{key}` says {theta}; flash-linear-attention 0.6.0 computes with \
                     `rope_theta`: make both the same"
                );
                return Err(document.error("rope_theta", message));
            }
            Some(_) => {}
            None => document.set("rope_theta", theta.clone()),
        }
    }
    Ok(())
}
