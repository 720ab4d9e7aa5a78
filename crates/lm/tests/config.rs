//! Configurations: what is read, what is refused and how that is said, what is written.

mod foreign;
mod hints;
mod refusals;
mod settings;

use std::path::Path;

use march_lm::Config;
use march_lm::anchors::{MemoryConfig, Placement, Retention, Storage};
use march_lm::model::ModelConfig;
use march_lm::model::mixer::MixerConfig;
use serde_json::{Map, Value, json};

/// The text of a preset as it stands in `configs/`.
fn file_of(preset: &str) -> String {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("configs");
    std::fs::read_to_string(root.join(preset).with_extension("toml")).unwrap()
}

/// `config.json` of a small model.
fn json_of(model_type: &str) -> Value {
    let mut keys = json!({
        "model_type": model_type,
        "vocab_size": 61,
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "intermediate_size": 48,
        "norm_eps": 1e-6,
        "tie_word_embeddings": false,
        "initializer_range": 0.02,
        "hidden_act": "swish",
        "num_heads": 2,
    });
    if model_type == "transformer" {
        keys["rope_theta"] = json!(500_000.0);
    } else {
        for (key, value) in [("head_dim", json!(12)), ("expand_v", json!(2.0)), ("conv_size", json!(4))] {
            keys[key] = value;
        }
    }
    if model_type == "log_linear_gated_deltanet" {
        keys["num_levels"] = json!(9);
    }
    if model_type == "hybrid" {
        keys["layers"] = json!("2 gated_delta_net, 1 attention");
        keys["attention_num_heads"] = json!(2);
        keys["attention_rope_theta"] = json!(10_000.0);
        keys["anchors"] = json!([1]);
    }
    if ["march", "memory_caching", "hybrid"].contains(&model_type) {
        for (key, value) in
            [("anchor_interval", json!(16)), ("routing_dim", json!(8)), ("routing_top_k", json!(null))]
        {
            keys[key] = value;
        }
    }
    keys
}

fn read(keys: &Value) -> march_lm::Result<ModelConfig> {
    ModelConfig::from_json(&keys.to_string(), "folder/config.json")
}

/// The small model with one key changed.
fn changed(model_type: &str, key: &str, value: Value) -> Value {
    let mut keys = json_of(model_type);
    keys[key] = value;
    keys
}

fn toml(text: &str) -> march_lm::Result<Config> {
    Config::from_toml(text, "my.toml", None)
}

/// Keys of a model as it is written.
fn written(model: &ModelConfig) -> Map<String, Value> {
    serde_json::from_str(&model.to_json()).unwrap()
}

/// Asserts a refusal whose message contains all the parts.
#[track_caller]
fn refused<T: std::fmt::Debug>(result: march_lm::Result<T>, parts: &[&str]) {
    let message = result.expect_err("should be refused").to_string();
    for part in parts {
        assert!(message.contains(part), "no `{part}` in: {message}");
    }
}

#[test]
fn every_preset_loads() {
    let names: Vec<_> = Config::presets().collect();
    assert_eq!(names.len(), 26);
    let mut model_types = Vec::new();
    for name in names {
        let config = Config::load(name).unwrap();
        config.model.check(name).unwrap();
        assert!(config.model.other.is_empty());
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("configs");
        let path = root.join(name).with_extension("toml");
        assert_eq!(config, Config::load(path.to_str().unwrap()).unwrap(), "the file of {name}");
        model_types.push(config.model.mixer.model_type());
    }
    for model_type in MixerConfig::MODEL_TYPES {
        assert!(model_types.contains(model_type), "messages take examples from a preset of {model_type}");
    }
}

#[test]
fn every_file_is_a_preset() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("configs");
    for folder in std::fs::read_dir(root).unwrap() {
        let folder = folder.unwrap();
        for file in std::fs::read_dir(folder.path()).unwrap() {
            let path = file.unwrap().path();
            let name = format!(
                "{}/{}",
                folder.file_name().to_str().unwrap(),
                path.file_stem().unwrap().to_str().unwrap()
            );
            assert!(Config::presets().any(|preset| preset == name), "{name}");
        }
    }
}

