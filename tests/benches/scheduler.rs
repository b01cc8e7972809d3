//! Measures the host's work for one engine step of 256 decoding rows: it schedules the step, builds
//! the batch and appends the tokens. A GPU waits for all of it, so it should stay under 100 µs. Run
//! it with `cargo bench --bench scheduler`.

#![allow(clippy::disallowed_methods, unreachable_pub, reason = "a program that measures time")]

use cresset_base::AccountId;
use cresset_engine::{
    EngineOptions, GenerateRequest, SamplingParams, Scheduler, SequenceId, forward_batch,
};
use cresset_models::cache_kinds::CacheKinds;
use criterion::{Criterion, criterion_group, criterion_main};
use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

const ROWS: u64 = 256;
const PROMPT: u32 = 500;
const BLOCK: usize = 16;

/// A scheduler with 256 sequences of 16 accounts, whose prompts are computed and which have a first
/// token each.
fn decoding() -> Scheduler {
    let options = EngineOptions {
        max_batched_tokens: 8_192,
        background_tokens: 16,
        max_rows: ROWS as usize,
        max_waiting: 0,
        block_size: BLOCK,
        num_blocks: 32_768,
        cache: CacheKinds::default(),
        max_context: 4_096,
        speculative_tokens: 0,
    };
    let mut scheduler = Scheduler::new(options, [7; 32]);
    let accounts: Vec<AccountId> = (0..16).map(|_| AccountId::generate()).collect();
    for row in 0..ROWS {
        let request = GenerateRequest {
            account: accounts[row as usize % accounts.len()],
            application: None,
            prompt: Arc::new((0..PROMPT).map(|token| token + row as u32).collect()),
            sampling: SamplingParams::default(),
            max_tokens: 3_000,
            min_tokens: 0,
            eos_ids: [0].into(),
            grammar: None,
            deadline: None,
            priority: 0,
            background: false,
        };
        scheduler.add(SequenceId(row + 1), request);
    }
    while scheduler.sequences().any(|sequence| !sequence.is_decoding()) {
        step(&mut scheduler);
    }
    scheduler
}

fn step(scheduler: &mut Scheduler) {
    let step = scheduler.schedule();
    let batch = forward_batch(scheduler, &step);
    black_box(&batch);
    drop(batch);
    for row in scheduler.commit_step().iter().filter(|row| row.samples) {
        black_box(scheduler.append(row.id, 9));
    }
}

fn bench(criterion: &mut Criterion) {
    criterion.bench_function("one step of 256 decoding rows", |bencher| {
        bencher.iter_custom(|steps| {
            let (mut left, mut spent) = (steps, Duration::ZERO);
            while left > 0 {
                // Sequences grow and end at their context, so the scheduler is replaced now and
                // then.
                let (mut scheduler, count) = (decoding(), left.min(1_000));
                let began = Instant::now();
                for _ in 0..count {
                    step(&mut scheduler);
                }
                spent += began.elapsed();
                left -= count;
            }
            spent
        });
    });
}

criterion_group!(benches, bench);
criterion_main!(benches);
