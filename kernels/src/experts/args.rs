//! The arguments of the choice of experts, of the products with their matrices, and of the sum.

use crate::Result;
use crate::error::ensure;
use crate::gpu::Kind;
use crate::operand::{Operand, distinct, is_activation};

/// Most experts that may be chosen for a row: a device has a lane of a warp for each. Published
/// models choose at most 22.
pub const MAX_CHOSEN: usize = 32;

/// The experts that were chosen for `n` rows.
#[derive(Clone, Copy, Debug)]
pub struct Routes<V> {
    /// The number of experts that there are.
    pub experts: usize,
    /// The number of experts that are chosen for a row.
    pub chosen: usize,
    /// `[n, chosen]` f32: the factor of each choice's result.
    pub weights: V,
    /// u32, [`Routes::plan_len`] of them: `[n, chosen]` the experts of the choices; `[experts + 1]`
    /// the place behind which each expert's choices stand in the rest; `[n * chosen]` the numbers
    /// of the choices by ascending expert, those of an expert in ascending order.
    pub plan: V,
}

impl<V: Operand> Routes<V> {
    /// The length of the plan for `n` rows.
    pub const fn plan_len(n: usize, experts: usize, chosen: usize) -> usize {
        2 * n * chosen + experts + 1
    }

    /// Returns the number of rows.
    fn check(&self, op: &'static str) -> Result<usize> {
        let &Self { experts, chosen, weights, plan } = self;
        ensure(op, (1..=experts.min(MAX_CHOSEN)).contains(&chosen), || {
            format!("{chosen} of {experts} experts for a row, where at most {MAX_CHOSEN} can be")
        })?;
        let n = weights.len() / chosen;
        let fits = weights.kind() == Kind::F32
            && plan.kind() == Kind::U32
            && weights.len() == n * chosen
            && plan.len() == Self::plan_len(n, experts, chosen);
        ensure(op, fits, || format!("{weights:?} and {plan:?} for {chosen} of {experts} experts"))?;
        Ok(n)
    }
}

/// Most groups that experts may be in: a device has a lane of a warp for each.
pub const MAX_GROUPS: usize = 32;

/// How the scores of a router become weights, and how experts are chosen by them.
#[derive(Clone, Copy, Debug)]
pub enum RouteScoring<V> {
    /// Weights are the softmax of all scores. The experts with the largest are chosen.
    Softmax,
    /// Weights are the same. Experts are chosen among those of the groups that are kept: of
    /// `groups` equal ones those whose largest score is largest. DeepSeek-AI 2024, "DeepSeek-V2".
    GroupedSoftmax { groups: usize, kept: usize },
    /// Weights are the sigmoids of the scores. An expert is chosen by the sum of its weight and its
    /// bias, among the experts of the groups that are kept: of `groups` equal ones those in which
    /// the two largest sums together are largest. DeepSeek-AI 2024, "DeepSeek-V3".
    Sigmoid {
        /// `[experts]` f32
        bias: V,
        groups: usize,
        kept: usize,
    },
}

/// The experts with the largest scores, and how much each counts.
#[derive(Clone, Copy, Debug)]
pub struct RouteArgs<V> {
    /// `[n, experts]` f32: the logits of the router.
    pub scores: V,
    pub scoring: RouteScoring<V>,
    /// Whether the weights of a row are divided by their sum.
    pub normalise: bool,
    /// By which the weights are then multiplied.
    pub scale: f32,
    /// Written; its two buffers share no memory with each other or with `scores`.
    pub routes: Routes<V>,
}

impl<V: Operand> RouteArgs<V> {
    /// Returns the number of rows.
    pub(super) fn check(&self, op: &'static str) -> Result<usize> {
        let Routes { experts, weights, plan, .. } = self.routes;
        let n = self.routes.check(op)?;
        let fits = self.scores.kind() == Kind::F32 && self.scores.len() == n * experts;
        ensure(op, fits, || format!("{:?} for {n} rows of {experts}", self.scores))?;
        distinct(op, weights, &[self.scores, plan])?;
        distinct(op, plan, &[self.scores])?;
        let (bias, [groups, kept]) = self.scoring.parts();
        let chosen = self.routes.chosen;
        let fits = (1..=groups.min(MAX_GROUPS)).contains(&kept)
            && experts.is_multiple_of(groups)
            && experts / groups * kept >= chosen
            && bias.is_none_or(|bias| bias.kind() == Kind::F32 && bias.len() == experts);
        ensure(op, fits, || {
            format!("{chosen} of {experts} experts, {bias:?}, in {kept} of {groups} groups")
        })?;
        if let Some(bias) = bias {
            distinct(op, weights, &[bias])?;
            distinct(op, plan, &[bias])?;
        }
        Ok(n)
    }
}

