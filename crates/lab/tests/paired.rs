//! The paired bootstrap.

use march_lab::eval::{Difference, paired_bootstrap};

fn means(a: &[f64], b: &[f64]) -> Difference {
    let mean = |of: &[f64], documents: &[usize]| {
        documents.iter().map(|&i| of[i]).sum::<f64>() / documents.len().max(1) as f64
    };
    paired_bootstrap(a.len(), |documents| [mean(a, documents), mean(b, documents)])
}

#[test]
fn the_interval_is_that_of_the_pairs() {
    // 200 differences of 1 with probability 1/4: mean 0.25, standard error √(0.1875 / 200) = 0.0306.
    let a: Vec<f64> = (0..200).map(|i| f64::from(i % 2)).collect();
    let b: Vec<f64> = (0..200).map(|i| f64::from(i % 2) + f64::from(u8::from(i % 4 == 0))).collect();
    let got = means(&a, &b);
    assert!((got.value - 0.25).abs() < 1e-12);
    assert!((got.interval[0] - (0.25 - 0.06)).abs() < 0.01, "{got:?}");
    assert!((got.interval[1] - (0.25 + 0.06)).abs() < 0.01, "{got:?}");
    assert_eq!(means(&a, &a), Difference { value: 0.0, interval: [0.0, 0.0], p: 1.0 });
    assert_eq!(got, means(&a, &b));
    assert!(got.p < 0.001, "{got:?}");
}
