//! Logits and losses of a text, by the entry for applications.

use std::ops::ControlFlow;

use march_lm::Pipeline;
use march_lm::disk::{BUILT_IN, EXAMPLE, QUESTION};
use march_lm::model::Part;

fn march() -> Pipeline {
    Pipeline::open(BUILT_IN).unwrap()
}

#[test]
fn logits_are_those_of_one_call() {
    let march = march();
    let ids = march.tokenizer().encode(&EXAMPLE.repeat(3)).unwrap();
    assert!(ids.len() > march.inference().call_tokens(), "the text takes several calls");
    let mut left = Vec::new();
    let found = march
        .logits(&ids, &mut |rest| {
            left.push(rest);
            ControlFlow::Continue(())
        })
        .unwrap();
    let mut bank = march.model().bank(march.policy().clone()).unwrap();
    let expected = march.inference().token_logits(&mut [Part::new(&ids, &mut bank)]).unwrap().to_f32();
    assert!(found == expected);
    assert_eq!(left.last(), Some(&0));
    assert_eq!(left.len(), ids.len().div_ceil(march.inference().call_tokens()));
    assert!(march.logits(&[], &mut |_| ControlFlow::Continue(())).unwrap().is_empty());
}

#[test]
fn losses_are_those_of_the_logits() {
    let march = march();
    let text = format!("{} {QUESTION}", EXAMPLE.lines().next().unwrap());
    let ids = march.tokenizer().encode(&text).unwrap();
    let mut go_on = |_| ControlFlow::Continue(());
    let losses = march.token_losses(&ids, &mut go_on).unwrap();
    let logits = march.logits(&ids, &mut go_on).unwrap();
    assert_eq!(losses.len(), ids.len() - 1);
    for ((logits, target), loss) in
        logits.chunks(march.model().config().vocab_size).zip(&ids[1..]).zip(&losses)
    {
        let sum: f64 = logits.iter().map(|&logit| f64::from(logit).exp()).sum();
        let expected = sum.ln() - f64::from(logits[*target as usize]);
        assert!((expected - f64::from(*loss)).abs() < 1e-4, "{expected} and {loss}");
    }
    let named = march.losses(&text).unwrap();
    assert!(named.iter().map(|(_, loss)| *loss).eq(losses));
}

#[test]
fn both_stop_when_asked() {
    let march = march();
    let ids = march.tokenizer().encode(&EXAMPLE.repeat(6)).unwrap();
    let call = march.inference().call_tokens();
    let mut stop = |_| ControlFlow::Break(());
    assert_eq!(march.token_losses(&ids, &mut stop).unwrap().len(), call);
    assert_eq!(march.logits(&ids, &mut stop).unwrap().len(), call * march.model().config().vocab_size);
}
