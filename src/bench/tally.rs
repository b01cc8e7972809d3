//! Outcomes of requests: reads streams as they arrive, and counts.

#![expect(clippy::disallowed_methods, reason = "a benchmark measures time")]

use super::figures::{Times, per_second};
use cresset_base::EventReader;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Counts and times of some requests.
#[derive(Default)]
pub(super) struct CompletionTally {
    first: Times,
    between: Times,
    whole: Times,
    answered: u64,
    pub usage: TokenUsage,
    /// Failed requests by their status and code, or by the connection's error.
    pub errors: BTreeMap<String, u64>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct TokenUsage {
    pub prompt: u64,
    pub completion: u64,
}

impl CompletionTally {
    pub(super) fn fail(&mut self, error: &str) {
        *self.errors.entry(error.to_owned()).or_default() += 1;
    }

    pub(super) fn merge(&mut self, other: Self) {
        self.first.merge(other.first);
        self.between.merge(other.between);
        self.whole.merge(other.whole);
        self.answered += other.answered;
        self.usage.prompt += other.usage.prompt;
        self.usage.completion += other.usage.completion;
        for (error, count) in other.errors {
            *self.errors.entry(error).or_default() += count;
        }
    }

    pub(super) fn report(self, clients: usize, time: Duration) -> Value {
        let TokenUsage { prompt, completion } = self.usage;
        json!({
            "concurrency": clients,
            "answered": self.answered,
            "failed": self.errors.values().sum::<u64>(),
            "errors": self.errors,
            "seconds": time.as_secs_f64(),
            "requests_per_second": per_second(self.answered, time),
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "output_tokens_per_second": per_second(completion, time),
            "time_to_first_token_ms": self.first.percentiles(),
            "inter_token_ms": self.between.percentiles(),
            "end_to_end_ms": self.whole.percentiles(),
        })
    }
}

/// One answer while it is read.
pub(super) struct MeasuredAnswer {
    sent: Instant,
    /// Time at which the last text arrived.
    last: Option<Instant>,
    usage: Option<TokenUsage>,
    refused: Option<String>,
    events: EventReader,
}

impl MeasuredAnswer {
    /// Begins the answer to a request that is about to be sent.
    pub(super) fn begin() -> Self {
        Self {
            sent: Instant::now(),
            last: None,
            usage: None,
            refused: None,
            events: EventReader::default(),
        }
    }

    /// The request was refused with this status and body.
    pub(super) fn refuse(&mut self, status: u16, body: &[u8]) {
        self.refused = Some(format!("{status} {}", code(body)));
    }

    /// Reads the events that `arrived` completes. Text that arrives together counts as one token.
    pub(super) fn read(&mut self, arrived: &[u8], tally: &mut CompletionTally) {
        let now = Instant::now();
        let mut text = false;
        self.events.push(arrived);
        while let Some(data) = self.events.next_data() {
            if has_text(&data) {
                text = true;
            } else if data.contains(r#""usage":{"#) {
                self.usage = usage(&data);
            } else if data.contains(r#"{"error":"#) {
                self.refused = Some(format!("in the stream: {}", code(data.as_bytes())));
            }
        }
        if text {
            match self.last.replace(now) {
                None => tally.first.add(now - self.sent),
                Some(last) => tally.between.add(now - last),
            }
        }
    }

    pub(super) fn close(self, tally: &mut CompletionTally) {
        match (self.refused, self.usage) {
            (Some(error), _) => tally.fail(&error),
            (None, None) => tally.fail("a stream ended without its usage"),
            (None, Some(usage)) => {
                tally.answered += 1;
                tally.whole.add(self.sent.elapsed());
                tally.usage.prompt += usage.prompt;
                tally.usage.completion += usage.completion;
            }
        }
    }
}

fn has_text(data: &str) -> bool {
    const CONTENT: &str = r#""content":""#;
    data.find(CONTENT).is_some_and(|at| data.as_bytes().get(at + CONTENT.len()) != Some(&b'"'))
}

fn usage(data: &str) -> Option<TokenUsage> {
    let chunk: Value = serde_json::from_str(data).ok()?;
    let tokens = |name: &str| chunk["usage"][name].as_u64();
    Some(TokenUsage { prompt: tokens("prompt_tokens")?, completion: tokens("completion_tokens")? })
}

/// Returns the error code in a body, or the beginning of the body.
fn code(body: &[u8]) -> String {
    let value: Value = serde_json::from_slice(body).unwrap_or_default();
    match value["error"]["code"].as_str() {
        Some(code) => code.to_owned(),
        None => String::from_utf8_lossy(&body[..body.len().min(80)]).into_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A tally after a stream that arrived in these pieces.
    fn tally(pieces: &[&str]) -> CompletionTally {
        let (mut answer, mut tally) = (MeasuredAnswer::begin(), CompletionTally::default());
        for piece in pieces {
            answer.read(piece.as_bytes(), &mut tally);
        }
        answer.close(&mut tally);
        tally
    }

    #[test]
    fn streams_are_read_across_pieces() {
        let check = |pieces: &[&str], gaps: usize, usage: (u64, u64), errors: &[&str]| {
            let found = tally(pieces);
            let report = found.report(1, Duration::from_secs(1));
            assert_eq!(report["inter_token_ms"]["p50"].is_number(), gaps > 0, "{pieces:?}");
            assert_eq!(
                (report["prompt_tokens"].as_u64(), report["completion_tokens"].as_u64()),
                (Some(usage.0), Some(usage.1)),
                "{pieces:?}"
            );
            let named: Vec<_> = report["errors"].as_object().unwrap().keys().collect();
            assert_eq!(named, errors, "{pieces:?}");
        };
        let role =
            "data: {\"choices\":[{\"delta\":{\"role\":\"assistant\",\"content\":\"\"}}]}\n\n";
        let text = "data: {\"choices\":[{\"delta\":{\"content\":\"a \\\"content\\\":\"}}],\"usage\":null}\n\n";
        let usage =
            "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":3,\"completion_tokens\":2}}\n\n";
        let failure = "data: {\"error\":{\"code\":\"generation_failed\"}}\n\n";
        let done = "data: [DONE]\n\n";
        let (front, back) = text.split_at(30);
        check(&[role, text, front, back, usage, done], 1, (3, 2), &[]);
        check(&[role, text, usage, done], 0, (3, 2), &[]);
        check(
            &[role, ": keep-alive\n\n", failure, done],
            0,
            (0, 0),
            &["in the stream: generation_failed"],
        );
        check(&[role, text], 0, (0, 0), &["a stream ended without its usage"]);
    }

    #[test]
    fn errors_have_names() {
        for (body, expect) in [
            (r#"{"error":{"code":"insufficient_credits"}}"#, "insufficient_credits"),
            ("oops", "oops"),
        ] {
            assert_eq!(code(body.as_bytes()), expect);
        }
    }
}
