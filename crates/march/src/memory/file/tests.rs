//! Every precision of the anchors through a file.

use march_engine::{Cpu, CpuOptions, Products, Tape};

use super::*;
use crate::memory::Rollback;
use crate::model::{Batch, ModelConfig};

const CONFIG: &str = r#"{"model_type": "march", "vocab_size": 37, "hidden_size": 24, "num_hidden_layers": 3,
    "intermediate_size": 40, "norm_eps": 1e-6, "tie_word_embeddings": false, "initializer_range": 0.12, "num_heads": 2,
    "num_v_heads": 4, "head_dim": 6, "expand_v": 1.5, "conv_size": 4, "anchor_interval": 12, "routing_dim": 5}"#;

/// Stores the anchors' states in another precision.
fn store_as(engine: &Cpu, bank: &mut StateBank<Cpu>, storage: Storage) {
    for state in bank.layers.iter_mut().flat_map(|layer| &mut layer.anchors.states) {
        let exact = engine.from_f32(&state.to_f32().unwrap(), &state.shape()).unwrap();
        *state = Arc::new(engine.store_states(&exact, storage).unwrap());
    }
}

#[test]
fn every_precision_goes_on_bit_for_bit() {
    let options = CpuOptions { threads: 1, products: Products::BatchInvariant, ..Default::default() };
    let engine = Cpu::new(options).unwrap();
    let model = Model::<Cpu>::new(&ModelConfig::from_json(CONFIG, "test").unwrap());
    let parameters = model.init(&engine, 7).unwrap();
    let tape = Tape::inference(&engine);
    let weights = model.bind(&tape, &parameters);
    let fingerprint = model.fingerprint(&engine, &parameters).unwrap();
    let tag = BankTag::new(&model, fingerprint, &Tokenizer::bytes());
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("bank");
    let extend = |bank: &mut StateBank<Cpu>, ids: &[u32]| {
        let hidden = model.extend(&tape, &weights, Batch::one(ids), &mut [bank], None).unwrap();
        engine.to_f32(hidden.value())
    };
    let ids: Vec<u32> = (0..60).map(|i| i * 7 % 37).collect();
    let mut whole = model.bank(model.policy()).unwrap();
    extend(&mut whole, &ids[..40]);
    let exact = extend(&mut whole.clone(), &ids[40..47]);
    for (storage, name) in [(Storage::F32, "f32"), (Storage::Bf16, "bf16"), (Storage::Int8, "int8")] {
        let mut bank = whole.clone();
        store_as(&engine, &mut bank, storage);
        bank.save(&engine, &path, &tag).unwrap();
        let file = BankFile::open(&path).unwrap();
        file.verify().unwrap();
        let mut loaded = file.load(&engine, &model, &tag, None).unwrap();
        assert_eq!(loaded.bytes(&engine), bank.bytes(&engine));
        for (got, want) in loaded.layers.iter().zip(&bank.layers) {
            for (got, want) in got.anchors.states.iter().zip(&want.anchors.states) {
                assert_eq!((got.storage(), got.shape()), (storage, want.shape()));
                assert_eq!(got.parts().unwrap(), want.parts().unwrap());
            }
        }
        let mut back = loaded.clone();
        let got = extend(&mut loaded, &ids[40..47]);
        assert!(got == extend(&mut bank, &ids[40..47]), "{name}");
        assert_eq!(got == exact, storage == Storage::F32, "{name}");
        match back.rollback(&engine, 2).unwrap() {
            Rollback::Exact => assert_eq!(storage, Storage::F32),
            Rollback::Approximate(why) => assert!(why.contains(&format!("stored as {name}")), "{why}"),
        }
        assert_eq!(back.timeline().position, 24);
        let near = extend(&mut back, &ids[24..40]);
        let mut fresh = model.bank(model.policy()).unwrap();
        extend(&mut fresh, &ids[..24]);
        let want = extend(&mut fresh, &ids[24..40]);
        let largest = want.iter().fold(0.0f32, |m, v| m.max(v.abs()));
        let error = near.iter().zip(&want).fold(0.0f32, |m, (a, b)| m.max((a - b).abs())) / largest;
        assert!(error <= if storage == Storage::F32 { 0.0 } else { 0.05 }, "{name}: {error}");
        // A flipped bit in a state, or in its scale.
        for tensor in ["states", "scales"] {
            let bytes = std::fs::read(&path).unwrap();
            let Some(part) = file.last.tensors.get(&format!("layers.1.anchors.{tensor}")) else { continue };
            let mut damaged = bytes.clone();
            damaged[part.entry.range.end - 3] ^= 16;
            let other = folder.path().join(format!("{name}-{tensor}"));
            std::fs::write(&other, damaged).unwrap();
            let mut bank = StateBank::load(&engine, &model, &other, &tag, None).unwrap();
            let failed = model.extend(&tape, &weights, Batch::one(&[1]), &mut [&mut bank], None);
            let error = failed.expect_err("a damaged state is read").to_string();
            assert!(error.contains("is damaged") && error.contains(tensor), "{error}");
        }
    }
}
