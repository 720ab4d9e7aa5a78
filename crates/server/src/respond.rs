//! Requests for text: reads them, gives them to the model's thread, and answers, whole or as a stream.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use axum::Json;
use axum::body::Body;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::sse::{Event as Sent, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures_util::{StreamExt, stream};
use march_lm::tokenizer::Tokenizer;
use serde_json::{Value, json};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use crate::answer::{Answer, Form, Head};
use crate::error::ApiError;
use crate::http::{App, Options, broken, model_not_found, seconds, spawn_blocking};
use crate::job::{Event, Events, Job, PromptEvents};
use crate::recall;
use crate::request::{Context, ParsedRequest};
use crate::sessions::{NewTurn, OpenSession};

/// The most bytes of a stream that wait for its client to read them; a client that is further behind is disconnected.
const MOST_UNREAD: usize = 16 << 20;

/// `POST /v1/completions`.
pub async fn completions(State(app): State<Arc<App>>, body: Body) -> Response {
    respond(app, body, Form::Completion).await.unwrap_or_else(IntoResponse::into_response)
}

/// `POST /v1/chat/completions`.
pub async fn chat_completions(State(app): State<Arc<App>>, body: Body) -> Response {
    respond(app, body, Form::Chat).await.unwrap_or_else(IntoResponse::into_response)
}

async fn respond(app: Arc<App>, body: Body, form: Form) -> Result<Response, ApiError> {
    let deadline = Instant::now() + app.options.request_time;
    let body = app.body(body).await?;
    let parsing = Arc::clone(&app);
    let mut request = spawn_blocking(move || {
        let App { loaded, template, sessions, options: Options { allowed, .. }, .. } = &*parsing;
        let (tokenizer, policy, model) = (loaded.tokenizer(), loaded.policy(), loaded.model());
        let vocabulary = parsing.vocabulary();
        let context = Context { tokenizer, template, vocabulary, policy, allowed, sessions };
        let request = match form {
            Form::Completion => ParsedRequest::completion(&body, &context)?,
            Form::Chat => ParsedRequest::chat(&body, &context)?,
        };
        model.check_policy(&request.policy).map_err(|error| ApiError::key("memory", error.to_string()))?;
        Ok(request)
    })
    .await?;
    if let Some(other) = request.model.as_ref().filter(|model| **model != app.options.name) {
        return Err(model_not_found(other, &app.options.name));
    }
    let mut prefix = request.conversation.as_mut().and_then(|(open, _)| open.prefix.take());
    let (sender, mut receiver) = unbounded_channel();
    let jobs = request.prompts.iter().enumerate().map(|(number, prompt)| Job {
        prompt: prompt.clone(),
        ends: request.ends.clone(),
        policy: request.policy.clone(),
        prefix: prefix.take(),
        choices: request.choices.clone(),
        limits: request.limits.clone(),
        score_prompt: request.echo && request.logprobs.is_some(),
        top: request.logprobs,
        whole: request.conversation.is_some(),
        recall: request.recall,
        deadline,
        events: Events::new(sender.clone(), number, request.stream),
    });
    app.jobs.add(jobs.collect())?;
    drop(sender);
    let number = app.answers.fetch_add(1, Ordering::Relaxed);
    let kind = if form == Form::Chat { "chatcmpl" } else { "cmpl" };
    let head = Head {
        form,
        id: format!("{kind}-{:x}-{number:x}", app.began),
        created: seconds(),
        model: app.options.name.clone(),
    };
    if request.stream {
        let mut first = receiver.recv().await;
        if let Some((_, events)) = &mut first
            && let Some(at) = events.iter().position(|event| matches!(event, Event::Failed(_)))
            && let Event::Failed(failure) = events.swap_remove(at)
        {
            return Err(failure.into());
        }
        return Ok(streamed(app, request, head, first, receiver));
    }
    let mut conversation = request.conversation.take();
    let mut answer = Answer::new(head, &request, app.loaded.tokenizer());
    while let Some((prompt, events)) = receiver.recv().await {
        add(&mut answer, prompt, events, &mut Vec::new())?;
    }
    if !answer.is_complete() {
        return Err(incomplete());
    }
    end(&app, &request, &mut answer, conversation.take()).await?;
    Ok(Json(answer.whole()).into_response())
}

fn incomplete() -> ApiError {
    ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "the model stopped before the answer was whole")
}

