//! The ops of a mixture of experts.

use crate::case::{Case, TOLERANCE, f32s};
use crate::data::{bf16s, output, value};
use crate::packed::{Shape, row_blocks};
use crate::{Model, Result};
use cresset_kernels::experts::{ExpertLinearArgs, Experts, RouteArgs, RouteScoring, Routes};
use cresset_kernels::gpu::{Buffer, Gpu, Kind, View};
use cresset_kernels::linear::{BAND_ROWS, DeviceFormat, Weight, WeightType};
use cresset_kernels::operand::{DeviceOps, MatrixBuffer, MatrixPart, MatrixView, OpMemory};
use std::sync::Arc;

pub fn cases<'a>(
    gpu: &'a Arc<dyn Gpu>,
    model: &'a Model,
) -> impl Iterator<Item = Result<Case>> + 'a {
    let ops: [fn(&Arc<dyn Gpu>, &Model, usize) -> Result<Case>; 3] =
        [routed, multiplied, multiplied_by_codes];
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

/// Experts in Q4_K.
fn multiplied_by_codes(gpu: &Arc<dyn Gpu>, m: &Model, n: usize) -> Result<Case> {
    let &Model { experts, chosen, .. } = m;
    let (rows, cols) = (m.expert_ffn.next_multiple_of(BAND_ROWS), m.hidden.next_multiple_of(256));
    let shape: Shape = ("experts", WeightType::Q4K, &[0, 2], experts * rows, cols);
    let routing = Routing::new(gpu, m, n)?;
    gpu.route(&routing.args())?;
    let x = bf16s(gpu, 0, n * cols)?;
    let (matrix, expert_bytes) = packed_matrix(gpu, &shape, rows)?;
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

/// The matrices of experts of so many rows, and the bytes of one.
fn packed_matrix(
    gpu: &Arc<dyn Gpu>,
    shape: &Shape,
    expert_rows: usize,
) -> Result<(MatrixBuffer, usize)> {
    let &(_, dtype, _, rows, cols) = shape;
    let format = DeviceFormat::of(dtype).ok_or("a device has no packed form of this type")?;
    let raw: Vec<u8> = (0..rows).flat_map(|row| row_blocks(shape, row)).collect();
    let mut bytes = vec![0; format.bytes(rows, cols)];
    format.pack(&raw, cols, &mut bytes)?;
    let values = Buffer::from_slice(gpu, &bytes)?;
    let parts = vec![MatrixPart { values, rows, format: Some(format) }];
    let matrix = MatrixBuffer { parts, cols, scratch: None, order: None };
    Ok((matrix, format.bytes(expert_rows, cols)))
}
