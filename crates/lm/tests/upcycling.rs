//! A trained Gated DeltaNet that continues as MARCH: it computes the same at first, and its routing learns.

mod routing;

use std::path::{Path, PathBuf};
use std::sync::LazyLock;
use std::sync::atomic::AtomicBool;

use march_lm::Config;
use march_lm::checkpoint::Checkpoint;
use march_lm::data::builtin;
use march_lm::engine::{Device, Tensor};
use march_lm::model::mixer::MixerConfig;
use march_lm::model::{Batch, Model, Settings};
use march_lm::run::{Run, RunOptions};
use march_lm::train::ranks::SingleProcess;
use tempfile::TempDir;

use crate::common::{Case, cpu};

/// A small model of a preset's type; those of `tiny/gdn` and `tiny/march` have the same base.
fn config(preset: &str, more: &[&str]) -> Config {
    let mut settings = vec![
        "model.hidden_size=32",
        "model.num_hidden_layers=3",
        "model.intermediate_size=64",
        "model.num_heads=2",
        "data.sequence_length=256",
        "train.tokens_per_step=1024",
        "train.steps=120",
        "train.save_every=0",
        "train.validate_every=0",
        "train.sample_tokens=0",
    ];
    if preset != "tiny/transformer" {
        settings.extend(["model.head_dim=16", "model.expand_v=1.0"]);
    }
    if preset == "tiny/march" {
        settings.extend(["model.anchor_interval=64", "model.routing_dim=8"]);
    }
    settings.extend(more);
    Config::load_with(preset, &settings.iter().map(|text| text.to_string()).collect::<Vec<_>>()).unwrap()
}

fn create(
    device: &Device,
    config: Config,
    folder: &Path,
    from: Option<&Path>,
    bias: Option<f64>,
) -> march_lm::Result<Run> {
    let options = RunOptions {
        init_from: from.map(Into::into),
        upcycle_null_bias: bias,
        stop_at: None,
        settings: Vec::new(),
    };
    Run::create(device, config, folder, options, Box::<SingleProcess>::default())
}

/// A Gated DeltaNet after 120 steps on the built-in book.
fn trained() -> PathBuf {
    static TRAINED: LazyLock<TempDir> = LazyLock::new(|| {
        let folder = tempfile::tempdir().unwrap();
        let device = cpu();
        let mut run =
            create(&device, config("tiny/gdn", &[]), &folder.path().join("run"), None, None).unwrap();
        assert!(run.train(&AtomicBool::new(false), &mut |_| {}).unwrap());
        folder
    });
    TRAINED.path().join("run/checkpoints/step-120")
}

/// The trained model continued as MARCH with further settings.
fn continued(device: &Device, folder: &Path, more: &[&str], bias: Option<f64>) -> Run {
    create(device, config("tiny/march", more), folder, Some(&trained()), bias).unwrap()
}

/// The last part of the book, which was not trained on.
fn text(tokens: usize) -> (Vec<u32>, Vec<u32>) {
    let ids: Vec<u32> = builtin().bytes().rev().take(tokens + 1).map(u32::from).collect();
    let ids: Vec<u32> = ids.into_iter().rev().collect();
    (ids[..tokens].to_vec(), ids[1..].to_vec())
}

/// The mean loss of the text's tokens.
fn loss(model: &Model, parameters: &[Tensor], tokens: usize) -> f64 {
    let (inputs, targets) = text(tokens);
    let weights = parameters.into();
    let settings = Settings { policy: model.policy(), ..Settings::default() };
    let hidden = model.forward(&weights, Batch::one(&inputs), &settings, None).unwrap();
    let losses = model.token_losses(&weights, &hidden, &targets).unwrap();
    losses.nll.iter().map(|&nll| f64::from(nll)).sum::<f64>() / tokens as f64
}

fn null_bias(config: &Config) -> f64 {
    let MixerConfig::March(mixer) = &config.model.mixer else { panic!("not MARCH") };
    mixer.routing.null_bias_init
}

