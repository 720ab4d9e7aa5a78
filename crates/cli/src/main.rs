//! The `march` command.

mod command;
mod display;
mod interrupt;
mod job;
mod machine;

use std::process::ExitCode;

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
    Chat(command::chat::Chat),
    Data(command::data::Data),
    Demo(command::demo::Demo),
    Doctor(command::doctor::Doctor),
    Eval(command::eval::Eval),
    Generate(command::generate::Generate),
    Init(command::init::Init),
    Inspect(command::inspect::Inspect),
    Logits(command::logits::Logits),
    Report(command::report::Report),
    Train(command::train::Train),
}

fn main() -> ExitCode {
    // What went wrong and why, in one line, whatever the environment says of backtraces.
    let result = run();
    let printed = display::out::finish()
        .map_or(Ok(()), |error| Err(anyhow::Error::new(error).context("standard output: could not write")));
    match result.and(printed) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            display::out::note!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> anyhow::Result<()> {
    tracing_subscriber::fmt()
        .with_writer(|| display::screen::Aside)
        .without_time()
        .with_target(false)
        .with_ansi(false)
        .init();
    match Cli::parse().command {
        Command::Chat(chat) => chat.run(),
        Command::Data(data) => data.run(),
        Command::Demo(demo) => demo.run(),
        Command::Doctor(doctor) => doctor.run(),
        Command::Eval(eval) => eval.run(),
        Command::Generate(generate) => generate.run(),
        Command::Init(init) => init.run(),
        Command::Inspect(inspect) => inspect.run(),
        Command::Logits(logits) => logits.run(),
        Command::Report(report) => report.run(),
        Command::Train(train) => train.run(),
    }
}
