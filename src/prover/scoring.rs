//! Scores a given text through the engine: log-probabilities of the tokens that the text has, in
//! place of sampled ones. A runner between the engine and its model asks for the logits of prompt
//! rows too, and biases each row towards the text's next token, so scheduler, cache, kernels and
//! sampler are those that serve. Only a qualification has such a runner.

#[cfg(feature = "self-test")]
use super::self_test::{EngineFault, FaultyRunner};
use cresset_engine::{EngineError, RowResult, RowSampling, Runner, SamplingParams, TokenLogprobs};
use cresset_models::ForwardBatch;
#[cfg(feature = "self-test")]
use cresset_models::planted::OpFault;
use cresset_qualification::subject::{ScorePath, TOP_LOGPROBS};
use parking_lot::Mutex;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

/// Raises the text's next token over every other.
pub(super) const FORCE: f32 = 1e4;

/// The text being scored. One at a time: nothing else may run in the engine meanwhile.
#[derive(Clone, Default)]
pub(super) struct Scoring {
    text: Arc<Mutex<Option<ScoredText>>>,
    /// A fault that is planted in the engine.
    #[cfg(feature = "self-test")]
    pub(super) fault: Option<EngineFault>,
}

struct ScoredText {
    tokens: Vec<u32>,
    path: ScorePath,
    /// By position, those of the next token.
    found: BTreeMap<usize, TokenLogprobs>,
}

impl Scoring {
    #[cfg(feature = "self-test")]
    pub(super) fn with_fault(fault: Option<EngineFault>) -> Self {
        Self { fault, ..Self::default() }
    }

    /// Whether the engine computes as a device of that precision does.
    #[cfg(feature = "self-test")]
    pub(super) fn rounds_to_bf16(&self) -> bool {
        self.fault == Some(EngineFault::Op(OpFault::Bf16))
    }

    #[cfg(not(feature = "self-test"))]
    #[expect(clippy::unused_self, reason = "a build for the self-test has such engines")]
    pub(super) fn rounds_to_bf16(&self) -> bool {
        false
    }

    /// The runner with the planted fault, if there is one.
    #[cfg(feature = "self-test")]
    pub(super) fn spoiled(&self, runner: Box<dyn Runner>, block_size: usize) -> Box<dyn Runner> {
        match self.fault {
            Some(fault) => Box::new(FaultyRunner::new(runner, fault, block_size)),
            None => runner,
        }
    }

    #[cfg(not(feature = "self-test"))]
    #[expect(clippy::unused_self, reason = "a build for the self-test has faults")]
    pub(super) fn spoiled(&self, runner: Box<dyn Runner>, _: usize) -> Box<dyn Runner> {
        runner
    }

    pub(super) fn begin(&self, tokens: &[u32], path: ScorePath) {
        let (tokens, found) = (tokens.to_vec(), BTreeMap::new());
        *self.text.lock() = Some(ScoredText { tokens, path, found });
    }

    /// Ends the scoring and returns what was found, by position.
    pub(super) fn end(&self) -> BTreeMap<usize, TokenLogprobs> {
        self.text.lock().take().map(|text| text.found).unwrap_or_default()
    }
}

/// A runner that scores while a text is given, and is the inner one otherwise.
pub(super) struct ScoringRunner {
    inner: Box<dyn Runner>,
    scoring: Scoring,
    /// Most rows of a step whose logits are computed.
    most_rows: usize,
    /// For each step in flight that scores: its rows.
    in_flight: VecDeque<Option<Vec<ScoredRow>>>,
}

impl ScoringRunner {
    /// `most_rows` is the number of rows of a step that the model can compute logits for.
    pub(super) fn new(inner: Box<dyn Runner>, scoring: Scoring, most_rows: usize) -> Self {
        Self { inner, scoring, most_rows, in_flight: VecDeque::new() }
    }

    /// The index among the results of the step launched last of a result that the engine counts
    /// among those it asked for.
    fn result(&self, asked: u32) -> u32 {
        let Some(Some(rows)) = self.in_flight.back() else { return asked };
        let mut indices = rows.iter().enumerate().filter(|(_, row)| row.asked);
        indices.nth(asked as usize).map_or(asked, |(index, _)| index as u32)
    }
}

#[derive(Clone, Copy)]
struct ScoredRow {
    position: usize,
    asked: bool,
    scored: bool,
}

