//! swiglu: device = reference, on odd and empty sizes and at the ends of the value range.

use crate::common::{Random, compare, tests};

tests![device_equals_reference];

fn device_equals_reference() {
    let mut random = Random(3);
    for shape in [vec![0, 3], vec![1], vec![5, 7], vec![2, 3, 129]] {
        for scale in [1.0, 30.0] {
            let inputs = [random.input("gate", &shape, scale), random.input("up", &shape, 1.0)];
            compare(&format!("swiglu {shape:?} × {scale}"), &|v| Ok(vec![v[0].swiglu(&v[1])?]), &inputs);
        }
    }
}
