//! The first thing that a loaded model computes: what it computed when it was qualified. A machine
//! or a load that has gone wrong since is found before a client's request is.

#![expect(clippy::disallowed_methods, reason = "a canary ends after its time")]

use super::batch::forward_batch;
use super::error::EngineError;
use super::runner::Runner;
use super::scheduler::{EngineOptions, Scheduler};
use super::sequence::{GenerateRequest, SequenceId, StopCause};
use cresset_kernels::sampling::params::SamplingParams;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A prompt and the most likely token at each position after it.
#[derive(Clone, Debug, PartialEq)]
pub struct KnownAnswer {
    pub prompt: Vec<u32>,
    pub tokens: Vec<u32>,
    /// The lead of each token over the second most likely one, nats.
    pub margins: Vec<f32>,
}

/// Computes the answers side by side for at most `patience` and compares each position whose lead
/// is more than `decisive`; after a position that differs the known token goes on. Returns how many
/// positions were computed.
///
/// # Errors
/// `WrongAnswers` when a position differs, and the runner's own errors.
pub fn compare(
    runner: &mut dyn Runner,
    options: &EngineOptions,
    answers: &[KnownAnswer],
    decisive: f32,
    patience: Duration,
) -> Result<usize, EngineError> {
    let began = Instant::now();
    let mut canary = Canary::new(options, answers, decisive);
    let mut compared = 0;
    while !canary.open.is_empty() && began.elapsed() < patience {
        compared += canary.step(runner)?;
    }
    Ok(compared)
}

/// Answers that are being computed, with the number of tokens that each has.
struct Canary<'a> {
    scheduler: Scheduler,
    open: BTreeMap<SequenceId, (&'a KnownAnswer, usize)>,
    decisive: f32,
}

impl<'a> Canary<'a> {
    fn new(options: &EngineOptions, answers: &'a [KnownAnswer], decisive: f32) -> Self {
        // Each step gives one token of each answer.
        let options = EngineOptions { speculative_tokens: 0, ..options.clone() };
        // The prefix cache of this scheduler is not used again, so its hashes need no secret.
        let mut scheduler = Scheduler::new(options, [0; 32]);
        let mut open = BTreeMap::new();
        for (index, answer) in answers.iter().enumerate() {
            let id = SequenceId(index as u64 + 1);
            scheduler.add(id, request(answer));
            open.insert(id, (answer, 0));
        }
        Self { scheduler, open, decisive }
    }

    /// Computes one step and returns how many positions it compared.
    fn step(&mut self, runner: &mut dyn Runner) -> Result<usize, EngineError> {
        let step = self.scheduler.schedule();
        if step.rows.is_empty() {
            return Err(EngineError::Integrity("the canary's prompts cannot be computed".into()));
        }
        let (batch, rows) = forward_batch(&self.scheduler, &step);
        runner.launch(&batch, &rows)?;
        let results = runner.collect()?;
        let rows = self.scheduler.commit_step().into_iter().filter(|row| row.samples);
        let mut compared = 0;
        for (row, result) in rows.zip(results) {
            self.compare(row.id, result?.token)?;
            compared += 1;
        }
        Ok(compared)
    }

    fn compare(&mut self, id: SequenceId, found: u32) -> Result<(), EngineError> {
        let (answer, at) = self.open[&id];
        let (wanted, margin) = (answer.tokens[at], answer.margins[at]);
        if found != wanted && margin > self.decisive {
            return Err(wrong(id, at, wanted, found, margin));
        }
        self.scheduler.append(id, wanted);
        if at + 1 < answer.tokens.len() {
            self.open.insert(id, (answer, at + 1));
        } else {
            self.scheduler.finish(id, StopCause::Length);
            self.open.remove(&id);
        }
        Ok(())
    }
}

fn wrong(id: SequenceId, at: usize, wanted: u32, found: u32, margin: f32) -> EngineError {
    EngineError::WrongAnswers(format!(
        "it computes other tokens than when it was qualified: at position {at} of canary {} token \
         {found} instead of {wanted}, which led by {margin:.3} nat: see `cresset doctor`, then \
         qualify it again",
        id.0
    ))
}

fn request(answer: &KnownAnswer) -> GenerateRequest {
    GenerateRequest {
        account: cresset_base::AccountId(uuid::Uuid::nil()),
        application: None,
        priority: 0,
        background: false,
        prompt: Arc::new(answer.prompt.clone()),
        sampling: SamplingParams { temperature: 0.0, ..SamplingParams::default() },
        // One more than is computed: the end of an answer is decided here.
        max_tokens: answer.tokens.len() as u32 + 1,
        min_tokens: 0,
        eos_ids: [].into(),
        grammar: None,
        deadline: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{ScriptedFailure, ScriptedRunner};
    use cresset_models::cache_kinds::CacheKinds;

    fn options() -> EngineOptions {
        EngineOptions {
            max_batched_tokens: 8,
            max_rows: 2,
            background_tokens: 16,
            max_waiting: 8,
            block_size: 16,
            num_blocks: 64,
            cache: CacheKinds::default(),
            max_context: 64,
            speculative_tokens: 0,
        }
    }

    fn answer(tokens: &[u32], margin: f32) -> KnownAnswer {
        let margins = vec![margin; tokens.len()];
        KnownAnswer { prompt: (1..20).collect(), tokens: tokens.to_vec(), margins }
    }

    fn check(answers: &[KnownAnswer], runner: ScriptedRunner) -> Result<usize, EngineError> {
        let mut runner = runner;
        compare(&mut runner, &options(), answers, 0.03, Duration::from_mins(1))
    }

    #[test]
    fn an_engine_that_answers_as_before_passes_and_another_does_not() {
        let three = || vec![answer(&[5, 6, 7], 1.0), answer(&[5, 6], 1.0), answer(&[5], 1.0)];
        let runner = || ScriptedRunner::repeating(vec![5, 6, 7]);
        assert_eq!(check(&three(), runner()), Ok(6));
        let other = check(&three(), ScriptedRunner::repeating(vec![5, 6, 8])).unwrap_err();
        assert_eq!(other.kind(), "wrong_answers");
        let text = other.to_string();
        assert!(text.contains("position 2") && text.contains("8 instead of 7"), "{text}");
        let failing = runner().fail_at(1, ScriptedFailure::Error);
        assert_eq!(check(&three(), failing).unwrap_err().kind(), "compute");
    }

    #[test]
    fn a_close_second_choice_is_no_fault_and_the_rest_is_compared() {
        let mut close = answer(&[5, 9, 7, 8], 1.0);
        close.margins[1] = 0.02;
        let script = |tail| ScriptedRunner::repeating(vec![5, 6, 7, tail]);
        assert_eq!(check(std::slice::from_ref(&close), script(8)), Ok(4));
        assert!(check(&[close], script(1)).is_err());
    }

    #[test]
    fn it_takes_no_longer_than_it_may() {
        let mut slow = ScriptedRunner::repeating(vec![5]).step_time(Duration::from_millis(20));
        let long = [answer(&[5; 40], 1.0)];
        let patience = Duration::from_millis(100);
        let compared = compare(&mut slow, &options(), &long, 0.03, patience).unwrap();
        assert!((1..40).contains(&compared), "{compared}");
    }
}
