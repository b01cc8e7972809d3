//! Turns tokens into the answer that a client reads: whole characters, without stop strings, with
//! the tokens' log-probabilities; what the model thought and what it calls are told apart.

use cresset_engine::TokenLogprobs;
use cresset_ledger::{Sha256Bytes, TokenDigest};
use cresset_text::{AnswerPart, AnswerReader, Detokenizer, ReadCall, StopMatcher, TextModel};
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

/// A part of the answer that became certain, with the scores of its tokens if they were asked for.
#[derive(Clone, Debug, PartialEq)]
pub struct PartDelta {
    pub part: AnswerPart,
    /// The number of the call that the part belongs to, counted from 0.
    pub call: u32,
    pub scores: Option<Vec<TokenScores>>,
}

/// An answer as it grows, token by token.
pub struct Transcript {
    model: Arc<TextModel>,
    eos_ids: Arc<[u32]>,
    detokenizer: Detokenizer,
    reader: AnswerReader,
    /// Looks at the content alone: what was thought and what is called end no answer.
    stops: StopMatcher,
    /// All content shown so far.
    pub text: String,
    /// What was thought so far.
    pub reasoning: String,
    pub calls: Vec<ReadCall>,
    /// Tokens of thoughts, with their marks.
    pub reasoning_tokens: u32,
    /// Tokens behind the last one of which it is known what it belongs to.
    undecided: u32,
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
            reader: AnswerReader::default(),
            stops: StopMatcher::new(stops),
            text: String::new(),
            reasoning: String::new(),
            calls: Vec::new(),
            reasoning_tokens: 0,
            undecided: 0,
            tokens: 0,
            digest: TokenDigest::default(),
            stopped: false,
            scores: scored.then(Vec::new),
            pending: Vec::new(),
        }
    }

    /// The transcript of an answer that `reader` divides.
    #[must_use]
    pub fn read_by(self, reader: AnswerReader) -> Self {
        let continued = reader.continues.then(Detokenizer::behind_text);
        Self { reader, detokenizer: continued.unwrap_or(self.detokenizer), ..self }
    }

    /// Adds the next token. Tokens after a stop string are neither counted nor read.
    pub fn push(&mut self, id: u32, logprobs: Option<&TokenLogprobs>) -> Vec<PartDelta> {
        if self.stopped {
            return Vec::new();
        }
        self.tokens += 1;
        self.digest.push(id);
        if self.eos_ids.contains(&id) {
            return Vec::new();
        }
        if let Some(logprobs) = logprobs {
            let scores = self.scores_of(id, logprobs);
            self.pending.push(scores);
        }
        let text = self.text_of(id);
        let was_thinking = self.reader.is_thinking();
        let parts = self.reader.push(&text);
        self.undecided += 1;
        if was_thinking || self.reader.is_thinking() {
            self.reasoning_tokens += std::mem::take(&mut self.undecided);
        } else if !parts.is_empty() {
            self.undecided = 0;
        }
        let mut deltas = Vec::new();
        for part in parts {
            self.add(part, &mut deltas);
        }
        deltas
    }

    /// The text that became certain with this token.
    fn text_of(&mut self, id: u32) -> String {
        let tokenizer = &self.model.tokenizer;
        if self.reader.marks.contains(&id) {
            self.detokenizer.push_mark(tokenizer, id)
        } else {
            self.detokenizer.push(tokenizer, id)
        }
    }

    /// Returns what was held back, once no token follows.
    pub fn finish(&mut self) -> Vec<PartDelta> {
        let mut deltas = Vec::new();
        if self.stopped {
            return deltas;
        }
        let mut parts = self.reader.push(&self.detokenizer.finish());
        parts.extend(self.reader.finish());
        for part in parts {
            self.add(part, &mut deltas);
        }
        if !self.stopped {
            let held = self.stops.finish();
            self.show_content(held, &mut deltas);
        }
        deltas
    }

    /// Adds a part of the answer, of which the content is searched for stop strings.
    fn add(&mut self, part: AnswerPart, deltas: &mut Vec<PartDelta>) {
        match part {
            _ if self.stopped => {}
            AnswerPart::Content(text) => {
                let step = self.stops.push(&text);
                self.stopped = step.stopped;
                self.show_content(step.emit, deltas);
            }
            AnswerPart::Reasoning(text) => {
                self.reasoning.push_str(&text);
                self.show(AnswerPart::Reasoning(text), deltas);
            }
            AnswerPart::Call { name } => self.begin_call(name, deltas),
            AnswerPart::Arguments(text) => {
                if let Some(call) = self.calls.last_mut() {
                    call.arguments.push_str(&text);
                }
                self.show(AnswerPart::Arguments(text), deltas);
            }
        }
    }

    fn begin_call(&mut self, name: String, deltas: &mut Vec<PartDelta>) {
        // No stop string reaches into a call.
        let held = self.stops.finish();
        self.show_content(held, deltas);
        self.calls.push(ReadCall { name: name.clone(), arguments: String::new() });
        self.show(AnswerPart::Call { name }, deltas);
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

    fn show_content(&mut self, text: String, deltas: &mut Vec<PartDelta>) {
        if !text.is_empty() {
            self.text.push_str(&text);
            self.show(AnswerPart::Content(text), deltas);
        }
    }

    fn show(&mut self, part: AnswerPart, deltas: &mut Vec<PartDelta>) {
        let call = u32::try_from(self.calls.len()).unwrap_or(u32::MAX).saturating_sub(1);
        let scores = self.take_pending();
        deltas.push(PartDelta { part, call, scores });
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
