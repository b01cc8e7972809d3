//! The device's sampler gives the results of the CPU's, parameter by parameter and row by row.

use super::*;
use crate::gpu::{Buffer, Gpu, Kind, device_or_emulator};
use crate::sampling::cpu::Sampler;
use crate::sampling::gpu::{
    History, RESULT_WORDS, Sample, decode, encode, encoded_words, mask_words, sample, workspace,
    write_mask,
};
use crate::sampling::params::TokenMask;
use crate::sampling::{SampleResult, Sampled, TokenLogprobs, philox4x32};
use std::iter::repeat;
use std::sync::Arc;

/// Numbers for making up rows, each as likely as the others.
struct Dice(u32);

impl Dice {
    fn below(&mut self, sides: usize) -> usize {
        self.0 += 1;
        philox4x32([self.0, 0, 0, 0], [3, 1])[0] as usize % sides
    }

    fn unit(&mut self) -> f32 {
        self.below(1 << 24) as f32 / (1 << 24) as f32
    }

    /// Returns `usual` most of the time.
    fn rarely(&mut self, usual: f32, other: impl Fn(f32) -> f32) -> f32 {
        if self.below(3) > 0 { usual } else { other(self.unit()) }
    }

    fn ids(&mut self, most: usize, vocab_size: usize) -> Vec<u32> {
        (0..self.below(most)).map(|_| self.below(vocab_size) as u32).collect()
    }
}

fn params(vocab_size: usize, dice: &mut Dice) -> SamplingParams {
    let mut biased = dice.ids(4, vocab_size);
    biased.sort_unstable();
    biased.dedup();
    SamplingParams {
        temperature: dice.rarely(1.0, |x| if x < 0.3 { 0.0 } else { 2.0 * x }),
        top_p: dice.rarely(1.0, |x| x),
        top_k: if dice.below(3) == 0 { dice.below(2 * vocab_size) as u32 } else { 0 },
        min_p: dice.rarely(0.0, |x| x * x),
        frequency_penalty: dice.rarely(0.0, |x| 4.0 * x - 2.0),
        presence_penalty: dice.rarely(0.0, |x| 4.0 * x - 2.0),
        repetition_penalty: dice.rarely(1.0, |x| 0.5 + x),
        seed: (dice.below(1 << 32) << 32 | dice.below(1 << 32)) as u64,
        logit_bias: biased.into_iter().map(|token| (token, 20.0 * dice.unit() - 10.0)).collect(),
        // Twenty cost the emulator most of its time.
        logprobs: [None, Some(0), Some(1), Some(2), Some(20)][dice.below(33) / 8],
    }
}

fn row(vocab_size: usize, dice: &mut Dice) -> RowSampling {
    let (prompt, output) = (dice.ids(30, vocab_size + 1), dice.ids(30, vocab_size));
    RowSampling {
        pending: None,
        params: Arc::new(params(vocab_size, dice)),
        prompt_len: prompt.len(),
        tokens: Arc::new([prompt, output].concat()),
        banned: if dice.below(4) == 0 { dice.ids(3, vocab_size + 1).into() } else { [].into() },
        grammar: (dice.below(3) == 0).then(|| mask(vocab_size, dice)),
    }
}

/// Allows the same tokens everywhere.
#[derive(Debug)]
struct FixedMask(Arc<[u32]>);

impl TokenMask for FixedMask {
    fn allowed_after(&self, _: &[u32]) -> Result<Arc<[u32]>, String> {
        Ok(self.0.clone())
    }
}

/// Few tokens, half of them, or none; fewer or more words than the vocabulary has.
fn mask(vocab_size: usize, dice: &mut Dice) -> Arc<dyn TokenMask> {
    let (words, kind) = (dice.below(mask_words(vocab_size) + 2), dice.below(4));
    let word = |dice: &mut Dice| match kind {
        0 => 1 << dice.below(32),
        1 => 0,
        _ => dice.below(1 << 32) as u32,
    };
    let words: Vec<u32> = (0..words).map(|_| word(dice)).collect();
    Arc::new(FixedMask(words.into()))
}

fn logits(vocab_size: usize, dice: &mut Dice) -> Vec<f32> {
    let spread = 20.0 * dice.unit();
    let mut logits: Vec<f32> =
        (0..vocab_size).map(|_| (dice.unit() + dice.unit() - 1.2) * spread).collect();
    if dice.below(2) == 0 {
        // The values look like those of sixteen-bit weights: with ties.
        for x in &mut logits {
            *x = f32::from_bits(x.to_bits() & 0xffff_0000);
        }
    }
    if dice.below(50) == 0 {
        logits[dice.below(vocab_size)] = f32::NAN;
    }
    logits
}

