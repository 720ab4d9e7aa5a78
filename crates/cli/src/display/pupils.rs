//! Models that train in parallel: one line each, rewritten in place on a terminal; elsewhere one line per step at which
//! all of them have been evaluated.

use std::collections::BTreeMap;
use std::io::IsTerminal;
use std::time::{Duration, Instant};

use super::lines::duration;
use super::out::{self, say};

/// The progress of one model.
#[derive(Clone, Default)]
struct Pupil {
    step: u64,
    loss: f64,
    /// Step and accuracy.
    curve: Vec<(u64, f64)>,
}

/// The display of models in training.
pub struct Pupils {
    names: Vec<&'static str>,
    steps: u64,
    pupils: Vec<Pupil>,
    /// The known accuracies, by step.
    known: BTreeMap<u64, Vec<Option<f64>>>,
    started: Instant,
    drawn: Option<Instant>,
    terminal: bool,
}

impl Pupils {
    /// A display for models that make `steps` steps each.
    pub fn new(names: Vec<&'static str>, steps: u64) -> Self {
        let terminal = std::io::stdout().is_terminal();
        let pupils = vec![Pupil::default(); names.len()];
        let (known, started, drawn) = (BTreeMap::new(), Instant::now(), None);
        Self { names, steps, pupils, known, started, drawn, terminal }
    }

    /// A model completed a step.
    pub fn step(&mut self, number: usize, step: u64, loss: f64) {
        let pupil = &mut self.pupils[number];
        (pupil.step, pupil.loss) = (step, loss);
        self.draw(false);
    }

    /// A model was evaluated.
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

    /// Draws the lines one last time.
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
        // Move back to the first of the previously drawn lines.
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

/// The last accuracies as a row of block characters.
fn spark(curve: &[(u64, f64)]) -> String {
    const BLOCKS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
    let shown = &curve[curve.len().saturating_sub(30)..];
    shown.iter().map(|(_, share)| BLOCKS[((share * 8.0) as usize).min(7)]).collect()
}
