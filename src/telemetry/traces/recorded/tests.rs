//! Which trace a request belongs to, and what becomes of spans that nobody takes.

use super::*;
use crate::metrics::Metrics;
use std::net::TcpListener;

fn traces(settings: &TraceSettings, metrics: &Metrics) -> Traces {
    Traces::start(settings, "test", metrics.spans.clone())
}

/// Settings with an address at which nobody answers.
fn unanswered() -> TraceSettings {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("http://{}/v1/traces", listener.local_addr().unwrap());
    TraceSettings { endpoint: Some(endpoint), ..TraceSettings::default() }
}

fn headers(pairs: &[(&'static str, &'static str)]) -> HeaderMap {
    let pair = |(name, value): &(&'static str, &'static str)| {
        (HeaderName::from_static(name), HeaderValue::from_static(value))
    };
    pairs.iter().map(pair).collect()
}

const CLIENT: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
const UNSAMPLED: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00";

/// What a request's receiver is told: the client's trace, whether it is recorded, or nothing.
fn passed_on(ratio: f64, method: &Method, pairs: &[(&'static str, &'static str)]) -> String {
    let metrics = Metrics::default();
    let settings = TraceSettings { sample_ratio: ratio, ..unanswered() };
    let mut headers = headers(pairs);
    let traces = traces(&settings, &metrics);
    let span = traces.request(Some(method), "/v1/chat/completions", &headers);
    span.continue_in(&mut headers);
    let told = headers.get("traceparent").map_or("", |value| value.to_str().unwrap());
    match told.split('-').collect::<Vec<_>>()[..] {
        [_, trace, parent, flags] => {
            let own = if trace == "0af7651916cd43dd8448eb211c80319c" { "client's" } else { "own" };
            let same = if parent == "b7ad6b7169203331" { ", as it came" } else { "" };
            format!("{own} {flags}{same}")
        }
        _ => "nothing".to_owned(),
    }
}

#[test]
fn a_clients_trace_and_its_decision_are_kept() {
    let (post, get) = (&Method::POST, &Method::GET);
    let client = [("traceparent", CLIENT)];
    for (ratio, method, pairs, expect) in [
        (1.0, post, &[][..], "own 01"),
        (0.0, post, &[], "own 00"),
        (0.0, post, &client, "client's 01"),
        (1.0, post, &[("traceparent", UNSAMPLED)], "client's 00"),
        (1.0, get, &[], "nothing"),
        (1.0, get, &client, "client's 01"),
        (1.0, post, &[("traceparent", "00-0-0-01")], "own 01"),
        (1.0, post, &[("traceparent", CLIENT), ("traceparent", UNSAMPLED)], "own 01"),
    ] {
        assert_eq!(passed_on(ratio, method, pairs), expect, "{ratio} {method} {pairs:?}");
    }
}

#[test]
fn without_a_collector_headers_pass_as_they_came() {
    let traces = Traces::start(&TraceSettings::default(), "test", Metrics::default().spans);
    let mut headers = headers(&[("traceparent", CLIENT)]);
    traces.request(Some(&Method::POST), "/", &headers).continue_in(&mut headers);
    assert_eq!(headers["traceparent"], CLIENT);
}

#[tokio::test]
async fn a_full_queue_drops_and_counts() {
    let metrics = Metrics::default();
    let settings = TraceSettings { queue_spans: 2, ..unanswered() };
    let traces = traces(&settings, &metrics);
    // The batch has the size of the queue, so the sender may take it at once.
    let spans: Vec<_> = (0..9).map(|_| traces.request(None, "/", &HeaderMap::new())).collect();
    drop(spans);
    traces.end().await;
    let text = metrics.text();
    let count = |result: &str| -> u64 {
        let name = format!("cresset_trace_spans_total{{result=\"{result}\"}} ");
        let line = text.lines().find_map(|line| line.strip_prefix(&name));
        line.map_or(0, |count| count.parse().unwrap())
    };
    assert_eq!(count("sent"), 0);
    assert_eq!(count("failed") + count("dropped"), 9, "{text}");
    assert!(count("failed") >= 2, "{text}");
}
