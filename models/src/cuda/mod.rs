//! A model on a device: weights, KV cache, and steps from token ids to sampled tokens that are
//! launched and collected apart.
//!
//! A step is one upload, a fixed sequence of kernels over preallocated memory, and one download.
//! Where rows keep to formats, their masks are a second upload in front of the sampler (`formats`).
//! Steps that only decode (every sequence has one token and gets its next one) are recorded once
//! for some numbers of rows, and replayed with padding: one CUDA graph for the logits and one for
//! the sampler. All other steps launch the same kernels one by one, prefill's attention beside
//! decode's if some sequences have one token and others more. Quantised weights stay quantised
//! (`store`).

pub(crate) mod cache;
mod formats;
mod graphs;
mod inputs;
mod plans;
mod ranks;
pub(crate) mod store;
#[cfg(test)]
mod tests;
mod workspace;

use crate::cache_kinds::CacheKinds;
use crate::decoder::{Decoder, DecoderOptions, GroupBatch, StepBatch};
use crate::loader::ModelSource;
use crate::loader::tensors::Reading;
use crate::{Error, ForwardBatch, Model, ModelConfig, ModelOptions, Result};
use cache::{Budget, CacheSizes, DeviceCache};
use cresset_kernels::Compute;
use cresset_kernels::DeviceOps;
use cresset_kernels::attention::gpu::PagedSequences;
use cresset_kernels::embedding::DeviceTokens;
use cresset_kernels::gpu::{DeviceElement, Kind, Staging, StreamEvent};
use cresset_kernels::linear::Mode;
use cresset_kernels::linear::gpu::{LIBRARY_ROWS, ROUNDED_ROWS, uses_scratch};
use cresset_kernels::rope::E4M3;
use cresset_kernels::sampling::gpu::{History, RESULT_WORDS, Sample, decode, mask_words, sample};
use cresset_kernels::sampling::{DeviceRow, RowSampling, SampleError, SampleResult};
use formats::{known_at_launch, masks};
use graphs::{Graphs, StepPart};
use inputs::{Inputs, ModelShape, Staged, StepShape};
use plans::AttentionKinds;
pub use ranks::TensorParallel;
use std::collections::VecDeque;
use store::DeviceStore;
use workspace::StepWorkspace;

/// Steps that may be launched and not yet collected.
const DEPTH: usize = 2;
/// Special tokens, pieces of keys and blocks per row for which the inputs have room at first. Steps
/// with more make them grow.
const SPECIALS_PER_ROW: usize = 64;
const PIECES_PER_ROW: usize = 4;
const BLOCKS_PER_ROW: usize = 256;

impl ModelOptions {
    /// The kind of weights and activations on a device.
    fn kind(&self) -> Kind {
        if self.dequantise { Kind::F32 } else { Kind::Bf16 }
    }

    pub(crate) fn kv_kind(&self) -> Kind {
        if self.fp8_cache { E4M3 } else { self.kind() }
    }

    fn max_tokens(&self) -> usize {
        self.max_batched_tokens.max(self.max_rows)
    }

    /// Rows of activations that are rounded to eight bits at a time.
    fn rounded_rows(&self) -> usize {
        if self.byte_activations { self.max_tokens().min(ROUNDED_ROWS) } else { 0 }
    }

    /// Words for which the inputs have room at first.
    fn first_words(&self, model: ModelShape) -> usize {
        let (tokens, rows) = (self.max_tokens(), self.max_rows);
        let step = StepShape { tokens, ..StepShape::decode(rows, model) };
        let blocks = rows * BLOCKS_PER_ROW * model.groups;
        step.words(rows * PIECES_PER_ROW, blocks, rows * SPECIALS_PER_ROW)
    }
}

