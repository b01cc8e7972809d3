//! A runner that has two steps in flight without a device.

use crate::EngineError;
use crate::runner::{RowResult, Runner, nothing_launched};
use crate::testing::with_pending;
use cresset_kernels::sampling::params::{RowSampling, Sampled};
use cresset_models::ForwardBatch;
use std::collections::VecDeque;
use std::sync::Arc;

/// Wraps a runner of depth 1. Each step is computed at its launch, or when it is sampled if a
/// grammar has to wait. Input tokens that the engine does not have yet are filled in from this
/// runner's own last results, which the engine sees later, when it collects.
pub struct Ahead {
    inner: Box<dyn Runner>,
    previous: Vec<RowResult>,
    /// The step launched last, if a grammar of it waits.
    waiting: Option<(ForwardBatch, Vec<RowSampling>)>,
    launched: VecDeque<Vec<RowResult>>,
}

impl Ahead {
    /// Returns `runner` itself for a depth of 1, and wraps it otherwise.
    pub fn wrap(depth: usize, runner: impl Runner + 'static) -> Box<dyn Runner> {
        let inner: Box<dyn Runner> = Box::new(runner);
        if depth == 1 {
            return inner;
        }
        let (previous, waiting, launched) = (Vec::new(), None, VecDeque::new());
        Box::new(Self { inner, previous, waiting, launched })
    }

    fn compute(&mut self, batch: &ForwardBatch, rows: &[RowSampling]) -> Result<(), EngineError> {
        self.inner.launch(batch, rows)?;
        self.previous = self.inner.collect()?;
        self.launched.push_back(self.previous.clone());
        Ok(())
    }
}

impl Runner for Ahead {
    fn launch(&mut self, batch: &ForwardBatch, rows: &[RowSampling]) -> Result<(), EngineError> {
        let mut batch = batch.clone();
        assert!(batch.feedback.is_empty() || batch.feedback.len() == batch.input_ids.len());
        for (id, from) in batch.input_ids.iter_mut().zip(std::mem::take(&mut batch.feedback)) {
            if let Some(index) = from {
                assert_eq!(*id, 0);
                *id = self.previous[index as usize].as_ref().unwrap().token;
            }
        }
        assert!(self.waiting.is_none(), "the step before was not sampled");
        let waits = rows.iter().any(RowSampling::awaits_mask);
        let rows: Vec<_> = rows.iter().map(|row| with_pending(row, &self.previous)).collect();
        if waits {
            self.waiting = Some((batch, rows));
            return Ok(());
        }
        self.compute(&batch, &rows)
    }

    fn sample(&mut self, known: &[Option<RowSampling>]) -> Result<(), EngineError> {
        let (batch, mut rows) = self.waiting.take().expect("a grammar of the step waits");
        for (row, known) in rows.iter_mut().zip(known) {
            match known {
                Some(known) => {
                    let both = [&*row, known].map(|row| (row.tokens.clone(), row.banned.clone()));
                    assert_eq!(both[0], both[1], "it is the same row");
                    assert_eq!(known.pending, None);
                }
                None => row.grammar = None,
            }
        }
        self.compute(&batch, &rows)
    }

    fn collect(&mut self) -> Result<Vec<RowResult>, EngineError> {
        self.launched.pop_front().ok_or_else(nothing_launched)
    }

    fn depth(&self) -> usize {
        2
    }

    fn recover(&mut self) -> Result<(), EngineError> {
        self.launched.clear();
        self.waiting = None;
        self.inner.recover()
    }
}

#[test]
fn a_pending_token_is_one_of_the_previous_results() {
    let before = RowSampling {
        params: Arc::default(),
        tokens: Arc::new(vec![3, 1]),
        pending: Some(1),
        prompt_len: 2,
        banned: Arc::default(),
        grammar: None,
    };
    let previous = [9, 4].map(|token| Ok(Sampled { token, logprobs: None }));
    let found = with_pending(&before, &previous);
    assert_eq!((&found.tokens[..], found.pending, found.position()), (&[3, 1, 4][..], None, 3));
}
