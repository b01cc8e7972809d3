//! The tiled path against the reference, its invariances, and the errors of wrong calls.

use super::query_tile::{CpuArgs, QueryTile};
use super::*;
use crate::Error;
use crate::element::Element;
use crate::simd::Isa;
use crate::testing::{assert_close, compute, poisoned, random, values};
use candle_core::{D, DType, Device, Tensor, WithDType};
use half::f16;

/// A ragged batch over a paged cache whose unused slots are NaN.
#[derive(Clone)]
pub(super) struct Case {
    pub heads: usize,
    pub kv_heads: usize,
    pub dim: usize,
    pub window: Option<usize>,
    pub softcap: Option<f32>,
    /// If set, values are so many first dimensions of the keys.
    pub value_prefix: Option<usize>,
    /// `[heads]`
    pub sinks: Option<Tensor>,
    /// The element type of the CPU's caches.
    pub dtype: DType,
    /// Per sequence: queries and tokens.
    pub spans: Vec<(usize, usize)>,
    pub q: Tensor,
    /// Per sequence `[tokens, kv_heads, dim]`.
    pub keys: Vec<Tensor>,
    pub vals: Vec<Tensor>,
}

const SCALE: f32 = 0.3;

impl Case {
    pub fn new(heads: usize, kv_heads: usize, dim: usize, spans: &[(usize, usize)]) -> Self {
        let n = spans.iter().map(|s| s.0).sum();
        let cached = |seed| {
            move |(i, s): (usize, &(usize, usize))| random(&[s.1, kv_heads, dim], seed + i as u64)
        };
        Self {
            heads,
            kv_heads,
            dim,
            window: None,
            softcap: None,
            value_prefix: None,
            sinks: None,
            dtype: DType::F32,
            spans: spans.to_vec(),
            q: (random(&[n, heads * dim + 5], 1) * 3.0).unwrap(),
            keys: spans.iter().enumerate().map(cached(100)).collect(),
            vals: spans.iter().enumerate().map(cached(200)).collect(),
        }
    }

    pub fn windowed(mut self, window: usize) -> Self {
        self.window = Some(window);
        self
    }

    pub fn capped(mut self, cap: f32) -> Self {
        self.softcap = Some(cap);
        self
    }

    pub fn with_sinks(mut self) -> Self {
        self.sinks = Some((random(&[self.heads], 7) * 9.0).unwrap());
        self
    }

    pub fn with_values_in_keys(mut self, width: usize) -> Self {
        self.value_prefix = Some(width);
        self.vals = self.keys.clone();
        self
    }

    pub fn value_dim(&self) -> usize {
        self.value_prefix.unwrap_or(self.dim)
    }

    /// Rounds keys and values to those that f16 holds.
    fn halved(mut self) -> Self {
        self.dtype = DType::F16;
        for tensor in self.keys.iter_mut().chain(&mut self.vals) {
            *tensor = tensor.to_dtype(DType::F16).unwrap().to_dtype(DType::F32).unwrap();
        }
        self
    }

    /// The sequences' blocks, in a scattered order.
    pub fn tables(&self, block_size: usize) -> (Vec<Vec<u32>>, usize) {
        let needed: usize = self.spans.iter().map(|s| s.1.div_ceil(block_size)).sum();
        let blocks = (needed + 3).next_multiple_of(2) + 1;
        let mut next = (0..blocks).map(|i| (i * 2 % blocks) as u32);
        let table = |s: &(usize, usize)| next.by_ref().take(s.1.div_ceil(block_size)).collect();
        (self.spans.iter().map(table).collect(), blocks)
    }

    /// The layout of devices: `[blocks, block_size, kv_heads, dim]`.
    pub fn cache_by_token(
        &self,
        rows: &[Tensor],
        tables: &[Vec<u32>],
        blocks: usize,
        block_size: usize,
    ) -> Tensor {
        let width = self.kv_heads * self.dim;
        let mut data = vec![f32::NAN; blocks * block_size * width];
        for (rows, table) in rows.iter().zip(tables) {
            for (i, token) in values(rows).chunks(width).enumerate() {
                let slot = table[i / block_size] as usize * block_size + i % block_size;
                data[slot * width..(slot + 1) * width].copy_from_slice(token);
            }
        }
        Tensor::from_vec(data, (blocks, block_size, self.kv_heads, self.dim), &Device::Cpu).unwrap()
    }

