//! Gated activations: `out = act(gate) * up`. Shazeer 2020, "GLU Variants Improve Transformer". And
//! the soft cap of logits.

mod cpu;
pub mod gpu;
#[cfg(test)]
mod reference;
#[cfg(test)]
mod tests;

use crate::simd::Isa;
use crate::storage::{Parts, dims2, distinct, ensure, read, write};
use crate::{Compute, Result};
use candle_core::Tensor;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    Silu,
    /// The tanh approximation of GELU.
    GeluTanh,
}

/// Fewer outputs than this are not worth waking a thread for.
const OUTPUTS_PER_TASK: usize = 8 * 1024;

/// `gate_up: [n, 2 * d]` (gate first), `out: [n, d]`, f32.
pub fn gated(c: &Compute, act: Activation, gate_up: &Tensor, out: &Tensor) -> Result<()> {
    const OP: &str = "gated";
    let (n, d) = dims2(OP, out)?;
    ensure(OP, gate_up.dims() == [n, 2 * d], || {
        format!("gate_up {:?} for an output [{n}, {d}]", gate_up.dims())
    })?;
    distinct(OP, &[out, gate_up])?;
    let gate_up = read(OP, gate_up)?;
    let rows = (OUTPUTS_PER_TASK / d.max(1)).max(1);
    write(OP, out, |out| {
        let parts = Parts::new(out);
        c.run(n.div_ceil(rows), |task| {
            for row in task * rows..n.min((task + 1) * rows) {
                let (gate, up) = gate_up[row * 2 * d..(row + 1) * 2 * d].split_at(d);
                // SAFETY: each row belongs to one task.
                let out = unsafe { parts.slice(row * d..(row + 1) * d) };
                cpu::gated_row(Isa::best(), act, gate, up, out);
            }
        });
        Ok(())
    })
}

/// `values = cap * tanh(values / cap)` in place; f32 of any shape.
pub fn soft_cap(c: &Compute, cap: f32, values: &Tensor) -> Result<()> {
    write("soft_cap", values, |values| {
        let (count, parts) = (values.len(), Parts::new(values));
        c.run(count.div_ceil(OUTPUTS_PER_TASK), |task| {
            let range = task * OUTPUTS_PER_TASK..count.min((task + 1) * OUTPUTS_PER_TASK);
            // SAFETY: each range belongs to one task.
            cpu::soft_cap(Isa::best(), cap, unsafe { parts.slice(range) });
        });
        Ok(())
    })
}
