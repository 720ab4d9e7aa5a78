//! Runs every command of README.md and docs/*.md as a reader would type it: those of the two pages that are read first
//! always, those of all pages with `MARCH_LONG=1`. Of the other pages, the commands and flags must exist.
//!
//! Each page has its own folder with the files that readers find in the repository's root. The commands of
//! its `sh` blocks run with `sh -c`, in the order of the page; `march`, `target/release/march` and `cargo run
//! … --` run the program under test. For each command, a line reports that it ran, or why not. Comments right
//! before a block change it for the test:
//!
//! ```text
//! <!-- test: --max-tokens 20 -->                       added to the block's march commands
//! <!-- test: train tiny/march --set train.steps=2 -->  added to those that begin with these words
//! <!-- test: s/step-120/step-2/ -->                    another text in place of this one, as in sed
//! <!-- test: before: cp README.md book.txt -->         a command to run first
//! <!-- test: skip: needs a cluster -->                 nothing of the block runs, for this reason
//! ```
//!
//! Commands and flags of `march` that are mentioned in prose must exist too, and so must all link targets.

mod page;

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::Write;
use std::os::unix::fs::symlink;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use page::{Block, Hint, Page};

use crate::common;

/// One test per page, and the list of all pages.
macro_rules! pages {
    ($($test:ident $path:literal,)*) => {
        const PAGES: &[&str] = &[$($path),*];
        $(#[test] fn $test() { run($path) })*
    };
}

pages! {
    readme "README.md",
    changelog "CHANGELOG.md",
    contributing "CONTRIBUTING.md",
    security "SECURITY.md",
    add_a_mixer "docs/add-a-mixer.md",
    architecture "docs/architecture.md",
    cluster "docs/cluster.md",
    data "docs/data.md",
    engine "docs/engine.md",
    equations "docs/equations.md",
    eval "docs/eval.md",
    first_run "docs/first-run.md",
    formats "docs/formats.md",
    generate "docs/generate.md",
    gguf "docs/gguf.md",
    gpu "docs/gpu.md",
    memory "docs/memory.md",
    models "docs/models.md",
    python "docs/python.md",
    reliability "docs/reliability.md",
    results "docs/results/README.md",
    results_capacity "docs/results/capacity.md",
    results_demo "docs/results/demo.md",
    results_efficiency "docs/results/efficiency.md",
    results_frontier "docs/results/frontier.md",
    results_interval "docs/results/interval.md",
    results_length "docs/results/length.md",
    results_placement "docs/results/placement.md",
    results_recall "docs/results/recall.md",
    results_routing "docs/results/routing.md",
    results_upcycle "docs/results/upcycle.md",
    serve "docs/serve.md",
    train "docs/train.md",
}

/// The pages whose commands run without `MARCH_LONG=1` too.
const READ_FIRST: &[&str] = &["README.md", "docs/first-run.md"];

/// Command prefixes for which no page needs a hint.
const NOT_HERE: &[(&str, &str)] = &[
    ("cargo bench", "measures; `.ci/run` has its quick form"),
    ("cargo build", "built already"),
    ("cargo install", "changes the machine"),
    ("cargo test", "this is one of its tests"),
    ("cd ", "commands run in the repository's root"),
    ("git clone", "commands run in the repository's root"),
    ("rustup ", "changes the machine"),
    ("sudo ", "changes the machine"),
    ("bench/peers/run.sh", "installs PyTorch"),
    #[cfg(not(feature = "mpi"))]
    ("mpirun ", "this build has no MPI"),
];

/// A command that takes longer than this needs a hint that shortens it.
const LIMIT: Duration = Duration::from_secs(180);

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

fn read(path: &str) -> Page {
    Page::read(path, &std::fs::read_to_string(repository().join(path)).unwrap())
}

/// Checks that the commands of a page exist, those in its prose too, and runs those of its blocks if it is their turn.
fn run(path: &str) {
    let page = read(path);
    look_up(&page);
    let long = std::env::var("MARCH_LONG").is_ok_and(|value| value == "1");
    if page.blocks.is_empty() || !(long || READ_FIRST.contains(&path)) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let mut shell = Shell::new(folder.path());
    for block in &page.blocks {
        shell.hints = block.added_flags();
        for hint in &block.hints {
            if let Hint::Before(command) = hint {
                shell.run(path, block.line, command);
            }
        }
        for (line, command) in &block.commands {
            match reason_not_to_run(block, command) {
                Some(reason) => say(path, *line, &format!("skipped ({reason})"), command),
                None => shell.run(path, *line, &block.replaced(command)),
            }
        }
    }
}

fn reason_not_to_run<'a>(block: &'a Block, command: &str) -> Option<&'a str> {
    let by_hint = block.hints.iter().find_map(|hint| match hint {
        Hint::Skip(reason) => Some(reason.as_str()),
        _ => None,
    });
    by_hint
        .or_else(|| NOT_HERE.iter().find(|(start, _)| command.starts_with(start)).map(|(_, reason)| *reason))
}

