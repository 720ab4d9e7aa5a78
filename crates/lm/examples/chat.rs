//! Chats on standard input: `cargo run --release -p march-lm --example chat -- [MODEL]`

use march_lm::{Pipeline, Result};

fn main() -> Result<()> {
    let march = Pipeline::open(std::env::args().nth(1).unwrap_or("runs/example".into()))?;
    let mut chat = march.chat()?;
    for line in std::io::stdin().lines().map_while(std::result::Result::ok) {
        for piece in chat.say(&line, 100)? {
            print!("{}", piece?);
        }
        println!("\n[{} tokens, {} bytes of memory]", chat.bank().tokens(), chat.bank().bytes());
    }
    Ok(())
}
