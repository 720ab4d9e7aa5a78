//! state_read: device = reference, on odd and empty sizes and on queries without length.

use march_engine::ops::state_read::StateRead;
use march_engine::{Result, Tensor};

use crate::common::{Input, Random, compare, devices, infer, tests};

tests![device_equals_reference, random_shapes, rows_do_not_depend_on_each_other];

fn read(v: &[Tensor], key_heads: usize) -> Result<Vec<Tensor>> {
    Ok(vec![StateRead { query: &v[0], states: &v[1] }.state_read(key_heads)?])
}

fn inputs(random: &mut Random, rows: usize, heads: [usize; 2], dims: [usize; 2], scale: f64) -> [Input; 2] {
    [
        random.input("query", &[rows, heads[0] * dims[0]], scale),
        random.input("states", &[rows, heads[1], dims[0], dims[1]], 1.0),
    ]
}

fn device_equals_reference() {
    let mut random = Random(31);
    for (rows, heads, dims) in [
        (0, [1, 1], [4, 4]),
        (1, [1, 1], [1, 1]),
        (3, [2, 4], [8, 16]),
        (5, [1, 3], [7, 130]),
        (2, [2, 2], [70, 33]),
    ] {
        for scale in [1.0, 1e-4, 0.0] {
            let inputs = inputs(&mut random, rows, heads, dims, scale);
            let label = format!("state_read {rows} rows, heads {heads:?}, {dims:?}, × {scale}");
            compare(&label, &|v| read(v, heads[0]), &inputs);
        }
    }
}

fn random_shapes() {
    let mut random = Random(32);
    for _ in 0..20 {
        let (key_heads, group) = (random.between(1, 3), random.between(1, 3));
        let dims = [random.between(1, 40), random.between(1, 90)];
        let rows = random.between(1, 9);
        let inputs = inputs(&mut random, rows, [key_heads, key_heads * group], dims, 1.0);
        compare(&format!("state_read {rows} rows, {dims:?}"), &|v| read(v, key_heads), &inputs);
    }
}

/// A row's readout has the same bits alone and among others.
fn rows_do_not_depend_on_each_other() {
    let all = inputs(&mut Random(33), 7, [1, 2], [20, 70], 1.0);
    let mut alone = all.clone();
    for input in &mut alone {
        let width: usize = input.shape[1..].iter().product();
        input.shape[0] = 1;
        input.data = input.data[4 * width..5 * width].to_vec();
    }
    for device in devices() {
        let run = |inputs: &[Input]| infer(device, &|v| read(v, 1), inputs).unwrap().remove(0).1;
        assert!(run(&alone)[..] == run(&all)[4 * 140..5 * 140], "{device}");
    }
}
