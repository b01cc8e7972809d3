//! The span of a generation, by the names of OpenTelemetry's conventions for generative AI, with
//! one below it for each phase: `queue`, `prefill`, `decode`, `settlement`.

use super::plan::RequestPlan;
use cresset_ledger::{FailureCode, FinishReason, RequestRecord, Usage};
use cresset_telemetry::traces::TraceSpan;
use opentelemetry::{Array, StringValue, Value};
use serde_json::Value as Json;
use std::time::{Duration, Instant, SystemTime};

/// Sampling parameters that the conventions know, by the names that requests have for them.
const SAMPLING: [(&str, &str); 5] = [
    ("temperature", "gen_ai.request.temperature"),
    ("top_p", "gen_ai.request.top_p"),
    ("top_k", "gen_ai.request.top_k"),
    ("frequency_penalty", "gen_ai.request.frequency_penalty"),
    ("presence_penalty", "gen_ai.request.presence_penalty"),
];

#[derive(Default)]
pub(super) struct GenerationTrace {
    span: TraceSpan,
    phase: TraceSpan,
    is_streamed: bool,
}

impl GenerationTrace {
    /// The trace of a generation that has been in the engine's queue since `began`.
    pub(super) fn begin(plan: &RequestPlan, record: &RequestRecord, began: Instant) -> Self {
        let began = SystemTime::now() - began.elapsed();
        let name = &plan.model.qualified.manifest().name;
        let span = plan.live.trace.child(|| format!("chat {name}"), began);
        if !span.is_recorded() {
            return Self::default();
        }
        span.set("gen_ai.operation.name", "chat");
        span.set("gen_ai.provider.name", "cresset");
        span.set("gen_ai.request.model", name.clone());
        span.set("gen_ai.request.max_tokens", i64::from(plan.generate.max_tokens));
        span.set("gen_ai.request.seed", plan.asked.seed as i64);
        span.set("gen_ai.request.stream", plan.live.stream);
        for value in &plan.asked.sampling {
            if let Some((_, name)) = SAMPLING.iter().find(|(own, _)| *own == value.name) {
                span.set(name, value.value());
            }
        }
        span.set("gen_ai.response.id", record.key.request.to_string());
        span.set("gen_ai.response.model", record.model.to_string());
        span.set("gen_ai.conversation.id", record.session.to_string());
        let attempt = record.latest();
        span.set("cresset.attempt.id", attempt.id.to_string());
        span.set("cresset.attempt.number", i64::from(attempt.number));
        if let Some(before) = attempt.retry_of {
            span.set("cresset.attempt.retry_of", before.to_string());
        }
        let phase = span.child(|| "queue".to_owned(), began);
        Self { span, phase, is_streamed: plan.live.stream }
    }

    /// Ends the phase before and begins the next one.
    pub(super) fn enter(&mut self, phase: &'static str) {
        self.phase.end();
        self.phase = self.span.child(|| phase.to_owned(), SystemTime::now());
    }

    /// The conventions have a time to the first token for streams alone.
    pub(super) fn first_token(&mut self, passed: Duration) {
        if self.is_streamed {
            self.span.set("gen_ai.response.time_to_first_chunk", passed.as_secs_f64());
        }
        self.enter("decode");
    }

    pub(super) fn used(&self, usage: Usage, charged: u64) {
        let Usage { prompt_tokens, cached_tokens, completion_tokens } = usage;
        self.span.set("gen_ai.usage.input_tokens", i64::from(prompt_tokens));
        self.span.set("gen_ai.usage.cache_read.input_tokens", i64::from(cached_tokens));
        self.span.set("gen_ai.usage.output_tokens", i64::from(completion_tokens));
        self.span.set("cresset.charged_microcredits", charged as i64);
    }

    /// Ends all spans. `end` is `completed`, `cancelled` or `failed`.
    pub(super) fn end(
        &self,
        end: &'static str,
        reason: Option<FinishReason>,
        failure: Option<FailureCode>,
    ) {
        self.phase.end();
        self.span.set("cresset.end", end);
        if let Some(reason) = reason {
            let reasons =
                Array::String(vec![StringValue::from(told(serde_json::to_value(reason)))]);
            self.span.set("gen_ai.response.finish_reasons", Value::Array(reasons));
        }
        if let Some(code) = failure {
            self.span.fail(told(serde_json::to_value(code)));
        }
        self.span.end();
    }
}

/// A word as clients are told it.
fn told(word: serde_json::Result<Json>) -> String {
    word.ok().and_then(|word| word.as_str().map(str::to_owned)).unwrap_or_default()
}
