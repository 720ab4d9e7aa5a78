//! What browsers and tools load from the server: the page and the description of the interface. All of it is part of the
//! program.

use axum::http::{HeaderName, HeaderValue, header};
use axum::response::{IntoResponse, Response};
use march_lm::disk::EXAMPLE;

/// The page may load only what the server itself has.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; \
                      img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// The paths that need no key: they say nothing about what the server was asked.
pub const OPEN: [&str; 5] = ["/", "/page.css", "/page.js", "/openapi.json", "/health"];

fn file(kind: &'static str, text: &'static str) -> Response {
    let headers: [(HeaderName, HeaderValue); 4] = [
        (header::CONTENT_TYPE, HeaderValue::from_static(kind)),
        (header::CONTENT_SECURITY_POLICY, HeaderValue::from_static(POLICY)),
        (header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff")),
        (header::CACHE_CONTROL, HeaderValue::from_static("no-cache")),
    ];
    (headers, text).into_response()
}

/// `/`
pub async fn index() -> Response {
    file("text/html; charset=utf-8", include_str!("page/index.html"))
}

/// `/page.css`
pub async fn style() -> Response {
    file("text/css; charset=utf-8", include_str!("page/page.css"))
}

/// `/page.js`
pub async fn script() -> Response {
    file("text/javascript; charset=utf-8", include_str!("page/page.js"))
}

/// `/example.txt`, a text to ask the model inside the program about
pub fn example() -> Response {
    file("text/plain; charset=utf-8", EXAMPLE)
}

/// `/openapi.json`
pub async fn openapi() -> Response {
    file("application/json", include_str!("openapi.json"))
}
