//! The inputs of a step that change from step to step: one pinned buffer on the host and one on the
//! device, filled by one copy.
//!
//! Small arrays stand at places that follow from the step's shape alone, so that a recorded step
//! finds them. Data without a fixed length comes last, in one list that also begins at such a
//! place: the pieces of keys that decode computes, to which their shares point, the blocks of each
//! sequence that hold tokens, to which their starts point, and each row's special tokens, to which
//! its sampling parameters point.

use super::plans::KINDS;
use crate::{ForwardBatch, Result};
use cresset_kernels::attention::gpu::{
    DecodePieces, DecodeWorkspace, PagedSequences, PrefillQueries, StepSequences,
};
use cresset_kernels::attention::plan::{DecodePlan, KeyPiece};
use cresset_kernels::gpu::{Buffer, Gpu, Kind, Staging, View};
use cresset_kernels::recurrence::{NO_STATE, StateMoves};
use cresset_kernels::sampling::DeviceRow;
use cresset_kernels::sampling::gpu::{encode, encoded_words};
use std::iter::repeat;
use std::ops::Range;
use std::sync::Arc;

/// Sizes of a step, padding included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct StepShape {
    pub tokens: usize,
    pub sequences: usize,
    /// The first `decodes` sequences have one new token each and are read by decode's attention,
    /// the others by prefill's.
    pub decodes: usize,
    /// Rows whose logits are computed.
    pub rows: usize,
    /// The most new tokens of any of the other sequences.
    pub most_queries: usize,
    /// The most tokens of any of the other sequences.
    pub longest_prompt: usize,
    /// What the model asks for, whatever the step is.
    pub model: ModelShape,
}

/// What the sizes of a step depend on beside its batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ModelShape {
    /// Shares in the plan of each kind of attention; 0 without a plan.
    pub shares: [usize; KINDS],
    /// Groups of layers, each with slots and block tables of its own.
    pub groups: usize,
    /// Whether sequences have states.
    pub has_states: bool,
}

impl StepShape {
    /// The shape of a step of sequences with one new token each, all of which get logits.
    pub(super) fn decode(rows: usize, model: ModelShape) -> Self {
        Self {
            tokens: rows,
            sequences: rows,
            decodes: rows,
            rows,
            most_queries: 0,
            longest_prompt: 0,
            model,
        }
    }

    pub(super) fn is_decode(&self) -> bool {
        [self.tokens, self.sequences, self.decodes] == [self.rows; 3]
    }

    /// The size of the inputs in words, with these numbers of pieces of keys, of blocks in all
    /// tables, and of special tokens.
    pub(super) fn words(&self, pieces: usize, blocks: usize, specials: usize) -> usize {
        let sampling = encoded_words(self.rows, specials);
        Layout::new(self).sampling + sampling + list_words(pieces, blocks)
    }
}

/// Words of the list up to the special tokens.
fn list_words(pieces: usize, blocks: usize) -> usize {
    pieces * KeyPiece::WORDS + blocks.next_multiple_of(ALIGNMENT)
}

/// Each array begins at a multiple of this many words, because vector loads need 16 bytes.
const ALIGNMENT: usize = 4;
/// Stands for the id of a result where a row takes no result.
const NONE: u32 = u32::MAX;

/// The begin and the end of each array, in words.
struct Layout {
    prefill_split: Range<usize>,
    ids: Range<usize>,
    feedback: Range<usize>,
    positions: Range<usize>,
    /// One group of layers after the other.
    slots: Range<usize>,
    seq_lens: Range<usize>,
    /// Likewise.
    table_starts: Range<usize>,
    /// The sequences that do not decode; starts at 0.
    cu_seqlens: Range<usize>,
    selected: Range<usize>,
    /// If sequences have states: the first row of each, and the slots that its state is read from
    /// and written to.
    state_starts: Range<usize>,
    state_reads: Range<usize>,
    state_writes: Range<usize>,
    /// For each kind of attention: the first piece of each share, and the first partial result of
    /// each sequence that decodes.
    plans: [[Range<usize>; 2]; KINDS],
    sampling: usize,
    list: usize,
}

impl Layout {
    fn new(shape: &StepShape) -> Self {
        let &StepShape { tokens, sequences, decodes, rows, model, .. } = shape;
        let [starts, states] = if model.has_states { [sequences + 1, sequences] } else { [0; 2] };
        let mut end = 0;
        let mut take = |len: usize| {
            let start = end;
            end += len.next_multiple_of(ALIGNMENT);
            start..start + len
        };
        Self {
            prefill_split: take(1),
            ids: take(tokens),
            feedback: take(tokens),
            positions: take(tokens),
            slots: take(model.groups * tokens),
            seq_lens: take(sequences),
            table_starts: take(model.groups * (sequences + 1)),
            cu_seqlens: take(sequences - decodes + 1),
            selected: take(rows),
            state_starts: take(starts),
            state_reads: take(states),
            state_writes: take(states),
            plans: model.shares.map(|shares| [take(shares + 1), take(decodes + 1)]),
            sampling: end,
            list: end + encoded_words(rows, 0),
        }
    }
}

