//! The page `docs/equations.md` is true: the places it names are there, its tests are tests, no equation is
//! missing; and one head of the method, written out in the paper's letters, is what the operations compute.

use std::fs;
use std::path::{Path, PathBuf};

use march_lm::anchors::{AnchorPlan, Policy};
use march_lm::engine::ops::anchor_read::{AnchorRead, AnchorReadOptions};
use march_lm::engine::ops::gated_delta::{GatedDelta, GatedDeltaOptions};
use march_lm::engine::ops::state_read::StateRead;
use march_lm::engine::{Device, Tensor};

/// The labelled equations of the paper.
const LABELS: [&str; 12] = [
    "eq:prelim-memory",
    "eq:prelim-full-attention",
    "eq:prelim-la",
    "eq:prelim-gdn",
    "eq:prelim-state-scaling",
    "eq:march-anchors",
    "eq:march-anchor",
    "eq:march-anchor-token-read",
    "eq:march-routing-key",
    "eq:march-routing-score",
    "eq:march-routing-prob",
    "eq:march-core",
];

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// What stands between single backticks, code blocks left out.
fn quoted(text: &str) -> Vec<&str> {
    let prose = text.split("```").step_by(2);
    prose.flat_map(|prose| prose.split('`').skip(1).step_by(2)).collect()
}

/// Those of the quoted that are places, `path.rs::name`.
fn places(text: &str) -> Vec<(&str, &str)> {
    quoted(text)
        .into_iter()
        .filter_map(|q| q.split_once("::"))
        .filter(|(path, _)| path.ends_with(".rs"))
        .collect()
}

/// Whether `line` declares `name` with one of the keywords.
fn declares(line: &str, keywords: &[&str], name: &str) -> bool {
    let words: Vec<&str> = line.split(|c: char| !(c.is_alphanumeric() || c == '_')).collect();
    !line.trim_start().starts_with("//")
        && words.windows(2).any(|pair| keywords.contains(&pair[0]) && pair[1] == name)
}

fn is_item(source: &str, name: &str) -> bool {
    let keywords = ["fn", "struct", "enum", "trait", "type", "const", "static", "mod"];
    source.lines().any(|line| declares(line, &keywords, name))
}

/// Whether the source has a function of that name right under `#[test]`.
fn is_test(source: &str, name: &str) -> bool {
    let mut marked = false;
    for line in source.lines() {
        match line.trim() {
            "#[test]" => marked = true,
            other if other.starts_with("//") || other.starts_with("#[") => {}
            _ if marked && declares(line, &["fn"], name) => return true,
            _ => marked = false,
        }
    }
    false
}

/// The list item of a section that starts with `- key:`, up to the next one or an empty line.
fn entry<'a>(section: &'a str, key: &str) -> Option<&'a str> {
    let start = section.find(&format!("\n- {key}:"))? + 1;
    let rest = &section[start..];
    let end = ["\n- ", "\n\n"].iter().filter_map(|stop| rest.find(stop)).min();
    Some(&rest[..end.unwrap_or(rest.len())])
}

/// Everything that is wrong with the page.
fn problems(page: &str, root: &Path) -> Vec<String> {
    let mut found = Vec::new();
    for label in LABELS {
        if !page.lines().any(|line| line.starts_with("### ") && quoted(line).contains(&label)) {
            found.push(format!("no section for {label}"));
        }
    }
    let source = |path: &str| fs::read_to_string(root.join(path));
    for (path, name) in places(page) {
        match source(path) {
            Err(_) => found.push(format!("`{path}::{name}`: there is no such file")),
            Ok(source) if !is_item(&source, name) => found.push(format!("`{path}::{name}`: no such item")),
            Ok(_) => {}
        }
    }
    for path in quoted(page).into_iter().filter(|q| q.starts_with("crates/") && !q.contains("::")) {
        if !root.join(path).exists() {
            found.push(format!("`{path}`: there is no such file"));
        }
    }
    for section in page.split("\n### ").skip(1) {
        let section = section.split("\n## ").next().unwrap_or_default();
        let title = section.lines().next().unwrap_or_default();
        let background = entry(section, "background").is_some();
        let code = entry(section, "code").map_or(Vec::new(), places);
        let tests = entry(section, "test").map_or(Vec::new(), places);
        if !section.contains("```text\n") {
            found.push(format!("{title}: no equation"));
        }
        if code.is_empty() && !background {
            found.push(format!("{title}: no code, and not marked as background"));
        }
        if tests.is_empty() && !background {
            found.push(format!("{title}: no test"));
        }
        for (path, name) in tests {
            if source(path).is_ok_and(|source| !is_test(&source, name)) {
                found.push(format!("{title}: `{path}::{name}` is not a test"));
            }
        }
    }
    found
}

