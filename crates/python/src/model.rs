//! A model: opening, logits, losses, generation, chat.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use march_engine::{CpuOptions, Device, Precision, Products};
use march_lab::eval::{Encoded, Event, Request, Scheduler};
use march_lab::report::routing::Routing as Found;
use march_lm::anchors::Policy;
use march_lm::checkpoint::{NewFolder, SHARD_BYTES, newest};
use march_lm::disk::BUILT_IN;
use march_lm::generate::{Generator, Sampling, Text};
use march_lm::model::{Model as Architecture, TraceCell};
use march_lm::pipeline::OpenOptions;
use march_lm::{Config, Pipeline};
use march_server::{Message, Splitter, Template};
use numpy::PyArray1;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyString};

use crate::bank::{Bank, Pieces, read_together};
use crate::error::{Result, refuse, run};
use crate::routing::Routing;
use crate::{arrays, sampling};

/// A model with its tokenizer: what `march_lm.load` returns. Threads may share it.
///
/// >>> import march_lm
/// >>> model = march_lm.load()
/// >>> model.logits("3 May: the key is in the barn.").shape[1] == model.vocabulary
/// True
#[pyclass(frozen, module = "march_lm")]
pub struct Model {
    pipeline: Pipeline,
    /// How conversations are written; or why the model's own form cannot be used.
    template: std::result::Result<Mutex<Template>, String>,
    path: PathBuf,
}

/// The names of the presets that `load` and `train` know.
///
/// >>> import march_lm
/// >>> "tiny/march" in march_lm.presets()
/// True
#[pyfunction]
pub fn presets() -> Vec<&'static str> {
    Config::presets().collect()
}

/// Opens a model: a checkpoint folder, the folder of a run, a GGUF file, or the name of a preset, whose weights are then
/// random (`seed`). Without a name it is the model inside the package, which answers questions about a diary.
///
/// `weights` are "f32", "bf16", "int8", "q8" or "q4"; by default as they are stored. `threads` is the number of threads,
/// by default all; `device` is "cpu", or "reference" for f64. `tokenizer` is "bytes" or the path of a `tokenizer.json`.
///
/// >>> import march_lm
/// >>> model = march_lm.load(weights="q8", threads=1)
/// >>> model.weights
/// 'q8'
#[pyfunction]
#[pyo3(signature = (model = None, *, weights = None, threads = None, device = "cpu", tokenizer = None, seed = 0))]
pub fn load(
    py: Python<'_>,
    model: Option<PathBuf>,
    weights: Option<&str>,
    threads: Option<usize>,
    device: &str,
    tokenizer: Option<String>,
    seed: u64,
) -> Result<Model> {
    let path = model.unwrap_or_else(|| BUILT_IN.into());
    let weights = match weights.map(str::parse::<Precision>) {
        Some(Err(why)) => return refuse(format!("`weights` {why}")),
        found => found.and_then(std::result::Result::ok),
    };
    let device = open_device(device, threads)?;
    run(py, |_| -> Result<Model> {
        let options = OpenOptions { device: Some(device), weights, tokenizer };
        let preset = path.to_str().filter(|name| !path.exists() && Config::presets().any(|it| it == *name));
        let Some(preset) = preset else { return Ok(Model::open(path, options)?) };
        // A folder for the moment; the weights are read from it once.
        let folder = tempfile::tempdir().map_err(march_lm::Error::io(&path, "write the weights of"))?;
        let written = folder.path().join("model");
        write_preset(preset, &written, seed)?;
        let opened = Model::open(written, options)?;
        Ok(Model { path, ..opened })
    })
}

fn open_device(name: &str, threads: Option<usize>) -> Result<Device> {
    match name {
        "cpu" => {
            // A text is continued with the same bits however it was read.
            let (threads, products) = (threads.unwrap_or(0), Products::BatchInvariant);
            Ok(Device::cpu(CpuOptions { threads, products, ..CpuOptions::default() })?)
        }
        "reference" => Ok(Device::reference()),
        _ => refuse(format!("`device` is `{name}`; it must be `cpu` or `reference`")),
    }
}

