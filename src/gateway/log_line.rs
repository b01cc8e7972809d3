//! One line of the log for each request, its metrics and its span, when its answer was sent or its
//! client has gone. They name paths, models, figures and members that were left out, and nothing
//! else that a client chose.

#![expect(clippy::disallowed_methods, reason = "the log tells how long an answer took")]

use super::dialects::ApiDialect;
use super::left_out::LeftOut;
use cresset_telemetry::GatewayMetrics;
use cresset_telemetry::traces::{TraceSpan, Traces};
use hyper::http::request::Parts;
use hyper::{Method, Response};
use std::time::Instant;

/// Paths of other services that are logged as they are.
const ROUTES: [&str; 15] = [
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/api/chat",
    "/api/generate",
    "/api/tags",
    "/api/ps",
    "/api/show",
    "/api/version",
    "/completion",
    "/infill",
    "/tokenize",
    "/detokenize",
    "/apply-template",
];

/// The path as it is logged.
fn route(path: &str) -> &'static str {
    let own = ROUTES.into_iter().find(|route| *route == path);
    own.unwrap_or_else(|| cresset_transport::route(path))
}

/// The line of one request; it is written when it is dropped.
#[derive(Debug)]
pub(super) struct GatewayLine {
    began: Instant,
    method: Option<Method>,
    dialect: &'static str,
    route: &'static str,
    /// The model's name or id, once it is known to be one.
    pub model: Option<String>,
    /// Absent when the client went away before there was one.
    status: Option<u16>,
    request_id: Option<String>,
    /// Told in the answer, too.
    pub left_out: LeftOut,
    pub prompt_tokens: Option<u64>,
    pub completion_tokens: Option<u64>,
    metrics: GatewayMetrics,
    /// Ended with the line.
    pub trace: TraceSpan,
}

impl GatewayLine {
    /// `metrics` count the request too.
    pub(super) fn begin(head: &Parts, metrics: GatewayMetrics, traces: &Traces) -> Self {
        let (method, route) =
            (cresset_transport::known_method(&head.method), route(head.uri.path()));
        Self {
            metrics,
            began: Instant::now(),
            trace: traces.request(method.as_ref(), route, &head.headers),
            method,
            dialect: ApiDialect::maker(head),
            route,
            model: None,
            status: None,
            request_id: None,
            left_out: LeftOut::default(),
            prompt_tokens: None,
            completion_tokens: None,
        }
    }

    /// Notes the head of the answer. The id is the node's, or that of the gateway's own refusal.
    pub(super) fn answered<B>(&mut self, answer: &Response<B>) {
        self.status = Some(answer.status().as_u16());
        let id = answer.headers().get(super::REQUEST_ID).and_then(|id| id.to_str().ok());
        self.request_id = id.map(str::to_owned);
    }

    /// Takes the counts of tokens from the end of an answer.
    pub(super) fn count_tokens(&mut self, tail: &[u8]) {
        let tail = String::from_utf8_lossy(tail);
        let count = |member, before: Option<u64>| number(&tail, member).or(before);
        self.prompt_tokens = count("\"prompt_tokens\":", self.prompt_tokens);
        self.completion_tokens = count("\"completion_tokens\":", self.completion_tokens);
    }

    fn end_trace(&self) {
        let tokens = [
            ("gen_ai.usage.input_tokens", self.prompt_tokens),
            ("gen_ai.usage.output_tokens", self.completion_tokens),
        ];
        for (name, count) in tokens {
            if let Some(count) = count {
                self.trace.set(name, count as i64);
            }
        }
        if let Some(model) = &self.model {
            self.trace.set("gen_ai.request.model", model.clone());
        }
        if let Some(id) = &self.request_id {
            self.trace.set("cresset.request.id", id.clone());
        }
        self.trace.answered(self.status, None);
        self.trace.end();
    }
}

/// The number that the last `member` has. Inside a JSON string no quotation mark stands without a
/// backslash before it, so what is found is a member, and never part of an answer's text.
fn number(tail: &str, member: &str) -> Option<u64> {
    let (_, after) = tail.rsplit_once(member)?;
    let end = after.find(|digit: char| !digit.is_ascii_digit())?;
    after[..end].parse().ok()
}

impl Drop for GatewayLine {
    fn drop(&mut self) {
        let Self { dialect, route, status, prompt_tokens, completion_tokens, .. } = *self;
        let method = self.method.as_ref().map(Method::as_str);
        let (model, request_id) = (self.model.as_deref(), self.request_id.as_deref());
        let left_out = self.left_out.shown();
        let took = self.began.elapsed();
        self.metrics.answered(dialect, route, status, took);
        for (kind, tokens) in [("prompt", prompt_tokens), ("generation", completion_tokens)] {
            if let Some(tokens) = tokens {
                self.metrics.count_tokens(dialect, kind, tokens);
            }
        }
        self.end_trace();
        let milliseconds = took.as_millis() as u64;
        macro_rules! line {
            ($level:ident) => {
                tracing::$level!(
                    method,
                    dialect,
                    route,
                    status,
                    request_id,
                    model,
                    prompt_tokens,
                    completion_tokens,
                    left_out,
                    milliseconds,
                    "passed on"
                )
            };
        }
        if method == Some("GET") && status.is_some_and(|status| status < 400) {
            line!(debug);
        } else {
            line!(info);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_counted_from_the_last_usage() {
        let check = |tail: &str, expect: Option<u64>| {
            assert_eq!(number(tail, "\"completion_tokens\":"), expect, "{tail}");
        };
        check(r#"{"usage":{"completion_tokens":12,"total_tokens":20}}"#, Some(12));
        check(r#"{"text":"\"completion_tokens\":9,"}"#, None);
        check(r#"{"usage":{"completion_tokens":1},"u":{"completion_tokens":2}}"#, Some(2));
        check(r#"{"usage":{"completion_tokens":1"#, None);
        check(r#"data: {"usage":null}"#, None);
    }
}
