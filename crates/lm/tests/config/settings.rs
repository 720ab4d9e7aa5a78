//! `--set section.key=value`, and messages that need no knowledge of the program.

use march_lm::Config;
use march_lm::train::Schedule;

use super::{refused, toml};

fn set(base: &str, settings: &[&str]) -> march_lm::Result<Config> {
    let settings: Vec<String> = settings.iter().map(ToString::to_string).collect();
    Config::load_with(base, &settings)
}

#[test]
fn settings_count_over_the_file() {
    let changed = set("tiny/march", &["train.steps=7", "train.seed = 3", "train.schedule=cosine"]).unwrap();
    let mut expected = Config::load("tiny/march").unwrap();
    (expected.train.steps, expected.train.seed, expected.train.schedule) = (7, 3, Schedule::Cosine);
    assert_eq!(changed, expected);
    assert_eq!(set("tiny/march", &["train.steps=7", "train.steps=8"]).unwrap().train.steps, 8);
    assert_eq!(set("tiny/march", &["train.betas=[0.5, 0.75]"]).unwrap().train.betas, [0.5, 0.75]);
    assert_eq!(set("tiny/march", &["train.prompts=['a', 'b c']"]).unwrap().train.prompts, ["a", "b c"]);
    assert_eq!(set("tiny/march", &["data.tokenizer='3'"]).unwrap().data.tokenizer, "3");
    assert_eq!(set("tiny/march", &["data.tokenizer=a=b"]).unwrap().data.tokenizer, "a=b");
    assert_eq!(set("tiny/march", &[]).unwrap(), Config::load("tiny/march").unwrap());
}

#[test]
fn an_error_names_the_setting() {
    for (setting, parts) in [
        ("train.steps=x", ["`steps` is \"x\"", "it must be a whole number, 0 or more"]),
        ("train.steps=", ["`steps` is \"\"", "whole number"]),
        ("train.seed=-1", ["`seed` is -1", "it must be a whole number, 0 or more"]),
        ("train.steps=99999999999999999999", ["`steps`", "too large"]),
        ("train.steps=1\ntrain.seed=2", ["`steps` is", "whole number"]),
        ("train.betas=0.9", ["`betas` is 0.9", "a list of 2 values"]),
        ("train.betas=[0.9]", ["`betas` is [0.9]", "a list of 2 values"]),
        ("train.betas=[0.9, 'a']", ["`betas` is [0.9,\"a\"]", "each of its values must be a number"]),
        ("train.prompts=hello", ["`prompts` is \"hello\"", "a list"]),
        ("train.tokens_per_step=100000000000", ["`tokens_per_step` is 100000000000", "from 1 to 4294967296"]),
        ("data.sequence_length=100000000", ["`sequence_length` is 100000000", "from 1 to 16777216"]),
        ("train.micro_batch=100000000000", ["`micro_batch` is 100000000000", "from 1 to"]),
        ("train.steps=10000000000000", ["`steps` is 10000000000000", "from 1 to"]),
        ("train.stepps=5", ["`stepps`", "mean `steps`"]),
        ("modle.steps=5", ["`modle` is not a section", "mean `model`"]),
        ("model.norm_eps=0", ["`norm_eps` is 0", "it must be"]),
        ("memory.retention=3", ["`retention` is 3", "a text in quotes"]),
        ("memory.retention=newest", ["`retention` is `newest`", "fenwick"]),
        ("train.schedule=linear", ["`schedule` is `linear`", "it must be `wsd`, `cosine` or `constant`"]),
        ("train.schedule=3", ["`schedule` is 3", "it must be a text in quotes"]),
        ("train.recompute=yes", ["`recompute` is `yes`", "it must be `auto`, `on` or `off`"]),
        ("data.kind=files", ["`kind` is `files`", "`builtin`, `shards`, `recall`, `needles` or `batches`"]),
    ] {
        let error = set("tiny/march", &["train.seed=1", setting]).unwrap_err().to_string();
        assert!(error.starts_with(&format!("--set {setting}: `")), "{error}");
        refused(set("tiny/march", &["train.seed=1", setting]), &parts);
        for word in
            ["u64", "usize", "f64", "invalid", "expected", "variant", "sequence,", "line ", "config.toml"]
        {
            assert!(!error.contains(word), "`{word}` in: {error}");
        }
    }
    refused(set("tiny/march", &["steps=5"]), &["--set: `steps=5`", "section.key=value"]);
    refused(set("tiny/march", &["train.steps"]), &["--set: `train.steps`", "section.key=value"]);
}

#[test]
fn an_error_elsewhere_names_the_file_or_preset() {
    refused(
        set("tiny/march", &["model.model_type=gated_deltanet"]),
        &["preset tiny/march, line ", "is not used by model_type `gated_deltanet`"],
    );
    refused(
        set("tiny/march", &["data.kind=shards"]),
        &["preset tiny/march: `path` is missing in [data]", "`march data prepare`", "`--set data.path=DIR`"],
    );
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("mine.toml");
    std::fs::write(&path, "extends = 'tiny/march'\n[train]\nkeep = -1").unwrap();
    let path = path.to_str().unwrap();
    let error = set(path, &["train.steps=5"]).unwrap_err().to_string();
    assert!(
        error.starts_with(&format!("{path}, line 3: `keep` is -1; it must be a whole number")),
        "{error}"
    );
    set(path, &["train.keep=1"]).unwrap();
    refused(
        toml("extends = 'tiny/gdn'\n[train]\nsteps = 1.5"),
        &["my.toml, line 3: `steps` is 1.5", "whole"],
    );
    refused(toml("extends = 'tiny/gdn'\n[data]\nshuffle = 1"), &["`shuffle` is 1", "true or false"]);
}
