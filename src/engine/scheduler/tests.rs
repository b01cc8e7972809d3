//! The scheduler driven by text: each line is an operation and, after `=>`, its expected result.
//! The scheduler's integrity is checked after each.

use super::*;
use crate::error::EngineError;
use crate::tests::any_instant;
use cresset_kernels::sampling::params::SamplingParams;
use cresset_kernels::sampling::philox4x32;
use cresset_models::cache_kinds::{CacheKinds, NO_STATE};
use std::collections::HashMap;
use std::fmt::Write;
use std::sync::Arc;
use std::time::Duration;
use uuid::Uuid;

struct Bench {
    scheduler: Scheduler,
    /// How many steps may be in flight.
    depth: usize,
    began: Instant,
    /// The token that a sequence of this number gets behind so many.
    token: fn(u64, usize) -> u32,
}

impl Bench {
    /// `options` is `budget N rows N block N blocks N context N`: tokens in one step, sequences in
    /// one step, tokens in one block, blocks, and tokens of the longest sequence, if the blocks
    /// hold it; behind them maybe `drafts N`.
    fn new(depth: usize, options: &str) -> Self {
        Self::with_windows(depth, options, &[None])
    }

    fn with_windows(depth: usize, options: &str, windows: &[Option<usize>]) -> Self {
        Self::of_kinds(
            depth,
            options,
            CacheKinds { windows: windows.to_vec(), ..CacheKinds::default() },
        )
    }

    fn of_kinds(depth: usize, options: &str, cache: CacheKinds) -> Self {
        let words: Vec<_> = options.split_whitespace().collect();
        let given = |key: &str| {
            let at = words.iter().position(|word| *word == key)?;
            Some(words[at + 1].parse().unwrap())
        };
        let value = |key: &str| given(key).expect(key);
        let mut options = EngineOptions {
            max_batched_tokens: value("budget"),
            background_tokens: 4,
            max_rows: value("rows"),
            max_waiting: 0,
            block_size: value("block"),
            num_blocks: value("blocks"),
            cache,
            max_context: value("context"),
            speculative_tokens: given("drafts").unwrap_or(0),
        };
        options.max_context = options.longest_within(options.max_context);
        let (scheduler, began) = (Scheduler::new(options, [7; 32]), any_instant());
        Self { scheduler, depth, began, token: |_, len| 1000 + len as u32 }
    }

    /// `add ID ACCOUNT FROM..TO +MAX`, optionally `eos ID`, `by SECONDS`, `rank PRIORITY` or
    /// `background`.
    fn add(&mut self, id: &str, account: &str, prompt: &str, max: &str, rest: &[&str]) -> String {
        let (from, to) = prompt.split_once("..").unwrap();
        let value = |key: &str| {
            let at = rest.iter().position(|word| *word == key)?;
            rest[at + 1].parse::<u32>().ok()
        };
        let request = GenerateRequest {
            account: self::account(account),
            application: None,
            priority: value("rank").unwrap_or(0) as u8,
            background: rest.contains(&"background"),
            prompt: Arc::new((from.parse().unwrap()..to.parse().unwrap()).collect()),
            sampling: SamplingParams::default(),
            max_tokens: max[1..].parse().unwrap(),
            min_tokens: 0,
            eos_ids: value("eos").into_iter().collect(),
            grammar: None,
            deadline: value("by").map(|s| self.began + Duration::from_secs(s.into())),
        };
        self.scheduler.add(self::id(id), request);
        String::new()
    }

    /// Schedules a step and collects the oldest one, unless more may be in flight. Returns
    /// `ID:TOKENS` for each row (`*` when it samples, `<N` when its token is result N of the step
    /// before), the preempted sequences, and the result of `collect`.
    fn step(&mut self) -> String {
        let step = self.scheduler.schedule();
        let mut said = String::new();
        for row in &step.rows {
            let star = if row.samples { "*" } else { "" };
            let fed = row.feedback.map_or_else(String::new, |index| format!("<{index}"));
            write!(said, "{}:{}{star}{fed} ", row.id.0, row.num_tokens).unwrap();
        }
        for id in &step.preempted {
            write!(said, "preempted {} ", id.0).unwrap();
        }
        let in_flight = self.scheduler.in_flight().len();
        assert!(in_flight <= self.depth);
        assert!(in_flight > 0 || self.scheduler.is_empty(), "stalled");
        if in_flight == self.depth || (step.rows.is_empty() && in_flight > 0) {
            said += &self.collect();
        }
        said.trim_end().into()
    }