/// The inputs on the device.
pub(super) struct Inputs(Buffer);

macro_rules! arrays {
    ($($name:ident),*) => { $(
        pub(super) fn $name(&self, shape: &StepShape) -> View {
            self.0.view().slice(Layout::new(shape).$name)
        }
    )* };
}

impl Inputs {
    pub(super) fn new(gpu: &Arc<dyn Gpu>, words: usize) -> Result<Self> {
        Ok(Self(Buffer::new(gpu, Kind::U32, words)?))
    }

    arrays!(prefill_split, ids, feedback, positions, cu_seqlens, selected);
    arrays!(state_starts, state_reads, state_writes);

    /// The slots of K and V of a group of layers.
    pub(super) fn slots(&self, shape: &StepShape, group: usize) -> View {
        let all = self.0.view().slice(Layout::new(shape).slots);
        all.slice(group * shape.tokens..(group + 1) * shape.tokens)
    }

    /// The states that sequences read and write, if they have some.
    pub(super) fn states(&self, shape: &StepShape) -> Option<StateMoves<View>> {
        shape.model.has_states.then(|| StateMoves {
            starts: self.state_starts(shape),
            reads: self.state_reads(shape),
            writes: self.state_writes(shape),
        })
    }

    /// The sequences with their blocks in a group of layers.
    pub(super) fn all(&self, shape: &StepShape, group: usize) -> PagedSequences {
        let (at, starts) = (Layout::new(shape), shape.sequences + 1);
        let words = self.0.view();
        PagedSequences {
            seq_lens: words.slice(at.seq_lens),
            tables: self.from(at.list),
            table_starts: words.slice(at.table_starts).slice(group * starts..(group + 1) * starts),
        }
    }

    /// The plans of decode's attention, of layers with each of these windows.
    pub(super) fn plans(
        &self,
        shape: &StepShape,
        windows: &[Option<usize>],
    ) -> Vec<(Option<usize>, DecodePieces)> {
        let at = Layout::new(shape);
        let plan = |(window, places): (&Option<usize>, [Range<usize>; 2])| {
            let [shares, partials] = places.map(|place| self.0.view().slice(place));
            (*window, DecodePieces { shares, pieces: self.from(at.list), partials })
        };
        windows.iter().zip(at.plans.clone()).map(plan).collect()
    }

    /// The sequences in the form that attention of a group of layers takes; `workspace` is for
    /// partial results. Blocks share the keys of few queries only if they may be divided into
    /// parts.
    pub(super) fn sequences<'a>(
        &self,
        (shape, group): (&StepShape, usize),
        plans: &'a [(Option<usize>, DecodePieces)],
        in_parts: bool,
        workspace: DecodeWorkspace,
    ) -> StepSequences<'a> {
        let (all, first, last) = (self.all(shape, group), shape.decodes, shape.sequences);
        let part = |from: usize, to: usize| PagedSequences {
            seq_lens: all.seq_lens.slice(from..to),
            table_starts: all.table_starts.slice(from..to + 1),
            ..all
        };
        StepSequences {
            decodes: part(0, first),
            plans,
            workspace,
            prefills: part(first, last),
            queries: PrefillQueries {
                cu_seqlens: self.cu_seqlens(shape),
                most: shape.most_queries,
                split: self.prefill_split(shape),
                longest: in_parts.then_some(shape.longest_prompt),
                workspace: workspace.partials,
            },
        }
    }

    pub(super) fn sampling(&self, shape: &StepShape) -> View {
        self.from(Layout::new(shape).sampling)
    }

    fn from(&self, start: usize) -> View {
        self.0.view().slice(start..self.words())
    }

    pub(super) fn words(&self) -> usize {
        self.0.view().len()
    }

    /// Copies the first `words` words of `from`.
    pub(super) fn upload(&self, gpu: &dyn Gpu, from: &Staging, words: usize) -> Result<()> {
        Ok(gpu.upload(from, 0, self.0.view().slice(0..words))?)
    }
}

/// A step in the host's memory.
pub(super) struct Staged<'a> {
    pub batch: &'a ForwardBatch,
    pub rows: &'a [DeviceRow],
    pub shape: StepShape,
    /// One for each kind of attention, over the sequences that decode.
    pub plans: &'a [DecodePlan],
    /// Tokens of one split of the keys of prefill.
    pub prefill_split: u32,
    /// For each group of layers the block that padding rows write to and read.
    pub dummy_blocks: &'a [u32],
    /// The slot that their states go to.
    pub dummy_state: u32,
    pub block_size: usize,
}

