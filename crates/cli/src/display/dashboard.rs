//! A run as a screen of curves and numbers.
//!
//! The training loop only sends events. A thread of its own reads the keys, follows `metrics.jsonl`, and draws at most
//! five times a second, and only when something changed.

use std::io::{self, BufWriter, Write, stdout};
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use march::train::Event;
use ratatui::Terminal;
use ratatui::backend::CrosstermBackend;
use ratatui::crossterm::event::{self, Event as Input, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};

use super::view::{About, View};
use super::{lines, screen};
use crate::interrupt;

/// Between two drawings.
const PAUSE: Duration = Duration::from_millis(200);
/// A held key repeats itself before this has passed; that is not a second press.
const REPEAT: Duration = Duration::from_millis(700);

/// The thread that draws; dropping it gives the terminal back.
pub struct Dashboard {
    events: Option<Sender<Event>>,
    thread: Option<JoinHandle<()>>,
}

impl Dashboard {
    /// Takes the terminal. `past` are events that have been shown as lines already.
    pub fn open(about: About, past: Vec<Event>) -> io::Result<Self> {
        let (events, received) = channel();
        let mut view = View::new(about);
        past.into_iter().for_each(|event| view.take(event));
        screen::take()?;
        let work = move || {
            let ended = watch(view, &received);
            screen::give_back();
            if let Err(error) = ended {
                let _ = writeln!(io::stderr(), "note          the dashboard ended: {error}");
                received.try_iter().for_each(lines::show);
            }
        };
        let thread = std::thread::Builder::new().name("dashboard".into()).spawn(work);
        let thread = thread.inspect_err(|_| screen::give_back())?;
        Ok(Self { events: Some(events), thread: Some(thread) })
    }

    /// Shows what happened: on the dashboard, or as a line should that have ended.
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
            // Its panic has been reported, and the lines that followed were shown.
            let _ = thread.join();
        }
        screen::give_back();
    }
}

/// Draws until the events end or the terminal is given back.
fn watch(mut view: View, events: &Receiver<Event>) -> io::Result<()> {
    let mut terminal = Terminal::new(CrosstermBackend::new(BufWriter::new(stdout())))?;
    let (mut drawn, mut pressed, mut changed) = (None::<Instant>, None, true);
    loop {
        loop {
            match events.try_recv() {
                Ok(event) => {
                    view.take(event);
                    changed = true;
                }
                Err(TryRecvError::Empty) => break,
                Err(TryRecvError::Disconnected) => return Ok(()),
            }
        }
        let age = drawn.map_or(Duration::MAX, |drawn| drawn.elapsed());
        // The clock moves on each second.
        if age >= Duration::from_secs(1) || (age >= PAUSE && changed) {
            view.read_on();
            if !screen::draw(|| terminal.draw(|frame| view.draw(frame)).map(|_| ()))? {
                return Ok(());
            }
            changed = false;
            drawn = Some(Instant::now());
        }
        if event::poll(PAUSE)? {
            press(&event::read()?, &mut pressed);
            changed = true;
        }
    }
}

/// q and Ctrl-C ask the run to end. `pressed`: when q was pressed last.
fn press(input: &Input, pressed: &mut Option<Instant>) {
    let Input::Key(KeyEvent { code, modifiers, kind: KeyEventKind::Press, .. }) = input else { return };
    match code {
        KeyCode::Char('c' | 'C') if modifiers.contains(KeyModifiers::CONTROL) => interrupt::ask(),
        KeyCode::Char('q' | 'Q') => {
            let before = pressed.replace(Instant::now());
            if before.is_none_or(|before| before.elapsed() > REPEAT) {
                interrupt::ask();
            }
        }
        _ => {}
    }
}
