//! Memory Caching on Gated DeltaNet, in its gated form (arXiv 2602.24281): the states at the ends of segments stay
//! readable, and every token weights them against the current state.
//!
//! ```text
//! segments of C tokens; the state S continues across their ends; A_i is S at the end of segment i
//! u_t = W_u x_t;  c_i = mean of W_c x_j over segment i, for the open segment s over its tokens so far (per value head)
//! g_t = softmax([u_t·c_1 … u_t·c_s])
//! o_t = g_ts S_tᵀ q_t + Σ_{i<s} g_ti A_iᵀ q_t                    then norm, gate and W_o as for Gated DeltaNet
//! ```
//! With top-K a token reads the K best closed segments, and always the open one. In terms of MARCH, closed segments are
//! anchors with keys c_i, and the open segment replaces the null: its score is the null score, and the remainder of the
//! softmax, g_ts, weights the current state.
//!
//! The running mean is itself a gated delta rule with one-dimensional keys and no decay, in which the i-th token of a
//! segment (from 1) is written with strength 1/i: m ← m + (W_c x − m) / i. It is therefore just as exact across call
//! boundaries, and its states at segment boundaries are the keys c_i.
//!
//! Memory: that of Gated DeltaNet and of the running mean, and for each closed segment its state, its key and the
//! convolution tails.

use march_engine::Tensor;
use march_engine::ops::gated_delta::CHUNK_TOKENS;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::anchored::{self, AnchoredMemory, NewAnchors, Reader, Routing, UNIT};
use super::gated_delta_net::{GatedDeltaNet, GatedDeltaNetConfig, Recurrence, RecurrenceOutput, Rule};
use super::{Contradiction, Layer, Mixer, MixerSpec, Streams};
use crate::anchors::{Anchor, Policy, Storage};
use crate::config::{Document, keys_of};
use crate::error::Result;
use crate::memory::{LayerReader, LayerWriter, Ledger, Memory};
use crate::model::{Builder, Pass, Projection, Row};

/// Configuration of Memory Caching.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MemoryCachingConfig {
    /// The recurrence.
    #[serde(flatten)]
    pub base: GatedDeltaNetConfig,
    /// The segments, which Memory Caching adds.
    #[serde(flatten)]
    pub segments: SegmentConfig,
}

/// Keys that Memory Caching adds to Gated DeltaNet.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SegmentConfig {
    /// C, the number of text tokens in a segment.
    pub anchor_interval: usize,
    /// The width of u and c.
    pub routing_dim: usize,
    /// K, the number of closed segments that a token reads; `None` reads all visible segments.
    #[serde(default)]
    pub routing_top_k: Option<usize>,
}

impl MixerSpec for MemoryCachingConfig {
    const MODEL_TYPE: &'static str = "memory_caching";

    fn read(document: &mut Document) -> Result<Self> {
        Ok(Self { base: document.keys()?, segments: document.keys()? })
    }

    fn write(&self) -> Map<String, Value> {
        let mut keys = self.base.write();
        keys.extend(keys_of(&self.segments));
        keys
    }

    fn check(&self, hidden_size: usize) -> std::result::Result<(), Contradiction> {
        let SegmentConfig { anchor_interval, routing_dim, routing_top_k } = self.segments;
        for (key, value) in [("anchor_interval", anchor_interval), ("routing_dim", routing_dim)] {
            if value == 0 {
                return Err((key, "is 0; it must be at least 1".into()));
            }
        }
        if routing_top_k == Some(0) {
            return Err((
                "routing_top_k",
                "is 0; it must be at least 1, or not be set for dense reading".into(),
            ));
        }
        self.base.check(hidden_size)
    }

    fn policy(&self) -> Option<Policy> {
        let SegmentConfig { anchor_interval, routing_top_k, .. } = self.segments;
        Some(Policy { interval: Some(anchor_interval), top_k: routing_top_k, ..Policy::default() })
    }

    fn build(&self, hidden_size: usize, layer: Layer, builder: &mut Builder<'_>) -> Box<dyn Mixer> {
        let base = GatedDeltaNet::new(&self.base, hidden_size, builder);
        let width = base.value_heads * self.segments.routing_dim;
        Box::new(MemoryCaching {
            layer,
            routing_dim: self.segments.routing_dim,
            segment_query_proj: builder.linear("segment_query_proj", width, hidden_size),
            segment_key_proj: builder.linear("segment_key_proj", width, hidden_size),
            base,
        })
    }
}

