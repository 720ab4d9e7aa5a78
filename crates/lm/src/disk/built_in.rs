//! The checkpoint inside the program: a small MARCH that answers questions about a diary.
//!
//! It has the name of a folder, `diary`, which stands for the files in `assets/diary` unless a folder of that name
//! exists. `assets/diary/README.md` has the commands that trained it.

use std::path::Path;

/// The name that stands for the checkpoint.
pub const BUILT_IN: &str = "diary";

/// A diary of 60 days to ask the model about.
pub const EXAMPLE: &str = include_str!("../../assets/diary/example.txt");

/// A question as the model understands it.
pub const QUESTION: &str = "Where was the key on 3 May?";

/// The files of the checkpoint, as they would be in its folder.
const FILES: [(&str, &[u8]); 4] = [
    ("config.json", include_bytes!("../../assets/diary/config.json")),
    ("model.safetensors", include_bytes!("../../assets/diary/model.safetensors")),
    ("tokenizer.json", include_bytes!("../../assets/diary/tokenizer.json")),
    ("chat_template.jinja", include_bytes!("../../assets/diary/chat_template.jinja")),
];

/// Whether a folder is the checkpoint inside the program.
pub fn is_built_in(folder: &Path) -> bool {
    folder == Path::new(BUILT_IN) && !folder.exists()
}

/// The contents of a file of the checkpoint inside the program; `None` if it has no such file, or if `folder` is another
/// one.
pub fn built_in(folder: &Path, name: &str) -> Option<&'static [u8]> {
    let file = FILES.iter().find(|(own, _)| *own == name).filter(|_| is_built_in(folder));
    file.map(|(_, bytes)| *bytes)
}
