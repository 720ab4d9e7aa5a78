//! The routes, and what holds for all of them: keys, limits, failures that stay failures of one request.

use std::net::SocketAddr;
use std::panic::AssertUnwindSafe;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::body::Body;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, Request, State};
use axum::http::{HeaderValue, Method, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use futures_util::FutureExt;
use march::engine::Engine;
use serde_json::{Value, json};
use subtle::ConstantTimeEq;
use tokio::net::TcpListener;

use crate::chat::Template;
use crate::error::ApiError;
use crate::job::Jobs;
use crate::metrics::Metrics;
use crate::page;
use crate::request::{self, Allowed};
use crate::respond::{chat_completions, completions};
use crate::scheduler::{Loaded, Share, start};
use crate::sessions::{Sessions, Wanted};

/// How a server is set up.
#[derive(Clone, Debug)]
pub struct Options {
    /// Where it listens.
    pub addr: SocketAddr,
    /// The model's name.
    pub name: String,
    /// The checkpoint's folder, which may have a chat template.
    pub folder: PathBuf,
    /// The key that clients must send, if any.
    pub api_key: Option<String>,
    /// The web page that may use the server from a browser, if any; `*` for all.
    pub cors: Option<String>,
    /// The largest body of a request, in bytes.
    pub body_bytes: usize,
    /// How long a request may take, from its arrival.
    pub request_time: Duration,
    /// The folder for conversations; without it, they are only in memory.
    pub sessions: Option<PathBuf>,
    /// What requests may ask for.
    pub allowed: Allowed,
    /// How requests share the model.
    pub share: Share,
}

/// How long a client may take to send a body.
const BODY_TIME: Duration = Duration::from_secs(60);

/// How often a server looks whether it should stop.
const LOOK: Duration = Duration::from_millis(100);

/// What all requests share.
pub(crate) struct App<E: Engine> {
    pub loaded: Arc<Loaded<E>>,
    pub template: Template,
    pub options: Options,
    pub jobs: Jobs<E>,
    pub sessions: Arc<Sessions<E>>,
    pub metrics: Arc<Metrics>,
    pub answers: AtomicU64,
    pub began: u64,
}

/// Serves until `stop` says so; then no new requests are taken and those that run are finished. `ready` gets the
/// address as soon as it is open.
pub fn serve<E: Engine>(
    loaded: Loaded<E>,
    options: Options,
    stop: impl Fn() -> bool + Send + 'static,
    ready: impl FnOnce(SocketAddr),
) -> Result<(), String> {
    let addr = options.addr;
    let template = Template::of_folder(&options.folder, &loaded.tokenizer)?;
    let (loaded, metrics) = (Arc::new(loaded), Arc::new(Metrics::default()));
    let Options { sessions, name, share, .. } = &options;
    let sessions = Sessions::open(sessions.clone(), Arc::clone(&loaded), name, share.cache_bytes)?;
    let sessions = Arc::new(sessions);
    let (jobs, model) = start(Arc::clone(&loaded), options.share.clone(), Arc::clone(&metrics))
        .map_err(|error| format!("the model's thread could not start: {error}"))?;
    let app = App {
        loaded,
        template,
        options,
        jobs,
        sessions,
        metrics,
        answers: AtomicU64::new(0),
        began: seconds(),
    };
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .map_err(|error| format!("the server's threads could not start: {error}"))?;
    let served = runtime.block_on(async move {
        let listener =
            TcpListener::bind(addr).await.map_err(|error| format!("{addr}: could not listen: {error}"))?;
        ready(listener.local_addr().map_err(|error| error.to_string())?);
        let stopped = async move {
            while !stop() {
                tokio::time::sleep(LOOK).await;
            }
        };
        let served = axum::serve(listener, router(Arc::new(app))).with_graceful_shutdown(stopped);
        served.await.map_err(|error| format!("{addr}: {error}"))
    });
    // All handlers have ended, and with them all senders of jobs.
    drop(runtime);
    model.join().map_err(|_| "the model's thread failed".to_string())?;
    served
}

fn router<E: Engine>(app: Arc<App<E>>) -> Router {
    Router::new()
        .route("/v1/completions", post(completions::<E>))
        .route("/v1/chat/completions", post(chat_completions::<E>))
        .route("/v1/models", get(models::<E>))
        .route("/v1/models/{*id}", get(one_model::<E>))
        .route("/v1/sessions", get(list_sessions::<E>))
        .route("/v1/sessions/{id}", get(get_session::<E>).put(put_session::<E>).delete(delete_session::<E>))
        .route("/tokenize", post(tokenize::<E>))
        .route("/detokenize", post(detokenize::<E>))
        .route("/tokenizer_info", get(tokenizer_info::<E>))
        .route("/health", get(health::<E>))
        .route("/metrics", get(metrics::<E>))
        .route("/", get(page::index))
        .route("/page.css", get(page::style))
        .route("/page.js", get(page::script))
        .route("/openapi.json", get(page::openapi))
        .method_not_allowed_fallback(|| async {
            ApiError::new(StatusCode::METHOD_NOT_ALLOWED, "this path exists, but not with this method")
        })
        .fallback(|| async { ApiError::new(StatusCode::NOT_FOUND, "there is no such path") })
        .layer(middleware::from_fn_with_state(Arc::clone(&app), guard::<E>))
        .with_state(app)
}

/// Checks the key, adds headers, counts the answer, and turns a panic into an answer.
async fn guard<E: Engine>(State(app): State<Arc<App<E>>>, request: Request, next: Next) -> Response {
    let open = page::OPEN.contains(&request.uri().path());
    let preflight = request.method() == Method::OPTIONS && app.options.cors.is_some();
    let mut response = if preflight {
        StatusCode::NO_CONTENT.into_response()
    } else if !open && !app.permits(&request) {
        let message = "the API key is missing or wrong; send it as `Authorization: Bearer KEY`";
        ApiError::new(StatusCode::UNAUTHORIZED, message).into_response()
    } else {
        AssertUnwindSafe(next.run(request)).catch_unwind().await.unwrap_or_else(|_| {
            ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "the request failed unexpectedly")
                .into_response()
        })
    };
    if let Some(origin) = app.options.cors.as_ref().and_then(|origin| HeaderValue::from_str(origin).ok()) {
        let headers = response.headers_mut();
        headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin);
        let allowed = HeaderValue::from_static("authorization, content-type");
        headers.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, allowed);
        headers
            .insert(header::ACCESS_CONTROL_ALLOW_METHODS, HeaderValue::from_static("GET, POST, PUT, DELETE"));
    }
    app.metrics.answered(response.status().as_u16());
    response
}

