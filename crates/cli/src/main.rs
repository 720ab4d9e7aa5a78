//! The program `march`.

use std::process::ExitCode;

fn main() -> ExitCode {
    march_cli::main()
}
