//! Common parts of mixers with anchors: the kept anchors, and reading them.
//!
//! An anchor of a layer consists of the recurrence's state at a boundary, a routing key, and the last inputs of the
//! convolutions (tails), from which the text can continue there. Later tokens read it as
//!
//! ```text
//! π_t = softmax([ρ_t·κ_m …, n_t])   over the anchors that token t sees and the null;   Σ_m π_tm A_mᵀ q_t
//! ```
//! where the definitions of ρ, κ and the null score depend on the mixer.

use std::sync::{Arc, PoisonError};

use march_engine::Tensor;
use march_engine::ops::anchor_read::{AnchorRead, AnchorReadOptions, ReadPlan};
use march_engine::ops::gated_delta::CHUNK_TOKENS;

use super::Layer;
use super::adaptive::PlacementState;
use super::gated_delta_net::{DeltaMemory, GatedDeltaNet, Recurrence, RecurrenceOutput, TAILS};
use crate::anchors::{Anchor, AnchorPlan, Placement, Policy, Storage, frobenius};
use crate::error::{Error, Result};
use crate::memory::{DECAY, LayerReader, LayerWriter, Ledger, LedgerEntry, Memory, STATES};
use crate::model::{Pass, Row};

/// What a mixer with anchors keeps of a text.
#[derive(Clone, Default)]
pub struct AnchoredMemory {
    pub(super) base: DeltaMemory,
    /// The kept anchors.
    anchors: Anchors,
    /// The state of adaptive placement, in the first layer.
    pub(super) placement: PlacementState,
}

/// Name of the anchors' routing keys in a file.
const ROUTING_KEYS: &str = "routing_keys";

impl Memory for AnchoredMemory {
    fn fork(&self) -> Box<dyn Memory> {
        Box::new(self.clone())
    }

    fn tensors(&self) -> Vec<&Tensor> {
        let before = self.base.tensors().into_iter().chain(self.placement.tensors());
        before.chain(self.anchors.tensors()).collect()
    }

    fn save<'a>(&'a self, file: &mut LayerWriter<'a>) -> Result<()> {
        self.base.save(file)?;
        self.placement.save(file);
        let Anchors { states, routing_keys, tails, .. } = &self.anchors;
        file.anchor_states(STATES, states)?;
        if let Some(keys) = routing_keys {
            file.anchor_rows(ROUTING_KEYS, keys);
        }
        for (name, tails) in TAILS.into_iter().zip(tails) {
            file.anchor_states(name, tails)?;
        }
        Ok(())
    }

    fn load(&mut self, file: &LayerReader<'_>) -> Result<()> {
        self.base.load(file)?;
        self.placement = PlacementState::load(file)?;
        self.anchors.ledger = file.ledger().clone();
        if file.anchors() > 0 {
            self.anchors.routing_keys = Some(file.anchor_rows(ROUTING_KEYS)?);
            self.anchors.states = Arc::new(file.anchor_states(STATES)?);
            let [q, k, v] = TAILS.map(|name| file.anchor_states(name));
            self.anchors.tails = [q?, k?, v?];
        }
        Ok(())
    }

    fn can_roll_back(&self) -> bool {
        true
    }

    fn rollback(&mut self, anchor: Anchor, place: usize) -> Result<Storage> {
        let ledger = &self.anchors.ledger;
        // A layer that decides by itself which anchors to keep has its own numbers for them.
        let own = ledger.number(anchor.ordinal).unwrap_or(usize::MAX);
        let place = if ledger.entries.is_empty() { place } else { own };
        let tails = self.anchors.tails.each_ref().map(|list| list.get(place));
        let (Some(state), [Some(q), Some(k), Some(v)]) = (self.anchors.states.get(place), tails) else {
            let message = format!("anchor {} is in the timeline, but missing in a layer", anchor.ordinal);
            return Err(Error::Request(message));
        };
        let restore = |tensor: &Tensor, skip: usize| -> Result<Tensor> {
            let stored = tensor.stored()?;
            Ok(Tensor::from_slice(&stored.to_f32()?, &stored.shape()[skip..], tensor.device())?)
        };
        let storage = state.stored()?.storage();
        let state = restore(state, 0)?;
        self.base.tails = Some([restore(q, 1)?, restore(k, 1)?, restore(v, 1)?]);
        self.anchors.keep(&(0..=place).collect::<Vec<_>>())?;
        self.anchors.ledger.entries.truncate(place + 1);
        self.anchors.ledger.evictions.retain(|(at, _)| *at <= anchor.ordinal);
        self.placement.rollback(&state);
        self.base.recurrence = Recurrence::at(state);
        Ok(storage)
    }

    fn rollback_bytes(&self) -> usize {
        self.anchors.tails.iter().flatten().map(Tensor::bytes).sum()
    }

    fn anchors(&self) -> (usize, usize) {
        (self.anchors.len(), self.anchors.bytes())
    }

    fn ledger(&self) -> Option<&Ledger> {
        Some(&self.anchors.ledger)
    }

    fn ledger_mut(&mut self) -> Option<&mut Ledger> {
        Some(&mut self.anchors.ledger)
    }

    fn permute_keys(&mut self, order: &mut dyn FnMut(usize) -> Vec<u32>) -> Result<()> {
        if let Some(keys) = &self.anchors.routing_keys {
            let order = order(self.anchors.len());
            self.anchors.routing_keys = Some(keys.embedding(&order, &[order.len()])?);
        }
        Ok(())
    }

    fn state(&self) -> Option<&Tensor> {
        self.base.state()
    }
}

