//! The input of one step, flattened over its sequences.

use crate::cache_kinds::{CacheKinds, NO_BLOCK, NO_STATE, first_kept};
use cresset_kernels::sampling::SampleResult;

/// Sequence i owns rows `cu_seqlens_q[i]..cu_seqlens_q[i + 1]` of the per-token arrays.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ForwardBatch {
    /// `[n]` token ids.
    pub input_ids: Vec<u32>,
    /// Empty, or `[n]`: for a row whose token the host does not have yet, the index of the previous
    /// step's result that is the token; `input_ids[row]` is 0 then.
    pub feedback: Vec<Option<u32>>,
    /// `[n]` position of each token in its sequence.
    pub positions: Vec<u32>,
    /// `[sequences + 1]`.
    pub cu_seqlens_q: Vec<u32>,
    /// `[sequences]` tokens in the cache after this step.
    pub seq_lens: Vec<u32>,
    /// `[groups of layers, sequences]` blocks of each, in order; `block_tables[i].len() *
    /// block_size >= seq_lens[i]`. Those that none of the step's tokens sees are not read.
    pub block_tables: Vec<Vec<u32>>,
    /// `[groups of layers, n]` `block * block_size + offset` where each token's K and V go.
    pub slot_mapping: Vec<u32>,
    /// `[sequences]`, or empty where nothing will be guessed: the token behind each sequence's last
    /// one, if it is not drawn in this step.
    pub following: Vec<u32>,
    /// Rows whose logits are computed, ascending.
    pub logits_indices: Vec<u32>,
    /// Empty where no sequence is in parts, or `[parts + 1]`: the first token of each part of each
    /// sequence, whose own state is kept. On the CPU only.
    pub part_starts: Vec<u32>,
    /// `[parts]`, or empty if no layer is recurrent: the slot of the state that each goes on from,
    /// which is that of the part before it; `NO_STATE` where a sequence begins.
    pub state_reads: Vec<u32>,
    /// `[parts]`, or empty: the slot that gets the state after each, which no other sequence of the
    /// step reads or writes.
    pub state_writes: Vec<u32>,
}

impl ForwardBatch {
    /// Completes a batch for one group of layers whose model has several: a block of the batch
    /// stands for as many blocks as there are groups. A sequence's state is in the slot that has
    /// the number of its first block.
    #[must_use]
    pub fn spread(mut self, kinds: &CacheKinds, block_size: usize) -> Self {
        let groups = kinds.windows.len() as u32;
        let block_size = block_size as u32;
        let slots = std::mem::take(&mut self.slot_mapping);
        let tables = std::mem::take(&mut self.block_tables);
        if kinds.states > 0 {
            self.state_writes = tables.iter().map(|table| table[0]).collect();
            let begins = |i: usize| self.positions[self.cu_seqlens_q[i] as usize] == 0;
            let read = |(i, slot): (usize, &u32)| if begins(i) { NO_STATE } else { *slot };
            self.state_reads = self.state_writes.iter().enumerate().map(read).collect();
        }
        for group in 0..groups {
            let block = |block: u32| block * groups + group;
            let slot = |slot: &u32| block(slot / block_size) * block_size + slot % block_size;
            self.slot_mapping.extend(slots.iter().map(slot));
            let table = |table: &Vec<u32>| table.iter().map(|id| block(*id)).collect();
            self.block_tables.extend(tables.iter().map(table));
        }
        self
    }

