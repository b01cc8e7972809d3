//! The kernel against the reference, and the memory that it must not change.

use super::super::reference;
use super::*;
use crate::gpu::{Buffer, Emulator, Gpu, Kind};
use crate::norm::reference::rms_norm;
use crate::rope::QkNorm;
use crate::testing::{
    KINDS, assert_close, downloaded, e4m3_cache, gpu, poisoned_buffer, random, rounded, upload,
    values,
};
use std::sync::Arc;

const EPS: f32 = 1e-6;
const POSITIONS: usize = 50;
const SLOTS: usize = 48;

#[derive(Clone, Copy, Debug)]
struct Case {
    n: usize,
    heads: usize,
    kv_heads: usize,
    dim: usize,
    rotary: usize,
    style: RopeStyle,
    normed: bool,
    /// Whether queries have factors.
    scaled: bool,
    /// Whether values differ by many powers of two.
    spread: bool,
}

/// Operands and the caches they were run with.
struct Run {
    qkv: Vec<f32>,
    cos: Vec<f32>,
    sin: Vec<f32>,
    scales: Vec<f32>,
    weights: [Vec<f32>; 2],
    out: Buffer,
    caches: [Buffer; 2],
    outcome: Result<()>,
}

impl Case {
    fn run(self, gpu: &Arc<dyn Gpu>, kind: Kind, positions: &[u32], slots: &[u32]) -> Run {
        self.run_into(gpu, [kind; 2], positions, slots)
    }

    /// Runs with a kind of activations and one of caches.
    fn run_into(
        self,
        gpu: &Arc<dyn Gpu>,
        [kind, cache]: [Kind; 2],
        positions: &[u32],
        slots: &[u32],
    ) -> Run {
        let Self { n, heads, kv_heads, dim, rotary, style, normed, scaled, spread } = self;
        let mut qkv = values(&random(&[n, (heads + 2 * kv_heads) * dim], 1));
        if spread {
            let exponent = |i: usize| (i % 29) as i32 - 10 * (1 + (i % 2) as i32);
            qkv.iter_mut().enumerate().for_each(|(i, x)| *x *= 2f32.powi(exponent(i)));
        }
        let qkv = rounded(kind, &qkv);
        let [cos, sin] = [2, 3].map(|seed| values(&random(&[POSITIONS, rotary / 2], seed)));
        let weights = [4, 5].map(|seed| values(&random(&[dim], seed)));
        let scales = values(&random(&[POSITIONS], 6));
        let scales_on = upload(gpu, Kind::F32, &scales);
        let out = upload(gpu, kind, &qkv);
        let caches =
            [(); 2].map(|()| poisoned_buffer(gpu, cache, SLOTS * cached(cache, kv_heads, dim)));
        let [cos_on, sin_on, q, k] =
            [&cos, &sin, &weights[0], &weights[1]].map(|v| upload(gpu, Kind::F32, v));
        let [positions, slots] = [positions, slots].map(|v| Buffer::from_slice(gpu, v).unwrap());
        let args = RopeArgs {
            qkv: out.view(),
            heads,
            kv_heads,
            head_dim: dim,
            positions: positions.view(),
            slots: slots.view(),
            table: RopeTable {
                cos: cos_on.view(),
                sin: sin_on.view(),
                rotary_dim: rotary,
                style,
                query_scales: scaled.then(|| scales_on.view()),
            },
            qk_norm: normed.then(|| QkNorm { q: q.view(), k: k.view(), eps: EPS }),
            k_cache: caches[0].view(),
            v_cache: caches[1].view(),
            block_size: 16,
        };
        let outcome = gpu.rope_kv_write(&args).and_then(|()| gpu.synchronise());
        Run { qkv, cos, sin, scales, weights, out, caches, outcome }
    }

