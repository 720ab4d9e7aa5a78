//! Where anchors are placed: on a grid, or where the state has moved.
//!
//! Adaptive placement looks at the first layer's state S at the multiples of MIN, and at S′, the state where the last
//! anchor was placed (before the first anchor: at the first multiple):
//!
//! ```text
//! movement = ‖S − S′‖ / (‖S‖ + ‖S′‖)                                 Frobenius norms over all heads, 0 to 1
//! wanted = position / C;   θ = usual · exp((placed + 1 − wanted) / 4)
//! usual: mean movement at the anchors after the first, which is the movement from almost nothing; once there are more
//! than 8, usual += (movement − usual) / 8
//! slack = min(1 + wanted / 20, 8)
//! the first anchor: at the first candidate not before C
//! later ones: where movement ≥ θ; but never more than wanted + slack, never less than wanted − slack
//! ```
//! Every anchor raises the threshold and every token lowers it, so it settles where anchors are as frequent as
//! periodic ones; the slack bounds the count for any text. A decision depends only on earlier tokens, and only
//! on the first layer, whose input does not depend on anchors.

use std::fmt;
use std::str::FromStr;

use super::{Timeline, multiples};

/// The rule for placing anchors.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Placement {
    /// Every C tokens.
    #[default]
    Periodic,
    /// Where the state has moved most: at most one anchor in this many tokens, and on average as many as periodic ones.
    Adaptive(usize),
}

impl FromStr for Placement {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parsed = match text.split_once(':') {
            None if text == "periodic" => Some(Self::Periodic),
            Some(("adaptive", min)) => min.parse().ok().filter(|&n| n > 0).map(Self::Adaptive),
            _ => None,
        };
        parsed.ok_or_else(|| {
            format!("is `{text}`; it must be `periodic` or `adaptive:MIN` (such as adaptive:64)")
        })
    }
}

impl fmt::Display for Placement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Periodic => f.write_str("periodic"),
            Self::Adaptive(min) => write!(f, "adaptive:{min}"),
        }
    }
}

impl Placement {
    /// The positions where an anchor may be placed, after `position` and up to `position + tokens`.
    #[doc(hidden)]
    pub fn candidates(self, position: usize, tokens: usize) -> Vec<usize> {
        match self {
            Self::Periodic => Vec::new(),
            Self::Adaptive(min) => multiples(min, position, tokens).collect(),
        }
    }
}

/// A position where an anchor may be placed.
#[derive(Clone, Copy, Debug)]
pub struct Candidate {
    /// Text tokens before it.
    pub position: usize,
    /// How far the state has moved since the last anchor.
    pub movement: f64,
}

/// How fast the threshold reacts to the count.
const FOLLOW: f64 = 0.25;

impl Candidate {
    /// Whether an anchor is placed here. `timeline` is at the last anchor and is updated with the observed movement.
    pub fn is_placed(self, interval: usize, timeline: &mut Timeline) -> bool {
        let wanted = self.position as f64 / interval as f64;
        let placed = timeline.complete as f64;
        if timeline.complete == 0 {
            let first = self.position >= interval;
            if first {
                timeline.usual_movement = self.movement;
            }
            return first;
        }
        let slack = (1.0 + wanted / 20.0).min(8.0);
        let threshold = timeline.usual_movement * (FOLLOW * (placed + 1.0 - wanted)).exp();
        let (may, must) = (placed + 1.0 <= wanted + slack, placed < wanted - slack);
        let place = must || (may && self.movement >= threshold);
        if place {
            timeline.usual_movement += (self.movement - timeline.usual_movement) / placed.min(8.0);
        }
        place
    }
}

/// ‖a − b‖, or ‖a‖ without `b`, always summed in the same order.
pub(crate) fn frobenius(a: &[f32], b: Option<&[f32]>) -> f64 {
    const LANES: usize = 8;
    let mut sums = [0.0f64; LANES];
    let squares = |sums: &mut [f64; LANES], a: &[f32], b: Option<&[f32]>| {
        for (i, sum) in sums.iter_mut().enumerate().take(a.len()) {
            let value = f64::from(a[i]) - b.map_or(0.0, |b| f64::from(b[i]));
            *sum += value * value;
        }
    };
    for (i, part) in a.chunks(LANES).enumerate() {
        squares(&mut sums, part, b.map(|b| &b[i * LANES..]));
    }
    sums.iter().sum::<f64>().sqrt()
}

/// ‖S − S′‖ / (‖S‖ + ‖S′‖); 1 without S′, which then counts as zero.
pub fn movement(state: &[f32], last: Option<&[f32]>) -> f64 {
    let Some(last) = last else { return 1.0 };
    let length = frobenius(state, None) + frobenius(last, None);
    if length > 0.0 { frobenius(state, Some(last)) / length } else { 0.0 }
}
