use march_lm::Result;
use march_lm::data::{Loader, Source};

/// A source of so many sequences.
struct Numbers(u64);

impl Source for Numbers {
    fn sequence_length(&self) -> usize {
        1
    }
    fn sequences(&self) -> u64 {
        self.0
    }
    fn sequence(&self, _: u64, _: &mut Vec<u32>, _: &mut Vec<u32>) -> Result<()> {
        Ok(())
    }
    fn fingerprint(&self) -> Result<String> {
        Ok(String::new())
    }
}

/// The first `places` numbers of an epoch's order.
fn order(count: u64, seed: u64, epoch: u64, places: u64) -> Vec<u64> {
    let loader = Loader::new(Box::new(Numbers(count)), Some(seed)).unwrap();
    (0..places).map(|place| loader.at(epoch * count + place)).collect()
}

#[test]
fn every_order_is_a_permutation() {
    for count in (1..300).chain([1000, 1023, 1024, 1025, 4097, 65_537]) {
        for epoch in 0..3 {
            let mut numbers = order(count, 7, epoch, count);
            numbers.sort_unstable();
            assert!(numbers.into_iter().eq(0..count), "{count} numbers, epoch {epoch}");
        }
    }
}

#[test]
fn orders_are_shuffled_and_differ() {
    let count = 10_000;
    let orders: Vec<Vec<u64>> =
        [(1, 0), (1, 1), (2, 0)].map(|(seed, epoch)| order(count, seed, epoch, count)).into();
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
    let loader = Loader::new(Box::new(Numbers(u64::MAX)), Some(3)).unwrap();
    assert_ne!(loader.at(0), loader.at(u64::MAX - 1));
}