impl AnchoredMemory {
    /// Adds the convolution tails at a row's boundaries, given the inputs of the convolutions. It comes before the
    /// convolutions of the row, which replace the tails that it starts from.
    fn push_tails(
        &mut self,
        base: &GatedDeltaNet,
        pass: &Pass,
        inputs: [&Tensor; 3],
        row: Row<'_>,
    ) -> Result<()> {
        for tails in base.tails_at_boundaries(pass, inputs, row, &self.base)? {
            for (list, tail) in self.anchors.tails.iter_mut().zip(tails) {
                let shape: Vec<usize> = [1].iter().chain(tail.shape()).copied().collect();
                list.push(tail.reshape(&shape)?.store(Storage::F32)?);
            }
        }
        Ok(())
    }

    /// The newest anchor's routing key, [1, value_heads·d_r], and the number of value heads.
    pub fn last_key(&self) -> Result<Option<(Tensor, usize)>> {
        let (Some(keys), Some(state)) = (&self.anchors.routing_keys, self.state()) else { return Ok(None) };
        let (count, heads) = (keys.shape()[0], state.shape()[1]);
        Ok(Some((keys.slice(0, count - 1..count)?, heads)))
    }
}

/// The kept anchors of one layer, oldest first.
#[derive(Clone, Default)]
struct Anchors {
    /// One entry per anchor, [1, value_heads, d_k, d_v], in storage precision.
    states: Arc<Vec<Tensor>>,
    /// The routing keys, [anchors, value_heads·d_r].
    routing_keys: Option<Tensor>,
    /// The last inputs of the convolutions of q, k and v before each anchor, each [1, 1, conv_size − 1, channels], in
    /// f32. They stay in the file unless a rollback needs them.
    tails: [Vec<Tensor>; 3],
    /// This layer's bookkeeping of the anchors, if it decides by itself which to keep; otherwise empty.
    ledger: Ledger,
}

impl Anchors {
    /// Adds anchors with states [N, value_heads, d_k, d_v] and routing keys [N, value_heads·d_r].
    fn push(&mut self, states: &Tensor, keys: &Tensor, storage: Storage) -> Result<()> {
        let list = Arc::make_mut(&mut self.states);
        for n in 0..states.shape()[0] {
            list.push(states.slice(0, n..n + 1)?.store(storage)?);
        }
        match &mut self.routing_keys {
            Some(all) => all.append(keys, 0)?,
            None => self.routing_keys = Some(keys.clone()),
        }
        Ok(())
    }

    /// Drops all anchors except those with the given numbers, which must be ascending.
    fn keep(&mut self, numbers: &[usize]) -> Result<()> {
        if numbers.len() == self.len() {
            return Ok(());
        }
        let kept = |list: &[Tensor]| numbers.iter().filter_map(|&n| list.get(n).cloned()).collect();
        self.states = Arc::new(kept(&self.states));
        self.tails = self.tails.each_ref().map(|list| kept(list));
        if let Some(keys) = &self.routing_keys {
            let ids: Vec<u32> = numbers.iter().map(|&n| n as u32).collect();
            self.routing_keys = Some(keys.embedding(&ids, &[ids.len()])?);
        }
        Ok(())
    }

