//! The sampler against chosen distributions (chi-square, fixed seeds) and against slow, obvious
//! versions of itself.

use super::*;
use crate::sampling::params::TokenMask;
use crate::sampling::{gumbel_noise, philox4x32};
use std::sync::Arc;

const DRAWS: u64 = 20_000;

/// Token i is twice as likely as token i + 1, except the last two: 8 4 2 1 1 sixteenths.
fn logits() -> Vec<f32> {
    [8.0f32, 4.0, 2.0, 1.0, 1.0].map(f32::ln).to_vec()
}

fn row(params: SamplingParams, prompt: &[u32], output: &[u32], banned: &[u32]) -> RowSampling {
    RowSampling {
        params: Arc::new(params),
        tokens: Arc::new([prompt, output].concat()),
        pending: None,
        prompt_len: prompt.len(),
        banned: banned.into(),
        grammar: None,
    }
}

/// The 99.9 % quantile of chi-square for 1 to 4 degrees of freedom.
const CRITICAL: [f64; 5] = [0.0, 10.83, 13.82, 16.27, 18.47];

/// Checks that counts follow `weights`; a token without weight must never be drawn.
fn check_counts(counts: &[u64], weights: &[f64], what: &str) {
    let draws = counts.iter().sum::<u64>() as f64;
    let total: f64 = weights.iter().sum();
    let mut statistic = 0.0;
    for (&count, weight) in counts.iter().zip(weights) {
        let expect = draws * weight / total;
        if expect == 0.0 {
            assert_eq!(count, 0, "{what}: an excluded token came: {counts:?}");
        } else {
            statistic += (count as f64 - expect).powi(2) / expect;
        }
    }
    let freedom = weights.iter().filter(|&&weight| weight > 0.0).count() - 1;
    assert!(statistic <= CRITICAL[freedom], "{what}: {statistic} for {counts:?}");
}

fn check(what: &str, row: &RowSampling, weights: [f64; 5]) {
    let mut sampler = Sampler::default();
    let mut counts = [0; 5];
    for seed in 0..DRAWS {
        let mut row = row.clone();
        Arc::make_mut(&mut row.params).seed = seed;
        let sampled = sampler.sample(&logits(), &row).unwrap();
        counts[sampled.token as usize] += 1;
    }
    check_counts(&counts, &weights, what);
}

#[test]
fn every_parameter_shapes_the_distribution_as_defined() {
    let plain = SamplingParams::default;
    let with = |change: fn(&mut SamplingParams)| {
        let mut params = plain();
        change(&mut params);
        params
    };
    let only = |change| row(with(change), &[0], &[], &[]);
    let ln2 = std::f32::consts::LN_2;
    check("plain", &row(plain(), &[0], &[], &[]), [8.0, 4.0, 2.0, 1.0, 1.0]);
    check("temperature 0.5", &only(|p| p.temperature = 0.5), [64.0, 16.0, 4.0, 1.0, 1.0]);
    check(
        "temperature 2",
        &only(|p| p.temperature = 2.0),
        [8f64.sqrt(), 2.0, 2f64.sqrt(), 1.0, 1.0],
    );
    check("greedy", &only(|p| p.temperature = 0.0), [1.0, 0.0, 0.0, 0.0, 0.0]);
    check("top-k 2", &only(|p| p.top_k = 2), [8.0, 4.0, 0.0, 0.0, 0.0]);
    check("top-k 4 cuts a tie by id", &only(|p| p.top_k = 4), [8.0, 4.0, 2.0, 1.0, 0.0]);
    check("top-k beyond the vocabulary", &only(|p| p.top_k = 99), [8.0, 4.0, 2.0, 1.0, 1.0]);
    check("top-p 0.7", &only(|p| p.top_p = 0.7), [8.0, 4.0, 0.0, 0.0, 0.0]);
    check("top-p 0.8", &only(|p| p.top_p = 0.8), [8.0, 4.0, 2.0, 0.0, 0.0]);
    check("top-p 0", &only(|p| p.top_p = 0.0), [1.0, 0.0, 0.0, 0.0, 0.0]);
    check("min-p 0.2", &only(|p| p.min_p = 0.2), [8.0, 4.0, 2.0, 0.0, 0.0]);
    check("min-p 1", &only(|p| p.min_p = 1.0), [1.0, 0.0, 0.0, 0.0, 0.0]);
    let both = |p: &mut SamplingParams| (p.top_k, p.top_p) = (3, 0.85);
    check("top-p counts what top-k left", &only(both), [8.0, 4.0, 0.0, 0.0, 0.0]);
    let biased = SamplingParams { logit_bias: [(3, ln2), (0, -ln2)].into(), ..plain() };
    check("bias", &row(biased, &[0], &[], &[]), [4.0, 4.0, 2.0, 2.0, 1.0]);
    check("banned", &row(plain(), &[0], &[], &[0, 99]), [0.0, 4.0, 2.0, 1.0, 1.0]);
    let frequency = with(|p| p.frequency_penalty = std::f32::consts::LN_2);
    check("frequency", &row(frequency, &[1, 1], &[0, 0, 2], &[]), [2.0, 4.0, 1.0, 1.0, 1.0]);
    let presence = with(|p| p.presence_penalty = std::f32::consts::LN_2);
    check("presence", &row(presence, &[1, 1], &[0, 0, 2], &[]), [4.0, 4.0, 1.0, 1.0, 1.0]);
    let repetition = with(|p| p.repetition_penalty = 2.0);
    check("repetition", &row(repetition, &[1], &[0, 0], &[]), [8f64.sqrt(), 2.0, 2.0, 1.0, 1.0]);
}

