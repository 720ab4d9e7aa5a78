//! `config.json` of other tools: what is filled in as they do, what is kept, and what is refused.

use march_lm::model::ModelConfig;
use march_lm::model::mixer::MixerConfig;
use serde_json::{Value, json};

use super::{changed, json_of, read, refused, written};

/// Types that flash-linear-attention does not have.
const OURS: [&str; 2] = ["march", "log_linear_gated_deltanet"];

/// A `config.json` with nothing but these keys.
fn only(model_type: &str, keys: Value) -> march_lm::Result<ModelConfig> {
    let mut keys = keys;
    keys["model_type"] = json!(model_type);
    read(&keys)
}

#[test]
fn what_flash_linear_attention_fills_in_is_filled_in() {
    let gdn = written(&only("gated_deltanet", json!({})).unwrap());
    for (key, value) in [
        ("vocab_size", json!(32_000)),
        ("hidden_size", json!(2048)),
        ("num_hidden_layers", json!(21)),
        ("intermediate_size", json!(5632)),
        ("norm_eps", json!(1e-6)),
        ("tie_word_embeddings", json!(false)),
        ("initializer_range", json!(0.02)),
        ("num_heads", json!(6)),
        ("num_v_heads", json!(6)),
        ("head_dim", json!(256)),
        ("expand_v", json!(2.0)),
        ("conv_size", json!(4)),
        ("allow_neg_eigval", json!(false)),
    ] {
        assert_eq!(gdn[key], value, "{key}");
    }
    let transformer = written(&only("transformer", json!({})).unwrap());
    for (key, value) in [
        ("num_hidden_layers", json!(24)),
        ("num_heads", json!(32)),
        ("rope_theta", json!(10_000.0)),
        ("intermediate_size", json!(5632)),
        ("tie_word_embeddings", json!(false)),
    ] {
        assert_eq!(transformer[key], value, "{key}");
    }
    // Each key alone, and what follows from others.
    for model_type in ["gated_deltanet", "transformer"] {
        let keys = json_of(model_type);
        for key in keys.as_object().unwrap().keys().filter(|key| *key != "model_type") {
            let mut without = keys.clone();
            without.as_object_mut().unwrap().remove(key);
            // Some defaults do not fit the small model; none is missing.
            if let Err(error) = read(&without) {
                assert!(!error.to_string().contains("missing"), "{error}");
            }
        }
        for ratio in [json!({}), json!({"hidden_ratio": null}), json!({"intermediate_size": null})] {
            let mut with = ratio;
            with["hidden_size"] = json!(96);
            with["num_heads"] = json!(2);
            assert_eq!(only(model_type, with).unwrap().intermediate_size, 256);
        }
        assert!(!read(&changed(model_type, "tie_word_embeddings", json!(null))).unwrap().tie_word_embeddings);
        // There, null is no default: it is another computation, or none.
        for key in ["norm_eps", "num_heads", "hidden_size"] {
            refused(
                read(&changed(model_type, key, json!(null))),
                &[&format!("`{key}` is missing (it is null)")],
            );
        }
    }
    refused(read(&changed("gated_deltanet", "num_head", json!(3))), &["`num_head` is 3", "mean `num_heads`"]);
    for model_type in OURS {
        refused(only(model_type, json!({})), &["`vocab_size` is missing"]);
    }
}

/// Whether a model has this key of flash-linear-attention, too.
fn has(model_type: &str, key: &str) -> bool {
    match key {
        "num_kv_heads" | "qk_norm" | "qkv_bias" | "window_size" => model_type == "transformer",
        "output_gate_activation" | "use_gate" | "use_short_conv" => model_type != "transformer",
        "attn" => model_type == "gated_deltanet",
        _ => false,
    }
}

