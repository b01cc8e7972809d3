//! The decoder, written once for the CPU and for a device: what its layers are loaded from, and in
//! which order a step calls the ops. An implementation `O` of the ops decides where memory lies.
//!
//! A layer is the architecture's own ([`Layer`]); it is composed of `blocks`. Nothing in a step
//! allocates, and the calls depend only on a step's shape, never on its values: so a device can
//! record a step and replay it.

mod activations;
pub(crate) mod guess_head;
mod layer_loader;
pub(crate) mod ranks;
pub mod rope;
mod step;

pub use activations::Activations;
pub use layer_loader::{DecoderOptions, LayerLoader};
pub use step::{GroupBatch, Layer, LayerStep, StepBatch, Stream};

use crate::planted::in_f32;
use crate::{Error, ForwardBatch, KvCache, ModelConfig, Result};
use cresset_kernels::Ops;
use cresset_kernels::embedding::GatherArgs;
use cresset_kernels::linear::Mode;
use cresset_kernels::operand::IndicesOf;
use guess_head::GuessHead;
use ranks::RankBuffers;

pub struct Decoder<O: Ops> {
    pub ops: O,
    pub config: ModelConfig,
    /// Whether any layer has block-quantised weights after its attention. On the CPU, K and V are
    /// then kept in f16.
    pub quantised: bool,
    /// Positions that the RoPE tables cover; this is also the longest sequence.
    pub positions: usize,
    pub(crate) mode: Mode,
    pub(crate) embedding: O::Matrix,
    pub(crate) layers: Vec<Box<dyn Layer<O>>>,
    pub(crate) norm: O::Buffer,
    /// `None`: the head is the embedding's transpose.
    pub(crate) head: Option<O::Matrix>,
    pub(crate) guess_head: Option<GuessHead<O>>,
    /// Each `[tokens, hidden]`.
    pub(crate) residual: Activations<O>,
    pub(crate) normed: Activations<O>,
    /// The same rounded to eight bits, for products that round.
    pub(crate) rounded: Option<Activations<O>>,
    pub(crate) sublayer_out: Activations<O>,
    /// `[logits rows, hidden]`: the residual stream of the rows whose logits are computed.
    pub(crate) selected: Activations<O>,
    /// If several devices compute the model together.
    pub(crate) ranks: Option<RankBuffers<O>>,
}

impl<O: Ops> Decoder<O> {
    /// Writes K and V of every token of the step into the cache, and the logits of the rows that
    /// the batch asks for to `logits`: `[logits_rows, vocab_size]` f32.
    ///
    /// In the last layer, everything after the write into the cache is computed for those rows
    /// alone, unless a head needs the state of every token to guess on.
    pub fn forward<'a>(
        &'a self,
        batch: &'a StepBatch<'a, O>,
        kv: &'a KvCache<O>,
        logits: O::View<'a>,
    ) -> Result<()> {
        let mut x = self.stream(batch);
        self.embed(batch, &x)?;
        for (layer, weights) in self.layers.iter().enumerate() {
            weights.forward(&self.step(batch, kv, layer), &mut x)?;
        }
        if x.rows() == 0 {
            return Ok(());
        }
        let last = self.step(batch, kv, self.layers.len() - 1);
        let Some(head) = &self.guess_head else {
            last.add_norm(&self.norm, &mut x)?;
            return self.logits(&last, x.input(), logits);
        };
        head.keep_states(&last, &self.norm, &x)?;
        if batch.logits_rows == 0 {
            return Ok(());
        }
        let selected = head.selected_states(&last)?;
        self.logits(&last, selected, logits)
    }

    /// Whether the model has a head that guesses tokens.
    pub(crate) fn guesses(&self) -> bool {
        self.guess_head.is_some()
    }

    /// Runs the head that guesses tokens at the positions of `batch`, whose ids are those of the
    /// tokens behind them. `sources`: for each the row of the latest call of this function or of
    /// [`Self::forward`] whose state it goes on from. Writes K and V of the head's layer, and the
    /// logits of the token behind each of those ids, or none if `batch` asks for none.
    pub(crate) fn guess<'a>(
        &'a self,
        batch: &'a StepBatch<'a, O>,
        sources: IndicesOf<'a, O>,
        kv: &'a KvCache<O>,
        logits: O::View<'a>,
    ) -> Result<()> {
        let head = self.guess_head.as_ref().expect("invariant: the model has the head");
        let mut x = self.stream(batch);
        let step = self.step(batch, kv, self.layers.len());
        head.read_states(&step, sources, &mut x)?;
        self.embed(batch, &x)?;
        head.forward(&step, &mut x)?;
        if x.rows() == 0 {
            return Ok(());
        }
        let states = head.keep_own_states(&step, &x)?;
        self.logits(&step, states, logits)
    }

    fn stream<'a>(&'a self, batch: &'a StepBatch<'a, O>) -> Stream<'a, O> {
        Stream {
            rows: batch.tokens,
            residual: &self.residual,
            normed: &self.normed,
            rounded: self.rounded.as_ref(),
            is_rounded: false,
            input: &self.residual,
            sublayer_out: &self.sublayer_out,
            pending: false,
        }
    }

    /// The embeddings of the step's tokens → the residual stream.
    fn embed<'a>(&'a self, batch: &'a StepBatch<'a, O>, x: &Stream<'a, O>) -> Result<()> {
        Ok(self.ops.gather(&GatherArgs {
            table: O::matrix(&self.embedding),
            ids: batch.ids,
            device: batch.device,
            scale: self.config.embedding_scale,
            out: x.residual(),
        })?)
    }

    /// States behind the last norm → logits.
    fn logits<'a>(
        &'a self,
        last: &LayerStep<'a, O>,
        states: O::View<'a>,
        logits: O::View<'a>,
    ) -> Result<()> {
        in_f32(|| {
            let head = self.head.as_ref().unwrap_or(&self.embedding);
            match &self.ranks {
                None => last.linear(head, None, states, logits)?,
                Some(ranks) => {
                    let shape = [last.batch.logits_rows, self.config.vocab_size];
                    let own = |part| last.linear(head, None, states, part);
                    ranks.logits(&self.ops, shape, own, logits)?;
                }
            }
            let cap = self.config.logits_softcap;
            cap.map_or(Ok(()), |cap| Ok(self.ops.soft_cap(logits, cap)?))
        })
    }

    /// Refuses a batch that contradicts itself, the model, or the first `num_blocks` of its cache.
    pub(crate) fn check(
        &self,
        batch: &ForwardBatch,
        kv: &KvCache<O>,
        num_blocks: usize,
    ) -> Result<()> {
        let (vocab_size, kinds) = (self.config.vocab_size, &kv.layout.kinds);
        batch
            .check(vocab_size, self.positions, kv.block_size, num_blocks, kinds)
            .map_err(Error::Batch)
    }

    fn step<'a>(
        &'a self,
        batch: &'a StepBatch<'a, O>,
        kv: &'a KvCache<O>,
        layer: usize,
    ) -> LayerStep<'a, O> {
        LayerStep {
            ops: &self.ops,
            config: &self.config,
            mode: self.mode,
            batch,
            kv,
            layer,
            is_last: layer + 1 == self.config.layers,
            selected: &self.selected,
            ranks: self.ranks.as_ref(),
        }
    }
}
