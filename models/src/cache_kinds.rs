//! How the caches of a model's layers are paged: which layers share a KV cache block, which blocks
//! a sequence keeps, and how many states there are, those kept for the prefix cache among them.
//! Pure.
//!
//! A block holds K and V of some tokens in one group of layers. All groups have equally many
//! places, so every block has one size, and layers with a window and layers without one take their
//! blocks from the same memory, however their needs change. A place holds K and V of one layer, or
//! of several whose K are that much smaller than those of the others. Where neither kind's width
//! divides the other's, a place holds several layers of either.

use crate::ModelConfig;
use crate::config::Sliding;
/// Stands for a slot where a sequence begins without a state.
pub use cresset_kernels::recurrence::NO_STATE;
use cresset_kernels::rope::E4M3;

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
    /// The first state of a prompt that is kept covers at least this many tokens, and each further
    /// one twice as many as the one before.
    pub first_kept: usize,
}

impl Default for CacheKinds {
    /// One group of layers that attend to everything.
    fn default() -> Self {
        Self { windows: vec![None], states: 0, first_kept: 0 }
    }
}

impl CacheKinds {
    /// For each group the most blocks that one sequence holds at a time, if at most `in_flight` of
    /// its tokens are scheduled and not committed.
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

/// Groups of layers with a window beside a group that has no layer and counts tokens alone: each of
/// its blocks costs as much as one of theirs.
const GROUPS_BESIDE_TOKENS: usize = 8;

/// The place of what a layer keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LayerPlace {
    /// K and V are in a place of a group's blocks. `group` counts the parts of all groups before it
    /// and the place's own before this layer's.
    Blocks { group: usize, index: usize },
    /// The layer is the `index`-th recurrent one.
    State { index: usize },
}

/// Which layers share blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CacheLayout {
    pub kinds: CacheKinds,
    /// For each place of a block, the elements that K has of a token there.
    pub widths: Vec<usize>,
    /// For each group, the layers that share a place.
    pub parts: Vec<usize>,
    pub places: Vec<LayerPlace>,
}

impl CacheLayout {
    /// All layers with attention share a block, and nothing is given back.
    pub(crate) fn of_one_group(config: &ModelConfig) -> Self {
        let (mut widths, mut states) = (Vec::new(), 0);
        let mut places: Vec<LayerPlace> = Vec::new();
        for layer in 0..config.layers {
            places.push(if config.recurrence(layer).is_some() {
                states += 1;
                LayerPlace::State { index: states - 1 }
            } else if let Some(donor) = config.donor(layer) {
                places[donor]
            } else {
                widths.push(config.cached(config.kv_heads_of(layer)));
                LayerPlace::Blocks { group: 0, index: widths.len() - 1 }
            });
        }
        if widths.is_empty() {
            // The tokens of a model of recurrent layers alone are counted in blocks too, which
            // cost what those of one layer would.
            widths.push(config.kv_width());
        }
        Self { kinds: CacheKinds::default(), widths, parts: vec![1], places }
    }

    /// Layers with a window and layers without one are apart. A group has as many places as the
    /// kind that is rarer needs.
    pub(crate) fn by_kind(config: &ModelConfig) -> Self {
        Self::in_groups(config, false)
    }

    /// The same on a device, whose samplers count tokens in the slots of the first group: so that
    /// group has no window, if need be without a layer.
    pub(crate) fn on_device(config: &ModelConfig) -> Self {
        let heads = |sliding: &Sliding| sliding.heads.filter(|own| own.dim != config.head_dim);
        let other_dim = config.sliding.as_ref().and_then(heads).is_some();
        // Scales stand behind all codes, at a place that depends on the size of a head.
        if config.kv_kind == E4M3 && other_dim {
            return Self::of_one_group(config);
        }
        Self::in_groups(config, true)
    }

