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

/// The kinds of damage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    Flipped,
    Replaced,
    Digit,
    Zeroed,
    Cut,
    Appended,
}

impl Fault {
    pub const ALL: [Self; 6] =
        [Self::Flipped, Self::Replaced, Self::Digit, Self::Zeroed, Self::Cut, Self::Appended];

    /// What it is called in the table.
    pub fn name(self) -> &'static str {
        match self {
            Self::Flipped => "one bit flipped",
            Self::Replaced => "up to 4 bytes replaced",
            Self::Digit => "a digit replaced by another",
            Self::Zeroed => "up to 4096 bytes zeroed",
            Self::Cut => "file cut short",
            Self::Appended => "up to 64 bytes appended",
        }
    }
}

/// A damaged copy of a file, the kind of damage, and what was done.
pub fn damage(bytes: &[u8], random: &mut Random) -> (Vec<u8>, Fault, String) {
    let mut damaged = bytes.to_vec();
    let length = bytes.len().max(1);
    let at = random.below(length);
    let (fault, what) = match random.below(8) {
        // What happens most: single bits and bytes.
        0..=2 if !bytes.is_empty() => {
            let bit = random.below(8);
            damaged[at] ^= 1 << bit;
            (Fault::Flipped, format!("bit {bit} of byte {at} flipped"))
        }
        3 if !bytes.is_empty() => {
            let count = 1 + random.below(4);
            for _ in 0..count {
                let at = random.below(length);
                damaged[at] = random.below(256) as u8;
            }
            (Fault::Replaced, format!("{count} bytes replaced"))
        }
        // A digit for another: what a text file survives best.
        4 => match digits(bytes) {
            digits if digits.is_empty() => {
                damaged.truncate(at);
                (Fault::Cut, format!("cut at byte {at}"))
            }
            digits => {
                let at = digits[random.below(digits.len())];
                damaged[at] = b'0' + ((bytes[at] - b'0') + 1 + random.below(9) as u8) % 10;
                (Fault::Digit, format!("the digit at byte {at} replaced"))
            }
        },
        5 => {
            let end = length.min(at + 1 + random.below(4096));
            damaged[at.min(bytes.len())..end.min(bytes.len())].fill(0);
            (Fault::Zeroed, format!("bytes {at}..{end} zeroed"))
        }
        6 => {
            damaged.truncate(at);
            (Fault::Cut, format!("cut at byte {at}"))
        }
        _ => {
            let count = 1 + random.below(64);
            (0..count).for_each(|_| damaged.push(random.below(256) as u8));
            (Fault::Appended, format!("{count} bytes appended"))
        }
    };
    (damaged, fault, what)
}

fn digits(bytes: &[u8]) -> Vec<usize> {
    bytes.iter().enumerate().filter(|(_, byte)| byte.is_ascii_digit()).map(|(at, _)| at).collect()
}