    /// `[blocks, kv_heads, dim, block_size]` of keys, `[blocks, kv_heads, block_size, dim]` of
    /// values.
    fn cache(&self, keys: bool, tables: &[Vec<u32>], blocks: usize, size: usize) -> Tensor {
        let (heads, dim) = (self.kv_heads, self.dim);
        let mut data = vec![f32::NAN; blocks * size * heads * dim];
        for (rows, table) in if keys { &self.keys } else { &self.vals }.iter().zip(tables) {
            for (i, value) in values(rows).into_iter().enumerate() {
                let (token, head, d) = (i / (heads * dim), i / dim % heads, i % dim);
                let start = (table[token / size] as usize * heads + head) * size * dim;
                data[start + if keys { d * size + token % size } else { token % size * dim + d }] =
                    value;
            }
        }
        let shape = if keys { (blocks, heads, dim, size) } else { (blocks, heads, size, dim) };
        Tensor::from_vec(data, shape, &Device::Cpu).unwrap().to_dtype(self.dtype).unwrap()
    }

    /// The op over queries `part` of every sequence (all sequences must have them).
    fn run_part(&self, block_size: usize, part: std::ops::Range<usize>) -> Vec<f32> {
        let (tables, blocks) = self.tables(block_size);
        let rows: Vec<Tensor> =
            self.offsets().map(|o| self.q.narrow(0, o + part.start, part.len()).unwrap()).collect();
        let q = Tensor::cat(&rows, 0).unwrap();
        let cu: Vec<u32> = (0..=self.spans.len()).map(|i| (i * part.len()) as u32).collect();
        let lens: Vec<u32> = self.spans.iter().map(|s| (s.1 - s.0 + part.end) as u32).collect();
        self.call(&q, &tables, (blocks, block_size), &cu, &lens).unwrap()
    }

    fn run(&self, block_size: usize) -> Vec<f32> {
        let (mut tables, blocks) = self.tables(block_size);
        self.give_back_unseen(&mut tables, block_size);
        let cu: Vec<u32> = self.offsets().chain([self.q.dims()[0]]).map(|o| o as u32).collect();
        let lens: Vec<u32> = self.spans.iter().map(|s| s.1 as u32).collect();
        self.call(&self.q, &tables, (blocks, block_size), &cu, &lens).unwrap()
    }

    /// Removes the blocks behind the window of each sequence's first query from its table.
    fn give_back_unseen(&self, tables: &mut [Vec<u32>], block_size: usize) {
        for (table, (queries, tokens)) in tables.iter_mut().zip(&self.spans) {
            let first = tokens - queries + 1;
            let unseen = self.window.map_or(0, |window| first.saturating_sub(window));
            table[..unseen / block_size].fill(u32::MAX);
        }
    }

    pub fn shape(&self, q_stride: usize, block_size: usize) -> AttentionShape {
        AttentionShape {
            q_stride,
            heads: self.heads,
            kv_heads: self.kv_heads,
            head_dim: self.dim,
            value_prefix: self.value_prefix,
            block_size,
            scale: SCALE,
            window: self.window,
            softcap: self.softcap,
        }
    }

    pub fn offsets(&self) -> impl Iterator<Item = usize> {
        self.spans.iter().scan(0, |sum, s| Some(std::mem::replace(sum, *sum + s.0)))
    }

    fn call(
        &self,
        q: &Tensor,
        tables: &[Vec<u32>],
        (blocks, block_size): (usize, usize),
        cu: &[u32],
        lens: &[u32],
    ) -> Result<Vec<f32>> {
        let real = |keys| self.cache(keys, &self.tables(block_size).0, blocks, block_size);
        let out = poisoned(&[q.dims()[0], self.heads * self.value_dim()]);
        let (k, v) = (real(true), real(false));
        let v = if self.value_prefix.is_some() { &k } else { &v };
        let sequences = HostSequences { cu_seqlens_q: cu, seq_lens: lens, block_tables: tables };
        compute().attend(&AttentionArgs {
            q: q.into(),
            k_cache: (&k).into(),
            v_cache: v.into(),
            sinks: self.sinks.as_ref().map(Into::into),
            shape: self.shape(q.dims()[1], block_size),
            sequences,
            out: (&out).into(),
        })?;
        Ok(values(&out))
    }

