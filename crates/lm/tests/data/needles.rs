//! Prompts with needles, and lessons made of them.

mod essay;
mod fit;
mod lessons;
mod tasks;
mod words;
