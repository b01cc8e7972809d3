//! Decides which sequences run in the next step, and with how many tokens: continuous batching with
//! chunked prefill. Pure.
//!
//! The life of a step, as the worker drives it:
//! 1. `add` puts a request's sequence into the queue.
//! 2. `schedule` hands out the token budget and returns the step, which is in flight from then on.
//! 3. The runner computes it. Meanwhile the next step may be scheduled: a token that is being
//!    sampled counts as its sequence's, although its value is not known yet.
//! 4. `commit_step` notes that the oldest step in flight was computed.
//! 5. `append` gives each sampled token to its sequence and says whether it was the last one.
//! 6. `finish` removes a sequence, at any time, and frees its blocks. When a step has failed,
//!    `drop_steps_in_flight` names the sequences to finish.
//!
//! There is no prefill or decode phase: every sequence has tokens beyond `num_computed_tokens`, and
//! each step's token budget is handed out until it is spent. Sequences with only their last token
//! to compute come first. The rest of the budget goes to prompts, in chunks: higher priorities
//! first, fairly between accounts of the same priority; in models with recurrent layers, chunks
//! also end where a state is kept for later prompts. When blocks run out, the sequence that arrived
//! last is preempted and computed again later. Rows and blocks are shared between accounts too: an
//! account that runs nothing and finds no room takes it from the account that runs most.
//!
//! Background sequences run only while there are no others, in small steps, so that one that comes
//! waits for little. It preempts all of them; what they have computed stays in the prefix cache
//! until its blocks are needed.

mod integrity;

use super::block_manager::{BlockManager, Prefix};
use super::fair_queue::FairQueue;
use super::sequence::{Finished, GenerateRequest, Sequence, SequenceId, SequenceState, StopCause};
use super::speculation::{Estimate, Proposer, StepCosts};
use crate::settings::EngineSettings;
use cresset_base::AccountId;
use cresset_models::cache_kinds::CacheKinds;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::{Duration, Instant};

/// Limits of one engine; the configuration sets all of them.
#[derive(Clone, Debug)]
pub struct EngineOptions {
    /// Tokens in one step (prefill chunks and decodes together).
    pub max_batched_tokens: usize,
    /// Tokens in one step of background sequences.
    pub background_tokens: usize,
    /// Sequences in one step.
    pub max_rows: usize,
    /// Sequences waiting for a row before new ones are refused.
    pub max_waiting: usize,
    pub block_size: usize,
    pub num_blocks: usize,
    /// How the model's layers share the blocks.
    pub cache: CacheKinds,
    /// Longest prompt + output of a sequence, tokens.
    pub max_context: usize,
    /// Most drafts of a sequence in one step. 0 switches them off, as does a runner with more than
    /// one step in flight: drafts follow from tokens that are known.
    pub speculative_tokens: usize,
}

impl EngineOptions {
    /// The limits of an engine whose model's cache has `num_blocks` blocks. `max_context` is the
    /// longest sequence that the model and the settings allow; the blocks may hold less.
    pub fn new(
        settings: &EngineSettings,
        num_blocks: usize,
        cache: CacheKinds,
        max_context: usize,
    ) -> Self {
        let mut options = Self {
            max_batched_tokens: settings.max_batched_tokens,
            background_tokens: settings.background_tokens,
            max_rows: settings.max_rows,
            max_waiting: settings.max_waiting,
            block_size: settings.block_size,
            num_blocks,
            cache,
            max_context,
            speculative_tokens: settings.speculative_tokens,
        };
        options.max_context = options.longest_within(max_context);
        options
    }

    /// Most sequences that run at once: each gets a token of every step, and may need two states.
    pub fn most_rows(&self) -> usize {
        let rows = self.max_rows.min(self.max_batched_tokens);
        if self.cache.states > 0 { rows.min(self.cache.states / 2) } else { rows }
    }

