//! Turns tokens into the answer that a client reads: whole characters, without stop strings, with
//! the tokens' log-probabilities.

use super::token_digest::TokenDigest;
use crate::engine::TokenLogprobs;
use crate::ledger::Sha256Bytes;
use crate::text::{Detokenizer, StopMatcher, TextModel};
use std::sync::Arc;

/// One token with its log-probability.
#[derive(Clone, Debug, PartialEq)]
pub struct ScoredToken {
    /// The token's text in bytes, which may be only a part of a character.
    pub bytes: Vec<u8>,
    pub logprob: f32,
}

/// A token of the answer beside the most likely tokens at its place.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenScores {
    pub chosen: ScoredToken,
    pub most_likely: Vec<ScoredToken>,
}

/// Text that became certain, with the scores of its tokens if they were asked for.
#[derive(Clone, Debug, PartialEq)]
pub struct TextDelta {
    pub text: String,
    pub scores: Option<Vec<TokenScores>>,
}

/// An answer as it grows, token by token.
pub struct Transcript {
    model: Arc<TextModel>,
    eos_ids: Arc<[u32]>,
    detokenizer: Detokenizer,
    stops: StopMatcher,
    /// All text shown so far.
    pub text: String,
    /// Tokens seen, including the one that completed a stop string and none after it.
    pub tokens: u32,
    digest: TokenDigest,
    /// A stop string was completed.
    pub stopped: bool,
    /// Scores of everything shown so far, if they were asked for.
    scores: Option<Vec<TokenScores>>,
    /// Scores of tokens whose text is still held back.
    pending: Vec<TokenScores>,
}

impl Transcript {
    pub fn new(
        model: Arc<TextModel>,
        eos_ids: Arc<[u32]>,
        stops: Vec<String>,
        scored: bool,
    ) -> Self {
        Self {
            model,
            eos_ids,
            detokenizer: Detokenizer::new(),
            stops: StopMatcher::new(stops),
            text: String::new(),
            tokens: 0,
            digest: TokenDigest::default(),
            stopped: false,
            scores: scored.then(Vec::new),
            pending: Vec::new(),
        }
    }

    /// Adds the next token. Tokens after a stop string are neither counted nor read.
    pub fn push(&mut self, id: u32, logprobs: Option<&TokenLogprobs>) -> Option<TextDelta> {
        if self.stopped {
            return None;
        }
        self.tokens += 1;
        self.digest.push(id);
        if self.eos_ids.contains(&id) {
            return None;
        }
        if let Some(logprobs) = logprobs {
            let scores = self.scores_of(id, logprobs);
            self.pending.push(scores);
        }
        let text = self.detokenizer.push(&self.model.tokenizer, id);
        let step = self.stops.push(&text);
        self.stopped = step.stopped;
        self.show(step.emit)
    }

    /// Returns the text that was held back, once no token follows.
    pub fn finish(&mut self) -> Option<TextDelta> {
        if self.stopped {
            return None;
        }
        let step = self.stops.push(&self.detokenizer.finish());
        self.stopped = step.stopped;
        let held = if step.stopped { String::new() } else { self.stops.finish() };
        self.show(step.emit + &held)
    }

    /// Scores of tokens that have shown no text of their own yet.
    pub fn take_pending(&mut self) -> Option<Vec<TokenScores>> {
        let scores = self.scores.as_mut()?;
        let pending = std::mem::take(&mut self.pending);
        scores.extend_from_slice(&pending);
        (!pending.is_empty()).then_some(pending)
    }

    /// The digest of the tokens that were counted.
    pub fn token_digest(&self) -> Sha256Bytes {
        self.digest.value()
    }

    /// Scores of the whole answer.
    pub fn scores(&self) -> Option<&Vec<TokenScores>> {
        self.scores.as_ref()
    }

    fn show(&mut self, text: String) -> Option<TextDelta> {
        if text.is_empty() {
            return None;
        }
        self.text.push_str(&text);
        let scores = self.take_pending();
        Some(TextDelta { text, scores })
    }

    fn scores_of(&self, id: u32, logprobs: &TokenLogprobs) -> TokenScores {
        let score = |&(id, logprob): &(u32, f32)| ScoredToken {
            bytes: self.model.tokenizer.token_bytes(id, false),
            logprob,
        };
        TokenScores {
            chosen: score(&(id, logprobs.chosen)),
            most_likely: logprobs.top.iter().map(score).collect(),
        }
    }
}
