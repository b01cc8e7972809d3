//! The CPU path against the reference, and its promises: bits that depend neither on cuts nor on
//! other sequences, and states that stay as they were unless they are written.

use super::*;
use crate::operand::TensorView;
use crate::testing::{assert_close, compute, poisoned, random, values};
use candle_core::{DType, Device, Tensor};

const SLOTS: usize = 6;

/// A step: for each sequence its rows, and the slots read and written.
pub(super) type Step<'a> = &'a [(usize, u32, u32)];

pub(super) fn starts(step: Step) -> Vec<u32> {
    let ends = step.iter().scan(0, |end, (rows, ..)| {
        *end += *rows as u32;
        Some(*end)
    });
    [0].into_iter().chain(ends).collect()
}

/// A step's moves, owned.
struct Moves([Vec<u32>; 3]);

impl Moves {
    fn of(step: Step) -> Self {
        let reads = step.iter().map(|(_, read, _)| *read).collect();
        Self([starts(step), reads, step.iter().map(|(.., write)| *write).collect()])
    }

    fn views(&self) -> StateMoves<TensorView<'_>> {
        let Self([starts, reads, writes]) = self;
        StateMoves { starts, reads, writes }
    }
}

/// An op over a step: its input rows, `[n, width]`, and the states of all slots.
pub(super) trait Op {
    fn input(&self) -> usize;
    fn state(&self) -> usize;
    fn run(&self, x: &Tensor, step: Step, states: &Tensor) -> Result<Tensor>;
    /// The reference over one sequence.
    fn want(&self, x: &[f32], state: &mut [f32]) -> Vec<f32>;
}

pub(super) struct Conv {
    pub form: ConvForm,
    pub width: usize,
    pub taps: usize,
    pub biased: bool,
}

impl Conv {
    pub fn weight(&self) -> Tensor {
        random(&[self.taps, self.width], 9)
    }

    pub fn bias(&self) -> Option<Tensor> {
        self.biased.then(|| random(&[self.width], 4))
    }
}

impl Op for Conv {
    fn input(&self) -> usize {
        self.form.parts() * self.width
    }

    fn state(&self) -> usize {
        (self.taps - 1) * self.width
    }

    fn run(&self, x: &Tensor, step: Step, states: &Tensor) -> Result<Tensor> {
        let (weight, out) = (self.weight(), poisoned(&[x.dims()[0], self.width]));
        let bias = self.bias();
        compute().short_conv(&ShortConvArgs {
            form: self.form,
            x: x.into(),
            weight: (&weight).into(),
            bias: bias.as_ref().map(Into::into),
            width: self.width,
            states: states.into(),
            moves: Moves::of(step).views(),
            out: (&out).into(),
        })?;
        Ok(out)
    }

    fn want(&self, x: &[f32], state: &mut [f32]) -> Vec<f32> {
        let mut out = vec![f32::NAN; x.len() / self.form.parts()];
        let (weight, bias) = (values(&self.weight()), self.bias().map(|bias| values(&bias)));
        reference::short_conv(self.form, x, &weight, bias.as_deref(), self.width, state, &mut out);
        out
    }
}

/// An op over what was convolved and the rates at which heads write and forget.
pub(super) enum Rule {
    Delta(DeltaShape),
    Scan(ScanShape),
}

/// Some steps are below the least, and some above the largest.
pub(super) const STEP_LIMITS: [f32; 2] = [0.4, 1.1];

impl Rule {
    /// The widths of what was convolved, of the rates and of the results, and the number of heads.
    pub fn sizes(&self) -> [usize; 4] {
        match self {
            Self::Delta(s) => {
                [s.width(), 2 * s.value_heads, s.value_heads * s.value_dim, s.value_heads]
            }
            Self::Scan(s) => [s.width(), s.heads, s.heads * s.head_dim, s.heads],
        }
    }

    /// Three factors of each head: the rate at which it forgets, which is negative so that some is
    /// kept; the bias of that rate; and the weight of its own values, which the delta rule ignores.
    pub fn factors(&self) -> [Tensor; 3] {
        let [.., heads] = self.sizes();
        let decay: Vec<f32> = (0..heads).map(|h| -0.05 - 0.1 * h as f32).collect();
        let decay = Tensor::new(decay, &Device::Cpu).unwrap();
        [decay, random(&[heads], 8), random(&[heads], 7)]
    }

    /// The part of the rows that was convolved, and that of the rates.
    fn split(&self, x: &Tensor) -> [Tensor; 2] {
        let [width, rates, ..] = self.sizes();
        [(0, width), (width, rates)]
            .map(|(first, len)| x.narrow(1, first, len).unwrap().contiguous().unwrap())
    }
}

