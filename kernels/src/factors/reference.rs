//! The specification, in plain loops.

pub fn scale(x: &mut [f32], factor: f32) {
    for x in x {
        *x *= factor;
    }
}

/// With the tanh approximation of GELU.
pub fn layer_input(gate: &[f32], inputs: &[f32], [stride, first, width]: [usize; 3]) -> Vec<f32> {
    let gelu = |x: f32| {
        let inner = (2.0 / std::f32::consts::PI).sqrt() * (x + 0.044_715 * x * x * x);
        0.5 * x * (1.0 + inner.tanh())
    };
    let input = |i: usize| inputs[i / width * stride + first + i % width];
    gate.iter().enumerate().map(|(i, x)| gelu(*x) * input(i)).collect()
}

pub fn choice_factors(weights: &mut [f32], ids: &[u32], factors: &[f32]) {
    for (weight, id) in weights.iter_mut().zip(ids) {
        *weight *= factors[*id as usize];
    }
}
