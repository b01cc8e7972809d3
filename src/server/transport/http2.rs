//! Ends what the HTTP/2 library would leave open: streams whose reader takes nothing, and
//! connections without a stream.

use axum::body::{Body, Bytes};
use axum::response::Response;
use hyper::body::{Frame, SizeHint};
use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::time::{Instant, sleep_until};

tokio::task_local! {
    static PACE: Arc<Pace>;
}

/// The time at which the stream's last piece was handed out, while no further one has been asked
/// for: the client's window is full.
#[derive(Default)]
struct Pace(Mutex<Option<Instant>>);

impl Pace {
    fn note(&self, handed: Option<Instant>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = handed;
    }

    fn handed(&self) -> Option<Instant> {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Runs the streams of one connection, resets those that stall, and records since when none is
/// open.
#[derive(Clone)]
pub(super) struct Streams {
    stall: Duration,
    open: Arc<Mutex<Open>>,
}

struct Open {
    streams: usize,
    changed: Instant,
}

impl Streams {
    pub(super) fn new(stall: Duration) -> Self {
        Self { stall, open: Arc::new(Mutex::new(Open { streams: 0, changed: Instant::now() })) }
    }

    fn change(&self, by: isize) {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        *open = Open { streams: open.streams.saturating_add_signed(by), changed: Instant::now() };
    }

    /// Returns when no stream has been open for `time`.
    pub(super) async fn idle(&self, time: Duration) {
        loop {
            let since = {
                let open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
                if open.streams == 0 { open.changed } else { Instant::now() }
            };
            if since.elapsed() >= time {
                return;
            }
            sleep_until(since + time).await;
        }
    }
}

impl<F> hyper::rt::Executor<F> for Streams
where
    F: Future + Send + 'static,
    F::Output: Send,
{
    fn execute(&self, stream: F) {
        let (pace, streams) = (Arc::new(Pace::default()), self.clone());
        streams.change(1);
        tokio::spawn(PACE.scope(pace.clone(), async move {
            let _open = Guard(&streams);
            // A stream that is dropped unfinished is reset.
            unless_stalled(stream, &pace, streams.stall).await;
        }));
    }
}

struct Guard<'a>(&'a Streams);

impl Drop for Guard<'_> {
    fn drop(&mut self) {
        self.0.change(-1);
    }
}

async fn unless_stalled(stream: impl Future, pace: &Pace, stall: Duration) {
    let mut stream = pin!(stream);
    loop {
        let due = pace.handed().unwrap_or_else(Instant::now) + stall;
        tokio::select! {
            _ = &mut stream => return,
            () = sleep_until(due) => {
                if pace.handed().is_some_and(|at| at.elapsed() >= stall) {
                    return;
                }
            }
        }
    }
}

/// Returns the response with its pieces timed. To be called while its stream runs.
pub(super) fn timed(response: Response) -> Response {
    match PACE.try_with(Arc::clone) {
        Ok(pace) => response.map(|body| Body::new(Timed { body, pace })),
        Err(_) => response,
    }
}

struct Timed {
    body: Body,
    pace: Arc<Pace>,
}

impl hyper::body::Body for Timed {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        self.pace.note(None);
        let frame = ready!(Pin::new(&mut self.body).poll_frame(cx));
        self.pace.note(Some(Instant::now()));
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
