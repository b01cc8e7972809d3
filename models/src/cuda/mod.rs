//! A model on a device: weights, KV cache, and steps from token ids to sampled tokens that are
//! launched and collected apart.
//!
//! A step is one upload, a fixed sequence of kernels over preallocated memory, and one download.
//! Steps in which every sequence has one token and wants its next one are recorded once for some
//! numbers of rows and replayed with padding; all others run the same kernels one by one, prefill's
//! attention beside decode's where prompts come with sequences of one token. Quantised files are
//! widened to bf16 when they are loaded.

mod cache;
mod decoder;
mod graphs;
mod inputs;
mod store;
#[cfg(test)]
mod tests;
mod workspace;

pub use inputs::Row;

use crate::loader::{self, ModelSource};
use crate::{Error, ForwardBatch, ModelConfig, Result};
use cache::{Budget, KvCache, block_bytes};
use cresset_kernels::Compute;
use cresset_kernels::attention::gpu::{WHOLE, tokens_per_split};
use cresset_kernels::gpu::{DeviceElement, Gpu, Kind, Staging, StreamEvent};
use cresset_kernels::linear::gpu::FEW;
use cresset_kernels::sampling::gpu::{Outcome, RESULT_WORDS, RowParams, decode};
use decoder::Decoder;
use graphs::Graphs;
use inputs::{Inputs, Shape, Staged};
use std::collections::VecDeque;
use std::sync::Arc;
use store::Device;

/// Steps that may be launched and not yet collected.
pub const DEPTH: usize = 2;
/// Most pieces that one sequence's keys are cut into.
const MOST_SPLITS: usize = 32;
/// Thread blocks of attention that a multiprocessor is given to choose from, those that find no
/// work included.
const BLOCKS_PER_MULTIPROCESSOR: usize = 16;
/// Special tokens and table entries a row, in the inputs' first size. Steps with more make them
/// grow.
const SPECIALS_PER_ROW: usize = 64;
const BLOCKS_PER_ROW: usize = 256;

#[derive(Clone)]
pub struct Options {
    pub gpu: Arc<dyn Gpu>,
    /// Converts the weights at load.
    pub compute: Compute,
    /// Of weights, activations and cache: bf16 or f32.
    pub kind: Kind,
    /// Each row has the same bits in any company.
    pub deterministic: bool,
    /// Of the device's memory, 0 to 1: what the model may take. The rest is for recorded steps and
    /// the driver.
    pub memory_share: f64,
    /// Tokens of a block of the KV cache.
    pub block_size: usize,
    /// Largest number of tokens in one step.
    pub max_batched_tokens: usize,
    /// Largest number of sequences in one step.
    pub max_rows: usize,
    /// Longest sequence, tokens.
    pub max_context: usize,
    /// Largest number of rows whose steps are recorded. 0 records none.
    pub graph_rows: usize,
}

impl Options {
    fn max_tokens(&self) -> usize {
        self.max_batched_tokens.max(self.max_rows)
    }

    fn positions(&self, config: &ModelConfig) -> usize {
        self.max_context.min(config.max_positions)
    }
}

/// How many pieces a sequence's keys may be cut into in a step in which so many decode.
fn max_splits(options: &Options, config: &ModelConfig, sequences: usize) -> usize {
    if options.deterministic {
        return MOST_SPLITS;
    }
    let blocks = BLOCKS_PER_MULTIPROCESSOR * options.gpu.properties().multiprocessors as usize;
    blocks.div_ceil(sequences.max(1) * config.kv_heads).clamp(1, MOST_SPLITS)
}

pub struct GpuModel {
    options: Options,
    decoder: Decoder,
    kv: KvCache,
    inputs: Inputs,
    graphs: Graphs,
    lanes: Vec<Lane>,
    /// Steps ever staged: each takes the next lane.
    staged: usize,
    in_flight: VecDeque<InFlight>,
    /// Results of the step launched last.
    previous_rows: usize,
    weight_bytes: usize,
}

/// The host's side of a step. Its buffers may be changed again when the step has been collected.
struct Lane {
    inputs: Staging,
    results: Staging,
}

