//! Who runs in the next step, and with how many tokens.
//!
//! There is no prefill or decode phase: every sequence has tokens beyond `num_computed_tokens`, and
//! each step's token budget is handed out until it is spent. Sequences that miss only their last
//! token come first; the rest of the budget goes to prompts, in chunks: higher priorities first,
//! fairly between accounts of the same one. When blocks run out, the latest arrived sequence is
//! preempted and computed again later.
//! A step is in flight from `schedule` until `advance` takes it in. The next one may be scheduled
//! before that: a token that is sampled in flight counts as the sequence's, only its value is not
//! known.
//! Rows and blocks are shared too: an account that runs nothing and finds no room takes it from the
//! account that runs most.

mod integrity;

use super::block_manager::BlockManager;
use super::fair_queue::FairQueue;
use super::sequence::{Finished, GenerateRequest, Sequence, SequenceId, State, StopCause};
use crate::ids::AccountId;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::time::Instant;

/// Limits of one engine; all from the configuration.
#[derive(Clone, Debug)]
pub struct EngineOptions {
    /// Tokens in one step (prefill chunks and decodes together).
    pub max_batched_tokens: usize,
    /// Sequences in one step.
    pub max_rows: usize,
    /// Sequences waiting for a row before new ones are refused.
    pub max_waiting: usize,
    pub block_size: usize,
    pub num_blocks: usize,
    /// Longest prompt + output of a sequence, tokens.
    pub max_context: usize,
}

/// What one step computes.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Step {
    pub rows: Vec<StepRow>,
    /// Sequences that run for the first time.
    pub started: Vec<SequenceId>,
    pub preempted: Vec<SequenceId>,
    /// Rows that sample.
    num_results: u32,
}

impl Step {
    fn push(&mut self, sequence: &mut Sequence, num_tokens: usize) {
        let (id, from, feedback) = (sequence.id, sequence.num_computed_tokens, sequence.feedback());
        let samples = sequence.launch(num_tokens, self.num_results);
        self.num_results += u32::from(samples);
        self.rows.push(StepRow { id, from, num_tokens, feedback, samples });
    }

    pub fn num_tokens(&self) -> usize {
        self.rows.iter().map(|row| row.num_tokens).sum()
    }
}

/// `num_tokens` tokens of a sequence from position `from` on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepRow {
    pub id: SequenceId,
    pub from: usize,
    pub num_tokens: usize,
    /// The row's only token is this result of the step before, not known yet.
    pub feedback: Option<u32>,
    /// The row reaches the sequence's end, so its last token gives logits.
    pub samples: bool,
}

impl StepRow {
    pub fn end(&self) -> usize {
        self.from + self.num_tokens
    }
}

/// Counters since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    pub prompt_tokens: u64,
    pub generated_tokens: u64,
    pub prefix_hit_tokens: u64,
    pub preemptions: u64,
}

#[derive(Debug)]
pub struct Scheduler {
    options: EngineOptions,
    blocks: BlockManager,
    /// In order of arrival.
    sequences: BTreeMap<SequenceId, Sequence>,
    running: BTreeSet<SequenceId>,
    /// Sequences with more than one token to compute, running or waiting.
    queue: FairQueue,
    /// Sequences per account.
    accounts: HashMap<AccountId, usize>,
    /// A sequence that found no room in the last step although its account runs nothing.
    starved: Option<SequenceId>,
    in_flight: VecDeque<Vec<StepRow>>,
    totals: Totals,
}

impl Scheduler {
    /// `secret` seeds the hashes of the prefix cache; draw it once per boot. No more sequences run
    /// than a step has tokens: each running one gets at least one.
    pub fn new(mut options: EngineOptions, secret: [u8; 32]) -> Self {
        options.max_rows = options.max_rows.min(options.max_batched_tokens);
        assert!(options.max_rows > 0, "a step has at least one row and one token");
        Self {
            blocks: BlockManager::new(options.num_blocks, options.block_size, secret),
            sequences: BTreeMap::new(),
            running: BTreeSet::new(),
            queue: FairQueue::new(options.max_batched_tokens),
            accounts: HashMap::new(),
            starved: None,
            in_flight: VecDeque::new(),
            totals: Totals::default(),
            options,
        }
    }

