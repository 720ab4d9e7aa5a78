//! Tensors of a checkpoint that are not among the model's parameters. Ignoring one could change what the model
//! computes, so they are rejected, except for a few that are known to be redundant.

use std::collections::BTreeSet;

use super::names::is_left_out;
use super::read::{Stored, TensorFile};
use super::{CONFIG_FILE, Checkpoint, first_names};
use crate::error::{Error, Result};
use crate::model::Dialect;
use crate::model::mixer::MixerConfig;

const HEAD: &str = "lm_head.weight";

/// Name suffixes of the table of rotary wavelengths, which is determined by `rope_theta`.
const FREQUENCIES: [&str; 2] = [".rotary.inv_freq", ".rotary_emb.inv_freq"];

/// The relative tolerance for numbers of that table: the rounding of bf16.
const ROUNDING: f64 = 1.0 / 128.0;

impl Checkpoint {
    /// Rejects tensors that nothing has read, unless they are known to be redundant.
    pub(super) fn refuse_extra(&self, asked: &BTreeSet<&str>) -> Result<()> {
        let mut extra = Vec::new();
        for (name, (place, entry)) in self.tensors.iter().filter(|(name, _)| !asked.contains(name.as_str())) {
            let file = &self.files[*place];
            if name == HEAD && self.config.tie_word_embeddings && asked.contains(self.embeddings()) {
                self.check_tied_head(file, entry)?;
            } else if is_left_out(name, self.dialect)
                || self.gguf.as_ref().is_some_and(|own| own.leaves_out(name))
            {
                // Nothing of the language model needs it.
            } else if !self.is_known_table(name, file, entry)? {
                extra.push(name.as_str());
            }
        }
        if extra.is_empty() {
            return Ok(());
        }
        let names = first_names(&extra);
        let described = self.described();
        let what = match extra.len() {
            1 => format!("tensor {names} is not part of the model that {described} describes"),
            count => format!("{count} tensors are not part of the model that {described} describes: {names}"),
        };
        let cause = match &self.config.mixer {
            MixerConfig::March(config)
                if !config.routing.null_route
                    && extra.iter().all(|name| name.contains(".attn.null_proj.")) =>
            {
                "`null_route` is false there: set it to true if the model has a null route, else remove them"
            }
            _ if self.gguf.is_some() => "without them another result may be computed: it cannot be loaded",
            _ => "without them another result may be computed: correct the configuration, or remove them",
        };
        Err(Error::file(&self.listing, format!("{what}; {cause}")))
    }

    /// The name of the embeddings.
    fn embeddings(&self) -> &'static str {
        match self.dialect {
            Dialect::Own => "model.embeddings.weight",
            Dialect::Qwen35 { nested: true } => "model.language_model.embed_tokens.weight",
            _ => "model.embed_tokens.weight",
        }
    }

    /// Rejects an output head that differs from the embeddings although they are tied.
    fn check_tied_head(&self, file: &TensorFile, head: &Stored) -> Result<()> {
        /// How many numbers are compared at a time.
        const BLOCK: usize = 1 << 16;
        let name = self.embeddings();
        let Some((place, embeddings)) = self.tensors.get(name) else { return Ok(()) };
        let other = &self.files[*place];
        let count: usize = head.shape.iter().product();
        let mut same = head.shape == embeddings.shape;
        for start in (0..count).step_by(BLOCK) {
            if !same {
                break;
            }
            let places: Vec<usize> = (start..count.min(start + BLOCK)).collect();
            let [head, embeddings] =
                [file.sample(HEAD, head, &places)?, other.sample(name, embeddings, &places)?];
            same = head.iter().zip(&embeddings).all(|(a, b)| a.to_bits() == b.to_bits());
        }
        file.release(head);
        other.release(embeddings);
        if same {
            return Ok(());
        }
        let message = format!(
            "has `{HEAD}` with other numbers than `{name}`, but `tie_word_embeddings` is true in `{CONFIG_FILE}`, \
             which makes the embeddings the head; set it to false if `{HEAD}` is meant, or remove that tensor"
        );
        Err(Error::file(file.path(), message))
    }

    /// Whether a tensor is the table of rotary wavelengths that the configuration implies.
    fn is_known_table(&self, name: &str, file: &TensorFile, entry: &Stored) -> Result<bool> {
        let Some(config) = self.config.mixer.attention() else { return Ok(false) };
        let turned = config.turned(self.config.hidden_size);
        let is_table = FREQUENCIES.iter().any(|end| name.ends_with(end)) && entry.shape == [turned / 2];
        if !is_table || config.rotary_scaling.is_some() {
            return Ok(false);
        }
        let found = file.sample(name, entry, &(0..turned / 2).collect::<Vec<_>>())?;
        let expected = config.frequencies(self.config.hidden_size).list(turned);
        Ok(found
            .iter()
            .zip(expected)
            .all(|(&found, expected)| (f64::from(found) - expected).abs() <= ROUNDING * expected))
    }
}
