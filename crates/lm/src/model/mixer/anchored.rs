//! Common parts of mixers with anchors: the kept anchors, reading them, and adaptive placement.
//!
//! An anchor of a layer consists of the recurrence's state at a boundary, a routing key, and the last inputs of the
//! convolutions (tails), from which the text can continue there. Later tokens read it as
//!
//! ```text
//! π_t = softmax([ρ_t·κ_m …, n_t])   over the anchors that token t sees and the null;   Σ_m π_tm A_mᵀ q_t
//! ```
//! where the definitions of ρ, κ and the null score depend on the mixer.

use std::sync::Arc;

use march_engine::ops::anchor_read::{AnchorRead, AnchorReadOptions};
use march_engine::ops::embedding::Embedding;
use march_engine::{Engine, Var};

use super::gated_delta_net::{DeltaMemory, GatedDeltaNet, Recurrence, TAILS};
use super::{FirstInput, Layer};
use crate::anchors::{
    Anchor, AnchorPlan, Candidate, Placement, Policy, Storage, Timeline, frobenius, movement,
};
use crate::error::{Error, Result};
use crate::memory::{DECAY, LayerReader, LayerWriter, Ledger, LedgerEntry, Memory, STATES, tensor_bytes};
use crate::model::{Pass, Row};

/// What a mixer with anchors keeps of a text.
pub struct AnchoredMemory<E: Engine> {
    pub(super) base: DeltaMemory<E>,
    /// The kept anchors.
    pub(super) anchors: Anchors<E>,
    /// The state of adaptive placement, in the first layer.
    placement: PlacementState<E>,
}

impl<E: Engine> Clone for AnchoredMemory<E> {
    fn clone(&self) -> Self {
        Self { base: self.base.clone(), anchors: self.anchors.clone(), placement: self.placement.clone() }
    }
}

impl<E: Engine> Default for AnchoredMemory<E> {
    fn default() -> Self {
        Self {
            base: DeltaMemory::default(),
            anchors: Anchors::default(),
            placement: PlacementState::default(),
        }
    }
}

/// The first layer's state as adaptive placement follows it. It is cut at every candidate for an anchor, whereas the
/// mixer's own state is cut only at the anchors; the two differ by rounding.
struct PlacementState<E: Engine> {
    /// The state at the last point of the chunk grid; `None` stands for zero.
    state: Option<E::Tensor>,
    /// The state at the last anchor, from which movement is measured.
    anchor: Option<E::Tensor>,
}

impl<E: Engine> Clone for PlacementState<E> {
    fn clone(&self) -> Self {
        Self { state: self.state.clone(), anchor: self.anchor.clone() }
    }
}

impl<E: Engine> Default for PlacementState<E> {
    fn default() -> Self {
        Self { state: None, anchor: None }
    }
}

/// Names in a file: the state of adaptive placement, and the anchors' routing keys.
const PLACEMENT: [&str; 2] = ["placement_state", "placement_anchor"];
const ROUTING_KEYS: &str = "routing_keys";

impl<E: Engine> Memory<E> for AnchoredMemory<E> {
    fn fork(&self) -> Box<dyn Memory<E>> {
        Box::new(self.clone())
    }

    fn bytes(&self, engine: &E) -> usize {
        let placement = self.placement.state.iter().chain(&self.placement.anchor);
        let placement = placement.map(|tensor| tensor_bytes(engine, tensor)).sum::<usize>();
        self.base.bytes(engine) + placement + self.anchors.bytes(engine)
    }

