use std::ops::Range;

use march_lm::Result;
use march_lm::train::ranks::{HandOver, Overlap, Ranks};

struct One(usize, usize);

impl Ranks for One {
    fn rank(&self) -> usize {
        self.0
    }
    fn count(&self) -> usize {
        self.1
    }
    fn sum(&mut self, _: &mut [f64]) -> Result<()> {
        Ok(())
    }
    fn sum_during(
        &mut self,
        _: usize,
        _: &mut dyn FnMut(&mut HandOver<'_>) -> Result<()>,
    ) -> Result<(&[f32], Overlap)> {
        Ok((&[], Overlap::default()))
    }
}

#[test]
fn shares_cover_a_batch() {
    for (rows, count) in [(8, 2), (7, 3), (3, 3), (1, 1), (100, 7)] {
        let shares: Vec<Range<usize>> = (0..count).map(|rank| One(rank, count).share(rows)).collect();
        assert_eq!((shares[0].start, shares[count - 1].end), (0, rows));
        assert!(shares.windows(2).all(|pair| pair[0].end == pair[1].start));
        assert!(shares.iter().all(|share| share.len().abs_diff(rows / count) <= 1 && !share.is_empty()));
    }
}
