//! The `[memory]` section of a configuration file, which has the same keys as a checkpoint's `config.json`.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::{Placement, Policy, Retention, Storage, text};
use crate::config::{Document, keys_of};
use crate::error::Result;

/// How anchors are kept and placed: the part of a policy that the model's own interval and routing do not determine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct MemoryConfig {
    /// Which anchors survive the next boundary, in training as well; all by default.
    #[serde(with = "text")]
    pub retention: Retention,
    /// Where anchors are placed, in training as well; periodic by default.
    #[serde(with = "text")]
    pub placement: Placement,
    /// The precision of kept states during decoding; f32 by default.
    #[serde(with = "text")]
    pub storage: Storage,
}

impl MemoryConfig {
    /// Returns `own` with these settings applied.
    pub fn over(&self, own: Policy) -> Policy {
        let Self { retention, placement, storage } = *self;
        Policy { retention, placement, storage, ..own }
    }

    /// Takes the keys from a document, for a model whose mixer has the policy `own`. A mixer without anchors has no
    /// policy; only the default settings are valid for it.
    pub(crate) fn read(document: &mut Document, own: Option<Policy>, model_type: &str) -> Result<Self> {
        let config: Self = document.keys()?;
        let Some(own) = own else {
            let defaults = Self::default().keys();
            return match config.keys().into_iter().find(|(key, value)| defaults.get(key) != Some(value)) {
                Some((key, value)) => {
                    let value = value.as_str().unwrap_or_default();
                    let message =
                        format!("is `{value}`, but model_type `{model_type}` has no anchors; remove it");
                    Err(document.error(&key, message))
                }
                None => Ok(config),
            };
        };
        if let (Placement::Adaptive(_), Err(error)) = (config.placement, config.over(own).check()) {
            return Err(document.error("placement", format!("is not valid: {error}")));
        }
        Ok(config)
    }

    /// All keys and their values.
    pub(crate) fn keys(&self) -> Map<String, Value> {
        keys_of(self)
    }
}
