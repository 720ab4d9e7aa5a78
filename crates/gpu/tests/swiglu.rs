//! swiglu: device = reference, on odd and empty sizes and at the ends of the value range.

use march_engine::ops::swiglu::SwiGlu;
use march_engine::{Engine, Result, Tape, Var};

use crate::common::{Program, Random, compare};

struct Forward;

impl Program for Forward {
    fn run<'e, E: Engine>(&self, tape: &Tape<'e, E>, v: &[Var<E::Tensor>]) -> Result<Vec<Var<E::Tensor>>> {
        Ok(vec![tape.swiglu(SwiGlu { gate: &v[0], up: &v[1] })?])
    }
}

#[test]
fn device_equals_reference() {
    let mut random = Random(3);
    for shape in [vec![0, 3], vec![1], vec![5, 7], vec![2, 3, 129]] {
        for scale in [1.0, 30.0] {
            let inputs = [random.input("gate", &shape, scale), random.input("up", &shape, 1.0)];
            compare(&format!("swiglu {shape:?} × {scale}"), &Forward, &inputs);
        }
    }
}
