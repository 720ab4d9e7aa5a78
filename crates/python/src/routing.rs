//! Which anchors the tokens of a text read.

use march_lab::report::routing::Routing as Found;
use pyo3::prelude::*;

use crate::arrays;
use crate::error::Result;

/// Which anchors the tokens of a text read: what `Model.routing` returns.
#[pyclass(frozen, module = "march_lm")]
pub struct Routing {
    /// The text of each token; empty if the token only begins a character.
    #[pyo3(get)]
    pieces: Vec<String>,
    /// int64 [anchors]: the number of tokens before each anchor.
    #[pyo3(get)]
    boundaries: Py<PyAny>,
    /// int64 [anchors, 2]: the characters of the text between the anchor before and each anchor, `text[a:b]`.
    #[pyo3(get)]
    ranges: Py<PyAny>,
    /// float32 [layers, tokens, heads, anchors]: the weight with which a token reads an anchor, without the null route.
    /// 0 where an anchor was not visible or not chosen.
    #[pyo3(get)]
    weights: Py<PyAny>,
}

impl Routing {
    pub fn new(py: Python<'_>, found: Found) -> Result<Self> {
        let (tokens, anchors) = (found.tokens(), found.anchors());
        let Found { pieces, boundaries, heads, layers } = found;
        let mut ends = Vec::with_capacity(anchors);
        let (mut characters, mut at) = (0, 0);
        for &boundary in &boundaries {
            characters += pieces[at..boundary].iter().map(|piece| piece.chars().count()).sum::<usize>();
            at = boundary;
            ends.push(characters);
        }
        let starts = [0].into_iter().chain(ends.iter().copied());
        let ranges = starts.zip(ends.iter().copied()).flat_map(|(start, end)| [start, end]);
        let shape = [layers.len(), tokens, heads, anchors];
        Ok(Self {
            ranges: arrays::of_i64(py, ranges, &[anchors, 2])?.unbind(),
            boundaries: arrays::of_i64(py, boundaries.into_iter(), &[anchors])?.unbind(),
            weights: arrays::of_f32(py, layers.concat(), &shape)?.unbind(),
            pieces,
        })
    }
}

#[pymethods]
impl Routing {
    /// The text.
    #[getter]
    fn text(&self) -> String {
        self.pieces.concat()
    }
}
