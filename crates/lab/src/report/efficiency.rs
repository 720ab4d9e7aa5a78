//! The page of the experiment `efficiency`: time by sequence length.

use super::evidence::{Cell, Figure, Page, Plot, Point, Scale, Section, Series, SeriesStyle, Table};
use super::heat::short;
use super::text::thousands;
use crate::reproduce::efficiency::{Kind, Timing, composed};

/// A claim of the paper's figure on training efficiency, as a ratio of two times.
struct Target {
    claim: &'static str,
    /// How many times as long as `faster` the arm `slower` must take, at least.
    wanted: f64,
    slower: &'static str,
    faster: &'static str,
    kind: Kind,
    length: usize,
}

const TARGETS: [Target; 4] = [
    Target {
        claim: "dense reading takes less time in the core than attention at 32K tokens",
        wanted: 1.0,
        slower: "attention",
        faster: "MARCH dense",
        kind: Kind::Core,
        length: 32_768,
    },
    Target {
        claim: "top-4 takes an eighth of the dense core's time at 128K",
        wanted: 8.0,
        slower: "MARCH dense",
        faster: "MARCH top-4",
        kind: Kind::Core,
        length: 131_072,
    },
    Target {
        claim: "top-4 trains twice as fast as dense at 128K",
        wanted: 2.0,
        slower: "MARCH dense",
        faster: "MARCH top-4",
        kind: Kind::EndToEnd,
        length: 131_072,
    },
    Target {
        claim: "top-4 trains faster than attention at 128K",
        wanted: 1.0,
        slower: "attention",
        faster: "MARCH top-4",
        kind: Kind::EndToEnd,
        length: 131_072,
    },
];

impl Target {
    /// The time of the slower arm over that of the faster one; `None` if one of them was not measured. A training step
    /// that was not measured as a whole is composed of its parts, for both arms.
    fn ratio(&self, timings: &[Timing]) -> Option<f64> {
        let arms = [self.slower, self.faster];
        // Steps may differ in their number of tokens.
        let whole =
            |arm| find(timings, arm, self.kind, self.length).map(|timing| 1.0 / timing.tokens_per_second);
        let parts = |arm| composed(timings, arm, self.length).filter(|_| self.kind == Kind::EndToEnd);
        let ratio = |times: [Option<f64>; 2]| Some(times[0]? / times[1]?);
        ratio(arms.map(whole)).or_else(|| ratio(arms.map(parts)))
    }
}

/// What the measured times say of the paper's claims, each with its ratio: those that hold, those that do not, and
/// those that were not measured.
pub fn verdict(timings: &[Timing]) -> Vec<String> {
    let (mut holds, mut fails, mut missing) = (Vec::new(), Vec::new(), Vec::new());
    for target in &TARGETS {
        match target.ratio(timings) {
            Some(ratio) => {
                let list = if ratio >= target.wanted { &mut holds } else { &mut fails };
                let Target { claim, wanted, .. } = target;
                list.push(format!("{claim} (ratio {ratio:.2}, at least {wanted} wanted)"));
            }
            None => missing.push(target.claim.to_string()),
        }
    }
    let count = TARGETS.len();
    let parts =
        [(holds, "hold in this run"), (fails, "do not hold in this run"), (missing, "were not measured")];
    let parts = parts.into_iter().filter(|(claims, _)| !claims.is_empty());
    let line = |(claims, what): (Vec<String>, &str)| {
        format!("**{} of the paper's {count} claims {what}**: {}.", claims.len(), claims.join("; "))
    };
    parts.map(line).collect()
}

/// The page of measured times. `notes` say what was scaled down, and whether PyTorch was found.
pub fn page(timings: &[Timing], facts: Vec<(String, String)>, notes: &[String]) -> Page {
    let mut summary = vec![
        "How does the cost of training grow with the length of the text, for attention, Gated DeltaNet (GDN), MARCH that \
         reads all anchors, and MARCH that reads the best four?"
            .to_string(),
        "In the paper: the figure on training efficiency.".to_string(),
    ];
    summary.extend(verdict(timings));
    let results = Section {
        heading: "Results".into(),
        tables: tables(timings),
        figures: vec![figure(timings)],
        ..Section::default()
    };
    let claims = Section {
        heading: "The paper's claims".into(),
        text: vec![
            "From the same run. The ratio is the time of the first over the time of the second. Where no whole training \
             step was measured, it is computed as in the table above."
                .into(),
        ],
        tables: vec![claims(timings)],
        ..Section::default()
    };
    let scaled =
        Section { heading: "What differs from the paper".into(), list: notes.to_vec(), ..Section::default() };
    Page {
        title: "Efficiency: time by length of the text".into(),
        summary,
        facts,
        sections: vec![results, claims, scaled],
    }
}

/// The arms and lengths that were measured, in the order of the measurements.
fn axes(timings: &[Timing], kind: Kind) -> (Vec<&str>, Vec<usize>) {
    let (mut arms, mut lengths) = (Vec::new(), Vec::new());
    for timing in timings.iter().filter(|timing| timing.kind == kind) {
        if !arms.contains(&timing.arm.as_str()) {
            arms.push(timing.arm.as_str());
        }
        if !lengths.contains(&timing.length) {
            lengths.push(timing.length);
        }
    }
    lengths.sort_unstable();
    (arms, lengths)
}

fn find<'a>(timings: &'a [Timing], arm: &str, kind: Kind, length: usize) -> Option<&'a Timing> {
    let mut own = timings.iter().filter(|timing| timing.arm == arm && timing.kind == kind);
    own.find(|timing| timing.length == length && !timing.is_skipped())
}

