//! The input of one step, flattened over its sequences.

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
    /// `[sequences]` blocks of each, in order; `block_tables[i].len() * block_size >= seq_lens[i]`.
    pub block_tables: Vec<Vec<u32>>,
    /// `[n]` `block * block_size + offset` where each token's K and V go.
    pub slot_mapping: Vec<u32>,
    /// Rows whose logits are computed, ascending.
    pub logits_indices: Vec<u32>,
}

impl ForwardBatch {
    /// Checks that the arrays agree with each other, the model and the cache: a token's slot in
    /// particular must be the one that its sequence's own blocks give for its position.
    pub(crate) fn check(
        &self,
        vocab_size: usize,
        max_positions: usize,
        block_size: usize,
        num_blocks: usize,
    ) -> Result<(), String> {
        self.check_shapes()?;
        if let Some(id) = self.input_ids.iter().find(|id| **id as usize >= vocab_size) {
            return Err(format!("token {id} is outside the vocabulary of {vocab_size}"));
        }
        if let Some(len) = self.seq_lens.iter().find(|len| **len as usize > max_positions) {
            return Err(format!(
                "a sequence of {len} tokens is beyond the context of {max_positions}"
            ));
        }
        let blocks = self.block_tables.iter().flatten();
        if let Some(block) = blocks.into_iter().find(|b| **b as usize >= num_blocks) {
            return Err(format!("block {block} is outside the cache of {num_blocks}"));
        }
        let mut tokens = self.feedback.iter().zip(&self.input_ids);
        if let Some((_, id)) = tokens.find(|(feedback, id)| feedback.is_some() && **id != 0) {
            return Err(format!("a row is token {id} and a result of the previous step at once"));
        }
        (0..self.seq_lens.len()).try_for_each(|i| self.check_sequence(i, block_size))
    }

    fn check_shapes(&self) -> Result<(), String> {
        let (n, sequences) = (self.input_ids.len(), self.seq_lens.len());
        let spans = &self.cu_seqlens_q;
        let agree = n > 0
            && self.positions.len() == n
            && self.slot_mapping.len() == n
            && (self.feedback.is_empty() || self.feedback.len() == n)
            && self.block_tables.len() == sequences
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

    fn check_sequence(&self, i: usize, block_size: usize) -> Result<(), String> {
        let rows = self.cu_seqlens_q[i] as usize..self.cu_seqlens_q[i + 1] as usize;
        let (len, blocks) = (self.seq_lens[i] as usize, &self.block_tables[i]);
        if rows.len() > len || blocks.len() * block_size < len {
            return Err(format!(
                "sequence {i} of {len} tokens has {} new ones and {} blocks of {block_size}",
                rows.len(),
                blocks.len()
            ));
        }
        for (position, row) in (len - rows.len()..len).zip(rows) {
            let slot = blocks[position / block_size] as usize * block_size + position % block_size;
            if self.positions[row] as usize != position || self.slot_mapping[row] as usize != slot {
                return Err(format!(
                    "row {row} is at position {} in slot {}; sequence {i} needs position {position} in slot {slot}",
                    self.positions[row], self.slot_mapping[row]
                ));
            }
        }
        Ok(())
    }
}
