//! Routing weights, recorded for inspection while a model runs.

use std::collections::BTreeMap;

use march_engine::Tensor;

use super::Row;
use crate::error::Result;

/// One call's weights in one layer.
#[derive(Clone)]
struct Part {
    position: usize,
    tokens: usize,
    /// The anchor ordinal of each column.
    ordinals: Vec<usize>,
    /// [tokens, value_heads, anchors].
    weights: Tensor,
}

/// Routing weights of one sequence, by layer.
#[derive(Clone, Default)]
pub struct Trace {
    heads: usize,
    boundaries: Vec<usize>,
    layers: Vec<Vec<Part>>,
}

impl Trace {
    /// Adds the weights of one call, [tokens, heads, anchors]; `None` if no token sees an anchor.
    pub(super) fn note(&mut self, layer: usize, heads: usize, row: Row<'_>, weights: Option<Tensor>) {
        self.heads = heads;
        let Row { position, tokens, anchors: plan, .. } = row;
        let new = plan.boundaries.first().map_or(&[][..], Vec::as_slice);
        for (&ordinal, &boundary) in plan.ordinals.iter().rev().zip(new.iter().rev()) {
            self.boundaries.resize(self.boundaries.len().max(ordinal), 0);
            self.boundaries[ordinal - 1] = position + boundary;
        }
        let Some(weights) = weights else { return };
        if self.layers.len() <= layer {
            self.layers.resize_with(layer + 1, Vec::new);
        }
        self.layers[layer].push(Part { position, tokens, ordinals: plan.ordinals.clone(), weights });
    }

    /// Forgets the weights of all tokens but the newest.
    pub fn keep_newest(&mut self) -> Result<()> {
        for parts in &mut self.layers {
            let Some(mut newest) = parts.pop() else { continue };
            let last = newest.tokens - 1;
            newest.weights = newest.weights.slice(0, last..last + 1)?;
            (newest.position, newest.tokens) = (newest.position + last, 1);
            *parts = vec![newest];
        }
        Ok(())
    }

    /// b_m of every anchor, kept or not: the number of text tokens before it.
    pub fn boundaries(&self) -> &[usize] {
        &self.boundaries
    }

    /// The number of heads, and π of one layer over the whole text, [tokens, heads, anchors], without the null; 0 where
    /// an anchor was not seen or not chosen. `anchors` is the number of boundaries in the text.
    pub fn weights(&self, layer: usize, tokens: usize, anchors: usize) -> (usize, Vec<f32>) {
        let parts = self.layers.get(layer).map_or(&[][..], Vec::as_slice);
        let heads = self.heads;
        let mut all = vec![0.0; tokens * heads * anchors];
        for part in parts {
            let columns = part.ordinals.len();
            let weights = part.weights.to_f32();
            for row in 0..part.tokens * heads {
                for (column, &ordinal) in part.ordinals.iter().enumerate().filter(|(_, o)| **o <= anchors) {
                    let to = (part.position * heads + row) * anchors + ordinal - 1;
                    if let Some(to) = all.get_mut(to) {
                        *to = weights[row * columns + column];
                    }
                }
            }
        }
        (heads, all)
    }

    /// The mean of π over all recorded tokens that saw an anchor, and over the heads.
    pub fn means(&self) -> MeanRouting {
        let mut means = MeanRouting { heads: self.heads, ..MeanRouting::default() };
        for (layer, parts) in self.layers.iter().enumerate() {
            let tokens: usize = parts.iter().map(|part| part.tokens).sum();
            means.tokens = means.tokens.max(tokens);
            for part in parts {
                let weights = part.weights.to_f32();
                for row in weights.chunks(part.ordinals.len().max(1)) {
                    for (&ordinal, &weight) in part.ordinals.iter().zip(row) {
                        let by_layer =
                            means.anchors.entry(ordinal).or_insert_with(|| vec![0.0; self.layers.len()]);
                        by_layer[layer] += f64::from(weight) / (tokens * self.heads) as f64;
                    }
                }
            }
        }
        means.null = (0..self.layers.len())
            .map(|layer| 1.0 - means.anchors.values().map(|weights| weights[layer]).sum::<f64>())
            .collect();
        means
    }
}

/// Which anchors the tokens of a text read on average; see [`Trace::means`].
#[derive(Clone, Debug, Default, PartialEq)]
pub struct MeanRouting {
    /// The number of recorded tokens that saw an anchor.
    pub tokens: usize,
    /// The number of heads of each layer.
    pub heads: usize,
    /// The mean weight of the null, by layer; empty if nothing was recorded.
    pub null: Vec<f64>,
    /// By the anchor's ordinal: its mean weight in each layer.
    pub anchors: BTreeMap<usize, Vec<f64>>,
}
