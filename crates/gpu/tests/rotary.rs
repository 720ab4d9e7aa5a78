//! rotary: device = reference, also at far positions; the bits of a token depend on its position alone.

use march_engine::Tensor;
use march_engine::ops::rotary::Rotary;

use crate::common::{Input, Random, compare, devices, tests};

tests![device_equals_reference, bits_depend_on_the_position_alone];

fn check(inputs: &[Input], rotary: Rotary) {
    let label = format!("{rotary:?} of {:?}", inputs[0].shape);
    compare(&label, &|v| Ok(vec![v[0].rotary(rotary)?]), inputs);
}

fn device_equals_reference() {
    let mut random = Random(11);
    for (batch, tokens, heads, head, offset) in [
        (1, 1, 1, 2, 0),
        (2, 0, 1, 8, 3),
        (0, 4, 1, 8, 3),
        (2, 150, 3, 12, 0),
        (1, 70, 2, 64, 61),
        (3, 5, 1, 6, 1_000_000),
        (1, 3, 2, 8, 1 << 40),
    ] {
        let inputs = [random.input("x", &[batch, tokens, heads * head], 1.0)];
        check(&inputs, Rotary::new(heads, 500_000.0, offset));
    }
    for _ in 0..15 {
        let (heads, head) = (random.between(1, 4), 2 * random.between(1, 20));
        let shape = [random.between(1, 3), random.between(1, 140), heads * head];
        let offset = random.between(0, 300);
        check(&[random.input("x", &shape, 1.0)], Rotary::new(heads, 10_000.0, offset));
    }
}

fn bits_depend_on_the_position_alone() {
    let x = Random(12).input("x", &[1, 200, 24], 1.0);
    for device in devices() {
        let at = |from: usize, to: usize| {
            let part = &x.data[from * 24..to * 24];
            let part = Tensor::from_f64(part, &[1, to - from, 24], device).unwrap();
            part.rotary(Rotary::new(2, 10_000.0, 7 + from)).unwrap().to_f32()
        };
        let pieces: Vec<f32> =
            [(0, 1), (1, 60), (60, 130), (130, 200)].iter().flat_map(|&(a, b)| at(a, b)).collect();
        assert!(pieces == at(0, 200), "{device}");
    }
}