#[test]
fn the_page_is_true() {
    let page = fs::read_to_string(repository().join("docs/equations.md")).unwrap();
    let found = problems(&page, &repository());
    assert!(found.is_empty(), "docs/equations.md:\n{}", found.join("\n"));
    assert!(places(&page).len() > 50, "the page names places");
}

/// Every name in the page's list of symbols is a word of the sources.
#[test]
fn the_symbols_are_in_the_code() {
    fn read(folder: &Path, all: &mut String) {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                read(&path, all);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                all.push_str(&fs::read_to_string(path).unwrap());
            }
        }
    }
    let mut sources = String::new();
    read(&repository().join("crates/engine/src"), &mut sources);
    read(&repository().join("crates/lm/src"), &mut sources);
    let words: std::collections::HashSet<&str> =
        sources.split(|c: char| !(c.is_alphanumeric() || c == '_')).collect();
    let page = fs::read_to_string(repository().join("docs/equations.md")).unwrap();
    let symbols = page.split("\n## ").find(|part| part.starts_with("Symbols")).unwrap();
    let names = quoted(symbols);
    assert!(names.len() > 20);
    for name in names {
        assert!(words.contains(name), "docs/equations.md: no `{name}` in the code");
    }
}

#[test]
fn a_page_that_is_not_true_is_found_out() {
    let page = fs::read_to_string(repository().join("docs/equations.md")).unwrap();
    for (part, instead, problem) in [
        ("`eq:march-core`", "", "no section for eq:march-core"),
        ("swiglu/reference.rs::forward", "swish/reference.rs::forward", "there is no such file"),
        ("reference.rs::update", "reference.rs::updated", "no such item"),
        ("init.rs::draw", "init.rs::Init", "no such item"),
        ("`crates/cli/golden`", "`crates/cli/gold`", "there is no such file"),
        ("layers.rs::adamw", "common/mod.rs::compare", "is not a test"),
        ("- code: `crates/lm/src/anchors/retention.rs::keeps`", "", "Fenwick retention: no code"),
        ("- background: no model", "- no model", "`eq:prelim-la`: no code"),
        (
            "- test: `crates/lm/tests/properties.rs::the_first_values_are_as_they_should_be`",
            "",
            "Initial values: no test",
        ),
    ] {
        assert!(page.contains(part), "{part}");
        let found = problems(&page.replace(part, instead), &repository());
        assert!(found.iter().any(|p| p.contains(problem)), "{problem:?} is not in {found:?}");
    }
    let missing = problems("", &repository());
    assert_eq!(missing.len(), LABELS.len());
}

