//! One thread reads documents, several encode them, and the caller's thread receives the tokens in order.

use std::ops::ControlFlow;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};

use super::Options;
use super::progress::SourceProgress;
use crate::data::text::{self, Record};
use crate::error::{Error, Result};
use crate::tokenizer::{Encoder, Tokenizer};

/// Bytes of text per unit of work; longer documents are split where the tokenizer allows it.
pub(super) const BATCH_BYTES: usize = 1 << 18;

/// Batches in flight per thread: enough that none waits, few enough to fit in memory.
const BATCHES_A_THREAD: usize = 4;

/// A part of a document, or a whole one.
struct Part {
    text: String,
    ends_document: bool,
}

/// Texts of one source, waiting to be encoded, and where to send their tokens.
struct Batch {
    parts: Vec<Part>,
    encoded: Encoded,
    sender: Sender<Encoded>,
}

/// A batch as tokens.
pub(super) struct Encoded {
    /// The index of the source.
    pub source: usize,
    /// Its tokens.
    pub tokens: Vec<u32>,
    /// The progress of the source, without its tokens, once this batch and all earlier ones are written; `None` if the
    /// batch was not encoded completely.
    pub progress: Option<SourceProgress>,
    /// Number of bytes read so far, over all sources.
    pub bytes: u64,
    /// The error that ended the work after these tokens, if any.
    pub failed: Option<Error>,
}

pub(super) struct Pipeline<'a> {
    pub tokenizer: &'a Tokenizer,
    pub files: &'a [PathBuf],
    pub options: &'a Options,
    /// How much of each file is already done.
    pub sources: Vec<SourceProgress>,
}

impl Pipeline<'_> {
    /// Passes every batch to `take`, in order, until it stops, fails, or everything is done.
    pub fn run(&self, mut take: impl FnMut(Encoded) -> Result<ControlFlow<()>>) -> Result<()> {
        let available = || std::thread::available_parallelism().map_or(1, usize::from);
        let threads = if self.options.threads == 0 { available() } else { self.options.threads };
        let (batches, work) = channel::<Batch>();
        let work = Mutex::new(work);
        // The batches in the order of the text. The reader waits while too many of them are in flight.
        let (order, ordered) = sync_channel::<Receiver<Encoded>>(threads * BATCHES_A_THREAD);
        std::thread::scope(|scope| {
            scope.spawn(move || Reader { pipeline: self, batches, order, bytes: 0 }.run());
            for _ in 0..threads {
                scope.spawn(|| encode_batches(self.tokenizer, &work));
            }
            // When this returns, the receiver is dropped, and the reader ends.
            for encoded in ordered.into_iter().map_while(|batch| batch.recv().ok()) {
                if take(encoded)?.is_break() {
                    break;
                }
            }
            Ok(())
        })
    }
}

/// Encodes batches until there are no more.
fn encode_batches(tokenizer: &Tokenizer, work: &Mutex<Receiver<Batch>>) {
    let mut encoder = tokenizer.encoder();
    loop {
        let received = work.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).recv();
        let Ok(Batch { parts, mut encoded, sender }) = received else { return };
        // Some tokenizer files make the library panic; that must not hang the other threads.
        let result = catch_unwind(AssertUnwindSafe(|| encode(tokenizer, &mut encoder, &parts)));
        match result.unwrap_or_else(|_| Err(Error::Request("the tokenizer failed on a document".into()))) {
            Ok(tokens) => encoded.tokens = tokens,
            Err(error) => (encoded.progress, encoded.failed) = (None, Some(error)),
        }
        // Nobody waits for it after the work was stopped.
        let _ = sender.send(encoded);
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
    order: SyncSender<Receiver<Encoded>>,
    /// Number of bytes of the sources before the current one.
    bytes: u64,
}

/// Why reading ends early.
enum Stop {
    /// The receiver of batches is gone.
    ReceiverGone,
    /// A source could not be read further.
    Failed(Error),
}

impl From<Error> for Stop {
    fn from(error: Error) -> Self {
        Self::Failed(error)
    }
}

