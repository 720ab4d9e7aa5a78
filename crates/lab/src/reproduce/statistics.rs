//! Means over seeds and counts of seeds, with 95 % intervals and tests of their differences.

/// A mean over seeds and its 95 % interval by Student's t, which assumes that seeds are independent draws of a normal
/// distribution.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Mean {
    /// The mean.
    pub value: f64,
    /// Half the width of the interval; `None` for fewer than two seeds.
    pub half: Option<f64>,
    /// Number of seeds.
    pub seeds: usize,
}

/// The 97.5 % quantile of Student's t for 1, 2, … degrees of freedom.
const T: [f64; 30] = [
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
];

impl Mean {
    /// The mean of some values; `None` if there are none.
    pub fn of(values: &[f64]) -> Option<Self> {
        let n = values.len();
        if n == 0 {
            return None;
        }
        let value = values.iter().sum::<f64>() / n as f64;
        let half = (n > 1).then(|| {
            let squares: f64 = values.iter().map(|x| (x - value).powi(2)).sum();
            let t = T.get(n - 2).copied().unwrap_or(1.96);
            t * (squares / (n - 1) as f64 / n as f64).sqrt()
        });
        Some(Self { value, half, seeds: n })
    }

    /// The interval.
    pub fn interval(&self) -> Option<(f64, f64)> {
        self.half.map(|half| (self.value - half, self.value + half))
    }
}

/// The two-sided p-value of a paired t-test: how likely differences at least as far from 0 are if their mean is 0.
pub fn paired_t(differences: &[f64]) -> f64 {
    let (n, freedom) = (differences.len() as f64, differences.len().saturating_sub(1));
    let mean = differences.iter().sum::<f64>() / n;
    if freedom == 0 || mean == 0.0 {
        return 1.0;
    }
    let squares: f64 = differences.iter().map(|x| (x - mean).powi(2)).sum();
    let error = (squares / freedom as f64 / n).sqrt();
    // The distribution of t has a finite sum in the sine and cosine of this angle.
    let angle = (mean.abs() / error / (freedom as f64).sqrt()).atan();
    let (sin, cos) = angle.sin_cos();
    let (mut term, mut sum) = if freedom % 2 == 1 { (cos, 0.0) } else { (1.0, 0.0) };
    let mut k = if freedom % 2 == 1 { 1 } else { 0 };
    while k + 2 <= freedom {
        sum += term;
        term *= cos * cos * (k + 1) as f64 / (k + 2) as f64;
        k += 2;
    }
    let within = if freedom % 2 == 1 { (angle + sin * sum) * std::f64::consts::FRAC_2_PI } else { sin * sum };
    (1.0 - within).clamp(0.0, 1.0)
}

/// A number of successes among independent trials, such as the seeds that learned a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Count {
    /// Successes.
    pub successes: usize,
    /// Trials.
    pub trials: usize,
}

impl Count {
    /// The exact 95 % interval of the success rate by Clopper and Pearson: the rates at which a count at least as high,
    /// and at least as low, has a probability of 2.5 % or more.
    pub fn interval(&self) -> (f64, f64) {
        let Self { successes, trials } = *self;
        let low = match successes {
            0 => 0.0,
            _ => bisect(|rate| at_least(successes, trials, rate) - 0.025),
        };
        let high = match trials - successes {
            0 => 1.0,
            _ => bisect(|rate| 0.025 - (1.0 - at_least(successes + 1, trials, rate))),
        };
        (low, high)
    }
}

/// The zero of an increasing function between 0 and 1.
fn bisect(f: impl Fn(f64) -> f64) -> f64 {
    let (mut low, mut high) = (0.0, 1.0);
    for _ in 0..60 {
        let middle = (low + high) / 2.0;
        if f(middle) < 0.0 {
            low = middle;
        } else {
            high = middle;
        }
    }
    (low + high) / 2.0
}

/// P(X ≥ successes) of a binomial distribution.
fn at_least(successes: usize, trials: usize, rate: f64) -> f64 {
    let one = |k: usize| {
        let (k, n) = (k as f64, trials as f64);
        (ln_choose(trials, k as usize) + k * rate.ln() + (n - k) * (1.0 - rate).ln()).exp()
    };
    (successes..=trials).map(one).sum()
}

/// ln of the number of ways to choose k of n.
fn ln_choose(n: usize, k: usize) -> f64 {
    (1..=k).map(|i| ((n - k + i) as f64 / i as f64).ln()).sum()
}

/// The two-sided p-value of Fisher's exact test: the probability, if both success rates are equal, of a table that is
/// no more probable than this one.
pub fn fisher(a: Count, b: Count) -> f64 {
    let (successes, trials) = (a.successes + b.successes, a.trials + b.trials);
    let probability = |of_a: usize| {
        let ways = ln_choose(a.trials, of_a) + ln_choose(b.trials, successes - of_a);
        (ways - ln_choose(trials, successes)).exp()
    };
    let possible = successes.saturating_sub(b.trials)..=successes.min(a.trials);
    // Tables of equal probability may differ by rounding.
    let most = probability(a.successes) * (1.0 + 1e-9);
    possible.map(probability).filter(|&p| p <= most).sum::<f64>().min(1.0)
}

/// Holm's correction of several p-values, in their order: below 5 % after it, a difference is significant although
/// several were tested.
pub fn holm(p: &[f64]) -> Vec<f64> {
    let mut order: Vec<usize> = (0..p.len()).collect();
    order.sort_by(|&a, &b| p[a].total_cmp(&p[b]));
    let (mut corrected, mut most) = (vec![0.0; p.len()], 0.0f64);
    for (rank, at) in order.into_iter().enumerate() {
        most = most.max(((p.len() - rank) as f64 * p[at]).min(1.0));
        corrected[at] = most;
    }
    corrected
}
