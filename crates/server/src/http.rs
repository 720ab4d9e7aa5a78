//! The routes, and what holds for all of them: keys, limits, failures that stay failures of one request.

use std::borrow::Cow;
use std::net::SocketAddr;
use std::ops::Deref;
use std::panic::AssertUnwindSafe;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::body::{Body, HttpBody};
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, Request, State};
use axum::http::{Method, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Extension, Json, Router};
use futures_util::{FutureExt, StreamExt};
use march_lm::Pipeline;
use march_lm::disk::is_built_in;
use serde::Serialize;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::access::Access;
use crate::body::{self, Keys, ListError};
use crate::chat::Template;
use crate::connection::{Connection, ConnectionLimits, accept};
use crate::error::ApiError;
use crate::job::Jobs;
use crate::metrics::Metrics;
use crate::page;
use crate::request::{self, RequestLimits};
use crate::respond::{chat_completions, completions};
use crate::scheduler::{LoadedModel, SchedulerLimits, start};
use crate::sessions::{SessionRequest, Sessions};

/// How a server is set up.
#[derive(Clone, Debug)]
pub struct Options {
    /// Where it listens.
    pub addr: SocketAddr,
    /// The model's name.
    pub name: String,
    /// The checkpoint's folder, which may have a chat template.
    pub folder: PathBuf,
    /// Who may use it.
    pub access: Access,
    /// What connections may take.
    pub connections: ConnectionLimits,
    /// The largest body of a request, in bytes.
    pub body_bytes: usize,
    /// How long a request may take, from its arrival.
    pub request_time: Duration,
    /// The folder for conversations; without it, they are only in memory.
    pub sessions: Option<PathBuf>,
    /// What requests may ask for.
    pub allowed: RequestLimits,
    /// How requests share the model.
    pub scheduler: SchedulerLimits,
}

/// How long a client may take to send a body.
const BODY_TIME: Duration = Duration::from_secs(60);

/// Bodies up to this size are always read; how many larger ones at once is limited by their bytes.
const SMALL_BODY: usize = 64 << 10;

/// How many bodies of the largest size are in memory at once.
const LARGE_BODIES: usize = 2;

/// Bytes of memory for bodies are handed out in pieces of this size.
const SHARE: usize = 64 << 10;

/// How long work that is not a request may still take when the server stops.
const LAST_WORK: Duration = Duration::from_secs(10);

/// How often the server checks whether it should stop.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// What all requests share.
pub(crate) struct App {
    pub loaded: Arc<LoadedModel>,
    pub template: Template,
    pub options: Options,
    pub jobs: Arc<Jobs>,
    pub sessions: Arc<Sessions>,
    pub metrics: Arc<Metrics>,
    pub answers: AtomicU64,
    pub began: u64,
    /// Pieces of memory for large bodies that are free.
    bodies: Arc<Semaphore>,
}

/// The body of a request, and its share of the memory for bodies.
pub(crate) struct ReceivedBody {
    bytes: Vec<u8>,
    _share: Option<OwnedSemaphorePermit>,
}

impl Deref for ReceivedBody {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes
    }
}

/// Serves until `stop` says so; then no new requests are taken and those that run are finished. `ready` gets the
/// address as soon as it is open.
pub fn serve(
    pipeline: Pipeline,
    options: Options,
    stop: impl Fn() -> bool + Send + 'static,
    ready: impl FnOnce(SocketAddr),
) -> Result<(), String> {
    let addr = options.addr;
    let template = Template::of_model(&options.folder, &pipeline)?;
    let tag = pipeline.tag().map_err(|error| error.to_string())?;
    let (loaded, metrics) = (Arc::new(LoadedModel { pipeline, tag }), Arc::new(Metrics::default()));
    let Options { sessions, name, scheduler, .. } = &options;
    let sessions = Sessions::open(sessions.clone(), Arc::clone(&loaded), name, scheduler.cache_bytes)?;
    let sessions = Arc::new(sessions);
    let (jobs, model) = start(Arc::clone(&loaded), options.scheduler.clone(), Arc::clone(&metrics))
        .map_err(|error| format!("the model's thread could not start: {error}"))?;
    let app = App {
        loaded,
        template,
        jobs,
        sessions,
        metrics,
        answers: AtomicU64::new(0),
        began: seconds(),
        bodies: Arc::new(Semaphore::new(LARGE_BODIES * options.body_bytes.div_ceil(SHARE))),
        options,
    };
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .map_err(|error| format!("the server's threads could not start: {error}"))?;
    let app = Arc::new(app);
    let served = runtime.block_on(async {
        let listener =
            TcpListener::bind(addr).await.map_err(|error| format!("{addr}: cannot listen there: {error}"))?;
        ready(listener.local_addr().map_err(|error| error.to_string())?);
        let stopped = async move {
            while !stop() {
                tokio::time::sleep(POLL_INTERVAL).await;
            }
        };
        accept(listener, router(Arc::clone(&app)), &app.options.connections, stopped).await;
        Ok(())
    });
    // All connections have ended, and with them all requests.
    app.jobs.close();
    runtime.shutdown_timeout(LAST_WORK);
    model.join().map_err(|_| "the model's thread failed".to_string())?;
    served
}

