//! Keys of a `config.json` that are not the model's own. Every such key is either known not to affect the computation,
//! or has the one value that describes this computation, or is rejected by name; unknown keys are never ignored.
//!
//! The keys are those of transformers' `PreTrainedConfig` (4.45 to 5.22) and of flash-linear-attention's
//! `GatedDeltaNetConfig` and `TransformerConfig` (0.1 to 0.6.0).

use serde_json::Value;

use super::defaults::{self, ROPE_KEYS};
use crate::config::{Document, list, model_types_with, nearest};
use crate::error::Result;

/// Keys that do not affect what a trained model computes, in groups; they are preserved when the file is written.
const HARMLESS: [&str; 7] = [
    // Origin of the folder, and the classes and precision with which other tools open it.
    "_attn_implementation _attn_implementation_autoset _attn_implementation_internal _commit_hash \
     _experts_implementation _experts_implementation_internal _from_model_config _name_or_path \
     architectures attn_implementation custom_pipelines dtype experts_implementation name_or_path \
     tokenizer_class torch_dtype torchscript transformers_version use_bfloat16 xla_device",
    // What a call returns besides the logits, and how its computation is split.
    "chunk_size_feed_forward output_attentions output_hidden_states return_dict tie_last_hidden_states \
     use_cache",
    // Tasks other than predicting the next token: their heads would be extra tensors, which are rejected.
    "finetuning_task id2label is_decoder label2id num_labels prefix problem_type task_specific_params \
     tf_legacy_loss tie_encoder_decoder",
    // Tokens with a meaning for the tokenizer. The row of the padding token is treated like any other.
    "bos_token_id cls_token_id decoder_start_token_id eos_token_id mask_token_id pad_token_id \
     sep_token_id unk_token_id",
    // How tokens are drawn from the logits.
    "bad_words_ids begin_suppress_tokens diversity_penalty do_sample early_stopping \
     encoder_no_repeat_ngram_size encoder_repetition_penalty epsilon_cutoff eta_cutoff \
     exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id length_penalty max_length \
     max_new_tokens max_time min_length min_new_tokens min_p no_repeat_ngram_size num_beam_groups \
     num_beams num_return_sequences output_logits output_scores penalty_alpha remove_invalid_values \
     renormalize_logits repetition_penalty return_dict_in_generate stop_strings suppress_tokens \
     temperature top_k top_p typical_p",
    // flash-linear-attention: which kernels compute the same numbers, and the training loss.
    "attn_mode fuse_cross_entropy fuse_linear_cross_entropy fuse_norm fuse_swiglu use_l2warp",
    // flash-linear-attention: the initial length of the table of rotary angles; never read; only used to derive
    // `intermediate_size`.
    "max_position_embeddings elementwise_affine hidden_ratio",
];

/// Whether a key does not affect what a trained model computes.
fn is_harmless(key: &str) -> bool {
    HARMLESS.iter().any(|group| group.split(' ').any(|known| known == key))
}

/// Rejects keys that may require a different computation from this one. Null requires nothing, except for the two keys
/// that are true by default.
pub(super) fn check(document: &Document, model_type: &str) -> Result<()> {
    for (key, value) in document.unknown() {
        let falsy =
            !defaults::is_attention(model_type) && ["use_gate", "use_short_conv"].contains(&key.as_str());
        if value.is_null() && !falsy || is_harmless(key) || ROPE_KEYS.contains(&key.as_str()) {
            continue;
        }
        let message = match demanded(document, model_type, key, value) {
            Some((true, _)) => continue,
            Some((false, only)) => {
                format!("is {}, which is not supported; {only} can be loaded", short(value))
            }
            None => unknown(document, model_type, key, value),
        };
        return Err(document.error(key, message));
    }
    Ok(())
}

/// For a key that is accepted with certain values only: whether it has one of them, and what they are.
fn demanded(document: &Document, model_type: &str, key: &str, value: &Value) -> Option<(bool, String)> {
    let attention = defaults::is_attention(model_type);
    let is = |expected: bool| *value == Value::Bool(expected);
    let number = |key: &str| document.get(key).and_then(Value::as_f64);
    let heads = number("num_heads");
    let same = |expected: Option<f64>| expected.is_some() && value.as_f64() == expected;
    let empty = value.as_object().is_some_and(|object| object.is_empty());
    let (fits, only) = match key {
        "num_kv_heads" | "num_key_value_heads" | "num_attention_heads" => {
            let heads = heads.map(|heads| heads.to_string()).unwrap_or_default();
            (same(number("num_heads")), format!("the number of heads is `num_heads`: only {heads} or null"))
        }
        "head_dim" if attention => {
            let width = heads.and_then(|heads| Some(number("hidden_size")? / heads));
            (same(width), "a head is `hidden_size` / `num_heads` wide: only that or null".into())
        }
        "qk_norm" => (is(false), "queries and keys have no learned norm: only false".into()),
        "qkv_bias" | "attention_bias" | "conv_bias" | "mlp_bias" => {
            (is(false), "no bias is added: only false".into())
        }
        "window_size" | "sliding_window" => (false, "attention sees the whole past: only null".into()),
        "partial_rotary_factor" => (same(Some(1.0)), "heads are rotated whole: only 1".into()),
        "use_gate" if attention => (is(false), "attention has no gate: only false".into()),
        "use_short_conv" if attention => (is(false), "attention has no convolutions: only false".into()),
        "use_gate" => (is(true), "the readout is always gated: only true".into()),
        "use_short_conv" => (is(true), "the convolutions are always there: only true".into()),
        "attn" => (false, "all layers have the same mixer: only null".into()),
        "attnres_block_size" => (false, "a layer reads only the sum of those before it: only null".into()),
        "norm_first" => (is(false), "norms are before the mixers, not in them: only false".into()),
        "hidden_act" | "output_gate_activation" => {
            (matches!(value.as_str(), Some("swish" | "silu")), "only \"swish\" or \"silu\"".into())
        }
        "is_encoder_decoder" | "add_cross_attention" => {
            (is(false), "there is one stack of layers: only false".into())
        }
        "cross_attention_hidden_size" => (false, "there is one stack of layers: only null".into()),
        "per_layer_config" => (empty, "all layers are the same: only null".into()),
        "pruned_heads" => (empty, "every layer has all of its heads: only {} or null".into()),
        "quantization_config" => (false, "weights must be f32, bf16 or f16 (convert them): only null".into()),
        "auto_map" => {
            let only = "it names the model's own code; remove the key if that computes what \
                        flash-linear-attention does: only null";
            (false, only.into())
        }
        _ => return None,
    };
    Some((fits, only))
}

/// The message about an unknown key.
fn unknown(document: &Document, model_type: &str, key: &str, value: &Value) -> String {
    let users = model_types_with(document.examples(), key);
    if !users.is_empty() {
        return format!(
            "is not used by model_type `{model_type}`, only by {}; remove it, or correct `model_type`",
            list(users)
        );
    }
    let near = nearest(key, document.known());
    let question = near.map(|near| format!(" (did you mean `{near}`?)")).unwrap_or_default();
    format!(
        "is {}, but this key is not known{question} and may change what the model computes; if it does not, \
         remove it, otherwise the model cannot be loaded",
        short(value)
    )
}

/// A value, truncated if it is long.
fn short(value: &Value) -> String {
    const LONGEST: usize = 80;
    let text = value.to_string();
    match text.char_indices().nth(LONGEST) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}
