//! The random numbers of one example.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

/// Random numbers that depend only on a seed and an index.
pub struct Random(ChaCha8Rng);

impl Random {
    /// The random numbers of a seed and an index.
    pub fn new(seed: u64, index: u64) -> Self {
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        random.set_stream(index);
        Self(random)
    }

    /// A number below `count`.
    pub fn below(&mut self, count: usize) -> usize {
        ((u128::from(self.0.next_u64()) * count as u128) >> 64) as usize
    }

    /// A number above 0 and below 1.
    pub(crate) fn unit(&mut self) -> f64 {
        ((self.0.next_u64() >> 11) as f64 + 0.5) / (1u64 << 53) as f64
    }

    /// `count` distinct numbers below `below`, in random order.
    pub fn distinct(&mut self, count: usize, below: usize) -> Vec<usize> {
        let mut numbers: Vec<usize> = (0..below).collect();
        for i in 0..count.min(below) {
            let other = i + self.below(below - i);
            numbers.swap(i, other);
        }
        numbers.truncate(count);
        numbers
    }

    /// `count` distinct numbers below `weights.len()`, drawn one after the other, each with a probability proportional
    /// to its weight among those that are left.
    pub fn weighted(&mut self, count: usize, weights: &[f64]) -> Vec<usize> {
        // The first of independent exponential clocks to ring is number i with probability wᵢ / Σw, and so on.
        let mut clocks: Vec<(f64, usize)> =
            weights.iter().enumerate().map(|(i, weight)| (-self.unit().ln() / weight, i)).collect();
        clocks.sort_by(|a, b| a.0.total_cmp(&b.0));
        clocks.into_iter().take(count).map(|(_, i)| i).collect()
    }
}
