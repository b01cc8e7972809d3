//! The head that guesses tokens against a reference of its own, from every layout of files.

use super::*;
use crate::testing::{GuessGolden, guess_goldens};
use crate::tests::{assert_close, options};
use crate::{Model, ModelOptions, ModelSource};
use cresset_kernels::sampling::RowSampling;
use cresset_kernels::sampling::params::SamplingParams;
use std::ops::Range;

const BLOCK_SIZE: usize = 16;

fn load(source: &ModelSource, guesses: bool) -> CpuModel {
    let options = ModelOptions { guesses, kv_bytes: 8 << 20, ..options() };
    CpuModel::load(source, &options).unwrap()
}

impl GuessGolden {
    fn in_folder(&self, guesses: bool) -> CpuModel {
        self.model.in_folder(&self.model.config, |source| load(source, guesses))
    }

    fn row(&self, tokens: usize) -> RowSampling {
        let params = SamplingParams { temperature: 0.0, ..SamplingParams::default() };
        RowSampling {
            params: Arc::new(params),
            tokens: Arc::new(self.model.tokens[..tokens].to_vec()),
            pending: None,
            prompt_len: tokens,
            banned: Arc::default(),
            grammar: None,
        }
    }

    /// The sequence in the first blocks with so many tokens.
    fn wanted(&self, tokens: usize, most: usize) -> WantedGuesses {
        WantedGuesses { row: self.row(tokens), blocks: vec![0, 1, 2], most }
    }

    /// A step of these tokens, whose sequence has the first blocks. No token is drawn.
    fn step(&self, model: &mut CpuModel, tokens: Range<usize>) {
        let positions = tokens.start as u32..tokens.end as u32;
        let batch = ForwardBatch {
            input_ids: self.model.tokens[tokens.clone()].to_vec(),
            positions: positions.clone().collect(),
            cu_seqlens_q: vec![0, tokens.len() as u32],
            seq_lens: vec![positions.end],
            block_tables: vec![vec![0, 1, 2]],
            slot_mapping: positions.collect(),
            following: vec![self.model.tokens.get(tokens.end).copied().unwrap_or(0)],
            ..ForwardBatch::default()
        };
        model.launch(&batch.spread(model.cache_kinds(), BLOCK_SIZE), &[]).unwrap();
        model.collect().unwrap();
    }

    /// The logits of the head at these positions of a text that was computed in chunks.
    fn logits(&self, model: &mut CpuModel, chunk: usize) -> Vec<Vec<f32>> {
        let all = self.model.tokens.len();
        let mut logits = Vec::new();
        for start in (0..all).step_by(chunk) {
            let end = all.min(start + chunk);
            self.step(model, start..end);
            let known = end.min(all - 1) - start;
            let wanted = (0..known).map(|i| self.wanted(start + i + 2, 1)).collect();
            assert_eq!(model.guess(wanted).unwrap().concat().len(), known);
            let found = model.logits.narrow(0, 0, known).unwrap().to_vec2().unwrap();
            logits.extend(found);
        }
        logits
    }

    /// The logits of the first guess of a text that was computed in chunks.
    fn first_logits(&self, model: &mut CpuModel, chunk: usize) -> Vec<Vec<f32>> {
        let known = self.model.tokens.len() - 1;
        for start in (0..known).step_by(chunk) {
            self.step(model, start..known.min(start + chunk));
        }
        model.guess(vec![self.wanted(known + 1, 1)]).unwrap();
        model.logits.narrow(0, 0, 1).unwrap().to_vec2().unwrap()
    }

    fn check(&self, load: impl Fn() -> CpuModel, what: &str) {
        let what = format!("{} from {what}", self.model.name);
        let mut model = load();
        assert!(model.guesses(), "{what}");
        let want = &self.logits[..self.model.tokens.len() - 1];
        let whole = self.logits(&mut model, 40);
        assert_close(&whole, want, &what);
        for chunk in [1, 7] {
            assert_eq!(self.logits(&mut model, chunk), whole, "{what} in chunks of {chunk}");
            // Only the steps themselves have filled the cache of this model's head.
            let first = self.first_logits(&mut load(), chunk);
            assert_eq!(first, whole[whole.len() - 1..], "{what} in chunks of {chunk}");
        }
        self.check_guesses(&mut model, &what);
    }