struct InFlight {
    lane: usize,
    done: StreamEvent,
    rows: Vec<RowParams>,
}

impl GpuModel {
    /// Loads the weights, runs steps of all sizes once to see what they take, gives the KV cache
    /// the rest of the model's share, and records the steps.
    pub fn load(source: &ModelSource, options: Options) -> Result<Self> {
        let gpu = options.gpu.clone();
        let (free_before, total) = gpu.memory()?;
        let mut store = Device::new(&gpu, options.kind, options.compute.clone())?;
        let (blueprint, weights) = loader::read(source, &mut store)?;
        let weight_bytes = store.bytes;
        drop(store);
        let decoder = Decoder::new(blueprint, weights, &options)?;
        let (kind, block_size, layout) =
            (options.kind, options.block_size, decoder.config.kv_layout());
        let rows = options.max_rows;
        let first =
            Shape { tokens: options.max_tokens(), ..Shape::decode(rows, 1, BLOCKS_PER_ROW) };
        let inputs = Inputs::new(&gpu, first.words(rows * SPECIALS_PER_ROW))?;
        let graphs = Graphs::new(options.graph_rows.min(rows));
        let kv = KvCache::new(&gpu, kind, &layout, 1, block_size)?;
        let mut model = Self {
            decoder,
            kv,
            inputs,
            graphs,
            lanes: Vec::new(),
            staged: 0,
            in_flight: VecDeque::new(),
            previous_rows: 0,
            weight_bytes,
            options,
        };
        model.lanes = model.new_lanes()?;
        model.run_largest_steps()?;
        let (free, _) = gpu.memory()?;
        let budget = Budget {
            total,
            free,
            own: free_before.saturating_sub(free),
            share: model.options.memory_share,
        };
        let blocks = budget.blocks(block_bytes(&layout, kind, block_size), block_size)?;
        model.kv = KvCache::new(&gpu, kind, &layout, blocks, block_size)?;
        tracing::info!(
            weight_bytes,
            kv_blocks = model.num_blocks(),
            kv_bytes = model.kv.bytes(),
            "the GPU holds the model"
        );
        model.record_all()?;
        Ok(model)
    }

    pub fn config(&self) -> &ModelConfig {
        &self.decoder.config
    }

    pub fn weight_bytes(&self) -> usize {
        self.weight_bytes
    }

    /// Blocks that batches may use. One more is the padding's.
    pub fn num_blocks(&self) -> usize {
        self.kv.num_blocks - 1
    }

    /// Starts a step. `rows[i]` says how to sample from the logits of `batch.logits_indices[i]`,
    /// the last token of its sequence. Where the batch's `feedback` names a result, it is one of
    /// the step launched just before.
    pub fn launch(&mut self, batch: &ForwardBatch, rows: &[Row]) -> Result<()> {
        self.check(batch, rows)?;
        let shape = self.shape(batch);
        let lane = self.stage(batch, rows, shape)?;
        let gpu = &*self.options.gpu;
        if self.graphs.covers(&shape) {
            let step = || self.decoder.step(&self.kv, &self.inputs, &shape);
            self.graphs.replay(gpu, shape, &step)?;
        } else {
            self.decoder.step(&self.kv, &self.inputs, &shape)?;
        }
        let results = self.decoder.workspace.results.view().slice(0..rows.len() * RESULT_WORDS);
        gpu.download(results, &self.lanes[lane].results, 0)?;
        let rows: Vec<_> = rows.iter().map(|(params, _)| params.clone()).collect();
        self.previous_rows = rows.len();
        self.in_flight.push_back(InFlight { lane, done: gpu.record()?, rows });
        Ok(())
    }

    /// The outcomes of the oldest launched step: one for each of its rows. Waits for them.
    pub fn collect(&mut self) -> Result<Vec<Outcome>> {
        let oldest = self
            .in_flight
            .pop_front()
            .ok_or_else(|| Error::Batch("nothing was launched".into()))?;
        self.options.gpu.wait(&oldest.done)?;
        let bytes = oldest.rows.len() * RESULT_WORDS * Kind::U32.bytes();
        let words = u32::decode(&self.lanes[oldest.lane].results.bytes()[..bytes]);
        Ok(oldest
            .rows
            .iter()
            .zip(words.chunks_exact(RESULT_WORDS))
            .map(|(row, result)| decode(result, row))
            .collect())
    }