    /// Most tokens of one sequence that are scheduled and not committed: those of two steps.
    pub fn most_in_flight(&self) -> usize {
        2 * self.max_batched_tokens
    }

    /// Most blocks that a sequence of `tokens` holds at a time.
    pub fn blocks_for(&self, tokens: usize) -> usize {
        self.cache.blocks_for(tokens, self.block_size, self.most_in_flight())
    }

    /// The longest sequence, of at most `tokens`, that the blocks hold.
    pub fn longest_within(&self, tokens: usize) -> usize {
        let blocks = 1..=tokens.div_ceil(self.block_size);
        let fits = |blocks: &usize| self.blocks_for(blocks * self.block_size) <= self.num_blocks;
        blocks.take_while(fits).last().map_or(0, |blocks| tokens.min(blocks * self.block_size))
    }
}

/// The rows that one step computes, and the sequences that it starts and preempts.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct ScheduledStep {
    pub rows: Vec<StepRow>,
    /// Sequences that run for the first time.
    pub started: Vec<SequenceId>,
    pub preempted: Vec<SequenceId>,
    /// Tokens that the step samples.
    num_results: u32,
}

impl ScheduledStep {
    fn push(&mut self, sequence: &mut Sequence, num_tokens: usize) {
        let (id, from, feedback) = (sequence.id, sequence.num_computed_tokens, sequence.feedback());
        let samples = sequence.schedule(num_tokens, self.num_results);
        self.num_results += u32::from(samples);
        self.rows.push(StepRow { id, from, num_tokens, feedback, samples, drafts: 0 });
    }

    pub fn num_tokens(&self) -> usize {
        self.rows.iter().map(|row| row.num_tokens + row.drafts).sum()
    }
}

/// `num_tokens` tokens of one sequence, those at the positions from `from` on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepRow {
    pub id: SequenceId,
    pub from: usize,
    pub num_tokens: usize,
    /// Set when the row's only token is not known yet: it is this result of the step before.
    pub feedback: Option<u32>,
    /// The row reaches the sequence's end, so its last token gives logits.
    pub samples: bool,
    /// Drafts behind these tokens, each of which gives logits too.
    pub drafts: usize,
}

impl StepRow {
    /// The position behind the row's tokens, at which its drafts begin.
    pub fn end(&self) -> usize {
        self.from + self.num_tokens
    }

    /// Whether the row has only the token that its sequence got last.
    pub fn decodes(&self) -> bool {
        self.samples && self.num_tokens == 1
    }

    /// How many tokens are sampled for the row.
    pub fn results(&self) -> usize {
        if self.samples { 1 + self.drafts } else { 0 }
    }
}

/// Counters since the start. What runs in the background counts in none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    pub prompt_tokens: u64,
    pub generated_tokens: u64,
    pub prefix_hit_tokens: u64,
    pub preemptions: u64,
    /// Drafts computed, and those that were the tokens drawn.
    pub draft_tokens: u64,
    pub accepted_tokens: u64,
}

#[derive(Debug)]
pub struct Scheduler {
    options: EngineOptions,
    blocks: BlockManager,
    /// Every live sequence. Ids rise, so this is the order of arrival.
    sequences: BTreeMap<SequenceId, Sequence>,
    running: BTreeSet<SequenceId>,
    /// The live ones of them that run in the background.
    background: BTreeSet<SequenceId>,
    /// Sequences with more than one token to compute, running or waiting.
    queue: FairQueue,
    /// A sequence that found no room in the last step although its account runs nothing.
    unserved: Option<SequenceId>,
    in_flight: VecDeque<Vec<StepRow>>,
    costs: StepCosts,
    /// How often the drafts of a proposer were right.
    proposed: Estimate,
    totals: Totals,
}