    /// `keeps_tokens`: whether the first group has all tokens of a sequence, whatever layers see.
    fn in_groups(config: &ModelConfig, keeps_tokens: bool) -> Self {
        let Some(sliding) = &config.sliding else { return Self::of_one_group(config) };
        let own = &sliding.layers[..config.layers - config.shared_kv_layers];
        let place = config.place_width();
        let [full, windowed] = [false, true].map(|kind| KindOfLayers::of(config, own, kind, place));
        let size = match [full.places(), windowed.places()] {
            [0, most] if keeps_tokens => most.div_ceil(GROUPS_BESIDE_TOKENS),
            [0, most] | [most, 0] => most,
            [full, windowed] => full.min(windowed),
        };
        let mut groups = [&full, &windowed].map(|kind| kind.places().div_ceil(size));
        if keeps_tokens {
            groups[0] = groups[0].max(1);
        }
        let mut windows = vec![None; groups[0]];
        windows.resize(groups[0] + groups[1], Some(sliding.window));
        let mut parts = vec![full.parts; groups[0]];
        parts.resize(windows.len(), windowed.parts);
        // The first group of each kind, counted in parts, and the number of its next layer.
        let mut next = [(0, 0), (groups[0] * full.parts, 0)];
        let mut place_of = |slides: bool| {
            let parts = if slides { windowed.parts } else { full.parts };
            let (first, number) = &mut next[usize::from(slides)];
            let (place, part) = (*number / parts, *number % parts);
            *number += 1;
            LayerPlace::Blocks { group: *first + place / size * parts + part, index: place % size }
        };
        let mut places: Vec<LayerPlace> = own.iter().map(|slides| place_of(*slides)).collect();
        for layer in own.len()..config.layers {
            places.extend(config.donor(layer).map(|donor| places[donor]));
        }
        let kinds = CacheKinds { windows, ..CacheKinds::default() };
        Self { kinds, widths: vec![place; size], parts, places }
    }

    /// The groups of smaller blocks that the layers of a place have to themselves.
    pub(crate) fn parted_groups(&self) -> usize {
        self.parts.iter().sum()
    }

    /// Bytes of one block, K and V.
    pub(crate) fn block_bytes(&self, config: &ModelConfig, block_size: usize) -> usize {
        self.widths.iter().map(|width| config.kv_bytes(*width, block_size)).sum()
    }
}

impl ModelConfig {
    /// Bytes of a CPU's KV cache for `block_size` tokens in all layers that keep K and V.
    pub fn block_bytes(&self, block_size: usize) -> usize {
        let layout = CacheLayout::by_kind(self);
        layout.kinds.windows.len() * layout.block_bytes(self, block_size)
    }

    /// Bytes of a CPU's KV cache that a sequence of `tokens` takes at most, if `in_flight` of them
    /// are being computed.
    pub fn context_bytes(&self, tokens: usize, block_size: usize, in_flight: usize) -> usize {
        let layout = CacheLayout::by_kind(self);
        let blocks = layout.kinds.blocks_for(tokens, block_size, in_flight);
        blocks * layout.block_bytes(self, block_size)
    }
}

/// The layers that have a window, or those that have none.
struct KindOfLayers {
    layers: usize,
    /// How many of them share a place.
    parts: usize,
}

impl KindOfLayers {
    fn of(config: &ModelConfig, layers: &[bool], slides: bool, place: usize) -> Self {
        let own = layers.iter().position(|layer| *layer == slides);
        let width = own.map_or(place, |layer| config.cached(config.kv_heads_of(layer)));
        let layers = layers.iter().filter(|layer| **layer == slides).count();
        Self { layers, parts: place / width }
    }