/// Writes a checkpoint with the random weights of a preset.
fn write_preset(preset: &str, folder: &Path, seed: u64) -> march_lm::Result<()> {
    let config = Config::load(preset)?.model;
    let model = Architecture::new(&config);
    let new = NewFolder::create(folder)?;
    new.model(&config, model.layout(), SHARD_BYTES, Precision::F32, |i| Ok(model.initial(i, seed)))?;
    new.finish()
}

impl Model {
    fn open(path: PathBuf, options: OpenOptions) -> march_lm::Result<Self> {
        let pipeline = Pipeline::open_with(&path, options)?;
        let template = Template::of_model(&newest(&path), &pipeline).map(Mutex::new);
        Ok(Self { pipeline, template, path })
    }

    fn ids(&self, value: &Bound<'_, PyAny>) -> Result<Vec<u32>> {
        arrays::ids(value, self.pipeline.tokenizer())
    }

    fn vocab_size(&self) -> usize {
        self.pipeline.model().config().vocab_size
    }

    /// The model's policy with some settings changed.
    fn policy_with(&self, settings: Option<&Bound<'_, PyDict>>) -> Result<Policy> {
        let mut text = Vec::new();
        for (name, value) in settings.into_iter().flatten().filter(|(_, value)| !value.is_none()) {
            text.push(format!("{}={}", name.to_string().replace('_', "-"), value.str()?));
        }
        let policy = self.pipeline.policy().with(&text.join(" "))?;
        self.pipeline.model().check_policy(&policy)?;
        Ok(policy)
    }
}

