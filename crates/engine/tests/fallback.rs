//! A device with four operations, all others left to the reference engine: results, gradients, refusals, packed weights
//! and stored states are those of the reference engine.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use march_engine::ops::anchor_read::{AnchorRead, AnchorReadOptions, ReadPlan, Storage};
use march_engine::ops::cross_entropy::LinearCrossEntropy;
use march_engine::ops::elementwise::Zip;
use march_engine::ops::embedding::Embedding;
use march_engine::ops::gated_delta::{CHUNK_TOKENS, GatedDelta, GatedDeltaOptions};
use march_engine::ops::linear::{Linear, LinearList, Product};
use march_engine::ops::rms_norm::{RmsNorm, RmsNormList};
use march_engine::ops::swiglu::SwiGlu;
use march_engine::{Cpu, Engine, Error, Fallback, Precision, Reference, Result, Tape, Var, Weight};

use crate::common::{self, Input, Program, Random, assert_close, outcome};
use crate::toy;

/// A small network around a recurrence and the reader of its states.
struct Network;

const HEADS: usize = 2;
const TOKENS: usize = 12;

fn inputs(random: &mut Random) -> Vec<Input> {
    vec![
        random.input("x", &[1, TOKENS, 8], 1.0),
        random.input("norm", &[8], 1.0),
        random.input("weight", &[8, 8], 0.5),
        random.input("bias", &[8], 0.5),
        random.input("gates", &[HEADS, 8], 0.5),
        random.input("a_log", &[HEADS], 0.5),
        random.input("dt_bias", &[HEADS], 0.5),
        random.input("keys", &[3, 8], 0.5),
        random.input("null", &[1, TOKENS, HEADS], 0.5),
    ]
}

impl Program for Network {
    fn run<'e, E: Engine>(&self, tape: &Tape<'e, E>, v: &[Var<E::Tensor>]) -> Result<Vec<Var<E::Tensor>>> {
        let [x, norm, weight, bias, gates, a_log, dt_bias, keys, null] = v else { panic!("nine inputs") };
        let normal = tape.rms_norm(RmsNorm { x, weight: norm }, 1e-6)?;
        let query = tape.linear(Linear { x: &normal, weight, bias: Some(bias) })?;
        let gate = tape.linear(Linear { x: &normal, weight: gates, bias: None })?;
        let options = GatedDeltaOptions {
            key_heads: HEADS,
            value_heads: HEADS,
            allow_neg_eigval: false,
            boundaries: Arc::new(vec![vec![4, 8, 12]]),
            final_state: false,
            chunk_offset: 0,
        };
        let input = GatedDelta {
            query: &query,
            key: &normal,
            value: x,
            retention_input: &gate,
            write_input: &gate,
            a_log,
            dt_bias,
            initial_state: None,
        };
        let out = tape.gated_delta(input, &options)?;
        let plan = Arc::new(ReadPlan::from_boundaries(TOKENS, &[vec![4, 8, 12]]));
        let mut results = Vec::new();
        for top_k in [None, Some(1)] {
            let input = AnchorRead {
                query: &query,
                routing_query: &normal,
                routing_keys: keys,
                anchor_states: &out.boundary_states,
                null_score: Some(null),
            };
            let plan = Arc::clone(&plan);
            let options =
                AnchorReadOptions { key_heads: HEADS, value_heads: HEADS, top_k, routing_scale: 0.9, plan };
            let read = tape.anchor_read(input, &options)?;
            let sum = tape.add(&tape.scale(&read, 0.7)?, &tape.mul(&out.readout, &tape.silu(bias)?)?)?;
            results.push(tape.swiglu(SwiGlu { gate: &sum, up: x })?);
        }
        let input = LinearCrossEntropy { x: &results[0], weight };
        results.push(tape.linear_cross_entropy(input, &[0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3], None)?);
        Ok(results)
    }
}

