//! One request's life, from its first look-up to its settlement, without any HTTP.
//!
//! A surface parses its own dialect into an `IncomingRequest`, calls `find_or_start`, and renders
//! the `AnswerSource` it gets. It renders a stream delta by delta, and it gives the lifecycle a
//! function that renders the whole answer, because that body is stored before the settlement.
//!
//! The life of a request that is new (`lifecycle`): the sequence enters the engine, the reservation
//! becomes durable, tokens become deltas, the body is stored, the charge is settled, and only then
//! the last delta is published. `guard` undoes what is left wherever that ends early.

#![cfg_attr(
    test,
    allow(
        clippy::disallowed_methods,
        unreachable_pub,
        reason = "tests measure time, start threads and share helpers"
    )
)]

mod complete_answer;
mod documents;
mod elsewhere;
mod error;
mod find;
mod generation_input;
mod guard;
mod lifecycle;
mod live;
mod other_nodes;
mod plan;
mod plans;
mod recent;
mod services;
mod settings;
#[cfg(test)]
mod tests;
mod tools;
mod trace;
mod transcript;

pub use complete_answer::{CompleteAnswer, Thought};
pub use cresset_text::AnswerFormat;
#[cfg(any(test, feature = "testing"))]
pub use documents::receipt::testing;
pub use documents::receipt::{ReceiptEnvelope, ReceiptPredicate, ReceiptStatement};
pub use documents::{CreditBalance, RequestObject, UsageObject};
pub use elsewhere::{lease_lost, owner};
pub use error::RequestError;
pub use find::{AnswerSource, find_or_start};
pub use generation_input::{
    AskedFormat, AskedTools, GenerationInput, SamplingOverrides, ToolChoice,
};
pub use live::{AnswerFigures, Delta, Subscription};
pub use other_nodes::follow_cluster;
pub use plan::{Caller, IncomingRequest, TokenLimits, read_prompt};
pub use plans::PlanInForce;
pub use recent::RecentError;
pub use services::{ServiceParts, Services, cancel};
pub use settings::Plan;
pub use tools::{Capability, PreparedAnswer};
pub use transcript::{PartDelta, ScoredToken, TokenScores, Transcript};
