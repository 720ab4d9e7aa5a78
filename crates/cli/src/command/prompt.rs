//! A prompt that is read piece by piece, from an argument, a file or standard input.

use std::fs::File;
use std::io::{self, IsTerminal, Read};
use std::path::Path;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::time::Duration;

use anyhow::{Context, bail};

use crate::interrupt;

/// Bytes per read.
const PIECE_BYTES: usize = 256 << 10;

/// How often to check for Ctrl-C while nothing arrives.
const PAUSE: Duration = Duration::from_millis(50);

/// A prompt. It is read on a separate thread, so that Ctrl-C is noticed while nothing arrives.
pub struct Prompt {
    /// Its name in messages.
    name: String,
    pieces: Receiver<io::Result<Vec<u8>>>,
    /// Its size in bytes, if known.
    total: Option<u64>,
}

/// The next event of a prompt.
pub enum Next {
    Piece(Vec<u8>),
    End,
    Interrupted,
}

impl Prompt {
    /// Opens the text, or else the file, or else standard input. A terminal cannot provide a prompt: that is rejected,
    /// or counts as an empty prompt if that is allowed.
    pub fn open(text: Option<&str>, file: Option<&Path>, may_be_empty: bool) -> anyhow::Result<Self> {
        let (sender, pieces) = sync_channel(1);
        let (name, total) = match (text, file) {
            (Some(text), _) => {
                // The channel has room for it.
                let _ = sender.send(Ok(text.as_bytes().to_vec()));
                ("--prompt".into(), Some(text.len() as u64))
            }
            (None, Some(path)) => {
                let name = path.display().to_string();
                let could = || format!("{name}: could not read");
                let input = File::open(path).with_context(could)?;
                let metadata = input.metadata().with_context(could)?;
                if metadata.is_dir() {
                    bail!("{name}: is a folder; name a file with the prompt");
                }
                read(input, sender)?;
                (name, metadata.is_file().then_some(metadata.len()))
            }
            (None, None) if io::stdin().is_terminal() => {
                if !may_be_empty {
                    bail!("there is no prompt: give --prompt TEXT or --prompt-file FILE, or pipe it in");
                }
                ("the standard input".into(), Some(0))
            }
            (None, None) => {
                read(io::stdin(), sender)?;
                ("the standard input".into(), None)
            }
        };
        Ok(Self { name, pieces, total })
    }

    /// Its name in messages.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its size in bytes, if known.
    pub fn total(&self) -> Option<u64> {
        self.total
    }

    /// Waits for the next piece.
    pub fn next(&self) -> anyhow::Result<Next> {
        loop {
            if interrupt::asked() {
                return Ok(Next::Interrupted);
            }
            match self.pieces.recv_timeout(PAUSE) {
                Ok(piece) => {
                    let piece = piece.with_context(|| format!("{}: could not read", self.name))?;
                    return Ok(Next::Piece(piece));
                }
                Err(RecvTimeoutError::Disconnected) => return Ok(Next::End),
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
    }
}

/// Reads to the end on another thread, at most a few pieces ahead.
fn read(
    mut input: impl Read + Send + 'static,
    pieces: SyncSender<io::Result<Vec<u8>>>,
) -> anyhow::Result<()> {
    let work = move || {
        let mut buffer = vec![0; PIECE_BYTES];
        loop {
            let piece = match input.read(&mut buffer) {
                Ok(0) => return,
                Ok(count) => Ok(buffer[..count].to_vec()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => Err(error),
            };
            let failed = piece.is_err();
            if pieces.send(piece).is_err() || failed {
                return;
            }
        }
    };
    std::thread::Builder::new().name("prompt".into()).spawn(work).context("could not start a thread")?;
    Ok(())
}
