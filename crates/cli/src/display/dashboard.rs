//! A run as a full-screen dashboard of curves and numbers.
//!
//! The training loop only sends events. A separate thread follows `metrics.jsonl` and draws, at most five times per
//! second and only if something changed; another one waits for keys.

use std::fs::File;
use std::io::{self, BufWriter, IsTerminal, Read, stdout};
use std::mem::ManuallyDrop;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use march_lm::run::Event;
use ratatui::Terminal;
use ratatui::backend::CrosstermBackend;

use super::out::note;
use super::view::{RunInfo, View};
use super::{lines, screen};
use crate::interrupt;

/// The interval between two frames.
const PAUSE: Duration = Duration::from_millis(200);
/// A key press within this time is a repeat of a held key, not a second press.
const REPEAT: Duration = Duration::from_millis(700);
const CTRL_C: u8 = 3;
const ESCAPE: u8 = 27;

/// The drawing thread; dropping it restores the terminal.
pub struct Dashboard {
    events: Option<Sender<Event>>,
    thread: Option<JoinHandle<()>>,
}

impl Dashboard {
    /// Takes over the terminal. `past` are events that were already printed as lines.
    pub fn open(about: RunInfo, past: Vec<Event>) -> io::Result<Self> {
        let (events, received) = channel();
        let mut view = View::new(about);
        past.into_iter().for_each(|event| view.take(event));
        screen::take()?;
        let work = move || {
            let ended = watch(view, &received);
            screen::give_back();
            if let Err(error) = ended {
                note!("note          the dashboard ended: {error}");
                received.try_iter().for_each(lines::show);
            }
        };
        let start = |name: &str, work: Box<dyn FnOnce() + Send>| {
            let thread = std::thread::Builder::new().name(name.into()).spawn(work);
            thread.inspect_err(|_| screen::give_back())
        };
        start("keys", Box::new(read_keys))?;
        let thread = start("dashboard", Box::new(work))?;
        Ok(Self { events: Some(events), thread: Some(thread) })
    }

    /// Shows an event: on the dashboard, or as a line if the dashboard has ended.
    pub fn show(&self, event: Event) {
        let Some(events) = &self.events else { return };
        if let Err(unsent) = events.send(event) {
            lines::show(unsent.0);
        }
    }
}

impl Drop for Dashboard {
    fn drop(&mut self) {
        self.events = None;
        if let Some(thread) = self.thread.take() {
            // A panic of the thread was already reported, and later events were printed as lines.
            let _ = thread.join();
        }
        screen::give_back();
    }
}

/// Draws until the events end or the terminal is restored.
fn watch(mut view: View, events: &Receiver<Event>) -> io::Result<()> {
    // Never dropped: the library would show the cursor, which `screen` does, and panic if the terminal is gone.
    let mut terminal = ManuallyDrop::new(Terminal::new(CrosstermBackend::new(BufWriter::new(stdout())))?);
    let (mut drawn, mut before, mut changed) = (None::<Instant>, None, true);
    loop {
        let age = drawn.map_or(Duration::MAX, |drawn| drawn.elapsed());
        if age >= PAUSE {
            let now = Some((terminal.size()?, interrupt::asked()));
            changed |= std::mem::replace(&mut before, now) != now;
        }
        // Redraw the clock every second.
        if age >= Duration::from_secs(1) || (age >= PAUSE && changed) {
            view.read_on();
            if !screen::draw(|| terminal.draw(|frame| view.draw(frame)).map(|_| ()))? {
                return Ok(());
            }
            changed = false;
            drawn = Some(Instant::now());
        }
        match events.recv_timeout(PAUSE) {
            Ok(event) => {
                view.take(event);
                changed = true;
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return Ok(()),
        }
    }
}

/// Handles q and Ctrl-C as requests to stop, while the dashboard has the terminal. Uses plain reads, which end with the
/// terminal; the library's event loop would spin in that case.
fn read_keys() {
    let mut keyboard: Box<dyn Read> = match File::open("/dev/tty") {
        Ok(file) if !io::stdin().is_terminal() => Box::new(file),
        _ => Box::new(io::stdin()),
    };
    let (mut keys, mut pressed) = ([0; 64], None::<Instant>);
    loop {
        let count = match keyboard.read(&mut keys) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Ok(count @ 1..) if screen::taken() => count,
            _ => return,
        };
        // Ignore escape sequences: an arrow key, for instance, arrives as several bytes.
        for key in keys[..count].iter().take_while(|key| **key != ESCAPE) {
            match *key {
                CTRL_C => interrupt::ask(),
                b'q' | b'Q' => {
                    let before = pressed.replace(Instant::now());
                    if before.is_none_or(|before| before.elapsed() > REPEAT) {
                        interrupt::ask();
                    }
                }
                _ => {}
            }
        }
    }
}
