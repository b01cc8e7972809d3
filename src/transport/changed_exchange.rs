//! Routes whose requests and answers are changed on their way, for proving that checks over HTTP
//! notice it. Only builds with the feature `self-test` have them.

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::extract::Request;
use axum::http::header::CONTENT_LENGTH;
use axum::middleware::{Next, from_fn};
use axum::response::Response;
use serde_json::Value;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// More than any body of a check.
const MOST_BYTES: usize = 64 << 20;

/// Changes requests that have a JSON body, and their answers.
pub trait ChangedExchange: Send + Sync + 'static {
    /// `call` is the number of the request, from 1.
    fn request(&self, call: u64, body: &mut Value);
    /// Returns what is answered instead of `answer`; `asked` is the body as it came.
    fn answer(&self, asked: &Value, status: u16, answer: Vec<u8>) -> Vec<u8>;
}

/// The routes, changed where that is asked for.
pub fn changed(routes: Router, change: Option<Arc<dyn ChangedExchange>>) -> Router {
    let Some(change) = change else { return routes };
    let calls = Arc::new(AtomicU64::new(0));
    routes.layer(from_fn(move |request: Request, next: Next| {
        let call = calls.fetch_add(1, Ordering::Relaxed) + 1;
        let change = change.clone();
        async move { exchange(&*change, call, request, next).await }
    }))
}

async fn exchange(
    change: &dyn ChangedExchange,
    call: u64,
    request: Request,
    next: Next,
) -> Response {
    let (mut head, body) = request.into_parts();
    let bytes = to_bytes(body, MOST_BYTES).await.unwrap_or_default();
    let Ok(asked) = serde_json::from_slice::<Value>(&bytes) else {
        return next.run(Request::from_parts(head, bytes.into())).await;
    };
    let mut sent = asked.clone();
    change.request(call, &mut sent);
    head.headers.remove(CONTENT_LENGTH);
    let request = Request::from_parts(head, Body::from(sent.to_string()));
    let (mut head, body) = next.run(request).await.into_parts();
    let answer = to_bytes(body, MOST_BYTES).await.unwrap_or_default().to_vec();
    head.headers.remove(CONTENT_LENGTH);
    let answer = change.answer(&asked, head.status.as_u16(), answer);
    Response::from_parts(head, answer.into())
}
