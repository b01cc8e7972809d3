//! The kernels against the reference.

use super::super::reference;
use super::*;
use crate::activation::Activation;
use crate::gpu::{Buffer, Emulator, Gpu, Kind};
use crate::testing::{
    KINDS, assert_close, downloaded, gpu, poisoned_buffer, random, rounded, upload, values,
};
use std::sync::Arc;

#[test]
fn a_scaled_stream_equals_the_reference() {
    let gpu = gpu();
    for (kind, tolerance) in KINDS {
        for len in [0, 1, 70, 1024, 20_001] {
            let mut want = rounded(kind, &values(&random(&[len], 1)));
            let (x, factor) = (upload(&gpu, kind, &want), upload(&gpu, Kind::F32, &[-0.3]));
            gpu.scale(&ScaleArgs { x: x.view(), factor: factor.view() }).unwrap();
            reference::scale(&mut want, -0.3);
            assert_close(&downloaded(&x), &want, tolerance, &format!("{kind:?} {len}"));
            let wrong = ScaleArgs { x: x.view(), factor: factor.view().slice(0..0) };
            assert!(gpu.scale(&wrong).is_err());
        }
    }
}

#[test]
fn inputs_of_a_layer_equal_the_reference() {
    let gpu = gpu();
    for (kind, tolerance) in KINDS {
        for (n, [stride, first, width]) in [
            (0, [8, 0, 8]),
            (3, [9, 5, 4]),
            (70, [40, 8, 16]),
            (5, [40, 4, 16]),
            (5, [44, 8, 16]),
            (2, [17, 0, 17]),
            (1, [3000, 1500, 1500]),
        ] {
            let what = format!("{kind:?} {n} by {width} of {stride}");
            let [gate, inputs] = [(width, 1), (stride, 2)]
                .map(|(columns, seed)| rounded(kind, &values(&random(&[n, columns], seed))));
            let want = reference::layer_input(&gate, &inputs, [stride, first, width]);
            let [gate, inputs] = [&gate, &inputs].map(|x| upload(&gpu, kind, x));
            let out = poisoned_buffer(&gpu, kind, n * width);
            let args = LayerInputArgs {
                activation: Activation::GeluTanh,
                gate: gate.view(),
                inputs: inputs.view(),
                stride,
                first,
                width,
                out: out.view(),
            };
            gpu.layer_input(&args).unwrap();
            assert_close(&downloaded(&out), &want, tolerance, &what);
            let beyond = LayerInputArgs { first: stride - width + 1, ..args };
            assert!(gpu.layer_input(&beyond).is_err(), "{what}");
        }
    }
}

/// Multiplies the weights of `ids.len() / 2` rows on `gpu`.
fn multiplied(gpu: &Arc<dyn Gpu>, weights: &Buffer, ids: &[u32], factors: &[f32]) -> Result<()> {
    let (experts, chosen) = (factors.len(), 2);
    let mut plan = ids.to_vec();
    plan.resize(Routes::<View>::plan_len(ids.len() / chosen, experts, chosen), 0);
    let (plan, factors) = (Buffer::from_slice(gpu, &plan)?, upload(gpu, Kind::F32, factors));
    let routes = Routes { experts, chosen, weights: weights.view(), plan: plan.view() };
    gpu.choice_factors(&ChoiceFactorsArgs { routes, factors: factors.view() })?;
    gpu.synchronise()
}

#[test]
fn factors_of_choices_equal_the_reference() {
    let gpu = gpu();
    for n in [0, 3, 150] {
        let factors = values(&random(&[5], 2));
        let mut want = values(&random(&[n, 2], 1));
        let ids: Vec<u32> = (0..2 * n as u32).map(|i| i * 7 % 5).collect();
        let weights = upload(&gpu, Kind::F32, &want);
        multiplied(&gpu, &weights, &ids, &factors).unwrap();
        reference::choice_factors(&mut want, &ids, &factors);
        assert_eq!(downloaded(&weights), want);
    }
    // A fault ends a device for the whole process.
    let emulator: Arc<dyn Gpu> = Emulator::new();
    let weights = upload(&emulator, Kind::F32, &[1.0; 4]);
    let error = multiplied(&emulator, &weights, &[0, 4, 5, 1], &[1.0; 5]).unwrap_err().to_string();
    assert!(error.contains("ids[choice] < experts"), "{error}");
}