impl Scheduler {
    /// `secret` seeds the hashes of the prefix cache; draw it once per boot.
    pub fn new(mut options: EngineOptions, secret: [u8; 32]) -> Self {
        options.max_rows = options.most_rows();
        assert!(options.max_rows > 0, "a step has at least one row and one token");
        Self {
            blocks: BlockManager::new(
                options.num_blocks,
                options.block_size,
                options.cache.clone(),
                options.most_in_flight(),
                secret,
            ),
            sequences: BTreeMap::new(),
            running: BTreeSet::new(),
            background: BTreeSet::new(),
            queue: FairQueue::new(options.max_batched_tokens),
            unserved: None,
            in_flight: VecDeque::new(),
            costs: StepCosts::default(),
            proposed: Estimate::default(),
            totals: Totals::default(),
            options,
        }
    }

    /// The request must have passed `queue_limits::check_size`.
    pub fn add(&mut self, id: SequenceId, request: GenerateRequest) {
        self.queue.add(request.account, id, request.priority);
        if request.background {
            self.background.insert(id);
        }
        self.sequences.insert(id, Sequence::new(id, request).looked_up(&self.blocks));
    }

    pub fn options(&self) -> &EngineOptions {
        &self.options
    }

    pub fn get(&self, id: SequenceId) -> Option<&Sequence> {
        self.sequences.get(&id)
    }

    pub fn sequences(&self) -> impl Iterator<Item = &Sequence> + Clone {
        self.sequences.values()
    }

    pub fn is_empty(&self) -> bool {
        self.sequences.is_empty()
    }

    /// Rows of the steps in flight, oldest step first. Some may belong to sequences that have ended
    /// since.
    pub fn in_flight(&self) -> &VecDeque<Vec<StepRow>> {
        &self.in_flight
    }

    /// Running sequences, those in the background left out.
    pub fn num_running(&self) -> usize {
        self.running.difference(&self.background).count()
    }

    /// Waiting sequences, those in the background left out.
    pub fn num_waiting(&self) -> usize {
        self.foreground() - self.num_running()
    }

    /// The live sequences that run in the background.
    pub fn in_background(&self) -> BTreeSet<SequenceId> {
        self.background.clone()
    }

    /// Live sequences that do not run in the background.
    fn foreground(&self) -> usize {
        self.sequences.len() - self.background.len()
    }

    pub fn blocks(&self) -> &BlockManager {
        &self.blocks
    }

    pub fn totals(&self) -> Totals {
        self.totals
    }

    /// Sequences whose deadline is not after `now`.
    pub fn past_deadline(&self, now: Instant) -> Vec<SequenceId> {
        let late = |sequence: &&Sequence| sequence.request.deadline.is_some_and(|at| at <= now);
        self.sequences().filter(late).map(|s| s.id).collect()
    }

    /// Hands out the next step's token budget; a step that is not empty is in flight from now on.
    /// It is empty only when there is no sequence, or nothing to do before the steps in flight are
    /// committed.
    pub fn schedule(&mut self) -> ScheduledStep {
        self.schedule_with(None)
    }

    /// Schedules a step, and asks `proposer` for drafts of sequences whose own text gives none.
    pub fn schedule_with(&mut self, proposer: Option<&mut dyn Proposer>) -> ScheduledStep {
        self.queue.begin_step();
        let mut step = ScheduledStep::default();
        self.hold_or_release_background(&mut step);
        let unserved = self.preempt_for_unserved(&mut step);
        let preempted_before = step.preempted.len();
        self.schedule_decodes(&mut step);
        // Blocks that were just freed for decodes belong to those decodes.
        let may_start = step.preempted.len() == preempted_before;
        self.schedule_prompts(&mut step, unserved.filter(|_| may_start), may_start);
        self.add_drafts(&mut step, proposer);
        if !step.rows.is_empty() {
            self.in_flight.push_back(step.rows.clone());
        }
        step
    }

