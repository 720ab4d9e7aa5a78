//! A policy as a line of text: `interval=512 top-k=4 retention=fenwick placement=adaptive:32 storage=int8`.

use std::fmt;
use std::str::FromStr;

use super::{Placement, Policy, Retention, Storage};
use crate::error::{Error, Result};

impl Policy {
    /// This policy with the changes in `settings`: entries `name=value`, separated by spaces, with the names shown
    /// above, each at most once. Settings that are not named stay unchanged.
    pub fn with(&self, settings: &str) -> Result<Self> {
        let (mut policy, mut named) = (self.clone(), Vec::new());
        for setting in settings.split_whitespace() {
            let refuse = |why: String| Error::Request(format!("policy `{settings}`: {why}"));
            let Some((name, value)) = setting.split_once('=') else {
                return Err(refuse(format!("`{setting}` is not of the form `name=value`")));
            };
            if named.contains(&name) {
                return Err(refuse(format!("`{name}` is given twice; give it once")));
            }
            named.push(name);
            policy.set(name, value).map_err(|why| refuse(format!("`{name}` {why}")))?;
        }
        Ok(policy)
    }

    fn set(&mut self, name: &str, value: &str) -> std::result::Result<(), String> {
        match name {
            "interval" => self.interval = Some(above_zero(value, "")?),
            "top-k" if value == "dense" => self.top_k = None,
            "top-k" => self.top_k = Some(above_zero(value, ", or `dense`")?),
            "retention" => self.retention = Retention::from_str(value)?,
            "placement" => self.placement = Placement::from_str(value)?,
            "storage" => self.storage = Storage::from_str(value)?,
            _ => {
                return Err("is not a setting; the settings are `interval`, `top-k`, `retention`, \
                            `placement`, `storage`"
                    .into());
            }
        }
        Ok(())
    }
}

fn above_zero(value: &str, or: &str) -> std::result::Result<usize, String> {
    let number = value.parse().ok().filter(|&number| number > 0);
    number.ok_or_else(|| format!("is `{value}`; it must be a whole number above 0{or}"))
}

/// Writes interval and routing, and the other settings only where they differ from the default.
impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { interval, top_k, retention, placement, storage } = self;
        match (interval, top_k) {
            (None, _) => return f.write_str("no anchors"),
            (Some(interval), Some(k)) => write!(f, "interval={interval} top-k={k}")?,
            (Some(interval), None) => write!(f, "interval={interval} top-k=dense")?,
        }
        if *retention != Retention::default() {
            write!(f, " retention={retention}")?;
        }
        if *placement != Placement::default() {
            write!(f, " placement={placement}")?;
        }
        if *storage != Storage::default() {
            write!(f, " storage={storage}")?;
        }
        Ok(())
    }
}
