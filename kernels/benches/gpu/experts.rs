//! The ops of a mixture of experts.

use crate::case::{Case, TOLERANCE, f32s};
use crate::data::{bf16s, output, value};
use crate::{Model, Result};
use cresset_kernels::experts::{ExpertLinearArgs, Experts, RouteArgs, RouteScoring, Routes};
use cresset_kernels::gpu::{Buffer, Gpu, Kind, View};
use cresset_kernels::operand::MatrixView;
use std::sync::Arc;

pub fn cases<'a>(
    gpu: &'a Arc<dyn Gpu>,
    model: &'a Model,
) -> impl Iterator<Item = Result<Case>> + 'a {
    let ops: [fn(&Arc<dyn Gpu>, &Model, usize) -> Result<Case>; 2] = [routed, multiplied];
    ops.into_iter().flat_map(move |op| model.steps.iter().map(move |n| op(gpu, model, *n)))
}

/// Scores of the rows of a step, and the buffers of their routes.
struct Routing {
    scores: Arc<Buffer>,
    weights: Arc<Buffer>,
    plan: Arc<Buffer>,
    experts: usize,
    chosen: usize,
}

impl Routing {
    fn new(gpu: &Arc<dyn Gpu>, m: &Model, n: usize) -> Result<Self> {
        let &Model { experts, chosen, .. } = m;
        let plan = Routes::<View>::plan_len(n, experts, chosen);
        Ok(Self {
            scores: f32s(gpu, 2, n * experts)?,
            weights: output(gpu, Kind::F32, n * chosen)?,
            plan: output(gpu, Kind::U32, plan)?,
            experts,
            chosen,
        })
    }

    fn args(&self) -> RouteArgs<View> {
        let &Self { experts, chosen, .. } = self;
        let (weights, plan) = (self.weights.view(), self.plan.view());
        let routes = Routes { experts, chosen, weights, plan };
        let (scores, scoring) = (self.scores.view(), RouteScoring::Softmax);
        RouteArgs { scores, scoring, normalise: true, scale: 1.0, routes }
    }

    /// The experts of a row, ascending.
    fn experts_of(row: usize, experts: usize, chosen: usize) -> Vec<usize> {
        let score = |expert: &usize| value(2, row * experts + expert);
        let mut ids: Vec<usize> = (0..experts).collect();
        ids.sort_by(|a, b| score(b).total_cmp(&score(a)));
        ids.truncate(chosen);
        ids.sort_unstable();
        ids
    }
}

fn routed(gpu: &Arc<dyn Gpu>, m: &Model, n: usize) -> Result<Case> {
    let routing = Routing::new(gpu, m, n)?;
    let &Model { experts, chosen, .. } = m;
    let (out, on) = (routing.weights.clone(), gpu.clone());
    let want = move |i: usize| {
        let (row, own) = (i / chosen, i % chosen);
        let exp = |expert: &usize| value(2, row * experts + expert).exp();
        let ids = Routing::experts_of(row, experts, chosen);
        exp(&ids[own]) / ids.iter().map(exp).sum::<f64>()
    };
    Ok(Case {
        op: "route",
        shape: format!("{chosen} of {experts}"),
        n,
        bytes: 4 * n * (experts + 4 * chosen),
        flops: n * experts,
        tolerance: TOLERANCE,
        out,
        want: Box::new(want),
        launch: Box::new(move |_| on.route(&routing.args())),
    })
}

fn multiplied(gpu: &Arc<dyn Gpu>, m: &Model, n: usize) -> Result<Case> {
    let &Model { experts, chosen, expert_ffn: rows, hidden: cols, .. } = m;
    let routing = Routing::new(gpu, m, n)?;
    gpu.route(&routing.args())?;
    let x = bf16s(gpu, 0, n * cols)?;
    let w = bf16s(gpu, 1, experts * rows * cols)?;
    let out = output(gpu, Kind::Bf16, n * chosen * rows)?;
    let (on, written) = (gpu.clone(), out.clone());
    let launch = move |_| {
        let w = MatrixView::dense(w.view(), experts * rows, cols);
        let (x, routes, out) = (x.view(), routing.args().routes, written.view());
        on.expert_linear(&ExpertLinearArgs { x, w, bias: None, routes, out })
    };
    let want = move |i: usize| {
        let (choice, output) = (i / rows, i % rows);
        let row = choice / chosen;
        let expert = Routing::experts_of(row, experts, chosen)[choice % chosen];
        let at = (expert * rows + output) * cols;
        (0..cols).map(|c| value(0, row * cols + c) * value(1, at + c)).sum()
    };
    let read = experts.min(n * chosen);
    Ok(Case {
        op: "expert linear",
        shape: format!("{chosen} of {experts}, {rows} × {cols}"),
        n,
        bytes: 2 * (read * rows * cols + n * cols + n * chosen * rows),
        flops: 2 * n * chosen * rows * cols,
        tolerance: TOLERANCE,
        out,
        want: Box::new(want),
        launch: Box::new(launch),
    })
}
