//! The entry for applications: open a model, generate text, chat, keep a memory, measure losses, train.
//!
//! ```no_run
//! let march = march_lm::Pipeline::open("runs/demo/march")?;
//! for piece in march.generate("Alice was", 100)? {
//!     print!("{}", piece?);
//! }
//! # Ok::<(), march_lm::Error>(())
//! ```

use std::borrow::BorrowMut;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use march_engine::{CpuOptions, Device, Precision, Products};

use crate::anchors::{Anchor, Policy};
use crate::checkpoint::{ChatTemplate, Checkpoint, newest};
use crate::error::Result;
use crate::generate::{Generator, Inference, Limits, Sampling, Text};
use crate::memory::{BankFile, BankTag, Rollback, StateBank};
use crate::model::{Model, Part};
use crate::recipe::Config;
use crate::run::{Event, Run, RunOptions};
use crate::tokenizer::Tokenizer;
use crate::train::ranks::SingleProcess;

/// A model with its tokenizer, ready to use. Cloning copies a handle; several threads can use one at the same time.
#[derive(Clone)]
pub struct Pipeline {
    loaded: Arc<Loaded>,
    policy: Policy,
    sampling: Sampling,
}

struct Loaded {
    inference: Inference,
    tokenizer: Tokenizer,
    checkpoint: Checkpoint,
    weights: Precision,
}

/// How a model is opened.
#[derive(Clone, Debug, Default)]
pub struct OpenOptions {
    /// The device that runs the model; by default the CPU with all its cores.
    pub device: Option<Device>,
    /// Precision of the weights; by default as they are stored: bf16, q8 or q4 if the checkpoint's matrices are, which then
    /// stay in the file, q8 if they are in a GGUF file's blocks of eight bits or fewer, else f32.
    pub weights: Option<Precision>,
    /// `bytes`, or the path of a `tokenizer.json`; by default the checkpoint's.
    pub tokenizer: Option<String>,
}

impl Pipeline {
    /// Opens a checkpoint folder, a GGUF file, or the newest checkpoint of a run's folder.
    pub fn open(folder: impl AsRef<Path>) -> Result<Self> {
        Self::open_with(folder, OpenOptions::default())
    }

    /// Opens a model with chosen options.
    pub fn open_with(folder: impl AsRef<Path>, options: OpenOptions) -> Result<Self> {
        let OpenOptions { device, weights, tokenizer } = options;
        let folder = newest(folder.as_ref());
        let checkpoint = Checkpoint::open(&folder)?;
        let tokenizer = checkpoint.tokenizer(&folder, tokenizer.as_deref())?;
        let device = device.map_or_else(inference_cpu, Ok)?;
        let weights = weights.unwrap_or_else(|| checkpoint.precision(&device));
        let (model, parameters) = Model::load_in(&device, &checkpoint, weights)?;
        let policy = model.policy();
        let inference = Inference::new(&model, &parameters);
        let loaded = Arc::new(Loaded { inference, tokenizer, checkpoint, weights });
        Ok(Self { loaded, policy, sampling: Sampling::default() })
    }

    /// Trains a model as a preset or a TOML file says, in a folder that must not hold a run yet, and opens the result.
    /// `watch` receives what happens.
    pub fn train(config: &str, folder: impl AsRef<Path>, watch: &mut dyn FnMut(Event)) -> Result<Self> {
        let device = Device::cpu(CpuOptions::default())?;
        let (config, ranks) = (Config::load(config)?, Box::<SingleProcess>::default());
        let mut run = Run::create(&device, config, folder.as_ref(), RunOptions::default(), ranks)?;
        run.train(&AtomicBool::new(false), watch)?;
        Self::open(folder)
    }

    /// The same model with another policy for the anchors of new banks.
    pub fn with_policy(mut self, policy: Policy) -> Result<Self> {
        self.model().check_policy(&policy)?;
        self.policy = policy;
        Ok(self)
    }

    /// The same model with other sampling settings.
    pub fn with_sampling(mut self, sampling: Sampling) -> Result<Self> {
        sampling.check()?;
        self.sampling = sampling;
        Ok(self)
    }

    /// The model.
    pub fn model(&self) -> &Model {
        self.loaded.inference.model()
    }

    /// The model and its weights, for callers that run several texts in one call.
    pub fn inference(&self) -> &Inference {
        &self.loaded.inference
    }

    /// The device that runs the model.
    pub fn device(&self) -> &Device {
        self.loaded.inference.device()
    }

