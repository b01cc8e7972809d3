//! One model on several devices (tensor parallelism). Each device has a share of the weights and of
//! the KV cache, and a thread of its own, which computes every step on that share. All ranks get
//! the same logits to the bit and sample alike, so none waits for another's tokens.

use super::CudaModel;
use super::formats::{known_at_launch, masks};
use crate::cache_kinds::CacheKinds;
use crate::{Error, ForwardBatch, Model, ModelConfig, ModelOptions, ModelSource, Result};
use cresset_kernels::sampling::{RowSampling, SampleResult};
use cresset_kernels::{Compute, DeviceOps, Error as KernelError};
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvError, SyncSender, sync_channel};
use std::thread::{Builder, JoinHandle};

pub struct TensorParallel {
    pub(super) ranks: RankThreads,
    /// The threads that ask formats, once for all ranks.
    compute: Compute,
    /// The first rank's sizes, which are those of a share.
    config: ModelConfig,
    cache_kinds: CacheKinds,
    num_blocks: usize,
    /// The sum over all ranks.
    weight_bytes: usize,
    /// That of the rank which takes most.
    memory_bytes: usize,
    depth: usize,
}

impl TensorParallel {
    /// Loads the shares of all ranks at the same time; each rank reads the files by itself. The KV
    /// cache has as many blocks on each as fit on the fullest device.
    pub fn load(source: &ModelSource, options: &ModelOptions) -> Result<Self> {
        let gpus = options.gpu.iter().chain(&options.further_ranks);
        let mut ranks = RankThreads::start(gpus, source, options)?;
        let told = ranks.each(|model| {
            Ok((model.config().clone(), model.cache_kinds().clone(), model.num_blocks()))
        })?;
        let bytes = ranks.each(|model| Ok([model.weight_bytes(), model.memory_bytes()]))?;
        let depth = ranks.first(|model| Ok(model.depth()))?;
        let (config, cache_kinds, num_blocks) = first_of(told)?;
        Ok(Self {
            ranks,
            compute: Compute::new(options.threads),
            config,
            cache_kinds,
            num_blocks,
            weight_bytes: bytes.iter().map(|[weights, _]| weights).sum(),
            memory_bytes: bytes.iter().map(|[_, all]| *all).max().unwrap_or_default(),
            depth,
        })
    }
}

impl Model for TensorParallel {
    fn config(&self) -> &ModelConfig {
        &self.config
    }

    fn weight_bytes(&self) -> usize {
        self.weight_bytes
    }

    fn memory_bytes(&self) -> usize {
        self.memory_bytes
    }

    fn num_blocks(&self) -> usize {
        self.num_blocks
    }

    fn cache_kinds(&self) -> &CacheKinds {
        &self.cache_kinds
    }

    fn depth(&self) -> usize {
        self.depth
    }

    fn launch(&mut self, batch: &ForwardBatch, rows: &[RowSampling]) -> Result<()> {
        let step = Arc::new((batch.clone(), rows.to_vec()));
        self.ranks.first(move |model| model.start_rows(&step.0, &step.1))?;
        known_at_launch(rows).map_or(Ok(()), |rows| self.sample(&rows))
    }

    fn sample(&mut self, rows: &[Option<RowSampling>]) -> Result<()> {
        let masks = Arc::new(masks(&self.compute, rows));
        self.ranks.first(move |model| model.sample_masked(&masks))
    }

    fn collect(&mut self) -> Result<Vec<SampleResult>> {
        self.ranks.first(Model::collect)
    }

    fn recover(&mut self) -> Result<()> {
        self.ranks.first(Model::recover)
    }
}

/// Work for the thread of a rank.
type RankCall = Box<dyn FnOnce(&mut CudaModel) + Send>;

/// The threads of all ranks. Dropping it ends them.
pub(super) struct RankThreads {
    threads: Vec<RankThread>,
    /// Why no further step can be computed.
    lost: Option<String>,
}

struct RankThread {
    gpu: DeviceOps,
    /// `None` once the thread is to end.
    calls: Option<SyncSender<RankCall>>,
    thread: JoinHandle<()>,
}