    /// The number of kept anchors.
    pub fn len(&self) -> usize {
        self.states.len()
    }

    /// Size of states, keys and tails, in bytes.
    pub fn bytes(&self) -> usize {
        self.tensors().map(Tensor::bytes).sum()
    }

    /// States, keys and tails.
    fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        self.states.iter().chain(self.tails.iter().flatten()).chain(&self.routing_keys)
    }

    /// Drops the anchors that the plan does not keep; with a budget, the layer decides by itself.
    fn retain(&mut self, plan: &AnchorPlan, layers: usize) -> Result<()> {
        match plan.budget {
            None if plan.new.is_empty() => Ok(()),
            None => self.keep(&plan.keep),
            Some(bytes) => {
                let settle = |&anchor: &Anchor| self.settle(anchor, bytes / layers, plan.record);
                plan.placed.iter().try_for_each(settle)
            }
        }
    }

    /// Adds the anchor that was pushed last to the ledger, and drops others until the rest fits into `budget` bytes.
    fn settle(&mut self, anchor: Anchor, budget: usize, record: bool) -> Result<()> {
        for entry in &mut self.ledger.entries {
            entry.mass *= DECAY;
            entry.exposure *= DECAY;
        }
        let new = self.len() - 1;
        let norm = frobenius(&self.numbers(new)?, None);
        let distance = self.distance(new.checked_sub(1), new)?;
        self.ledger.entries.push(LedgerEntry { anchor, mass: 0.0, exposure: 0.0, norm, distance });
        let room = budget / (self.bytes() / self.len()).max(1);
        let mut dropped = Vec::new();
        while self.len() > room.max(1) {
            let Some(m) = self.ledger.cheapest() else { break };
            let kept: Vec<usize> = (0..self.len()).filter(|&n| n != m).collect();
            dropped.push(self.ledger.entries[m].anchor.ordinal);
            self.ledger.entries[m + 1].distance = self.distance(m.checked_sub(1), m + 1)?;
            self.ledger.entries.remove(m);
            self.keep(&kept)?;
        }
        if record && !dropped.is_empty() {
            dropped.sort_unstable();
            self.ledger.evictions.push((anchor.ordinal, dropped));
        }
        Ok(())
    }

    /// ‖A_a − A_b‖; infinite if there is no a.
    fn distance(&self, a: Option<usize>, b: usize) -> Result<f64> {
        let Some(a) = a else { return Ok(f64::INFINITY) };
        Ok(frobenius(&self.numbers(a)?, Some(&self.numbers(b)?)))
    }

    /// The numbers of a state, as stored.
    fn numbers(&self, n: usize) -> Result<Vec<f32>> {
        Ok(self.states[n].stored()?.to_f32()?)
    }
}

/// Convolutions and recurrence of a row, given the inputs of the convolutions and the gates: the queries, S_tᵀ q_t, and
/// the states at the row's boundaries. With a memory, the convolution tails at the boundaries are added to it.
pub(super) fn recur(
    base: &GatedDeltaNet,
    pass: &Pass,
    [q, k, v, a, b]: [Tensor; 5],
    row: Row<'_>,
    mut memory: Option<&mut AnchoredMemory>,
) -> Result<(Tensor, RecurrenceOutput)> {
    if let Some(memory) = &mut memory {
        memory.push_tails(base, pass, [&q, &k, &v], row)?;
    }
    let mut memory = memory.map(|memory| &mut memory.base);
    let [q, k, v] = base.convolve(pass, [&q, &k, &v], memory.as_deref_mut())?;
    let recurrence = memory.map(|memory| &mut memory.recurrence);
    let out = base.recur(pass, [&q, &k, &v, &a, &b], row, recurrence)?;
    Ok((q, out))
}

/// How a mixer reads its anchors.
pub(super) struct Reader<'a> {
    pub base: &'a GatedDeltaNet,
    pub layer: Layer,
    pub routing_scale: f64,
    /// Whether all scores of this layer are equal, so that top-K takes the newest.
    pub equal_scores: bool,
    /// Whether to compute each token's total weight on anchors as well as the readout.
    pub want_mass: bool,
}

