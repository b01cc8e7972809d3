//! Turns the tensors of a product on the CPU into slices, on which `matmul` works.

use super::{Linear, LinearArgs, OP, Weight, matmul};
use crate::operand::TensorView;
use crate::simd::Isa;
use crate::storage::{ensure, read, write};
use crate::{Compute, Result};

impl Linear for Compute {
    fn linear(&self, args: &LinearArgs<TensorView>) -> Result<()> {
        let n = args.check()?;
        let &LinearArgs { x, w, bias, out, .. } = args;
        let x = read::<f32>(OP, x)?;
        let bias = bias.map(|bias| read::<f32>(OP, bias)).transpose()?;
        write(OP, out, |out| linear_slices(Isa::best(), self, w, bias.as_deref(), &x, n, out))?
    }
}

/// Computes the product on slices: `x: [n, cols]`, `out: [n, rows]`, `bias: [rows]`.
pub(super) fn linear_slices(
    isa: Isa,
    c: &Compute,
    w: &Weight,
    bias: Option<&[f32]>,
    x: &[f32],
    n: usize,
    out: &mut [f32],
) -> Result<()> {
    let (rows, cols) = (w.rows, w.cols);
    let expected = (n * cols, n * rows, bias.map(|_| rows));
    let got = (x.len(), out.len(), bias.map(<[f32]>::len));
    ensure(OP, got == expected, || {
        format!(
            "[{rows}, {cols}] for {n} rows: x, out, bias want {expected:?} elements, got {got:?}"
        )
    })?;
    if cols == 0 {
        out.chunks_exact_mut(rows.max(1)).for_each(|out| match bias {
            Some(bias) => out.copy_from_slice(bias),
            None => out.fill(0.0),
        });
    } else if n > 0 {
        matmul::run(isa, c, w, bias, x, out);
    }
    Ok(())
}