    /// Commits the oldest step: every sampled row produces the bench's tokens, by default the token
    /// 1000 + its length. Returns which sequences ended and why, and `late ID` for a result of a
    /// sequence that had ended before.
    fn collect(&mut self) -> String {
        let mut said = String::new();
        for row in self.scheduler.commit_step().iter().filter(|row| row.samples) {
            if self.scheduler.get(row.id).is_none() {
                write!(said, "late {} ", row.id.0).unwrap();
            }
            for _ in 0..row.results() {
                let Some(sequence) = self.scheduler.get(row.id) else { break };
                let token = (self.token)(row.id.0, sequence.tokens.len());
                if !self.scheduler.awaits(row.id) {
                    break;
                }
                if let Some(cause) = self.scheduler.append(row.id, token) {
                    write!(said, "{cause:?} {} ", row.id.0).unwrap();
                    self.scheduler.finish(row.id, cause).unwrap();
                }
            }
        }
        said
    }

    /// The oldest step in flight fails, and all that were launched after it. Returns which
    /// sequences that ended.
    fn crash(&mut self) -> String {
        let mut said = String::new();
        for id in self.scheduler.drop_steps_in_flight() {
            if self
                .scheduler
                .finish(id, StopCause::Failed(EngineError::Compute("scripted".into())))
                .is_some()
            {
                write!(said, "{} ", id.0).unwrap();
            }
        }
        said.trim_end().into()
    }

    fn finish(&mut self, id: &str, cause: StopCause) -> String {
        match self.scheduler.finish(self::id(id), cause) {
            None => "unknown".into(),
            Some(finished) => {
                let Finished { prompt_tokens, cached_tokens, completion_tokens, .. } = finished;
                format!("prompt {prompt_tokens} cached {cached_tokens} output {completion_tokens}")
            }
        }
    }

    fn expired(&self, seconds: &str) -> String {
        let now = self.began + Duration::from_secs(seconds.parse().unwrap());
        let ids = self.scheduler.past_deadline(now);
        ids.iter().map(|id| id.0.to_string()).collect::<Vec<_>>().join(" ")
    }

    fn blocks(&self) -> String {
        let blocks = self.scheduler.blocks();
        format!("used {} of {}", blocks.used(), blocks.total())
    }

    fn run(&mut self, operation: &str) -> String {
        let words: Vec<_> = operation.split_whitespace().collect();
        let said = match words[..] {
            ["add", id, account, prompt, max, ref rest @ ..] => {
                self.add(id, account, prompt, max, rest)
            }
            ["step"] => self.step(),
            ["steps", count] => (0..count.parse().unwrap()).fold(String::new(), |_, _| self.step()),
            ["stop", id] => self.finish(id, StopCause::Stopped),
            ["fail", id] => {
                self.finish(id, StopCause::Failed(EngineError::Compute("scripted".into())))
            }
            ["crash"] => self.crash(),
            ["produced"] => self.scheduler.totals().generated_tokens.to_string(),
            ["expired", seconds] => self.expired(seconds),
            ["blocks"] => self.blocks(),
            _ => panic!("unknown operation: {operation}"),
        };
        self.scheduler.check_integrity().unwrap();
        said
    }
}

fn id(text: &str) -> SequenceId {
    SequenceId(text.parse().unwrap())
}

fn account(name: &str) -> AccountId {
    AccountId(Uuid::from_u128(u128::from(name.as_bytes()[0])))
}

fn check(options: &str, script: &str) {
    run(1, options, script);
}

/// Checks like `check`, with two steps in flight.
fn check_ahead(options: &str, script: &str) {
    run(2, options, script);
}

fn run(depth: usize, options: &str, script: &str) {
    let mut bench = Bench::new(depth, options);
    for line in script.lines().map(str::trim).filter(|line| !line.is_empty()) {
        let (operation, expect) = line.split_once("=>").unwrap_or((line, ""));
        assert_eq!(bench.run(operation), expect.trim(), "{line}");
    }
}