impl Op for Rule {
    fn input(&self) -> usize {
        let [width, rates, ..] = self.sizes();
        width + rates
    }

    fn state(&self) -> usize {
        match self {
            Self::Delta(shape) => shape.state_len(),
            Self::Scan(shape) => shape.state_len(),
        }
    }

    fn run(&self, x: &Tensor, step: Step, states: &Tensor) -> Result<Tensor> {
        let [_, _, inner, _] = self.sizes();
        let ([input, rates], [decay, bias, skip]) = (self.split(x), self.factors());
        let (out, moves) = (poisoned(&[x.dims()[0], inner]), Moves::of(step));
        match *self {
            Self::Delta(shape) => compute().delta_rule(&DeltaRuleArgs {
                shape,
                qkv: (&input).into(),
                gates: (&rates).into(),
                decay: (&decay).into(),
                decay_bias: (&bias).into(),
                states: states.into(),
                moves: moves.views(),
                out: (&out).into(),
            })?,
            Self::Scan(shape) => compute().selective_scan(&SelectiveScanArgs {
                shape,
                xbc: (&input).into(),
                steps: (&rates).into(),
                decay: (&decay).into(),
                step_bias: (&bias).into(),
                skip: (&skip).into(),
                step_limits: STEP_LIMITS,
                states: states.into(),
                moves: moves.views(),
                out: (&out).into(),
            })?,
        }
        Ok(out)
    }

    fn want(&self, x: &[f32], state: &mut [f32]) -> Vec<f32> {
        let (rows, [_, _, inner, _]) = (x.len() / self.input(), self.sizes());
        let x = Tensor::from_slice(x, (rows, self.input()), &Device::Cpu).unwrap();
        let [input, rates] = self.split(&x).map(|part| values(&part));
        let [decay, bias, skip] = self.factors().map(|part| values(&part));
        let mut out = vec![f32::NAN; rows * inner];
        match *self {
            Self::Delta(shape) => {
                reference::delta_rule(shape, [&input, &rates, &decay, &bias], state, &mut out);
            }
            Self::Scan(shape) => {
                let inputs = [&input, &rates, &decay, &bias, &skip].map(|part| &part[..]);
                reference::selective_scan(shape, inputs, STEP_LIMITS, state, &mut out);
            }
        }
        out
    }
}

pub(super) fn delta(
    key_heads: usize,
    value_heads: usize,
    dims: [usize; 2],
    head_map: HeadMap,
) -> Rule {
    let [key_dim, value_dim] = dims;
    Rule::Delta(DeltaShape { key_heads, value_heads, key_dim, value_dim, head_map })
}

fn ops() -> Vec<Box<dyn Op>> {
    vec![
        Box::new(Conv { form: ConvForm::Silu, width: 1, taps: 2, biased: false }),
        Box::new(Conv { form: ConvForm::Silu, width: 300, taps: 4, biased: true }),
        Box::new(Conv { form: ConvForm::Gated, width: 67, taps: 3, biased: false }),
        Box::new(delta(1, 1, [4, 3], HeadMap::Grouped)),
        Box::new(delta(2, 4, [16, 40], HeadMap::Grouped)),
        Box::new(delta(2, 4, [16, 32], HeadMap::Tiled)),
        Box::new(Rule::Scan(ScanShape { heads: 1, head_dim: 1, groups: 1, state_dim: 1 })),
        Box::new(Rule::Scan(ScanShape { heads: 4, head_dim: 20, groups: 2, state_dim: 7 })),
        Box::new(Rule::Scan(ScanShape { heads: 3, head_dim: 64, groups: 1, state_dim: 16 })),
    ]
}

/// Slots full of numbers that a sequence must not begin with unless it reads them.
fn slots(op: &dyn Op) -> Tensor {
    random(&[SLOTS, op.state()], 5).to_dtype(DType::F32).unwrap()
}

fn slot(states: &Tensor, slot: usize) -> Vec<f32> {
    values(&states.narrow(0, slot, 1).unwrap())
}

#[test]
fn a_step_equals_the_reference() {
    for op in ops() {
        let states = slots(&*op);
        let before = values(&states);
        let step = [(1, NO_STATE, 0), (7, NO_STATE, 4), (5, 2, 3), (1, 2, 5)];
        let x = random(&[14, op.input()], 3);
        let got = values(&op.run(&x, &step, &states).unwrap());
        let (x, mut want) = (values(&x), Vec::new());
        for (span, (_, read, write)) in starts(&step).windows(2).zip(step) {
            let rows = span[0] as usize * op.input()..span[1] as usize * op.input();
            let mut state = match read {
                NO_STATE => vec![0.0; op.state()],
                read => before[read as usize * op.state()..][..op.state()].to_vec(),
            };
            want.extend(op.want(&x[rows], &mut state));
            assert_close(&slot(&states, write as usize), &state, 1e-5, "state");
        }
        assert_close(&got, &want, 1e-5, "rows");
        for unwritten in [1, 2] {
            let state = &before[unwritten * op.state()..][..op.state()];
            assert_eq!(slot(&states, unwritten), state);
        }
    }
}

