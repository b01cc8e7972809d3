//! Builds a decoder from tensors. Weights are taken by name; a layer's own activations are
//! allocated once its weights are found, so that a damaged config cannot ask for more memory than
//! its files justify.

use super::guess_head::{GuessHead, HeadNames};
use super::ranks::RankBuffers;
use super::rope::{self, RopeBuffers};
use super::{Activations, Decoder};
use crate::arch::{self, ArchSpec};
use crate::config::{RopeConfig, RopeScaling, Sliding};
use crate::loader::store::WeightStore;
use crate::loader::tensors::{Reading, Tensors};
use crate::loader::{self, ModelSource};
use crate::{ModelConfig, Result};
use cresset_kernels::Ops;
use cresset_kernels::gpu::{Kind, Rank};
use cresset_kernels::linear::Mode;
use std::collections::BTreeMap;
use std::sync::Arc;

/// The matrix of the logits, in files where it is not the embedding.
const HEAD: &str = "lm_head.weight";
/// Divisors of the rotary frequencies, if the file has them.
const ROPE_FACTORS: &str = "rope_freqs.weight";
/// The two tables of LongRoPE in GGUF files.
pub(crate) const LONG_FACTORS: &str = "rope_factors_long.weight";
const SHORT_FACTORS: &str = "rope_factors_short.weight";

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
    fn new(
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
    pub(super) fn begin(&mut self, layer: usize, prefix: String) {
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
    fn positions(&self, config: &ModelConfig) -> usize {
        self.max_context.min(config.max_positions)
    }
}

impl<O: Ops> Decoder<O> {
    /// Loads a model. Ends with an error that names every tensor left over or missing, every config
    /// key not understood, and every file whose digest is not that of the release.
    pub fn load(
        ops: O,
        source: &ModelSource,
        store: &mut dyn WeightStore<O>,
        reading: Reading,
        options: &DecoderOptions,
    ) -> Result<Self> {
        let build =
            |spec: ArchSpec, tensors: &mut Tensors<O>| Self::build(ops, spec, tensors, *options);
        loader::read(source, store, reading, build)
    }

    /// Takes every tensor; `None` if there was a problem, which `Tensors::finish` reports.
    fn build(
        ops: O,
        mut spec: ArchSpec,
        t: &mut Tensors<O>,
        options: DecoderOptions,
    ) -> Option<Self> {
        // Whatever a config says of it, as in transformers: it may be another one than the
        // embedding.
        spec.config.tied_embeddings &= !t.has(HEAD);
        let ModelConfig { vocab_size, hidden_size, layers, tied_embeddings, .. } = spec.config;
        let (whole, rank) = (spec.config.clone(), ops.rank());
        take_share(&mut spec, t, rank)?;
        let guess_names = leave_out_unused(&mut spec, t, options.guesses);
        take_factors(t, &mut spec.config)?;
        let (shape, own_rows) = ([vocab_size, hidden_size], rank.share(vocab_size));
        let first = "model.embed_tokens.weight";
        let (embedding, tied_head) = if tied_embeddings && rank.count > 1 {
            t.matrix_and_rows(first, shape, own_rows.clone()).unzip()
        } else {
            (t.matrix(first, vocab_size, hidden_size), None)
        };
        let mut loader = LayerLoader::new(&spec, t, &ops, options);
        // Before the layers: while a matrix is packed it is in memory twice, and this one is large.
        let head = if tied_embeddings {
            Some(tied_head)
        } else {
            loader.tensors.rows_of(HEAD, shape, own_rows).map(Some)
        };
        let mut load = |layer| {
            loader.begin(layer, format!("model.layers.{layer}."));
            loader.tensors.share.kv_parts = whole.kv_heads_of(layer).count.min(rank.count);
            arch::load_layer(&mut loader)
        };
        let layers: Vec<_> = (0..layers).map(&mut load).collect();
        let guess_head = match guess_names {
            None => Some(None),
            Some(names) => GuessHead::load(&mut loader, layers.len(), names).map(Some),
        };
        // The logits are linear in what the last norm gives.
        let scale = spec.config.logits_scale;
        let norm = loader.tensors.scaled_norm("model.norm.weight", hidden_size, scale);
        let (embedding, layers, head) =
            (embedding?, layers.into_iter().collect::<Option<_>>()?, head?);
        Some(Self {
            positions: options.positions(&spec.config),
            mode: options.mode,
            embedding,
            layers,
            norm: norm?,
            head,
            guess_head: guess_head?,
            residual: loader.rows("residual", hidden_size)?,
            normed: loader.rows("normed", hidden_size)?,
            rounded: if options.rounds && hidden_size.is_multiple_of(8) {
                Some(loader.rows("rounded", hidden_size)?)
            } else {
                None
            },
            sublayer_out: loader.rows("sublayer out", hidden_size)?,
            selected: loader.selected_rows("selected residual", hidden_size)?,
            ranks: RankBuffers::load(&mut loader, rank)?,
            quantised: loader.quantised,
            config: spec.config,
            ops,
        })
    }
}

/// Leaves the sizes of one rank's share, or refuses a model that has none for it.
fn take_share<O: Ops>(spec: &mut ArchSpec, t: &mut Tensors<O>, rank: Rank) -> Option<()> {
    t.share.rank = rank;
    let refuse =
        |why: String| t.refuse(&format!("{why}: use another number (engine.tensor_parallel)"));
    spec.take_share(rank).map_err(refuse).ok()
}

/// Leaves out the tensors that are not used. If a head that guesses tokens is wanted and there is
/// one, its layer becomes one of the config, and the names of its tensors are returned.
fn leave_out_unused<O: Ops>(
    spec: &mut ArchSpec,
    t: &mut Tensors<O>,
    guesses: bool,
) -> Option<HeadNames> {
    let further = spec.config.layers..spec.config.layers + spec.options.further_layers;
    let wanted = guesses && !further.is_empty();
    let head = HeadNames::find(t, spec.config.layers).filter(|_| wanted);
    // Older checkpoints store values that are computed here.
    t.ignore("rotary_emb.inv_freq");
    t.ignore_towers();
    match &head {
        None => t.ignore_below(HeadNames::APART),
        // It shares the model's embedding and output, of which checkpoints have copies.
        Some(HeadNames { layer, .. }) => ["embed_tokens.weight", "shared_head.head.weight"]
            .iter()
            .for_each(|copy| t.ignore_one(&format!("{layer}{copy}"))),
    }
    further.skip(usize::from(head.is_some())).for_each(|layer| t.ignore_layer(layer));
    if head.is_some() {
        spec.config.add_guess_layer();
    }
    head
}

/// Takes the divisors of rotary frequencies, if the file has some among its tensors.
fn take_factors<O: Ops>(t: &mut Tensors<O>, config: &mut ModelConfig) -> Option<()> {
    if t.has(ROPE_FACTORS) {
        let factors = t.numbers(ROPE_FACTORS, config.rope.rotary_dim / 2)?;
        config.rope.scaling = RopeScaling::Factors(factors);
    }
    if let RopeScaling::LongRope { short, long, .. } = &mut config.rope.scaling
        && t.has(LONG_FACTORS)
    {
        (*short, *long) =
            (t.numbers(SHORT_FACTORS, short.len())?, t.numbers(LONG_FACTORS, long.len())?);
    }
    Some(())
}
