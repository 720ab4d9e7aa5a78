//! The address that a server listens at: a host name or an IP address, and a port.

use std::net::{SocketAddr, ToSocketAddrs};

/// A host as the user named it, and the address that it stands for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Address {
    /// The name or IP address without the port, as in the header `Host`; an IPv6 address is in brackets.
    pub host: String,
    /// The address to listen at.
    pub addr: SocketAddr,
}

/// Reads `HOST:PORT` and looks up the host. Of several addresses, one of this machine alone comes first, then IPv4.
pub fn address(text: &str) -> Result<Address, String> {
    let form = "it must be HOST:PORT, such as localhost:8080, 127.0.0.1:8080 or [::1]:8080";
    let Some((host, port)) = text.rsplit_once(':').filter(|(host, _)| !host.is_empty()) else {
        return Err(form.into());
    };
    if port.parse::<u16>().is_err() {
        return Err(format!("the port `{port}` is not a number from 0 to 65535; {form}"));
    }
    let bracketed = host.starts_with('[') && host.ends_with(']');
    if host.contains(':') && !bracketed {
        return Err(format!("an IPv6 address is written in brackets, as in [::1]:8080; {form}"));
    }
    let found = text.to_socket_addrs().map_err(|error| {
        format!("the host `{host}` is not known ({error}); check its spelling, or give an IP address")
    })?;
    let best = found.min_by_key(|addr| (!addr.ip().is_loopback(), !addr.is_ipv4()));
    let addr = best.ok_or_else(|| format!("the host `{host}` has no address; give an IP address"))?;
    Ok(Address { host: host.into(), addr })
}
