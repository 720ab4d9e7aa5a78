//! The state bank: everything that decoding keeps of one text between calls.
//!
//! What a layer keeps is defined by its mixer, as a type that implements [`Memory`]. The bank holds one such memory per
//! layer and what the layers share: the [`Policy`] and the [`Timeline`].

mod file;
mod ledger;
mod rollback;

use std::any::Any;
use std::fmt;

use march_engine::Tensor;
use march_engine::ops::anchor_read::Storage;

use crate::anchors::{Anchor, Policy, Recording, Timeline};
use crate::error::{Error, Result};

pub(crate) use file::STATES;
pub use file::{BankFile, BankTag, Ending, FORMAT_VERSION, FilePart, LayerReader, LayerWriter};
pub(crate) use ledger::DECAY;
pub use ledger::{Ledger, LedgerEntry};
pub use rollback::Rollback;
#[doc(hidden)]
pub use rollback::runs;

/// What one layer keeps of one text between calls.
pub trait Memory: Any + Send + Sync {
    /// Returns a copy that continues independently. It copies handles: tensors are shared until one side appends to
    /// them.
    fn fork(&self) -> Box<dyn Memory>;

    /// Everything that is kept. Forks share tensors until one side appends to them.
    fn tensors(&self) -> Vec<&Tensor>;

    /// Size of everything that is kept, in bytes.
    fn bytes(&self) -> usize {
        self.tensors().into_iter().map(Tensor::bytes).sum()
    }

    /// Whether each token is kept apart, so that [`Memory::truncate`] can forget some.
    fn can_truncate(&self) -> bool {
        false
    }

    /// Forgets all but the first tokens of the text, if [`Memory::can_truncate`].
    fn truncate(&mut self, _tokens: usize) -> Result<()> {
        Err(Error::Request("this layer does not keep each token apart".into()))
    }

    /// Lists the tensors that a file must hold.
    fn save<'a>(&'a self, file: &mut LayerWriter<'a>) -> Result<()>;

    /// Loads the tensors of a file into the memory of an empty text.
    fn load(&mut self, file: &LayerReader<'_>) -> Result<()>;

    /// Whether [`Memory::rollback`] is possible, to any anchor that is kept.
    fn can_roll_back(&self) -> bool {
        self.can_truncate()
    }

    /// Returns to the state right after `anchor`, which has index `place` among the anchors that all layers keep.
    /// Returns the precision of the restored state.
    fn rollback(&mut self, _: Anchor, _place: usize) -> Result<Storage> {
        Err(Error::Request("this layer keeps no anchors, so it cannot be rolled back".into()))
    }

    /// Of these bytes, those that only [`Memory::rollback`] uses: no token reads them.
    fn rollback_bytes(&self) -> usize {
        0
    }

    /// The number of kept anchors, and their bytes.
    fn anchors(&self) -> (usize, usize) {
        (0, 0)
    }

    /// The layer's bookkeeping of its anchors, if it decides by itself which to keep.
    fn ledger(&self) -> Option<&Ledger> {
        None
    }

    /// Mutable access to the layer's bookkeeping of its anchors, if it decides by itself which to keep.
    fn ledger_mut(&mut self) -> Option<&mut Ledger> {
        None
    }

    /// Gives each anchor the routing key of another: anchor m that of anchor `order(count)[m]`.
    fn permute_keys(&mut self, _order: &mut dyn FnMut(usize) -> Vec<u32>) -> Result<()> {
        Ok(())
    }

    /// The state of the recurrence at the last point of the device's chunk grid, if there is one.
    fn state(&self) -> Option<&Tensor> {
        None
    }
}

impl Clone for Box<dyn Memory> {
    fn clone(&self) -> Self {
        (**self).fork()
    }
}

/// What is kept of one sequence. Cloning it is cheap and forks the sequence.
#[derive(Clone)]
pub struct StateBank {
    /// How anchors are placed, kept and read.
    pub(crate) policy: Policy,
    /// How far the sequence has progressed.
    pub(crate) timeline: Timeline,
    pub(crate) layers: Vec<Box<dyn Memory>>,
    /// Set while a call is running, and after a call failed between two layers.
    pub(crate) torn: bool,
}

impl fmt::Debug for StateBank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { policy, timeline, .. } = self;
        f.debug_struct("StateBank")
            .field("policy", policy)
            .field("timeline", timeline)
            .finish_non_exhaustive()
    }
}

impl StateBank {
    /// The bank of an empty text, from the layers' empty memories.
    pub(crate) fn new(policy: Policy, layers: Vec<Box<dyn Memory>>) -> Self {
        Self { policy, timeline: Timeline::default(), layers, torn: false }
    }