#[test]
fn a_prompt_is_computed_in_chunks_beside_decodes() {
    check(
        "budget 8 rows 4 block 4 blocks 16 context 64",
        "add 1 a 0..6 +4
         step      => 1:6*
         add 2 a 100..120 +2
         step      => 1:1* 2:7
         step      => 1:1* 2:7
         step      => 1:1* 2:6* Length 1
         step      => 2:1* Length 2
         blocks    => used 0 of 16",
    );
}

#[test]
fn a_sequence_ends_by_its_own_causes() {
    check(
        "budget 8 rows 4 block 4 blocks 16 context 8",
        "add 1 a 0..3 +9 eos 1004
         add 2 a 10..13 +2
         step  => 1:3* 2:3*
         step  => 1:1* 2:1* EndOfText 1 Length 2
         add 3 a 20..26 +9
         step  => 3:6*
         step  => 3:1* Length 3",
    );
}

#[test]
fn usage_is_what_was_computed() {
    check(
        "budget 8 rows 4 block 4 blocks 16 context 64",
        "add 1 a 0..20 +4
         stop 1 => prompt 0 cached 0 output 0
         add 2 a 0..20 +4
         step   => 2:8
         stop 2 => prompt 8 cached 0 output 0
         add 3 a 0..20 +4
         step   => 3:8
         step   => 3:4*
         step   => 3:1*
         stop 3 => prompt 20 cached 8 output 2
         stop 3 => unknown
         blocks => used 0 of 16",
    );
}

#[test]
fn rows_are_limited_and_first_come_is_first_served() {
    check(
        "budget 16 rows 2 block 4 blocks 16 context 64",
        "add 1 a 0..2 +2
         add 2 a 10..12 +3
         add 3 a 20..22 +2
         step => 1:2* 2:2*
         step => 1:1* 2:1* Length 1
         step => 2:1* 3:2* Length 2
         step => 3:1* Length 3",
    );
}

#[test]
fn no_sequence_overtakes_one_that_does_not_fit_yet() {
    check(
        "budget 32 rows 4 block 4 blocks 6 context 24",
        "add 1 a 0..12 +3
         step   => 1:12*
         add 2 a 100..112 +1
         add 3 a 200..202 +1
         step   => 1:1*
         step   => 1:1* Length 1
         step   => 2:12* 3:2* Length 2 Length 3",
    );
}

#[test]
fn the_latest_arrival_is_preempted_and_computed_again() {
    check(
        "budget 32 rows 4 block 4 blocks 6 context 24",
        "add 1 a 0..8 +9
         add 2 b 100..107 +9
         step   => 1:8* 2:7*
         step   => 1:1* 2:1*
         steps 3 => 1:1* 2:1*
         step   => 1:1* preempted 2
         blocks => used 4 of 6
         step   => 1:1*
         step   => 1:1*
         step   => 1:1* Length 1
         step   => 2:4*
         step   => 2:1*
         stop 2 => prompt 7 cached 0 output 7",
    );
}

#[test]
fn what_runs_in_the_background_gives_way_to_all_else() {
    check(
        "budget 8 rows 4 block 4 blocks 16 context 64",
        "add 1 a 0..10 +3 background
         step   => 1:4
         step   => 1:4
         add 2 b 100..102 +2
         add 3 c 20..22 +1 background
         step   => 2:2* preempted 1
         step   => 2:1* Length 2
         blocks => used 0 of 16
         step   => 1:2* 3:2* Length 3
         step   => 1:1*
         add 4 b 30..40 +1
         step   => 4:8 preempted 1
         stop 1 => prompt 10 cached 0 output 2
         step   => 4:2* Length 4",
    );
}

#[test]
fn a_higher_priority_starts_first_and_chunks_first() {
    check(
        "budget 8 rows 2 block 4 blocks 64 context 64",
        "add 1 a 0..2 +3
         add 2 b 10..12 +3
         step => 1:2* 2:2*
         add 3 c 20..22 +1
         add 4 d 30..44 +1 rank 2
         add 5 e 50..52 +1 rank 1
         step => 1:1* 2:1*
         step => 1:1* 2:1* Length 1 Length 2
         step => 4:8
         step => 4:6* 5:2* Length 4 Length 5
         step => 3:2* Length 3",
    );
}

