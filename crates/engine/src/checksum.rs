//! A checksum of bytes at the speed of memory. It finds damage; it does not withstand somebody who means to deceive.

/// Words of eight bytes that are taken at a time.
const LANES: usize = 8;
const BLOCK: usize = 8 * LANES;
/// Odd, so that multiplying by it loses nothing; its bits are the golden ratio's.
const FACTOR: u64 = 0x9E37_79B9_7F4A_7C15;

/// The checksum of bytes.
///
/// Lane i takes words i, i + 8, i + 16, …: lane ← mix(lane ⊕ word). Each step maps lanes one to one, and so does each
/// step that joins them: a change within one word always changes the sum, any other change all but once in 2⁶⁴, and a
/// bit that flips spreads so far that few others cannot undo it. The last block is filled with zeros; the length tells these from zeros that were there.
pub fn checksum(bytes: &[u8]) -> u64 {
    let mut lanes: [u64; LANES] = std::array::from_fn(|i| FACTOR.rotate_left(8 * i as u32));
    let (blocks, rest) = bytes.as_chunks();
    for block in blocks {
        step(&mut lanes, block);
    }
    let mut last = [0; BLOCK];
    last[..rest.len()].copy_from_slice(rest);
    step(&mut lanes, &last);
    lanes.iter().fold(mix(bytes.len() as u64), |sum, lane| mix(sum ^ lane))
}

#[inline(always)]
fn step(lanes: &mut [u64; LANES], block: &[u8; BLOCK]) {
    for (lane, &word) in lanes.iter_mut().zip(block.as_chunks().0) {
        *lane = mix(*lane ^ u64::from_le_bytes(word));
    }
}

/// Spreads every bit over many, one to one.
#[inline(always)]
fn mix(x: u64) -> u64 {
    let x = (x ^ (x >> 32)).wrapping_mul(FACTOR);
    (x ^ (x >> 29)).wrapping_mul(FACTOR)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn any_change_changes_it() {
        let bytes: Vec<u8> = (0..200u32).map(|i| (i * 37 + 11) as u8).collect();
        let mut sums = BTreeSet::from([checksum(&bytes)]);
        let mut count = 1;
        for at in 0..bytes.len() {
            for bit in 0..8 {
                let mut changed = bytes.clone();
                changed[at] ^= 1 << bit;
                sums.insert(checksum(&changed));
                // Two flips a block apart meet in the same lane.
                if let Some(other) = changed.get_mut(at + BLOCK) {
                    *other ^= 1 << bit;
                    sums.insert(checksum(&changed));
                    count += 1;
                }
                count += 1;
            }
            sums.insert(checksum(&bytes[..at]));
            count += 1;
        }
        for zeros in 1..200 {
            sums.insert(checksum(&vec![0; zeros]));
            count += 1;
        }
        assert_eq!(sums.len(), count);
        assert_eq!(checksum(b"a file must not change its meaning"), 0x2A34_E903_AEA7_E0C0);
    }
}