/// The inputs that the tokens of a row route with: queries, routing queries ρ, null scores.
#[derive(Clone, Copy)]
pub(super) struct Routing<'a> {
    pub query: &'a Tensor,
    pub routing_query: &'a Tensor,
    pub null_score: Option<&'a Tensor>,
}

/// The anchors that a row adds: their states, and their routing keys if there are anchors in the call.
pub(super) struct NewAnchors<'a> {
    pub states: &'a Tensor,
    pub keys: Option<&'a Tensor>,
}

/// The result of reading anchors.
pub(super) struct History {
    /// Σ_m π_tm A_mᵀ q_t, [B, n, value_heads·d_v].
    pub readout: Tensor,
    /// Σ_m π_tm, [B, n, value_heads], if it was requested.
    pub mass: Option<Tensor>,
}

impl<'a> Routing<'a> {
    /// The reader's inputs, with the anchors' keys and states.
    fn read<A>(self, routing_keys: &'a Tensor, anchor_states: A) -> AnchorRead<&'a Tensor, A> {
        let Self { query, routing_query, null_score } = self;
        AnchorRead { query, routing_query, routing_keys, anchor_states, null_score }
    }
}

impl Reader<'_> {
    /// Reads the anchors that each token sees; `None` if no token sees any. With a memory, its anchors come before the
    /// new ones, and the new ones that the plan keeps are added to it.
    pub fn historical_readout(
        &self,
        pass: &Pass,
        routing: Routing<'_>,
        new: NewAnchors<'_>,
        row: Row<'_>,
        memory: Option<&mut AnchoredMemory>,
    ) -> Result<Option<History>> {
        let mut kept = memory.map(|memory| &mut memory.anchors);
        let new_keys = new.keys.filter(|keys| keys.shape()[0] > 0);
        // With a budget, the layer's own ledger determines which anchors are visible.
        let own = match (&kept, row.anchors.budget) {
            (Some(kept), Some(_)) => Some(row.anchors.seeing(kept.ledger.anchors(), row.tokens)),
            _ => None,
        };
        let row = Row { anchors: own.as_ref().unwrap_or(row.anchors), ..row };
        self.trace(pass, row, None);
        if let (Some(kept), Some(keys)) = (&mut kept, new_keys) {
            kept.push(new.states, keys, row.anchors.storage)?;
        }
        let (plan, top_k) = row.anchors.read_in(self.layer.index, self.equal_scores);
        let keys = kept.as_ref().map_or(new_keys.cloned(), |kept| kept.routing_keys.clone());
        let history = match keys.filter(|_| !plan.segments.is_empty()) {
            Some(keys) => {
                let options = self.options(top_k, plan);
                self.record(pass, routing, &keys, &options, row, kept.as_deref_mut())?;
                Some(self.read(routing, &keys, new.states, kept.as_deref(), &options)?)
            }
            None => None,
        };
        if let Some(kept) = kept {
            kept.retain(row.anchors, self.layer.anchored)?;
        }
        Ok(history)
    }

    fn options(&self, top_k: Option<usize>, plan: &Arc<ReadPlan>) -> AnchorReadOptions {
        AnchorReadOptions {
            key_heads: self.base.key_heads,
            value_heads: self.base.value_heads,
            top_k,
            routing_scale: self.routing_scale,
            plan: Arc::clone(plan),
        }
    }

    /// Notes the routing weights where they are wanted: in a trace, and in the ledger of a layer with a budget.
    fn record(
        &self,
        pass: &Pass,
        routing: Routing<'_>,
        keys: &Tensor,
        options: &AnchorReadOptions,
        row: Row<'_>,
        kept: Option<&mut Anchors>,
    ) -> Result<()> {
        let ledger = kept.filter(|_| row.anchors.budget.is_some()).map(|kept| &mut kept.ledger);
        if ledger.is_none() && pass.trace(row).is_none() {
            return Ok(());
        }
        let sizes = [self.base.key_dim, self.base.value_dim];
        let weights = routing.read(keys, sizes).routing_weights(options)?;
        if let Some(ledger) = ledger {
            ledger.note(&weights.to_f32(), self.base.value_heads, keys.shape()[0]);
        }
        self.trace(pass, row, Some(weights));
        Ok(())
    }