pub struct CudaModel {
    options: ModelOptions,
    /// The threads that ask formats.
    compute: Compute,
    decoder: Decoder<DeviceOps>,
    shape: ModelShape,
    attention: AttentionKinds,
    workspace: StepWorkspace,
    cache: DeviceCache,
    inputs: Inputs,
    graphs: Graphs,
    lanes: Vec<StepBuffers>,
    /// Number of steps staged since the start; each uses the next lane.
    staged: usize,
    in_flight: VecDeque<InFlight>,
    /// Number of results of the step launched last.
    previous_rows: usize,
    weight_bytes: usize,
    /// Memory of the device that the model has taken.
    memory_bytes: usize,
}

/// The host's buffers of a step. They may be written again once the step has been collected.
struct StepBuffers {
    inputs: Staging,
    masks: Staging,
    results: Staging,
}

struct InFlight {
    lane: usize,
    shape: StepShape,
    /// The end of the step, once its sampler is launched.
    done: Option<StreamEvent>,
    rows: Vec<RowInFlight>,
}

/// The host's data about a row whose result is not there yet.
struct RowInFlight {
    /// The number of log-probabilities that the request asks for, if any.
    logprobs: Option<u8>,
    masked: bool,
    /// Why the host rejected the row's sampling parameters, or has no mask for it: this overrides
    /// the device's result.
    rejected: Option<SampleError>,
}

impl CudaModel {
    /// Loads the weights, runs steps of all sizes once to see what they take, gives the KV cache
    /// the rest of the model's share, and records the steps.
    pub fn load(source: &ModelSource, gpu: &DeviceOps, options: &ModelOptions) -> Result<Self> {
        let (free_before, total) = gpu.memory()?;
        let kind = options.kind();
        let mode = if options.deterministic { Mode::Invariant } else { Mode::Fast };
        let dequantises = uses_scratch(mode, options.max_tokens());
        let compute = Compute::new(options.threads);
        let rounded_rows = options.rounded_rows();
        let mut store = DeviceStore::new(gpu, kind, compute.clone(), dequantises, rounded_rows)?;
        let sizes = DecoderOptions {
            kind,
            mode,
            max_tokens: options.max_tokens(),
            max_logits_rows: options.max_rows,
            max_context: options.max_context.unwrap_or(usize::MAX),
            rounds: options.byte_activations,
            guesses: false,
        };
        let mut decoder = Decoder::load(gpu.clone(), source, &mut store, Reading::Whole, &sizes)?;
        decoder.config.kv_kind = options.kv_kind();
        let weight_bytes = store.bytes;
        drop(store);
        tracing::info!(weight_bytes, "the weights are on the GPU");
        let attention = AttentionKinds::new(gpu, options, &decoder.config, decoder.positions)?;
        let workspace = StepWorkspace::new(gpu, options, &decoder.config, &attention)?;
        let graphs = Graphs::new(options.gpu_graph_rows.min(options.max_rows));
        let padding = CacheSizes::padding(&decoder.config);
        let cache = DeviceCache::new(gpu, &decoder.config, padding, options)?;
        let shape = ModelShape {
            shares: attention.shares(),
            groups: cache.kv.layout.parted_groups(),
            has_states: decoder.config.recurrent.is_some(),
        };
        let inputs = Inputs::new(gpu, options.first_words(shape))?;
        let mut model = Self {
            compute,
            decoder,
            shape,
            attention,
            workspace,
            cache,
            inputs,
            graphs,
            lanes: Vec::new(),
            staged: 0,
            in_flight: VecDeque::new(),
            previous_rows: 0,
            weight_bytes,
            memory_bytes: 0,
            options: options.clone(),
        };
        model.lanes = model.new_lanes(model.inputs.words())?;
        model.run_largest_steps()?;
        let sizes = model.cache_sizes(free_before, total)?;
        let cache_bytes = sizes.bytes(&model.decoder.config, options.block_size);
        model.cache = DeviceCache::new(gpu, &model.decoder.config, sizes, options)?;
        tracing::info!(
            weight_bytes,
            kv_blocks = model.num_blocks(),
            states = model.cache_kinds().states,
            cache_bytes,
            "the GPU holds the model"
        );
        model.record_all()?;
        let (free, _) = gpu.memory()?;
        // Other programs may have given memory back meanwhile.
        model.memory_bytes = free_before.saturating_sub(free).max(weight_bytes + cache_bytes);
        Ok(model)
    }

