//! `march inspect policies`: the cost and benefit of memory policies on one text.

use std::ops::ControlFlow;
use std::path::PathBuf;

use anyhow::bail;
use clap::Args;
use march_lab::eval::{Measure, Measured};
use march_lm::anchors::Policy;
use march_lm::data;
use march_lm::generate::PIECE_TOKENS;
use serde_json::{Value, json};

use super::open::{self, ModelArgs, OpenedModel};
use crate::display::out::say;
use crate::display::{Progress, bytes, thousands};
use crate::output::{Kind, Output};
use crate::{interrupt, number};

/// The cost and benefit of memory policies on one text: size of the bank, loss, and speed of reading and decoding.
#[derive(Args)]
#[command(after_help = "Examples:
  march inspect policies --model models/tiny-march
  march inspect policies --model models/tiny-march --text book.txt --lengths 1024,4096 \\
    --policy '' --policy 'top-k=4 storage=int8' --policy 'interval=128 retention=budget:8MB placement=adaptive:32'
  march inspect policies --model models/march --beside models/gdn --text book.txt

The last tokens of the text are read, as many as the longest length. The loss, in nats per token, is the mean
over the last quarter of them; the change is relative to the first row. Reading is timed without logits, and
decoding with logits and one token at a time; computing the loss is not timed.")]
pub struct InspectPolicies {
    #[command(flatten)]
    model: ModelArgs,
    /// The text [default: the built-in book]
    #[arg(long, value_name = "FILE")]
    text: Option<PathBuf>,
    /// Numbers of tokens after which to show the bank's size
    #[arg(long, value_name = "N,N,…", value_delimiter = ',', default_value = "4096,65536", value_parser = number::count::<usize>)]
    lengths: Vec<usize>,
    /// How many of the last tokens to decode one at a time
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = number::whole::<usize>)]
    decode: usize,
    /// Changes to the checkpoint's own policy: any of interval=N, top-k=K|dense, retention=RULE, placement=RULE and
    /// storage=TYPE; or `none` for no anchors at all; may be repeated [default: a list that shows each setting alone and
    /// some together, and no anchors]
    #[arg(long, value_name = "SETTINGS")]
    policy: Vec<String>,
    /// Further models with the same tokenizer, each a row with its own policy: whether anchors are worth their bytes is
    /// seen beside a model without them; may be repeated
    #[arg(long, value_name = "DIR")]
    beside: Vec<PathBuf>,
    /// Print the table in Markdown
    #[arg(long)]
    markdown: bool,
    /// Also write the numbers to this file, after every row
    #[arg(long, value_name = "FILE.json")]
    output: Option<PathBuf>,
}

impl InspectPolicies {
    /// Prints one row per policy as soon as it is measured.
    pub fn run(mut self) -> anyhow::Result<()> {
        self.model.choose()?;
        self.lengths.sort_unstable();
        self.lengths.dedup();
        let longest = self.lengths.last().copied().unwrap_or(0);
        let mut inputs = self.model.inputs();
        inputs.extend(self.text.as_deref());
        inputs.extend(self.beside.iter().map(PathBuf::as_path));
        let output = Output::check_some(self.output.as_deref(), Kind::Policies, &inputs)?;
        let opened = self.model.open()?;
        let beside = self.beside(&opened)?;
        let own = self.policies(&opened)?.into_iter().map(|policy| (policy.to_string(), &opened, policy));
        let others = beside.iter().map(|(name, other)| (name.clone(), other, other.policy().clone()));
        let rows: Vec<Row<'_>> = own.chain(others).collect();
        let (text, name) = match &self.text {
            Some(path) => (open::text(path)?, path.display().to_string()),
            None => (data::builtin().to_string(), "the built-in book".to_string()),
        };
        let ids = opened.tokenizer().encode(&text)?;
        let Some(start) = ids.len().checked_sub(longest) else {
            bail!(
                "{name} has {} tokens, but --lengths asks for {}; give a longer --text or smaller --lengths",
                thousands(ids.len()),
                thousands(longest)
            );
        };
        let measure = Measure { ids: &ids[start..], lengths: &self.lengths, decode: self.decode };
        if !self.markdown {
            say!("{}: the last {} tokens of {name}", self.model.model.display(), thousands(longest));
        }
        self.measure(&rows, measure, &name, output.as_ref())
    }