    fn places(&self) -> usize {
        self.layers.div_ceil(self.parts)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arch;
    use crate::goldens::goldens;
    use std::path::Path;

    fn config_of(golden: &str) -> ModelConfig {
        let case = goldens().cases.into_iter().find(|case| case.name == golden).unwrap();
        let json = case.config.to_string();
        arch::from_hf(Path::new("config.json"), json.as_bytes()).unwrap().config
    }

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

    /// Where each layer's K and V are in the golden model of this name.
    fn places(name: &str) -> (CacheLayout, Vec<[usize; 2]>) {
        let config = config_of(name);
        let layout = CacheLayout::by_kind(&config);
        let place = |place: &LayerPlace| match *place {
            LayerPlace::Blocks { group, index } => [group, index],
            LayerPlace::State { .. } => panic!("{name} has attention alone"),
        };
        let places = layout.places.iter().map(place).collect();
        (layout, places)
    }

    #[test]
    fn layers_with_a_narrow_k_share_a_place_and_the_last_ones_read_that_of_others() {
        let window = Some(8);
        let (layout, found) = places("gemma4-inputs");
        assert_eq!(layout.kinds.windows, [None, window, window]);
        assert_eq!((layout.parts, layout.widths), (vec![1, 2, 2], vec![64]));
        assert_eq!(found, [1, 2, 3, 0, 3, 3, 3, 0].map(|group| [group, 0]));
        let (layout, found) = places("gemma4");
        assert_eq!(layout.kinds.windows, [None, window, window, window]);
        assert_eq!((layout.parts, layout.widths), (vec![2, 1, 1, 1], vec![64]));
        assert_eq!(found, [2, 3, 4, 0].map(|group| [group, 0]));
        let (layout, found) = places("gemma3-odd");
        assert_eq!((layout.parts, layout.widths.len()), (vec![1; 3], 1));
        assert_eq!(found, [[0, 0], [2, 0], [1, 0]]);
    }

    /// K of 40 values in layers with a window and of 24 in those without: a place of 120 holds
    /// three or five.
    #[test]
    fn widths_that_do_not_divide_each_other_share_the_least_common_place() {
        let (layout, found) = places("gemma4-uneven");
        assert_eq!(layout.kinds.windows, [None, Some(8)]);
        assert_eq!((layout.parts, layout.widths), (vec![5, 3], vec![120]));
        assert_eq!(found, [5, 6, 0, 7, 1].map(|group| [group, 0]));
    }

    /// Their tokens are counted in blocks, which must not be free.
    #[test]
    fn recurrent_layers_alone_have_blocks() {
        let config = config_of("lfm2-recurrent");
        let layout = CacheLayout::by_kind(&config);
        assert_eq!(layout.widths, [config.kv_width()]);
        assert_eq!(layout.places, [0, 1, 2].map(|index| LayerPlace::State { index }));
    }

    /// A device has one group where heads of two sizes are kept in eight bits: their scales stand
    /// behind all codes, at places that depend on the size.
    #[test]
    fn in_one_group_each_layer_has_a_place_of_its_own_width() {
        let mut config = config_of("gemma4-inputs");
        assert_eq!(CacheLayout::on_device(&config), CacheLayout::by_kind(&config));
        assert_eq!(config.block_bytes(16), 2 * 3 * 64 * 16 * 4);
        config.kv_kind = E4M3;
        let layout = CacheLayout::on_device(&config);
        assert_eq!(layout.widths, [36, 36, 36, 68]);
        let place = |index| LayerPlace::Blocks { group: 0, index };
        assert_eq!(layout.places, [0, 1, 2, 3, 2, 2, 2, 3].map(place));
        assert_eq!(layout.block_bytes(&config, 16), 2 * (3 * 36 + 68) * 16);
        config.sliding.as_mut().unwrap().heads.as_mut().unwrap().dim = config.head_dim;
        assert_eq!(CacheLayout::on_device(&config), CacheLayout::by_kind(&config));
    }

    /// The first of them has no layer: a device counts the tokens of a whole sequence in it.
    #[test]
    fn layers_with_a_window_alone_are_beside_a_group_of_tokens() {
        let mut config = config_of("gemma3");
        for (layers, groups, places) in [(3, 3, 1), (8, 8, 1), (20, 7, 3)] {
            config.layers = layers;
            config.sliding.as_mut().unwrap().layers = vec![true; layers];
            let window = config.sliding.as_ref().map(|sliding| sliding.window);
            let layout = CacheLayout::on_device(&config);
            assert_eq!(layout.widths.len(), places);
            assert_eq!(layout.kinds.windows, [vec![None], vec![window; groups]].concat());
            let last = LayerPlace::Blocks { group: groups, index: (layers - 1) % places };
            assert_eq!(layout.places[layers - 1], last);
            assert_eq!(CacheLayout::by_kind(&config).kinds.windows, [window]);
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
