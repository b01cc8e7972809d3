//! Rotation, per-head norm and the cache write against the reference, and the errors of wrong
//! calls.

use super::*;
use crate::Error;
use crate::testing::{assert_close, compute, poisoned, random, values};
use candle_core::{DType, Tensor};
use half::f16;

const HEADS: usize = 3;
const KV_HEADS: usize = 2;
const BLOCKS: usize = 3;
const BLOCK_SIZE: usize = 16;

struct Case {
    dim: usize,
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    style: RopeStyle,
    /// Weights of the norms of Q and K.
    norm: Option<[Tensor; 2]>,
    /// Factors of queries, in cases with interleaved pairs.
    scales: Option<Tensor>,
    k: Tensor,
    v: Tensor,
}

impl Case {
    fn new(n: usize, dim: usize, rotary: usize, style: RopeStyle, normed: bool) -> Self {
        Self {
            dim,
            qkv: random(&[n, (HEADS + 2 * KV_HEADS) * dim], 1),
            cos: random(&[50, rotary / 2], 2),
            sin: random(&[50, rotary / 2], 3),
            style,
            norm: normed.then(|| [random(&[dim], 4), random(&[dim], 5)]),
            scales: (style == RopeStyle::Interleaved).then(|| random(&[50], 6)),
            k: poisoned(&[BLOCKS, KV_HEADS, dim, BLOCK_SIZE]),
            v: poisoned(&[BLOCKS, KV_HEADS, BLOCK_SIZE, dim]),
        }
    }

    fn halved(mut self) -> Self {
        for cache in [&mut self.k, &mut self.v] {
            *cache = cache.to_dtype(DType::F16).unwrap();
        }
        self
    }

    /// Keys and values of all heads in a slot.
    fn slot(&self, slot: u32) -> [Vec<f32>; 2] {
        let (block, offset) = (slot as usize / BLOCK_SIZE, slot as usize % BLOCK_SIZE);
        [self.k.transpose(2, 3).unwrap(), self.v.clone()].map(|cache| {
            let token = cache.narrow(0, block, 1).unwrap().narrow(2, offset, 1).unwrap();
            values(&token.to_dtype(DType::F32).unwrap())
        })
    }

    fn run(&self, positions: &[u32], slots: &[u32]) -> Result<()> {
        self.run_with(KV_HEADS, positions, slots)
    }

    fn run_with(&self, kv_heads: usize, positions: &[u32], slots: &[u32]) -> Result<()> {
        let (cos, sin) = ((&self.cos).into(), (&self.sin).into());
        let rotary_dim = 2 * self.cos.dims()[1];
        compute().rope_kv_write(&RopeArgs {
            qkv: (&self.qkv).into(),
            heads: HEADS,
            kv_heads,
            head_dim: self.dim,
            positions,
            slots,
            table: RopeTable {
                cos,
                sin,
                rotary_dim,
                style: self.style,
                query_scales: self.scales.as_ref().map(Into::into),
            },
            qk_norm: self.norm.as_ref().map(|[q, k]| QkNorm {
                q: q.into(),
                k: k.into(),
                eps: 1e-6,
            }),
            k_cache: (&self.k).into(),
            v_cache: (&self.v).into(),
            block_size: BLOCK_SIZE,
        })
    }

    /// Computes row `i` of Q, K (both normed and rotated) and V by the reference.
    fn want(&self, i: usize, position: usize) -> [Vec<f32>; 3] {
        let row = values(&self.qkv.narrow(0, i, 1).unwrap());
        let (q, kv) = row.split_at(HEADS * self.dim);
        let (k, v) = kv.split_at(KV_HEADS * self.dim);
        let norm = self.norm.as_ref();
        let scale = self.scales.as_ref().map_or(1.0, |scales| values(scales)[position]);
        let q = self.turned(q, position, norm.map(|norm| &norm[0]));
        [
            q.into_iter().map(|x| x * scale).collect(),
            self.turned(k, position, norm.map(|norm| &norm[1])),
            v.to_vec(),
        ]
    }

    fn turned(&self, heads: &[f32], position: usize, norm: Option<&Tensor>) -> Vec<f32> {
        let angle = |t: &Tensor| values(&t.narrow(0, position, 1).unwrap());
        let mut out = heads.to_vec();
        for head in out.chunks_mut(self.dim) {
            if let Some(weight) = norm {
                let x = head.to_vec();
                crate::norm::reference::rms_norm(&x, &values(weight), 1e-6, head);
            }
            reference::rotate(head, &angle(&self.cos), &angle(&self.sin), self.style);
        }
        out
    }
}

