//! From tokens to what a client reads: whole characters, stop strings, log-probabilities.

use crate::engine::TokenLogprobs;
use crate::server::wire::completion::{Logprobs, TokenChoice, TokenLogprob};
use crate::text::{Detokenizer, StopMatcher, TextModel};
use std::sync::Arc;

/// Text that became certain, with the log-probabilities of the tokens behind it.
#[derive(Debug, PartialEq)]
pub struct Delta {
    pub text: String,
    pub logprobs: Option<Logprobs>,
}

/// An answer as it grows.
pub struct Transcript {
    model: Arc<TextModel>,
    eos_ids: Arc<[u32]>,
    detokenizer: Detokenizer,
    stops: StopMatcher,
    /// All text shown so far.
    pub text: String,
    /// Tokens seen, the one that completed a stop string included and none after it.
    pub tokens: u32,
    /// A stop string was completed.
    pub stopped: bool,
    /// Log-probabilities of everything shown so far, when they were asked for.
    logprobs: Option<Vec<TokenLogprob>>,
    /// Those of tokens whose text is still held back.
    pending: Vec<TokenLogprob>,
}

impl Transcript {
    pub fn new(
        model: Arc<TextModel>,
        eos_ids: Arc<[u32]>,
        stops: Vec<String>,
        logprobs: bool,
    ) -> Self {
        Self {
            model,
            eos_ids,
            detokenizer: Detokenizer::new(),
            stops: StopMatcher::new(stops),
            text: String::new(),
            tokens: 0,
            stopped: false,
            logprobs: logprobs.then(Vec::new),
            pending: Vec::new(),
        }
    }

    /// The next token. Tokens after a stop string are neither counted nor read.
    pub fn push(&mut self, id: u32, logprobs: Option<&TokenLogprobs>) -> Option<Delta> {
        if self.stopped {
            return None;
        }
        self.tokens += 1;
        if self.eos_ids.contains(&id) {
            return None;
        }
        if let Some(logprobs) = logprobs {
            let entry = self.entry(id, logprobs);
            self.pending.push(entry);
        }
        let text = self.detokenizer.push(&self.model.tokenizer, id);
        let step = self.stops.push(&text);
        self.stopped = step.stopped;
        self.show(step.emit)
    }

    /// What was held back, once no token follows.
    pub fn finish(&mut self) -> Option<Delta> {
        if self.stopped {
            return None;
        }
        let step = self.stops.push(&self.detokenizer.finish());
        self.stopped = step.stopped;
        let held = if step.stopped { String::new() } else { self.stops.finish() };
        self.show(step.emit + &held)
    }

    /// Log-probabilities of tokens that never showed text of their own.
    pub fn take_pending(&mut self) -> Option<Logprobs> {
        let logprobs = self.logprobs.as_mut()?;
        let content = std::mem::take(&mut self.pending);
        logprobs.extend_from_slice(&content);
        (!content.is_empty()).then_some(Logprobs { content, refusal: None })
    }

    /// The log-probabilities of the whole answer.
    pub fn logprobs(&self) -> Option<Logprobs> {
        self.logprobs.clone().map(|content| Logprobs { content, refusal: None })
    }

    fn show(&mut self, text: String) -> Option<Delta> {
        if text.is_empty() {
            return None;
        }
        self.text.push_str(&text);
        let logprobs = self.take_pending();
        Some(Delta { text, logprobs })
    }

    fn entry(&self, id: u32, logprobs: &TokenLogprobs) -> TokenLogprob {
        let choice = |&(id, logprob): &(u32, f32)| {
            let bytes = self.model.tokenizer.token_bytes(id, false);
            TokenChoice { token: String::from_utf8_lossy(&bytes).into_owned(), logprob, bytes }
        };
        TokenLogprob {
            chosen: choice(&(id, logprobs.chosen)),
            top_logprobs: logprobs.top.iter().map(choice).collect(),
        }
    }
}
