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