impl Staged<'_> {
    pub(super) fn words(&self) -> usize {
        self.shape.words(
            self.pieces(),
            self.blocks(),
            self.rows.iter().map(|row| row.specials.len()).sum(),
        )
    }

    fn pieces(&self) -> usize {
        self.plans.iter().map(|plan| plan.pieces.len()).sum()
    }

    /// Blocks in all tables, those of padding rows included.
    fn blocks(&self) -> usize {
        let groups = self.shape.model.groups;
        (0..groups).flat_map(|group| self.tables(group)).map(<[u32]>::len).sum()
    }

    /// The blocks in a group of layers of each sequence that hold tokens after this step. Each
    /// padding row has the dummy block.
    fn tables(&self, group: usize) -> impl Iterator<Item = &[u32]> {
        let lens = self.batch.seq_lens.iter().map(|len| *len as usize);
        let tables = self.batch.block_tables.iter().skip(group * lens.len()).zip(lens);
        let own = tables.map(|(table, len)| &table[..len.div_ceil(self.block_size)]);
        own.chain(repeat(&self.dummy_blocks[group..=group])).take(self.shape.sequences)
    }

    /// Writes everything to the beginning of `to`. Rows beyond the batch's are padding: one token
    /// at position 0 of the dummy block.
    pub(super) fn write(&self, to: &mut [u32]) {
        let (batch, shape, at) = (self.batch, &self.shape, Layout::new(&self.shape));
        let mut put = |range: &Range<usize>, values: &[u32], padding| {
            fill(&mut to[range.clone()], values, padding);
        };
        put(&at.prefill_split, &[self.prefill_split], 0);
        put(&at.ids, &batch.input_ids, 0);
        put(&at.positions, &batch.positions, 0);
        put(&at.seq_lens, &batch.seq_lens, 1);
        put(&at.selected, &batch.logits_indices, 0);
        put(&at.state_reads, &batch.state_reads, NO_STATE);
        put(&at.state_writes, &batch.state_writes, self.dummy_state);
        let feedback = batch.feedback.iter().map(|from| from.unwrap_or(NONE)).chain(repeat(NONE));
        to[at.feedback.clone()].iter_mut().zip(feedback).for_each(|(to, from)| *to = from);
        // Only recorded steps are padded, and in those all sequences decode.
        let starts =
            batch.cu_seqlens_q.iter().skip(shape.decodes).map(|start| start - shape.decodes as u32);
        to[at.cu_seqlens.clone()]
            .iter_mut()
            .zip(starts.chain(repeat(0)))
            .for_each(|(to, start)| *to = start);
        let starts = &batch.cu_seqlens_q;
        let sequence_of = |row: usize| {
            starts.partition_point(|start| *start <= batch.logits_indices[row]) as u32 - 1
        };
        let between = list_words(self.pieces(), self.blocks());
        encode(self.rows, sequence_of, shape.rows, between, &mut to[at.sampling..]);
        self.write_slots(&mut to[at.slots.clone()]);
        self.write_state_starts(to, &at);
        self.write_plans(to, &at);
        self.write_tables(to, &at);
    }

    fn write_slots(&self, to: &mut [u32]) {
        let (own, all) = (self.batch.input_ids.len(), self.shape.tokens);
        for (group, to) in to.chunks_exact_mut(all).enumerate() {
            let slots = &self.batch.slot_mapping[group * own..(group + 1) * own];
            fill(to, slots, self.dummy_blocks[group] * self.block_size as u32);
        }
    }

    /// Each padding row is a sequence.
    fn write_state_starts(&self, to: &mut [u32], at: &Layout) {
        let starts = &self.batch.cu_seqlens_q;
        let padding = starts.last().map_or(0, |end| end + 1)..;
        to[at.state_starts.clone()]
            .iter_mut()
            .zip(starts.iter().copied().chain(padding))
            .for_each(|(to, start)| *to = start);
    }

    fn write_plans(&self, to: &mut [u32], at: &Layout) {
        let mut first = 0;
        for (plan, [shares, partials]) in self.plans.iter().zip(&at.plans) {
            let starts = plan.shares.iter().map(|share| first as u32 + share);
            to[shares.clone()].iter_mut().zip(starts).for_each(|(to, start)| *to = start);
            to[partials.clone()].copy_from_slice(&plan.partials);
            let pieces = &mut to[at.list + first * KeyPiece::WORDS..];
            for (to, piece) in pieces.chunks_exact_mut(KeyPiece::WORDS).zip(&plan.pieces) {
                to.copy_from_slice(&piece.words());
            }
            first += plan.pieces.len();
        }
    }

    /// Writes the tables behind the pieces, one group of layers after the other.
    fn write_tables(&self, to: &mut [u32], at: &Layout) {
        let (mut end, mut place) = (self.pieces() * KeyPiece::WORDS, at.table_starts.start);
        for group in 0..self.shape.model.groups {
            for table in self.tables(group) {
                to[place] = end as u32;
                to[at.list + end..][..table.len()].copy_from_slice(table);
                (end, place) = (end + table.len(), place + 1);
            }
            to[place] = end as u32;
            place += 1;
        }
    }
}

fn fill(to: &mut [u32], values: &[u32], padding: u32) {
    let (own, rest) = to.split_at_mut(values.len());
    own.copy_from_slice(values);
    rest.fill(padding);
}

#[cfg(test)]
mod tests;
