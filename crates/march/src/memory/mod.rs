//! The state bank: all that decoding keeps of a text between calls.
//!
//! Per layer the live tensors of its mixer (a state, convolution tails, or keys and values), and the kept anchors:
//! state, routing key, and the convolution tails at that point. What is kept is decided by a [`Policy`].

mod budget;
mod file;
mod measure;
mod rollback;

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;

use march_engine::Engine;
use march_engine::ops::embedding::Embedding;

use crate::anchors::{Policy, Recording, Storage, Timeline};
use crate::error::{Error, Result};

pub use budget::{Ledger, LedgerEntry};
pub use file::{BankFile, BankTag, Ending, FORMAT_VERSION, FilePart};
pub use measure::{Measure, Measured};
pub use rollback::Rollback;

/// What is kept of one sequence. Cloning it is cheap and forks the sequence.
#[derive(Debug)]
pub struct StateBank<E: Engine> {
    /// How anchors are placed, kept and read.
    policy: Policy,
    /// How far the sequence has come.
    pub(crate) timeline: Timeline,
    pub(crate) layers: Vec<LayerMemory<E>>,
    /// A call is under way, or failed between two layers.
    pub(crate) torn: bool,
}

impl<E: Engine> Clone for StateBank<E> {
    fn clone(&self) -> Self {
        let Self { policy, timeline, layers, torn } = self;
        Self { policy: policy.clone(), timeline: timeline.clone(), layers: layers.clone(), torn: *torn }
    }
}

impl<E: Engine> StateBank<E> {
    /// The bank of an empty text, for a model of `layers` layers.
    pub(crate) fn new(policy: Policy, layers: usize) -> Self {
        let layers = (0..layers).map(|_| LayerMemory::default()).collect();
        Self { policy, timeline: Timeline::default(), layers, torn: false }
    }

    /// Refuses a bank that a call left half-way.
    pub(crate) fn check_whole(&self) -> Result<()> {
        if self.torn {
            let message =
                "the bank's last call failed and left it half-way; load it again or begin a new one";
            return Err(Error::Request(message.into()));
        }
        Ok(())
    }

    /// How anchors are placed, kept and read.
    pub fn policy(&self) -> &Policy {
        &self.policy
    }

    /// Text tokens so far, and the anchors that are kept.
    pub fn timeline(&self) -> &Timeline {
        &self.timeline
    }

    /// The layers' memories.
    pub fn layers(&self) -> &[LayerMemory<E>] {
        &self.layers
    }

    /// Notes down from now on, or no more, where anchors are placed and what layers drop, to be replayed by
    /// [`crate::model::Model::replay`]. It begins with the text; the notes grow with it.
    pub fn record(&mut self, on: bool) -> Result<()> {
        match (on, &self.timeline.boundaries) {
            (true, None) if self.timeline.position > 0 => {
                let message = "a recording of anchors begins with an empty bank; this one holds text already";
                return Err(Error::Request(message.into()));
            }
            (true, None) => self.timeline.boundaries = Some(Vec::new()),
            (true, Some(_)) => {}
            (false, _) => {
                self.timeline.boundaries = None;
                self.layers.iter_mut().for_each(|layer| layer.anchors.ledger.evictions.clear());
            }
        }
        Ok(())
    }

    /// What was noted down; none without [`StateBank::record`].
    pub fn recording(&self) -> Option<Recording> {
        let evictions = self.layers.iter().map(|layer| layer.anchors.ledger.evictions.clone()).collect();
        Some(Recording { boundaries: self.timeline.boundaries.clone()?, evictions })
    }

    /// Sets the anchors of the timeline to those that all layers keep, where each decides by itself.
    pub(crate) fn join_layers(&mut self) {
        let [first, others @ ..] = &self.layers[..] else { return };
        let anchors = first.anchors.ledger.anchors();
        let kept = anchors.filter(|anchor| {
            others.iter().all(|layer| layer.anchors.ledger.number(anchor.ordinal).is_some())
        });
        self.timeline.kept = kept.collect();
    }

    /// Bytes of all that is kept.
    pub fn bytes(&self, engine: &E) -> usize {
        self.layers.iter().map(|layer| layer.bytes(engine)).sum()
    }
}

/// The first layer's state as adaptive placement follows it, at the last multiple of the chunk's length. It is cut at
/// every candidate for an anchor, the mixer's own at the anchors only; the two differ by rounding.
pub(crate) const PLACEMENT_STATE: &str = "placement_state";

/// The same at the last anchor, which movement is counted from.
pub(crate) const PLACEMENT_ANCHOR: &str = "placement_anchor";

/// What one layer keeps of one sequence.
#[derive(Debug)]
pub struct LayerMemory<E: Engine> {
    live: BTreeMap<Cow<'static, str>, E::Tensor>,
    /// The kept anchors.
    pub anchors: Anchors<E>,
}

impl<E: Engine> Clone for LayerMemory<E> {
    fn clone(&self) -> Self {
        Self { live: self.live.clone(), anchors: self.anchors.clone() }
    }
}

impl<E: Engine> Default for LayerMemory<E> {
    fn default() -> Self {
        Self { live: BTreeMap::new(), anchors: Anchors::default() }
    }
}

