//! Needles in a haystack: the retrieval tasks of RULER. The prompts are those of [`march_lm::data::needles`], which also
//! makes lessons of them.

use super::metric::Metric;
use super::{Documents, Gold, Sample, Suite};
use march_lm::data::needles::{self, Drawn, GENERATED};

/// The tasks of RULER; the paper reports six of them.
pub(super) const TASKS: &[Suite] = &[
    suite(&needles::TASKS[0]),
    suite(&needles::TASKS[1]),
    suite(&needles::TASKS[2]),
    suite(&needles::TASKS[3]),
    suite(&needles::TASKS[4]),
    suite(&needles::TASKS[5]),
    suite(&needles::TASKS[6]),
    suite(&needles::TASKS[7]),
];

const fn suite(task: &needles::Task) -> Suite {
    Suite {
        name: task.name,
        group: if task.paper.is_some() { "niah" } else { "niah_extra" },
        about: task.about,
        metrics: &[Metric::StringMatchAll],
        paper: task.paper,
        documents: Documents::Needles(task.needles),
    }
}

impl Sample {
    /// The prompt as a request, and its answers.
    pub fn of_needles(drawn: Drawn) -> Self {
        let gold = Gold::Texts { answers: drawn.answers, classes: Vec::new() };
        Self::generated(drawn.prompt, &[], GENERATED, gold)
    }
}
