//! How many kernels a GPU starts for a layer, counted, not estimated: the difference between models of three and of four
//! layers, which is one layer in the middle.

use march_gpu::Gpu;
use march_lm::Config;
use march_lm::engine::{Device, Tape};
use march_lm::model::{Batch, Model, Settings};

/// Tokens before the token that is decoded; they end between two anchors.
const TOKENS: usize = 75;

/// The kinds of models that are counted, and the preset of each.
const MODELS: [(&str, &str); 3] =
    [("march", "tiny/march"), ("gated_deltanet", "tiny/gdn"), ("transformer", "tiny/transformer")];

/// Dispatches for one layer of a kind of model.
pub struct PerLayer {
    /// The kind of model.
    pub model: &'static str,
    /// Forward and backward pass.
    pub training: u64,
    /// One token of one text.
    pub decoding: u64,
}

/// Counts the dispatches of each kind of model.
pub fn count(device: &Device, gpu: &Gpu) -> anyhow::Result<Vec<PerLayer>> {
    let each = MODELS.iter().map(|&(model, preset)| {
        let [fewer, more] = [of(device, gpu, preset, 3)?, of(device, gpu, preset, 4)?];
        Ok(PerLayer { model, training: more[0] - fewer[0], decoding: more[1] - fewer[1] })
    });
    each.collect()
}

/// Dispatches of a training pass, and of decoding one token, of a whole model.
fn of(device: &Device, gpu: &Gpu, preset: &str, layers: usize) -> anyhow::Result<[u64; 2]> {
    let mut settings = vec![format!("model.num_hidden_layers={layers}"), "model.hidden_size=32".into()];
    settings.extend(["model.num_heads=2".into(), "model.intermediate_size=48".into()]);
    if preset != "tiny/transformer" {
        settings.push("model.head_dim=16".into());
    }
    if preset == "tiny/march" {
        settings.push("model.anchor_interval=8".into());
    }
    let config = Config::load_with(preset, &settings)?.model;
    let model = Model::new(&config);
    let parameters = model.init(device, 1)?;
    let settings = Settings { policy: model.policy(), ..Default::default() };
    let ids: Vec<u32> = (0..=TOKENS as u32).map(|i| i % 7).collect();
    let training = counted(gpu, || {
        let tape = Tape::new();
        let weights = model.bind(&tape, &parameters);
        let hidden = model.forward(&weights, Batch::one(&ids[..TOKENS]), &settings, None)?;
        let loss = model.loss(&weights, &hidden, &ids[1..], None)?;
        Ok(tape.backward(&loss, |_, _| {})?)
    })?;
    let weights = parameters.into();
    let mut bank = model.bank(settings.policy.clone())?;
    model.extend(&weights, Batch::one(&ids[..TOKENS]), &mut [&mut bank], None)?;
    let decoding = counted(gpu, || {
        model.extend(&weights, Batch::one(&ids[TOKENS..]), &mut [&mut bank], None)?;
        Ok(())
    })?;
    device.check()?;
    Ok([training, decoding])
}

fn counted(gpu: &Gpu, work: impl FnOnce() -> anyhow::Result<()>) -> anyhow::Result<u64> {
    let before = gpu.dispatches();
    work()?;
    Ok(gpu.dispatches() - before)
}
