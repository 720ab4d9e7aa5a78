//! Block formats of GGUF, and the numbers that they stand for. A block is a run of numbers of one row with common
//! scales; d, m and the like are f16.
//!
//! ```text
//!        numbers  bytes                                            number
//! Q4_0   32       d, 16 × 2 codes                                  d (q − 8)
//! Q4_1   32       d, m, 16 × 2 codes                               d q + m
//! Q5_0   32       d, 32 high bits, 16 × 2 codes                    d (q − 16)
//! Q5_1   32       d, m, 32 high bits, 16 × 2 codes                 d q + m
//! Q8_0   32       d, 32 codes                                      d q
//! Q4_K   256      d, m, 8 × 6-bit s and t, 128 × 2 codes           d s q − m t, with s and t for each 32
//! Q5_K   256      d, m, 8 × 6-bit s and t, 256 high bits, codes    the same
//! Q6_K   256      128 × 2 low codes, 256 × 2 high bits, 16 s, d    d s (q − 32), with s for each 16
//! ```
//! In a run of 32, the low halves of the bytes are the first 16 codes (in K formats: of 64, the first 32).

use half::f16;

/// A block format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)] // The names say it.
pub(in crate::checkpoint) enum Blocks {
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q4K,
    Q5K,
    Q6K,
}

/// The largest number of numbers in a block.
pub(in crate::checkpoint) const LARGEST: usize = 256;

/// Formats that are known by name only.
const OTHERS: [(u32, &str); 20] = [
    (9, "Q8_1"),
    (10, "Q2_K"),
    (11, "Q3_K"),
    (15, "Q8_K"),
    (16, "IQ2_XXS"),
    (17, "IQ2_XS"),
    (18, "IQ3_XXS"),
    (19, "IQ1_S"),
    (20, "IQ4_NL"),
    (21, "IQ3_S"),
    (22, "IQ2_S"),
    (23, "IQ4_XS"),
    (29, "IQ1_M"),
    (34, "TQ1_0"),
    (35, "TQ2_0"),
    (39, "MXFP4"),
    (40, "NVFP4"),
    (41, "Q1_0"),
    (42, "Q2_0"),
    (31, "Q4_0_4_4"),
];

impl Blocks {
    /// The format with this number in a header.
    pub fn of(code: u32) -> Option<Self> {
        Some(match code {
            2 => Self::Q4_0,
            3 => Self::Q4_1,
            6 => Self::Q5_0,
            7 => Self::Q5_1,
            8 => Self::Q8_0,
            12 => Self::Q4K,
            13 => Self::Q5K,
            14 => Self::Q6K,
            _ => return None,
        })
    }

    /// Why a tensor of another format cannot be read.
    pub fn refusal(name: &str, code: u32) -> String {
        let known = OTHERS.iter().find(|(other, _)| *other == code);
        let kind = known.map_or(format!("the unknown type {code}"), |(_, kind)| format!("type {kind}"));
        format!(
            "has tensor `{name}` of {kind}, which is not supported; F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, \
             Q4_K, Q5_K and Q6_K can be read: take a file of the model in one of these, such as Q4_K_M"
        )
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Q4_0 => "Q4_0",
            Self::Q4_1 => "Q4_1",
            Self::Q5_0 => "Q5_0",
            Self::Q5_1 => "Q5_1",
            Self::Q8_0 => "Q8_0",
            Self::Q4K => "Q4_K",
            Self::Q5K => "Q5_K",
            Self::Q6K => "Q6_K",
        }
    }

    /// Numbers and bytes of a block.
    pub const fn size(self) -> (usize, usize) {
        match self {
            Self::Q4_0 => (32, 18),
            Self::Q4_1 => (32, 20),
            Self::Q5_0 => (32, 22),
            Self::Q5_1 => (32, 24),
            Self::Q8_0 => (32, 34),
            Self::Q4K => (256, 144),
            Self::Q5K => (256, 176),
            Self::Q6K => (256, 210),
        }
    }

    /// Where in a block its f16 numbers are.
    const fn scales(self) -> &'static [usize] {
        match self {
            Self::Q4_0 | Self::Q5_0 | Self::Q8_0 => &[0],
            Self::Q4_1 | Self::Q5_1 | Self::Q4K | Self::Q5K => &[0, 2],
            Self::Q6K => &[208],
        }
    }

    /// Whether all numbers of whole blocks are finite.
    pub fn are_finite(self, blocks: &[u8]) -> bool {
        /// All bits of the exponent are set in what is not finite.
        const EXPONENT: u8 = 0x7C;
        let (_, bytes) = self.size();
        let finite = |block: &[u8]| self.scales().iter().all(|at| block[at + 1] & EXPONENT != EXPONENT);
        blocks.chunks_exact(bytes).all(finite)
    }

    /// Writes the numbers of whole blocks.
    pub fn decode(self, blocks: &[u8], to: &mut [f32]) {
        match self {
            Self::Q4_0 => each(blocks, to, q4_0),
            Self::Q4_1 => each(blocks, to, q4_1),
            Self::Q5_0 => each(blocks, to, q5_0),
            Self::Q5_1 => each(blocks, to, q5_1),
            Self::Q8_0 => each(blocks, to, q8_0),
            Self::Q4K => each(blocks, to, q4_k),
            Self::Q5K => each(blocks, to, q5_k),
            Self::Q6K => each(blocks, to, q6_k),
        }
    }
}

