use march_lm::generate::Sampling;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::SeedableRng;

/// How often each token occurs in 10,000 draws.
fn counts(sampling: Sampling, logits: &[f32], recent: &[u32]) -> Vec<usize> {
    let mut random = ChaCha8Rng::seed_from_u64(1);
    let recent = recent.iter().copied().collect();
    let mut counts = vec![0; logits.len()];
    (0..10_000).for_each(|_| counts[sampling.draw(logits, &recent, &mut random) as usize] += 1);
    counts
}

fn assert_share(counts: &[usize], token: usize, share: f64) {
    assert!((counts[token] as f64 / 10_000.0 - share).abs() < 0.03, "{token}, {share}: {counts:?}");
}

/// Probabilities 0.1, 0.4, 0, 0.2, 0.3.
fn logits() -> [f32; 5] {
    [0.1f32, 0.4, 0.0, 0.2, 0.3].map(f32::ln)
}

#[test]
fn tokens_come_as_often_as_they_are_probable() {
    let all = counts(Sampling::default(), &logits(), &[]);
    for (token, share) in [0.1, 0.4, 0.0, 0.2, 0.3].into_iter().enumerate() {
        assert_share(&all, token, share);
    }
    assert_eq!(all[2], 0);
    let greedy = Sampling { temperature: 0.0, ..Sampling::default() };
    assert_eq!(counts(greedy, &[1.0, 3.0, 3.0], &[]), [0, 10_000, 0]);
    // The probabilities squared.
    let cold = counts(Sampling { temperature: 0.5, ..Sampling::default() }, &logits(), &[]);
    assert_share(&cold, 1, 0.16 / 0.30);
}

#[test]
fn top_k_and_top_p_leave_the_most_probable() {
    let top_k = |k| counts(Sampling { top_k: Some(k), ..Sampling::default() }, &logits(), &[]);
    assert_eq!(top_k(1)[1], 10_000);
    assert_share(&top_k(2), 1, 0.4 / 0.7);
    assert_share(&top_k(2), 4, 0.3 / 0.7);
    assert_eq!(top_k(2)[0] + top_k(2)[3], 0);
    assert_eq!(top_k(5), top_k(100));
    assert_eq!(top_k(5), counts(Sampling::default(), &logits(), &[]));
    let top_p = |p| counts(Sampling { top_p: p, ..Sampling::default() }, &logits(), &[]);
    assert_eq!(top_p(1e-9)[1], 10_000);
    assert_eq!(top_p(0.39)[1], 10_000);
    let two = top_p(0.5);
    assert_eq!(two[0] + two[2] + two[3], 0);
    assert_share(&two, 1, 0.4 / 0.7);
    assert_eq!(top_p(0.8)[0], 0);
    assert_share(&top_p(0.8), 3, 0.2 / 0.9);
    // Ties go to the lowest ids, in both cases.
    let both = Sampling { top_k: Some(3), top_p: 0.6, ..Sampling::default() };
    assert_eq!(counts(both, &[0.0; 6], &[])[2..], [0; 4]);
}

#[test]
fn the_penalty_is_for_recent_tokens_once() {
    let greedy = Sampling { temperature: 0.0, repetition_penalty: 2.0, ..Sampling::default() };
    let first = |sampling: Sampling, logits: &[f32], recent: &[u32]| {
        counts(sampling, logits, recent).iter().position(|&count| count > 0)
    };
    assert_eq!(first(greedy, &[3.0, 2.0, -1.0], &[]), Some(0));
    assert_eq!(first(greedy, &[3.0, 2.0, -1.0], &[0]), Some(1));
    assert_eq!(first(greedy, &[3.0, 1.0, -1.0], &[0, 0, 0]), Some(0), "1.5, not less");
    assert_eq!(first(greedy, &[-1.0, -1.5], &[0]), Some(1));
    let short = Sampling { penalty_window: 1, ..greedy };
    assert_eq!(first(short, &[3.0, 2.0, -1.0], &[0, 2]), Some(0));
    // Ids that are outside the model's vocabulary.
    assert_eq!(first(greedy, &[3.0, 2.0], &[7]), Some(0));
}

#[test]
fn what_has_no_meaning_is_refused() {
    let fine = Sampling::default();
    assert!(fine.check().is_ok());
    for (bad, word, key) in [
        (Sampling { temperature: -1.0, ..fine }, "temperature", "temperature"),
        (Sampling { temperature: f64::NAN, ..fine }, "temperature", "temperature"),
        (Sampling { top_k: Some(0), ..fine }, "top-k", "top_k"),
        (Sampling { top_p: 0.0, ..fine }, "top-p", "top_p"),
        (Sampling { top_p: 1.5, ..fine }, "top-p", "top_p"),
        (Sampling { repetition_penalty: 0.0, ..fine }, "penalty", "repetition_penalty"),
    ] {
        assert!(bad.check().unwrap_err().to_string().contains(word), "{bad:?}");
        assert_eq!(bad.check_keys().unwrap_err().0, key, "{bad:?}");
    }
}
