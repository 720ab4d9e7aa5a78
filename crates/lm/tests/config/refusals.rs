//! What is refused, and that the message names the key, the value and what was meant.

use march_lm::Config;
use march_lm::model::ModelConfig;
use serde_json::json;

use super::{changed, json_of, read, refused, toml};

#[test]
fn each_missing_key_is_named() {
    // Types of flash-linear-attention have its defaults; see `foreign`.
    for model_type in ["march", "log_linear_gated_deltanet"] {
        let keys = json_of(model_type);
        for key in keys.as_object().unwrap().keys() {
            if ["hidden_act", "routing_top_k"].contains(&key.as_str()) {
                continue;
            }
            let mut without = keys.clone();
            without.as_object_mut().unwrap().remove(key);
            refused(read(&without), &[&format!("`{key}` is missing")]);
        }
    }
    let mut keys = json_of("march");
    keys.as_object_mut().unwrap().remove("anchor_interval");
    refused(read(&keys), &["preset paper/march has 512"]);
    keys["anchor_intervall"] = json!(16);
    refused(read(&keys), &["`anchor_interval` is missing", "`anchor_intervall`"]);
}

#[test]
fn a_wrong_type_is_named() {
    for (key, value, parts) in [
        ("num_heads", json!("two"), ["`num_heads` is \"two\"", "a whole number"]),
        ("norm_eps", json!([1]), ["`norm_eps` is [1]", "a number"]),
        ("tie_word_embeddings", json!("no"), ["`tie_word_embeddings` is \"no\"", "true or false"]),
        ("model_type", json!(3), ["`model_type` is 3", "a text"]),
        ("routing_top_k", json!(true), ["`routing_top_k` is true", "whole number"]),
        ("norm_eps", json!(null), ["`norm_eps` is missing (it is null)", "add it"]),
    ] {
        refused(read(&changed("march", key, value)), &parts);
    }
    refused(ModelConfig::from_json("[1]", "c.json"), &["c.json", "JSON object"]);
    refused(ModelConfig::from_json("{\n  \"a\": ,\n}", "c.json"), &["c.json", "line 2 column 8"]);
    refused(ModelConfig::from_json("", "c.json"), &["c.json", "not JSON"]);
}

#[test]
fn contradictions_are_refused() {
    for (key, value) in [
        ("vocab_size", json!(0)),
        ("hidden_size", json!(0)),
        ("num_hidden_layers", json!(0)),
        ("intermediate_size", json!(0)),
        ("vocab_size", json!(1u64 << 60)),
        ("num_hidden_layers", json!(1_000_000)),
        ("norm_eps", json!(0.0)),
        ("norm_eps", json!(-1e-6)),
        ("initializer_range", json!(-0.5)),
        ("num_v_heads", json!(3)),
        ("expand_v", json!(0.3)),
        ("anchor_interval", json!(0)),
        ("routing_dim", json!(0)),
        ("routing_top_k", json!(0)),
    ] {
        let parts = ["folder/config.json", &format!("`{key}` is"), "it must be"];
        refused(read(&changed("march", key, value)), &parts);
    }
    refused(
        read(&changed("transformer", "num_heads", json!(5))),
        &["`num_heads` is 5", "`hidden_size` (32)"],
    );
    let mut model = read(&json_of("march")).unwrap();
    for value in [f64::NAN, f64::INFINITY] {
        model.norm_eps = value;
        refused(model.check("here"), &["here: `norm_eps` is"]);
        model.norm_eps = 1e-6;
        model.initializer_range = value;
        refused(model.check("here"), &["here: `initializer_range` is"]);
        model.initializer_range = 0.0;
        model.check("here").unwrap();
    }
    refused(toml("extends = 'paper/gdn'\n[model]\nnorm_eps = 0"), &["my.toml, line 3", "`norm_eps` is 0"]);
    refused(
        toml("extends = 'paper/gdn'\n[model]\nnorm_eps = inf"),
        &["my.toml, line 3", "`norm_eps` is inf"],
    );
    refused(toml("extends = 'paper/gdn'\n[model]\nnorm_eps = nan"), &["`norm_eps` is nan", "finite"]);
}

#[test]
fn unknown_model_types_name_the_nearest() {
    refused(
        read(&changed("march", "model_type", json!("marhc"))),
        &["`model_type` is `marhc`", "mean `march`"],
    );
    refused(toml("[model]\nmodel_type = 'gated-deltanet'"), &["line 2", "mean `gated_deltanet`"]);
    refused(
        toml("[model]\nmodel_type = 'rwkv'"),
        &["`rwkv`", "`march`", "`transformer`", "`gated_deltanet`"],
    );
}

