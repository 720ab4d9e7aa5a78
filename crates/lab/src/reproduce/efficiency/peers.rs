//! The core of attention and of GDN in PyTorch, at the shapes of a plan.

use std::io::{BufRead, BufReader, Read, Write};
use std::ops::ControlFlow;
use std::process::{Command, Stdio};

use serde::Deserialize;

use super::{Arm, EfficiencyPlan, Kind, Timing};
use march_lm::{Error, Result};

/// The measurement in PyTorch; also a program of its own.
const PEER_SCRIPT: &str = include_str!("peers.py");

/// One line of what the script prints.
#[derive(Deserialize)]
struct PeerLine {
    /// "attention" or "GDN".
    arm: String,
    length: usize,
    seconds: f64,
    repeats: usize,
}

/// The Python that has PyTorch: the one that the environment variable PEERS_PYTHON names, or `python3`.
pub fn find_python() -> Option<String> {
    let named = std::env::var("PEERS_PYTHON").ok().filter(|name| !name.is_empty());
    let python = named.unwrap_or_else(|| "python3".into());
    let mut probe = Command::new(&python);
    probe.args(["-c", "import torch"]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    probe.status().is_ok_and(|status| status.success()).then_some(python)
}

/// Measures the core of attention and of GDN in PyTorch, as "PyTorch attention" and "PyTorch GDN". `None` if no Python
/// with PyTorch was found ([`find_python`]). When `watch` breaks, the result holds what was measured until then.
pub fn peers(
    plan: &EfficiencyPlan,
    watch: &mut dyn FnMut(&Timing) -> ControlFlow<()>,
) -> Result<Option<Vec<Timing>>> {
    plan.check()?;
    find_python().map(|python| plan.peers_with(&python, PEER_SCRIPT, watch)).transpose()
}

impl EfficiencyPlan {
    /// Runs the script with a Python, and reads its lines as they come.
    pub fn peers_with(
        &self,
        python: &str,
        script: &str,
        watch: &mut dyn FnMut(&Timing) -> ControlFlow<()>,
    ) -> Result<Vec<Timing>> {
        let io = |action| Error::io(python.as_ref(), action);
        let mut command = Command::new(python);
        command.args(["-W", "ignore", "-"]).args(self.peer_arguments());
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().map_err(io("start"))?;
        if let Some(mut input) = child.stdin.take() {
            // If the program ended before it had read all, its exit status says so.
            let _ = input.write_all(script.as_bytes());
        }
        // Read meanwhile, so that a full pipe cannot stop the program.
        let errors = child.stderr.take().map(|mut errors| {
            std::thread::spawn(move || {
                let mut text = Vec::new();
                errors.read_to_end(&mut text).map(|_| text)
            })
        });
        let mut all = Vec::new();
        let mut outcome = Ok(ControlFlow::Continue(()));
        if let Some(output) = child.stdout.take() {
            for line in BufReader::new(output).lines() {
                outcome =
                    line.map_err(io("read from")).and_then(|line| self.peer_timing(&line)).map(|timing| {
                        let flow = watch(&timing);
                        all.push(timing);
                        flow
                    });
                if !matches!(outcome, Ok(ControlFlow::Continue(()))) {
                    // It may have ended by itself meanwhile.
                    let _ = child.kill();
                    break;
                }
            }
        }
        let status = child.wait().map_err(io("wait for"))?;
        if outcome?.is_continue() && !status.success() {
            let said = errors.and_then(|errors| errors.join().ok()?.ok()).unwrap_or_default();
            let said = String::from_utf8_lossy(&said);
            let last = said.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or("it said nothing");
            return Err(Error::Request(format!(
                "{python}: the measurement in PyTorch failed ({status}): {last}"
            )));
        }
        Ok(all)
    }

    fn peer_arguments(&self) -> Vec<String> {
        let core = &self.core;
        let lengths: Vec<String> = self.lengths.iter().map(usize::to_string).collect();
        let arguments = [
            ("lengths", lengths.join(",")),
            ("heads", core.heads.to_string()),
            ("head-dim-k", core.head_dim_k.to_string()),
            ("head-dim-v", core.head_dim_v.to_string()),
            ("attention-heads", core.attention_heads.to_string()),
            ("attention-head-dim", core.attention_head_dim.to_string()),
            ("seconds", self.core_seconds.to_string()),
            ("limit", self.peer_limit_seconds.to_string()),
            ("threads", self.thread_count().to_string()),
        ];
        arguments.into_iter().flat_map(|(name, value)| [format!("--{name}"), value]).collect()
    }

    /// A line of the script's output.
    pub fn peer_timing(&self, line: &str) -> Result<Timing> {
        let refuse =
            |why: String| Error::Request(format!("the measurement in PyTorch printed {line:?}: {why}"));
        let PeerLine { arm, length, seconds, repeats } =
            serde_json::from_str(line).map_err(|error| refuse(error.to_string()))?;
        let arm = Arm::ALL.into_iter().find(|known| known.name() == arm);
        let arm = arm.ok_or_else(|| refuse("that arm is unknown".into()))?;
        if !(seconds.is_finite() && seconds > 0.0) {
            return Err(refuse("a time must be a number above 0".into()));
        }
        let flop = self.flop(arm, Kind::Core, length)?;
        Ok(Timing::new(
            &format!("PyTorch {}", arm.name()),
            Kind::Core,
            [length, length],
            flop,
            (seconds, repeats),
        ))
    }
}