    /// Rejects a bank that a failed call left incomplete.
    pub(crate) fn check_whole(&self) -> Result<()> {
        if self.torn {
            let message =
                "the bank's last call failed and left it incomplete; load it again or start a new one";
            return Err(Error::Request(message.into()));
        }
        Ok(())
    }

    /// How anchors are placed, kept and read.
    pub fn policy(&self) -> &Policy {
        &self.policy
    }

    /// The number of text tokens so far, and the anchors that are kept.
    pub fn timeline(&self) -> &Timeline {
        &self.timeline
    }

    /// The layers' memories.
    pub fn layers(&self) -> &[Box<dyn Memory>] {
        &self.layers
    }

    /// Starts or stops recording where anchors are placed and which ones layers drop, for
    /// `Settings::recordings`. Recording must start with an empty bank; the recorded lists grow with the text.
    pub fn record(&mut self, on: bool) -> Result<()> {
        match (on, &self.timeline.boundaries) {
            (true, None) if self.timeline.position > 0 => {
                let message = "recording anchors requires an empty bank; this one already contains text";
                return Err(Error::Request(message.into()));
            }
            (true, None) => self.timeline.boundaries = Some(Vec::new()),
            (true, Some(_)) => {}
            (false, _) => {
                self.timeline.boundaries = None;
                let ledgers = self.layers.iter_mut().filter_map(|layer| layer.ledger_mut());
                ledgers.for_each(|ledger| ledger.evictions.clear());
            }
        }
        Ok(())
    }

    /// What was recorded; `None` unless recording was started with [`StateBank::record`].
    pub fn recording(&self) -> Option<Recording> {
        let evictions = |layer: &dyn Memory| layer.ledger().map_or_else(Vec::new, |it| it.evictions.clone());
        let evictions = self.layers.iter().map(|layer| evictions(&**layer)).collect();
        Some(Recording { boundaries: self.timeline.boundaries.clone()?, evictions })
    }

    /// Sets the timeline's anchors to those that all layers keep, if each layer decides by itself.
    pub(crate) fn join_layers(&mut self) {
        let ledgers: Vec<&Ledger> = self.layers.iter().filter_map(|layer| layer.ledger()).collect();
        let [first, others @ ..] = &ledgers[..] else { return };
        let kept = first.anchors();
        let kept = kept.filter(|anchor| others.iter().all(|other| other.number(anchor.ordinal).is_some()));
        self.timeline.kept = kept.collect();
    }

    /// Gives each anchor the routing key of another, in each layer: anchor m that of anchor `order(count)[m]`. This is a
    /// control: it shows whether tokens profit from the anchors that they choose, or would from any.
    pub fn permute_keys(&mut self, order: &mut dyn FnMut(usize) -> Vec<u32>) -> Result<()> {
        self.layers.iter_mut().try_for_each(|layer| layer.permute_keys(order))
    }

    /// Everything that is kept, with an identity that is equal for the same tensor in another bank, and the bytes of memory
    /// that it takes, with the spare room of what grows.
    pub fn parts(&self) -> impl Iterator<Item = (usize, usize)> {
        let tensors = self.layers.iter().flat_map(|layer| layer.tensors());
        tensors.map(|tensor| (tensor.identity(), tensor.held_bytes()))
    }

    /// Whether every layer can go back to any anchor that is kept ([`StateBank::rollback`]). In a stack where only some
    /// of the recurrent layers have anchors, the others cannot.
    pub fn can_roll_back(&self) -> bool {
        self.policy.interval.is_some() && self.layers.iter().all(|layer| layer.can_roll_back())
    }

    /// Whether every layer keeps each token apart, as attention does, so that [`StateBank::truncate`] is possible.
    pub fn can_truncate(&self) -> bool {
        self.policy.interval.is_none() && self.layers.iter().all(|layer| layer.can_truncate())
    }

    /// Forgets all but the first tokens of the text. If that is not possible, nothing changes and the result is false.
    pub fn truncate(&mut self, tokens: usize) -> Result<bool> {
        if !self.can_truncate() || tokens > self.timeline.position {
            return Ok(false);
        }
        self.layers.iter_mut().try_for_each(|layer| layer.truncate(tokens))?;
        self.timeline.position = tokens;
        Ok(true)
    }

    /// Size of everything that is kept, in bytes.
    pub fn bytes(&self) -> usize {
        self.layers.iter().map(|layer| layer.bytes()).sum()
    }

    /// Of these bytes, those that only a rollback uses: no token reads them.
    pub fn rollback_bytes(&self) -> usize {
        self.layers.iter().map(|layer| layer.rollback_bytes()).sum()
    }
}
