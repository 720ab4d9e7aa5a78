//! Models that train side by side or one after the other: one line each, rewritten in place on a terminal; elsewhere
//! about ten lines for each, at steps at which it was evaluated.

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use super::lines::duration;
use super::out::{self, say};

/// The progress of one model.
#[derive(Clone, Default)]
struct ModelProgress {
    step: u64,
    loss: f64,
    /// Step and accuracy.
    curve: Vec<(u64, f64)>,
    /// Tenths of the steps for which a line was printed.
    printed: u64,
}

/// The display of models in training.
pub struct ModelsProgress {
    names: Vec<&'static str>,
    steps: u64,
    models: Vec<ModelProgress>,
    started: Instant,
    drawn: Option<Instant>,
    terminal: bool,
}

impl ModelsProgress {
    /// A display for models that make `steps` steps each.
    pub fn new(names: Vec<&'static str>, steps: u64) -> Self {
        let terminal = std::io::stdout().is_terminal();
        let models = vec![ModelProgress::default(); names.len()];
        Self { names, steps, models, started: Instant::now(), drawn: None, terminal }
    }

    /// A model completed a step.
    pub fn step(&mut self, number: usize, step: u64, loss: f64) {
        let model = &mut self.models[number];
        (model.step, model.loss) = (step, loss);
        self.draw(false);
    }

    /// A model was evaluated.
    pub fn evaluated(&mut self, number: usize, step: u64, accuracy: f64) {
        let (steps, name, wide) = (self.steps, self.names[number], self.wide());
        let model = &mut self.models[number];
        model.curve.push((step, accuracy));
        let tenths = (10.0 * step as f64 / steps.max(1) as f64) as u64;
        if !self.terminal && tenths > model.printed {
            model.printed = tenths;
            let digits = steps.to_string().len();
            let (right, left) = (100.0 * accuracy, self.left());
            say!("{name:<wide$}  step {step:>digits$}/{steps}  right {right:>5.1} %  {left}");
        }
        self.draw(false);
    }

    /// The length of the longest name.
    fn wide(&self) -> usize {
        self.names.iter().map(|name| name.chars().count()).max().unwrap_or(0)
    }

    /// Draws the lines one last time.
    pub fn finish(mut self) {
        self.draw(true);
    }

    /// The time that all models together still need, at the pace so far.
    fn left(&self) -> String {
        let done: u64 = self.models.iter().map(|model| model.step).sum();
        let share = done as f64 / (self.steps as f64 * self.names.len() as f64).max(1.0);
        if done == 0 {
            return String::new();
        }
        duration(self.started.elapsed().as_secs_f64() * (1.0 - share).max(0.0) / share) + " left"
    }

    fn draw(&mut self, last: bool) {
        let recently = self.drawn.is_some_and(|at| at.elapsed() < Duration::from_millis(100));
        if !self.terminal || (recently && !last) {
            return;
        }
        // Move back to the first of the previously drawn lines.
        let mut text =
            if self.drawn.is_some() { format!("\x1b[{}A", self.names.len()) } else { String::new() };
        let wide = self.wide();
        for (name, model) in self.names.iter().zip(&self.models) {
            if model.step == 0 {
                text += &format!("\r\x1b[K{name:<wide$} waits for its turn\n");
                continue;
            }
            let right = model
                .curve
                .last()
                .map_or("   …  ".into(), |(_, share)| format!("{:>5.1} %", 100.0 * share));
            text += &format!(
                "\r\x1b[K{name:<wide$} step {:>5}/{}  loss {:.3}  right {right}  {}  {}\n",
                model.step,
                self.steps,
                model.loss,
                spark(&model.curve),
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
