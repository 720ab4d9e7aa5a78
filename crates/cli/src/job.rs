//! Running a command as one of the processes started by an MPI launcher.

/// Environment variables that launchers set: Open MPI, PMIx, and MPICH and its derivatives.
const SIGNS: [&str; 3] = ["OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_SIZE"];

/// Whether a launcher started this process.
pub fn launched() -> bool {
    SIGNS.iter().any(|name| std::env::var_os(name).is_some())
}

#[cfg(feature = "mpi")]
pub use with_mpi::together;
#[cfg(not(feature = "mpi"))]
pub use without_mpi::together;

#[cfg(feature = "mpi")]
mod with_mpi {
    use std::sync::atomic::AtomicBool;
    use std::time::Duration;

    use march_lm::train::ranks::{Job, Ranks};

    use crate::display::out::note;

    /// Runs `work` with the job's processes and the number of threads that this one may use; 0 means all. An error ends
    /// the whole job.
    pub fn together(
        asked: &'static AtomicBool,
        work: impl FnOnce(Box<dyn Ranks>, usize) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let job = Job::join(asked)?;
        let ranks = job.ranks();
        let rank = ranks.rank();
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        // A launcher that binds processes to cores has already divided them.
        let divided = cores < online();
        let threads = if divided { cores } else { (cores / job.on_this_machine().max(1)).max(1) };
        match work(Box::new(ranks), threads) {
            Ok(()) => job.finish(),
            Err(error) => {
                // An error that all processes found is reported by the first.
                if rank > 0 {
                    std::thread::sleep(Duration::from_secs(2));
                }
                note!("error: rank {rank}: {error:#}");
                job.abort();
            }
        }
        Ok(())
    }

    /// Number of cores in the machine, whether or not this process may use them.
    fn online() -> usize {
        let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        text.lines().filter(|line| line.starts_with("processor")).count()
    }
}

#[cfg(not(feature = "mpi"))]
mod without_mpi {
    use std::sync::atomic::AtomicBool;

    use march_lm::train::ranks::Ranks;

    /// Fails, because without MPI each process would train by itself.
    pub fn together(
        _: &'static AtomicBool,
        _: impl FnOnce(Box<dyn Ranks>, usize) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        anyhow::bail!(
            "an MPI launcher started this, but march was built without MPI; build it with \
             `cargo build --release --features mpi` (docs/cluster.md)"
        )
    }
}
