//! Self-contained pages that need no network: of a run (curves, samples, machine, configuration), of the anchors that a
//! text read, of the demo, and of experiments.

pub mod axis;
pub mod chart;
pub mod demo;
pub mod efficiency;
pub mod evidence;
pub mod experiment;
mod experiment_groups;
mod experiment_plot;
mod experiment_tests;
mod follow;
mod heat;
mod machine;
pub mod mark;
mod picture;
pub mod recall;
pub mod release;
pub mod routing;
mod series;
pub mod text;

use std::fmt::Write;
use std::fs;
use std::path::Path;

use serde_json::Value;

use chart::{Chart, Line, Shape};
pub use follow::Follow;
pub use heat::Heat;
use march_lm::run::read_metrics;
use march_lm::{Error, Result};

/// The contents of a run's `metrics.jsonl`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Metrics {
    /// (step, loss) of every step.
    pub loss: Vec<(f64, f64)>,
    /// (step, loss) on held-out text.
    pub validation: Vec<(f64, f64)>,
    /// (step, percent) of held-out targets that are the most probable token.
    pub accuracy: Vec<(f64, f64)>,
    /// (step, norm) of the gradient.
    pub gradient_norm: Vec<(f64, f64)>,
    /// (step, learning rate).
    pub learning_rate: Vec<(f64, f64)>,
    /// (step, tokens per second).
    pub speed: Vec<(f64, f64)>,
    /// Step, prompt and text of every sample.
    pub samples: Vec<(u64, String, String)>,
    /// Number of tokens trained on.
    pub tokens: u64,
}

impl Metrics {
    /// Reads a run's metrics, as [`read_metrics`] does.
    pub fn read(run: &Path) -> Result<Self> {
        let mut metrics = Self::default();
        for value in read_metrics(&run.join("metrics.jsonl"))? {
            metrics.take(&value);
        }
        Ok(metrics)
    }

    fn take(&mut self, line: &Value) {
        let Some(step) = line["step"].as_f64() else { return };
        let add = |key: &str, list: &mut Vec<(f64, f64)>| {
            if let Some(number) = line[key].as_f64() {
                list.push((step, number));
            }
        };
        add("loss", &mut self.loss);
        add("validation_loss", &mut self.validation);
        add("gradient_norm", &mut self.gradient_norm);
        add("learning_rate", &mut self.learning_rate);
        add("tokens_per_second", &mut self.speed);
        if let Some(share) = line["validation_accuracy"].as_f64() {
            self.accuracy.push((step, 100.0 * share));
        }
        self.tokens = line["tokens"].as_u64().unwrap_or(self.tokens);
        if let (Some(prompt), Some(text)) = (line["prompt"].as_str(), line["sample"].as_str()) {
            self.samples.push((step as u64, prompt.into(), text.into()));
        }
    }
}

/// Renders the page of a run.
pub fn render(run: &Path) -> Result<String> {
    let metrics = Metrics::read(run)?;
    let path = run.join("config.toml");
    let config = fs::read_to_string(&path).map_err(Error::io(&path, "read"))?;
    let name =
        run.file_name().map_or_else(|| run.display().to_string(), |n| n.to_string_lossy().into_owned());
    let mut page = format!("<p class=\"soft\">{}</p>\n", facts(&metrics));
    let smooth = smoothed(&metrics.loss);
    let charts = [
        Chart {
            title: "Loss, nats per token",
            lines: vec![
                Line { name: "each step", points: &metrics.loss, class: "faint", ..Line::default() },
                Line { name: "smoothed", points: &smooth, class: "main", ..Line::default() },
                Line {
                    name: "held-back text",
                    points: &metrics.validation,
                    class: "other",
                    shape: Shape::Marked,
                    ..Line::default()
                },
            ],
            ..Chart::default()
        },
        Chart::one("Held-back targets that are the most probable token, %", &metrics.accuracy),
        Chart::one("Gradient norm, before the clip", &metrics.gradient_norm),
        Chart::one("Learning rate", &metrics.learning_rate),
        Chart::one("Tokens per second", &metrics.speed),
    ];
    page += "<div class=\"charts\">\n";
    for chart in charts.iter().filter(|chart| !chart.is_empty()) {
        page += &chart.to_svg();
    }
    page += "</div>\n";
    if !metrics.samples.is_empty() {
        page += "<h2>Samples</h2>\n";
        for (step, prompt, text) in metrics.samples.iter().rev() {
            let _ = writeln!(
                page,
                "<figure><figcaption>step {step}</figcaption><pre><b>{}</b>{}</pre></figure>",
                escape(prompt),
                escape(text)
            );
        }
    }
    page += &machine::table(run);
    let _ = writeln!(page, "<h2>Configuration</h2>\n<pre>{}</pre>", escape(&config));
    Ok(whole_page(&name, "", &page))
}

