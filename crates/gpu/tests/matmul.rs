//! matmul: device = reference for every transposition, batched and with a shared right operand.

use march_engine::ops::matmul::Transpose;

use crate::common::{Random, compare, devices, tests};

tests![device_equals_reference, random_shapes, a_row_alone_has_the_same_bits];

fn check(random: &mut Random, leading: &[usize], [m, n, k]: [usize; 3], shared: bool, transpose: Transpose) {
    let shape = |leading: &[usize], [a, b]: [usize; 2], swap: bool| {
        let last = if swap { [b, a] } else { [a, b] };
        [leading, &last].concat()
    };
    let b_leading = if shared { &[] } else { leading };
    let inputs = [
        random.input("a", &shape(leading, [m, k], transpose.a), 1.0),
        random.input("b", &shape(b_leading, [k, n], transpose.b), 1.0),
    ];
    let label = format!("matmul {leading:?} {m}×{n}×{k}, shared {shared}, {transpose:?}");
    compare(&label, &|v| Ok(vec![v[0].matmul_with(&v[1], transpose)?]), &inputs);
}

const ALL: [Transpose; 4] = [
    Transpose { a: false, b: false },
    Transpose { a: false, b: true },
    Transpose { a: true, b: false },
    Transpose { a: true, b: true },
];

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

fn random_shapes() {
    let mut random = Random(9);
    for turn in 0..20 {
        let sizes = [80, 80, 40].map(|most| random.between(1, most));
        let batch = random.between(1, 3);
        let shared = random.bits().is_multiple_of(2);
        check(&mut random, &[batch], sizes, shared, ALL[turn % 4]);
    }
}

fn a_row_alone_has_the_same_bits() {
    let mut random = Random(7);
    let (m, n, k) = (40, 35, 150);
    let (a, b) = (random.input("a", &[m, k], 1.0), random.input("b", &[k, n], 1.0));
    for device in devices() {
        let (a, b) = (a.on(device), b.on(device));
        let all = a.matmul(&b).unwrap().to_f32();
        for rows in [0..1, 7..9, 10..40] {
            let some = a.slice(0, rows.clone()).unwrap().matmul(&b).unwrap().to_f32();
            assert!(some == all[rows.start * n..rows.end * n], "{device}: rows {rows:?}");
        }
    }
}
