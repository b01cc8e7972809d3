//! Recurrences on the CPU. A convolution is dealt out by channels, the delta rule by heads; within
//! a task each sequence's tokens follow one another, whatever step or part of a step they came in.

#![expect(
    clippy::inline_always,
    reason = "generic bodies must end up inside the functions that enable the instruction set"
)]

use super::args::{CONV, DELTA, NORM};
use super::sequences::{SequenceRows, by_sequence, sequences, softplus};
use super::{
    ConvForm, DeltaRuleArgs, DeltaShape, GateOrder, GatedNormArgs, Recurrence, SelectiveScanArgs,
    ShortConvArgs, scan,
};
use crate::activation::{Activation, gated_row};
use crate::norm::rms_norm;
use crate::operand::{Operand, TensorView};
use crate::parts::Parts;
use crate::simd::{Isa, Lanes, vectorised};
use crate::storage::{read, write};
use crate::{Compute, Result};
use std::ops::Range;

/// With fewer values than this, waking a thread costs more than it saves.
const VALUES_PER_TASK: usize = 8 * 1024;
/// Columns of a head's state that are computed together: this many stay in the first-level cache.
const COLUMNS: usize = 32;
/// Added to the sum of squares by which queries and keys are divided.
const UNIT_EPS: f32 = 1e-6;

impl Recurrence for Compute {
    fn short_conv(&self, args: &ShortConvArgs<TensorView>) -> Result<()> {
        let taps = args.check()?;
        let &ShortConvArgs { form, x, weight, bias, width, states, ref moves, out } = args;
        let (rows, slots) = (out.len() / width, states.len() / ((taps - 1) * width));
        let sequences = sequences(CONV, moves, rows, slots)?;
        let (x, weight) = (read::<f32>(CONV, x)?, read::<f32>(CONV, weight)?);
        let bias = bias.map(|bias| read::<f32>(CONV, bias)).transpose()?;
        let channels = (VALUES_PER_TASK / rows.max(1)).clamp(64, width.max(64));
        write(CONV, states, |states: &mut [f32]| {
            write(CONV, out, |out: &mut [f32]| {
                let (states, out) = (Parts::new(states), Parts::new(out));
                let (x, weight, bias) = (&x, &weight, bias.as_deref());
                let task = ConvTask { form, x, weight, bias, width, taps, states, out };
                self.run(width.div_ceil(channels), |i| {
                    let channels = i * channels..width.min((i + 1) * channels);
                    for sequence in &sequences {
                        task.run(sequence, channels.clone());
                    }
                });
            })
        })?
    }

    fn delta_rule(&self, args: &DeltaRuleArgs<TensorView>) -> Result<()> {
        args.check()?;
        let &DeltaRuleArgs { shape, qkv, gates, decay, decay_bias, states, ref moves, out } = args;
        let (rows, slots) = (qkv.len() / shape.width(), states.len() / shape.state_len());
        let sequences = sequences(DELTA, moves, rows, slots)?;
        let [qkv, gates] = [read::<f32>(DELTA, qkv)?, read::<f32>(DELTA, gates)?];
        let [decay, decay_bias] = [read::<f32>(DELTA, decay)?, read::<f32>(DELTA, decay_bias)?];
        write(DELTA, states, |states: &mut [f32]| {
            write(DELTA, out, |out: &mut [f32]| {
                let (states, out) = (Parts::new(states), Parts::new(out));
                let task = DeltaTask {
                    shape,
                    qkv: &qkv,
                    gates: &gates,
                    decay: &decay,
                    decay_bias: &decay_bias,
                    states,
                    out,
                };
                let (all, heads) = (by_sequence(&sequences), shape.value_heads);
                self.run(all.len() * heads, |i| {
                    for part in all[i / heads] {
                        task.run(part, i % heads);
                    }
                });
            })
        })?
    }

    fn selective_scan(&self, args: &SelectiveScanArgs<TensorView>) -> Result<()> {
        scan::run(self, args)
    }