fn router(app: Arc<App>) -> Router {
    Router::new()
        .route("/v1/completions", post(completions))
        .route("/v1/chat/completions", post(chat_completions))
        .route("/v1/models", get(models))
        .route("/v1/models/{*id}", get(one_model))
        .route("/v1/sessions", get(list_sessions))
        .route("/v1/sessions/{id}", get(get_session).put(put_session).delete(delete_session))
        .route("/tokenize", post(tokenize))
        .route("/detokenize", post(detokenize))
        .route("/tokenizer_info", get(tokenizer_info))
        .route("/health", get(health))
        .route("/metrics", get(metrics))
        .route("/", get(page::index))
        .route("/page.css", get(page::style))
        .route("/page.js", get(page::script))
        .route("/openapi.json", get(page::openapi))
        .route("/example.txt", get(example))
        .method_not_allowed_fallback(|| async {
            ApiError::new(StatusCode::METHOD_NOT_ALLOWED, "this path exists, but not with this method")
        })
        .fallback(|| async { ApiError::new(StatusCode::NOT_FOUND, "there is no such path") })
        .layer(middleware::from_fn_with_state(Arc::clone(&app), guard))
        .with_state(app)
}

/// Checks who asks, adds headers, counts the answer, and turns a panic into an answer.
async fn guard(
    State(app): State<Arc<App>>,
    Extension(connection): Extension<Arc<Connection>>,
    request: Request,
    next: Next,
) -> Response {
    connection.begin(&request);
    let access = &app.options.access;
    let open = page::OPEN.contains(&request.uri().path());
    let origin = request.headers().get(header::ORIGIN).cloned();
    let mut response = if request.method() == Method::OPTIONS && origin.is_some() {
        // A browser asks whether a page may use the server, before it sends the page's request.
        match origin.as_ref().and_then(|origin| access.allowed(origin)) {
            Some(_) => StatusCode::NO_CONTENT.into_response(),
            None => {
                ApiError::new(StatusCode::FORBIDDEN, "this web page may not use this server").into_response()
            }
        }
    } else if let Err(error) = access.check(&request, connection.address(), open) {
        error.unread().into_response()
    } else {
        AssertUnwindSafe(next.run(request)).catch_unwind().await.unwrap_or_else(|_| {
            ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "the request failed unexpectedly")
                .into_response()
        })
    };
    access.add_headers(origin.as_ref(), &mut response);
    app.metrics.answered(response.status().as_u16());
    connection.answer(response)
}

impl App {
    /// The body of a request. A large one is refused while others take all the memory for bodies. It takes memory as it
    /// arrives: an announced size costs a client nothing.
    pub(crate) async fn body(&self, body: Body) -> Result<ReceivedBody, ApiError> {
        let most = self.options.body_bytes;
        if body.size_hint().lower() > most as u64 {
            return Err(too_large(most));
        }
        let receive = async {
            let (mut bytes, mut share, mut frames) = (Vec::new(), None, body.into_data_stream());
            while let Some(frame) = frames.next().await {
                let frame = frame
                    .map_err(|error| ApiError::key("body", format!("the body could not be read: {error}")))?;
                if bytes.len() + frame.len() > most {
                    return Err(too_large(most));
                }
                bytes.extend_from_slice(&frame);
                self.admit(bytes.len(), &mut share)?;
            }
            Ok(ReceivedBody { bytes, _share: share })
        };
        tokio::time::timeout(BODY_TIME, receive).await.unwrap_or_else(|_| {
            Err(ApiError::new(StatusCode::REQUEST_TIMEOUT, "the body took too long to arrive").unread())
        })
    }