impl Reader<'_> {
    fn run(mut self) {
        let pipeline = self.pipeline;
        for (source, (path, done)) in pipeline.files.iter().zip(&pipeline.sources).enumerate() {
            let size = std::fs::metadata(path).map_or(0, |metadata| metadata.len());
            if !done.finished {
                let progress = done.clone();
                let mut batch = PartialBatch { source, parts: Vec::new(), size: 0, progress, bytes: 0 };
                let read = self.read(path, &mut batch);
                // What was read before an error is sent with it.
                if let Err(Stop::Failed(error)) = read {
                    let _ = self.send(&mut batch, Some(error));
                    return;
                } else if read.is_err() {
                    return;
                }
            }
            self.bytes += size;
        }
    }

    /// Reads one file, from where its batch says.
    fn read(&mut self, path: &Path, batch: &mut PartialBatch) -> std::result::Result<(), Stop> {
        let options = self.pipeline.options;
        let mut documents = text::open(path, &options.text_column)?;
        documents.skip_to(batch.progress.records)?;
        // The first document may be a long one of which some parts are done.
        let mut done = batch.progress.parts;
        while let Some(record) = documents.read()? {
            match record {
                // An empty text is not a document: there would be nothing between two ends of text.
                Record::Document(text) if text.is_empty() => {}
                Record::Document(text) => {
                    self.add(batch, text, std::mem::take(&mut done), documents.bytes())?
                }
                Record::Broken(error) if !options.skip_bad => return Err(error.into()),
                Record::Broken(_) => batch.progress.skipped += 1,
            }
            batch.progress.records = documents.place();
            batch.bytes = documents.bytes();
            if batch.size >= BATCH_BYTES {
                self.send(batch, None)?;
            }
        }
        if batch.progress.documents + batch.progress.skipped == 0 {
            if !options.skip_bad {
                let message = "contains no text; remove it, or skip all such files with --skip-bad";
                return Err(Error::file(path, message).into());
            }
            tracing::warn!("{} contains no text", path.display());
        }
        batch.progress.records = documents.place();
        batch.progress.finished = true;
        self.send(batch, None)
    }

    /// Adds a document, in parts if it is long; the first `done` parts are already in the shards.
    fn add(
        &mut self,
        batch: &mut PartialBatch,
        text: String,
        done: u64,
        bytes: u64,
    ) -> std::result::Result<(), Stop> {
        batch.bytes = bytes;
        if text.len() <= BATCH_BYTES {
            batch.push(text, true);
        } else {
            let parts = self.pipeline.tokenizer.parts(&text, BATCH_BYTES);
            let last = parts.len().saturating_sub(1);
            for (place, part) in parts.into_iter().enumerate().skip(done as usize) {
                batch.push(part.into(), place == last);
                if place < last {
                    batch.progress.parts = place as u64 + 1;
                    self.send(batch, None)?;
                }
            }
        }
        batch.progress.parts = 0;
        batch.progress.documents += 1;
        Ok(())
    }

    /// Sends a batch.
    fn send(&mut self, batch: &mut PartialBatch, failed: Option<Error>) -> std::result::Result<(), Stop> {
        let (sender, receiver) = channel();
        let (source, bytes) = (batch.source, self.bytes + batch.bytes);
        let progress = Some(batch.progress.clone());
        let encoded = Encoded { source, tokens: Vec::new(), progress, bytes, failed };
        batch.size = 0;
        self.order.send(receiver).map_err(|_| Stop::ReceiverGone)?;
        let sent = Batch { parts: std::mem::take(&mut batch.parts), encoded, sender };
        self.batches.send(sent).map_err(|_| Stop::ReceiverGone)
    }
}

/// A batch that is being filled.
struct PartialBatch {
    source: usize,
    parts: Vec<Part>,
    /// Total bytes of its texts.
    size: usize,
    /// How much of the source is done with this batch, without its tokens.
    progress: SourceProgress,
    /// Number of bytes of the source read so far.
    bytes: u64,
}

impl PartialBatch {
    fn push(&mut self, text: String, ends_document: bool) {
        self.size += text.len();
        self.parts.push(Part { text, ends_document });
    }
}
