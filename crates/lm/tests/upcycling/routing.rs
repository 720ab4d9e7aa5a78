//! `march upcycle`: layers of a trained model that become layers of MARCH; and training of the routing alone.

use std::path::{Path, PathBuf};
use std::sync::LazyLock;
use std::sync::atomic::AtomicBool;

use march_lm::Config;
use march_lm::anchors::Storage;
use march_lm::checkpoint::Checkpoint;
use march_lm::engine::Device;
use march_lm::model::Model;
use march_lm::run::{Run, RunOptions, Upcycle};
use march_lm::train::ranks::SingleProcess;
use march_lm::train::{Only, training_bytes};
use safetensors::SafeTensors;
use tempfile::TempDir;

use super::{config, create, loss, trained};
use crate::common::cpu;

/// A stack of Gated DeltaNet and attention after 120 steps on the built-in book.
fn trained_hybrid() -> PathBuf {
    static TRAINED: LazyLock<TempDir> = LazyLock::new(|| {
        let folder = tempfile::tempdir().unwrap();
        let layers = [
            "model.model_type=hybrid",
            "model.layers=2 gated_delta_net, 1 attention",
            "model.num_hidden_layers=6",
            "model.attention_num_heads=2",
            "model.attention_rope_theta=10000.0",
            "model.attention_attn_output_gate=true",
        ];
        let run = folder.path().join("run");
        let mut run = create(&cpu(), config("tiny/gdn", &layers), &run, None, None).unwrap();
        assert!(run.train(&AtomicBool::new(false), &mut |_| {}).unwrap());
        folder
    });
    TRAINED.path().join("run/checkpoints/step-120")
}

fn upcycled(from: &Path, to: &Path, upcycle: &Upcycle) -> Model {
    upcycle.write(&Checkpoint::open(from).unwrap(), from, to, &mut |_| {}).unwrap()
}

/// With the settings that the command proposes, and with many anchors; on texts up to eight times as long as in training.
#[test]
fn an_upcycled_model_starts_where_its_origin_is() {
    let device = cpu();
    let folder = tempfile::tempdir().unwrap();
    let close = Upcycle { interval: 64, layers: "every gated_delta_net".into(), ..Upcycle::default() };
    let ways = [
        Upcycle::default(),
        Upcycle { storage: Storage::F32, ..close.clone() },
        Upcycle { top_k: Some(2), ..close.clone() },
        Upcycle { layers: "1".into(), storage: Storage::Bf16, ..close },
    ];
    for from in [trained(), trained_hybrid()] {
        let (base, parameters) = Model::load(&device, &Checkpoint::open(&from).unwrap()).unwrap();
        for (n, way) in ways.iter().enumerate() {
            let to = folder.path().join(format!("{}-{n}", base.parameter_count()));
            upcycled(&from, &to, way);
            let (model, new) = Model::load(&device, &Checkpoint::open(&to).unwrap()).unwrap();
            assert!(model.policy().interval == Some(way.interval) && model.policy().storage == way.storage);
            for tokens in [256, 2048] {
                let (before, after) = (loss(&base, &parameters, tokens), loss(&model, &new, tokens));
                println!("{way:?}, {tokens} tokens: {before:.4} nats before, {:+.5} after", after - before);
                assert!(before < 3.5, "{before}: the origin was not trained");
                assert!((after - before).abs() < 0.01, "{way:?}: {before}, {after}");
            }
        }
    }
}

#[test]
fn layers_that_cannot_have_anchors_are_refused() {
    let (hybrid, gdn) = (Checkpoint::open(&trained_hybrid()).unwrap(), Checkpoint::open(&trained()).unwrap());
    for (checkpoint, layers, part) in [
        (&hybrid, "2", "layer 2, which is `attention`"),
        (&hybrid, "9", "names layer 9"),
        (&hybrid, "every attention", "which is `attention`"),
        (&hybrid, "every 9th gated_delta_net", "names no layer"),
        (&hybrid, "some", "every 2nd gated_delta_net"),
        (&gdn, "every 0th gated_delta_net", "every 2nd gated_delta_net"),
    ] {
        let upcycle = Upcycle { layers: layers.into(), ..Upcycle::default() };
        let message = upcycle.config(checkpoint.config()).unwrap_err().to_string();
        assert!(message.contains(part) && message.contains(layers), "{layers}: {message}");
    }
    let (march, _) = Upcycle::default().config(gdn.config()).unwrap();
    assert!(Upcycle::default().config(&march).unwrap_err().to_string().contains("has anchors already"));
}

