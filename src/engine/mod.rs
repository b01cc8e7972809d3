//! The engine: `schedule → launch → collect → commit` on one thread that owns the model and its KV
//! cache.
//! `sequence`, `block_manager`, `fair_queue`, `scheduler`, `queue_limits` and `rate` are pure; tensors
//! appear in `model_runner` and `gpu_runner`.

pub mod batch;
pub mod block_manager;
pub mod error;
pub mod fair_queue;
pub mod gpu_runner;
pub mod gpu_sampling;
pub mod handle;
mod inbox;
pub mod model_runner;
pub mod queue_limits;
pub mod rate;
pub mod runner;
pub mod sampler;
pub mod sampling_params;
pub mod scheduler;
pub mod sequence;
mod worker;

#[cfg(test)]
mod tests;

pub use error::EngineError;
pub use handle::{
    EngineHandle, EngineOptions, EngineStats, Event, Finished, GenerateRequest, Refused,
    SequenceId, StopCause,
};
pub use sampler::TokenLogprobs;
pub use sampling_params::{RowSampling, SamplingParams};
