//! Measures the host's work between two steps. Run it alone, in an optimised build.

use super::*;
use crate::batch::forward_batch;
use crate::scheduler::Scheduler;
use cresset_kernels::sampling::cpu::Sampler;
use cresset_kernels::sampling::params::RowSampling;
use cresset_kernels::sampling::philox4x32;
use cresset_models::cache_kinds::CacheKinds;

/// The median and the least of `times`, in µs.
fn told(what: &str, mut times: Vec<f64>) {
    times.sort_by(f64::total_cmp);
    println!("{what}: {:.1} µs (fastest {:.1})", times[times.len() / 2], times[0]);
}

fn timed(times: &mut Vec<f64>, work: impl FnOnce()) {
    let began = Instant::now();
    work();
    times.push(began.elapsed().as_secs_f64() * 1e6);
}

#[test]
#[ignore = "measures"]
fn a_step_of_256_rows() {
    steps_of_256_rows(1);
    steps_of_256_rows(2);
}

fn steps_of_256_rows(depth: usize) {
    let options = EngineOptions {
        max_batched_tokens: 512,
        max_rows: 256,
        background_tokens: 16,
        max_waiting: 1_024,
        block_size: 16,
        num_blocks: 65_536,
        cache: CacheKinds::default(),
        max_context: 4_096,
        speculative_tokens: 0,
    };
    let mut scheduler = Scheduler::new(options, [0; 32]);
    for id in 0..256 {
        let account = AccountId(Uuid::from_u128(u128::from(id % 32)));
        let prompt = id as u32 * 1_000..id as u32 * 1_000 + 500;
        scheduler.add(SequenceId(id + 1), GenerateRequest { account, ..request(prompt, 3_000) });
    }
    let (mut planning, mut committing) = (Vec::new(), Vec::new());
    for turn in 0..1_200 {
        let mut rows = 0;
        let plan = || {
            let step = scheduler.schedule();
            rows = step.rows.len();
            forward_batch(&scheduler, &step);
        };
        let mut ignored = Vec::new();
        timed(if turn < 700 { &mut ignored } else { &mut planning }, plan);
        assert!(turn < 700 || rows == 256);
        if scheduler.in_flight().len() < depth {
            continue;
        }
        timed(if turn < 700 { &mut ignored } else { &mut committing }, || {
            for row in scheduler.commit_step().iter().filter(|row| row.samples) {
                assert!(scheduler.append(row.id, 7).is_none());
            }
        });
    }
    told(&format!("schedule and build the batch at depth {depth}"), planning);
    told(&format!("advance and append at depth {depth}"), committing);
}

#[test]
#[ignore = "measures"]
fn a_row_of_49_152_logits() {
    // A normal distribution of deviation 3 is about as peaked as a language model's logits.
    let uniform = |id: u32, word: usize| {
        (f64::from(philox4x32([id, 0, 0, 0], [1, 2])[word]) + 0.5) / 4_294_967_296.0
    };
    let normal =
        |id| (-2.0 * uniform(id, 0).ln()).sqrt() * (std::f64::consts::TAU * uniform(id, 1)).cos();
    let logits: Vec<f32> = (0..49_152).map(|id| (normal(id) * 3.0) as f32).collect();
    let measure = |what: &str, change: fn(&mut SamplingParams)| {
        let mut params = SamplingParams::default();
        change(&mut params);
        let tokens = Arc::new((0..700).collect::<Vec<u32>>());
        let params = Arc::new(params);
        let mut row = RowSampling {
            params,
            tokens,
            pending: None,
            prompt_len: 500,
            banned: Arc::default(),
            grammar: None,
        };
        let (mut sampler, mut times) = (Sampler::default(), Vec::new());
        for seed in 0..200 {
            Arc::make_mut(&mut row.params).seed = seed;
            timed(&mut times, || drop(sampler.sample(&logits, &row).unwrap()));
        }
        told(what, times);
    };
    measure("greedy", |p| p.temperature = 0.0);
    measure("temperature", |p| p.temperature = 0.8);
    measure("top-k 50", |p| p.top_k = 50);
    measure("top-p 0.95", |p| p.top_p = 0.95);
    measure("top-k 50, top-p 0.9, min-p 0.05", |p| (p.top_k, p.top_p, p.min_p) = (50, 0.9, 0.05));
    measure("greedy with penalties", |p| (p.temperature, p.repetition_penalty) = (0.0, 1.1));
    measure("temperature with 20 logprobs", |p| p.logprobs = Some(20));
}
