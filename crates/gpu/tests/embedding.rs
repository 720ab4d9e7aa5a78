//! embedding: device = reference with repeated, missing and no ids, and with packed tables.

use march_engine::{Device, Precision};

use crate::common::{Random, assert_close, compare, devices, tests};

tests![device_equals_reference, packed_tables];

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
        let ids: Vec<u32> = (0..count).map(|_| random.between(0, rows - 1) as u32).collect();
        let table = random.input("table", &[rows, width], 1.0);
        let label = format!("embedding {rows}×{width} {shape:?}");
        compare(&label, &|v| Ok(vec![v[0].embedding(&ids, &shape)?]), &[table]);
    }
}

fn packed_tables() {
    let mut random = Random(5);
    for width in [1, 6, 35] {
        let table = random.input("table", &[9, width], 2.0);
        for precision in [Precision::F32, Precision::Bf16, Precision::Int8] {
            let run = |device: &Device| {
                let packed = table.on(device).pack(precision).unwrap();
                packed.embedding(&[8, 0, 3, 3, 1], &[5]).unwrap().to_f64()
            };
            let want = run(&Device::reference());
            for device in devices() {
                assert_close(&format!("{device}, {width} in {precision}"), &run(device), &want, 1e-6);
            }
        }
    }
}