    pub fn want(&self) -> Vec<f32> {
        let (mut out, q, stride) = (Vec::new(), values(&self.q), self.q.dims()[1]);
        let sinks = self.sinks.as_ref().map(values);
        for (i, (queries, tokens)) in self.spans.iter().enumerate() {
            let (keys, vals) = (values(&self.keys[i]), values(&self.vals[i]));
            let offset = self.offsets().nth(i).unwrap();
            for row in 0..*queries {
                let position = tokens - queries + row;
                let first = self.window.map_or(0, |w| (position + 1).saturating_sub(w));
                for head in 0..self.heads {
                    let kv_head = head / (self.heads / self.kv_heads);
                    let at = |data: &'_ [f32], t: usize| {
                        let start = (t * self.kv_heads + kv_head) * self.dim;
                        data[start..start + self.dim].to_vec()
                    };
                    let seen: Vec<_> =
                        (first..=position).map(|t| (at(&keys, t), at(&vals, t))).collect();
                    let start = (offset + row) * stride + head * self.dim;
                    let query = reference::Query {
                        q: &q[start..start + self.dim],
                        scale: SCALE,
                        softcap: self.softcap,
                        sink: sinks.as_ref().map(|sinks| sinks[head]),
                    };
                    let keys: Vec<&[f32]> = seen.iter().map(|s| &s.0[..]).collect();
                    let vals: Vec<&[f32]> = seen.iter().map(|s| &s.1[..]).collect();
                    out.extend(&reference::attend(&query, &keys, &vals)[..self.value_dim()]);
                }
            }
        }
        out
    }
}

fn cases() -> Vec<Case> {
    vec![
        Case::new(1, 1, 16, &[(1, 1)]),
        Case::new(9, 3, 64, &[(1, 200), (64, 64), (33, 130), (1, 1), (2, 65)]),
        Case::new(4, 4, 80, &[(70, 70), (1, 129)]),
        Case::new(8, 1, 17, &[(19, 99)]),
        Case::new(6, 2, 128, &[(5, 300)]),
        Case::new(4, 2, 64, &[(99, 99), (1, 250)]).windowed(33),
        Case::new(4, 2, 64, &[(9, 140)]).windowed(1),
        Case::new(2, 1, 256, &[(20, 90)]).capped(5.0).windowed(70),
        Case::new(9, 3, 64, &[(1, 700), (30, 600)]),
        Case::new(9, 3, 64, &[(1, 700), (30, 600)]).windowed(280),
        Case::new(9, 3, 64, &[(1, 257), (64, 64)]).halved(),
        Case::new(8, 1, 17, &[(19, 99), (1, 300)]).halved(),
        Case::new(9, 3, 64, &[(1, 700), (30, 600), (1, 1)]).with_sinks(),
        Case::new(8, 1, 17, &[(19, 99), (1, 300)]).windowed(33).halved().with_sinks(),
        Case::new(16, 1, 72, &[(19, 99), (1, 700), (33, 33)]).with_values_in_keys(64),
        Case::new(40, 1, 21, &[(5, 70), (1, 300)]).windowed(50).halved().with_values_in_keys(17),
    ]
}

#[test]
fn equals_the_reference() {
    for case in cases() {
        let want = case.want();
        for block_size in [16, 32, 5] {
            assert_close(
                &case.run(block_size),
                &want,
                2e-5,
                &format!("{:?} dim {}", case.spans, case.dim),
            );
        }
    }
}

#[test]
fn every_instruction_set_equals_the_reference() {
    for case in cases() {
        for isa in Isa::available() {
            match case.dtype {
                DType::F16 => check_isa::<f16>(isa, &case),
                _ => check_isa::<f32>(isa, &case),
            }
        }
    }
}

fn check_isa<E: Element + WithDType>(isa: Isa, case: &Case) {
    let (tables, blocks) = case.tables(16);
    let cache =
        |keys| case.cache(keys, &tables, blocks, 16).flatten_all().unwrap().to_vec1::<E>().unwrap();
    let sinks = case.sinks.as_ref().map(values);
    let problem = CpuArgs {
        q: &values(&case.q),
        k: &cache(true),
        v: &cache(false),
        sinks: sinks.as_deref(),
        shape: case.shape(case.q.dims()[1], 16),
    };
    let tile = |(i, (offset, (queries, tokens))): (usize, (usize, &(usize, usize)))| QueryTile {
        rows: offset..offset + queries,
        position: tokens - queries,
        blocks: &tables[i],
    };
    let tiles: Vec<QueryTile> = case.offsets().zip(&case.spans).enumerate().map(tile).collect();
    let want = case.want();
    let mut out = vec![f32::NAN; want.len()];
    cpu::run(isa, &compute(), &problem, &tiles, &mut out);
    assert_close(&out, &want, 2e-5, &format!("{isa:?} {:?} dim {}", case.spans, case.dim));
}

