//! Trains a model on the built-in book: `cargo run --release -p march-lm --example train -- [PRESET or TOML file] [FOLDER]`

use march_lm::run::Event;
use march_lm::{Pipeline, Result};

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let config = arguments.next().unwrap_or("tiny/march".into());
    let folder = arguments.next().unwrap_or("runs/example".into());
    let march = Pipeline::train(&config, &folder, &mut |event| match event {
        Event::Step(line) if line.step % 10 == 0 => {
            println!("step {}: loss {:.3}", line.step, line.report.loss)
        }
        Event::Saved(path) => println!("saved {}", path.display()),
        _ => {}
    })?;
    println!("{} parameters", march.model().parameter_count());
    Ok(())
}
