//! The data of one step that layers read, and the activations they share.

use super::activations::Activations;
use super::ranks::RankBuffers;
use crate::planted::{OpFault, argument};
use crate::{KvCache, ModelConfig, Result};
use cresset_kernels::Ops;
use cresset_kernels::embedding::{DeviceTokens, SelectRowsArgs};
use cresset_kernels::linear::{LinearArgs, Mode};
use cresset_kernels::norm::{AddNormedArgs, NormArgs};
use cresset_kernels::operand::IndicesOf;
use cresset_kernels::recurrence::StateMoves;

/// The inputs of a step.
pub struct StepBatch<'a, O: Ops> {
    /// The number of tokens of the step, padding included.
    pub tokens: usize,
    /// The number of rows whose logits are computed.
    pub logits_rows: usize,
    /// `[tokens]` each: ids, positions in their sequences.
    pub ids: IndicesOf<'a, O>,
    pub positions: IndicesOf<'a, O>,
    /// `[logits_rows]`: the indices of those rows.
    pub selected: IndicesOf<'a, O>,
    /// For each group of layers.
    pub groups: &'a [GroupBatch<'a, O>],
    /// The states of the sequences, if the model has recurrent layers.
    pub states: Option<StateMoves<O::View<'a>>>,
    /// Ids that only the device has; `None` on the CPU.
    pub device: Option<DeviceTokens<IndicesOf<'a, O>>>,
}

/// The inputs of layers that share the blocks of the cache.
pub struct GroupBatch<'a, O: Ops> {
    /// `[tokens]`: slots of K and V in the cache.
    pub slots: IndicesOf<'a, O>,
    pub sequences: O::Sequences<'a>,
}

/// The residual stream and what is added to it. Every layer reads and writes it.
pub struct Stream<'a, O: Ops> {
    pub(super) rows: usize,
    pub(super) residual: &'a Activations<O>,
    pub(super) normed: &'a Activations<O>,
    /// The memory for what the next sub-layer reads, rounded to eight bits, and whether it has it.
    pub(super) rounded: Option<&'a Activations<O>>,
    pub(super) is_rounded: bool,
    /// What the next sub-layer reads: one of the two.
    pub(super) input: &'a Activations<O>,
    pub(super) sublayer_out: &'a Activations<O>,
    /// Whether `sublayer_out` still has to be added to the residual stream.
    pub(super) pending: bool,
}

impl<'a, O: Ops> Stream<'a, O> {
    /// Rows that are still computed: all tokens, and after the last attention only those that get
    /// logits.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// `[rows, hidden]`
    pub fn residual(&self) -> O::View<'a> {
        self.residual.first(self.rows)
    }

    /// `[rows, hidden]`: what a sub-layer reads. It is the normed residual stream, or the stream
    /// itself in layers that norm only the results of their sub-layers.
    pub fn input(&self) -> O::View<'a> {
        self.input.first(self.rows)
    }

    /// `[rows, hidden]`: where a sub-layer writes what [`LayerStep::add_norm`] adds to the residual
    /// stream.
    pub fn sublayer_out(&mut self) -> O::View<'a> {
        self.pending = true;
        self.sublayer_out.first(self.rows)
    }
}

/// One layer of a decoder. The file of its architecture shows which blocks it has, in which order.
pub trait Layer<O: Ops>: Send {
    /// Adds the layer's share to the residual stream. When the layer begins, the result of the
    /// previous layer's last sub-layer may still have to be added; when it ends, so may this
    /// layer's own last result: [`LayerStep::add_norm`] adds and norms in one op.
    fn forward<'a>(&'a self, step: &LayerStep<'a, O>, x: &mut Stream<'a, O>) -> Result<()>;
}

/// The things that a layer takes from its step.
pub struct LayerStep<'a, O: Ops> {
    pub ops: &'a O,
    pub config: &'a ModelConfig,
    pub mode: Mode,
    pub batch: &'a StepBatch<'a, O>,
    pub kv: &'a KvCache<O>,
    /// The number of the layer, from 0.
    pub layer: usize,
    /// Whether this is the last layer, that of a head which guesses tokens included.
    pub is_last: bool,
    pub(super) selected: &'a Activations<O>,
    /// If several devices compute the model together.
    pub(super) ranks: Option<&'a RankBuffers<O>>,
}

impl<'a, O: Ops> LayerStep<'a, O> {
    /// Adds up what the ranks computed of `x`, if a matrix whose columns they share made it.
    pub fn add_ranks(&self, x: O::View<'a>) -> Result<()> {
        self.ranks.map_or(Ok(()), |ranks| ranks.add_up(self.ops, x))
    }