    /// Precision of the weights.
    pub fn weights(&self) -> Precision {
        self.loaded.weights
    }

    /// The tokenizer.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.loaded.tokenizer
    }

    /// The chat template in a GGUF file. That of a folder is in a file of its own.
    pub fn chat_template(&self) -> Result<Option<ChatTemplate>> {
        self.loaded.checkpoint.chat_template()
    }

    /// The policy of new banks.
    pub fn policy(&self) -> &Policy {
        &self.policy
    }

    /// Identifies the model, including the precision of its weights.
    pub fn fingerprint(&self) -> Result<String> {
        let own = self.model().checkpoint_fingerprint(&self.loaded.checkpoint)?;
        Ok(match self.loaded.weights {
            Precision::F32 => own,
            other => format!("{own}-{other}"),
        })
    }

    /// The tag of this model's bank files.
    pub fn tag(&self) -> Result<BankTag> {
        let model_type = self.model().config().mixer.model_type();
        Ok(BankTag::new(model_type, self.fingerprint()?, self.tokenizer()))
    }

    /// Continues a prompt by at most `max_tokens` tokens, piece by piece.
    pub fn generate(&self, prompt: &str, max_tokens: usize) -> Result<Pieces<Bank>> {
        let mut bank = self.bank()?;
        bank.read(prompt)?;
        Pieces::new(bank, Limits { max_tokens, stop: Vec::new() })
    }

    /// Starts a chat.
    pub fn chat(&self) -> Result<Chat> {
        Ok(Chat {
            bank: self.bank()?,
            user_prefix: "\nUser: ".into(),
            assistant_prefix: "\nAssistant:".into(),
        })
    }

    /// The memory of an empty text.
    pub fn bank(&self) -> Result<Bank> {
        self.bank_of(Text::new(self.model().bank(self.policy.clone())?))
    }

    /// Loads the memory of a text from a file that [`Bank::save`] or a command wrote. Its policy is the file's.
    pub fn load_bank(&self, path: impl AsRef<Path>) -> Result<Bank> {
        let file = BankFile::open(path.as_ref())?;
        self.bank_of(Text::load(self.device(), self.model(), &file, &self.tag()?, None)?)
    }

    fn bank_of(&self, text: Text) -> Result<Bank> {
        let generator = Generator::with_text(self.inference(), text, self.sampling)?;
        Ok(Bank { pipeline: self.clone(), generator })
    }

    /// −ln p of each token of a text after the first, with the token as text.
    pub fn losses(&self, text: &str) -> Result<Vec<(String, f32)>> {
        let ids = self.tokenizer().encode(text)?;
        let losses = self.token_losses(&ids, &mut |_| ControlFlow::Continue(()))?;
        let named = |(&id, loss)| Ok((self.tokenizer().decode(&[id])?, loss));
        ids.iter().skip(1).zip(losses).map(named).collect()
    }

    /// −ln p of each token after the first. After each call of the model `watch` receives the number of tokens left and
    /// may stop; the result is then that of the tokens before.
    pub fn token_losses(
        &self,
        ids: &[u32],
        watch: &mut dyn FnMut(usize) -> ControlFlow<()>,
    ) -> Result<Vec<f32>> {
        let mut bank = self.model().bank(self.policy.clone())?;
        let mut losses = Vec::with_capacity(ids.len());
        let read = &ids[..ids.len().saturating_sub(1)];
        for part in read.chunks(self.inference().call_tokens()) {
            let targets = &ids[losses.len() + 1..][..part.len()];
            losses.extend(self.inference().losses(&mut [Part::new(part, &mut bank)], targets)?.nll);
            if watch(read.len() - losses.len()).is_break() {
                break;
            }
        }
        Ok(losses)
    }

    /// The logits after each token, `vocab_size` numbers for each. `watch` is as for [`Pipeline::token_losses`].
    pub fn logits(&self, ids: &[u32], watch: &mut dyn FnMut(usize) -> ControlFlow<()>) -> Result<Vec<f32>> {
        let mut bank = self.model().bank(self.policy.clone())?;
        let mut logits = Vec::new();
        let mut left = ids.len();
        for part in ids.chunks(self.inference().call_tokens()) {
            let numbers = self.inference().token_logits(&mut [Part::new(part, &mut bank)])?.to_f32();
            self.device().check()?;
            left -= part.len();
            // A text of one call is not copied.
            if logits.is_empty() {
                logits = numbers;
                logits.reserve_exact(left * self.model().config().vocab_size);
            } else {
                logits.extend(numbers);
            }
            if watch(left).is_break() {
                break;
            }
        }
        Ok(logits)
    }
}

