//! The tests of an experiment's page: which differences between models are significant, corrected for their number.

use std::collections::BTreeMap;

use super::evidence::Cell;
use super::experiment::{scale_of, values};
use crate::eval::{Difference, Resamples, paired_bootstrap};
use crate::reproduce::{
    Count, Evaluation, GROUPS, Group, Measured, REPETITIONS, Results, fisher, holm, paired_t,
};

/// Resamples of documents. The smallest p-value must stay below 5 % after a correction for hundreds of tests.
const RESAMPLES: usize = 50_000;

/// Resamples by the number of documents.
pub(super) type Drawn = BTreeMap<usize, Resamples>;

/// What a difference shows.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Sign {
    Above,
    Below,
    NotSignificant,
}

/// All tests of a page.
pub(super) struct Tests<'a> {
    pub(super) differences: Vec<DifferenceTest<'a>>,
    pub(super) counts: Vec<CountTest<'a>>,
    /// The courses whose tests are corrected together, and the number of these tests.
    families: Vec<(Vec<&'a str>, usize)>,
}

/// The difference of two rows in one evaluation.
pub(super) struct DifferenceTest<'a> {
    pub(super) course: &'a String,
    pub(super) pair: &'a [String; 2],
    pub(super) evaluation: &'a Evaluation,
    /// For losses, the tokens that are compared.
    pub(super) group: Option<&'static str>,
    pub(super) difference: Difference,
    /// After the correction.
    pub(super) sign: Sign,
}

/// The numbers of seeds of two rows that succeed.
pub(super) struct CountTest<'a> {
    pub(super) course: &'a String,
    pub(super) pair: &'a [String; 2],
    pub(super) counts: [Count; 2],
    /// Fisher's exact test, after the correction.
    pub(super) p: f64,
}

/// The groups of tokens that an evaluation compares; `None` for all questions of a task.
fn groups_of(evaluation: &Evaluation) -> Vec<Option<&'static str>> {
    match (&evaluation.text, evaluation.copy) {
        (None, _) => vec![None],
        (_, Some(_)) => vec![Some(REPETITIONS)],
        _ => GROUPS.map(Some).to_vec(),
    }
}

impl<'a> Tests<'a> {
    /// Tests of a course that continues another are corrected together, all others of the page together.
    pub(super) fn of(results: &'a Results) -> Self {
        let experiment = &results.plan.experiment;
        let mut tests = Self { differences: Vec::new(), counts: Vec::new(), families: Vec::new() };
        let mut drawn = Drawn::new();
        for course in &experiment.courses {
            for pair in &experiment.compare {
                for evaluation in experiment.evaluations_of(course) {
                    for group in groups_of(evaluation) {
                        let Some(difference) = difference(results, pair, (evaluation, group), &mut drawn)
                        else {
                            continue;
                        };
                        let sign = Sign::NotSignificant;
                        let test = DifferenceTest { course, pair, evaluation, group, difference, sign };
                        tests.differences.push(test);
                    }
                }
                if let [Some(a), Some(b)] = [&pair[0], &pair[1]].map(|row| successes(results, row, course)) {
                    tests.counts.push(CountTest { course, pair, counts: [a, b], p: fisher(a, b) });
                }
            }
        }
        let continued = |course: &&String| experiment.course[*course].after.is_some();
        let (own, together): (Vec<&String>, Vec<&String>) = experiment.courses.iter().partition(continued);
        tests.correct(together);
        own.into_iter().for_each(|course| tests.correct(vec![course]));
        tests
    }

