//! The checks, as data: what each proves, which planted faults must turn it red, and how it is run.

mod context;
mod generation;
mod invariance;
mod text;

use crate::faults::Fault;
use crate::goldens::Goldens;
use crate::record::State;
use crate::subject::{Generation, Request, Result, Subject};
use crate::suite::Scope;
use std::collections::BTreeMap;

pub struct Check {
    pub id: &'static str,
    /// Of the qualification plan: S0 identity … S7 context.
    pub stage: &'static str,
    pub proves: &'static str,
    /// Planted, each must turn this check red and no other.
    pub faults: &'static [Fault],
    pub(crate) run: fn(&mut Bench) -> Result<Finding>,
}

/// In the order they run: cheap and fundamental ones first.
pub const ALL: &[Check] = &[
    Check {
        id: "digests",
        stage: "S0",
        proves: "the loaded files are the release's, byte for byte",
        faults: &[Fault::ByteFlipped],
        run: text::digests,
    },
    Check {
        id: "tokenizer_round_trip",
        stage: "S1",
        proves: "text survives encoding and decoding in every script",
        faults: &[Fault::LossyEncoding],
        run: text::tokenizer_round_trip,
    },
    Check {
        id: "tokenizer_goldens",
        stage: "S1",
        proves: "token ids equal the reference tokenizer's",
        faults: &[Fault::SpecialAdded],
        run: text::tokenizer_goldens,
    },
    Check {
        id: "special_text",
        stage: "S1",
        proves: "special tokens written by a user stay text",
        faults: &[Fault::SpecialTextParsed],
        run: text::special_text,
    },
    Check {
        id: "template_render",
        stage: "S2",
        proves: "every message reaches the prompt, once and in order",
        faults: &[Fault::MessageDropped],
        run: text::template_render,
    },
    Check {
        id: "template_goldens",
        stage: "S2",
        proves: "prompts equal the reference's, byte for byte and id for id",
        faults: &[Fault::SisterTemplate],
        run: text::template_goldens,
    },
    Check {
        id: "logprobs",
        stage: "S6",
        proves: "logits are finite and log-probabilities a distribution led by the greedy choice",
        faults: &[Fault::LogitsShifted, Fault::NotANumber],
        run: generation::logprobs,
    },
    Check {
        id: "greedy_goldens",
        stage: "S6",
        proves: "greedy tokens equal the f32 reference's, wherever its margin is decisive",
        faults: &[Fault::WrongToken],
        run: generation::greedy_goldens,
    },
    Check {
        id: "length_limit",
        stage: "S6",
        proves: "max_tokens is exact",
        faults: &[Fault::OneTokenMore],
        run: generation::length_limit,
    },
    Check {
        id: "usage",
        stage: "S6",
        proves: "the tokens that are billed are the tokens that were used",
        faults: &[Fault::UsageOffByOne],
        run: generation::usage,
    },
    Check {
        id: "end_of_text",
        stage: "S6",
        proves: "every end-of-text id ends the answer and none shows in it",
        faults: &[Fault::EndIgnored],
        run: generation::end_of_text,
    },
    Check {
        id: "stop_string",
        stage: "S6",
        proves: "a stop string across tokens ends the answer exactly before it",
        faults: &[Fault::StopDropped],
        run: generation::stop_string,
    },
    Check {
        id: "stream_join",
        stage: "S6",
        proves: "streamed pieces are whole characters and join to the whole answer",
        faults: &[Fault::HalfCharacter],
        run: generation::stream_join,
    },
    Check {
        id: "seeds",
        stage: "S6",
        proves: "a seed gives the same answer, alone and among neighbours; another seed another one",
        faults: &[Fault::SeedIgnored, Fault::SeedShared],
        run: generation::seeds,
    },
    Check {
        id: "batch_invariance",
        stage: "S5",
        proves: "an answer does not depend on what else is in the batch, to the last bit",
        faults: &[Fault::BatchDependent],
        run: invariance::batch,
    },
    Check {
        id: "prefix_reuse",
        stage: "S5",
        proves: "a reused prefix changes nothing and is never another account's",
        faults: &[Fault::PrefixDiffers, Fault::PrefixLeaks],
        run: invariance::prefix,
    },
    Check {
        id: "context_edge",
        stage: "S7",
        proves: "a prompt over the context is refused, never cut",
        faults: &[Fault::CutAtEdge],
        run: context::edge,
    },
    Check {
        id: "context_length",
        stage: "S7",
        proves: "the qualified context really runs, with every prompt token counted",
        faults: &[Fault::LongPromptCut],
        run: context::length,
    },
];

/// What a check works with.
pub(crate) struct Bench<'a> {
    pub subject: &'a mut dyn Subject,
    /// File name → hex SHA-256, from the release's manifest.
    pub files: &'a BTreeMap<String, String>,
    pub goldens: Option<&'a Goldens>,
    pub scope: Scope,
}

/// A check's outcome with its evidence.
#[derive(Debug)]
pub(crate) struct Finding {
    pub state: State,
    pub value: String,
    pub gate: String,
}

impl Finding {
    pub fn new(passed: bool, value: impl Into<String>, gate: impl Into<String>) -> Self {
        let state = if passed { State::Passed } else { State::Failed };
        Self { state, value: value.into(), gate: gate.into() }
    }

    /// Passed when nothing was found wrong; the first few faults are the evidence otherwise.
    pub fn from_wrong(wrong: &[String], of: usize, gate: &str) -> Self {
        let shown = wrong.iter().take(3).cloned().collect::<Vec<_>>().join("; ");
        let value = if wrong.is_empty() {
            format!("{of} of {of}")
        } else {
            format!("{} of {of} wrong: {shown}", wrong.len())
        };
        Self::new(wrong.is_empty(), value, gate)
    }

    pub fn without_goldens() -> Self {
        Self {
            state: State::NotRun,
            value: "no reference outputs for this release".into(),
            gate: "equal".into(),
        }
    }
}

impl Bench<'_> {
    pub fn one(&mut self, request: Request) -> Result<Generation> {
        let mut all = self.subject.generate(&[request])?;
        Ok(all.pop().expect("a result per request"))
    }

    /// A short prompt of real conversation; different `topic`s give different ones.
    pub fn prompt(&mut self, topic: &str) -> Result<Vec<u32>> {
        let question = format!("Tell me something about {topic}.");
        self.subject.encode_chat(&[crate::subject::Message::new("user", &question)])
    }
}

/// Equal to the last bit: tokens and every log-probability.
pub(crate) fn identical(a: &Generation, b: &Generation) -> bool {
    let bits = |g: &Generation| -> Vec<(u32, Vec<(u32, u32)>)> {
        let top = |t: &[(u32, f32)]| t.iter().map(|(id, p)| (*id, p.to_bits())).collect();
        g.logprobs.iter().map(|l| (l.chosen.to_bits(), top(&l.top))).collect()
    };
    a.tokens == b.tokens && bits(a) == bits(b)
}