    fn gated_norm(&self, args: &GatedNormArgs<TensorView>) -> Result<()> {
        args.check()?;
        let &GatedNormArgs { order, groups, x, gate, weight, eps, out } = args;
        let [x, gate, weight] =
            [read::<f32>(NORM, x)?, read::<f32>(NORM, gate)?, read::<f32>(NORM, weight)?];
        let norm = |x: &[f32], out: &mut [f32]| {
            let width = weight.len() / groups;
            let parts = x.chunks_exact(width).zip(out.chunks_exact_mut(width));
            for ((x, out), weight) in parts.zip(weight.chunks_exact(width).cycle()) {
                rms_norm(Isa::best(), x, weight, eps, out);
            }
        };
        let rows = (VALUES_PER_TASK / weight.len()).max(1) * weight.len();
        write(NORM, out, |out: &mut [f32]| {
            self.run_chunks(out, rows, |start, out| {
                let span = start..start + out.len();
                let (x, gate, mut between) = (&x[span.clone()], &gate[span], vec![0.0; out.len()]);
                match order {
                    GateOrder::AfterNorm => {
                        norm(x, &mut between);
                        gated_row(Isa::best(), Activation::Silu, gate, &between, out);
                    }
                    GateOrder::BeforeNorm => {
                        gated_row(Isa::best(), Activation::Silu, gate, x, &mut between);
                        norm(&between, out);
                    }
                }
            });
        })
    }
}

/// What the tasks of a convolution share. Each has channels of its own.
struct ConvTask<'a> {
    form: ConvForm,
    x: &'a [f32],
    weight: &'a [f32],
    bias: Option<&'a [f32]>,
    width: usize,
    taps: usize,
    states: Parts<'a>,
    out: Parts<'a>,
}

impl ConvTask<'_> {
    /// Computes some channels of a sequence's rows, and their part of its new state.
    fn run(&self, sequence: &SequenceRows, channels: Range<usize>) {
        let &Self { form, width, taps, .. } = self;
        let count = channels.len();
        let kept = |slot: usize, tap: usize| {
            let first = (slot * (taps - 1) + tap) * width + channels.start;
            first..first + count
        };
        // What is convolved, one tap's channels after the other's: the state, then the rows.
        let mut inputs = Vec::with_capacity((taps - 1 + sequence.rows.len()) * count);
        match sequence.read {
            Some(slot) => {
                for tap in 0..taps - 1 {
                    // SAFETY: no other sequence writes the slot, and this one not while it is read.
                    inputs.extend_from_slice(unsafe { self.states.shared(kept(slot, tap)) });
                }
            }
            None => inputs.resize((taps - 1) * count, 0.0),
        }
        let part = |row: usize, part: usize| {
            &self.x[(row * form.parts() + part) * width..][channels.clone()]
        };
        for row in sequence.rows.clone() {
            match form {
                ConvForm::Silu => inputs.extend_from_slice(part(row, 0)),
                ConvForm::Gated => {
                    inputs.extend(part(row, 0).iter().zip(part(row, 2)).map(|(gate, x)| gate * x));
                }
            }
        }
        for (row, inputs) in sequence.rows.clone().zip(inputs.windows(taps * count).step_by(count))
        {
            let first = row * width + channels.start;
            // SAFETY: a row belongs to one sequence, and channels to one task.
            let out = unsafe { self.out.slice(first..first + count) };
            let gate = (form == ConvForm::Gated).then(|| part(row, 1));
            match self.bias {
                Some(bias) => out.copy_from_slice(&bias[channels.clone()]),
                None => out.fill(0.0),
            }
            let weight = &self.weight[channels.start..];
            conv_row(Isa::best(), inputs, weight, self.width, gate, out);
        }
        let last = inputs.chunks_exact(count).skip(sequence.rows.len());
        for (tap, last) in last.enumerate() {
            // SAFETY: a slot that is written belongs to one sequence, and channels to one task.
            unsafe { self.states.slice(kept(sequence.write, tap)) }.copy_from_slice(last);
        }
    }
}

vectorised! {
    /// `inputs` holds as many inputs of each channel as there are taps; the taps in `weight` are
    /// `stride` apart. The sums are added to `out`. The results are multiplied by `gate`, or else
    /// go through SiLU.
    fn conv_row(
        inputs: &[f32],
        weight: &[f32],
        stride: usize,
        gate: Option<&[f32]>,
        out: &mut [f32],
    ) = convolve
}

#[inline(always)]
fn convolve<L: Lanes>(
    inputs: &[f32],
    weight: &[f32],
    stride: usize,
    gate: Option<&[f32]>,
    out: &mut [f32],
) {
    for (inputs, weight) in inputs.chunks_exact(out.len()).zip(weight.chunks(stride)) {
        for ((out, x), w) in out.iter_mut().zip(inputs).zip(weight) {
            *out += x * w;
        }
    }
    if let Some(gate) = gate {
        out.iter_mut().zip(gate).for_each(|(out, gate)| *out *= gate);
    } else {
        crate::activation::silu::<L>(out);
    }
}

/// What the tasks of a delta rule share. Each has a head of a sequence.
struct DeltaTask<'a> {
    shape: DeltaShape,
    qkv: &'a [f32],
    gates: &'a [f32],
    decay: &'a [f32],
    decay_bias: &'a [f32],
    states: Parts<'a>,
    out: Parts<'a>,
}

