//! Which anchors each token of a text read, by layer and head, as numbers and as a page.

use std::ops::Range;

use serde_json::json;

use super::{escape, whole_page};
use march_lm::Result;
use march_lm::generate::TextStream;
use march_lm::model::Trace;
use march_lm::tokenizer::Tokenizer;

/// The routing weights of one text.
pub struct Routing {
    /// The text of each token; empty if the token only begins a character.
    pub pieces: Vec<String>,
    /// b_m: the number of tokens before each anchor.
    pub boundaries: Vec<usize>,
    /// Number of heads per layer.
    pub heads: usize,
    /// π of each layer, [tokens, heads, anchors], without the null.
    pub layers: Vec<Vec<f32>>,
}

/// Statistics of reading, for one head or for all heads of a layer. Only tokens that see an anchor count.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Summary {
    /// The mean weight of the null.
    pub null: f64,
    /// The mean entropy of a token's weights, including the null, in bits.
    pub entropy: f64,
    /// The mean distance in tokens to the anchors that were read, weighted.
    pub distance: f64,
    /// The anchors by their share of all reads, largest first: ordinal and share.
    pub most_read: Vec<(usize, f64)>,
}

impl Routing {
    /// Creates the routing of a text from what `trace` recorded in a model of `layers` layers.
    pub fn new(trace: &Trace, layers: usize, tokenizer: &Tokenizer, ids: &[u32]) -> Result<Self> {
        let mut stream = TextStream::new(tokenizer, &[])?;
        let mut pieces = ids.iter().map(|&id| stream.push(tokenizer, id)).collect::<Result<Vec<String>>>()?;
        if let Some(last) = pieces.last_mut() {
            *last += &stream.finish(tokenizer)?;
        }
        Ok(Self::of_pieces(trace, layers, pieces))
    }

    /// Creates the routing of tokens that come from no tokenizer; a piece is the displayed form of its token.
    pub fn of_pieces(trace: &Trace, layers: usize, pieces: Vec<String>) -> Self {
        let tokens = pieces.len();
        // No token sees an anchor at the very end.
        let boundaries: Vec<usize> = trace.boundaries().iter().copied().filter(|&b| b < tokens).collect();
        let traced = (0..layers).map(|layer| trace.weights(layer, tokens, boundaries.len()));
        let (heads, layers): (Vec<usize>, Vec<Vec<f32>>) = traced.unzip();
        Self { pieces, boundaries, heads: heads.first().copied().unwrap_or(0), layers }
    }

    /// Number of tokens in the text.
    pub fn tokens(&self) -> usize {
        self.pieces.len()
    }

    /// Number of anchors that some token can see.
    pub fn anchors(&self) -> usize {
        self.boundaries.len()
    }

    /// Number of heads per layer.
    pub fn heads(&self) -> usize {
        self.heads
    }

    /// Number of layers.
    pub fn layers(&self) -> usize {
        self.layers.len()
    }

    /// The number of tokens before anchor m, from 1.
    pub fn boundary(&self, ordinal: usize) -> usize {
        self.boundaries[ordinal - 1]
    }

    /// The last `characters` or so characters of the text before anchor m, from 1.
    pub fn snippet(&self, ordinal: usize, characters: usize) -> String {
        let mut text: Vec<&str> = Vec::new();
        let mut count = 0;
        for piece in self.pieces[..self.boundary(ordinal)].iter().rev() {
            if count >= characters {
                break;
            }
            count += piece.chars().count();
            text.push(piece);
        }
        text.into_iter().rev().collect()
    }

    /// π of a token over the anchors before it, without the null.
    fn weights(&self, layer: usize, head: usize, token: usize) -> &[f32] {
        let anchors = self.anchors();
        let start = (token * self.heads + head) * anchors;
        &self.layers[layer][start..start + self.before(token)]
    }

    /// The number of anchors before a token.
    fn before(&self, token: usize) -> usize {
        self.boundaries.partition_point(|&boundary| boundary <= token)
    }

    /// The part of the text before the anchor that a token read most, in the layer and on the mean of the heads where its
    /// weight is greatest, and that weight; `None` if the token sees no anchor.
    pub fn read_most(&self, token: usize) -> Option<(Range<usize>, f64)> {
        let mean = |layer: usize, m: usize| {
            let heads = (0..self.heads).map(|head| f64::from(self.weights(layer, head, token)[m]));
            heads.sum::<f64>() / self.heads as f64
        };
        let all = (0..self.layers()).flat_map(|layer| (0..self.before(token)).map(move |m| (layer, m)));
        let (m, weight) = all.map(|(layer, m)| (m, mean(layer, m))).max_by(|a, b| a.1.total_cmp(&b.1))?;
        let from = m.checked_sub(1).map_or(0, |before| self.boundaries[before]);
        Some((from..self.boundaries[m], weight))
    }

