//! Random numbers, and what can happen to a file.

/// Random numbers (SplitMix64).
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15))
    }

    /// A number below `end`, which is above 0.
    pub fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((x ^ (x >> 31)) % end as u64) as usize
    }
}

/// A damaged copy of a file, and what was done to it.
pub fn damage(bytes: &[u8], random: &mut Random) -> (Vec<u8>, String) {
    let mut damaged = bytes.to_vec();
    let length = bytes.len().max(1);
    let at = random.below(length);
    let what = match random.below(8) {
        // What happens most: single bits and bytes.
        0..=2 if !bytes.is_empty() => {
            let bit = random.below(8);
            damaged[at] ^= 1 << bit;
            format!("bit {bit} of byte {at} flipped")
        }
        3 if !bytes.is_empty() => {
            let count = 1 + random.below(4);
            for _ in 0..count {
                let at = random.below(length);
                damaged[at] = random.below(256) as u8;
            }
            format!("{count} bytes replaced")
        }
        // A digit for another: what a text file survives best.
        4 => match digits(bytes) {
            digits if digits.is_empty() => {
                damaged.truncate(at);
                format!("cut at byte {at}")
            }
            digits => {
                let at = digits[random.below(digits.len())];
                damaged[at] = b'0' + ((bytes[at] - b'0') + 1 + random.below(9) as u8) % 10;
                format!("the digit at byte {at} replaced")
            }
        },
        5 => {
            let end = length.min(at + 1 + random.below(4096));
            damaged[at.min(bytes.len())..end.min(bytes.len())].fill(0);
            format!("bytes {at}..{end} zeroed")
        }
        6 => {
            damaged.truncate(at);
            format!("cut at byte {at}")
        }
        _ => {
            let count = 1 + random.below(64);
            (0..count).for_each(|_| damaged.push(random.below(256) as u8));
            format!("{count} bytes appended")
        }
    };
    (damaged, what)
}

fn digits(bytes: &[u8]) -> Vec<usize> {
    bytes.iter().enumerate().filter(|(_, byte)| byte.is_ascii_digit()).map(|(at, _)| at).collect()
}