    /// The sequence must have passed `queue_limits::check_size`.
    pub fn add(&mut self, id: SequenceId, request: GenerateRequest) {
        let (account, priority) = (request.account, request.priority);
        self.queue.push_waiting(account, id, priority);
        *self.accounts.entry(account).or_default() += 1;
        self.sequences.insert(id, Sequence::new(id, request));
    }

    pub fn options(&self) -> &EngineOptions {
        &self.options
    }

    pub fn get(&self, id: SequenceId) -> Option<&Sequence> {
        self.sequences.get(&id)
    }

    pub fn sequences(&self) -> impl Iterator<Item = &Sequence> {
        self.sequences.values()
    }

    pub fn is_empty(&self) -> bool {
        self.sequences.is_empty()
    }

    /// Rows of the steps in flight, oldest first. Some may be of sequences that have ended since.
    pub fn in_flight(&self) -> &VecDeque<Vec<StepRow>> {
        &self.in_flight
    }

    pub fn num_running(&self) -> usize {
        self.running.len()
    }

    pub fn num_waiting(&self) -> usize {
        self.sequences.len() - self.running.len()
    }

    pub fn blocks(&self) -> &BlockManager {
        &self.blocks
    }

    pub fn totals(&self) -> Totals {
        self.totals
    }

    /// Sequences whose deadline has passed.
    pub fn expired(&self, now: Instant) -> Vec<SequenceId> {
        let late = |sequence: &&Sequence| sequence.request.deadline.is_some_and(|at| at <= now);
        self.sequences().filter(late).map(|s| s.id).collect()
    }

    /// Hands out the next step's token budget; a step that is not empty is in flight from now on.
    /// Empty only when there is no sequence, or nothing to do before the steps in flight are taken
    /// in.
    pub fn schedule(&mut self) -> Step {
        self.queue.tick();
        let mut step = Step::default();
        let starved = self.displace(&mut step);
        let displaced = step.preempted.len();
        self.schedule_decodes(&mut step);
        // Blocks that the decodes have just freed belong to those who needed them.
        let admitting = step.preempted.len() == displaced;
        self.schedule_prompts(&mut step, starved.filter(|_| admitting), admitting);
        if !step.rows.is_empty() {
            self.in_flight.push_back(step.rows.clone());
        }
        step
    }

    /// Records that the oldest step in flight was computed: its tokens are in the cache, its full
    /// blocks can be shared. Returns its rows; those of sequences that have ended since count for
    /// nothing.
    pub fn advance(&mut self) -> Vec<StepRow> {
        let rows = self.in_flight.pop_front().expect("invariant: a step is in flight");
        for row in &rows {
            let Some(sequence) = self.sequences.get_mut(&row.id) else { continue };
            sequence.in_flight -= 1;
            self.totals.prompt_tokens += sequence.see(row.end()) as u64;
            // The blocks of a sequence that was preempted since are somebody else's.
            if sequence.state == State::Running {
                self.blocks.register(&mut sequence.table, &sequence.tokens[..row.end()]);
            }
        }
        rows
    }

    /// Gives up the steps in flight. The sequences in them, some perhaps named twice or ended
    /// before, must be finished.
    pub fn abandon(&mut self) -> Vec<SequenceId> {
        self.in_flight.drain(..).flatten().map(|row| row.id).collect()
    }

    /// Appends the token sampled by a row of the step that `advance` took in; a cause means that
    /// the sequence is complete and must be finished.
    pub fn append(&mut self, id: SequenceId, token: u32) -> Option<StopCause> {
        self.totals.generated_tokens += 1;
        sequence_mut(&mut self.sequences, id).append(token, self.options.max_context)
    }