    /// The models of `--beside`, by name.
    fn beside(&self, opened: &OpenedModel) -> anyhow::Result<Vec<(String, OpenedModel)>> {
        let open = |folder: &PathBuf| {
            let other = self.model.of(folder).open()?;
            if other.tokenizer().hash() != opened.tokenizer().hash() {
                bail!(
                    "{}: has another tokenizer than {}; losses per token cannot be compared",
                    folder.display(),
                    self.model.model.display()
                );
            }
            let name = folder.file_name().unwrap_or(folder.as_os_str()).to_string_lossy().into_owned();
            Ok((name, other))
        };
        self.beside.iter().map(open).collect()
    }

    /// The policies of the rows.
    fn policies(&self, opened: &OpenedModel) -> anyhow::Result<Vec<Policy>> {
        let own = opened.policy();
        if self.policy.is_empty() {
            return Ok(own.interval.map_or(vec![own.clone()], |interval| built_in(opened, interval)));
        }
        let mut policies = Vec::with_capacity(self.policy.len());
        for settings in &self.policy {
            let policy = if settings == "none" { without_anchors() } else { own.with(settings)? };
            opened.model().check_policy(&policy)?;
            policies.push(policy);
        }
        Ok(policies)
    }

    fn measure(
        &self,
        all: &[Row<'_>],
        measure: Measure<'_>,
        text: &str,
        output: Option<&Output>,
    ) -> anyhow::Result<()> {
        interrupt::listen("stopping")?;
        let names: Vec<&str> = all.iter().map(|row| row.0.as_str()).collect();
        let table = Table::new(&self.lengths, &names, self.markdown);
        let tokens = measure.ids.len();
        table.head();
        // Warm up: the first calls of a process are slow, and no row should include that.
        let first = &measure.ids[..tokens.min(PIECE_TOKENS)];
        let warm = Measure { ids: first, lengths: &[], decode: 1 };
        let run = |measure: &Measure<'_>, row: &Row<'_>, watch: &mut dyn FnMut(usize) -> ControlFlow<()>| {
            let (_, opened, policy) = row;
            measure.run(opened.model(), opened.inference().parameters(), policy, watch)
        };
        run(&warm, &all[0], &mut |_| ControlFlow::Continue(()))?;
        let mut progress = Progress::new("measured", "tokens", tokens * all.len());
        let (mut rows, mut reference): (Vec<Value>, _) = (Vec::with_capacity(all.len()), None);
        for (i, row) in all.iter().enumerate() {
            let (name, _, policy) = row;
            let measured = run(&measure, row, &mut |done| {
                progress.at(i * tokens + done);
                if interrupt::asked() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
            })?;
            progress.clear();
            let Some(measured) = measured else { interrupt::leave() };
            if measured.loss.is_some_and(|loss| !loss.is_finite()) {
                bail!(
                    "policy `{name}`: the loss is not finite: the weights are damaged, or their training diverged; use \
                     an earlier checkpoint"
                );
            }
            if i == 0 {
                reference = measured.loss;
            }
            let change = measured.loss.zip(reference).map(|(loss, reference)| loss - reference);
            table.row(name, &measured, change);
            rows.push(json!({ "policy": name, "settings": policy, "measured": measured, "change": change }));
            if let Some(output) = output {
                let all = json!({
                    "model": self.model.model, "text": text, "tokens": tokens, "lengths": self.lengths,
                    "decode": self.decode, "rows": rows,
                });
                output.write(&serde_json::to_vec_pretty(&all)?)?;
            }
        }
        Ok(())
    }
}

/// A row of the table: its name, its model and its policy.
type Row<'a> = (String, &'a OpenedModel, Policy);

