//! Devices as values: one of the test's own, with a table of a few operations and its own tensor data; what it refuses;
//! and what all devices have in common.

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use march_engine::ops::accumulate::Accumulate;
use march_engine::ops::adamw::{self, AdamW, Step};
use march_engine::ops::elementwise::{Map, MapBackward, MapForward};
use march_engine::ops::gated_delta::CHUNK_TOKENS;
use march_engine::ops::linear::{Product, linear_list};
use march_engine::ops::pack::Pack;
use march_engine::{
    Backend, Cpu, DType, Data, Device, Error, Foreign, Op, Precision, Reference, Result, Table, Tape, Tensor,
};

use crate::common::{all_devices, cpu};

/// Data of the device: plain elements, or a packed weight.
#[derive(Clone, Debug)]
struct Numbers {
    shape: Vec<usize>,
    data: Vec<f64>,
    packed: bool,
}

impl Foreign for Numbers {
    fn shape(&self) -> &[usize] {
        &self.shape
    }
    fn dtype(&self) -> DType {
        if self.packed { DType::Int8 } else { DType::F64 }
    }
    fn is_plain(&self) -> bool {
        !self.packed
    }
    fn bytes(&self) -> usize {
        self.data.len() * if self.packed { 1 } else { 8 }
    }
}

/// A device that implements four operations and one of its own, and counts how often they ran.
struct Toy {
    table: Table,
    calls: AtomicUsize,
}

impl Backend for Toy {
    fn name(&self) -> &str {
        "toy"
    }
    fn table(&self) -> &Table {
        &self.table
    }
    fn from_f32(&self, data: &[f32], shape: &[usize]) -> Result<Data> {
        Ok(numbers(data.iter().map(|&v| f64::from(v)).collect(), shape))
    }
    fn full(&self, shape: &[usize], value: f64) -> Result<Data> {
        Ok(numbers(vec![value; shape.iter().product()], shape))
    }
    fn to_f32(&self, data: &Data) -> Vec<f32> {
        let Data::Foreign(data) = data else { panic!("of another device: {data:?}") };
        let data: &dyn Any = &**data;
        data.downcast_ref::<Numbers>().unwrap().data.iter().map(|&v| v as f32).collect()
    }
    fn check(&self) -> Result<()> {
        Err(Error::Device { message: "the toy was lost".into() })
    }
}

fn numbers(data: Vec<f64>, shape: &[usize]) -> Data {
    Data::Foreign(Arc::new(Numbers { shape: shape.to_vec(), data, packed: false }))
}

fn of(tensor: &Tensor) -> &Numbers {
    tensor.foreign().unwrap()
}

/// The operation of the test's own: x, `count` times one after the other.
struct Repeat {
    x: Tensor,
    count: usize,
}

impl Op for Repeat {
    const NAME: &'static str = "repeat";
    type Sizes = usize;
    type Output = Tensor;
    fn inputs(&self) -> Vec<&Tensor> {
        vec![&self.x]
    }
    fn check(&self) -> Result<usize> {
        match *self.x.shape() {
            [size] => Ok(size * self.count),
            _ => Err(Error::Value { operation: Self::NAME, message: "one dimension is expected".into() }),
        }
    }
}

fn map(toy: &Toy, op: MapForward, (): ()) -> Result<Tensor> {
    toy.calls.fetch_add(1, Ordering::Relaxed);
    let f = |&v: &f64| match op.kind {
        Map::Square => v * v,
        Map::Scale(factor) => v * factor,
        kind => panic!("{kind:?}"),
    };
    Ok(op.x.like(numbers(of(&op.x).data.iter().map(f).collect(), op.x.shape())))
}

fn map_backward(toy: &Toy, op: MapBackward, (): ()) -> Result<Tensor> {
    toy.calls.fetch_add(1, Ordering::Relaxed);
    let f = |(kept, gradient): (&f64, &f64)| match op.kind {
        Map::Square => 2.0 * kept * gradient,
        Map::Scale(factor) => factor * gradient,
        kind => panic!("{kind:?}"),
    };
    let dx = of(&op.kept).data.iter().zip(&of(&op.gradient).data).map(f).collect();
    Ok(op.kept.like(numbers(dx, op.kept.shape())))
}

