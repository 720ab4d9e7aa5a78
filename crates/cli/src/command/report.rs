//! `march report`: a run as one page.

use std::path::PathBuf;

use clap::Args;
use march::run::Session;

use crate::display::out::say;
use crate::output::{Kind, Output};

/// Render a run's curves, samples and configuration as one HTML page.
#[derive(Args)]
#[command(after_help = "Example:
  march report runs/tiny-march")]
pub struct Report {
    /// The run's folder
    #[arg(value_name = "RUN")]
    run: PathBuf,
    /// The page to write [default: RUN/report.html]
    #[arg(long, value_name = "FILE.html")]
    output: Option<PathBuf>,
}

impl Report {
    /// Writes the page.
    pub fn run(self) -> anyhow::Result<()> {
        let path = self.output.unwrap_or_else(|| self.run.join("report.html"));
        let output = Output::check(&path, Kind::Page, &[&self.run])?;
        output.write(march::report::render(&self.run)?.as_bytes())?;
        say!("{}", path.display());
        // The page shows this error in place of the machines; report it to scripts as well.
        Session::all(&self.run)?;
        Ok(())
    }
}
