//! The `march` command.
fn main() {}
