//! The weights that a run starts with: drawn, or taken from a checkpoint, which may be of a model that the configured
//! one extends.

use std::path::Path;

use march_engine::{Device, Tensor};

use crate::anchors::Policy;
use crate::checkpoint::Checkpoint;
use crate::error::{Error, Result};
use crate::model::mixer::Extension;
use crate::model::{Model, ModelConfig, ParameterSpec, Parameters};
use crate::recipe::Config;

/// How far above the logarithm of the number of visible anchors the null's bias starts, in nats. With normal routing
/// scores near 0, the anchors together then take e^-5, about 0.7 %, of the weight of a sequence's last token.
pub(super) const MARGIN: f64 = 5.0;

/// Prepares a configuration for the weights of a checkpoint: if they are those of a model that the configured one
/// extends, the additions start such that the new model computes nearly what the old one did. `bias` is the value that
/// the user chose for the null's bias. The configuration then holds all that the initial weights depend on besides the
/// checkpoint.
pub(super) fn adapt(config: &mut Config, from: &Path, bias: Option<f64>) -> Result<()> {
    let checkpoint = Checkpoint::open(from)?;
    let extension = match extension_of(&config.model, checkpoint.config()) {
        Some(extension) => extension,
        None if bias.is_none() => return Ok(()),
        None => {
            let message = format!(
                "is a model of type `{}`, and the configured one is `{}`: --upcycle-null-bias applies only if a \
                 checkpoint is continued as a model that adds routing to it; leave the option out",
                checkpoint.config().mixer.model_type(),
                config.model.mixer.model_type()
            );
            return Err(Error::file(from, message));
        }
    };
    refuse_other_keys(from, &config.model, checkpoint.config(), &extension)?;
    let policy = config.model.policy().unwrap_or_default();
    let visible = visible_anchors(&policy, config.data.sequence_length);
    let bias = bias.unwrap_or_else(|| (100.0 * (MARGIN + (visible.max(1) as f64).ln())).round() / 100.0);
    let started = config.model.mixer.start_as_base(bias);
    started.map_err(|(key, message)| Error::config(super::CONFIGURATION, key, message))
}

/// How many anchors the last token of a sequence can read.
fn visible_anchors(policy: &Policy, tokens: usize) -> usize {
    let anchors = policy.interval.map_or(0, |interval| tokens.saturating_sub(1) / interval.max(1));
    anchors.min(policy.top_k.unwrap_or(usize::MAX))
}

/// The extension by which the configured model continues that of a checkpoint; `None` if they are of one type, or
/// neither extends the other.
fn extension_of(model: &ModelConfig, found: &ModelConfig) -> Option<Extension> {
    let continues = |extension: &Extension| extension.base.model_type() == found.mixer.model_type();
    // A checkpoint that has the additions already is continued as it is.
    model.mixer.extension().filter(|extension| continues(extension) && found.mixer.extension().is_none())
}

/// Rejects a checkpoint with another value of a key that both models have.
fn refuse_other_keys(
    from: &Path,
    model: &ModelConfig,
    found: &ModelConfig,
    extension: &Extension,
) -> Result<()> {
    let base = ModelConfig { mixer: extension.base.clone(), ..model.clone() };
    let (wanted, found) = (base.keys(), found.keys());
    // The range of initial weights does not matter any more.
    let compared = wanted.iter().filter(|(key, _)| *key != "initializer_range");
    for (key, value) in compared {
        if let Some(other) = found.get(key).filter(|other| *other != value) {
            let message = format!(
                "has `{key}` {other}, but the configured model has {value}; set model.{key}={other}, or use another \
                 checkpoint"
            );
            return Err(Error::file(from, message));
        }
    }
    Ok(())
}

/// The model of a configuration with the weights of a checkpoint; what the model adds to them is drawn with `seed`.
pub(super) fn load(
    device: &Device,
    model: &ModelConfig,
    from: &Path,
    seed: u64,
) -> Result<(Model, Parameters)> {
    let checkpoint = Checkpoint::open(from)?;
    let architecture = Model::new(model);
    let layout = Model::new(checkpoint.config()).layout().to_vec();
    let extension = extension_of(model, checkpoint.config());
    let added = |spec: &ParameterSpec| extension.as_ref().is_some_and(|extension| extension.adds(&spec.name));
    if let Some(difference) = difference(architecture.layout(), &layout, added) {
        let [own, other] = [checkpoint.config(), model].map(|config| config.mixer.model_type());
        let message = format!(
            "has parameters that differ from those of the configured model: {difference}. It is a `{own}`, and \
             `{other}` is configured; use another checkpoint, or change [model]"
        );
        return Err(Error::file(from, message));
    }
    let (_, loaded) = Model::load(device, &checkpoint)?;
    let mut parameters = Vec::with_capacity(architecture.layout().len());
    for (i, spec) in architecture.layout().iter().enumerate() {
        let place = layout.iter().position(|other| other.name == spec.name);
        parameters.push(match place.and_then(|place| loaded.get(place)) {
            Some(tensor) => tensor.clone(),
            None => Tensor::from_slice(&architecture.initial(i, seed), &spec.shape, device)?,
        });
    }
    Ok((architecture, parameters))
}

/// The first parameter that a checkpoint lacks, has in another shape, or has in excess. It may lack what is `added`.
fn difference(
    wanted: &[ParameterSpec],
    found: &[ParameterSpec],
    added: impl Fn(&ParameterSpec) -> bool,
) -> Option<String> {
    for spec in wanted {
        match found.iter().find(|other| other.name == spec.name) {
            Some(other) if other.shape == spec.shape => {}
            Some(other) => {
                let [has, needs] = [other, spec].map(|spec| format!("{:?}", spec.shape));
                return Some(format!("`{}` is {has}, but {needs} is needed", spec.name));
            }
            None if added(spec) => {}
            None => return Some(format!("`{}` is missing", spec.name)),
        }
    }
    let excess = found.iter().find(|spec| !wanted.iter().any(|other| other.name == spec.name));
    excess.map(|spec| format!("`{}` has no place in it", spec.name))
}
