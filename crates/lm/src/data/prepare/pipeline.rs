//! One thread reads documents, several encode them, and the caller's thread receives the tokens in order.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};

use super::Options;
use crate::data::text::{Documents, Record};
use crate::error::{Error, Result};
use crate::tokenizer::{Encoder, Tokenizer};

/// Bytes of text per unit of work; longer documents are split where the tokenizer allows it.
pub(super) const BATCH_BYTES: usize = 1 << 18;

/// Batches in flight per thread: enough that none waits, few enough to fit in memory.
const BATCHES_A_THREAD: usize = 4;

/// The position at which to resume a source.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    /// Lines or rows before it.
    pub records: u64,
    /// Parts of the document there that are already done.
    pub parts: u64,
    /// Documents and invalid records before it.
    pub found: u64,
}

/// The progress of a source once a batch and all earlier ones are written.
#[derive(Clone, Debug, Default)]
pub(super) struct Step {
    /// Number of lines or rows of the source that are done.
    pub records: u64,
    /// Number of parts of the document after them that are done.
    pub parts: u64,
    /// Number of documents that ended since the last step.
    pub documents: u64,
    /// Number of invalid records since the last step.
    pub skipped: u64,
    /// Whether the source has ended.
    pub finished: bool,
}

/// A part of a document, or a whole one.
struct Part {
    text: String,
    ends_document: bool,
}

/// Texts of one source, waiting to be encoded.
struct Batch {
    number: u64,
    source: usize,
    parts: Vec<Part>,
    step: Step,
    bytes: u64,
    failed: Option<Error>,
}

/// A batch as tokens.
pub(super) struct Encoded {
    number: u64,
    /// The index of the source.
    pub source: usize,
    /// Its tokens.
    pub tokens: Vec<u32>,
    /// The progress; `None` if the batch was not encoded completely.
    pub step: Option<Step>,
    /// Number of bytes read so far, over all sources.
    pub bytes: u64,
    /// The error that ended the work after these tokens, if any.
    pub failed: Option<Error>,
}

pub(super) struct Pipeline<'a> {
    pub tokenizer: &'a Tokenizer,
    pub files: &'a [PathBuf],
    pub options: &'a Options,
    /// The position at which to resume each file; `None` for finished ones.
    pub places: Vec<Option<Place>>,
}

impl Pipeline<'_> {
    /// Passes every batch to `take`, in order, until it stops, fails, or everything is done.
    pub fn run(&self, mut take: impl FnMut(Encoded) -> Result<ControlFlow<()>>) -> Result<()> {
        let available = || std::thread::available_parallelism().map_or(1, usize::from);
        let threads = if self.options.threads == 0 { available() } else { self.options.threads };
        let (batch_sender, batches) = channel::<Batch>();
        let batches = Mutex::new(batches);
        let (sender, receiver) = channel::<Encoded>();
        // Limits the batches in flight: the reader sends a permit for each batch and blocks while the channel is full;
        // a batch that is written frees one.
        let (coins, given_back) = sync_channel::<()>(threads * BATCHES_A_THREAD);
        std::thread::scope(|scope| {
            scope.spawn(move || {
                Reader { pipeline: self, batches: batch_sender, coins, number: 0, bytes: 0 }.run()
            });
            for _ in 0..threads {
                let (sender, batches) = (sender.clone(), &batches);
                scope.spawn(move || work(self.tokenizer, batches, &sender));
            }
            drop(sender);
            let result = in_order(&receiver, &given_back, &mut take);
            // Threads that still try to send something now end.
            drop(receiver);
            drop(given_back);
            result
        })
    }
}

/// Passes on batches in the order of their numbers.
fn in_order(
    receiver: &Receiver<Encoded>,
    given_back: &Receiver<()>,
    take: &mut impl FnMut(Encoded) -> Result<ControlFlow<()>>,
) -> Result<()> {
    let mut waiting = BTreeMap::new();
    let mut next = 0;
    while let Ok(encoded) = receiver.recv() {
        waiting.insert(encoded.number, encoded);
        while let Some(encoded) = waiting.remove(&next) {
            next += 1;
            if take(encoded)?.is_break() {
                return Ok(());
            }
            let _ = given_back.recv();
        }
    }
    Ok(())
}

/// Encodes batches until there are no more.
fn work(tokenizer: &Tokenizer, batches: &Mutex<Receiver<Batch>>, sender: &Sender<Encoded>) {
    let mut encoder = tokenizer.encoder();
    loop {
        let received = batches.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).recv();
        let Ok(Batch { number, source, parts, step, bytes, failed }) = received else { return };
        let mut encoded = Encoded { number, source, tokens: Vec::new(), step: Some(step), bytes, failed };
        // Some tokenizer files make the library panic; that must not hang the other threads.
        let result = catch_unwind(AssertUnwindSafe(|| encode(tokenizer, &mut encoder, &parts)));
        match result.unwrap_or_else(|_| Err(Error::Request("the tokenizer failed on a document".into()))) {
            Ok(tokens) => encoded.tokens = tokens,
            Err(error) => (encoded.step, encoded.failed) = (None, Some(error)),
        }
        if sender.send(encoded).is_err() {
            return;
        }
    }
}

fn encode(tokenizer: &Tokenizer, encoder: &mut Encoder<'_>, parts: &[Part]) -> Result<Vec<u32>> {
    let mut tokens = Vec::new();
    for Part { text, ends_document } in parts {
        encoder.encode(text, &mut tokens)?;
        if *ends_document {
            tokens.extend(tokenizer.end_of_text());
        }
    }
    Ok(tokens)
}