    /// Behind its own guesses the head goes on from its own states, as far as the blocks reach.
    fn check_guesses(&self, model: &mut CpuModel, what: &str) {
        for (most, blocks) in [(1, 3), (3, 3), (2, 2)] {
            self.step(model, 0..40);
            let wanted = WantedGuesses {
                blocks: (0..blocks).collect(),
                ..self.wanted(self.model.tokens.len(), most)
            };
            let expect = if blocks < 3 { &[] } else { &self.guesses[..most] };
            assert_eq!(model.guess(vec![wanted]).unwrap(), [expect], "{what}");
        }
        let last = model.logits.get(0).unwrap().to_vec1::<f32>().unwrap();
        assert_eq!(last.len(), self.logits[0].len());
        // No guess can go on from the model's states, since the head has overwritten them.
        assert_eq!(model.guess(vec![self.wanted(40, 3)]).unwrap(), [[0; 0]], "{what}");
    }
}

#[test]
fn the_head_gives_the_logits_of_its_definition() {
    for case in guess_goldens().unwrap() {
        case.check(|| case.in_folder(true), "a folder");
        if let Some(converted) = &case.model.gguf {
            let file = case.model.gguf_file(converted);
            let source = ModelSource::gguf(file.path().to_owned());
            case.check(|| load(&source, true), "GGUF");
        }
    }
}

/// Copies of what the head shares with the model are left out, as is the head where none is wanted.
/// Neither changes a bit of what the model computes.
#[test]
fn the_model_computes_the_same_with_its_head_and_without_it() {
    for mut case in guess_goldens().unwrap() {
        let mut with = case.in_folder(true);
        let mut without = case.in_folder(false);
        assert!(!without.guesses() && with.weight_bytes > without.weight_bytes);
        let tokens = case.model.tokens.clone();
        for chunk in [7, 40] {
            let expect = crate::tests::alone(&mut without, &tokens, chunk);
            assert_eq!(crate::tests::alone(&mut with, &tokens, chunk), expect, "{chunk}");
        }
        let layers = &case.model.config["num_hidden_layers"];
        if case.model.config.get("num_nextn_predict_layers").is_some() {
            for copy in ["embed_tokens", "shared_head.head"] {
                let name = format!("model.layers.{layers}.{copy}.weight");
                case.model.tensors.insert(name, vec![48, 64]);
            }
            assert_eq!(case.in_folder(true).weight_bytes, with.weight_bytes);
        }
    }
}

/// A head guesses on from the states of the latest step alone, and of a step that named the tokens
/// behind it.
#[test]
fn nothing_is_guessed_of_a_sequence_that_had_no_row() {
    let case = guess_goldens().unwrap().remove(0);
    let mut model = case.in_folder(true);
    case.step(&mut model, 0..20);
    case.step(&mut model, 20..40);
    let wanted = |tokens| vec![case.wanted(tokens, 1)];
    assert_eq!(model.guess(wanted(12)).unwrap(), [[0; 0]]);
    case.step(&mut model, 20..40);
    assert_eq!(model.guess(vec![case.wanted(30, 0), case.wanted(30, 1)]).unwrap()[0], [0; 0]);
    case.step(&mut model, 20..40);
    crate::tests::alone(&mut model, &case.model.tokens, 40);
    let mut step = ForwardBatch {
        input_ids: vec![1],
        positions: vec![0],
        cu_seqlens_q: vec![0, 1],
        seq_lens: vec![1],
        block_tables: vec![vec![0]],
        slot_mapping: vec![0],
        ..ForwardBatch::default()
    };
    step = step.spread(model.cache_kinds(), BLOCK_SIZE);
    model.launch(&step, &[]).unwrap();
    assert_eq!(model.guess(wanted(2)).unwrap(), [[0; 0]]);
    step.following = vec![48];
    assert!(matches!(model.forward(&step), Err(Error::Batch(_))));
    step.following = vec![1, 2];
    assert!(matches!(model.forward(&step), Err(Error::Batch(_))));
}
