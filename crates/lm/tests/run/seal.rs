use march_lm::disk::{Seal, seal, unseal};

#[test]
fn any_changed_byte_is_noticed() {
    for text in ["{\"a\":1,\"b\":[\"x\"]}", "{\n  \"a\": 1,\n  \"b\": \"}\"\n}\n", "{}"] {
        assert_eq!(unseal(text), Seal::Missing);
        let sealed = seal(text);
        assert_eq!(unseal(&sealed), Seal::Sealed, "{sealed}");
        let value: serde_json::Value = serde_json::from_str(&sealed).unwrap();
        assert_eq!(value["checksum"].as_str().unwrap().len(), 16);
        for at in 0..sealed.len() {
            for bit in 0..7 {
                let mut bytes = sealed.clone().into_bytes();
                bytes[at] ^= 1 << bit;
                let Ok(changed) = String::from_utf8(bytes) else { continue };
                assert_ne!(unseal(&changed), Seal::Sealed, "{changed}");
            }
            if at + 1 < sealed.len() {
                assert_ne!(unseal(&sealed[..at]), Seal::Sealed);
            }
        }
    }
}
