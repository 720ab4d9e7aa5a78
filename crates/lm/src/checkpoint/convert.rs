//! A model written again: as a folder, in another precision.

use std::fs;
use std::path::Path;

use march_engine::{CpuOptions, Device, Precision};

use super::write::Values;
use super::{Checkpoint, NewFolder, SHARD_BYTES};
use crate::disk::built_in;
use crate::error::{Error, Result};
use crate::model::{Model, ModelConfig};

/// Files besides the model that a folder may have, and that belong to a new one as well.
const OTHER_FILES: [&str; 7] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "special_tokens_map.json",
    "LICENSE",
];

impl Checkpoint {
    /// Writes the model of `folder` to a folder that must not exist yet, with matrices in f32, bf16, q8 or q4. Loading them
    /// in this precision gives the same bits from both. `watch` is called with the number of parameters written so far.
    pub fn convert(
        &self,
        folder: &Path,
        to: &Path,
        weights: Precision,
        watch: &mut dyn FnMut(usize),
    ) -> Result<()> {
        // Keys of the tool that wrote the checkpoint say nothing about this one.
        let config = ModelConfig { other: Default::default(), ..self.config().clone() };
        let model = Model::new(&config);
        let layout = model.layout();
        self.check(layout)?;
        let out = NewFolder::create(to)?;
        self.verify()?;
        let device = Device::cpu(CpuOptions::default())?;
        let (mut done, mut last) = (0, None);
        out.model(&config, layout, SHARD_BYTES, weights, |i| {
            // The one before was written: neither its buffer nor its pages of the file are needed.
            device.trim();
            if let Some(last) = last.replace(i) {
                self.release(&layout[last]);
            }
            done += layout[i].count();
            watch(done);
            Ok(match weights {
                // Without a second copy.
                Precision::F32 => Values::Numbers(self.tensor(&layout[i])?.into_owned()),
                _ => Values::Tensor(self.parameter(&device, &layout[i], weights)?),
            })
        })?;
        out.files_of(self, folder)?;
        out.finish()
    }

    /// Bytes of the tensors.
    pub fn bytes(&self) -> usize {
        self.tensors.values().map(|(_, entry)| entry.range.len()).sum()
    }
}

impl NewFolder {
    /// Writes what belongs to the model of a checkpoint besides its weights: tokenizer, chat template and settings.
    pub(crate) fn files_of(&self, from: &Checkpoint, folder: &Path) -> Result<()> {
        for name in OTHER_FILES {
            let path = folder.join(name);
            if let Some(bytes) = built_in(folder, name) {
                self.file(name, bytes)?;
            } else if path.is_file() {
                self.file(name, &fs::read(&path).map_err(Error::io(&path, "read"))?)?;
            }
        }
        for (name, bytes) in from.files_beside(folder)? {
            self.file(name, &bytes)?;
        }
        Ok(())
    }
}
