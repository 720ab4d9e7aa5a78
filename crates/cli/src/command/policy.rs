//! Flags that change how anchors are placed, kept and read.

use std::str::FromStr;

use clap::Args;
use march_lm::anchors::{Placement, Policy, Retention, Storage};

use crate::number;

/// The anchor settings, where they differ from those that the checkpoint was trained with.
#[derive(Args, Clone)]
pub struct PolicyArgs {
    /// Text tokens from one anchor to the next [default: the checkpoint's]
    #[arg(long, value_name = "N", value_parser = number::whole::<usize>)]
    interval: Option<usize>,
    /// Number of anchors that a token reads: a number, or `dense` for all visible ones [default: the checkpoint's]
    #[arg(long, value_name = "K|dense")]
    routing_top_k: Option<TopK>,
    /// Which anchors are kept: `all`, `fenwick` (a logarithmic number), `recent:N` (the newest), `budget:BYTES` (what
    /// fits, such as budget:64MB) [default: the checkpoint's]
    #[arg(long, value_name = "RULE", value_parser = setting::<Retention>)]
    retention: Option<Retention>,
    /// The precision of kept states: `f32`, `bf16` or `int8` [default: the checkpoint's]
    #[arg(long, value_name = "TYPE", value_parser = setting::<Storage>)]
    storage: Option<Storage>,
    /// Where anchors are placed: `periodic`, or `adaptive:MIN` (where the state has moved, at most one in MIN tokens)
    /// [default: the checkpoint's]
    #[arg(long, value_name = "RULE", value_parser = setting::<Placement>)]
    placement: Option<Placement>,
}

#[derive(Clone, Copy)]
struct TopK(Option<usize>);

impl FromStr for TopK {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.parse::<usize>() {
            _ if text == "dense" => Ok(Self(None)),
            Ok(k) if k > 0 => Ok(Self(Some(k))),
            _ => Err("it must be a whole number above 0, or `dense`".into()),
        }
    }
}

/// Parses a setting; the error continues clap's own sentence.
fn setting<T: FromStr<Err = String>>(text: &str) -> Result<T, String> {
    text.parse().map_err(|error: String| match error.split_once("; ") {
        Some((_, must)) => must.to_string(),
        None => error,
    })
}

impl PolicyArgs {
    /// Applies the flags to the policy `own`.
    pub fn over(&self, own: Policy) -> Policy {
        Policy {
            interval: self.interval.or(own.interval),
            top_k: self.routing_top_k.map_or(own.top_k, |k| k.0),
            retention: self.retention.unwrap_or(own.retention),
            storage: self.storage.unwrap_or(own.storage),
            placement: self.placement.unwrap_or(own.placement),
        }
    }
}
