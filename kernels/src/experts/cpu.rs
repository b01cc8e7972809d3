//! Experts on the CPU. The product gathers the choices by expert, so each expert's weights are read
//! once, and weights of experts that no row chose are not read.

#![expect(
    clippy::inline_always,
    reason = "generic bodies must end up inside the functions that enable the instruction set"
)]

use super::{CombineArgs, ExpertLinearArgs, Experts, RouteArgs, Routes, SharedExpert};
use crate::error::ensure;
use crate::linear::run_chosen;
use crate::operand::TensorView;
use crate::parts::Parts;
use crate::simd::{Isa, Lanes, vectorised};
use crate::storage::{read, write};
use crate::{Compute, Result};
use std::borrow::Cow;

/// With fewer scores or values than this, waking a thread costs more than it saves.
const SCORES_PER_TASK: usize = 2 * 1024;
const VALUES_PER_TASK: usize = 16 * 1024;

impl Experts for Compute {
    fn route(&self, args: &RouteArgs<TensorView>) -> Result<()> {
        const OP: &str = "route";
        let n = args.check(OP)?;
        let Routes { experts, chosen, weights, plan } = args.routes;
        let scores = read::<f32>(OP, args.scores)?;
        let (bias, groups) = args.scoring.parts();
        let bias = bias.map(|bias| read::<f32>(OP, bias)).transpose()?;
        let (bias, normalise) = (bias.as_deref(), args.normalise);
        let rule = RouteRule { bias, groups, normalise, scale: args.scale };
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
                        route_row(scores, &rule, ids, weights);
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
            Some(SharedExpert { x, gate }) => {
                let gate = gate.map(|gate| read::<f32>(OP, gate)).transpose()?;
                Some((read::<f32>(OP, x)?, gate))
            }
            None => None,
        };
        let rows = (VALUES_PER_TASK / (chosen * width).max(1)).max(1);
        write(OP, args.out, |out: &mut [f32]| {
            self.run_chunks(out, (rows * width).max(1), |start, out| {
                for (row, out) in (start / width..).zip(out.chunks_exact_mut(width)) {
                    let weights = &weights[row * chosen..(row + 1) * chosen];
                    let x = &x[row * chosen * width..(row + 1) * chosen * width];
                    let shared = shared.as_ref().map(|(x, gate)| {
                        let factor = gate.as_ref().map_or(1.0, |gate| sigmoid(gate[row]));
                        (&x[row * width..(row + 1) * width], factor)
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

/// The rule by which a row's experts are chosen and get their weights.
struct RouteRule<'a> {
    /// The biases of sigmoids; `None` is a softmax.
    bias: Option<&'a [f32]>,
    /// The number of groups that there are, and of those that are kept.
    groups: [usize; 2],
    normalise: bool,
    scale: f32,
}

/// Added to a sum of sigmoids by which they are divided: all may be zero.
const SIGMOID_EPS: f32 = 1e-20;

/// Chooses the experts of a row, and puts them in ascending order.
fn route_row(scores: &[f32], rule: &RouteRule, ids: &mut [u32], weights: &mut [f32]) {
    if !scores.iter().all(|score| score.is_finite()) {
        ids.iter_mut().zip(0..).for_each(|(id, number)| *id = number);
        weights.fill(f32::NAN);
        return;
    }
    let all = match rule.bias {
        None => {
            let mut ranks = Cow::Borrowed(scores);
            keep_groups(&mut ranks, rule.groups, |group| largest_two(group)[0]);
            choose(&ranks, ids);
            let largest = scores[ids[0] as usize];
            ids.sort_unstable();
            take(ids, weights, |id| (scores[id] - largest).exp());
            scores.iter().map(|score| (score - largest).exp()).sum()
        }
        Some(bias) => {
            let sigmoids: Vec<f32> = scores.iter().map(|score| sigmoid(*score)).collect();
            let ranks = sigmoids.iter().zip(bias).map(|(s, bias)| s + bias).collect();
            let mut ranks = Cow::Owned(ranks);
            keep_groups(&mut ranks, rule.groups, |group| largest_two(group).iter().sum());
            choose(&ranks, ids);
            ids.sort_unstable();
            take(ids, weights, |id| sigmoids[id]);
            1.0
        }
    };
    let eps = if rule.bias.is_some() { SIGMOID_EPS } else { 0.0 };
    let sum = if rule.normalise { weights.iter().sum::<f32>() + eps } else { all };
    for weight in weights.iter_mut() {
        *weight = *weight / sum * rule.scale;
    }
}

fn take(ids: &[u32], weights: &mut [f32], of: impl Fn(usize) -> f32) {
    weights.iter_mut().zip(ids).for_each(|(weight, id)| *weight = of(*id as usize));
}

fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

/// The numbers of the largest values, in descending order.
fn choose(values: &[f32], ids: &mut [u32]) {
    let mut found = 0;
    for (id, value) in (0..).zip(values) {
        let better = |other: &u32| values[*other as usize] >= *value;
        let place = ids[..found].partition_point(better);
        if place < ids.len() {
            found = (found + 1).min(ids.len());
            ids[place..found].rotate_right(1);
            ids[place] = id;
        }
    }
}

/// The largest value, and the one behind it; 0 if there is only one.
fn largest_two(values: &[f32]) -> [f32; 2] {
    let (mut first, mut second) = (f32::NEG_INFINITY, f32::NEG_INFINITY);
    for value in values {
        (first, second) = (first.max(*value), second.max(first.min(*value)));
    }
    [first, if values.len() > 1 { second } else { 0.0 }]
}

/// Makes the ranks of all groups but those with the best `score` too low to be chosen.
fn keep_groups(ranks: &mut Cow<[f32]>, [groups, kept]: [usize; 2], score: impl Fn(&[f32]) -> f32) {
    if kept == groups {
        return;
    }
    let size = ranks.len() / groups;
    let best: Vec<f32> = ranks.chunks_exact(size).map(score).collect();
    let mut order = vec![0; kept];
    choose(&best, &mut order);
    for (group, ranks) in (0..).zip(ranks.to_mut().chunks_exact_mut(size)) {
        if !order.contains(&group) {
            ranks.fill(f32::NEG_INFINITY);
        }
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
