//! The table of the machines and programs that computed a run.

use std::fmt::Write;
use std::path::Path;

use super::escape;
use march_lm::run::Session;

/// One row per session; empty for a run without `environment.json`.
pub(super) fn table(run: &Path) -> String {
    let sessions = match Session::all(run) {
        Ok(sessions) if sessions.is_empty() => return String::new(),
        Ok(sessions) => sessions,
        // The rest of the page is still worth showing.
        Err(error) => return format!("<h2>Machine</h2>\n<p>{}</p>\n", escape(&error.to_string())),
    };
    let mut text = String::from("<h2>Machine</h2>\n<div class=\"scroll\"><table>\n<tr>");
    for name in ["Started", "After step", "Program", "Processor", "Threads", "System", "Arguments"] {
        let _ = write!(text, "<th>{name}</th>");
    }
    text += "</tr>\n";
    for session in &sessions {
        let memory = session
            .memory
            .map_or(String::new(), |bytes| format!(", {:.1} GiB", bytes as f64 / (1u64 << 30) as f64));
        let cells = [
            session.started.clone(),
            session.step.to_string(),
            [std::slice::from_ref(&session.program), &session.features[..]].concat().join(", "),
            [session.processor.as_deref().unwrap_or_default(), &session.instructions].join(" "),
            threads(session),
            format!("{} {}{memory}", session.system, session.kernel.as_deref().unwrap_or_default()),
            session.arguments.join(" "),
        ];
        text += "<tr>";
        for cell in &cells {
            let _ = write!(text, "<td>{}</td>", escape(cell.trim()));
        }
        text += "</tr>\n";
    }
    text + "</table></div>\n"
}

/// "2 on 8 cores, Avx2", the number of processes, and the GPU if there was one.
fn threads(session: &Session) -> String {
    let Session { processes, threads, cores, kernels, device, .. } = session;
    let each = if *processes > 1 { format!(" in each of {processes} processes") } else { String::new() };
    let gpu = if ["", "cpu"].contains(&device.as_str()) { String::new() } else { format!("; {device}") };
    format!("{threads}{each} on {cores} cores, {kernels}{gpu}")
}
