//! The golden checkpoints as part of the program, and the model of Memory Caching.

use std::collections::BTreeMap;
use std::fmt::Display;

use march_lm::engine::{Device, Tensor};
use march_lm::model::{Model, ModelConfig};
use march_lm::{Error, Result};
use safetensors::SafeTensors;
use serde_json::Value;

use super::loaded::LoadedExample;
use super::{Example, Expected, OWN, Training, policies};

/// The files of a golden checkpoint; `crates/cli/golden/README.md` describes them.
struct Files {
    name: &'static str,
    config: &'static str,
    model: &'static [u8],
    tokens: &'static str,
    expected: &'static [u8],
    gradients: &'static [u8],
    training: &'static str,
}

macro_rules! path {
    ($name:literal, $file:literal) => {
        concat!("../../golden/", $name, "/", $file)
    };
}

macro_rules! files {
    ($name:literal) => {
        Files {
            name: $name,
            config: include_str!(path!($name, "config.json")),
            model: include_bytes!(path!($name, "model.safetensors")),
            tokens: include_str!(path!($name, "tokens.json")),
            expected: include_bytes!(path!($name, "expected.safetensors")),
            gradients: include_bytes!(path!($name, "gradients.safetensors")),
            training: include_str!(path!($name, "training.json")),
        }
    };
}

static FILES: [Files; 5] = [
    files!("transformer"),
    files!("gated_deltanet"),
    files!("log_linear"),
    files!("march"),
    files!("march_topk"),
];

/// A model without a golden checkpoint.
const MEMORY_CACHING: &str = r#"{"model_type": "memory_caching", "vocab_size": 61, "hidden_size": 32,
    "num_hidden_layers": 2, "intermediate_size": 48, "norm_eps": 1e-6, "tie_word_embeddings": false, "num_heads": 2,
    "head_dim": 12, "expand_v": 2.0, "conv_size": 4, "initializer_range": 0.12, "anchor_interval": 16,
    "routing_dim": 8}"#;

fn invalid(error: impl Display) -> Error {
    Error::Request(format!("a golden checkpoint cannot be read: {error}"))
}

/// A tensor of a file.
fn tensor(file: &SafeTensors<'_>, name: &str) -> Result<Vec<f32>> {
    let view = file.tensor(name).map_err(invalid)?;
    let (numbers, _) = view.data().as_chunks();
    Ok(numbers.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect())
}

fn wide(numbers: Vec<f32>) -> Vec<f64> {
    numbers.into_iter().map(f64::from).collect()
}

impl Example {
    /// The golden checkpoints.
    pub fn golden() -> Result<Vec<Self>> {
        FILES.iter().map(Self::read).collect()
    }

    fn read(files: &Files) -> Result<Self> {
        let config = ModelConfig::from_json(files.config, files.name)?;
        let layout = Model::new(&config).layout().to_vec();
        let open = |bytes| SafeTensors::deserialize(bytes).map_err(invalid);
        let (model, gradients, results) = (open(files.model)?, open(files.gradients)?, open(files.expected)?);
        let parameters = layout.iter().map(|spec| tensor(&model, &spec.name)).collect::<Result<_>>()?;
        let each = layout.iter().map(|spec| tensor(&gradients, &spec.name).map(wide));
        let training: Value = serde_json::from_str(files.training).map_err(invalid)?;
        let mut expected = Expected {
            gradients: each.collect::<Result<_>>()?,
            losses: serde_json::from_value(training["losses"].clone()).map_err(invalid)?,
            norms: serde_json::from_value(training["gradient_norms"].clone()).map_err(invalid)?,
            ..Expected::default()
        };
        for (name, _) in policies(&config.policy().unwrap_or_default()) {
            if results.tensor(name).is_ok() {
                expected.logits.insert(name, wide(tensor(&results, name)?));
            }
        }
        for layer in 0..config.num_hidden_layers {
            let name = format!("routing_weights.{layer}");
            if let Ok(view) = results.tensor(&name) {
                expected.routing.0 = view.shape().last().copied().unwrap_or(0);
                expected.routing.1.push(wide(tensor(&results, &name)?));
            }
        }
        if gradients.len() != layout.len()
            || results.len() != expected.logits.len() + expected.routing.1.len()
        {
            return Err(invalid(format!("{} has tensors that nothing is compared with", files.name)));
        }
        Ok(Self {
            name: files.name,
            config,
            parameters,
            tokens: serde_json::from_str(files.tokens).map_err(invalid)?,
            training: Training {
                batches: serde_json::from_value(training["batches"].clone()).map_err(invalid)?,
                rates: serde_json::from_value(training["learning_rates"].clone()).map_err(invalid)?,
                betas: serde_json::from_value(training["betas"].clone()).map_err(invalid)?,
                eps: serde_json::from_value(training["eps"].clone()).map_err(invalid)?,
                weight_decay: serde_json::from_value(training["weight_decay"].clone()).map_err(invalid)?,
                clip_norm: serde_json::from_value(training["clip_norm"].clone()).map_err(invalid)?,
            },
            expected,
            floor: 0.0,
        })
    }

    /// Memory Caching with random weights, on the tokens of a golden checkpoint; the reference device computes the
    /// results.
    pub fn memory_caching() -> Result<Self> {
        let config = ModelConfig::from_json(MEMORY_CACHING, "memory_caching")?;
        let model = Model::new(&config);
        let parameters = (0..model.layout().len()).map(|i| model.initial(i, 1)).collect();
        let mut example =
            Self { name: "memory_caching", config, parameters, floor: 1e-3, ..Self::read(&FILES[0])? };
        let mut loaded = LoadedExample::new(&Device::reference(), &example)?;
        let (_, gradients) = loaded.gradients(false)?;
        let logits = loaded.forward(&model.policy())?;
        let (losses, norms) = loaded.train()?;
        let numbers = |gradient: Option<Tensor>| gradient.map(|found| found.to_f64()).unwrap_or_default();
        example.expected = Expected {
            logits: BTreeMap::from([(OWN, logits)]),
            gradients: gradients.into_iter().map(numbers).collect(),
            losses,
            norms,
            ..Expected::default()
        };
        Ok(example)
    }
}
