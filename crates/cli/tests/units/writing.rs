//! Tests of `command/writing.rs`.

use march_cli::command::writing::*;

#[test]
fn backslashes() {
    assert_eq!(unescape(r"\nUser:\t\\n").unwrap(), "\nUser:\t\\n");
    assert!(unescape(r"a\").is_err() && unescape(r"\x").is_err());
}

#[test]
fn control_characters_are_spelt_out() {
    assert_eq!(visible("plain ✓ text\n\tagain"), "plain ✓ text\n\tagain");
    assert_eq!(visible("a\x1b[2Jb\r\x07\u{9b}\u{7f}\n"), "a\\x1b[2Jb\\x0d\\x07\\x9b\\x7f\n");
}