    /// Heads whose values differ widely become the codes that the layout asks for.
    fn check_codes(self) {
        let positions: Vec<u32> = (0..self.n as u32).collect();
        let slots: Vec<u32> = positions.iter().map(|i| (i * 11 + 47) % SLOTS as u32).collect();
        let run = |cache| self.run_into(&gpu(), [Kind::Bf16, cache], &positions, &slots);
        let (exact, coded) = (run(Kind::Bf16), run(E4M3));
        coded.outcome.as_ref().unwrap();
        let q_width = self.heads * self.dim;
        let q = |run: &Run| {
            let rows = downloaded(&run.out);
            let rows = rows.chunks(rows.len() / self.n).flat_map(|row| &row[..q_width]);
            rows.copied().collect::<Vec<f32>>()
        };
        assert_eq!(q(&exact), q(&coded), "{self:?}");
        for (exact, coded) in exact.caches.iter().zip(&coded.caches) {
            let want = e4m3_cache(&downloaded(exact), self.kv_heads, self.dim, 16);
            let got = coded.to_vec::<u8>().unwrap();
            let (vectors, codes) = (SLOTS * self.kv_heads, SLOTS * self.kv_heads * self.dim);
            for vector in 0..vectors {
                let (slot, head) = (vector / self.kv_heads, vector % self.kv_heads);
                let scale = slot / 16 * 16 * self.kv_heads + head * 16 + slot % 16;
                let own = [
                    vector * self.dim..(vector + 1) * self.dim,
                    codes + 2 * scale..codes + 2 * scale + 2,
                ];
                for own in own {
                    let written = slots.contains(&(slot as u32));
                    let same = if written {
                        got[own.clone()] == want[own]
                    } else {
                        got[own].iter().all(|b| *b == 0xff)
                    };
                    assert!(same, "{self:?}: slot {slot}");
                }
            }
        }
    }

    fn check(self, kind: Kind, tolerance: f32) {
        let what = format!("{kind:?} {self:?}");
        let positions: Vec<u32> =
            (0..self.n as u32).map(|i| (i * 7 + 49) % POSITIONS as u32).collect();
        let slots: Vec<u32> = (0..self.n as u32).map(|i| (i * 11 + 47) % SLOTS as u32).collect();
        let run = self.run(&gpu(), kind, &positions, &slots);
        run.outcome.as_ref().unwrap();
        let (q_width, kv_width) = (self.heads * self.dim, self.kv_heads * self.dim);
        let (out, caches) =
            (downloaded(&run.out), [&run.caches[0], &run.caches[1]].map(downloaded));
        let mut untouched = [true; SLOTS];
        for (i, row) in run.qkv.chunks(q_width + 2 * kv_width).enumerate() {
            let (q, k) = (&row[..q_width], &row[q_width..q_width + kv_width]);
            let slot = slots[i] as usize;
            untouched[slot] = false;
            let cached = |cache: usize| &caches[cache][slot * kv_width..][..kv_width];
            let got = &out[i * row.len()..][..q_width];
            let scale = if self.scaled { run.scales[positions[i] as usize] } else { 1.0 };
            let q = self.turned(&run, 0, q, positions[i] as usize);
            let q: Vec<f32> = q.into_iter().map(|x| x * scale).collect();
            assert_close(got, &q, tolerance, &what);
            assert_close(
                cached(0),
                &self.turned(&run, 1, k, positions[i] as usize),
                tolerance,
                &what,
            );
            assert_eq!(cached(1), &row[q_width + kv_width..], "{what}");
        }
        for slot in (0..SLOTS).filter(|slot| untouched[*slot]) {
            let nan =
                |cache: &Vec<f32>| cache[slot * kv_width..][..kv_width].iter().all(|x| x.is_nan());
            assert!(caches.iter().all(nan), "{what}: slot {slot}");
        }
    }

    fn turned(self, run: &Run, weight: usize, heads: &[f32], position: usize) -> Vec<f32> {
        let half = self.rotary / 2;
        let mut out = heads.to_vec();
        for head in out.chunks_mut(self.dim) {
            if self.normed {
                let plain = head.to_vec();
                rms_norm(&plain, &run.weights[weight], EPS, head);
            }
            let angles = |table: &'_ [f32]| table[position * half..][..half].to_vec();
            reference::rotate(head, &angles(&run.cos), &angles(&run.sin), self.style);
        }
        out
    }
}

