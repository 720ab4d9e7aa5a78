//! Optimised elementwise operations: eight elements at a time, with the flat result split over threads. The last
//! elements use the same vector code with padding, so an element's result is bit-identical wherever it is.
//! Gradients of broadcast operands are computed in full and then summed by `reduce`.

use std::ops::Range;

use super::broadcast::{Dim, dims, offsets};
use super::{Map, MapBackward, MapForward, Reads, Zip, ZipBackward, ZipForward};
use crate::array::Array;
use crate::cpu::{Cpu, Shared};
use crate::error::Result;
use crate::ops::reduce::fast::sum_over;
use crate::simd::{self, Kernel, LANES, Simd};
use crate::tensor::Tensor;

pub(crate) fn map(cpu: &Cpu, op: MapForward, (): ()) -> Result<Tensor> {
    Ok(op.x.like(values(cpu, op.kind, op.x.f32())))
}

pub(crate) fn map_backward(cpu: &Cpu, op: MapBackward, (): ()) -> Result<Tensor> {
    let MapBackward { kind, kept, gradient } = op;
    Ok(match kind.reads() {
        Reads::Nothing if matches!(kind, Map::Shift(_)) => gradient.detach(),
        Reads::Nothing => gradient.like(values(cpu, kind, gradient.f32())),
        Reads::Input | Reads::Output => gradient.like(slopes(cpu, kind, kept.f32(), gradient.f32())),
    })
}

pub(crate) fn zip(cpu: &Cpu, op: ZipForward, shape: Vec<usize>) -> Result<Tensor> {
    Ok(op.a.like(pairs(cpu, op.kind, op.a.f32(), op.b.f32(), &shape)))
}

pub(crate) fn zip_backward(cpu: &Cpu, op: ZipBackward, (): ()) -> Result<[Option<Tensor>; 2]> {
    let (kind, a, b, dy) = (op.kind, op.a.f32(), op.b.f32(), op.gradient.f32());
    let pairs = |kind, x: &Array<f32>, y| pairs(cpu, kind, x, y, dy.shape());
    let da = op.needs[0].then(|| {
        let whole = match kind {
            Zip::Add | Zip::Sub => dy.clone(),
            Zip::Mul | Zip::Div => pairs(kind, dy, b),
        };
        op.a.like(sum_over(cpu, &whole, a.shape()))
    });
    let db = op.needs[1].then(|| {
        let whole = match kind {
            Zip::Add | Zip::Sub => dy.clone(),
            Zip::Mul => pairs(Zip::Mul, dy, a),
            // dy a / b², ordered so that b² cannot overflow.
            Zip::Div => pairs(Zip::Div, &pairs(Zip::Mul, &pairs(Zip::Div, dy, b), a), b),
        };
        let sum = sum_over(cpu, &whole, b.shape());
        op.b.like(match kind {
            Zip::Add | Zip::Mul => sum,
            Zip::Sub | Zip::Div => values(cpu, Map::Neg, &sum),
        })
    });
    Ok([da, db])
}

#[allow(unsafe_code)]
fn values(cpu: &Cpu, kind: Map, x: &Array<f32>) -> Array<f32> {
    let mut y = cpu.uninit(x.shape());
    let out = Shared::new(y.data_mut());
    cpu.for_rows(cpu.row_parts(x.len(), 1), |_, range| {
        // SAFETY: parts are disjoint ranges.
        let y = unsafe { out.part(range.start, range.len()) };
        cpu.level().run(Values { kind, x: &x.data()[range], y });
    });
    y
}

struct Values<'a> {
    kind: Map,
    x: &'a [f32],
    y: &'a mut [f32],
}

impl Kernel for Values<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Self { kind, x, y } = self;
        let whole = y.len() / LANES * LANES;
        let mut i = 0;
        while i < whole {
            s.store(&mut y[i..], value(s, kind, s.load(&x[i..])));
            i += LANES;
        }
        if whole < y.len() {
            let mut last = padded(&x[whole..]);
            let v = value(s, kind, s.load(&last));
            s.store(&mut last, v);
            let rest = y.len() - whole;
            y[whole..].copy_from_slice(&last[..rest]);
        }
    }
}

/// Pads fewer than eight elements to a vector with ones, which are a valid input of every function.
#[inline(always)]
fn padded(x: &[f32]) -> [f32; LANES] {
    let mut vector = [1.0; LANES];
    vector[..x.len()].copy_from_slice(x);
    vector
}

