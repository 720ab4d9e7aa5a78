//! `march report`: a run as one page.

use std::path::{Path, PathBuf};

use anyhow::bail;
use clap::Args;
use march_lm::run::Session;

use super::open::{RUNS, is_run, runs_in};
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
        check_run(&self.run)?;
        let path = self.output.unwrap_or_else(|| self.run.join("report.html"));
        let output = Output::check(&path, Kind::Page, &[&self.run])?;
        output.write(march_lab::report::render(&self.run)?.as_bytes())?;
        say!("{}", path.display());
        // The page shows this error in place of the machines; report it to scripts as well.
        Session::all(&self.run)?;
        Ok(())
    }
}

/// Rejects a folder that is not a run, and lists the runs that there are.
fn check_run(run: &Path) -> anyhow::Result<()> {
    if is_run(run) {
        return Ok(());
    }
    let wrong = match (run.is_dir(), run.exists()) {
        (true, _) => "is not a run: it has no `config.toml`",
        (false, true) => "is not a folder",
        (false, false) => "does not exist",
    };
    let beside = run.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let found = [run, beside, Path::new(RUNS)].map(runs_in).into_iter().find(|runs| !runs.is_empty());
    let Some(found) = found else {
        bail!(
            "{}: {wrong}, and there are no runs in {RUNS}/; `march train tiny/march` makes one",
            run.display()
        )
    };
    let list: String = found.iter().map(|run| format!("\n  {}", run.display())).collect();
    bail!("{}: {wrong}; the runs are{list}", run.display())
}
