//! RMSNorm, alone and fused with the residual addition before it. Sums in f32 per row; a row's
//! result never depends on other rows. Zhang and Sennrich 2019, "Root Mean Square Layer
//! Normalization".

mod cpu;
pub mod gpu;
#[cfg(test)]
pub(crate) mod reference;
#[cfg(test)]
mod tests;

use crate::simd::Isa;
use crate::storage::{Parts, dims2, distinct, ensure, read, write};
use crate::{Compute, Result};
use candle_core::Tensor;

/// Fewer values than this are not worth waking a thread for.
const VALUES_PER_TASK: usize = 16 * 1024;

/// `out[i] = x[i] / sqrt(mean(x[i]²) + eps) * weight`. `x, out: [n, d]`, `weight: [d]`, f32. `out`
/// must not alias `x`.
pub fn rms_norm(c: &Compute, x: &Tensor, weight: &Tensor, eps: f32, out: &Tensor) -> Result<()> {
    const OP: &str = "rms_norm";
    check(OP, &[x, out], weight)?;
    distinct(OP, &[out, x])?;
    let (x, weight) = (read(OP, x)?, read(OP, weight)?);
    write(OP, out, |out| {
        let d = weight.len();
        let parts = Parts::new(out);
        each_rows(c, x.len() / d.max(1), d, |rows| {
            let span = rows.start * d..rows.end * d;
            // SAFETY: tasks get disjoint rows.
            let out = unsafe { parts.slice(span.clone()) };
            cpu::rms_norm(Isa::best(), &x[span], &weight, eps, out);
        });
        Ok(())
    })
}

/// `residual += delta; out = rms_norm(residual)`.
pub fn add_rms_norm(
    c: &Compute,
    residual: &Tensor,
    delta: &Tensor,
    weight: &Tensor,
    eps: f32,
    out: &Tensor,
) -> Result<()> {
    const OP: &str = "add_rms_norm";
    check(OP, &[residual, delta, out], weight)?;
    distinct(OP, &[residual, out, delta])?;
    let (delta, weight) = (read(OP, delta)?, read(OP, weight)?);
    write(OP, residual, |residual| {
        write(OP, out, |out| {
            let d = weight.len();
            let (residual, out) = (Parts::new(residual), Parts::new(out));
            each_rows(c, delta.len() / d.max(1), d, |rows| {
                let span = rows.start * d..rows.end * d;
                // SAFETY: tasks get disjoint rows.
                let (residual, out) =
                    unsafe { (residual.slice(span.clone()), out.slice(span.clone())) };
                cpu::add_rms_norm(Isa::best(), residual, &delta[span], &weight, eps, out);
            });
            Ok(())
        })
    })
}

/// All of `rows_of` have the same shape, whose last dimension is `weight`'s.
fn check(op: &'static str, rows_of: &[&Tensor], weight: &Tensor) -> Result<()> {
    let (n, d) = dims2(op, rows_of[0])?;
    ensure(op, weight.dims() == [d], || format!("weight {:?} for rows of {d}", weight.dims()))?;
    for other in &rows_of[1..] {
        ensure(op, other.dims() == [n, d], || format!("{:?} beside [{n}, {d}]", other.dims()))?;
    }
    Ok(())
}

/// Splits `n` rows of `d` values over the workers.
fn each_rows(c: &Compute, n: usize, d: usize, f: impl Fn(std::ops::Range<usize>) + Sync) {
    let rows = (VALUES_PER_TASK / d.max(1)).max(1);
    c.run(n.div_ceil(rows), |task| f(task * rows..n.min((task + 1) * rows)));
}
