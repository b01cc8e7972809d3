//! What layers keep of the tokens before: keys and values in blocks (the paged KV cache), and
//! states of fixed size.

use crate::cache_kinds::{CacheLayout, LayerPlace};
use crate::{ModelConfig, Result};
use cresset_kernels::OpMemory;
use cresset_kernels::gpu::Kind;

/// K and V of every layer with attention, in the layout that the ops of `M` read
/// ([`RopeArgs`](cresset_kernels::rope::RopeArgs)), and the states of every other layer.
pub struct KvCache<M: OpMemory> {
    pub block_size: usize,
    pub num_blocks: usize,
    pub(crate) layout: CacheLayout,
    /// For each place of a block: `num_blocks * block_size` times its width. Latent attention finds
    /// its values in its keys, and has no `v`.
    pub k: Vec<M::Buffer>,
    pub v: Vec<M::Buffer>,
    /// For each recurrent layer.
    states: Vec<StateBuffers<M>>,
}

/// The states of all slots of a layer, f32.
struct StateBuffers<M: OpMemory> {
    conv: M::Buffer,
    memory: M::Buffer,
}

/// The place of one layer's K and V in the cache. They are the same in latent attention.
pub struct LayerCache<'a, M: OpMemory> {
    /// The number of the layer's group among those of the step.
    pub group: usize,
    pub k: M::View<'a>,
    pub v: M::View<'a>,
}

/// The states of one recurrent layer.
pub struct LayerStates<'a, M: OpMemory> {
    /// `[slots, taps - 1, channels]`: the last inputs of its convolution.
    pub conv: M::View<'a>,
    /// `[slots, …]`: what its delta rule or its scan remembers; empty without one.
    pub memory: M::View<'a>,
}

impl<M: OpMemory> KvCache<M> {
    /// `layout.kinds` says how many states there are.
    pub(crate) fn new(
        ops: &M,
        config: &ModelConfig,
        layout: CacheLayout,
        num_blocks: usize,
        block_size: usize,
    ) -> Result<Self> {
        let layer =
            |width: &usize| Ok(ops.allocate(config.kv_kind, num_blocks * block_size * width)?);
        let layers = |widths: &[usize]| widths.iter().map(layer).collect::<Result<_>>();
        let k = layers(&layout.widths)?;
        let v = layers(if config.latent.is_some() { &[] } else { &layout.widths })?;
        let state = |layer| {
            let lens = config.recurrence(layer)?.state_lens(config.hidden_size);
            let [conv, memory] = lens.map(|len| ops.allocate(Kind::F32, layout.kinds.states * len));
            Some(conv.and_then(|conv| Ok(StateBuffers { conv, memory: memory? })))
        };
        let states = (0..config.layers).filter_map(state).collect::<Result<_, _>>()?;
        Ok(Self { block_size, num_blocks, layout, k, v, states })
    }

    /// The part of a layer of the model that has attention.
    pub fn of_layer(&self, layer: usize) -> LayerCache<'_, M> {
        let LayerPlace::Blocks { group, index } = self.layout.places[layer] else {
            panic!("invariant: layer {layer} has attention")
        };
        let k = &self.k[index];
        LayerCache { group, k: M::view(k), v: M::view(self.v.get(index).unwrap_or(k)) }
    }

    /// The states of a layer of the model that is recurrent.
    pub fn states_of_layer(&self, layer: usize) -> LayerStates<'_, M> {
        let LayerPlace::State { index } = self.layout.places[layer] else {
            panic!("invariant: layer {layer} is recurrent")
        };
        let StateBuffers { conv, memory } = &self.states[index];
        LayerStates { conv: M::view(conv), memory: M::view(memory) }
    }
}