fn accumulate(toy: &Toy, op: Accumulate, (): ()) -> Result<Tensor> {
    toy.calls.fetch_add(1, Ordering::Relaxed);
    let device = op.sum.device().clone();
    let mut sum: Numbers = op.sum.into_foreign().unwrap();
    sum.data.iter_mut().zip(&of(&op.term).data).for_each(|(sum, term)| *sum += term);
    Ok(Tensor::new(Data::Foreign(Arc::new(sum)), &device))
}

fn pack(_: &Toy, op: Pack, _: [usize; 2]) -> Result<Tensor> {
    Ok(op.weight.like(Data::Foreign(Arc::new(Numbers { packed: true, ..of(&op.weight).clone() }))))
}

fn repeat(_: &Toy, op: Repeat, size: usize) -> Result<Tensor> {
    Ok(op.x.like(numbers(of(&op.x).data.repeat(op.count), &[size])))
}

fn toy() -> Device {
    let table = Table::of::<Toy>().with(map).with(map_backward).with(accumulate).with(pack).with(repeat);
    Device::new(Toy { table: table.build(), calls: AtomicUsize::new(0) })
}

fn tensor(values: &[f32], device: &Device) -> Tensor {
    Tensor::from_slice(values, &[values.len()], device).unwrap()
}

#[test]
fn its_operations_run() {
    let toy = toy();
    assert_eq!(toy.operations(), ["accumulate", "map", "map_backward", "pack", "repeat"]);
    let x = tensor(&[1.0, 2.0, 3.0], &toy);
    assert_eq!((x.dtype(), x.bytes(), x.device()), (DType::F64, 24, &toy));
    assert_eq!(x.square().unwrap().scale(0.5).unwrap().to_f64(), [0.5, 2.0, 4.5]);
    assert_eq!(Repeat { x: x.clone(), count: 2 }.run().unwrap().to_f32(), [1.0, 2.0, 3.0, 1.0, 2.0, 3.0]);
    // A sum that nobody shares is computed in its own buffer; another handle keeps its values.
    let mut sum = tensor(&[1.0, 1.0, 1.0], &toy);
    let address = of(&sum).data.as_ptr();
    sum.accumulate(&x).unwrap();
    assert_eq!(of(&sum).data.as_ptr(), address);
    let other = sum.clone();
    sum.accumulate(&x).unwrap();
    assert_eq!((sum.to_f32(), other.to_f32()), (vec![3.0, 5.0, 7.0], vec![2.0, 3.0, 4.0]));
    assert_eq!(toy.backend::<Toy>().unwrap().calls.load(Ordering::Relaxed), 4);
    assert!(toy.backend::<Cpu>().is_none() && x.foreign::<Numbers>().is_some());
    assert_eq!(format!("{toy} {toy:?} {x:?}"), "toy Device(toy) Tensor[3] in f64 on toy");
}

#[test]
fn gradients_flow_through_its_operations() {
    let toy = toy();
    let tape = Tape::new();
    let x = tape.parameter(7, &tensor(&[1.0, 2.0, 3.0], &toy));
    let (square, five) = (x.square().unwrap(), x.scale(5.0).unwrap());
    let one = tensor(&[1.0; 3], &toy);
    let mut calls = Vec::new();
    tape.backward_from(&[(&square, one.clone()), (&five, one)], |key, g| calls.push((key, g.to_f32())))
        .unwrap();
    assert_eq!(calls, [(7, vec![7.0, 9.0, 11.0])]);

    // A device without a backward operation can still compute forward.
    let table = Table::of::<Toy>().with(map).build();
    let forward_only = Device::new(Toy { table, calls: AtomicUsize::new(0) });
    let y = tape.parameter(0, &tensor(&[3.0], &forward_only)).square().unwrap();
    assert_eq!(y.to_f32(), [9.0]);
    let error = tape.backward(&y, |_, _| panic!("a gradient")).unwrap_err();
    assert_eq!(error, Error::Unsupported { operation: "map_backward", device: "toy".into() });
}