/// Prints a line that is shown even if the tests pass.
fn say(path: &str, line: usize, what: &str, command: &str) {
    let command = page::on_one_line(command);
    let mut output = std::io::stderr().lock();
    writeln!(output, "{path}:{line}: {what}: {command}").unwrap();
}

/// The folder in which a page's commands run, one after the other.
struct Shell {
    root: PathBuf,
    log: PathBuf,
    hints: String,
    /// Process groups of commands that may still be running.
    groups: Vec<u32>,
}

impl Shell {
    fn new(folder: &Path) -> Shell {
        let (root, log) = (folder.join("march"), folder.join("log"));
        std::fs::create_dir_all(root.join("target/release")).unwrap();
        let copied = Command::new("cp")
            .args(["-r", "README.md", "configs", "docs"])
            .arg(&root)
            .current_dir(repository())
            .status();
        assert!(copied.unwrap().success());
        symlink(programs().join("march"), root.join("target/release/march")).unwrap();
        symlink(repository().join("crates"), root.join("crates")).unwrap();
        Shell { root, log, hints: String::new(), groups: Vec::new() }
    }

    /// Runs a command, which must succeed.
    fn run(&mut self, path: &str, line: usize, command: &str) {
        let (began, log) = (Instant::now(), File::create(&self.log).unwrap());
        let found = std::env::var("PATH").unwrap_or_default();
        // A pipe fails if any of its commands fails.
        let mut child = Command::new("bash")
            .args(["-o", "pipefail", "-c", command])
            .current_dir(&self.root)
            .env("PATH", format!("{}:{found}", programs().display()))
            .env("MARCH_PROGRAM", env!("CARGO_BIN_EXE_march"))
            .env("MARCH_HINTS", &self.hints)
            // Without these, running as root or with more processes than cores is rejected.
            .env("OMPI_ALLOW_RUN_AS_ROOT", "1")
            .env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
            .env("OMPI_MCA_rmaps_base_oversubscribe", "1")
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .process_group(0)
            .spawn()
            .unwrap();
        self.groups.push(child.id());
        let status = loop {
            match child.try_wait().unwrap() {
                Some(status) => break status.to_string(),
                None if began.elapsed() > LIMIT => break format!("did not end in {} s", LIMIT.as_secs()),
                None => std::thread::sleep(Duration::from_millis(5)),
            }
        };
        let output = String::from_utf8_lossy(&std::fs::read(&self.log).unwrap()).into_owned();
        assert!(status == "exit status: 0", "{path}:{line}: {command}\n{status}\n{output}");
        if !command.contains('&') {
            self.groups.pop();
        }
        say(path, line, &format!("ran ({:.1} s)", began.elapsed().as_secs_f64()), command);
    }
}

impl Drop for Shell {
    /// Ends processes that commands left in the background, or that took too long.
    fn drop(&mut self) {
        for group in &self.groups {
            let _ = Command::new("kill").args(["--", &format!("-{group}")]).stderr(Stdio::null()).status();
        }
    }
}

/// The folder with the replacements for `march` and `cargo`.
fn programs() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/documented")
}

/// Every command and flag of `march` that a page mentions must be in its help.
fn look_up(page: &Page) {
    let mut helps = BTreeMap::new();
    let mut help_of = |command: &[String]| -> Help {
        helps.entry(command.to_vec()).or_insert_with_key(|command| Help::of(command)).clone()
    };
    for (line, words) in page.march_commands() {
        let (mut depth, mut help) = (0, help_of(&[]));
        while words.get(depth).is_some_and(|word| help.commands.contains(word)) {
            depth += 1;
            help = help_of(&words[..depth]);
        }
        let (command, rest) = words.split_at(depth);
        let place = format!("{}:{line}: `march {}`", page.path, words.join(" "));
        if let Some(word) = rest.first().filter(|_| !help.commands.is_empty()) {
            // Flags, FILE or … may follow; a plain word must be a command.
            assert!(!word.chars().all(|c| c.is_ascii_lowercase()), "{place}: no command `{word}`");
        }
        for flag in rest.iter().filter(|word| word.starts_with("--")) {
            let flag = flag.split('=').next().unwrap();
            assert!(help.flags.contains(flag), "{place}: `march {}` has no `{flag}`", command.join(" "));
        }
    }
}

