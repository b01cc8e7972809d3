//! The plans of a step's decode attention: one for each kind of attention that the model's layers
//! have.

use crate::{ModelConfig, ModelOptions, Result};
use cresset_kernels::DeviceOps;
use cresset_kernels::attention::gpu::{
    HeadShape, WHOLE, decode_grid, partial_values, prefill_values,
};
use cresset_kernels::attention::plan::{DecodeGrid, DecodePlan, KeyCuts};
use std::iter::repeat;

/// The most kinds of attention in a model: layers without a window, and layers with one.
pub(super) const KINDS: usize = 2;
/// With fixed cuts, a sequence has at most this many pieces.
const MOST_PIECES: usize = 32;

/// The kinds of attention of a model on its device, and where their keys may be cut.
pub(super) struct AttentionKinds {
    kinds: Vec<AttentionKind>,
    cuts: KeyCuts,
}

struct AttentionKind {
    window: Option<usize>,
    heads: HeadShape,
    grid: DecodeGrid,
    /// f32 values of the partial results of prefill, whose keys are divided with cuts anywhere.
    prefill_values: usize,
}

impl AttentionKinds {
    /// With `options.deterministic`, the pieces of a sequence depend on its own length alone.
    pub(super) fn new(
        gpu: &DeviceOps,
        options: &ModelOptions,
        config: &ModelConfig,
        max_context: usize,
    ) -> Result<Self> {
        let cuts = if options.deterministic {
            KeyCuts::fixed(max_context, MOST_PIECES)
        } else {
            KeyCuts::Anywhere
        };
        let sliding = config.sliding.as_ref();
        let slides = |layer: &usize| sliding.is_some_and(|sliding| sliding.layers[*layer]);
        let full = (0..config.layers).find(|layer| !slides(layer)).map(|layer| (None, layer));
        let windowed = (0..config.layers).find(slides);
        let windowed = windowed.map(|layer| (sliding.map(|sliding| sliding.window), layer));
        let kind = |(window, layer): (Option<usize>, usize)| {
            let heads = config.head_shape(layer);
            let grid = decode_grid(&**gpu, options.kind(), &heads)?;
            let prefill_values = match cuts {
                KeyCuts::Anywhere => prefill_values(&**gpu, options.kind(), &heads)?,
                KeyCuts::Every(_) => 0,
            };
            Ok(AttentionKind { window, heads, grid, prefill_values })
        };
        let kinds = full.into_iter().chain(windowed).map(kind).collect::<Result<_>>()?;
        Ok(Self { kinds, cuts })
    }

    /// The windows of the kinds, in their order.
    pub(super) fn windows(&self) -> Vec<Option<usize>> {
        self.kinds.iter().map(|kind| kind.window).collect()
    }

    /// The number of shares in a plan of each kind; 0 without a plan.
    pub(super) fn shares(&self) -> [usize; KINDS] {
        let mut shares = [0; KINDS];
        for (shares, kind) in shares.iter_mut().zip(&self.kinds) {
            *shares = kind.grid.most_shares();
        }
        shares
    }

    /// The f32 values of the most partial results when up to `rows` sequences decode. Prefill's
    /// stand in the same place, after decode's were merged.
    pub(super) fn workspace(&self, rows: usize) -> usize {
        let values = |kind: &AttentionKind| {
            let partials = self.cuts.most_partials(rows, kind.grid.most_shares(), MOST_PIECES);
            partial_values(partials, &kind.heads).max(kind.prefill_values)
        };
        self.kinds.iter().map(values).max().unwrap_or(0)
    }

    /// The counters of decode when up to `rows` sequences decode.
    pub(super) fn counters(&self, rows: usize) -> usize {
        self.kinds.iter().map(|kind| rows * kind.grid.head_tiles).max().unwrap_or(0)
    }

    /// A plan of each kind for the first `decodes` sequences of a step. Sequences that it lacks are
    /// padding, of one token.
    pub(super) fn plan(&self, seq_lens: &[u32], decodes: usize) -> Vec<DecodePlan> {
        let lens: Vec<u32> = seq_lens.iter().copied().chain(repeat(1)).take(decodes).collect();
        let plan =
            |kind: &AttentionKind| DecodePlan::new(&lens, kind.window, self.cuts, &kind.grid);
        self.kinds.iter().map(plan).collect()
    }

    /// Tokens of a split of prefill, which is cut only where its bits must be decode's.
    pub(super) fn prefill_split(&self) -> u32 {
        match self.cuts {
            KeyCuts::Anywhere => WHOLE,
            KeyCuts::Every(tokens) => tokens as u32,
        }
    }
}
