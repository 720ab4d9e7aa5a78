//! How large the haystack may be for a prompt to fit a length.

use super::super::config::LONGEST_SEQUENCE;
use super::super::recall::Random;
use super::words::Items;
use super::{Drawn, Essay, Haystack, Needles, Place};
use crate::error::{Error, Result};
use crate::tokenizer::Tokenizer;

/// Number of tokens that a model may answer with; they are part of a task's length.
pub const GENERATED: usize = 128;

/// A task at one length for one tokenizer.
pub struct FittedTask<'a> {
    needles: Needles,
    place: Place<'a>,
    length: usize,
    stream: u64,
    /// The size of the haystack in words of the text, or in lines.
    units: usize,
    /// Tokens per unit.
    rate: f64,
}

impl Needles {
    /// Finds how large the haystack may be at a length. Fails if one of the first `samples` samples does not
    /// fit even with the smallest haystack, and says at which length all of them do.
    pub fn fit<'a>(
        &self,
        tokenizer: &'a Tokenizer,
        essay: &'a Essay,
        length: usize,
        seed: u64,
        samples: u64,
    ) -> Result<FittedTask<'a>> {
        self.check()?;
        if length as u64 > LONGEST_SEQUENCE {
            return Err(Error::Request(format!(
                "a length of {length} tokens is too long; the longest is {LONGEST_SEQUENCE}"
            )));
        }
        let least = self.count();
        let mut fitted = FittedTask {
            needles: *self,
            place: Place { tokenizer, essay, first: 0 },
            length,
            stream: self.stream(seed),
            units: least,
            rate: 1.0,
        };
        let budget = length.saturating_sub(GENERATED);
        let smallest = fitted.tokens(least, 0)?;
        // Samples differ by some tokens, never by half of them: they need to be tried only if it is close.
        if smallest.saturating_mul(2) > budget {
            let mut longest = smallest;
            for index in 1..samples {
                longest = longest.max(fitted.tokens(least, index)?);
            }
            if longest > budget {
                return Err(fitted.too_short(longest));
            }
        }
        // Every unit has at least a token, unless the tokenizer knows nothing of the text.
        let lines = Items::most(self.key).min(Items::most(self.value)) - least;
        let most = if self.haystack == Haystack::Needles { lines.min(4 * length) } else { 4 * length };
        let count = |units| fitted.tokens(units, 0);
        let size = largest((least, smallest), most.max(least), budget, count)?;
        if size.units == most {
            return Err(Error::Request(format!(
                "the largest possible haystack has {most} {}, but the tokenizer `{}` makes only {} tokens \
                 of it; ask for a length below {}",
                if self.haystack == Haystack::Essay { "words" } else { "lines" },
                tokenizer.name(),
                size.tokens,
                size.tokens + GENERATED
            )));
        }
        (fitted.units, fitted.rate) = (size.units, size.rate);
        Ok(fitted)
    }
}

impl FittedTask<'_> {
    /// The size of the haystack: words of a text, or lines. A sample with long keys may have fewer.
    pub fn units(&self) -> usize {
        self.units
    }

    /// Draws sample `index`.
    pub fn sample(&self, index: u64) -> Result<Drawn> {
        let least = self.needles.count();
        let mut units = self.units;
        loop {
            let drawn = self.draw(units, index)?;
            let excess = (drawn.tokens + GENERATED).saturating_sub(self.length);
            if excess == 0 {
                return Ok(drawn);
            }
            if units == least {
                return Err(self.too_short(drawn.tokens));
            }
            let fewer = (excess as f64 / self.rate).ceil() as usize;
            units = units.saturating_sub(fewer.max(1)).max(least);
        }
    }

    fn too_short(&self, tokens: usize) -> Error {
        Error::Request(format!(
            "a length of {} tokens is too short for {} needles in a prompt of the tokenizer `{}`; \
             the smallest length that fits is {}: the prompt and {GENERATED} tokens of an answer",
            self.length,
            self.needles.count(),
            self.place.tokenizer.name(),
            tokens + GENERATED
        ))
    }

    fn tokens(&self, units: usize, index: u64) -> Result<usize> {
        Ok(self.draw(units, index)?.tokens)
    }

    fn draw(&self, units: usize, index: u64) -> Result<Drawn> {
        self.needles.draw(self.place, units, Random::new(self.stream, index))
    }
}

/// A size of the haystack.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Size {
    /// Words of the text, or lines.
    pub units: usize,
    /// Tokens of the prompt.
    pub tokens: usize,
    /// Tokens per unit, about.
    pub rate: f64,
}

/// How many units the first measurement adds, to estimate the tokens per unit.
const FIRST: usize = 64;

/// A size, up to `most` units, whose tokens are just within the budget; `least`, units and tokens, is one
/// that is. Long texts take long to count, so sizes are estimated from those counted before, and the search
/// ends when what is left of the budget is less than a unit or than 1/256.
pub fn largest(
    least: (usize, usize),
    most: usize,
    budget: usize,
    count: impl Fn(usize) -> Result<usize>,
) -> Result<Size> {
    // Units that fit and units that are too many, if known, with their tokens.
    let mut low = least;
    let mut high: Option<(usize, usize)> = None;
    let mut rate = 1.0;
    let mut step = FIRST;
    loop {
        let end = high.map_or(most, |high| high.0 - 1);
        if low.0 >= end {
            break;
        }
        let units = low.0.saturating_add(step.max(1)).min(end);
        let tokens = count(units)?;
        rate = per_unit(least, (units, tokens));
        if tokens <= budget {
            low = (units, tokens);
        } else {
            high = Some((units, tokens));
        }
        let left = (budget - low.1) as f64;
        if left < rate.max(budget as f64 / 256.0) {
            break;
        }
        step = (left / high.map_or(rate, |high| per_unit(low, high))) as usize;
    }
    Ok(Size { units: low.0, tokens: low.1, rate })
}

/// Tokens per unit between two sizes; more than none even if the larger size has no more tokens.
fn per_unit(from: (usize, usize), to: (usize, usize)) -> f64 {
    (to.1.saturating_sub(from.1) as f64 / to.0.saturating_sub(from.0).max(1) as f64).max(1e-3)
}
