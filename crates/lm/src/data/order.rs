//! A shuffled order without a table.

/// One of many permutations of the numbers below `count`, chosen by a key.
///
/// A Feistel network over pairs of half-words, where each round swaps the halves and mixes one with a function of the
/// other, is a permutation of the numbers below 4^k, whatever that function is. If the result is `count` or more, the
/// network is applied again until it is not: following a cycle of a permutation from a number below `count` always
/// returns below it, and never to the same number from two starts.
#[derive(Clone, Copy, Debug)]
pub(super) struct Order {
    count: u64,
    /// Number of bits in a half.
    half: u32,
    keys: [u64; Order::ROUNDS],
}

impl Order {
    const ROUNDS: usize = 8;

    /// The order of `count` numbers for one epoch and seed.
    pub fn new(count: u64, seed: u64, epoch: u64) -> Self {
        let bits = u64::BITS - count.saturating_sub(1).leading_zeros();
        let half = bits.div_ceil(2).max(1);
        let mut state = mix(seed ^ mix(epoch ^ 0x6D61_7263_6821_0001));
        let keys = std::array::from_fn(|_| {
            state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
            mix(state)
        });
        Self { count, half, keys }
    }

    /// The number at a position; both are below `count`.
    pub fn at(&self, place: u64) -> u64 {
        let mut number = place;
        loop {
            number = self.round_trip(number);
            if number < self.count {
                return number;
            }
        }
    }

    fn round_trip(&self, number: u64) -> u64 {
        let mask = (1u64 << self.half) - 1;
        let (mut left, mut right) = (number >> self.half, number & mask);
        for key in self.keys {
            (left, right) = (right, left ^ (mix(right ^ key) & mask));
        }
        left << self.half | right
    }
}

/// A number whose every bit depends on every bit of `x` (the last step of SplitMix64).
fn mix(x: u64) -> u64 {
    let x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_order_is_a_permutation() {
        for count in (1..300).chain([1000, 1023, 1024, 1025, 4097, 65_537]) {
            for epoch in 0..3 {
                let order = Order::new(count, 7, epoch);
                let mut seen = vec![false; count as usize];
                for place in 0..count {
                    let number = order.at(place) as usize;
                    assert!(!seen[number], "{number} comes twice among {count}");
                    seen[number] = true;
                }
            }
        }
    }

    #[test]
    fn orders_are_shuffled_and_differ() {
        let count = 10_000;
        let orders: Vec<Vec<u64>> = [(1, 0), (1, 1), (2, 0)]
            .map(|(seed, epoch)| (0..count).map(|i| Order::new(count, seed, epoch).at(i)).collect())
            .into();
        for (i, a) in orders.iter().enumerate() {
            // In a random order, a number is on average a third of `count` away from its own position, and next to its
            // neighbour twice in `count`.
            let way: u64 = a.iter().zip(0..).map(|(&number, place): (_, u64)| number.abs_diff(place)).sum();
            let mean = way as f64 / (count * count) as f64;
            assert!((mean - 1.0 / 3.0).abs() < 0.01, "{mean}");
            assert!(a.windows(2).filter(|pair| pair[0].abs_diff(pair[1]) == 1).count() < 12);
            for b in &orders[i + 1..] {
                assert!(a.iter().zip(b).filter(|(a, b)| a == b).count() < 12);
            }
        }
    }

    #[test]
    fn the_largest_count_has_an_order() {
        let order = Order::new(u64::MAX, 3, 0);
        assert_ne!(order.at(0), order.at(u64::MAX - 1));
    }
}
