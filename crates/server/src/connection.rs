//! Connections: how many there are, how long a client may hang, and how they end when the server stops.
//!
//! A task per connection drives hyper and watches the client beside it. Nothing that a client does, or stops doing, may
//! hold a place for longer than a stated time: a header that does not end, a connection without requests, an answer that
//! is not read. A client that closes its sending side is either gone or waits for its answer; the two look alike until
//! something is sent to it, so it gets `100 Continue`, which HTTP allows before any answer: a system whose client is gone
//! refuses it.

use std::io;
use std::mem::MaybeUninit;
use std::net::{IpAddr, Shutdown, SocketAddr};
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::{Body, HttpBody};
use axum::extract::Request;
use axum::http::Version;
use axum::response::Response;
use hyper::body::{Bytes, Frame, Incoming, SizeHint};
use hyper_util::rt::TokioIo;
use socket2::SockRef;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;
use tower_service::Service;

use crate::error::ApiError;

/// What connections may take.
#[derive(Clone, Debug)]
pub struct ConnectionLimits {
    /// The most connections at once.
    pub connections: usize,
    /// How long a client may take to send the header of a request.
    pub header: Duration,
    /// How long a connection may stay open without a request, or without reading its answer.
    pub idle: Duration,
    /// How long running requests may take when the server stops.
    pub drain: Duration,
}

/// How often the client of a running request is looked at.
const TICK: Duration = Duration::from_millis(500);

/// How long a connection without a request may still send what is buffered when the server stops.
const GRACE: Duration = Duration::from_millis(500);

/// File descriptors that connections leave to everything else.
const SPARE_FILES: usize = 48;

/// Refused connections that may still read why.
const REFUSALS: usize = 16;

/// How often the log repeats why connections are refused.
const REPEAT: Duration = Duration::from_secs(10);

const CONTINUE: &[u8] = b"HTTP/1.1 100 Continue\r\n\r\n";

const TIMEOUT: &[u8] = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n";

/// A client's connection, as its requests see it.
pub struct Connection {
    socket: TcpStream,
    local: SocketAddr,
    state: Mutex<State>,
}

struct State {
    phase: Phase,
    /// Since when the client does not read what is sent to it.
    blocked: Option<Instant>,
}

#[derive(Clone, Copy)]
enum Phase {
    /// No request, since then.
    Idle(Instant),
    /// The header of a request is arriving, since then.
    Header(Instant),
    /// A request is being handled; nothing of its answer has been sent. Whether `100 Continue` may be sent.
    Handling { may_probe: bool },
    /// An answer is being sent.
    Answering,
}