/// f(x)
#[inline(always)]
fn value<S: Simd>(s: S, kind: Map, x: S::V) -> S::V {
    let zero = s.splat(0.0);
    match kind {
        Map::Neg => s.mul(s.splat(-1.0), x),
        Map::Exp => simd::exp(s, x),
        Map::Ln => scalar(s, x, f32::ln),
        Map::Sigmoid => simd::sigmoid(s, x),
        Map::Silu => s.mul(x, simd::sigmoid(s, x)),
        Map::Tanh => tanh(s, x),
        // With this operand order NaN propagates.
        Map::Relu => s.max(zero, x),
        Map::Softplus => simd::softplus(s, x),
        Map::Square => s.mul(x, x),
        Map::Sqrt => s.sqrt(x),
        Map::Reciprocal => s.div(s.splat(1.0), x),
        Map::Scale(c) => s.mul(s.splat(c as f32), x),
        Map::Shift(c) => s.add(s.splat(c as f32), x),
    }
}

/// tanh x: an odd polynomial of degree 11 for |x| < 0.625, otherwise 1 − 2 / (e^2|x| + 1) with the sign of x.
#[inline(always)]
fn tanh<S: Simd>(s: S, x: S::V) -> S::V {
    let (zero, one) = (s.splat(0.0), s.splat(1.0));
    let z = s.mul(x, x);
    let mut p = s.splat(-5.704_988_7e-3);
    for c in [2.063_909e-2, -5.373_971_6e-2, 1.333_144_2e-1, -3.333_328e-1] {
        p = s.fma(p, z, s.splat(c));
    }
    let small = s.fma(s.mul(p, z), x, x);
    let minus = s.sub(zero, x);
    let abs = s.max(minus, x);
    let large = s.sub(one, s.div(s.splat(2.0), s.add(simd::exp(s, s.add(abs, abs)), one)));
    let large = s.select_lt(x, zero, s.sub(zero, large), large);
    s.select_lt(abs, s.splat(0.625), small, large)
}

/// Applies a scalar function to each lane, for functions without a vectorised implementation.
#[inline(always)]
fn scalar<S: Simd>(s: S, x: S::V, f: fn(f32) -> f32) -> S::V {
    let mut lanes = [0.0; LANES];
    s.store(&mut lanes, x);
    s.load(&lanes.map(f))
}

#[allow(unsafe_code)]
fn slopes(cpu: &Cpu, kind: Map, kept: &Array<f32>, gradient: &Array<f32>) -> Array<f32> {
    let mut dx = cpu.uninit(gradient.shape());
    let out = Shared::new(dx.data_mut());
    cpu.for_rows(cpu.row_parts(gradient.len(), 1), |_, range| {
        // SAFETY: parts are disjoint ranges.
        let dx = unsafe { out.part(range.start, range.len()) };
        let (kept, dy) = (&kept.data()[range.clone()], &gradient.data()[range]);
        cpu.level().run(Slopes { kind, kept, dy, dx });
    });
    dx
}

struct Slopes<'a> {
    kind: Map,
    kept: &'a [f32],
    dy: &'a [f32],
    dx: &'a mut [f32],
}

impl Kernel for Slopes<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Self { kind, kept, dy, dx } = self;
        let whole = dx.len() / LANES * LANES;
        let mut i = 0;
        while i < whole {
            s.store(&mut dx[i..], slope(s, kind, s.load(&kept[i..]), s.load(&dy[i..])));
            i += LANES;
        }
        if whole < dx.len() {
            let mut last = padded(&dy[whole..]);
            let v = slope(s, kind, s.load(&padded(&kept[whole..])), s.load(&last));
            s.store(&mut last, v);
            let rest = dx.len() - whole;
            dx[whole..].copy_from_slice(&last[..rest]);
        }
    }
}

/// dy f', from the tensor that the backward pass reads: x or y.
#[inline(always)]
fn slope<S: Simd>(s: S, kind: Map, kept: S::V, dy: S::V) -> S::V {
    let one = s.splat(1.0);
    match kind {
        Map::Exp => s.mul(dy, kept),
        Map::Ln => s.div(dy, kept),
        Map::Sigmoid => s.mul(dy, s.mul(kept, s.sub(one, kept))),
        Map::Silu => {
            let sig = simd::sigmoid(s, kept);
            s.mul(dy, s.mul(sig, s.fma(kept, s.sub(one, sig), one)))
        }
        Map::Tanh => s.mul(dy, s.mul(s.sub(one, kept), s.add(one, kept))),
        Map::Relu => s.select_lt(s.splat(0.0), kept, dy, s.splat(0.0)),
        Map::Softplus => s.mul(dy, simd::sigmoid(s, kept)),
        Map::Square => s.mul(dy, s.add(kept, kept)),
        Map::Sqrt => s.div(dy, s.add(kept, kept)),
        Map::Reciprocal => s.mul(s.mul(s.splat(-1.0), dy), s.mul(kept, kept)),
        Map::Neg | Map::Scale(_) | Map::Shift(_) => value(s, kind, dy),
    }
}

