//! The libraries march-lm and march-lab are read from their first module to their last: a module imports only from those
//! before it, in the order of the tree in README.md. And no file of tests is forgotten.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The modules of a library as README's tree lists them: the names at the depth of those in its folder's `src/`.
fn modules(library: &str) -> Vec<String> {
    let readme = fs::read_to_string(root().join("README.md")).unwrap();
    let indent = |line: &str| line.len() - line.trim_start().len();
    let mut lines = readme.lines().skip_while(|line| !line.starts_with(&format!("  {library}/ ")));
    let src = lines.by_ref().find(|line| line.trim() == "src/").expect("no `src/` in README.md");
    let below: Vec<&str> = lines.take_while(|line| indent(line) > indent(src)).collect();
    let depth = indent(below[0]);
    let names = below.into_iter().filter(|line| indent(line) == depth).flat_map(|line| {
        // Several names in a line have commas between them; two spaces end the names.
        let names = line.trim().split("  ").next().unwrap_or_default();
        names.split(',').map(|name| name.trim().trim_end_matches('/').trim_end_matches(".rs").to_string())
    });
    names.collect()
}

/// The Rust files below a folder.
fn files(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

/// The names that follow `crate::` in a text, also in braces, and those that as many `super::` lead to as there are
/// modules around the text.
fn imports(text: &str, depth: usize) -> Vec<String> {
    let name = |text: &str| -> String {
        text.trim_start().chars().take_while(|c| c.is_ascii_lowercase() || *c == '_').collect()
    };
    let mut starts: Vec<&str> =
        text.match_indices("crate::").map(|(at, found)| &text[at + found.len()..]).collect();
    let up = "super::".repeat(depth);
    starts.extend(text.match_indices(&up).map(|(at, found)| &text[at + found.len()..]));
    let mut names = Vec::new();
    for start in starts {
        let Some(list) = start.strip_prefix('{') else {
            names.push(name(start));
            continue;
        };
        let (mut open, mut item) = (1, String::new());
        for c in list.chars() {
            match c {
                '{' => open += 1,
                '}' => open -= 1,
                _ => {}
            }
            if open == 0 || c == ',' && open == 1 {
                names.push(name(&item));
                item.clear();
            } else {
                item.push(c);
            }
            if open == 0 {
                break;
            }
        }
    }
    names
}

#[test]
fn imports_are_found() {
    let text =
        "use crate::a::B; use crate::{b::{C, x::D}, c, d::E}; fn f(g: crate::e::G) { super::super::f::h() }";
    assert_eq!(imports(text, 2), ["a", "b", "c", "d", "e", "f"]);
    assert_eq!(imports("use super::super::a::B;", 3), Vec::<String>::new());
}

#[test]
fn modules_import_only_from_those_before_them() {
    for library in ["lm", "lab"] {
        check(library);
    }
}

fn check(library: &str) {
    let order = modules(library);
    let src = root().join("crates").join(library).join("src");
    let declared: BTreeSet<String> = fs::read_to_string(src.join("lib.rs"))
        .unwrap()
        .lines()
        .filter_map(|line| {
            let name = line.strip_prefix("pub mod ").or_else(|| line.strip_prefix("mod "))?;
            Some(name.trim_end_matches(';').to_string())
        })
        .collect();
    assert_eq!(
        order.iter().cloned().collect::<BTreeSet<_>>(),
        declared,
        "README's tree and lib.rs of {library} differ"
    );
    let place = |module: &str| order.iter().position(|name| name == module);
    let mut all = Vec::new();
    files(&src, &mut all);
    let mut wrong = Vec::new();
    for path in all {
        let inside = path.strip_prefix(&src).unwrap().with_extension("");
        let mut around: Vec<&str> = inside.iter().map(|part| part.to_str().unwrap()).collect();
        around.pop_if(|last| *last == "mod");
        let Some(own) = place(around[0]) else { continue }; // lib.rs
        for name in imports(&fs::read_to_string(&path).unwrap(), around.len()) {
            let Some(other) = place(&name).filter(|other| *other > own) else { continue };
            let (own, other) = (&order[own], &order[other]);
            wrong.push(format!("{}: `{other}`, which comes after `{own}`", path.display()));
        }
    }
    wrong.sort();
    wrong.dedup();
    assert!(wrong.is_empty(), "imports against the order {}:\n{}", order.join(", "), wrong.join("\n"));
}

/// Cargo builds the programs that a crate's Cargo.toml names, and `tests/main.rs` is made of the files that it declares:
/// tests in any other file would never run.
#[test]
fn every_file_of_tests_is_part_of_a_program() {
    let mut crates = 0;
    for entry in fs::read_dir(root().join("crates")).unwrap() {
        let folder = entry.unwrap().path();
        let Ok(main) = fs::read_to_string(folder.join("tests/main.rs")) else { continue };
        let manifest = fs::read_to_string(folder.join("Cargo.toml")).unwrap();
        crates += 1;
        for file in fs::read_dir(folder.join("tests")).unwrap() {
            let path = file.unwrap().path();
            if path.extension().is_none_or(|extension| extension != "rs") || path.ends_with("main.rs") {
                continue;
            }
            let name = path.file_stem().unwrap().to_str().unwrap();
            let declared = main.lines().any(|line| line == format!("mod {name};"));
            let program = manifest.contains(&format!("[[test]]\nname = \"{name}\"\n"));
            assert!(declared || program, "{}: declare it in tests/main.rs", path.display());
        }
    }
    assert_eq!(crates, 5);
}
