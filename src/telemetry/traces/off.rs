//! What is left of traces in a program without the feature `traces`: nothing is recorded.

use super::TraceSettings;
use crate::metrics::SpanCounts;
use hyper::Method;
use hyper::header::HeaderMap;
use opentelemetry::Value;
use std::time::SystemTime;

/// There is no collector to ask.
pub fn probe(_: &TraceSettings) -> Option<Result<(), String>> {
    None
}

/// The tracing of a process, which does nothing.
#[derive(Clone, Debug, Default)]
pub struct NoTraces(());

impl NoTraces {
    pub fn start(_: &TraceSettings, _: &'static str, _: SpanCounts) -> Self {
        Self(())
    }

    pub fn request(&self, _: Option<&Method>, _: &str, _: &HeaderMap) -> NoSpan {
        NoSpan(())
    }

    #[expect(clippy::unused_async, reason = "with the feature spans are sent")]
    pub async fn end(&self) {}
}

/// The span of what is not traced.
#[derive(Clone, Debug, Default)]
pub struct NoSpan(());

impl NoSpan {
    pub fn child(&self, _: impl FnOnce() -> String, _: SystemTime) -> Self {
        Self(())
    }

    pub fn is_recorded(&self) -> bool {
        false
    }

    pub fn set(&self, _: &'static str, _: impl Into<Value>) {}

    pub fn link(&self, _: &Self) {}

    pub fn fail(&self, _: impl Into<String>) {}

    pub fn answered(&self, _: Option<u16>, _: Option<&str>) {}

    pub fn end(&self) {}

    pub fn continue_in(&self, _: &mut HeaderMap) {}
}
