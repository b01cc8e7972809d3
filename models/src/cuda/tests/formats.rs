//! Rows that keep to formats: the tokens of the CPU, whether or not the token before is known at
//! the launch, and masks that are uploaded for these rows alone.

use super::mixed::spied;
use super::*;
use crate::cpu::CpuModel;
use crate::cuda::ranks::TensorParallel;
use cresset_kernels::sampling::SamplingParams;
use cresset_kernels::sampling::gpu::mask_words;
use cresset_kernels::sampling::params::TokenMask;
use std::sync::Arc;

/// Allows a third of the ids each time. Which third follows from every token before.
#[derive(Debug)]
struct IdThirds;

impl TokenMask for IdThirds {
    fn allowed_after(&self, output: &[u32]) -> Result<Arc<[u32]>, String> {
        if output.len() == FAILS_AFTER {
            return Err("it costs too much".into());
        }
        let third = output.iter().sum::<u32>() % 3;
        let mut words = vec![0; mask_words(vocab_size())];
        let ids = (0..vocab_size()).filter(|id| *id as u32 % 3 == third);
        ids.for_each(|id| words[id / 32] |= 1 << (id % 32));
        Ok(words.into())
    }
}

/// Tokens after which the grammars fail, and those that are asked for.
const FAILS_AFTER: usize = 7;
const STEPS: usize = 9;

/// How the sequence with this number is sampled: greedily or not, with a format or not, with
/// log-probabilities, penalties, a bias and a ban.
fn row(number: usize, tokens: &[u32], pending: bool) -> RowSampling {
    let params = SamplingParams {
        temperature: [0.0, 0.9][number % 2],
        seed: number as u64,
        logprobs: (number == 1).then_some(3),
        frequency_penalty: [0.0, 0.4][number / 4],
        logit_bias: [(number as u32 + 5, 4.0)].into(),
        ..SamplingParams::default()
    };
    RowSampling {
        params: Arc::new(params),
        tokens: Arc::new(tokens.to_vec()),
        pending: pending.then_some(number as u32),
        prompt_len: PROMPTS[number],
        banned: if number == 2 { [9, 10, 11].into() } else { [].into() },
        grammar: (!number.is_multiple_of(3)).then(|| Arc::new(IdThirds) as Arc<dyn TokenMask>),
    }
}

const PROMPTS: [usize; 6] = [9, 21, 3, 14, 5, 1];

/// The results of each sequence. With `ahead`, steps are launched before the tokens of the step
/// before are known.
fn results(model: &mut dyn Model, ahead: bool) -> Vec<Vec<SampleResult>> {
    let mut texts: Vec<Vec<u32>> = PROMPTS.iter().zip(0..).map(|(n, i)| tokens(*n, i)).collect();
    let mut found = vec![Vec::new(); texts.len()];
    let mut take = |model: &mut dyn Model, texts: &mut [Vec<u32>]| {
        for ((text, found), result) in
            texts.iter_mut().zip(&mut found).zip(model.collect().unwrap())
        {
            // Nobody sees the tokens behind a failure.
            text.push(result.as_ref().map_or(0, |sampled| sampled.token));
            found.push(result);
        }
    };
    for step in 0..STEPS {
        let pending = ahead && step > 0;
        let spans: Vec<_> = texts.iter().map(|text| span_of(text, step, pending)).collect();
        let blocks: Vec<_> = (0..spans.len() as u32).map(|i| [2 * i, 2 * i + 1]).collect();
        let spans: Vec<_> = spans
            .iter()
            .zip(&blocks)
            .map(|((cached, tokens), blocks)| Span { tokens, cached: *cached, blocks })
            .collect();
        let mut batch = batch(&spans, BLOCK, true);
        let rows = |texts: &[Vec<u32>], pending| -> Vec<RowSampling> {
            texts.iter().enumerate().map(|(i, text)| row(i, text, pending)).collect()
        };
        if pending {
            batch.feedback = (0..texts.len() as u32).map(Some).collect();
        }
        model.launch(&batch, &rows(&texts, pending)).unwrap();
        if step > 0 || !ahead {
            take(model, &mut texts);
        }
        if pending {
            let known: Vec<_> = rows(&texts, false).into_iter().map(Some).collect();
            model.sample(&known).unwrap();
        }
    }
    if ahead {
        take(model, &mut texts);
    }
    found
}

/// The new tokens of a sequence in a step, and how many are cached before them. A zero stands for
/// one that is not known.
fn span_of(text: &[u32], step: usize, pending: bool) -> (usize, Vec<u32>) {
    match (step, pending) {
        (0, _) => (0, text.to_vec()),
        (_, true) => (text.len(), vec![0]),
        (_, false) => (text.len() - 1, vec![text[text.len() - 1]]),
    }
}

/// Compares what was sampled before a failure, and the failure.
fn assert_same(found: &[Vec<SampleResult>], want: &[Vec<SampleResult>], what: &str) {
    for (number, (found, want)) in found.iter().zip(want).enumerate() {
        let until_failure = |results: &[SampleResult]| -> Vec<Sampled> {
            results.iter().map_while(|result| result.as_ref().ok()).cloned().collect()
        };
        let failure = |results: &[SampleResult]| results.iter().find_map(|r| r.clone().err());
        assert_eq!(failure(found), failure(want), "sequence {number}, {what}");
        let [found, want] = [found, want].map(|results| until_failure(results));
        assert_eq!(found.len(), want.len(), "sequence {number}, {what}");
        for (found, want) in found.iter().zip(&want) {
            let flat = |sampled: &Sampled| {
                let logprobs = sampled.logprobs.iter();
                let all = logprobs.flat_map(|all| [&[(0, all.chosen)], &all.top[..]].concat());
                (sampled.token, all.collect::<Vec<_>>())
            };
            let ((found, probable), (want, expect)) = (flat(found), flat(want));
            let close =
                |((a, x), (b, y)): (&(u32, f32), &(u32, f32))| a == b && (x - y).abs() < 1e-3;
            let same = probable.iter().zip(&expect).all(close) && probable.len() == expect.len();
            assert!(found == want && same, "sequence {number}, {what}: {probable:?}, {expect:?}");
        }
    }
}