/// A table for each kind that was measured, and one for what follows from them.
fn tables(timings: &[Timing]) -> Vec<Table> {
    let kinds = [Kind::Core, Kind::EndToEnd, Kind::OneLayer, Kind::TwoLayers];
    let mut tables = kinds.map(|kind| table(timings, kind)).to_vec();
    tables.push(composed_table(timings));
    // A page always has the first two.
    let mut number = 0;
    tables.retain(|table| {
        number += 1;
        number <= 2 && timings.iter().all(|timing| timing.kind != Kind::OneLayer) || !table.rows.is_empty()
    });
    tables
}

/// Training steps of all layers, computed from their parts.
fn composed_table(timings: &[Timing]) -> Table {
    let (arms, lengths) = axes(timings, Kind::Core);
    let mut columns = vec!["model".to_string()];
    columns.extend(lengths.iter().map(|&length| short(length)));
    let rows = arms.iter().map(|arm| {
        let speeds = lengths.iter().map(|&length| composed(timings, arm, length));
        let cells = speeds.map(|seconds| Cell::of(seconds.map_or("–".into(), |s| format!("{:.1}", 1.0 / s))));
        std::iter::once(Cell::of(*arm)).chain(cells).collect::<Vec<_>>()
    });
    let rows = rows.filter(|row| row[1..].iter().any(|cell| cell.text != "–")).collect();
    let caption = "Training of all 21 layers, tokens per second, computed: two layers − one layer, with the core of that \
                   length in place of the core of the measured step, times 21, plus what is outside of layers";
    Table { caption: caption.into(), columns, rows }
}

fn table(timings: &[Timing], kind: Kind) -> Table {
    let (arms, lengths) = axes(timings, kind);
    let mut columns = vec!["model".to_string()];
    columns.extend(lengths.iter().map(|&length| short(length)));
    let rows = arms.iter().map(|arm| {
        let mut cells = vec![Cell::of(*arm)];
        cells.extend(lengths.iter().map(|&length| {
            let shown = |timing: &Timing| match kind {
                Kind::Core => format!("{:.1}", 1e3 * timing.seconds),
                Kind::EndToEnd => thousands(timing.tokens_per_second),
                Kind::OneLayer | Kind::TwoLayers => format!("{:.1}", timing.tokens_per_second),
            };
            match find(timings, arm, kind, length) {
                Some(timing) => Cell {
                    title: format!(
                        "{:.1} GFLOP/s, best of {}",
                        timing.flop / timing.seconds / 1e9,
                        timing.repeats
                    ),
                    ..Cell::of(shown(timing))
                },
                None => Cell::of("–"),
            }
        }));
        cells
    });
    let caption = match kind {
        Kind::Core => {
            "The sequence-mixing operation alone, forward and backward, milliseconds (lower is better)"
        }
        Kind::EndToEnd => "Training end to end, tokens per second (higher is better)",
        Kind::OneLayer => "Training a model with one layer, tokens per second",
        Kind::TwoLayers => "Training a model with two layers, tokens per second",
    };
    Table { caption: caption.into(), columns, rows: rows.collect() }
}

fn figure(timings: &[Timing]) -> Figure {
    let plot = |kind: Kind, title: &str, label: &str, value: &dyn Fn(&Timing) -> Option<f64>| {
        let (arms, lengths) = axes(timings, kind);
        let series = arms.iter().map(|arm| Series {
            name: arm.to_string(),
            points: lengths
                .iter()
                .filter_map(|&length| find(timings, arm, kind, length))
                .filter_map(|timing| {
                    let y = value(timing)?;
                    Some(Point { x: timing.length as f64, y, low: f64::NAN, high: f64::NAN })
                })
                .collect(),
            style: if arm.starts_with("PyTorch") { SeriesStyle::Dashed } else { SeriesStyle::Line },
        });
        Plot {
            title: title.into(),
            x: Scale { label: "tokens".into(), log: true, ..Scale::default() },
            y: Scale { label: label.into(), log: true, ..Scale::default() },
            series: series.collect(),
            levels: Vec::new(),
        }
    };
    let measured = timings.iter().any(|timing| timing.kind == Kind::EndToEnd);
    let training = match measured {
        true => {
            plot(Kind::EndToEnd, "Training", "tokens per second", &|timing| Some(timing.tokens_per_second))
        }
        false => plot(Kind::Core, "Training, computed", "tokens per second", &|timing| {
            composed(timings, &timing.arm, timing.length).map(|seconds| 1.0 / seconds)
        }),
    };
    Figure {
        name: "efficiency".into(),
        title: "Training cost by length of the text".into(),
        line:
            "Left: training, tokens per second. Right: the sequence-mixing operation, forward and backward."
                .into(),
        charts: vec![
            training,
            plot(Kind::Core, "Core, forward and backward", "milliseconds", &|timing| {
                Some(1e3 * timing.seconds)
            }),
        ],
    }
}

fn claims(timings: &[Timing]) -> Table {
    let rows = TARGETS.iter().map(|target| {
        let ratio = target.ratio(timings);
        let verdict = match ratio {
            Some(ratio) if ratio >= target.wanted => "holds",
            Some(_) => "does not hold",
            None => "not measured",
        };
        vec![
            Cell::of(target.claim),
            Cell::of(format!("≥ {}", target.wanted)),
            Cell::of(ratio.map_or("–".into(), |ratio| format!("{ratio:.2}"))),
            Cell { strong: ratio.is_some(), ..Cell::of(verdict) },
        ]
    });
    let columns = ["claim", "ratio wanted", "ratio here", ""].map(String::from).to_vec();
    Table { caption: String::new(), columns, rows: rows.collect() }
}
