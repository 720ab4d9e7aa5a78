//! The results of `march demo`, as a page and as a picture.

use std::fmt::Write;

use super::axis::{Axis, number};
use super::chart::{Chart, Line, Shape};
use super::mark::CLASSES;
use super::picture::picture;
use super::routing::{self, Routing};
use super::text::thousands;
use super::{escape, whole_page};

/// The results of the demo, for its page and picture.
pub struct Demo {
    /// One-line description of the task.
    pub title: String,
    /// Paragraphs: the task, how it was trained, on which machine.
    pub about: Vec<String>,
    /// The accuracy of guessing, 0 to 1.
    pub chance: f64,
    /// The most facts in a training sequence.
    pub most_in_training: usize,
    /// In the order of the table, MARCH first.
    pub models: Vec<DemoModel>,
    /// A question to MARCH, its answer, and what was read for it.
    pub asked: Option<Vec<String>>,
    /// What MARCH read in one example.
    pub routing: Option<Routing>,
    /// Commands to try next.
    pub next: Vec<String>,
}

/// The results and costs of one model.
pub struct DemoModel {
    /// The name in the legend.
    pub name: String,
    /// Number of parameters.
    pub parameters: usize,
    /// The learning rate it was trained with.
    pub learning_rate: f64,
    /// Training time.
    pub seconds: f64,
    /// Step and accuracy, 0 to 1, on fixed held-out sequences of the stage.
    pub curve: Vec<(u64, f64)>,
    /// The answers by number of facts.
    pub by_facts: Vec<Amount>,
    /// The answers with the same weights but without anchors; empty if the model has none.
    pub without: Vec<Amount>,
}

/// The answers about sequences with one number of facts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Amount {
    /// Facts in a sequence.
    pub facts: usize,
    /// Number of correct answers.
    pub correct: u64,
    /// Number of questions.
    pub asked: u64,
    /// The standard error of the fraction of correct answers; `None` for a single sequence.
    pub error: Option<f64>,
    /// Bytes kept after one sequence.
    pub memory_bytes: usize,
    /// Of these bytes, those that only a rollback uses.
    pub rollback_bytes: usize,
}

impl Amount {
    /// The accuracy and its standard error; `None` if nothing was asked.
    fn accuracy(&self) -> Option<(f64, Option<f64>)> {
        let share = self.correct.min(self.asked) as f64 / self.asked as f64;
        (self.asked > 0).then_some((share, self.error))
    }

    /// "97.1 ± 0.3 %"; a dash if nothing was asked.
    fn shown(&self) -> String {
        self.accuracy().map_or("–".into(), |(share, error)| plus_minus(share, error))
    }
}

/// The points of both charts for one model.
struct Points {
    curve: Vec<(f64, f64)>,
    amounts: Vec<(f64, f64)>,
    errors: Vec<f64>,
}

impl Demo {
    /// Renders a self-contained page.
    pub fn page(&self) -> String {
        let mut body = format!("<p><b>{}</b></p>\n", escape(&self.result()));
        for paragraph in &self.about {
            let _ = writeln!(body, "<p>{}</p>", escape(paragraph));
        }
        let points = self.points();
        body += "<div class=\"charts\">\n";
        for chart in self.charts(&points).iter().filter(|chart| !chart.is_empty()) {
            body += &chart.to_svg();
        }
        body += "</div>\n";
        body += &self.table();
        if let Some(asked) = &self.asked {
            body += "<h2>One question</h2>\n";
            for sentence in asked {
                let _ = writeln!(body, "<p>{}</p>", escape(sentence));
            }
        }
        if let Some(routing) = self.routing.as_ref().filter(|it| it.tokens() > 0 && it.layers() > 0) {
            let _ = write!(
                body,
                "<h2>What {} reads in one example</h2>\n{}",
                escape(self.models.first().map_or("MARCH", |model| &model.name)),
                routing.map()
            );
        }
        if !self.next.is_empty() {
            let _ = writeln!(body, "<h2>Next steps</h2>\n<pre>{}</pre>", escape(&self.next.join("\n")));
        }
        whole_page(&self.title, routing::STYLE, &body)
    }

