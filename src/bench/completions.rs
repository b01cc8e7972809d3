//! Measures streamed completions under load: time to the first token, between tokens and to the
//! end, at each concurrency.

#![expect(clippy::disallowed_methods, reason = "a benchmark measures time")]

use super::connection::LoadConnection;
use super::figures::{Column, show, show_percentiles, table};
use super::tally::{CompletionTally, MeasuredAnswer};
use super::target::Target;
use crate::Arguments;
use crate::MeasureProgress;
use crate::Result;
use cresset_node::NodeError;
use serde_json::{Value, json};
use std::fmt::Write;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use tokio::task::JoinSet;
use uuid::Uuid;

/// Words by which two prompts differ, to measure how many tokens a word has.
const PROBE_WORDS: usize = 32;
/// Requests for each client at a concurrency, when `--requests` is not given.
const REQUESTS_PER_CLIENT: usize = 2;
/// Requests at a concurrency when that would be fewer: percentiles of less than 8 say nothing.
const MIN_REQUESTS: usize = 8;
/// Short words that most tokenizers have as one token each.
const WORDS: [&str; 16] = [
    "time", "water", "house", "light", "world", "hand", "night", "road", "tree", "book", "city",
    "food", "music", "day", "table", "stone",
];

/// The parameters that every request of a run has in common.
struct RequestShape {
    target: Arc<Target>,
    /// Words of the prompt.
    words: usize,
    output_tokens: u32,
}

pub(super) async fn run(
    target: Arc<Target>,
    arguments: &Arguments,
    progress: &mut dyn MeasureProgress,
) -> Result<Value> {
    let shape = calibrate(target, arguments).await?;
    let longest = Duration::from_secs(arguments.seconds.unwrap_or(300));
    let mut levels = Vec::new();
    for &clients in &arguments.concurrency {
        let requests = arguments
            .requests
            .map_or((clients * REQUESTS_PER_CLIENT).max(MIN_REQUESTS), |n| n as usize);
        progress.begin(format!("{requests} requests, {clients} at a time"));
        levels.push(level(&shape, clients, requests, longest, progress).await);
    }
    let Target { node, model, .. } = &*shape.target;
    Ok(json!({ "url": node.url, "model": model, "input_tokens": arguments.input_tokens,
               "output_tokens": arguments.output_tokens, "levels": levels }))
}

/// Finds how many words make a prompt of the required length, from the token counts of a short and
/// a longer prompt, because only the server has the tokenizer.
async fn calibrate(target: Arc<Target>, arguments: &Arguments) -> Result<Arc<RequestShape>> {
    let wanted = f64::from(arguments.input_tokens);
    let mut shape = RequestShape { target, words: 1, output_tokens: 1 };
    let least = shape.prompt_tokens().await?;
    shape.words += PROBE_WORDS;
    let a_word = (shape.prompt_tokens().await? - least) / PROBE_WORDS as f64;
    shape.words = 1 + ((wanted - least) / a_word.max(1.0)).max(0.0).round() as usize;
    shape.output_tokens = arguments.output_tokens;
    Ok(Arc::new(shape))
}

async fn level(
    shape: &Arc<RequestShape>,
    clients: usize,
    requests: usize,
    longest: Duration,
    progress: &mut dyn MeasureProgress,
) -> Value {
    let left = Arc::new(AtomicUsize::new(requests));
    let began = Instant::now();
    let until = began + longest;
    let mut workers = JoinSet::new();
    for _ in 0..clients.min(requests) {
        workers.spawn(client(shape.clone(), left.clone(), until));
    }
    let mut total = CompletionTally::default();
    while let Some(tally) = workers.join_next().await {
        total.merge(tally.unwrap_or_default());
        progress.at((requests - left.load(Ordering::Relaxed)) as u64, requests as u64);
    }
    total.report(clients, began.elapsed())
}

/// One client: sends one request after the other until none is left or the time is over.
async fn client(
    shape: Arc<RequestShape>,
    left: Arc<AtomicUsize>,
    until: Instant,
) -> CompletionTally {
    let (mut connection, mut tally) = (None, CompletionTally::default());
    let another =
        || left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| n.checked_sub(1)).is_ok();
    while Instant::now() < until && another() {
        let asked =
            tokio::time::timeout_at(until.into(), shape.ask(&mut connection, &mut tally)).await;
        if asked.is_err() {
            tally.fail("not finished in time");
        }
    }
    tally
}

