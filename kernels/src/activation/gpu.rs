//! Launches the gated activations of `activation.cu` on a device.

use super::{Activation, GateArgs, Gated, GatedArgs};
use crate::gpu::{Arg, Gpu, Kind, Launch, View};
use crate::operand::DeviceOps;
use crate::{Result, args};

const THREADS: usize = 128;

impl Gated for DeviceOps {
    fn gated(&self, args: &GatedArgs<View>) -> Result<()> {
        args.check()?;
        let &GatedArgs { activation, gate_up, width, out, rounded } = args;
        if out.is_empty() {
            return Ok(());
        }
        let (gate, up) = (gate_up, gate_up.slice(width..gate_up.len()));
        let rows = GatedRows { gate, up, strides: [2 * width; 2], width, out };
        if rounded {
            return launch_rounded(&**self, activation, &rows);
        }
        launch_gated(&**self, activation, &rows)
    }

    fn gate(&self, args: &GateArgs<View>) -> Result<()> {
        args.check()?;
        let &GateArgs { x, gate } = args;
        if x.is_empty() {
            return Ok(());
        }
        let kernel = x.kind().kernel("gate_f32", "gate_bf16");
        let vector = vector(x.kind(), &[x.len()], &[x, gate]);
        let blocks = [x.len().div_ceil(THREADS * vector) as u32, 1, 1];
        let launch = Launch { kernel, blocks, threads: THREADS as u32, shared_bytes: 0 };
        self.launch(&launch, &args![x, gate, x.len(), u32::from(vector > 1)])
    }
}

/// Rows of gates and of what they multiply, `width` values of each, which may stand among others.
pub(crate) struct GatedRows {
    /// They begin with the first row's values.
    pub gate: View,
    pub up: View,
    /// Values from a row of each to the next.
    pub strides: [usize; 2],
    pub width: usize,
    /// `[n, width]`, not empty.
    pub out: View,
}

pub(crate) fn launch_gated(gpu: &dyn Gpu, activation: Activation, rows: &GatedRows) -> Result<()> {
    let &GatedRows { gate, up, strides: [gate_stride, up_stride], width, out } = rows;
    let vector = vector(out.kind(), &[gate_stride, up_stride, width], &[gate, up, out]);
    let mut params =
        args![gate, up, out, gate_stride, up_stride, width, u32::from(vector > 1)].to_vec();
    let [f32, bf16, _] = kernels(activation, &mut params);
    let kernel = out.kind().kernel(f32, bf16);
    let parts = width.div_ceil(THREADS * vector) as u32;
    let blocks = [(out.len() / width) as u32, parts, 1];
    gpu.launch(&Launch { kernel, blocks, threads: THREADS as u32, shared_bytes: 0 }, &params)
}

/// The same with each row rounded to eight bits.
fn launch_rounded(gpu: &dyn Gpu, activation: Activation, rows: &GatedRows) -> Result<()> {
    let &GatedRows { gate, up, strides: [gate_stride, up_stride], width, out } = rows;
    let mut params = args![gate, up, out, gate_stride, up_stride, width].to_vec();
    let [.., kernel] = kernels(activation, &mut params);
    let blocks = [(out.len() / width) as u32, 1, 1];
    gpu.launch(&Launch { kernel, blocks, threads: 1024, shared_bytes: 0 }, &params)
}

/// The kernels for f32, for bf16, and for rounded rows of bf16. Adds the activation's own numbers
/// to their parameters.
fn kernels(activation: Activation, params: &mut Vec<Arg>) -> [&'static str; 3] {
    match activation {
        Activation::Silu => ["silu_f32", "silu_bf16", "silu_rounded_bf16"],
        Activation::GeluTanh => ["gelu_f32", "gelu_bf16", "gelu_rounded_bf16"],
        Activation::ClampedSwiglu { alpha, limit } => {
            params.extend(args![alpha, limit]);
            ["clamped_swiglu_f32", "clamped_swiglu_bf16", "clamped_swiglu_rounded_bf16"]
        }
    }
}

/// The number of values that one thread takes: 16 bytes if all rows consist of whole ones.
pub(crate) fn vector(kind: Kind, lens: &[usize], views: &[View]) -> usize {
    let values = 16 / kind.bytes();
    let whole = lens.iter().all(|len| len.is_multiple_of(values))
        && views.iter().all(|view| view.address().is_multiple_of(16));
    if whole { values } else { 1 }
}

#[cfg(test)]
mod tests;
