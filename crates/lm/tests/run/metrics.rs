use std::fs;

use march_lm::disk::seal;
use march_lm::run::read_metrics;
use serde_json::{Value, json};

#[test]
fn any_changed_byte_is_noticed() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("metrics.jsonl");
    let values = [
        json!({"step": 1, "loss": 5.123456789012345}),
        json!({"step": 1, "prompt": "A", "sample": "\"checksum\":\"0\"} é\n"}),
        json!({"step": 2, "loss": 0.1 + 0.2}),
    ];
    let text: String = values.iter().map(|value| seal(&value.to_string()) + "\n").collect();
    fs::write(&path, &text).unwrap();
    assert_eq!(read_metrics(&path).unwrap(), values);
    for at in 0..text.len() {
        // Wherever the file is cut, the first lines are left.
        fs::write(&path, &text.as_bytes()[..at]).unwrap();
        let read = read_metrics(&path).unwrap();
        assert_eq!(read, values[..read.len()]);
        assert!(at + 1 < text.len() || read == values);
        for byte in [b'0', b'7', b'"', b' ', b'\n', b'}', 0xFF, text.as_bytes()[at] ^ 1] {
            let mut bytes = text.clone().into_bytes();
            bytes[at] = byte;
            fs::write(&path, &bytes).unwrap();
            if bytes != text.as_bytes() {
                assert!(read_metrics(&path).is_err(), "{}", String::from_utf8_lossy(&bytes));
            }
        }
    }
}

#[test]
fn lines_without_checksums_are_read_where_no_line_has_one() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("metrics.jsonl");
    let (plain, sealed) = ("{\"step\":1}", seal("{\"step\":2}"));
    let read = |text: String| {
        fs::write(&path, text).unwrap();
        read_metrics(&path).map_err(|error| error.to_string())
    };
    assert_eq!(
        read(format!("{plain}\n{plain}\n{{\"step")).unwrap(),
        [json!({"step": 1}), json!({"step": 1})]
    );
    assert_eq!(read(String::new()).unwrap(), Vec::<Value>::new());
    assert!(
        read(format!("{plain}\n{sealed}\n")).unwrap_err().contains("line 2 is damaged: it has a checksum")
    );
    assert!(read(format!("{sealed}\n{plain}\n")).unwrap_err().contains("line 2 is damaged: it has no"));
    assert!(read(format!("{sealed}\n\n{sealed}\n")).unwrap_err().contains("line 2 is damaged"));
    assert!(
        read(format!("{sealed}\n7\n")).unwrap_err().contains("line 2 is damaged: it is not a JSON object")
    );
    assert!(read(format!("{sealed}\n{sealed}x")).unwrap_err().contains("line 2 is damaged: it has extra"));
    assert_eq!(read(format!("{sealed}\n{sealed}")).unwrap(), [json!({"step": 2}), json!({"step": 2})]);
    assert!(read_metrics(&folder.path().join("none")).unwrap_err().to_string().contains("none"));
}