pub(super) struct MemoryCaching {
    pub base: GatedDeltaNet,
    layer: Layer,
    routing_dim: usize,
    /// W_u.
    segment_query_proj: Projection,
    /// W_c.
    segment_key_proj: Projection,
}

/// What Memory Caching keeps of a text.
#[derive(Clone, Default)]
pub struct SegmentMemory {
    /// The recurrence and the closed segments.
    pub(super) anchored: AnchoredMemory,
    /// The running mean of the open segment.
    mean: Recurrence,
}

/// Prefix of the names of the running mean's tensors in a file.
const MEAN: &str = "mean_";

impl Memory for SegmentMemory {
    fn fork(&self) -> Box<dyn Memory> {
        Box::new(self.clone())
    }

    fn tensors(&self) -> Vec<&Tensor> {
        self.anchored.tensors().into_iter().chain(self.mean.tensors()).collect()
    }

    fn rollback_bytes(&self) -> usize {
        self.anchored.rollback_bytes()
    }

    fn anchors(&self) -> (usize, usize) {
        self.anchored.anchors()
    }

    fn save<'a>(&'a self, file: &mut LayerWriter<'a>) -> Result<()> {
        self.mean.save(MEAN, file);
        self.anchored.save(file)
    }

    fn load(&mut self, file: &LayerReader<'_>) -> Result<()> {
        self.mean.load(MEAN, file)?;
        self.anchored.load(file)
    }

    fn can_roll_back(&self) -> bool {
        true
    }

    fn rollback(&mut self, anchor: Anchor, place: usize) -> Result<Storage> {
        let storage = self.anchored.rollback(anchor, place)?;
        // At a boundary, the running mean equals the key of the segment that ends there.
        self.mean = match self.anchored.last_key()? {
            Some((key, heads)) => {
                let width = key.shape().last().copied().unwrap_or(0);
                Recurrence::at(key.reshape(&[1, heads, 1, width / heads.max(1)])?)
            }
            None => Recurrence::default(),
        };
        Ok(storage)
    }

    fn ledger(&self) -> Option<&Ledger> {
        self.anchored.ledger()
    }

    fn ledger_mut(&mut self) -> Option<&mut Ledger> {
        self.anchored.ledger_mut()
    }

    fn state(&self) -> Option<&Tensor> {
        self.anchored.state()
    }
}

/// A retention input for no decay: its softplus is 0, whatever the bias.
const KEEP_ALL: f64 = -1e9;
/// A write input for strength 1: its sigmoid is 1.
const WRITE_ALL: f64 = 1e4;

impl MemoryCaching {
    /// The mean of W_c x over the segment so far, for each token [B, n, value_heads·d_r] and at each boundary [N,
    /// value_heads, 1, d_r].
    fn running_mean(
        &self,
        keys: &Tensor,
        row: Row<'_>,
        memory: Option<&mut Recurrence>,
    ) -> Result<RecurrenceOutput> {
        let (device, heads) = (keys.device(), self.base.value_heads);
        let &[batch, tokens, _] = keys.shape() else { unreachable!("[B, n, width]") };
        let gates = [batch, tokens, heads];
        let (unit, kept) = (Tensor::full(&gates, UNIT, device)?, Tensor::full(&gates, KEEP_ALL, device)?);
        // σ(−ln(i − 1)) = 1/i for the i-th token of its segment.
        let mut write = Vec::with_capacity(batch * tokens * heads);
        for b in 0..batch {
            let boundaries = row.anchors.boundaries.get(b).map_or(&[][..], Vec::as_slice);
            let mut next = boundaries.iter().peekable();
            let mut before = row.anchors.since;
            for t in 0..tokens {
                if next.next_if(|&&boundary| boundary == t).is_some() {
                    before = 0;
                }
                let strength = if before == 0 { WRITE_ALL } else { -(before as f64).ln() };
                write.extend(std::iter::repeat_n(strength, heads));
                before += 1;
            }
        }
        let write = Tensor::from_f64(&write, &gates, device)?;
        let zero = &Tensor::full(&[heads], 0.0, device)?;
        let (key_heads, value_heads, allow_neg_eigval) = (heads, heads, false);
        let rule = Rule { key_heads, value_heads, allow_neg_eigval, a_log: zero, dt_bias: zero };
        rule.run([&unit, &unit, keys, &kept, &write], row, memory)
    }

