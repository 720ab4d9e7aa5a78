//! Loads a bank from an opened file.

use march_engine::Device;
use safetensors::Dtype;
use serde_json::Value;

use super::layer::LayerReader;
use super::section::{Part, Section};
use super::{BankFile, BankTag, Ending, LOGITS};
use crate::anchors::Policy;
use crate::config::keys_of;
use crate::disk::header::Entry;
use crate::error::{Error, Result};
use crate::memory::StateBank;

/// The policy settings that may change when a bank is loaded.
const FREE: [&str; 2] = ["top_k", "retention"];

impl BankFile {
    /// Fills `empty`, the model's bank of an empty text, from this file, which must belong to the same model and
    /// tokenizer. The policy of `empty` may differ from the file's only in top-K and retention.
    pub fn load(&self, device: &Device, mut empty: StateBank, tag: &BankTag) -> Result<StateBank> {
        self.check_tag(tag)?;
        self.check_policy(empty.policy())?;
        let (Section { timeline, ledgers, .. }, count) = (&self.last, empty.layers.len());
        let of = |index: usize, name: &str| name.starts_with(&format!("layers.{index}."));
        let mut names = self.sections().flat_map(|section| section.tensors.keys());
        if !names.all(|name| name == LOGITS || (0..count).any(|index| of(index, name))) {
            let message = format!("has tensors of layers other than the model's {count}");
            return Err(Error::file(self.path(), message));
        }
        for (index, layer) in empty.layers.iter_mut().enumerate() {
            let ledger = ledgers.get(index).cloned().unwrap_or_default();
            // If each layer decides by itself which anchors to keep, its ledger lists them.
            let own = self.policy().budget().map(|_| ledger.entries.len());
            let reader = LayerReader::new(self, device, index, ledger, own.unwrap_or(timeline.kept.len()));
            if timeline.position > 0 {
                layer.load(&reader)?;
            }
            reader.finish()?;
        }
        empty.timeline = timeline.clone();
        Ok(empty)
    }

    /// Rejects a bank of another model or tokenizer.
    pub(crate) fn check_tag(&self, tag: &BankTag) -> Result<()> {
        let own = self.tag();
        for (what, kind, saved, other_kind, asked) in [
            ("model", &own.model_type, &own.model, &tag.model_type, &tag.model),
            ("tokenizer", &own.tokenizer_name, &own.tokenizer, &tag.tokenizer_name, &tag.tokenizer),
        ] {
            if saved != asked {
                let message = format!(
                    "is a bank of {what} {saved} ({kind}), but {what} {asked} ({other_kind}) was requested; only \
                     the model and tokenizer that wrote a bank can continue it"
                );
                return Err(Error::file(self.path(), message));
            }
        }
        Ok(())
    }

    /// Rejects a policy that differs from the file's in a fixed setting.
    fn check_policy(&self, asked: &Policy) -> Result<()> {
        let (saved, wanted) = (keys_of(self.policy()), keys_of(asked));
        for (key, value) in &saved {
            let other = wanted.get(key).unwrap_or(&Value::Null);
            // A budget decides per layer from the beginning of the text, so it cannot be switched on or off for an
            // existing bank.
            let budget = key == "retention" && (self.policy().budget().is_some() || asked.budget().is_some());
            if value != other && (budget || !FREE.contains(&key.as_str())) {
                let message = format!(
                    "was saved with {key} {value}, but {key} {other} was requested; it is fixed for an \
                     existing bank: keep the saved value, or start a new bank"
                );
                return Err(Error::file(self.path(), message));
            }
        }
        Ok(())
    }

    /// The end of the text, which the bank itself does not hold; `None` if the file was written without it.
    pub fn ending(&self, vocab_size: usize) -> Result<Option<Ending>> {
        let (Some(part), Some(recent)) = (self.last.tensors.get(LOGITS), &self.last.recent) else {
            return Ok(None);
        };
        if part.entry.shape != [vocab_size] || recent.iter().any(|&id| id as usize >= vocab_size) {
            return Err(self.unreadable(LOGITS, part));
        }
        let logits = self.numbers(&self.last, LOGITS, part, 0)?;
        Ok(Some(Ending { logits, recent: recent.clone() }))
    }

    /// Reads an f32 tensor and verifies its checksums. `before` rows of it are in earlier sections.
    pub(super) fn numbers(
        &self,
        section: &Section,
        name: &str,
        part: &Part,
        before: usize,
    ) -> Result<Vec<f32>> {
        if part.entry.dtype != Dtype::F32 {
            return Err(self.unreadable(name, part));
        }
        let bytes = self.source.read(part.entry.range.clone())?;
        self.compare_rows(section, name, part, 0..part.rows, &bytes, before)
            .map_err(|message| Error::damaged(self.path(), message))?;
        Ok(bytes.as_chunks().0.iter().map(|&number| f32::from_le_bytes(number)).collect())
    }

    pub(super) fn unreadable(&self, name: &str, part: &Part) -> Error {
        let Entry { dtype, shape, .. } = &part.entry;
        let message = format!("tensor `{name}`, {dtype} of shape {shape:?}, is not valid in a state bank");
        Error::file(self.path(), message)
    }
}
