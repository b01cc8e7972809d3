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

pub fn add_normed(x: &mut [f32], delta: &[f32], weight: &[f32], eps: f32) {
    let mut normed = vec![0.0; x.len()];
    rms_norm(delta, weight, eps, &mut normed);
    for (x, normed) in x.iter_mut().zip(normed) {
        *x += normed;
    }
}

pub fn norm_columns(x: &mut [f32], stride: usize, first: usize, weight: &[f32], eps: f32) {
    for row in x.chunks_mut(stride) {
        let part = row[first..first + weight.len()].to_vec();
        rms_norm(&part, weight, eps, &mut row[first..first + weight.len()]);
    }
}