impl<E: Engine> LayerMemory<E> {
    /// A live tensor by its name.
    pub fn get(&self, name: &str) -> Option<&E::Tensor> {
        self.live.get(name)
    }

    /// Replaces a live tensor.
    pub fn set(&mut self, name: &'static str, tensor: E::Tensor) {
        self.live.insert(name.into(), tensor);
    }

    /// Adds rows to a live tensor along dimension `axis`, before which all dimensions are 1; gives the whole.
    pub fn append(
        &mut self,
        engine: &E,
        name: &'static str,
        rows: E::Tensor,
        axis: usize,
    ) -> Result<E::Tensor> {
        match self.live.get_mut(name) {
            Some(tensor) => {
                engine.append(tensor, &rows, axis)?;
                Ok(tensor.clone())
            }
            None => {
                self.live.insert(name.into(), rows.clone());
                Ok(rows)
            }
        }
    }

    /// The live tensors, with the state that placement follows in the place of the mixer's own.
    pub(crate) fn for_placement(&self) -> Self {
        let mut live = self.live.clone();
        live.remove("state");
        if let Some(state) = live.remove(PLACEMENT_STATE) {
            live.insert("state".into(), state);
        }
        Self { live, anchors: Anchors::default() }
    }

    /// Bytes of all that is kept.
    pub fn bytes(&self, engine: &E) -> usize {
        let live = self.live.values().map(|tensor| tensor_bytes(engine, tensor)).sum::<usize>();
        live + self.anchors.bytes(engine)
    }
}

/// Bytes of a tensor in f32.
fn tensor_bytes<E: Engine>(engine: &E, tensor: &E::Tensor) -> usize {
    engine.shape(tensor).iter().product::<usize>() * size_of::<f32>()
}

/// The kept anchors of one layer, oldest first.
#[derive(Debug)]
pub struct Anchors<E: Engine> {
    /// One entry for each anchor, [1, value_heads, d_k, d_v].
    states: Vec<Arc<E::Stored>>,
    /// [anchors, value_heads·d_r].
    routing_keys: Option<E::Tensor>,
    /// The last inputs of the three convolutions before each anchor, each [1, 1, conv_size − 1, channels]: exact, and
    /// in the file as long as nobody rolls back to them.
    tails: Vec<[Arc<E::Stored>; 3]>,
    /// What this layer knows of them, where it decides by itself what to keep; else empty.
    pub(crate) ledger: Ledger,
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
        Self { states: Vec::new(), routing_keys: None, tails: Vec::new(), ledger: Ledger::default() }
    }
}

impl<E: Engine> Anchors<E> {
    /// Adds anchors with states [N, value_heads, d_k, d_v] and routing keys [N, value_heads·d_r].
    pub(crate) fn push(
        &mut self,
        engine: &E,
        states: &E::Tensor,
        keys: &E::Tensor,
        storage: Storage,
    ) -> Result<()> {
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

    /// Adds the convolutions' last inputs of new anchors.
    pub(crate) fn push_tails(&mut self, engine: &E, tails: Vec<[E::Tensor; 3]>) -> Result<()> {
        let store = |tail: E::Tensor| -> Result<Arc<E::Stored>> {
            let shape: Vec<usize> = [1].iter().chain(engine.shape(&tail)).copied().collect();
            let tail = engine.reshape(&tail, &shape)?;
            Ok(Arc::new(engine.store_states(&tail, Storage::F32)?))
        };
        for [q, k, v] in tails {
            self.tails.push([store(q)?, store(k)?, store(v)?]);
        }
        Ok(())
    }

    /// Lets go of all anchors but those with the given numbers, which ascend.
    pub(crate) fn keep(&mut self, engine: &E, numbers: &[usize]) -> Result<()> {
        if numbers.len() == self.states.len() {
            return Ok(());
        }
        self.states = numbers.iter().filter_map(|&n| self.states.get(n).cloned()).collect();
        self.tails = numbers.iter().filter_map(|&n| self.tails.get(n).cloned()).collect();
        if let Some(keys) = &self.routing_keys {
            let ids: Vec<u32> = numbers.iter().map(|&n| n as u32).collect();
            let rows = Embedding { table: keys, ids: &ids, shape: &[ids.len()] };
            self.routing_keys = Some(engine.embedding(rows)?);
        }
        Ok(())
    }

    /// How many.
    pub fn len(&self) -> usize {
        self.states.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.states.is_empty()
    }

    /// The states, each [1, value_heads, d_k, d_v].
    pub fn states(&self) -> &[Arc<E::Stored>] {
        &self.states
    }

    /// The routing keys, [anchors, value_heads·d_r]; none where there is no anchor yet.
    pub fn routing_keys(&self) -> Option<&E::Tensor> {
        self.routing_keys.as_ref()
    }

    /// What this layer knows of its anchors, where it decides by itself what to keep.
    pub fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    /// Bytes of states, keys and tails.
    pub fn bytes(&self, engine: &E) -> usize {
        let states = self.states.iter().map(|state| engine.stored_bytes(state)).sum::<usize>();
        let keys = self.routing_keys.as_ref().map_or(0, |keys| tensor_bytes(engine, keys));
        let tails = self.tails.iter().flatten().map(|tail| engine.stored_bytes(tail)).sum::<usize>();
        states + keys + tails
    }
}
