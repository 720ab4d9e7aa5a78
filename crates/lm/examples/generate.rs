//! Continues a prompt: `cargo run --release -p march-lm --example generate -- [MODEL] [PROMPT]`

use march_lm::{Pipeline, Result};

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let march = Pipeline::open(arguments.next().unwrap_or("runs/example".into()))?;
    let prompt = arguments.next().unwrap_or("Alice was".into());
    print!("{prompt}");
    for piece in march.generate(&prompt, 100)? {
        print!("{}", piece?);
    }
    println!();
    Ok(())
}