#[pymethods]
impl Model {
    /// The token ids of a text, uint32 `[tokens]`.
    fn encode<'py>(&self, py: Python<'py>, text: &str) -> Result<Bound<'py, PyArray1<u32>>> {
        Ok(PyArray1::from_vec(py, self.pipeline.tokenizer().encode(text)?))
    }

    /// The text of token ids.
    fn decode(&self, ids: &Bound<'_, PyAny>) -> Result<String> {
        Ok(self.pipeline.tokenizer().decode_checked(&self.ids(ids)?)?)
    }

    /// The logits after each token of a text, float32 `[tokens, vocabulary]`. The text is a `str`, or token ids in
    /// anything that numpy can read.
    fn logits<'py>(&self, py: Python<'py>, ids: &Bound<'_, PyAny>) -> Result<Bound<'py, PyAny>> {
        let ids = self.ids(ids)?;
        let logits = run(py, |watch| self.pipeline.logits(&ids, &mut |_| watch()))?;
        arrays::of_f32(py, logits, &[ids.len(), self.vocab_size()])
    }

    /// −ln p of each token of a text after the first, float32 `[tokens - 1]`.
    fn losses<'py>(&self, py: Python<'py>, ids: &Bound<'_, PyAny>) -> Result<Bound<'py, PyAny>> {
        let ids = self.ids(ids)?;
        let losses = run(py, |watch| self.pipeline.token_losses(&ids, &mut |_| watch()))?;
        let count = losses.len();
        arrays::of_f32(py, losses, &[count])
    }

    /// The mean of `losses`, in nats per token.
    fn loss(&self, py: Python<'_>, ids: &Bound<'_, PyAny>) -> Result<f64> {
        let ids = self.ids(ids)?;
        if ids.len() < 2 {
            return refuse("a loss needs a text of at least two tokens");
        }
        let losses = run(py, |watch| self.pipeline.token_losses(&ids, &mut |_| watch()))?;
        Ok(losses.iter().map(|&loss| f64::from(loss)).sum::<f64>() / losses.len() as f64)
    }

    /// For pairs of a context and a continuation, both text: ln p of the continuation, and whether each of its tokens
    /// was the most probable one. A context that occurs several times is read once, and many are read in one call.
    ///
    /// >>> import march_lm
    /// >>> model = march_lm.load()
    /// >>> pairs = [("3 May: the key is in the", " barn"), ("3 May: the key is in the", " key")]
    /// >>> (good, _), (bad, _) = model.loglikelihood(pairs)
    /// >>> good > bad
    /// True
    fn loglikelihood(&self, py: Python<'_>, pairs: Vec<(String, String)>) -> Result<Vec<(f64, bool)>> {
        // One request for each context, with the places of its continuations in `pairs`.
        let mut requests: Vec<(Request, Vec<usize>)> = Vec::new();
        let mut known = std::collections::HashMap::new();
        for (i, (context, continuation)) in pairs.iter().enumerate() {
            let at = *known.entry(context).or_insert(requests.len());
            if at == requests.len() {
                let context = context.clone();
                requests.push((Request::Loglikelihood { context, continuations: Vec::new() }, Vec::new()));
            }
            if let (Request::Loglikelihood { continuations, .. }, places) = &mut requests[at] {
                continuations.push(continuation.clone());
                places.push(i);
            }
        }
        let (requests, places): (Vec<_>, Vec<_>) = requests.into_iter().unzip();
        let answers = self.answers(py, &requests)?;
        let mut found = vec![(0.0, false); pairs.len()];
        for (answer, places) in answers.iter().zip(places) {
            for (score, place) in answer.scores().iter().zip(places) {
                found[place] = (score.loglikelihood, score.is_greedy);
            }
        }
        Ok(found)
    }

    /// Answers requests as `march eval requests` does, many in one call of the model: dicts with a `kind`
    /// ("loglikelihood", "loglikelihood_rolling" or "generate_until") and what belongs to it.
    ///
    /// >>> import march_lm
    /// >>> model = march_lm.load()
    /// >>> context = "3 May: the key is in the barn. That was 3 May. Where was the key on 3 May?"
    /// >>> model.answer([{"kind": "generate_until", "context": context, "max_tokens": 8}])
    /// [{'generate_until': ' barn'}]
    fn answer<'py>(&self, py: Python<'py>, requests: &Bound<'py, PyAny>) -> Result<Bound<'py, PyAny>> {
        let requests: Vec<Request> = from_python(requests, "requests")?;
        to_python(py, &self.answers(py, &requests)?)
    }

    /// Continues a prompt, a `str` or token ids, by at most `max_tokens` tokens: an iterator of pieces. Keyword arguments
    /// are `temperature` (1.0), `top_k`, `top_p` (1.0), `repetition_penalty` (1.0), `penalty_window` (64), `seed` (0) and
    /// `stop`, a string or several.
    ///
    /// >>> import march_lm
    /// >>> model = march_lm.load()
    /// >>> text = "3 May: the key is in the barn. That was 3 May. Where was the key on 3 May?"
    /// >>> "".join(model.generate(text, 8, temperature=0.0))
    /// ' barn'
    #[pyo3(signature = (prompt = None, max_tokens = 256, **sampling))]
    fn generate(
        &self,
        py: Python<'_>,
        prompt: Option<&Bound<'_, PyAny>>,
        max_tokens: usize,
        sampling: Option<&Bound<'_, PyDict>>,
    ) -> Result<Pieces> {
        let (sampling, limits) = sampling::read(max_tokens, sampling)?;
        let prompt = prompt.map(|prompt| self.ids(prompt)).transpose()?;
        Bank::begin(Py::new(py, self.bank(None)?)?, py, prompt.unwrap_or_default(), sampling, &limits)
    }

    /// Answers the last of some messages, dicts with `role` and `content`, as the model's chat template writes them: an
    /// iterator of pieces, whose `reasoning` is what the model thought before. Arguments are those of `generate`.
    ///
    /// >>> import march_lm
    /// >>> model = march_lm.load()
    /// >>> question = "3 May: the key is in the barn. That was 3 May. Where was the key on 3 May?"
    /// >>> "".join(model.chat([{"role": "user", "content": question}], 8, temperature=0.0))
    /// 'barn'
    #[pyo3(signature = (messages, max_tokens = 256, **sampling))]
    fn chat(
        &self,
        py: Python<'_>,
        messages: &Bound<'_, PyAny>,
        max_tokens: usize,
        sampling: Option<&Bound<'_, PyDict>>,
    ) -> Result<Pieces> {
        let (sampling, mut limits) = sampling::read(max_tokens, sampling)?;
        let messages: Vec<Message> = from_python(messages, "messages")?;
        let (prompt, splitter) = match &self.template {
            Err(why) => return refuse(why.clone()),
            Ok(template) => {
                let template = template.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
                limits.stop.extend(template.stop());
                let prompt = template.render(&messages).or_else(refuse)?;
                let splitter = Splitter::new(template.reply_form(&prompt, None));
                (prompt, splitter)
            }
        };
        let prompt = self.pipeline.tokenizer().encode(&prompt)?;
        let bank = Py::new(py, self.bank(None)?)?;
        Ok(Bank::begin(bank, py, prompt, sampling, &limits)?.answer(splitter))
    }

    /// The memory of an empty text. Settings that are not given are the model's own: `interval` (tokens from one anchor to
    /// the next), `top_k` (how many anchors a token reads, or "dense"), `retention` ("all", "fenwick", "recent:N",
    /// "budget:BYTES"), `placement` ("periodic", "adaptive:N") and `storage` ("f32", "bf16", "int8").
    #[pyo3(signature = (**policy))]
    fn bank(&self, policy: Option<&Bound<'_, PyDict>>) -> Result<Bank> {
        let policy = self.policy_with(policy)?;
        Ok(Bank::new(&self.pipeline, Text::new(self.pipeline.model().bank(policy)?))?)
    }

    /// The memory of a text from a file that `Bank.save` or a command wrote.
    fn load_bank(&self, py: Python<'_>, path: PathBuf) -> Result<Bank> {
        run(py, |_| Bank::of_file(&self.pipeline, path))
    }

    /// The same model, whose weights are shared, with another policy for all that it reads; the settings are those of
    /// `bank`.
    #[pyo3(signature = (**policy))]
    fn with_policy(&self, policy: Option<&Bound<'_, PyDict>>) -> Result<Self> {
        let pipeline = self.pipeline.clone().with_policy(self.policy_with(policy)?)?;
        let template = Template::of_model(&newest(&self.path), &pipeline).map(Mutex::new);
        Ok(Self { pipeline, template, path: self.path.clone() })
    }

    /// Reads the next tokens of several texts in the same calls of the model: `texts[i]`, a `str` or token ids, into
    /// `banks[i]`. Each text gets the bits that it would get alone.
    ///
    /// >>> import march_lm
    /// >>> model = march_lm.load()
    /// >>> banks = [model.bank(), model.bank(interval=4)]
    /// >>> model.read(banks, ["3 May: the key is", "4 May: the lamp is in the shed."])
    /// >>> [bank.logits.shape == (model.vocabulary,) for bank in banks]
    /// [True, True]
    fn read(&self, py: Python<'_>, banks: Vec<Py<Bank>>, texts: &Bound<'_, PyList>) -> Result<()> {
        let texts = texts.iter().map(|text| self.ids(&text)).collect::<Result<Vec<_>>>()?;
        read_together(py, &self.pipeline, &banks, &texts)
    }

    /// Which anchors the tokens of a text read.
    ///
    /// >>> import march_lm
    /// >>> model = march_lm.load()
    /// >>> text = "3 May: the key is in the barn. That was 3 May. Where was the key on 3 May?"
    /// >>> routing = model.with_policy(interval=4).routing(text)
    /// >>> layers, tokens, heads, anchors = routing.weights.shape
    /// >>> (len(routing.pieces), len(routing.boundaries)) == (tokens, anchors)
    /// True
    fn routing(&self, py: Python<'_>, ids: &Bound<'_, PyAny>) -> Result<Routing> {
        let ids = self.ids(ids)?;
        let (model, tokenizer) = (self.pipeline.model(), self.pipeline.tokenizer());
        if self.pipeline.policy().interval.is_none() {
            return refuse(format!("a model of type `{}` does not route", model.config().mixer.model_type()));
        }
        let found = run(py, |watch| {
            let trace = TraceCell::default();
            let text = Text::new(model.bank(self.pipeline.policy().clone())?);
            let generator = Generator::with_text(self.pipeline.inference(), text, Sampling::default())?;
            generator.with_trace(&trace).read(&ids, &mut |_| watch())?;
            let trace = trace.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            Found::new(&trace, model.config().num_hidden_layers, tokenizer, &ids)
        })?;
        Routing::new(py, found)
    }

    /// How anchors are placed, kept and read, such as `interval=64 top-k=4`.
    #[getter]
    fn policy(&self) -> String {
        self.pipeline.policy().to_string()
    }

    /// Number of token ids.
    #[getter]
    fn vocabulary(&self) -> usize {
        self.vocab_size()
    }

    /// Number of parameters.
    #[getter]
    fn parameters(&self) -> usize {
        self.pipeline.model().parameter_count()
    }

    /// Precision of the weights.
    #[getter]
    fn weights(&self) -> String {
        self.pipeline.weights().to_string()
    }

    /// The kind of model, such as `march`.
    #[getter]
    fn model_type(&self) -> &str {
        self.pipeline.model().config().mixer.model_type()
    }

    /// Identifies the model and the precision of its weights.
    #[getter]
    fn fingerprint(&self, py: Python<'_>) -> Result<String> {
        run(py, |_| self.pipeline.fingerprint())
    }

    fn __repr__(&self) -> String {
        format!(
            "<march_lm.Model {}: {}, {} parameters in {}, {}>",
            self.path.display(),
            self.model_type(),
            self.parameters(),
            self.weights(),
            self.policy()
        )
    }
}