#[test]
fn a_failed_sequence_leaves_nothing_in_the_cache() {
    check(
        "budget 32 rows 4 block 4 blocks 16 context 64",
        "add 1 a 0..9 +9
         step   => 1:9*
         fail 1 => prompt 9 cached 0 output 1
         add 2 a 0..9 +9
         step   => 2:9*
         stop 2 => prompt 9 cached 0 output 1
         add 3 a 0..9 +9
         step   => 3:1*",
    );
}

#[test]
fn deadlines_are_those_that_have_passed() {
    check(
        "budget 8 rows 4 block 4 blocks 16 context 64",
        "add 1 a 0..3 +9 by 5
         add 2 a 0..3 +9
         add 3 a 0..3 +9 by 2
         expired 1 =>
         expired 2 => 3
         expired 9 => 1 3",
    );
}

#[test]
fn an_account_with_one_prompt_does_not_wait_for_one_with_many() {
    check(
        "budget 128 rows 8 block 16 blocks 256 context 1024",
        "add 1 a 0..500 +1
         add 2 a 1000..1500 +1
         step => 1:128
         add 3 b 0..100 +1
         step => 1:128
         step => 3:100* 1:28 Length 3
         step => 1:128",
    );
}

#[test]
fn an_account_that_runs_nothing_takes_a_row_from_the_one_that_runs_most() {
    check(
        "budget 4 rows 4 block 4 blocks 64 context 64",
        "add 1 a 0..1 +9
         add 2 a 10..11 +9
         add 3 b 20..21 +9
         add 4 a 30..31 +9
         step   => 1:1* 2:1* 4:1* 3:1*
         add 5 a 40..41 +9
         add 6 c 50..51 +9
         step   => 1:1* 2:1* 3:1* 4:1*
         step   => 1:1* 2:1* 3:1* 6:1* preempted 4
         add 7 d 60..61 +9
         step   => 1:1* 2:1* 3:1* 6:1*
         step   => 1:1* 3:1* 6:1* 7:1* preempted 2
         add 8 e 70..71 +9
         step   => 1:1* 3:1* 6:1* 7:1*
         step   => 1:1* 3:1* 6:1* 7:1*
         stop 3 => prompt 1 cached 0 output 7
         step   => 1:1* 6:1* 7:1* 8:1*",
    );
}

#[test]
fn an_account_that_runs_nothing_takes_blocks_from_the_one_that_runs_most() {
    check(
        "budget 64 rows 8 block 4 blocks 8 context 32",
        "add 1 a 0..9 +9
         add 2 a 100..109 +9
         step => 1:9* 2:9*
         add 3 b 200..209 +9
         step => 1:1* 2:1*
         step => 1:1* 3:9* preempted 2
         step => 1:1* 3:1*",
    );
}

/// Three accounts have endless work but unequal numbers of sequences: at any time, the numbers of
/// tokens they were given differ by little.
#[test]
fn backlogged_accounts_get_equal_shares() {
    const BUDGET: usize = 100;
    let mut bench =
        Bench::new(1, &format!("budget {BUDGET} rows 16 block 16 blocks 4096 context 4096"));
    let mut next = 0..;
    let mut given = HashMap::<AccountId, usize>::new();
    for round in 0..400 {
        for (name, sequences) in [("a", 9), ("b", 4), ("c", 3)] {
            let owned = |sequence: &&Sequence| sequence.request.account == account(name);
            let live = bench.scheduler.sequences().filter(owned).count();
            for _ in live..sequences {
                let id = next.next().unwrap();
                let from = id * 1000;
                bench.run(&format!("add {id} {name} {from}..{} +5", from + 400));
            }
        }
        let step = bench.scheduler.schedule();
        assert_eq!(step.num_tokens(), BUDGET, "no budget is left unused in round {round}");
        for row in &step.rows {
            let owner = bench.scheduler.get(row.id).unwrap().request.account;
            *given.entry(owner).or_default() += row.num_tokens;
        }
        bench.collect();
    }
    let most = given.values().max().unwrap();
    let least = given.values().min().unwrap();
    assert!(given.len() == 3 && most - least <= 4 * BUDGET, "{given:?}");
}