#[test]
fn equals_the_reference() {
    for style in [RopeStyle::Neox, RopeStyle::Interleaved] {
        for (dim, rotary) in [(64, 64), (64, 32), (80, 80), (6, 4), (2, 2)] {
            for normed in [false, true] {
                let positions: Vec<u32> = (0..37).map(|i| (i * 7) % 50).collect();
                let slots: Vec<u32> = (0..37).map(|i| (i * 11) % 48).collect();
                let case = Case::new(37, dim, rotary, style, normed);
                let want: Vec<_> =
                    positions.iter().enumerate().map(|(i, p)| case.want(i, *p as usize)).collect();
                case.run(&positions, &slots).unwrap();
                let what = format!("{style:?} {dim} {rotary} {normed}");
                let half = Case::new(37, dim, rotary, style, normed).halved();
                half.run(&positions, &slots).unwrap();
                for (i, [q, k, v]) in want.iter().enumerate() {
                    let row = values(&case.qkv.narrow(0, i, 1).unwrap());
                    assert_close(&row[..HEADS * dim], q, 1e-5, &what);
                    let [keys, vals] = case.slot(slots[i]);
                    assert_close(&keys, k, 1e-5, &what);
                    assert_eq!(&vals, v, "{what}");
                    let round = |x: &f32| f16::from_f32(*x).to_f32();
                    let rounded =
                        [keys, vals].map(|exact| exact.iter().map(round).collect::<Vec<_>>());
                    assert_eq!(half.slot(slots[i]), rounded, "{what} in f16");
                }
            }
        }
    }
}

/// A layer that reads what an earlier one wrote has queries alone.
#[test]
fn queries_alone_leave_the_caches_as_they_are() {
    let whole = Case::new(2, 64, 32, RopeStyle::Neox, true);
    let want = [whole.want(0, 3)[0].clone(), whole.want(1, 4)[0].clone()].concat();
    let q = whole.qkv.narrow(1, 0, HEADS * 64).unwrap().contiguous().unwrap();
    let alone = Case { qkv: q, ..whole };
    alone.run_with(0, &[3, 4], &[5, 5]).unwrap();
    assert_close(&values(&alone.qkv), &want, 1e-5, "queries");
    assert!([&alone.k, &alone.v].iter().all(|cache| values(cache).iter().all(|x| x.is_nan())));
    assert!(alone.run_with(0, &[3, 50], &[0, 1]).is_err());
}

#[test]
fn values_beyond_f16_become_its_largest() {
    let case = Case::new(1, 64, 64, RopeStyle::Neox, false);
    let huge = Case { qkv: (&case.qkv * 1e6).unwrap(), ..case }.halved();
    let exact = [1, 2].map(|part| huge.want(0, 3)[part].clone());
    huge.run(&[3], &[9]).unwrap();
    let kept = exact.map(|part| {
        part.iter().map(|x| f16::from_f32(x.clamp(-65504.0, 65504.0)).to_f32()).collect()
    });
    assert!(kept.iter().all(|part: &Vec<f32>| part.iter().any(|x| x.abs() == 65504.0)));
    assert_eq!(huge.slot(9), kept);
    let lost = Case::new(1, 64, 64, RopeStyle::Neox, false).halved();
    let nothing = Case { qkv: (&lost.qkv * f64::NAN).unwrap(), ..lost };
    nothing.run(&[3], &[9]).unwrap();
    assert!(
        nothing.slot(9).iter().flatten().all(|x| x.is_nan()),
        "what is no number does not become one"
    );
}

#[test]
fn slots_not_named_are_not_touched() {
    let case = Case::new(1, 64, 64, RopeStyle::Neox, false);
    case.run(&[3], &[9]).unwrap();
    let written = values(&case.k).iter().filter(|x| !x.is_nan()).count();
    assert_eq!(written, KV_HEADS * 64);
}

#[test]
fn bad_indices_are_refused_before_anything_is_written() {
    for (positions, slots) in [
        ([0, 50], [0, 1]),
        ([0, 1], [0, 48]),
        ([0, 1], [5, 5]),
        ([0, u32::MAX], [0, 1]),
        ([0, 1], [0, u32::MAX]),
    ] {
        let case = Case::new(2, 64, 64, RopeStyle::Neox, false);
        assert!(matches!(case.run(&positions, &slots), Err(Error::Shape { .. })));
        assert!(values(&case.k).iter().all(|x| x.is_nan()));
        assert_eq!(values(&case.qkv), values(&random(&[2, (HEADS + 2 * KV_HEADS) * 64], 1)));
    }
}

/// The operands of latent attention, whose vectors have `RANK` values that are not rotated.
struct LatentCase {
    plain: Tensor,
    rotary: Tensor,
    latent: Tensor,
    scales: Option<Tensor>,
    queries: Tensor,
    cache: Tensor,
}

