//! The kernels against the reference, and their promises: bits that depend neither on cuts nor on
//! other sequences, and states that stay as they were unless they are written.

use super::super::tests::{Conv, Op, Rule, STEP_LIMITS, Step, delta, starts};
use super::super::{NO_STATE, reference};
use super::*;
use crate::gpu::{Buffer, Emulator, Gpu, Kind};
use crate::testing::{
    KINDS, assert_close, downloaded, gpu, poisoned_buffer, random, rounded, upload, values,
};
use std::sync::Arc;

const SLOTS: usize = 6;

/// A step's moves on a device.
struct Moves([Buffer; 3]);

impl Moves {
    fn of(gpu: &Arc<dyn Gpu>, step: Step) -> Self {
        let reads: Vec<u32> = step.iter().map(|(_, read, _)| *read).collect();
        let writes: Vec<u32> = step.iter().map(|(.., write)| *write).collect();
        Self([starts(step), reads, writes].map(|words| Buffer::from_slice(gpu, &words).unwrap()))
    }

    fn views(&self) -> StateMoves<View> {
        let [starts, reads, writes] = self.0.each_ref().map(Buffer::view);
        StateMoves { starts, reads, writes }
    }
}

/// An op over a step on a device.
trait DeviceOp: Op {
    /// `x`: the input rows.
    fn run_on(
        &self,
        gpu: &Arc<dyn Gpu>,
        kind: Kind,
        x: &[f32],
        step: Step,
        states: &Buffer,
    ) -> Result<Vec<f32>>;
}

impl DeviceOp for Conv {
    fn run_on(
        &self,
        gpu: &Arc<dyn Gpu>,
        kind: Kind,
        x: &[f32],
        step: Step,
        states: &Buffer,
    ) -> Result<Vec<f32>> {
        let of_f32 = |values: &[f32]| upload(gpu, Kind::F32, values);
        let out = poisoned_buffer(gpu, kind, x.len() / self.form.parts());
        let (x, weight) = (upload(gpu, kind, x), of_f32(&values(&self.weight())));
        let (bias, moves) = (self.bias().map(|bias| of_f32(&values(&bias))), Moves::of(gpu, step));
        gpu.short_conv(&ShortConvArgs {
            form: self.form,
            x: x.view(),
            weight: weight.view(),
            bias: bias.as_ref().map(Buffer::view),
            width: self.width,
            states: states.view(),
            moves: moves.views(),
            out: out.view(),
        })?;
        gpu.synchronise()?;
        Ok(downloaded(&out))
    }
}

impl DeviceOp for Rule {
    fn run_on(
        &self,
        gpu: &Arc<dyn Gpu>,
        kind: Kind,
        x: &[f32],
        step: Step,
        states: &Buffer,
    ) -> Result<Vec<f32>> {
        let [width, rates, inner, _] = self.sizes();
        let part = |first: usize, len: usize| -> Vec<f32> {
            let rows = x.chunks(width + rates);
            rows.flat_map(|row| &row[first..first + len]).copied().collect()
        };
        let (input, rates) =
            (upload(gpu, kind, &part(0, width)), upload(gpu, kind, &part(width, rates)));
        let [decay, bias, skip] =
            self.factors().map(|factors| upload(gpu, Kind::F32, &values(&factors)));
        let (out, moves) =
            (poisoned_buffer(gpu, kind, x.len() / self.input() * inner), Moves::of(gpu, step));
        match *self {
            Self::Delta(shape) => gpu.delta_rule(&DeltaRuleArgs {
                shape,
                qkv: input.view(),
                gates: rates.view(),
                decay: decay.view(),
                decay_bias: bias.view(),
                states: states.view(),
                moves: moves.views(),
                out: out.view(),
            })?,
            Self::Scan(shape) => gpu.selective_scan(&SelectiveScanArgs {
                shape,
                xbc: input.view(),
                steps: rates.view(),
                decay: decay.view(),
                step_bias: bias.view(),
                skip: skip.view(),
                step_limits: STEP_LIMITS,
                states: states.view(),
                moves: moves.views(),
                out: out.view(),
            })?,
        }
        gpu.synchronise()?;
        Ok(downloaded(&out))
    }
}

