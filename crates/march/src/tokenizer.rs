//! Text to token ids and back.

use crate::error::{Error, Result};

/// Bytes as tokens: 0 to 255 are the bytes, 256 is the end of a text.
#[derive(Clone, Debug)]
pub struct Tokenizer;

impl Tokenizer {
    /// A tokenizer by its name.
    pub fn load(name: &str) -> Result<Self> {
        match name {
            "bytes" => Ok(Self),
            other => Err(Error::Request(format!("there is no tokenizer `{other}`; there is `bytes`"))),
        }
    }

    /// Ids are below this.
    pub fn vocabulary(&self) -> usize {
        257
    }

    /// The ids of a text.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        Ok(text.bytes().map(u32::from).collect())
    }

    /// The text of ids; what is not UTF-8 becomes U+FFFD, the end of a text nothing.
    pub fn decode(&self, ids: &[u32]) -> Result<String> {
        let bytes: Vec<u8> = ids.iter().filter_map(|&id| u8::try_from(id).ok()).collect();
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }
}