    /// The batch for a cache where `parts[group]` layers share a place of the group's blocks: each
    /// block is then `parts[group]` smaller ones, one for every layer. `None` where none share, and
    /// for a batch without sequences.
    pub(crate) fn in_parts(&self, parts: &[usize], block_size: usize) -> Option<Self> {
        if self.seq_lens.is_empty() || parts.iter().all(|parts| *parts == 1) {
            return None;
        }
        let (mut batch, block_size) = (self.clone(), block_size as u32);
        batch.slot_mapping.clear();
        batch.block_tables.clear();
        let slots = self.slot_mapping.chunks(self.input_ids.len());
        let groups = slots.zip(self.block_tables.chunks(self.seq_lens.len()));
        for ((slots, tables), parts) in groups.zip(parts) {
            for part in 0..*parts as u32 {
                // Blocks that were given back are not read.
                let block = |block: u32| match block {
                    NO_BLOCK => NO_BLOCK,
                    block => block * *parts as u32 + part,
                };
                let slot = |slot: &u32| block(slot / block_size) * block_size + slot % block_size;
                batch.slot_mapping.extend(slots.iter().map(slot));
                let table = |table: &Vec<u32>| table.iter().map(|id| block(*id)).collect();
                batch.block_tables.extend(tables.iter().map(table));
            }
        }
        Some(batch)
    }

    /// Refuses rows whose number is not that of the batch's logits.
    pub(crate) fn check_rows(&self, rows: usize) -> crate::Result<()> {
        let wanted = self.logits_indices.len();
        if rows == wanted {
            return Ok(());
        }
        Err(crate::Error::Batch(format!("{rows} rows are sampled where {wanted} are wanted")))
    }

    /// Checks that the arrays agree with each other, the model and the cache: a token's slot in
    /// particular must be the one that its sequence's own blocks give for its position.
    pub(crate) fn check(
        &self,
        vocab_size: usize,
        max_positions: usize,
        block_size: usize,
        num_blocks: usize,
        kinds: &CacheKinds,
    ) -> Result<(), String> {
        self.check_shapes(kinds.windows.len())?;
        let mut ids = self.input_ids.iter().chain(&self.following);
        if let Some(id) = ids.find(|id| **id as usize >= vocab_size) {
            return Err(format!("token {id} is outside the vocabulary of {vocab_size}"));
        }
        if let Some(len) = self.seq_lens.iter().find(|len| **len as usize > max_positions) {
            return Err(format!(
                "a sequence of {len} tokens is beyond the context of {max_positions}"
            ));
        }
        let mut tokens = self.feedback.iter().zip(&self.input_ids);
        if let Some((_, id)) = tokens.find(|(feedback, id)| feedback.is_some() && **id != 0) {
            return Err(format!("a row is token {id} and a result of the previous step at once"));
        }
        self.check_states(kinds.states)?;
        for (group, window) in kinds.windows.iter().enumerate() {
            for i in 0..self.seq_lens.len() {
                self.check_blocks(group, i, *window, [block_size, num_blocks])?;
                self.check_sequence(group, i, block_size)?;
            }
        }
        Ok(())
    }

    fn check_shapes(&self, groups: usize) -> Result<(), String> {
        let (n, sequences) = (self.input_ids.len(), self.seq_lens.len());
        let spans = &self.cu_seqlens_q;
        let agree = n > 0
            && self.positions.len() == n
            && self.slot_mapping.len() == groups * n
            && (self.feedback.is_empty() || self.feedback.len() == n)
            && self.block_tables.len() == groups * sequences
            && (self.following.is_empty() || self.following.len() == sequences)
            && spans.len() == sequences + 1
            && spans.first() == Some(&0)
            && spans.last().is_some_and(|end| *end as usize == n)
            && spans.is_sorted();
        if !agree {
            return Err(format!(
                "the lengths of the arrays of {n} tokens and {sequences} sequences do not agree"
            ));
        }
        let ascending = self.logits_indices.windows(2).all(|w| w[0] < w[1]);
        if !ascending || self.logits_indices.last().is_some_and(|row| *row as usize >= n) {
            return Err(format!("logits are wanted of rows {:?} out of {n}", self.logits_indices));
        }
        Ok(())
    }