fn ops() -> Vec<Box<dyn DeviceOp>> {
    vec![
        Box::new(Conv { form: ConvForm::Silu, width: 1, taps: 2, biased: false }),
        Box::new(Conv { form: ConvForm::Silu, width: 300, taps: 4, biased: true }),
        Box::new(Conv { form: ConvForm::Gated, width: 67, taps: 3, biased: false }),
        Box::new(Conv { form: ConvForm::Silu, width: 5, taps: 65, biased: false }),
        Box::new(delta(1, 1, [4, 3], HeadMap::Grouped)),
        Box::new(delta(2, 4, [24, 40], HeadMap::Grouped)),
        Box::new(delta(2, 4, [128, 32], HeadMap::Tiled)),
        Box::new(delta(1, 2, [130, 9], HeadMap::Grouped)),
        Box::new(Rule::Scan(ScanShape { heads: 1, head_dim: 1, groups: 1, state_dim: 1 })),
        Box::new(Rule::Scan(ScanShape { heads: 4, head_dim: 20, groups: 2, state_dim: 7 })),
        Box::new(Rule::Scan(ScanShape { heads: 3, head_dim: 64, groups: 1, state_dim: 128 })),
        Box::new(Rule::Scan(ScanShape { heads: 2, head_dim: 33, groups: 2, state_dim: 256 })),
    ]
}

/// Slots full of numbers that a sequence must not begin with unless it reads them.
fn slots(op: &dyn DeviceOp) -> Vec<f32> {
    values(&random(&[SLOTS, op.state()], 5))
}

/// Rows of input, as a device holds them.
fn input(op: &dyn DeviceOp, kind: Kind, rows: usize, seed: u64) -> Vec<f32> {
    rounded(kind, &values(&random(&[rows, op.input()], seed)))
}

#[test]
fn a_step_equals_the_reference() {
    let ops = ops();
    for (op, (kind, tolerance)) in ops.iter().flat_map(|op| KINDS.map(|kind| (&**op, kind))) {
        let (gpu, before) = (gpu(), slots(op));
        let states = upload(&gpu, Kind::F32, &before);
        let step = [(1, NO_STATE, 0), (7, NO_STATE, 4), (75, 2, 3), (1, 2, 5), (64, 1, 1)];
        let x = input(op, kind, 148, 3);
        let got = op.run_on(&gpu, kind, &x, &step, &states).unwrap();
        let (after, mut want, len) = (downloaded(&states), Vec::new(), op.state());
        for (span, (_, read, write)) in starts(&step).windows(2).zip(step) {
            let rows = span[0] as usize * op.input()..span[1] as usize * op.input();
            let mut state = match read {
                NO_STATE => vec![0.0; len],
                read => before[read as usize * len..][..len].to_vec(),
            };
            want.extend(op.want(&x[rows], &mut state));
            assert_close(&after[write as usize * len..][..len], &state, 1e-4, "state");
        }
        assert_close(&got, &want, tolerance.max(1e-4), "rows");
        assert_eq!(after[2 * len..3 * len], before[2 * len..3 * len], "it is not written");
    }
}

#[test]
fn bits_depend_neither_on_cuts_nor_on_other_sequences() {
    let ops = ops();
    for (op, (kind, _)) in ops.iter().flat_map(|op| KINDS.map(|kind| (&**op, kind))) {
        let gpu = gpu();
        let new_states = || upload(&gpu, Kind::F32, &slots(op));
        let (x, whole, len) = (input(op, kind, 80, 6), new_states(), op.state());
        let want = op.run_on(&gpu, kind, &x, &[(80, NO_STATE, 1)], &whole).unwrap();
        let slot = |states: &Buffer, slot: usize| downloaded(states)[slot * len..][..len].to_vec();
        for cuts in [&[1, 1, 1, 1, 76][..], &[27, 27, 26], &[79, 1]] {
            let (states, mut got, mut first) = (new_states(), Vec::new(), 0);
            for (i, &count) in cuts.iter().enumerate() {
                // A part goes on from the state before it, in place or into another slot.
                let read = if i == 0 { NO_STATE } else { (i as u32 - 1) / 2 % 2 };
                let write = i as u32 / 2 % 2;
                let own = &x[first * op.input()..(first + count) * op.input()];
                let both = [&input(op, kind, 3, i as u64), own].concat();
                let step = [(3, 4, 5), (count, read, write)];
                let rows = op.run_on(&gpu, kind, &both, &step, &states).unwrap();
                got.extend_from_slice(&rows[rows.len() / (3 + count) * 3..]);
                first += count;
            }
            assert!(got == want, "{kind:?} {cuts:?}");
            let last = (cuts.len() - 1) / 2 % 2;
            assert!(slot(&states, last) == slot(&whole, 1), "{kind:?} {cuts:?}");
        }
    }
}