#[test]
fn equals_the_engine_that_runs_the_rest() {
    let engine = toy::engine();
    let inputs = inputs(&mut Random(41));
    let want = outcome(&Reference, &Network, &inputs).unwrap();
    let found = outcome(&engine, &Network, &inputs).unwrap();
    for (i, (found, want)) in found.outputs.iter().zip(&want.outputs).enumerate() {
        assert_eq!(found.0, want.0);
        assert_close(&format!("output {i}"), &found.1, &want.1, 1e-13);
    }
    for ((input, found), want) in inputs.iter().zip(&found.gradients).zip(&want.gradients) {
        assert_close(input.name, found.as_ref().unwrap(), want.as_ref().unwrap(), 1e-12);
    }
    // Its own operations did run: two products, two scalings, two sums, one norm.
    assert_eq!(engine.device.counts(), [2, 2, 2, 1]);
}

/// The rest may be another kind of engine, which keeps values of its own for the backward pass.
#[test]
fn the_rest_on_the_fast_engine() {
    let inputs = inputs(&mut Random(42));
    let want = outcome(&Reference, &Network, &inputs).unwrap();
    let engine = Fallback::new(toy::Toy::default(), Cpu::new(Default::default()).unwrap());
    let found = outcome(&engine, &Network, &inputs).unwrap();
    for (i, (found, want)) in found.outputs.iter().zip(&want.outputs).enumerate() {
        assert_close(&format!("output {i}"), &found.1, &want.1, common::FORWARD);
    }
    for ((input, found), want) in inputs.iter().zip(&found.gradients).zip(&want.gradients) {
        assert_close(input.name, found.as_ref().unwrap(), want.as_ref().unwrap(), common::GRADIENT);
    }
}

/// Packed weights and stored states, which the device does not have, are those of the other engine.
#[test]
fn packed_weights_and_stored_states() {
    fn results<E: Engine>(engine: &E) -> Vec<Vec<f64>> {
        let mut random = Random(43);
        let mut tensor = |shape: &[usize]| {
            let input = random.input("input", shape, 1.0);
            engine.from_f64(&input.data, shape).unwrap()
        };
        let (x, w) = (tensor(&[3, 8]), tensor(&[5, 8]));
        let packed = engine.pack(&w, Precision::Int8).unwrap();
        assert_eq!(engine.packed_precision(&packed), Precision::Int8);
        let weight = Weight::Packed(&packed);
        let residual = tensor(&[3, 5]);
        let weights = [weight, Weight::Full(&w)];
        let products = [Product::new(0, 0), Product { residual: Some(&residual), ..Product::new(0, 1) }];
        let list = LinearList { x: &[&x], weights: &weights, products: &products };
        let each = engine.linear_list(list).unwrap();
        let mut list: Vec<Vec<f64>> = each.iter().map(|y| engine.to_f64(y)).collect();
        list.push(engine.to_f64(&engine.unpack(&packed).unwrap()));
        let input = Embedding { table: weight, ids: &[4, 0], shape: &[2] };
        list.push(engine.to_f64(&engine.embedding(input).unwrap()));
        let losses = engine.token_losses(&x, weight, &[1, 2, 3]).unwrap();
        list.push(losses.nll.iter().map(|&v| f64::from(v)).collect());
        let states = tensor(&[2, 1, 4, 4]);
        let stored = Arc::new(engine.store_states(&states, Storage::Bf16).unwrap());
        let host = engine.stored_to_host(&stored).unwrap().into_owned();
        let again = Arc::new(engine.stored_from_host(host).unwrap());
        assert_eq!(engine.stored_bytes(&again), 2 * 16 * 2);
        let (query, routing_query, routing_keys) = (tensor(&[3, 4]), tensor(&[3, 2]), tensor(&[4, 2]));
        let options = AnchorReadOptions {
            key_heads: 1,
            value_heads: 1,
            top_k: None,
            routing_scale: 1.0,
            plan: Arc::new(ReadPlan::from_boundaries(3, &[vec![1, 2], vec![]])),
        };
        let input = AnchorRead {
            query: &query,
            routing_query: &routing_query,
            routing_keys: &routing_keys,
            anchor_states: &[stored, again][..],
            null_score: None,
        };
        list.push(engine.to_f64(&engine.anchor_read_stored(input, &options).unwrap()));
        list
    }
    for (i, (found, want)) in results(&toy::engine()).iter().zip(results(&Reference)).enumerate() {
        assert_close(&format!("result {i}"), found, &want, 1e-13);
    }
}