#[test]
fn unknown_keys_in_toml_name_the_nearest() {
    let march = |line: &str| toml(&format!("extends = 'paper/march'\n[model]\n{line}"));
    refused(
        march("anchor_intervall = 5"),
        &["my.toml, line 3: `anchor_intervall`", "mean `anchor_interval`"],
    );
    refused(march("top_k = 5"), &["`top_k`", "mean `routing_top_k`"]);
    refused(march("NormEps = 1e-5"), &["`NormEps`", "mean `norm_eps`"]);
    refused(
        march("learning_rate = 1"),
        &["`learning_rate`", "its keys are", "`vocab_size`", "`routing_dim`"],
    );
    refused(march("num_kv_heads = 6"), &["`num_kv_heads` is not a key of [model]"]);
    refused(march("retention = 'all'"), &["`retention` is not a key of [model]", "[memory]"]);
    refused(march("rope_theta = 1.0"), &["`rope_theta`", "model_type `march`", "`transformer`"]);
    refused(march("[model.extra]\na = 1"), &["`extra` is not a key of [model]"]);
    let gdn = |line: &str| toml(&format!("extends = 'tiny/gdn'\n[model]\n{line}"));
    refused(
        gdn("anchor_interval = 64"),
        &["`anchor_interval` is not used by model_type `gated_deltanet`", "`march`"],
    );
    refused(gdn("routing_top_k = 4"), &["`routing_top_k` is not used by model_type `gated_deltanet`"]);
    // Keys of the extended file count too, and the message says where they stand.
    refused(
        toml("extends = 'paper/march'\n[model]\nmodel_type = 'gated_deltanet'"),
        &["preset paper/march, line", "is not used by model_type `gated_deltanet`"],
    );
}

#[test]
fn unknown_sections_are_refused() {
    refused(toml("[modle]\nvocab_size = 1"), &["my.toml, line 1: `modle`", "mean `model`"]);
    refused(toml("\n[optimizer]\nlr = 1"), &["line 2: `optimizer`", "[model], [memory], [data], [train]"]);
    refused(toml("vocab_size = 1"), &["`vocab_size`", "below the line [model]"]);
    refused(toml("model = 1"), &["`model` is a section"]);
    refused(toml("extend = 'paper/march'"), &["`extend`", "mean `extends`"]);
    refused(toml("something = 1"), &["`something`", "`extends`"]);
    refused(toml(""), &["my.toml: `model` is missing", "extends"]);
}

#[test]
fn toml_syntax_errors_have_a_line_and_a_column() {
    refused(toml("[model]\nvocab_size = = 3"), &["my.toml", "line 2, column 14"]);
    refused(toml("[model]\n# é\nα = 1"), &["my.toml", "line 3, column 1"]);
    refused(toml("[model]\nvocab_size = 1\nvocab_size = 2"), &["line 3, column 1", "duplicate"]);
    refused(toml("[model"), &["line 1, column"]);
    refused(toml("[model]\nvocab_size = 99999999999999999999"), &["line 2", "`vocab_size`", "too large"]);
}

#[test]
fn names_that_are_not_there_are_answered_with_presets() {
    let near = "the nearest presets are\n  ";
    refused(Config::load("paper/marhc"), &["paper/marhc: is not", &format!("{near}paper/march\n  ")]);
    refused(Config::load("march"), &[near, "\n  paper/march", "\n  demo/march", "\n  tiny/march"]);
    refused(Config::load("paper/gdn.toml"), &[&format!("{near}paper/gdn\n  ")]);
    refused(Config::load("zzz"), &["zzz", near, "`march inspect model --list` shows all"]);
    refused(Config::load(""), &[near]);
    let message = Config::load("tiny/marsh").unwrap_err().to_string();
    assert_eq!(message.lines().filter(|line| line.starts_with("  ")).count(), 3, "{message}");
    let folder = tempfile::tempdir().unwrap();
    refused(Config::load(folder.path().to_str().unwrap()), &["is a folder"]);
    let binary = folder.path().join("binary.toml");
    std::fs::write(&binary, [0xff, 0xfe, 0x00]).unwrap();
    refused(Config::load(binary.to_str().unwrap()), &["binary.toml", "could not read"]);
}
