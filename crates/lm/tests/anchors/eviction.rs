use march_lm::anchors::{Policy, Retention};
use march_lm::memory::BankTag;
use march_lm::tokenizer::Tokenizer;
use safetensors::SafeTensors;

use crate::common::{Case, invariant, small, tokens};

/// The ledger of a layer that evicts anchors describes the states that are left: each entry has its norm and its distance
/// to the one before it.
#[test]
fn distances_follow_what_is_dropped() {
    let (device, folder) = (invariant(), tempfile::tempdir().unwrap());
    let case = Case::new(&device, &small("march"));
    let own = Policy { interval: Some(4), ..case.model.policy() };
    let budget = 5 * case.model.anchor_bytes(&own);
    let policy = Policy { retention: Retention::Budget(budget), ..own };
    let mut bank = case.model.bank(policy).unwrap();
    bank.record(true).unwrap();
    case.continued(&mut bank, &tokens(120, 37, 3), &[7], |_| {});
    let path = folder.path().join("bank");
    bank.save(&path, &BankTag::new("march", "a model".into(), &Tokenizer::bytes())).unwrap();
    let bytes = std::fs::read(&path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    for (i, layer) in bank.layers().iter().enumerate() {
        let ledger = layer.ledger().unwrap();
        assert!(layer.anchors().1 <= budget / bank.layers().len());
        let states = file.tensor(&format!("layers.{i}.anchors.states")).unwrap();
        assert_eq!(states.shape()[0], ledger.entries.len());
        let numbers: Vec<f64> =
            states.data().as_chunks().0.iter().map(|&bytes| f64::from(f32::from_le_bytes(bytes))).collect();
        let states: Vec<&[f64]> = numbers.chunks(numbers.len() / states.shape()[0]).collect();
        let norm = |numbers: Vec<f64>| numbers.iter().map(|x| x * x).sum::<f64>().sqrt();
        for (m, entry) in ledger.entries.iter().enumerate() {
            assert!((entry.norm / norm(states[m].to_vec()) - 1.0).abs() < 1e-12, "layer {i}, entry {m}");
            if m == 0 {
                assert_eq!(entry.distance, f64::INFINITY);
            } else {
                let way = states[m].iter().zip(states[m - 1]).map(|(a, b)| a - b).collect();
                assert!((entry.distance / norm(way) - 1.0).abs() < 1e-12, "layer {i}, entry {m}");
            }
        }
        // Every anchor was either kept or dropped once, and what is dropped is not always the oldest.
        let kept: Vec<usize> = ledger.anchors().map(|anchor| anchor.ordinal).collect();
        let dropped: Vec<usize> = ledger.evictions.iter().flat_map(|(_, gone)| gone.clone()).collect();
        let mut all = [kept, dropped.clone()].concat();
        all.sort_unstable();
        assert!(all.into_iter().eq(1..=30), "layer {i}");
        assert!(!dropped.is_sorted(), "layer {i}: {dropped:?}");
    }
}