    /// The blocks and states for which the model's share has room beside all else. Every rank gets
    /// as many as the one that has room for the fewest.
    fn cache_sizes(&self, free_before: usize, total: usize) -> Result<CacheSizes> {
        let (gpu, options) = (self.gpu(), &self.options);
        let (free, _) = gpu.memory()?;
        let budget = Budget {
            total,
            free,
            own: free_before.saturating_sub(free),
            share: options.gpu_memory_share,
            reserve: options.gpu_reserve_mib << 20,
            most: (options.gpu_kv_mib > 0).then_some(options.gpu_kv_mib << 20),
            state_share: options.state_share,
        };
        let mut sizes = budget.sizes(&self.decoder.config, options.block_size)?;
        sizes.blocks = cache::fewest(gpu, sizes.blocks)?;
        sizes.states = cache::fewest(gpu, sizes.states)?;
        Ok(sizes)
    }

    fn gpu(&self) -> &DeviceOps {
        &self.decoder.ops
    }

    /// Encodes the rows and starts the step.
    fn start_rows(&mut self, batch: &ForwardBatch, rows: &[RowSampling]) -> Result<()> {
        let vocab_size = self.decoder.config.vocab_size;
        let encode = |row: &RowSampling| match DeviceRow::new(row, vocab_size) {
            Ok(row) => (row, None),
            Err(error) => {
                let masked = row.grammar.is_some();
                (DeviceRow { masked, ..DeviceRow::greedy() }, Some(error))
            }
        };
        let (rows, rejected): (Vec<_>, Vec<_>) = rows.iter().map(encode).unzip();
        self.start(batch, &rows)?;
        let started = self.in_flight.back_mut().into_iter().flat_map(|step| &mut step.rows);
        started.zip(rejected).for_each(|(row, rejected)| row.rejected = rejected);
        Ok(())
    }

    /// Starts a step whose rows are encoded. If some are masked, it waits for their masks.
    fn start(&mut self, batch: &ForwardBatch, rows: &[DeviceRow]) -> Result<()> {
        self.check(batch, rows.len())?;
        let shape = self.shape(batch);
        let lane = self.stage(batch, rows, shape)?;
        self.run(StepPart::Logits, &shape)?;
        self.previous_rows = rows.len();
        let row = |row: &DeviceRow| RowInFlight {
            logprobs: row.params.logprobs,
            masked: row.masked,
            rejected: None,
        };
        let in_flight = rows.iter().map(row).collect();
        self.in_flight.push_back(InFlight { lane, shape, done: None, rows: in_flight });
        let waits = rows.iter().any(|row| row.masked);
        if waits { Ok(()) } else { self.sample_last() }
    }

    /// Samples the step launched last.
    fn sample_last(&mut self) -> Result<()> {
        let Some(&InFlight { lane, shape, ref rows, .. }) = self.in_flight.back() else {
            return Err(Error::nothing_launched());
        };
        let results = self.workspace.results.view().slice(0..rows.len() * RESULT_WORDS);
        self.run(StepPart::Sampling, &shape)?;
        let gpu = &*self.decoder.ops;
        gpu.download(results, &self.lanes[lane].results, 0)?;
        let done = Some(gpu.record()?);
        if let Some(step) = self.in_flight.back_mut() {
            step.done = done;
        }
        Ok(())
    }

    /// Launches a part of a step, recorded if steps of this shape are.
    fn run(&mut self, part: StepPart, shape: &StepShape) -> Result<()> {
        if !self.graphs.covers(shape) {
            return self.launch_part(part, shape);
        }
        self.with_graphs(|model, graphs| {
            let launch = || model.launch_part(part, shape);
            graphs.replay(&**model.gpu(), (shape.rows, part), &launch)
        })
    }

