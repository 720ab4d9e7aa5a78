//! `march inspect routing`: which anchors the tokens of a text read.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use anyhow::bail;
use clap::Args;
use march_lab::report::routing::{Routing, Summary};
use march_lm::generate::Sampling;
use march_lm::model::TraceCell;

use super::bank;
use super::open::{self, ModelArgs, OpenedModel};
use crate::display::out::say;
use crate::display::{Progress, bytes, thousands};
use crate::output::{Kind, Output};
use crate::{interrupt, number};

/// Which anchors the tokens of a text read, by layer and head.
#[derive(Args)]
#[command(after_help = "Examples:
  march inspect routing --model models/tiny-march --text book.txt
  march inspect routing --model models/tiny-march --text book.txt --routing-top-k 4 --html routing.html

Only tokens that see an anchor count. Entropy is that of a token's routing weights, including the null route;
distance is the mean number of tokens back to the anchors, weighted by how much each is read. The page shows
every weight, with the text.")]
pub struct InspectRouting {
    #[command(flatten)]
    model: ModelArgs,
    /// The text
    #[arg(long, value_name = "FILE")]
    text: PathBuf,
    /// Read at most this many tokens of it
    #[arg(long, value_name = "N", default_value_t = 8192, value_parser = number::count::<usize>)]
    tokens: usize,
    /// Also write an HTML page with a map of the weights
    #[arg(long, value_name = "FILE.html")]
    html: Option<PathBuf>,
    /// Also list every head
    #[arg(long)]
    heads: bool,
}

/// Maximum number of weights per head over all layers: some hundred megabytes in memory.
const MOST_WEIGHTS: usize = 1 << 24;

impl InspectRouting {
    /// Reads the text and shows which anchors it read.
    pub fn run(mut self) -> anyhow::Result<()> {
        self.model.choose()?;
        let mut inputs = self.model.inputs();
        inputs.push(&self.text);
        let html = Output::check_some(self.html.as_deref(), Kind::Page, &inputs)?;
        let text = open::text(&self.text)?;
        let opened = self.model.open()?;
        if opened.policy().interval.is_none() {
            let kind = opened.model().config().mixer.model_type();
            bail!("{}: a model of type `{kind}` does not route", self.model.model.display());
        }
        let mut ids = opened.tokenizer().encode(&text)?;
        let all = ids.len();
        ids.truncate(self.tokens);
        if ids.is_empty() {
            bail!("{}: the text has no tokens", self.text.display());
        }
        let Some(routing) = self.read(&opened, &ids)? else { interrupt::leave() };
        let finite = |layer| routing.summary(layer, None).entropy.is_finite();
        if let Some(layer) = (0..routing.layers()).find(|&layer| !finite(layer)) {
            bail!(
                "{}: the routing weights of layer {layer} are not finite: the weights are damaged, or their training \
                 diverged; use an earlier checkpoint",
                self.model.model.display()
            );
        }
        let facts = facts(&opened, &routing, all);
        say!("{}\n{facts}", self.text.display());
        if routing.anchors() == 0 {
            say!("the text is too short for an anchor that a token could read; use a smaller --interval");
        } else {
            self.print(&routing);
        }
        if let Some(html) = &html {
            let name = |path: &Path| path.file_name().map(|name| name.to_string_lossy().into_owned());
            let title = format!(
                "What {} reads of {}",
                name(&self.model.model).unwrap_or_default(),
                name(&self.text).unwrap_or_default()
            );
            let page = routing.render(&title, &facts);
            html.write(page.as_bytes())?;
            say!("\n{}: {}", html.path().display(), bytes(page.len()));
        }
        Ok(())
    }

    /// Reads the text; `None` if interrupted.
    fn read(&self, opened: &OpenedModel, ids: &[u32]) -> anyhow::Result<Option<Routing>> {
        let layers = opened.model().config().num_hidden_layers;
        let interval = opened.policy().interval.unwrap_or(usize::MAX);
        let weights = ids.len() * (ids.len() / interval) / 2 * layers;
        if weights > MOST_WEIGHTS {
            bail!(
                "{} tokens with an anchor every {interval} are too many weights to show; give fewer --tokens or a \
                 larger --interval",
                thousands(ids.len())
            );
        }
        interrupt::listen("stopping")?;
        let trace = TraceCell::default();
        let mut generator = opened.generator(bank::empty(opened)?, Sampling::default())?.with_trace(&trace);
        let mut progress = Progress::new("read", "tokens", ids.len());
        let whole = generator.read(ids, &mut |left| {
            progress.at(ids.len() - left);
            if interrupt::asked() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        })?;
        progress.finish();
        if !whole {
            return Ok(None);
        }
        let trace = trace.lock().unwrap();
        Ok(Some(Routing::new(&trace, layers, opened.tokenizer(), ids)?))
    }

    fn print(&self, routing: &Routing) {
        say!(
            "\n{:<10} {:>6} {:>8} {:>9}   anchors by their share of what was read",
            "layer",
            "null",
            "entropy",
            "distance"
        );
        for layer in 0..routing.layers() {
            let summary = routing.summary(layer, None);
            say!("{layer:<10} {}", row(routing, &summary, 3));
            for head in (0..routing.heads()).filter(|_| self.heads) {
                let summary = routing.summary(layer, Some(head));
                say!("{:<10} {}", format!("  head {head}"), row(routing, &summary, 1));
            }
        }
    }
}

/// A one-line summary of what was read.
fn facts(opened: &OpenedModel, routing: &Routing, all: usize) -> String {
    let (tokens, policy) = (routing.tokens(), opened.policy());
    let of = if tokens < all { format!(" of {}", thousands(all)) } else { String::new() };
    format!(
        "{}{of} tokens, {} anchors; interval {}, {} routing, retention {}, placement {}, storage {}",
        thousands(tokens),
        thousands(routing.anchors()),
        policy.interval.unwrap_or(0),
        policy.top_k.map_or("dense".into(), |k| format!("top-{k}")),
        policy.retention,
        policy.placement,
        policy.storage
    )
}

/// The numbers of a summary, and its most-read anchors with the end of the text before them.
fn row(routing: &Routing, summary: &Summary, most: usize) -> String {
    let Summary { null, entropy, distance, most_read } = summary;
    let anchors: Vec<String> = most_read
        .iter()
        .take(most)
        .filter(|(_, share)| *share > 0.0)
        .map(|&(ordinal, share)| {
            let text = routing.snippet(ordinal, 24);
            let skip = text.chars().count().saturating_sub(24);
            let text: String = text.chars().skip(skip).collect();
            format!("{ordinal} ({:.0} %) {text:?}", 100.0 * share)
        })
        .collect();
    format!("{null:>6.3} {entropy:>8.2} {:>9}   {}", thousands(distance.round() as usize), anchors.join("  "))
}