/// Numbers in −1 … 1 that look random.
fn numbers(count: usize, seed: f64) -> Vec<f64> {
    (0..count).map(|i| ((i as f64 + 1.0) * (12.9898 + seed)).sin()).collect()
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// M x for a matrix of rows.
fn times(matrix: &[Vec<f64>], x: &[f64]) -> Vec<f64> {
    matrix.iter().map(|row| dot(row, x)).collect()
}

/// The sizes of one head.
const L: usize = 25;
const C: usize = 5;
const DK: usize = 3;
const DV: usize = 4;
const DR: usize = 2;

/// What one head takes in, by token or by anchor.
struct Head {
    query: Vec<f64>,
    key: Vec<f64>,
    value: Vec<f64>,
    retention_input: Vec<f64>,
    write_input: Vec<f64>,
    a_log: f64,
    dt_bias: f64,
    rho: Vec<f64>,
    null: Vec<f64>,
    anchor_query: Vec<f64>,
    kappa: Vec<f64>,
}

impl Head {
    /// prelim-gdn, march-anchor, march-anchor-token-read, march-routing-score, march-routing-prob and
    /// march-core with S [d_v, d_k] and t from 1: o_t of every token, o_m of every anchor that some token sees.
    fn by_the_paper(&self, top_k: Option<usize>) -> (Vec<f64>, Vec<f64>) {
        let unit = |x: &[f64]| -> Vec<f64> {
            let length = (dot(x, x) + 1e-6).sqrt();
            x.iter().map(|v| v / length).collect()
        };
        let scaled = |x: &[f64]| unit(x).iter().map(|v| v / (DK as f64).sqrt()).collect::<Vec<_>>();
        let mut s = vec![vec![0.0; DK]; DV];
        // (b_m, A^(m)) for m = 1, 2, …
        let mut anchors: Vec<(usize, Vec<Vec<f64>>)> = Vec::new();
        let mut outputs = Vec::new();
        for t in 1..=L {
            let i = t - 1;
            let (q, k) = (scaled(&self.query[i * DK..][..DK]), unit(&self.key[i * DK..][..DK]));
            let v = &self.value[i * DV..][..DV];
            let softplus = (self.retention_input[i] + self.dt_bias).exp().ln_1p();
            let alpha = (-self.a_log.exp() * softplus).exp();
            let beta = 1.0 / (1.0 + (-self.write_input[i]).exp());
            let held = times(&s, &k);
            for row in 0..DV {
                for column in 0..DK {
                    s[row][column] = alpha * s[row][column] + beta * (v[row] - alpha * held[row]) * k[column];
                }
            }
            let score = |m: usize| dot(&self.rho[i * DR..][..DR], &self.kappa[(m - 1) * DR..][..DR]);
            let mut visible: Vec<usize> = (1..=anchors.len()).filter(|&m| anchors[m - 1].0 < t).collect();
            visible.sort_by(|&a, &b| score(b).total_cmp(&score(a)));
            visible.truncate(top_k.unwrap_or(usize::MAX));
            let total = self.null[i].exp() + visible.iter().map(|&m| score(m).exp()).sum::<f64>();
            let mut o = times(&s, &q);
            for m in visible {
                let read = times(&anchors[m - 1].1, &q);
                o.iter_mut().zip(read).for_each(|(o, read)| *o += score(m).exp() / total * read);
            }
            outputs.extend(o);
            if t.is_multiple_of(C) {
                anchors.push((t, s.clone()));
            }
        }
        anchors.retain(|(b, _)| *b < L);
        let own = anchors.iter().zip(self.anchor_query.chunks(DK));
        (outputs, own.flat_map(|((_, a), query)| times(a, &scaled(query))).collect())
    }

    /// The same by the operations and the plan that the models use.
    fn by_the_operations(&self, top_k: Option<usize>) -> march_lm::Result<(Vec<f64>, Vec<f64>)> {
        let plan = AnchorPlan::fresh(&Policy { interval: Some(C), ..Policy::default() }, 1, L);
        let device = Device::reference();
        let tensor = |data: &[f64], shape: &[usize]| Tensor::from_f64(data, shape, &device);
        let query = tensor(&self.query, &[1, L, DK])?;
        let recurrence = GatedDelta {
            query: &query,
            key: &tensor(&self.key, &[1, L, DK])?,
            value: &tensor(&self.value, &[1, L, DV])?,
            retention_input: &tensor(&self.retention_input, &[1, L, 1])?,
            write_input: &tensor(&self.write_input, &[1, L, 1])?,
            a_log: &tensor(&[self.a_log], &[1])?,
            dt_bias: &tensor(&[self.dt_bias], &[1])?,
            initial_state: None,
        };
        let boundaries = plan.boundaries.clone();
        let options = GatedDeltaOptions {
            key_heads: 1,
            value_heads: 1,
            allow_neg_eigval: false,
            boundaries,
            final_state: true,
            chunk_offset: 0,
        };
        let out = recurrence.gated_delta(&options)?;
        let count = plan.new.len();
        let history = AnchorRead {
            query: &query,
            routing_query: &tensor(&self.rho, &[1, L, DR])?,
            routing_keys: &tensor(&self.kappa[..count * DR], &[count, DR])?,
            anchor_states: &out.boundary_states,
            null_score: Some(&tensor(&self.null, &[1, L, 1])?),
        };
        let options = AnchorReadOptions {
            key_heads: 1,
            value_heads: 1,
            top_k,
            routing_scale: 1.0,
            plan: plan.read.clone(),
        };
        let readout = (&out.readout + &history.anchor_read(&options)?)?;
        let anchor_query = tensor(&self.anchor_query[..count * DK], &[count, DK])?;
        let own = StateRead { query: &anchor_query, states: &out.boundary_states }.state_read(1)?;
        Ok((readout.to_f64(), own.to_f64()))
    }
}

#[test]
fn one_head_in_the_letters_of_the_paper() {
    let head = Head {
        query: numbers(L * DK, 0.0),
        key: numbers(L * DK, 1.0),
        value: numbers(L * DV, 2.0),
        retention_input: numbers(L, 3.0),
        write_input: numbers(L, 4.0),
        a_log: -1.5,
        dt_bias: 0.3,
        rho: numbers(L * DR, 5.0).iter().map(|v| 3.0 * v).collect(),
        null: numbers(L, 6.0),
        anchor_query: numbers(L / C * DK, 7.0),
        kappa: numbers(L / C * DR, 8.0),
    };
    let close = |a: &[f64], b: &[f64]| {
        assert_eq!(a.len(), b.len());
        a.iter().zip(b).all(|(a, b)| (a - b).abs() < 1e-12)
    };
    for top_k in [None, Some(2), Some(1)] {
        let (want, want_own) = head.by_the_paper(top_k);
        let (found, found_own) = head.by_the_operations(top_k).unwrap();
        assert!(close(&found, &want), "readouts with top-K {top_k:?}");
        assert!(close(&found_own, &want_own), "the anchors' own readouts");
        assert_eq!(found_own.len(), 4 * DV);
    }
    // The numbers are such that each of the three differs.
    assert!(!close(&head.by_the_paper(None).0, &head.by_the_paper(Some(2)).0));
    assert!(!close(&head.by_the_paper(Some(2)).0, &head.by_the_paper(Some(1)).0));
}