    /// Removes a sequence and frees its blocks at once. `None` when there is no such sequence.
    pub fn finish(&mut self, id: SequenceId, cause: StopCause) -> Option<Finished> {
        let mut sequence = self.sequences.remove(&id)?;
        self.running.remove(&id);
        self.leave_account(&sequence);
        if matches!(cause, StopCause::Failed(_)) {
            self.blocks.discard(&mut sequence.table);
        } else {
            self.blocks.release(&mut sequence.table);
        }
        Some(sequence.finished(cause))
    }

    /// Of a live sequence.
    fn account(&self, id: SequenceId) -> AccountId {
        self.sequences[&id].request.account
    }

    fn schedule_decodes(&mut self, step: &mut Step) {
        let running: Vec<_> = self.running.iter().copied().collect();
        step.rows.reserve(running.len());
        for id in running {
            let sequence = sequence_mut(&mut self.sequences, id);
            let (account, from) = (sequence.request.account, sequence.num_computed_tokens);
            if !sequence.is_decoding() || sequence.is_ending(self.options.max_context) {
                continue;
            }
            if self.blocks.claim(&mut sequence.table, from, from + 1) || self.make_room(id, step) {
                self.queue.charge(account, 1);
                step.push(sequence_mut(&mut self.sequences, id), 1);
            }
        }
    }

    /// Gets the block for one more token, from later arrivals if need be. False when the sequence
    /// itself had to give way.
    fn make_room(&mut self, id: SequenceId, step: &mut Step) -> bool {
        while !self.claim(id, 1) {
            let latest = *self.running.last().expect("invariant: `id` is running");
            // Rows are handed out in order of arrival, so the latest has none in this step yet.
            self.preempt(latest);
            step.preempted.push(latest);
            if latest == id {
                return false;
            }
        }
        true
    }

    /// Makes room for the starved sequence, if it still is: the account that runs the most gives up
    /// its latest arrival.
    fn displace(&mut self, step: &mut Step) -> Option<SequenceId> {
        let rows = self.rows_by_account();
        let starved = self.starved.take().and_then(|id| self.get(id));
        let starved = starved.filter(|sequence| is_starved(sequence, &rows))?.id;
        let most = rows.into_values().max_by_key(Vec::len).filter(|rows| rows.len() > 1);
        if let Some(latest) = most.as_ref().and_then(|rows| rows.last()) {
            self.preempt(*latest);
            step.preempted.push(*latest);
        }
        Some(starved)
    }

    /// What each account runs, in order of arrival.
    fn rows_by_account(&self) -> Rows {
        let mut rows = Rows::new();
        for &id in &self.running {
            rows.entry(self.account(id)).or_default().push(id);
        }
        rows
    }

    /// `first` is served before the queue.
    fn schedule_prompts(
        &mut self,
        step: &mut Step,
        first: Option<SequenceId>,
        mut admitting: bool,
    ) {
        let mut budget = self.options.max_batched_tokens - step.num_tokens();
        let mut popped = Vec::new();
        if let Some(id) = first {
            self.queue.remove(self.account(id), id, false);
        }
        let mut next = first.or_else(|| self.queue.pop(admitting));
        while let Some(id) = next {
            popped.push(id);
            // Nobody overtakes a sequence that does not fit yet, or a long one would wait for ever.
            admitting = self.admit(id, step) && admitting;
            let count = self.chunk(id, budget);
            if count > 0 {
                self.queue.charge(self.account(id), count);
                step.push(sequence_mut(&mut self.sequences, id), count);
                budget -= count;
            }
            next = if budget > 0 { self.queue.pop(admitting) } else { None };
        }
        for id in popped {
            self.requeue(id);
        }
        if !admitting {
            let rows = self.rows_by_account();
            let starved = self.sequences().filter(|sequence| is_starved(sequence, &rows));
            let first = starved.max_by_key(|sequence| {
                (self.queue.rank(sequence.request.account), Reverse(sequence.id))
            });
            self.starved = first.map(|sequence| sequence.id);
        }
    }

