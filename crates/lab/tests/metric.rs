//! The metrics, against the values of lm-evaluation-harness.

use march_lab::eval::suite::Gold;
use march_lab::eval::suite::metric::{
    Metric, Normalisation, Value, best_assignment, class_match, contains, drop_normal, drop_score,
    exact_match, f1, rouge_l, string_match_all,
};
use march_lab::eval::{Answer, Scored};

fn strings(texts: &[&str]) -> Vec<String> {
    texts.iter().map(|text| text.to_string()).collect()
}

fn texts(answers: &[&str]) -> Gold {
    Gold::Texts { answers: strings(answers), classes: Vec::new() }
}

fn written(text: &str) -> [Answer; 1] {
    [Answer::GenerateUntil(text.into())]
}

fn scored(loglikelihoods: &[f64]) -> Answer {
    let score = |&loglikelihood| Scored { loglikelihood, is_greedy: false, tokens: 2 };
    Answer::Loglikelihood(loglikelihoods.iter().map(score).collect())
}

fn values(values: &[f64]) -> Vec<Value> {
    values.iter().map(|&value| Value { value, weight: 1.0 }).collect()
}

// The expected values of the tests were computed by lm-evaluation-harness 0.4.13.

#[test]
fn rouge_is_that_of_the_package() {
    let cases = [
        ("the cat sat on the mat. it ran", "the cat ran. it sat", 0.8333333284722222),
        ("", "a", 0.0),
        ("a", "", 0.0),
        ("a", ". .", 0.0),
        (" . a", "b. ", 0.4999999950000001),
        ("x", "x", 0.999999995),
        ("a b c d", "d c b a", 0.24999999500000009),
        ("a b a b a", "b a b a b", 0.999999995),
        ("naïve café. 中 文", "café 中. naïve", 0.8571428522448981),
        ("...", "a", 0.0),
        ("A b", "a b", 0.4999999950000001),
        ("the cat the cat the cat", "the cat", 0.999999995),
        ("a  b\tc.d e", "a b c. d e f", 0.9090909041322315),
        ("1.5 metres", "1.5 metres tall", 0.8571428522448981),
        ("b c a d e b. a c", "a b c d. e a b c", 0.7999999950000002),
    ];
    for (prediction, answer, expected) in cases {
        assert_eq!(rouge_l(prediction, answer), expected, "{prediction:?} {answer:?}");
    }
    // The package overflows its stack here.
    assert_eq!(rouge_l(&"word ".repeat(3000), &"word ".repeat(2000)), 0.999999995);
    assert_eq!(Metric::Rouge.score(&texts(&["b", "a b"]), &written(" a b\n")).value, 0.999999995);
}

#[test]
fn f1_counts_words_without_articles_and_punctuation() {
    let cases = [
        ("The big-cat!", "a bigcat", 1.0),
        ("no no yes", "no yes", 0.8),
        ("", "x", 0.0),
        ("the", "a", 0.0),
        ("Ünïcode Straße", "straße, ünïcode", 1.0),
        ("a b b c", "b c c d", 0.5714285714285715),
        ("yes no no", "no no no", 0.6666666666666666),
    ];
    for (prediction, answer, expected) in cases {
        assert_eq!(f1(prediction, answer), expected, "{prediction:?} {answer:?}");
    }
    assert_eq!(Metric::QaF1.score(&texts(&["x", "no yes", "yes"]), &written("no no yes")).value, 0.8);
    assert_eq!(Metric::QaF1.score(&texts(&[]), &written("x")).value, 0.0);
}

#[test]
fn classes_are_removed_while_they_are_examined() {
    let classes = ["Abbreviation", "Expression abbreviated", "Other", "Other location", "location", "Date"];
    let cases = [
        ("Abbreviation Expression abbreviated", "Expression abbreviated", 0.5),
        ("Other location", "Other location", 1.0),
        ("Other location", "location", 1.0 / 3.0),
        ("Date", "Date", 1.0),
        ("Date Other", "Date", 0.5),
        ("", "Date", 0.0),
        ("other", "Other", 0.0),
        ("Other location Date", "Other location", 0.5),
    ];
    for (prediction, answer, expected) in cases {
        assert_eq!(
            class_match(prediction, answer, &strings(&classes)),
            expected,
            "{prediction:?} {answer:?}"
        );
    }
    // `b` follows the removed `a` and is skipped, so that it counts.
    assert_eq!(class_match("a b ab", "ab", &strings(&["a", "b", "ab"])), 0.5);
    let gold = Gold::Texts { answers: strings(&["x", "Date"]), classes: strings(&classes) };
    assert_eq!(Metric::Classification.score(&gold, &written(" Date")).value, 1.0);
}