#[test]
fn the_kernel_equals_the_reference() {
    for style in [RopeStyle::Neox, RopeStyle::Interleaved] {
        for (dim, rotary) in
            [(128, 128), (64, 64), (64, 32), (80, 80), (256, 64), (6, 4), (2, 2), (36, 20)]
        {
            for normed in [false, true] {
                for (n, heads, kv_heads) in [(1, 4, 1), (37, 3, 2), (5, 3, 0)] {
                    let scaled = style == RopeStyle::Interleaved;
                    let case = Case { n, heads, kv_heads, dim, rotary, normed, ..SMALL };
                    let case = Case { style, scaled, ..case };
                    for (kind, tolerance) in KINDS {
                        case.check(kind, tolerance);
                    }
                }
            }
        }
    }
}

const SMALL: Case = Case {
    n: 2,
    heads: 2,
    kv_heads: 1,
    dim: 8,
    rotary: 8,
    style: RopeStyle::Neox,
    normed: false,
    scaled: false,
    spread: false,
};

#[test]
fn a_cache_in_e4m3_gets_codes_and_scales() {
    for (n, kv_heads, dim, rotary) in [(1, 1, 64, 64), (37, 3, 128, 96), (5, 2, 256, 256)] {
        for style in [RopeStyle::Neox, RopeStyle::Interleaved] {
            let case = Case { n, kv_heads, dim, rotary, style, spread: true, ..SMALL };
            case.check_codes();
            Case { normed: true, ..case }.check_codes();
        }
    }
    let run = |case: Case, kinds| case.run_into(&gpu(), kinds, &[0, 1], &[0, 1]).outcome;
    assert!(run(SMALL, [Kind::Bf16, E4M3]).is_err());
    assert!(run(Case { dim: 64, ..SMALL }, [Kind::F32, E4M3]).is_err());
}

#[test]
fn the_last_slot_and_position_are_the_last() {
    let last = [POSITIONS as u32 - 1, SLOTS as u32 - 1];
    SMALL.run(&gpu(), Kind::Bf16, &[0, last[0]], &[0, last[1]]).outcome.unwrap();
    for (positions, slots) in [
        ([0, last[0] + 1], [0, 1]),
        ([0, u32::MAX], [0, 1]),
        ([0, 1], [0, last[1] + 1]),
        ([0, 1], [0, u32::MAX]),
    ] {
        // A fault ends a device for the whole process.
        let emulator = Emulator::new();
        let error =
            SMALL.run(&emulator, Kind::Bf16, &positions, &slots).outcome.unwrap_err().to_string();
        assert!(error.contains("assertion failed"), "{error}");
    }
}

#[test]
fn wrong_shapes_are_refused() {
    let gpu = gpu();
    assert!(SMALL.run(&gpu, Kind::F32, &[0], &[0, 1]).outcome.is_err());
    assert!(SMALL.run(&gpu, Kind::F32, &[0, 1, 2], &[0, 1, 2]).outcome.is_err());
    for case in [Case { rotary: 10, ..SMALL }, Case { rotary: 3, ..SMALL }] {
        assert!(case.run(&gpu, Kind::F32, &[0, 1], &[0, 1]).outcome.is_err(), "{case:?}");
    }
    assert!(Case { n: 0, ..SMALL }.run(&gpu, Kind::F32, &[], &[]).outcome.is_ok());
}

/// Some tokens of latent attention: heads, the values that are not rotated, and those that are.
#[derive(Clone, Copy, Debug)]
struct LatentCase {
    n: usize,
    heads: usize,
    rank: usize,
    rotary: usize,
    style: RopeStyle,
    scaled: bool,
}

