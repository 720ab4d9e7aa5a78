//! The plots on the page of an experiment.

use super::evidence::{Plot, Point, Scale, Series, SeriesStyle};
use super::experiment::{mean, rows_of};
use crate::reproduce::{Evaluation, Mean, Measured, PlotSpec, Quantity, Results};

/// A plot of an experiment: a line, points or bars for each row, over the evaluations of a course.
pub(super) fn plotted(results: &Results, spec: &PlotSpec) -> Plot {
    let experiment = &results.plan.experiment;
    let evaluations: Vec<&Evaluation> = experiment
        .evaluations_of(&spec.course)
        .filter(|evaluation| spec.evaluations.as_ref().is_none_or(|names| names.contains(&evaluation.name)))
        .collect();
    let loss = evaluations.iter().any(|evaluation| evaluation.text.is_some());
    let mut rows = rows_of(results, &spec.course);
    rows.retain(|row| spec.rows.as_ref().is_none_or(|names| names.iter().any(|name| name == row)));
    let series = rows.iter().map(|row| Series {
        name: row.to_string(),
        points: points(results, row, &evaluations, spec.x),
        style: match spec.x {
            Quantity::Name => SeriesStyle::Bars,
            Quantity::Bytes | Quantity::Flop => SeriesStyle::Points,
            _ if experiment.variant.iter().any(|variant| variant.name == *row) => SeriesStyle::Dashed,
            _ => SeriesStyle::Line,
        },
    });
    let names = match spec.x {
        Quantity::Name => evaluations.iter().map(|evaluation| evaluation.name.clone()).collect(),
        _ => Vec::new(),
    };
    Plot {
        title: spec.title.clone(),
        x: Scale {
            label: spec.label.clone(),
            log: !spec.linear && spec.x != Quantity::Name,
            bytes: spec.x == Quantity::Bytes,
            names,
            ..Scale::default()
        },
        y: Scale {
            label: if loss { "loss, nats per token" } else { "right answers" }.into(),
            percent: !loss,
            range: (!loss).then_some((0.0, 1.0)),
            ..Scale::default()
        },
        series: series.collect(),
        levels: Vec::new(),
    }
}

fn points(results: &Results, row: &str, evaluations: &[&Evaluation], x: Quantity) -> Vec<Point> {
    let mut points = Vec::new();
    for (i, evaluation) in evaluations.iter().enumerate() {
        let found = results.measured(row, evaluation);
        if x == Quantity::Position {
            points.extend(by_position(&found));
            continue;
        }
        let Some(mean) = mean(results, row, evaluation) else { continue };
        let average = |of: fn(&Measured) -> f64| {
            found.iter().map(|measured| of(measured)).sum::<f64>() / found.len().max(1) as f64
        };
        let at = match x {
            Quantity::Bytes => average(|measured| measured.memory_bytes as f64),
            Quantity::Flop => average(|measured| measured.flop_per_token),
            Quantity::Evaluation => evaluation.x.unwrap_or(i as f64),
            Quantity::Name | Quantity::Position => i as f64,
        };
        points.push(point(at, &mean));
    }
    points
}

fn point(x: f64, mean: &Mean) -> Point {
    let (low, high) = mean.interval().unwrap_or((f64::NAN, f64::NAN));
    Point { x, y: mean.value, low, high }
}

/// Losses by position, with intervals over seeds.
fn by_position(found: &[&Measured]) -> Vec<Point> {
    let Some(first) = found.first() else { return Vec::new() };
    let places = first.positions.iter().enumerate().filter_map(|(i, &(end, _))| {
        let losses: Vec<f64> =
            found.iter().filter_map(|measured| measured.positions.get(i).map(|&(_, loss)| loss)).collect();
        Mean::of(&losses).map(|mean| point(end as f64, &mean))
    });
    places.collect()
}
