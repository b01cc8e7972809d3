//! Measures reads under load: the most that the node answers, and the time of each at half that
//! rate.

#![expect(clippy::disallowed_methods, reason = "a benchmark measures time")]

use super::connection::LoadConnection;
use super::figures::{Column, Times, per_second, show, show_percentiles, table};
use super::target::Target;
use crate::Arguments;
use crate::MeasureProgress;
use crate::Result;
use cresset_client::ApiClient;
use cresset_node::NodeError;
use serde_json::{Value, json};
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::task::JoinSet;

/// Seconds that one figure is measured for by default.
const SECONDS: u64 = 2;

pub(super) async fn run(
    api: &ApiClient,
    target: &Arc<Target>,
    arguments: &Arguments,
    progress: &mut dyn MeasureProgress,
) -> Result<Value> {
    let question = [json!({ "role": "user", "content": "hello" })];
    let quiet = |_: &str| Ok::<_, NodeError>(());
    let request = api.ask(&question, &json!({ "max_tokens": 1 }), quiet).await?.request;
    let span = Duration::from_secs(arguments.seconds.unwrap_or(SECONDS));
    let mut rows = Vec::new();
    for path in ["/v1/me", "/v1/credits", &format!("/v1/requests/{request}")] {
        for &clients in &arguments.concurrency {
            progress.begin(format!("{path}, {clients} at a time"));
            rows.push(measure(target, path, clients, span).await?);
        }
    }
    Ok(json!({ "url": target.node.url, "reads": rows }))
}

async fn measure(
    target: &Arc<Target>,
    path: &str,
    clients: usize,
    span: Duration,
) -> Result<Value> {
    let broken = |error: io::Error| NodeError::new(format!("GET {path}: {error}"));
    let full = load(target, path, clients, span, None).await.map_err(broken)?;
    let rate = per_second(full.count, span);
    let pause = Duration::from_secs_f64(2.0 * clients as f64 / rate.max(1.0));
    let half = load(target, path, clients, span, Some(pause)).await.map_err(broken)?;
    Ok(json!({
        "path": path,
        "concurrency": clients,
        "answered": full.count + half.count,
        "per_second": rate,
        "milliseconds": full.times.percentiles(),
        "half": { "per_second": per_second(half.count, span), "milliseconds": half.times.percentiles() },
    }))
}

#[derive(Default)]
struct ReadTally {
    count: u64,
    times: Times,
}

/// `clients` connections for the time of `span`; each sends one request every `pause`, or the next
/// as soon as it can.
async fn load(
    target: &Arc<Target>,
    path: &str,
    clients: usize,
    span: Duration,
    pause: Option<Duration>,
) -> io::Result<ReadTally> {
    let (until, request) = (Instant::now() + span, Arc::<[u8]>::from(target.get(path)));
    let mut workers = JoinSet::new();
    for number in 0..clients {
        let connection = LoadConnection::open(&target.node).await?;
        // The first requests are spread over the pause, as those of independent clients would be.
        let first =
            pause.map(|pause| Instant::now() + pause.mul_f64(number as f64 / clients as f64));
        workers.spawn(client(connection, request.clone(), until, first.zip(pause)));
    }
    let mut total = ReadTally::default();
    while let Some(tally) = workers.join_next().await {
        let tally = tally.map_err(io::Error::other)??;
        total.count += tally.count;
        total.times.merge(tally.times);
    }
    Ok(total)
}

/// `schedule` is the time of the first request and the time from one to the next. The time of a
/// request that had to wait for the answer before it counts from when it was due.
async fn client(
    mut connection: LoadConnection,
    request: Arc<[u8]>,
    until: Instant,
    mut schedule: Option<(Instant, Duration)>,
) -> io::Result<ReadTally> {
    let (mut tally, mut body) = (ReadTally::default(), Vec::new());
    loop {
        let mut began = Instant::now();
        if let Some((due, pause)) = &mut schedule {
            if *due > began {
                tokio::time::sleep_until((*due).into()).await;
                began = Instant::now();
            } else {
                began = *due;
            }
            *due += *pause;
        }
        if began >= until {
            return Ok(tally);
        }
        body.clear();
        let status = connection.send(&request).await?;
        connection.rest(&mut body).await?;
        if status != 200 {
            return Err(io::Error::other(format!(
                "status {status}: {}",
                String::from_utf8_lossy(&body)
            )));
        }
        tally.count += 1;
        tally.times.add(began.elapsed());
    }
}

const COLUMNS: &[Column] = &[
    ("PATH", "path", |path| path.as_str().unwrap_or_default().to_owned()),
    ("CLIENTS", "concurrency", ToString::to_string),
    ("READS/S", "per_second", show),
    ("MS p50 / p90 / p99", "milliseconds", show_percentiles),
    ("AT HALF: READS/S", "half.per_second", show),
    ("MS p50 / p90 / p99", "half.milliseconds", show_percentiles),
];

pub(super) fn show_rows(document: &Value) -> String {
    table(&document["reads"], COLUMNS)
}
