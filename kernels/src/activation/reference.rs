//! The specification, in plain loops.

use super::Activation;

pub fn gated_row(act: Activation, gate: &[f32], up: &[f32], out: &mut [f32]) {
    for i in 0..out.len() {
        out[i] = match act {
            Activation::ClampedSwiglu { limit, .. } => {
                activate(act, gate[i].min(limit)) * (up[i].clamp(-limit, limit) + 1.0)
            }
            _ => activate(act, gate[i]) * up[i],
        };
    }
}

fn activate(act: Activation, x: f32) -> f32 {
    match act {
        Activation::Silu => x / (1.0 + (-x).exp()),
        Activation::GeluTanh => {
            let inner = (2.0 / std::f32::consts::PI).sqrt() * (x + 0.044_715 * x * x * x);
            0.5 * x * (1.0 + inner.tanh())
        }
        Activation::ClampedSwiglu { alpha, .. } => x / (1.0 + (-alpha * x).exp()),
    }
}
