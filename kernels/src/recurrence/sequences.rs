//! The rows of a step by sequence, and what the recurrences compute alike.

use super::args::{NO_STATE, StateMoves};
use crate::Result;
use crate::error::ensure;
use crate::operand::TensorView;
use crate::parts::Parts;
use std::ops::Range;

/// One sequence of a step, or a part of one.
pub(super) struct SequenceRows {
    pub rows: Range<usize>,
    /// The slot of the state that it begins with; `None` is zeros.
    pub read: Option<usize>,
    pub write: usize,
}

impl SequenceRows {
    /// A part of the sequence's new state, which begins as that of its old one. `place` tells where
    /// a slot has it.
    ///
    /// # Safety
    /// No other thread uses this part of the sequence's slots.
    #[expect(clippy::mut_from_ref, reason = "the caller has the part for itself")]
    pub(super) unsafe fn state<'a>(
        &self,
        states: &'a Parts,
        place: impl Fn(usize) -> Range<usize>,
    ) -> &'a mut [f32] {
        // SAFETY: a slot that is written belongs to one sequence.
        let state = unsafe { states.slice(place(self.write)) };
        match self.read {
            Some(read) if read == self.write => {}
            // SAFETY: it is another slot, which nobody writes but this sequence's part before it.
            Some(read) => state.copy_from_slice(unsafe { states.shared(place(read)) }),
            None => state.fill(0.0),
        }
        state
    }
}

/// The sequences of a step of `rows` rows. Slots and rows are checked here: they index memory.
pub(super) fn sequences(
    op: &'static str,
    moves: &StateMoves<TensorView>,
    rows: usize,
    slots: usize,
) -> Result<Vec<SequenceRows>> {
    let &StateMoves { starts, reads, writes } = moves;
    let sequence = |(span, (read, write)): (&[u32], (&u32, &u32))| SequenceRows {
        rows: span[0] as usize..span[1] as usize,
        read: (*read != NO_STATE).then_some(*read as usize),
        write: *write as usize,
    };
    let all: Vec<_> = starts.windows(2).zip(reads.iter().zip(writes)).map(sequence).collect();
    let mut writers = vec![usize::MAX; slots];
    let mut fits = starts.first() == Some(&0) && starts.last() == Some(&(rows as u32));
    for (index, sequence) in all.iter().enumerate() {
        let own = writers.get_mut(sequence.write);
        fits &= !sequence.rows.is_empty()
            && own.is_some_and(|own| std::mem::replace(own, index) == usize::MAX);
    }
    for (index, read) in all.iter().enumerate().filter_map(|(i, s)| Some((i, s.read?))) {
        // A sequence may also read the state that the one before it writes: then both are parts of
        // one text.
        let fitting = [Some(usize::MAX), Some(index), index.checked_sub(1)];
        fits &= writers.get(read).is_some_and(|writer| fitting.contains(&Some(*writer)));
    }
    ensure(op, fits, || format!("rows {starts:?} from {reads:?} to {writes:?} of {slots} slots"))?;
    Ok(all)
}

/// The parts of each sequence, which are computed one after the other.
pub(super) fn by_sequence(parts: &[SequenceRows]) -> Vec<&[SequenceRows]> {
    parts.chunk_by(|before, part| part.read == Some(before.write)).collect()
}

/// log(1 + e^x), which is x where e^x is too large.
pub(super) fn softplus(x: f32) -> f32 {
    x.max(0.0) + (-x.abs()).exp().ln_1p()
}
