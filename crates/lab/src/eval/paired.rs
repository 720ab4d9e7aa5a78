//! The paired bootstrap: is B better than A on the same documents?

use march_lm::data::recall::Random;

/// Resamples for an interval; the seed is fixed, so that the same files give the same interval.
const RESAMPLES: usize = 10_000;
const SEED: u64 = 1;

/// A paired difference.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Difference {
    /// B − A.
    pub value: f64,
    /// The 95 % interval: the 2.5 % and 97.5 % quantiles of the resampled differences.
    pub interval: [f64; 2],
    /// Two-sided: twice the fraction of the resampled differences that lie on the other side of 0, or on it.
    pub p: f64,
}

/// The difference B − A of a statistic over the same `count` documents, and its interval. `statistic` receives the
/// numbers of the documents, with repetitions, and returns the statistic for A and for B.
pub fn paired_bootstrap(count: usize, statistic: impl Fn(&[usize]) -> [f64; 2]) -> Difference {
    Resamples::new(count, RESAMPLES).difference(statistic)
}

/// Drawn documents, for many differences over the same ones.
pub struct Resamples {
    count: usize,
    /// The documents of one resample after the other.
    drawn: Vec<usize>,
}

impl Resamples {
    /// Draws `count` of as many documents, a number of times that limits how small a p-value can be.
    pub fn new(count: usize, resamples: usize) -> Self {
        let mut random = Random::new(SEED, 0);
        Self { count, drawn: (0..count * resamples).map(|_| random.below(count)).collect() }
    }

    /// As [`paired_bootstrap`].
    pub fn difference(&self, statistic: impl Fn(&[usize]) -> [f64; 2]) -> Difference {
        let difference = |documents: &[usize]| {
            let [a, b] = statistic(documents);
            b - a
        };
        let value = difference(&(0..self.count).collect::<Vec<_>>());
        if self.drawn.is_empty() {
            return Difference { value, interval: [value, value], p: 1.0 };
        }
        let mut resampled: Vec<f64> = self.drawn.chunks(self.count).map(difference).collect();
        resampled.sort_by(f64::total_cmp);
        let resamples = resampled.len();
        let quantile = |q: f64| resampled[((resamples - 1) as f64 * q).round() as usize];
        let below = resampled.partition_point(|&difference| difference <= 0.0);
        let above = resamples - resampled.partition_point(|&difference| difference < 0.0);
        // The observed difference counts as one of the resamples, so that no p-value is 0.
        let p = 2.0 * (below.min(above) + 1) as f64 / (resamples + 1) as f64;
        Difference { value, interval: [quantile(0.025), quantile(0.975)], p: p.min(1.0) }
    }
}
