//! The memory of one text, and text that is being written.

use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};

use march_lm::Pipeline;
use march_lm::generate::{Generator, Limits, Sampling, StopReason, Text};
use march_lm::memory::{BankFile, Rollback};
use march_lm::model::Model as Architecture;
use march_server::{Part, Splitter};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::error::{Result, Watch, refuse, run};
use crate::{arrays, sampling};

/// The memory of one text: what `Model.bank` returns.
///
/// A bank reads text, continues it, and can be copied, rolled back and saved. Threads may share it; they wait for each
/// other.
///
/// >>> import march_lm
/// >>> model = march_lm.load()
/// >>> bank = model.bank(storage="int8")
/// >>> bank.read("3 May: the key is in the barn. That was 3 May. ")
/// >>> "".join(bank.fork().generate("Where was the key on 3 May?", 8, temperature=0.0))
/// ' barn'
/// >>> bank.tokens > 0 and bank.bytes > 0
/// True
#[pyclass(frozen, module = "march_lm")]
pub struct Bank {
    pub pipeline: Pipeline,
    open: Mutex<Open>,
}

/// A text that is read and written.
pub struct Open {
    pub generator: Generator,
    /// How often writing began. Only the newest `Pieces` may go on.
    turn: u64,
}

impl Bank {
    /// A bank that continues a text.
    pub fn new(pipeline: &Pipeline, text: Text) -> march_lm::Result<Self> {
        let generator = Generator::with_text(pipeline.inference(), text, Sampling::default())?;
        Ok(Self { pipeline: pipeline.clone(), open: Mutex::new(Open { generator, turn: 0 }) })
    }

    /// Loads a bank from a file.
    pub fn of_file(pipeline: &Pipeline, path: PathBuf) -> march_lm::Result<Self> {
        let file = BankFile::open(&path)?;
        Self::new(pipeline, Text::load(pipeline.device(), pipeline.model(), &file, &pipeline.tag()?, None)?)
    }

    /// The text, for the caller alone. The GIL must not be held, because another thread may have the text and need it.
    pub fn lock(&self) -> MutexGuard<'_, Open> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn with<T: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&mut Open, &mut Watch<'_>) -> march_lm::Result<T> + Send,
    ) -> Result<T> {
        run(py, |watch| work(&mut self.lock(), watch))
    }

    fn state<T: Send>(&self, py: Python<'_>, of: impl FnOnce(&Text) -> T + Send) -> T {
        py.detach(|| of(self.lock().generator.text()))
    }

    /// Reads a prompt and begins to write. An empty prompt begins a new text, after the token that ends one.
    pub fn begin(
        bank: Py<Self>,
        py: Python<'_>,
        mut prompt: Vec<u32>,
        sampling: Sampling,
        limits: &Limits,
    ) -> Result<Pieces> {
        let this = bank.get();
        let tokenizer = this.pipeline.tokenizer();
        let turn = this.with(py, |open, watch| {
            let text = open.generator.text().clone();
            if prompt.is_empty() && text.tokens() == 0 {
                prompt.extend(tokenizer.end_of_text());
            }
            open.generator = Generator::with_text(this.pipeline.inference(), text, sampling)?;
            open.generator.read(&prompt, &mut |_| watch())?;
            open.generator.begin(tokenizer, limits)?;
            open.turn += 1;
            Ok(open.turn)
        })?;
        Ok(Pieces { bank, turn, writing: Mutex::default() })
    }
}

#[pymethods]
impl Bank {
    /// Reads more text: a `str`, or token ids. Ctrl-C stops between calls of the model; what was read until then is part
    /// of the text.
    fn read(&self, py: Python<'_>, ids: &Bound<'_, PyAny>) -> Result<()> {
        let ids = arrays::ids(ids, self.pipeline.tokenizer())?;
        self.with(py, |open, watch| open.generator.read(&ids, &mut |_| watch()).map(drop))
    }

