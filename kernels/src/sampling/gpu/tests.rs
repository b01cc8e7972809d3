//! The device's sampler against the specification.

use super::*;
use crate::gpu::{Buffer, Emulator};
use crate::sampling::{SamplingParams, Special, philox4x32, reference};
use crate::testing::{assert_close, downloaded, gpu, poisoned_buffer, random, upload, values};
use std::sync::Arc;

/// Numbers for making up rows, each as likely as the others.
struct Dice {
    seed: u32,
    count: u32,
}

impl Dice {
    fn below(&mut self, sides: u32) -> u32 {
        self.count += 1;
        philox4x32([self.count, 0, 0, 0], [self.seed, 7])[0] % sides
    }

    fn unit(&mut self) -> f32 {
        self.below(1 << 24) as f32 / (1 << 24) as f32
    }

    fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len() as u32) as usize]
    }
}

struct Case {
    logits: Vec<f32>,
    row: DeviceRow,
    /// The previous tokens.
    history: Vec<u32>,
}

fn case(vocab_size: usize, dice: &mut Dice) -> Case {
    let k_bound = 2 * vocab_size as u32;
    let params = SamplingParams {
        temperature: dice.pick(&[0.0, 1.0, 0.7, 1.8, 1e-30, 1e-3, 40.0]),
        top_p: dice.pick(&[1.0, 1.0, 0.9, 0.5, 0.0, 1e-6, 0.999]),
        top_k: dice.pick(&[0, 0, 1, 2, 40, k_bound / 2 - 1, k_bound / 2, k_bound]),
        min_p: dice.pick(&[0.0, 0.0, 0.05, 1.0, 1e-12]),
        frequency_penalty: dice.pick(&[0.0, 0.3, -1.1]),
        presence_penalty: dice.pick(&[0.0, 0.7]),
        repetition_penalty: dice.pick(&[1.0, 1.3, 0.8]),
        seed: u64::from(dice.below(u32::MAX)) << 20,
        ..SamplingParams::default()
    };
    let position = dice.below(100_000);
    let logprobs = dice.pick(&[None, None, None, None, Some(0), Some(1), Some(3), Some(20)]);
    let params = Arc::new(SamplingParams { logprobs, ..params });
    let prompt_len = dice.below(40);
    let history = history(prompt_len as usize + dice.below(30) as usize, vocab_size, dice);
    let logits = logits(vocab_size, dice);
    let specials = specials(vocab_size, dice);
    let row = DeviceRow { params, position, prompt_len, specials, masked: false };
    Case { logits, row, history }
}

/// Some tokens occur often; ids outside the vocabulary cannot be chosen anyway.
fn history(len: usize, vocab_size: usize, dice: &mut Dice) -> Vec<u32> {
    let ids = dice.pick(&[5, vocab_size as u32 + 1]);
    (0..len).map(|_| dice.below(ids)).collect()
}

fn logits(vocab_size: usize, dice: &mut Dice) -> Vec<f32> {
    let spread = dice.pick(&[0.0, 3.0, 12.0, 100.0]);
    // There are few different values, so that cutoffs fall among equals. Zeros have one sign.
    let step = dice.pick(&[0.0, 0.0, 0.25, 4.0]);
    let value = |x: f32| if step > 0.0 { (x / step).round() * step } else { x } + 0.0;
    let mut logits: Vec<f32> =
        (0..vocab_size).map(|_| value((dice.unit() - 0.3) * spread)).collect();
    if dice.below(20) == 0 {
        logits[dice.below(vocab_size as u32) as usize] =
            dice.pick(&[f32::NAN, f32::INFINITY, f32::NEG_INFINITY]);
    }
    logits
}

fn specials(vocab_size: usize, dice: &mut Dice) -> Vec<Special> {
    // Sometimes no token is banned, sometimes all are; ids outside the vocabulary cannot be chosen
    // anyway.
    let (every, banned) = dice.pick(&[(0, 0), (0, 0), (3, 9), (2, 2), (1, 9), (1, 1)]);
    let tokens = (0..vocab_size as u32 + 2)
        .filter(|_| every > 0 && dice.below(every) == 0)
        .collect::<Vec<_>>();
    let mut special = |token| Special {
        token,
        bias: if dice.below(banned) == 0 {
            f32::NEG_INFINITY
        } else {
            dice.pick(&[0.0, -3.5, 2.0])
        },
    };
    tokens.into_iter().map(&mut special).collect()
}

const BLOCK: usize = 16;

/// The cases' histories on the device, the last case's first, each in blocks that are not adjacent.
/// The rest of a history's last block, and blocks that belong to no history, hold a token that is
/// often drawn.
struct Histories([Buffer; 4]);