impl Connection {
    /// The address that the client reached.
    pub fn address(&self) -> IpAddr {
        self.local.ip().to_canonical()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Every change is a single assignment.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set(&self, phase: Phase) {
        self.state().phase = phase;
    }

    /// Notes that a request is being handled.
    pub fn begin(&self, request: &Request) {
        self.set(Phase::Handling { may_probe: request.version() == Version::HTTP_11 });
    }

    /// Notes that an answer is ready. The connection counts as idle when its body has been sent.
    pub fn answer(self: &Arc<Self>, response: Response) -> Response {
        self.set(Phase::Answering);
        let connection = Arc::clone(self);
        response.map(|body| Body::new(Answer { body, connection }))
    }

    /// Whether a request is being handled, or the client still has to read an answer.
    fn is_busy(&self) -> bool {
        let state = self.state();
        state.blocked.is_some() || matches!(state.phase, Phase::Handling { .. } | Phase::Answering)
    }

    /// Waits until the client is gone or has used up its time.
    async fn expire(&self, limits: &ConnectionLimits) {
        let mut half_closed = false;
        loop {
            tokio::time::sleep(TICK.min(limits.header).min(limits.idle)).await;
            let state = self.state();
            let over = |since: Instant, limit: Duration| since.elapsed() >= limit;
            if state.blocked.is_some_and(|since| over(since, limits.idle)) {
                return;
            }
            match state.phase {
                Phase::Idle(since) if over(since, limits.idle) => return,
                Phase::Header(since) if over(since, limits.header) => {
                    // Nothing is lost if the client does not read it.
                    let _ = self.socket.try_write(TIMEOUT);
                    return;
                }
                Phase::Handling { may_probe } => {
                    // The request's own answer is not sent while the state is locked.
                    if !half_closed
                        && matches!(SockRef::from(&self.socket).peek(&mut [MaybeUninit::uninit()]), Ok(0))
                    {
                        half_closed = true;
                        // A client of HTTP/1.0 knows no such answer, and keeps its place until its own is sent.
                        if may_probe && self.socket.try_write(CONTINUE).is_err() {
                            return;
                        }
                    } else if half_closed && !matches!(self.socket.take_error(), Ok(None)) {
                        return;
                    }
                }
                _ => half_closed = false,
            }
        }
    }
}

/// The body of an answer; when it is dropped, the connection waits for the next request.
struct Answer {
    body: Body,
    connection: Arc<Connection>,
}

impl HttpBody for Answer {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl Drop for Answer {
    fn drop(&mut self) {
        self.connection.set(Phase::Idle(Instant::now()));
    }
}

/// A connection's bytes, as hyper reads and writes them.
struct Stream(Arc<Connection>);

impl AsyncRead for Stream {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let connection = &self.0;
        loop {
            ready!(connection.socket.poll_read_ready(context))?;
            match connection.socket.try_read(buffer.initialize_unfilled()) {
                Ok(count) => {
                    buffer.advance(count);
                    let mut state = connection.state();
                    if let (Phase::Idle(_), 1..) = (state.phase, count) {
                        state.phase = Phase::Header(Instant::now());
                    }
                    return Poll::Ready(Ok(()));
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
    }
}

impl AsyncWrite for Stream {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let Connection { socket, .. } = &*self.0;
        loop {
            let Poll::Ready(ready) = socket.poll_write_ready(context) else {
                self.0.state().blocked.get_or_insert_with(Instant::now);
                return Poll::Pending;
            };
            ready?;
            match socket.try_write(bytes) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                written => {
                    let mut state = self.0.state();
                    state.blocked = None;
                    // An answer that is complete here may take long to be read.
                    if let Phase::Idle(since) = &mut state.phase {
                        *since = Instant::now();
                    }
                    return Poll::Ready(written);
                }
            }
        }
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(SockRef::from(&self.0.socket).shutdown(Shutdown::Write))
    }
}

/// Accepts connections until `stop` ends; then finishes the requests that run, as far as the limit allows.
pub async fn accept(
    listener: TcpListener,
    router: Router,
    limits: &ConnectionLimits,
    stop: impl Future<Output = ()>,
) {
    let mut stop = pin!(stop);
    let (stopping, stopped) = watch::channel(false);
    let (most, why) = most_connections(limits.connections);
    let (places, refusals) = (Arc::new(Semaphore::new(most)), Arc::new(Semaphore::new(REFUSALS)));
    let mut connections = JoinSet::new();
    let mut warned: Option<Instant> = None;
    let mut warn = |message: String| {
        if warned.is_none_or(|at| at.elapsed() >= REPEAT) {
            warned = Some(Instant::now());
            tracing::warn!("{message}");
        }
    };
    loop {
        let accepted = tokio::select! {
            () = &mut stop => break,
            // Tasks that have ended are forgotten.
            Some(_) = connections.join_next() => continue,
            accepted = listener.accept() => accepted,
        };
        let socket = match accepted {
            Ok((socket, _)) => socket,
            Err(error) => {
                warn(format!("a connection could not be accepted: {error}"));
                tokio::time::sleep(TICK).await;
                continue;
            }
        };
        match Arc::clone(&places).try_acquire_owned() {
            Ok(place) => {
                let (router, limits, stopped) = (router.clone(), limits.clone(), stopped.clone());
                connections.spawn(async move {
                    serve(socket, router, &limits, stopped).await;
                    drop(place);
                });
            }
            Err(_) => {
                warn(format!("{most} connections are open, as many as {why}; others are refused"));
                if let Ok(place) = Arc::clone(&refusals).try_acquire_owned() {
                    connections.spawn(async move {
                        refuse(socket).await;
                        drop(place);
                    });
                }
            }
        }
    }
    drop(listener);
    stopping.send_replace(true);
    let ended = async { while connections.join_next().await.is_some() {} };
    if tokio::time::timeout(limits.drain, ended).await.is_err() {
        let seconds = limits.drain.as_secs();
        tracing::warn!(
            "{} requests were still running after {seconds} s (--drain-seconds)",
            connections.len()
        );
        connections.shutdown().await;
    }
}

/// The most connections, and what sets that limit.
fn most_connections(asked: usize) -> (usize, &'static str) {
    #[cfg(unix)]
    {
        let files = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
        let files = files.map_or(usize::MAX, |files| usize::try_from(files).unwrap_or(usize::MAX));
        let most = files.saturating_sub(SPARE_FILES).max(4);
        if most < asked {
            return (most, "the system's limit of open files allows (ulimit -n)");
        }
    }
    (asked, "--connections allows")
}

/// Tells a client that there are too many connections.
async fn refuse(mut socket: TcpStream) {
    let body = ApiError::too_many_connections().body().to_string();
    let head = "HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\nretry-after: 1\r\ncontent-type: application/json";
    let text = format!("{head}\r\ncontent-length: {}\r\n\r\n{body}", body.len());
    let send = async {
        socket.write_all(text.as_bytes()).await?;
        socket.shutdown().await?;
        // A socket that is closed with unread bytes takes back what was sent.
        let mut rest = [0; 4096];
        while tokio::io::AsyncReadExt::read(&mut socket, &mut rest).await? > 0 {}
        io::Result::Ok(())
    };
    // The client may be gone.
    let _ = tokio::time::timeout(Duration::from_secs(1), send).await;
}

/// Serves a connection until it ends, its client is gone or hangs, or the server stops.
async fn serve(
    socket: TcpStream,
    router: Router,
    limits: &ConnectionLimits,
    mut stopped: watch::Receiver<bool>,
) {
    let Ok(local) = socket.local_addr() else { return };
    // Small parts of a stream go out at once.
    let _ = socket.set_nodelay(true);
    let state = Mutex::new(State { phase: Phase::Idle(Instant::now()), blocked: None });
    let connection = Arc::new(Connection { socket, local, state });
    let own = Arc::clone(&connection);
    let service = hyper::service::service_fn(move |mut request: Request<Incoming>| {
        request.extensions_mut().insert(Arc::clone(&own));
        router.clone().call(request)
    });
    let stream = TokioIo::new(Stream(Arc::clone(&connection)));
    let mut http = hyper::server::conn::http1::Builder::new();
    let mut served = pin!(http.half_close(true).serve_connection(stream, service));
    tokio::select! {
        // What goes wrong on a connection is the client's affair.
        _ = &mut served => return,
        () = connection.expire(limits) => return,
        _ = stopped.wait_for(|stopped| *stopped) => {}
    }
    served.as_mut().graceful_shutdown();
    let without_requests = async {
        loop {
            tokio::time::sleep(GRACE).await;
            if !connection.is_busy() {
                return;
            }
        }
    };
    tokio::select! {
        _ = &mut served => {}
        () = connection.expire(limits) => {}
        () = without_requests => {}
    }
}
