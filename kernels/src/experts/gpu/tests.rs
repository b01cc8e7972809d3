//! The kernels against the reference, and bit by bit against themselves in other batches.

use super::super::reference::{self, Choices};
use super::super::tests::{GROUPED, SIZES, scores};
use super::super::{CombineArgs, ExpertLinearArgs, RouteArgs, RouteScoring, SharedExpert};
use super::*;
use crate::gpu::{Buffer, Gpu};
use crate::operand::MatrixView;
use crate::testing::{
    KINDS, assert_close, downloaded, gpu, poisoned_buffer, random, rounded, upload, values,
};
use std::sync::Arc;

pub(super) struct Routed {
    pub gpu: Arc<dyn Gpu>,
    weights: Buffer,
    pub plan: Buffer,
    experts: usize,
    chosen: usize,
}

impl Routed {
    pub fn new(scores: &[f32], size: [usize; 3], normalise: bool) -> Self {
        Self::by(scores, size, normalise, None)
    }

    /// `sigmoid`: biases on the host, and how many groups there are and are kept.
    fn by(
        scores: &[f32],
        [n, experts, chosen]: [usize; 3],
        normalise: bool,
        sigmoid: Option<(&[f32], [usize; 2])>,
    ) -> Self {
        let gpu = gpu();
        let len = Routes::<View>::plan_len(n, experts, chosen);
        let weights = poisoned_buffer(&gpu, Kind::F32, n * chosen);
        let plan = poisoned_buffer(&gpu, Kind::U32, len);
        let routed = Self { gpu, weights, plan, experts, chosen };
        let scores = upload(&routed.gpu, Kind::F32, scores);
        let bias = sigmoid.map(|(bias, _)| upload(&routed.gpu, Kind::F32, bias));
        let scoring = match (&bias, sigmoid) {
            (Some(bias), Some((_, [groups, kept]))) => {
                RouteScoring::Sigmoid { bias: bias.view(), groups, kept }
            }
            _ => RouteScoring::Softmax,
        };
        let (scale, routes) = (if bias.is_some() { 2.5 } else { 1.0 }, routed.routes());
        let args = RouteArgs { scores: scores.view(), scoring, normalise, scale, routes };
        routed.gpu.route(&args).unwrap();
        routed
    }

    pub fn routes(&self) -> Routes<View> {
        let &Self { experts, chosen, .. } = self;
        Routes { experts, chosen, weights: self.weights.view(), plan: self.plan.view() }
    }

    fn product(&self, kind: Kind, x: &[f32], w: &[f32], [rows, cols]: [usize; 2]) -> Vec<f32> {
        let (x, w) = (upload(&self.gpu, kind, x), upload(&self.gpu, kind, w));
        let choices = self.weights.view().len();
        let out = poisoned_buffer(&self.gpu, kind, choices * rows);
        let w = MatrixView::dense(w.view(), self.experts * rows, cols);
        let routes = self.routes();
        let args = ExpertLinearArgs { x: x.view(), w, bias: None, routes, out: out.view() };
        self.gpu.expert_linear(&args).unwrap();
        downloaded(&out)
    }
}

#[test]
fn routes_equal_the_reference() {
    for [n, experts, chosen] in SIZES {
        for normalise in [false, true] {
            let scores = scores(n, experts);
            let want = reference::route(&scores, experts, chosen, normalise);
            let got = Routed::new(&scores, [n, experts, chosen], normalise);
            let what = format!("{n} rows of {experts}, {chosen} chosen");
            let Choices { experts, weights, begins, order } = want;
            let plan = [&experts[..], &begins, &order].concat();
            assert_eq!(got.plan.to_vec::<u32>().unwrap(), plan, "{what}");
            assert_close(&downloaded(&got.weights), &weights, 1e-6, &what);
        }
    }
    let mut bad = scores(2, 8);
    bad[3] = f32::NAN;
    let weights = downloaded(&Routed::new(&bad, [2, 8, 2], true).weights);
    assert!(weights[..2].iter().all(|weight| weight.is_nan()));
    assert!(weights[2..].iter().all(|weight| weight.is_finite()));
}