#[test]
fn an_end_is_found_a_step_late_and_its_extra_token_counts_for_nothing() {
    check_ahead(
        "budget 8 rows 4 block 4 blocks 16 context 64",
        "add 1 a 0..3 +9 eos 1004
         step     => 1:3*
         step     => 1:1*<0
         produced => 1
         step     => 1:1*<0 EndOfText 1
         blocks   => used 0 of 16
         step     => late 1
         produced => 2",
    );
}

#[test]
fn nothing_is_launched_beyond_a_limit_known_ahead() {
    check_ahead(
        "budget 8 rows 4 block 4 blocks 16 context 8",
        "add 1 a 0..3 +3
         add 2 b 0..5 +9
         step => 1:3* 2:5*
         step => 1:1*<0 2:1*<1
         step => 1:1*<0 2:1*<1
         step => Length 1 Length 2
         step =>
         add 3 a 10..12 +1
         step => 3:2*
         step => Length 3",
    );
}

#[test]
fn a_sequence_stopped_in_flight_frees_its_blocks_at_once() {
    check_ahead(
        "budget 8 rows 4 block 4 blocks 16 context 64",
        "add 1 a 0..5 +9
         add 2 b 0..3 +9
         step     => 1:5* 2:3*
         step     => 1:1*<0 2:1*<1
         stop 1   => prompt 5 cached 0 output 1
         blocks   => used 1 of 16
         step     => 2:1*<1 late 1
         step     => 2:1*<0
         produced => 4",
    );
}

#[test]
fn a_sequence_stopped_before_its_prompt_is_computed_has_computed_none() {
    check_ahead(
        "budget 8 rows 4 block 4 blocks 16 context 64",
        "add 1 a 0..20 +9
         step   => 1:8
         step   => 1:8
         stop 1 => prompt 8 cached 0 output 0
         step   =>
         blocks => used 0 of 16",
    );
}

#[test]
fn a_sequence_preempted_in_flight_keeps_the_token() {
    check_ahead(
        "budget 32 rows 4 block 4 blocks 6 context 24",
        "add 1 a 0..8 +9
         add 2 b 100..107 +9
         step     => 1:8* 2:7*
         step     => 1:1*<0 2:1*<1
         steps 3  => 1:1*<0 2:1*<1
         produced => 8
         step     => 1:1*<0 preempted 2
         produced => 10
         blocks   => used 4 of 6
         steps 3  => 1:1*<0
         step     => Length 1
         step     => 2:4*
         step     => 2:1*<0
         stop 2   => prompt 7 cached 0 output 6",
    );
}

#[test]
fn a_block_is_shared_once_its_tokens_are_known() {
    check_ahead(
        "budget 32 rows 4 block 4 blocks 16 context 64",
        "add 1 a 0..9 +9
         step   => 1:9*
         add 2 a 0..9 +9
         step   => 1:1*<0 2:9*
         add 3 a 0..9 +9
         step   => 1:1*<0 2:1*<1 3:1*
         stop 3 => prompt 8 cached 8 output 0",
    );
}

#[test]
fn a_failed_step_takes_the_one_launched_after_it_along() {
    check_ahead(
        "budget 8 rows 4 block 4 blocks 16 context 64",
        "add 1 a 0..3 +9
         step   => 1:3*
         add 2 b 0..3 +9
         add 3 b 0..30 +9
         step   => 1:1*<0 2:3* 3:4
         add 4 c 0..3 +9
         crash  => 1 2 3
         blocks => used 0 of 16
         step   => 4:3*
         step   => 4:1*<0",
    );
}

#[test]
fn integrity_covers_what_is_in_flight() {
    let check = |breaks: fn(&mut Scheduler), expect: &str| {
        let mut bench = Bench::new(2, "budget 8 rows 4 block 4 blocks 16 context 64");
        bench.run("add 1 a 0..3 +9");
        bench.run("add 2 b 0..3 +9");
        bench.run("step");
        bench.scheduler.schedule();
        breaks(&mut bench.scheduler);
        let error = bench.scheduler.check_integrity().expect_err(expect).to_string();
        assert!(error.contains(expect), "{error}");
    };
    check(|s| s.in_flight[1][0].feedback = Some(1), "fed another sequence's token");
    check(|s| drop(s.in_flight.pop_front()), "do not agree");
    check(|s| s.in_flight[0][0].from = 1, "do not agree");
    check(|s| sequence_mut(&mut s.sequences, SequenceId(1)).rows_in_flight = 1, "do not agree");
}

