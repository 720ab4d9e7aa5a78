//! The embedded configuration files of this crate's `configs/`.

macro_rules! embed {
    ($($name:literal),* $(,)?) => {
        &[$(($name, include_str!(concat!("../../configs/", $name, ".toml")))),*]
    };
}

/// Names and contents of the presets.
const PRESETS: &[(&str, &str)] = embed![
    "paper/march",
    "paper/gdn",
    "paper/log-linear",
    "paper/transformer-21",
    "paper/transformer-24",
    "demo/march",
    "demo/gdn",
    "demo/gdn-wide",
    "demo/log-linear",
    "demo/memory-caching",
    "demo/transformer",
    "tiny/march",
    "tiny/gdn",
    "tiny/log-linear",
    "tiny/memory-caching",
    "tiny/transformer",
    "tiny/hybrid",
    "qwen3_5/0_8b",
    "qwen3_5/4b",
    "ablation/interval-256",
    "ablation/interval-1024",
    "ablation/interval-2048",
    "ablation/routing-dim-192",
    "ablation/top-4",
    "ablation/no-null",
    "ablation/fenwick",
];

/// The names of the presets.
pub(crate) fn names() -> impl Iterator<Item = &'static str> + Clone {
    PRESETS.iter().map(|(name, _)| *name)
}

/// The name and text of a preset.
pub(crate) fn find(name: &str) -> Option<(&'static str, &'static str)> {
    PRESETS.iter().find(|(known, _)| *known == name).copied()
}