    /// Takes the share of a body of which so many bytes have arrived.
    fn admit(&self, bytes: usize, share: &mut Option<OwnedSemaphorePermit>) -> Result<(), ApiError> {
        let missing = bytes.saturating_sub(SMALL_BODY).div_ceil(SHARE)
            - share.as_ref().map_or(0, OwnedSemaphorePermit::num_permits);
        if missing == 0 {
            return Ok(());
        }
        let missing = u32::try_from(missing).unwrap_or(u32::MAX);
        let more = Arc::clone(&self.bodies).try_acquire_many_owned(missing).map_err(|_| {
            let message = "the server is reading other large bodies; try again in a second";
            ApiError::new(StatusCode::TOO_MANY_REQUESTS, message).unread()
        })?;
        match share {
            Some(share) => share.merge(more),
            None => *share = Some(more),
        }
        Ok(())
    }

    pub(crate) fn vocabulary(&self) -> usize {
        self.loaded.model().config().vocab_size
    }
}

fn too_large(most: usize) -> ApiError {
    let message = format!("the body is larger than {most} bytes (--body-bytes)");
    ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, message).unread()
}

pub(crate) fn seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}

/// Runs work that takes a while on a thread of its own, so that it does not hold up the threads that answer.
pub(crate) async fn spawn_blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    tokio::task::spawn_blocking(work).await.unwrap_or_else(|_| {
        Err(ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "the request failed unexpectedly"))
    })
}

pub(crate) fn broken(error: march_lm::Error) -> ApiError {
    ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, error.to_string())
}

/// A model in OpenAI's shape. There is one.
fn model_object(app: &App) -> Value {
    let Options { name, allowed, .. } = &app.options;
    let (model, policy) = (app.loaded.model(), app.loaded.policy());
    json!({
        "id": name, "object": "model", "created": app.began, "owned_by": "march", "max_model_len": allowed.context,
        "march": {
            "model_type": model.config().mixer.model_type(), "parameters": model.parameter_count(),
            "policy": policy.to_string(), "routes": policy.interval.is_some(),
            "example": is_built_in(&app.options.folder),
        },
    })
}

/// A text to ask the model inside the program about.
async fn example(State(app): State<Arc<App>>) -> Result<Response, ApiError> {
    match is_built_in(&app.options.folder) {
        true => Ok(page::example()),
        false => Err(ApiError::new(StatusCode::NOT_FOUND, "this model has no example")),
    }
}

async fn models(State(app): State<Arc<App>>) -> Json<Value> {
    Json(json!({ "object": "list", "data": [model_object(&app)] }))
}

/// A model's name may contain slashes.
async fn one_model(State(app): State<Arc<App>>, path: Id) -> Result<Json<Value>, ApiError> {
    match path {
        Ok(Path(id)) if id == app.options.name => Ok(Json(model_object(&app))),
        Ok(Path(other)) => Err(model_not_found(&other, &app.options.name)),
        Err(error) => Err(ApiError::new(StatusCode::NOT_FOUND, error.body_text())),
    }
}

/// The error of a request that names another model.
pub(crate) fn model_not_found(other: &str, name: &str) -> ApiError {
    let message = format!("the model `{other}` was not found; this server serves `{name}`");
    ApiError::new(StatusCode::NOT_FOUND, message)
}

async fn list_sessions(State(app): State<Arc<App>>) -> Json<Value> {
    Json(app.sessions.list())
}

/// The id in a path. One that is not UTF-8 is as wrong as one with other characters.
type Id = Result<Path<String>, PathRejection>;

fn id(id: Id) -> Result<String, ApiError> {
    id.map(|Path(id)| id).map_err(|error| ApiError::key("session", error.body_text()))
}

async fn get_session(State(app): State<Arc<App>>, path: Id) -> Result<Json<Value>, ApiError> {
    let id = id(path)?;
    spawn_blocking(move || app.sessions.get(&id).map(Json)).await
}

