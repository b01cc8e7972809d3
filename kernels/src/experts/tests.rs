//! The CPU's path against the reference, whole and in parts, and the errors of wrong calls.

use super::*;
use crate::Compute;
use crate::gpu::Kind;
use crate::linear::WeightType;
use crate::linear::{Weight, linear_reference};
use crate::operand::OpMemory;
use crate::testing::{assert_close, poisoned, random, values};
use candle_core::quantized::QTensor;
use candle_core::{Device, Tensor};

/// Rows, experts, chosen.
pub(super) const SIZES: [[usize; 3]; 7] =
    [[1, 1, 1], [1, 8, 2], [3, 4, 4], [19, 60, 4], [40, 128, 8], [70, 5, 1], [2, 200, 32]];

/// Scores in which many are equal.
pub(super) fn scores(n: usize, experts: usize) -> Vec<f32> {
    let step = |x: &f32| (x * 8.0).round() / 2.0;
    values(&random(&[n, experts], (n * experts) as u64)).iter().map(step).collect()
}

/// Tensors for the routes of `n` rows.
struct Buffers {
    weights: Tensor,
    plan: Tensor,
}

impl Buffers {
    fn new(n: usize, experts: usize, chosen: usize) -> Self {
        let len = Routes::<crate::operand::TensorView>::plan_len(n, experts, chosen);
        let plan = Compute::new(1).allocate(Kind::U32, len).unwrap();
        Self { weights: poisoned(&[n * chosen]), plan }
    }

    fn routes(&self, experts: usize, chosen: usize) -> Routes<crate::operand::TensorView<'_>> {
        let (weights, plan) = ((&self.weights).into(), (&self.plan).into());
        Routes { experts, chosen, weights, plan }
    }

    fn routed(
        c: &Compute,
        scores: &[f32],
        [n, experts, chosen]: [usize; 3],
        normalise: bool,
    ) -> Self {
        let buffers = Self::new(n, experts, chosen);
        let scores = Tensor::from_slice(scores, (n, experts), &Device::Cpu).unwrap();
        let (scores, routes) = ((&scores).into(), buffers.routes(experts, chosen));
        let scoring = RouteScoring::Softmax;
        c.route(&RouteArgs { scores, scoring, normalise, scale: 1.0, routes }).unwrap();
        buffers
    }
}

#[test]
fn routes_equal_the_reference() {
    for [n, experts, chosen] in SIZES {
        for normalise in [false, true] {
            let scores = scores(n, experts);
            let want = reference::route(&scores, experts, chosen, normalise);
            for threads in [1, 3] {
                let c = Compute::new(threads);
                let got = Buffers::routed(&c, &scores, [n, experts, chosen], normalise);
                let what = format!("{n} rows of {experts}, {chosen} chosen");
                let plan = [&want.experts[..], &want.begins, &want.order].concat();
                assert_eq!(got.plan.to_vec1::<u32>().unwrap(), plan, "{what}");
                assert_close(&values(&got.weights), &want.weights, 1e-6, &what);
            }
        }
    }
}

/// Rows, experts, chosen; groups, kept.
pub(super) const GROUPED: [([usize; 3], [usize; 2]); 5] = [
    ([1, 4, 2], [1, 1]),
    ([9, 60, 4], [1, 1]),
    ([20, 64, 6], [8, 3]),
    ([7, 256, 8], [8, 4]),
    ([5, 6, 3], [6, 4]),
];

