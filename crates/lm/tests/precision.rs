//! Models with weights in bf16 and int8: the CPU against the equations, decoding against the forward pass.

use march_lm::checkpoint::Checkpoint;
use march_lm::engine::{DType, Device, Precision, Tape, Tensor};
use march_lm::model::{Batch, Model};

use crate::common::{Case, KINDS, assert_close, error, golden, invariant, small, tokens};

/// A small model whose weights are rounded.
fn rounded(device: &Device, kind: &str, weights: Precision) -> Case {
    let Case { model, parameters } = Case::new(device, &small(kind));
    Case { parameters: model.quantize(parameters, weights).unwrap(), model }
}

#[test]
fn every_mixer_with_rounded_weights() {
    let (cpu, reference) = (invariant(), Device::reference());
    let ids = tokens(45, 37, 3);
    for kind in KINDS {
        let exact = Case::new(&reference, &small(kind));
        let policy = exact.model.policy();
        let exact = exact.forward(Batch::one(&ids), &policy);
        for (weights, limit) in [(Precision::Bf16, 0.1), (Precision::Int8, 0.3)] {
            let name = format!("{kind} with {weights} weights");
            let want = rounded(&reference, kind, weights).forward(Batch::one(&ids), &policy);
            let change = error(&want, &exact);
            assert!(change > 0.0 && change < limit, "{name}: logits changed by {change}");
            let case = rounded(&cpu, kind, weights);
            assert_close(&name, &case.forward(Batch::one(&ids), &policy), &want, 1e-4);
            let by_token = case.extend(&ids, &policy, &[1]);
            assert_close(&name, &by_token, &want, 1e-4);
            assert_close(&name, &case.extend(&ids, &policy, &[7, 16, 1, 9]), &want, 1e-4);
        }
    }
}

/// The same bits from rounding while loading and from rounding afterwards; only matrices are rounded.
#[test]
fn loading_in_fewer_bits() {
    let cpu = invariant();
    for name in ["march", "log_linear", "transformer"] {
        let checkpoint = Checkpoint::open(&golden(name)).unwrap();
        let (model, parameters) = Model::load(&cpu, &checkpoint).unwrap();
        for weights in [Precision::Bf16, Precision::Int8] {
            let (_, loaded) = Model::load_in(&cpu, &checkpoint, weights).unwrap();
            let afterwards = model.quantize(parameters.clone(), weights).unwrap();
            let mut bytes = 0;
            for (spec, (a, b)) in model.layout().iter().zip(loaded.iter().zip(&afterwards)) {
                let numbers = |weight: &Tensor| match weight.is_plain() {
                    true => weight.to_f32(),
                    false => weight.unpack().unwrap().to_f32(),
                };
                assert!(numbers(a) == numbers(b), "{}", spec.name);
                let own = if spec.is_matrix() { weights } else { Precision::F32 };
                assert_eq!([a.dtype(), b.dtype()], [DType::from(own); 2], "{}", spec.name);
                bytes += spec.bytes(weights);
            }
            assert_eq!(bytes, model.parameter_bytes(weights));
        }
        let vectors: Vec<&str> = model
            .layout()
            .iter()
            .filter(|spec| !spec.is_matrix())
            .filter_map(|spec| spec.name.strip_prefix("model.layers.0."))
            .collect();
        let expected: &[&str] = match name {
            "transformer" => &["attn_norm.weight", "mlp_norm.weight"],
            "march" => &["attn.null_proj.bias"],
            _ => &["attn.L"],
        };
        for vector in expected.iter().chain(&["attn_norm.weight", "mlp_norm.weight"]) {
            assert!(vectors.contains(vector), "{name}: {vector} of {vectors:?}");
        }
    }
}

/// Rounded weights are for inference: a tape that records refuses them.
#[test]
fn training_refuses_them() {
    let cpu = invariant();
    let case = rounded(&cpu, "march", Precision::Bf16);
    let tape = Tape::new();
    let weights = case.model.bind(&tape, &case.parameters);
    let batch = Batch::one(&[1, 2, 3]);
    let message = case.model.forward(&weights, batch, &case.settings(), None).unwrap_err().to_string();
    assert!(message.contains("a weight in bf16 has no gradient"), "{message}");
}
