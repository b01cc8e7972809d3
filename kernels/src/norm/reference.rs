//! The specification, in plain loops.

pub fn rms_norm(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    let d = weight.len();
    for (x, out) in x.chunks(d).zip(out.chunks_mut(d)) {
        let mean = x.iter().map(|x| x * x).sum::<f32>() / d as f32;
        let scale = 1.0 / (mean + eps).sqrt();
        for i in 0..d {
            out[i] = x[i] * scale * weight[i];
        }
    }
}

pub fn add_rms_norm(
    residual: &mut [f32],
    delta: &[f32],
    weight: &[f32],
    eps: f32,
    out: &mut [f32],
) {
    for (r, d) in residual.iter_mut().zip(delta) {
        *r += d;
    }
    rms_norm(residual, weight, eps, out);
}