/// The tokens of each row are in one block of their own.
fn on_device(gpu: &Arc<dyn Gpu>, logits: &[Vec<f32>], rows: &[RowSampling]) -> Vec<SampleResult> {
    const BLOCK: usize = 64;
    let vocab_size = logits[0].len();
    let tokens = rows
        .iter()
        .flat_map(|row| row.tokens.iter().copied().chain(repeat(0)).take(BLOCK))
        .collect();
    let lens = rows.iter().map(|row| row.tokens.len() as u32).collect();
    let numbers = |last: usize| (0..last as u32).collect();
    let history: [Vec<u32>; 4] = [tokens, lens, numbers(rows.len()), numbers(rows.len() + 1)];
    let history = history.map(|words| Buffer::from_slice(gpu, &words).unwrap());
    let [tokens, seq_lens, tables, table_starts] = history.each_ref().map(Buffer::view);
    let history = History { tokens, seq_lens, tables, table_starts, block_size: BLOCK };
    let encoded: Vec<_> = rows.iter().map(|row| DeviceRow::new(row, vocab_size).unwrap()).collect();
    let specials = encoded.iter().map(|row: &DeviceRow| row.specials.len()).sum();
    let mut words = vec![0; encoded_words(rows.len(), specials)];
    encode(&encoded, |row| row as u32, rows.len(), 0, &mut words);
    let allowed: Vec<_> = rows.iter().filter_map(RowSampling::mask).map(Result::unwrap).collect();
    let mut masks = vec![7; allowed.len() * mask_words(vocab_size)];
    for (to, allowed) in masks.chunks_mut(mask_words(vocab_size)).zip(allowed) {
        write_mask(&allowed, to);
    }
    let masks = Buffer::from_slice(gpu, &masks).unwrap();
    let logits = Buffer::from_slice(gpu, &logits.concat()).unwrap();
    let params = Buffer::from_slice(gpu, &words).unwrap();
    let [tokens, results] =
        [1, RESULT_WORDS].map(|each| Buffer::new(gpu, Kind::U32, rows.len() * each).unwrap());
    let work = Buffer::new(gpu, Kind::U8, workspace(rows.len(), vocab_size)).unwrap();
    let args = Sample {
        logits: logits.view(),
        vocab_size,
        params: params.view(),
        masks: masks.view(),
        history,
        tokens: tokens.view(),
        results: results.view(),
        workspace: work.view(),
    };
    sample(&**gpu, &args).unwrap();
    let results = results.to_vec::<u32>().unwrap();
    let row = |(result, row): (&[u32], &DeviceRow)| decode(result, row.params.logprobs);
    results.chunks(RESULT_WORDS).zip(&encoded).map(row).collect()
}

fn assert_same(found: &SampleResult, want: &SampleResult, what: &str) {
    let (Ok(found), Ok(want)) = (found, want) else {
        assert!(found.is_err() && want.is_err(), "{what}: {found:?} for {want:?}");
        return;
    };
    assert_eq!(found.token, want.token, "{what}");
    let flat = |sampled: &Sampled| {
        let all = |logprobs: &TokenLogprobs| {
            [&[(sampled.token, logprobs.chosen)], &logprobs.top[..]].concat()
        };
        sampled.logprobs.as_ref().map(all).unwrap_or_default()
    };
    let (found, want) = (flat(found), flat(want));
    let same = |((a, x), (b, y)): (&(u32, f32), &(u32, f32))| a == b && (x - y).abs() <= 1e-5;
    assert!(
        found.len() == want.len() && found.iter().zip(&want).all(same),
        "{what}: {found:?} for {want:?}"
    );
}

#[test]
fn the_device_gives_the_tokens_of_the_cpu() {
    let gpu = device_or_emulator(1 << 30, 4);
    let (mut dice, mut sampler) = (Dice(0), Sampler::default());
    for (vocab_size, batches, rows) in [(5, 8, 100), (97, 8, 100), (1000, 4, 100), (10_000, 1, 20)]
    {
        for _ in 0..batches {
            let logits: Vec<_> = (0..rows).map(|_| logits(vocab_size, &mut dice)).collect();
            let rows: Vec<_> = (0..rows).map(|_| row(vocab_size, &mut dice)).collect();
            for ((logits, row), found) in
                logits.iter().zip(&rows).zip(on_device(&gpu, &logits, &rows))
            {
                assert_same(&found, &sampler.sample(logits, row), &format!("{row:?}"));
            }
        }
    }
}

/// Masks that allow one token each, at the first and the last place of words, vectors and chunks.
#[test]
fn each_bit_of_a_mask_is_its_token() {
    let gpu = device_or_emulator(1 << 30, 4);
    let mut dice = Dice(0);
    for vocab_size in [31, 32, 33, 4095, 4096, 8192, 8195] {
        let edges =
            [1, 4, 32, 1024, 4096, vocab_size].into_iter().flat_map(|edge| [edge - 1, edge]);
        let ids: Vec<usize> = edges.filter(|id| *id < vocab_size).chain([0]).collect();
        let only = |id: &usize| {
            let mut words = vec![0; mask_words(vocab_size)];
            words[id / 32] = 1 << (id % 32);
            let grammar: Arc<dyn TokenMask> = Arc::new(FixedMask(words.into()));
            let params = Arc::new(SamplingParams { seed: *id as u64, ..SamplingParams::default() });
            let (tokens, banned) = (Arc::new(vec![1]), Arc::default());
            let grammar = Some(grammar);
            RowSampling { params, tokens, pending: None, prompt_len: 1, banned, grammar }
        };
        // Rows without a format stand between the others and have no mask.
        let rows = ids.iter().flat_map(|id| [only(id), RowSampling { grammar: None, ..only(id) }]);
        let rows: Vec<_> = rows.collect();
        let logits: Vec<_> = rows
            .iter()
            .map(|_| (0..vocab_size).map(|_| dice.unit()).collect::<Vec<f32>>())
            .collect();
        let found = on_device(&gpu, &logits, &rows);
        for (at, id) in ids.into_iter().enumerate() {
            let token = found[2 * at].as_ref().unwrap().token;
            assert_eq!(token as usize, id, "of {vocab_size}");
        }
        let mut sampler = Sampler::default();
        for ((logits, row), found) in logits.iter().zip(&rows).zip(&found) {
            assert_same(found, &sampler.sample(logits, row), &format!("{row:?}"));
        }
    }
}

#[test]
fn a_bias_outside_the_vocabulary_is_refused() {
    let mut row = row(5, &mut Dice(0));
    Arc::make_mut(&mut row.params).logit_bias = [(5, 1.0)].into();
    assert_eq!(
        DeviceRow::new(&row, 5).unwrap_err(),
        SampleError::UnknownToken { token: 5, vocab_size: 5 }
    );
}
