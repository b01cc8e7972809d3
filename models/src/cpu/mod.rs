//! A model on the CPU: quantised weights stay quantised, and a step is computed when it is
//! launched.

mod guesses;
mod inspect;
mod store;

pub use inspect::{ModelCard, inspect};

use crate::cache_kinds::{CacheKinds, CacheLayout};
use crate::decoder::{Decoder, DecoderOptions, GroupBatch, StepBatch};
use crate::loader::tensors::Reading;
use crate::{
    Error, ForwardBatch, KvCache, Model, ModelConfig, ModelOptions, ModelSource, Result,
    WantedGuesses,
};
use candle_core::{DType, Device, Tensor};
use cresset_kernels::Compute;
use cresset_kernels::attention::HostSequences;
use cresset_kernels::gpu::Kind;
use cresset_kernels::linear::Mode;
use cresset_kernels::recurrence::StateMoves;
use cresset_kernels::sampling::cpu::RowSampler;
use cresset_kernels::sampling::{RowSampling, SampleResult};
use store::CpuStore;

pub struct CpuModel {
    decoder: Decoder<Compute>,
    kv: KvCache<Compute>,
    max_tokens: usize,
    /// `[rows, vocab_size]` f32; it grows to the largest number of rows that a step has had.
    logits: Tensor,
    sampler: RowSampler,
    /// The slots of the tokens of the step computed last, if a head can guess on from their states.
    known_slots: Vec<u32>,
    /// The results of the launched step, which is computed right away.
    results: Option<Vec<SampleResult>>,
    weight_bytes: usize,
}

impl CpuModel {
    /// Loads the weights and allocates as many KV blocks as `options.kv_bytes` hold.
    pub fn load(source: &ModelSource, options: &ModelOptions) -> Result<Self> {
        let mut compute = Compute::new(options.threads);
        if options.byte_activations {
            let bytes = compute.with_byte_activations();
            compute = bytes.map_err(|why| Error::Unsupported(why.to_string()))?;
        }
        let mut store =
            CpuStore { compute: compute.clone(), dequantise: options.dequantise, bytes: 0 };
        let max_tokens = options.max_batched_tokens;
        let sizes = DecoderOptions {
            kind: Kind::F32,
            mode: Mode::Invariant,
            max_tokens,
            max_logits_rows: max_tokens,
            max_context: options.max_context.unwrap_or(usize::MAX),
            rounds: false,
            guesses: options.guesses,
        };
        let mut decoder = Decoder::load(compute, source, &mut store, Reading::Whole, &sizes)?;
        if decoder.quantised {
            decoder.config.kv_kind = Kind::F16;
        }
        let config = &decoder.config;
        let mut layout = CacheLayout::by_kind(config);
        layout.kinds.states = options.num_states(config.state_bytes())?;
        layout.kinds.first_kept = options.state_tokens;
        let state_bytes = layout.kinds.states * config.state_bytes();
        let block_bytes = layout.block_bytes(config, options.block_size);
        let blocks = options.num_blocks(block_bytes, state_bytes)?;
        Ok(Self {
            kv: KvCache::new(&decoder.ops, config, layout, blocks, options.block_size)?,
            max_tokens,
            logits: zeros(1, config.vocab_size)?,
            sampler: RowSampler::default(),
            known_slots: Vec::new(),
            results: None,
            weight_bytes: store.bytes,
            decoder,
        })
    }

    /// Computes one step without sampling. Returns f32 logits `[batch.logits_indices.len(),
    /// vocab_size]`, valid until the next step.
    pub fn forward(&mut self, batch: &ForwardBatch) -> Result<Tensor> {
        self.check(batch)?;
        self.known_slots.clear();
        let logits = self.logits(batch.logits_indices.len())?;
        self.compute(batch, &batch.input_ids, &logits, None)?;
        Ok(logits)
    }

