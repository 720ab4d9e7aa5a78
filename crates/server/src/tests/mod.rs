//! Random conversations with the scheduler: what is continued from the prefix cache has the bits of what is read from its
//! beginning, and the cache stays within its bytes. And chats with a template (`chats`).

mod chats;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use march_lm::checkpoint::{NewFolder, SHARD_BYTES};
use march_lm::engine::{CpuOptions, Device, Precision, Products};
use march_lm::generate::{Limits, Sampling};
use march_lm::model::Model;
use march_lm::pipeline::OpenOptions;
use march_lm::{Config, Pipeline};
use tokio::sync::mpsc::unbounded_channel;

use crate::job::{Event, Events, Job, Jobs};
use crate::metrics::Metrics;
use crate::scheduler::{LoadedModel, SchedulerLimits, start};

/// A checkpoint with random weights of a preset with other lines: pairs of what a line is and what it becomes.
pub(crate) fn checkpoint(folder: &Path, preset: &str, changes: &[(&str, &str)]) {
    let file =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs").join(preset).with_extension("toml");
    let mut text = std::fs::read_to_string(file).unwrap();
    for (old, new) in changes {
        assert!(text.contains(old), "{preset} has no `{old}`");
        text = text.replace(old, new);
    }
    let toml = tempfile::NamedTempFile::with_suffix(".toml").unwrap();
    std::fs::write(toml.path(), text).unwrap();
    let config = Config::load(toml.path().to_str().unwrap()).unwrap().model;
    let model = Model::new(&config);
    let new = NewFolder::create(folder).unwrap();
    new.model(&config, model.layout(), SHARD_BYTES, Precision::F32, |i| Ok(model.initial(i, 7))).unwrap();
    new.finish().unwrap();
}

pub(crate) fn load(folder: &Path) -> LoadedModel {
    let options = CpuOptions { threads: 1, products: Products::BatchInvariant, ..CpuOptions::default() };
    let device = Some(Device::cpu(options).unwrap());
    let pipeline = Pipeline::open_with(folder, OpenOptions { device, ..OpenOptions::default() }).unwrap();
    LoadedModel { tag: pipeline.tag().unwrap(), pipeline }
}

/// A model's thread.
struct Running {
    loaded: Arc<LoadedModel>,
    jobs: Arc<Jobs>,
    metrics: Arc<Metrics>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Running {
    fn drop(&mut self) {
        self.jobs.close();
        self.thread.take().map(JoinHandle::join);
    }
}

/// What a prompt got: how much of it was known, and the tokens with the bits of their log-probabilities.
#[derive(Debug, PartialEq)]
struct Got {
    cached: usize,
    tokens: Vec<(u32, Vec<(u32, u32)>)>,
}

impl Running {
    fn new(loaded: &Arc<LoadedModel>, cache_bytes: usize) -> Self {
        let (loaded, metrics) = (Arc::clone(loaded), Arc::new(Metrics::default()));
        let limits = SchedulerLimits { texts: 4, queue: 16, slice: 64, cache_bytes };
        let (jobs, thread) = start(Arc::clone(&loaded), limits, Arc::clone(&metrics)).unwrap();
        Self { loaded, jobs, metrics, thread: Some(thread) }
    }

    fn ask(&self, prompt: &[u32], ends: &[usize], tokens: usize) -> Got {
        let (sender, mut receiver) = unbounded_channel();
        let job = Job {
            prompt: prompt.to_vec(),
            ends: ends.to_vec(),
            policy: self.loaded.policy().clone(),
            prefix: None,
            choices: vec![Sampling::greedy()],
            limits: Limits { max_tokens: tokens, stop: Vec::new() },
            score_prompt: false,
            top: Some(3),
            whole: false,
            recall: false,
            deadline: Instant::now() + Duration::from_secs(600),
            events: Events::new(sender, 0, false),
        };
        self.jobs.add(vec![job]).unwrap();
        let mut got = Got { cached: 0, tokens: Vec::new() };
        while let Some((_, events)) = receiver.blocking_recv() {
            for event in events {
                match event {
                    Event::PromptRead { cached, .. } => got.cached = cached,
                    Event::Piece { token: Some(token), .. } => {
                        let top = token.top.iter().map(|&(id, logprob)| (id, logprob.to_bits()));
                        got.tokens.push((token.id, top.collect()));
                    }
                    Event::Failed(failure) => panic!("{failure:?}"),
                    _ => {}
                }
            }
        }
        got
    }

    /// Bytes of the model's device, once the thread has let go of everything but the cache.
    fn live(&self) -> usize {
        std::thread::sleep(Duration::from_millis(50));
        self.loaded.device().live_bytes()
    }
}

/// Random numbers: SplitMix64.
struct Random(u64);

impl Random {
    /// A number below `end`.
    fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ (z >> 31)) % end as u64) as usize
    }
}

/// A conversation as tokens, message by message.
type Talk = Vec<Vec<u32>>;

/// The next prompt of somebody who talks: a new turn, the last one again, an edit, a departure, or something else.
fn next(talks: &[Talk], random: &mut Random) -> Talk {
    let message = |random: &mut Random| -> Vec<u32> {
        let long = if random.below(4) == 0 { 900 } else { 120 };
        (0..3 + random.below(long)).map(|_| random.below(256) as u32).collect()
    };
    let mut talk = talks.get(random.below(talks.len().max(1))).cloned().unwrap_or_default();
    match random.below(7) {
        0 | 1 => {}
        2 if !talk.is_empty() => return talk,
        3 => drop(talk.pop()),
        // Some messages back.
        4 => talk.truncate(random.below(talk.len() + 1)),
        // In the middle of a message.
        5 => {
            let all = talk.concat();
            talk = vec![all[..random.below(all.len() + 1)].to_vec()];
        }
        _ => talk.clear(),
    }
    if talk.concat().len() > 2500 {
        talk.clear();
    }
    talk.push(message(random));
    talk
}