    /// Reads a prompt and continues the text: an iterator of pieces. Afterwards the text consists of what was there
    /// before, the prompt, and the pieces.
    #[pyo3(signature = (prompt, max_tokens = 256, **sampling))]
    fn generate(
        slf: Py<Self>,
        py: Python<'_>,
        prompt: &Bound<'_, PyAny>,
        max_tokens: usize,
        sampling: Option<&Bound<'_, PyDict>>,
    ) -> Result<Pieces> {
        let (sampling, limits) = sampling::read(max_tokens, sampling)?;
        let prompt = arrays::ids(prompt, slf.get().pipeline.tokenizer())?;
        Self::begin(slf, py, prompt, sampling, &limits)
    }

    /// A copy that continues independently. It shares the numbers until one of the two goes on.
    fn fork(&self, py: Python<'_>) -> Result<Self> {
        let text = self.state(py, Text::clone);
        Ok(Self::new(&self.pipeline, text)?)
    }

    /// Rolls back to the last kept anchor at or before `tokens` tokens. Returns where the text now ends, and why the
    /// memory is only nearly what it was there, or `None` if it is exactly that.
    fn rollback(&self, py: Python<'_>, tokens: usize) -> Result<(usize, Option<String>)> {
        self.with(py, |open, _| {
            let found = open.generator.rollback(tokens)?;
            open.turn += 1;
            Ok(match found {
                None => (tokens, None),
                Some((anchor, Rollback::Exact)) => (anchor.position, None),
                Some((anchor, Rollback::Approximate(why))) => (anchor.position, Some(why)),
            })
        })
    }

    /// Writes the memory to a file, from which `Model.load_bank` continues. If the file has the beginning of this text,
    /// only what is new is written.
    fn save(&self, py: Python<'_>, path: PathBuf) -> Result<()> {
        let tag = self.pipeline.tag()?;
        self.with(py, |open, _| open.generator.save(&path, &tag))
    }

    /// The logits of the next token, float32 `[vocabulary]`; `None` before the first token.
    #[getter]
    fn logits<'py>(&self, py: Python<'py>) -> Result<Option<Bound<'py, PyAny>>> {
        let logits = self.with(py, |open, _| {
            open.generator.bank()?; // reads the rest
            Ok(open.generator.session_mut().logits().map(<[f32]>::to_vec))
        })?;
        logits
            .map(|logits| arrays::of_f32(py, logits, &[self.pipeline.model().config().vocab_size]))
            .transpose()
    }

    /// Number of tokens in the text.
    #[getter]
    fn tokens(&self, py: Python<'_>) -> usize {
        self.state(py, Text::tokens)
    }

    /// Size of the memory in bytes.
    #[getter]
    fn bytes(&self, py: Python<'_>) -> usize {
        self.state(py, |text| text.bank().bytes())
    }

    /// The number of tokens before each anchor that is kept, int64 `[anchors]`.
    #[getter]
    fn anchors<'py>(&self, py: Python<'py>) -> Result<Bound<'py, PyAny>> {
        let kept: Vec<usize> =
            self.state(py, |text| text.bank().timeline().kept.iter().map(|anchor| anchor.position).collect());
        let count = kept.len();
        arrays::of_i64(py, kept.into_iter(), &[count])
    }

    /// How anchors are placed, kept and read, such as `interval=64 top-k=4 storage=int8`.
    #[getter]
    fn policy(&self, py: Python<'_>) -> String {
        self.state(py, |text| text.bank().policy().to_string())
    }

    fn __repr__(&self, py: Python<'_>) -> String {
        self.state(py, |text| {
            format!(
                "<march_lm.Bank: {} tokens, {} bytes, {}>",
                text.tokens(),
                text.bank().bytes(),
                text.bank().policy()
            )
        })
    }
}

