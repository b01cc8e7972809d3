//! Commands that may read much of the ledger.

use super::command::AdminError;
use std::sync::Arc;
use tokio::runtime::Handle;
use tokio::sync::Mutex;
use tokio::task::spawn_blocking;

/// The turn of the one command that may read much of the ledger. Such commands run on a thread that
/// may wait, so that no request waits for them, and one after the other, so that they take one core
/// and the memory of one.
#[derive(Clone, Debug, Default)]
pub struct LongCommands(Arc<Mutex<()>>);

impl LongCommands {
    /// Runs `work` when its turn comes. Its turn ends with the work, even if nobody waits for the
    /// answer any more.
    pub(super) async fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, AdminError> {
        let turn = self.0.clone().lock_owned().await;
        let done = spawn_blocking(move || {
            let _turn = turn;
            work()
        });
        done.await.map_err(|error| AdminError::Unavailable(error.to_string()))
    }

    /// `run` for reads, whose answers come as futures.
    pub(super) async fn read<T: Send + 'static>(
        &self,
        reads: impl Future<Output = Result<T, AdminError>> + Send + 'static,
    ) -> Result<T, AdminError> {
        let runtime = Handle::current();
        self.run(move || runtime.block_on(reads)).await?
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::mpsc;

    #[tokio::test(flavor = "current_thread")]
    async fn one_runs_at_a_time_and_the_runtime_goes_on() {
        let commands = LongCommands::default();
        let running = Arc::new(AtomicBool::new(false));
        let (go_on, wait) = mpsc::channel::<()>();
        let first = {
            let (commands, running) = (commands.clone(), running.clone());
            tokio::spawn(async move {
                let work = move || {
                    running.store(true, Ordering::SeqCst);
                    let _ = wait.recv();
                    running.store(false, Ordering::SeqCst);
                };
                commands.run(work).await
            })
        };
        // This thread is the runtime's only one: it comes here although the first one blocks.
        while !running.load(Ordering::SeqCst) {
            tokio::task::yield_now().await;
        }
        // Its caller goes away, and its turn goes on.
        first.abort();
        assert!(first.await.unwrap_err().is_cancelled());
        let second = commands.read(async move { Ok(running.load(Ordering::SeqCst)) });
        tokio::pin!(second);
        assert!(futures_util::poll!(second.as_mut()).is_pending());
        go_on.send(()).unwrap();
        assert!(!second.await.unwrap(), "the second ran beside the first");
    }
}