#[test]
fn equals_composed_candle_ops() {
    let (heads, dim, n) = (3, 64, 70);
    let case = Case::new(heads, heads, dim, &[(n, n)]);
    let split = |t: &Tensor| {
        t.reshape((n, heads, dim)).unwrap().transpose(0, 1).unwrap().contiguous().unwrap()
    };
    let q = split(&case.q.narrow(1, 0, heads * dim).unwrap().contiguous().unwrap());
    let scores =
        (q.matmul(&split(&case.keys[0]).t().unwrap()).unwrap() * f64::from(SCALE)).unwrap();
    let unseen: Vec<f32> =
        (0..n * n).map(|i| if i % n > i / n { f32::NEG_INFINITY } else { 0.0 }).collect();
    let scores =
        scores.broadcast_add(&Tensor::from_vec(unseen, (n, n), &Device::Cpu).unwrap()).unwrap();
    let weights =
        scores.broadcast_sub(&scores.max_keepdim(D::Minus1).unwrap()).unwrap().exp().unwrap();
    let weights = weights.broadcast_div(&weights.sum_keepdim(D::Minus1).unwrap()).unwrap();
    let want = weights
        .matmul(&split(&case.vals[0]))
        .unwrap()
        .transpose(0, 1)
        .unwrap()
        .contiguous()
        .unwrap();
    assert_eq!(want.dtype(), DType::F32);
    assert_close(&case.run(16), &values(&want), 2e-5, "candle");
}

#[test]
fn bits_do_not_depend_on_the_batch() {
    for window in [None, Some(50), Some(300)] {
        let mut together =
            Case::new(9, 3, 64, &[(1, 200), (64, 64), (33, 130), (2, 65), (1, 900)]).halved();
        together = together.with_sinks();
        together.window = window;
        let all = together.run(16);
        let width = together.heads * together.dim;
        for (i, offset) in together.offsets().enumerate() {
            let queries = together.spans[i].0;
            let alone = Case {
                spans: vec![together.spans[i]],
                q: together.q.narrow(0, offset, queries).unwrap(),
                keys: vec![together.keys[i].clone()],
                vals: vec![together.vals[i].clone()],
                dtype: together.dtype,
                sinks: together.sinks.clone(),
                ..Case::new(9, 3, 64, &[])
            };
            let alone = Case { window, ..alone };
            assert_eq!(
                alone.run(16),
                all[offset * width..(offset + queries) * width],
                "sequence {i} {window:?}"
            );
        }
    }
}

#[test]
fn bits_depend_neither_on_chunks_nor_on_the_block_size() {
    const LENGTH: usize = 540;
    let plain = || Case::new(6, 2, 64, &[(LENGTH, LENGTH)]).with_sinks();
    let latent = || Case::new(5, 1, 72, &[(LENGTH, LENGTH)]).halved().with_values_in_keys(60);
    for case in
        [plain(), plain().windowed(40), plain().windowed(257), latent(), latent().windowed(257)]
    {
        let window = case.window;
        let whole = case.run(16);
        for size in [48, 7] {
            assert_eq!(case.run(size), whole, "block size {size} {window:?}");
        }
        for chunk in [1, 7, 16, 64] {
            let parts: Vec<f32> = (0..LENGTH)
                .step_by(chunk)
                .flat_map(|i| case.run_part(16, i..LENGTH.min(i + chunk)))
                .collect();
            assert_eq!(parts, whole, "chunks of {chunk} {window:?}");
        }
    }
}

/// Block tables, `cu_seqlens_q` and `seq_lens` of a call.
type Call<'a> = (Vec<Vec<u32>>, &'a [u32], &'a [u32]);

#[test]
fn bad_indices_are_refused() {
    let case = Case::new(2, 1, 16, &[(2, 20), (1, 5)]);
    let (tables, blocks) = case.tables(16);
    let good: (&[u32], &[u32]) = (&[0, 2, 3], &[20, 5]);
    assert!(case.call(&case.q, &tables, (blocks, 16), good.0, good.1).is_ok());
    let with = |i: usize, table: Vec<u32>| {
        let mut tables = tables.clone();
        tables[i] = table;
        tables
    };
    let bad: [Call; 8] = [
        (with(0, vec![0]), good.0, good.1),
        (with(0, vec![0, blocks as u32]), good.0, good.1),
        (with(1, vec![u32::MAX]), good.0, good.1),
        (tables.clone(), &[0, 2, 4], good.1),
        (tables.clone(), &[0, 3, 2], good.1),
        (tables.clone(), &[0, 2], good.1),
        (tables.clone(), good.0, &[1, 5]),
        (tables.clone(), good.0, &[20]),
    ];
    for (i, (tables, cu, lens)) in bad.iter().enumerate() {
        let result = case.call(&case.q, tables, (blocks, 16), cu, lens);
        assert!(matches!(result, Err(Error::Shape { .. })), "case {i}: {result:?}");
    }
    let wide = Case::new(2, 1, 16, &[(2, 20), (1, 5)]).with_values_in_keys(17);
    let result = wide.call(&wide.q, &tables, (blocks, 16), good.0, good.1);
    assert!(matches!(result, Err(Error::Shape { .. })), "{result:?}");
}
