//! anchor_read: device = reference; dense and top-K, with and without null, ragged plans, stored states.

mod common;

use std::sync::Arc;

use common::{Input, Program, Random, assert_close, compare, devices, outcome};
use march_engine::ops::anchor_read::{AnchorRead, AnchorReadOptions, ReadPlan, Segment, Storage, Visible};
use march_engine::{Cpu, CpuOptions, Engine, Reference, Result, Tape, Var};

struct Read(AnchorReadOptions);

fn inputs_of<T>(v: &[T]) -> AnchorRead<&T> {
    AnchorRead {
        query: &v[0],
        routing_query: &v[1],
        routing_keys: &v[2],
        anchor_states: &v[3],
        null_score: v.get(4),
    }
}

impl Program for Read {
    fn run<'e, E: Engine>(&self, tape: &Tape<'e, E>, v: &[Var<E::Tensor>]) -> Result<Vec<Var<E::Tensor>>> {
        Ok(vec![tape.anchor_read(inputs_of(v), &self.0)?])
    }
}

#[derive(Clone, Copy)]
struct Case {
    rows: usize,
    anchors: usize,
    key_heads: usize,
    value_heads: usize,
    key_dim: usize,
    value_dim: usize,
    routing_dim: usize,
    null: bool,
    top_k: Option<usize>,
}

const BASE: Case = Case {
    rows: 20,
    anchors: 3,
    key_heads: 1,
    value_heads: 1,
    key_dim: 8,
    value_dim: 8,
    routing_dim: 8,
    null: true,
    top_k: None,
};

fn program(c: Case, plan: ReadPlan, random: &mut Random) -> (Read, Vec<Input>) {
    let mut inputs = vec![
        random.input("query", &[c.rows, c.key_heads * c.key_dim], 1.0),
        random.input("routing_query", &[c.rows, c.value_heads * c.routing_dim], 1.0),
        random.input("routing_keys", &[c.anchors, c.value_heads * c.routing_dim], 0.7),
        random.input("anchor_states", &[c.anchors, c.value_heads, c.key_dim, c.value_dim], 1.0),
    ];
    if c.null {
        inputs.push(random.input("null_score", &[c.rows, c.value_heads], 1.0));
    }
    let options = AnchorReadOptions {
        key_heads: c.key_heads,
        value_heads: c.value_heads,
        top_k: c.top_k,
        routing_scale: 0.9,
        plan: Arc::new(plan),
    };
    (Read(options), inputs)
}

fn run(start: usize, len: usize, visible: std::ops::Range<usize>) -> Segment {
    Segment { start, len, visible: Visible::Run(visible) }
}

fn list(start: usize, len: usize, visible: &[usize]) -> Segment {
    Segment { start, len, visible: Visible::List(visible.to_vec()) }
}

/// Plans with their rows and anchors: nothing at all, periodic, two batch rows, arbitrary subsets, many anchors.
fn plans() -> Vec<(usize, usize, ReadPlan)> {
    let every = |tokens: usize, c: usize| -> Vec<usize> { (1..=tokens / c).map(|m| m * c).collect() };
    vec![
        (0, 0, ReadPlan::default()),
        (3, 0, ReadPlan { segments: vec![run(1, 2, 0..0)] }),
        (1, 1, ReadPlan { segments: vec![run(0, 1, 0..1)] }),
        (5, 2, ReadPlan { segments: vec![run(1, 2, 0..0), run(4, 1, 1..2)] }),
        (20, 6, ReadPlan::from_boundaries(20, &[every(20, 3)])),
        (80, 14, ReadPlan::from_boundaries(40, &[every(40, 5), vec![1, 2, 3, 30, 33, 39]])),
        (
            30,
            7,
            ReadPlan { segments: vec![list(2, 3, &[0, 2, 5]), list(5, 1, &[]), list(8, 20, &[1, 5, 6])] },
        ),
        (
            70,
            37,
            ReadPlan {
                segments: vec![run(0, 41, 0..37), list(41, 29, &(0..37).step_by(2).collect::<Vec<_>>())],
            },
        ),
    ]
}

/// key heads, value heads, d_k, d_v, d_r: one tile, several, and sizes that no tile divides.
const SHAPES: [(usize, usize, usize, usize, usize); 4] =
    [(1, 1, 8, 8, 8), (2, 4, 12, 24, 5), (1, 2, 3, 70, 17), (1, 1, 67, 33, 66)];

#[test]
fn dense_equals_reference() {
    let mut random = Random(21);
    for (i, (rows, anchors, plan)) in plans().into_iter().enumerate() {
        for (j, &(key_heads, value_heads, key_dim, value_dim, routing_dim)) in SHAPES.iter().enumerate() {
            let null = (i + j) % 2 == 0;
            let case = Case {
                rows,
                anchors,
                key_heads,
                value_heads,
                key_dim,
                value_dim,
                routing_dim,
                null,
                top_k: None,
            };
            let (read, inputs) = program(case, plan.clone(), &mut random);
            compare(&format!("plan {i}, shape {j}, null {null}"), &read, &inputs);
        }
    }
}
