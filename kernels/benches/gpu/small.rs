//! The ops between the products.

use crate::case::{Case, TOLERANCE, f32s};
use crate::data::{bf16s, output, value};
use crate::{Model, Result};
use cresset_kernels::activation::{Activation, Gated, GatedArgs};
use cresset_kernels::gpu::{Buffer, Gpu, Kind};
use cresset_kernels::norm::{Norm, NormArgs};
use cresset_kernels::rope::{Rope, RopeArgs, RopeStyle, RopeTable};
use std::sync::Arc;

const EPS: f32 = 1e-5;
const POSITIONS: usize = 4096;

pub fn cases<'a>(
    gpu: &'a Arc<dyn Gpu>,
    model: &'a Model,
) -> impl Iterator<Item = Result<Case>> + 'a {
    let ops: [fn(&Arc<dyn Gpu>, &Model, usize) -> Result<Case>; 3] = [normed, rotated, gated];
    ops.into_iter().flat_map(move |op| model.steps.iter().map(move |n| op(gpu, model, *n)))
}

fn normed(gpu: &Arc<dyn Gpu>, m: &Model, n: usize) -> Result<Case> {
    let width = m.hidden;
    let (x, delta, weight) =
        (bf16s(gpu, 0, n * width)?, bf16s(gpu, 1, n * width)?, f32s(gpu, 2, width)?);
    let out = output(gpu, Kind::Bf16, n * width)?;
    let (on, written) = (gpu.clone(), out.clone());
    let launch = move |_| {
        let (x, delta, out) = (x.view(), Some(delta.view()), written.view());
        on.norm(&NormArgs { x, delta, weight: weight.view(), eps: EPS, out, rounded: None })
    };
    let sum = |i: usize| value(0, i) + value(1, i);
    let want = move |i: usize| {
        let row = i / width * width;
        let mean = (row..row + width).map(|i| sum(i).powi(2)).sum::<f64>() / width as f64;
        sum(i) / (mean + f64::from(EPS)).sqrt() * value(2, i % width)
    };
    Ok(Case {
        op: "add, norm",
        shape: width.to_string(),
        n,
        bytes: 4 * n * width * 2,
        flops: 6 * n * width,
        tolerance: TOLERANCE,
        out,
        want: Box::new(want),
        launch: Box::new(launch),
    })
}

fn rotated(gpu: &Arc<dyn Gpu>, m: &Model, n: usize) -> Result<Case> {
    let &Model { heads, kv_heads, head_dim, .. } = m;
    let (width, half) = ((heads + 2 * kv_heads) * head_dim, head_dim / 2);
    let qkv = bf16s(gpu, 0, n * width)?;
    let [cos, sin] = [f32s(gpu, 1, POSITIONS * half)?, f32s(gpu, 2, POSITIONS * half)?];
    let position = |token: usize| token * 7 % POSITIONS;
    let positions: Vec<u32> = (0..n).map(|i| position(i) as u32).collect();
    let slots: Vec<u32> = (0..n as u32).rev().collect();
    let [positions, slots] =
        [Buffer::from_slice(gpu, &positions)?, Buffer::from_slice(gpu, &slots)?];
    let caches = [(); 2].map(|()| output(gpu, Kind::Bf16, n * kv_heads * head_dim));
    let [k_cache, v_cache] = caches;
    let (k_cache, v_cache, out, on) = (k_cache?, v_cache?, qkv.clone(), gpu.clone());
    let launch = move |_| {
        let args = RopeArgs {
            qkv: qkv.view(),
            heads,
            kv_heads,
            head_dim,
            positions: positions.view(),
            slots: slots.view(),
            table: RopeTable {
                cos: cos.view(),
                sin: sin.view(),
                rotary_dim: head_dim,
                style: RopeStyle::Neox,
                query_scales: None,
            },
            qk_norm: None,
            k_cache: k_cache.view(),
            v_cache: v_cache.view(),
            block_size: 1,
        };
        on.rope_kv_write(&args)
    };
    // The launch leaves the K and V columns of a row as they were.
    let want = move |i: usize| {
        let (token, column) = (i / width, i % width);
        let (first, at) = (column % head_dim < half, position(token) * half + column % half);
        let (own, other) = (value(0, i), value(0, if first { i + half } else { i - half }));
        let turned = own * value(1, at) + if first { -other } else { other } * value(2, at);
        if column < heads * head_dim { turned } else { own }
    };
    Ok(Case {
        op: "rope, KV write",
        shape: format!("{heads} + 2 × {kv_heads} heads of {head_dim}"),
        n,
        bytes: n * (2 * width * 2 + 2 * half * 4),
        flops: 3 * n * width,
        tolerance: TOLERANCE,
        out,
        want: Box::new(want),
        launch: Box::new(launch),
    })
}

fn gated(gpu: &Arc<dyn Gpu>, m: &Model, n: usize) -> Result<Case> {
    let width = m.ffn;
    let gate_up = bf16s(gpu, 0, 2 * n * width)?;
    let out = output(gpu, Kind::Bf16, n * width)?;
    let (on, written) = (gpu.clone(), out.clone());
    let launch = move |_| {
        let (gate_up, out) = (gate_up.view(), written.view());
        on.gated(&GatedArgs { activation: Activation::Silu, gate_up, width, out, rounded: false })
    };
    let want = move |i: usize| {
        let gate = i / width * 2 * width + i % width;
        value(0, gate) / (1.0 + (-value(0, gate)).exp()) * value(0, gate + width)
    };
    Ok(Case {
        op: "silu · up",
        shape: width.to_string(),
        n,
        bytes: 3 * n * width * 2,
        flops: 5 * n * width,
        tolerance: TOLERANCE,
        out,
        want: Box::new(want),
        launch: Box::new(launch),
    })
}
