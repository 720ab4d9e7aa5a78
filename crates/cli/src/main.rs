//! The `march` command.

mod command;

use clap::{Parser, Subcommand};

/// MARCH: a recurrent memory that keeps its past versions and routes each token to the ones it needs.
#[derive(Parser)]
#[command(version, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Doctor(command::doctor::Doctor),
}

fn main() -> anyhow::Result<()> {
    match Cli::parse().command {
        Command::Doctor(doctor) => doctor.run(),
    }
}
