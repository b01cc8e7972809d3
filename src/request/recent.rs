//! What operators are told of the latest requests.

use cresset_base::{Recent, UnixMillis};
use std::time::Duration;

/// The latest failures of generations: enough for an operator to see whether one repeats, and few
/// enough to print.
pub(crate) type RecentErrors = Recent<RecentError, 16>;

/// How long the latest requests took: ten minutes of seven requests a second.
pub(crate) type RecentLatencies = Recent<RequestLatency, 4_096>;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecentError {
    pub at: UnixMillis,
    /// Name of the model concerned.
    pub model: String,
    pub message: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestLatency {
    /// The end of the request.
    pub at: UnixMillis,
    /// From its admission to its first token; `None` if it had none.
    pub first_token: Option<Duration>,
    /// From its admission to its end.
    pub whole: Duration,
}