#[test]
fn every_key_says_who_chose_it() {
    for name in Config::presets() {
        let text = file_of(name);
        assert!(text.starts_with("# "), "{name} does not open with a comment");
        for line in text.lines().filter(|line| line.contains('=') && !line.starts_with('#')) {
            let comment = line.split_once('#').unwrap_or_else(|| panic!("{name}: {line}")).1.trim();
            let known = ["paper", "ours", "Qwen3.5"].iter().any(|who| comment.starts_with(who));
            assert!(known, "{name}: {line}");
        }
    }
}

/// Numbers of the tensor list, from the keys.
fn parameters(model: &ModelConfig) -> usize {
    let keys = written(model);
    let key = |name: &str| keys.get(name).and_then(Value::as_u64).unwrap_or(0) as usize;
    let (width, heads, value_heads) = (key("hidden_size"), key("num_heads"), key("num_v_heads"));
    let tables = if model.tie_word_embeddings { 1 } else { 2 };
    let embeddings = tables * key("vocab_size") * width + width;
    let block = 2 * width + 3 * width * key("intermediate_size");
    let expand = keys.get("expand_v").and_then(Value::as_f64).unwrap_or(0.0);
    let value_dim = key("head_dim") * expand as usize;
    let (key_width, value_width) = (heads * key("head_dim"), value_heads * value_dim);
    let delta = (2 * key_width + 3 * value_width + 2 * value_heads) * width
        + (2 * key_width + value_width) * key("conv_size")
        + 2 * value_heads
        + value_dim;
    let null = if keys.get("null_route") == Some(&json!(true)) { value_heads * (width + 1) } else { 0 };
    let (mixer, once) = match model.mixer.model_type() {
        "transformer" => (4 * width * width, 0),
        "gated_deltanet" => (delta, 0),
        "log_linear_gated_deltanet" => (delta + value_heads * key("num_levels") * (width + 1), 0),
        "march" => (delta + 2 * value_heads * key("routing_dim") * width + null, width),
        "memory_caching" => (delta + 2 * value_heads * key("routing_dim") * width, 0),
        "hybrid" => {
            // Three layers in four are of Gated DeltaNet.
            let layers = key("num_hidden_layers");
            let (heads, head) = (key("attention_num_heads"), key("attention_head_width"));
            let attention = (3 * heads + 2 * key("attention_num_kv_heads")) * head * width + 2 * head;
            let anchored = keys.get("anchors").map_or(0, |list| list.as_array().unwrap().len());
            let routing = anchored * (2 * value_heads * key("routing_dim") * width + null);
            let once = if anchored > 0 { width } else { 0 };
            return embeddings + layers * block + layers / 4 * (3 * delta + attention) + routing + once;
        }
        other => panic!("{other}"),
    };
    embeddings + once + key("num_hidden_layers") * (block + mixer)
}

#[test]
fn the_opening_comment_counts_the_parameters() {
    for name in Config::presets() {
        let text = file_of(name);
        let words: Vec<_> = text.lines().next().unwrap().split_whitespace().collect();
        let at = words.iter().position(|word| word.starts_with("parameters")).unwrap();
        let count: usize = words[at - 1].replace(',', "").parse().unwrap();
        assert_eq!(count, parameters(&Config::load(name).unwrap().model), "{name}");
    }
    for (name, count) in [
        ("paper/transformer-21", 692_912_640),
        ("paper/transformer-24", 777_856_512),
        ("paper/gdn", 792_785_532),
        ("paper/log-linear", 795_690_462),
        ("paper/march", 817_753_338),
    ] {
        assert_eq!(parameters(&Config::load(name).unwrap().model), count, "{name}");
    }
}

#[test]
fn an_ablation_changes_one_key() {
    let paper = Config::load("paper/march").unwrap();
    for (name, key, value) in [
        ("interval-256", "anchor_interval", json!(256)),
        ("interval-1024", "anchor_interval", json!(1024)),
        ("interval-2048", "anchor_interval", json!(2048)),
        ("routing-dim-192", "routing_dim", json!(192)),
        ("top-4", "routing_top_k", json!(4)),
        ("no-null", "null_route", json!(false)),
    ] {
        let config = Config::load(&format!("ablation/{name}")).unwrap();
        assert_eq!(config.model.memory, paper.model.memory);
        let mut expected = written(&paper.model);
        assert_ne!(expected[key], value);
        expected[key] = value;
        assert_eq!(written(&config.model), expected, "{name}");
    }
    let fenwick = Config::load("ablation/fenwick").unwrap();
    let mut expected = written(&paper.model);
    expected["retention"] = json!("fenwick");
    assert_eq!(written(&fenwick.model), expected);
    assert_eq!(
        (paper.model.memory.retention, fenwick.model.memory.retention),
        (Retention::All, Retention::Fenwick)
    );
}