impl Histories {
    fn new(gpu: &std::sync::Arc<dyn Gpu>, cases: &[Case]) -> Self {
        let blocks =
            cases.iter().map(|case| case.history.len().div_ceil(BLOCK)).max().unwrap_or(0) + 1;
        let mut tokens = vec![0u32; cases.len() * blocks * BLOCK];
        let (mut tables, mut lens) = (Vec::new(), Vec::new());
        for (sequence, case) in cases.iter().rev().enumerate() {
            let table: Vec<usize> = (0..blocks).map(|i| i * cases.len() + sequence).collect();
            for (position, token) in case.history.iter().enumerate() {
                tokens[table[position / BLOCK] * BLOCK + position % BLOCK] = *token;
            }
            tables.extend(table.into_iter().map(|block| block as u32));
            lens.push(case.history.len() as u32);
        }
        let starts: Vec<u32> = (0..=cases.len()).map(|i| (i * blocks) as u32).collect();
        let words = [&tokens[..], &lens, &tables, &starts];
        Self(words.map(|words| Buffer::from_slice(gpu, words).unwrap()))
    }

    fn views(&self) -> History {
        let [tokens, seq_lens, tables, table_starts] = self.0.each_ref().map(Buffer::view);
        History { tokens, seq_lens, tables, table_starts, block_size: BLOCK }
    }
}

/// Samples all cases at once, on fewer rows than there is room for.
fn sampled(gpu: &std::sync::Arc<dyn Gpu>, cases: &[Case]) -> Vec<SampleResult> {
    let vocab_size = cases[0].logits.len();
    let rows = cases.len() + 1;
    let mut logits: Vec<f32> = cases.iter().flat_map(|case| case.logits.iter().copied()).collect();
    logits.resize(rows * vocab_size, f32::NAN);
    let encoded: Vec<_> = cases.iter().map(|case| case.row.clone()).collect();
    let between = 6;
    let mut words = vec![
        7;
        encoded_words(rows, cases.iter().map(|case| case.row.specials.len()).sum())
            + between
    ];
    encode(&encoded, |row| (cases.len() - 1 - row) as u32, rows, between, &mut words);
    let history = Histories::new(gpu, cases);
    let (logits, params) =
        (upload(gpu, Kind::F32, &logits), Buffer::from_slice(gpu, &words).unwrap());
    let [tokens, results] =
        [rows, rows * RESULT_WORDS].map(|len| poisoned_buffer(gpu, Kind::U32, len));
    let work = poisoned_buffer(gpu, Kind::U8, workspace(rows, vocab_size));
    let args = Sample {
        logits: logits.view(),
        vocab_size,
        params: params.view(),
        masks: params.view().slice(0..0),
        history: history.views(),
        tokens: tokens.view(),
        results: results.view(),
        workspace: work.view(),
    };
    sample(&**gpu, &args).unwrap();
    let (tokens, results) = (tokens.to_vec::<u32>().unwrap(), results.to_vec::<u32>().unwrap());
    let (results, _) = results.as_chunks::<RESULT_WORDS>();
    assert_eq!(decode(&results[rows - 1], None), Err(SampleError::SomeNotFinite));
    let outcome = |((case, token), result): ((&Case, &u32), &[u32; RESULT_WORDS])| {
        let outcome = decode(result, case.row.params.logprobs);
        let expect = outcome.as_ref().map_or(0, |sampled| sampled.token);
        assert_eq!(*token, expect);
        outcome
    };
    cases.iter().zip(&tokens).zip(results).map(outcome).collect()
}

/// Checks that results are equal except for the last places of log-probabilities.
fn assert_same(found: &SampleResult, want: &SampleResult, what: &str) {
    let (
        Ok(Sampled { token, logprobs }),
        Ok(Sampled { token: want_token, logprobs: want_logprobs }),
    ) = (found, want)
    else {
        assert_eq!(found, want, "{what}");
        return;
    };
    assert_eq!(token, want_token, "{what}");
    assert_eq!(logprobs.is_some(), want_logprobs.is_some(), "{what}");
    let Some((TokenLogprobs { chosen, top }, TokenLogprobs { chosen: want_chosen, top: want_top })) =
        logprobs.as_ref().zip(want_logprobs.as_ref())
    else {
        return;
    };
    let ids = |top: &[(u32, f32)]| top.iter().map(|(id, _)| *id).collect::<Vec<_>>();
    assert_eq!(ids(top), ids(want_top), "{what}");
    for (found, want) in [*chosen]
        .iter()
        .chain(top.iter().map(|(_, x)| x))
        .zip([*want_chosen].iter().chain(want_top.iter().map(|(_, x)| x)))
    {
        assert!((found - want).abs() <= 1e-5, "{what}: {found} for {want}");
    }
}

fn check(gpu: &std::sync::Arc<dyn Gpu>, cases: &[Case]) {
    for (index, (case, outcome)) in cases.iter().zip(sampled(gpu, cases)).enumerate() {
        let Case { logits, row, history } = case;
        let want = reference::sample(logits, row, history);
        let what = format!("row {index} of {} ids with {row:?}, {history:?}", logits.len());
        assert_same(&outcome, &want, &what);
    }
}