    /// Buffers for inputs of so many words.
    fn new_lanes(&self, words: usize) -> Result<Vec<StepBuffers>> {
        let staging = |words: usize| self.gpu().staging(words * Kind::U32.bytes());
        let (rows, vocab_size) = (self.options.max_rows, self.decoder.config.vocab_size);
        let lane = |_| {
            Ok(StepBuffers {
                inputs: staging(words)?,
                masks: staging(rows * mask_words(vocab_size))?,
                results: staging(rows * RESULT_WORDS)?,
            })
        };
        (0..DEPTH).map(lane).collect()
    }

    fn check(&self, batch: &ForwardBatch, rows: usize) -> Result<()> {
        let max_rows = self.options.max_rows;
        let fail = |what: String| Err(Error::Batch(what));
        if self.in_flight.len() == DEPTH {
            return fail(format!("{DEPTH} steps are in flight already"));
        }
        if self.in_flight.back().is_some_and(|step| step.done.is_none()) {
            return fail("the step before waits for its formats".into());
        }
        let (tokens, most) = (batch.input_ids.len(), self.options.max_tokens());
        if tokens > most || batch.seq_lens.len() > most || rows > max_rows {
            return fail(format!(
                "{tokens} tokens and {rows} rows in a step of at most {most} and {max_rows}"
            ));
        }
        batch.check_rows(rows)?;
        if let Some(&index) = batch.feedback.iter().flatten().max()
            && index as usize >= self.previous_rows
        {
            return fail(format!("result {index} of a step that had {}", self.previous_rows));
        }
        if !batch.part_starts.is_empty() {
            return fail("sequences in parts, where a device keeps one state of each".into());
        }
        self.decoder.check(batch, &self.cache.kv, self.num_blocks())
    }

    /// The batch's own shape, or that of a recorded step which has room for it.
    fn shape(&self, batch: &ForwardBatch) -> StepShape {
        let queries = || batch.cu_seqlens_q.windows(2).map(|span| (span[1] - span[0]) as usize);
        // Decode's workspace has room for `max_rows` sequences.
        let decodes = queries().take(self.options.max_rows).take_while(|n| *n == 1).count();
        let own = StepShape {
            tokens: batch.input_ids.len(),
            sequences: batch.seq_lens.len(),
            decodes,
            rows: batch.logits_indices.len(),
            most_queries: queries().skip(decodes).max().unwrap_or(0),
            longest_prompt: batch
                .seq_lens
                .iter()
                .skip(decodes)
                .max()
                .map_or(0, |len| *len as usize),
            model: self.shape,
        };
        let recorded = self.graphs.bucket(own.rows).filter(|_| own.is_decode());
        recorded.map_or(own, |rows| StepShape::decode(rows, self.shape))
    }

    /// Uploads the inputs of the step, and returns the lane that was used.
    fn stage(
        &mut self,
        batch: &ForwardBatch,
        rows: &[DeviceRow],
        shape: StepShape,
    ) -> Result<usize> {
        let parted = batch.in_parts(&self.cache.kv.layout.parts, self.options.block_size);
        let batch = parted.as_ref().unwrap_or(batch);
        let plans = self.attention.plan(&batch.seq_lens, shape.decodes);
        let staged = Staged {
            batch,
            rows,
            shape,
            plans: &plans,
            prefill_split: self.attention.prefill_split(),
            dummy_blocks: &self.cache.dummy_blocks(),
            dummy_state: self.cache_kinds().states as u32,
            block_size: self.options.block_size,
        };
        let words = staged.words();
        self.reserve(words)?;
        let number = self.staged % DEPTH;
        self.staged += 1;
        let lane = &mut self.lanes[number];
        staged.write(lane.inputs.words_mut());
        self.inputs.upload(&*self.decoder.ops, &lane.inputs, words)?;
        Ok(number)
    }