#[test]
fn config_json_is_read_with_its_defaults() {
    for model_type in MixerConfig::MODEL_TYPES {
        let model = read(&json_of(model_type)).unwrap();
        assert_eq!(model.mixer.model_type(), *model_type);
        assert_eq!((model.vocab_size, model.hidden_size, model.num_hidden_layers), (61, 32, 3));
        assert_eq!((model.intermediate_size, model.norm_eps, model.initializer_range), (48, 1e-6, 0.02));
        assert_eq!(model.other, json!({"hidden_act": "swish"}).as_object().unwrap().clone());
    }
    let MixerConfig::March(keys) = read(&json_of("march")).unwrap().mixer else { panic!("not march") };
    assert_eq!((keys.base.value_heads(), keys.base.value_dim(), keys.base.allow_neg_eigval), (2, 24, false));
    assert_eq!((keys.routing.routing_top_k, keys.routing.null_route), (None, true));
    assert_eq!((keys.routing.routing_scale, keys.routing.null_bias_init), (1.0, 0.0));
}

#[test]
fn what_is_written_reads_the_same() {
    for model_type in MixerConfig::MODEL_TYPES {
        let mut keys = json_of(model_type);
        keys["architectures"] = json!(["SomeModel"]);
        keys["fuse_norm"] = json!(true);
        keys["attnres_block_size"] = json!(null);
        keys["task_specific_params"] = json!({"a": [1, 2.5, null]});
        let model = read(&keys).unwrap();
        let text = model.to_json();
        assert!(text.starts_with("{\n  \"model_type\": "), "{text}");
        assert!(text.ends_with("}\n"), "{text}");
        assert_eq!(ModelConfig::from_json(&text, "again").unwrap(), model);
        let written = written(&model);
        for key in ["architectures", "fuse_norm", "attnres_block_size", "task_specific_params", "hidden_act"]
        {
            assert_eq!(written[key], keys[key]);
        }
    }
    let march = written(&read(&json_of("march")).unwrap());
    assert_eq!((&march["num_v_heads"], &march["allow_neg_eigval"]), (&json!(2), &json!(false)));
    assert_eq!((&march["routing_top_k"], &march["null_route"]), (&json!(null), &json!(true)));
    assert_eq!((&march["routing_scale"], &march["null_bias_init"]), (&json!(1.0), &json!(0.0)));
    for name in Config::presets() {
        let model = Config::load(name).unwrap().model;
        assert_eq!(ModelConfig::from_json(&model.to_json(), name).unwrap(), model);
    }
}

#[test]
fn numbers_may_be_written_either_way() {
    let mut keys = json_of("gated_deltanet");
    keys["expand_v"] = json!(2);
    keys["num_heads"] = json!(2.0);
    keys["norm_eps"] = json!(1);
    let model = read(&keys).unwrap();
    keys["expand_v"] = json!(2.0);
    keys["num_heads"] = json!(2);
    keys["norm_eps"] = json!(1.0);
    assert_eq!(model, read(&keys).unwrap());
    assert_eq!(model.norm_eps, 1.0);
    let march = toml("extends = 'paper/march'\n[model]\nrouting_scale = 2\nanchor_interval = 64.0").unwrap();
    assert_eq!(written(&march.model)["routing_scale"], json!(2.0));
    assert_eq!(march.model.mixer.policy().unwrap().interval, Some(64));
    refused(read(&changed("march", "num_heads", json!(2.5))), &["`num_heads` is 2.5", "whole number"]);
    refused(read(&changed("march", "num_heads", json!(-2))), &["`num_heads` is -2", "whole number"]);
    refused(read(&changed("march", "num_heads", json!(1e300))), &["`num_heads` is 1e+300", "whole number"]);
}