/// A run of four steps that trains the routing of an upcycled hybrid alone.
fn started(device: &Device, from: &Path, folder: &Path, stop_at: Option<u64>) -> Run {
    let settings = [
        "data.sequence_length=256",
        "train.tokens_per_step=512",
        "train.steps=4",
        "train.save_every=0",
        "train.validate_every=0",
        "train.sample_tokens=0",
        "train.only=routing",
    ];
    let model = Checkpoint::open(from).unwrap().config().clone();
    let config = Config::with_model("tiny/march", &model, &settings.map(String::from)).unwrap();
    let options = RunOptions { init_from: Some(from.into()), stop_at, ..RunOptions::default() };
    Run::create(device, config, folder, options, Box::<SingleProcess>::default()).unwrap()
}

fn numbers(run: &Run) -> Vec<Vec<f64>> {
    run.trainer().parameters().iter().map(|parameter| parameter.to_f64()).collect()
}

#[test]
fn only_the_routing_is_trained() {
    let device = cpu();
    let folder = tempfile::tempdir().unwrap();
    let from = folder.path().join("upcycled");
    let model = upcycled(&trained_hybrid(), &from, &Upcycle { interval: 32, ..Upcycle::default() });
    let added = model.config().mixer.extension().unwrap();
    let is_added: Vec<bool> = model.layout().iter().map(|spec| added.adds(&spec.name)).collect();

    let path = folder.path().join("run");
    let mut run = started(&device, &from, &path, None);
    let before = numbers(&run);
    assert!(run.train(&AtomicBool::new(false), &mut |_| {}).unwrap());
    let after = numbers(&run);
    let mut trained = 0;
    for ((spec, added), (before, after)) in
        model.layout().iter().zip(&is_added).zip(before.iter().zip(&after))
    {
        assert_eq!(*added, before != after, "{}", spec.name);
        trained += if *added { spec.count() } else { 0 };
    }
    assert_eq!(run.trainer().trained_count(), trained);
    // What stays between steps: weights, and two moments of what is trained. The estimate counts a
    // gradient as well.
    let floats = model.parameter_count() + 2 * trained;
    let most = 4 * floats * 9 / 8 + 64 * model.layout().len(); // buffers are rounded up
    assert!(device.live_bytes() < most, "{} bytes instead of {}", device.live_bytes(), 4 * floats);
    assert!(most < 4 * 2 * model.parameter_count(), "too few weights to tell");
    assert_eq!(training_bytes(&model, Only::Routing), 4 * (model.parameter_count() + 3 * trained));
    let saved = path.join("checkpoints/step-4");
    let bytes = std::fs::read(saved.join("optimizer.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let moments = model.layout().iter().zip(&is_added).filter(|(_, added)| **added).count();
    assert_eq!(file.len(), 2 * moments);
    assert!(file.names().iter().all(|name| added.adds(name.split_once('.').unwrap().1)));
    drop(run);

    // Stopped after two steps and resumed, the run ends with the same bits.
    let path = folder.path().join("stopped");
    let mut run = started(&device, &from, &path, Some(2));
    assert!(!run.train(&AtomicBool::new(false), &mut |_| {}).unwrap());
    drop(run);
    let mut run =
        Run::resume(&device, &path, RunOptions::default(), Box::<SingleProcess>::default(), &mut |_| {})
            .unwrap();
    assert_eq!((run.trainer().step(), run.trainer().trained_count()), (2, trained));
    assert!(run.train(&AtomicBool::new(false), &mut |_| {}).unwrap());
    assert!(numbers(&run) == after, "resumed, the run has other weights");
}
