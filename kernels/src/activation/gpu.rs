//! Gated activations on a device. `activation.cu` says how.

use super::Activation;
use crate::gpu::{Gpu, Kind, Launch, View};
use crate::storage::ensure;
use crate::{Result, args};

const OP: &str = "activation";
const THREADS: usize = 128;

/// `out[n, width] = activation(gate) * up` of `gate_up[n, 2 * width]`, gate first; one kind, f32 or
/// bf16.
pub fn gated(
    gpu: &dyn Gpu,
    activation: Activation,
    gate_up: View,
    width: usize,
    out: View,
) -> Result<()> {
    let kind = out.kind();
    let fits = matches!(kind, Kind::F32 | Kind::Bf16)
        && gate_up.kind() == kind
        && gate_up.len() == 2 * out.len()
        && width > 0
        && out.len().is_multiple_of(width);
    ensure(OP, fits, || format!("{gate_up:?} and {out:?} for a width of {width}"))?;
    if out.is_empty() {
        return Ok(());
    }
    let kernel = match (activation, kind) {
        (Activation::Silu, Kind::Bf16) => "silu_bf16",
        (Activation::Silu, _) => "silu_f32",
        (Activation::GeluTanh, Kind::Bf16) => "gelu_bf16",
        (Activation::GeluTanh, _) => "gelu_f32",
    };
    let blocks =
        [(out.len() / width) as u32, width.div_ceil(THREADS * vector(kind, width)) as u32, 1];
    let launch = Launch { kernel, blocks, threads: THREADS as u32, shared_bytes: 0 };
    gpu.launch(&launch, &args![gate_up, out, width])
}

/// The values one thread takes: 16 bytes where rows consist of such, as the kernel decides.
fn vector(kind: Kind, width: usize) -> usize {
    let whole = 16 / kind.bytes();
    if width.is_multiple_of(whole) { whole } else { 1 }
}

#[cfg(test)]
mod tests;
