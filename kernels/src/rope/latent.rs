//! The rotation of latent attention on the CPU, one token at a time.

#![expect(
    clippy::inline_always,
    reason = "generic bodies must end up inside the functions that enable the instruction set"
)]

use super::rotation::{VALUES_PER_TASK, check_indices, rotate, store_key};
use super::{LATENT, RopeLatentArgs};
use crate::element::Element;
use crate::gpu::Kind;
use crate::operand::{Operand, TensorView};
use crate::parts::Parts;
use crate::simd::{Isa, Lanes, vectorised};
use crate::storage::{read, write, wrong_type};
use crate::{Compute, Result};
use half::f16;

pub(super) fn run(c: &Compute, args: &RopeLatentArgs<TensorView>) -> Result<()> {
    args.check()?;
    let cached = args.cache.len() / args.width();
    check_indices(LATENT, args.positions, args.slots, &args.table, cached)?;
    match args.cache.kind() {
        Kind::F32 => run_as::<f32>(c, args),
        Kind::F16 => run_as::<f16>(c, args),
        _ => Err(wrong_type(LATENT, args.cache)),
    }
}

fn run_as<E: Element>(c: &Compute, args: &RopeLatentArgs<TensorView>) -> Result<()> {
    let &RopeLatentArgs { heads, rank, block_size, .. } = args;
    let of = |view| read::<f32>(LATENT, view);
    let [plain, rotary, latent] = [of(args.plain)?, of(args.rotary)?, of(args.latent)?];
    let [cos, sin] = [of(args.table.cos)?, of(args.table.sin)?];
    let scales = args.table.query_scales.map(of).transpose()?;
    let (width, rotary_dim) = (args.width(), args.table.rotary_dim);
    let rows = (VALUES_PER_TASK / (heads * width)).max(1);
    write(LATENT, args.queries, |queries: &mut [f32]| {
        write(LATENT, args.cache, |cache: &mut [E]| {
            let cache = Parts::new(cache);
            c.run_chunks(queries, rows * heads * width, |start, queries| {
                let first = start / (heads * width);
                for (i, queries) in (first..).zip(queries.chunks_exact_mut(heads * width)) {
                    let position = args.positions[i] as usize;
                    let angles = position * rotary_dim / 2..(position + 1) * rotary_dim / 2;
                    let token = Token {
                        plain: &plain[i * heads * rank..(i + 1) * heads * rank],
                        rotary: &rotary[i * heads * rotary_dim..(i + 1) * heads * rotary_dim],
                        latent: &latent[i * width..(i + 1) * width],
                        angles: [&cos[angles.clone()], &sin[angles]],
                        scale: scales.as_ref().map_or(1.0, |scales| scales[position]),
                    };
                    let slot = args.slots[i] as usize;
                    let at = slot / block_size * block_size * width + slot % block_size;
                    turn(Isa::best(), args, &token, queries, &cache, at);
                }
            });
        })
    })?
}

/// The operands of one token.
struct Token<'a> {
    plain: &'a [f32],
    rotary: &'a [f32],
    latent: &'a [f32],
    /// The cosines and the sines of its position.
    angles: [&'a [f32]; 2],
    /// By which its queries are multiplied.
    scale: f32,
}

vectorised! {
    /// Writes a token's queries, and what it caches from place `at` on. `check_indices` found every
    /// slot once, so no other thread writes this one.
    fn turn<E: Element>(
        args: &RopeLatentArgs<TensorView>,
        token: &Token,
        queries: &mut [f32],
        cache: &Parts<E>,
        at: usize,
    ) = turn_with
}

#[inline(always)]
fn turn_with<L: Lanes, E: Element>(
    args: &RopeLatentArgs<TensorView>,
    token: &Token,
    queries: &mut [f32],
    cache: &Parts<E>,
    at: usize,
) {
    let (rank, [cos, sin], style) = (args.rank, token.angles, args.table.style);
    let parts = token.plain.chunks_exact(rank).zip(token.rotary.chunks_exact(2 * cos.len()));
    for (query, (plain, rotary)) in queries.chunks_exact_mut(args.width()).zip(parts) {
        let (first, last) = query.split_at_mut(rank);
        first.copy_from_slice(plain);
        last.copy_from_slice(rotary);
        rotate(style, last, cos, sin);
        for value in query {
            *value *= token.scale;
        }
    }
    let mut latent = token.latent.to_vec();
    rotate(style, &mut latent[rank..], cos, sin);
    // SAFETY: the slot is this token's alone.
    unsafe { store_key::<L, E>(&latent, cache, at, args.block_size) };
}