    /// Forgets everything launched. A device that has failed stays so, which is an error here.
    pub fn recover(&mut self) -> Result<()> {
        self.options.gpu.synchronise()?;
        self.in_flight.clear();
        self.previous_rows = 0;
        Ok(())
    }

    fn new_lanes(&self) -> Result<Vec<Lane>> {
        let staging = |words: usize| self.options.gpu.staging(words * Kind::U32.bytes());
        let (words, results) = (self.inputs.words(), self.options.max_rows * RESULT_WORDS);
        let lane = |_| Ok(Lane { inputs: staging(words)?, results: staging(results)? });
        (0..DEPTH).map(lane).collect()
    }

    fn check(&self, batch: &ForwardBatch, rows: &[Row]) -> Result<()> {
        let Options { max_rows, block_size, .. } = self.options;
        let fail = |what: String| Err(Error::Batch(what));
        if self.in_flight.len() == DEPTH {
            return fail(format!("{DEPTH} steps are in flight already"));
        }
        let (tokens, most) = (batch.input_ids.len(), self.options.max_tokens());
        if tokens > most || batch.seq_lens.len() > most || rows.len() > max_rows {
            return fail(format!(
                "{tokens} tokens and {} rows in a step of at most {most} and {max_rows}",
                rows.len()
            ));
        }
        if rows.len() != batch.logits_indices.len() {
            return fail(format!(
                "{} rows are sampled where {} are wanted",
                rows.len(),
                batch.logits_indices.len()
            ));
        }
        if let Some(&index) = batch.feedback.iter().flatten().max()
            && index as usize >= self.previous_rows
        {
            return fail(format!("result {index} of a step that had {}", self.previous_rows));
        }
        let config = self.config();
        let positions = self.options.positions(config);
        batch
            .check(config.vocab_size, positions, block_size, self.num_blocks())
            .map_err(Error::Batch)
    }

    /// The batch's own shape, or that of a recorded step which has room for it.
    fn shape(&self, batch: &ForwardBatch) -> Shape {
        let queries = || batch.cu_seqlens_q.windows(2).map(|span| (span[1] - span[0]) as usize);
        // Decode's workspace has room for so many sequences.
        let decodes = queries().take(self.options.max_rows).take_while(|n| *n == 1).count();
        let own = Shape {
            tokens: batch.input_ids.len(),
            sequences: batch.seq_lens.len(),
            decodes,
            rows: batch.logits_indices.len(),
            most_queries: queries().skip(decodes).max().unwrap_or(0),
            max_splits: self.max_splits(decodes),
            table_stride: batch.block_tables.iter().map(Vec::len).max().unwrap_or(0).max(1),
        };
        let recorded = self.graphs.bucket(own.rows).filter(|_| own.is_decode());
        recorded.map_or(own, |rows| Shape::decode(rows, self.max_splits(rows), own.table_stride))
    }

    fn max_splits(&self, decodes: usize) -> usize {
        max_splits(&self.options, self.config(), decodes)
    }

    /// Tokens of a split of the keys, for decode and for prefill. Where prefill's bits need not be
    /// decode's, it has none.
    fn splits(&self, batch: &ForwardBatch, shape: &Shape) -> [u32; 2] {
        let Options { ref gpu, deterministic, .. } = self.options;
        let longest =
            batch.seq_lens.iter().take(shape.decodes).copied().max().unwrap_or(1) as usize;
        let (kv_heads, context) = (self.config().kv_heads, self.options.positions(self.config()));
        let Shape { decodes, max_splits, .. } = *shape;
        let split = tokens_per_split(
            &**gpu,
            decodes,
            kv_heads,
            longest,
            context,
            max_splits,
            deterministic,
        ) as u32;
        [split, if deterministic { split } else { WHOLE }]
    }

