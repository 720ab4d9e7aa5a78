//! A bank from an opened file.

use std::sync::Arc;

use march_engine::Engine;
use march_engine::ops::anchor_read::{self, Storage, StoredStates};
use safetensors::Dtype;
use serde_json::{Map, Value};

use super::section::{Part, Row, Section, is_of_anchors};
use super::{BankFile, BankTag, Ending, LOGITS, ROUTING_KEYS, SCALES, STATES, TAILS};
use crate::anchors::Policy;
use crate::checkpoint::read::Entry;
use crate::error::{Error, Result};
use crate::memory::{Anchors, LayerMemory, Ledger, StateBank};
use crate::model::Model;

/// What of a policy may change when a bank is loaded.
const FREE: [&str; 2] = ["top_k", "retention"];

impl BankFile {
    /// [`StateBank::load`] from an opened file.
    pub fn load<E: Engine>(
        &self,
        engine: &E,
        model: &Model<E>,
        tag: &BankTag,
        policy: Option<&Policy>,
    ) -> Result<StateBank<E>> {
        self.check_tag(tag)?;
        let policy = self.check_policy(policy.unwrap_or(self.policy()))?;
        model.check_policy(&policy)?;
        let (Section { timeline, ledgers, .. }, count) = (&self.last, model.config().num_hidden_layers);
        let of = |index: usize, name: &str| name.starts_with(&format!("layers.{index}."));
        let mut names = self.sections().flat_map(|section| section.tensors.keys());
        if !names.all(|name| name == LOGITS || (0..count).any(|index| of(index, name))) {
            let message = format!("has tensors of other layers than the model's {count}");
            return Err(Error::file(self.path(), message));
        }
        let mut layers = Vec::new();
        for index in 0..count {
            let prefix = format!("layers.{index}.");
            let mut layer = LayerMemory::default();
            for (name, part) in &self.last.tensors {
                if of(index, name) && !is_of_anchors(name) {
                    let numbers = self.numbers(&self.last, name, part, 0)?;
                    let tensor = engine.from_f32(&numbers, &part.entry.shape)?;
                    layer.live.insert(name[prefix.len()..].to_string().into(), tensor);
                }
            }
            if layer.live.is_empty() != (timeline.position == 0) {
                let message = format!("does not hold what layer {index} kept");
                return Err(Error::file(self.path(), message));
            }
            let ledger = ledgers.get(index).cloned().unwrap_or_default();
            // Where each layer decides by itself, it knows what it keeps.
            let own = self.policy().budget().map(|_| ledger.entries.len());
            let count = own.unwrap_or(timeline.kept.len());
            if count > 0 {
                layer.anchors = self.anchors(engine, &format!("{prefix}anchors."), count)?;
            }
            layer.anchors.ledger = ledger;
            layers.push(layer);
        }
        Ok(StateBank { policy, timeline: timeline.clone(), layers, torn: false })
    }

    /// Refuses a bank of another model or tokenizer.
    fn check_tag(&self, tag: &BankTag) -> Result<()> {
        let own = self.tag();
        for (what, kind, saved, other_kind, asked) in [
            ("model", &own.model_type, &own.model, &tag.model_type, &tag.model),
            ("tokenizer", &own.tokenizer_name, &own.tokenizer, &tag.tokenizer_name, &tag.tokenizer),
        ] {
            if saved != asked {
                let message = format!(
                    "is a bank of {what} {saved} ({kind}), but {what} {asked} ({other_kind}) is to go on with it; a \
                     bank goes on only with what made it"
                );
                return Err(Error::file(self.path(), message));
            }
        }
        Ok(())
    }

    /// Refuses a policy that differs from the file's in what is fixed.
    fn check_policy(&self, asked: &Policy) -> Result<Policy> {
        let (saved, wanted) = (keys(self.policy()), keys(asked));
        for (key, value) in &saved {
            let other = wanted.get(key).unwrap_or(&Value::Null);
            // A budget decides from the beginning of a text, layer by layer.
            let budget = key == "retention" && (self.policy().budget().is_some() || asked.budget().is_some());
            if value != other && (budget || !FREE.contains(&key.as_str())) {
                let message = format!(
                    "was saved with {key} {value}, but {key} {other} is asked for; it cannot change within a text: \
                     leave it as it is, or begin a new bank"
                );
                return Err(Error::file(self.path(), message));
            }
        }
        Ok(asked.clone())
    }

