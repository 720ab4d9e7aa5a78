//! Flags that change how anchors are placed, kept and read.

use std::str::FromStr;

use clap::Args;
use march::anchors::{Policy, Retention};

/// Anchors, where they are to differ from what the checkpoint was made for.
#[derive(Args, Clone)]
pub struct PolicyArgs {
    /// Text tokens from one anchor to the next [default: the checkpoint's anchor_interval]
    #[arg(long, value_name = "N")]
    interval: Option<usize>,
    /// How many anchors a token reads: a number, or `dense` for all that it sees [default: the checkpoint's]
    #[arg(long, value_name = "K|dense")]
    routing_top_k: Option<TopK>,
    /// Which anchors are kept: `all`, or `fenwick` for a logarithmic number of them [default: all]
    #[arg(long, value_name = "all|fenwick", value_parser = retention)]
    retention: Option<Retention>,
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

fn retention(text: &str) -> Result<Retention, String> {
    text.parse().map_err(|_| "it must be `all` or `fenwick`".to_string())
}

impl PolicyArgs {
    /// `own` with what the flags change.
    pub fn over(&self, own: Policy) -> Policy {
        Policy {
            interval: self.interval.or(own.interval),
            top_k: self.routing_top_k.map_or(own.top_k, |k| k.0),
            retention: self.retention.unwrap_or(own.retention),
        }
    }
}
