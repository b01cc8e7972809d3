//! Ends what the HTTP/2 library would leave open: streams whose reader takes nothing, and
//! connections without a stream.

use axum::body::{Body, Bytes};
use axum::response::Response;
use http_body_util::BodyExt;
use hyper::body::{Body as _, Frame, Incoming, SizeHint};
use parking_lot::Mutex;
use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::runtime::Handle;
use tokio::time::{Instant, sleep_until, timeout};

tokio::task_local! {
    static PACE: Arc<Pace>;
}

/// The time at which the stream's last piece was handed out, while no further one has been asked
/// for: the client's window is full.
#[derive(Default)]
struct Pace(Mutex<Option<Instant>>);

impl Pace {
    fn note(&self, handed: Option<Instant>) {
        *self.0.lock() = handed;
    }

    fn handed(&self) -> Option<Instant> {
        *self.0.lock()
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
        let mut open = self.open.lock();
        *open = Open { streams: open.streams.saturating_add_signed(by), changed: Instant::now() };
    }

    /// Returns when no stream has been open for `time`.
    pub(super) async fn idle(&self, time: Duration) {
        loop {
            let since = {
                let open = self.open.lock();
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

/// A request's body, which is kept until its response has ended: the library resets a stream whose
/// body is dropped unread, and the client would lose an answer that it has not read by then.
#[derive(Clone)]
pub(super) struct KeptBody(Arc<Mutex<Incoming>>);

impl KeptBody {
    pub(super) fn new(body: Incoming) -> Self {
        Self(Arc::new(Mutex::new(body)))
    }

    /// Throws away what still comes, for so long at most, so that the stream ends without a reset.
    /// Clients cannot hold more of them than they may have streams.
    async fn drain(mut self, time: Duration) {
        let all = async { while self.frame().await.is_some_and(|frame| frame.is_ok()) {} };
        let _ = timeout(time, all).await;
    }
}

impl hyper::body::Body for KeptBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        Pin::new(&mut *self.0.lock()).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.0.lock().is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.0.lock().size_hint()
    }
}

/// Returns the response with its pieces timed. What its request still sends is read for the time of
/// `linger` after its end. To be called while its stream runs.
pub(super) fn timed(response: Response, request: KeptBody, linger: Duration) -> Response {
    match PACE.try_with(Arc::clone) {
        Ok(pace) => response.map(|body| Body::new(Timed { body, pace, request, linger })),
        Err(_) => response,
    }
}

struct Timed {
    body: Body,
    pace: Arc<Pace>,
    request: KeptBody,
    linger: Duration,
}

impl Drop for Timed {
    fn drop(&mut self) {
        if let (false, Ok(runtime)) = (self.request.is_end_stream(), Handle::try_current()) {
            runtime.spawn(self.request.clone().drain(self.linger));
        }
    }
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
