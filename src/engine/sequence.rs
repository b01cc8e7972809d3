//! One sequence: its tokens, how far they are computed, and its blocks. Pure.

use super::block_manager::{BlockManager, BlockOwner, BlockTable};
use super::error::EngineError;
use super::grammar::TokenGrammar;
pub use super::sequence_id::SequenceId;
use super::speculation::{Drafts, Wanted};
use cresset_base::{AccountId, ApplicationId};
use cresset_kernels::sampling::params::{RowSampling, SamplingParams, TokenMask};
use std::sync::Arc;
use std::time::Instant;

/// One sequence to generate. The engine does not look for stop strings: the caller finds them, and
/// ends the sequence with `EngineHandle::stop`.
#[derive(Clone, Debug)]
pub struct GenerateRequest {
    /// Fairness is per account.
    pub account: AccountId,
    /// Prefixes are found again per application connection of the account.
    pub application: Option<ApplicationId>,
    /// The priority of the account's plan: higher ones are served first.
    pub priority: u8,
    /// It runs only in steps in which no other sequence has work (the idle class of schedulers), is
    /// preempted by any that comes, and counts in no queue limit.
    pub background: bool,
    /// At least one token. The sequence takes this list over and appends its output to it, without
    /// a copy if the caller has dropped its own reference by then.
    pub prompt: Arc<Vec<u32>>,
    pub sampling: SamplingParams,
    /// Most tokens to produce, at least 1.
    pub max_tokens: u32,
    /// End-of-text ids are masked out until this many tokens are produced.
    pub min_tokens: u32,
    /// Ids that end the generation (empty when end-of-text is ignored). The ending token counts as
    /// produced but is not text.
    pub eos_ids: Arc<[u32]>,
    /// What the answer keeps to.
    pub grammar: Option<Arc<dyn TokenGrammar>>,
    /// The sequence ends before the first step that would begin after this.
    pub deadline: Option<Instant>,
}

impl GenerateRequest {
    /// Most events that the sequence can have: `Started`, one for each token, and `Finished`. A
    /// channel with room for them never makes the engine wait.
    pub fn event_capacity(&self) -> usize {
        self.max_tokens as usize + 2
    }

    /// Whose prefixes the sequence may find again and leaves for later ones.
    pub(super) fn owner(&self) -> BlockOwner {
        BlockOwner { account: self.account, application: self.application }
    }
}

/// How a sequence ended, and what it is charged for.
#[derive(Clone, Debug, PartialEq)]
pub struct Finished {
    pub cause: StopCause,
    /// Prompt tokens computed or taken from the prefix cache so far.
    pub prompt_tokens: u32,
    /// Prompt tokens taken from the prefix cache when the sequence first started.
    pub cached_tokens: u32,
    /// Exactly the number of `Token` events sent.
    pub completion_tokens: u32,
}

