//! Counts of seeds and several tests, against published values and other software.

use march_lab::reproduce::{Count, fisher, holm, paired_t};

fn count(successes: usize, trials: usize) -> Count {
    Count { successes, trials }
}

fn close(found: f64, right: f64) {
    assert!((found - right).abs() < 5e-5, "{found} instead of {right}");
}

/// The values of R's `binom.test`.
#[test]
fn clopper_pearson() {
    for (successes, trials, low, high) in [
        (0, 10, 0.0, 0.30850),
        (5, 10, 0.18709, 0.81291),
        (18, 20, 0.68302, 0.98765),
        (20, 20, 0.83157, 1.0),
        (1, 1, 0.02500, 1.0),
    ] {
        let found = count(successes, trials).interval();
        close(found.0, low);
        close(found.1, high);
    }
}

/// The values of R's `fisher.test` and scipy's `fisher_exact`.
#[test]
fn fishers_exact_test() {
    close(fisher(count(8, 10), count(1, 6)), 0.03497);
    close(fisher(count(7, 8), count(4, 8)), 0.28205);
    close(fisher(count(20, 20), count(0, 20)), 1.4509e-11);
    close(fisher(count(3, 5), count(3, 5)), 1.0);
    close(fisher(count(0, 4), count(0, 9)), 1.0);
}

/// The values of scipy's `ttest_1samp`.
#[test]
fn paired_t_test() {
    close(paired_t(&[1.0, 2.0, 3.0, 4.0, 5.0]), 0.01324);
    close(paired_t(&[1.0, 2.0, 1.0, 2.0, 90.0]), 0.33907);
    close(paired_t(&[1.0, -1.0, 2.0]), 0.52860);
    close(paired_t(&[3.0, 4.0]), 0.09033);
    close(paired_t(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, -7.0, 8.0]), 0.12951);
    close(paired_t(&[0.5, 0.5]), 0.0);
    close(paired_t(&[0.0, 0.0]), 1.0);
    close(paired_t(&[2.0]), 1.0);
}

#[test]
fn holms_correction() {
    let corrected = holm(&[0.01, 0.04, 0.03, 0.005]);
    for (found, right) in corrected.iter().zip([0.03, 0.06, 0.06, 0.02]) {
        close(*found, right);
    }
    assert_eq!(holm(&[0.6, 0.9]), [1.0, 1.0]);
    assert!(holm(&[]).is_empty());
}
