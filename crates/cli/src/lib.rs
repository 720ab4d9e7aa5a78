//! The `march` command, as a library: the program calls [`main`], and tests call its parts.
#![allow(missing_docs)] // not an interface for others

// All printing goes through `display::out`, which never panics.
#![deny(clippy::print_stdout, clippy::print_stderr)]

#[cfg(feature = "serve")]
pub mod address;
pub mod command;
pub mod device;
#[cfg(feature = "gpu")]
pub mod device_test;
pub mod display;
#[cfg(feature = "gpu")]
pub mod golden;
pub mod interrupt;
pub mod job;
pub mod machine;
pub mod number;
pub mod output;

use std::process::ExitCode;

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};

/// MARCH: a recurrent memory that keeps its past versions and routes each token to the ones it needs.
#[derive(Parser)]
#[command(name = "march", version, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Bench(command::bench::Bench),
    Chat(command::chat::Chat),
    Convert(command::convert::Convert),
    Data(command::data::Data),
    Demo(command::demo::Demo),
    Doctor(command::doctor::Doctor),
    Eval(command::eval::Eval),
    Generate(command::generate::Generate),
    Init(command::init::Init),
    Upcycle(command::upcycle::UpcycleModel),
    Inspect(command::inspect::Inspect),
    Logits(command::logits::Logits),
    Report(command::report::Report),
    Reproduce(command::reproduce::Reproduce),
    #[cfg(feature = "serve")]
    Serve(command::serve::Serve),
    Train(command::train::Train),
}

/// Runs the command that the arguments name.
pub fn main() -> ExitCode {
    // Report what went wrong and why on one line, whatever the environment says about backtraces.
    let result = run();
    let printed = display::out::finish()
        .map_or(Ok(()), |error| Err(anyhow::Error::new(error).context("standard output: could not write")));
    match result.and_then(|code| printed.map(|()| code)) {
        Ok(code) => code,
        Err(error) => {
            display::out::note!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> anyhow::Result<ExitCode> {
    tracing_subscriber::fmt()
        .with_writer(|| display::screen::HeldStderr)
        .without_time()
        .with_target(false)
        .with_ansi(false)
        .init();
    let mut flags = number::tuned(Cli::command());
    let matches = flags.try_get_matches_from_mut(std::env::args_os());
    let cli = match matches.and_then(|found| Cli::from_arg_matches(&found).map_err(|e| e.format(&mut flags)))
    {
        Ok(cli) => cli,
        // Help, the version, or a usage error.
        Err(message) => {
            let printed = message.print();
            if !message.use_stderr() {
                display::out::keep(printed);
            }
            return Ok(ExitCode::from(message.exit_code() as u8));
        }
    };
    match cli.command {
        Command::Bench(bench) => bench.run(),
        Command::Chat(chat) => chat.run(),
        Command::Convert(convert) => convert.run(),
        Command::Data(data) => data.run(),
        Command::Demo(demo) => demo.run(),
        Command::Doctor(doctor) => doctor.run(),
        Command::Eval(eval) => eval.run(),
        Command::Generate(generate) => generate.run(),
        Command::Init(init) => init.run(),
        Command::Upcycle(upcycle) => upcycle.run(),
        Command::Inspect(inspect) => inspect.run(),
        Command::Logits(logits) => logits.run(),
        Command::Report(report) => report.run(),
        Command::Reproduce(reproduce) => reproduce.run(),
        #[cfg(feature = "serve")]
        Command::Serve(serve) => serve.run(),
        Command::Train(train) => train.run(),
    }?;
    Ok(ExitCode::SUCCESS)
}