/// A one-line summary of the run.
fn facts(metrics: &Metrics) -> String {
    let last = metrics.loss.last().map_or(0.0, |point| point.0);
    let mut text = format!("{last} steps, {:.2} million tokens", metrics.tokens as f64 / 1e6);
    if let Some((step, loss)) = metrics.validation.iter().copied().min_by(|a, b| a.1.total_cmp(&b.1)) {
        let _ = write!(text, "; lowest loss on held-back text {loss:.4} at step {step}");
    }
    let mut speeds: Vec<f64> = metrics.speed.iter().map(|point| point.1).collect();
    speeds.sort_by(f64::total_cmp);
    if let Some(median) = speeds.get(speeds.len() / 2) {
        let _ = write!(text, "; {median:.0} tokens per second (median)");
    }
    text
}

/// A running mean over about a twentieth of the points.
pub fn smoothed(points: &[(f64, f64)]) -> Vec<(f64, f64)> {
    let keep = 1.0 - 1.0 / (points.len() as f64 / 20.0).max(1.0);
    let mut mean = None;
    points
        .iter()
        .map(|&(x, y)| {
            let next = mean.map_or(y, |mean: f64| keep * mean + (1.0 - keep) * y);
            mean = Some(next);
            (x, next)
        })
        .collect()
}

/// The beginning of every page.
const PAGE_BEGINS: &str = "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
    <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n<title>";
/// The beginning of every picture, and the rest of its first line.
const PICTURE_BEGINS: &str = "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 ";
const PICTURE_IS: &str = " role=\"img\" aria-label=\"";

/// Whether a file with this beginning is a page that this library wrote.
pub fn is_page(beginning: &[u8]) -> bool {
    beginning.starts_with(PAGE_BEGINS.as_bytes())
}

/// Whether a file with this beginning is a picture that this library wrote.
pub fn is_picture(beginning: &[u8]) -> bool {
    let first = beginning.split(|&byte| byte == b'\n').next().unwrap_or_default();
    let is = PICTURE_IS.as_bytes();
    first.starts_with(PICTURE_BEGINS.as_bytes()) && first.windows(is.len()).any(|part| part == is)
}

/// A self-contained page: the title as its heading, then `body`; `style` is added to the common style.
fn whole_page(title: &str, style: &str, body: &str) -> String {
    let variables = |dark: bool| {
        let one = |&(name, light, night): &(&str, &str, &str)| {
            format!("--{name}: {}; ", if dark { night } else { light })
        };
        COLOURS.iter().map(one).collect::<String>()
    };
    let (light, dark) = (variables(false), variables(true));
    format!(
        "{PAGE_BEGINS}{title}</title>\n<style>\n\
         :root {{ color-scheme: light dark; {light}}}\n\
         @media (prefers-color-scheme: dark) {{ :root {{ {dark}}} }}\n\
         {PAGE_STYLE}{CHART_STYLE}{style}</style></head><body>\n<h1>{title}</h1>\n{body}</body></html>\n",
        title = escape(title)
    )
}

/// Escapes text for HTML or SVG. Characters that XML does not allow become �.
pub(crate) fn escape(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => safe += "&amp;",
            '<' => safe += "&lt;",
            '>' => safe += "&gt;",
            '"' => safe += "&quot;",
            '\n' | '\t' | '\r' => safe.push(character),
            '\u{FFFE}' | '\u{FFFF}' => safe.push('\u{FFFD}'),
            _ if character.is_control() => safe.push('\u{FFFD}'),
            _ => safe.push(character),
        }
    }
    safe
}

/// Name, colour on light, colour on dark. `main` and `other` are distinguishable with any colour vision; from `fifth`
/// on, colours also differ in lightness from those before them.
const COLOURS: [(&str, &str, &str); 15] = [
    ("ink", "#1d2733", "#dde5ee"),
    ("soft", "#5c6a78", "#93a1b0"),
    ("faint", "#9aa7b4", "#5d6b7a"),
    ("main", "#1f6feb", "#6ea8fe"),
    ("other", "#c2491f", "#f0876b"),
    ("third", "#00866a", "#4fc9a4"),
    ("fourth", "#8a5aa8", "#cfa6ea"),
    ("fifth", "#b09400", "#f6efa6"),
    ("sixth", "#1b1f5e", "#3d6fe0"),
    ("seventh", "#ef6aa8", "#c03fa0"),
    ("eighth", "#5a2d16", "#7d8f1a"),
    // Text in `ink` is readable on it, and on all its shades.
    ("heat", "#74a7f5", "#355f9c"),
    ("grid", "#e3e8ee", "#2a3440"),
    ("back", "#ffffff", "#12181f"),
    ("ahead", "#f1f4f7", "#1b232c"),
];
const PAGE_STYLE: &str = include_str!("page.css");
const CHART_STYLE: &str = include_str!("chart.css");