#[test]
fn keys_that_change_the_result_are_refused() {
    let long: Vec<usize> = (0..1000).collect();
    for (key, value) in [
        ("num_kv_heads", json!(1)),
        ("num_kv_heads", json!("2")),
        ("num_key_value_heads", json!(1)),
        ("num_attention_heads", json!(4)),
        ("qk_norm", json!(true)),
        ("qkv_bias", json!(true)),
        ("conv_bias", json!(true)),
        ("attention_bias", json!(true)),
        ("mlp_bias", json!(true)),
        ("window_size", json!(2048)),
        ("sliding_window", json!(2048)),
        ("partial_rotary_factor", json!(0.5)),
        ("attn", json!({"layers": [1]})),
        ("attnres_block_size", json!(1)),
        ("attnres_block_size", json!(4)),
        ("output_gate_activation", json!("sigmoid")),
        ("hidden_act", json!("gelu")),
        ("hidden_act", json!("powlu")),
        ("norm_first", json!(true)),
        ("is_encoder_decoder", json!(true)),
        ("add_cross_attention", json!(true)),
        ("per_layer_config", json!({"1": {"num_heads": 1}})),
        ("pruned_heads", json!({"0": [1]})),
        ("quantization_config", json!({"bits": 4})),
        ("auto_map", json!({"AutoModelForCausalLM": "modeling.Model"})),
    ] {
        for model_type in MixerConfig::MODEL_TYPES.iter().filter(|model_type| !has(model_type, key)) {
            let parts = [&format!("`{key}` is {value}"), "folder/config.json", "only"];
            refused(read(&changed(model_type, key, value.clone())), &parts);
        }
    }
    for key in ["use_gate", "use_short_conv"] {
        refused(read(&changed("transformer", key, json!(true))), &[key, "only", "is not supported"]);
        read(&changed("transformer", key, json!(false))).unwrap();
        for model_type in MixerConfig::MODEL_TYPES {
            read(&changed(model_type, key, json!(false))).unwrap();
        }
        // In Python, null counts as false.
        let model = |value| read(&changed("gated_deltanet", key, value)).unwrap();
        assert_eq!(model(json!(null)).mixer, model(json!(false)).mixer);
        assert_ne!(model(json!(null)).mixer, model(json!(true)).mixer);
    }
    for (key, value) in
        [("logit_scale", json!(0.5)), ("embedding_multiplier", json!(12)), ("a_key", json!(long.clone()))]
    {
        for model_type in MixerConfig::MODEL_TYPES {
            let parts =
                [&format!("`{key}` is"), "not known", "may change what the model computes", "remove it"];
            let error = read(&changed(model_type, key, value.clone()));
            assert!(error.as_ref().unwrap_err().to_string().len() < 400);
            refused(error, &parts);
        }
    }
    refused(
        read(&changed("transformer", "num_levels", json!(9))),
        &[
            "`num_levels` is not used by model_type `transformer`",
            "`log_linear_gated_deltanet`",
            "`model_type`",
        ],
    );
    refused(read(&changed("transformer", "head_dim", json!(8))), &["`head_dim` is 8", "`num_heads`"]);
    refused(
        read(&changed("gated_deltanet", "rms_norm_eps", json!(1e-5))),
        &["`rms_norm_eps`", "mean `norm_eps`"],
    );
}

