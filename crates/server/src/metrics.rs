//! Counters, as Prometheus reads them.

use std::fmt::Write;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// What is counted.
#[derive(Debug, Default)]
pub struct Metrics {
    /// Answers by the first digit of their status: 2, 4 and 5.
    pub answers: [AtomicU64; 3],
    /// Prompt tokens that the model read.
    pub prompt_tokens: AtomicU64,
    /// Prompt tokens that came from the cache.
    pub cached_tokens: AtomicU64,
    /// Tokens that were written.
    pub generated_tokens: AtomicU64,
    /// Steps of the model.
    pub steps: AtomicU64,
    /// Steps that failed.
    pub failed_steps: AtomicU64,
    /// Requests whose client went away.
    pub cancelled: AtomicU64,
    /// Texts in the model's steps now.
    pub active: AtomicUsize,
    /// Bytes of the prefix cache.
    pub cache_bytes: AtomicUsize,
}

impl Metrics {
    /// Counts an answer.
    pub fn answered(&self, status: u16) {
        let place = match status / 100 {
            5 => 2,
            4 => 1,
            _ => 0,
        };
        self.answers[place].fetch_add(1, Ordering::Relaxed);
    }

    /// In Prometheus' text format.
    pub fn text(&self, waiting: usize, sessions: (usize, usize)) -> String {
        let mut text = String::new();
        let mut add = |name: &str, kind: &str, help: &str, values: &[(&str, u64)]| {
            // Writing to a string cannot fail.
            let _ = writeln!(text, "# HELP march_{name} {help}\n# TYPE march_{name} {kind}");
            for (labels, value) in values {
                let _ = writeln!(text, "march_{name}{labels} {value}");
            }
        };
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let [fine, refused, failed] = &self.answers;
        add(
            "answers_total",
            "counter",
            "Answers by class of their status.",
            &[
                ("{status=\"2xx\"}", count(fine)),
                ("{status=\"4xx\"}", count(refused)),
                ("{status=\"5xx\"}", count(failed)),
            ],
        );
        let counters = [
            ("prompt_tokens_total", "Prompt tokens that the model read.", &self.prompt_tokens),
            ("cached_tokens_total", "Prompt tokens that came from the prefix cache.", &self.cached_tokens),
            ("generated_tokens_total", "Tokens that were written.", &self.generated_tokens),
            ("steps_total", "Steps of the model.", &self.steps),
            ("failed_steps_total", "Steps of the model that failed.", &self.failed_steps),
            ("cancelled_total", "Requests whose client went away.", &self.cancelled),
        ];
        for (name, help, counter) in counters {
            add(name, "counter", help, &[("", count(counter))]);
        }
        let active = self.active.load(Ordering::Relaxed) as u64;
        let bytes = self.cache_bytes.load(Ordering::Relaxed) as u64;
        add("active_texts", "gauge", "Texts in the model's steps.", &[("", active)]);
        add("waiting_requests", "gauge", "Requests that wait for a place.", &[("", waiting as u64)]);
        add("cache_bytes", "gauge", "Bytes of the prefix cache.", &[("", bytes)]);
        add("sessions", "gauge", "Conversations that are kept.", &[("", sessions.0 as u64)]);
        add(
            "session_bytes",
            "gauge",
            "Bytes of conversations' states in memory.",
            &[("", sessions.1 as u64)],
        );
        text
    }
}
