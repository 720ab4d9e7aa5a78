//! Steps of training, without a run around them.

mod common;

use common::{KINDS, cpu, small, tokens};
use march::data::{Loader, TextSource};
use march::model::{Model, Settings};
use march::train::{TrainConfig, Trainer};

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