/// A hundred tokens need 25 blocks; a window of 9 and two steps of 8 tokens need 7 at a time.
#[test]
fn memory_follows_the_window() {
    let options = "budget 8 rows 2 block 4 blocks 8 context 200";
    let mut bench = Bench::with_windows(2, options, &[Some(9)]);
    bench.run("add 1 a 0..100 +30");
    while !bench.scheduler.is_empty() {
        bench.run("step");
        assert!(bench.scheduler.blocks().used() <= 7);
    }
    assert_eq!(bench.scheduler.totals().generated_tokens, 30);
}

#[test]
fn the_longest_sequence_is_the_one_that_all_layers_hold() {
    let longest = |blocks: usize, windows: &[Option<usize>], tokens| {
        let options = format!("budget 8 rows 2 block 4 blocks {blocks} context 1000");
        let bench = Bench::with_windows(1, &options, windows);
        bench.scheduler.options().longest_within(tokens)
    };
    assert_eq!(longest(10, &[None], 1_000), 40);
    assert_eq!(longest(10, &[None], 39), 39);
    assert_eq!(longest(20, &[None, Some(9)], 1_000), 52);
    assert_eq!(longest(7, &[Some(9)], 1_000), 1_000);
    assert_eq!(longest(6, &[Some(9)], 1_000), 24);
}

/// A prompt is cut where its state is kept: at eight tokens, at twice as many, and at its end. A
/// later one goes on from there; where it went on without a state, it leaves one.
#[test]
fn a_prefix_goes_on_from_a_state_that_was_kept() {
    let options = "budget 40 rows 4 block 4 blocks 64 context 64";
    let cache = CacheKinds { windows: vec![None], states: 16, first_kept: 8 };
    let mut bench = Bench::of_kinds(1, options, cache);
    let script = "
        add 1 a 0..39 +1 => 8 8 16 4 3*
        add 2 a 0..39 +1 => 3*
        add 3 a 0..30 +1 => 12 2*
        add 4 a 0..30 +1 => 2*
        add 5 b 0..30 +1 => 8 8 12 2*
        add 6 a 0..7 +1 => 7*
        add 7 a 90..98 +1 => 8*
        add 8 a 0..39 +9 => 3* 1* 1* 1* 1* 1* 1* 1* 1*";
    for line in script.lines().skip(1).map(str::trim) {
        let (add, expect) = line.split_once(" => ").unwrap();
        bench.run(add);
        let mut rows = Vec::new();
        while !bench.scheduler.is_empty() {
            let said = bench.run("step");
            let (_, row) = said.split_once(':').unwrap();
            rows.push(row.split(' ').next().unwrap().to_owned());
        }
        assert_eq!(rows.join(" "), expect, "{add}");
    }
}

/// Random arrivals, stops, failures, crashes and steps under a tight cache. The scheduler's
/// integrity is checked after each operation.
fn churn(depth: usize, operations: u32) {
    churn_windows(depth, operations, 20, &[None]);
    churn_windows(depth, operations, 40, &[None, Some(9)]);
    churn_windows(depth, operations, 14, &[Some(9)]);
    churn_windows(depth, operations, 80, &[None, Some(5), None, Some(30)]);
    churn_states(depth, operations, 20, 12);
    churn_states(depth, operations, 18, 5);
}

/// Texts that nearly repeat themselves, so that of the drafts some are right and some are not.
/// There are none while a sequence waits, so there are few sequences.
fn churn_drafts(operations: u32, blocks: usize, states: usize, sequences: usize) {
    let options = format!("budget 24 rows 6 block 4 blocks {blocks} context 64 drafts 6");
    let cache = CacheKinds { windows: vec![None], states, first_kept: 8 };
    let mut bench = Bench::of_kinds(1, &options, cache);
    bench.token = |id, len| {
        let [chance, other, ..] = philox4x32([id as u32, len as u32, 0, 0], [3, 4]);
        if chance % 8 == 0 { other % 50 } else { (id + len as u64) as u32 % 4 }
    };
    churn_bench(&mut bench, operations, sequences);
    let totals = bench.scheduler.totals();
    let wrong = totals.draft_tokens - totals.accepted_tokens;
    assert!(totals.accepted_tokens > 500 && wrong > 500, "{totals:?}");
}

