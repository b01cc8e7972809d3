//! What a node shows of its work: every metric with its name, unit and help, and spans of requests
//! in OpenTelemetry's form.

#![cfg_attr(
    test,
    allow(
        clippy::disallowed_methods,
        unreachable_pub,
        reason = "tests measure time, start threads and share helpers"
    )
)]

mod metrics;
mod metrics_text;
pub mod traces;

pub use metrics::{
    DeviceSample, GatewayMetrics, GpuSample, Metrics, ModelMetrics, ProcessSample, RelayMetrics,
};
pub use metrics_text::metrics_text;