#[test]
fn keys_that_say_what_is_computed_are_kept() {
    for (key, value) in [
        ("num_kv_heads", json!(null)),
        ("num_kv_heads", json!(2)),
        ("num_kv_heads", json!(2.0)),
        ("num_attention_heads", json!(2)),
        ("qk_norm", json!(false)),
        ("qkv_bias", json!(null)),
        ("conv_bias", json!(false)),
        ("attention_bias", json!(false)),
        ("window_size", json!(null)),
        ("attn", json!(null)),
        ("attnres_block_size", json!(null)),
        ("output_gate_activation", json!("swish")),
        ("output_gate_activation", json!("silu")),
        ("hidden_act", json!("silu")),
        ("hidden_act", json!(null)),
        ("pruned_heads", json!({})),
        ("rope_scaling", json!(null)),
        ("rope_parameters", json!({"rope_type": "default"})),
        ("of_a_later_version", json!(null)),
        // Those that change nothing, whatever they say.
        ("architectures", json!(["GatedDeltaNetForCausalLM"])),
        ("torch_dtype", json!("bfloat16")),
        ("dtype", json!("float32")),
        ("transformers_version", json!("5.22.2")),
        ("_name_or_path", json!("somewhere")),
        ("bos_token_id", json!(1)),
        ("eos_token_id", json!([2, 3])),
        ("pad_token_id", json!(0)),
        ("use_cache", json!(true)),
        ("attn_mode", json!("fused_recurrent")),
        ("max_position_embeddings", json!(2048)),
        ("elementwise_affine", json!(true)),
        ("fuse_norm", json!(false)),
        ("fuse_swiglu", json!(true)),
        ("fuse_cross_entropy", json!(true)),
        ("fuse_linear_cross_entropy", json!(false)),
        ("use_l2warp", json!(true)),
        ("id2label", json!({"0": "LABEL_0"})),
        ("temperature", json!(0.7)),
        ("output_hidden_states", json!(false)),
    ] {
        for model_type in MixerConfig::MODEL_TYPES {
            let model = read(&changed(model_type, key, value.clone())).unwrap();
            if !has(model_type, key) {
                assert_eq!(model.other[key], value);
                assert_eq!(written(&model)[key], value);
            }
        }
    }
    read(&changed("transformer", "head_dim", json!(16))).unwrap();
}

/// Attention in some layers of a Gated DeltaNet.
#[test]
fn hybrids_of_flash_linear_attention_are_read() {
    let with = |attn: Value| read(&changed("gated_deltanet", "attn", attn));
    let plain = with(json!(null)).unwrap();
    assert_eq!(with(json!({"layers": [], "num_heads": 2})).unwrap().mixer, plain.mixer);
    let attn = json!({
        "layers": [1], "num_heads": 4, "num_kv_heads": 2, "qkv_bias": true, "window_size": 64, "rope_theta": 5000.0
    });
    let model = with(attn.clone()).unwrap();
    let keys = model.mixer.attention().unwrap();
    assert_eq!((keys.num_heads, keys.num_kv_heads, keys.qkv_bias), (4, Some(2), true));
    assert_eq!((keys.window_size, keys.rope_theta), (Some(64), 5000.0));
    assert_eq!(written(&model)["layers"], json!("1 gated_delta_net, 1 attention"));
    assert_eq!(ModelConfig::from_json(&model.to_json(), "again").unwrap().mixer, model.mixer);
    assert_eq!(with(json!([attn])).unwrap().mixer, model.mixer);
    for (key, value) in [
        ("layers", json!([3])),
        ("layers", json!("all")),
        ("num_heads", json!(null)),
        ("num_heads", json!("many")),
        ("num_kv_heads", json!(3)),
        ("qk_norm", json!(true)),
    ] {
        let mut other = attn.clone();
        other[key] = value;
        refused(with(other), &["`attn"]);
    }
}

