//! One request's life, from before its reservation to its settlement.

pub mod lifecycle;
pub mod live;
pub mod plan;
pub mod rate_limit;
pub mod recent_errors;
pub mod services;
pub mod transcript;