    /// Makes room for larger inputs. Recorded steps name the old ones, so they are dropped. Without
    /// room the step fails alone: nothing is replaced before all is there.
    fn reserve(&mut self, words: usize) -> Result<()> {
        if words <= self.inputs.words() {
            return Ok(());
        }
        let words = words.next_power_of_two();
        let (inputs, lanes) = (Inputs::new(self.gpu(), words)?, self.new_lanes(words)?);
        self.gpu().synchronise()?;
        self.graphs.forget();
        self.inputs = inputs;
        // Results that were not collected yet stay where they are.
        for (larger, lane) in lanes.into_iter().zip(&mut self.lanes) {
            lane.inputs = larger.inputs;
        }
        Ok(())
    }

    /// Runs the largest step, and before it one step for each power of two of rows, at which the
    /// library's algorithms are chosen. The first step of a size takes longer than any step of
    /// serving should.
    fn run_largest_steps(&mut self) -> Result<()> {
        let most = self.options.max_tokens();
        let sizes = std::iter::successors(Some(LIBRARY_ROWS.next_power_of_two()), |tokens| {
            tokens.checked_mul(2)
        });
        for tokens in sizes.take_while(|tokens| *tokens < most).chain([most]) {
            let batch = self.full_batch(tokens);
            self.run_unsampled(&batch, self.shape(&batch))?;
        }
        Ok(())
    }

    /// A batch in which half of the tokens belong to sequences that decode and the others to whole
    /// prompts, with as many rows as they allow, all in the dummy block.
    fn full_batch(&self, tokens: usize) -> ForwardBatch {
        let (positions, block_size) = (self.decoder.positions, self.options.block_size);
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
        let groups = self.cache_kinds().windows.len();
        batch.slot_mapping = batch.slot_mapping.repeat(groups);
        batch.block_tables = vec![batch.block_tables; groups].concat();
        batch
    }

    /// Runs each step that is to be recorded once, with padding alone, and records it.
    fn record_all(&mut self) -> Result<()> {
        for rows in self.graphs.buckets() {
            let shape = StepShape::decode(rows, self.shape);
            self.run_unsampled(&ForwardBatch::default(), shape)?;
            for part in [StepPart::Logits, StepPart::Sampling] {
                self.with_graphs(|model, graphs| {
                    let launch = || model.launch_part(part, &shape);
                    graphs.record(&**model.gpu(), (rows, part), &launch)
                })?;
            }
        }
        Ok(())
    }

    /// Lets `work` change the recorded steps, which call the model.
    fn with_graphs(&mut self, work: impl FnOnce(&Self, &mut Graphs) -> Result<()>) -> Result<()> {
        let mut graphs = std::mem::take(&mut self.graphs);
        let outcome = work(self, &mut graphs);
        self.graphs = graphs;
        outcome
    }

    /// Runs a step whose results are not used: all its rows are sampled as padding.
    fn run_unsampled(&mut self, batch: &ForwardBatch, shape: StepShape) -> Result<()> {
        self.stage(batch, &[], shape)?;
        self.step(&shape)?;
        Ok(self.gpu().synchronise()?)
    }

    /// Launches everything from token ids to the sampled tokens and their results.
    fn step(&self, shape: &StepShape) -> Result<()> {
        self.compute_logits(shape)?;
        self.sample_logits(shape)
    }

    fn launch_part(&self, part: StepPart, shape: &StepShape) -> Result<()> {
        match part {
            StepPart::Logits => self.compute_logits(shape),
            StepPart::Sampling => self.sample_logits(shape),
        }
    }