/// Reads the files one after the other.
struct Reader<'p> {
    pipeline: &'p Pipeline<'p>,
    batches: Sender<Batch>,
    coins: SyncSender<()>,
    number: u64,
    /// Number of bytes of the sources before the current one.
    bytes: u64,
}

/// The receiver of batches is gone.
struct ReceiverGone;

impl Reader<'_> {
    fn run(mut self) {
        let pipeline = self.pipeline;
        for (source, (path, place)) in pipeline.files.iter().zip(&pipeline.places).enumerate() {
            let size = std::fs::metadata(path).map_or(0, |metadata| metadata.len());
            if let Some(place) = place {
                let mut batch = PartialBatch::new(source, *place);
                match self.read(path, *place, &mut batch) {
                    Err(ReceiverGone) | Ok(ControlFlow::Break(())) => return,
                    Ok(ControlFlow::Continue(())) => {}
                }
            }
            self.bytes += size;
        }
    }

    /// Reads one file; breaks if that failed.
    fn read(
        &mut self,
        path: &std::path::Path,
        place: Place,
        batch: &mut PartialBatch,
    ) -> std::result::Result<ControlFlow<()>, ReceiverGone> {
        let options = self.pipeline.options;
        let documents = Documents::open(path, &options.text_column).and_then(|mut documents| {
            documents.skip_to(place.records)?;
            Ok(documents)
        });
        let mut documents = match documents {
            Ok(documents) => documents,
            Err(error) => return self.fail(batch, error),
        };
        let (mut found, mut done) = (place.found, place.parts);
        loop {
            match documents.read() {
                // An empty text is not a document: there would be nothing between two ends of text.
                Ok(Some(Record::Document(text))) if text.is_empty() => {}
                Ok(Some(Record::Document(text))) => {
                    found += 1;
                    self.add(batch, text, std::mem::take(&mut done), documents.bytes())?;
                }
                Ok(Some(Record::Broken(error))) => {
                    found += 1;
                    if !options.skip_bad {
                        return self.fail(batch, error);
                    }
                    batch.step.skipped += 1;
                }
                Ok(None) => break,
                Err(error) => return self.fail(batch, error),
            }
            batch.step.records = documents.place();
            batch.bytes = documents.bytes();
            if batch.size >= BATCH_BYTES {
                self.send(batch, None)?;
            }
        }
        if found == 0 {
            let error =
                Error::file(path, "contains no text; remove it, or skip all such files with --skip-bad");
            if !options.skip_bad {
                return self.fail(batch, error);
            }
            tracing::warn!("{} contains no text", path.display());
        }
        batch.step.records = documents.place();
        batch.step.finished = true;
        self.send(batch, None)?;
        Ok(ControlFlow::Continue(()))
    }

    /// Adds a document, in parts if it is long; the first `done` parts are already in the shards.
    fn add(
        &mut self,
        batch: &mut PartialBatch,
        text: String,
        done: u64,
        bytes: u64,
    ) -> std::result::Result<(), ReceiverGone> {
        batch.bytes = bytes;
        if text.len() <= BATCH_BYTES {
            batch.push(text, true);
        } else {
            let parts = self.pipeline.tokenizer.parts(&text, BATCH_BYTES);
            let last = parts.len().saturating_sub(1);
            for (place, part) in parts.into_iter().enumerate().skip(done as usize) {
                batch.push(part.into(), place == last);
                if place < last {
                    batch.step.parts = place as u64 + 1;
                    self.send(batch, None)?;
                }
            }
        }
        batch.step.parts = 0;
        batch.step.documents += 1;
        Ok(())
    }

    /// Sends what was read before an error, and the error.
    fn fail(
        &mut self,
        batch: &mut PartialBatch,
        error: Error,
    ) -> std::result::Result<ControlFlow<()>, ReceiverGone> {
        self.send(batch, Some(error))?;
        Ok(ControlFlow::Break(()))
    }

    /// Sends a batch.
    fn send(
        &mut self,
        batch: &mut PartialBatch,
        failed: Option<Error>,
    ) -> std::result::Result<(), ReceiverGone> {
        let (source, bytes) = (batch.source, self.bytes + batch.bytes);
        let sent = Batch {
            number: self.number,
            source,
            parts: batch.take(),
            step: batch.step.clone(),
            bytes,
            failed,
        };
        (batch.step.documents, batch.step.skipped) = (0, 0);
        self.number += 1;
        self.coins.send(()).map_err(|_| ReceiverGone)?;
        self.batches.send(sent).map_err(|_| ReceiverGone)
    }
}

/// A batch that is being filled.
struct PartialBatch {
    source: usize,
    parts: Vec<Part>,
    /// Total bytes of its texts.
    size: usize,
    /// Changes since the last step.
    step: Step,
    /// Number of bytes of the source read so far.
    bytes: u64,
}

impl PartialBatch {
    fn new(source: usize, place: Place) -> Self {
        let step = Step { records: place.records, parts: place.parts, ..Step::default() };
        Self { source, parts: Vec::new(), size: 0, step, bytes: 0 }
    }

    fn push(&mut self, text: String, ends_document: bool) {
        self.size += text.len();
        self.parts.push(Part { text, ends_document });
    }

    fn take(&mut self) -> Vec<Part> {
        self.size = 0;
        std::mem::take(&mut self.parts)
    }
}
