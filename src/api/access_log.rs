//! One line of the log for each request, and its span, written when its answer is over: a stream's
//! at its end. They name accounts, models and figures, and never a key, a prompt or an answer.

#![expect(clippy::disallowed_methods, reason = "the log tells how long an answer took")]

use axum::http::{Method, Request};
use cresset_base::{AccountId, ApplicationId, ModelId};
use cresset_request::{AnswerFigures, Caller};
use cresset_telemetry::traces::{TraceSpan, Traces};
use cresset_transport::{known_method, route};
use parking_lot::Mutex;
use std::sync::Arc;
use std::time::{Duration, Instant};
use uuid::Uuid;

/// The line of one request. Everyone who answers it holds it; it is written when the last one lets
/// it go, which is when the answer was sent or its client has gone.
#[derive(Debug)]
pub struct AccessLine {
    began: Instant,
    method: Option<Method>,
    route: &'static str,
    request_id: Uuid,
    /// Ended with the line.
    pub trace: TraceSpan,
    facts: Mutex<LineFacts>,
}

/// The way of a request between two nodes that share a ledger.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hop {
    /// Another node answered it.
    Sent,
    /// Another node passed it on.
    Received,
}

impl Hop {
    fn word(self) -> &'static str {
        match self {
            Self::Sent => "sent",
            Self::Received => "received",
        }
    }
}

/// What becomes known on the way.
#[derive(Debug, Default)]
struct LineFacts {
    /// Absent when the client went away before there was one.
    status: Option<u16>,
    code: Option<&'static str>,
    account: Option<AccountId>,
    application: Option<ApplicationId>,
    model: Option<ModelId>,
    first_token: Option<Duration>,
    figures: Option<AnswerFigures>,
    /// The answer was stored before: nothing ran and nothing was charged.
    replayed: bool,
    hop: Option<Hop>,
}

impl AccessLine {
    pub(super) fn begin<B>(traces: &Traces, request: &Request<B>, request_id: Uuid) -> Arc<Self> {
        let (method, route) = (known_method(request.method()), route(request.uri().path()));
        Arc::new(Self {
            began: Instant::now(),
            trace: traces.request(method.as_ref(), route, request.headers()),
            method,
            route,
            request_id,
            facts: Mutex::new(LineFacts {
                hop: request.extensions().get().copied(),
                ..LineFacts::default()
            }),
        })
    }

    pub(super) fn passed(&self, hop: Hop) {
        self.facts.lock().hop = Some(hop);
    }

    pub(super) fn was_passed(&self, hop: Hop) -> bool {
        self.facts.lock().hop == Some(hop)
    }

    pub(super) fn caller(&self, caller: &Caller) {
        let mut facts = self.facts.lock();
        facts.account = Some(caller.account.id);
        facts.application = caller.credential.application;
    }

    pub(super) fn model(&self, model: Option<ModelId>) {
        self.facts.lock().model = model;
    }

    pub(super) fn replayed(&self) {
        self.facts.lock().replayed = true;
    }

    /// The first token of a stream is ready.
    pub(super) fn token(&self) {
        self.facts.lock().first_token.get_or_insert_with(|| self.began.elapsed());
    }

    pub(super) fn completed(&self, figures: Option<AnswerFigures>) {
        self.facts.lock().figures = figures;
    }

    /// A stream that ended with an error, after its head.
    pub(super) fn failed(&self, code: &'static str) {
        self.facts.lock().code = Some(code);
    }

    pub(super) fn answered(&self, status: u16, code: Option<&'static str>) {
        let mut facts = self.facts.lock();
        facts.status = Some(status);
        facts.code = facts.code.or(code);
    }
}

impl LineFacts {
    fn trace(&self, request_id: Uuid, span: &TraceSpan) {
        if !span.is_recorded() {
            return;
        }
        span.set("cresset.request.id", request_id.to_string());
        if let Some(account) = self.account {
            span.set("cresset.account.id", account.to_string());
        }
        if let Some(application) = self.application {
            span.set("cresset.application.id", application.to_string());
        }
        span.set("cresset.replayed", self.replayed);
        span.answered(self.status, self.code);
        span.end();
    }
}

impl Drop for AccessLine {
    fn drop(&mut self) {
        let Self { began, method, route, request_id, .. } = self;
        let milliseconds = began.elapsed().as_millis() as u64;
        let facts = self.facts.get_mut();
        facts.trace(*request_id, &self.trace);
        let LineFacts { status, code, replayed, figures, .. } = *facts;
        let method = method.as_ref().map(Method::as_str);
        let account = facts.account.map(tracing::field::display);
        let application = facts.application.map(tracing::field::display);
        let model = facts.model.map(tracing::field::display);
        let replayed = replayed.then_some(true);
        let forwarded = facts.hop.map(Hop::word);
        let first_token = facts.first_token.or(figures.and_then(|figures| figures.first_token));
        let time_to_first_token_ms = first_token.map(|time| time.as_millis() as u64);
        let prompt_tokens = figures.map(|figures| figures.usage.prompt_tokens);
        let cached_tokens = figures.map(|figures| figures.usage.cached_tokens);
        let completion_tokens = figures.map(|figures| figures.usage.completion_tokens);
        let charged = figures.map(|figures| figures.charged.get());
        macro_rules! line {
            ($level:ident) => {
                tracing::$level!(
                    method,
                    route,
                    status,
                    code,
                    %request_id,
                    account,
                    application,
                    model,
                    prompt_tokens,
                    cached_tokens,
                    completion_tokens,
                    charged,
                    replayed,
                    forwarded,
                    time_to_first_token_ms,
                    milliseconds,
                    "answered"
                )
            };
        }
        if method == Some("GET") && code.is_none() {
            // Clients read often, and a line of the log costs as much as the read.
            line!(debug);
        } else {
            line!(info);
        }
    }
}