    /// Notes that the oldest step in flight was computed: its tokens are in the cache, and its full
    /// blocks can be shared. Returns its rows; the caller skips those whose sequence has ended
    /// since.
    pub fn commit_step(&mut self) -> Vec<StepRow> {
        let rows = self.in_flight.pop_front().expect("invariant: a step is in flight");
        for row in &rows {
            let Some(sequence) = self.sequences.get_mut(&row.id) else { continue };
            sequence.rows_in_flight -= 1;
            self.totals.prompt_tokens += sequence.count_prompt(row.end());
            // After a preemption the blocks belong to other sequences.
            if sequence.state == SequenceState::Running {
                self.blocks.commit(&mut sequence.table, &sequence.tokens[..row.end()]);
            }
        }
        rows
    }

    /// Notes how long the step of these rows took, from which follows whether drafts pay.
    pub fn note_cost(&mut self, rows: &[StepRow], spent: Duration) {
        if rows.iter().all(StepRow::decodes) {
            self.costs.record(rows.iter().map(StepRow::results).sum(), spent);
        }
    }

    /// Gives up the steps in flight. The caller finishes the sequences in them; an id may come
    /// twice, and may have ended before.
    pub fn drop_steps_in_flight(&mut self) -> Vec<SequenceId> {
        self.in_flight.drain(..).flatten().map(|row| row.id).collect()
    }

    /// Whether the next result of a row of the step committed last is a token of its sequence. It
    /// is not once the sequence has ended, nor behind a draft that was not drawn.
    pub fn awaits(&self, id: SequenceId) -> bool {
        self.get(id).is_some_and(|sequence| sequence.pending_tokens > 0)
    }

    /// Appends the next token that a row of the step committed last gave a sequence that awaits it.
    /// A returned cause means that the sequence is complete and must be finished.
    pub fn append(&mut self, id: SequenceId, token: u32) -> Option<StopCause> {
        let sequence = sequence_mut(&mut self.sequences, id);
        self.totals.generated_tokens += sequence.counted(1);
        let (computed, drafted) = (sequence.num_computed_tokens, !sequence.drafts().is_empty());
        let proposed = sequence.awaits_proposed();
        let cause = sequence.append(token, self.options.max_context);
        let accepted = sequence.num_computed_tokens;
        self.totals.accepted_tokens += (accepted - computed) as u64;
        if proposed {
            self.proposed.note(accepted > computed);
        }
        // A draft may be the token that ends the sequence; then no further result is awaited.
        if drafted && (sequence.pending_tokens == 0 || cause.is_some()) {
            self.blocks.settle_drafts(&mut sequence.table, &sequence.tokens[..accepted]);
        }
        cause
    }

    /// Removes a sequence and frees its blocks at once. `None` when there is no such sequence.
    pub fn finish(&mut self, id: SequenceId, cause: StopCause) -> Option<Finished> {
        let mut sequence = self.sequences.remove(&id)?;
        self.running.remove(&id);
        self.background.remove(&id);
        self.queue.forget(sequence.request.account, id);
        if matches!(cause, StopCause::Failed(_)) {
            self.blocks.discard(&mut sequence.table);
        } else {
            self.blocks.release(&mut sequence.table);
        }
        Some(sequence.finished(cause))
    }

    /// The account of a live sequence.
    fn account(&self, id: SequenceId) -> AccountId {
        self.sequences[&id].request.account
    }

    /// While there are other sequences, those in the background hold no blocks and are not queued.
    fn hold_or_release_background(&mut self, step: &mut ScheduledStep) {
        let held = self.foreground() > 0;
        for id in self.in_background() {
            if held && self.running.contains(&id) {
                self.preempt(id);
                step.preempted.push(id);
            }
            if held {
                self.queue.remove(self.account(id), id);
            } else if self.sequences[&id].state == SequenceState::Waiting {
                self.enqueue(id);
            }
        }
    }

