//! Builds a decoder from a release: its architecture reads the spec, and the spec's layers take
//! their tensors.

use crate::arch;
use crate::config::RopeScaling;
use crate::decoder::guess_head::{GuessHead, HeadNames};
use crate::decoder::ranks::RankBuffers;
use crate::decoder::{Decoder, DecoderOptions, LayerLoader};
use crate::loader::names::{LONG_FACTORS, ROPE_FACTORS, SHORT_FACTORS};
use crate::loader::store::WeightStore;
use crate::loader::tensors::{Reading, Tensors};
use crate::loader::{self, ModelSource};
use crate::spec::ArchSpec;
use crate::{ModelConfig, Result};
use cresset_kernels::Ops;
use cresset_kernels::gpu::Rank;

/// The matrix of the logits, in files where it is not the embedding.
const HEAD: &str = "lm_head.weight";

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
        loader::read(source, store, reading, arch::SPEC_READER, build)
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
            Some(names) => {
                GuessHead::load(&mut loader, layers.len(), names, arch::load_layer).map(Some)
            }
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