/// At the length that the run trains with, from 3 to 511 anchors, the loss is that of the checkpoint within 0.01 nats.
#[test]
fn the_loss_is_that_of_the_checkpoint() {
    let device = cpu();
    let (base, parameters) = Model::load(&device, &Checkpoint::open(&trained()).unwrap()).unwrap();
    let folder = tempfile::tempdir().unwrap();
    for (tokens, interval) in [(256, 64), (1024, 32), (2048, 16), (2048, 4)] {
        let lengths = [
            format!("data.sequence_length={tokens}"),
            format!("train.tokens_per_step={tokens}"),
            format!("model.anchor_interval={interval}"),
        ];
        let run = folder.path().join(format!("{tokens}-{interval}"));
        let run = continued(&device, &run, &lengths.each_ref().map(String::as_str), None);
        let visible = (tokens - 1) / interval;
        assert!((null_bias(run.config()) - 5.0 - (visible as f64).ln()).abs() < 0.01);
        let before = loss(&base, &parameters, tokens);
        let after = loss(run.trainer().model(), run.trainer().parameters(), tokens);
        println!("{tokens} tokens, {visible} anchors: {before:.4} nats before, {after:.4} after");
        assert!(before < 3.3, "{before}: the checkpoint was not trained");
        assert!((after - before).abs() < 0.01, "{tokens} tokens, {visible} anchors: {before}, {after}");
    }
}

/// The same on a text eight times as long as those of the run, and with lower biases, which are further away.
#[test]
fn the_default_bias_has_a_margin() {
    let device = cpu();
    let (base, parameters) = Model::load(&device, &Checkpoint::open(&trained()).unwrap()).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let before = loss(&base, &parameters, 2048);
    let mut differences = Vec::new();
    for bias in [None, Some(4.0), Some(2.0), Some(0.0)] {
        let run = folder.path().join(format!("{bias:?}"));
        let run = continued(&device, &run, &["model.anchor_interval=8"], bias);
        let after = loss(run.trainer().model(), run.trainer().parameters(), 2048);
        println!("bias {:.2}, 255 anchors: {:+.5} nats", null_bias(run.config()), after - before);
        differences.push((after - before).abs());
    }
    assert!(differences[0] < 0.01 && differences[0] < differences[3], "{differences:?}");
}

/// With a null that takes all of the weight, the logits are those of the checkpoint. The kernel's chunks of 64 tokens
/// divide the interval, so they are so bit for bit.
#[test]
fn a_null_that_takes_all_leaves_the_checkpoint() {
    let device = cpu();
    let (model, parameters) = Model::load(&device, &Checkpoint::open(&trained()).unwrap()).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let run = continued(&device, &folder.path().join("run"), &[], Some(1e4));
    assert_eq!(null_bias(run.config()), 1e4);
    let (inputs, _) = text(700);
    let base = Case { model, parameters };
    let model = Model::new(&run.config().model);
    let policy = model.policy();
    let march = Case { model, parameters: run.trainer().parameters().to_vec() };
    let want = base.forward(Batch::one(&inputs), &Default::default());
    assert!(march.forward(Batch::one(&inputs), &policy) == want, "the logits differ");
}

