//! The contents of the dashboard, at any size. All curves and numbers come from `metrics.jsonl`, so that they include
//! those from before a resume.

use std::path::PathBuf;
use std::time::Instant;

use march_lab::report::{Follow, smoothed};
use march_lm::run::Event;
use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Style, Stylize};
use ratatui::symbols::Marker;
use ratatui::text::{Line, Span, Text};
use ratatui::widgets::{Axis, Block, Chart, Dataset, Gauge, GraphType, Paragraph, Wrap};

use super::lines::{self, duration};
use super::{bytes, screen, thousands};
use crate::{interrupt, machine};

/// Number of messages to keep.
const MESSAGES: usize = 100;
/// The minimum width and height with space for a chart.
const ROOM: (u16, u16) = (40, 12);
const TRAINING: Color = Color::Cyan;
const VALIDATION: Color = Color::Yellow;

/// Constant information about a run.
pub struct RunInfo {
    /// The run's folder.
    pub folder: PathBuf,
    /// The model's type.
    pub model: String,
    /// Number of parameters.
    pub parameters: usize,
    /// Number of steps completed before.
    pub step: u64,
    /// Total number of steps.
    pub steps: u64,
}

/// The state of the dashboard.
pub struct View {
    about: RunInfo,
    follow: Follow,
    step: u64,
    seconds_left: Option<f64>,
    memory: Option<usize>,
    messages: Vec<String>,
    /// How many of the lines held back from standard error are already among the messages.
    held_back: usize,
    started: Instant,
    pub stopping: bool,
}

impl View {
    /// The view before anything happened.
    pub fn new(about: RunInfo) -> Self {
        Self {
            follow: Follow::new(&about.folder),
            step: about.step,
            about,
            seconds_left: None,
            memory: None,
            messages: Vec::new(),
            held_back: 0,
            started: Instant::now(),
            stopping: false,
        }
    }

    /// Handles an event.
    pub fn take(&mut self, event: Event) {
        match &event {
            Event::Step(line) => {
                self.step = line.step;
                self.seconds_left = Some(line.seconds_left);
            }
            // These are shown elsewhere on the screen.
            Event::Sampled(..) | Event::Validated(..) => {}
            _ => self.say(lines::line(&event)),
        }
    }

    fn say(&mut self, message: String) {
        self.messages.push(message);
        let extra = self.messages.len().saturating_sub(MESSAGES);
        self.messages.drain(..extra);
    }

    /// Reads what came from other sources since the last frame.
    pub fn read_on(&mut self) {
        if let Err(error) = self.follow.read_on() {
            let message = error.to_string();
            if self.messages.last() != Some(&message) {
                self.say(message);
            }
        }
        let held_back = screen::held_back();
        for line in held_back.iter().skip(self.held_back) {
            self.say(line.clone());
        }
        self.held_back = held_back.len();
        self.memory = machine::resident();
        self.stopping = interrupt::asked();
    }

    /// Draws everything that fits.
    pub fn draw(&self, frame: &mut Frame<'_>) {
        let area = frame.area();
        if area.width < ROOM.0 || area.height < ROOM.1 {
            return self.draw_small(frame, area);
        }
        let (sample, messages) = match area.height {
            0..17 => (0, 0),
            17..22 => (0, 4),
            22..34 => (4, 4),
            34.. => (7, 5),
        };
        let rows = [1, 1, 0, sample, messages, 1].map(Constraint::Length);
        let rows = [&rows[..2], &[Constraint::Fill(1)], &rows[3..]].concat();
        let rows = Layout::vertical(rows).split(area);
        let [title, gauge, middle, sample, messages, hint] = rows[..] else { return };
        let RunInfo { folder, model, parameters, .. } = &self.about;
        let about = format!("  {model}, {} parameters", thousands(*parameters));
        let run = Span::from(folder.display().to_string()).bold();
        frame.render_widget(Line::from(vec![run, Span::from(about)]), title);
        let bar = Style::new().fg(Color::Cyan).bg(Color::DarkGray);
        let ratio = self.share().clamp(0.0, 1.0);
        frame.render_widget(Gauge::default().gauge_style(bar).ratio(ratio).label(self.progress()), gauge);
        if area.width >= 80 {
            let [curves, numbers] =
                Layout::horizontal([Constraint::Fill(1), Constraint::Length(38)]).areas(middle);
            self.draw_chart(frame, curves);
            let rows: Vec<Line<'_>> = self.numbers().iter().map(|(name, value)| pair(name, value)).collect();
            frame.render_widget(Paragraph::new(rows).block(Block::bordered().title("numbers")), numbers);
        } else {
            let [numbers, curves] =
                Layout::vertical([Constraint::Length(3), Constraint::Fill(1)]).areas(middle);
            let all = self.numbers().map(|(name, value)| format!("{name} {value}")).join("  ");
            frame.render_widget(Paragraph::new(all).wrap(Wrap { trim: true }), numbers);
            self.draw_chart(frame, curves);
        }
        self.draw_sample(frame, sample);
        let shown = self.messages.len().saturating_sub(usize::from(messages.height.saturating_sub(2)));
        let text: Vec<Line<'_>> =
            self.messages[shown..].iter().map(|text| Line::from(text.as_str())).collect();
        frame.render_widget(Paragraph::new(text).block(Block::bordered().title("messages")), messages);
        frame.render_widget(self.hint(), hint);
    }

