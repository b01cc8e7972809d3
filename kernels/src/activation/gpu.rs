//! Gated activations on a device. `activation.cu` says how.

use super::Activation;
use crate::Result;
use crate::gpu::{Gpu, View};

/// `out[n, width] = activation(gate) * up` of `gate_up[n, 2 * width]`, gate first; one kind, f32 or bf16.
pub fn gated(gpu: &dyn Gpu, activation: Activation, gate_up: View, width: usize, out: View) -> Result<()> {
    let _ = (gpu, activation, gate_up, width, out);
    Err(crate::Error::Unsupported { op: "activation", detail: "the device path is being written".into() })
}
