//! Steps of training, without a run around them.

use std::sync::atomic::Ordering;

use march_lm::data::{Loader, TextSource};
use march_lm::generate::{Generator, Sampling};
use march_lm::memory::BankTag;
use march_lm::model::{Model, Settings};
use march_lm::tokenizer::Tokenizer;
use march_lm::train::{Progress, TrainConfig, Trainer};

use crate::common::{KINDS, cpu, small, tokens};
use crate::toy;

/// A step takes its memory from the one before: what the engine holds, in use or free, does not grow any more.
#[test]
fn steps_reuse_their_memory() {
    for kind in KINDS {
        for recompute in [false, true] {
            let (engine, config) = (cpu(), small(kind));
            let model = Model::new(&config);
            let parameters = model.init(&engine, 1).unwrap();
            let settings = Settings { policy: model.policy(), recompute };
            let keys = TrainConfig { tokens_per_step: 5 * 150, micro_batch: 2, ..TrainConfig::default() };
            let mut trainer = Trainer::new(&engine, model, parameters, settings, keys, 150).unwrap();
            let source = TextSource::new(tokens(3000, 37, 1), 150).unwrap();
            let mut loader = Loader::new(Box::new(source), Some(1)).unwrap();
            let mut held = Vec::new();
            for _ in 0..6 {
                trainer.advance(&mut loader).unwrap();
                held.push(engine.live_bytes() + engine.free_bytes());
            }
            assert!(held[1..].iter().all(|&bytes| bytes == held[1]), "{kind}, {recompute}: {held:?}");
        }
    }
}

/// Numbers of a device that was lost are never taken for a loss, a checkpoint, a text or a bank; what was saved before
/// stays.
#[test]
fn a_lost_device() {
    let (engine, config) = (toy::engine(), small("march"));
    let folder = tempfile::tempdir().unwrap();
    let [good, bad, bank] = ["good", "bad", "bank.safetensors"].map(|name| folder.path().join(name));
    let model = Model::new(&config);
    let parameters = model.init(&engine, 1).unwrap();
    let settings = Settings { policy: model.policy(), recompute: false };
    let keys = TrainConfig { tokens_per_step: 40, micro_batch: 1, ..TrainConfig::default() };
    let mut trainer = Trainer::new(&engine, model, parameters, settings, keys, 40).unwrap();
    let source = TextSource::new(tokens(400, 37, 1), 40).unwrap();
    let mut loader = Loader::new(Box::new(source), Some(1)).unwrap();
    trainer.advance(&mut loader).unwrap();
    trainer.save(&good, &Progress::default(), None).unwrap();
    let model: Model<_> = Model::new(&config);
    let parameters = model.init(&engine, 1).unwrap();
    let empty = model.bank(model.policy()).unwrap();
    let mut text = Generator::new(&engine, &model, &parameters, empty, Sampling::greedy()).unwrap();
    text.read(&[1, 2, 3], &mut |_| std::ops::ControlFlow::Continue(())).unwrap();
    let tag = BankTag::new("march", "m".into(), &Tokenizer::bytes());
    text.save(&bank, &tag).unwrap();
    let saved = std::fs::read(&bank).unwrap();

    engine.device.lost.store(true, Ordering::Relaxed);
    let lost = |error: march_lm::Error| assert_eq!(error.to_string(), "the toy was lost");
    lost(trainer.advance(&mut loader).unwrap_err());
    assert_eq!(trainer.step(), 1);
    lost(trainer.save(&bad, &Progress::default(), None).unwrap_err());
    lost(text.read(&[4], &mut |_| std::ops::ControlFlow::Continue(())).unwrap_err());
    lost(text.save(&bank, &tag).unwrap_err());
    let mut names: Vec<_> =
        std::fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["bank.safetensors", "good"]);
    assert!(std::fs::read(&bank).unwrap() == saved, "the bank is what it was");
}