/// Why a sequence ended.
#[derive(Clone, Debug, PartialEq)]
pub enum StopCause {
    /// An end-of-text id was produced.
    EndOfText,
    /// `max_tokens` or the context was reached.
    Length,
    /// `EngineHandle::stop` was called (cancel, or a stop string).
    Stopped,
    DeadlineExceeded,
    /// The sequence never started: its model was not loaded in time, or the engine was full by
    /// then.
    TurnedAway,
    /// The engine could not go on with it. The error is for logs, not for clients.
    Failed(EngineError),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SequenceState {
    /// The sequence holds no blocks, and none of its tokens is computed.
    Waiting,
    /// The sequence holds blocks, or gets them with its next row.
    Running,
}

/// A sequence in the scheduler. The scheduler runs the tokens beyond `num_computed_tokens`: those
/// of a prompt, the last sampled token, or all of them again after a preemption.
#[derive(Debug)]
pub struct Sequence {
    pub id: SequenceId,
    /// The request, without its prompt: that has become the beginning of `tokens`.
    pub request: GenerateRequest,
    prompt_len: usize,
    /// Prompt and output so far. The runner shares it during a launch only, so appending to it
    /// copies nothing.
    pub tokens: Arc<Vec<u32>>,
    /// Leading tokens whose keys and values are in the blocks once the steps in flight are done.
    pub num_computed_tokens: usize,
    pub table: BlockTable,
    pub state: SequenceState,
    /// Number of the sequence's rows in flight.
    pub rows_in_flight: usize,
    /// How many of these rows give a token. Those tokens follow `tokens`; only the runner has them
    /// yet.
    pub pending_tokens: usize,
    /// Tokens that were in the prefix cache when it came.
    pub expected_in_cache: usize,
    drafts: Drafts,
    /// Index of the sequence's latest result among the results of that result's step.
    latest_result: u32,
    sampling: Arc<SamplingParams>,
    grammar: Option<Arc<dyn TokenMask>>,
    /// Tokens found in the prefix cache at the first start; `None` until then.
    cached_tokens: Option<usize>,
    /// Most prompt tokens that were ever computed or found in the cache. A preemption does not
    /// lower it.
    prompt_tokens: usize,
}

impl Sequence {
    pub fn new(id: SequenceId, mut request: GenerateRequest) -> Self {
        let tokens = std::mem::take(&mut request.prompt);
        Self {
            id,
            prompt_len: tokens.len(),
            table: BlockTable::new(request.owner(), tokens.len()),
            tokens,
            num_computed_tokens: 0,
            state: SequenceState::Waiting,
            rows_in_flight: 0,
            pending_tokens: 0,
            expected_in_cache: 0,
            drafts: Drafts::default(),
            latest_result: 0,
            sampling: Arc::new(request.sampling.clone()),
            grammar: request.grammar.as_ref().map(|grammar| grammar.begin()),
            cached_tokens: None,
            prompt_tokens: 0,
            request,
        }
    }

    /// Notes what the prefix cache has of its prompt.
    pub fn looked_up(mut self, blocks: &BlockManager) -> Self {
        self.expected_in_cache = blocks.found(&mut self.table, &self.tokens);
        self
    }

    /// How many tokens, known or pending, are neither computed nor in flight.
    pub fn uncomputed(&self) -> usize {
        self.tokens.len() + self.pending_tokens - self.num_computed_tokens
    }

    /// How many of these it is expected to need computed: one that waits begins with what is in the
    /// prefix cache.
    pub fn expected_work(&self) -> usize {
        let found = self.expected_in_cache;
        let found = if self.state == SequenceState::Waiting { found } else { 0 };
        self.uncomputed().saturating_sub(found)
    }

    /// Tokens produced so far, pending ones not included.
    pub fn output_len(&self) -> usize {
        self.tokens.len() - self.prompt_len
    }

    /// Whether only the last sampled token is to be computed: its row has one token and gives one.
    pub fn is_decoding(&self) -> bool {
        self.state == SequenceState::Running && self.uncomputed() == 1
    }

    /// Whether the sequence's last token is in flight already, so that no further row is needed.
    pub fn is_ending(&self, max_context: usize) -> bool {
        self.remaining(max_context) <= self.pending_tokens
    }

    /// Which result of the step launched last is the token that follows `tokens`.
    pub fn feedback(&self) -> Option<u32> {
        (self.pending_tokens > 0).then_some(self.latest_result)
    }

    /// Starts to run with `cached` tokens already in the blocks. True when it is the first start.
    pub fn start(&mut self, cached: usize) -> bool {
        self.state = SequenceState::Running;
        self.num_computed_tokens = cached;
        let first = self.cached_tokens.is_none();
        self.cached_tokens.get_or_insert(cached);
        first
    }

    /// Goes back to waiting: nothing counts as computed any more. The tokens stay.
    pub fn preempt(&mut self) {
        self.state = SequenceState::Waiting;
        self.num_computed_tokens = 0;
    }

    /// Notes that a row of the next `count` tokens is in flight. True when it reaches the
    /// sequence's end: then the row's result, the step's `result`-th, is the next token.
    pub fn schedule(&mut self, count: usize, result: u32) -> bool {
        let samples = count == self.uncomputed();
        self.num_computed_tokens += count;
        self.rows_in_flight += 1;
        if samples {
            self.pending_tokens += 1;
            self.latest_result = result;
        }
        samples
    }

    /// Looks for at most `most` drafts to compute behind the last token, as many as are worth their
    /// `price`. None for an answer that keeps to a grammar, whose place only goes forward.
    pub fn find_drafts(&mut self, most: usize, price: f64) {
        let most = if self.grammar.is_some() { 0 } else { most };
        self.drafts.look_up(&self.tokens, most, price);
    }

