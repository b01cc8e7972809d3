//! The settings of traces.

use cresset_base::section;

section! {
/// Traces of requests in OpenTelemetry's form. They hold no key, no prompt and no answer.
pub struct TraceSettings {
    /// Address of the collector, which takes OTLP over HTTP, such as
    /// `http://127.0.0.1:4318/v1/traces`. Absent: nothing is traced.
    pub endpoint: Option<String> = None,
    /// Share of the requests that are traced. Where a client sends a `traceparent`, its decision
    /// counts.
    #[schemars(range(min = 0, max = 1))]
    pub sample_ratio: f64 = 1.0,
    /// Ended spans that wait to be sent; further ones are dropped and counted, spans.
    #[schemars(range(min = 1, max = 1 << 20))]
    pub queue_spans: usize = 2_048,
    /// Most that are sent at once, spans.
    #[schemars(range(min = 1, max = 65_536))]
    pub batch_spans: usize = 512,
    /// Longest time that an ended span waits before it is sent, milliseconds.
    #[schemars(range(min = 10, max = 60_000))]
    pub send_after_milliseconds: u64 = 5_000,
    /// Longest time that the collector may take for what was sent at once, seconds.
    #[schemars(range(min = 1, max = 300))]
    pub timeout_seconds: u64 = 10,
}
}