async fn delete_session(State(app): State<Arc<App>>, path: Id) -> Result<Json<Value>, ApiError> {
    let id = id(path)?;
    spawn_blocking(move || app.sessions.delete(&id).map(Json)).await
}

async fn put_session(State(app): State<Arc<App>>, path: Id, body: Body) -> Result<Response, ApiError> {
    let id = id(path)?;
    let body = app.body(body).await?;
    spawn_blocking(move || {
        let policy = app.loaded.policy();
        let request = if body.is_empty() {
            SessionRequest::default()
        } else {
            request::session_request(&body, policy)?
        };
        if let Some(policy) = &request.policy {
            let checked = app.loaded.model().check_policy(policy);
            checked.map_err(|error| ApiError::key("memory", error.to_string()))?;
        }
        let (new, session) = app.sessions.put(&id, request)?;
        Ok((if new { StatusCode::CREATED } else { StatusCode::OK }, Json(session)).into_response())
    })
    .await
}

/// The answer of `/tokenize`. It may be long: ids as JSON values would take 16 times their bytes.
#[derive(Serialize)]
struct TokenizeResponse {
    count: usize,
    max_model_len: usize,
    tokens: Vec<u32>,
}

async fn tokenize(State(app): State<Arc<App>>, body: Body) -> Result<Response, ApiError> {
    let body = app.body(body).await?;
    spawn_blocking(move || {
        let mut keys = Keys::of_body(&body)?;
        let text = keys.raw("prompt").and_then(|text| serde_json::from_str::<Cow<'_, str>>(text).ok());
        let text = text.ok_or_else(|| ApiError::key("prompt", "`prompt` must be a string"))?;
        // Neither changes the answer.
        keys.take("add_special_tokens")?;
        keys.take("model")?;
        keys.end(|_, _| Ok(false))?;
        let ids = app
            .loaded
            .tokenizer()
            .encode(&text)
            .map_err(|error| ApiError::key("prompt", error.to_string()))?;
        let (count, max_model_len) = (ids.len(), app.options.allowed.context);
        // Written here, while the body still has its share of the memory.
        Ok(Json(TokenizeResponse { count, max_model_len, tokens: ids }).into_response())
    })
    .await
}

async fn detokenize(State(app): State<Arc<App>>, body: Body) -> Result<Json<Value>, ApiError> {
    let body = app.body(body).await?;
    spawn_blocking(move || {
        let mut keys = Keys::of_body(&body)?;
        let most = app.options.allowed.context;
        let ids = keys.raw("tokens").ok_or(ListError::Entry).and_then(|text| body::list::<u32>(text, most));
        let ids = ids.map_err(|error| match error {
            ListError::Entry => ApiError::key("tokens", "`tokens` must be a list of ids"),
            ListError::Long => ApiError::key(
                "tokens",
                format!("`tokens` has more than {most} ids, the server's context (--context)"),
            ),
        })?;
        keys.take("model")?;
        keys.end(|_, _| Ok(false))?;
        let text = app
            .loaded
            .tokenizer()
            .decode_checked(&ids)
            .map_err(|error| ApiError::key("tokens", error.to_string()))?;
        Ok(Json(json!({ "prompt": text })))
    })
    .await
}

async fn tokenizer_info(State(app): State<Arc<App>>) -> Result<Json<Value>, ApiError> {
    let tokenizer = app.loaded.tokenizer();
    let end = match tokenizer.end_of_text() {
        Some(id) => Some(tokenizer.decode(&[id]).map_err(broken)?),
        None => None,
    };
    Ok(Json(json!({
        "eos_token": end, "bos_token": null, "pad_token": null, "chat_template": app.template.text(),
    })))
}

async fn health(State(app): State<Arc<App>>) -> Json<Value> {
    Json(json!({ "status": "ok", "model": app.options.name, "waiting": app.jobs.waiting() }))
}

async fn metrics(State(app): State<Arc<App>>) -> impl IntoResponse {
    let kind = [(header::CONTENT_TYPE, "text/plain; version=0.0.4")];
    (kind, app.metrics.text(app.jobs.waiting(), app.sessions.size()))
}
