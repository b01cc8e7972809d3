//! The engine: generates tokens for many sequences at once with one loaded model.
//!
//! Each engine has one thread of its own (`worker`), which owns the model, its KV cache and the
//! scheduler, and repeats `schedule → launch → collect → commit`. The rest of the node holds an
//! `EngineHandle`. Its calls never wait for a step: requests and stops go into an inbox, which
//! the worker empties before each step, and events come back over one bounded channel per sequence
//! that has room for all of them.
//!
//! A runner may have two steps in flight: the next one is scheduled and launched while the device
//! computes the last one, whose sampled tokens are fed back on the device. The end of a sequence is
//! therefore found one step late. The extra token is dropped: it is neither sent nor counted. Where
//! an answer keeps to a grammar, the next step is launched up to its logits. It is sampled once the
//! last one's tokens, and so what may follow them, are known.
//!
//! `sequence`, `block_manager`, `scheduler`, `speculation`, `fair_queue`, `queue_limits`,
//! `grammar`, `rate` and `error` are pure: no tensors, no tasks, and time is an argument. `batch`
//! turns a scheduled step into the model's input; `model_runner` computes it. `draft_model` guesses
//! tokens with a second, smaller model, `own_guesses` with a head of the model itself.

#![cfg_attr(
    test,
    allow(
        clippy::disallowed_methods,
        unreachable_pub,
        reason = "tests measure time, start threads and share helpers"
    )
)]

mod batch;
mod block_manager;
pub mod boot_canary;
mod draft_model;
mod error;
mod fair_queue;
mod grammar;
mod handle;
mod model_runner;
mod own_guesses;
mod panics;
mod queue_limits;
mod rate;
mod runner;
mod scheduler;
mod sequence;
mod sequence_id;
mod settings;
mod speculation;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
mod worker;

#[cfg(test)]
mod tests;

pub use batch::{forward_batch, known_rows};
pub use cresset_base::EngineStats;
pub use cresset_kernels::sampling::params::{
    NumberField, RowSampling, SAMPLING_NUMBERS, SamplingNumber, SamplingParams, TokenLogprobs,
    TokenMask,
};
pub use draft_model::DraftModel;
pub use error::EngineError;
pub use grammar::TokenGrammar;
pub use handle::{EngineHandle, EnginePhase, EngineProgress, SequenceEvent};
pub use model_runner::{LoadedInfo, ModelRunner};
pub use queue_limits::Refused;
pub use runner::{RowResult, Runner, nothing_launched};
pub use scheduler::{EngineOptions, Scheduler};
pub use sequence::{Finished, GenerateRequest, SequenceId, StopCause};
pub use settings::{DeviceSetting, EngineSettings, InstructionSetSetting, KvTypeSetting};