/// The device has no checks, and refuses what every engine refuses, in the same words. Alone it names the operation that
/// it does not have.
#[test]
fn refusals() {
    fn messages<E: Engine>(engine: &E) -> Vec<String> {
        let (a, b) = (engine.full(&[2, 3], 1.0).unwrap(), engine.full(&[4, 2], 1.0).unwrap());
        let mut sum = a.clone();
        vec![
            engine.full(&[usize::MAX, 2], 0.0).unwrap_err().to_string(),
            engine.from_f32(&[1.0], &[2]).unwrap_err().to_string(),
            engine.linear(Linear { x: &a, weight: &b, bias: None }).unwrap_err().to_string(),
            engine.zip(Zip::Add, &a, &b).unwrap_err().to_string(),
            engine.rms_norm(RmsNormList { x: &[&a], weight: &b }, 1e-6).unwrap_err().to_string(),
            engine.accumulate(&mut sum, &b).unwrap_err().to_string(),
            engine.pack(&engine.full(&[2], 0.0).unwrap(), Precision::Int8).unwrap_err().to_string(),
        ]
    }
    let want = messages(&Reference);
    assert_eq!(messages(&toy::engine()), want);
    assert_eq!(messages(&toy::Toy::default()), want);
    let toy = toy::Toy::default();
    let x = toy.full(&[2], 1.0).unwrap();
    let error = toy.softmax(&x).unwrap_err();
    assert_eq!(error, Error::Unsupported { operation: "softmax" });
    assert!(error.to_string().contains("`Fallback`"), "{error}");
}

/// Engines and what they hold may be shared by threads; every engine states the chunk of its recurrences.
#[test]
fn shared_by_threads() {
    fn check<T: Send + Sync>() {}
    fn all<E: Engine>(_: &E) -> usize {
        check::<E>();
        check::<E::Tensor>();
        check::<E::Packed>();
        check::<E::Stored>();
        check::<Var<E::Tensor>>();
        E::CHUNK_TOKENS
    }
    let cpu = Cpu::new(Default::default()).unwrap();
    assert_eq!([all(&cpu), all(&Reference), all(&toy::engine())], [CHUNK_TOKENS; 3]);
    // A device that runs the recurrence itself has its own chunks, so that nothing is computed again for the other.
    assert_eq!(all(&Fallback::new(toy::Device::<1>::default(), Reference)), 1);
    assert_eq!(all(&Fallback::new(toy::Device::<48>::default(), Reference)), 48);
}

/// Memory and loss of the device are those of both engines.
#[test]
fn the_device_itself() {
    let engine = Fallback::new(toy::Toy::default(), Cpu::new(Default::default()).unwrap());
    let kept = engine.rest.full(&[1000], 1.0).unwrap();
    assert_eq!((engine.live_bytes(), engine.free_bytes()), (engine.rest.live_bytes(), 0));
    assert!(engine.live_bytes() >= 4000);
    drop(kept);
    assert!(engine.free_bytes() >= 4000);
    engine.trim();
    assert_eq!((engine.live_bytes(), engine.free_bytes()), (0, 0));
    assert_eq!(engine.check(), Ok(()));
    engine.device.lost.store(true, Ordering::Relaxed);
    assert_eq!(engine.check().unwrap_err().to_string(), "the toy was lost");
}