const RANK: usize = 19;
const ROTARY: usize = 6;

impl LatentCase {
    fn new(n: usize, scaled: bool) -> Self {
        Self {
            plain: random(&[n, HEADS, RANK], 1),
            rotary: random(&[n, HEADS, ROTARY], 2),
            latent: random(&[n, RANK + ROTARY], 3),
            scales: scaled.then(|| random(&[50], 6)),
            queries: poisoned(&[n, HEADS, RANK + ROTARY]),
            cache: poisoned(&[BLOCKS, RANK + ROTARY, BLOCK_SIZE]),
        }
    }

    fn run(&self, style: RopeStyle, positions: &[u32], slots: &[u32]) -> Result<()> {
        let [cos, sin] = angles();
        compute().rope_latent(&RopeLatentArgs {
            plain: (&self.plain).into(),
            rotary: (&self.rotary).into(),
            latent: (&self.latent).into(),
            heads: HEADS,
            rank: RANK,
            positions,
            slots,
            table: RopeTable {
                cos: (&cos).into(),
                sin: (&sin).into(),
                rotary_dim: ROTARY,
                style,
                query_scales: self.scales.as_ref().map(Into::into),
            },
            queries: (&self.queries).into(),
            cache: (&self.cache).into(),
            block_size: BLOCK_SIZE,
        })
    }
}

fn angles() -> [Tensor; 2] {
    [4, 5].map(|seed| random(&[50, ROTARY / 2], seed))
}

fn row(of: &Tensor, i: usize) -> Vec<f32> {
    values(&of.narrow(0, i, 1).unwrap())
}

#[test]
fn latent_vectors_and_their_queries_equal_the_reference() {
    let positions: Vec<u32> = (0..37).map(|i| (i * 7) % 50).collect();
    let slots: Vec<u32> = (0..37).map(|i| (i * 11) % 48).collect();
    for (style, scaled) in [(RopeStyle::Neox, false), (RopeStyle::Interleaved, true)] {
        let case = LatentCase::new(37, scaled);
        case.run(style, &positions, &slots).unwrap();
        let half = LatentCase::new(37, scaled);
        let half = LatentCase { cache: half.cache.to_dtype(DType::F16).unwrap(), ..half };
        half.run(style, &positions, &slots).unwrap();
        for (i, (position, slot)) in positions.iter().zip(&slots).enumerate() {
            let [cos, sin] = angles().map(|angles| row(&angles, *position as usize));
            let scale = case.scales.as_ref().map_or(1.0, |all| values(all)[*position as usize]);
            let (plain, rotary) = (row(&case.plain, i), row(&case.rotary, i));
            let mut want = Vec::new();
            for head in 0..HEADS {
                let mut turned = rotary[head * ROTARY..(head + 1) * ROTARY].to_vec();
                reference::rotate(&mut turned, &cos, &sin, style);
                let whole = plain[head * RANK..(head + 1) * RANK].iter().chain(&turned);
                want.extend(whole.map(|x| x * scale));
            }
            assert_close(&row(&case.queries, i), &want, 1e-6, "queries");
            let mut want = row(&case.latent, i);
            reference::rotate(&mut want[RANK..], &cos, &sin, style);
            let kept = |cache: &Tensor| {
                let (block, offset) = (*slot as usize / BLOCK_SIZE, *slot as usize % BLOCK_SIZE);
                let token = cache.narrow(0, block, 1).unwrap().narrow(2, offset, 1).unwrap();
                values(&token.to_dtype(DType::F32).unwrap())
            };
            assert_close(&kept(&case.cache), &want, 1e-6, "cache");
            let rounded: Vec<f32> =
                kept(&case.cache).iter().map(|x| f16::from_f32(*x).to_f32()).collect();
            assert_eq!(kept(&half.cache), rounded, "in f16");
        }
    }
}

#[test]
fn bad_indices_of_latent_vectors_are_refused_before_anything_is_written() {
    for (positions, slots) in [([0, 50], [0, 1]), ([0, 1], [0, 48]), ([0, 1], [5, 5])] {
        let case = LatentCase::new(2, false);
        let result = case.run(RopeStyle::Neox, &positions, &slots);
        assert!(matches!(result, Err(Error::Shape { .. })));
        assert!(values(&case.cache).iter().chain(&values(&case.queries)).all(|x| x.is_nan()));
    }
    let short = LatentCase { scales: Some(random(&[49], 6)), ..LatentCase::new(1, false) };
    assert!(matches!(short.run(RopeStyle::Neox, &[0], &[0]), Err(Error::Shape { .. })));
}