impl RequestShape {
    /// Tokens of a prompt of this shape, as the server counts them.
    async fn prompt_tokens(&self) -> Result<f64> {
        let (mut connection, mut tally) = (None, CompletionTally::default());
        self.ask(&mut connection, &mut tally).await;
        match tally.errors.keys().next() {
            None => Ok(tally.usage.prompt as f64),
            Some(error) => {
                Err(NodeError::new(format!("a first request was not answered: {error}"))
                    .remedy("check --url, --key, --model and the balance"))
            }
        }
    }

    /// Sends one request, over the kept connection if there is one, and counts its outcome.
    async fn ask(&self, connection: &mut Option<LoadConnection>, tally: &mut CompletionTally) {
        // The connection is put back only when it can be used again.
        let kept = connection.take();
        match self.try_ask(kept, tally).await {
            Ok(usable) => *connection = Some(usable),
            Err(error) => tally.fail(&error.to_string()),
        }
    }

    async fn try_ask(
        &self,
        kept: Option<LoadConnection>,
        tally: &mut CompletionTally,
    ) -> io::Result<LoadConnection> {
        let mut connection = match kept {
            Some(connection) => connection,
            None => LoadConnection::open(&self.target.node).await?,
        };
        let request = self.target.post("/v1/chat/completions", &self.body());
        let mut answer = MeasuredAnswer::begin();
        let status = connection.send(&request).await?;
        if status == 200 {
            let mut arrived = Vec::new();
            while connection.piece(&mut arrived).await? {
                answer.read(&arrived, tally);
                arrived.clear();
            }
        } else {
            let mut body = Vec::new();
            connection.rest(&mut body).await?;
            answer.refuse(status, &body);
        }
        answer.close(tally);
        Ok(connection)
    }

    fn body(&self) -> String {
        let body = json!({
            "model": self.target.model,
            "messages": [{ "role": "user", "content": words(self.words) }],
            "max_tokens": self.output_tokens,
            "ignore_eos": true,
            "stream": true,
            "stream_options": { "include_usage": true },
        });
        body.to_string()
    }
}

/// Random words, so that no two prompts begin alike and no answer comes from a prefix cache.
fn words(count: usize) -> String {
    let mut text = String::new();
    while text.split(' ').count() <= count {
        for byte in Uuid::new_v4().into_bytes() {
            text.push_str(WORDS[usize::from(byte) % WORDS.len()]);
            text.push(' ');
        }
    }
    text.split(' ').take(count).collect::<Vec<_>>().join(" ")
}

const COLUMNS: &[Column] = &[
    ("CLIENTS", "concurrency", ToString::to_string),
    ("ANSWERED", "answered", ToString::to_string),
    ("FAILED", "failed", ToString::to_string),
    ("REQUESTS/S", "requests_per_second", show),
    ("TOKENS/S", "output_tokens_per_second", show),
    ("FIRST TOKEN", "time_to_first_token_ms", show_percentiles),
    ("BETWEEN TOKENS", "inter_token_ms", show_percentiles),
    ("TO THE END", "end_to_end_ms", show_percentiles),
];

/// A table with the failures below it.
pub(super) fn show_levels(document: &Value) -> String {
    let mut errors = String::new();
    for level in document["levels"].as_array().into_iter().flatten() {
        let clients = &level["concurrency"];
        for (error, count) in level["errors"].as_object().into_iter().flatten() {
            let _ = writeln!(errors, "{count} requests of {clients} clients failed: {error}");
        }
    }
    let intro = format!(
        "{} at {}: prompts of about {} tokens, answers of {}; times are p50 / p90 / p99 in ms\n",
        document["model"].as_str().unwrap_or_default(),
        document["url"].as_str().unwrap_or_default(),
        document["input_tokens"],
        document["output_tokens"],
    );
    intro + &table(&document["levels"], COLUMNS) + &errors
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompts_have_their_words_and_differ() {
        for count in [1, 16, 17, 100] {
            assert_eq!(words(count).split(' ').count(), count);
        }
        assert_ne!(words(64), words(64));
    }
}