#[test]
fn rows_of_every_mix_get_the_specified_tokens() {
    let gpu = gpu();
    for (seed, vocab_size, rows, batches) in
        [(1, 5, 50, 8), (2, 97, 50, 8), (3, 4097, 20, 2), (4, 49_152, 12, 1)]
    {
        let mut dice = Dice { seed, count: 0 };
        for _ in 0..batches {
            check(&gpu, &(0..rows).map(|_| case(vocab_size, &mut dice)).collect::<Vec<_>>());
        }
    }
}

/// At the cutoff there are more ids than a list holds: many equals, or all that both top-k and
/// top-p consider.
#[test]
fn cuts_through_more_than_a_list_holds_are_exact() {
    let mut dice = Dice { seed: 9, count: 0 };
    let mut row = |spread: f32, top_k, top_p, min_p| Case {
        // A quarter stands a little above the others, so that the cut is not in the first bucket.
        logits: (0..9_000)
            .map(|id| dice.unit() * spread + if id % 4 == 0 { 1.1 } else { 1.0 })
            .collect(),
        row: DeviceRow {
            params: Arc::new(SamplingParams {
                temperature: 0.9,
                top_k,
                top_p,
                min_p,
                ..SamplingParams::default()
            }),
            position: dice.below(1000),
            ..DeviceRow::greedy()
        },
        history: Vec::new(),
    };
    let mut cases = Vec::new();
    for spread in [0.0, 0.01, 3.0] {
        for (top_k, top_p) in [(3000, 1.0), (0, 0.5), (3000, 0.7), (8999, 0.01), (2, 1.0), (0, 0.0)]
        {
            cases.extend([0.0, 0.99].map(|min_p| row(spread, top_k, top_p, min_p)));
        }
    }
    check(&gpu(), &cases);
}

/// The history takes more than one round of a block, and a count exceeds a byte.
#[test]
fn long_histories_are_counted_whole() {
    let mut dice = Dice { seed: 11, count: 0 };
    let mut row = |len: usize, prompt_len| Case {
        logits: logits(97, &mut dice),
        row: DeviceRow {
            params: Arc::new(SamplingParams {
                temperature: 0.0,
                repetition_penalty: 1.1,
                frequency_penalty: 0.01,
                logprobs: Some(1),
                ..SamplingParams::default()
            }),
            prompt_len,
            ..DeviceRow::greedy()
        },
        history: history(len, 97, &mut dice),
    };
    check(
        &gpu(),
        &[(1023, 5), (1024, 1023), (1025, 0), (3001, 1026), (2999, 5000)]
            .map(|(len, prompt)| row(len, prompt)),
    );
}

#[test]
fn arguments_that_do_not_fit_are_refused() {
    let check = |vocab_size: usize, change: fn(&mut [u32]), len: u32, expect: &str| {
        // A fault ends a device for the whole process.
        let gpu = Emulator::new();
        let logits = upload(&gpu, Kind::F32, &[0.0; 10]);
        let mut words = [0; 16];
        let mut row = DeviceRow::greedy();
        Arc::make_mut(&mut row.params).presence_penalty = 0.5;
        encode(&[row], |_| 0, 1, 0, &mut words);
        change(&mut words);
        let case = |len: u32| Case {
            logits: vec![],
            row: DeviceRow::greedy(),
            history: vec![0; len as usize],
        };
        let mut history = Histories::new(&gpu, &[case(20)]);
        history.0[1] = Buffer::from_slice(&gpu, &[len]).unwrap();
        let [params, tokens, results] =
            [&words[..], &[0], &[0; RESULT_WORDS]].map(|w| Buffer::from_slice(&gpu, w).unwrap());
        let work = poisoned_buffer(&gpu, Kind::U8, workspace(1, 10));
        let args = Sample {
            logits: logits.view(),
            vocab_size,
            params: params.view(),
            masks: params.view().slice(0..0),
            history: history.views(),
            tokens: tokens.view(),
            results: results.view(),
            workspace: work.view(),
        };
        let error = sample(&*gpu, &args).and_then(|()| gpu.synchronise()).unwrap_err().to_string();
        assert!(error.contains(expect), "{error}");
    };
    check(11, |_| (), 20, "rows of 11");
    check(10, |words| words[14] = 1, 20, "params_len");
    check(10, |words| words[15] = 1, 20, "row_words");
    check(10, |words| words[11] = 1, 20, "sequence < sequences");
    check(10, |_| (), 49, "last - table");
}

#[test]
fn a_soft_cap_bounds_every_value() {
    let gpu = gpu();
    for n in [0, 1, 3, 4, 989, 5000] {
        let x: Vec<f32> = values(&random(&[n], 3)).iter().map(|x| x * 100.0).collect();
        let buffer = upload(&gpu, Kind::F32, &x);
        gpu.soft_cap(buffer.view(), 30.0).unwrap();
        let want: Vec<f32> = x.iter().map(|x| 30.0 * (x / 30.0).tanh()).collect();
        assert_close(&downloaded(&buffer), &want, 1e-6, &format!("{n} values"));
    }
}
