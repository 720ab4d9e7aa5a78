//! Information about the machine, the system and the build.

use std::path::Path;
use std::time::{Duration, SystemTime};

use march_lm::engine::{Device, Level};
use march_lm::run::Session;
use march_lm::train::machine_memory;

/// Optional features of the program, and whether it was built with them.
const FEATURES: [(&str, bool); 3] = [
    ("mpi", cfg!(feature = "mpi")),
    ("gpu", cfg!(feature = "gpu")),
    ("portable", cfg!(feature = "portable")),
];

/// The build profile.
pub fn profile() -> &'static str {
    if cfg!(debug_assertions) { "debug build" } else { "release build" }
}

/// The relevant instruction sets that the processor supports.
pub fn instructions() -> String {
    #[cfg(target_arch = "x86_64")]
    {
        let known = [
            ("avx2", std::arch::is_x86_feature_detected!("avx2")),
            ("fma", std::arch::is_x86_feature_detected!("fma")),
            ("avx512f", std::arch::is_x86_feature_detected!("avx512f")),
        ];
        let has: Vec<&str> = known.iter().filter(|(_, has)| *has).map(|(name, _)| *name).collect();
        if has.is_empty() { "(no AVX2)".into() } else { has.join(" ") }
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        "(portable kernels)".into()
    }
}

/// Number of cores that this process may use.
pub fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Number of threads for the value of `--threads`, of which 0 means all cores.
pub fn threads_in_use(threads: usize) -> usize {
    if threads == 0 { cores() } else { threads }
}

/// The memory that the process currently uses, in bytes.
pub fn resident() -> Option<usize> {
    kib("/proc/self/status", "VmRSS")
}

/// The peak memory of the process, in bytes.
pub fn peak() -> Option<usize> {
    kib("/proc/self/status", "VmHWM")
}

/// Describes this invocation, one of `processes` with `threads` threads (0: all cores), for a run at step `step`. Contains
/// neither user nor host name.
pub fn session(device: &Device, threads: usize, step: u64, processes: usize) -> Session {
    let home = std::env::var("HOME").unwrap_or_default();
    let arguments = std::env::args_os().skip(1);
    Session {
        started: utc(SystemTime::now()),
        step,
        program: format!("march {} ({})", env!("CARGO_PKG_VERSION"), profile()),
        features: FEATURES.iter().filter(|(_, has)| *has).map(|(name, _)| name.to_string()).collect(),
        arguments: arguments.map(|word| without_home(&word.to_string_lossy(), &home)).collect(),
        processor: field("/proc/cpuinfo", "model name", ':'),
        instructions: format!("{} {}", std::env::consts::ARCH, instructions()),
        cores: cores(),
        processes,
        threads: threads_in_use(threads),
        kernels: Level::detect().map_or("none".into(), |level| format!("{level:?}")),
        device: device.to_string(),
        memory: machine_memory().map(|[total, _]| total as u64),
        system: field("/etc/os-release", "PRETTY_NAME", '=').unwrap_or(std::env::consts::OS.into()),
        kernel: std::fs::read_to_string("/proc/sys/kernel/osrelease").ok().map(|text| text.trim().into()),
    }
}

/// The value of the first line `name<separator>value` of a system file, without quotes.
fn field(file: &str, name: &str, separator: char) -> Option<String> {
    let text = std::fs::read_to_string(file).ok()?;
    let mut lines = text.lines().filter_map(|line| line.split_once(separator));
    let (_, value) = lines.find(|(key, _)| key.trim() == name)?;
    Some(value.trim().trim_matches('"').into())
}

/// The value of a line of a system file that is given in kB, in bytes.
fn kib(file: &str, name: &str) -> Option<usize> {
    field(file, name, ':')?.split_whitespace().next()?.parse::<usize>().ok().map(|kib| kib * 1024)
}

/// Replaces the home folder, which a shell may have expanded, by `~` in an argument.
pub fn without_home(argument: &str, home: &str) -> String {
    let (key, path) = argument.rsplit_once('=').map_or(("", argument), |(key, path)| (key, path));
    match Path::new(path).strip_prefix(home) {
        Ok(rest) if home.len() > 1 => {
            let equals = if key.is_empty() { "" } else { "=" };
            format!("{key}{equals}{}", Path::new("~").join(rest).display())
        }
        _ => argument.into(),
    }
}

/// A time as RFC 3339, in UTC.
pub fn utc(time: SystemTime) -> String {
    let seconds = time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or(Duration::ZERO).as_secs();
    let (mut days, second) = (seconds / 86_400, seconds % 86_400);
    let leap = |year: u64| year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
    let (mut year, mut month) = (1970, 1);
    while days >= 365 + u64::from(leap(year)) {
        days -= 365 + u64::from(leap(year));
        year += 1;
    }
    let february = 28 + u64::from(leap(year));
    for length in [31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30] {
        if days < length {
            break;
        }
        days -= length;
        month += 1;
    }
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    format!("{year:04}-{month:02}-{:02}T{hour:02}:{minute:02}:{second:02}Z", days + 1)
}

/// Today's date in UTC, as 2026-01-31.
pub fn today() -> String {
    utc(SystemTime::now()).chars().take(10).collect()
}

/// Cores and instructions, in one line.
pub fn summary() -> String {
    format!("{} cores, {}", cores(), instructions())
}