#[test]
fn a_null_counts_as_missing() {
    for key in ["num_v_heads", "allow_neg_eigval", "null_route", "routing_scale", "null_bias_init"] {
        assert_eq!(read(&changed("march", key, json!(null))).unwrap(), read(&json_of("march")).unwrap());
    }
    for key in ["vocab_size", "norm_eps", "head_dim", "anchor_interval", "model_type"] {
        let parts = ["folder/config.json", &format!("`{key}` is missing")];
        refused(read(&changed("march", key, json!(null))), &parts);
    }
}

#[test]
fn intermediate_size_can_follow_from_hidden_ratio() {
    let with = |hidden: Value, ratio: Value| {
        let mut keys = changed("gated_deltanet", "intermediate_size", json!(null));
        keys["hidden_size"] = hidden;
        keys["hidden_ratio"] = ratio;
        read(&keys)
    };
    for (hidden, ratio, expected) in [
        (json!(1536), json!(4), 4096),
        (json!(2048), json!(4), 5632),
        (json!(32), json!(4.0), 256),
        (json!(96), json!(4), 256),
        (json!(1024.0), json!(3.5), 2560),
    ] {
        let model = with(hidden, ratio.clone()).unwrap();
        assert_eq!(model.intermediate_size, expected);
        assert_eq!(model.other["hidden_ratio"], ratio);
        assert_eq!(ModelConfig::from_json(&model.to_json(), "again").unwrap(), model);
    }
    assert_eq!(with(json!(2048), json!(null)).unwrap().intermediate_size, 5632);
    refused(read(&changed("march", "intermediate_size", json!(null))), &["`intermediate_size` is missing"]);
    for ratio in [json!(0), json!(-4), json!("four"), json!(1e300)] {
        refused(with(json!(32), ratio), &["`hidden_ratio` is", "`intermediate_size`"]);
    }
    // Where both are given, the size counts.
    assert_eq!(read(&changed("march", "hidden_ratio", json!(4))).unwrap().intermediate_size, 48);
}

#[test]
fn memory_is_read_and_refused() {
    let config = |model: &str, line: &str| toml(&format!("extends = '{model}'\n[memory]\n{line}"));
    assert_eq!(config("tiny/march", "").unwrap().model.memory.retention, Retention::All);
    assert_eq!(
        config("tiny/march", "retention = 'fenwick'").unwrap().model.memory.retention,
        Retention::Fenwick
    );
    assert_eq!(config("tiny/gdn", "retention = 'all'").unwrap().model.memory.retention, Retention::All);
    refused(config("tiny/gdn", "retention = 'fenwick'"), &["`retention`", "`gated_deltanet` has no anchors"]);
    refused(
        config("tiny/march", "retention = 'newest'"),
        &["my.toml, line 3: `retention` is `newest`", "fenwick"],
    );
    refused(config("tiny/march", "retention = 3"), &["`retention` is 3"]);
    refused(config("tiny/march", "retension = 'all'"), &["`retension`", "mean `retention`"]);
    refused(config("tiny/march", "anchor_interval = 3"), &["`anchor_interval`", "[model]"]);
    let all =
        config("tiny/march", "retention = 'recent:9'\nplacement = 'adaptive:8'\nstorage = 'int8'").unwrap();
    let policy = all.model.policy().unwrap();
    assert_eq!((policy.interval, policy.retention), (Some(64), Retention::Recent(9)));
    assert_eq!((policy.placement, policy.storage), (Placement::Adaptive(8), Storage::Int8));
    assert_eq!(Config::from_toml(&all.to_toml(), "again", None).unwrap(), all);
    refused(
        config("tiny/march", "placement = 'adaptive:65'"),
        &["line 3: `placement`", "adaptive:64 or less"],
    );
    refused(config("tiny/march", "placement = 'here'"), &["`placement` is `here`", "`periodic`"]);
    refused(config("tiny/march", "storage = 'f16'"), &["`storage` is `f16`", "`int8`"]);
    refused(config("tiny/gdn", "storage = 'int8'"), &["`storage`", "`gated_deltanet` has no anchors"]);
}

