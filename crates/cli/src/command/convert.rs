//! `march convert`: a model as a folder, in another precision.

use std::path::PathBuf;

use clap::Args;
use march_lm::checkpoint::{Checkpoint, newest};
use march_lm::engine::Precision;
use march_lm::model::Model;

use crate::display::out::say;
use crate::display::{Progress, bytes, thousands};

/// Write a model as a folder, in another precision.
#[derive(Args)]
#[command(after_help = "Examples:
  march convert --model Qwen3.5-0.8B --weights q4 --output qwen-q4
  march convert --model SmolLM2-135M-Instruct.Q4_1.gguf --weights q8 --output smollm
  march chat --model qwen-q4

The folder computes what `--weights` of other commands computes with the original model, to the last bit, and opens at once:
its matrices are not read before they are used, and stay in the file. What is not a matrix is in f32. The tokenizer, the chat
template and the settings of generation are copied. A model that is in q8 or q4 already can be converted further, but its
numbers are then rounded twice; f32 keeps them as they are.")]
pub struct Convert {
    /// A checkpoint folder, a GGUF file, or the folder of a run, whose newest checkpoint is used; `diary` is the model inside
    /// the program
    #[arg(long, value_name = "DIR|FILE")]
    model: PathBuf,
    /// Precision of the matrices in the file: f32, bf16, or q8 and q4 with one scale per 32 numbers of a row
    #[arg(long, value_name = "f32|bf16|q8|q4", value_parser = stored)]
    weights: Precision,
    /// The checkpoint folder to create; it must not exist yet
    #[arg(long, value_name = "DIR")]
    output: PathBuf,
}

/// Parses a precision that a file can have.
pub fn stored(text: &str) -> Result<Precision, String> {
    let known = text.parse().ok().filter(|weights| *weights != Precision::Int8);
    known.ok_or_else(|| "it must be `f32`, `bf16`, `q8` or `q4`".to_string())
}

impl Convert {
    /// Writes the folder, one tensor at a time.
    pub fn run(self) -> anyhow::Result<()> {
        let folder = newest(&self.model);
        let checkpoint = Checkpoint::open(&folder)?;
        let count = Model::new(checkpoint.config()).parameter_count();
        let mut progress = Progress::new("writing", "weights", count);
        checkpoint.convert(&folder, &self.output, self.weights, &mut |done| progress.at(done))?;
        let time = progress.finish();
        say!(
            "{}: {} parameters in {}, {} instead of {}, in {:.1} s",
            self.output.display(),
            thousands(count),
            self.weights,
            bytes(Checkpoint::open(&self.output)?.bytes()),
            bytes(checkpoint.bytes()),
            time.as_secs_f64()
        );
        Ok(())
    }
}
