//! Requests as token ids.

use march_lab::eval::{Encoded, Request};
use march_lm::Result;
use march_lm::tokenizer::Tokenizer;

fn encoded(context: &str, continuations: &[&str]) -> Result<Encoded> {
    let continuations = continuations.iter().map(|&c| c.to_string()).collect();
    let request = Request::Loglikelihood { context: context.into(), continuations };
    Encoded::new(&request, &Tokenizer::bytes(), 257)
}

fn ids(text: &str) -> Vec<u32> {
    text.bytes().map(u32::from).collect()
}

#[test]
fn spaces_move_to_the_continuation() {
    let Encoded::Loglikelihood { context, continuations } = encoded("ab  ", &["c", " d"]).unwrap() else {
        panic!()
    };
    assert_eq!((context, continuations), (ids("ab"), vec![ids("  c"), ids("   d")]));
}

#[test]
fn an_empty_context_is_the_end_of_text() {
    for context in ["", " \n"] {
        let Encoded::Loglikelihood { context: start, continuations } = encoded(context, &["x"]).unwrap()
        else {
            panic!()
        };
        assert_eq!((start, &continuations[0]), (vec![256], &ids(&format!("{context}x"))));
    }
}

#[test]
fn what_cannot_be_scored_is_refused() {
    assert!(encoded("a", &[]).unwrap_err().to_string().contains("no continuations"));
    assert!(encoded("a", &[""]).unwrap_err().to_string().contains("no token of its own"));
    let request = Request::LoglikelihoodRolling { text: "é".into() };
    let error = Encoded::new(&request, &Tokenizer::bytes(), 100).unwrap_err().to_string();
    assert!(error.contains("does not fit the model"), "{error}");
}
