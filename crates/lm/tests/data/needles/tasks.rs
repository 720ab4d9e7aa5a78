use std::collections::BTreeSet;

use march_lm::data::needles::{Essay, Task};
use march_lm::tokenizer::Tokenizer;

/// np.round(np.linspace(0, 100, 40)).
#[test]
fn depths_are_those_of_the_harness() {
    let (tokenizer, essay) = (Tokenizer::bytes(), Essay::builtin());
    let task = Task::list("niah_multikey_1").unwrap()[0];
    let fitted = task.needles.fit(&tokenizer, &essay, 2048, 0, 1).unwrap();
    let needles = (0..200).flat_map(|index| fitted.sample(index).unwrap().needles);
    let all: Vec<usize> =
        needles.map(|needle| needle.depth as usize).collect::<BTreeSet<_>>().into_iter().collect();
    assert_eq!(all.len(), 40);
    assert_eq!(all[..8], [0, 3, 5, 8, 10, 13, 15, 18]);
    assert_eq!(all[32..], [82, 85, 87, 90, 92, 95, 97, 100]);
}

#[test]
fn tasks_are_found_by_name() {
    let names = |list: &str| Task::list(list).map(|tasks| tasks.iter().map(|task| task.name).collect());
    let all: Vec<&str> = names("niah_single_2, niah_multivalue").unwrap();
    assert_eq!(all, ["niah_single_2", "niah_multivalue"]);
    assert_eq!(Task::list(&Task::paper()).unwrap().len(), 6);
    let error = names("niah_single_1,niah_singel_2").unwrap_err().to_string();
    assert!(error.contains("`niah_singel_2` is not") && error.contains("mean `niah_single_2`?"), "{error}");
    assert!(names("").is_err() && names("niah_single_1,").is_err());
}