#[test]
fn run_does_not_record() {
    let tape = Tape::new();
    let x = tape.parameter(0, &tensor(&[1.0, 2.0], &toy()));
    assert!(!MapForward { kind: Map::Square, x: x.clone() }.run().unwrap().is_recorded());
    assert!(!Repeat { x: x.clone(), count: 3 }.run().unwrap().is_recorded());
    assert!(tape.is_empty());
    assert!(x.square().unwrap().is_recorded());
    assert_eq!(tape.len(), 1);
}

#[test]
fn a_missing_operation_is_an_error() {
    let x = tensor(&[1.0, 2.0], &toy());
    let error = x.softmax().unwrap_err();
    assert_eq!(error, Error::Unsupported { operation: "softmax", device: "toy".into() });
    assert_eq!(error.to_string(), "softmax: the device toy does not implement it");
    for device in [cpu(1), Device::reference()] {
        let error = Repeat { x: tensor(&[1.0], &device), count: 2 }.run().unwrap_err();
        assert_eq!(error, Error::Unsupported { operation: "repeat", device: device.to_string() });
    }
}

#[test]
fn tensors_of_two_devices_are_refused() {
    let (toy, cpu, other) = (toy(), cpu(1), cpu(1));
    assert!(cpu == cpu.clone() && cpu != other && cpu != toy);
    let error = tensor(&[1.0], &toy).add(&tensor(&[2.0], &cpu)).unwrap_err();
    assert_eq!(error, Error::Devices { operation: "zip", left: "toy".into(), right: "cpu".into() });
    assert_eq!(error.to_string(), "zip: tensors are on two devices, toy and cpu");
    // Also where one of many is elsewhere, and where the devices are of one kind.
    let full = |shape: &[usize], device| Tensor::full(shape, 1.0, device).unwrap();
    let (x, weight, residual) = (full(&[2, 3], &cpu), full(&[4, 3], &cpu), full(&[2, 4], &other));
    let product = Product { residual: Some(&residual), ..Product::new(0, 0) };
    let errors = [
        linear_list(&[&x], &[&weight], &[product]).unwrap_err(),
        x.linear(&full(&[4, 3], &other)).unwrap_err(),
        x.detach().accumulate(&full(&[2, 3], &other)).unwrap_err(),
        Tensor::concat(&[&x, &x, &full(&[2, 3], &other)], 0).unwrap_err(),
    ];
    for error in errors {
        assert!(matches!(error, Error::Devices { .. }), "{error}");
    }
}

#[test]
fn a_packed_tensor_is_refused_where_none_is_accepted() {
    let toy = toy();
    let packed = Tensor::full(&[2, 3], 1.0, &toy).unwrap().pack(Precision::Int8).unwrap();
    assert_eq!((packed.dtype(), packed.is_plain(), packed.bytes()), (DType::Int8, false, 6));
    let error = packed.square().unwrap_err();
    assert_eq!(error.to_string(), "map: cannot read a tensor in int8; unpack it first");
    // Unpacking would be the way, but this device cannot; it could read the weight in a product, but has none.
    assert_eq!(packed.unpack().unwrap_err().to_string(), "unpack: the device toy does not implement it");
    let error = Tensor::full(&[1, 3], 1.0, &toy).unwrap().linear(&packed).unwrap_err();
    assert_eq!(error, Error::Unsupported { operation: "linear", device: "toy".into() });
    assert_eq!(toy.backend::<Toy>().unwrap().calls.load(Ordering::Relaxed), 0);
}