fn shared(a: &[u32], b: &[u32]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

/// How far back a model may have to go from where a text departs.
enum Back {
    Nowhere,
    /// To a point of the grid of calls that is kept.
    Most(usize),
}

fn check(preset: &str, changes: &[(&str, &str)], back: &Back, seed: u64) {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path().join("model");
    checkpoint(&folder, preset, changes);
    let loaded = Arc::new(load(&folder));
    let cold = Running::new(&loaded, 0);
    let mut random = Random(seed);
    for limit in [1 << 30, 6 << 20] {
        let before = cold.live();
        let warm = Running::new(&loaded, limit);
        let (mut talks, mut texts): (Vec<Talk>, Vec<Vec<u32>>) = (Vec::new(), Vec::new());
        let mut known = 0;
        for _ in 0..12 {
            let mut talk = next(&talks, &mut random);
            let prompt = talk.concat();
            let ends: Vec<usize> = talk
                .iter()
                .scan(0, |at, message| {
                    *at += message.len();
                    Some(*at)
                })
                .filter(|&at| at < prompt.len())
                .collect();
            let tokens = 1 + random.below(5);
            let (got, expected) = (warm.ask(&prompt, &ends, tokens), cold.ask(&prompt, &ends, tokens));
            let what = format!("{preset}, seed {seed}, {limit} bytes, {} tokens: {got:?}", prompt.len());
            assert_eq!(got.tokens, expected.tokens, "{what}");
            assert_eq!(expected.cached, 0);
            let most = texts.iter().map(|text| shared(text, &prompt)).max().unwrap_or(0);
            assert!(got.cached <= most, "{what}: only {most} were read before");
            if limit == 1 << 30 {
                // The last token of a prompt may have to be read for the logits after it.
                let least = match back {
                    Back::Nowhere => most.min(prompt.len() - 1).saturating_sub(1),
                    Back::Most(most_back) => most.saturating_sub(*most_back),
                };
                assert!(got.cached >= least || least < 16, "{what}: {most} are shared");
            }
            let bytes = warm.metrics.cache_bytes.load(Ordering::Relaxed);
            assert!(bytes <= limit, "{what}: {bytes} bytes in the cache");
            known += got.cached;
            let answer: Vec<u32> = expected.tokens.iter().map(|(id, _)| *id).collect();
            // The model need not have read the last token to know that it is there.
            texts.push([&prompt[..], &answer].concat());
            talk.push(answer);
            talks.push(talk);
        }
        let (bytes, live) = (warm.metrics.cache_bytes.load(Ordering::Relaxed), warm.live());
        assert!(live <= before + bytes, "{preset}: {bytes} bytes are counted, {} are used", live - before);
        assert!(known > 0 || limit < 1 << 30, "{preset}, seed {seed}: nothing was known again");
    }
}

/// What makes `tiny/hybrid` a stack without anchors, as Qwen3.5 is.
pub(crate) const WITHOUT_ANCHORS: [(&str, &str); 10] = [
    ("anchors = [1, 2]", ""),
    ("anchor_interval = 64", ""),
    ("routing_dim = 32", ""),
    ("null_route = true", ""),
    ("routing_scale = 1.0", ""),
    ("null_bias_init = 1.0", ""),
    ("[memory]", ""),
    ("retention = \"all\"", ""),
    ("placement = \"periodic\"", ""),
    ("storage = \"f32\"", ""),
];

#[test]
fn random_conversations_continue_exactly() {
    for seed in 0..2 {
        check("tiny/transformer", &[], &Back::Nowhere, seed);
        check("tiny/gdn", &[], &Back::Most(512), seed);
        check("tiny/march", &[], &Back::Most(512), seed);
        check("tiny/log-linear", &[], &Back::Most(576), seed);
        check("tiny/memory-caching", &[], &Back::Most(576), seed);
        // Anchors on some layers, on none, and on all that are recurrent.
        check("tiny/hybrid", &[], &Back::Most(512), seed);
        check("tiny/hybrid", &WITHOUT_ANCHORS, &Back::Most(512), seed);
        check("tiny/hybrid", &[("anchors = [1, 2]", "anchors = [0, 1, 2]")], &Back::Most(512), seed);
        check("tiny/hybrid", &[("storage = \"f32\"", "storage = \"int8\"")], &Back::Most(512), seed);
    }
}

/// A text ends at every id that the checkpoint's `generation_config.json` names.
#[test]
fn ids_of_the_checkpoint_end_a_text() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path().join("model");
    checkpoint(&folder, "tiny/gdn", &[]);
    let prompt: Vec<u32> = (0..40).map(|i| i * i % 251).collect();
    let free = Running::new(&Arc::new(load(&folder)), 0).ask(&prompt, &[], 8).tokens;
    let end = free[5].0;
    let first = free.iter().position(|(id, _)| *id == end).unwrap();
    for ends in [format!("{end}"), format!("[256, {end}]")] {
        std::fs::write(folder.join("generation_config.json"), format!("{{\"eos_token_id\": {ends}}}"))
            .unwrap();
        let ended = Running::new(&Arc::new(load(&folder)), 0).ask(&prompt, &[], 8).tokens;
        assert_eq!(ended, free[..=first]);
    }
    std::fs::write(folder.join("generation_config.json"), "{\"eos_token_id\": \"x\"}").unwrap();
    let refused = Pipeline::open(&folder).err().unwrap().to_string();
    assert!(refused.contains("generation_config.json") && refused.contains("`eos_token_id`"), "{refused}");
}