#[test]
fn sigmoids_with_biases_equal_the_reference() {
    for (size @ [n, experts, chosen], groups @ [count, kept]) in GROUPED {
        let (scores, bias) = (scores(n, experts), random(&[experts], 77));
        let (ids, weights) =
            reference::route_by_sigmoid(&scores, &values(&bias), chosen, groups, 2.5);
        let plain = Tensor::from_slice(&scores, (n, experts), &Device::Cpu).unwrap();
        for threads in [1, 3] {
            let got = Buffers::new(n, experts, chosen);
            let mut args = RouteArgs {
                scores: (&plain).into(),
                scoring: RouteScoring::Sigmoid { bias: (&bias).into(), groups: count, kept },
                normalise: true,
                scale: 2.5,
                routes: got.routes(experts, chosen),
            };
            Compute::new(threads).route(&args).unwrap();
            assert_eq!(got.plan.to_vec1::<u32>().unwrap()[..n * chosen], ids, "{size:?}");
            assert_close(&values(&got.weights), &weights, 1e-6, &format!("{size:?}"));
            args.normalise = false;
            Compute::new(threads).route(&args).unwrap();
            let sigmoid = |(choice, id): (usize, &u32)| {
                2.5 / (1.0 + (-scores[choice / chosen * experts + *id as usize]).exp())
            };
            let weights: Vec<f32> = ids.iter().enumerate().map(sigmoid).collect();
            assert_close(&values(&got.weights), &weights, 1e-6, &format!("{size:?}"));
            for (groups, kept) in [(count, count + 1), (experts + 1, 1), (count, 0)] {
                let scoring = RouteScoring::Sigmoid { bias: (&bias).into(), groups, kept };
                let wrong = RouteArgs { scoring, ..args };
                assert!(Compute::new(1).route(&wrong).is_err(), "{kept} of {groups} groups");
            }
        }
    }
}

#[test]
fn softmaxes_in_groups_equal_the_reference() {
    for (size @ [n, experts, chosen], groups @ [count, kept]) in GROUPED {
        let scores = scores(n, experts);
        let ids = reference::choose_in_groups(&scores, experts, chosen, groups);
        let weight = |(choice, id): (usize, &u32)| {
            let row = &scores[choice / chosen * experts..][..experts];
            let part = |score: f32| f64::from(score).exp();
            let all: f64 = row.iter().map(|score| part(*score)).sum();
            (3.0 * part(row[*id as usize]) / all) as f32
        };
        let weights: Vec<f32> = ids.iter().enumerate().map(weight).collect();
        let plain = Tensor::from_slice(&scores, (n, experts), &Device::Cpu).unwrap();
        let got = Buffers::new(n, experts, chosen);
        let args = RouteArgs {
            scores: (&plain).into(),
            scoring: RouteScoring::GroupedSoftmax { groups: count, kept },
            normalise: false,
            scale: 3.0,
            routes: got.routes(experts, chosen),
        };
        Compute::new(3).route(&args).unwrap();
        assert_eq!(got.plan.to_vec1::<u32>().unwrap()[..n * chosen], ids, "{size:?}");
        assert_close(&values(&got.weights), &weights, 1e-6, &format!("{size:?}"));
        let scoring = RouteScoring::GroupedSoftmax { groups: count, kept: count + 1 };
        assert!(Compute::new(1).route(&RouteArgs { scoring, ..args }).is_err());
    }
}

/// Sigmoids that are all zero have weights of zero and not NaN.
#[test]
fn sigmoids_may_all_vanish() {
    let (scores, bias) = (vec![-200.0_f32; 4], poisoned(&[4]).zeros_like().unwrap());
    let scores = Tensor::from_vec(scores, (1, 4), &Device::Cpu).unwrap();
    let got = Buffers::new(1, 4, 2);
    let (scores, routes) = ((&scores).into(), got.routes(4, 2));
    let scoring = RouteScoring::Sigmoid { bias: (&bias).into(), groups: 1, kept: 1 };
    let args = RouteArgs { scores, scoring, normalise: true, scale: 1.0, routes };
    Compute::new(1).route(&args).unwrap();
    assert_eq!(values(&got.weights), [0.0, 0.0]);
}

