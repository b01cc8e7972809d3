//! Experts on the CPU. The product gathers the choices by expert, so each expert's weights are read
//! once, and weights of experts that no row chose are not read.

#![expect(
    clippy::inline_always,
    reason = "generic bodies must end up inside the functions that enable the instruction set"
)]

use super::{CombineArgs, ExpertLinearArgs, Experts, RouteArgs, Routes, SharedExpert};
use crate::linear::run_chosen;
use crate::operand::TensorView;
use crate::simd::{Isa, Lanes, vectorised};
use crate::storage::{Parts, ensure, read, write};
use crate::{Compute, Result};

/// With fewer scores or values than this, waking a thread costs more than it saves.
const SCORES_PER_TASK: usize = 2 * 1024;
const VALUES_PER_TASK: usize = 16 * 1024;

impl Experts for Compute {
    fn route(&self, args: &RouteArgs<TensorView>) -> Result<()> {
        const OP: &str = "route";
        let n = args.check(OP)?;
        let Routes { experts, chosen, weights, plan } = args.routes;
        let scores = read::<f32>(OP, args.scores)?;
        write(OP, weights, |weights: &mut [f32]| {
            write(OP, plan, |plan: &mut [u32]| {
                let (ids, rest) = plan.split_at_mut(n * chosen);
                let parts = Parts::new(ids);
                let rows = (SCORES_PER_TASK / experts).max(1);
                self.run_chunks(weights, rows * chosen, |start, weights| {
                    // SAFETY: tasks get disjoint rows.
                    let ids = unsafe { parts.slice(start..start + weights.len()) };
                    let scores = scores[start / chosen * experts..].chunks_exact(experts);
                    let rows = ids.chunks_exact_mut(chosen).zip(weights.chunks_exact_mut(chosen));
                    for (scores, (ids, weights)) in scores.zip(rows) {
                        route_row(scores, args.normalise, ids, weights);
                    }
                });
                let (begins, order) = rest.split_at_mut(experts + 1);
                group_choices(ids, begins, order);
            })
        })?
    }

    fn expert_linear(&self, args: &ExpertLinearArgs<TensorView>) -> Result<()> {
        const OP: &str = "expert linear";
        let sizes = args.check(OP)?;
        let Routes { experts, plan, .. } = args.routes;
        ensure(OP, args.w.is_stack_of(experts), || {
            format!("{:?} is not stacked of {experts} experts alike", args.w)
        })?;
        let (x, plan) = (read::<f32>(OP, args.x)?, read::<u32>(OP, plan)?);
        let plan = check_plan(OP, &plan[sizes.choices..], experts)?;
        let bias = args.bias.map(|bias| read::<f32>(OP, bias)).transpose()?;
        let (bias, per_row) = (bias.as_deref(), sizes.choices_per_row);
        write(OP, args.out, |out| {
            run_chosen(self, args.w, bias, plan, per_row, &x, out);
        })
    }

    fn combine(&self, args: &CombineArgs<TensorView>) -> Result<()> {
        const OP: &str = "combine";
        let (_, width) = args.check(OP)?;
        let (x, chosen) = (read::<f32>(OP, args.x)?, args.routes.chosen);
        let weights = read::<f32>(OP, args.routes.weights)?;
        let shared = match args.shared {
            Some(SharedExpert { x, gate }) => Some((read::<f32>(OP, x)?, read::<f32>(OP, gate)?)),
            None => None,
        };
        let rows = (VALUES_PER_TASK / (chosen * width).max(1)).max(1);
        write(OP, args.out, |out: &mut [f32]| {
            self.run_chunks(out, (rows * width).max(1), |start, out| {
                for (row, out) in (start / width..).zip(out.chunks_exact_mut(width)) {
                    let weights = &weights[row * chosen..(row + 1) * chosen];
                    let x = &x[row * chosen * width..(row + 1) * chosen * width];
                    let shared = shared.as_ref().map(|(x, gate)| {
                        (&x[row * width..(row + 1) * width], 1.0 / (1.0 + (-gate[row]).exp()))
                    });
                    combine_row(Isa::best(), x, weights, shared, out);
                }
            });
        })
    }
}

/// The begins and the order of a plan, which index memory.
fn check_plan<'a>(
    op: &'static str,
    plan: &'a [u32],
    experts: usize,
) -> Result<(&'a [u32], &'a [u32])> {
    let (begins, order) = plan.split_at(experts + 1);
    let sound = begins.is_sorted()
        && begins.last().is_some_and(|end| *end as usize == order.len())
        && order.iter().all(|choice| (*choice as usize) < order.len());
    ensure(op, sound, || "the routes are not those of a routing".into())?;
    Ok((begins, order))
}

/// Chooses the experts of a row, and puts them in ascending order.
fn route_row(scores: &[f32], normalise: bool, ids: &mut [u32], weights: &mut [f32]) {
    if !scores.iter().all(|score| score.is_finite()) {
        ids.iter_mut().zip(0..).for_each(|(id, number)| *id = number);
        weights.fill(f32::NAN);
        return;
    }
    // The best so far, in descending order of their scores.
    let mut found = 0;
    for (id, score) in (0..).zip(scores) {
        let better = |other: &u32| scores[*other as usize] >= *score;
        let place = ids[..found].partition_point(better);
        if place < ids.len() {
            found = (found + 1).min(ids.len());
            ids[place..found].rotate_right(1);
            ids[place] = id;
        }
    }
    let largest = scores[ids[0] as usize];
    ids.sort_unstable();
    for (weight, id) in weights.iter_mut().zip(&*ids) {
        *weight = (scores[*id as usize] - largest).exp();
    }
    let sum: f32 = if normalise {
        weights.iter().sum()
    } else {
        scores.iter().map(|score| (score - largest).exp()).sum()
    };
    for weight in weights {
        *weight /= sum;
    }
}

/// Sorts the choices by their experts.
fn group_choices(ids: &[u32], begins: &mut [u32], order: &mut [u32]) {
    begins.fill(0);
    for id in ids {
        begins[*id as usize + 1] += 1;
    }
    for expert in 1..begins.len() {
        begins[expert] += begins[expert - 1];
    }
    // Each begin moves up to its end, where the next expert's choices begin.
    for (choice, id) in (0..).zip(ids) {
        let place = &mut begins[*id as usize];
        order[*place as usize] = choice;
        *place += 1;
    }
    begins.rotate_right(1);
    begins[0] = 0;
}

vectorised! {
    /// `x`: the results of the row's choices; `shared`: that of the shared expert and its factor.
    pub(super) fn combine_row(
        x: &[f32],
        weights: &[f32],
        shared: Option<(&[f32], f32)>,
        out: &mut [f32],
    ) = combine_row_with
}

#[inline(always)]
fn combine_row_with<L: Lanes>(
    x: &[f32],
    weights: &[f32],
    shared: Option<(&[f32], f32)>,
    out: &mut [f32],
) {
    out.fill(0.0);
    let choices = x.chunks_exact(out.len()).zip(weights.iter().copied());
    for (x, weight) in choices.chain(shared) {
        for (out, x) in out.iter_mut().zip(x) {
            *out += weight * x;
        }
    }
}
