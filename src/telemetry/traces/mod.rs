//! Traces in OpenTelemetry's form: a span for each request, and below it one for its generation
//! with its phases. They are sent to a collector from a thread of their own. Whatever becomes of
//! them, no request waits for it. No span holds a key, a prompt or an answer.

#[cfg(feature = "traces")]
mod export;
#[cfg(not(feature = "traces"))]
mod off;
#[cfg(feature = "traces")]
mod recorded;
mod settings;

#[cfg(feature = "traces")]
pub use export::probe;
#[cfg(not(feature = "traces"))]
pub use off::{NoSpan as TraceSpan, NoTraces as Traces, probe};
#[cfg(feature = "traces")]
pub use recorded::{TraceSpan, Traces};
pub use settings::TraceSettings;
