//! Files as a bad disk or a slip of the hand leaves them.

/// Calls `check` with many damaged copies of some bytes: changed, cut, grown.
pub fn damaged(bytes: &[u8], seed: u64, times: usize, mut check: impl FnMut(&[u8])) {
    let mut state = seed | 1;
    let mut random = |below: usize| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 11) as usize % below.max(1)
    };
    for _ in 0..times {
        let mut copy = bytes.to_vec();
        for _ in 0..=random(4) {
            let place = random(copy.len());
            match random(5) {
                0 => copy.truncate(place),
                1 => copy.insert(place, random(256) as u8),
                2 if !copy.is_empty() => _ = copy.remove(place),
                3 if !copy.is_empty() => copy[place] ^= 1 << random(8),
                _ if !copy.is_empty() => copy[place] = b"0919\"{}[],:-e\xFF\0"[random(15)],
                _ => {}
            }
        }
        check(&copy);
    }
}