impl Model {
    fn answers(&self, py: Python<'_>, requests: &[Request]) -> Result<Vec<march_lab::eval::Answer>> {
        let tokenizer = self.pipeline.tokenizer();
        run(py, |watch| -> march_lm::Result<_> {
            let encode = |request| Encoded::new(request, tokenizer, self.vocab_size());
            let encoded = requests.iter().map(encode).collect::<march_lm::Result<Vec<_>>>()?;
            let numbered: Vec<_> = encoded.into_iter().enumerate().collect();
            let mut answers = vec![None; requests.len()];
            let scheduler =
                Scheduler::new(self.pipeline.inference().clone(), tokenizer, self.pipeline.policy());
            scheduler.run(&numbered, &mut |event| match event {
                Event::Read(_) => Ok(watch()),
                Event::Answered(i, answer) => {
                    answers[i] = Some(answer);
                    Ok(ControlFlow::Continue(()))
                }
            })?;
            Ok(answers.into_iter().flatten().collect())
        })
    }
}

/// A value of Python's lists, dicts, texts and numbers as one of the library's.
pub fn from_python<T: serde::de::DeserializeOwned>(value: &Bound<'_, PyAny>, name: &str) -> Result<T> {
    let text = value.py().import("json")?.call_method1("dumps", (value,))?;
    let text = text.cast_into::<PyString>().map_err(PyErr::from)?;
    serde_json::from_str(text.to_cow()?.as_ref()).or_else(|error| refuse(format!("`{name}`: {error}")))
}

/// A value of the library as Python's lists, dicts, texts and numbers.
pub fn to_python<'py>(py: Python<'py>, value: &impl serde::Serialize) -> Result<Bound<'py, PyAny>> {
    let text = serde_json::to_string(value).or_else(|error| refuse(error.to_string()))?;
    Ok(py.import("json")?.call_method1("loads", (text,))?)
}