    /// The states of the sequences, which a recurrent layer asks for.
    pub fn states(&self) -> StateMoves<O::View<'a>> {
        self.batch.states.expect("invariant: the batch was checked against the model")
    }

    /// Adds the sub-layer's result to the residual stream, if there is one, and norms the stream
    /// into `x.input()`.
    pub fn add_norm(&self, weight: &'a O::Buffer, x: &mut Stream<'a, O>) -> Result<()> {
        let delta = x.pending.then(|| x.sublayer_out.first(x.rows));
        x.pending = false;
        x.input = x.normed;
        x.is_rounded = x.rounded.is_some();
        let rounded = x.rounded.map(|rounded| rounded.first(x.rows));
        let (x, out, weight, eps) = (x.residual(), x.input(), O::view(weight), self.epsilon());
        Ok(self.ops.norm(&NormArgs { x, delta, weight, eps, out, rounded })?)
    }

    /// Norms the sub-layer's result before it is added to the residual stream. Overwrites
    /// `x.input()`.
    pub fn norm_sublayer_out(&self, weight: &'a O::Buffer, x: &mut Stream<'a, O>) -> Result<()> {
        x.is_rounded = false;
        self.norm(x.sublayer_out.first(x.rows), None, weight, x.normed.first(x.rows))?;
        std::mem::swap(&mut x.sublayer_out, &mut x.normed);
        Ok(())
    }

    /// Norms the sub-layer's result and adds it to the residual stream, which the next sub-layer
    /// reads as it is.
    pub fn add_normed(&self, weight: &'a O::Buffer, x: &mut Stream<'a, O>) -> Result<()> {
        x.pending = false;
        x.input = x.residual;
        x.is_rounded = false;
        let (delta, weight) = (x.sublayer_out.first(x.rows), O::view(weight));
        let args = AddNormedArgs { x: x.residual(), delta, weight, eps: self.epsilon() };
        Ok(self.ops.add_normed(&args)?)
    }

    /// The epsilon of the model's norms.
    pub fn epsilon(&self) -> f32 {
        argument(OpFault::Epsilon, self.config.rms_norm_eps, |eps| eps * 1e3)
    }

    /// Norms `x`, after adding `delta` to it if there is one, into `out`.
    pub fn norm(
        &self,
        x: O::View<'a>,
        delta: Option<O::View<'a>>,
        weight: &'a O::Buffer,
        out: O::View<'a>,
    ) -> Result<()> {
        let (eps, weight) = (self.epsilon(), O::view(weight));
        Ok(self.ops.norm(&NormArgs { x, delta, weight, eps, out, rounded: None })?)
    }

    /// `out = x · wᵀ (+ bias)`.
    pub fn linear(
        &self,
        w: &'a O::Matrix,
        bias: Option<&'a O::Buffer>,
        x: O::View<'a>,
        out: O::View<'a>,
    ) -> Result<()> {
        self.linear_in(self.mode, w, bias, x, out)
    }

    /// The same of what a sub-layer reads, rounded beforehand where the product rounds it.
    pub fn input_linear(
        &self,
        w: &'a O::Matrix,
        bias: Option<&'a O::Buffer>,
        x: &Stream<'a, O>,
        out: O::View<'a>,
    ) -> Result<()> {
        match x.rounded.filter(|_| x.is_rounded && O::takes_rounded(w)) {
            Some(rounded) => self.rounded_linear(w, bias, rounded.first(x.rows), out),
            None => self.linear(w, bias, x.input(), out),
        }
    }

    /// The same with rows that are rounded already, if the product rounds them.
    pub fn rounded_linear(
        &self,
        w: &'a O::Matrix,
        bias: Option<&'a O::Buffer>,
        x: O::View<'a>,
        out: O::View<'a>,
    ) -> Result<()> {
        let (w, bias, mode) = (O::matrix(w), bias.map(O::view), self.mode);
        Ok(self.ops.rounded_linear(&LinearArgs { x, w, bias, out, mode })?)
    }

    /// The same with a matrix that is not shared out: where several devices compute the model
    /// together, all get the same bits, and so choose the same experts.
    pub fn whole_linear(
        &self,
        w: &'a O::Matrix,
        bias: Option<&'a O::Buffer>,
        x: O::View<'a>,
        out: O::View<'a>,
    ) -> Result<()> {
        let mode = if self.ranks.is_some() { Mode::Invariant } else { self.mode };
        self.linear_in(mode, w, bias, x, out)
    }

    fn linear_in(
        &self,
        mode: Mode,
        w: &'a O::Matrix,
        bias: Option<&'a O::Buffer>,
        x: O::View<'a>,
        out: O::View<'a>,
    ) -> Result<()> {
        let (w, bias) = (O::matrix(w), bias.map(O::view));
        Ok(self.ops.linear(&LinearArgs { x, w, bias, out, mode })?)
    }

    /// In the last layer, keeps only the rows that get logits: of the residual stream, and of
    /// `from`, a further state of the layer, for which `to` has room. Returns where that state is
    /// now.
    pub fn select_rows(
        &self,
        x: &mut Stream<'a, O>,
        from: &'a Activations<O>,
        to: &'a Activations<O>,
    ) -> Result<&'a Activations<O>> {
        let rows = self.batch.logits_rows;
        if !self.is_last || rows == x.rows {
            return Ok(from);
        }
        self.select(x.residual.first(x.rows), self.selected, rows)?;
        self.select(from.first(x.rows), to, rows)?;
        (x.residual, x.rows) = (self.selected, rows);
        Ok(to)
    }

    /// The rows of `from`, which has one for each token of the step, that are still computed. If
    /// they are fewer they are copied to `to`.
    pub fn remaining_rows(
        &self,
        x: &Stream<'a, O>,
        from: &'a Activations<O>,
        to: &'a Activations<O>,
    ) -> Result<O::View<'a>> {
        if x.rows == self.batch.tokens {
            return Ok(from.first(x.rows));
        }
        self.select(from.first(self.batch.tokens), to, x.rows)?;
        Ok(to.first(x.rows))
    }

    /// In the last layer of a step without logits, stops: no further row is computed. Returns
    /// whether it stopped.
    pub fn ends_here(&self, x: &mut Stream<'a, O>) -> bool {
        let ends = self.is_last && self.batch.logits_rows == 0;
        if ends {
            x.rows = 0;
        }
        ends
    }

    pub(super) fn select(&self, x: O::View<'a>, to: &'a Activations<O>, rows: usize) -> Result<()> {
        let args =
            SelectRowsArgs { x, width: to.width, rows: self.batch.selected, out: to.first(rows) };
        Ok(self.ops.select_rows(&args)?)
    }
}
