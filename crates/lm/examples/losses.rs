//! Prints how surprising each token of a text is: `cargo run --release -p march-lm --example losses -- [MODEL] [TEXT]`

use march_lm::{Pipeline, Result};

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let march = Pipeline::open(arguments.next().unwrap_or("runs/example".into()))?;
    let losses = march.losses(&arguments.next().unwrap_or("Alice was beginning to get very tired".into()))?;
    for (token, nats) in &losses {
        println!("{nats:6.3}  {token:?}");
    }
    let mean = losses.iter().map(|(_, nats)| nats).sum::<f32>() / losses.len().max(1) as f32;
    println!("{mean:6.3}  nats per token");
    Ok(())
}
