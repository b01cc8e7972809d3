//! Commands that may read much of the ledger.

use super::error::AdminError;
use std::panic::{self, AssertUnwindSafe};
use std::sync::Arc;
use std::sync::mpsc::{self, SyncSender};
use tokio::runtime::Handle;
use tokio::sync::{Mutex, oneshot};

type Work = Box<dyn FnOnce() + Send>;

/// The turn of the one command that may read much of the ledger. Such commands run on a thread of
/// their own, so that no request waits for them, and one after the other, so that they take one
/// core and the memory of one. It is the same thread each time: memory that a thread gave back is
/// kept for that thread, and many threads would keep many times as much.
#[derive(Clone, Debug, Default)]
pub struct LongCommands {
    turn: Arc<Mutex<()>>,
    thread: Arc<parking_lot::Mutex<Option<SyncSender<Work>>>>,
}

impl LongCommands {
    /// Runs `work` when its turn comes. Its turn ends with the work, even if nobody waits for the
    /// answer any more.
    pub(super) async fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, AdminError> {
        let turn = self.turn.clone().lock_owned().await;
        let (answer, told) = oneshot::channel();
        let work = move || {
            let _turn = turn;
            let _ = answer.send(work());
        };
        let failed = |why: &dyn std::fmt::Display| AdminError::Unavailable(why.to_string());
        self.hand_over(Box::new(work)).map_err(|why| failed(&why))?;
        told.await.map_err(|_| failed(&"the command panicked: see the node's log"))
    }

    /// Gives work to the thread, which is started for the first.
    fn hand_over(&self, work: Work) -> std::io::Result<()> {
        let mut thread = self.thread.lock();
        if thread.is_none() {
            let (sender, all) = mpsc::sync_channel::<Work>(1);
            std::thread::Builder::new().name("long-commands".into()).spawn(move || {
                for work in all {
                    // Its caller is told, because the answer is dropped with it.
                    let _ = panic::catch_unwind(AssertUnwindSafe(work));
                }
            })?;
            *thread = Some(sender);
        }
        let sender = thread.as_ref().expect("invariant: it was started");
        sender.send(work).expect("invariant: the thread ends with the last sender");
        Ok(())
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

    #[tokio::test]
    async fn a_command_that_panics_is_told_and_the_next_one_runs() {
        let commands = LongCommands::default();
        let name = || std::thread::current().id();
        let [first, second] = [commands.run(name).await, commands.run(name).await];
        assert_eq!(first.unwrap(), second.unwrap(), "one thread does both");
        let panicked = commands.run(|| panic!("planted")).await;
        assert!(matches!(panicked, Err(AdminError::Unavailable(_))));
        assert_eq!(commands.run(|| 7).await.unwrap(), 7);
    }
}