    /// Tokens that the next step may have.
    fn budget(&self) -> usize {
        let most = self.options.max_batched_tokens;
        if self.foreground() > 0 { most } else { most.min(self.options.background_tokens) }
    }

    fn schedule_decodes(&mut self, step: &mut ScheduledStep) {
        let running: Vec<_> = self.running.iter().copied().collect();
        step.rows.reserve(running.len());
        for id in running {
            let sequence = sequence_mut(&mut self.sequences, id);
            let (account, from) = (sequence.request.account, sequence.num_computed_tokens);
            if !sequence.is_decoding() || sequence.is_ending(self.options.max_context) {
                continue;
            }
            if self.blocks.claim(&mut sequence.table, from, from + 1)
                || self.allocate_or_preempt(id, step)
            {
                self.queue.charge(account, 1);
                step.push(sequence_mut(&mut self.sequences, id), 1);
            }
        }
    }

    /// Adds drafts to a step in which every sequence decodes: where a prompt waits, its tokens are
    /// the better use of a step.
    fn add_drafts(&mut self, step: &mut ScheduledStep, proposer: Option<&mut dyn Proposer>) {
        let decodes =
            step.rows.len() == self.foreground() && step.rows.iter().all(StepRow::decodes);
        if self.options.speculative_tokens == 0 || !decodes || !self.in_flight.is_empty() {
            return;
        }
        let price = self.costs.price(step.rows.len(), 0.0);
        for row in &step.rows {
            let most = self.most_drafts(row);
            sequence_mut(&mut self.sequences, row.id).find_drafts(most, price);
        }
        if let Some(proposer) = proposer {
            self.propose_drafts(step, proposer);
        }
        self.claim_drafts(step);
    }

    /// The most drafts that a row may have: the answer has one token less to come, and a state is
    /// kept where a row ends.
    fn most_drafts(&self, row: &StepRow) -> usize {
        let sequence = &self.sequences[&row.id];
        let ahead = sequence.remaining(self.options.max_context) - 1;
        let most = self.options.speculative_tokens.min(ahead);
        self.blocks.row_within(&sequence.table, row.end(), most)
    }

    /// Asks for drafts of the sequences that have none.
    fn propose_drafts(&mut self, step: &ScheduledStep, proposer: &mut dyn Proposer) {
        let assumed = self.proposed.of_next_step();
        let price = self.costs.price(step.rows.len(), proposer.seconds_per_draft());
        let wanted = step.rows.iter().filter_map(|row| {
            self.sequences[&row.id].wanted_drafts(self.most_drafts(row), price, assumed)
        });
        let wanted: Vec<_> = wanted.collect();
        let ids: Vec<_> = wanted.iter().map(|wanted| wanted.id).collect();
        if !ids.is_empty() {
            for (id, drafts) in ids.into_iter().zip(proposer.propose(wanted)) {
                sequence_mut(&mut self.sequences, id).take_drafts(drafts);
            }
        }
    }

    /// Makes room for the drafts that were found. They take no block that a sequence needs for its
    /// next token.
    fn claim_drafts(&mut self, step: &mut ScheduledStep) {
        let rows = step.rows.len();
        let mut budget = self.options.max_batched_tokens - step.num_tokens();
        budget = budget.min(self.blocks.states_for_drafts());
        for row in &mut step.rows {
            let sequence = sequence_mut(&mut self.sequences, row.id);
            let drafts = sequence.keep_drafts(budget);
            let end = row.end() + drafts;
            let needed = self.blocks.missing(sequence.table.groups(), end);
            let spare = self.blocks.available().saturating_sub(rows * self.blocks.groups());
            if needed > spare || !self.blocks.claim_drafts(&mut sequence.table, row.end(), end) {
                sequence.keep_drafts(0);
                continue;
            }
            row.drafts = drafts;
            budget -= drafts;
            step.num_results += drafts as u32;
            self.totals.draft_tokens += drafts as u64;
        }
    }