    /// What a proposer is asked for where nothing was found: at most `most` drafts, if any is worth
    /// its `price`. `assumed` is the share of its drafts that are right in other sequences.
    pub fn wanted_drafts(&self, most: usize, price: f64, assumed: f64) -> Option<Wanted> {
        let most = self.drafts.worth_proposing(most, price, assumed);
        let wanted = self.drafts().is_empty() && self.grammar.is_none() && most > 0;
        wanted.then(|| Wanted {
            id: self.id,
            row: self.row_sampling(None, 0),
            blocks: self.table.groups()[0].clone(),
            most,
        })
    }

    /// Takes over the drafts of a proposer.
    pub fn take_drafts(&mut self, tokens: Vec<u32>) {
        self.drafts.take(tokens);
    }

    /// Gives up all drafts but the first `most`, and returns how many there are.
    pub fn keep_drafts(&mut self, most: usize) -> usize {
        self.drafts.truncate(most);
        self.drafts().len()
    }

    /// The drafts of the row in flight.
    pub fn drafts(&self) -> &[u32] {
        self.drafts.tokens()
    }

    /// Whether the next token will be compared with a draft of a proposer.
    pub fn awaits_proposed(&self) -> bool {
        self.drafts.awaits_proposed()
    }

    /// Notes that the first `count` tokens are computed or were found in the cache. Returns how
    /// many prompt tokens are counted for the first time by that; none of a background sequence.
    pub fn count_prompt(&mut self, count: usize) -> u64 {
        assert!(count <= self.tokens.len());
        let before = self.prompt_tokens;
        self.prompt_tokens = before.max(count.min(self.prompt_len));
        self.counted(self.prompt_tokens - before)
    }

    /// So many tokens as the engine's totals count them: none of a background sequence.
    pub fn counted(&self, tokens: usize) -> u64 {
        if self.request.background { 0 } else { tokens as u64 }
    }

    /// Appends the token that was pending longest. A cause means that it is the last one. If it is
    /// the draft in its place, it is computed already, and the token after it is pending.
    pub fn append(&mut self, token: u32, max_context: usize) -> Option<StopCause> {
        self.pending_tokens -= 1;
        Arc::make_mut(&mut self.tokens).push(token);
        if self.drafts.accept(token) {
            self.num_computed_tokens += 1;
            self.pending_tokens += 1;
        }
        if self.request.eos_ids.contains(&token) {
            Some(StopCause::EndOfText)
        } else if self.remaining(max_context) == 0 {
            Some(StopCause::Length)
        } else {
            None
        }
    }

    /// The number of tokens that it may still produce, pending ones included.
    pub fn remaining(&self, max_context: usize) -> usize {
        (self.request.max_tokens as usize)
            .saturating_sub(self.output_len())
            .min(max_context.saturating_sub(self.tokens.len()))
    }

    /// Says how a row of the step being launched is sampled. The row stands behind the first
    /// `drafts` drafts of the sequence. `pending` is the result of the step before that is the
    /// row's last token, if that is not known yet.
    pub fn row_sampling(&self, pending: Option<u32>, drafts: usize) -> RowSampling {
        let before = self.output_len() + drafts + usize::from(pending.is_some());
        let may_end = before >= self.request.min_tokens as usize;
        let tokens = match drafts {
            0 => Arc::clone(&self.tokens),
            _ => Arc::new([&self.tokens, &self.drafts()[..drafts]].concat()),
        };
        RowSampling {
            params: Arc::clone(&self.sampling),
            tokens,
            pending,
            prompt_len: self.prompt_len,
            banned: if may_end { Arc::default() } else { Arc::clone(&self.request.eos_ids) },
            grammar: self.grammar.clone(),
        }
    }

    /// The sequence's end, counted as of now.
    pub fn finished(&self, cause: StopCause) -> Finished {
        Finished {
            cause,
            prompt_tokens: self.prompt_tokens as u32,
            cached_tokens: self.cached_tokens.unwrap_or(0) as u32,
            completion_tokens: self.output_len() as u32,
        }
    }
}