/// The CPU with products whose bits do not depend on the batch, so that a text is continued with the same bits however
/// it was read.
fn inference_cpu() -> Result<Device> {
    Ok(Device::cpu(CpuOptions { products: Products::BatchInvariant, ..CpuOptions::default() })?)
}

/// The memory of one text, with the model that reads and continues it.
pub struct Bank {
    pipeline: Pipeline,
    generator: Generator,
}

impl Bank {
    /// Reads more text.
    pub fn read(&mut self, text: &str) -> Result<()> {
        let ids = self.pipeline.tokenizer().encode(text)?;
        self.generator.read(&ids, &mut |_| ControlFlow::Continue(()))?;
        Ok(())
    }

    /// Reads a prompt and continues the text by at most `max_tokens` tokens. Afterwards the text consists of what was
    /// there before, the prompt, and the pieces. If the iterator is dropped before its end, the text may also have a
    /// token whose characters were not complete yet.
    pub fn generate(&mut self, prompt: &str, max_tokens: usize) -> Result<Pieces<&mut Self>> {
        self.read(prompt)?;
        Pieces::new(self, Limits { max_tokens, stop: Vec::new() })
    }

    /// A copy that continues independently. It shares the tensors.
    pub fn fork(&self) -> Result<Self> {
        self.pipeline.bank_of(self.generator.text().clone())
    }

    /// Rolls back to the last kept anchor that is at most `tokens` tokens into the text; `None` if the text ends there.
    pub fn rollback(&mut self, tokens: usize) -> Result<Option<(Anchor, Rollback)>> {
        self.generator.rollback(tokens)
    }

    /// Writes the memory to a file; if that holds the beginning of this text, only what is new is appended.
    pub fn save(&mut self, path: impl AsRef<Path>) -> Result<()> {
        let tag = self.pipeline.tag()?;
        self.generator.save(path.as_ref(), &tag)
    }

    /// Number of tokens in the text.
    pub fn tokens(&self) -> usize {
        self.generator.text().tokens()
    }

    /// Size of the memory in bytes.
    pub fn bytes(&self) -> usize {
        self.state().bytes()
    }

    /// What is kept: policy, anchors, and one memory per layer.
    pub fn state(&self) -> &StateBank {
        self.generator.text().bank()
    }
}

/// A conversation, whose earlier turns are not read again.
pub struct Chat {
    bank: Bank,
    /// The text before each turn of the user; an answer ends before it.
    pub user_prefix: String,
    /// The text between a turn and its answer.
    pub assistant_prefix: String,
}

impl Chat {
    /// Reads a turn and answers with at most `max_tokens` tokens, piece by piece.
    pub fn say(&mut self, turn: &str, max_tokens: usize) -> Result<Pieces<&mut Bank>> {
        let Self { bank, user_prefix, assistant_prefix } = self;
        bank.read(&format!("{user_prefix}{turn}{assistant_prefix}"))?;
        Pieces::new(bank, Limits { max_tokens, stop: vec![user_prefix.trim_end().to_string()] })
    }

    /// The memory of the conversation.
    pub fn bank(&mut self) -> &mut Bank {
        &mut self.bank
    }
}

/// Text that is being generated: an iterator of pieces. It ends at the limit, at a stop string, at the end of the text,
/// or after an error.
pub struct Pieces<B: BorrowMut<Bank>> {
    bank: B,
    ended: bool,
}

impl<B: BorrowMut<Bank>> Pieces<B> {
    fn new(mut bank: B, limits: Limits) -> Result<Self> {
        let Bank { pipeline, generator } = bank.borrow_mut();
        generator.begin(pipeline.tokenizer(), &limits)?;
        Ok(Self { bank, ended: false })
    }
}

impl<B: BorrowMut<Bank>> Iterator for Pieces<B> {
    type Item = Result<String>;

    fn next(&mut self) -> Option<Result<String>> {
        while !self.ended {
            let Bank { pipeline, generator } = self.bank.borrow_mut();
            match generator.advance(pipeline.tokenizer()) {
                Ok(piece) => {
                    self.ended = piece.ended.is_some();
                    if !piece.text.is_empty() {
                        return Some(Ok(piece.text));
                    }
                }
                Err(error) => {
                    self.ended = true;
                    return Some(Err(error));
                }
            }
        }
        None
    }
}
