//! RMSNorm on a device. `norm.cu` says how.

use crate::gpu::{Gpu, Kind, Launch, View};
use crate::storage::ensure;
use crate::{Result, args};

const OP: &str = "norm";

/// `x[n, width]`, normed into `out`; with `delta`, `x += delta` first, in place. `x`, `delta` and
/// `out` are of one kind (f32 or bf16), `weight[width]` is f32. `out` may be `x` or `delta`.
pub struct Norm {
    pub x: View,
    pub delta: Option<View>,
    pub weight: View,
    pub eps: f32,
    pub out: View,
}

pub fn norm(gpu: &dyn Gpu, args: &Norm) -> Result<()> {
    let &Norm { x, delta, weight, eps, out } = args;
    let width = weight.len();
    let kinds = weight.kind() == Kind::F32
        && [Some(out), delta].into_iter().flatten().all(|v| v.kind() == x.kind());
    let sizes = width > 0
        && x.len().is_multiple_of(width)
        && [Some(out), delta].into_iter().flatten().all(|v| v.len() == x.len());
    ensure(OP, kinds && sizes, || format!("{x:?}, {delta:?} and {out:?} for a width of {width}"))?;
    if x.is_empty() {
        return Ok(());
    }
    let kernel = match x.kind() {
        Kind::Bf16 => "norm_bf16",
        _ => "norm_f32",
    };
    let launch =
        Launch { kernel, blocks: [(x.len() / width) as u32, 1, 1], threads: 256, shared_bytes: 0 };
    gpu.launch(&launch, &args![x, delta, weight, out, width, eps])
}

#[cfg(test)]
mod tests;
