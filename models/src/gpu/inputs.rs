//! What a step reads that changes from step to step: one pinned buffer on the host, in device memory as small arrays at places
//! that follow from the step's shape alone, so that a recorded step finds them.
//!
//! Both ends of variable length are last: the sampling parameters behind the arrays, the block tables in a region of their own.

use crate::{ForwardBatch, Result};
use cresset_kernels::gpu::{Buffer, Element, Gpu, Kind, Staging, View};
use cresset_kernels::sampling::gpu::{RowParams, Special, encode, encoded_words};
use std::ops::Range;
use std::sync::Arc;

/// How a row is sampled, and the tokens it treats otherwise.
pub type Row = (RowParams, Vec<Special>);

/// Sizes of a step, padding included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    pub tokens: usize,
    pub sequences: usize,
    /// Rows whose logits are wanted.
    pub rows: usize,
    /// No sequence has more new tokens.
    pub most_queries: usize,
    /// Most splits of a sequence's keys where each has one new token.
    pub max_splits: usize,
}

/// Words at whose multiples each array begins: vector loads need 16 bytes.
const ALIGNMENT: usize = 4;
/// The id of no result.
const NONE: u32 = u32::MAX;

/// Where each array begins and ends, in words.
struct Layout {
    header: Range<usize>,
    ids: Range<usize>,
    feedback: Range<usize>,
    positions: Range<usize>,
    slots: Range<usize>,
    cu_seqlens: Range<usize>,
    seq_lens: Range<usize>,
    wanted: Range<usize>,
    sampling: usize,
}

impl Layout {
    fn new(shape: &Shape) -> Self {
        let &Shape { tokens, sequences, rows, .. } = shape;
        let mut end = 0;
        let mut take = |len: usize| {
            let start = end;
            end += len.next_multiple_of(ALIGNMENT);
            start..start + len
        };
        Self {
            header: take(2),
            ids: take(tokens),
            feedback: take(tokens),
            positions: take(tokens),
            slots: take(tokens),
            cu_seqlens: take(sequences + 1),
            seq_lens: take(sequences),
            wanted: take(rows),
            sampling: end,
        }
    }
}

/// The device's side.
pub struct Inputs {
    words: Buffer,
    tables: Buffer,
}

macro_rules! arrays {
    ($($name:ident),*) => { $(
        pub fn $name(&self, shape: &Shape) -> View {
            self.words.view().slice(Layout::new(shape).$name)
        }
    )* };
}

impl Inputs {
    pub fn new(gpu: &Arc<dyn Gpu>, words: usize, tables: usize) -> Result<Self> {
        Ok(Self { words: Buffer::new(gpu, Kind::U32, words)?, tables: Buffer::new(gpu, Kind::U32, tables)? })
    }

    arrays!(header, ids, feedback, positions, slots, cu_seqlens, seq_lens, wanted);

    pub fn sampling(&self, shape: &Shape) -> View {
        let words = self.words.view();
        words.slice(Layout::new(shape).sampling..words.len())
    }

    pub fn tables(&self) -> View {
        self.tables.view()
    }

    pub fn capacity(&self) -> (usize, usize) {
        (self.words.view().len(), self.tables.view().len())
    }

    /// Copies what `stage` wrote.
    pub fn upload(&self, gpu: &dyn Gpu, from: &Staging, (words, tables): (usize, usize)) -> Result<()> {
        gpu.upload(from, 0, self.words.view().slice(0..words))?;
        Ok(gpu.upload(from, words * Kind::U32.bytes(), self.tables.view().slice(0..tables))?)
    }
}

/// A step as the host has it.
pub struct Staged<'a> {
    pub batch: &'a ForwardBatch,
    pub rows: &'a [Row],
    pub shape: Shape,
    /// Tokens of one split of the keys.
    pub split: usize,
    /// Where padding rows write and look.
    pub dummy_block: u32,
    pub block_size: usize,
}

impl Staged<'_> {
    /// Words of the arrays with the sampling parameters, and of the tables.
    pub fn size(&self) -> (usize, usize) {
        let specials = self.rows.iter().map(|(_, specials)| specials.len()).sum();
        let words = Layout::new(&self.shape).sampling + encoded_words(self.shape.rows, specials);
        (words, self.shape.sequences * self.stride())
    }

    fn stride(&self) -> usize {
        self.batch.block_tables.iter().map(Vec::len).max().unwrap_or(0).max(1)
    }

    /// Writes everything, by way of `scratch`, to the beginning of `to`. Rows beyond the batch's are padding: one token at
    /// position 0 of the dummy block.
    pub fn write(&self, scratch: &mut Vec<u32>, to: &mut [u8]) {
        let (words, tables) = self.size();
        let (batch, at) = (self.batch, Layout::new(&self.shape));
        scratch.clear();
        scratch.resize(words + tables, 0);
        scratch[at.header.clone()].copy_from_slice(&[self.stride() as u32, self.split as u32]);
        let mut put = |range: &Range<usize>, values: &[u32], padding: u32| {
            let (own, rest) = scratch[range.clone()].split_at_mut(values.len());
            own.copy_from_slice(values);
            rest.fill(padding);
        };
        put(&at.ids, &batch.input_ids, 0);
        put(&at.feedback, &batch.feedback.iter().map(|from| from.unwrap_or(NONE)).collect::<Vec<_>>(), NONE);
        put(&at.positions, &batch.positions, 0);
        put(&at.slots, &batch.slot_mapping, self.dummy_block * self.block_size as u32);
        put(&at.seq_lens, &batch.seq_lens, 1);
        put(&at.wanted, &batch.logits_indices, 0);
        put(&at.cu_seqlens, &batch.cu_seqlens_q, 0);
        // Only a recorded step is padded, and that has one token a sequence.
        let (first, last) = (batch.cu_seqlens_q.len().max(1) - 1, self.shape.sequences);
        (first..=last).for_each(|i| scratch[at.cu_seqlens.start + i] = (batch.input_ids.len() + i - first) as u32);
        let (words, tables) = scratch.split_at_mut(words);
        encode(self.rows, self.shape.rows, &mut words[at.sampling..]);
        tables.fill(self.dummy_block);
        for (table, row) in batch.block_tables.iter().zip(tables.chunks_exact_mut(self.stride())) {
            row[..table.len()].copy_from_slice(table);
        }
        u32::encode(scratch, &mut to[..scratch.len() * Kind::U32.bytes()]);
    }
}