    fn save<'a>(&'a self, engine: &E, file: &mut LayerWriter<'a, E>) -> Result<()> {
        self.base.save(engine, file)?;
        for (name, tensor) in PLACEMENT.into_iter().zip([&self.placement.state, &self.placement.anchor]) {
            if let Some(tensor) = tensor {
                file.tensor(engine, name, tensor);
            }
        }
        let Anchors { states, routing_keys, tails, .. } = &self.anchors;
        file.anchor_states(engine, STATES, states)?;
        if let Some(keys) = routing_keys {
            file.anchor_rows(engine, ROUTING_KEYS, keys);
        }
        for (name, tails) in TAILS.into_iter().zip(tails) {
            file.anchor_states(engine, name, tails)?;
        }
        Ok(())
    }

    fn load(&mut self, engine: &E, file: &LayerReader<'_>) -> Result<()> {
        self.base.load(engine, file)?;
        let [state, anchor] = PLACEMENT.map(|name| file.tensor(engine, name));
        self.placement = PlacementState { state: state?, anchor: anchor? };
        self.anchors.ledger = file.ledger().clone();
        if file.anchors() > 0 {
            self.anchors.routing_keys = Some(file.anchor_rows(engine, ROUTING_KEYS)?);
            self.anchors.states = file.anchor_states(engine, STATES)?;
            let [q, k, v] = TAILS.map(|name| file.anchor_states(engine, name));
            self.anchors.tails = [q?, k?, v?];
        }
        Ok(())
    }

    fn rollback(&mut self, engine: &E, anchor: Anchor, place: usize) -> Result<Storage> {
        let ledger = &self.anchors.ledger;
        // A layer that decides by itself which anchors to keep has its own numbers for them.
        let own = ledger.number(anchor.ordinal).unwrap_or(usize::MAX);
        let place = if ledger.entries.is_empty() { place } else { own };
        let (Some(state), Some(tails)) = (self.anchors.states.get(place), self.anchors.tails(place)) else {
            let message = format!("anchor {} is in the timeline, but missing in a layer", anchor.ordinal);
            return Err(Error::Request(message));
        };
        let state = engine.stored_to_host(state)?;
        let storage = state.storage();
        let state = engine.from_f32(&state.to_f32()?, &state.shape())?;
        let restore = |tail: &E::Stored| -> Result<E::Tensor> {
            let tail = engine.stored_to_host(tail)?;
            let [_, shape @ ..] = tail.shape();
            Ok(engine.from_f32(&tail.to_f32()?, &shape)?)
        };
        let [q, k, v] = tails;
        self.base.tails = Some([restore(q)?, restore(k)?, restore(v)?]);
        self.anchors.keep(engine, &(0..=place).collect::<Vec<_>>())?;
        self.anchors.ledger.entries.truncate(place + 1);
        self.anchors.ledger.evictions.retain(|(at, _)| *at <= anchor.ordinal);
        if self.placement.state.is_some() {
            self.placement = PlacementState { state: Some(state.clone()), anchor: Some(state.clone()) };
        }
        self.base.recurrence = Recurrence::at(state);
        Ok(storage)
    }

    fn rollback_bytes(&self, engine: &E) -> usize {
        self.anchors.tails.iter().flatten().map(|tail| engine.stored_bytes(tail)).sum()
    }

    fn anchors(&self, engine: &E) -> (usize, usize) {
        (self.anchors.len(), self.anchors.bytes(engine))
    }

    fn ledger(&self) -> Option<&Ledger> {
        Some(&self.anchors.ledger)
    }

    fn ledger_mut(&mut self) -> Option<&mut Ledger> {
        Some(&mut self.anchors.ledger)
    }

    fn state(&self) -> Option<&E::Tensor> {
        self.base.state()
    }
}

impl<E: Engine> AnchoredMemory<E> {
    /// The newest anchor's routing key, [1, value_heads·d_r], and the number of value heads.
    pub fn last_key(&self, engine: &E) -> Result<Option<(E::Tensor, usize)>> {
        let (Some(keys), Some(state)) = (&self.anchors.routing_keys, self.state()) else { return Ok(None) };
        let (count, heads) = (engine.shape(keys)[0], engine.shape(state)[1]);
        Ok(Some((engine.slice(keys, 0, count - 1..count)?, heads)))
    }
}

