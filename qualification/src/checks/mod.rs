//! The checks, as data: what each proves and how it is run. `testing::planted_faults` holds the
//! faults that each check must find.
//!
//! The stages are those of the plan that records on disk refer to, so their numbers never change:
//!
//! | stage | proves | |---|---|
//! | S0 | identity: the files are the release's |
//! | S1 | tokenizer: text and ids are the reference's |
//! | S2 | template: prompts are the reference's |
//! | S3 | logic of the architectures in f32, on this machine's kernels |
//! | S4 | precision against f32 over many tokens |
//! | S5 | invariance: an answer does not depend on how it is computed |
//! | S6 | generation: tokens, text, log-probabilities and counts are right |
//! | S7 | context: the promised length really runs |
//! | S8 | capacity: the cache holds what it promises |
//! | S10 | endurance: memory stays where it is |
//!
//! S6 runs before S5, because equal answers mean little until they are right.

mod capacity;
mod context;
mod distance;
mod generation;
mod invariance;
mod kernels;
mod language;
mod long_context;
mod lost_blocks;
mod reference;
mod sampler;
mod structure;
mod text;
mod texts;
mod tool_choice;
mod tools;
mod witness;

#[cfg(any(test, feature = "testing"))]
pub(crate) use texts::PLAIN_TEXTS;
#[cfg(test)]
pub(crate) use tool_choice::due as due_calls;

use crate::goldens::Goldens;
use crate::http;
use crate::record::{CheckState, Series};
use crate::subject::{Generation, Request, Result, Subject};
use crate::suite::SuiteScope;
use std::collections::BTreeMap;

#[derive(Clone, Copy)]
pub struct Check {
    pub id: &'static str,
    /// The stage of the plan, `S0` to `S10`; the head of this module says what each proves.
    pub stage: &'static str,
    pub proves: &'static str,
    pub(crate) run: fn(&mut CheckInput) -> Result<CheckFinding>,
}

/// All checks in the order they run: cheap and fundamental ones first.
pub const ALL: &[Check] = &[
    Check {
        id: "digests",
        stage: "S0",
        proves: "the loaded files are the release's, byte for byte",
        run: text::digests,
    },
    Check {
        id: "weights",
        stage: "S0",
        proves: "no weight is broken, and each tensor has the scale of its kind",
        run: structure::weights,
    },
    Check {
        id: "hyper_parameters",
        stage: "S0",
        proves: "the files declare the shape, rotation and context of the reference's release",
        run: reference::hyper_parameters,
    },
    Check {
        id: "tokenizer_round_trip",
        stage: "S1",
        proves: "text survives encoding and decoding in every script",
        run: text::tokenizer_round_trip,
    },
    Check {
        id: "tokenizer_goldens",
        stage: "S1",
        proves: "token ids equal the reference tokenizer's",
        run: text::tokenizer_goldens,
    },
    Check {
        id: "special_text",
        stage: "S1",
        proves: "special tokens written by a user stay text",
        run: text::special_text,
    },
    Check {
        id: "special_tokens",
        stage: "S1",
        proves: "each special token that the template writes is one token",
        run: structure::special_tokens,
    },
    Check {
        id: "template_render",
        stage: "S2",
        proves: "every message reaches the prompt, once and in order",
        run: text::template_render,
    },
    Check {
        id: "template_goldens",
        stage: "S2",
        proves: "prompts equal the reference's, byte for byte and id for id",
        run: text::template_goldens,
    },
    Check {
        id: "turns",
        stage: "S2",
        proves: "each turn extends the one before, and an answer is asked for",
        run: structure::turns,
    },
    Check {
        id: "end_of_turn",
        stage: "S2",
        proves: "what the files declare and the template writes behind an answer ends it",
        run: structure::end_of_turn,
    },
    Check {
        id: "kernels",
        stage: "S3",
        proves: "this machine's kernels compute what independent implementations do, in any number of threads",
        run: kernels::kernels,
    },
    Check {
        id: "plain_text",
        stage: "S4",
        proves: "the model reads ordinary text as well as its size lets expect",
        run: language::plain_text,
    },
    Check {
        id: "witness",
        stage: "S4",
        proves: "a second implementation computes the same from the same file, prefilled and decoded",
        run: witness::witness,
    },
    Check {
        id: "distributions",
        stage: "S4",
        proves: "log-probabilities are the f32 reference's, in every kind of text and at every depth",
        run: reference::distributions,
    },
    Check {
        id: "logprobs",
        stage: "S6",
        proves: "logits are finite and log-probabilities a distribution led by the greedy choice",
        run: generation::logprobs,
    },
    Check {
        id: "greedy_goldens",
        stage: "S6",
        proves: "greedy tokens equal the f32 reference's, wherever its margin is decisive",
        run: generation::greedy_goldens,
    },
    Check {
        id: "answers_end",
        stage: "S6",
        proves: "questions of one word are answered, and the answers end",
        run: structure::answers_end,
    },
    Check {
        id: "seeds",
        stage: "S6",
        proves: "a seed gives the same answer, alone and among neighbours; another seed another one",
        run: generation::seeds,
    },
    Check {
        id: "sampler_law",
        stage: "S6",
        proves: "tokens are drawn with the probabilities that the sampling parameters promise",
        run: sampler::sampler_law,
    },
    http::PROMPT_TOKENS,
    http::HTTP_GOLDENS,
    http::HTTP_LOGPROBS,
    http::HTTP_SPECIAL_TEXT,
    http::LENGTH_LIMIT,
    http::PROMPT_TOO_LONG,
    http::USAGE,
    http::END_OF_TEXT,
    http::STOP_STRING,
    http::STREAM_JOIN,
    http::HTTP_SEEDS,
    http::PARAMETERS,
    Check {
        id: "tool_calls",
        stage: "S6",
        proves: "tools are told to the model, and its calls are read as the template writes them",
        run: tools::calls,
    },
    Check {
        id: "tool_choice",
        stage: "S6",
        proves: "the model calls a tool where a question needs one, and only there",
        run: tool_choice::choice,
    },
    Check {
        id: "batch_invariance",
        stage: "S5",
        proves: "an answer does not depend on what else is in the batch, to the last bit",
        run: invariance::batch,
    },
    Check {
        id: "prompt_cuts",
        stage: "S5",
        proves: "an answer does not depend on where its prompt is cut",
        run: invariance::cuts,
    },
    Check {
        id: "cancelled_neighbour",
        stage: "S5",
        proves: "an answer does not change when others are cancelled beside it",
        run: invariance::left,
    },
    Check {
        id: "prefix_reuse",
        stage: "S5",
        proves: "a reused prefix changes nothing and is never another account's",
        run: invariance::prefix,
    },
    Check {
        id: "evicted_prefix",
        stage: "S5",
        proves: "what is left of an evicted prefix is found again, and nothing else is",
        run: lost_blocks::evicted,
    },
    Check {
        id: "preemption",
        stage: "S5",
        proves: "an answer does not change when its blocks are taken once or twice on the way",
        run: lost_blocks::preempted,
    },
    Check {
        id: "restart",
        stage: "S5",
        proves: "an engine that was started anew answers as before, from an empty cache",
        run: lost_blocks::restarted,
    },
    Check {
        id: "context_edge",
        stage: "S7",
        proves: "a prompt over the context is refused, never cut",
        run: context::edge,
    },
    Check {
        id: "context_length",
        stage: "S7",
        proves: "the qualified context really runs, with every prompt token counted",
        run: context::length,
    },
    Check {
        id: "long_context",
        stage: "S7",
        proves: "a long text is read as exactly at its end as at its beginning, and recalled",
        run: long_context::recall,
    },
    Check {
        id: "full_cache",
        stage: "S8",
        proves: "as many sequences of the whole context run as the cache holds, and more wait",
        run: capacity::full_cache,
    },
    Check {
        id: "soak",
        stage: "S10",
        proves: "under mixed load memory stays where it is, and every block comes back",
        run: capacity::soak,
    },
];

