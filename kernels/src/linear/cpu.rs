//! Turns the tensors of a product on the CPU into slices, on which `matmul` works.

use super::{HEADS, HeadLinearArgs, Linear, LinearArgs, OP, Weight, matmul};
use crate::error::ensure;
use crate::operand::TensorView;
use crate::simd::Isa;
use crate::storage::{read, write};
use crate::{Compute, Result};

impl Linear for Compute {
    fn linear(&self, args: &LinearArgs<TensorView>) -> Result<()> {
        let n = args.check()?;
        let &LinearArgs { x, w, bias, out, .. } = args;
        let x = read::<f32>(OP, x)?;
        let bias = bias.map(|bias| read::<f32>(OP, bias)).transpose()?;
        write(OP, out, |out| linear_slices(Isa::best(), self, w, bias.as_deref(), &x, n, out))?
    }

    /// The heads are experts of which every row chooses all.
    fn head_linear(&self, args: &HeadLinearArgs<TensorView>) -> Result<()> {
        let n = args.check()? as u32;
        let &HeadLinearArgs { x, w, heads, out } = args;
        ensure(HEADS, w.is_stack_of(heads), || format!("{w:?} is no stack of {heads} alike"))?;
        let x = read::<f32>(HEADS, x)?;
        let heads = heads as u32;
        let begins: Vec<u32> = (0..=heads).map(|head| head * n).collect();
        let of_head = |head| (0..n).map(move |row| row * heads + head);
        let order: Vec<u32> = (0..heads).flat_map(of_head).collect();
        write(HEADS, out, |out| matmul::run_chosen(self, w, None, (&begins, &order), 1, &x, out))
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