#[test]
fn a_row_that_is_not_finite_fails_alone() {
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut scores = scores(3, 8);
        scores[8 + 5] = bad;
        let got = Buffers::routed(&Compute::new(1), &scores, [3, 8, 2], true);
        let weights = values(&got.weights);
        assert!(weights[2..4].iter().all(|weight| weight.is_nan()), "{bad}");
        assert!([&weights[..2], &weights[4..]].concat().iter().all(|weight| weight.is_finite()));
        assert_eq!(got.plan.to_vec1::<u32>().unwrap()[2..4], [0, 1]);
    }
}

/// Experts whose matrices are stacked of parts of one type each, and their values.
fn stack(
    dtype: WeightType,
    experts: usize,
    rows: [usize; 2],
    cols: usize,
) -> (Weight, Vec<Weight>) {
    let part = |seed: u64, rows: usize| {
        let q =
            QTensor::quantize(&random(&[rows, cols], seed), dtype.in_candle().unwrap()).unwrap();
        Weight::from_ggml(dtype, &q.data().unwrap(), rows, cols).unwrap()
    };
    let parts = |expert: usize| {
        let seeds = [0, 1].map(|i| (2 * expert + i) as u64);
        seeds
            .into_iter()
            .zip(rows)
            .filter(|(_, rows)| *rows > 0)
            .map(|(seed, rows)| part(seed, rows))
    };
    let each = (0..experts).map(|expert| Weight::stack(parts(expert).collect()).unwrap()).collect();
    (Weight::stack((0..experts).flat_map(parts).collect()).unwrap(), each)
}

fn product(
    c: &Compute,
    x: &Tensor,
    w: &Weight,
    bias: Option<&Tensor>,
    routes: Routes<crate::operand::TensorView>,
) -> Vec<f32> {
    let choices = routes.weights.tensor.elem_count();
    let out = poisoned(&[choices, w.rows() / routes.experts]);
    let (bias, out_view) = (bias.map(Into::into), (&out).into());
    c.expert_linear(&ExpertLinearArgs { x: x.into(), w, bias, routes, out: out_view }).unwrap();
    values(&out)
}

#[test]
fn products_equal_the_reference_and_do_not_depend_on_the_batch() {
    for (dtype, rows, cols) in [
        (WeightType::F32, [7, 9], 20),
        (WeightType::F32, [40, 0], 33),
        (WeightType::BF16, [16, 16], 24),
        (WeightType::Q4_0, [32, 32], 64),
        (WeightType::Q4K, [17, 3], 256),
        (WeightType::Q8_0, [48, 0], 96),
    ] {
        // The last has so many rows for each expert that they share unpacked codes.
        let sizes = SIZES.into_iter().filter(|size| size[1] < 100).chain([[250, 2, 1]]);
        for size @ [n, experts, chosen] in sizes {
            let (w, each) = stack(dtype, experts, rows, cols);
            let scores = scores(n, experts);
            let c = Compute::new(2);
            let buffers = Buffers::routed(&c, &scores, size, true);
            let ids = &buffers.plan.to_vec1::<u32>().unwrap()[..n * chosen];
            let width: usize = rows.iter().sum();
            let bias = random(&[experts * width], 11);
            // A row of `x` for all choices of a row, or for each choice its own.
            for (per_row, bias) in [(1, None), (chosen, Some(bias))] {
                let x = random(&[n * chosen / per_row, cols], 9);
                let row = |i: usize| values(&x.narrow(0, i, 1).unwrap());
                let got = product(&c, &x, &w, bias.as_ref(), buffers.routes(experts, chosen));
                let want = ids.iter().enumerate().flat_map(|(choice, id)| {
                    let bias = bias.as_ref().map(values);
                    let bias = bias.as_ref().map(|bias| &bias[*id as usize * width..][..width]);
                    linear_reference(&each[*id as usize], bias, &row(choice / per_row))
                });
                let what = format!("{dtype:?} {n} rows, {chosen} of {experts}");
                assert_close(&got, &want.collect::<Vec<_>>(), 1e-4, &what);
                let last = n - 1;
                let alone =
                    Buffers::routed(&c, &scores[last * experts..], [1, experts, chosen], true);
                let first = last * chosen / per_row;
                let x = x.narrow(0, first, n * chosen / per_row - first).unwrap();
                let x = x.contiguous().unwrap().copy().unwrap();
                let one = product(&c, &x, &w, bias.as_ref(), alone.routes(experts, chosen));
                assert_eq!(got[got.len() - one.len()..], one, "{what}: the last row alone");
            }
        }
    }
}

