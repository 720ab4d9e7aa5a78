//! Models that learn side by side: one line each, rewritten on a terminal; elsewhere a line for each step that all of
//! them have been asked at.

use std::collections::BTreeMap;
use std::io::IsTerminal;
use std::time::{Duration, Instant};

use super::lines::duration;
use super::out::{self, say};

/// How one model comes along.
#[derive(Clone, Default)]
struct Pupil {
    step: u64,
    loss: f64,
    /// Step and accuracy.
    curve: Vec<(u64, f64)>,
}

/// What is shown of models that learn.
pub struct Pupils {
    names: Vec<&'static str>,
    steps: u64,
    pupils: Vec<Pupil>,
    /// By step, the accuracies that are known.
    known: BTreeMap<u64, Vec<Option<f64>>>,
    started: Instant,
    drawn: Option<Instant>,
    terminal: bool,
}

impl Pupils {
    /// Models that will make so many steps each.
    pub fn new(names: Vec<&'static str>, steps: u64) -> Self {
        let terminal = std::io::stdout().is_terminal();
        let pupils = vec![Pupil::default(); names.len()];
        let (known, started, drawn) = (BTreeMap::new(), Instant::now(), None);
        Self { names, steps, pupils, known, started, drawn, terminal }
    }

    /// A model made a step.
    pub fn step(&mut self, number: usize, step: u64, loss: f64) {
        let pupil = &mut self.pupils[number];
        (pupil.step, pupil.loss) = (step, loss);
        self.draw(false);
    }

    /// A model was asked.
    pub fn asked(&mut self, number: usize, step: u64, accuracy: f64) {
        self.pupils[number].curve.push((step, accuracy));
        let row = self.known.entry(step).or_insert_with(|| vec![None; self.names.len()]);
        row[number] = Some(accuracy);
        if !self.terminal && row.iter().all(Option::is_some) {
            let cells = self.names.iter().zip(row.iter().flatten());
            let cells: Vec<String> =
                cells.map(|(name, share)| format!("{name} {:>5.1} %", 100.0 * share)).collect();
            say!("step {step:>5}/{}   {}   {}", self.steps, cells.join("   "), self.left());
        }
        self.draw(false);
    }

    /// Draws the lines a last time.
    pub fn finish(mut self) {
        self.draw(true);
    }

    fn left(&self) -> String {
        let step = self.pupils.iter().map(|pupil| pupil.step).min().unwrap_or(0);
        let share = step as f64 / self.steps.max(1) as f64;
        if step == 0 {
            return String::new();
        }
        duration(self.started.elapsed().as_secs_f64() * (1.0 - share) / share) + " left"
    }

    fn draw(&mut self, last: bool) {
        let recently = self.drawn.is_some_and(|at| at.elapsed() < Duration::from_millis(100));
        if !self.terminal || (recently && !last) {
            return;
        }
        // Back to the first of the lines that were drawn before.
        let mut text =
            if self.drawn.is_some() { format!("\x1b[{}A", self.names.len()) } else { String::new() };
        for (name, pupil) in self.names.iter().zip(&self.pupils) {
            let right = pupil
                .curve
                .last()
                .map_or("   …  ".into(), |(_, share)| format!("{:>5.1} %", 100.0 * share));
            text += &format!(
                "\r\x1b[K{name:<6} step {:>5}/{}  loss {:.3}  right {right}  {}  {}\n",
                pupil.step,
                self.steps,
                pupil.loss,
                spark(&pupil.curve),
                if last { String::new() } else { self.left() }
            );
        }
        self.drawn = Some(Instant::now());
        out::piece(&text);
    }
}

/// The last shares as a row of blocks.
fn spark(curve: &[(u64, f64)]) -> String {
    const BLOCKS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
    let shown = &curve[curve.len().saturating_sub(30)..];
    shown.iter().map(|(_, share)| BLOCKS[((share * 8.0) as usize).min(7)]).collect()
}