/// The policy that a checkpoint was made for is in its `config.json`; a folder from before that has the defaults.
#[test]
fn config_json_has_the_whole_policy() {
    let plain = read(&json_of("march")).unwrap();
    assert_eq!(plain.memory, MemoryConfig::default());
    let names = ["retention", "placement", "storage"];
    let of = |keys: &Map<String, Value>| names.map(|name| keys[name].clone());
    assert_eq!(of(&written(&plain)), ["all", "periodic", "f32"].map(Value::from));
    let mut keys = json_of("march");
    keys["retention"] = json!("recent:9");
    keys["placement"] = json!("adaptive:8");
    keys["storage"] = json!("int8");
    let model = read(&keys).unwrap();
    let policy = model.policy().unwrap();
    assert_eq!((policy.interval, policy.top_k, policy.retention), (Some(16), None, Retention::Recent(9)));
    assert_eq!((policy.placement, policy.storage), (Placement::Adaptive(8), Storage::Int8));
    assert_eq!(of(&written(&model)), names.map(|name| keys[name].clone()));
    assert!(model.other.iter().all(|(key, _)| !names.contains(&key.as_str())));
    // Refused as in `[memory]`, and unknown to a model without anchors.
    for (key, value, parts) in [
        ("retention", json!("newest"), ["folder/config.json: `retention` is `newest`", "`fenwick`"]),
        ("placement", json!("adaptive:17"), ["`placement`", "adaptive:16 or less"]),
        ("storage", json!(3), ["`storage` is 3", "a text in quotes"]),
    ] {
        refused(read(&changed("march", key, value)), &parts);
    }
    for model_type in ["gated_deltanet", "transformer", "log_linear_gated_deltanet"] {
        refused(read(&changed(model_type, "retention", json!("all"))), &["`retention`", "not known"]);
        assert!(names.iter().all(|name| !written(&read(&json_of(model_type)).unwrap()).contains_key(*name)));
        assert_eq!(read(&json_of(model_type)).unwrap().policy(), None);
    }
}

#[test]
fn extends_merges_key_by_key() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let write = |name: &str, text: &str| {
        std::fs::create_dir_all(path(name).parent().unwrap()).unwrap();
        std::fs::write(path(name), text).unwrap();
    };
    let load = |name: &str| Config::load(path(name).to_str().unwrap());
    write("base.toml", "extends = 'tiny/march'\n[model]\nrouting_dim = 16\nvocab_size = 300");
    write(
        "sub/top.toml",
        "extends = '../base.toml'\n[model]\nvocab_size = 400\n[memory]\nretention = 'fenwick'",
    );
    let (tiny, top) = (Config::load("tiny/march").unwrap(), load("sub/top.toml").unwrap());
    let mut expected = written(&tiny.model);
    expected["routing_dim"] = json!(16);
    expected["vocab_size"] = json!(400);
    expected["retention"] = json!("fenwick");
    assert_eq!(written(&top.model), expected);
    assert_eq!(top.model.memory.retention, Retention::Fenwick);
    let text = std::fs::read_to_string(path("sub/top.toml")).unwrap();
    assert_eq!(Config::from_toml(&text, "a text", Some(&path("sub"))).unwrap(), top);

    write("a.toml", "extends = 'sub/b.toml'");
    write("sub/b.toml", "extends = '../sub/../a.toml'");
    refused(load("a.toml"), &["b.toml, line 1: `extends` forms a cycle", "a.toml", " → "]);
    write("self.toml", "# one line\nextends = 'self.toml'");
    refused(load("self.toml"), &["self.toml, line 2: `extends` forms a cycle"]);
    refused(Config::from_toml("extends = 'a.toml'", "text", Some(folder.path())), &["cycle"]);

    write("lost.toml", "extends = 'nowhere.toml'");
    refused(load("lost.toml"), &["lost.toml, line 1: `extends` names `nowhere.toml`", "does not exist"]);
    refused(
        toml("extends = 'paper/marhc'"),
        &["`extends` names `paper/marhc`", "presets are\n  paper/march\n"],
    );
    refused(toml("extends = 'base.toml'"), &["`extends` names `base.toml`", "the nearest presets are"]);
    refused(toml("extends = 3"), &["`extends` must be a text"]);
    write("broken.toml", "[model");
    write("on-broken.toml", "extends = 'broken.toml'");
    refused(load("on-broken.toml"), &["broken.toml: line 1"]);
    write("wrong.toml", "extends = 'tiny/march'\n[model]\nrouting_dimm = 3");
    write("on-wrong.toml", "extends = 'wrong.toml'\n[model]\nvocab_size = 3");
    refused(load("on-wrong.toml"), &["wrong.toml, line 3: `routing_dimm`", "`routing_dim`"]);
}
