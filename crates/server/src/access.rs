//! Who may use the server: clients with its key, or, if it has none, clients that are no other origin's web page.
//!
//! A browser sends requests for any page that is open in it, also to addresses that only its own machine reaches. Two
//! things tell such requests apart. `Origin` names the page that asks. `Host` names the server as the page knows it: a
//! page whose own name was made to resolve to this machine (DNS rebinding) has the right origin, but not the right name.
//! A form can be sent anywhere without asking first, but not as `application/json`.

use std::net::IpAddr;
use std::str::FromStr;

use axum::extract::Request;
use axum::http::uri::Authority;
use axum::http::{HeaderName, HeaderValue, Method, StatusCode, header};
use axum::response::Response;
use subtle::ConstantTimeEq;

use crate::error::ApiError;

/// The origin of a web page: scheme, host and port, as browsers write it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Origin(String);

impl FromStr for Origin {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || {
            format!(
                "`{text}` is not an origin; an origin is a scheme, a host and a port, such as http://localhost:3000"
            )
        };
        let (scheme, authority) = text.split_once("://").ok_or_else(wrong)?;
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'+' | b'-' | b'.');
        if scheme.is_empty() || !scheme.bytes().all(plain) {
            return Err(wrong());
        }
        let parsed: Authority = authority.parse().map_err(|_| wrong())?;
        let port = parsed.port_u16();
        // A user name, or a port that is no number.
        if authority.contains(['@', '*']) || (port.is_none() && authority != parsed.host()) {
            return Err(wrong());
        }
        let (scheme, host) = (scheme.to_ascii_lowercase(), parsed.host().to_ascii_lowercase());
        // Browsers leave out the port that the scheme implies.
        let implied = matches!((scheme.as_str(), port), ("http", Some(80)) | ("https", Some(443)));
        Ok(Self(match port.filter(|_| !implied) {
            Some(port) => format!("{scheme}://{host}:{port}"),
            None => format!("{scheme}://{host}"),
        }))
    }
}

/// Who may use a server.
#[derive(Clone, Debug, Default)]
pub struct Access {
    /// The key that clients must send. Without one, the names and origins decide.
    pub key: Option<String>,
    /// Names of the server, besides its address.
    pub host_names: Vec<String>,
    /// The web pages that may use the server from a browser, besides its own.
    pub origins: Vec<Origin>,
}

fn forbidden(message: String) -> ApiError {
    ApiError::new(StatusCode::FORBIDDEN, message)
}

impl Access {
    /// Refuses a request that reached `address` and must not be answered. `open` paths need no key.
    pub fn check(&self, request: &Request, address: IpAddr, open: bool) -> Result<(), ApiError> {
        if let Some(key) = &self.key {
            return match open || sends(request, key) {
                true => Ok(()),
                false => {
                    let message = "the API key is missing or wrong; send it as `Authorization: Bearer KEY`";
                    Err(ApiError::new(StatusCode::UNAUTHORIZED, message))
                }
            };
        }
        let host = host(request)?;
        self.check_host(&host, address)?;
        if let Some(origin) = request.headers().get(header::ORIGIN)
            && !is_own(origin, &host)
            && self.allowed(origin).is_none()
        {
            let origin = String::from_utf8_lossy(origin.as_bytes());
            return Err(forbidden(format!(
                "the web page of `{origin}` may not use this server; name its origin with --cors to allow it"
            )));
        }
        self.check_type(request)
    }

    fn check_host(&self, host: &Authority, address: IpAddr) -> Result<(), ApiError> {
        let name = host.host().trim_end_matches('.');
        let literal = name.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>();
        let is_address = literal.is_ok_and(|literal| literal.to_canonical() == address);
        let is_local = address.is_loopback() && name.eq_ignore_ascii_case("localhost");
        if is_address || is_local || self.host_names.iter().any(|own| own.eq_ignore_ascii_case(name)) {
            return Ok(());
        }
        Err(forbidden(format!(
            "the request is for the host `{host}`, which is not a name of this server; use its address, {address}, or \
             start it with --host-name {name}"
        )))
    }