#[test]
fn positions_are_not_scaled() {
    for key in ["rope_scaling", "rope_parameters"] {
        for value in [
            json!({"factor": 2.0}),
            json!({"rope_type": "linear", "factor": 2.0, "rope_theta": 500_000.0}),
            json!({"type": "dynamic", "factor": 2.0}),
            json!({"rope_type": "yarn"}),
            json!({"rope_type": "default", "partial_rotary_factor": 0.5}),
            json!({"rope_type": "default", "mrope_section": [1, 2]}),
            json!({"rope_type": "default", "rope_theta": "large"}),
            json!({"full_attention": {"rope_type": "default"}}),
            json!("default"),
        ] {
            for model_type in MixerConfig::MODEL_TYPES {
                let parts = [&format!("`{key}` is {value}"), "not supported", "rope_type \"default\""];
                refused(read(&changed(model_type, key, value.clone())), &parts);
            }
        }
        let with = |theta: Option<f64>, inner: Value| {
            let mut keys = json_of("transformer");
            keys.as_object_mut().unwrap().remove("rope_theta");
            if let Some(theta) = theta {
                keys["rope_theta"] = json!(theta);
            }
            keys[key] = json!({"rope_type": "default", "rope_theta": inner});
            read(&keys)
        };
        let theta = |model: march_lm::Result<ModelConfig>| match model.unwrap().mixer {
            MixerConfig::Attention(keys) => keys.rope_theta,
            other => panic!("{other:?}"),
        };
        assert_eq!(theta(with(None, json!(500_000.0))), 500_000.0);
        assert_eq!(theta(with(Some(500_000.0), json!(500_000))), 500_000.0);
        assert_eq!(theta(with(Some(500_000.0), json!(null))), 500_000.0);
        assert_eq!(theta(with(None, json!(null))), 10_000.0);
        let contradiction = with(Some(500_000.0), json!(10_000.0));
        refused(
            contradiction,
            &["`rope_theta` is 500000.0", &format!("`{key}` says 10000.0"), "both the same"],
        );
        let model = with(None, json!(500_000.0)).unwrap();
        assert_eq!(ModelConfig::from_json(&model.to_json(), "again").unwrap(), model);
        // A model without positions has no wavelengths.
        read(&changed("march", key, json!({"rope_type": "default", "rope_theta": 10_000.0}))).unwrap();
    }
}

#[test]
fn a_whole_file_of_flash_linear_attention_is_read() {
    let file = json!({
        "allow_neg_eigval": false, "architectures": ["GatedDeltaNetForCausalLM"], "attn": null, "attn_mode": "chunk",
        "attnres_block_size": null, "bos_token_id": 1, "conv_size": 4, "dtype": "float32", "eos_token_id": 2,
        "expand_v": 2.0, "fuse_cross_entropy": true, "fuse_linear_cross_entropy": false, "fuse_norm": true,
        "fuse_swiglu": true, "head_dim": 16, "hidden_act": "swish", "hidden_ratio": 4, "hidden_size": 64,
        "initializer_range": 0.02, "intermediate_size": null, "max_position_embeddings": 2048,
        "model_type": "gated_deltanet", "norm_eps": 1e-06, "num_heads": 2, "num_hidden_layers": 2,
        "num_v_heads": null, "output_gate_activation": "swish", "pad_token_id": null, "tie_word_embeddings": false,
        "transformers_version": "5.22.2", "use_cache": true, "use_gate": true, "use_l2warp": false,
        "use_short_conv": true, "vocab_size": 97,
    });
    let model = read(&file).unwrap();
    assert_eq!((model.intermediate_size, model.vocab_size), (256, 97));
    assert_eq!(ModelConfig::from_json(&model.to_json(), "again").unwrap(), model);
    let file = json!({
        "architectures": ["TransformerForCausalLM"], "attnres_block_size": null, "bos_token_id": 1,
        "elementwise_affine": true, "eos_token_id": 2, "fuse_cross_entropy": true,
        "fuse_linear_cross_entropy": false, "fuse_norm": true, "fuse_swiglu": true, "hidden_act": "swish",
        "hidden_ratio": 4, "hidden_size": 64, "initializer_range": 0.02, "intermediate_size": null,
        "max_position_embeddings": 2048, "model_type": "transformer", "norm_eps": 1e-06, "num_heads": 4,
        "num_hidden_layers": 2, "num_kv_heads": null, "qk_norm": false, "qkv_bias": false, "rope_theta": 10000.0,
        "tie_word_embeddings": false, "torch_dtype": "float32", "transformers_version": "4.57.1", "use_cache": true,
        "use_l2warp": false, "vocab_size": 97, "window_size": null,
    });
    assert_eq!(read(&file).unwrap().intermediate_size, 256);
}
