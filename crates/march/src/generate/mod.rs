//! Text from a model: one token after the other, each drawn from the model's probabilities.

use march_engine::{Engine, Tape};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

use crate::anchors::Policy;
use crate::error::Result;
use crate::model::{Batch, Model};

/// How tokens are drawn.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// Scores are divided by this first; 0 takes the most probable token.
    pub temperature: f64,
    /// Of the random numbers.
    pub seed: u64,
}

/// The `count` tokens that follow a prompt of at least one token.
pub fn continue_text<E: Engine>(
    engine: &E,
    model: &Model<E>,
    parameters: &[E::Tensor],
    policy: &Policy,
    prompt: &[u32],
    count: usize,
    sampling: Sampling,
) -> Result<Vec<u32>> {
    let tape = Tape::inference(engine);
    let weights = model.bind(&tape, parameters);
    let mut bank = model.bank(policy.clone())?;
    let mut random = ChaCha8Rng::seed_from_u64(sampling.seed);
    let mut tokens = Vec::with_capacity(count);
    let mut next = prompt.to_vec();
    while tokens.len() < count {
        let hidden = model.extend(&tape, &weights, Batch::one(&next), &mut [&mut bank], None)?;
        let last = tape.slice(&hidden, 1, next.len() - 1..next.len())?;
        let logits = engine.to_f32(model.logits(&tape, &weights, &last)?.value());
        let token = draw(&logits, sampling.temperature, &mut random);
        tokens.push(token);
        next = vec![token];
    }
    Ok(tokens)
}

/// A token by its score; of equals the first.
fn draw(logits: &[f32], temperature: f64, random: &mut impl Rng) -> u32 {
    let mut best = 0;
    for (i, &logit) in logits.iter().enumerate() {
        if logit > logits[best] {
            best = i;
        }
    }
    if temperature <= 0.0 {
        return best as u32;
    }
    let largest = f64::from(logits.get(best).copied().unwrap_or(0.0));
    let weight = |&logit: &f32| ((f64::from(logit) - largest) / temperature).exp();
    let total: f64 = logits.iter().map(weight).sum();
    let mut left = (random.next_u64() >> 11) as f64 / (1u64 << 53) as f64 * total;
    for (i, logit) in logits.iter().enumerate() {
        left -= weight(logit);
        if left < 0.0 {
            return i as u32;
        }
    }
    best as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_come_as_often_as_they_are_probable() {
        let logits = [0.0, (3.0f32).ln(), f32::NEG_INFINITY, 0.0];
        let mut random = ChaCha8Rng::seed_from_u64(1);
        let mut counts = [0; 4];
        (0..10_000).for_each(|_| counts[draw(&logits, 1.0, &mut random) as usize] += 1);
        assert_eq!(counts[2], 0);
        assert!((counts[1] as f64 / 10_000.0 - 0.6).abs() < 0.03, "{counts:?}");
        assert_eq!(draw(&logits, 0.0, &mut random), 1);
    }
}
