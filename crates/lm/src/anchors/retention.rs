//! Retention: which anchors survive the next boundary.

use std::fmt;
use std::str::FromStr;

/// The rule for which anchors survive the next boundary.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Retention {
    /// Every anchor.
    #[default]
    All,
    /// With c complete intervals, the anchors c, c & (c − 1), …: a number logarithmic in the length of the text.
    Fenwick,
    /// The newest N.
    Recent(usize),
    /// As many as fit into this many bytes, in all layers together. Each layer has an equal share and drops the anchors
    /// with the least value to it.
    Budget(usize),
}

/// What one layer dropped: the number of the anchor that was placed, and the numbers of those dropped to make room.
pub type Evictions = Vec<(usize, Vec<usize>)>;

impl Retention {
    /// Whether the anchor with number `ordinal` is kept after `complete` intervals, as far as the numbers alone decide.
    #[doc(hidden)]
    pub fn keeps(self, ordinal: usize, complete: usize) -> bool {
        match self {
            Self::All | Self::Budget(_) => true,
            Self::Recent(count) => complete - ordinal < count,
            Self::Fenwick => {
                // c with its lowest bits cleared one by one: the part of c above the lowest bit of `ordinal`.
                let low = ordinal & ordinal.wrapping_neg();
                ordinal > 0 && complete & !(low - 1) == ordinal
            }
        }
    }

    /// How many of `complete` anchors are kept, each of `anchor_bytes` bytes in all layers together.
    pub(crate) fn kept_of(self, complete: usize, anchor_bytes: usize) -> usize {
        match self {
            Self::All => complete,
            Self::Fenwick => complete.count_ones() as usize,
            Self::Recent(count) => complete.min(count),
            Self::Budget(bytes) => complete.min(bytes / anchor_bytes.max(1)),
        }
    }
}

/// Units of bytes. A unit that is a suffix of another comes after it.
const UNITS: [(&str, f64); 11] = [
    ("gib", (1u64 << 30) as f64),
    ("mib", (1u64 << 20) as f64),
    ("kib", 1024.0),
    ("gb", 1e9),
    ("mb", 1e6),
    ("kb", 1e3),
    ("g", 1e9),
    ("m", 1e6),
    ("k", 1e3),
    ("b", 1.0),
    ("", 1.0),
];

/// A number of bytes: `64MB`, `64MiB`, `1e6`, `65536`.
fn bytes(text: &str) -> Option<usize> {
    let lower = text.trim().to_ascii_lowercase();
    let (number, unit) = UNITS.iter().find_map(|(name, unit)| Some((lower.strip_suffix(name)?, unit)))?;
    let bytes = number.trim().parse::<f64>().ok()? * unit;
    (bytes.is_finite() && (1.0..=1e15).contains(&bytes)).then_some(bytes as usize)
}

impl FromStr for Retention {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parsed = match text.split_once(':') {
            None if text == "all" => Some(Self::All),
            None if text == "fenwick" => Some(Self::Fenwick),
            Some(("recent", count)) => count.parse().ok().filter(|&n| n > 0).map(Self::Recent),
            Some(("budget", size)) => bytes(size).map(Self::Budget),
            _ => None,
        };
        parsed.ok_or_else(|| {
            format!(
                "is `{text}`; it must be `all`, `fenwick`, `recent:N` (such as recent:16) or `budget:BYTES` (such as \
                 budget:64MB)"
            )
        })
    }
}

impl fmt::Display for Retention {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::All => f.write_str("all"),
            Self::Fenwick => f.write_str("fenwick"),
            Self::Recent(count) => write!(f, "recent:{count}"),
            Self::Budget(bytes) => {
                let units = [(1_000_000_000, "GB"), (1_000_000, "MB"), (1000, "kB")];
                match units.into_iter().find(|(unit, _)| bytes.is_multiple_of(*unit)) {
                    Some((unit, name)) => write!(f, "budget:{}{name}", bytes / unit),
                    None => write!(f, "budget:{bytes}"),
                }
            }
        }
    }
}