/// Keeps the turn of a conversation, and adds to the answer what OpenAI's interface has no place for.
async fn end(
    app: &Arc<App>,
    request: &ParsedRequest,
    answer: &mut Answer<'_>,
    conversation: Option<(OpenSession, NewTurn)>,
) -> Result<(), ApiError> {
    let Some(finished) = answer.finished.take() else { return Ok(()) };
    let (policy, recall) = (request.policy.clone(), request.recall);
    let (text, said) = (answer.text().to_string(), answer.said());
    let app = Arc::clone(app);
    let more = spawn_blocking(move || {
        let tokenizer = app.loaded.tokenizer();
        let recall = if recall { recall::json(&finished, tokenizer).map_err(broken)? } else { Value::Null };
        let (mut session, mut turn) = (None, None);
        if let Some((mut open, new)) = conversation {
            open.finish(&new, (&text, said), &policy, &finished, (&app.template, tokenizer))?;
            (session, turn) = (Some(open.id.clone()), Some(open.record.turns.len()));
        }
        let anchors = finished.prefix.text.bank().timeline().kept.len();
        Ok(json!({
            "session": session, "turn": turn, "tokens": finished.prefix.ids.len(),
            "memory": { "policy": policy.to_string(), "bytes": finished.bytes, "anchors": anchors },
            "recall": recall,
        }))
    });
    answer.more = Some(more.await?);
    Ok(())
}

/// Sends an answer as it is written. When the client goes away, the receiver is dropped, which cancels the jobs.
fn streamed(
    app: Arc<App>,
    mut request: ParsedRequest,
    head: Head,
    first: Option<PromptEvents>,
    mut receiver: UnboundedReceiver<PromptEvents>,
) -> Response {
    let (sender, sent) = unbounded_channel::<Vec<String>>();
    let waiting = Arc::new(AtomicUsize::new(0));
    let sending = Arc::clone(&waiting);
    // Returns whether the client is still there and reads.
    let send = move |sender: &UnboundedSender<Vec<String>>, parts: Vec<Value>| {
        let text = |part: &Value| if part.is_null() { "[DONE]".to_string() } else { part.to_string() };
        let parts: Vec<String> = parts.iter().map(text).collect();
        let bytes = parts.iter().map(String::len).sum::<usize>();
        let before = sending.fetch_add(bytes, Ordering::Relaxed);
        before + bytes <= MOST_UNREAD && sender.send(parts).is_ok()
    };
    tokio::spawn(async move {
        let tokenizer: &Tokenizer = app.loaded.tokenizer();
        let conversation = request.conversation.take();
        let mut answer = Answer::new(head, &request, tokenizer);
        let mut next = first;
        while let Some(message) = next {
            // What is ready goes out together, so that a busy machine is not woken for every token.
            let mut parts = Vec::new();
            let mut ready = Some(message);
            while let Some((prompt, events)) = ready {
                if let Err(error) = add(&mut answer, prompt, events, &mut parts) {
                    // A stream has begun: its status can no longer be changed.
                    parts.push(error.body());
                    send(&sender, parts);
                    return;
                }
                ready = receiver.try_recv().ok();
            }
            if !parts.is_empty() && !send(&sender, parts) {
                return;
            }
            next = tokio::select! {
                next = receiver.recv() => next,
                () = sender.closed() => return,
            };
        }
        let ended = match answer.is_complete() {
            true => end(&app, &request, &mut answer, conversation).await,
            false => Err(incomplete()),
        };
        let last = match ended {
            Err(error) => vec![error.body()],
            Ok(()) if request.stream_usage || answer.more.is_some() => vec![answer.usage_part(), Value::Null],
            Ok(()) => vec![Value::Null],
        };
        send(&sender, last);
    });
    let events = stream::unfold(sent, |mut sent| async move { Some((sent.recv().await?, sent)) });
    let events = events.flat_map(move |parts| {
        let bytes = parts.iter().map(String::len).sum();
        waiting.fetch_sub(bytes, Ordering::Relaxed);
        stream::iter(parts.into_iter().map(|text| Ok::<_, Infallible>(Sent::default().data(text))))
    });
    Sse::new(events).keep_alive(KeepAlive::default()).into_response()
}

/// Adds the events of a prompt to an answer, and the parts of a stream that they give to `parts`.
fn add(
    answer: &mut Answer<'_>,
    prompt: usize,
    events: Vec<Event>,
    parts: &mut Vec<Value>,
) -> Result<(), ApiError> {
    for event in events {
        match event {
            Event::Failed(failure) => return Err(failure.into()),
            event => parts.extend(answer.add(prompt, event).map_err(broken)?),
        }
    }
    Ok(())
}