fn churn_windows(depth: usize, operations: u32, blocks: usize, windows: &[Option<usize>]) {
    let cache = CacheKinds { windows: windows.to_vec(), ..CacheKinds::default() };
    churn_kinds(depth, operations, blocks, cache);
}

/// Few states make few sequences run, so that an account takes rows from another.
fn churn_states(depth: usize, operations: u32, blocks: usize, states: usize) {
    let cache = CacheKinds { windows: vec![None], states, first_kept: 8 };
    churn_kinds(depth, operations, blocks, cache);
}

fn churn_kinds(depth: usize, operations: u32, blocks: usize, cache: CacheKinds) {
    let options = format!("budget 24 rows 6 block 4 blocks {blocks} context 64");
    churn_bench(&mut Bench::of_kinds(depth, &options, cache), operations, 24);
}

/// At most so many sequences live at a time.
fn churn_bench(bench: &mut Bench, operations: u32, sequences: usize) {
    let mut next = 1..;
    let mut live = Vec::new();
    for operation in 0..operations {
        let [kind, a, b, c] = philox4x32([operation, 0, 0, 0], [1, 2]);
        match kind % 16 {
            0..3 if live.len() < sequences => {
                let (id, from) = (next.next().unwrap(), a % 3);
                live.push(id);
                let to = from + 1 + b % 40;
                let (name, max) = (["a", "b", "c"][c as usize % 3], 1 + (c >> 8) % 30);
                let eos = 1_000 + to + (c >> 16) % 60;
                // Few sequences have drafts only while none of them waits.
                let class = if c >> 30 == 0 && sequences > 5 { " background" } else { "" };
                bench.run(&format!("add {id} {name} {from}..{to} +{max} eos {eos}{class}"))
            }
            3 if b % 32 == 0 => bench.run("crash"),
            3 if !live.is_empty() => {
                let id = live.swap_remove(a as usize % live.len());
                bench.run(&format!("{} {id}", ["stop", "fail"][b as usize % 2]))
            }
            _ => bench.run("step"),
        };
        live.retain(|&id| bench.scheduler.get(SequenceId(id)).is_some());
    }
    assert!(bench.scheduler.totals().preemptions > 100, "the cache was not tight");
    assert!(bench.scheduler.totals().prefix_hit_tokens > 100, "nothing was shared");
    while !bench.scheduler.is_empty() {
        bench.run("step");
    }
    assert_eq!(bench.scheduler.blocks().used(), 0);
}

#[test]
fn random_operations_keep_every_block_accounted_for() {
    churn(1, 30_000);
    churn(2, 30_000);
    for [blocks, states, sequences] in [[20, 0, 5], [20, 12, 5], [30, 40, 5], [18, 5, 2]] {
        churn_drafts(30_000, blocks, states, sequences);
    }
}

#[test]
#[ignore = "the same ten times longer"]
fn a_million_random_operations_keep_every_block_accounted_for() {
    churn(1, 1_000_000);
    churn(2, 1_000_000);
}

/// The next step of a scheduler with one sequence: where its row begins, and its drafts.
fn next_row(scheduler: &mut Scheduler) -> (usize, Vec<u32>) {
    let step = scheduler.schedule();
    let [row] = step.rows[..] else { panic!("one row: {step:?}") };
    assert!(row.samples && row.results() == 1 + row.drafts);
    scheduler.check_integrity().unwrap();
    (row.from, scheduler.get(row.id).unwrap().drafts().to_vec())
}