/// The kept anchors of one layer, oldest first.
pub(super) struct Anchors<E: Engine> {
    /// One entry per anchor, [1, value_heads, d_k, d_v].
    states: Vec<Arc<E::Stored>>,
    /// The routing keys, [anchors, value_heads·d_r].
    routing_keys: Option<E::Tensor>,
    /// The last inputs of the convolutions of q, k and v before each anchor, each [1, 1, conv_size − 1, channels], in
    /// f32. They stay in the file unless a rollback needs them.
    tails: [Vec<Arc<E::Stored>>; 3],
    /// This layer's bookkeeping of the anchors, if it decides by itself which to keep; otherwise empty.
    ledger: Ledger,
}

impl<E: Engine> Clone for Anchors<E> {
    fn clone(&self) -> Self {
        let Self { states, routing_keys, tails, ledger } = self;
        let (states, tails) = (states.clone(), tails.clone());
        Self { states, routing_keys: routing_keys.clone(), tails, ledger: ledger.clone() }
    }
}

impl<E: Engine> Default for Anchors<E> {
    fn default() -> Self {
        let tails = std::array::from_fn(|_| Vec::new());
        Self { states: Vec::new(), routing_keys: None, tails, ledger: Ledger::default() }
    }
}

impl<E: Engine> Anchors<E> {
    /// Adds anchors with states [N, value_heads, d_k, d_v] and routing keys [N, value_heads·d_r].
    fn push(&mut self, engine: &E, states: &E::Tensor, keys: &E::Tensor, storage: Storage) -> Result<()> {
        for n in 0..engine.shape(states)[0] {
            let state = engine.slice(states, 0, n..n + 1)?;
            self.states.push(Arc::new(engine.store_states(&state, storage)?));
        }
        match &mut self.routing_keys {
            Some(all) => engine.append(all, keys, 0)?,
            None => self.routing_keys = Some(keys.clone()),
        }
        Ok(())
    }

    /// Adds the convolution tails of new anchors.
    pub fn push_tails(&mut self, engine: &E, tails: Vec<[E::Tensor; 3]>) -> Result<()> {
        for (list, tail) in tails.into_iter().flat_map(|tails| std::iter::zip(0.., tails)) {
            let shape: Vec<usize> = [1].iter().chain(engine.shape(&tail)).copied().collect();
            let tail = engine.reshape(&tail, &shape)?;
            let list: &mut Vec<_> = &mut self.tails[list];
            list.push(Arc::new(engine.store_states(&tail, Storage::F32)?));
        }
        Ok(())
    }

    /// The tails of one anchor.
    fn tails(&self, place: usize) -> Option<[&E::Stored; 3]> {
        let [q, k, v] = self.tails.each_ref().map(|list| list.get(place));
        Some([&**q?, &**k?, &**v?])
    }

    /// Drops all anchors except those with the given numbers, which must be ascending.
    fn keep(&mut self, engine: &E, numbers: &[usize]) -> Result<()> {
        if numbers.len() == self.states.len() {
            return Ok(());
        }
        for list in [&mut self.states].into_iter().chain(&mut self.tails) {
            *list = numbers.iter().filter_map(|&n| list.get(n).cloned()).collect();
        }
        if let Some(keys) = &self.routing_keys {
            let ids: Vec<u32> = numbers.iter().map(|&n| n as u32).collect();
            let rows = Embedding { table: keys, ids: &ids, shape: &[ids.len()] };
            self.routing_keys = Some(engine.embedding(rows)?);
        }
        Ok(())
    }

    /// The number of kept anchors.
    pub fn len(&self) -> usize {
        self.states.len()
    }

    /// Size of states, keys and tails, in bytes.
    pub fn bytes(&self, engine: &E) -> usize {
        let stored = self.states.iter().chain(self.tails.iter().flatten());
        let stored = stored.map(|state| engine.stored_bytes(state)).sum::<usize>();
        stored + self.routing_keys.as_ref().map_or(0, |keys| tensor_bytes(engine, keys))
    }

