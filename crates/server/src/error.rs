//! Errors in OpenAI's shape.

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::json;

use crate::job::{Failure, QueueRefusal};

/// An answer that says what is wrong.
#[derive(Debug)]
pub struct ApiError {
    status: StatusCode,
    message: String,
    /// The key of the request that is wrong.
    key: Option<String>,
    /// Whether the body of the request was left unread, so that the connection cannot be used again.
    unread: bool,
}

impl ApiError {
    /// An error with a status.
    pub fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Self { status, message: message.into(), key: None, unread: false }
    }

    /// A key of the request has a value that cannot be.
    pub fn key(key: &str, message: impl Into<String>) -> Self {
        Self { key: Some(key.into()), ..Self::new(StatusCode::BAD_REQUEST, message) }
    }

    /// The same error, about another key.
    pub fn of(self, key: &str) -> Self {
        Self { key: Some(key.into()), ..self }
    }

    /// The same error, of a request whose body was left unread: the client must not use the connection again.
    pub fn unread(self) -> Self {
        Self { unread: true, ..self }
    }

    /// The server has no place for another connection.
    pub fn too_many_connections() -> Self {
        Self::new(
            StatusCode::SERVICE_UNAVAILABLE,
            "the server has too many open connections; try again in a second",
        )
    }

    /// The error as OpenAI's clients expect it.
    pub fn body(&self) -> serde_json::Value {
        let kind = match self.status.as_u16() {
            401 => "authentication_error",
            403 => "permission_error",
            404 => "not_found_error",
            429 => "rate_limit_error",
            400..=499 => "invalid_request_error",
            _ => "server_error",
        };
        json!({ "error": {
            "message": self.message, "type": kind, "param": self.key, "code": self.status.as_u16(),
        } })
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.status, Json(self.body())).into_response();
        if self.status == StatusCode::TOO_MANY_REQUESTS {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
        }
        if self.unread {
            response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}

impl From<QueueRefusal> for ApiError {
    fn from(refusal: QueueRefusal) -> Self {
        match refusal {
            QueueRefusal::Full => Self::new(
                StatusCode::TOO_MANY_REQUESTS,
                "too many requests are waiting; try again in a second, or send fewer prompts in one request",
            ),
            QueueRefusal::Closing => {
                Self::new(StatusCode::SERVICE_UNAVAILABLE, "the server is shutting down")
            }
        }
    }
}

impl From<Failure> for ApiError {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::Refused(message) => Self::new(StatusCode::BAD_REQUEST, message),
            Failure::Late => Self::new(
                StatusCode::GATEWAY_TIMEOUT,
                "the request took longer than the server allows (--request-seconds); ask for fewer tokens",
            ),
            Failure::Broken(message) => Self::new(StatusCode::INTERNAL_SERVER_ERROR, message),
        }
    }
}