    /// Both charts as one standalone SVG, 1000 × 420, for light and dark pages.
    pub fn picture(&self) -> String {
        let points = self.points();
        picture(&self.title, &self.result(), &self.charts(&points))
    }

    /// "128 facts, 32 in training: MARCH 97.1 ± 0.3 %; GDN 35.0 ± 0.6 %; guessing 4.2 %", for the most facts.
    fn result(&self) -> String {
        let Some(&facts) = self.amounts().last() else { return String::new() };
        let shown = |model: &DemoModel| {
            find(&model.by_facts, facts).map(|amount| format!("{} {}", model.name, amount.shown()))
        };
        let mut each: Vec<String> = self.models.iter().filter_map(shown).collect();
        if self.chance.is_finite() {
            each.push(format!("guessing {}", percent(self.chance)));
        }
        let training = match self.most_in_training {
            most if facts > most => format!(", {most} in training"),
            _ => String::new(),
        };
        format!("{facts} facts{training}: {}", each.join("; "))
    }

    /// All numbers of facts, ascending.
    fn amounts(&self) -> Vec<usize> {
        let each = self.models.iter().flat_map(|model| model.by_facts.iter().map(|amount| amount.facts));
        let mut all: Vec<usize> = each.collect();
        all.sort_unstable();
        all.dedup();
        all
    }

    fn points(&self) -> Vec<Points> {
        let all = self.amounts();
        let of = |model: &DemoModel| {
            let curve = model.curve.iter().filter(|point| point.1.is_finite());
            let curve = curve.map(|&(step, y)| (step as f64, y.clamp(0.0, 1.0))).collect();
            let known = |(i, &facts)| Some((i, find(&model.by_facts, facts)?.accuracy()?));
            let amounts = all.iter().enumerate().filter_map(known);
            let (amounts, errors) =
                amounts.map(|(i, (share, error))| ((i as f64, share), error.unwrap_or(f64::NAN))).unzip();
            Points { curve, amounts, errors }
        };
        self.models.iter().map(of).collect()
    }

