//! Steps with rows that keep to formats. Their logits are computed while the host may still wait
//! for the tokens before. It asks the formats when it knows them, uploads one mask for each of
//! these rows, and launches the sampler.

use super::CudaModel;
use crate::{Error, Result};
use cresset_kernels::Compute;
use cresset_kernels::sampling::gpu::{mask_words, write_mask};
use cresset_kernels::sampling::{RowMask, RowSampling, SampleError};

/// The rows of a step, if some keep to formats and all of these can be asked at its launch.
pub(super) fn known_at_launch(rows: &[RowSampling]) -> Option<Vec<Option<RowSampling>>> {
    let asks = rows.iter().any(|row| row.grammar.is_some());
    let known = asks && !rows.iter().any(RowSampling::awaits_mask);
    known.then(|| rows.iter().cloned().map(Some).collect())
}

/// Asks the formats of the rows, each on any free thread.
pub(super) fn masks(compute: &Compute, rows: &[Option<RowSampling>]) -> Vec<RowMask> {
    let mut masks = vec![None; rows.len()];
    compute.run_chunks(&mut masks, 1, |row, mask| {
        mask[0] = rows[row].as_ref().and_then(RowSampling::mask);
    });
    masks
}

impl CudaModel {
    /// Samples the step launched last, which waits for the masks of its rows. A masked row without
    /// a mask has no result.
    pub(super) fn sample_masked(&mut self, masks: &[RowMask]) -> Result<()> {
        let waiting = |step: &&mut super::InFlight| step.done.is_none();
        let step = self.in_flight.back_mut().filter(waiting);
        let step = step.filter(|step| step.rows.len() == masks.len());
        let step = step.ok_or_else(|| {
            Error::Batch(format!("no step waits for the formats of {} rows", masks.len()))
        })?;
        let words = mask_words(self.decoder.config.vocab_size);
        let staging = &mut self.lanes[step.lane].masks;
        let mut places = staging.words_mut().chunks_exact_mut(words);
        let masked = step.rows.iter_mut().zip(masks).filter(|(row, _)| row.masked);
        let mut count = 0;
        for ((row, mask), place) in masked.zip(&mut places) {
            match mask.as_ref().unwrap_or(&Err(SampleError::NotRun)) {
                Ok(allowed) => write_mask(allowed, place),
                Err(error) => {
                    place.fill(u32::MAX);
                    row.rejected.get_or_insert_with(|| error.clone());
                }
            }
            count += 1;
        }
        let to = self.workspace.masks.view().slice(0..count * words);
        self.decoder.ops.upload(staging, 0, to)?;
        self.sample_last()
    }
}
