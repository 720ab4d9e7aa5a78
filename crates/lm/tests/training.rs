//! Steps of training, without a run around them.

mod config;
mod ranks;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use march_lm::data::{Loader, TextSource};
use march_lm::engine::ops::accumulate::Append;
use march_lm::engine::ops::adamw::AdamWStep;
use march_lm::engine::ops::attention::{AttentionBlocks, AttentionForward};
use march_lm::engine::ops::cross_entropy::{CrossEntropy, LinearCrossEntropy, LinearCrossEntropyBackward};
use march_lm::engine::ops::embedding::Embedding;
use march_lm::engine::ops::layout::{Concat, Slice};
use march_lm::engine::ops::linear::LinearList;
use march_lm::engine::ops::rms_norm::RmsNorm;
use march_lm::engine::ops::rotary::RotaryForward;
use march_lm::engine::ops::swiglu::SwiGlu;
use march_lm::engine::{self, Backend, DType, Data, Device, Foreign, Table, Tensor};
use march_lm::generate::{Generator, Sampling};
use march_lm::memory::BankTag;
use march_lm::model::{Model, Settings};
use march_lm::tokenizer::Tokenizer;
use march_lm::train::{Progress, TrainConfig, Trainer};

use crate::common::{KINDS, cpu, small, tokens};

/// A step takes its memory from the one before: what the device holds, in use or free, does not grow any more.
#[test]
fn steps_reuse_their_memory() {
    for kind in KINDS {
        for recompute in [false, true] {
            let (device, config) = (cpu(), small(kind));
            let model = Model::new(&config);
            let parameters = model.init(&device, 1).unwrap();
            let settings = Settings { policy: model.policy(), recompute, ..Settings::default() };
            let keys = TrainConfig { tokens_per_step: 5 * 150, micro_batch: 2, ..TrainConfig::default() };
            let mut trainer = Trainer::new(model, parameters, settings, keys, 150).unwrap();
            let source = TextSource::new(tokens(3000, 37, 1), 150).unwrap();
            let mut loader = Loader::new(Box::new(source), Some(1)).unwrap();
            let mut held = Vec::new();
            for _ in 0..6 {
                trainer.advance(&mut loader).unwrap();
                held.push(device.live_bytes() + device.free_bytes());
            }
            assert!(held[1..].iter().all(|&bytes| bytes == held[1]), "{kind}, {recompute}: {held:?}");
        }
    }
}

/// `routing_rate` scales the steps of what routing adds, and of nothing else.
#[test]
fn routing_has_a_rate_of_its_own() {
    let config = small("march");
    let extension = config.mixer.extension().unwrap();
    let after = |routing_rate: f64| {
        let model = Model::new(&config);
        let parameters = model.init(&cpu(), 1).unwrap();
        let before: Vec<Vec<f32>> = parameters.iter().map(Tensor::to_f32).collect();
        let settings = Settings { policy: model.policy(), ..Settings::default() };
        let keys =
            TrainConfig { tokens_per_step: 150, routing_rate, weight_decay: 0.0, ..TrainConfig::default() };
        let mut trainer = Trainer::new(model, parameters, settings, keys, 150).unwrap();
        let source = TextSource::new(tokens(3000, 37, 1), 150).unwrap();
        trainer.advance(&mut Loader::new(Box::new(source), Some(1)).unwrap()).unwrap();
        let after = trainer.parameters().iter().map(Tensor::to_f32);
        let moved = |(after, before): (Vec<f32>, &Vec<f32>)| -> f64 {
            after.iter().zip(before).map(|(a, b)| f64::from(a - b).abs()).sum()
        };
        after.zip(&before).map(moved).collect::<Vec<f64>>()
    };
    let (one, four) = (after(1.0), after(4.0));
    for (spec, (one, four)) in Model::new(&config).layout().iter().zip(one.into_iter().zip(four)) {
        match extension.adds(&spec.name) {
            true => assert!(one > 0.0 && (four / one - 4.0).abs() < 0.01, "{}: {one} {four}", spec.name),
            false => assert_eq!(one, four, "{}", spec.name),
        }
    }
}

/// A tensor of a device that keeps shapes only.
#[derive(Clone, Debug)]
struct Shape(Vec<usize>);

impl Foreign for Shape {
    fn shape(&self) -> &[usize] {
        &self.0
    }
    fn dtype(&self) -> DType {
        DType::F32
    }
    fn is_plain(&self) -> bool {
        true
    }
    fn bytes(&self) -> usize {
        0
    }
}