impl<E: Engine> App<E> {
    fn permits(&self, request: &Request) -> bool {
        let Some(key) = &self.options.api_key else { return true };
        let given = request.headers().get(header::AUTHORIZATION).map(HeaderValue::as_bytes);
        let given = given.and_then(|given| given.strip_prefix(b"Bearer "));
        given.is_some_and(|given| given.ct_eq(key.as_bytes()).into())
    }

    /// The body of a request, which must be JSON.
    pub(crate) async fn body(&self, body: Body) -> Result<Vec<u8>, ApiError> {
        let read = axum::body::to_bytes(body, self.options.body_bytes);
        match tokio::time::timeout(BODY_TIME, read).await {
            Ok(Ok(bytes)) => Ok(bytes.to_vec()),
            Ok(Err(error)) if error.to_string().contains("length limit") => {
                let most = self.options.body_bytes;
                let message = format!("the body is larger than {most} bytes (--body-bytes)");
                Err(ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, message))
            }
            Ok(Err(error)) => Err(ApiError::key("body", format!("the body could not be read: {error}"))),
            Err(_) => Err(ApiError::new(StatusCode::REQUEST_TIMEOUT, "the body took too long to arrive")),
        }
    }

    pub(crate) fn vocabulary(&self) -> usize {
        self.loaded.model.config().vocab_size
    }
}

pub(crate) fn seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}

/// Runs work that takes a while apart from the threads that answer.
pub(crate) async fn apart<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    tokio::task::spawn_blocking(work).await.unwrap_or_else(|_| {
        Err(ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "the request failed unexpectedly"))
    })
}

pub(crate) fn broken(error: march::Error) -> ApiError {
    ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, error.to_string())
}

/// A model in OpenAI's shape. There is one.
fn model_object<E: Engine>(app: &App<E>) -> Value {
    let Options { name, allowed, .. } = &app.options;
    let Loaded { model, policy, .. } = &*app.loaded;
    json!({
        "id": name, "object": "model", "created": app.began, "owned_by": "march", "max_model_len": allowed.context,
        "march": {
            "model_type": model.config().mixer.model_type(), "parameters": model.parameter_count(),
            "policy": policy.to_string(), "routes": policy.interval.is_some(),
        },
    })
}

async fn models<E: Engine>(State(app): State<Arc<App<E>>>) -> Json<Value> {
    Json(json!({ "object": "list", "data": [model_object(&app)] }))
}

/// A model's name may contain slashes.
async fn one_model<E: Engine>(State(app): State<Arc<App<E>>>, path: Id) -> Result<Json<Value>, ApiError> {
    match path {
        Ok(Path(id)) if id == app.options.name => Ok(Json(model_object(&app))),
        Ok(Path(other)) => Err(not_here(&other, &app.options.name)),
        Err(error) => Err(ApiError::new(StatusCode::NOT_FOUND, error.body_text())),
    }
}

/// The error of a request that names another model.
pub(crate) fn not_here(other: &str, name: &str) -> ApiError {
    let message = format!("the model `{other}` is not here; the server has `{name}`");
    ApiError::new(StatusCode::NOT_FOUND, message)
}

