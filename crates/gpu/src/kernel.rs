//! A kernel: WGSL text, an entry point, and constants.
//!
//! WGSL has no includes and no way to size workgroup memory at run time, so both are added here: a line
//! `//!include NAME` is replaced by `src/shaders/NAME.wgsl`, and constants become `const NAME: u32 = VALUE;` lines
//! before the text. A kernel binds its tensors as `@group(0) @binding(i)` in the order of the call, and reads the
//! call's numbers from `var<immediate>`.

/// Texts that kernels can include, by name.
const SHARED: [(&str, &str); 4] = [
    ("group", include_str!("shaders/group.wgsl")),
    ("sum", include_str!("shaders/sum.wgsl")),
    ("activation", include_str!("shaders/activation.wgsl")),
    ("delta", include_str!("shaders/delta.wgsl")),
];

/// What to run: a shader's text, its entry point, and its constants.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Kernel {
    /// Operation and direction, for messages, such as `rms_norm/backward`.
    pub name: &'static str,
    /// WGSL text, usually `include_str!("kernel.wgsl")`.
    pub source: &'static str,
    /// Entry point in the text.
    pub entry: &'static str,
    /// Constants that the text uses, all of them `u32`.
    pub constants: Vec<(&'static str, u32)>,
    /// For each binding, whether the kernel writes it.
    pub writes: &'static [bool],
}

impl Kernel {
    /// The text that the device compiles.
    pub fn text(&self) -> String {
        let mut text = String::new();
        for (name, value) in &self.constants {
            text.push_str(&format!("const {name}: u32 = {value}u;\n"));
        }
        expand(self.source, &mut text);
        #[cfg(feature = "mutants")]
        if text.contains(mutant::MARK) {
            eprintln!("mutant: {}", self.name);
        }
        text
    }
}

fn expand(source: &str, text: &mut String) {
    #[cfg(feature = "mutants")]
    let source = &mutant::change(source);
    for line in source.lines() {
        let shared = line.strip_prefix("//!include ").map(|name| {
            SHARED
                .iter()
                .find(|(known, _)| *known == name.trim())
                .unwrap_or_else(|| unreachable!("a kernel includes {name:?}, which is not in src/shaders"))
        });
        match shared {
            Some((_, source)) => expand(source, text),
            None => {
                text.push_str(line);
                text.push('\n');
            }
        }
    }
}

/// A barrier that a test of the tests deletes; see `tests/gpu/mutants.py`.
#[cfg(feature = "mutants")]
mod mutant {
    use std::env::var;

    const BARRIER: &str = "workgroupBarrier();";

    /// What stands in the place of the deleted barrier.
    pub const MARK: &str = "/* a barrier was deleted here */";

    /// Deletes barrier number `MARCH_GPU_MUTANT_BARRIER` of the file `MARCH_GPU_MUTANT_FILE` if the text contains it.
    pub fn change(source: &str) -> String {
        let (Ok(path), Ok(number)) = (var("MARCH_GPU_MUTANT_FILE"), var("MARCH_GPU_MUTANT_BARRIER")) else {
            return source.into();
        };
        let file = std::fs::read_to_string(path).unwrap_or_default();
        let place = number.parse().ok().and_then(|number| file.match_indices(BARRIER).nth(number));
        let Some((at, _)) = place else {
            return source.into();
        };
        let changed = [&file[..at], MARK, &file[at + BARRIER.len()..]].concat();
        source.replace(&file, &changed)
    }
}
