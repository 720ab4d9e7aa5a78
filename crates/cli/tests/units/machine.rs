//! Tests of `machine.rs`.

use std::time::{Duration, SystemTime};

use march_cli::machine::*;

#[test]
fn times_are_utc() {
    for (seconds, text) in [
        (0, "1970-01-01T00:00:00Z"),
        (951_782_399, "2000-02-28T23:59:59Z"),
        (951_782_400, "2000-02-29T00:00:00Z"),
        (951_868_800, "2000-03-01T00:00:00Z"),
        (1_735_689_599, "2024-12-31T23:59:59Z"),
        (4_107_542_400, "2100-03-01T00:00:00Z"),
    ] {
        assert_eq!(utc(SystemTime::UNIX_EPOCH + Duration::from_secs(seconds)), text);
    }
}

#[test]
fn the_home_folder_is_not_told() {
    let told = |argument| without_home(argument, "/home/somebody");
    assert_eq!(told("/home/somebody/runs/a"), "~/runs/a");
    assert_eq!(told("data.path=/home/somebody/x"), "data.path=~/x");
    assert_eq!(told("--run=/home/somebody/x"), "--run=~/x");
    assert_eq!(told("/home/somebody-else/x"), "/home/somebody-else/x");
    assert_eq!(told("runs/a"), "runs/a");
    assert_eq!(without_home("/data", "/"), "/data");
    assert_eq!(without_home("train", ""), "train");
}