    fn check_type(&self, request: &Request) -> Result<(), ApiError> {
        let length = request.headers().get(header::CONTENT_LENGTH).map(HeaderValue::as_bytes);
        let empty = length.is_none_or(|length| length == b"0")
            && !request.headers().contains_key(header::TRANSFER_ENCODING);
        let may_be_without = request.method() == Method::PUT && empty;
        if !matches!(*request.method(), Method::POST | Method::PUT) || may_be_without {
            return Ok(());
        }
        let given = request.headers().get(header::CONTENT_TYPE).and_then(|given| given.to_str().ok());
        let essence = given.unwrap_or_default().split(';').next().unwrap_or_default().trim();
        if essence.eq_ignore_ascii_case("application/json") {
            return Ok(());
        }
        let message = "the body must be JSON; send the header `content-type: application/json`";
        Err(ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, message))
    }

    /// The origin of a request's page, if it is one of those that may use the server.
    pub fn allowed(&self, origin: &HeaderValue) -> Option<HeaderValue> {
        let given = origin.to_str().ok()?;
        self.origins.iter().any(|own| own.0 == given).then(|| origin.clone())
    }

    /// Tells a browser that the page at `origin` may read an answer, if it may.
    pub fn add_headers(&self, origin: Option<&HeaderValue>, response: &mut Response) {
        if self.origins.is_empty() {
            return;
        }
        let headers = response.headers_mut();
        headers.append(header::VARY, HeaderValue::from_static("origin"));
        let Some(origin) = origin.and_then(|origin| self.allowed(origin)) else { return };
        let values: [(HeaderName, HeaderValue); 3] = [
            (header::ACCESS_CONTROL_ALLOW_ORIGIN, origin),
            (header::ACCESS_CONTROL_ALLOW_HEADERS, HeaderValue::from_static("authorization, content-type")),
            (header::ACCESS_CONTROL_ALLOW_METHODS, HeaderValue::from_static("GET, POST, PUT, DELETE")),
        ];
        headers.extend(values);
    }
}

/// Whether a request sends the key.
fn sends(request: &Request, key: &str) -> bool {
    let given = request.headers().get(header::AUTHORIZATION).map(HeaderValue::as_bytes);
    let Some((scheme, given)) = given.and_then(|given| given.split_at_checked("Bearer ".len())) else {
        return false;
    };
    scheme.eq_ignore_ascii_case(b"Bearer ") && given.trim_ascii().ct_eq(key.as_bytes()).into()
}

/// The host that a request is for.
fn host(request: &Request) -> Result<Authority, ApiError> {
    let mut given = request.headers().get_all(header::HOST).iter();
    let host = match (given.next(), given.next()) {
        (Some(host), None) => host.to_str().ok().and_then(|host| host.parse().ok()),
        _ => None,
    };
    // What is parsed as a host may be followed by anything that could be a port.
    let is_whole = |host: &Authority| {
        let port = host.as_str().strip_prefix(host.host()).unwrap_or("@");
        port.is_empty() || port.strip_prefix(':').is_some_and(|port| port.parse::<u16>().is_ok())
    };
    let host = host.filter(is_whole);
    host.ok_or_else(|| {
        ApiError::new(
            StatusCode::BAD_REQUEST,
            "the request must have one `Host` header: the server's address",
        )
    })
}

/// Whether an origin is the server's own page: the host and the port that the request is for.
fn is_own(origin: &HeaderValue, host: &Authority) -> bool {
    let origin = origin.to_str().ok().and_then(|origin| origin.split_once("://"));
    origin.is_some_and(|(_, own)| own.eq_ignore_ascii_case(host.as_str()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn origins_are_a_scheme_a_host_and_a_port() {
        let written = |text: &str| text.parse::<Origin>().map(|origin| origin.0);
        for (text, expected) in [
            ("http://localhost:3000", "http://localhost:3000"),
            ("HTTPS://App.Example", "https://app.example"),
            ("https://app.example:443", "https://app.example"),
            ("http://[::1]:8080", "http://[::1]:8080"),
        ] {
            assert_eq!(written(text).as_deref(), Ok(expected));
        }
        for wrong in [
            "*",
            "localhost",
            "http://",
            "http://x/",
            "http://x/path",
            "http://a@x",
            "http://*",
            "http://x:y",
            "://x",
        ] {
            assert!(written(wrong).is_err(), "{wrong}");
        }
    }
}