#[test]
fn drop_compares_spans() {
    let normal = [
        ("The 12-Yard run, 3.50", "12.0 yard run 3.5"),
        ("1,000 men", "1000.0 men"),
        ("$5", "5.0"),
        ("a-the b", "b"),
        ("nan inf INFINITY", "nan inf inf"),
        ("1_000", "1000.0"),
        ("1e5 1e20", "100000.0 1e+20"),
        ("O'Neil's", "oneils"),
        ("5%", "5.0"),
        ("an\napple\tthe pie", "apple pie"),
        ("٣ men", "3.0 men"),
        ("½", "½"),
        (".5 -3", "0.5 3.0"),
    ];
    for (span, expected) in normal {
        assert_eq!(drop_normal(span), expected, "{span:?}");
    }
    let cases: [(&[&str], &[&str], (f64, f64)); 13] = [
        (&["12 yards"], &["12"], (0.0, 0.67)),
        (&["12"], &["12 yards"], (0.0, 0.67)),
        (&["red"], &["red", "blue"], (0.0, 0.5)),
        (&["the red"], &["Red"], (1.0, 1.0)),
        (&[""], &["x"], (0.0, 0.0)),
        (&[""], &["the"], (1.0, 1.0)),
        (&["5.0"], &["5"], (1.0, 1.0)),
        (&["Tom Brady threw"], &["Tom Brady"], (0.0, 0.8)),
        (&["a b", "c d"], &["c d", "a b"], (1.0, 1.0)),
        (&["x y", "x"], &["x", "x y z", "w"], (0.0, 0.6)),
        (&["a b c"], &["b c d", "a b x y", "q"], (0.0, 0.27)),
        (&["1 2"], &["2 3"], (0.0, 0.5)),
        (&["one two three", "two"], &["two three", "one"], (0.0, 0.58)),
    ];
    for (prediction, answer, expected) in cases {
        assert_eq!(drop_score(prediction, answer), expected, "{prediction:?} {answer:?}");
    }
    let gold = Gold::Spans(vec![strings(&["", "x"]), strings(&["red"]), strings(&["x y z"])]);
    assert_eq!(Metric::Em.score(&gold, &written("x")).value, 0.0);
    assert_eq!(Metric::F1.score(&gold, &written("x")).value, 0.5);
}

#[test]
fn the_best_assignment_is_that_of_all_permutations() {
    fn brute(scores: &[Vec<f64>], row: usize, used: &mut Vec<bool>) -> f64 {
        let Some(entries) = scores.get(row) else { return 0.0 };
        let mut highest = brute(scores, row + 1, used);
        for (column, entry) in entries.iter().enumerate() {
            if !used[column] {
                used[column] = true;
                highest = highest.max(entry + brute(scores, row + 1, used));
                used[column] = false;
            }
        }
        highest
    }
    let mut state = 1u64;
    let mut next = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 60) as f64 / 15.0
    };
    for (rows, columns) in [(1, 1), (1, 5), (5, 1), (2, 3), (3, 2), (4, 4), (4, 5), (5, 4)] {
        for _ in 0..20 {
            let scores: Vec<Vec<f64>> = (0..rows).map(|_| (0..columns).map(|_| next()).collect()).collect();
            let expected = brute(&scores, 0, &mut vec![false; columns]);
            assert!((best_assignment(&scores) - expected).abs() < 1e-12, "{scores:?}");
        }
    }
    assert_eq!(best_assignment(&[]), 0.0);
}

#[test]
fn exact_matches() {
    for normalisation in [Normalisation::Plain, Normalisation::Articles] {
        for (prediction, answer, expected) in [
            ("The Beatles!", "the beatles", true),
            ("A.B", "ab", true),
            ("x ", "x", false),
            ("É", "é", true),
            ("", "!", true),
            ("", "x", false),
        ] {
            assert_eq!(exact_match(prediction, answer, normalisation), expected, "{prediction:?}");
        }
    }
    assert!(exact_match("end of the line", "End of line", Normalisation::Articles));
    assert!(!exact_match("end of the line", "End of line", Normalisation::Plain));
    let metric = Metric::ExactMatch(Normalisation::Plain);
    assert_eq!(metric.score(&texts(&["x", "Shakespeare"]), &written(" shakespeare ")).value, 1.0);
}

#[test]
fn containment_ignores_case() {
    for (prediction, answer, expected) in [
        ("It is PARIS.", "paris", true),
        ("STRASSE", "straße", false),
        ("straẞe", "straße", true),
        ("İstanbul", "istanbul", true),
        ("ıI", "iı", true),
        ("ſ", "S", true),
        ("\u{212a}", "k", true),
        ("a+b", "A+B", true),
        ("ab", "a.b", false),
        ("x", "", true),
        ("ΣΑΣ", "σας", true),
        ("", "x", false),
    ] {
        assert_eq!(contains(prediction, answer), expected, "{prediction:?} {answer:?}");
    }
    let long = "Word ".repeat(100_000);
    assert!(contains(&long, &long.to_lowercase()));
    assert_eq!(Metric::Contains.score(&texts(&["y", "X"]), &written("axb")).value, 1.0);
}