    /// The token behind each one of the batch, `[n]`: the next one of its sequence, or that of
    /// `results` which was drawn there. Behind a wrong draft it means nothing.
    pub(crate) fn ids_behind(&self, results: &[SampleResult]) -> Vec<u32> {
        let mut ids: Vec<u32> = self.input_ids[1..].to_vec();
        ids.push(0);
        for (end, following) in self.cu_seqlens_q[1..].iter().zip(&self.following) {
            ids[*end as usize - 1] = *following;
        }
        for (row, result) in self.logits_indices.iter().zip(results) {
            if let Ok(sampled) = result {
                ids[*row as usize] = sampled.token;
            }
        }
        ids
    }

    /// The first token of each part of each sequence that has a state of its own, and their end.
    pub(crate) fn part_starts(&self) -> &[u32] {
        if self.part_starts.is_empty() { &self.cu_seqlens_q } else { &self.part_starts }
    }

    /// Checks that a sequence begins without a state, and goes on from one of those that exist; and
    /// its parts from that of the part before.
    fn check_states(&self, slots: usize) -> Result<(), String> {
        let (starts, reads, writes) = (self.part_starts(), &self.state_reads, &self.state_writes);
        let parts = if slots == 0 { 0 } else { starts.len() - 1 };
        let cuts = starts.windows(2).all(|part| part[0] < part[1])
            && self.cu_seqlens_q.iter().all(|start| starts.binary_search(start).is_ok())
            && starts.last() == self.cu_seqlens_q.last();
        if reads.len() != parts || writes.len() != parts || !(cuts || parts == 0) {
            return Err(format!("states of {reads:?} and {writes:?} for parts at {starts:?}"));
        }
        for (i, (read, write)) in reads.iter().zip(writes).enumerate() {
            let fits = if self.cu_seqlens_q.binary_search(&starts[i]).is_err() {
                *read == writes[i - 1]
            } else if self.positions[starts[i] as usize] == 0 {
                *read == NO_STATE
            } else {
                (*read as usize) < slots
            };
            if !fits || *write as usize >= slots {
                return Err(format!(
                    "part {i} cannot go on from state {read} to {write} of {slots}"
                ));
            }
        }
        Ok(())
    }

    /// A sequence's blocks in a group of layers.
    fn blocks(&self, group: usize, i: usize) -> &[u32] {
        &self.block_tables[group * self.seq_lens.len() + i]
    }

    fn check_blocks(
        &self,
        group: usize,
        i: usize,
        window: Option<usize>,
        [block_size, num_blocks]: [usize; 2],
    ) -> Result<(), String> {
        let new = (self.cu_seqlens_q[i + 1] - self.cu_seqlens_q[i]) as usize;
        let before = (self.seq_lens[i] as usize).saturating_sub(new);
        let read = self.blocks(group, i).iter().skip(first_kept(window, before, block_size));
        match read.into_iter().find(|block| **block as usize >= num_blocks) {
            Some(block) => Err(format!("block {block} is outside the cache of {num_blocks}")),
            None => Ok(()),
        }
    }

    fn check_sequence(&self, group: usize, i: usize, block_size: usize) -> Result<(), String> {
        let rows = self.cu_seqlens_q[i] as usize..self.cu_seqlens_q[i + 1] as usize;
        let (len, blocks) = (self.seq_lens[i] as usize, self.blocks(group, i));
        let slots = &self.slot_mapping[group * self.input_ids.len()..];
        if rows.len() > len || blocks.len() * block_size < len {
            return Err(format!(
                "sequence {i} of {len} tokens has {} new ones and {} blocks of {block_size}",
                rows.len(),
                blocks.len()
            ));
        }
        for (position, row) in (len - rows.len()..len).zip(rows) {
            let slot = blocks[position / block_size] as usize * block_size + position % block_size;
            if self.positions[row] as usize != position || slots[row] as usize != slot {
                return Err(format!(
                    "row {row} is at position {} in slot {}; sequence {i} needs position {position} in slot {slot}",
                    self.positions[row], slots[row]
                ));
            }
        }
        Ok(())
    }
}