/// Every parameter that was added has a gradient, in every element of the text's routing. That holds for the first
/// layer too: its anchors have equal keys, so its scores are equal, but they compete with the null, and the gradient
/// of their common score reaches the query, the key and the anchor embedding.
#[test]
fn all_that_was_added_learns() {
    let device = cpu();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run");
    let mut run = continued(&device, &path, &["train.steps=1"], None);
    let model = Model::new(&run.config().model);
    let extension = run.config().model.mixer.extension().unwrap();
    let (inputs, targets) = text(1024);
    let settings = Settings { policy: model.policy(), ..Settings::default() };
    let before = run.trainer().parameters().to_vec();
    let case = Case { model, parameters: before.clone() };
    let batch = Batch { ids: &inputs, rows: 4 };
    let (_, gradients) = case.gradients(batch, &targets, &settings);
    let mut added = 0;
    let largest = |values: Vec<f64>| values.into_iter().fold(0.0f64, |largest, v| largest.max(v.abs()));
    for (spec, gradient) in case.model.layout().iter().zip(&gradients) {
        if extension.adds(&spec.name) {
            let gradient = largest(gradient.as_ref().expect(&spec.name).to_f64());
            println!("{} {gradient:.1e}", spec.name);
            assert!(gradient > 1e-9, "{}: {gradient}", spec.name);
            added += 1;
        }
    }
    assert_eq!(added, 1 + 3 * 4);
    // A step of training changes all of them.
    assert!(run.train(&AtomicBool::new(false), &mut |_| {}).unwrap());
    for ((spec, before), after) in case.model.layout().iter().zip(&before).zip(run.trainer().parameters()) {
        assert!(before.to_f64() != after.to_f64(), "{} is as before", spec.name);
    }
}

/// The run's folder holds all that the start depends on.
#[test]
fn resuming_continues_from_the_same_start() {
    let device = cpu();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run");
    let start = continued(&device, &path, &["train.steps=2"], Some(7.5));
    let want: Vec<Vec<f64>> = start.trainer().parameters().iter().map(|p| p.to_f64()).collect();
    drop(start);
    let options = RunOptions::default();
    let run = Run::resume(&device, &path, options, Box::<SingleProcess>::default(), &mut |_| {}).unwrap();
    assert_eq!(null_bias(run.config()), 7.5);
    let got: Vec<Vec<f64>> = run.trainer().parameters().iter().map(|p| p.to_f64()).collect();
    assert!(got == want);
}

#[test]
fn what_does_not_fit_is_refused_by_name() {
    let device = cpu();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run");
    let refused = |config: Config, from: &Path, bias| {
        let message = create(&device, config, &path, Some(from), bias).err().expect("refused").to_string();
        assert!(!path.exists(), "{message}");
        message
    };
    let gdn = trained();
    for (set, part) in [
        ("model.hidden_size=48", "`hidden_size` 32, but the configured model has 48"),
        ("model.num_hidden_layers=4", "`num_hidden_layers` 3"),
        ("model.num_heads=4", "`num_heads` 2"),
        ("model.norm_eps=1e-5", "`norm_eps`"),
        ("model.allow_neg_eigval=true", "`allow_neg_eigval` false"),
        ("model.null_route=false", "`null_route` is false"),
    ] {
        let message = refused(config("tiny/march", &[set]), &gdn, None);
        assert!(message.contains(part), "{set}: {message}");
    }
    let message = refused(config("tiny/gdn", &[]), &gdn, Some(3.0));
    assert!(message.contains("--upcycle-null-bias"), "{message}");
    let message = refused(config("tiny/march", &[]), &gdn, Some(f64::NAN));
    assert!(message.contains("finite"), "{message}");
    // Other kinds of models, and MARCH without its routing.
    let from = |preset: &str| {
        let run = folder.path().join(preset.replace('/', "-"));
        let more = ["train.steps=1", "train.sample_tokens=0"];
        let mut run = create(&device, config(preset, &more), &run, None, None).unwrap();
        run.train(&AtomicBool::new(false), &mut |_| {}).unwrap();
        run.folder().join("checkpoints/step-1")
    };
    for (preset, target, part) in [
        ("tiny/transformer", "tiny/march", "`model.anchor_embedding` is missing"),
        ("tiny/transformer", "tiny/gdn", "`model.layers.0.attn.q_conv1d.weight` is missing"),
        ("tiny/march", "tiny/gdn", "`model.anchor_embedding` has no place in it"),
    ] {
        let checkpoint = folder.path().join(preset.replace('/', "-")).join("checkpoints/step-1");
        let checkpoint = if checkpoint.exists() { checkpoint } else { from(preset) };
        let message = refused(config(target, &[]), &checkpoint, None);
        assert!(message.contains(part), "{preset} as {target}: {message}");
    }
}