    /// Allocates the block for one more token, taking blocks from later arrivals if necessary.
    /// False when the sequence itself was preempted.
    fn allocate_or_preempt(&mut self, id: SequenceId, step: &mut ScheduledStep) -> bool {
        while !self.allocate(id, 1) {
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

    /// Makes room for the unserved sequence, if its account still runs nothing: the account that
    /// runs the most gives up its latest arrival. Returns the unserved sequence.
    fn preempt_for_unserved(&mut self, step: &mut ScheduledStep) -> Option<SequenceId> {
        let running = self.running_by_account();
        let unserved = self.unserved.take().and_then(|id| self.get(id));
        let unserved = unserved.filter(|sequence| is_unserved(sequence, &running))?.id;
        let most = running.into_values().max_by_key(Vec::len).filter(|ids| ids.len() > 1);
        if let Some(latest) = most.as_ref().and_then(|ids| ids.last()) {
            self.preempt(*latest);
            step.preempted.push(*latest);
        }
        Some(unserved)
    }

    /// The running sequences of each account, in order of arrival.
    fn running_by_account(&self) -> RunningByAccount {
        let mut running = RunningByAccount::new();
        for &id in &self.running {
            running.entry(self.account(id)).or_default().push(id);
        }
        running
    }

    /// Gives the rest of the budget to sequences with more than one token to compute: `first`, then
    /// the queue in its order. Waiting sequences start only while `may_start` holds.
    fn schedule_prompts(
        &mut self,
        step: &mut ScheduledStep,
        first: Option<SequenceId>,
        mut may_start: bool,
    ) {
        let mut budget = self.budget().saturating_sub(step.num_tokens());
        let mut popped = Vec::new();
        if let Some(id) = first {
            self.queue.remove(self.account(id), id);
        }
        let mut next = first.or_else(|| self.queue.pop(may_start));
        while let Some(id) = next {
            popped.push(id);
            // No sequence overtakes one that does not fit yet; otherwise a long one would wait for
            // ever.
            may_start = self.start(id, step) && may_start;
            let count = self.allocate_chunk(id, budget);
            if count > 0 {
                self.queue.charge(self.account(id), count);
                step.push(sequence_mut(&mut self.sequences, id), count);
                budget -= count;
            }
            next = if budget > 0 { self.queue.pop(may_start) } else { None };
        }
        for id in popped {
            self.enqueue(id);
        }
        if !may_start {
            self.unserved = self.most_unserved();
        }
    }

    /// The first sequence of the highest-ranking account that runs nothing.
    fn most_unserved(&self) -> Option<SequenceId> {
        let running = self.running_by_account();
        let unserved = self.sequences().filter(|sequence| is_unserved(sequence, &running));
        let unserved = unserved.filter(|sequence| !sequence.request.background);
        let rank = |sequence: &Sequence| self.queue.rank(sequence.request.account);
        let first = unserved.max_by_key(|sequence| (rank(sequence), Reverse(sequence.id)));
        first.map(|sequence| sequence.id)
    }

    /// Starts a waiting sequence if a row is free and its tokens fit. Returns whether sequences
    /// behind it in the queue may start too. A preempted sequence with rows still in flight is
    /// skipped in this step and does not hold up others.
    fn start(&mut self, id: SequenceId, step: &mut ScheduledStep) -> bool {
        let sequence = sequence_mut(&mut self.sequences, id);
        if sequence.state == SequenceState::Running || sequence.rows_in_flight > 0 {
            return true;
        }
        if self.running.len() >= self.options.max_rows {
            return false;
        }
        let prefix = self.blocks.lookup(&mut sequence.table, &sequence.tokens);
        if !self.can_allocate(id, &prefix) {
            return false;
        }
        let sequence = sequence_mut(&mut self.sequences, id);
        let cached = self.blocks.adopt(&mut sequence.table, prefix);
        if sequence.start(cached) {
            step.started.push(id);
            self.totals.prefix_hit_tokens += sequence.counted(cached);
        }
        self.totals.prompt_tokens += sequence.count_prompt(cached);
        self.running.insert(id);
        true
    }

    /// Whether all known tokens of a waiting sequence fit beside the needs of the running ones.
    /// Blocks of its prefix that others use already cost nothing.
    fn can_allocate(&self, id: SequenceId, prefix: &Prefix) -> bool {
        let missing = self.blocks.missing(&prefix.groups, self.sequences[&id].tokens.len());
        missing + prefix.evictable <= self.unreserved_blocks()
    }

    /// Blocks left for sequences that are not running yet. The running ones reserve the blocks of
    /// their known tokens, and one more block each in every group of layers.
    fn unreserved_blocks(&self) -> usize {
        let outstanding = |id: &SequenceId| {
            let sequence = &self.sequences[id];
            let missing = self.blocks.missing(sequence.table.groups(), sequence.tokens.len());
            self.blocks.groups() + missing
        };
        let reserved = self.running.iter().map(outstanding).sum();
        self.blocks.available().saturating_sub(reserved)
    }

    /// Allocates blocks for as many of the sequence's tokens as the budget and the free blocks
    /// allow, and returns how many tokens that is. It is 0 for a sequence that did not start.
    fn allocate_chunk(&mut self, id: SequenceId, budget: usize) -> usize {
        let sequence = &self.sequences[&id];
        if sequence.state == SequenceState::Waiting {
            return 0;
        }
        let more = self.blocks.available() / self.blocks.groups();
        let reachable = sequence.table.len() + more;
        let room = reachable * self.options.block_size - sequence.num_computed_tokens;
        let count = sequence.uncomputed().min(budget).min(room);
        let count = self.blocks.row_within(&sequence.table, sequence.num_computed_tokens, count);
        assert!(self.allocate(id, count), "the chunk was cut to fit");
        count
    }

    /// Allocates the blocks for the next `count` tokens, or none of them.
    fn allocate(&mut self, id: SequenceId, count: usize) -> bool {
        let sequence = sequence_mut(&mut self.sequences, id);
        let from = sequence.num_computed_tokens;
        self.blocks.claim(&mut sequence.table, from, from + count)
    }

    /// Puts a sequence back into the queue unless it has at most one token left to compute.
    fn enqueue(&mut self, id: SequenceId) {
        let sequence = &self.sequences[&id];
        let account = sequence.request.account;
        if sequence.state == SequenceState::Waiting {
            self.queue.push_waiting(account, id, sequence.request.priority);
        } else if sequence.uncomputed() > 1 {
            self.queue.push_partial(account, id);
        }
    }

    /// Takes a running sequence's blocks away and lets it wait. Its tokens stay, and are computed
    /// again when it starts the next time.
    fn preempt(&mut self, id: SequenceId) {
        let sequence = sequence_mut(&mut self.sequences, id);
        self.blocks.release(&mut sequence.table);
        sequence.preempt();
        self.running.remove(&id);
        let GenerateRequest { account, priority, background, .. } = sequence.request;
        self.queue.remove(account, id);
        self.queue.push_waiting(account, id, priority);
        self.totals.preemptions += u64::from(!background);
    }
}

type RunningByAccount = BTreeMap<AccountId, Vec<SequenceId>>;

/// Whether the sequence waits although its account runs nothing.
fn is_unserved(sequence: &Sequence, running: &RunningByAccount) -> bool {
    sequence.state == SequenceState::Waiting && !running.contains_key(&sequence.request.account)
}

/// A function, not a method, so that the block manager can be borrowed beside the sequence.
fn sequence_mut(sequences: &mut BTreeMap<SequenceId, Sequence>, id: SequenceId) -> &mut Sequence {
    sequences.get_mut(&id).expect("invariant: scheduled ids are live")
}

#[cfg(test)]
mod tests;