/// What `march COMMAND… --help` lists.
#[derive(Clone)]
struct Help {
    commands: BTreeSet<String>,
    flags: BTreeSet<String>,
}

impl Help {
    fn of(command: &[String]) -> Help {
        let arguments: Vec<&str> = command.iter().map(String::as_str).chain(["--help"]).collect();
        let text = common::ok(&arguments);
        let listed = text.lines().skip_while(|line| *line != "Commands:").skip(1);
        let listed = listed.take_while(|line| !line.is_empty());
        let options = text.lines().filter(|line| line.trim_start().starts_with('-'));
        let words = options.flat_map(|line| line.split([' ', ',', '=', '[']));
        Help {
            commands: listed.filter_map(|line| line.split_whitespace().next()).map(String::from).collect(),
            flags: words.filter(|word| word.starts_with("--")).map(String::from).collect(),
        }
    }
}

#[test]
fn every_page_has_a_test() {
    let docs = std::fs::read_dir(repository().join("docs")).unwrap();
    for file in docs.map(|entry| entry.unwrap().file_name().into_string().unwrap()) {
        let path = format!("docs/{file}");
        assert!(!path.ends_with(".md") || PAGES.contains(&path.as_str()), "add {path} to `pages!` above");
    }
}

#[test]
fn every_link_leads_somewhere() {
    let mut broken = Vec::new();
    for path in PAGES {
        let page = read(path);
        for (line, link) in page.links() {
            let (file, anchor) = link.split_once('#').unwrap_or((&link, ""));
            let target = match file {
                "" => repository().join(path),
                file => repository().join(path).parent().unwrap().join(file),
            };
            let found = target.exists() && {
                let pages_anchors = target.extension().is_some_and(|kind| kind == "md") && !anchor.is_empty();
                !pages_anchors
                    || Page::read(&link, &std::fs::read_to_string(&target).unwrap())
                        .anchors()
                        .contains(anchor)
            };
            if !found {
                broken.push(format!("{path}:{line}: {link}"));
            }
        }
    }
    assert!(broken.is_empty(), "links that lead nowhere:\n{}", broken.join("\n"));
}

#[test]
fn pages_are_read_as_they_are_meant() {
    let text = "\
# A *page* of `code`, twice
Text with `march train --set a.b=1`, [a link](b.md#c) and `[no](link)`.
<!-- test: train --set x=1 -->
<!-- test: s|a/b|c| -->
```sh
# only words
march train \\
  a/b   # more words
echo 'two
lines' | wc
```
1. A list.
   ```text
   march nothing
   ```
";
    let page = Page::read("page.md", text);
    let [block] = &page.blocks[..] else { panic!("{} blocks", page.blocks.len()) };
    let expected = [(7, "march train \\\n  a/b   # more words"), (9, "echo 'two\nlines' | wc")];
    assert_eq!(
        block.commands.iter().map(|(line, text)| (*line, text.as_str())).collect::<Vec<_>>(),
        expected
    );
    assert_eq!(block.replaced(expected[0].1), "march train \\\n  c   # more words");
    assert_eq!(block.added_flags(), "case \"$* \" in 'train '*) set -- \"$@\" --set x=1;; esac\n");
    let commands: Vec<_> =
        page.march_commands().iter().map(|(line, words)| (*line, words.join(" "))).collect();
    assert_eq!(commands, [(2, "train --set a.b=1".into()), (7, "train a/b".into())]);
    assert_eq!(page.links(), [(2, "b.md#c".into())]);
    assert_eq!(page.anchors(), BTreeSet::from(["a-page-of-code-twice".to_string()]));
}

#[test]
#[should_panic(expected = "exit status: 3")]
fn a_command_that_fails_fails_the_test() {
    let folder = tempfile::tempdir().unwrap();
    Shell::new(folder.path()).run("page.md", 1, "exit 3");
}

#[test]
#[should_panic(expected = "`march train` has no `--stpes`")]
fn a_flag_in_prose_must_exist() {
    look_up(&Page::read("page.md", "Say `march train\n--stpes 3`."));
}