    /// Lets a waiting sequence in when a row is free and its known tokens fit beside what the
    /// running ones still need. One that was preempted in flight sits this step out, without being
    /// in the way of others.
    fn admit(&mut self, id: SequenceId, step: &mut Step) -> bool {
        let headroom = self.headroom();
        let sequence = sequence_mut(&mut self.sequences, id);
        if sequence.state == State::Running || sequence.in_flight > 0 {
            return true;
        }
        if self.running.len() >= self.options.max_rows {
            return false;
        }
        let prefix = self.blocks.lookup(&mut sequence.table, &sequence.tokens);
        let shared = prefix.blocks.len() - prefix.evictable;
        if self.blocks.blocks_for(sequence.tokens.len()) - shared > headroom {
            return false;
        }
        let cached = self.blocks.adopt(&mut sequence.table, prefix);
        if sequence.start(cached) {
            step.started.push(id);
            self.totals.prefix_hit_tokens += cached as u64;
        }
        self.totals.prompt_tokens += sequence.see(cached) as u64;
        self.running.insert(id);
        true
    }

    /// Blocks left for newcomers: the known tokens of running sequences, and one more block for
    /// each, are spoken for.
    fn headroom(&self) -> usize {
        let outstanding = |id: &SequenceId| {
            let sequence = &self.sequences[id];
            1 + self
                .blocks
                .blocks_for(sequence.tokens.len())
                .saturating_sub(sequence.table.blocks().len())
        };
        let spoken_for = self.running.iter().map(outstanding).sum();
        self.blocks.available().saturating_sub(spoken_for)
    }

    /// Claims blocks for as many tokens as the budget and the free blocks allow, and returns how
    /// many that are.
    fn chunk(&mut self, id: SequenceId, budget: usize) -> usize {
        let sequence = &self.sequences[&id];
        if sequence.state == State::Waiting {
            return 0;
        }
        let reachable = sequence.table.blocks().len() + self.blocks.available();
        let room = reachable * self.options.block_size - sequence.num_computed_tokens;
        let count = sequence.uncomputed().min(budget).min(room);
        assert!(self.claim(id, count), "the chunk was cut to fit");
        count
    }

    fn claim(&mut self, id: SequenceId, count: usize) -> bool {
        let sequence = sequence_mut(&mut self.sequences, id);
        let from = sequence.num_computed_tokens;
        self.blocks.claim(&mut sequence.table, from, from + count)
    }

    /// Puts a sequence back in line unless it has at most one token left to compute.
    fn requeue(&mut self, id: SequenceId) {
        let sequence = &self.sequences[&id];
        let account = sequence.request.account;
        if sequence.state == State::Waiting {
            self.queue.push_waiting(account, id, sequence.request.priority);
        } else if sequence.uncomputed() > 1 {
            self.queue.push_partial(account, id);
        }
    }

    fn preempt(&mut self, id: SequenceId) {
        let sequence = sequence_mut(&mut self.sequences, id);
        self.blocks.release(&mut sequence.table);
        sequence.reset();
        self.running.remove(&id);
        let (account, priority) = (sequence.request.account, sequence.request.priority);
        self.queue.remove(account, id, false);
        self.queue.push_waiting(account, id, priority);
        self.totals.preemptions += 1;
    }

    fn leave_account(&mut self, sequence: &Sequence) {
        let account = sequence.request.account;
        let left = self
            .accounts
            .get_mut(&account)
            .expect("invariant: accounts of live sequences are counted");
        *left -= 1;
        let alone = *left == 0;
        if alone {
            self.accounts.remove(&account);
        }
        self.queue.remove(account, sequence.id, alone);
    }
}

type Rows = BTreeMap<AccountId, Vec<SequenceId>>;

fn is_starved(sequence: &Sequence, rows: &Rows) -> bool {
    sequence.state == State::Waiting && !rows.contains_key(&sequence.request.account)
}

/// Not a method, so that the block manager can be borrowed beside the sequence.
fn sequence_mut(sequences: &mut BTreeMap<SequenceId, Sequence>, id: SequenceId) -> &mut Sequence {
    sequences.get_mut(&id).expect("invariant: scheduled ids are live")
}

#[cfg(test)]
mod tests;
