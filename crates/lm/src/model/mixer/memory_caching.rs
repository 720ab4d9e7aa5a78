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

use march_engine::{Engine, Var};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::anchored::{self, AnchoredMemory, Reader, Routing, UNIT};
use super::gated_delta_net::{GatedDeltaNet, GatedDeltaNetConfig, Recurrence, RecurrenceOutput, Rule};
use super::{AnyMixer, Contradiction, FirstInput, Layer, Mixer, MixerSpec, Streams};
use crate::anchors::{Anchor, Policy, Storage, Timeline};
use crate::config::{Document, keys_of};
use crate::error::Result;
use crate::memory::{LayerReader, LayerWriter, Ledger, Memory};
use crate::model::{Builder, MixerOutput, Parameter, Pass, Row};

/// Configuration of Memory Caching.
#[derive(Clone, Debug, PartialEq)]
pub struct MemoryCachingConfig {
    /// The recurrence.
    pub base: GatedDeltaNetConfig,
    /// The segments, which Memory Caching adds.
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

    fn build<E: Engine>(
        &self,
        hidden_size: usize,
        layer: Layer,
        builder: &mut Builder<'_>,
    ) -> Box<dyn AnyMixer<E>> {
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

struct MemoryCaching {
    base: GatedDeltaNet,
    layer: Layer,
    routing_dim: usize,
    /// W_u.
    segment_query_proj: Parameter,
    /// W_c.
    segment_key_proj: Parameter,
}

/// What Memory Caching keeps of a text.
pub struct SegmentMemory<E: Engine> {
    /// The recurrence and the closed segments.
    anchored: AnchoredMemory<E>,
    /// The running mean of the open segment.
    mean: Recurrence<E>,
}

/// Prefix of the names of the running mean's tensors in a file.
const MEAN: &str = "mean_";

impl<E: Engine> Memory<E> for SegmentMemory<E> {
    fn fork(&self) -> Box<dyn Memory<E>> {
        Box::new(Self { anchored: self.anchored.clone(), mean: self.mean.clone() })
    }

    fn bytes(&self, engine: &E) -> usize {
        self.anchored.bytes(engine) + self.mean.bytes(engine)
    }

    fn rollback_bytes(&self, engine: &E) -> usize {
        self.anchored.rollback_bytes(engine)
    }

    fn anchors(&self, engine: &E) -> (usize, usize) {
        self.anchored.anchors(engine)
    }

    fn save<'a>(&'a self, engine: &E, file: &mut LayerWriter<'a, E>) -> Result<()> {
        self.mean.save(engine, MEAN, file);
        self.anchored.save(engine, file)
    }

    fn load(&mut self, engine: &E, file: &LayerReader<'_>) -> Result<()> {
        self.mean.load(engine, MEAN, file)?;
        self.anchored.load(engine, file)
    }

    fn rollback(&mut self, engine: &E, anchor: Anchor, place: usize) -> Result<Storage> {
        let storage = self.anchored.rollback(engine, anchor, place)?;
        // At a boundary, the running mean equals the key of the segment that ends there.
        self.mean = match self.anchored.last_key(engine)? {
            Some((key, heads)) => {
                let width = engine.shape(&key).last().copied().unwrap_or(0);
                Recurrence::at(engine.reshape(&key, &[1, heads, 1, width / heads.max(1)])?)
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

    fn state(&self) -> Option<&E::Tensor> {
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
    fn running_mean<E: Engine>(
        &self,
        pass: &Pass<'_, '_, E>,
        keys: &Var<E::Tensor>,
        row: Row<'_>,
        memory: Option<&mut Recurrence<E>>,
    ) -> Result<RecurrenceOutput<E::Tensor>> {
        let (engine, heads) = (pass.engine(), self.base.value_heads);
        let &[batch, tokens, _] = engine.shape(keys.value()) else { unreachable!("[B, n, width]") };
        let constant =
            |value| Ok::<_, crate::Error>(pass.tape.constant(engine.full(&[batch, tokens, heads], value)?));
        let (unit, kept) = (constant(UNIT)?, constant(KEEP_ALL)?);
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
        let write = pass.tape.constant(engine.from_f64(&write, &[batch, tokens, heads])?);
        let zero = pass.tape.constant(engine.full(&[heads], 0.0)?);
        let rule = Rule {
            key_heads: heads,
            value_heads: heads,
            allow_neg_eigval: false,
            a_log: &zero,
            dt_bias: &zero,
        };
        let inputs = [&unit, &unit, keys, &kept, &write];
        rule.run(pass, inputs, row, &row.anchors.boundaries, &row.anchors.recent, memory)
    }

    /// Size of the running mean after `tokens` tokens, in bytes.
    fn mean_bytes<E: Engine>(&self, tokens: usize) -> usize {
        let heads = self.base.value_heads;
        let state = if tokens < E::CHUNK_TOKENS { 0 } else { heads * self.routing_dim };
        let open = tokens % E::CHUNK_TOKENS * heads * (self.routing_dim + 3);
        (state + open) * size_of::<f32>()
    }
}

impl<E: Engine> Mixer<E> for MemoryCaching {
    type Memory = SegmentMemory<E>;

    fn memory(&self) -> SegmentMemory<E> {
        SegmentMemory { anchored: AnchoredMemory::default(), mean: Recurrence::default() }
    }

    fn output(&self) -> Parameter {
        self.base.o_proj
    }

    fn forward(
        &self,
        pass: &Pass<'_, '_, E>,
        input: &Streams<E::Tensor>,
        memory: &mut [&mut SegmentMemory<E>],
    ) -> Result<Streams<E::Tensor>> {
        let (base, heads) = (&self.base, self.base.value_heads);
        let [q, k, v, a, b] = base.projections();
        let weights = [q, k, v, a, b, self.segment_query_proj, self.segment_key_proj, base.g_proj];
        let [q, k, v, a, b, queries, keys, gate] = pass.linear_each(&input.text, weights)?;
        let reader =
            Reader { base, layer: self.layer, routing_scale: 1.0, equal_scores: false, want_mass: true };
        let inputs = [&q, &k, &v, &a, &b, &queries, &keys];
        let mixed =
            pass.each_row(inputs, memory, |pass, [q, k, v, a, b, queries, keys], row, mut memory| {
                let tape = pass.tape;
                let boundaries = row.anchors.boundaries.first().map_or(&[][..], Vec::as_slice);
                let base_memory = memory.as_deref_mut().map(|memory| &mut memory.anchored.base);
                let (qkv, tails) = base.convolve(pass, [q, k, v], boundaries, base_memory)?;
                let [q, k, v] = qkv.each_ref();
                let recurrence = memory.as_deref_mut().map(|memory| &mut memory.anchored.base.recurrence);
                let out = base.recur(pass, [q, k, v, a, b], row, recurrence)?;
                let mean = memory.as_deref_mut().map(|memory| &mut memory.mean);
                let mean = self.running_mean(pass, keys, row, mean)?;
                // u_t · c_s, the open segment's score, [B, n, value_heads].
                let shape = pass.engine().shape(queries.value()).to_vec();
                let by_head = [shape[0], shape[1], heads, self.routing_dim];
                let products = tape.reshape(&tape.mul(queries, &mean.readout)?, &by_head)?;
                let open_score = tape.sum(&products, 3)?;
                let closed = pass.engine().shape(mean.boundary_states.value())[0];
                let keys = tape.reshape(&mean.boundary_states, &[closed, heads * self.routing_dim])?;
                let keys = Some(&keys).filter(|_| closed > 0);
                let mut anchors = memory.map(|memory| &mut memory.anchored.anchors);
                if let Some(anchors) = &mut anchors {
                    anchors.push_tails(pass.engine(), tails)?;
                }
                let routing = Routing { query: q, routing_query: queries, null_score: Some(&open_score) };
                let history =
                    reader.historical_readout(pass, routing, &out.boundary_states, keys, row, anchors)?;
                let Some(history) = history else {
                    return Ok(MixerOutput { readout: out.readout, states: None });
                };
                // g_ts = 1 − Σ_{i<s} g_ti is the weight of the current state.
                let by_head = |width| [shape[0], shape[1], heads, width];
                let closed = match history.mass {
                    Some(mass) => tape.reshape(&mass, &by_head(1))?,
                    None => unreachable!("it was asked for"),
                };
                let current = tape.reshape(&out.readout, &by_head(base.value_dim))?;
                let current = tape.sub(&current, &tape.mul(&current, &closed)?)?;
                let current = tape.reshape(&current, &[shape[0], shape[1], heads * base.value_dim])?;
                Ok(MixerOutput { readout: tape.add(&current, &history.readout)?, states: None })
            })?;
        base.gated(pass, &[&mixed.readout], &[&gate])
    }

    /// Operations of the recurrence, of the running mean, and of reading closed segments.
    fn work(&self, tokens: usize, policy: &Policy) -> f64 {
        let mean = 6.0 * (self.base.value_heads * self.routing_dim * tokens) as f64;
        let read = anchored::read_work(&self.base, self.routing_dim, tokens, policy);
        self.base.recurrence_work(tokens) + mean + read
    }

    fn memory_bytes(&self, tokens: usize, policy: &Policy) -> usize {
        let kept = anchored::memory_bytes::<E>(&self.base, self.layer, self.routing_dim, tokens, policy);
        kept + self.mean_bytes::<E>(tokens)
    }

    fn rollback_bytes(&self, tokens: usize, policy: &Policy) -> usize {
        anchored::rollback_bytes(&self.base, self.layer, self.routing_dim, tokens, policy)
    }

    fn anchor_bytes(&self, storage: Storage) -> usize {
        anchored::anchor_bytes(&self.base, self.routing_dim, storage)
    }

    fn place(
        &self,
        pass: &Pass<'_, '_, E>,
        tokens: usize,
        input: FirstInput<'_, E::Tensor>,
        policy: &Policy,
        timeline: &mut Timeline,
        memory: &mut SegmentMemory<E>,
    ) -> Result<Vec<usize>> {
        anchored::place(&self.base, pass, tokens, input, policy, timeline, &mut memory.anchored)
    }
}
