//! Keeps, forks, rolls back, saves and loads the memory of a text: `cargo run --release -p march-lm --example bank -- [MODEL]`

use march_lm::{Pipeline, Result};

fn main() -> Result<()> {
    let march = Pipeline::open(std::env::args().nth(1).unwrap_or("runs/example".into()))?;
    let mut bank = march.bank()?;
    bank.read(&"The White Rabbit put on his spectacles. ".repeat(20))?;
    let mut other = bank.fork()?;
    let end: String = bank.generate("\"Where shall I begin,", 20)?.collect::<Result<_>>()?;
    println!("{end:?} after {} tokens in {} bytes", bank.tokens(), bank.bytes());

    let file = std::env::temp_dir().join(format!("march-example-{}.bank", std::process::id()));
    bank.save(&file)?;
    println!("loaded: {} tokens", march.load_bank(&file)?.tokens());
    std::fs::remove_file(&file).ok();

    if let Some((anchor, _)) = other.rollback(other.tokens() - 1)? {
        println!("the fork went back to token {}", anchor.position);
    }
    Ok(())
}
