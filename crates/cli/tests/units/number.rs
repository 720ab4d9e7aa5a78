//! Tests of `number.rs`.

use march_cli::number::*;

#[test]
fn only_numbers_in_range_are_taken() {
    assert_eq!((threads("0"), threads("4096")), (Ok(0), Ok(4096)));
    assert_eq!((seed("0"), seed("18446744073709551615")), (Ok(0), Ok(u64::MAX)));
    assert_eq!((whole("0"), count("1")), (Ok(0usize), Ok(1u64)));
    assert_eq!(positive("1e-3"), Ok(0.001));
    assert!(any("-1").is_ok() && any("much").is_err());
    for text in ["", "-1", "nan", "1.5", "1e3", "18446744073709551616", "1000000000001"] {
        assert!(threads(text).unwrap_err().contains("from 0 to 4096"), "{text}");
        assert!(count::<usize>(text).unwrap_err().contains("from 1 to 1000000000000"), "{text}");
        assert!(whole::<u64>(text).unwrap_err().contains("from 0 to 1000000000000"), "{text}");
    }
    assert!(length("0").is_err() && length("16777217").is_err());
    assert!(count::<u64>("0").is_err() && threads("4097").is_err() && seed("-1").is_err());
    for text in ["0", "-1", "nan", "inf", "-inf", "1e999", "x", ""] {
        assert!(positive(text).is_err(), "{text}");
    }
}