async fn list_sessions<E: Engine>(State(app): State<Arc<App<E>>>) -> Json<Value> {
    Json(app.sessions.list())
}

/// The id in a path. One that is not UTF-8 is as wrong as one with other characters.
type Id = Result<Path<String>, PathRejection>;

fn id(id: Id) -> Result<String, ApiError> {
    id.map(|Path(id)| id).map_err(|error| ApiError::key("session", error.body_text()))
}

async fn get_session<E: Engine>(State(app): State<Arc<App<E>>>, path: Id) -> Result<Json<Value>, ApiError> {
    let id = id(path)?;
    apart(move || app.sessions.get(&id).map(Json)).await
}

async fn delete_session<E: Engine>(
    State(app): State<Arc<App<E>>>,
    path: Id,
) -> Result<Json<Value>, ApiError> {
    let id = id(path)?;
    apart(move || app.sessions.delete(&id).map(Json)).await
}

async fn put_session<E: Engine>(
    State(app): State<Arc<App<E>>>,
    path: Id,
    body: Body,
) -> Result<Response, ApiError> {
    let id = id(path)?;
    let body = app.body(body).await?;
    apart(move || {
        let policy = &app.loaded.policy;
        let wanted = if body.is_empty() { Wanted::default() } else { request::wanted(&body, policy)? };
        if let Some(policy) = &wanted.policy {
            let checked = app.loaded.model.check_policy(policy);
            checked.map_err(|error| ApiError::key("memory", error.to_string()))?;
        }
        let (new, session) = app.sessions.put(&id, wanted)?;
        Ok((if new { StatusCode::CREATED } else { StatusCode::OK }, Json(session)).into_response())
    })
    .await
}

/// A JSON object with the given keys only.
fn object(body: &[u8], known: &[&str]) -> Result<Value, ApiError> {
    let value: Value = serde_json::from_slice(body)
        .map_err(|error| ApiError::key("body", format!("the body is not JSON: {error}")))?;
    let Some(keys) = value.as_object() else {
        return Err(ApiError::key("body", "the body must be a JSON object"));
    };
    match keys.keys().find(|key| !known.contains(&key.as_str())) {
        Some(key) => Err(ApiError::key(key, format!("`{key}` is not a key of this request"))),
        None => Ok(value),
    }
}

async fn tokenize<E: Engine>(State(app): State<Arc<App<E>>>, body: Body) -> Result<Json<Value>, ApiError> {
    let body = app.body(body).await?;
    apart(move || {
        let request = object(&body, &["prompt", "add_special_tokens", "model"])?;
        let text =
            request["prompt"].as_str().ok_or_else(|| ApiError::key("prompt", "`prompt` must be a string"))?;
        let ids =
            app.loaded.tokenizer.encode(text).map_err(|error| ApiError::key("prompt", error.to_string()))?;
        Ok(Json(json!({ "count": ids.len(), "max_model_len": app.options.allowed.context, "tokens": ids })))
    })
    .await
}

async fn detokenize<E: Engine>(State(app): State<Arc<App<E>>>, body: Body) -> Result<Json<Value>, ApiError> {
    let body = app.body(body).await?;
    apart(move || {
        let request = object(&body, &["tokens", "model"])?;
        let wrong = || ApiError::key("tokens", "`tokens` must be a list of ids");
        let list = request["tokens"].as_array().ok_or_else(wrong)?;
        let ids = list.iter().map(|id| id.as_u64().and_then(|id| u32::try_from(id).ok()).ok_or_else(wrong));
        let ids = ids.collect::<Result<Vec<u32>, _>>()?;
        let text =
            app.loaded.tokenizer.decode(&ids).map_err(|error| ApiError::key("tokens", error.to_string()))?;
        Ok(Json(json!({ "prompt": text })))
    })
    .await
}

async fn tokenizer_info<E: Engine>(State(app): State<Arc<App<E>>>) -> Result<Json<Value>, ApiError> {
    let tokenizer = &app.loaded.tokenizer;
    let end = match tokenizer.end_of_text() {
        Some(id) => Some(tokenizer.decode(&[id]).map_err(broken)?),
        None => None,
    };
    Ok(Json(json!({
        "eos_token": end, "bos_token": null, "pad_token": null, "chat_template": app.template.text(),
    })))
}

async fn health<E: Engine>(State(app): State<Arc<App<E>>>) -> Json<Value> {
    Json(json!({ "status": "ok", "model": app.options.name, "waiting": app.jobs.waiting() }))
}

async fn metrics<E: Engine>(State(app): State<Arc<App<E>>>) -> impl IntoResponse {
    let kind = [(header::CONTENT_TYPE, "text/plain; version=0.0.4")];
    (kind, app.metrics.text(app.jobs.waiting(), app.sessions.size()))
}
