//! Small models with known results, and how far a device is from them: the five golden checkpoints, whose results are
//! those of an independent implementation in f64, and a model of Memory Caching, whose results are those of the
//! reference device. `march doctor --device gpu` and `march train --device gpu` compare a GPU with them, and tests
//! compare every device.

pub mod files;
pub mod loaded;

use std::collections::BTreeMap;

use march_lm::Result;
use march_lm::anchors::{Policy, Retention};
use march_lm::engine::Device;
use march_lm::model::ModelConfig;

use self::loaded::LoadedExample;

/// A kind of results: their name, and the largest difference that is allowed, as a share of the largest value; of a loss
/// as it is.
type Kind = (&'static str, f64);

const LOGITS: Kind = ("logits", 1e-4);
const ROUTING: Kind = ("routing", 1e-4);
const GRADIENTS: Kind = ("gradients", 1e-3);
const LOSSES: Kind = ("losses", 1e-4);
const NORMS: Kind = ("norms", 1e-3);
const DECODING: Kind = ("decoding", 1e-5);

/// How far a device is from what is known.
#[derive(Clone, Debug, PartialEq)]
pub struct Check {
    /// The kind of results: logits, routing weights, gradients, losses and gradient norms of training, decoding.
    pub kind: &'static str,
    /// The largest difference; infinite if a number is missing or not finite.
    pub error: f64,
    /// The largest difference that is allowed.
    pub allowed: f64,
    /// What differs by that much, and from which model's.
    pub what: String,
}

impl Check {
    fn new((kind, allowed): Kind) -> Self {
        Self { kind, error: 0.0, allowed, what: String::new() }
    }

    fn add(&mut self, error: f64, what: impl FnOnce() -> String) {
        if error > self.error {
            (self.error, self.what) = (error, what());
        }
    }

    /// What differs by more than is allowed.
    pub fn failure(&self) -> Option<String> {
        let Self { error, allowed, what, .. } = self;
        (error > allowed).then(|| format!("{what} differs by {error:.1e}, and {allowed:.0e} is allowed"))
    }
}

/// The largest difference, divided by `unit`; infinite unless all values are finite and as many as wanted.
fn difference(found: &[f64], want: &[f64], unit: f64) -> f64 {
    if found.len() != want.len() || !found.iter().chain(want).all(|value| value.is_finite()) {
        return f64::INFINITY;
    }
    let most = found.iter().zip(want).fold(0.0f64, |most, (a, b)| most.max((a - b).abs()));
    most / if unit > 0.0 { unit } else { 1.0 }
}

/// The largest absolute value.
fn peak(values: &[f64]) -> f64 {
    values.iter().fold(0.0, |most, value| most.max(value.abs()))
}

/// Six steps of AdamW on two sequences each.
struct Training {
    batches: Vec<Vec<Vec<u32>>>,
    rates: Vec<f64>,
    betas: [f64; 2],
    eps: f64,
    weight_decay: f64,
    clip_norm: f64,
}

/// Known results.
#[derive(Default)]
struct Expected {
    /// Logits by the name of the policy.
    logits: BTreeMap<&'static str, Vec<f64>>,
    /// Number of anchors, and routing weights of each layer.
    routing: (usize, Vec<Vec<f64>>),
    /// Gradients in the order of the parameters.
    gradients: Vec<Vec<f64>>,
    losses: Vec<f64>,
    norms: Vec<f64>,
}

/// A model with known results.
pub struct Example {
    /// Name of the model.
    pub name: &'static str,
    config: ModelConfig,
    /// The numbers of the parameters, in the order of the layout.
    pub parameters: Vec<Vec<f32>>,
    tokens: Vec<u32>,
    training: Training,
    expected: Expected,
    /// A gradient that is smaller than this share of the largest gradient is measured by that.
    floor: f64,
}

impl Example {
    /// The golden checkpoints, and a model of Memory Caching.
    pub fn all() -> Result<Vec<Self>> {
        let mut list = Self::golden()?;
        list.push(Self::memory_caching()?);
        Ok(list)
    }

    /// Every check that this program does on a device.
    pub fn checks(&self, device: &Device) -> Result<Vec<Check>> {
        let mut list =
            vec![self.logits(device, &[&[7, 64, 1, 33]])?, self.routing(device, &[None, Some(11)])?];
        list.push(self.gradients(device)?);
        list.extend(self.training(device)?);
        list.push(self.decoding(device)?);
        device.check()?;
        Ok(list)
    }

    /// Logits under the model's own policy and the others that results are known for, from the forward pass and from a
    /// bank that gets the tokens in calls of the given sizes.
    pub fn logits(&self, device: &Device, calls: &[&[usize]]) -> Result<Check> {
        let loaded = LoadedExample::new(device, self)?;
        let mut check = Check::new(LOGITS);
        for (name, policy) in policies(&loaded.model.policy()) {
            let Some(want) = self.expected.logits.get(name) else { continue };
            let mut compare = |found: Vec<f64>, how: String| {
                check.add(difference(&found, want, peak(want)), || format!("{}: {name} {how}", self.name));
            };
            compare(loaded.forward(&policy)?, "of the forward pass".into());
            for calls in calls {
                compare(loaded.extend(&policy, calls)?, format!("in calls of {calls:?} tokens"));
            }
        }
        Ok(check)
    }

    /// Routing weights, from the forward pass (`None`) and from a bank that gets the tokens in calls of a given size.
    pub fn routing(&self, device: &Device, calls: &[Option<usize>]) -> Result<Check> {
        let loaded = LoadedExample::new(device, self)?;
        let mut check = Check::new(ROUTING);
        let (anchors, layers) = &self.expected.routing;
        for calls in calls.iter().filter(|_| *anchors > 0) {
            let trace = loaded.traced(*calls)?;
            for (layer, want) in layers.iter().enumerate() {
                let (_, found) = trace.weights(layer, self.tokens.len(), *anchors);
                let found: Vec<f64> = found.into_iter().map(f64::from).collect();
                check.add(difference(&found, want, peak(want)), || {
                    format!("{}: the routing weights of layer {layer}", self.name)
                });
            }
        }
        Ok(check)
    }

    /// The gradient of every parameter, with and without recomputation.
    pub fn gradients(&self, device: &Device) -> Result<Check> {
        let loaded = LoadedExample::new(device, self)?;
        let mut check = Check::new(GRADIENTS);
        let wanted = &self.expected.gradients;
        let floor = self.floor * wanted.iter().map(|want| peak(want)).fold(0.0, f64::max);
        for recompute in [false, true] {
            let (_, gradients) = loaded.gradients(recompute)?;
            for ((spec, found), want) in loaded.model.layout().iter().zip(gradients).zip(wanted) {
                let found = found.map(|gradient| gradient.to_f64()).unwrap_or_default();
                check.add(difference(&found, want, peak(want).max(floor)), || {
                    format!("{}: the gradient of {}", self.name, spec.name)
                });
            }
        }
        Ok(check)
    }

    /// The losses and the gradient norms of six steps of AdamW.
    pub fn training(&self, device: &Device) -> Result<[Check; 2]> {
        let (losses, norms) = LoadedExample::new(device, self)?.train()?;
        let [mut loss, mut norm] = [LOSSES, NORMS].map(Check::new);
        let Expected { losses: wanted, norms: wanted_norms, .. } = &self.expected;
        for step in 0..wanted.len() {
            loss.add(difference(&losses[step..=step], &wanted[step..=step], 1.0), || {
                format!("{}: the loss of training step {}", self.name, step + 1)
            });
            let want = &wanted_norms[step..=step];
            norm.add(difference(&norms[step..=step], want, peak(want)), || {
                format!("{}: the gradient norm of training step {}", self.name, step + 1)
            });
        }
        Ok([loss, norm])
    }

    /// Tokens that come one by one give the logits of all at once, closer than either need be to the known ones.
    pub fn decoding(&self, device: &Device) -> Result<Check> {
        let loaded = LoadedExample::new(device, self)?;
        let policy = loaded.model.policy();
        let whole = loaded.forward(&policy)?;
        let mut check = Check::new(DECODING);
        check.add(difference(&loaded.extend(&policy, &[1])?, &whole, peak(&whole)), || {
            format!("{}: the logits of tokens one by one, compared with all at once,", self.name)
        });
        Ok(check)
    }
}

/// Name of the model's own policy.
const OWN: &str = "logits";

/// The policies that a golden checkpoint may have logits for, by their names in its file.
fn policies(own: &Policy) -> [(&'static str, Policy); 4] {
    [
        (OWN, own.clone()),
        ("logits.interval_20", Policy { interval: Some(20), ..own.clone() }),
        ("logits.top_k_2", Policy { top_k: Some(2), ..own.clone() }),
        ("logits.fenwick", Policy { retention: Retention::Fenwick, ..own.clone() }),
    ]
}