/// The device has no checks, and refuses what every device refuses, in the same words.
#[test]
fn checks_are_the_same_on_every_device() {
    let messages = |device: &Device| {
        let full = |shape: &[usize]| Tensor::full(shape, 1.0, device);
        let (a, b) = (full(&[2, 3]).unwrap(), full(&[4, 2]).unwrap());
        [
            full(&[usize::MAX, 2]).err(),
            Tensor::from_slice(&[1.0], &[2], device).err(),
            a.linear(&b).err(),
            a.add(&b).err(),
            a.rms_norm(&b, 1e-6).err(),
            a.detach().accumulate(&b).err(),
            full(&[2]).unwrap().pack(Precision::Int8).err(),
        ]
        .map(|error| error.unwrap().to_string())
    };
    let want = messages(&Device::reference());
    assert_eq!(messages(&toy()), want);
    assert_eq!(messages(&cpu(2)), want);
}

/// What is computed in place keeps its values when the call is refused.
#[test]
fn a_refused_call_in_place_loses_nothing() {
    let toy = toy();
    for device in [cpu(1), Device::reference(), toy] {
        let elsewhere = Tensor::full(&[2], 5.0, &cpu(1)).unwrap();
        let mut x = tensor(&[1.0, 2.0], &device);
        let longer = tensor(&[1.0; 3], &device);
        assert!(x.accumulate(&longer).is_err() && x.accumulate(&elsewhere).is_err());
        assert!(x.append(&longer, 1).is_err() && x.append(&elsewhere, 0).is_err());
        let step =
            Step { learning_rate: 0.1, betas: [0.9; 2], eps: 1e-8, weight_decay: 0.0, clip: 1.0, step: 1 };
        let (mut first, mut second) = (tensor(&[3.0, 4.0], &device), tensor(&[5.0, 6.0], &device));
        for gradient in [&longer, &elsewhere] {
            let state = AdamW { parameter: &mut x, first_moment: &mut first, second_moment: &mut second };
            assert!(adamw::update(state, gradient, &step).is_err());
        }
        let all = [x, first, second].map(|tensor| tensor.to_f32());
        assert_eq!(all, [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], "on {device}");
    }
}

/// A program that runs on the reference device runs on the CPU, and the other way round.
#[test]
fn reference_and_cpu_implement_the_same_operations() {
    let operations = Device::reference().operations();
    assert!(operations.windows(2).all(|two| two[0] < two[1]), "{operations:?}");
    assert!(operations.contains(&"linear") && operations.contains(&"anchor_read_backward"));
    assert_eq!(operations, cpu(1).operations());
}

/// Devices and tensors may be shared by threads; every device states the chunk of its recurrences.
#[test]
fn shared_by_threads() {
    fn check<T: Send + Sync>() {}
    check::<Device>();
    check::<Tensor>();
    check::<Tape>();
    assert_eq!(
        [cpu(1), Device::reference(), toy()].map(|device| device.chunk_tokens()),
        [CHUNK_TOKENS, CHUNK_TOKENS, 1]
    );
    for device in [cpu(3), Device::reference(), toy()] {
        let sums = [const { AtomicUsize::new(0) }; 20];
        device.side_by_side(20, &|i| {
            let x = tensor(&[i as f32], &device).scale(2.0).map_or(0.0, |y| y.to_f32()[0]);
            sums[i].fetch_add(1 + x as usize, Ordering::Relaxed);
        });
        for (i, sum) in sums.iter().enumerate() {
            assert_eq!(sum.load(Ordering::Relaxed), 1 + 2 * i, "task {i} on {device}");
        }
    }
}

/// The CPU counts its memory; a lost device says so.
#[test]
fn memory_and_loss() {
    let cpu = cpu(2);
    let kept = Tensor::full(&[1000], 1.0, &cpu).unwrap();
    assert!(cpu.live_bytes() >= 4000);
    assert_eq!(cpu.free_bytes(), 0);
    drop(kept);
    assert!(cpu.free_bytes() >= 4000);
    cpu.trim();
    assert_eq!((cpu.live_bytes(), cpu.free_bytes()), (0, 0));
    for device in all_devices() {
        assert_eq!(device.check(), Ok(()));
    }
    assert_eq!(toy().check().unwrap_err().to_string(), "the toy was lost");
    assert!(Device::reference().backend::<Reference>().is_some() && cpu.backend::<Reference>().is_none());
}