#[test]
fn sums_equal_the_reference() {
    for size @ [n, experts, chosen] in SIZES {
        for width in [1, 17, 64] {
            let c = Compute::new(2);
            let buffers = Buffers::routed(&c, &scores(n, experts), size, false);
            let [x, shared] = [random(&[n * chosen, width], 3), random(&[n, width], 4)];
            let gate = random(&[n], 5);
            for (with_shared, gated) in [(false, false), (true, true), (true, false)] {
                let out = poisoned(&[n, width]);
                let gate_view = gated.then(|| (&gate).into());
                let (x, views) = (&x, SharedExpert { x: (&shared).into(), gate: gate_view });
                c.combine(&CombineArgs {
                    x: x.into(),
                    routes: buffers.routes(experts, chosen),
                    shared: with_shared.then_some(views),
                    out: (&out).into(),
                })
                .unwrap();
                let (also, gate) = (values(&shared), values(&gate));
                let also = with_shared.then_some((&also[..], gated.then_some(&gate[..])));
                let weights = values(&buffers.weights);
                let want = reference::combine(&values(x), &weights, chosen, width, also);
                assert_close(&values(&out), &want, 1e-5, &format!("{size:?} of {width}"));
            }
        }
    }
}

#[test]
fn wrong_calls_are_refused() {
    let c = Compute::new(1);
    let (good, scores, x) = (Buffers::new(2, 4, 2), random(&[2, 4], 1), random(&[2, 8], 2));
    let (w, _) = stack(WeightType::F32, 4, [3, 0], 8);
    let check = |scores: &Tensor, x: &Tensor, w: &Weight, experts: usize, chosen: usize| {
        let routes = good.routes(experts, chosen);
        let out = poisoned(&[4, 3]);
        let (scores, scoring) = (scores.into(), RouteScoring::Softmax);
        let routed = c.route(&RouteArgs { scores, scoring, normalise: true, scale: 1.0, routes });
        routed.and(c.expert_linear(&ExpertLinearArgs {
            x: x.into(),
            w,
            bias: None,
            routes,
            out: (&out).into(),
        }))
    };
    check(&scores, &x, &w, 4, 2).unwrap();
    let one_part = Weight::from_ggml(WeightType::F32, &[0; 12 * 8 * 4], 12, 8).unwrap();
    for (scores, x, w, experts, chosen) in [
        (&scores, &x, &w, 4, 5),
        (&scores, &x, &w, 4, 0),
        (&scores, &x, &w, 5, 2),
        (&random(&[2, 5], 1), &x, &w, 4, 2),
        (&scores, &random(&[3, 8], 1), &w, 4, 2),
        (&scores, &x, &one_part, 4, 2),
    ] {
        assert!(check(scores, x, w, experts, chosen).is_err(), "{scores:?} {x:?} {w:?} {experts}");
    }
    let foreign = Buffers::new(2, 4, 2);
    let plan = Tensor::from_vec(vec![99u32; 13], 13, &Device::Cpu).unwrap();
    let routes = Routes { plan: (&plan).into(), ..foreign.routes(4, 2) };
    let out = poisoned(&[4, 3]);
    let (x, out) = ((&x).into(), (&out).into());
    let args = ExpertLinearArgs { x, w: &w, bias: None, routes, out };
    assert!(c.expert_linear(&args).is_err(), "a plan that no routing made");
}
