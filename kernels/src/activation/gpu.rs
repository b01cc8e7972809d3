//! Launches the gated activations of `activation.cu` on a device.

use super::args::{GATE, OP};
use super::{Activation, GateArgs, Gated, GatedArgs};
use crate::gpu::{Kind, Launch, View};
use crate::operand::DeviceOps;
use crate::storage::{no_kernel, unsupported};
use crate::{Result, args};

const THREADS: usize = 128;

impl Gated for DeviceOps {
    fn gated(&self, args: &GatedArgs<View>) -> Result<()> {
        args.check()?;
        let &GatedArgs { activation, gate_up, width, out } = args;
        if out.is_empty() {
            return Ok(());
        }
        let kernel = match activation {
            Activation::Silu => out.kind().kernel("silu_f32", "silu_bf16"),
            Activation::GeluTanh => out.kind().kernel("gelu_f32", "gelu_bf16"),
            Activation::ClampedSwiglu { .. } => {
                let what = "the clamped SwiGLU on a device: run the model on the CPU";
                return Err(unsupported(OP, what.into()));
            }
        };
        let parts = width.div_ceil(THREADS * vector(out.kind(), width)) as u32;
        let blocks = [(out.len() / width) as u32, parts, 1];
        let launch = Launch { kernel, blocks, threads: THREADS as u32, shared_bytes: 0 };
        self.launch(&launch, &args![gate_up, out, width])
    }

    /// Only models with recurrent layers gate their attention, and a device takes none of them.
    fn gate(&self, _: &GateArgs<View>) -> Result<()> {
        Err(no_kernel(GATE))
    }
}

/// The number of values that one thread takes: 16 bytes if a row consists of whole ones, as the
/// kernel decides.
fn vector(kind: Kind, width: usize) -> usize {
    let whole = 16 / kind.bytes();
    if width.is_multiple_of(whole) { whole } else { 1 }
}

#[cfg(test)]
mod tests;
