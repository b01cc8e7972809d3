//! Spans as the libraries of OpenTelemetry keep them.

use super::export::{BoundedQueue, CollectorExporter, TraceCollector};
use super::settings::TraceSettings;
use crate::metrics::SpanCounts;
use hyper::Method;
use hyper::header::{HeaderMap, HeaderName, HeaderValue};
use opentelemetry::propagation::{Extractor, Injector, TextMapPropagator};
use opentelemetry::trace::{
    SpanBuilder, SpanKind, Status, TraceContextExt, Tracer, TracerProvider,
};
use opentelemetry::{Context, InstrumentationScope, KeyValue, Value};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::propagation::TraceContextPropagator;
use opentelemetry_sdk::trace::{Sampler, SdkTracer, SdkTracerProvider};
use std::fmt;
use std::time::{Duration, SystemTime};

const VERSION: &str = env!("CARGO_PKG_VERSION");
/// Longest time at the end of the process in which spans that wait are still sent.
const LAST_SENDING: Duration = Duration::from_secs(5);

/// The tracing of a process. Without a collector it does nothing.
#[derive(Clone, Default)]
pub struct Traces(Option<SdkTracerProvider>);

impl Traces {
    /// Traces for the collector of `settings`, if there is one. `service` is the name under which
    /// it shows them.
    pub fn start(settings: &TraceSettings, service: &'static str, counts: SpanCounts) -> Self {
        let Some(collector) = TraceCollector::of(settings) else { return Self::default() };
        let version = KeyValue::new("service.version", VERSION);
        let resource = Resource::builder_empty().with_service_name(service);
        let exporter = CollectorExporter::new(collector, counts);
        let queue = BoundedQueue::new(settings, exporter);
        let root = Sampler::TraceIdRatioBased(settings.sample_ratio);
        let provider = SdkTracerProvider::builder()
            .with_resource(resource.with_attribute(version).build())
            .with_sampler(Sampler::ParentBased(Box::new(root)))
            .with_span_processor(queue)
            .build();
        Self(Some(provider))
    }

    /// Begins the span of a request that came over HTTP, as a part of its client's trace if it has
    /// one. Reads are so frequent that they are traced only for clients that trace them.
    pub fn request(&self, method: Option<&Method>, route: &str, headers: &HeaderMap) -> TraceSpan {
        let Some(provider) = &self.0 else { return TraceSpan::default() };
        let client = TraceContextPropagator::new()
            .extract_with_context(&Context::new(), &TraceHeaders(headers));
        if method == Some(&Method::GET) && !client.has_active_span() {
            return TraceSpan::default();
        }
        let scope = InstrumentationScope::builder("cresset").with_version(VERSION).build();
        let tracer = provider.tracer_with_scope(scope);
        let method = method.map_or("_OTHER", Method::as_str);
        let name = format!("{method} {route}");
        let builder = tracer.span_builder(name).with_kind(SpanKind::Server).with_attributes([
            KeyValue::new("http.request.method", method.to_owned()),
            KeyValue::new("http.route", route.to_owned()),
        ]);
        TraceSpan::begin(tracer, builder, &client)
    }

    /// Sends the spans that wait, and no further ones. It takes some seconds at most.
    pub async fn end(&self) {
        if let Some(provider) = self.0.clone() {
            let sending = move || provider.shutdown_with_timeout(LAST_SENDING);
            // The exporter tells of its own failures.
            let _ = tokio::task::spawn_blocking(sending).await;
        }
    }
}

impl fmt::Debug for Traces {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.debug_struct("Traces").field("on", &self.0.is_some()).finish()
    }
}

/// A span that has begun. It ends when it is told to, or when its last clone is dropped. The
/// default is the span of what is not traced, which takes everything and keeps nothing.
#[derive(Clone, Debug, Default)]
pub struct TraceSpan(Option<(SdkTracer, Context)>);

impl TraceSpan {
    fn begin(tracer: SdkTracer, builder: SpanBuilder, parent: &Context) -> Self {
        let span = tracer.build_with_context(builder, parent);
        Self(Some((tracer, parent.with_span(span))))
    }

    /// Begins a span of work inside the process that is a part of this one.
    pub fn child(&self, name: impl FnOnce() -> String, began: SystemTime) -> Self {
        match &self.0 {
            Some((tracer, context)) if self.is_recorded() => {
                let builder = tracer.span_builder(name()).with_start_time(began);
                Self::begin(tracer.clone(), builder.with_kind(SpanKind::Internal), context)
            }
            _ => Self::default(),
        }
    }

    /// Whether anything becomes of what is set.
    pub fn is_recorded(&self) -> bool {
        self.0.as_ref().is_some_and(|(_, context)| context.span().is_recording())
    }

    pub fn set(&self, name: &'static str, value: impl Into<Value>) {
        if let Some((_, context)) = &self.0 {
            context.span().set_attribute(KeyValue::new(name, value));
        }
    }

    /// Notes that this span goes on with the work of another one, which may be in another trace.
    pub fn link(&self, other: &Self) {
        if let (Some((_, own)), Some((_, other))) = (&self.0, &other.0) {
            own.span().add_link(other.span().span_context().clone(), Vec::new());
        }
    }

    /// Notes a failure by its stable code.
    pub fn fail(&self, code: impl Into<String>) {
        if let Some((_, context)) = &self.0 {
            let code = code.into();
            context.span().set_status(Status::error(code.clone()));
            self.set("error.type", code);
        }
    }

    /// Notes how a request was answered over HTTP. The status is absent when the client went away
    /// before there was one. What is refused as the client's mistake is no failure.
    pub fn answered(&self, status: Option<u16>, code: Option<&str>) {
        if let Some(status) = status {
            self.set("http.response.status_code", i64::from(status));
        }
        let code = match (status, code) {
            (_, Some(code)) => code.to_owned(),
            (None, None) => "client_went_away".to_owned(),
            (Some(status), None) if status >= 400 => status.to_string(),
            (Some(_), None) => return,
        };
        if status.is_some_and(|status| (400..500).contains(&status)) {
            self.set("error.type", code);
        } else {
            self.fail(code);
        }
    }

    /// Only the first end counts.
    pub fn end(&self) {
        if let Some((_, context)) = &self.0 {
            context.span().end();
        }
    }

    /// Writes the headers by which the receiver of a request continues this trace. What is not
    /// traced leaves the headers as they are.
    pub fn continue_in(&self, headers: &mut HeaderMap) {
        if let Some((_, context)) = &self.0 {
            TraceContextPropagator::new().inject_context(context, &mut WrittenHeaders(headers));
        }
    }
}

/// The headers of a request as the library reads them. A name that stands there twice tells
/// nothing.
struct TraceHeaders<'a>(&'a HeaderMap);

impl Extractor for TraceHeaders<'_> {
    fn get(&self, name: &str) -> Option<&str> {
        let mut values = self.0.get_all(name).iter();
        let value = values.next().filter(|_| values.next().is_none())?;
        value.to_str().ok()
    }

    fn keys(&self) -> Vec<&str> {
        self.0.keys().map(HeaderName::as_str).collect()
    }
}

struct WrittenHeaders<'a>(&'a mut HeaderMap);

impl Injector for WrittenHeaders<'_> {
    fn set(&mut self, name: &str, value: String) {
        let name = HeaderName::try_from(name);
        if let (Ok(name), Ok(value)) = (name, HeaderValue::try_from(value)) {
            self.0.insert(name, value);
        }
    }
}

#[cfg(test)]
mod tests;
