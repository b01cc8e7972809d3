//! The worker threads on which CPU ops run: a fixed number that spin between the ops of a step.
//!
//! A model step is some two hundred ops of tens of microseconds each, so starting one on the
//! workers must cost about a microsecond: idle workers watch one atomic word for a while before
//! they sleep.

use crate::parts::Parts;
use crate::simd::{InstructionSetError, Isa};
use std::any::Any;
use std::cell::UnsafeCell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

/// Pauses that a waiting thread makes before it gives up its core: 50 to 100 µs on current x86.
const SPINS: usize = 3_000;
/// Bits of `WorkerState::state`: whether a job may be joined, the number of workers inside it, and
/// the job's number.
const OPEN: usize = 1;
const WORKER: usize = 2;
const WORKERS: usize = 0xfffe;
const EPOCH: usize = 0x1_0000;

type TaskFn<'a> = dyn Fn(usize) + Sync + 'a;

/// Handle to the worker threads; cheap to clone.
#[derive(Clone)]
pub struct Compute {
    pool: Option<Arc<Pool>>,
    byte_activations: bool,
}

impl Compute {
    /// Starts `threads - 1` workers; the thread that calls `run` is the remaining one.
    pub fn new(threads: usize) -> Self {
        let pool = (threads > 1).then(|| Arc::new(Pool::new(threads - 1)));
        Self { pool, byte_activations: false }
    }

    /// The same workers, whose products with quantised weights round activations to eight bits
    /// instead of sixteen.
    ///
    /// # Errors
    /// When the kernels do not run with products of bytes (of AVX2, VNNI or NEON), which alone make
    /// that faster.
    pub fn with_byte_activations(self) -> Result<Self, InstructionSetError> {
        let isa = Isa::best();
        let bytes = Self { byte_activations: true, ..self };
        isa.has_byte_products().then_some(bytes).ok_or(InstructionSetError::NoBytes(isa.name()))
    }

    /// Whether [`Self::with_byte_activations`] made it.
    pub fn byte_activations(&self) -> bool {
        self.byte_activations
    }

    /// Threads that work on a run, including the caller's.
    pub fn threads(&self) -> usize {
        self.pool.as_ref().map_or(1, |pool| pool.workers.len() + 1)
    }

    /// Runs `task(0)`, …, `task(tasks - 1)`, each once, on the workers, and returns when all are
    /// done. A panic in a task is passed on once no task runs any more; tasks that have not begun
    /// by then are left out. While the workers are busy with another run (of another thread, or one
    /// that this is called in) the calling thread runs all tasks itself.
    pub fn run(&self, tasks: usize, task: impl Fn(usize) + Sync) {
        match &self.pool {
            Some(pool) if tasks > 1 && pool.shared.acquire() => pool.shared.run(tasks, &task),
            _ => (0..tasks).for_each(task),
        }
    }

    /// Deals out the chunks of `len` values of `out`, of which the last may be shorter:
    /// `task(start, chunk)` gets each of them with the position of its first value.
    pub fn run_chunks<T: Send>(
        &self,
        out: &mut [T],
        len: usize,
        task: impl Fn(usize, &mut [T]) + Sync,
    ) {
        let (total, parts) = (out.len(), Parts::new(out));
        self.run(total.div_ceil(len), |i| {
            let chunk = i * len..total.min((i + 1) * len);
            // SAFETY: each chunk belongs to one task.
            task(chunk.start, unsafe { parts.slice(chunk) });
        });
    }
}

struct Pool {
    shared: Arc<WorkerState>,
    workers: Vec<JoinHandle<()>>,
}

impl Pool {
    fn new(workers: usize) -> Self {
        let shared = Arc::new(WorkerState::default());
        let spawn = |i| {
            let shared = shared.clone();
            std::thread::Builder::new()
                .name(format!("compute-{i}"))
                .spawn(move || shared.work())
                .expect("the system can start a compute thread")
        };
        let workers = (1..=workers).map(spawn).collect();
        Self { shared, workers }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        self.shared.wake();
        for worker in self.workers.drain(..) {
            worker.join().expect("invariant: a worker catches its tasks' panics");
        }
    }
}

