//! What an answer read of the text before it: the parts of the text, with the weights of the anchors at their ends.

use std::collections::BTreeMap;

use march_lm::generate::TextStream;
use march_lm::model::MeanRouting;
use march_lm::tokenizer::Tokenizer;
use serde_json::{Value, json};

use crate::job::FinishedChoice;

/// As clients read it; `null` if the model does not route, or the answer saw no anchor.
pub fn json(finished: &FinishedChoice, tokenizer: &Tokenizer) -> march_lm::Result<Value> {
    let Some(MeanRouting { tokens, heads, null: nulls, anchors }) =
        finished.recall.as_ref().filter(|it| it.tokens > 0)
    else {
        return Ok(Value::Null);
    };
    let ends: BTreeMap<usize, usize> =
        finished.anchors.iter().map(|anchor| (anchor.ordinal, anchor.position)).collect();
    let (mut stream, mut read, mut list) = (TextStream::new(tokenizer, &[])?, 0, Vec::new());
    for (ordinal, weights) in anchors {
        let Some(&end) = ends.get(ordinal) else { continue };
        let (from, mut text) = (read, String::new());
        for &id in finished.prefix.ids.get(from..end).unwrap_or_default() {
            text += &stream.push(tokenizer, id)?;
        }
        read = end.max(from);
        list.push(json!({ "ordinal": ordinal, "from": from, "to": end, "text": text, "weights": weights }));
    }
    Ok(json!({ "tokens": tokens, "layers": nulls.len(), "heads": heads, "null": nulls, "anchors": list }))
}
