//! The specification, in plain loops. A sequence's state is changed in place.

use super::{ConvForm, DeltaShape, GateOrder, ScanShape};

fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

/// `state` is `[taps - 1, width]`.
pub fn short_conv(
    form: ConvForm,
    x: &[f32],
    weight: &[f32],
    bias: Option<&[f32]>,
    width: usize,
    state: &mut [f32],
    out: &mut [f32],
) {
    let taps = weight.len() / width;
    for (x, out) in x.chunks(form.parts() * width).zip(out.chunks_mut(width)) {
        for c in 0..width {
            let input = match form {
                ConvForm::Silu => x[c],
                ConvForm::Gated => x[c] * x[2 * width + c],
            };
            let before: f32 =
                (0..taps - 1).map(|j| weight[j * width + c] * state[j * width + c]).sum();
            let sum = before + weight[(taps - 1) * width + c] * input;
            let sum = sum + bias.map_or(0.0, |bias| bias[c]);
            out[c] = match form {
                ConvForm::Silu => sum * sigmoid(sum),
                ConvForm::Gated => sum * x[width + c],
            };
            for j in 0..taps - 2 {
                state[j * width + c] = state[(j + 1) * width + c];
            }
            state[(taps - 2) * width + c] = input;
        }
    }
}

/// The rule as [`DeltaRuleArgs`](super::DeltaRuleArgs) states it, over the rows of one sequence.
pub fn delta_rule(
    shape: DeltaShape,
    [qkv, gates, decay, decay_bias]: [&[f32]; 4],
    state: &mut [f32],
    out: &mut [f32],
) {
    let DeltaShape { key_heads, value_heads: heads, key_dim: dk, value_dim: dv, .. } = shape;
    let rows =
        qkv.chunks(shape.width()).zip(gates.chunks(2 * heads)).zip(out.chunks_mut(heads * dv));
    for ((qkv, gates), out) in rows {
        for h in 0..heads {
            let key_head = shape.key_head(h);
            let unit = |part: usize| -> Vec<f32> {
                let head = &qkv[(part * key_heads + key_head) * dk..][..dk];
                let length = (head.iter().map(|x| x * x).sum::<f32>() + 1e-6).sqrt();
                head.iter().map(|x| x / length).collect()
            };
            let (q, k) = (unit(0), unit(1));
            let v = &qkv[2 * key_heads * dk + h * dv..][..dv];
            let beta = sigmoid(gates[h]);
            let keep = (decay[h] * (1.0 + (gates[heads + h] + decay_bias[h]).exp()).ln()).exp();
            let state = &mut state[h * dk * dv..][..dk * dv];
            for x in &mut *state {
                *x *= keep;
            }
            for j in 0..dv {
                let known: f32 = (0..dk).map(|i| state[i * dv + j] * k[i]).sum();
                let delta = beta * (v[j] - known);
                (0..dk).for_each(|i| state[i * dv + j] += k[i] * delta);
                let sum: f32 = (0..dk).map(|i| state[i * dv + j] * q[i]).sum();
                out[h * dv + j] = sum / (dk as f32).sqrt();
            }
        }
    }
}

/// The scan as [`SelectiveScanArgs`](super::SelectiveScanArgs) states it, over the rows of one
/// sequence.
pub fn selective_scan(
    shape: ScanShape,
    [xbc, steps, decay, step_bias, skip]: [&[f32]; 5],
    step_limits: [f32; 2],
    state: &mut [f32],
    out: &mut [f32],
) {
    let ScanShape { heads, head_dim, groups, state_dim } = shape;
    let rows = xbc.chunks(shape.width()).zip(steps.chunks(heads));
    for ((xbc, steps), out) in rows.zip(out.chunks_mut(heads * head_dim)) {
        let (x, bc) = xbc.split_at(heads * head_dim);
        for h in 0..heads {
            let step = (1.0 + (steps[h] + step_bias[h]).exp()).ln();
            let step = step.max(step_limits[0]).min(step_limits[1]);
            for p in 0..head_dim {
                let at = h * head_dim + p;
                out[at] = skip[h] * x[at];
                for n in 0..state_dim {
                    let of_group = h * groups / heads * state_dim + n;
                    let (b, c) = (bc[of_group], bc[groups * state_dim + of_group]);
                    let state = &mut state[(h * state_dim + n) * head_dim + p];
                    *state = *state * (decay[h] * step).exp() + step * x[at] * b;
                    out[at] += *state * c;
                }
            }
        }
    }
}

pub fn gated_norm(
    order: GateOrder,
    groups: usize,
    [x, gate, weight]: [&[f32]; 3],
    eps: f32,
    out: &mut [f32],
) {
    let gates = gate.iter().map(|gate| gate * sigmoid(*gate));
    let gated: Vec<f32> = match order {
        GateOrder::AfterNorm => x.to_vec(),
        GateOrder::BeforeNorm => x.iter().zip(gates.clone()).map(|(x, gate)| x * gate).collect(),
    };
    let width = weight.len() / groups;
    let parts = gated.chunks(width).zip(out.chunks_mut(width));
    for ((x, out), weight) in parts.zip(weight.chunks(width).cycle()) {
        crate::norm::reference::rms_norm(x, weight, eps, out);
    }
    if order == GateOrder::AfterNorm {
        out.iter_mut().zip(gates).for_each(|(out, gate)| *out *= gate);
    }
}