/// f(a, b), both broadcast to `shape`.
#[allow(unsafe_code)]
fn pairs(cpu: &Cpu, kind: Zip, a: &Array<f32>, b: &Array<f32>, shape: &[usize]) -> Array<f32> {
    let dims = dims(shape, a.shape(), b.shape());
    let mut y = cpu.uninit(shape);
    let len = y.len();
    let out = Shared::new(y.data_mut());
    cpu.for_rows(cpu.row_parts(len, 1), |_, range| {
        // SAFETY: parts are disjoint ranges.
        let y = unsafe { out.part(range.start, range.len()) };
        cpu.level().run(Pairs { kind, dims: &dims, range, a: a.data(), b: b.data(), y });
    });
    y
}

struct Pairs<'a> {
    kind: Zip,
    dims: &'a [Dim],
    range: Range<usize>,
    a: &'a [f32],
    b: &'a [f32],
    y: &'a mut [f32],
}

impl Kernel for Pairs<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Self { kind, dims, range, a, b, y } = self;
        let Some((&inner, outer)) = dims.split_last() else { return };
        let mut at = range.start;
        while at < range.end {
            let (row, column) = (at / inner.size, at % inner.size);
            let n = (inner.size - column).min(range.end - at);
            let [start_a, start_b] = offsets(outer, row);
            let a = &a[start_a + column * inner.a..];
            let b = &b[start_b + column * inner.b..];
            let y = &mut y[at - range.start..][..n];
            match (inner.a, inner.b) {
                (1, 1) => both(s, kind, &a[..n], &b[..n], y),
                (1, _) => right(s, kind, &a[..n], b[0], y),
                (_, _) => left(s, kind, a[0], &b[..n], y),
            }
            at += n;
        }
    }
}

#[inline(always)]
fn meet<S: Simd>(s: S, kind: Zip, a: S::V, b: S::V) -> S::V {
    match kind {
        Zip::Add => s.add(a, b),
        Zip::Sub => s.sub(a, b),
        Zip::Mul => s.mul(a, b),
        Zip::Div => s.div(a, b),
    }
}

// The four operations round identically in scalar and vector form, so the last elements may be scalar.
#[inline(always)]
fn meet_one(kind: Zip, a: f32, b: f32) -> f32 {
    match kind {
        Zip::Add => a + b,
        Zip::Sub => a - b,
        Zip::Mul => a * b,
        Zip::Div => a / b,
    }
}

#[inline(always)]
fn both<S: Simd>(s: S, kind: Zip, a: &[f32], b: &[f32], y: &mut [f32]) {
    let whole = y.len() / LANES * LANES;
    let mut i = 0;
    while i < whole {
        s.store(&mut y[i..], meet(s, kind, s.load(&a[i..]), s.load(&b[i..])));
        i += LANES;
    }
    for i in whole..y.len() {
        y[i] = meet_one(kind, a[i], b[i]);
    }
}

#[inline(always)]
fn right<S: Simd>(s: S, kind: Zip, a: &[f32], b: f32, y: &mut [f32]) {
    let whole = y.len() / LANES * LANES;
    let vector = s.splat(b);
    let mut i = 0;
    while i < whole {
        s.store(&mut y[i..], meet(s, kind, s.load(&a[i..]), vector));
        i += LANES;
    }
    for i in whole..y.len() {
        y[i] = meet_one(kind, a[i], b);
    }
}

#[inline(always)]
fn left<S: Simd>(s: S, kind: Zip, a: f32, b: &[f32], y: &mut [f32]) {
    let whole = y.len() / LANES * LANES;
    let vector = s.splat(a);
    let mut i = 0;
    while i < whole {
        s.store(&mut y[i..], meet(s, kind, vector, s.load(&b[i..])));
        i += LANES;
    }
    for i in whole..y.len() {
        y[i] = meet_one(kind, a, b[i]);
    }
}
