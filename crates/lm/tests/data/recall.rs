use std::collections::HashMap;

use march_lm::data::Source;
use march_lm::data::recall::{QUESTION_SEED, RecallSource, TASKS, Task};
use march_lm::engine::ops::cross_entropy::IGNORE;

/// Every question's answer is at the position of its fact, and that position is before the question.
#[test]
fn answers_stand_where_their_facts_are() {
    for text in [
        "mqar",
        "mqar:pairs=3:vocabulary=10",
        "mqar:pairs=9:fewest=2",
        "versioned",
        "versioned:documents=1:keys=2",
        "versioned:documents=5:names=9:fewest=2",
        "diary",
        "diary:days=5:facts=3:things=7:fewest=2:least=1",
        "diary:days=4:facts=2:least=1:mixed=1",
        "needle",
    ] {
        let task = Task::open(text, None).unwrap();
        let names = task.vocabulary();
        for index in 0..50 {
            let example = task.lesson(3, index);
            assert_eq!(example.tokens.len(), task.length(), "{text}");
            assert_eq!(task.asked(3, index).questions.len(), task.questions(), "{text}");
            assert!(example.questions.len() <= task.questions(), "{text}");
            assert!(example.tokens.iter().all(|&id| (id as usize) < names.len()), "{text}");
            for pair in example.questions.windows(2) {
                assert!(pair[0].position < pair[1].position, "{text}");
            }
            for question in &example.questions {
                assert!(question.fact < question.position, "{text}");
                assert_eq!(example.tokens[question.fact], question.answer, "{text}");
                let in_english = text.starts_with("diary");
                assert!(in_english || names[question.answer as usize].starts_with('v'), "{text}");
                // The key that is asked for precedes its value; in a diary, it comes before the date.
                let key = question.position - usize::from(in_english);
                assert_eq!(example.tokens[question.fact - 1], example.tokens[key], "{text}");
            }
        }
    }
}

#[test]
fn examples_repeat_and_differ() {
    let task = Task::open("mqar", None).unwrap();
    assert_eq!(task.lesson(1, 5), task.lesson(1, 5));
    assert_ne!(task.lesson(1, 5), task.lesson(2, 5));
    let mut seen = HashMap::new();
    for index in 0..500 {
        for example in [task.lesson(0, index), task.asked(0, index)] {
            assert!(seen.insert(example.tokens, index).is_none(), "example {index} came twice");
        }
    }
}

#[test]
fn longer_sequences_keep_their_questions() {
    for kind in TASKS {
        let least = Task::open(kind.name, None).unwrap().length();
        for length in [least, least + 1, 2 * least + 3] {
            let task = Task::open(kind.name, Some(length)).unwrap();
            let example = task.asked(0, 0);
            assert_eq!((task.length(), example.tokens.len()), (length, length), "{}", kind.name);
        }
        let refused = Task::open(kind.name, Some(least - 1)).err().unwrap().to_string();
        assert!(refused.contains(&least.to_string()), "{refused}");
    }
}

#[test]
fn what_cannot_be_is_refused() {
    let refused = |text: &str| Task::open(text, None).err().unwrap().to_string();
    assert!(refused("mqra").contains("mqar"));
    assert!(refused("mqar:pears=3").contains("pairs"));
    assert!(refused("mqar:pairs=x").contains("whole number"));
    assert!(refused("mqar:pairs").contains("pairs=24"));
    assert!(refused("mqar:pairs=0").contains("at least 1"));
    assert!(refused("mqar:pairs=40:vocabulary=64").contains("31"));
    assert!(refused("versioned:documents=9:values=4").contains('9'));
    assert!(refused("versioned:names=3").contains("4 documents need as many names"));
    assert!(refused("versioned:fewest=5").contains("more than the 4 documents"));
    assert!(refused("needle:depth=101").contains("100"));
    assert!(refused("diary:facts=9").contains("`facts` is 9; at most 8"));
    assert!(refused("diary:days=65").contains("`days` is 65; at most 64"));
    assert!(refused("diary:places=99").contains("at most 64"));
    let task = Task::open("mqar:vocabulary=66", None).unwrap();
    assert_eq!(task.text(), "mqar:pairs=24:fewest=0:vocabulary=66");
    // Sizes that were added later do not change the text of a task that does not use them.
    let text = "versioned:documents=4:keys=8:values=32:questions=16";
    assert_eq!(Task::open("versioned", None).unwrap().text(), text);
    let task = Task::open("versioned:names=16", None).unwrap();
    assert_eq!(task.text(), format!("{text}:names=16"));
}

