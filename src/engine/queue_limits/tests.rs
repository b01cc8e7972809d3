//! Tables of requests that are refused, with the reasons.

use super::*;
use crate::SamplingParams;
use cresset_base::AccountId;
use cresset_models::cache_kinds::CacheKinds;
use std::sync::Arc;
use uuid::Uuid;

fn options() -> EngineOptions {
    EngineOptions {
        max_batched_tokens: 16,
        background_tokens: 16,
        max_rows: 4,
        max_waiting: 2,
        block_size: 4,
        num_blocks: 10,
        cache: CacheKinds::default(),
        max_context: 64,
        speculative_tokens: 0,
    }
}

fn request(prompt: usize, max_tokens: u32) -> GenerateRequest {
    GenerateRequest {
        account: AccountId(Uuid::nil()),
        application: None,
        priority: 0,
        background: false,
        prompt: vec![0; prompt].into(),
        sampling: SamplingParams::default(),
        max_tokens,
        min_tokens: 0,
        eos_ids: Arc::default(),
        grammar: None,
        deadline: None,
    }
}

#[test]
fn requests_that_can_never_run_are_refused() {
    let check = |prompt, max_tokens, expect: Option<&str>| {
        let found = check_size(&options(), &request(prompt, max_tokens));
        let expect = expect.map_or(Ok(()), |text| Err(Refused::TooLarge(text.into())));
        assert_eq!(found, expect, "{prompt} + {max_tokens}");
    };
    check(1, 1, None);
    check(30, 10, None);
    check(0, 1, Some("the prompt is empty"));
    check(1, 0, Some("max_tokens is 0"));
    check(64, 1, Some("the prompt has 64 tokens and the engine's context is 64"));
    check(30, 11, Some("it needs 11 KV blocks and there are 10"));
    check(30, u32::MAX, Some("it needs 16 KV blocks and there are 10"));
}

#[test]
fn requests_that_would_wait_in_vain_are_refused() {
    let now = Instant::now();
    // `load` is live sequences, prompt tokens, output tokens and tokens per second, ten times as
    // many of them in prompts; `deadline` is in seconds from now, and `expect` is the refusal's
    // Retry-After in seconds.
    let check = |load: (usize, usize, usize, f64), deadline: Option<u64>, expect: Option<u64>| {
        let (live, prompt_tokens, output_tokens, rate) = load;
        let load = EngineLoad {
            live,
            prompt_tokens,
            output_tokens,
            prompt_tokens_per_second: 10.0 * rate,
            tokens_per_second: rate,
            found_share: 0.0,
        };
        let mut request = request(1, 1);
        request.deadline = deadline.map(|seconds| now + Duration::from_secs(seconds));
        let refused =
            |seconds| Err(Refused::Overloaded { retry_after: Duration::from_secs(seconds) });
        let found = check_wait(&options(), &load, &request, now);
        assert_eq!(found, expect.map_or(Ok(()), refused), "{load:?} by {deadline:?}");
    };
    check((0, 0, 0, 0.0), None, None);
    check((5, 0, 0, 0.0), None, None);
    check((6, 0, 0, 0.0), None, Some(1));
    check((6, 1_000, 900, 100.0), None, Some(10));
    check((6, 100, 90_000, 100.0), None, Some(60));
    check((5, 1_000, 900, 100.0), Some(11), None);
    check((5, 1_000, 900, 100.0), Some(9), Some(10));
    check((3, 1_000, 900, 100.0), Some(9), None);
    check((4, 0, 30_001, 100.0), None, Some(60));
    check((4, 0, 29_999, 100.0), None, None);
}

/// Sessions whose long prompts are in the cache wait for little, so a burst of them is not refused.
#[test]
fn a_queued_prompt_counts_as_much_as_was_not_found_of_the_latest() {
    let mut found = FoundShare::default();
    assert!(found.share() <= 0.0);
    found.note(0, 1_000);
    for _ in 0..100 {
        found.note(950, 1_000);
    }
    let mut load = EngineLoad { found_share: found.share(), ..EngineLoad::default() };
    load.add(&request(1_000, 7));
    assert!((50..60).contains(&load.prompt_tokens), "{load:?}");
    load.add(&GenerateRequest { background: true, ..request(1_000, 7) });
    assert_eq!((load.live, load.output_tokens), (1, 7));
}