/// One job at a time. `job` and `tasks` are written only by the thread that holds `taken`, while no
/// worker is inside; they are read only by workers that joined an open job by raising the count in
/// `state`.
#[derive(Default)]
struct WorkerState {
    taken: AtomicBool,
    state: AtomicUsize,
    job: UnsafeCell<Option<*const TaskFn<'static>>>,
    tasks: AtomicUsize,
    next: AtomicUsize,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    stop: AtomicBool,
    sleepers: AtomicUsize,
    sleep_lock: Mutex<()>,
    wake_up: Condvar,
}

// SAFETY: `job` is the only field that is not Sync. It is accessed as the struct's comment says,
// and `state` orders the accesses.
unsafe impl Sync for WorkerState {}
// SAFETY: the pointer in `job` is dereferenced only while `run` keeps the closure borrowed.
unsafe impl Send for WorkerState {}

impl WorkerState {
    fn acquire(&self) -> bool {
        !self.taken.swap(true, Ordering::Acquire)
    }

    /// Runs one job; the caller holds `taken`.
    fn run(&self, tasks: usize, task: &TaskFn) {
        self.open(tasks, task);
        self.take_tasks(task);
        self.close();
        let panic = lock(&self.panic).take();
        self.taken.store(false, Ordering::Release);
        if let Some(payload) = panic {
            resume_unwind(payload);
        }
    }

    fn open(&self, tasks: usize, task: &TaskFn) {
        self.tasks.store(tasks, Ordering::Relaxed);
        self.next.store(0, Ordering::Relaxed);
        // SAFETY: no worker is inside (`close` waited for that), so no thread reads `job` now. The
        // lifetime is erased, but no worker uses the pointer after `close` returns, which is before
        // `run` ends the borrow, even after a panic.
        unsafe {
            *self.job.get() =
                Some(std::mem::transmute::<&TaskFn<'_>, *const TaskFn<'static>>(task));
        }
        let epoch = self.state.load(Ordering::Relaxed) & !(EPOCH - 1);
        self.state.store(epoch.wrapping_add(EPOCH) | OPEN, Ordering::SeqCst);
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            self.wake();
        }
    }

    /// Closes the job, so that no further worker joins it, and waits for the workers inside.
    fn close(&self) {
        self.state.fetch_and(!OPEN, Ordering::Relaxed);
        wait_until(|| self.state.load(Ordering::Acquire) & WORKERS == 0);
    }

    fn take_tasks(&self, task: &TaskFn) {
        let tasks = self.tasks.load(Ordering::Relaxed);
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            loop {
                let i = self.next.fetch_add(1, Ordering::Relaxed);
                if i >= tasks {
                    break;
                }
                task(i);
            }
        }));
        if let Err(payload) = outcome {
            self.next.store(tasks, Ordering::Relaxed);
            lock(&self.panic).get_or_insert(payload);
        }
    }

    /// The loop of a worker thread.
    fn work(&self) {
        let mut seen = 0;
        while let Some(state) = self.next_job(seen) {
            seen = state & !(EPOCH - 1);
            if !self.join(state) {
                continue;
            }
            // SAFETY: this worker joined an open job: `open` has published the pointer, and `close`
            // waits for this worker to leave.
            let task = unsafe { &*(*self.job.get()).expect("invariant: an open job has a task") };
            self.take_tasks(task);
            self.state.fetch_sub(WORKER, Ordering::Release);
        }
    }

    /// Joins the job that `state` shows, unless it has been closed since.
    fn join(&self, mut state: usize) -> bool {
        let epoch = state & !(EPOCH - 1);
        while state & OPEN != 0 && state & !(EPOCH - 1) == epoch {
            let entered = state + WORKER;
            match self.state.compare_exchange_weak(
                state,
                entered,
                Ordering::Acquire,
                Ordering::Relaxed,
            ) {
                Ok(_) => return true,
                Err(now) => state = now,
            }
        }
        false
    }

    /// Waits for an open job other than `seen`, spinning first; `None` when the pool ends.
    fn next_job(&self, seen: usize) -> Option<usize> {
        let open = || {
            let state = self.state.load(Ordering::SeqCst);
            (state & OPEN != 0 && state & !(EPOCH - 1) != seen).then_some(state)
        };
        for _ in 0..SPINS {
            if let Some(state) = open() {
                return Some(state);
            }
            std::hint::spin_loop();
        }
        let mut sleep_lock = lock(&self.sleep_lock);
        // A worker counts itself as a sleeper before it looks for a job for the last time, and
        // `open` publishes the job before it reads the count. So one of the two sees the other.
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        let job = loop {
            if self.stop.load(Ordering::SeqCst) {
                break None;
            }
            if let Some(state) = open() {
                break Some(state);
            }
            sleep_lock = self.wake_up.wait(sleep_lock).unwrap_or_else(PoisonError::into_inner);
        };
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
        job
    }

    fn wake(&self) {
        let _bed = lock(&self.sleep_lock);
        self.wake_up.notify_all();
    }
}

