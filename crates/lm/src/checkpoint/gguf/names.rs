//! Where a parameter is in a GGUF file, as llama.cpp's converter writes it:
//!
//! ```text
//! llama     attn_q, attn_k        rows of a head in pairs: 0, w/2, 1, w/2 + 1, … for heads of width w
//! qwen35    attn_qkv, ssm_conv1d  rows of q, then of k, then of v
//!           attn_q                for each head the rows of its query, then those of its gate
//!           norms                 w, not w − 1
//!           ssm_a                 −exp(A_log)
//! ```
//! The value heads of `qwen35` are in another order: not those of the first key head, then those of the second, but the
//! first of every key head, then the second of every key head. This holds for the rows of v, of its convolution, of the
//! gate and of α and β, for `ssm_a` and `ssm_dt`, and for the columns of `ssm_out`.

use std::ops::Range;

use super::super::names::{Change, Source, mixer_of, of_each, one};
use super::config::Architecture;
use crate::model::mixer::MixerConfig;
use crate::model::mixer::gated_delta_net::GatedDeltaNetConfig;
use crate::model::{ModelConfig, ParameterSpec};

/// Where a parameter is.
pub(in crate::checkpoint) fn source(
    spec: &ParameterSpec,
    architecture: Architecture,
    config: &ModelConfig,
) -> Source {
    let mut source = Source::own(spec);
    let Some((layer, own)) = spec.name.strip_prefix("model.layers.").and_then(|rest| rest.split_once('.'))
    else {
        source.name = match spec.name.as_str() {
            "model.embeddings.weight" => "token_embd.weight".into(),
            "model.norm.weight" => "output_norm.weight".into(),
            "lm_head.weight" => "output.weight".into(),
            other => other.into(),
        };
        return source;
    };
    let mixer = mixer_of(config, layer);
    let name = match own {
        "attn_norm.weight" => "attn_norm.weight",
        "mlp_norm.weight" if architecture == Architecture::Qwen35 => "post_attention_norm.weight",
        "mlp_norm.weight" => "ffn_norm.weight",
        "mlp.gate_proj.weight" => "ffn_gate.weight",
        "mlp.up_proj.weight" => "ffn_up.weight",
        "mlp.down_proj.weight" => "ffn_down.weight",
        own => match (own.strip_prefix("attn."), mixer) {
            (Some(own), Some(MixerConfig::GatedDeltaNet(keys))) => linear(own, keys, &mut source),
            (Some(own), mixer) => attention(own, architecture, mixer, config.hidden_size, &mut source),
            (None, _) => own,
        },
    };
    source.name = format!("blk.{layer}.{name}");
    source
}

/// A tensor of attention.
fn attention<'a>(
    own: &'a str,
    architecture: Architecture,
    mixer: Option<&MixerConfig>,
    hidden_size: usize,
    source: &mut Source,
) -> &'a str {
    let Some(keys) = mixer.and_then(MixerConfig::attention) else { return own };
    let (heads, width) = (keys.num_heads, keys.width_of_head(hidden_size));
    let mut paired = |heads: usize| {
        if architecture == Architecture::Llama {
            let half = width / 2;
            let place = |row: usize| row / width * width + row % half * 2 + row % width / half;
            let rows = (0..heads * half * 2).map(|row| place(row)..place(row) + 1);
            source.rows = Some(rows.collect());
        }
    };
    match own {
        "q_proj.weight" | "g_proj.weight" | "q_proj.bias" | "g_proj.bias" if keys.attn_output_gate => {
            let gate = usize::from(own.starts_with('g')) * width;
            let (rows, all) = of_each(heads, 2 * width, gate..gate + width);
            source.rows = Some(rows);
            source.shape[0] = all;
            if own.ends_with("bias") { "attn_q.bias" } else { "attn_q.weight" }
        }
        "q_proj.weight" => {
            paired(heads);
            "attn_q.weight"
        }
        "q_proj.bias" => {
            paired(heads);
            "attn_q.bias"
        }
        "k_proj.weight" => {
            paired(keys.num_kv_heads.unwrap_or(heads));
            "attn_k.weight"
        }
        "k_proj.bias" => {
            paired(keys.num_kv_heads.unwrap_or(heads));
            "attn_k.bias"
        }
        "v_proj.weight" => "attn_v.weight",
        "v_proj.bias" => "attn_v.bias",
        "o_proj.weight" => "attn_output.weight",
        "o_proj.bias" => "attn_output.bias",
        "q_norm.weight" => "attn_q_norm.weight",
        "k_norm.weight" => "attn_k_norm.weight",
        own => own,
    }
}

/// A tensor of Gated DeltaNet.
fn linear<'a>(own: &'a str, keys: &GatedDeltaNetConfig, source: &mut Source) -> &'a str {
    let (heads, value_heads) = (keys.num_heads, keys.value_heads());
    let (key, value) = (keys.head_dim, keys.value_dim());
    let sharing = (value_heads / heads.max(1)).max(1);
    // The value heads in our order, `width` rows or columns each, after `start` others.
    let tiled = |start: usize, width: usize| -> Vec<Range<usize>> {
        let place = |head: usize| start + (head % sharing * heads + head / sharing) * width;
        (0..value_heads).map(|head| place(head)..place(head) + width).collect()
    };
    let all = heads * 2 * key + value_heads * value;
    let mut of_all = |rows: Vec<Range<usize>>| {
        source.rows = Some(rows);
        source.shape[0] = all;
    };
    let first_value = 2 * heads * key;
    let (q, k) = (0..heads * key, heads * key..first_value);
    match own {
        "q_proj.weight" | "q_conv1d.weight" => of_all(one(q)),
        "k_proj.weight" | "k_conv1d.weight" => of_all(one(k)),
        "v_proj.weight" | "v_conv1d.weight" if sharing > 1 => of_all(tiled(first_value, value)),
        "v_proj.weight" | "v_conv1d.weight" => of_all(one(first_value..all)),
        "g_proj.weight" if sharing > 1 => source.rows = Some(tiled(0, value)),
        "b_proj.weight" | "a_proj.weight" | "A_log" | "dt_bias" if sharing > 1 => {
            source.rows = Some(tiled(0, 1));
        }
        "o_proj.weight" if sharing > 1 => source.columns = Some(tiled(0, value)),
        _ => {}
    }
    match own {
        "q_proj.weight" | "k_proj.weight" | "v_proj.weight" => "attn_qkv.weight",
        "q_conv1d.weight" | "k_conv1d.weight" | "v_conv1d.weight" => "ssm_conv1d.weight",
        "g_proj.weight" => "attn_gate.weight",
        "b_proj.weight" => "ssm_beta.weight",
        "a_proj.weight" => "ssm_alpha.weight",
        "A_log" => {
            source.change = Change::LogOfNegative;
            "ssm_a"
        }
        "dt_bias" => "ssm_dt.bias",
        "o_norm.weight" => "ssm_norm.weight",
        "o_proj.weight" => "ssm_out.weight",
        own => own,
    }
}
