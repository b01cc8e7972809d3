//! The threads on which connections are driven, and how any other thread waits for an answer.

use cresset_store::{StoreError, StoreResult};
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};
use std::time::Duration;
use tokio::runtime::{Builder, Handle, Runtime};

/// A runtime of the backend's own. Its users may have another runtime, or none, and connections
/// outlive them.
pub(super) struct Driver {
    runtime: Option<Runtime>,
}

impl Driver {
    pub(super) fn start() -> StoreResult<Self> {
        let mut builder = Builder::new_multi_thread();
        let runtime = builder.worker_threads(1).thread_name("store-database").enable_all().build();
        let runtime = runtime.map_err(|error| {
            StoreError::Unavailable(format!("a thread cannot be started: {error}"))
        })?;
        Ok(Self { runtime: Some(runtime) })
    }

    pub(super) fn handle(&self) -> Handle {
        let runtime = self.runtime.as_ref().expect("invariant: it is there until it is dropped");
        runtime.handle().clone()
    }

    /// Waits on the calling thread, also where that belongs to another runtime.
    pub(super) fn wait<T>(&self, work: impl Future<Output = T>) -> T {
        let handle = self.handle();
        let _timers = handle.enter();
        let mut work = pin!(work);
        let waker = Waker::from(Arc::new(Unpark(thread::current())));
        let mut context = Context::from_waker(&waker);
        loop {
            if let Poll::Ready(done) = work.as_mut().poll(&mut context) {
                return done;
            }
            thread::park();
        }
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        // Waiting for the threads is not allowed on a thread of another runtime.
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// `work`, or `None` where it takes longer than `most`. It can be awaited in any runtime.
pub(super) async fn within<T>(
    handle: &Handle,
    most: Duration,
    work: impl Future<Output = T>,
) -> Option<T> {
    let limited = {
        let _timers = handle.enter();
        tokio::time::timeout(most, work)
    };
    limited.await.ok()
}