impl RankThreads {
    /// Starts a thread for each device, and loads on it what is the device's share.
    fn start<'a>(
        gpus: impl Iterator<Item = &'a DeviceOps> + Clone,
        source: &ModelSource,
        options: &ModelOptions,
    ) -> Result<Self> {
        let count = gpus.clone().count();
        let threads = (options.threads / count).max(1);
        let (mut all, mut loading) = (Self { threads: Vec::new(), lost: None }, Vec::new());
        for gpu in gpus {
            let (source, gpu_of_rank, further_ranks) =
                (source.clone(), Some(gpu.clone()), Vec::new());
            let own = ModelOptions { gpu: gpu_of_rank, further_ranks, threads, ..options.clone() };
            let (loaded, outcome) = sync_channel(1);
            all.add(gpu, move |gpu| CudaModel::load(&source, gpu, &own), loaded)?;
            loading.push(outcome);
        }
        all.outcomes(loading)?;
        Ok(all)
    }

    fn add(
        &mut self,
        gpu: &DeviceOps,
        load: impl FnOnce(&DeviceOps) -> Result<CudaModel> + Send + 'static,
        loaded: SyncSender<Result<()>>,
    ) -> Result<()> {
        let (calls, received) = sync_channel(1);
        let own = gpu.clone();
        let work = move || match guarded(&own, || load(&own)) {
            Ok(model) => {
                // Nobody waits for it once another thread could not be started.
                let _ = loaded.send(Ok(()));
                serve(model, received);
            }
            Err(error) => {
                let _ = loaded.send(Err(error));
            }
        };
        let name = format!("rank-{}", gpu.rank().number);
        let thread = Builder::new().name(name).spawn(work).map_err(|error| {
            let why = format!("the thread of {} could not be started: {error}", gpu.rank());
            gpu.abandon(&why);
            group_lost(why)
        })?;
        self.threads.push(RankThread { gpu: gpu.clone(), calls: Some(calls), thread });
        Ok(())
    }

    /// Lets every rank do the same and returns the first one's result.
    fn first<T: Send + 'static>(
        &mut self,
        work: impl Fn(&mut CudaModel) -> Result<T> + Clone + Send + 'static,
    ) -> Result<T> {
        first_of(self.each(work)?)
    }

    /// Lets every rank do the same and returns the results in the order of the ranks. Batches that
    /// contradict themselves are refused by all of them before anything is launched; after any
    /// other error no further step is possible, because the ranks have not launched the same.
    pub(super) fn each<T: Send + 'static>(
        &mut self,
        work: impl Fn(&mut CudaModel) -> Result<T> + Clone + Send + 'static,
    ) -> Result<Vec<T>> {
        if let Some(why) = &self.lost {
            return Err(group_lost(why.clone()));
        }
        let waiting = self.threads.iter().map(|rank| rank.call(work.clone())).collect();
        // The rows of a step must not outlive the call.
        drop(work);
        self.outcomes(waiting)
    }

    /// Waits for the results of all ranks. Of several errors, returns one that is a cause and not a
    /// consequence.
    fn outcomes<T>(&mut self, waiting: Vec<Receiver<Result<T>>>) -> Result<Vec<T>> {
        let ended = |_: RecvError| Err(group_lost("the thread of a rank has ended".into()));
        let all = waiting.into_iter().map(|outcome| outcome.recv().unwrap_or_else(ended));
        let (found, failed): (Vec<_>, Vec<_>) = all.partition(Result::is_ok);
        let mut errors: Vec<Error> = failed.into_iter().filter_map(Result::err).collect();
        if errors.is_empty() {
            return found.into_iter().collect();
        }
        let cause = errors.iter().position(|error| !is_consequence(error)).unwrap_or(0);
        let error = errors.swap_remove(cause);
        if !matches!(error, Error::Batch(_)) {
            self.lost = Some(error.to_string());
        }
        Err(error)
    }
}

impl Drop for RankThreads {
    /// All threads are told first, because each waits for the others' exchanges before it ends.
    fn drop(&mut self) {
        self.threads.iter_mut().for_each(|rank| rank.calls = None);
        for rank in self.threads.drain(..) {
            if rank.thread.join().is_err() {
                tracing::error!(rank = %rank.gpu.rank(), "the thread of a rank panicked");
            }
        }
    }
}

impl RankThread {
    /// Gives the thread work; the result comes over the channel, which ends if the thread has.
    fn call<T: Send + 'static>(
        &self,
        work: impl Fn(&mut CudaModel) -> Result<T> + Send + 'static,
    ) -> Receiver<Result<T>> {
        let ((results, received), gpu) = (sync_channel(1), self.gpu.clone());
        let call: RankCall = Box::new(move |model| {
            let outcome = guarded(&gpu, || work(model));
            drop(work);
            // Whoever called waits for it.
            let _ = results.send(outcome);
        });
        if let Some(calls) = &self.calls {
            // A thread that has ended drops the channel of the result.
            let _ = calls.send(call);
        }
        received
    }
}

fn serve(mut model: CudaModel, calls: Receiver<RankCall>) {
    for call in calls {
        call(&mut model);
    }
}

/// Ends the exchanges with other ranks if `work` fails or panics, so that none of them waits for
/// this one.
fn guarded<T>(gpu: &DeviceOps, work: impl FnOnce() -> Result<T>) -> Result<T> {
    let outcome = catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| {
        Err(group_lost(format!("{} panicked: {}", gpu.rank(), message(&*panic))))
    });
    match &outcome {
        Ok(_) | Err(Error::Batch(_)) => {}
        Err(error) if is_consequence(error) => gpu.abandon(&error.to_string()),
        Err(error) => gpu.abandon(&format!("{} failed: {error}", gpu.rank())),
    }
    outcome
}

fn message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("without a message")
}

fn group_lost(detail: String) -> Error {
    Error::Kernel(KernelError::GroupLost { op: "step", detail })
}

/// Whether another rank's error says more.
fn is_consequence(error: &Error) -> bool {
    matches!(error, Error::Kernel(KernelError::GroupLost { .. }))
}

fn first_of<T>(results: Vec<T>) -> Result<T> {
    let none = || Error::Batch("a model needs a device".into());
    results.into_iter().next().ok_or_else(none)
}