    /// Reads the stored states of kept anchors, or without a memory the new states themselves.
    fn read(
        &self,
        routing: Routing<'_>,
        keys: &Tensor,
        new: &Tensor,
        kept: Option<&Anchors>,
        options: &AnchorReadOptions,
    ) -> Result<History> {
        let mass = self.want_mass.then(|| self.mass(routing, keys, kept.is_some(), options)).transpose()?;
        let readout = match kept {
            Some(kept) => routing.read(keys, &kept.states).anchor_read_stored(options)?,
            None => routing.read(keys, new).anchor_read(options)?,
        };
        Ok(History { readout, mass })
    }

    /// Σ_m π_tm, computed by the reader itself with every anchor state and every query set to the number 1.
    fn mass(
        &self,
        routing: Routing<'_>,
        keys: &Tensor,
        stored: bool,
        options: &AnchorReadOptions,
    ) -> Result<Tensor> {
        let (heads, device, shape) = (self.base.value_heads, keys.device(), routing.query.shape());
        let query = &Tensor::full(&[shape[0], shape[1], heads], UNIT, device)?;
        let ones = |count| Tensor::full(&[count, heads, 1, 1], 1.0, device);
        let routing = Routing { query, ..routing };
        let options = AnchorReadOptions { key_heads: heads, ..options.clone() };
        let count = keys.shape()[0];
        Ok(match stored {
            true => {
                let states = Arc::new(vec![ones(1)?.store(Storage::F32)?; count]);
                routing.read(keys, &states).anchor_read_stored(&options)?
            }
            false => routing.read(keys, &ones(count)?).anchor_read(&options)?,
        })
    }

    /// Records routing weights if a trace was requested.
    fn trace(&self, pass: &Pass, row: Row<'_>, weights: Option<Tensor>) {
        if let Some(trace) = pass.trace(row) {
            let mut trace = trace.lock().unwrap_or_else(PoisonError::into_inner);
            trace.note(self.layer.index, self.base.value_heads, row, weights);
        }
    }
}

/// A query or key of one number that the engine normalises to exactly 1: next to its square, 2^20, the 1e-6 under the
/// root is lost in rounding.
pub(super) const UNIT: f64 = 1024.0;

/// The anchors' part of [`super::Mixer::work`]: a score for each visible anchor, and Aᵀq for each one that is read.
pub(super) fn read_work(base: &GatedDeltaNet, routing_dim: usize, tokens: usize, policy: &Policy) -> f64 {
    let plan = AnchorPlan::fresh(policy, 1, tokens);
    let (mut scored, mut read) = (0, 0);
    for segment in &plan.read.segments {
        let seen = segment.visible.len();
        scored += segment.len * seen;
        read += segment.len * policy.top_k.map_or(seen, |k| seen.min(k));
    }
    2.0 * base.value_heads as f64 * (base.key_dim * base.value_dim * read + routing_dim * scored) as f64
}

/// Size of an [`AnchoredMemory`] after `tokens` tokens, in bytes.
pub(super) fn memory_bytes(
    base: &GatedDeltaNet,
    layer: Layer,
    routing_dim: usize,
    tokens: usize,
    policy: &Policy,
) -> usize {
    let anchor = anchor_bytes(base, routing_dim, policy.storage);
    let placement = match policy.placement {
        Placement::Adaptive(min) if layer.first() => {
            usize::from(tokens >= CHUNK_TOKENS) + usize::from(tokens >= min)
        }
        _ => 0,
    };
    let kept = policy.kept_after(tokens, anchor * layer.anchored);
    base.live_bytes(tokens) + placement * base.state_bytes() + kept * anchor
}

/// The part of [`memory_bytes`] that only a rollback uses: the tails of the kept anchors.
pub(super) fn rollback_bytes(
    base: &GatedDeltaNet,
    layer: Layer,
    routing_dim: usize,
    tokens: usize,
    policy: &Policy,
) -> usize {
    let anchor = anchor_bytes(base, routing_dim, policy.storage);
    policy.kept_after(tokens, anchor * layer.anchored) * base.tail_bytes()
}

/// Size of one anchor in one layer, in bytes.
pub(super) fn anchor_bytes(base: &GatedDeltaNet, routing_dim: usize, storage: Storage) -> usize {
    let state = storage.bytes(base.value_heads * base.key_dim, base.value_dim);
    state + base.tail_bytes() + base.value_heads * routing_dim * size_of::<f32>()
}