/// No anchors are kept or read.
fn without_anchors() -> Policy {
    Policy { interval: None, ..Policy::default() }
}

/// The policy of the checkpoint, each setting alone, and some together, and no anchors; without duplicates, and without
/// those that contradict the checkpoint's own settings.
fn built_in(opened: &OpenedModel, interval: usize) -> Vec<Policy> {
    let (own, model) = (opened.policy(), opened.model());
    let anchor = model.anchor_bytes(own);
    let (small, large) = (round(16 * anchor), round(64 * anchor));
    let mut settings = vec![String::new()];
    if interval / 2 > 1 {
        settings.push(format!("interval={}", interval / 2));
    }
    settings.extend([2, 8].map(|factor| format!("interval={}", interval.saturating_mul(factor))));
    settings.extend(["top-k=4", "top-k=16"].map(String::from));
    settings.extend(["fenwick", "recent:8", "recent:64"].map(|rule| format!("retention={rule}")));
    settings.extend([small, large].map(|bytes| format!("retention=budget:{bytes}")));
    settings.extend(["storage=bf16", "storage=int8"].map(String::from));
    settings.push(format!("placement=adaptive:{}", interval / 2));
    settings.push("top-k=4 storage=int8".into());
    settings.push(format!("retention=budget:{small} top-k=4 storage=int8"));
    let mut policies: Vec<Policy> = Vec::new();
    for policy in settings.iter().filter_map(|settings| own.with(settings).ok()).chain([without_anchors()]) {
        if !policies.contains(&policy) && model.check_policy(&policy).is_ok() {
            policies.push(policy);
        }
    }
    policies
}

/// Rounds up to two significant digits.
pub fn round(bytes: usize) -> usize {
    let step = 10usize.pow(bytes.max(1).ilog10().saturating_sub(1));
    bytes.div_ceil(step) * step
}

/// Columns of equal width, or Markdown.
struct Table {
    columns: Vec<String>,
    widths: Vec<usize>,
    markdown: bool,
}

impl Table {
    fn new(lengths: &[usize], names: &[&str], markdown: bool) -> Self {
        let mut columns = vec!["policy".to_string()];
        columns.extend(lengths.iter().map(|&length| format!("bytes after {}", thousands(length))));
        columns.extend(["loss", "change", "read/s", "decoded/s"].map(String::from));
        let mut widths: Vec<usize> = columns.iter().map(|column| column.len().max(8)).collect();
        widths[0] = names.iter().map(|name| name.len()).fold(widths[0], usize::max);
        Self { columns, widths, markdown }
    }

    fn head(&self) {
        self.line(&self.columns);
        if self.markdown {
            say!("|---|{}", "--:|".repeat(self.columns.len() - 1));
        }
    }

    fn row(&self, name: &str, measured: &Measured, change: Option<f64>) {
        let number = |number: Option<f64>, show: fn(f64) -> String| number.map_or("–".to_string(), show);
        let speed = |speed: f64| thousands(speed.round() as usize);
        let mut cells = vec![if self.markdown { format!("`{name}`") } else { name.to_string() }];
        cells.extend(measured.bank_bytes.iter().map(|&count| bytes(count)));
        cells.push(number(measured.loss, |loss| format!("{loss:.4}")));
        cells.push(number(change, |change| format!("{change:+.4}")));
        cells.push(number(measured.read_speed, speed));
        cells.push(number(measured.decode_speed, speed));
        self.line(&cells);
    }

    fn line(&self, cells: &[String]) {
        if self.markdown {
            return say!("| {} |", cells.join(" | "));
        }
        let mut line = format!("{:<1$}", cells[0], self.widths[0]);
        for (cell, width) in cells.iter().zip(&self.widths).skip(1) {
            line.push_str(&format!("  {cell:>width$}"));
        }
        say!("{line}");
    }
}