    /// Adds the anchor that was pushed last to the ledger, and drops others until the rest fits into `budget` bytes.
    fn settle(&mut self, engine: &E, anchor: Anchor, budget: usize, record: bool) -> Result<()> {
        for entry in &mut self.ledger.entries {
            entry.mass *= DECAY;
            entry.exposure *= DECAY;
        }
        let new = self.len() - 1;
        let norm = frobenius(&self.numbers(engine, new)?, None);
        let distance = self.distance(engine, new.checked_sub(1), new)?;
        self.ledger.entries.push(LedgerEntry { anchor, mass: 0.0, exposure: 0.0, norm, distance });
        let room = budget / (self.bytes(engine) / self.len()).max(1);
        let mut dropped = Vec::new();
        while self.len() > room.max(1) {
            let Some(m) = self.ledger.cheapest() else { break };
            let kept: Vec<usize> = (0..self.len()).filter(|&n| n != m).collect();
            dropped.push(self.ledger.entries[m].anchor.ordinal);
            self.ledger.entries[m + 1].distance = self.distance(engine, m.checked_sub(1), m + 1)?;
            self.ledger.entries.remove(m);
            self.keep(engine, &kept)?;
        }
        if record && !dropped.is_empty() {
            dropped.sort_unstable();
            self.ledger.evictions.push((anchor.ordinal, dropped));
        }
        Ok(())
    }

    /// ‖A_a − A_b‖; infinite if there is no a.
    fn distance(&self, engine: &E, a: Option<usize>, b: usize) -> Result<f64> {
        let Some(a) = a else { return Ok(f64::INFINITY) };
        Ok(frobenius(&self.numbers(engine, a)?, Some(&self.numbers(engine, b)?)))
    }

    /// The numbers of a state, as stored.
    fn numbers(&self, engine: &E, n: usize) -> Result<Vec<f32>> {
        Ok(engine.stored_to_host(&self.states[n])?.to_f32()?)
    }
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
pub(super) struct Routing<'a, T> {
    pub query: &'a Var<T>,
    pub routing_query: &'a Var<T>,
    pub null_score: Option<&'a Var<T>>,
}

/// The result of reading anchors.
pub(super) struct History<T> {
    /// Σ_m π_tm A_mᵀ q_t, [B, n, value_heads·d_v].
    pub readout: Var<T>,
    /// Σ_m π_tm, [B, n, value_heads], if it was requested.
    pub mass: Option<Var<T>>,
}