    /// Corrects the tests of some courses together.
    fn correct(&mut self, courses: Vec<&'a String>) {
        let mut differences: Vec<_> =
            self.differences.iter_mut().filter(|test| courses.contains(&test.course)).collect();
        let mut counts: Vec<_> =
            self.counts.iter_mut().filter(|test| courses.contains(&test.course)).collect();
        let all = differences.iter().map(|test| test.difference.p).chain(counts.iter().map(|test| test.p));
        let corrected = holm(&all.collect::<Vec<_>>());
        let tests = corrected.len();
        let mut corrected = corrected.into_iter();
        for (test, p) in differences.iter_mut().zip(&mut corrected) {
            test.sign = match test.difference.value {
                _ if p >= 0.05 => Sign::NotSignificant,
                value if value > 0.0 => Sign::Above,
                _ => Sign::Below,
            };
        }
        counts.iter_mut().zip(corrected).for_each(|(test, p)| test.p = p);
        if tests > 0 {
            self.families.push((courses.into_iter().map(String::as_str).collect(), tests));
        }
    }

    /// How many tests were corrected together.
    pub(super) fn corrected(&self) -> String {
        match &self.families[..] {
            [] => "for the 0 tests of this page".into(),
            [(_, tests)] => format!("for the {tests} tests of this page"),
            families => {
                let one = |(courses, tests): &(Vec<&str>, usize)| {
                    format!("for the {tests} tests of `{}`", courses.join("` and `"))
                };
                families.iter().map(one).collect::<Vec<_>>().join(" and, apart from them, ")
            }
        }
    }

    /// The differences over all tokens or questions of an evaluation.
    pub(super) fn whole(&self) -> impl Iterator<Item = &DifferenceTest<'a>> {
        self.differences
            .iter()
            .filter(|test| test.group.is_none_or(|group| [GROUPS[0], REPETITIONS].contains(&group)))
    }

    /// One line per pair: where the first is better, where it is worse, and where the difference is not significant.
    pub(super) fn decisions(&self, results: &Results) -> Vec<String> {
        let one_course = results.plan.experiment.courses.len() == 1;
        let whole: Vec<&DifferenceTest<'_>> = self.whole().collect();
        let pairs = whole.chunk_by(|a, b| a.course == b.course && a.pair == b.pair);
        pairs
            .map(|tests| {
                let mut parts =
                    [("better at", Vec::new()), ("worse at", Vec::new()), ("not significant at", Vec::new())];
                for test in tests {
                    // A lower loss is better.
                    let better = if test.evaluation.text.is_some() { Sign::Below } else { Sign::Above };
                    let part = match test.sign {
                        Sign::NotSignificant => 2,
                        sign => usize::from(sign != better),
                    };
                    parts[part].1.push(test.evaluation.name.as_str());
                }
                let said = parts.iter().filter(|part| !part.1.is_empty());
                let said: Vec<String> =
                    said.map(|(what, evaluations)| format!("{what} {}", evaluations.join(", "))).collect();
                let (course, [first, second]) = (tests[0].course, tests[0].pair);
                let place = if one_course { String::new() } else { format!("{course}: ") };
                format!("{place}{first} against {second}: {}.", said.join("; "))
            })
            .collect()
    }
}

impl DifferenceTest<'_> {
    /// Whether it is of this pair and evaluation.
    pub(super) fn is(&self, pair: &[String; 2], evaluation: &Evaluation) -> bool {
        self.pair == pair && std::ptr::eq(self.evaluation, evaluation)
    }

    /// The difference with its interval; losses with so many digits more.
    pub(super) fn cell(&self, more_digits: usize) -> Cell {
        let (factor, digits) = scale_of(self.evaluation);
        let digits = digits + more_digits;
        let sign = |value: f64| format!("{:+.digits$}", factor * value);
        let Difference { value, interval: [low, high], .. } = self.difference;
        let strong = self.sign != Sign::NotSignificant;
        Cell {
            text: format!("{} ({} to {})", sign(value), sign(low), sign(high)),
            strong,
            title: if strong { "significant" } else { "not significant" }.into(),
        }
    }
}