    /// Computes the batch with these ids in place of its own: with the model, or with its head from
    /// the states of the rows `sources`. The first rows that get logits are as many as `logits` has
    /// room for.
    fn compute(
        &self,
        batch: &ForwardBatch,
        ids: &[u32],
        logits: &Tensor,
        sources: Option<&[u32]>,
    ) -> Result<()> {
        let parted = batch.in_parts(&self.kv.layout.parts, self.kv.block_size);
        let batch = parted.as_ref().unwrap_or(batch);
        let slots = batch.slot_mapping.chunks(batch.input_ids.len());
        let tables = batch.block_tables.chunks(batch.seq_lens.len());
        let group = |(slots, block_tables)| GroupBatch {
            slots,
            sequences: HostSequences {
                cu_seqlens_q: &batch.cu_seqlens_q,
                seq_lens: &batch.seq_lens,
                block_tables,
            },
        };
        let groups: Vec<GroupBatch<Compute>> = slots.zip(tables).map(group).collect();
        let selected = &batch.logits_indices[..logits.dim(0)?];
        let step = StepBatch {
            tokens: ids.len(),
            logits_rows: selected.len(),
            ids,
            positions: &batch.positions[..],
            selected,
            groups: &groups,
            states: (!batch.state_writes.is_empty()).then_some(StateMoves {
                starts: batch.part_starts(),
                reads: &batch.state_reads,
                writes: &batch.state_writes,
            }),
            device: None,
        };
        match sources {
            None => self.decoder.forward(&step, &self.kv, logits.into()),
            Some(sources) => self.decoder.guess(&step, sources, &self.kv, logits.into()),
        }
    }

    fn check(&self, batch: &ForwardBatch) -> Result<()> {
        let (tokens, most) = (batch.input_ids.len(), self.max_tokens);
        if tokens > most {
            return Err(Error::Batch(format!("{tokens} tokens in a step of at most {most}")));
        }
        self.decoder.check(batch, &self.kv, self.kv.num_blocks)
    }

    /// Returns a view of `n` rows of logits.
    fn logits(&mut self, n: usize) -> Result<Tensor> {
        let (rows, vocab_size) = self.logits.dims2()?;
        if n > rows {
            self.logits = zeros(n.next_power_of_two(), vocab_size)?;
        }
        Ok(self.logits.narrow(0, 0, n)?)
    }
}

fn zeros(rows: usize, vocab_size: usize) -> Result<Tensor> {
    Ok(Tensor::zeros((rows, vocab_size), DType::F32, &Device::Cpu)?)
}

impl Model for CpuModel {
    fn config(&self) -> &ModelConfig {
        &self.decoder.config
    }

    fn weight_bytes(&self) -> usize {
        self.weight_bytes
    }

    fn memory_bytes(&self) -> usize {
        let KvCache { layout, block_size, .. } = &self.kv;
        let block_bytes = layout.block_bytes(&self.decoder.config, *block_size);
        let states = layout.kinds.states * self.decoder.config.state_bytes();
        self.weight_bytes + self.kv.num_blocks * block_bytes + states
    }

    fn num_blocks(&self) -> usize {
        self.kv.num_blocks
    }

    fn cache_kinds(&self) -> &CacheKinds {
        &self.kv.layout.kinds
    }

    fn depth(&self) -> usize {
        1
    }

    fn launch(&mut self, batch: &ForwardBatch, rows: &[RowSampling]) -> Result<()> {
        if self.results.is_some() || !batch.feedback.is_empty() {
            return Err(Error::Batch(
                "a step was launched before the one before it was collected".into(),
            ));
        }
        batch.check_rows(rows.len())?;
        let logits = self.forward(batch)?;
        let results = self.sampler.sample(&self.decoder.ops, (&logits).into(), rows)?;
        if self.decoder.guesses() {
            self.follow(batch, &results)?;
        }
        self.results = Some(results);
        Ok(())
    }

    fn guesses(&self) -> bool {
        self.decoder.guesses()
    }

    fn guess(&mut self, wanted: Vec<WantedGuesses>) -> Result<Vec<Vec<u32>>> {
        self.guess_all(wanted)
    }

    fn collect(&mut self) -> Result<Vec<SampleResult>> {
        self.results.take().ok_or_else(Error::nothing_launched)
    }

    fn recover(&mut self) -> Result<()> {
        self.results = None;
        Ok(())
    }
}

#[cfg(test)]
impl CpuModel {
    /// Returns the same model with an empty cache of `blocks` blocks, and of as many states if it
    /// has some.
    pub(crate) fn with_blocks(mut self, blocks: usize) -> Self {
        let (decoder, mut layout) = (&self.decoder, self.kv.layout);
        if layout.kinds.states > 0 {
            layout.kinds.states = blocks;
        }
        let block_size = self.kv.block_size;
        self.kv = KvCache::new(&decoder.ops, &decoder.config, layout, blocks, block_size).unwrap();
        self
    }
}