impl Reader<'_> {
    /// Reads the anchors that each token sees; `None` if no token sees any. The call's new anchors are `states` with
    /// their `keys`. With a memory, its anchors come before them, and the new ones that the plan keeps are added to it.
    pub fn historical_readout<E: Engine>(
        &self,
        pass: &Pass<'_, '_, E>,
        routing: Routing<'_, E::Tensor>,
        states: &Var<E::Tensor>,
        keys: Option<&Var<E::Tensor>>,
        row: Row<'_>,
        anchors: Option<&mut Anchors<E>>,
    ) -> Result<Option<History<E::Tensor>>> {
        // With a budget, the layer's own ledger determines which anchors are visible.
        let own = match (&anchors, row.anchors.budget) {
            (Some(anchors), Some(_)) => Some(row.anchors.seeing(anchors.ledger.anchors(), row.tokens)),
            _ => None,
        };
        let plan = own.as_ref().unwrap_or(row.anchors);
        let row = Row { anchors: plan, ..row };
        let (read, top_k) = plan.read_in(self.layer.index, self.equal_scores);
        let options = AnchorReadOptions {
            key_heads: self.base.key_heads,
            value_heads: self.base.value_heads,
            top_k,
            routing_scale: self.routing_scale,
            plan: Arc::clone(read),
        };
        self.trace(pass, row, None);
        let Routing { query, routing_query, null_score } = routing;
        let Some(anchors) = anchors else {
            let Some(routing_keys) = keys.filter(|_| !read.segments.is_empty()) else { return Ok(None) };
            let input = AnchorRead { query, routing_query, routing_keys, anchor_states: states, null_score };
            if pass.trace(row).is_some() {
                self.trace(pass, row, Some(self.routing_weights(pass, &options, &input)?));
            }
            let mass = match self.want_mass {
                true => Some(self.mass(pass, &options, input)?),
                false => None,
            };
            return Ok(Some(History { readout: pass.tape.anchor_read(input, &options)?, mass }));
        };
        let engine = pass.engine();
        if let Some(keys) = keys {
            anchors.push(engine, states.value(), keys.value(), plan.storage)?;
        }
        let history = match &anchors.routing_keys {
            Some(routing_keys) if !read.segments.is_empty() => {
                let routing_keys = pass.tape.constant(routing_keys.clone());
                let input = AnchorRead {
                    query,
                    routing_query,
                    routing_keys: &routing_keys,
                    anchor_states: states,
                    null_score,
                };
                if plan.budget.is_some() || pass.trace(row).is_some() {
                    let weights = self.routing_weights(pass, &options, &input)?;
                    if plan.budget.is_some() {
                        let columns = engine.shape(routing_keys.value())[0];
                        anchors.ledger.note(&engine.to_f32(&weights), self.base.value_heads, columns);
                    }
                    self.trace(pass, row, Some(weights));
                }
                let stored =
                    |query: &Var<E::Tensor>, states: &[Arc<E::Stored>], options: &AnchorReadOptions| {
                        let input = AnchorRead {
                            query: query.value(),
                            routing_query: routing_query.value(),
                            routing_keys: routing_keys.value(),
                            anchor_states: states,
                            null_score: null_score.map(Var::value),
                        };
                        Ok::<_, Error>(pass.tape.constant(engine.anchor_read_stored(input, options)?))
                    };
                let mass = match self.want_mass {
                    true => {
                        let (query, one) = self.ones(pass, query, 1)?;
                        let one = Arc::new(engine.store_states(one.value(), Storage::F32)?);
                        Some(stored(&query, &vec![one; anchors.len()], &self.mass_options(&options))?)
                    }
                    false => None,
                };
                Some(History { readout: stored(query, &anchors.states, &options)?, mass })
            }
            _ => None,
        };
        match plan.budget {
            None if plan.new.is_empty() => {}
            None => anchors.keep(engine, &plan.keep)?,
            Some(bytes) => {
                for &anchor in &plan.placed {
                    anchors.settle(engine, anchor, bytes / self.layer.count, plan.record)?;
                }
            }
        }
        Ok(history)
    }

    /// Σ_m π_tm, computed by the reader itself with every anchor state and every query set to the number 1.
    fn mass<E: Engine>(
        &self,
        pass: &Pass<'_, '_, E>,
        options: &AnchorReadOptions,
        input: AnchorRead<&Var<E::Tensor>>,
    ) -> Result<Var<E::Tensor>> {
        let count = pass.engine().shape(input.routing_keys.value())[0];
        let (query, states) = self.ones(pass, input.query, count)?;
        let input = AnchorRead { query: &query, anchor_states: &states, ..input };
        Ok(pass.tape.anchor_read(input, &self.mass_options(options))?)
    }

    fn mass_options(&self, options: &AnchorReadOptions) -> AnchorReadOptions {
        AnchorReadOptions { key_heads: self.base.value_heads, ..options.clone() }
    }

    /// Queries for the tokens of `like`, and `count` states, of one number each, chosen such that a state reads as 1.
    fn ones<E: Engine>(
        &self,
        pass: &Pass<'_, '_, E>,
        like: &Var<E::Tensor>,
        count: usize,
    ) -> Result<(Var<E::Tensor>, Var<E::Tensor>)> {
        let (engine, heads) = (pass.engine(), self.base.value_heads);
        let shape = engine.shape(like.value());
        let query = engine.full(&[shape[0], shape[1], heads], UNIT)?;
        Ok((pass.tape.constant(query), pass.tape.constant(engine.full(&[count, heads, 1, 1], 1.0)?)))
    }

    /// π, [tokens, value_heads, anchors].
    fn routing_weights<E: Engine>(
        &self,
        pass: &Pass<'_, '_, E>,
        options: &AnchorReadOptions,
        input: &AnchorRead<&Var<E::Tensor>>,
    ) -> Result<E::Tensor> {
        let input = AnchorRead {
            query: input.query.value(),
            routing_query: input.routing_query.value(),
            routing_keys: input.routing_keys.value(),
            anchor_states: [self.base.key_dim, self.base.value_dim],
            null_score: input.null_score.map(Var::value),
        };
        Ok(pass.engine().routing_weights(input, options)?)
    }

    /// Records routing weights if a trace was requested.
    fn trace<E: Engine>(&self, pass: &Pass<'_, '_, E>, row: Row<'_>, weights: Option<E::Tensor>) {
        if let Some(trace) = pass.trace(row) {
            let mut trace = trace.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
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
pub(super) fn memory_bytes<E: Engine>(
    base: &GatedDeltaNet,
    layer: Layer,
    routing_dim: usize,
    tokens: usize,
    policy: &Policy,
) -> usize {
    let anchor = anchor_bytes(base, routing_dim, policy.storage);
    let placement = match policy.placement {
        Placement::Adaptive(min) if layer.first() => {
            usize::from(tokens >= E::CHUNK_TOKENS) + usize::from(tokens >= min)
        }
        _ => 0,
    };
    let kept = policy.kept_after(tokens, anchor * layer.count);
    base.live_bytes::<E>(tokens) + placement * base.state_bytes() + kept * anchor
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
    policy.kept_after(tokens, anchor * layer.count) * base.tail_bytes()
}

/// Size of one anchor in one layer, in bytes.
pub(super) fn anchor_bytes(base: &GatedDeltaNet, routing_dim: usize, storage: Storage) -> usize {
    let state = storage.bytes(base.value_heads * base.key_dim, base.value_dim);
    state + base.tail_bytes() + base.value_heads * routing_dim * size_of::<f32>()
}

/// Implements [`super::Mixer::place`] for mixers with anchors. With adaptive placement, the first layer's recurrence
/// runs ahead of the call: the same recurrence over the same inputs, cut at every candidate, with its own state. The
/// decision therefore depends on the text alone, not on the anchors or on where calls end, and no gradient flows
/// through it.
pub(super) fn place<E: Engine>(
    base: &GatedDeltaNet,
    pass: &Pass<'_, '_, E>,
    tokens: usize,
    input: FirstInput<'_, E::Tensor>,
    policy: &Policy,
    timeline: &mut Timeline,
    memory: &mut AnchoredMemory<E>,
) -> Result<Vec<usize>> {
    let (Placement::Adaptive(min), Some(interval)) = (policy.placement, policy.interval) else {
        return Ok(policy.periodic(timeline.position, tokens));
    };
    let (chunk, begin) = (E::CHUNK_TOKENS, timeline.position);
    let end = begin + tokens;
    if begin / min == end / min && begin / chunk == end / chunk {
        // No candidate, and no chunk ends whose state would be needed later.
        return Ok(Vec::new());
    }
    let engine = pass.engine();
    let mut ahead = memory.base.clone();
    ahead.recurrence.state = memory.placement.state.clone();
    let mut placed = timeline.clone();
    let mut boundaries = Vec::new();
    let mut last = memory.placement.anchor.as_ref().map(|state| engine.to_f32(state));
    // Process pieces that end with a chunk, so that only a few candidates' states are held at once.
    let piece = chunk * min;
    let mut position = begin;
    while position < end {
        let tokens = (piece - position % piece).min(end - position);
        let candidates = policy.placement.candidates(position, tokens);
        let chunk_start = position / chunk * chunk;
        let plan = AnchorPlan {
            boundaries: Arc::new(vec![candidates.iter().map(|c| c - position).collect()]),
            recent: policy.placement.candidates(chunk_start, position - chunk_start),
            ..AnchorPlan::default()
        };
        let text = input(position - begin..position - begin + tokens)?;
        let states =
            states_at(base, pass, &text, Row { index: 0, position, tokens, anchors: &plan }, &mut ahead)?;
        for (i, &position) in candidates.iter().enumerate() {
            let tensor = engine.slice(&states, 0, i..i + 1)?;
            let state = engine.to_f32(&tensor);
            let candidate = Candidate { position, movement: movement(&state, last.as_deref()) };
            let is_placed = candidate.is_placed(interval, &mut placed);
            if is_placed {
                placed.complete += 1;
                boundaries.push(position);
            }
            if is_placed || last.is_none() {
                memory.placement.anchor = Some(tensor);
                last = Some(state);
            }
        }
        position += tokens;
    }
    memory.placement.state = ahead.recurrence.state;
    timeline.usual_movement = placed.usual_movement;
    Ok(boundaries)
}

/// Computes only the states at the row's boundaries, [N, value_heads, d_k, d_v].
fn states_at<E: Engine>(
    base: &GatedDeltaNet,
    pass: &Pass<'_, '_, E>,
    text: &Var<E::Tensor>,
    row: Row<'_>,
    memory: &mut DeltaMemory<E>,
) -> Result<E::Tensor> {
    let [q, k, v, a, b] = pass.linear_each(text, base.projections())?;
    let ([q, k, v], _) = base.convolve(pass, [&q, &k, &v], &[], Some(memory))?;
    let out = base.recur(pass, [&q, &k, &v, &a, &b], row, Some(&mut memory.recurrence))?;
    Ok(out.boundary_states.into_value())
}

#[cfg(test)]
mod tests {
    use march_engine::Reference;

    use super::*;

    /// States on a line, none of them read: the one nearest to its neighbour is dropped, and distances are updated.
    #[test]
    fn distances_follow_what_is_dropped() {
        let engine = Reference;
        let mut anchors: Anchors<Reference> = Anchors::default();
        let values = [1.0, 2.0, 2.1, 5.0, 9.0];
        for (i, value) in values.iter().enumerate() {
            let state = engine.full(&[1, 1, 1, 1], *value).unwrap();
            let key = engine.full(&[1, 1], 0.0).unwrap();
            anchors.push(&engine, &state, &key, Storage::F32).unwrap();
            let anchor = Anchor { ordinal: i + 1, position: i + 1 };
            // An anchor has 8 bytes: a state and a key of one number each.
            anchors.settle(&engine, anchor, 24, true).unwrap();
            assert!(anchors.bytes(&engine) <= 24);
        }
        // The fourth anchor evicts 2.1 (0.1 / 2.1 is least), the fifth evicts 2 (1 / 2 is less than 1 / 1 and 3 / 5).
        assert_eq!(anchors.ledger.evictions, [(4, vec![3]), (5, vec![2])]);
        assert_eq!(anchors.ledger.anchors().map(|a| a.ordinal).collect::<Vec<_>>(), [1, 4, 5]);
        let states: Vec<f32> =
            anchors.states.iter().map(|s| engine.stored_to_host(s).unwrap().to_f32().unwrap()[0]).collect();
        for (i, entry) in anchors.ledger.entries.iter().enumerate() {
            assert_eq!(values[entry.anchor.ordinal - 1] as f32, states[i]);
            let want = if i == 0 { f64::INFINITY } else { f64::from((states[i] - states[i - 1]).abs()) };
            assert_eq!(entry.distance, want);
        }
    }
}
