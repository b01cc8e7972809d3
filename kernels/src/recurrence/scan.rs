//! The selective scan on the CPU. Heads of sequences are dealt out, and within one each token's
//! step is vector code over the values of the head.

#![expect(
    clippy::inline_always,
    reason = "generic bodies must end up inside the functions that enable the instruction set"
)]

use super::args::{SCAN, ScanShape, SelectiveScanArgs};
use super::sequences::{SequenceRows, by_sequence, sequences, softplus};
use crate::operand::{Operand, TensorView};
use crate::parts::Parts;
use crate::simd::{Isa, Lanes, vectorised};
use crate::storage::{read, write};
use crate::{Compute, Result};

/// The arguments that all tasks of a scan share. A task computes one head of one sequence.
struct ScanTask<'a> {
    shape: ScanShape,
    xbc: &'a [f32],
    steps: &'a [f32],
    decay: &'a [f32],
    step_bias: &'a [f32],
    skip: &'a [f32],
    step_limits: [f32; 2],
    states: Parts<'a>,
    out: Parts<'a>,
}

pub(super) fn run(c: &Compute, args: &SelectiveScanArgs<TensorView>) -> Result<()> {
    args.check()?;
    let &SelectiveScanArgs { shape, xbc, steps, states, ref moves, out, step_limits, .. } = args;
    let (rows, slots) = (xbc.len() / shape.width(), states.len() / shape.state_len());
    let sequences = sequences(SCAN, moves, rows, slots)?;
    let [xbc, steps] = [read::<f32>(SCAN, xbc)?, read::<f32>(SCAN, steps)?];
    let [decay, step_bias, skip] = [
        read::<f32>(SCAN, args.decay)?,
        read::<f32>(SCAN, args.step_bias)?,
        read::<f32>(SCAN, args.skip)?,
    ];
    write(SCAN, states, |states: &mut [f32]| {
        write(SCAN, out, |out: &mut [f32]| {
            let task = ScanTask {
                shape,
                xbc: &xbc,
                steps: &steps,
                decay: &decay,
                step_bias: &step_bias,
                skip: &skip,
                step_limits,
                states: Parts::new(states),
                out: Parts::new(out),
            };
            let (all, heads) = (by_sequence(&sequences), shape.heads);
            c.run(all.len() * heads, |i| {
                for part in all[i / heads] {
                    task.run(part, i % heads);
                }
            });
        })
    })?
}

impl ScanTask<'_> {
    fn run(&self, sequence: &SequenceRows, head: usize) {
        let ScanShape { heads, head_dim, groups, state_dim } = self.shape;
        let len = head_dim * state_dim;
        let place = |slot: usize| {
            let first = (slot * heads + head) * len;
            first..first + len
        };
        // SAFETY: a head of a sequence belongs to one task.
        let state = unsafe { sequence.state(&self.states, place) };
        let group = head / (heads / groups);
        for row in sequence.rows.clone() {
            let xbc = &self.xbc[row * self.shape.width()..][..self.shape.width()];
            let (x, bc) = xbc.split_at(heads * head_dim);
            let (b, c) = bc.split_at(groups * state_dim);
            let [b, c] = [b, c].map(|part| &part[group * state_dim..][..state_dim]);
            let x = &x[head * head_dim..][..head_dim];
            let step = softplus(self.steps[row * heads + head] + self.step_bias[head]);
            let step = step.clamp(self.step_limits[0], self.step_limits[1]);
            let token =
                ScanToken { keep: (self.decay[head] * step).exp(), step, skip: self.skip[head] };
            let first = (row * heads + head) * head_dim;
            // SAFETY: a row belongs to one sequence, and a head to one task.
            let out = unsafe { self.out.slice(first..first + head_dim) };
            scan_token(Isa::best(), &token, x, b, c, state, out);
        }
    }
}

/// The factors of one head at one token, which are the same for all of its values.
struct ScanToken {
    /// The factor of the state.
    keep: f32,
    /// The factor of what is written.
    step: f32,
    /// The factor of the token's own values in its result.
    skip: f32,
}

vectorised! {
    /// One token's step of a head's state, `[b.len(), x.len()]`.
    fn scan_token(
        token: &ScanToken,
        x: &[f32],
        b: &[f32],
        c: &[f32],
        state: &mut [f32],
        out: &mut [f32],
    ) = scan_step
}

#[inline(always)]
fn scan_step<L: Lanes>(
    token: &ScanToken,
    x: &[f32],
    b: &[f32],
    c: &[f32],
    state: &mut [f32],
    out: &mut [f32],
) {
    out.fill(0.0);
    for ((state, b), c) in state.chunks_exact_mut(x.len()).zip(b).zip(c) {
        let written = token.step * b;
        for ((state, x), out) in state.iter_mut().zip(x).zip(&mut *out) {
            *state = *state * token.keep + written * x;
            *out += *state * c;
        }
    }
    for (out, x) in out.iter_mut().zip(x) {
        *out += token.skip * x;
    }
}
