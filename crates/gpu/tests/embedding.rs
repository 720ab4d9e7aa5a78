//! embedding: device = reference with repeated, missing and no ids, and with packed tables.

use march_engine::ops::embedding::Embedding;
use march_engine::{Engine, Precision, Reference, Result, Tape, Var, Weight};

use crate::common::{self, Program, Random, assert_close, compare, devices};

struct Rows {
    ids: Vec<u32>,
    shape: Vec<usize>,
}

impl Program for Rows {
    fn run<'e, E: Engine>(&self, tape: &Tape<'e, E>, v: &[Var<E::Tensor>]) -> Result<Vec<Var<E::Tensor>>> {
        Ok(vec![tape.embedding(Embedding { table: &v[0], ids: &self.ids, shape: &self.shape })?])
    }
}

#[test]
fn device_equals_reference() {
    let mut random = Random(3);
    let mut sizes = vec![
        (5, 3, vec![0]),
        (1, 1, vec![1]),
        (7, 33, vec![2, 3]),
        (3, 70, vec![131]),
        (300, 5, vec![40]),
        (4, 0, vec![2]),
    ];
    for _ in 0..15 {
        sizes.push((random.between(1, 40), random.between(1, 100), vec![random.between(1, 90)]));
    }
    for (rows, width, shape) in sizes {
        let count = shape.iter().product();
        let ids = (0..count).map(|_| random.between(0, rows - 1) as u32).collect();
        let table = random.input("table", &[rows, width], 1.0);
        compare(&format!("embedding {rows}×{width} {shape:?}"), &Rows { ids, shape }, &[table]);
    }
}

#[test]
fn packed_tables() {
    let mut random = Random(5);
    for width in [1, 6, 35] {
        let table = random.input("table", &[9, width], 2.0);
        let ids = [8, 0, 3, 3, 1];
        for precision in [Precision::F32, Precision::Bf16, Precision::Int8] {
            let want = packed(&Reference, &table, &ids, precision);
            for device in devices() {
                let found = packed(&device, &table, &ids, precision);
                assert_close(&format!("{device:?}, {width} in {precision}"), &found, &want, 1e-6);
            }
        }
    }
}

fn packed<E: Engine>(engine: &E, table: &common::Input, ids: &[u32], precision: Precision) -> Vec<f64> {
    let table = engine.from_f64(&table.data, &table.shape).unwrap();
    let packed = engine.pack(&table, precision).unwrap();
    let input = Embedding { table: Weight::Packed(&packed), ids, shape: &[ids.len()] };
    engine.to_f64(&engine.embedding(input).unwrap())
}
