//! Hints in messages about a wrong name: the name that was probably meant, and an example from a preset.

use serde_json::{Map, Value};

use super::presets;

/// The model of a preset, which provides names and values for messages. Only the caller knows the keys of models and
/// their defaults, so it provides the examples.
#[derive(Clone, Debug)]
pub struct Example {
    /// The preset's name.
    pub preset: &'static str,
    /// The model's type.
    pub model_type: &'static str,
    /// All keys of `[model]`, with defaults filled in.
    pub keys: Map<String, Value>,
}

/// Returns the examples; called only when a message needs them.
pub type Examples = fn() -> &'static [Example];

/// The candidate that `name` most likely stands for: equal except for case and `-`, containing it or contained in it,
/// or differing in at most a third of its letters.
pub fn nearest<'a>(name: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let plain = |text: &str| text.to_lowercase().replace('-', "_").chars().collect::<Vec<_>>();
    let name = plain(name);
    let score = |candidate: &str| {
        let candidate = plain(candidate);
        let (short, long) =
            if candidate.len() < name.len() { (&candidate, &name) } else { (&name, &candidate) };
        if short.len() >= 3 && short != long && long.windows(short.len()).any(|part| part == &short[..]) {
            return Some(1);
        }
        let distance = edit_distance(&name, &candidate);
        (distance <= (long.len() / 3).max(1)).then_some(distance)
    };
    let scored = candidates.into_iter().filter_map(|candidate| Some((score(candidate)?, candidate)));
    scored.min_by_key(|(score, _)| *score).map(|(_, candidate)| candidate)
}

/// The edit distance of two texts: insertions, deletions, substitutions and swaps of neighbours.
fn edit_distance(from: &[char], to: &[char]) -> usize {
    let mut before = vec![0; to.len() + 1];
    let mut above: Vec<usize> = (0..=to.len()).collect();
    for i in 1..=from.len() {
        let mut row = vec![i; to.len() + 1];
        for j in 1..=to.len() {
            let change = above[j - 1] + usize::from(from[i - 1] != to[j - 1]);
            row[j] = change.min(above[j] + 1).min(row[j - 1] + 1);
            if i > 1 && j > 1 && from[i - 1] == to[j - 2] && from[i - 2] == to[j - 1] {
                row[j] = row[j].min(before[j - 2] + 1);
            }
        }
        before = std::mem::replace(&mut above, row);
    }
    above[to.len()]
}

/// "`a`, `b`, `c`"
pub(crate) fn list<'a>(names: impl IntoIterator<Item = &'a str>) -> String {
    let quoted: Vec<String> = names.into_iter().map(|name| format!("`{name}`")).collect();
    quoted.join(", ")
}

/// The message about a name that is not a preset and not a file.
pub(crate) fn preset(name: &str) -> String {
    let list: String = nearest_presets(name).map(|near| format!("\n  {near}")).concat();
    format!("the nearest presets are{list}\n`march inspect model --list` shows all")
}

/// The three presets whose names differ least from `name`, the nearest first. The group may be missing.
fn nearest_presets(name: &str) -> [&'static str; 3] {
    let plain = |text: &str| text.to_lowercase().replace('_', "-").chars().collect::<Vec<_>>();
    let stem = name.strip_suffix(".toml").unwrap_or(name);
    let stem = stem.strip_prefix("configs/").unwrap_or(stem);
    let distance = |preset: &&str| {
        let whole = edit_distance(&plain(stem), &plain(preset));
        let own = preset.rsplit('/').next().filter(|_| !stem.contains('/'));
        own.map_or(whole, |own| whole.min(edit_distance(&plain(stem), &plain(own))))
    };
    let mut presets: Vec<&str> = presets::names().collect();
    presets.sort_by_key(distance);
    std::array::from_fn(|i| presets.get(i).copied().unwrap_or_default())
}

/// "did you mean `a`? there are `a`, `b`", without the question if nothing is similar.
pub fn choice<'a>(name: &str, there_are: &str, names: impl Iterator<Item = &'a str> + Clone) -> String {
    let question = nearest(name, names.clone()).map(|near| format!("did you mean `{near}`? "));
    format!("{}{there_are} {}", question.unwrap_or_default(), list(names))
}

/// Whether models of any type have this key.
pub(super) fn is_model_key(examples: Examples, key: &str) -> bool {
    examples().iter().any(|example| example.keys.contains_key(key))
}

/// The values of `model_type` whose models have this key.
pub(crate) fn model_types_with(examples: Examples, key: &str) -> Vec<&'static str> {
    let mut found = Vec::new();
    for Example { model_type, keys, .. } in examples() {
        if keys.contains_key(key) && !found.contains(model_type) {
            found.push(*model_type);
        }
    }
    found
}

/// The first preset of a `model_type`, and its value for a key.
pub(super) fn example(
    examples: Examples,
    model_type: Option<&str>,
    key: &str,
) -> Option<(&'static str, Value)> {
    examples().iter().find_map(|example| {
        let fits = model_type.is_none_or(|model_type| example.model_type == model_type);
        let value = example.keys.get(key).filter(|value| fits && !value.is_null())?.clone();
        Some((example.preset, value))
    })
}
