//! What the decoder knows of ranks, the devices that compute one model together (tensor
//! parallelism). Each has its share of the heads, of the inner values of MLPs and experts, and of
//! the rows of the head. The residual stream, the cache's order and the sampled tokens are the same
//! on all, as an all-reduce adds up the parts of each sub-layer.

use super::activations::Activations;
use super::layer_loader::LayerLoader;
use crate::Result;
use crate::loader::tensors::Optional;
use crate::spec::{ArchSpec, QkNorms};
use cresset_kernels::Ops;
use cresset_kernels::gpu::{Kind, Rank};
use cresset_kernels::operand::Operand;
use cresset_kernels::ranks::{AllReduceArgs, GatherColumnsArgs};

/// Rows whose logits are gathered at once: the memory for more would be of no use.
const GATHERED_ROWS: usize = 64;

impl ArchSpec {
    /// Makes the sizes those of one rank's share.
    ///
    /// # Errors
    /// Returns a text that says what this number of GPUs cannot share.
    pub(crate) fn take_share(&mut self, rank: Rank) -> Result<(), String> {
        let count = rank.count;
        if count == 1 {
            return Ok(());
        }
        let refused = |what: String| format!("{what}, so {count} GPUs cannot share it");
        if self.options.qk_norm == QkNorms::AllHeads {
            return Err(refused("it norms the heads of Q, and those of K, as one vector".into()));
        }
        let config = &mut self.config;
        let share = |what: &str, size: &mut usize| {
            if !size.is_multiple_of(count) {
                return Err(refused(format!("it has {size} {what}")));
            }
            *size /= count;
            Ok(())
        };
        // Where there are fewer KV heads than ranks, some ranks have the same one.
        let share_kv = |size: &mut usize| {
            if count.is_multiple_of(*size) {
                *size = 1;
                return Ok(());
            }
            share("KV heads", size)
        };
        share("heads", &mut config.heads)?;
        share("inner values in its MLP", &mut config.intermediate_size)?;
        if config.latent.is_none() {
            share_kv(&mut config.kv_heads)?;
        }
        if let Some(heads) = config.sliding.as_mut().and_then(|sliding| sliding.heads.as_mut()) {
            share_kv(&mut heads.count)?;
        }
        if let Some(mixture) = &mut config.mixture {
            share("inner values in an expert", &mut mixture.intermediate_size)?;
            if let Some(shared) = &mut mixture.shared {
                share("inner values in its shared expert", &mut shared.width)?;
            }
        }
        config.check().map_err(refused)
    }
}

/// The memory in which the parts of the ranks meet.
pub(crate) struct RankBuffers<O: Ops> {
    rank: Rank,
    /// `[tokens, ranks * hidden]`: the parts of a sub-layer's result.
    parts: Activations<O>,
    /// `[logits rows, largest share of the vocabulary]` f32: the logits of this rank's rows of the
    /// head.
    own_logits: Activations<O>,
    /// `[some rows, ranks * largest share of the vocabulary]` f32
    gathered: Activations<O>,
}

impl<O: Ops> RankBuffers<O> {
    /// The inner `None` stands for a model that one device computes.
    pub(crate) fn load(l: &mut LayerLoader<O>, rank: Rank) -> Option<Optional<Self>> {
        if rank.count == 1 {
            return Some(None);
        }
        let config = &l.spec.config;
        let (hidden, share) = (config.hidden_size, rank.largest_share(config.vocab_size));
        let rows = l.most_logits_rows();
        let logits =
            |l: &mut LayerLoader<O>, name, rows, width| l.activations(name, Kind::F32, rows, width);
        Some(Some(Self {
            rank,
            parts: l.rows("parts of ranks", rank.count * hidden)?,
            own_logits: logits(l, "logits of a rank", rows, share)?,
            gathered: logits(l, "gathered logits", rows.min(GATHERED_ROWS), rank.count * share)?,
        }))
    }

    /// Gathers the logits of all ranks in `out`, `[rows, columns]` f32. `own` computes those of
    /// this rank's columns.
    pub(super) fn logits<'a>(
        &'a self,
        ops: &O,
        [rows, columns]: [usize; 2],
        own: impl FnOnce(O::View<'a>) -> Result<()>,
        out: O::View<'a>,
    ) -> Result<()> {
        let part = self.own_logits.first(rows);
        own(part.slice(0..rows * self.rank.share(columns).len()))?;
        let parts = O::view(&self.gathered.buffer);
        Ok(ops.gather_columns(&GatherColumnsArgs { part, columns, parts, out })?)
    }

    /// Adds up the ranks' parts of a sub-layer's result, in place.
    pub(super) fn add_up<'a>(&'a self, ops: &O, x: O::View<'a>) -> Result<()> {
        let parts = O::view(&self.parts.buffer).slice(0..self.rank.count * x.len());
        Ok(ops.all_reduce(&AllReduceArgs { x, parts })?)
    }
}