    /// The charts of accuracy by step and by number of facts.
    fn charts<'a>(&'a self, points: &'a [Points]) -> [Chart<'a>; 2] {
        let names: Vec<String> = self.amounts().iter().map(usize::to_string).collect();
        let steps = self.models.iter().flat_map(|model| &model.curve).map(|point| point.0).max().unwrap_or(0);
        let across = [(0.0, steps.max(1) as f64), (-0.5, names.len().max(1) as f64 - 0.5)];
        let y = || Axis { label: "accuracy", range: Some((0.0, 1.0)), percent: true, ..Axis::default() };
        let mut charts = [
            Chart {
                title: "Accuracy while learning",
                x: Axis {
                    label: "training step; later stages have more facts",
                    range: Some(across[0]),
                    ..Axis::default()
                },
                y: y(),
                ..Chart::default()
            },
            Chart {
                title: "Accuracy by number of facts",
                x: Axis { label: "facts in the sequence", range: Some(across[1]), names, ..Axis::default() },
                y: y(),
                ..Chart::default()
            },
        ];
        for (i, (model, points)) in self.models.iter().zip(points).enumerate() {
            let (name, class) = (model.name.as_str(), CLASSES[i % 4]);
            let (curve, amounts, errors) = (&points.curve, &points.amounts, &points.errors);
            let line = Line { name, class, points: curve, shape: Shape::Marked, ..Line::default() };
            charts[0].lines.push(line);
            let bars = Line { name, class, points: amounts, shape: Shape::Bars, errors, ..Line::default() };
            charts[1].lines.push(bars);
        }
        for chart in &mut charts {
            if self.chance.is_finite() {
                chart.levels.push(("guessing", self.chance.clamp(0.0, 1.0)));
            }
        }
        charts
    }

    /// The table, with one column per model.
    fn table(&self) -> String {
        if self.models.is_empty() {
            return String::new();
        }
        let mut text = String::from(
            "<h2>In numbers</h2>\n<p class=\"soft\">Accuracy with its standard error, by number of facts; memory: \
             what is kept after one sequence.</p>\n\
             <div class=\"scroll\"><table class=\"numbers demo\">\n<tr><th></th>",
        );
        for model in &self.models {
            let _ = write!(text, "<th scope=\"col\">{}</th>", escape(&model.name));
        }
        text += "</tr>\n";
        let mut row = |name: &str, cell: &dyn Fn(&DemoModel) -> (String, String)| {
            let _ = write!(text, "<tr><th scope=\"row\">{}</th>", escape(name));
            for model in &self.models {
                let (shown, exact) = cell(model);
                let title = if exact.is_empty() { exact } else { format!(" title=\"{}\"", escape(&exact)) };
                let _ = write!(text, "<td{title}>{}</td>", escape(&shown));
            }
            text += "</tr>\n";
        };
        let plain = |shown: String| (shown, String::new());
        let accuracy = |amount: Option<&Amount>| {
            let Some(amount) = amount else { return plain("–".into()) };
            (
                amount.shown(),
                format!("{} of {} right", thousands(amount.correct as f64), thousands(amount.asked as f64)),
            )
        };
        let (all, most) = (self.amounts(), self.most_in_training);
        for &facts in &all {
            let note = if facts == most { " (most in training)" } else { "" };
            row(&format!("{facts} facts{note}"), &|model| accuracy(find(&model.by_facts, facts)));
        }
        if self.models.iter().any(|model| find(&model.without, most).is_some()) {
            row(&format!("{most} facts, without anchors"), &|model| accuracy(find(&model.without, most)));
        }
        for &facts in all.iter().filter(|&&facts| facts == most || Some(&facts) == all.last()) {
            let mut bytes = |name: &str, of: fn(&Amount) -> usize| {
                row(name, &|model| {
                    let amount = find(&model.by_facts, facts);
                    plain(amount.map_or("–".into(), |it| format!("{} bytes", thousands(of(it) as f64))))
                });
            };
            bytes(&format!("Memory after {facts} facts"), |it| it.memory_bytes);
            bytes("of it only for rollback", |it| it.rollback_bytes);
        }
        row("Parameters", &|m| plain(thousands(m.parameters as f64)));
        row("Learning rate", &|m| {
            plain(if m.learning_rate.is_finite() { number(m.learning_rate) } else { "–".into() })
        });
        row("Training", &|m| plain(rounded(m.seconds, "s")));
        text + "</table></div>\n"
    }
}

/// The answers about this number of facts.
fn find(amounts: &[Amount], facts: usize) -> Option<&Amount> {
    amounts.iter().find(|amount| amount.facts == facts)
}

/// 0.971 as 97.1 %.
fn percent(share: f64) -> String {
    format!("{:.1} %", 100.0 * share)
}

/// "97.1 ± 0.3 %"; a dash if it is not a number.
fn plus_minus(share: f64, error: Option<f64>) -> String {
    match error.filter(|error| error.is_finite()) {
        _ if !share.is_finite() => "–".into(),
        Some(error) => format!("{:.1} ± {}", 100.0 * share, percent(error)),
        None => percent(share),
    }
}

/// A number with at least three digits and its unit; a dash if it is not a number.
fn rounded(value: f64, unit: &str) -> String {
    match value {
        _ if !value.is_finite() => "–".into(),
        _ if value.abs() < 100.0 => format!("{value:.1} {unit}"),
        _ => format!("{} {unit}", thousands(value.round().max(0.0))),
    }
}
