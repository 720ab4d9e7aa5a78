//! Means over seeds, with 95 % intervals.

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

    /// The mean of `a − b`, paired by seed.
    pub fn of_differences(a: &[f64], b: &[f64]) -> Option<Self> {
        let differences: Vec<f64> = a.iter().zip(b).map(|(a, b)| a - b).collect();
        Self::of(&differences)
    }

    /// The interval.
    pub fn interval(&self) -> Option<(f64, f64)> {
        self.half.map(|half| (self.value - half, self.value + half))
    }

    /// What a difference shows.
    pub fn sign(&self) -> Sign {
        match self.interval() {
            Some((low, _)) if low > 0.0 => Sign::Above,
            Some((_, high)) if high < 0.0 => Sign::Below,
            _ => Sign::NotSignificant,
        }
    }
}

/// Whether the interval of a difference excludes 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sign {
    /// The whole interval is above 0.
    Above,
    /// The whole interval is below 0.
    Below,
    /// The interval contains 0, or there is none.
    NotSignificant,
}