impl LatentCase {
    /// Returns the queries and the cache, as they are and as they should be.
    fn run(self, gpu: &Arc<dyn Gpu>, kind: Kind, slots: &[u32]) -> Result<[Vec<f32>; 4]> {
        let Self { n, heads, rank, rotary, style, scaled } = self;
        let width = rank + rotary;
        let rows = |len, seed| rounded(kind, &values(&random(&[n, len], seed)));
        let (plain, turned, latent) =
            (rows(heads * rank, 1), rows(heads * rotary, 2), rows(width, 3));
        let positions: Vec<u32> = (0..n as u32).map(|i| (i * 7 + 49) % POSITIONS as u32).collect();
        let [cos, sin] = [4, 5].map(|seed| values(&random(&[POSITIONS, rotary / 2], seed)));
        let scales = values(&random(&[POSITIONS], 6));
        let [cos_on, sin_on, scales_on] =
            [&cos, &sin, &scales].map(|all| upload(gpu, Kind::F32, all));
        let [plain_on, turned_on, latent_on] =
            [&plain, &turned, &latent].map(|all| upload(gpu, kind, all));
        let [positions_on, slots_on] =
            [&positions[..], slots].map(|v| Buffer::from_slice(gpu, v).unwrap());
        let queries = poisoned_buffer(gpu, kind, n * heads * width);
        let cache = poisoned_buffer(gpu, kind, SLOTS * width);
        gpu.rope_latent(&RopeLatentArgs {
            plain: plain_on.view(),
            rotary: turned_on.view(),
            latent: latent_on.view(),
            heads,
            rank,
            positions: positions_on.view(),
            slots: slots_on.view(),
            table: RopeTable {
                cos: cos_on.view(),
                sin: sin_on.view(),
                rotary_dim: rotary,
                style,
                query_scales: scaled.then(|| scales_on.view()),
            },
            queries: queries.view(),
            cache: cache.view(),
            block_size: 16,
        })?;
        gpu.synchronise()?;
        let (mut want, mut cached) = (Vec::new(), vec![f32::NAN; SLOTS * width]);
        let vector = |plain: &[f32], turned: &[f32], position: u32, scale: f32| -> Vec<f32> {
            let mut turned = turned.to_vec();
            let angles = position as usize * rotary / 2..(position as usize + 1) * rotary / 2;
            reference::rotate(&mut turned, &cos[angles.clone()], &sin[angles], style);
            plain.iter().chain(&turned).map(|x| x * scale).collect()
        };
        for (i, (position, slot)) in positions.iter().zip(slots).enumerate() {
            let scale = if scaled { scales[*position as usize] } else { 1.0 };
            for head in i * heads..(i + 1) * heads {
                let (plain, turned) =
                    (&plain[head * rank..][..rank], &turned[head * rotary..][..rotary]);
                want.extend(vector(plain, turned, *position, scale));
            }
            let (plain, turned) = latent[i * width..][..width].split_at(rank);
            cached[*slot as usize * width..][..width]
                .copy_from_slice(&vector(plain, turned, *position, 1.0));
        }
        Ok([downloaded(&queries), want, downloaded(&cache), cached])
    }
}

#[test]
fn latent_vectors_and_their_queries_equal_the_reference() {
    let slots: Vec<u32> = (0..37).map(|i| (i * 11 + 47) % SLOTS as u32).collect();
    for (style, scaled) in [(RopeStyle::Neox, false), (RopeStyle::Interleaved, true)] {
        for (n, heads, rank, rotary) in [(37, 3, 16, 4), (5, 4, 512, 64), (4, 5, 19, 6)] {
            let case = LatentCase { n, heads, rank, rotary, style, scaled };
            for (kind, tolerance) in KINDS {
                let [queries, want, cache, cached] = case.run(&gpu(), kind, &slots[..n]).unwrap();
                let what = format!("{kind:?} {case:?}");
                assert_close(&queries, &want, tolerance, &what);
                for (got, want) in cache.iter().zip(&cached) {
                    let unwritten = got.is_nan() && want.is_nan();
                    assert!(unwritten || (got - want).abs() <= tolerance * 2.0, "{what}");
                }
            }
        }
    }
    let small =
        LatentCase { n: 1, heads: 2, rank: 8, rotary: 4, style: RopeStyle::Neox, scaled: false };
    // A fault ends a device for the whole process.
    let emulator: Arc<dyn Gpu> = Emulator::new();
    let error = small.run(&emulator, Kind::Bf16, &[SLOTS as u32]).unwrap_err().to_string();
    assert!(error.contains("slot < params.max_slots"), "{error}");
}