#[test]
fn all_strings_match() {
    let answers = strings(&["123", "ABC", "x\ny"]);
    assert_eq!(string_match_all(" abc\u{0}123 ", &answers), 2.0 / 3.0);
    assert_eq!(string_match_all("x\u{1}y", &answers), 1.0 / 3.0);
    assert_eq!(string_match_all("", &answers), 0.0);
    assert_eq!(string_match_all("x", &[]), 0.0);
    assert_eq!(Metric::StringMatchAll.score(&texts(&["7", "8"]), &written("8")).value, 0.5);
}

#[test]
fn choices_are_compared_by_likelihood_and_per_character() {
    let gold = |index| Gold::Choice { index, lengths: vec![1, 10, 2] };
    let answer = [scored(&[-1.0, -2.0, -1.0])];
    // The first of equal ones wins.
    assert_eq!([0, 1, 2].map(|i| Metric::Acc.score(&gold(i), &answer).value), [1.0, 0.0, 0.0]);
    assert_eq!([0, 1, 2].map(|i| Metric::AccNorm.score(&gold(i), &answer).value), [0.0, 1.0, 0.0]);
    let apart = [scored(&[-3.0]), scored(&[-2.0])];
    assert_eq!(Metric::Acc.score(&gold(1), &apart).value, 1.0);
    let nan = [scored(&[f64::NAN, -5.0, f64::NEG_INFINITY])];
    assert_eq!(Metric::Acc.score(&gold(1), &nan).value, 1.0);
    assert_eq!(Metric::Acc.score(&gold(0), &[scored(&[f64::NAN])]).value, 0.0);
    assert_eq!(Metric::Acc.score(&gold(0), &[]).value, 0.0);
    let empty = Gold::Choice { index: 1, lengths: vec![0, 4] };
    assert_eq!(Metric::AccNorm.score(&empty, &[scored(&[-1.0, -9.0])]).value, 1.0);
}

#[test]
fn means_and_their_errors() {
    let accuracy = values(&[1.0, 0.0, 1.0, 1.0]);
    assert_eq!(Metric::Acc.aggregate(&accuracy), 0.75);
    assert_eq!(Metric::Acc.standard_error(&accuracy), Some(0.25));
    assert_eq!(Metric::Acc.standard_error(&accuracy[..1]), None);
    assert!(Metric::Acc.aggregate(&[]).is_nan());
    let greedy =
        |loglikelihood| Answer::Loglikelihood(vec![Scored { loglikelihood, is_greedy: true, tokens: 1 }]);
    let lambada = [-1.0, -2.0, -3.0].map(|x| Metric::Perplexity.score(&Gold::Greedy, &[greedy(x)]));
    assert_eq!(Metric::Acc.score(&Gold::Greedy, &[greedy(-1.0)]).value, 1.0);
    assert_eq!(Metric::Perplexity.aggregate(&lambada), 2f64.exp());
    let error = Metric::Perplexity.standard_error(&lambada).unwrap();
    assert!((error - 2f64.exp() / 3f64.sqrt()).abs() < 1e-12);
    assert!(!Metric::Perplexity.higher_is_better() && Metric::Acc.higher_is_better());
}

#[test]
fn perplexities_of_texts_are_weighted() {
    let answer = |loglikelihood, tokens| {
        [Answer::LoglikelihoodRolling(Scored { loglikelihood, is_greedy: false, tokens })]
    };
    let documents = [
        (Gold::Sizes { words: 2, bytes: 10 }, answer(-4.0, 4)),
        (Gold::Sizes { words: 6, bytes: 30 }, answer(-12.0, 4)),
    ];
    let total = |metric: Metric| {
        let values: Vec<Value> = documents.iter().map(|(gold, answer)| metric.score(gold, answer)).collect();
        assert_eq!(metric.standard_error(&values), None);
        metric.aggregate(&values)
    };
    assert_eq!(total(Metric::WordPerplexity), 2f64.exp());
    assert_eq!(total(Metric::BytePerplexity), 0.4f64.exp());
    assert_eq!(total(Metric::TokenPerplexity), 2f64.exp());
    assert_eq!(total(Metric::BitsPerByte), 0.4 / std::f64::consts::LN_2);
    assert!(Metric::Acc.score(&documents[0].0, &documents[0].1).value.is_nan());
}