#[test]
fn a_repeated_negative_logit_falls() {
    let params = SamplingParams { repetition_penalty: 2.0, ..SamplingParams::default() };
    assert_eq!(
        [-1.5, 1.5].map(|logit| penalised(logit, 3, &params).to_bits()),
        [-3f32, 0.75].map(f32::to_bits)
    );
}

#[test]
fn positions_of_one_seed_are_independent_draws() {
    let mut sampler = Sampler::default();
    let mut row = row(SamplingParams::default(), &[0], &[], &[]);
    let mut counts = [0; 5];
    let mut pairs = [0; 4];
    let mut last = 0;
    for _ in 0..DRAWS {
        let token = sampler.sample(&logits(), &row).unwrap().token;
        Arc::make_mut(&mut row.tokens).push(token);
        counts[token as usize] += 1;
        let kind = usize::from(token > 0);
        pairs[last * 2 + kind] += 1;
        last = kind;
    }
    check_counts(&counts, &[8.0, 4.0, 2.0, 1.0, 1.0], "along positions");
    check_counts(&pairs, &[1.0; 4], "token after token");
}

#[test]
fn a_draw_depends_on_seed_and_position_alone() {
    let draw = |sampler: &mut Sampler, seed, length| {
        let params = SamplingParams { seed, ..SamplingParams::default() };
        let flat = vec![0.0; 1000];
        sampler.sample(&flat, &row(params, &vec![0; length], &[], &[])).unwrap().token
    };
    let mut used = Sampler::default();
    let first = draw(&mut used, 1, 5);
    assert_ne!(draw(&mut used, 2, 5), first);
    assert_ne!(draw(&mut used, 1 << 32, 5), draw(&mut used, 2 << 32, 5));
    assert_ne!(draw(&mut used, 1, 6), first);
    assert_eq!(draw(&mut used, 1, 5), first);
    assert_eq!(draw(&mut Sampler::default(), 1, 5), first);
}

/// Makes logits like those of models, with many ties.
fn wide_logits(vocab_size: u32, seed: u32) -> Vec<f32> {
    let logit = |id| philox4x32([id, 0, 0, 1], [seed, 0])[0] % 4000;
    (0..vocab_size).map(|id| logit(id) as f32 / 250.0).collect()
}

/// Truncates by sorting everything.
fn truncated_slowly(logits: &[f32], params: &SamplingParams) -> Vec<u32> {
    let max = f64::from(logits.iter().copied().fold(f32::MIN, f32::max));
    let weight = |id: &u32| (f64::from(logits[*id as usize]) - max).exp();
    let mut ids: Vec<u32> = (0..logits.len() as u32).collect();
    ids.sort_by(|a, b| weight(b).total_cmp(&weight(a)).then(a.cmp(b)));
    if params.top_k > 0 {
        ids.truncate(params.top_k as usize);
    }
    let total: f64 = ids.iter().map(weight).sum();
    let mut mass = 0.0;
    let nucleus = ids.iter().position(|id| {
        mass += weight(id);
        mass >= f64::from(params.top_p) * total
    });
    if params.top_p < 1.0 {
        ids.truncate(nucleus.map_or(ids.len(), |last| last + 1));
    }
    ids.retain(|id| weight(id) >= f64::from(params.min_p));
    ids.sort_unstable();
    ids
}

/// Draws by the definition: adds the noise of every token that sorting leaves.
fn drawn_slowly(logits: &[f32], params: &SamplingParams, position: u32) -> u32 {
    let max = logits.iter().copied().fold(f32::MIN, f32::max);
    let scaled: Vec<f32> = logits.iter().map(|logit| (logit - max) / params.temperature).collect();
    let value =
        |id: &u32| f64::from(scaled[*id as usize]) + gumbel_noise(params.seed, position, *id);
    let kept = truncated_slowly(&scaled, params);
    kept.into_iter().max_by(|a, b| value(a).total_cmp(&value(b)).then(b.cmp(a))).unwrap()
}