#[test]
fn answers_keep_to_formats_as_on_the_cpu() {
    let tiny = TinyLlama { seed: 31, ..TinyLlama::default() };
    let folder = tempfile::tempdir().unwrap();
    tiny.write_safetensors(folder.path()).unwrap();
    let source = ModelSource::hf_folder(folder.path().to_owned());
    let on_cpu = ModelOptions { gpu: None, kv_bytes: 4 << 20, ..options(Kind::F32) };
    let want = results(&mut CpuModel::load(&source, &on_cpu).unwrap(), false);
    let failed = SampleError::Grammar("it costs too much".into());
    for (number, results) in want.iter().enumerate() {
        let keeps = !number.is_multiple_of(3);
        assert_eq!(results.iter().position(Result::is_err), keeps.then_some(FAILS_AFTER));
        assert!(!keeps || results[FAILS_AFTER] == Err(failed.clone()));
    }
    for gpu_graph_rows in [0, 8] {
        let own = ModelOptions { gpu_graph_rows, ..options(Kind::F32) };
        for ahead in [false, true] {
            let what = format!("recorded for {gpu_graph_rows} rows, ahead: {ahead}");
            let found = results(&mut load_from(&source, &own).unwrap(), ahead);
            assert_same(&found, &want, &what);
            let two = super::ranks::on_ranks(&[24 << 20; 2], &own);
            let found = results(&mut TensorParallel::load(&source, &two).unwrap(), ahead);
            assert_same(&found, &want, &format!("{what}, on two devices"));
        }
    }
}

fn masked_rows(masked: &[bool]) -> Vec<DeviceRow> {
    masked.iter().map(|masked| DeviceRow { masked: *masked, ..DeviceRow::greedy() }).collect()
}

/// A step without formats has one upload. One with formats computes its logits at once, and waits
/// with the sampler for one upload more, of the masks of its masked rows.
#[test]
fn masks_are_uploaded_for_the_rows_that_have_some() {
    for graph_rows in [0, 4] {
        let sizes = ModelOptions { max_rows: 4, gpu_graph_rows: graph_rows, ..options(Kind::Bf16) };
        let (model, spy) = spied(&TinyLlama::default(), &sizes);
        let mut group = Sequences::new(model, &[4, 5, 6]);
        for (masked, uploads) in [([false; 3], 1), ([true, false, true], 2), ([false; 3], 1)] {
            let (batch, _) = group.batch(&[0, 1, 2], 64);
            let sampled = || spy.noted().kernels.iter().any(|name| name.starts_with("sampling"));
            spy.noted().clear();
            group.model.start(&batch, &masked_rows(&masked)).unwrap();
            let waits = masked.contains(&true);
            if graph_rows == 0 {
                assert_ne!(sampled(), waits);
            }
            if waits {
                assert!(group.model.collect().is_err(), "it is not sampled");
                let allowed = || Some(Ok(vec![8, 0].into()));
                group.model.sample_masked(&[allowed(), None, allowed()]).unwrap();
                assert_eq!(spy.noted().uploads[1], 2 * mask_words(vocab_size()));
            }
            assert_eq!(spy.noted().uploads.len(), uploads);
            let results = group.model.collect().unwrap();
            for (result, masked) in results.iter().zip(masked) {
                let token = result.as_ref().unwrap().token;
                assert!(!masked || token == 3, "{token}");
            }
        }
    }
}

#[test]
fn masks_that_no_step_waits_for_are_refused_and_do_no_harm() {
    let model = load(&TinyLlama::default(), &options(Kind::F32)).unwrap();
    let mut group = Sequences::new(model, &[4, 5]);
    let refused = |outcome: Result<()>, expect: &str| {
        let error = outcome.unwrap_err().to_string();
        assert!(error.contains(expect), "{error}");
    };
    let (batch, _) = group.batch(&[0, 1], 64);
    let masks = [Some(Err(SampleError::Grammar("it ends".into()))), None];
    refused(group.model.sample_masked(&masks), "formats of 2 rows");
    group.model.start(&batch, &masked_rows(&[false; 2])).unwrap();
    refused(group.model.sample_masked(&masks), "formats of 2 rows");
    group.model.start(&batch, &masked_rows(&[true; 2])).unwrap();
    group.model.collect().unwrap();
    refused(group.model.start(&batch, &masked_rows(&[false; 2])), "waits for its formats");
    refused(group.model.sample_masked(&masks[..1]), "formats of 1 rows");
    refused(group.model.collect().map(drop), "nothing was launched");
    group.model.sample_masked(&masks).unwrap();
    let results = group.model.collect().unwrap();
    let expect = [SampleError::Grammar("it ends".into()), SampleError::NotRun].map(Err);
    assert_eq!(results, expect);
    group.model.start(&batch, &masked_rows(&[true; 2])).unwrap();
    group.model.recover().unwrap();
    group.step(&[0, 1], 64);
}