    /// Uploads what the step reads, from the lane whose number it returns.
    fn stage(&mut self, batch: &ForwardBatch, rows: &[Row], shape: Shape) -> Result<usize> {
        let (splits, dummy_block) = (self.splits(batch, &shape), self.num_blocks() as u32);
        let staged =
            Staged { batch, rows, shape, splits, dummy_block, block_size: self.options.block_size };
        let words = staged.words();
        self.reserve(words)?;
        let number = self.staged % DEPTH;
        self.staged += 1;
        let lane = &mut self.lanes[number];
        staged.write(lane.inputs.words_mut());
        self.inputs.upload(&*self.options.gpu, &lane.inputs, words)?;
        Ok(number)
    }

    /// Makes room for larger inputs, which recorded steps do not know.
    fn reserve(&mut self, words: usize) -> Result<()> {
        if words <= self.inputs.words() {
            return Ok(());
        }
        self.options.gpu.synchronise()?;
        self.graphs.forget();
        self.inputs = Inputs::new(&self.options.gpu, words.next_power_of_two())?;
        // Results that were not collected yet stay where they are.
        for (larger, lane) in self.new_lanes()?.into_iter().zip(&mut self.lanes) {
            lane.inputs = larger.inputs;
        }
        Ok(())
    }

    /// The largest step, and before it one for each size that the library's products are chosen
    /// for, powers of two: the first of a size takes longer than any step of serving should.
    fn run_largest_steps(&mut self) -> Result<()> {
        let most = self.options.max_tokens();
        let sizes = std::iter::successors(Some(2 * FEW), |tokens| tokens.checked_mul(2));
        for tokens in sizes.take_while(|tokens| *tokens < most).chain([most]) {
            let batch = self.full_batch(tokens);
            self.run_unsampled(&batch, self.shape(&batch))?;
        }
        Ok(())
    }

    /// Sequences that decode for half of the tokens, whole prompts for the others, and as many rows
    /// as they allow, all in the dummy block.
    fn full_batch(&self, tokens: usize) -> ForwardBatch {
        let (positions, block_size) =
            (self.options.positions(self.config()), self.options.block_size);
        let mut batch = ForwardBatch { cu_seqlens_q: vec![0], ..ForwardBatch::default() };
        while batch.input_ids.len() < tokens {
            let left = tokens - batch.input_ids.len();
            let decodes = batch.seq_lens.len() < self.options.max_rows.min(tokens / 2);
            let len = if decodes { 1 } else { positions.min(left) };
            batch.positions.extend(0..len as u32);
            batch.slot_mapping.extend((0..len).map(|position| (position % block_size) as u32));
            batch.input_ids.resize(batch.input_ids.len() + len, 0);
            batch.cu_seqlens_q.push(batch.input_ids.len() as u32);
            batch.seq_lens.push(len as u32);
            batch.block_tables.push(vec![0; len.div_ceil(block_size)]);
        }
        batch.logits_indices = (0..self.options.max_rows.min(tokens) as u32).collect();
        batch
    }

    /// Runs each step that is to be recorded once, with padding alone, and records it.
    fn record_all(&mut self) -> Result<()> {
        for rows in self.graphs.buckets() {
            let shape = Shape::decode(rows, self.max_splits(rows), 1);
            self.run_unsampled(&ForwardBatch::default(), shape)?;
            let step = || self.decoder.step(&self.kv, &self.inputs, &shape);
            self.graphs.record(&*self.options.gpu, shape, &step)?;
        }
        Ok(())
    }

    /// A step whose results nobody wants: all its rows are sampled as padding.
    fn run_unsampled(&mut self, batch: &ForwardBatch, shape: Shape) -> Result<()> {
        self.stage(batch, &[], shape)?;
        self.decoder.step(&self.kv, &self.inputs, &shape)?;
        Ok(self.options.gpu.synchronise()?)
    }
}

impl Drop for GpuModel {
    /// Steps in flight still read and write the lanes.
    fn drop(&mut self) {
        if let Err(error) = self.options.gpu.synchronise() {
            tracing::error!(%error, "the device failed before its model was unloaded");
        }
    }
}
