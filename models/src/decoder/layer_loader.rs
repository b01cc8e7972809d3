//! What a layer is loaded from. Weights are taken by name; a layer's own activations are allocated
//! once its weights are found, so that a damaged config cannot ask for more memory than its files
//! justify.

use super::activations::Activations;
use super::rope::{self, RopeBuffers};
use crate::ModelConfig;
use crate::config::{RopeConfig, Sliding};
use crate::loader::tensors::Tensors;
use crate::spec::ArchSpec;
use cresset_kernels::Ops;
use cresset_kernels::gpu::Kind;
use cresset_kernels::linear::Mode;
use std::collections::BTreeMap;
use std::sync::Arc;

/// The sizes a decoder is built for.
#[derive(Clone, Copy, Debug)]
pub struct DecoderOptions {
    /// The kind of the activations: f32 or, on a device, bf16.
    pub kind: Kind,
    pub mode: Mode,
    /// Largest number of tokens in one step.
    pub max_tokens: usize,
    /// Largest number of rows of one step whose logits are computed.
    pub max_logits_rows: usize,
    /// Longest sequence, tokens.
    pub max_context: usize,
    /// Whether products may round activations to eight bits, so that norms round them beforehand.
    pub rounds: bool,
    /// Whether the head that guesses tokens is loaded, if the files have one.
    pub guesses: bool,
}

/// The things that a layer is loaded from.
pub struct LayerLoader<'l, 't, O: Ops> {
    pub spec: &'l ArchSpec,
    pub tensors: &'l mut Tensors<'t, O>,
    /// The number of the layer, from 0.
    pub layer: usize,
    /// The beginning of the names of its tensors.
    prefix: String,
    /// Whether any weights after an attention were found to be block-quantised.
    pub quantised: bool,
    ops: &'l O,
    options: DecoderOptions,
    /// Activations that all layers use in turn, by name and width.
    rows: BTreeMap<(&'static str, usize), Activations<O>>,
    rope: Option<Arc<RopeBuffers<O>>>,
    /// The RoPE table of the layers with a sliding window, if they use a different one.
    sliding_rope: Option<Arc<RopeBuffers<O>>>,
    /// The empty table of layers whose queries and keys are not rotated.
    no_rope: Option<Arc<RopeBuffers<O>>>,
}

impl<'l, 't, O: Ops> LayerLoader<'l, 't, O> {
    pub(crate) fn new(
        spec: &'l ArchSpec,
        tensors: &'l mut Tensors<'t, O>,
        ops: &'l O,
        options: DecoderOptions,
    ) -> Self {
        Self {
            spec,
            tensors,
            layer: 0,
            prefix: String::new(),
            quantised: false,
            ops,
            options,
            rows: BTreeMap::new(),
            rope: None,
            sliding_rope: None,
            no_rope: None,
        }
    }

    /// Goes on to a layer, the names of whose tensors begin with `prefix`.
    pub(crate) fn begin(&mut self, layer: usize, prefix: String) {
        (self.layer, self.prefix) = (layer, prefix);
    }

    /// The beginning of the names of the layer's tensors.
    pub fn prefix(&self) -> String {
        self.prefix.clone()
    }

    /// `[max_tokens, width]` activations. Layers that ask with one name and width get the same
    /// memory.
    pub fn rows(&mut self, name: &'static str, width: usize) -> Option<Activations<O>> {
        self.rows_of(self.options.kind, name, width)
    }

    /// The same of another kind.
    pub fn rows_of(
        &mut self,
        kind: Kind,
        name: &'static str,
        width: usize,
    ) -> Option<Activations<O>> {
        self.activations(name, kind, self.options.max_tokens, width)
    }

    /// `[max_logits_rows, width]` activations, for
    /// [`LayerStep::select_rows`](super::LayerStep::select_rows).
    pub fn selected_rows(&mut self, name: &'static str, width: usize) -> Option<Activations<O>> {
        self.activations(name, self.options.kind, self.options.max_logits_rows, width)
    }

    /// The largest number of rows of one step whose logits are computed.
    pub(super) fn most_logits_rows(&self) -> usize {
        self.options.max_logits_rows
    }

    pub(super) fn activations(
        &mut self,
        name: &'static str,
        kind: Kind,
        rows: usize,
        width: usize,
    ) -> Option<Activations<O>> {
        if let Some(known) = self.rows.get(&(name, width)) {
            return Some(known.clone());
        }
        let allocated = self.ops.allocate(kind, rows * width);
        let buffer = self.tensors.keep(name, allocated.map_err(Into::into))?;
        let rows = Activations { buffer: Arc::new(buffer), width };
        self.rows.insert((name, width), rows.clone());
        Some(rows)
    }

    /// The layer's sliding window, if it has one.
    pub fn sliding(&self) -> Option<&'l Sliding> {
        self.spec.config.sliding.as_ref().filter(|sliding| sliding.layers[self.layer])
    }

    /// The RoPE table of the layer.
    pub fn rope(&mut self) -> Option<Arc<RopeBuffers<O>>> {
        let config = &self.spec.config;
        let none = RopeConfig { rotary_dim: 0, ..config.rope.clone() };
        let (cached, own) = match self.sliding().and_then(|sliding| sliding.rope.as_ref()) {
            _ if config.unrotated.contains(&self.layer) => (&mut self.no_rope, &none),
            Some(own) => (&mut self.sliding_rope, own),
            None => (&mut self.rope, &config.rope),
        };
        if cached.is_none() {
            let positions = self.options.positions(config);
            let style = self.spec.options.rope_style;
            let table = rope::upload(self.ops, own, style, config.query_growth, positions);
            *cached = self.tensors.keep("the RoPE table", table).map(Arc::new);
        }
        cached.clone()
    }
}

impl DecoderOptions {
    pub(crate) fn positions(&self, config: &ModelConfig) -> usize {
        self.max_context.min(config.max_positions)
    }
}
