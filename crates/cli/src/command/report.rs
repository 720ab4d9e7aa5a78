//! `march report`: a run as one page.

use std::path::PathBuf;

use anyhow::Context;
use clap::Args;

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
        let page = march::report::render(&self.run)?;
        let path = self.output.unwrap_or_else(|| self.run.join("report.html"));
        let beside = path.with_extension("html.partial");
        std::fs::write(&beside, page)
            .and_then(|()| std::fs::rename(&beside, &path))
            .with_context(|| format!("{}: could not write", path.display()))?;
        println!("{}", path.display());
        Ok(())
    }
}