fn each<const B: usize, const N: usize>(
    blocks: &[u8],
    to: &mut [f32],
    decode: impl Fn(&[u8; B], &mut [f32; N]),
) {
    for (block, to) in blocks.as_chunks().0.iter().zip(to.as_chunks_mut().0) {
        decode(block, to);
    }
}

/// The f16 at a byte.
fn half(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

fn q4_0(block: &[u8; 18], to: &mut [f32; 32]) {
    let d = half(block, 0);
    for (i, code) in block[2..].iter().enumerate() {
        to[i] = f32::from((code & 15) as i8 - 8) * d;
        to[i + 16] = f32::from((code >> 4) as i8 - 8) * d;
    }
}

fn q4_1(block: &[u8; 20], to: &mut [f32; 32]) {
    let (d, m) = (half(block, 0), half(block, 2));
    for (i, code) in block[4..].iter().enumerate() {
        to[i] = f32::from(code & 15) * d + m;
        to[i + 16] = f32::from(code >> 4) * d + m;
    }
}

/// The fifth bit of code i, from the bytes that hold 32 of them.
fn fifth(bits: &[u8], i: usize) -> u8 {
    (bits[i / 8] >> (i % 8) & 1) << 4
}

fn q5_0(block: &[u8; 22], to: &mut [f32; 32]) {
    let d = half(block, 0);
    for (i, code) in block[6..].iter().enumerate() {
        to[i] = f32::from((code & 15 | fifth(&block[2..6], i)) as i8 - 16) * d;
        to[i + 16] = f32::from((code >> 4 | fifth(&block[2..6], i + 16)) as i8 - 16) * d;
    }
}

fn q5_1(block: &[u8; 24], to: &mut [f32; 32]) {
    let (d, m) = (half(block, 0), half(block, 2));
    for (i, code) in block[8..].iter().enumerate() {
        to[i] = f32::from(code & 15 | fifth(&block[4..8], i)) * d + m;
        to[i + 16] = f32::from(code >> 4 | fifth(&block[4..8], i + 16)) * d + m;
    }
}

fn q8_0(block: &[u8; 34], to: &mut [f32; 32]) {
    let d = half(block, 0);
    for (to, code) in to.iter_mut().zip(&block[2..]) {
        *to = f32::from(*code as i8) * d;
    }
}

/// The factors s and t of part i of eight: 12 bytes hold sixteen of 6 bits.
fn factors(scales: &[u8], i: usize) -> (f32, f32) {
    let (s, t) = match i {
        0..4 => (scales[i] & 63, scales[i + 4] & 63),
        _ => (scales[i + 4] & 15 | scales[i - 4] >> 6 << 4, scales[i + 4] >> 4 | scales[i] >> 6 << 4),
    };
    (f32::from(s), f32::from(t))
}

fn q4_k(block: &[u8; 144], to: &mut [f32; 256]) {
    let (d, m) = (half(block, 0), half(block, 2));
    for (i, to) in to.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let (s, t) = factors(&block[4..16], i);
        let (s, t) = (d * s, m * t);
        let shift = i % 2 * 4;
        for (to, code) in to.iter_mut().zip(&block[16 + i / 2 * 32..]) {
            *to = s * f32::from(code >> shift & 15) - t;
        }
    }
}

fn q5_k(block: &[u8; 176], to: &mut [f32; 256]) {
    let (d, m) = (half(block, 0), half(block, 2));
    for (i, to) in to.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let (s, t) = factors(&block[4..16], i);
        let (s, t) = (d * s, m * t);
        let shift = i % 2 * 4;
        for (j, (to, code)) in to.iter_mut().zip(&block[48 + i / 2 * 32..]).enumerate() {
            *to = s * f32::from(code >> shift & 15 | (block[16 + j] >> i & 1) << 4) - t;
        }
    }
}

fn q6_k(block: &[u8; 210], to: &mut [f32; 256]) {
    let d = half(block, 208);
    let (low, high, scales) = (&block[..128], &block[128..192], &block[192..208]);
    for (i, to) in to.as_chunks_mut::<16>().0.iter_mut().enumerate() {
        // Two halves of 128 numbers, each of four parts of 32.
        let (half, part, begin) = (i / 8, i % 8 / 2, i % 2 * 16);
        let s = d * f32::from(scales[i] as i8);
        for (j, to) in to.iter_mut().enumerate() {
            let low = low[half * 64 + part % 2 * 32 + begin + j] >> (part / 2 * 4) & 15;
            let high = high[half * 32 + begin + j] >> (part * 2) & 3;
            *to = s * f32::from((low | high << 4) as i8 - 32);
        }
    }
}