#[test]
fn drafts_become_tokens_up_to_the_first_that_was_not_drawn() {
    let options = EngineOptions { speculative_tokens: 4, ..super::super::testing::small_options() };
    let mut scheduler = Scheduler::new(options, [7; 32]);
    let id = SequenceId(1);
    let prompt = [1, 2, 3, 4, 1, 2, 3];
    scheduler.add(id, crate::tests::request(prompt, 14));
    // What a row gives, and which of that are tokens.
    let commit = |scheduler: &mut Scheduler, results: &[u32]| {
        scheduler.commit_step();
        let mut taken = 0;
        while scheduler.awaits(id) && taken < results.len() {
            assert_eq!(scheduler.append(id, results[taken]), None);
            taken += 1;
        }
        taken
    };
    // The row of a prompt has no drafts.
    assert_eq!(next_row(&mut scheduler), (0, vec![]));
    assert_eq!(commit(&mut scheduler, &[4]), 1);
    assert_eq!(next_row(&mut scheduler), (7, vec![1, 2, 3, 4]));
    assert_eq!(commit(&mut scheduler, &[1, 2, 9, 9, 9]), 3, "the third is no draft, so the last");
    assert_eq!(scheduler.get(id).unwrap().tokens[7..], [4, 1, 2, 9]);
    // Nothing in the text follows a 9.
    assert_eq!(next_row(&mut scheduler), (10, vec![]));
    assert_eq!(commit(&mut scheduler, &[2]), 1);
    for (from, token) in [(11, 3), (12, 4)] {
        assert_eq!(next_row(&mut scheduler), (from, vec![]));
        assert_eq!(commit(&mut scheduler, &[token]), 1);
    }
    // No more drafts than the answer may have tokens behind the next one.
    let (from, drafts) = next_row(&mut scheduler);
    assert!(from == 13 && drafts[..2] == [1, 2], "{drafts:?}");
    let all: Vec<u32> = drafts.iter().copied().chain([7]).collect();
    assert_eq!(commit(&mut scheduler, &all), all.len());
    let totals = scheduler.totals();
    assert_eq!(totals.accepted_tokens, 2 + drafts.len() as u64);
    assert_eq!(totals.draft_tokens, 4 + drafts.len() as u64);
    scheduler.finish(id, StopCause::Stopped).unwrap();
    scheduler.check_integrity().unwrap();
    assert_eq!(scheduler.blocks().used(), 0);
}

/// A row of a model with states, whose drafts each leave one: the sequence goes on from that of the
/// last right one. They take a quarter of the slots at most, and end where a state is kept.
#[test]
fn the_states_of_wrong_drafts_are_given_back() {
    let mut options = EngineOptions {
        speculative_tokens: 6,
        block_size: 4,
        ..super::super::testing::small_options()
    };
    options.cache = CacheKinds { states: 17, first_kept: 8, ..CacheKinds::default() };
    let mut scheduler = Scheduler::new(options, [7; 32]);
    let id = SequenceId(1);
    scheduler.add(id, crate::tests::request([1, 1, 1, 1, 1], 40));
    let mut moves = Vec::new();
    // How many of a row's drafts are right.
    for right in [0, 2, 1, 0] {
        let row = scheduler.schedule().rows[0];
        let states = scheduler.get(id).unwrap().table.state_moves().iter();
        let states: Vec<_> = states.map(|states| (states.read, states.write)).collect();
        moves.push((row.from, row.drafts, states));
        scheduler.check_integrity().unwrap();
        scheduler.commit_step();
        for result in 0..=right {
            let wrong = result == right && right < row.drafts;
            assert_eq!(scheduler.append(id, 1 + u32::from(wrong)), None);
        }
        assert!(!scheduler.awaits(id));
        scheduler.check_integrity().unwrap();
    }
    let expect = [
        (0, 0, vec![(NO_STATE, 0)]),
        // A state is kept at eight tokens.
        (5, 2, vec![(0, 0), (0, 1), (1, 2)]),
        (8, 4, vec![(2, 1), (1, 0), (0, 3), (3, 4), (4, 5)]),
        // The state after the first of four drafts.
        (10, 0, vec![(0, 0)]),
    ];
    assert_eq!(moves, expect);
    scheduler.finish(id, StopCause::Stopped).unwrap();
    scheduler.add(SequenceId(2), crate::tests::request([1; 9], 4));
    let again = scheduler.schedule().rows[0];
    assert_eq!(again.from, 8, "the state that was kept is found again");
}