impl<V: Operand> RouteScoring<V> {
    /// The biases of sigmoids, and how many groups there are and are kept.
    pub(super) fn parts(self) -> (Option<V>, [usize; 2]) {
        match self {
            Self::Softmax => (None, [1, 1]),
            Self::GroupedSoftmax { groups, kept } => (None, [groups, kept]),
            Self::Sigmoid { bias, groups, kept } => (Some(bias), [groups, kept]),
        }
    }
}

/// `out[c] = x[row of c] · w[expert of c]ᵀ (+ bias[expert of c])` for every choice c.
#[derive(Clone, Copy, Debug)]
pub struct ExpertLinearArgs<V: Operand> {
    /// `[n, cols]` or, for each choice its own, `[n * chosen, cols]` activations (f32 or, on a
    /// device, bf16).
    pub x: V,
    /// `[experts * rows, cols]`: the experts' matrices, one below the other. On the CPU in any
    /// format, each expert's in parts of its own; on a device of the kind of `x` or, for bf16 and
    /// `rows` in whole bands, in a packed form.
    pub w: V::Matrix,
    /// `[experts * rows]` of the kind of `x`.
    pub bias: Option<V>,
    pub routes: Routes<V>,
    /// `[n * chosen, rows]` of the kind of `x`; it shares no memory with `x`.
    pub out: V,
}

/// The sizes of a product with experts.
pub(super) struct ExpertSizes {
    pub choices: usize,
    /// Choices that read one row of `x`.
    pub choices_per_row: usize,
    pub rows: usize,
    pub cols: usize,
}

impl<V: Operand> ExpertLinearArgs<V> {
    pub(super) fn check(&self, op: &'static str) -> Result<ExpertSizes> {
        let &Self { x, w, bias, routes, out } = self;
        let (all_rows, cols) = V::shape(w);
        let (n, rows) = (routes.check(op)?, all_rows / routes.experts);
        let choices = n * routes.chosen;
        ensure(op, rows > 0 && cols > 0 && all_rows == rows * routes.experts, || {
            format!("a matrix of {all_rows} by {cols} for {} experts", routes.experts)
        })?;
        let fits = is_activation(x.kind())
            && out.kind() == x.kind()
            && [n * cols, choices * cols].contains(&x.len())
            && out.len() == choices * rows;
        ensure(op, fits, || format!("{x:?} and {out:?} for {choices} choices, {rows} by {cols}"))?;
        distinct(op, out, &[x, routes.weights, routes.plan])?;
        if let Some(bias) = bias {
            let fits = bias.kind() == x.kind() && bias.len() == all_rows;
            ensure(op, fits, || format!("a bias {bias:?} of {all_rows} outputs"))?;
            distinct(op, out, &[bias])?;
        }
        let choices_per_row = if x.len() == choices * cols { 1 } else { routes.chosen };
        Ok(ExpertSizes { choices, choices_per_row, rows, cols })
    }
}

/// An expert that computes every row.
#[derive(Clone, Copy, Debug)]
pub struct SharedExpert<V> {
    /// `[n, width]`: its results.
    pub x: V,
    /// `[n]` f32: each result is multiplied by the sigmoid of this.
    pub gate: Option<V>,
}

/// `out[i] = Σ_j weights[i, j] * x[i * chosen + j]`, and then the shared expert's part, if there is
/// one.
#[derive(Clone, Copy, Debug)]
pub struct CombineArgs<V> {
    /// `[n * chosen, width]` activations (f32 or, on a device, bf16).
    pub x: V,
    pub routes: Routes<V>,
    pub shared: Option<SharedExpert<V>>,
    /// `[n, width]` of the kind of `x`; it shares no memory with the other operands.
    pub out: V,
}

impl<V: Operand> CombineArgs<V> {
    /// Returns the number of rows and their width.
    pub(super) fn check(&self, op: &'static str) -> Result<(usize, usize)> {
        let &Self { x, routes, shared, out } = self;
        let n = routes.check(op)?;
        let width = out.len().checked_div(n).unwrap_or(0);
        let fits = is_activation(x.kind())
            && out.kind() == x.kind()
            && out.len() == n * width
            && x.len() == n * routes.chosen * width;
        ensure(op, fits, || {
            format!("{x:?} and {out:?} for {n} rows of {} choices", routes.chosen)
        })?;
        distinct(op, out, &[x, routes.weights])?;
        if let Some(SharedExpert { x: shared, gate }) = shared {
            let fits = shared.kind() == x.kind()
                && shared.len() == out.len()
                && gate.is_none_or(|gate| gate.kind() == Kind::F32 && gate.len() == n);
            ensure(op, fits, || format!("a shared expert {shared:?}, {gate:?} for {out:?}"))?;
            distinct(op, out, &[shared])?;
            gate.map_or(Ok(()), |gate| distinct(op, out, &[gate]))?;
        }
        Ok((n, width))
    }
}