    /// What the file has of the text's end beside the bank; none in a file that was written without.
    pub fn ending<E: Engine>(&self, model: &Model<E>) -> Result<Option<Ending>> {
        let (Some(part), Some(recent)) = (self.last.tensors.get(LOGITS), &self.last.recent) else {
            return Ok(None);
        };
        let vocabulary = model.config().vocab_size;
        if part.entry.shape != [vocabulary] || recent.iter().any(|&id| id as usize >= vocabulary) {
            return Err(self.unreadable(LOGITS, part));
        }
        let logits = self.numbers(&self.last, LOGITS, part, 0)?;
        Ok(Some(Ending { logits, recent: recent.clone() }))
    }

    /// A tensor of f32, compared with its checksums; before its rows there are others in earlier sections.
    fn numbers(&self, section: &Section, name: &str, part: &Part, before: usize) -> Result<Vec<f32>> {
        if part.entry.dtype != Dtype::F32 {
            return Err(self.unreadable(name, part));
        }
        let bytes = self.source.read(part.entry.range.clone())?;
        self.compare_rows(section, name, part, 0..part.rows, &bytes, before)
            .map_err(|message| Error::damaged(self.path(), message))?;
        Ok(bytes.as_chunks().0.iter().map(|&number| f32::from_le_bytes(number)).collect())
    }

    /// A layer's `count` kept anchors; their states and tails stay in the file until they are read.
    fn anchors<E: Engine>(&self, engine: &E, prefix: &str, count: usize) -> Result<Anchors<E>> {
        let find = |name: &str| {
            let (name, rows) = (format!("{prefix}{name}"), self.rows(&format!("{prefix}{name}")));
            if rows.len() == count {
                return Ok((name, rows));
            }
            Err(Error::file(self.path(), format!("has no tensor `{name}` of {count} anchors")))
        };
        let source: Arc<dyn anchor_read::Source> = self.source.clone();
        let stored = |storage, shape: [usize; 4], rows: &[Row<'_>]| -> Result<Arc<E::Stored>> {
            let parts: Vec<_> = rows.iter().map(|row| (row.range(), row.checksum())).collect();
            let states = StoredStates::distant(&source, shape, storage, &parts)?;
            Ok(Arc::new(engine.stored_from_host(states)?))
        };
        let (name, rows) = find(ROUTING_KEYS)?;
        let (mut keys, mut done) = (Vec::new(), 0);
        for section in self.sections() {
            if let Some(part) = section.tensors.get(&name) {
                keys.extend(self.numbers(section, &name, part, done)?);
                done += part.rows;
            }
        }
        let width: usize = rows[0].part.entry.shape[1..].iter().product();
        let routing_keys = Some(engine.from_f32(&keys, &[count, width])?);
        let (name, rows) = find(STATES)?;
        let scales = match rows.iter().any(|row| row.part.entry.dtype == Dtype::I8) {
            true => find(SCALES)?.1,
            false => Vec::new(),
        };
        let mut states = Vec::with_capacity(count);
        for (i, &row) in rows.iter().enumerate() {
            let &[_, heads, key_dim, value_dim] = &row.part.entry.shape[..] else {
                return Err(self.unreadable(&name, row.part));
            };
            let shape = [1, heads, key_dim, value_dim];
            states.push(match row.part.entry.dtype {
                Dtype::F32 => stored(Storage::F32, shape, &[row])?,
                Dtype::BF16 => stored(Storage::Bf16, shape, &[row])?,
                Dtype::I8 => stored(Storage::Int8, shape, &[row, scales[i]])?,
                _ => return Err(self.unreadable(&name, row.part)),
            });
        }
        let mut tails = Vec::with_capacity(count);
        let [q, k, v] = TAILS.map(find);
        let (all, mut lists) = ([q?, k?, v?], Vec::with_capacity(3));
        for (name, rows) in &all {
            let tail = |row: &Row<'_>| match row.part.entry.shape[..] {
                [_, tokens, width] => stored(Storage::F32, [1, 1, tokens, width], &[*row]),
                _ => Err(self.unreadable(name, row.part)),
            };
            lists.push(rows.iter().map(tail).collect::<Result<Vec<_>>>()?.into_iter());
        }
        while let (Some(q), Some(k), Some(v)) = (lists[0].next(), lists[1].next(), lists[2].next()) {
            tails.push([q, k, v]);
        }
        Ok(Anchors { states, routing_keys, tails, ledger: Ledger::default() })
    }

    fn unreadable(&self, name: &str, part: &Part) -> Error {
        let Entry { dtype, shape, .. } = &part.entry;
        let message =
            format!("tensor `{name}`, {dtype} of shape {shape:?}, is not what a state bank has there");
        Error::file(self.path(), message)
    }
}

/// The keys of a policy.
fn keys(policy: &Policy) -> Map<String, Value> {
    match serde_json::to_value(policy) {
        Ok(Value::Object(keys)) => keys,
        _ => Map::new(),
    }
}