fn check_truncation(logits: &[f32], top_k: u32, top_p: f32, min_p: f32) {
    let mut race = CandidateSet::default();
    for seed in 0..3 {
        let params = SamplingParams {
            top_p,
            top_k,
            min_p,
            temperature: 1.3,
            seed,
            ..SamplingParams::default()
        };
        let row = row(params.clone(), &[0; 5], &[], &[]);
        let max = scan(logits).max;
        let token = race.choose(logits, max, &row).unwrap();
        assert_eq!(token, drawn_slowly(logits, &params, 5), "{params:?}");
        if params.truncates() {
            let mut kept: Vec<u32> = race.candidates.iter().map(|candidate| candidate.id).collect();
            kept.sort_unstable();
            let scaled: Vec<f32> = logits.iter().map(|logit| (logit - max) / 1.3).collect();
            assert_eq!(kept, truncated_slowly(&scaled, &params), "{params:?}");
        }
    }
}

#[test]
fn truncation_keeps_what_sorting_everything_would_keep() {
    let flat = vec![1.5; 300];
    for top_k in [0, 1, 7, 63, 64, 65, 600] {
        let logits = wide_logits(1_000, top_k);
        for top_p in [0.0, 0.1, 0.5, 0.9, 0.99, 1.0] {
            check_truncation(&logits, top_k, top_p, 0.0);
            check_truncation(&logits, top_k, top_p, 0.3);
            check_truncation(&flat, top_k, top_p, 0.0);
        }
    }
    check_truncation(&wide_logits(40_000, 1), 0, 0.95, 0.0);
    check_truncation(&wide_logits(40_000, 2), 0, 1.0, 1e-6);
    check_truncation(&wide_logits(40_000, 3), 3_000, 0.999, 0.0);
}

#[test]
fn the_nucleus_is_found_far_below_the_largest() {
    // One token of weight 1 and ten thousand of e^-12 each, 0.06 together.
    let mut logits = vec![0.0; 10_001];
    logits[5_000] = 12.0;
    check_truncation(&logits, 0, 0.9, 0.0);
    check_truncation(&logits, 0, 0.96, 0.0);
    check_truncation(&logits, 2, 1.0, 0.0);
}

#[test]
fn logprobs_are_those_of_the_model() {
    let logits = wide_logits(2_000, 3);
    let total: f64 = logits.iter().map(|&l| f64::from(l).exp()).sum();
    let expect = |id: u32| (f64::from(logits[id as usize]).exp() / total).ln() as f32;
    let params = SamplingParams {
        temperature: 0.3,
        frequency_penalty: 2.0,
        logprobs: Some(20),
        ..SamplingParams::default()
    };
    let sampled = Sampler::default().sample(&logits, &row(params, &[1], &[2, 3], &[4])).unwrap();
    let found = sampled.logprobs.unwrap();
    assert!((found.chosen - expect(sampled.token)).abs() < 1e-5);
    let mut ids: Vec<u32> = (0..2_000).collect();
    ids.sort_by(|&a, &b| logits[b as usize].total_cmp(&logits[a as usize]).then(a.cmp(&b)));
    assert_eq!(found.top.iter().map(|(id, _)| *id).collect::<Vec<_>>(), ids[..20]);
    assert!(found.top.iter().all(|&(id, logprob)| (logprob - expect(id)).abs() < 1e-5));
}

#[test]
fn the_most_likely_are_ordered_by_value_then_id() {
    let check = |logits: &[f32], count, expect: &[u32]| {
        let found = CandidateSet::default().logprobs(logits, scan(logits).max, 0, count);
        let ids: Vec<u32> = found.top.iter().map(|(id, _)| *id).collect();
        assert_eq!(ids, expect, "{logits:?}");
    };
    check(&[1.0, 3.0, 2.0, 3.0], 0, &[]);
    check(&[1.0, 3.0, 2.0, 3.0], 1, &[1]);
    check(&[1.0, 3.0, 2.0, 3.0], 3, &[1, 3, 2]);
    check(&[1.0, 3.0, 2.0, 3.0], 9, &[1, 3, 2, 0]);
    check(&[0.0, 0.0, 0.0], 2, &[0, 1]);
    check(&[1e-9, 30.0, 2e-9, -90.0], 3, &[1, 2, 0]);
}

/// Allows the same tokens everywhere.
#[derive(Debug)]
struct Always(Vec<u32>);

impl TokenMask for Always {
    fn allowed_after(&self, output: &[u32]) -> Result<Arc<[u32]>, String> {
        if output == [9] { Err("it ends".into()) } else { Ok(self.0.as_slice().into()) }
    }
}