    /// Size of the running mean after `tokens` tokens, in bytes.
    fn mean_bytes(&self, tokens: usize) -> usize {
        let heads = self.base.value_heads;
        let state = if tokens < CHUNK_TOKENS { 0 } else { heads * self.routing_dim };
        let open = tokens % CHUNK_TOKENS * heads * (self.routing_dim + 3);
        (state + open) * size_of::<f32>()
    }
}

impl Mixer for MemoryCaching {
    fn memory(&self) -> Box<dyn Memory> {
        Box::new(SegmentMemory::default())
    }

    fn output(&self) -> Projection {
        self.base.o_proj
    }

    fn forward(&self, pass: &Pass, input: &Streams, memory: &mut [&mut dyn Memory]) -> Result<Streams> {
        let (base, heads) = (&self.base, self.base.value_heads);
        // q, k, v, α and β before their activations; u_t = W_u x_t, W_c x_t; the gate.
        let layers = (base.projections(), [self.segment_query_proj, self.segment_key_proj], base.g_proj);
        let (recurrence, routing, gate) = pass.project(&input.text, layers)?;
        let reader =
            Reader { base, layer: self.layer, routing_scale: 1.0, equal_scores: false, want_mass: true };
        let inputs = (recurrence, routing);
        let mixed = pass.each_row(inputs, memory, |(recurrence, [queries, keys]), row, memory| {
            let memory: Option<&mut SegmentMemory> = memory;
            let (mut anchored, mean) = memory.map(|memory| (&mut memory.anchored, &mut memory.mean)).unzip();
            // S_tᵀ q_t, and A_i = S at the end of each segment.
            let (query, out) = anchored::recur(base, pass, recurrence, row, anchored.as_deref_mut())?;
            let mean = self.running_mean(&keys, row, mean)?;
            // u_t · c_s, the open segment's score, [B, n, value_heads].
            let &[batch, tokens, _] = queries.shape() else { unreachable!("[B, n, width]") };
            let by_head = |width| [batch, tokens, heads, width];
            let open_score = queries.mul(&mean.readout)?.reshape(&by_head(self.routing_dim))?.sum(3)?;
            let closed = mean.boundary_states.shape()[0];
            let keys = mean.boundary_states.reshape(&[closed, heads * self.routing_dim])?;
            let new = NewAnchors { states: &out.boundary_states, keys: Some(&keys) };
            let routing = Routing { query: &query, routing_query: &queries, null_score: Some(&open_score) };
            let Some(history) = reader.historical_readout(pass, routing, new, row, anchored)? else {
                return Ok(out.readout);
            };
            // g_ts = 1 − Σ_{i<s} g_ti is the weight of the current state.
            let Some(mass) = history.mass else { unreachable!("it was asked for") };
            let closed = mass.reshape(&by_head(1))?;
            let current = out.readout.reshape(&by_head(base.value_dim))?;
            let current = (&current - &(&current * &closed)?)?;
            Ok((&current.reshape(&[batch, tokens, heads * base.value_dim])? + &history.readout)?)
        })?;
        base.gated(pass, &[&mixed.readout], &[gate.as_ref()])
    }

    /// Operations of the recurrence, of the running mean, and of reading closed segments.
    fn work(&self, tokens: usize, policy: &Policy) -> f64 {
        let mean = 6.0 * (self.base.value_heads * self.routing_dim * tokens) as f64;
        let read = anchored::read_work(&self.base, self.routing_dim, tokens, policy);
        self.base.recurrence_work(tokens) + mean + read
    }

    fn memory_bytes(&self, tokens: usize, policy: &Policy) -> usize {
        let kept = anchored::memory_bytes(&self.base, self.layer, self.routing_dim, tokens, policy);
        kept + self.mean_bytes(tokens)
    }

    fn rollback_bytes(&self, tokens: usize, policy: &Policy) -> usize {
        anchored::rollback_bytes(&self.base, self.layer, self.routing_dim, tokens, policy)
    }

    fn anchor_bytes(&self, storage: Storage) -> usize {
        anchored::anchor_bytes(&self.base, self.routing_dim, storage)
    }
}
