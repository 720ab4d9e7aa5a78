//! Keys that other tools write into `config.json` and that bear on what is computed.

use serde_json::Value;

use super::document::Document;
use crate::error::Result;

/// Refuses a foreign key that asks for something else than what is computed here. Null asks for nothing.
pub(super) fn check(document: &Document) -> Result<()> {
    for (key, value) in document.unknown().filter(|(_, value)| !value.is_null()) {
        let is = |expected: bool| *value == Value::Bool(expected);
        let heads = document.get("num_heads");
        let (fits, only) = match key.as_str() {
            "num_kv_heads" => {
                let same = heads.is_some_and(|heads| heads.as_f64() == value.as_f64());
                let heads = heads.map(Value::to_string).unwrap_or_default();
                (same, format!("every head has its own keys and values: only `num_heads` ({heads}) or null"))
            }
            "qk_norm" => (is(false), "queries and keys have no learned norm: only false".into()),
            "qkv_bias" | "attention_bias" | "conv_bias" => (is(false), "no bias is added: only false".into()),
            "window_size" => (false, "attention sees the whole past: only null".into()),
            "rope_scaling" => (false, "positions are not rescaled: only null".into()),
            "use_gate" => (is(true), "the readout is always gated: only true".into()),
            "use_short_conv" => (is(true), "the convolutions are always there: only true".into()),
            "attn" => (false, "all layers have the same mixer: only null".into()),
            "hidden_act" => {
                (matches!(value.as_str(), Some("swish" | "silu")), "only \"swish\" or \"silu\"".into())
            }
            _ => continue,
        };
        if !fits {
            let message = format!("is {value}, which is not computed here; {only} can be loaded");
            return Err(document.error(key, message));
        }
    }
    Ok(())
}

/// Where flash-linear-attention left `intermediate_size` to `hidden_ratio`, computes it as it does:
/// two thirds of `hidden_size` · `hidden_ratio`, rounded up to a multiple of 256.
pub(super) fn fill_intermediate_size(document: &mut Document) -> Result<()> {
    let (None, Some(ratio)) = (document.get("intermediate_size"), document.get("hidden_ratio")) else {
        return Ok(());
    };
    let Some(hidden_size) = document.get("hidden_size").and_then(Value::as_f64) else {
        return Ok(()); // its own error comes when it is read
    };
    let size = ratio.as_f64().map(|ratio| (hidden_size * ratio * 2.0 / 3.0).trunc());
    let Some(size) = size.filter(|size| (1.0..=1e9).contains(size)) else {
        let message = format!(
            "is {ratio}, from which no `intermediate_size` follows; set `intermediate_size`, or make it \
             a positive number such as 4"
        );
        return Err(document.error("hidden_ratio", message));
    };
    document.set("intermediate_size", (size as u64).next_multiple_of(256).into());
    Ok(())
}