#[test]
fn sigmoids_with_biases_equal_the_reference() {
    for (size @ [n, experts, chosen], groups) in GROUPED {
        let (scores, bias) = (scores(n, experts), values(&random(&[experts], 77)));
        let (ids, weights) = reference::route_by_sigmoid(&scores, &bias, chosen, groups, 2.5);
        let got = Routed::by(&scores, size, true, Some((&bias, groups)));
        assert_eq!(got.plan.to_vec::<u32>().unwrap()[..n * chosen], ids, "{size:?}");
        assert_close(&downloaded(&got.weights), &weights, 1e-6, &format!("{size:?}"));
    }
}

#[test]
fn products_equal_the_reference_and_do_not_depend_on_the_batch() {
    for size @ [n, experts, chosen] in SIZES.into_iter().filter(|size| size[1] < 100) {
        for (sizes @ [rows, cols], (kind, tolerance)) in
            [[5, 24], [3, 7]].into_iter().flat_map(|sizes| KINDS.map(|kind| (sizes, kind)))
        {
            let scores = scores(n, experts);
            let routed = Routed::new(&scores, size, true);
            let ids = reference::route(&scores, experts, chosen, true).experts;
            let w = rounded(kind, &values(&random(&[experts * rows, cols], 7)));
            for per_row in [1, chosen] {
                let x = rounded(kind, &values(&random(&[n * chosen / per_row, cols], 8)));
                let got = routed.product(kind, &x, &w, sizes);
                let mut want = Vec::new();
                for (choice, id) in ids.iter().enumerate() {
                    let x = &x[choice / per_row * cols..][..cols];
                    let matrix = &w[*id as usize * rows * cols..][..rows * cols];
                    let dot = |w: &[f32]| x.iter().zip(w).map(|(x, w)| x * w).sum::<f32>();
                    want.extend(matrix.chunks(cols).map(dot));
                }
                let what = format!("{kind:?} {size:?} {rows}x{cols}");
                assert_close(&got, &want, tolerance, &what);
                let alone = Routed::new(&scores[(n - 1) * experts..], [1, experts, chosen], true);
                let own = x.len() / n;
                let one = alone.product(kind, &x[x.len() - own..], &w, sizes);
                assert_eq!(got[got.len() - one.len()..], one, "{what}: the last row alone");
            }
        }
    }
}

#[test]
fn sums_equal_the_reference() {
    for size @ [n, experts, chosen] in SIZES {
        let routed = Routed::new(&scores(n, experts), size, false);
        for (width, (kind, tolerance)) in
            [1, 24, 136].into_iter().flat_map(|width| KINDS.map(|kind| (width, kind)))
        {
            let x = rounded(kind, &values(&random(&[n * chosen, width], 3)));
            let also = rounded(kind, &values(&random(&[n, width], 4)));
            let gates = values(&random(&[n], 5));
            let [on_device, shared] = [&x, &also].map(|values| upload(&routed.gpu, kind, values));
            let gate = upload(&routed.gpu, Kind::F32, &gates);
            for (with_shared, gated) in [(false, false), (true, true), (true, false)] {
                let out = poisoned_buffer(&routed.gpu, kind, n * width);
                let views = SharedExpert { x: shared.view(), gate: gated.then(|| gate.view()) };
                let (x_view, shared) = (on_device.view(), with_shared.then_some(views));
                let args =
                    CombineArgs { x: x_view, routes: routed.routes(), shared, out: out.view() };
                routed.gpu.combine(&args).unwrap();
                let also = with_shared.then_some((&also[..], gated.then_some(&gates[..])));
                let weights = downloaded(&routed.weights);
                let want = reference::combine(&x, &weights, routed.chosen, width, also);
                assert_close(&downloaded(&out), &want, tolerance, &format!("{size:?} of {width}"));
            }
        }
    }
}
