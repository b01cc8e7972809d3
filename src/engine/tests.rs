//! Tests of the whole engine around runners that need no model.

mod ahead;
mod cost;
mod determinism;
mod draft_model;
mod errors;
mod formats;
mod lifecycle;
mod neighbours;
mod own_guesses;
mod sessions;
mod speculation;

use super::*;
use cresset_base::AccountId;
use cresset_kernels::sampling::params::SamplingParams;
use cresset_models::ModelSource;
use cresset_models::cache_kinds::CacheKinds;
use cresset_models::goldens::goldens;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::mpsc;
use uuid::Uuid;

fn options() -> EngineOptions {
    EngineOptions {
        max_batched_tokens: 64,
        background_tokens: 16,
        max_rows: 8,
        max_waiting: 4,
        block_size: 4,
        num_blocks: 64,
        cache: CacheKinds::default(),
        max_context: 128,
        speculative_tokens: 0,
    }
}

pub fn request(prompt: impl IntoIterator<Item = u32>, max_tokens: u32) -> GenerateRequest {
    GenerateRequest {
        account: AccountId(Uuid::nil()),
        application: None,
        priority: 0,
        background: false,
        prompt: Arc::new(prompt.into_iter().collect()),
        sampling: SamplingParams::default(),
        max_tokens,
        min_tokens: 0,
        eos_ids: Arc::default(),
        grammar: None,
        deadline: None,
    }
}

/// The tiny model of this name, written to `folder`, for sequences of up to `context` tokens.
pub fn golden_model(name: &str, folder: &Path, context: usize) -> ModelSource {
    let case = goldens().cases.into_iter().find(|case| case.name == name).unwrap();
    let mut config = case.config.clone();
    config["max_position_embeddings"] = context.into();
    case.write(folder, &config).unwrap();
    ModelSource::hf_folder(folder.to_owned())
}

/// An instant for tests of pure code, which has no clock of its own.
pub fn any_instant() -> Instant {
    Instant::now()
}

/// Reads a sequence to its end: its tokens, and how it finished.
pub fn collect(mut events: mpsc::Receiver<SequenceEvent>) -> (Vec<u32>, Finished) {
    let mut tokens = Vec::new();
    let mut started = 0;
    loop {
        match events.blocking_recv().expect("a sequence ends with Finished") {
            SequenceEvent::Started => started += 1,
            SequenceEvent::Token { id, .. } => tokens.push(id),
            SequenceEvent::Finished(finished) => {
                assert_eq!(finished.completion_tokens as usize, tokens.len());
                assert!(started == 1 || (started == 0 && tokens.is_empty()));
                assert_eq!(events.blocking_recv(), None, "nothing follows Finished");
                return (tokens, finished);
            }
        }
    }
}

/// Polls the statistics, which are published after each step, until they are as expected.
pub fn wait_for(engine: &EngineHandle, what: &str, reached: impl Fn(&EngineStats) -> bool) {
    let patience = Instant::now() + Duration::from_secs(20);
    while !reached(&engine.stats()) {
        assert!(Instant::now() < patience, "never {what}: {:?}", engine.stats());
        std::thread::sleep(Duration::from_millis(1));
    }
}