#[test]
fn bits_depend_neither_on_cuts_nor_on_other_sequences() {
    for op in ops() {
        let x = random(&[20, op.input()], 6);
        let whole = slots(&*op);
        let want = values(&op.run(&x, &[(20, NO_STATE, 1)], &whole).unwrap());
        for cuts in [&[1usize; 20][..], &[7, 7, 6], &[19, 1]] {
            let (states, mut got, mut first) = (slots(&*op), Vec::new(), 0);
            for (i, &count) in cuts.iter().enumerate() {
                // A part goes on from the state before it, in place or into another slot.
                let read = if i == 0 { NO_STATE } else { (i as u32 - 1) / 2 % 2 };
                let write = i as u32 / 2 % 2;
                let own = x.narrow(0, first, count).unwrap();
                let other = random(&[3, op.input()], i as u64);
                let both = Tensor::cat(&[&other, &own], 0).unwrap();
                let step = [(3, 4, 5), (count, read, write)];
                let rows = values(&op.run(&both, &step, &states).unwrap());
                got.extend_from_slice(&rows[rows.len() / (3 + count) * 3..]);
                first += count;
            }
            assert_eq!(got, want, "{cuts:?}");
            let last = (cuts.len() - 1) / 2 % 2;
            assert_eq!(slot(&states, last), slot(&whole, 1), "{cuts:?}");
        }
    }
}

/// A sequence in parts of a step: each goes on from the slot of the one before, which stays.
#[test]
fn states_between_the_tokens_of_a_step_are_those_of_single_steps() {
    for op in ops() {
        let (states, whole) = (slots(&*op), slots(&*op));
        let x = random(&[7, op.input()], 6);
        let step = [(2, 5, 5), (1, NO_STATE, 1), (1, 1, 0), (1, 0, 2), (2, 4, 3)];
        let got = values(&op.run(&x, &step, &states).unwrap());
        let (mut want, mut first) = (Vec::new(), 0);
        for (count, read, write) in step {
            let part = x.narrow(0, first, count).unwrap();
            want.extend(values(&op.run(&part, &[(count, read, write)], &whole).unwrap()));
            first += count;
        }
        assert_eq!(got, want);
        assert_eq!(values(&states), values(&whole));
    }
}

#[test]
fn wrong_moves_and_shapes_are_refused() {
    for op in ops() {
        let (states, x) = (slots(&*op), random(&[4, op.input()], 1));
        for step in [
            &[(4, 6, 0)][..],
            &[(4, 0, 6)],
            &[(3, 0, 1)],
            &[(2, 0, 1), (2, 2, 1)],
            &[(2, 1, 2), (2, 0, 1)],
            &[(1, 0, 1), (1, 2, 3), (2, 1, 4)],
            &[(4, 0, 1), (0, 2, 3)],
        ] {
            let error = op.run(&x, step, &states).unwrap_err();
            assert!(matches!(error, crate::Error::Shape { .. }), "{step:?}: {error}");
        }
        let cut = random(&[SLOTS * op.state() - 1], 1);
        if op.state() > 1 {
            assert!(op.run(&x, &[(4, NO_STATE, 0)], &cut).is_err());
        }
    }
}

#[test]
fn a_gated_norm_equals_the_reference() {
    for (n, width, groups) in [(0, 16, 1), (1, 1, 1), (33, 40, 4), (600, 128, 1), (7, 96, 2)] {
        for order in [GateOrder::AfterNorm, GateOrder::BeforeNorm] {
            let [x, gate] = [1, 2].map(|seed| random(&[n, width], seed));
            let (weight, out) = (random(&[width], 3), poisoned(&[n, width]));
            let args = GatedNormArgs {
                order,
                groups,
                x: (&x).into(),
                gate: (&gate).into(),
                weight: (&weight).into(),
                eps: 1e-6,
                out: (&out).into(),
            };
            compute().gated_norm(&args).unwrap();
            let mut want = vec![f32::NAN; n * width];
            let [x, gate, weight] = [&x, &gate, &weight].map(values);
            reference::gated_norm(order, groups, [&x, &gate, &weight], 1e-6, &mut want);
            assert_close(&values(&out), &want, 1e-5, &format!("{order:?} {n}x{width}"));
            let uneven = GatedNormArgs { groups: width + 1, ..args };
            assert!(compute().gated_norm(&uneven).is_err());
        }
    }
}