/// Reads the next tokens of several texts in the same calls of the model.
pub fn read_together(
    py: Python<'_>,
    pipeline: &Pipeline,
    banks: &[Py<Bank>],
    texts: &[Vec<u32>],
) -> Result<()> {
    if banks.len() != texts.len() {
        return refuse(format!(
            "got {} banks and {} texts; give one text for each bank",
            banks.len(),
            texts.len()
        ));
    }
    let mut pairs: Vec<(&Bank, &[u32])> =
        banks.iter().map(Py::get).zip(texts.iter().map(Vec::as_slice)).collect();
    // Every caller locks in the same order, so that none waits for another that waits for it.
    let address = |bank: &Bank| std::ptr::from_ref(bank).addr();
    pairs.sort_by_key(|(bank, _)| address(bank));
    if pairs.windows(2).any(|two| std::ptr::eq(two[0].0, two[1].0)) {
        return refuse("a bank is given twice; give a fork of it");
    }
    let own = |architecture: &Architecture| std::ptr::from_ref(architecture.config());
    if pairs.iter().any(|(bank, _)| own(bank.pipeline.model()) != own(pipeline.model())) {
        return refuse("a bank is of another model");
    }
    run(py, |watch| {
        let mut open: Vec<_> = pairs.iter().map(|(bank, _)| bank.lock()).collect();
        for (open, (_, ids)) in open.iter_mut().zip(&pairs) {
            open.generator.session_mut().push(ids);
        }
        let mut sessions: Vec<_> = open.iter_mut().map(|open| open.generator.session_mut()).collect();
        while sessions.iter().any(|session| session.unread() > 0) && watch().is_continue() {
            pipeline.inference().step(&mut sessions)?;
        }
        march_lm::Result::Ok(())
    })
}

/// Text that is being written: an iterator of pieces.
#[pyclass(frozen, module = "march_lm")]
pub struct Pieces {
    /// The memory of the text.
    #[pyo3(get)]
    bank: Py<Bank>,
    turn: u64,
    writing: Mutex<Writing>,
}

#[derive(Default)]
struct Writing {
    /// For the answer of a chat: what tells its reasoning from its content.
    splitter: Option<Splitter>,
    reasoning: String,
    /// Whether the answer has begun.
    begun: bool,
    ended: Option<StopReason>,
}

impl Pieces {
    /// The answer of a chat.
    pub fn answer(mut self, splitter: Splitter) -> Self {
        self.writing = Mutex::new(Writing { splitter: Some(splitter), ..Writing::default() });
        self
    }

    fn writing(&self) -> MutexGuard<'_, Writing> {
        self.writing.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Writing {
    /// What the user sees of a new piece.
    fn shown(&mut self, text: String) -> String {
        let Some(splitter) = &mut self.splitter else { return text };
        let mut parts = splitter.push(&text);
        if self.ended.is_some() {
            parts.extend(splitter.finish());
        }
        let mut shown = String::new();
        for part in parts {
            match part {
                Part::Reasoning(text) => self.reasoning += &text,
                Part::Content(text) => shown += &text,
                Part::Call(name, arguments) => shown += &format!("{name}({arguments})"),
            }
        }
        let shown = if self.begun { shown } else { shown.trim_start().to_string() };
        self.begun |= !shown.is_empty();
        shown
    }
}

#[pymethods]
impl Pieces {
    fn __iter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    fn __next__(&self, py: Python<'_>) -> Result<Option<String>> {
        let bank = self.bank.get();
        bank.with(py, |open, watch| {
            let mut writing = self.writing();
            while writing.ended.is_none() && watch().is_continue() {
                if open.turn != self.turn {
                    let message = "the bank has begun another text since; iterate over a fork of it instead";
                    return Err(march_lm::Error::Request(message.into()));
                }
                let piece = open.generator.advance(bank.pipeline.tokenizer())?;
                writing.ended = piece.ended;
                let shown = writing.shown(piece.text);
                if !shown.is_empty() {
                    return Ok(Some(shown));
                }
            }
            Ok(None)
        })
    }

    /// What the model thought before the answer of a chat, so far.
    #[getter]
    fn reasoning(&self, py: Python<'_>) -> String {
        py.detach(|| self.writing().reasoning.clone())
    }

    /// Why the text ended: `"end"` of the text, a `"stop"` string, or `"length"`; `None` before that.
    #[getter]
    fn ended(&self, py: Python<'_>) -> Option<&'static str> {
        py.detach(|| self.writing().ended).map(|ended| match ended {
            StopReason::EndOfText => "end",
            StopReason::Stop => "stop",
            StopReason::MaxTokens => "length",
            StopReason::Requested => "asked",
        })
    }
}