/// Tokens that are not allowed are as if they were not there, whatever else shapes the row.
#[test]
fn only_allowed_tokens_are_drawn() {
    let vocab_size = 1_000;
    let logits = wide_logits(vocab_size, 3);
    let is_allowed = |id: u32| id % 7 == 3 || (64..96).contains(&id);
    let mut allowed = vec![0u32; 31];
    for id in (0..31 * 32).filter(|id| is_allowed(*id)) {
        allowed[id as usize / 32] |= 1 << (id % 32);
    }
    let params = |temperature, seed| SamplingParams {
        temperature,
        seed,
        top_p: 0.9,
        frequency_penalty: 0.5,
        logit_bias: [(5, 100.0)].into(),
        ..SamplingParams::default()
    };
    let mut sampler = Sampler::default();
    for seed in 0..200 {
        let mut row = row(params(if seed == 0 { 0.0 } else { 1.5 }, seed), &[3], &[10, 10], &[]);
        row.grammar = Some(Arc::new(Always(allowed.clone())));
        let token = sampler.sample(&logits, &row).unwrap().token;
        // The mask has no word for the last ids of the vocabulary.
        assert!(is_allowed(token) && token < 31 * 32, "{token}");
    }
    let mut none = row(params(1.0, 0), &[3], &[], &[]);
    none.grammar = Some(Arc::new(Always(Vec::new())));
    assert_eq!(sampler.sample(&logits, &none), Err(SampleError::NothingLeft));
    none.tokens = Arc::new(vec![3, 9]);
    assert_eq!(sampler.sample(&logits, &none), Err(SampleError::Grammar("it ends".into())));
}

#[test]
fn a_row_without_a_token_says_why() {
    let check = |logits: &[f32], change: fn(&mut RowSampling), expect: SampleError| {
        let mut row = row(SamplingParams::default(), &[0], &[], &[]);
        change(&mut row);
        let found = Sampler::default().sample(logits, &row).unwrap_err();
        assert_eq!(found.to_string(), expect.to_string());
    };
    for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        check(&[0.0, value], |_| {}, SampleError::NotFinite { token: 1, value });
        let greedy = |row: &mut RowSampling| Arc::make_mut(&mut row.params).temperature = 0.0;
        check(&[0.0, value], greedy, SampleError::NotFinite { token: 1, value });
    }
    check(&[0.0, 0.0], |row| row.banned = [0, 1].into(), SampleError::NothingLeft);
    let bias = |row: &mut RowSampling| {
        Arc::make_mut(&mut row.params).logit_bias = [(2, 1.0)].into();
    };
    check(&[0.0, 0.0], bias, SampleError::UnknownToken { token: 2, vocab_size: 2 });
}

#[test]
fn a_pending_token_counts_as_one_of_the_row() {
    let known = row(SamplingParams::default(), &[3, 1], &[4], &[]);
    let before = row(SamplingParams::default(), &[3, 1], &[], &[]);
    let pending = RowSampling { pending: Some(1), ..before.clone() };
    assert_eq!([&before, &pending, &known].map(RowSampling::position), [2, 3, 3]);
}

fn sample_rows(logits: &candle_core::Tensor, rows: usize) -> Result<Vec<SampleResult>> {
    let greedy = SamplingParams { temperature: 0.0, ..SamplingParams::default() };
    let rows = vec![row(greedy, &[0], &[], &[]); rows];
    RowSampler::default().sample(&Compute::new(2), logits.into(), &rows)
}

#[test]
fn a_row_without_finite_logits_fails_alone() {
    let logits = [[0f32, 1.0, 0.0], [0.0, f32::NAN, 0.0], [2.0, 1.0, 0.0]];
    let logits = candle_core::Tensor::new(&logits, &candle_core::Device::Cpu).unwrap();
    let results = sample_rows(&logits, 3).unwrap();
    let tokens: Vec<_> =
        results.iter().map(|result| result.as_ref().ok().map(|sampled| sampled.token)).collect();
    assert_eq!(tokens, [Some(1), None, Some(0)]);
    let reason = results[1].as_ref().unwrap_err();
    assert!(reason.to_string().contains("token 1"), "{reason}");
}

#[test]
fn logits_of_another_shape_are_refused() {
    let check = |logits: candle_core::Tensor, expect: &str| {
        let error = sample_rows(&logits, 2).unwrap_err();
        assert!(error.to_string().contains(expect), "{error}");
        assert!(matches!(error, crate::Error::Shape { .. }), "{error}");
    };
    let of = |shape: (usize, usize)| {
        candle_core::Tensor::zeros(shape, candle_core::DType::F32, &candle_core::Device::Cpu)
            .unwrap()
    };
    check(of((3, 3)), "9 logits of 2 rows");
    check(of((4, 2)).t().unwrap(), "not contiguous");
    assert_eq!(sample_rows(&of((2, 4)), 2).unwrap().len(), 2);
}
