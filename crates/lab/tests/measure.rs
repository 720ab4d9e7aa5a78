//! Measuring a memory policy on a text.

use std::ops::ControlFlow;

use march_lab::eval::{Measure, Measured};
use march_lm::anchors::{Policy, Retention};
use march_lm::model::Batch;

use crate::common::{Case, assert_close, invariant, small, tokens};

/// A policy's measurement on a text: the bank's bytes and the loss of the forward pass, also for odd sizes.
#[test]
fn policies_are_measured() {
    let device = invariant();
    let case = Case::new(&device, &small("march"));
    let ids = tokens(61, 37, 5);
    let measure = |measure: Measure<'_>, policy: &Policy| -> march_lm::Result<Option<Measured>> {
        let mut done = 0;
        let found = measure.run(&case.model, &case.parameters, policy, &mut |at| {
            done = at;
            ControlFlow::Continue(())
        })?;
        assert_eq!(done, measure.ids.len());
        Ok(found)
    };
    // Fewer tokens than the interval, one token, lengths among the tokens that are decoded, nothing decoded.
    for (count, decode, lengths) in
        [(61, 7, &[5, 16, 33, 59, 61][..]), (61, 0, &[61]), (5, 2, &[5, 1, 4]), (2, 64, &[1]), (1, 1, &[1])]
    {
        for retention in [Retention::All, Retention::Fenwick] {
            let policy = Policy { retention, ..case.model.policy() };
            let ids = &ids[..count];
            let found = measure(Measure { ids, lengths, decode }, &policy).unwrap().unwrap();
            let bytes: Vec<usize> = lengths.iter().map(|&n| case.model.memory_bytes(n, &policy)).collect();
            assert_eq!(found.bank_bytes, bytes, "{count} tokens");
            assert_eq!(found.read_speed.is_some(), decode < count);
            assert_eq!(found.decode_speed.is_some(), decode > 0);
            let logits = case.forward(Batch::one(ids), &policy);
            let losses: Vec<f64> = (1.max(count - count.div_ceil(4))..count)
                .map(|target| {
                    let logits = &logits[(target - 1) * 37..target * 37];
                    logits.iter().map(|v| v.exp()).sum::<f64>().ln() - logits[ids[target] as usize]
                })
                .collect();
            match found.loss {
                Some(loss) => {
                    let want = losses.iter().sum::<f64>() / losses.len() as f64;
                    assert_close("loss", &[loss], &[want], 1e-5);
                }
                None => assert!(losses.is_empty()),
            }
        }
    }
    let own = case.model.policy();
    for (count, length, part) in
        [(0, None, "without tokens"), (9, Some(10), "10 tokens"), (9, Some(0), "0 tokens")]
    {
        let lengths: Vec<usize> = length.into_iter().collect();
        let refused = measure(Measure { ids: &ids[..count], lengths: &lengths, decode: 1 }, &own);
        assert!(refused.unwrap_err().to_string().contains(part), "{part}");
    }
    let stopped = Measure { ids: &ids, lengths: &[], decode: 9 };
    let stop = &mut |_| ControlFlow::Break(());
    assert_eq!(stopped.run(&case.model, &case.parameters, &own, stop).unwrap(), None);
}
