use march_lm::data::builtin;
use march_lm::data::needles::Essay;

fn sentences(text: &str) -> Vec<String> {
    let essay = Essay::new(text).unwrap();
    let words = text.split_whitespace().count();
    let count = essay.sentences(0, words);
    let one = |i| {
        let end = if i + 1 < count { essay.start(i + 1) } else { words };
        let mut text = String::new();
        essay.append(essay.start(i)..end, &mut text);
        text
    };
    (0..count).map(one).collect()
}

#[test]
fn sentences_end_where_they_should() {
    assert_eq!(
        sentences(
            "Mr. Hare  met Dr. A. B. Dodo.\nWas it I? \
             `Oh dear!  Oh!' said he, 3.5 times... so. (It was.) Yes"
        ),
        [
            "Mr. Hare met Dr. A. B. Dodo.",
            "Was it I?",
            "`Oh dear!",
            "Oh!' said he, 3.5 times... so. (It was.)",
            "Yes"
        ]
    );
    assert!(Essay::new(" \n").is_err());
}

#[test]
fn a_text_begins_anew_when_it_is_over() {
    let essay = Essay::new("One two. Three four. Five").unwrap();
    let counts: Vec<usize> = (0..=11).map(|words| essay.sentences(0, words)).collect();
    assert_eq!(counts, [0, 1, 1, 2, 2, 3, 4, 4, 5, 5, 6, 7]);
    let later: Vec<usize> = (0..=6).map(|words| essay.sentences(2, words)).collect();
    assert_eq!(later, [0, 1, 2, 2, 3, 3, 4]);
    assert_eq!([essay.start(2), essay.start(3), essay.start(4)], [4, 5, 7]);
    let mut text = String::new();
    essay.append(3..7, &mut text);
    assert_eq!(text, "four. Five One two.");
}

#[test]
fn the_builtin_text_has_sentences() {
    let essay = Essay::builtin();
    let (words, sentences) = (builtin().split_whitespace().count(), essay.count());
    assert!(words > 20_000 && words / sentences < 40, "{words} words, {sentences} sentences");
}
