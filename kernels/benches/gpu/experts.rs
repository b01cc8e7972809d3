//! The ops of a mixture of experts.

use crate::case::{Case, TOLERANCE, f32s};
use crate::data::{bf16s, output, value};
use crate::packed::{Shape, packed, row_blocks};
use crate::{Model, Result};
use cresset_kernels::experts::{ExpertLinearArgs, Experts, RouteArgs, RouteScoring, Routes};
use cresset_kernels::gpu::{Buffer, Gpu, Kind, View};
use cresset_kernels::linear::{BAND_ROWS, DeviceFormat, Weight, WeightType};
use cresset_kernels::operand::{DeviceOps, MatrixBuffer, MatrixPart, MatrixView, OpMemory};
use std::iter::once_with;
use std::sync::Arc;

pub fn cases<'a>(
    gpu: &'a Arc<dyn Gpu>,
    model: &'a Model,
) -> impl Iterator<Item = Result<Case>> + 'a {
    let routes = model.steps.iter().map(move |n| routed(gpu, model, *n));
    let by_values = once_with(move || dense_experts(gpu, model)).flat_map(move |made| {
        let made = made.map_err(|error| error.to_string());
        model.steps.iter().map(move |n| multiplied(gpu, model, *n, made.clone()?))
    });
    let by_codes = once_with(move || packed_experts(gpu, model)).flat_map(move |made| {
        let made = made.map_err(|error| error.to_string());
        model.steps.iter().map(move |n| multiplied_by_codes(gpu, model, *n, made.clone()?))
    });
    routes.chain(by_values).chain(by_codes)
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

fn dense_experts(gpu: &Arc<dyn Gpu>, m: &Model) -> Result<Arc<Buffer>> {
    bf16s(gpu, 1, m.experts * m.expert_ffn * m.hidden)
}

fn multiplied(gpu: &Arc<dyn Gpu>, m: &Model, n: usize, w: Arc<Buffer>) -> Result<Case> {
    let &Model { experts, chosen, expert_ffn: rows, hidden: cols, .. } = m;
    let routing = Routing::new(gpu, m, n)?;
    gpu.route(&routing.args())?;
    let x = bf16s(gpu, 0, n * cols)?;
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

/// The rows of an expert's matrix in Q4_K, and all of them as one matrix.
fn packed_shape(m: &Model) -> (usize, Shape) {
    let (rows, cols) = (m.expert_ffn.next_multiple_of(BAND_ROWS), m.hidden.next_multiple_of(256));
    (rows, ("experts", WeightType::Q4K, &[0, 2], m.experts * rows, cols))
}

fn packed_experts(gpu: &Arc<dyn Gpu>, m: &Model) -> Result<Arc<MatrixBuffer>> {
    let (_, shape) = packed_shape(m);
    let (_, dtype, _, rows, cols) = shape;
    let format = DeviceFormat::of(dtype).ok_or("a device has no packed form of this type")?;
    let values = Buffer::from_slice(gpu, &packed(&shape, format))?;
    let parts = vec![MatrixPart { values, rows, format: Some(format) }];
    Ok(Arc::new(MatrixBuffer { parts, cols, scratch: None, order: None, rounded: None }))
}

fn multiplied_by_codes(
    gpu: &Arc<dyn Gpu>,
    m: &Model,
    n: usize,
    matrix: Arc<MatrixBuffer>,
) -> Result<Case> {
    let &Model { experts, chosen, .. } = m;
    let (rows, shape) = packed_shape(m);
    let cols = shape.4;
    let routing = Routing::new(gpu, m, n)?;
    gpu.route(&routing.args())?;
    let x = bf16s(gpu, 0, n * cols)?;
    let expert_bytes = matrix.parts[0].values.view().bytes() / experts;
    let out = output(gpu, Kind::Bf16, n * chosen * rows)?;
    let (on, written) = (gpu.clone(), out.clone());
    let launch = move |_| {
        let (x, w, out) = (x.view(), DeviceOps::matrix(&matrix), written.view());
        let routes = routing.args().routes;
        on.expert_linear(&ExpertLinearArgs { x, w, bias: None, routes, out })
    };
    let want = move |i: usize| {
        let (choice, output) = (i / rows, i % rows);
        let row = choice / chosen;
        let expert = Routing::experts_of(row, experts, chosen)[choice % chosen];
        let blocks = row_blocks(&shape, expert * rows + output);
        let mut weights = vec![0.0; cols];
        Weight::from_ggml(WeightType::Q4K, &blocks, 1, cols).map_or(f64::NAN, |one| {
            one.row_f32(0, &mut weights);
            let products = weights.iter().enumerate();
            products.map(|(c, w)| value(0, row * cols + c) * f64::from(*w)).sum()
        })
    };
    let read = experts.min(n * chosen);
    Ok(Case {
        op: "expert linear",
        shape: format!("{chosen} of {experts}, Q4_K {rows} × {cols}"),
        n,
        bytes: read * expert_bytes + 2 * (n * cols + n * chosen * rows),
        flops: 2 * n * chosen * rows * cols,
        tolerance: TOLERANCE,
        out,
        want: Box::new(want),
        launch: Box::new(launch),
    })
}
