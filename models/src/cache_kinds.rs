//! How the caches of a model's layers are paged: which layers share a block, which blocks a
//! sequence keeps, and how many states there are. Pure.
//!
//! A block holds K and V of some tokens in one group of layers. All groups have equally many
//! layers, so every block has one size, and layers with a window and layers without one take their
//! blocks from the same memory, however their needs change.

use crate::ModelConfig;
/// Stands for a slot where a sequence begins without a state.
pub use cresset_kernels::recurrence::NO_STATE;

/// Stands in a block table for a block that was given back.
pub const NO_BLOCK: u32 = u32::MAX;

/// The groups of layers with attention, and the states of the others, as the engine sees them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CacheKinds {
    /// For each group the tokens that its queries see, their own included; `None` is all of them.
    pub windows: Vec<Option<usize>>,
    /// The slots for states of sequences; 0 if no layer is recurrent. Every sequence that runs has
    /// one, and others keep states that later sequences can go on from.
    pub states: usize,
    /// The first state of a prompt that is kept has at least so many tokens, and each further one
    /// twice as many as the one before.
    pub first_kept: usize,
}

impl Default for CacheKinds {
    /// One group of layers that attend to everything.
    fn default() -> Self {
        Self { windows: vec![None], states: 0, first_kept: 0 }
    }
}

impl CacheKinds {
    /// For each group the most blocks that one sequence holds at a time, if so many of its tokens
    /// are scheduled and not committed.
    pub fn most_held(&self, block_size: usize, in_flight: usize) -> Vec<usize> {
        let most = |window: &Option<usize>| match window {
            Some(window) => (window - 1 + in_flight).div_ceil(block_size) + 1,
            None => usize::MAX,
        };
        self.windows.iter().map(most).collect()
    }

    /// Most blocks that a sequence of `tokens` holds at a time.
    pub fn blocks_for(&self, tokens: usize, block_size: usize, in_flight: usize) -> usize {
        let blocks = tokens.div_ceil(block_size);
        self.most_held(block_size, in_flight).into_iter().map(|most| blocks.min(most)).sum()
    }
}

/// The number of leading blocks that no token behind the first `tokens` sees.
pub fn first_kept(window: Option<usize>, tokens: usize, block_size: usize) -> usize {
    window.map_or(0, |window| tokens.saturating_sub(window - 1) / block_size)
}

/// The place of what a layer keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LayerPlace {
    /// K and V are in blocks of a group, as those of its `index`-th layer.
    Blocks { group: usize, index: usize },
    /// The layer is the `index`-th recurrent one.
    State { index: usize },
}

/// Which layers share blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CacheLayout {
    pub kinds: CacheKinds,
    pub layers_per_block: usize,
    pub places: Vec<LayerPlace>,
}

impl CacheLayout {
    /// All layers with attention share a block, and nothing is given back.
    pub(crate) fn of_one_group(config: &ModelConfig) -> Self {
        let (mut blocks, mut states) = (0.., 0..);
        let place = |layer| match config.recurrence(layer) {
            None => blocks.next().map(|index| LayerPlace::Blocks { group: 0, index }),
            Some(_) => states.next().map(|index| LayerPlace::State { index }),
        };
        let places = (0..config.layers).filter_map(place).collect();
        let layers_per_block = config.attention_layers();
        Self { kinds: CacheKinds::default(), layers_per_block, places }
    }

    /// Layers with a window and layers without one are apart. A group has as many layers as the
    /// kind that is rarer.
    pub(crate) fn by_kind(config: &ModelConfig) -> Self {
        let Some(sliding) = &config.sliding else { return Self::of_one_group(config) };
        let count = |kind: bool| sliding.layers.iter().filter(|layer| **layer == kind).count();
        let [full, windowed] = [false, true].map(count);
        let size = if full == 0 { windowed } else { full.min(windowed) };
        let mut windows = vec![None; full.div_ceil(size)];
        windows.resize(windows.len() + windowed.div_ceil(size), Some(sliding.window));
        // The next place of each kind, counted over its groups.
        let mut next = [0, full.div_ceil(size) * size];
        let place = |kind: &bool| {
            let next = &mut next[usize::from(*kind)];
            *next += 1;
            LayerPlace::Blocks { group: (*next - 1) / size, index: (*next - 1) % size }
        };
        let places = sliding.layers.iter().map(place).collect();
        let kinds = CacheKinds { windows, ..CacheKinds::default() };
        Self { kinds, layers_per_block: size, places }
    }

    /// Bytes of one block, K and V.
    pub(crate) fn block_bytes(&self, config: &ModelConfig, block_size: usize) -> usize {
        config.kv_layer_bytes(block_size) * self.layers_per_block
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_query_sees_no_block_behind_its_window() {
        for (window, tokens, expect) in [
            (None, 100, 0),
            (Some(1), 3, 0),
            (Some(1), 4, 1),
            (Some(4), 6, 0),
            (Some(4), 7, 1),
            (Some(5), 7, 0),
            (Some(5), 100, 24),
        ] {
            assert_eq!(first_kept(window, tokens, 4), expect, "{window:?} {tokens}");
        }
    }

    #[test]
    fn a_sequence_holds_no_more_than_its_windows_ask_for() {
        let kinds = CacheKinds { windows: vec![None, Some(9), Some(9)], ..CacheKinds::default() };
        for (tokens, expect) in [(0, 0), (1, 3), (16, 12), (40, 10 + 2 * 5), (4000, 1000 + 2 * 5)] {
            assert_eq!(kinds.blocks_for(tokens, 4, 6), expect, "{tokens}");
        }
    }
}