    /// Draws only the numbers, as many as fit.
    fn draw_small(&self, frame: &mut Frame<'_>, area: Rect) {
        let mut rows = vec![Line::from(self.progress())];
        if self.stopping {
            rows.push(self.hint());
        }
        rows.extend(self.numbers().iter().map(|(name, value)| Line::from(format!("{name} {value}"))));
        frame.render_widget(Paragraph::new(rows), area);
    }

    fn draw_chart(&self, frame: &mut Frame<'_>, area: Rect) {
        let metrics = self.follow.metrics();
        // A chart has two dots per character.
        let training = thinned(&smoothed(&metrics.loss), 2 * usize::from(area.width));
        let validation = thinned(&metrics.validation, 2 * usize::from(area.width));
        let range = |of: fn(&(f64, f64)) -> f64| {
            let values = training.iter().chain(&validation).map(of).filter(|value| value.is_finite());
            let (low, high) =
                values.fold((f64::INFINITY, f64::NEG_INFINITY), |(l, h), v| (l.min(v), h.max(v)));
            if high > low { [low, high] } else { [low - 0.5, low + 0.5] }
        };
        let title = [
            "loss, nats per token: ".into(),
            "training, smoothed".fg(TRAINING),
            ", ".into(),
            "validation".fg(VALIDATION),
        ];
        let block = Block::bordered().title(Line::from_iter(title));
        if training.is_empty() && validation.is_empty() {
            let text = "waiting for the first step";
            return frame.render_widget(Paragraph::new(text).block(block), area);
        }
        let (x, y) = (range(|point| point.0), range(|point| point.1));
        let labels = |[low, high]: [f64; 2], digits: usize| {
            let mut labels =
                [low, (low + high) / 2.0, high].map(|value| format!("{value:.digits$}")).to_vec();
            labels.dedup();
            labels.into_iter().map(|label| Span::from(label).dim()).collect::<Vec<_>>()
        };
        let set = |data, color, marker, kind| {
            Dataset::default().data(data).style(Style::new().fg(color)).marker(marker).graph_type(kind)
        };
        let sets = vec![
            set(&training, TRAINING, Marker::Braille, GraphType::Line),
            set(&validation, VALIDATION, Marker::Dot, GraphType::Scatter),
        ];
        let chart = Chart::new(sets)
            .block(block)
            .x_axis(Axis::default().bounds(x).labels(labels(x, 0)))
            .y_axis(Axis::default().bounds(y).labels(labels(y, 3)));
        frame.render_widget(chart, area);
    }

    fn draw_sample(&self, frame: &mut Frame<'_>, area: Rect) {
        let (title, text) = match self.follow.metrics().samples.last() {
            Some((step, prompt, text)) => {
                (format!("sample, step {step}"), prompt.clone() + &text.replace('\t', " "))
            }
            None => ("sample".into(), String::new()),
        };
        let text = Paragraph::new(Text::from(text)).wrap(Wrap { trim: false });
        frame.render_widget(text.block(Block::bordered().title(title)), area);
    }

    fn share(&self) -> f64 {
        self.step as f64 / self.about.steps.max(1) as f64
    }

    fn progress(&self) -> String {
        let left = self.seconds_left.map_or(String::new(), |left| format!(", {} left", duration(left)));
        format!("step {}/{}, {:.0} %{left}", self.step, self.about.steps, 100.0 * self.share())
    }

    fn numbers(&self) -> [(&'static str, String); 9] {
        let metrics = self.follow.metrics();
        let last = |points: &[(f64, f64)], show: fn(f64) -> String| {
            points.last().map_or("-".into(), |point| show(point.1))
        };
        let best = metrics.validation.iter().min_by(|a, b| a.1.total_cmp(&b.1));
        [
            ("loss", last(&metrics.loss, |loss| format!("{loss:.4}"))),
            ("validation", last(&metrics.validation, |loss| format!("{loss:.4}"))),
            ("lowest", best.map_or("-".into(), |(step, loss)| format!("{loss:.4} at step {step}"))),
            ("gradient norm", last(&metrics.gradient_norm, |norm| format!("{norm:.3}"))),
            ("learning rate", last(&metrics.learning_rate, |rate| format!("{rate:.2e}"))),
            ("tokens/s", last(&metrics.speed, |speed| thousands(speed as usize))),
            ("tokens", thousands(metrics.tokens as usize)),
            ("memory", self.memory.map_or("-".into(), bytes)),
            ("time", duration(self.started.elapsed().as_secs_f64())),
        ]
    }

    fn hint(&self) -> Line<'static> {
        if self.stopping {
            return Line::from("finishing the step, then saving; q again: exit immediately").yellow().bold();
        }
        Line::from("q or Ctrl-C: finish the step, save and stop").dim()
    }
}

fn pair(name: &str, value: &str) -> Line<'static> {
    Line::from(vec![Span::from(format!(" {name:<13} ")).dim(), Span::from(value.to_string()).bold()])
}

/// About `most` points: means of neighbours, each at the position of the first of them; the last point is kept.
pub fn thinned(points: &[(f64, f64)], most: usize) -> Vec<(f64, f64)> {
    let size = points.len().div_ceil(most.max(1)).max(1);
    let mean = |part: &[(f64, f64)]| {
        let sum: f64 = part.iter().map(|point| point.1).sum();
        (part[0].0, sum / part.len() as f64)
    };
    let Some((last, before)) = points.split_last() else { return Vec::new() };
    before.chunks(size).map(mean).chain([*last]).collect()
}
