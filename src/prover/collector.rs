//! What comes of one generation of the engine: its tokens, their log-probabilities, its text.

use super::subject::EngineSubject;
use cresset_engine::{EngineHandle, Finished, SequenceEvent, SequenceId, StopCause, TokenLogprobs};
use cresset_qualification::subject::Result as SubjectResult;
use cresset_qualification::{Finish, Generation, PositionLogprob, Request, SubjectError};
use cresset_request::{PartDelta, Transcript};
use cresset_text::AnswerPart;
use std::sync::Arc;
use tokio::sync::mpsc::Receiver;

/// Collects the events of one running generation into its tokens and text.
pub(super) struct Collector {
    engine: EngineHandle,
    id: SequenceId,
    events: Receiver<SequenceEvent>,
    transcript: Transcript,
    leaves_after: Option<u32>,
    tokens: Vec<u32>,
    logprobs: Vec<PositionLogprob>,
    deltas: Vec<String>,
}

impl Collector {
    pub(super) fn new(
        subject: &EngineSubject,
        request: &Request,
        id: SequenceId,
        events: Receiver<SequenceEvent>,
    ) -> Self {
        let (text, stops) = (Arc::clone(&subject.text), request.stop.clone());
        let eos_ids = subject.ending(request).into();
        Self {
            engine: subject.engine.clone(),
            id,
            events,
            transcript: Transcript::new(text, eos_ids, stops, false),
            leaves_after: request.leaves_after,
            tokens: Vec::new(),
            logprobs: Vec::new(),
            deltas: Vec::new(),
        }
    }

    pub(super) fn collect(mut self) -> SubjectResult<Generation> {
        loop {
            match self.events.blocking_recv() {
                Some(SequenceEvent::Started) => {}
                // Tokens under way when the stop string was found are never shown.
                Some(SequenceEvent::Token { .. }) if self.transcript.stopped => {}
                Some(SequenceEvent::Token { id, logprobs }) => self.token(id, logprobs)?,
                Some(SequenceEvent::Finished(finished)) => return self.finish(&finished),
                None => {
                    return Err(SubjectError::Failed(
                        "the engine ended without finishing the answer".into(),
                    ));
                }
            }
        }
    }

    fn token(&mut self, id: u32, logprobs: Option<TokenLogprobs>) -> SubjectResult<()> {
        let logprobs = logprobs
            .ok_or_else(|| SubjectError::Failed("a token came without log-probabilities".into()))?;
        self.tokens.push(id);
        self.logprobs.push(PositionLogprob { chosen: logprobs.chosen, top: logprobs.top });
        let deltas = self.transcript.push(id, None);
        self.deltas.extend(deltas.into_iter().filter_map(content));
        let left = self.leaves_after.is_some_and(|tokens| self.tokens.len() >= tokens as usize);
        if self.transcript.stopped || left {
            self.engine.stop(self.id);
        }
        Ok(())
    }

    fn finish(mut self, finished: &Finished) -> SubjectResult<Generation> {
        let held = self.transcript.finish();
        self.deltas.extend(held.into_iter().filter_map(content));
        let stopped = self.transcript.stopped;
        let finish = match &finished.cause {
            _ if stopped || self.leaves_after.is_some() => Finish::Stop,
            StopCause::EndOfText => Finish::Stop,
            StopCause::Length => Finish::Length,
            other => {
                return Err(SubjectError::Failed(format!("the generation ended with {other:?}")));
            }
        };
        let all = finished.completion_tokens;
        Ok(Generation {
            completion_tokens: if stopped { self.tokens.len() as u32 } else { all },
            prompt_tokens: finished.prompt_tokens,
            cached_tokens: finished.cached_tokens,
            tokens: self.tokens,
            logprobs: self.logprobs,
            deltas: self.deltas,
            finish,
        })
    }
}

/// The only kind of part that an answer has whose reader looks for no others.
fn content(delta: PartDelta) -> Option<String> {
    match delta.part {
        AnswerPart::Content(text) => Some(text),
        _ => None,
    }
}
