//! Sessions of agents, each of whose prompts is the last one, its answer and something new: no turn
//! computes what its session has in the cache.

use super::*;
use crate::runner::{RowResult, Runner};
use crate::testing::ScriptedRunner;
use cresset_kernels::sampling::params::RowSampling;
use cresset_models::ForwardBatch;
use std::sync::atomic::{AtomicUsize, Ordering};

const SESSIONS: u32 = 16;
const TURNS: u32 = 8;
const BLOCK: usize = 4;
/// Tokens of the system prompt, which all sessions begin with.
const SYSTEM: u32 = 41;
/// Tokens of an answer, `END` included. All answers are equal, so that drafts are right.
const ANSWER: u32 = 14;
const END: u32 = 2;

/// A model that answers by a script, and counts the tokens that it computes beside drafts.
struct Counting {
    inner: ScriptedRunner,
    computed: Arc<AtomicUsize>,
}

impl Counting {
    fn new(depth: usize) -> Self {
        let script = |row: &RowSampling| match (row.tokens.len() - row.prompt_len) as u32 {
            written if written + 1 == ANSWER => END,
            written => 100 + written,
        };
        let step = Duration::from_micros(200);
        let inner = ScriptedRunner::new(script).depth(depth).step_time(step);
        Self { inner, computed: Arc::default() }
    }
}

impl Runner for Counting {
    fn launch(&mut self, batch: &ForwardBatch, rows: &[RowSampling]) -> Result<(), EngineError> {
        self.computed.fetch_add(batch.input_ids.len(), Ordering::Relaxed);
        self.inner.launch(batch, rows)
    }

    fn collect(&mut self) -> Result<Vec<RowResult>, EngineError> {
        self.inner.collect()
    }

    fn depth(&self) -> usize {
        Runner::depth(&self.inner)
    }
}

/// What a session's turn adds to its prompt: the result of a tool.
fn result(session: u32, turn: u32) -> impl Iterator<Item = u32> {
    let first = 1_000 * (session + 1) + 50 * turn;
    first..first + 3 + (session * 7 + turn * 5) % 11
}

/// Tokens of a session at its end.
fn length(session: u32) -> usize {
    let results = (0..TURNS).map(|turn| result(session, turn).count());
    (SYSTEM + TURNS * ANSWER) as usize + results.sum::<usize>()
}

/// Blocks that hold all sessions at their ends, with what they share once.
fn just_enough() -> usize {
    let all: usize = (0..SESSIONS).map(|session| length(session).div_ceil(BLOCK)).sum();
    all - (SESSIONS as usize - 1) * (SYSTEM as usize / BLOCK)
}

/// The sessions of an engine: what each has said, and how much of that was there before its turn.
struct Sessions {
    engine: EngineHandle,
    texts: Vec<Vec<u32>>,
    before: Vec<usize>,
}

impl Sessions {
    fn begin(&mut self, session: usize, turn: u32) -> mpsc::Receiver<SequenceEvent> {
        let text = &mut self.texts[session];
        self.before[session] = text.len();
        text.extend(result(session as u32, turn));
        let eos_ids = [END].into();
        let request = GenerateRequest { eos_ids, ..request(text.clone(), 2 * ANSWER) };
        self.engine.submit(request).unwrap().1
    }

    /// Takes the answer. The turn has found all whole blocks of the one before it, whose last token
    /// was drawn and not computed.
    fn end(&mut self, session: usize, turn: u32, events: mpsc::Receiver<SequenceEvent>) {
        let (answer, finished) = collect(events);
        assert_eq!((answer.len() as u32, answer.last()), (ANSWER, Some(&END)));
        self.texts[session].extend(answer);
        let left = if turn > 0 { (self.before[session] - 1) / BLOCK * BLOCK } else { 0 };
        let found = finished.cached_tokens as usize;
        assert!(found >= left, "session {session}, turn {turn}: {found} tokens of {left}");
    }
}

/// Runs the sessions' turns, one by one or all sessions side by side. Returns the engine's counts.
fn run_sessions(options: &EngineOptions, depth: usize, together: bool) -> EngineStats {
    let runner = Counting::new(depth);
    let computed = runner.computed.clone();
    let engine = EngineHandle::start(Box::new(runner), options.clone());
    let system: Vec<u32> = (10..10 + SYSTEM).collect();
    let count = SESSIONS as usize;
    let mut sessions = Sessions { engine, texts: vec![system; count], before: vec![0; count] };
    for turn in 0..TURNS {
        let mut running = Vec::new();
        for session in 0..count {
            running.push((session, sessions.begin(session, turn)));
            if !together || session + 1 == count {
                running.drain(..).for_each(|(session, events)| sessions.end(session, turn, events));
            }
        }
    }
    wait_for(&sessions.engine, "idle", |stats| stats.running + stats.blocks_used == 0);
    let stats = sessions.engine.stats();
    let all: usize = sessions.texts.iter().map(Vec::len).sum();
    let computed = computed.load(Ordering::Relaxed) - stats.draft_tokens as usize;
    // A turn begins with the rest of a block that is computed again.
    let most = all + TURNS as usize * count * BLOCK;
    assert!(computed <= most, "{computed} tokens computed of {all}: {stats:?}");
    stats
}

#[test]
fn no_turn_computes_what_its_session_has_in_the_cache() {
    let window = CacheKinds { windows: vec![None, Some(9)], ..CacheKinds::default() };
    let states = CacheKinds { states: 80, first_kept: 8, ..CacheKinds::default() };
    let full = CacheKinds::default;
    let mut right = 0;
    for (what, cache, num_blocks, depth, drafts) in [
        ("room for more", full(), 4_000, 1, 0),
        ("just enough blocks", full(), just_enough(), 1, 0),
        ("just enough blocks, two steps in flight", full(), just_enough(), 2, 0),
        ("drafts", full(), just_enough(), 1, 8),
        ("a window", window, 4_000, 1, 0),
        ("states", states.clone(), 4_000, 1, 0),
        ("states, two steps in flight", states.clone(), 4_000, 2, 0),
        ("states and drafts", states, 4_000, 1, 8),
    ] {
        let options = EngineOptions {
            block_size: BLOCK,
            num_blocks,
            cache,
            max_context: 512,
            max_rows: SESSIONS as usize,
            max_waiting: SESSIONS as usize,
            speculative_tokens: drafts,
            ..options()
        };
        for together in [false, true] {
            println!("{what}, side by side {together}");
            let stats = run_sessions(&options, depth, together);
            assert_eq!(stats.preemptions, 0);
            right += stats.accepted_tokens;
        }
    }
    assert!(right > 0, "no draft was right");
}
