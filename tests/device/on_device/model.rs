//! A model on the device, with a runner that several engines use one after the other.

use crate::Result;
use crate::eight_bits::EightBits;
use crate::targets::{self, START};
use cresset_engine::{
    EngineError, EngineHandle, EngineOptions, LoadedInfo, ModelRunner, RowResult, RowSampling,
    Runner, nothing_launched,
};
use cresset_kernels::gpu::{Gpu, Kind, Properties};
use cresset_models::{ForwardBatch, ModelConfig, ModelOptions, ModelSource};
use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

pub const BLOCK_SIZE: usize = 16;

/// The model's folder or GGUF file, and the device on which it is loaded.
#[derive(Clone)]
pub struct Source {
    pub path: PathBuf,
    pub gpu: Arc<dyn Gpu>,
    pub emulated: bool,
    pub eight_bits: Option<EightBits>,
    /// When the program began.
    pub began: Instant,
}

/// The options that differ between the measurements.
#[derive(Clone, Copy)]
pub struct Wanted {
    pub kind: Kind,
    pub deterministic: bool,
    /// Share of the device's memory.
    pub share: f64,
    /// Whether steps of one token a row are recorded.
    pub graphs: bool,
    pub max_batched_tokens: usize,
    pub max_rows: usize,
    pub max_context: usize,
}

impl Source {
    /// Writes to the table which device this is, and whether kernels overlap on it.
    pub fn describe(&self) {
        let Properties { name, capability: (major, minor), multiprocessors, versions, .. } =
            self.gpu.properties();
        let what =
            format!("{name}, sm_{major}{minor}, {multiprocessors} multiprocessors, {versions}");
        let overlap = if self.gpu.overlaps() { "kernels overlap" } else { "no kernel overlaps" };
        targets::row(what, overlap, "", &[]);
    }

    /// The sizes of the model, from its headers.
    pub fn config(&self) -> Result<ModelConfig> {
        Ok(cresset_models::inspect(&self.files())?.config)
    }

    /// Whether the model is one GGUF file, whose weights are quantised.
    pub fn quantised(&self) -> bool {
        self.path.extension().is_some_and(|extension| extension == "gguf")
    }

    fn files(&self) -> ModelSource {
        let path = self.path.clone();
        if self.quantised() { ModelSource::gguf(path) } else { ModelSource::hf_folder(path) }
    }

    /// The sizes for a GPU or those for the emulator, whichever this runs on.
    pub fn sized<T>(&self, device: T, emulated: T) -> T {
        if self.emulated { emulated } else { device }
    }

    pub fn load(&self, wanted: Wanted) -> Result<Loaded> {
        let Wanted {
            kind,
            deterministic,
            share,
            graphs,
            max_batched_tokens,
            max_rows,
            max_context,
        } = wanted;
        let options = ModelOptions {
            gpu: Some(self.gpu.clone()),
            gpu_memory_share: share,
            gpu_reserve_mib: 0,
            gpu_kv_mib: 0,
            gpu_graph_rows: if graphs { max_rows } else { 0 },
            deterministic,
            max_rows,
            threads: std::thread::available_parallelism()?.get(),
            dequantise: kind == Kind::F32,
            byte_activations: matches!(
                self.eight_bits,
                Some(EightBits::Activations | EightBits::Both)
            ),
            fp8_cache: matches!(self.eight_bits, Some(EightBits::Cache | EightBits::Both)),
            guesses: false,
            further_ranks: Vec::new(),
            kv_bytes: 0,
            state_share: 0.0,
            state_tokens: 0,
            block_size: BLOCK_SIZE,
            max_batched_tokens,
            max_context: Some(max_context),
        };
        let (runner, info) = ModelRunner::load(&self.files(), &options)?;
        let watched =
            Watched { runner: Box::new(runner), launched: VecDeque::new(), done: Vec::new() };
        Ok(Loaded { runner: Shared(Arc::new(Mutex::new(watched))), info, wanted })
    }

    /// Loads the first model of a program, and writes the time that it took to the table.
    pub fn start(&self, wanted: Wanted) -> Result<Loaded> {
        let loaded = self.load(wanted)?;
        let seconds = self.began.elapsed().as_secs_f64();
        targets::row(
            "program started to model ready",
            format!("{seconds:.1} s"),
            "",
            &[(START, seconds)],
        );
        Ok(loaded)
    }
}

pub struct Loaded {
    pub runner: Shared,
    pub info: LoadedInfo,
    wanted: Wanted,
}

impl Loaded {
    /// The limits for an engine around this model.
    pub fn options(&self) -> EngineOptions {
        let Wanted { max_batched_tokens, max_rows, max_context, .. } = self.wanted;
        let num_blocks = self.info.num_blocks;
        EngineOptions {
            background_tokens: 16,
            max_batched_tokens,
            max_rows,
            max_waiting: 1 << 16,
            block_size: BLOCK_SIZE,
            num_blocks,
            cache: self.info.cache.clone(),
            max_context,
            // A device has two steps in flight, which leaves no drafts.
            speculative_tokens: 0,
        }
    }

    /// Starts an engine around the runner. The engine before must have been shut down.
    pub fn engine(&self, options: EngineOptions) -> EngineHandle {
        EngineHandle::start(Box::new(self.runner.clone()), options)
    }
}

/// A runner that records its steps.
#[derive(Clone)]
pub struct Shared(Arc<Mutex<Watched>>);

struct Watched {
    runner: Box<dyn Runner>,
    launched: VecDeque<Step>,
    done: Vec<Step>,
}

pub struct Step {
    pub tokens: usize,
    /// Tokens that each sequence has after it.
    pub lengths: Vec<u32>,
    /// When it was launched, and later when it was collected.
    pub at: Instant,
}

impl Shared {
    /// The steps collected since the last call.
    pub fn take_steps(&self) -> Vec<Step> {
        std::mem::take(&mut self.watched().done)
    }

    fn watched(&self) -> MutexGuard<'_, Watched> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Runner for Shared {
    fn launch(&mut self, batch: &ForwardBatch, rows: &[RowSampling]) -> Result<(), EngineError> {
        let mut watched = self.watched();
        watched.runner.launch(batch, rows)?;
        watched.launched.push_back(Step {
            tokens: batch.input_ids.len(),
            lengths: batch.seq_lens.clone(),
            at: Instant::now(),
        });
        Ok(())
    }

    fn sample(&mut self, rows: &[Option<RowSampling>]) -> Result<(), EngineError> {
        self.watched().runner.sample(rows)
    }

    fn collect(&mut self) -> Result<Vec<RowResult>, EngineError> {
        let mut watched = self.watched();
        let results = watched.runner.collect()?;
        let step = watched.launched.pop_front().ok_or_else(nothing_launched)?;
        watched.done.push(Step { at: Instant::now(), ..step });
        Ok(results)
    }

    fn depth(&self) -> usize {
        self.watched().runner.depth()
    }

    fn recover(&mut self) -> Result<(), EngineError> {
        let mut watched = self.watched();
        watched.launched.clear();
        watched.runner.recover()
    }
}