/// The inputs of a check: the subject, and the known facts about its release.
pub(crate) struct CheckInput<'a> {
    pub subject: &'a mut dyn Subject,
    /// File name → hex SHA-256, from the release's manifest.
    pub files: &'a BTreeMap<String, String>,
    pub goldens: Option<&'a Goldens>,
    pub scope: SuiteScope,
}

/// The outcome of one check with its evidence.
#[derive(Debug)]
pub(crate) struct CheckFinding {
    pub state: CheckState,
    pub value: String,
    pub gate: String,
    /// Curves behind the value.
    pub series: Vec<Series>,
}

impl CheckFinding {
    pub(crate) fn new(passed: bool, value: impl Into<String>, gate: impl Into<String>) -> Self {
        let state = if passed { CheckState::Passed } else { CheckState::Failed };
        Self { state, value: value.into(), gate: gate.into(), series: Vec::new() }
    }

    /// A check that could not run, and why.
    pub(crate) fn not_run(why: impl Into<String>, gate: impl Into<String>) -> Self {
        Self { state: CheckState::NotRun, ..Self::new(true, why, gate) }
    }

    /// Passed when `wrong` is empty, of `total` cases; otherwise its first three entries are the
    /// evidence.
    pub(crate) fn from_wrong(wrong: &[String], total: usize, gate: &str) -> Self {
        let shown = wrong.iter().take(3).cloned().collect::<Vec<_>>().join("; ");
        let value = if wrong.is_empty() {
            format!("{total} of {total}")
        } else {
            format!("{} of {total} wrong: {shown}", wrong.len())
        };
        Self::new(wrong.is_empty(), value, gate)
    }

    pub(crate) fn without_goldens() -> Self {
        Self::not_run("no reference outputs for this release", "equal")
    }
}

impl CheckInput<'_> {
    pub(crate) fn one(&mut self, request: Request) -> Result<Generation> {
        let mut all = self.subject.generate(&[request])?;
        Ok(all.pop().expect("a result per request"))
    }

    /// A short prompt of real conversation about `topic`.
    pub(crate) fn prompt(&mut self, topic: &str) -> Result<Vec<u32>> {
        let question = format!("Tell me something about {topic}.");
        self.subject.encode_chat(&[crate::subject::ChatTurn::new("user", &question)])
    }

    /// Exactly `length` tokens of varied text about `what`.
    pub(crate) fn varied_text(&mut self, length: usize, what: &str) -> Result<Vec<u32>> {
        let mut ids = Vec::new();
        for n in 0.. {
            if ids.len() >= length {
                break;
            }
            let sentence = format!(
                " Note {n}: the keeper of {what} {} writes down the weather at hour {}.",
                n * 7 % 101,
                n % 24
            );
            ids.extend(self.subject.encode(&sentence, false)?);
        }
        ids.truncate(length);
        Ok(ids)
    }
}
