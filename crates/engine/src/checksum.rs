//! Fast non-cryptographic checksum: it detects accidental corruption, not deliberate tampering.
//!
//! It must not slow down loading, so it runs at about memory bandwidth.

/// Number of 8-byte words processed in parallel.
const LANES: usize = 8;
const BLOCK: usize = 8 * LANES;
/// Odd, so that multiplication by it is invertible; the bits are those of the golden ratio.
const FACTOR: u64 = 0x9E37_79B9_7F4A_7C15;

/// Checksum of `bytes`.
///
/// Lane i processes words i, i + 8, i + 16, …: lane ← mix(lane ⊕ word). Every step is a bijection of the lane, and
/// so is every step that combines the lanes. A change within a single word therefore always changes the checksum;
/// any other change goes undetected with a probability of about 2⁻⁶⁴. A flipped bit affects so many bits that a few
/// further flips cannot undo it. The last block is padded with zeros; including the length distinguishes padding
/// from data.
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

/// Bijection that spreads every input bit over many output bits.
#[inline(always)]
fn mix(x: u64) -> u64 {
    let x = (x ^ (x >> 32)).wrapping_mul(FACTOR);
    (x ^ (x >> 29)).wrapping_mul(FACTOR)
}