impl ScoredText {
    /// The rows of a step whose logits are wanted, by their index in the batch.
    fn rows(&self, batch: &ForwardBatch, most: usize) -> Vec<(u32, ScoredRow)> {
        let total = batch.input_ids.len();
        let is_asked = |row: usize| batch.logits_indices.binary_search(&(row as u32)).is_ok();
        // The rows of a sequence that decodes are its last token, and drafts behind it.
        let decodes = |row: usize| {
            let sequence = batch.cu_seqlens_q.partition_point(|start| *start as usize <= row);
            is_asked(batch.cu_seqlens_q[sequence - 1] as usize)
        };
        // A device has room for few rows: then one row in `every` is scored.
        let every = if self.path == ScorePath::Prefill { total.div_ceil(most) } else { total };
        let row = |row: usize| {
            let asked = is_asked(row);
            let position = batch.positions[row] as usize;
            let scored = match self.path {
                ScorePath::Prefill => asked || row % every == every - 1,
                ScorePath::Decode => asked && decodes(row),
            };
            let scored = scored && position + 1 < self.tokens.len();
            (asked || scored).then_some((row as u32, ScoredRow { position, asked, scored }))
        };
        (0..total).filter_map(row).take(most.max(batch.logits_indices.len())).collect()
    }

    /// How to sample a row: so that the text's next token is chosen. `asked` is how the engine
    /// would sample it.
    fn sampling(&self, position: usize, asked: Option<RowSampling>) -> RowSampling {
        let next = self.tokens.get(position + 1).map(|token| (*token, FORCE));
        let params = Arc::new(SamplingParams {
            temperature: 0.0,
            logit_bias: next.into_iter().collect(),
            logprobs: Some(TOP_LOGPROBS),
            ..SamplingParams::default()
        });
        let row = || RowSampling {
            params: params.clone(),
            tokens: Arc::new(self.tokens[..=position].to_vec()),
            pending: None,
            prompt_len: position + 1,
            banned: Arc::default(),
            grammar: None,
        };
        asked.map_or_else(row, |asked| RowSampling { params: params.clone(), ..asked })
    }
}

impl Runner for ScoringRunner {
    fn launch(&mut self, batch: &ForwardBatch, rows: &[RowSampling]) -> Result<(), EngineError> {
        let text = self.scoring.text.lock();
        let Some(text) = text.as_ref() else {
            self.inner.launch(batch, rows)?;
            self.in_flight.push_back(None);
            return Ok(());
        };
        let mut wanted = text.rows(batch, self.most_rows);
        // A row behind a draft that differs from the text does not count in the text's score.
        for ((_, row), asked) in wanted.iter_mut().filter(|(_, row)| row.asked).zip(rows) {
            row.scored &= text.tokens.starts_with(&asked.tokens);
        }
        let mut wider = batch.clone();
        wider.logits_indices = wanted.iter().map(|(row, _)| *row).collect();
        wider.feedback.iter_mut().flatten().for_each(|index| *index = self.result(*index));
        let mut asked = rows.iter().map(|row| {
            let pending = row.pending.map(|index| self.result(index));
            RowSampling { pending, ..row.clone() }
        });
        let own = |(_, row): &(u32, ScoredRow)| {
            text.sampling(row.position, if row.asked { asked.next() } else { None })
        };
        let sampling: Vec<RowSampling> = wanted.iter().map(own).collect();
        self.inner.launch(&wider, &sampling)?;
        self.in_flight.push_back(Some(wanted.into_iter().map(|(_, row)| row).collect()));
        Ok(())
    }

    fn sample(&mut self, rows: &[Option<RowSampling>]) -> Result<(), EngineError> {
        self.inner.sample(rows)
    }

    fn collect(&mut self) -> Result<Vec<RowResult>, EngineError> {
        let results = self.inner.collect()?;
        let Some(rows) = self.in_flight.pop_front().flatten() else { return Ok(results) };
        let mut text = self.scoring.text.lock();
        let mut asked = Vec::new();
        for (row, result) in rows.into_iter().zip(results) {
            if let (Some(text), true, Ok(sampled)) = (text.as_mut(), row.scored, &result) {
                text.found.extend(sampled.logprobs.clone().map(|found| (row.position, found)));
            }
            asked.extend(row.asked.then_some(result));
        }
        Ok(asked)
    }

    fn depth(&self) -> usize {
        self.inner.depth()
    }

    fn recover(&mut self) -> Result<(), EngineError> {
        self.in_flight.clear();
        self.inner.recover()
    }
}