/// With `names`, only the name tells which document is asked for; with `fewest`, lessons vary in size.
#[test]
fn documents_have_drawn_names() {
    let task = Task::open("versioned:documents=3:keys=2:names=8:fewest=1", None).unwrap();
    let (mut firsts, mut counts) = (vec![0; 8], vec![0; 4]);
    for index in 0..400 {
        let is_name = |id: &&u32| (1..=8).contains(*id);
        let example = task.asked(0, index);
        let names: Vec<u32> = (0..3).map(|document| example.tokens[document * 5]).collect();
        assert!(names.iter().all(|id| is_name(&id)) && names[0] != names[1] && names[1] != names[2]);
        firsts[names[0] as usize - 1] += 1;
        for question in &example.questions {
            let (name, document) = (example.tokens[question.position - 1], question.fact / 5);
            assert_eq!(name, names[document]);
        }
        let lesson = task.lesson(0, index);
        let context = &lesson.tokens[..task.length() - 2 * task.questions()];
        counts[context.iter().filter(is_name).count()] += 1;
    }
    assert!(firsts.iter().all(|&count| count > 25), "{firsts:?}");
    assert!(counts[0] == 0 && counts[1..].iter().all(|&count| count > 90), "{counts:?}");
}

#[test]
fn targets_are_where_questions_are() {
    let task = Task::open("versioned", None).unwrap();
    let source = RecallSource::asked(task.clone(), 4);
    let (mut inputs, mut targets) = (vec![7], vec![9]);
    source.sequence(2, &mut inputs, &mut targets).unwrap();
    let example = task.asked(QUESTION_SEED, 2);
    assert_eq!(&inputs[1..], &example.tokens);
    assert_eq!(targets[1..].iter().filter(|&&id| id != IGNORE).count(), source.targets());
    assert!(example.questions.iter().all(|question| targets[1 + question.position] == question.answer));
}

/// A diary is written in English, and its tokenizer reads it as the tokens that it was written from.
#[test]
fn a_diary_is_written_and_read() {
    let sizes = "days=3:facts=2:things=4:questions=2";
    for text in ["", ":least=1", ":mixed=1"].map(|more| format!("diary:{sizes}{more}")) {
        let task = Task::open(&text, None).unwrap();
        let tokenizer = task.tokenizer().unwrap();
        for index in 0..20 {
            let example = task.lesson(0, index);
            // A day begins and ends with its date, and a question is followed by its answer.
            let (mut begins, mut asked) = (0, 0);
            for &end in &example.ends {
                match example.questions.get(asked).filter(|question| question.position + 1 == end) {
                    Some(question) => assert_eq!(example.tokens[end], question.answer),
                    None => assert_eq!(example.tokens[begins], example.tokens[end]),
                }
                asked += usize::from(example.tokens[begins] != example.tokens[end]);
                begins = end + 1;
            }
            assert_eq!(asked, 2);
            // The text up to the answer of the last question, and with it.
            let end = *example.ends.last().unwrap() + index as usize % 2;
            let asked = &example.tokens[..end];
            let written = task.write(asked);
            assert_eq!(tokenizer.encode(&written).unwrap(), asked, "{written}");
        }
    }
    let task = Task::open("diary", None).unwrap();
    let tokenizer = task.tokenizer().unwrap();
    let day = "12 May: the key is in the harbour, the lamp in the mill. That was 12 May.\n";
    let tokens = tokenizer.encode(day).unwrap();
    assert_eq!((tokens.len(), task.write(&tokens).as_str()), (6, day));
    let question = tokenizer.encode("Where was the key on 12 May?").unwrap();
    assert_eq!(task.write(&question), "Where was the key on 12 May?\n");
    assert_eq!(
        task.write(&[&question[..], &tokens[2..3]].concat()),
        "Where was the key on 12 May? In the harbour.\n"
    );
    for other in ["key, 12 May", "Where was THE key on 12 May?", "What about the key,\non 12 May please"] {
        assert_eq!(tokenizer.encode(other).unwrap(), question, "{other}");
    }
    assert_eq!(tokenizer.decode(&tokens[2..3]).unwrap(), "harbour");
    assert_eq!(tokenizer.end_of_text(), Some(0));
    let refused = tokenizer.encode("99 May: the yacht is in the harbour, the goat in the mill").unwrap_err();
    let refused = refused.to_string();
    assert!(
        refused.contains("the words `99`, `May`, `yacht`, `goat` are not in the model's vocabulary"),
        "{refused}"
    );
    assert!(refused.contains("such as `1 May`"), "{refused}");
}

/// Training also expects the end of the text after each day and each answer; questions count without it.
#[test]
fn a_diary_teaches_where_an_answer_ends() {
    let task = Task::open("diary", None).unwrap();
    let (lessons, asked) = (RecallSource::lessons(task.clone(), 0), RecallSource::asked(task, 9));
    for (source, count) in [(&lessons, 16 + 16 + 8), (&asked, 16)] {
        let (mut inputs, mut targets) = (Vec::new(), Vec::new());
        source.sequence(3, &mut inputs, &mut targets).unwrap();
        assert_eq!(targets.iter().filter(|&&id| id != IGNORE).count(), count);
        assert_eq!(source.targets(), count);
    }
}
