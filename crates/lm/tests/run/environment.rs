use std::fs;

use march_lm::disk;
use march_lm::run::Session;

const ENVIRONMENT_FILE: &str = "environment.json";

#[test]
fn sessions_are_added() {
    let run = tempfile::tempdir().unwrap();
    assert_eq!(Session::all(run.path()).unwrap(), []);
    let first = Session { program: "march 1".into(), kernel: None, ..Default::default() };
    first.record(run.path()).unwrap();
    // A key of another version is kept.
    let path = run.path().join(ENVIRONMENT_FILE);
    let text = fs::read_to_string(&path).unwrap();
    let line = text.lines().nth(1).unwrap();
    let plain = line[..line.find(",\"checksum\"").unwrap()].to_string() + ",\"later\":1}";
    fs::write(&path, text.replace(line, &disk::seal(&plain))).unwrap();
    let second = Session { step: 7, ..first.clone() };
    second.record(run.path()).unwrap();
    assert_eq!(Session::all(run.path()).unwrap(), [first.clone(), second]);
    let text = fs::read_to_string(&path).unwrap();
    assert!(text.contains("\"later\":1") && text.lines().count() == 4, "{text}");
    // A file with other contents is not overwritten.
    fs::write(&path, "{}").unwrap();
    assert!(first.record(run.path()).unwrap_err().to_string().contains("environment.json"));
    assert_eq!(fs::read_to_string(&path).unwrap(), "{}");
}

#[test]
fn sessions_without_checksums_get_them() {
    let run = tempfile::tempdir().unwrap();
    let path = run.path().join(ENVIRONMENT_FILE);
    fs::write(&path, "[\n{\"program\":\"march 1\",\"step\":3}\n]\n").unwrap();
    let old = Session { program: "march 1".into(), step: 3, ..Default::default() };
    assert_eq!(Session::all(run.path()).unwrap(), std::slice::from_ref(&old));
    old.record(run.path()).unwrap();
    assert_eq!(Session::all(run.path()).unwrap(), [old.clone(), old]);
    assert_eq!(fs::read_to_string(&path).unwrap().matches("\"checksum\"").count(), 2);
    fs::write(&path, "[\n{\"program\":\"march 1\",\"stcp\":3}\n]\n").unwrap();
    assert!(Session::all(run.path()).unwrap_err().to_string().contains("unknown key `stcp`"));
}

#[test]
fn any_changed_byte_is_noticed_and_stays() {
    let run = tempfile::tempdir().unwrap();
    let path = run.path().join(ENVIRONMENT_FILE);
    let session = Session { program: "march 1".into(), step: 3, ..Default::default() };
    for _ in 0..2 {
        session.record(run.path()).unwrap();
    }
    let text = fs::read_to_string(&path).unwrap();
    for at in 0..text.trim_end().len() {
        for byte in [b'0', b'7', b'"', b' ', b'\n', b',', b'{', 0xFF, text.as_bytes()[at] ^ 1] {
            let mut bytes = text.clone().into_bytes();
            bytes[at] = byte;
            if bytes == text.as_bytes() {
                continue;
            }
            fs::write(&path, &bytes).unwrap();
            assert!(Session::all(run.path()).is_err(), "{}", String::from_utf8_lossy(&bytes));
            assert!(session.record(run.path()).is_err());
            assert_eq!(fs::read(&path).unwrap(), bytes);
        }
        fs::write(&path, &text[..at]).unwrap();
        assert!(Session::all(run.path()).is_err());
    }
}