    /// The statistics of one head of a layer, or of all its heads.
    pub fn summary(&self, layer: usize, head: Option<usize>) -> Summary {
        let heads = head.map_or(0..self.heads, |head| head..head + 1);
        let first = self.boundaries.first().copied().unwrap_or(self.tokens());
        let (mut rows, mut null, mut entropy, mut distance) = (0.0, 0.0, 0.0, 0.0);
        let mut mass = vec![0.0; self.anchors()];
        for token in first..self.tokens() {
            for head in heads.clone() {
                let weights = self.weights(layer, head, token);
                let rest = null_of(weights);
                null += rest;
                entropy += surprise(rest);
                rows += 1.0;
                for (m, &weight) in weights.iter().enumerate() {
                    let weight = f64::from(weight);
                    mass[m] += weight;
                    entropy += surprise(weight);
                    distance += weight * (token - self.boundaries[m]) as f64;
                }
            }
        }
        let read: f64 = mass.iter().sum();
        let share = |part: f64, whole: f64| if whole > 0.0 { part / whole } else { 0.0 };
        let mut most_read: Vec<(usize, f64)> =
            mass.iter().enumerate().map(|(m, &mass)| (m + 1, share(mass, read))).collect();
        most_read.sort_by(|a, b| b.1.total_cmp(&a.1));
        Summary {
            null: share(null, rows),
            entropy: share(entropy, rows),
            distance: share(distance, read),
            most_read,
        }
    }

    /// Renders a self-contained page with an interactive map of the weights.
    pub fn render(&self, title: &str, facts: &str) -> String {
        let style = [STYLE, "body { max-width: 1400px; }\n"].concat();
        let body =
            format!("<p class=\"soft\">{}</p>\n<h2>Routing weights</h2>\n{}", escape(facts), self.map());
        whole_page(title, &style, &body)
    }

    /// The map, the text and the layers, as part of a page whose style includes `STYLE`.
    pub(super) fn map(&self) -> String {
        let mut weights = Vec::with_capacity(self.layers());
        let mut nulls = Vec::with_capacity(self.layers());
        for layer in 0..self.layers() {
            let (mut all, mut rest) = (Vec::new(), Vec::new());
            for head in 0..self.heads {
                for token in 0..self.tokens() {
                    let weights = self.weights(layer, head, token);
                    all.extend(weights.iter().flat_map(|&weight| fixed(f64::from(weight))));
                    rest.extend(fixed(null_of(weights)));
                }
            }
            weights.push(base64(&all));
            nulls.push(base64(&rest));
        }
        let summaries: Vec<_> = (0..self.layers())
            .map(|layer| {
                let summary = self.summary(layer, None);
                json!({
                    "null": summary.null, "entropy": summary.entropy, "distance": summary.distance,
                    "most_read": &summary.most_read[..summary.most_read.len().min(3)],
                })
            })
            .collect();
        let data = json!({
            "pieces": self.pieces, "boundaries": self.boundaries, "heads": self.heads, "layers": self.layers(),
            "summaries": summaries, "nulls": nulls, "weights": weights,
        });
        // Escape `<`, so that no text can end the script that contains it.
        let data = data.to_string().replace('<', "\\u003c");
        MAP.replacen("{{data}}", &data, 1)
    }
}

/// The map. Its data are, for each layer, [heads, tokens, anchors before the token] as 16-bit fractions of 1,
/// little-endian, in base64; and likewise for the null, [heads, tokens].
const MAP: &str = include_str!("routing.html");

/// The map's part of a page's style.
pub(super) const STYLE: &str = include_str!("routing.css");

/// The weight that the anchors leave to the null. Without a null that is zero, except where no anchor is seen.
fn null_of(weights: &[f32]) -> f64 {
    (1.0 - weights.iter().map(|&weight| f64::from(weight)).sum::<f64>()).clamp(0.0, 1.0)
}

/// −p log2 p.
fn surprise(p: f64) -> f64 {
    if p > 0.0 { -p * p.log2() } else { 0.0 }
}

/// A fraction of 1 in 16 bits.
fn fixed(share: f64) -> [u8; 2] {
    ((share * 65535.0).round() as u16).to_le_bytes()
}

/// Bytes in base64.
pub fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for group in bytes.chunks(3) {
        let bits = (0..3).fold(0u32, |bits, i| bits << 8 | u32::from(group.get(i).copied().unwrap_or(0)));
        for digit in 0..4 {
            let six = (bits >> (18 - 6 * digit)) & 63;
            text.push(if digit <= group.len() { DIGITS[six as usize] as char } else { '=' });
        }
    }
    text
}
