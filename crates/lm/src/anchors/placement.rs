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
    pub(crate) fn candidates(self, position: usize, tokens: usize) -> Vec<usize> {
        match self {
            Self::Periodic => Vec::new(),
            Self::Adaptive(min) => multiples(min, position, tokens).collect(),
        }
    }
}

/// A position where an anchor may be placed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Candidate {
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
pub(crate) fn movement(state: &[f32], last: Option<&[f32]>) -> f64 {
    let Some(last) = last else { return 1.0 };
    let length = frobenius(state, None) + frobenius(last, None);
    if length > 0.0 { frobenius(state, Some(last)) / length } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_and_back() {
        for (text, want) in [("periodic", Placement::Periodic), ("adaptive:64", Placement::Adaptive(64))] {
            assert_eq!(text.parse(), Ok(want));
            assert_eq!(want.to_string(), text);
        }
        for text in ["adaptive", "adaptive:0", "adaptive:x", "periodic:3", "random"] {
            assert!(text.parse::<Placement>().unwrap_err().contains("`adaptive:MIN`"));
        }
    }

    #[test]
    fn movement_is_a_share() {
        let a: Vec<f32> = (0..19).map(|i| (i as f32 * 0.7).sin()).collect();
        let b: Vec<f32> = (0..19).map(|i| (i as f32 * 1.3).cos()).collect();
        let norm = |x: &[f32]| x.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>().sqrt();
        let difference: Vec<f32> = a.iter().zip(&b).map(|(a, b)| a - b).collect();
        let want = norm(&difference) / (norm(&a) + norm(&b));
        assert!((movement(&a, Some(&b)) - want).abs() < 1e-6);
        assert_eq!(movement(&a, Some(&a)), 0.0);
        assert_eq!(movement(&[0.0; 3], Some(&[0.0; 3])), 0.0);
        assert_eq!(movement(&a, None), 1.0);
    }

    /// The count stays near the target whatever the state does.
    #[test]
    fn the_count_is_held() {
        let noise = |t: usize| ((t as f64 * 12.9898).sin() * 43758.5453).fract().abs();
        let kinds: [(&str, &dyn Fn(usize, usize) -> f64); 5] = [
            ("grows", &|_, since| 1.0 - (-(since as f64) / 300.0).exp()),
            ("is still", &|_, _| 0.0),
            ("jumps", &|_, _| 1.0),
            ("is noise", &|t, _| noise(t)),
            ("changes", &|t, since| {
                (since as f64 / 4000.0).min(1.0) * if t / 16384 % 2 == 0 { 1.0 } else { 1e-3 }
            }),
        ];
        for (name, kind) in kinds {
            for (interval, min) in [(512, 16), (512, 512), (100, 7), (2048, 64), (64, 1)] {
                let (mut timeline, mut last) = (Timeline::default(), 0);
                for position in Placement::Adaptive(min).candidates(0, 65536) {
                    let movement = kind(position, position - last);
                    if (Candidate { position, movement }).is_placed(interval, &mut timeline) {
                        timeline.complete += 1;
                        last = position;
                    }
                    let off = (timeline.complete as f64 - position as f64 / interval as f64).abs();
                    assert!(off <= 9.0 + min as f64 / interval as f64, "{name}: {off} off at {position}");
                }
                let (count, wanted) = (timeline.complete as f64, 65536.0 / interval as f64);
                assert!((count / wanted - 1.0).abs() < 0.1, "{name}, {interval}, {min}: {count} of {wanted}");
            }
        }
    }
}