/// Each step has an emulator of its own: a fault ends a device for the whole process.
#[test]
fn a_slot_or_row_out_of_bounds_fails() {
    let ops: [Box<dyn DeviceOp>; 2] = [
        Box::new(Conv { form: ConvForm::Silu, width: 3, taps: 2, biased: false }),
        Box::new(delta(1, 1, [4, 3], HeadMap::Grouped)),
    ];
    for op in ops {
        for (step, expect) in [
            (&[(4, NO_STATE, 5)][..], ""),
            (&[(4, 6, 0)], "slot < slots"),
            (&[(4, 0, 6)], "writes[sequence] < slots"),
            (&[(5, 0, 1)], "end <= rows"),
            (&[(4, 0, 1), (0, 2, 3)], "begin < end"),
        ] {
            let gpu: Arc<dyn Gpu> = Emulator::new();
            let states = upload(&gpu, Kind::F32, &slots(&*op));
            let x = input(&*op, Kind::F32, 4, 1);
            match op.run_on(&gpu, Kind::F32, &x, step, &states) {
                Ok(_) => assert!(expect.is_empty(), "{step:?} was not checked"),
                Err(error) => {
                    let text = error.to_string();
                    assert!(!expect.is_empty() && text.contains(expect), "{step:?}: {text}");
                }
            }
        }
    }
}

#[test]
fn sizes_without_a_kernel_are_refused() {
    let ops: [(Box<dyn DeviceOp>, &str); 3] = [
        (Box::new(Conv { form: ConvForm::Silu, width: 3, taps: 66, biased: false }), "66 taps"),
        (Box::new(delta(1, 1, [257, 3], HeadMap::Grouped)), "states of 257 rows"),
        (
            Box::new(Rule::Scan(ScanShape { heads: 1, head_dim: 2, groups: 1, state_dim: 300 })),
            "states of 300 rows",
        ),
    ];
    for (op, expect) in ops {
        let states = upload(&gpu(), Kind::F32, &slots(&*op));
        let x = input(&*op, Kind::F32, 1, 1);
        let error = op.run_on(&gpu(), Kind::F32, &x, &[(1, NO_STATE, 0)], &states).unwrap_err();
        assert!(error.to_string().contains(expect), "{error}");
    }
}

#[test]
fn a_gated_norm_equals_the_reference() {
    let gpu = gpu();
    for (n, width, groups) in [(0, 16, 1), (1, 1, 1), (33, 40, 4), (70, 128, 1), (7, 1030, 2)] {
        for order in [GateOrder::AfterNorm, GateOrder::BeforeNorm] {
            for (kind, tolerance) in KINDS {
                let [x, gate] =
                    [1, 2].map(|seed| rounded(kind, &values(&random(&[n, width], seed))));
                let weight = values(&random(&[width], 3));
                let mut want = vec![f32::NAN; n * width];
                reference::gated_norm(order, groups, [&x, &gate, &weight], 1e-6, &mut want);
                let [x, gate] = [&x, &gate].map(|values| upload(&gpu, kind, values));
                let (weight, out) =
                    (upload(&gpu, Kind::F32, &weight), poisoned_buffer(&gpu, kind, n * width));
                let args = GatedNormArgs {
                    order,
                    groups,
                    x: x.view(),
                    gate: gate.view(),
                    weight: weight.view(),
                    eps: 1e-6,
                    out: out.view(),
                };
                gpu.gated_norm(&args).unwrap();
                let what = format!("{kind:?} {order:?} {n}x{width} in {groups}");
                assert_close(&downloaded(&out), &want, tolerance, &what);
                let uneven = GatedNormArgs { groups: width + 1, ..args };
                assert!(gpu.gated_norm(&uneven).is_err());
            }
        }
    }
}