/// What a head's columns have in common at one token.
struct HeadToken {
    /// The factor of the state.
    keep: f32,
    /// The factor of what is written.
    beta: f32,
}

impl DeltaTask<'_> {
    fn run(&self, sequence: &SequenceRows, head: usize) {
        let DeltaShape { value_heads, key_dim, value_dim, .. } = self.shape;
        let len = key_dim * value_dim;
        let place = |slot: usize| {
            let first = (slot * value_heads + head) * len;
            first..first + len
        };
        // SAFETY: a head of a sequence belongs to one task.
        let state = unsafe { sequence.state(&self.states, place) };
        let tokens: Vec<_> = sequence.rows.clone().map(|row| self.token(row, head)).collect();
        let units: Vec<f32> = sequence.rows.clone().flat_map(|row| self.units(row, head)).collect();
        for first in (0..value_dim).step_by(COLUMNS) {
            let columns = first..value_dim.min(first + COLUMNS);
            for ((row, token), units) in
                sequence.rows.clone().zip(&tokens).zip(units.chunks_exact(2 * key_dim))
            {
                let (value, out) = self.values(row, head, &columns);
                // SAFETY: a row belongs to one sequence, and a head to one task.
                let out = unsafe { self.out.slice(out) };
                let state = &mut state[columns.start..];
                delta_columns(Isa::best(), token, units, value, value_dim, state, out);
            }
        }
    }

    fn token(&self, row: usize, head: usize) -> HeadToken {
        let heads = self.shape.value_heads;
        let [b, a] = [0, heads].map(|part| self.gates[row * 2 * heads + part + head]);
        let rate = softplus(a + self.decay_bias[head]);
        HeadToken { keep: (self.decay[head] * rate).exp(), beta: 1.0 / (1.0 + (-b).exp()) }
    }

    /// The query and the key that a value head reads, both of length one, and the query then as the
    /// scale of attention asks.
    fn units(&self, row: usize, head: usize) -> Vec<f32> {
        let DeltaShape { key_heads, key_dim, .. } = self.shape;
        let mut units = Vec::with_capacity(2 * key_dim);
        for (part, scale) in [(0, 1.0 / (key_dim as f32).sqrt()), (1, 1.0)] {
            let first = (part * key_heads + self.shape.key_head(head)) * key_dim;
            let x = &self.qkv[row * self.shape.width() + first..][..key_dim];
            let squares: f32 = x.iter().map(|x| x * x).sum();
            let scale = scale / (squares + UNIT_EPS).sqrt();
            units.extend(x.iter().map(|x| x * scale));
        }
        units
    }

    /// Some values of a head's row, and the place of the results.
    fn values(&self, row: usize, head: usize, columns: &Range<usize>) -> (&[f32], Range<usize>) {
        let DeltaShape { key_heads, value_heads, key_dim, value_dim, .. } = self.shape;
        let first = row * self.shape.width() + 2 * key_heads * key_dim + head * value_dim;
        let out = (row * value_heads + head) * value_dim;
        let values = &self.qkv[first + columns.start..first + columns.end];
        (values, out + columns.start..out + columns.end)
    }
}

vectorised! {
    /// One token's step of some columns of a head's state, whose rows are `stride` apart. `units`
    /// holds the query, then the key.
    fn delta_columns(
        token: &HeadToken,
        units: &[f32],
        value: &[f32],
        stride: usize,
        state: &mut [f32],
        out: &mut [f32],
    ) = delta_step
}

#[inline(always)]
fn delta_step<L: Lanes>(
    token: &HeadToken,
    units: &[f32],
    value: &[f32],
    stride: usize,
    state: &mut [f32],
    out: &mut [f32],
) {
    let (q, k) = units.split_at(units.len() / 2);
    let count = value.len();
    // First what the state knows of the key, then what is written.
    let mut delta = [0.0; COLUMNS];
    let delta = &mut delta[..count];
    for (state, k) in state.chunks_mut(stride).zip(k) {
        for (x, known) in state.iter_mut().zip(&mut *delta) {
            *x *= token.keep;
            *known += *x * k;
        }
    }
    for (known, value) in delta.iter_mut().zip(value) {
        *known = token.beta * (value - *known);
    }
    out.fill(0.0);
    for ((state, k), q) in state.chunks_mut(stride).zip(k).zip(q) {
        for ((x, delta), out) in state.iter_mut().zip(&*delta).zip(&mut *out) {
            *x += k * delta;
            *out += *x * q;
        }
    }
}
