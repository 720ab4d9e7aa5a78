//! matmul: device = reference for every transposition, batched and with a shared right operand.

use march_engine::ops::matmul::{MatMul, Transpose};
use march_engine::{Engine, Result, Tape, Var};

use crate::common::{Program, Random, compare, devices};

struct Product(Transpose);

impl Program for Product {
    fn run<'e, E: Engine>(&self, tape: &Tape<'e, E>, v: &[Var<E::Tensor>]) -> Result<Vec<Var<E::Tensor>>> {
        Ok(vec![tape.matmul(MatMul { a: &v[0], b: &v[1] }, self.0)?])
    }
}

fn check(random: &mut Random, leading: &[usize], [m, n, k]: [usize; 3], shared: bool, transpose: Transpose) {
    let shape = |leading: &[usize], last: [usize; 2], swap: bool| {
        let [a, b] = last;
        let last = if swap { [b, a] } else { [a, b] };
        [leading, &last].concat()
    };
    let b_leading = if shared { &[] } else { leading };
    let inputs = [
        random.input("a", &shape(leading, [m, k], transpose.a), 1.0),
        random.input("b", &shape(b_leading, [k, n], transpose.b), 1.0),
    ];
    let label = format!("matmul {leading:?} {m}×{n}×{k}, shared {shared}, {transpose:?}");
    compare(&label, &Product(transpose), &inputs);
}

const ALL: [Transpose; 4] = [
    Transpose { a: false, b: false },
    Transpose { a: false, b: true },
    Transpose { a: true, b: false },
    Transpose { a: true, b: true },
];

#[test]
fn device_equals_reference() {
    let mut random = Random(3);
    for transpose in ALL {
        for (leading, sizes, shared) in [
            (vec![], [1, 1, 1], false),
            (vec![2, 2], [3, 5, 4], false),
            (vec![3], [17, 20, 33], true),
            (vec![2], [67, 70, 18], false),
            (vec![0], [2, 3, 4], true),
            (vec![2], [4, 3, 0], false),
            (vec![2], [1, 66, 131], true),
        ] {
            check(&mut random, &leading, sizes, shared, transpose);
        }
    }
}

#[test]
fn random_shapes() {
    let mut random = Random(9);
    for turn in 0..20 {
        let sizes = [80, 80, 40].map(|most| random.between(1, most));
        let batch = random.between(1, 3);
        let shared = random.bits().is_multiple_of(2);
        check(&mut random, &[batch], sizes, shared, ALL[turn % 4]);
    }
}

#[test]
fn a_row_alone_has_the_same_bits() {
    let mut random = Random(7);
    let (m, n, k) = (40, 35, 150);
    let (a, b) = (random.input("a", &[m, k], 1.0), random.input("b", &[k, n], 1.0));
    for device in devices() {
        let b = device.from_f64(&b.data, &b.shape).unwrap();
        let run = |rows: std::ops::Range<usize>| {
            let part = &a.data[rows.start * k..rows.end * k];
            let a = device.from_f64(part, &[rows.len(), k]).unwrap();
            device.to_f32(&device.matmul(MatMul { a: &a, b: &b }, Transpose::default()).unwrap())
        };
        let all = run(0..m);
        for rows in [0..1, 7..9, 10..40] {
            assert!(run(rows.clone()) == all[rows.start * n..rows.end * n], "{device:?}: rows {rows:?}");
        }
    }
}