/// No code that can panic runs under these locks, so their data is consistent even if poisoned.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn wait_until(done: impl Fn() -> bool) {
    for _ in 0..SPINS {
        if done() {
            return;
        }
        std::hint::spin_loop();
    }
    while !done() {
        std::thread::yield_now();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every task index is run exactly once.
    fn check(threads: usize, tasks: usize) {
        let compute = Compute::new(threads);
        let counts: Vec<_> = (0..tasks).map(|_| AtomicUsize::new(0)).collect();
        compute.run(tasks, |i| {
            counts[i].fetch_add(1, Ordering::Relaxed);
        });
        assert!(
            counts.iter().all(|c| c.load(Ordering::Relaxed) == 1),
            "{threads} threads, {tasks} tasks"
        );
    }

    #[test]
    fn every_task_runs_once() {
        for threads in [0, 1, 2, 3, 8] {
            for tasks in [0, 1, 2, 7, 1000] {
                check(threads, tasks);
            }
        }
    }

    #[test]
    fn many_small_runs_see_each_others_writes() {
        let compute = Compute::new(3);
        let mut values = [0usize; 7];
        for round in 0..20_000 {
            let cells: Vec<_> = values.iter_mut().map(Mutex::new).collect();
            compute.run(cells.len(), |i| **lock(&cells[i]) += i);
            drop(cells);
            assert_eq!(values[6], (round + 1) * 6);
        }
    }

    #[test]
    fn workers_wake_from_sleep() {
        let compute = Compute::new(2);
        for _ in 0..5 {
            std::thread::sleep(std::time::Duration::from_millis(5));
            let barrier = std::sync::Barrier::new(2);
            compute.run(2, |_| {
                barrier.wait();
            });
        }
    }

    #[test]
    fn a_panic_is_passed_on_and_the_pool_goes_on() {
        let compute = Compute::new(3);
        for bad in [0, 5, 99] {
            let run = || compute.run(100, |i| assert_ne!(i, bad, "task refuses"));
            let payload = catch_unwind(AssertUnwindSafe(run)).unwrap_err();
            assert!(payload.downcast_ref::<String>().unwrap().contains("task refuses"));
        }
        let sum = AtomicUsize::new(0);
        compute.run(10, |i| {
            sum.fetch_add(i, Ordering::Relaxed);
        });
        assert_eq!(sum.into_inner(), 45);
    }

    #[test]
    fn a_run_inside_a_task_completes() {
        let compute = Compute::new(2);
        let sum = AtomicUsize::new(0);
        compute.run(4, |_| {
            compute.run(5, |i| {
                sum.fetch_add(i, Ordering::Relaxed);
            });
        });
        assert_eq!(sum.into_inner(), 40);
    }

    #[test]
    fn two_callers_share_a_pool() {
        let compute = Compute::new(2);
        let sum = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    for _ in 0..500 {
                        compute.run(3, |i| {
                            sum.fetch_add(i, Ordering::Relaxed);
                        });
                    }
                });
            }
        });
        assert_eq!(sum.into_inner(), 3 * 500 * 3);
    }

    #[test]
    fn dropping_the_last_handle_ends_the_threads() {
        let compute = Compute::new(4);
        let shared = Arc::downgrade(&compute.pool.as_ref().unwrap().shared);
        let other = compute.clone();
        drop(compute);
        other.run(8, |_| ());
        assert!(shared.upgrade().is_some());
        drop(other);
        assert!(shared.upgrade().is_none());
    }
}
