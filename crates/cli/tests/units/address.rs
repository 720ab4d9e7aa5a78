//! Tests of `address.rs`.

use march_cli::address::*;

#[test]
fn names_and_numbers() {
    for (text, host, addr) in [
        ("localhost:8080", "localhost", "127.0.0.1:8080"),
        ("127.0.0.1:0", "127.0.0.1", "127.0.0.1:0"),
        ("0.0.0.0:80", "0.0.0.0", "0.0.0.0:80"),
        ("[::1]:8080", "[::1]", "[::1]:8080"),
    ] {
        let expected = Address { host: host.into(), addr: addr.parse().unwrap() };
        assert_eq!(address(text), Ok(expected), "{text}");
    }
    for (text, part) in [
        ("localhost", "it must be HOST:PORT"),
        (":8080", "it must be HOST:PORT"),
        ("", "it must be HOST:PORT"),
        ("localhost:", "the port ``"),
        ("localhost:99999", "the port `99999`"),
        ("::1:8080", "in brackets"),
        ("no-such-host.invalid:8080", "the host `no-such-host.invalid` is not known"),
    ] {
        let refused = address(text).unwrap_err();
        assert!(refused.contains(part), "{text}: {refused}");
    }
}
