//! The way of ended spans to the collector: a bounded queue, and OTLP over HTTP.

use crate::metrics::SpanCounts;
use crate::traces::TraceSettings;
use opentelemetry::Context;
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::transform::common::tonic::ResourceAttributesWithSchema;
use opentelemetry_proto::transform::trace::tonic::group_spans_by_resource_and_scope;
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::error::{OTelSdkError, OTelSdkResult};
use opentelemetry_sdk::trace::{
    BatchConfigBuilder, BatchSpanProcessor, Span, SpanData, SpanExporter, SpanProcessor,
};
use prost::Message;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;
use ureq::Agent;

/// Spans that ended and are not sent yet, up to the limit of the configuration. A full queue drops
/// and counts what comes, so that nobody waits.
#[derive(Debug)]
pub(super) struct BoundedQueue {
    sender: BatchSpanProcessor,
    counts: SpanCounts,
    waiting: Arc<AtomicUsize>,
    limit: usize,
}

impl BoundedQueue {
    pub(super) fn new(settings: &TraceSettings, exporter: CollectorExporter) -> Self {
        let (counts, waiting) = (exporter.counts.clone(), exporter.waiting.clone());
        let limit = settings.queue_spans;
        let batches = BatchConfigBuilder::default()
            .with_max_queue_size(limit)
            .with_max_export_batch_size(settings.batch_spans.min(limit))
            .with_scheduled_delay(Duration::from_millis(settings.send_after_milliseconds));
        let sender = BatchSpanProcessor::new(exporter, batches.build());
        Self { sender, counts, waiting, limit }
    }
}

impl SpanProcessor for BoundedQueue {
    fn on_start(&self, span: &mut Span, context: &Context) {
        self.sender.on_start(span, context);
    }

    fn on_end(&self, span: SpanData) {
        if self.waiting.fetch_add(1, Ordering::Relaxed) < self.limit {
            self.sender.on_end(span);
        } else {
            self.waiting.fetch_sub(1, Ordering::Relaxed);
            self.counts.add("dropped", 1);
        }
    }

    fn force_flush(&self) -> OTelSdkResult {
        self.sender.force_flush()
    }

    fn shutdown_with_timeout(&self, timeout: Duration) -> OTelSdkResult {
        self.sender.shutdown_with_timeout(timeout)
    }

    fn set_resource(&mut self, resource: &Resource) {
        self.sender.set_resource(resource);
    }
}

/// Where spans are sent.
#[derive(Debug)]
pub(super) struct TraceCollector {
    endpoint: String,
    agent: Agent,
}

impl TraceCollector {
    pub(super) fn of(settings: &TraceSettings) -> Option<Self> {
        let endpoint = settings.endpoint.clone()?;
        let config = Agent::config_builder()
            .max_redirects(0)
            // A proxy has no way to this machine's own addresses, where most collectors are.
            .proxy(None)
            .timeout_global(Some(Duration::from_secs(settings.timeout_seconds)));
        Some(Self { endpoint, agent: config.build().into() })
    }

    fn send(&self, request: &ExportTraceServiceRequest) -> Result<(), String> {
        let sending = self.agent.post(&self.endpoint);
        let sending = sending.header("content-type", "application/x-protobuf");
        let sent = sending.send(request.encode_to_vec());
        sent.map(drop).map_err(|error| format!("{}: {error}", self.endpoint))
    }
}

/// Asks the collector of `settings`, if there is one, to take no spans. The error is a sentence.
pub fn probe(settings: &TraceSettings) -> Option<Result<(), String>> {
    TraceCollector::of(settings)
        .map(|collector| collector.send(&ExportTraceServiceRequest::default()))
}

/// Sends batches of spans. Each is sent once: a later one is worth more than a repetition.
#[derive(Debug)]
pub(super) struct CollectorExporter {
    collector: TraceCollector,
    resource: ResourceAttributesWithSchema,
    counts: SpanCounts,
    waiting: Arc<AtomicUsize>,
    /// The last batch was not taken, which the log has been told.
    is_failing: AtomicBool,
}

impl CollectorExporter {
    pub(super) fn new(collector: TraceCollector, counts: SpanCounts) -> Self {
        Self {
            collector,
            resource: ResourceAttributesWithSchema::default(),
            counts,
            waiting: Arc::default(),
            is_failing: AtomicBool::new(false),
        }
    }

    fn log(&self, sent: &Result<(), String>) {
        match (sent, self.is_failing.swap(sent.is_err(), Ordering::Relaxed)) {
            (Err(why), false) => tracing::warn!(%why, "traces cannot be sent"),
            (Ok(()), true) => tracing::info!("traces are sent again"),
            _ => {}
        }
    }
}

impl SpanExporter for CollectorExporter {
    /// Blocks, on the thread of the queue.
    async fn export(&self, batch: Vec<SpanData>) -> OTelSdkResult {
        let spans = batch.len();
        self.waiting.fetch_sub(spans, Ordering::Relaxed);
        let resource_spans = group_spans_by_resource_and_scope(batch, &self.resource);
        let sent = self.collector.send(&ExportTraceServiceRequest { resource_spans });
        self.counts.add(if sent.is_ok() { "sent" } else { "failed" }, spans as u64);
        self.log(&sent);
        sent.map_err(OTelSdkError::InternalFailure)
    }

    fn set_resource(&mut self, resource: &Resource) {
        self.resource = resource.into();
    }
}