/// The paired difference of two rows; `None` for fewer than two seeds or documents.
pub(super) fn difference(
    results: &Results,
    pair: &[String; 2],
    (evaluation, group): (&Evaluation, Option<&str>),
    drawn: &mut Drawn,
) -> Option<Difference> {
    if let Some(group) = group {
        return by_document(results, pair, (evaluation, group), drawn);
    }
    let [a, b] = [&pair[0], &pair[1]].map(|row| values(results, row, evaluation));
    let mean = |of: &[f64], seeds: &[usize]| seeds.iter().map(|&i| of[i]).sum::<f64>() / seeds.len() as f64;
    if a.len() != b.len() || a.len() < 2 {
        return None;
    }
    let mut found = paired_bootstrap(a.len(), |seeds| [mean(&b, seeds), mean(&a, seeds)]);
    // A bootstrap of few seeds finds a difference significant that one seed makes.
    found.p = found.p.max(paired_t(&a.iter().zip(&b).map(|(a, b)| a - b).collect::<Vec<_>>()));
    Some(found)
}

/// A group of a measurement.
pub(super) fn find<'a>(measured: &'a Measured, name: &str) -> Option<&'a Group> {
    measured.groups.iter().find(|group| group.name == name)
}

/// The difference of two rows, first minus second, with intervals over documents. Each row's losses are means over its
/// seeds.
fn by_document(
    results: &Results,
    pair: &[String; 2],
    (evaluation, group): (&Evaluation, &str),
    drawn: &mut Drawn,
) -> Option<Difference> {
    // For each row, the mean over seeds of the sum of losses, by document; and the number of tokens.
    let sums = |row: &String| {
        let seeds = results.measured(row, evaluation);
        let groups: Vec<&Group> = seeds.iter().filter_map(|measured| find(measured, group)).collect();
        let first = groups.first()?;
        let mean = |document: usize| {
            groups.iter().filter_map(|group| group.sums.get(document)).sum::<f64>() / groups.len() as f64
        };
        Some(((0..first.counts.len()).map(mean).collect::<Vec<f64>>(), first.counts.clone()))
    };
    let (a, counts) = sums(&pair[0])?;
    let (b, _) = sums(&pair[1])?;
    let documents = a.iter().zip(&b).zip(&counts).filter(|(_, count)| **count > 0);
    let used: Vec<[f64; 3]> = documents.map(|((a, b), count)| [*b, *a, *count as f64]).collect();
    if used.len() < 2 {
        return None;
    }
    let drawn = drawn.entry(used.len()).or_insert_with(|| Resamples::new(used.len(), RESAMPLES));
    let mut found = drawn.difference(|drawn| {
        let add = |sums: [f64; 3], &i: &usize| [0, 1, 2].map(|at| sums[at] + used[i][at]);
        let [second, first, tokens] = drawn.iter().fold([0.0; 3], add);
        [second / tokens, first / tokens]
    });
    // A bootstrap of few documents finds any common sign significant: that it is common has at least this probability.
    found.p = found.p.max(2f64.powi(1 - used.len() as i32));
    Some(found)
}

/// The seeds of a row that succeed on a course, by the experiment's definition; `None` without one.
pub(super) fn successes(results: &Results, row: &str, course: &str) -> Option<Count> {
    let experiment = &results.plan.experiment;
    let success = experiment.success.as_ref()?;
    let evaluation =
        experiment.evaluations_of(course).find(|evaluation| evaluation.name == success.evaluation)?;
    let with = values(results, row, evaluation);
    let none = experiment.variant.iter().find(|variant| variant.of == row && variant.policy == "none");
    let without = none.map(|variant| values(results, &variant.name, evaluation)).unwrap_or_default();
    let one = |(seed, &accuracy): (usize, &f64)| {
        let falls = without.get(seed).is_none_or(|without| accuracy - without >= success.drop);
        accuracy >= success.accuracy && falls
    };
    let successes = with.iter().enumerate().filter(|&seed| one(seed)).count();
    (!with.is_empty()).then_some(Count { successes, trials: with.len() })
}