/// A device on which every number is 0, with the operations that a Transformer needs. It can be lost.
struct Zeros {
    table: Table,
    lost: AtomicBool,
}

impl Backend for Zeros {
    fn name(&self) -> &str {
        "zeros"
    }
    fn table(&self) -> &Table {
        &self.table
    }
    fn from_f32(&self, _: &[f32], shape: &[usize]) -> engine::Result<Data> {
        self.full(shape, 0.0)
    }
    fn full(&self, shape: &[usize], _: f64) -> engine::Result<Data> {
        Ok(Data::Foreign(Arc::new(Shape(shape.to_vec()))))
    }
    fn to_f32(&self, data: &Data) -> Vec<f32> {
        let Data::Foreign(data) = data else { panic!("{data:?}") };
        vec![0.0; data.shape().iter().product()]
    }
    fn check(&self) -> engine::Result<()> {
        match self.lost.load(Ordering::Relaxed) {
            true => Err(engine::Error::Device { message: "the device was lost".into() }),
            false => Ok(()),
        }
    }
}

fn zeros() -> Device {
    fn full(x: &Tensor, shape: &[usize]) -> engine::Result<Tensor> {
        Tensor::full(shape, 0.0, x.device())
    }
    let table = Table::of::<Zeros>()
        .with::<Embedding>(|_, op, shape| full(&op.table, &shape))
        .with::<RmsNorm>(|_, op, _| Ok(op.x))
        .with::<LinearList>(|_, op, sizes| {
            let x = op.products.iter().map(|product| &op.x[product.x]);
            x.zip(sizes).map(|(x, sizes)| full(x, &sizes.output_shape(x.shape()))).collect()
        })
        .with::<RotaryForward>(|_, op, _| Ok(op.x))
        .with::<AttentionForward>(|_, op, _| Ok((op.input.query, Vec::new())))
        .with::<AttentionBlocks>(|_, op, _| Ok(op.query))
        .with::<SwiGlu>(|_, op, _| Ok(op.gates))
        .with::<Slice>(|_, op, _| {
            let mut shape = op.x.shape().to_vec();
            shape[op.axis] = op.range.len();
            full(&op.x, &shape)
        })
        .with::<Concat>(|_, op, shape| full(&op.parts[0], &shape))
        .with::<Append>(|_, op, shape| full(&op.rows, &shape))
        .with::<LinearCrossEntropy>(|_, op, _| {
            Ok(CrossEntropy { loss: full(&op.x, &[])?, gradients: [None, None] })
        })
        .with::<LinearCrossEntropyBackward>(|_, _, _| Ok([None, None]))
        .with::<AdamWStep>(|_, op, _| Ok([op.parameter, op.first_moment, op.second_moment]));
    Device::new(Zeros { table: table.build(), lost: AtomicBool::new(false) })
}

/// Numbers of a device that was lost are never taken for a loss, a checkpoint, a text or a bank; what was saved before
/// stays.
#[test]
fn a_lost_device() {
    let (device, config) = (zeros(), small("transformer"));
    let folder = tempfile::tempdir().unwrap();
    let [good, bad, bank] = ["good", "bad", "bank.safetensors"].map(|name| folder.path().join(name));
    let model = Model::new(&config);
    let parameters = model.init(&device, 1).unwrap();
    let settings = Settings { policy: model.policy(), ..Settings::default() };
    let keys = TrainConfig { tokens_per_step: 40, micro_batch: 1, ..TrainConfig::default() };
    let mut trainer = Trainer::new(model, parameters, settings, keys, 40).unwrap();
    let source = TextSource::new(tokens(400, 37, 1), 40).unwrap();
    let mut loader = Loader::new(Box::new(source), Some(1)).unwrap();
    trainer.advance(&mut loader).unwrap();
    trainer.save(&good, &Progress::default(), None).unwrap();
    let model = Model::new(&config);
    let parameters = model.init(&device, 1).unwrap();
    let empty = model.bank(model.policy()).unwrap();
    let mut text = Generator::new(&model, &parameters, empty, Sampling::greedy()).unwrap();
    text.read(&[1, 2, 3], &mut |_| std::ops::ControlFlow::Continue(())).unwrap();
    let tag = BankTag::new("transformer", "m".into(), &Tokenizer::bytes());
    text.save(&bank, &tag).unwrap();
    let saved = std::fs::read(&bank).unwrap();

    device.backend::<Zeros>().unwrap().lost.store(true, Ordering::Relaxed);
    let lost = |error: march_lm::Error| assert_eq!(error.to_string(), "the device was lost");
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