    /// Samples the rows from their logits.
    fn sample_logits(&self, shape: &StepShape) -> Result<()> {
        let rows = shape.rows;
        if rows == 0 {
            return Ok(());
        }
        let Self { workspace: w, cache, inputs, .. } = self;
        let PagedSequences { seq_lens, tables, table_starts } = inputs.all(shape, 0);
        let (tokens, block_size) = (cache.tokens.view(), cache.kv.block_size);
        let args = Sample {
            logits: w.logits(rows),
            vocab_size: self.decoder.config.vocab_size,
            params: inputs.sampling(shape),
            masks: w.masks.view(),
            history: History { tokens, seq_lens, tables, table_starts, block_size },
            tokens: w.tokens.view().slice(0..rows),
            results: w.results.view().slice(0..rows * RESULT_WORDS),
            workspace: w.sampling.view(),
        };
        Ok(sample(&**self.gpu(), &args)?)
    }

    /// Writes K and V of every token into the cache, and computes the logits of the rows that are
    /// sampled.
    fn compute_logits(&self, shape: &StepShape) -> Result<()> {
        let Self { workspace: w, cache, inputs, .. } = self;
        let plans = inputs.plans(shape, &self.attention.windows());
        let in_parts = !self.options.deterministic;
        let group = |group: usize| GroupBatch {
            slots: inputs.slots(shape, group),
            sequences: inputs.sequences((shape, group), &plans, in_parts, w.attention()),
        };
        let groups: Vec<_> = (0..shape.model.groups).map(group).collect();
        let step = StepBatch {
            tokens: shape.tokens,
            logits_rows: shape.rows,
            ids: inputs.ids(shape),
            positions: inputs.positions(shape),
            selected: inputs.selected(shape),
            groups: &groups,
            states: inputs.states(shape),
            device: Some(DeviceTokens {
                feedback: inputs.feedback(shape),
                previous: w.tokens.view(),
                slots: inputs.slots(shape, 0),
                history: cache.tokens.view(),
            }),
        };
        self.decoder.forward(&step, &cache.kv, w.logits(shape.rows))
    }
}

impl Model for CudaModel {
    fn config(&self) -> &ModelConfig {
        &self.decoder.config
    }

    fn weight_bytes(&self) -> usize {
        self.weight_bytes
    }

    fn memory_bytes(&self) -> usize {
        self.memory_bytes
    }

    /// Does not count the block that padding rows write to.
    fn num_blocks(&self) -> usize {
        self.cache.kv.num_blocks - 1
    }

    fn cache_kinds(&self) -> &CacheKinds {
        &self.cache.kv.layout.kinds
    }

    fn depth(&self) -> usize {
        DEPTH
    }

    fn launch(&mut self, batch: &ForwardBatch, rows: &[RowSampling]) -> Result<()> {
        self.start_rows(batch, rows)?;
        known_at_launch(rows).map_or(Ok(()), |rows| self.sample(&rows))
    }

    fn sample(&mut self, rows: &[Option<RowSampling>]) -> Result<()> {
        self.sample_masked(&masks(&self.compute, rows))
    }

    fn collect(&mut self) -> Result<Vec<SampleResult>> {
        let sampled = self.in_flight.pop_front_if(|step| step.done.is_some());
        let oldest = sampled.ok_or_else(Error::nothing_launched)?;
        oldest.done.iter().try_for_each(|done| self.gpu().wait(done))?;
        let bytes = oldest.rows.len() * RESULT_WORDS * Kind::U32.bytes();
        let words = u32::decode(&self.lanes[oldest.lane].results.bytes()[..bytes]);
        let results = words.chunks_exact(RESULT_WORDS);
        let result = |(row, result): (RowInFlight, &[u32])| {
            row.rejected.map_or_else(|| decode(result, row.logprobs), Err)
        };
        Ok(oldest.rows.into_iter().zip(results).map(result).collect())
    }

    fn recover(&mut self) -> Result<()> {
        self.gpu().synchronise()?;
        self.in_flight.clear();
        self.previous_rows = 0;
        Ok(())
    }
}

impl Drop for CudaModel {
    /// Steps in flight still read and write the lanes.
    fn drop(&mut self) {
        if let Err(error) = self.gpu().synchronise() {
            tracing::error!(%error, "the device failed before its model was unloaded");
        }
    }
}
