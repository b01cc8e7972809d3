//! RMSNorm on the CPU: one pass for the sum of squares, one for the product; the sums of four
//! vectors run side by side.

#![expect(
    clippy::inline_always,
    reason = "generic bodies must end up inside the functions that enable the instruction set"
)]

use super::args::{ADD, COLUMNS, OP};
use super::{AddNormedArgs, Norm, NormArgs, NormColumnsArgs};
use crate::operand::TensorView;
use crate::parts::Parts;
use crate::simd::{Isa, LANES, Lanes, vectorised};
use crate::storage::{read, write};
use crate::{Compute, Result};

/// With fewer values than this, waking a thread costs more than it saves.
const VALUES_PER_TASK: usize = 16 * 1024;

impl Norm for Compute {
    fn norm(&self, args: &NormArgs<TensorView>) -> Result<()> {
        args.check()?;
        let &NormArgs { x, delta, weight, eps, out, .. } = args;
        let weight = read::<f32>(OP, weight)?;
        let rows = (VALUES_PER_TASK / weight.len()).max(1) * weight.len();
        let Some(delta) = delta else {
            let x = read::<f32>(OP, x)?;
            return write(OP, out, |out: &mut [f32]| {
                self.run_chunks(out, rows, |start, out| {
                    rms_norm(Isa::best(), &x[start..start + out.len()], &weight, eps, out);
                });
            });
        };
        let delta = read::<f32>(OP, delta)?;
        write(OP, x, |x: &mut [f32]| {
            write(OP, out, |out: &mut [f32]| {
                let x = Parts::new(x);
                self.run_chunks(out, rows, |start, out| {
                    let span = start..start + out.len();
                    // SAFETY: tasks get disjoint rows.
                    let x = unsafe { x.slice(span.clone()) };
                    add_rms_norm(Isa::best(), x, &delta[span], &weight, eps, out);
                });
            })
        })?
    }

    fn add_normed(&self, args: &AddNormedArgs<TensorView>) -> Result<()> {
        args.check()?;
        let &AddNormedArgs { x, delta, weight, eps } = args;
        let (delta, weight) = (read::<f32>(ADD, delta)?, read::<f32>(ADD, weight)?);
        let rows = (VALUES_PER_TASK / weight.len()).max(1) * weight.len();
        write(ADD, x, |x: &mut [f32]| {
            self.run_chunks(x, rows, |start, x| {
                add_normed(Isa::best(), x, &delta[start..start + x.len()], &weight, eps);
            });
        })
    }

    fn norm_columns(&self, args: &NormColumnsArgs<TensorView>) -> Result<()> {
        args.check()?;
        let &NormColumnsArgs { x, stride, first, weight, eps } = args;
        let weight = read::<f32>(COLUMNS, weight)?;
        let rows = (VALUES_PER_TASK / weight.len()).max(1) * stride;
        write(COLUMNS, x, |x: &mut [f32]| {
            self.run_chunks(x, rows, |_, x| {
                for row in x.chunks_exact_mut(stride) {
                    norm_part(Isa::best(), &mut row[first..first + weight.len()], &weight, eps);
                }
            });
        })
    }
}

vectorised! {
    /// `x` and `out` hold whole rows of `weight.len()`.
    pub(crate) fn rms_norm(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) = norm_rows
}

vectorised! {
    pub(super) fn add_rms_norm(
        residual: &mut [f32],
        delta: &[f32],
        weight: &[f32],
        eps: f32,
        out: &mut [f32],
    ) = add_norm_rows
}

vectorised! {
    pub(super) fn add_normed(x: &mut [f32], delta: &[f32], weight: &[f32], eps: f32) =
        add_normed_rows
}

vectorised! {
    /// Norms a part of one row, of the length of `weight`.
    fn norm_part(x: &mut [f32], weight: &[f32], eps: f32) = norm_in_place
}

#[inline(always)]
fn norm_rows<L: Lanes>(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    let d = weight.len();
    for (x, out) in x.chunks_exact(d).zip(out.chunks_exact_mut(d)) {
        let scale = inverse_rms::<L>(x, eps);
        for ((out, x), w) in out.iter_mut().zip(x).zip(weight) {
            *out = x * scale * w;
        }
    }
}

#[inline(always)]
fn add_norm_rows<L: Lanes>(
    residual: &mut [f32],
    delta: &[f32],
    weight: &[f32],
    eps: f32,
    out: &mut [f32],
) {
    let d = weight.len();
    let rows = residual.chunks_exact_mut(d).zip(delta.chunks_exact(d));
    for ((residual, delta), out) in rows.zip(out.chunks_exact_mut(d)) {
        for (r, d) in residual.iter_mut().zip(delta) {
            *r += d;
        }
        norm_rows::<L>(residual, weight, eps, out);
    }
}

#[inline(always)]
fn add_normed_rows<L: Lanes>(x: &mut [f32], delta: &[f32], weight: &[f32], eps: f32) {
    let d = weight.len();
    for (x, delta) in x.chunks_exact_mut(d).zip(delta.chunks_exact(d)) {
        let scale = inverse_rms::<L>(delta, eps);
        for ((x, delta), w) in x.iter_mut().zip(delta).zip(weight) {
            *x += delta * scale * w;
        }
    }
}

#[inline(always)]
fn norm_in_place<L: Lanes>(x: &mut [f32], weight: &[f32], eps: f32) {
    let scale = inverse_rms::<L>(x, eps);
    for (x, w) in x.iter_mut().zip(weight) {
        *x *= scale * w;
    }
}

#[inline(always)]
fn inverse_rms<L: Lanes>(x: &[f32], eps: f32) -> f32 {
    1.0 / (sum_of_squares::<L>(x) / x.len() as f32 + eps).sqrt()
}

#[inline(always)]
fn sum_of_squares<L: Lanes>(x: &[f32]) -> f32 {
    let (blocks, rest) = x.as_chunks::<{ 4 * LANES }>();
    let mut sums = [L::splat(0.0); 4];
    for block in blocks {
        let (vectors, _) = block.as_chunks::<LANES>();
        for (sum, v) in sums.iter_mut().zip(vectors) {
            let v = L::load(v);
            *sum = v.mul_add(v, *sum);
        }
    }
    let tail: f32 = rest.iter().map(|x| x * x).sum();
    sums[0].add(sums[1]).add(sums[2].add(sums[3])).sum() + tail
}
