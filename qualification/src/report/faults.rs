//! The faults that each check must find, in words. The tests of this crate and of the node plant
//! them.

/// A check's id with a sentence for each of its planted faults.
const FAULTS: &[(&str, &[&str])] = &[
    ("digests", &["one byte of a file is not the release's"]),
    (
        "weights",
        &[
            "one flipped bit in the exponent of a block's scale",
            "all values of one tensor are zero",
            "one weight is not a number",
        ],
    ),
    ("tokenizer_round_trip", &["a token of text outside ASCII is lost"]),
    ("tokenizer_goldens", &["the tokenizer adds a special token"]),
    ("special_text", &["special tokens are parsed out of a user's text"]),
    ("special_tokens", &["the text of a special token is split into ordinary ones"]),
    ("template_render", &["the first message is left out"]),
    ("template_goldens", &["another release's template"]),
    ("turns", &["the template never asks for an answer", "a later turn changes the first one"]),
    ("end_of_turn", &["the id that the template puts behind an answer does not end it"]),
    ("kernels", &["a kernel sums one value in a thousand twice"]),
    ("plain_text", &["the model has lost what it had learned"]),
    ("witness", &["logits are a tenth too large", "one wrong position where decoding begins"]),
    ("hyper_parameters", &["the header declares another base of the rotation"]),
    ("distributions", &["the file's output head is a tenth too large, for every reader"]),
    ("logprobs", &["logits are shifted", "a logit is not a number"]),
    ("greedy_goldens", &["a late token is wrong"]),
    ("answers_end", &["answers go on for ever"]),
    ("seeds", &["the seed is ignored", "all rows share one seed"]),
    ("prompt_tokens", &["a prompt has tokens too many"]),
    ("http_goldens", &["the late part of an answer is another text"]),
    ("http_logprobs", &["log-probabilities are shifted", "they depend on the temperature"]),
    ("http_special_text", &["special tokens are parsed out of a user's text"]),
    ("length_limit", &["one token more than max_tokens"]),
    ("prompt_too_long", &["a prompt over the context is cut and answered"]),
    ("usage", &["one completion token too many is counted"]),
    ("end_of_text", &["an end-of-text id does not end the answer"]),
    ("stop_string", &["stop strings are ignored"]),
    ("stream_join", &["each token is decoded by itself"]),
    ("http_seeds", &["the seed is ignored"]),
    (
        "parameters",
        &[
            "temperatures above 1 count as 0",
            "top_p has no effect",
            "presence_penalty has no effect",
        ],
    ),
    (
        "tool_calls",
        &[
            "the model is told of no tools",
            "another value is read out of a call",
            "whether a call is demanded has no effect",
        ],
    ),
    ("tool_choice", &["the model never calls by its own choice", "the model always calls"]),
    ("sampler_law", &["one token more than top_k is drawn", "temperatures above 1 count as 1"]),
    ("prompt_cuts", &["a prompt of several chunks is computed otherwise beside others"]),
    ("cancelled_neighbour", &["what is left of a cancelled request changes its neighbours"]),
    ("batch_invariance", &["the last bit depends on the number of rows"]),
    (
        "prefix_reuse",
        &[
            "a hit on a prefix changes the last bit",
            "no prefix is found again",
            "prefixes are found across accounts",
        ],
    ),
    (
        "evicted_prefix",
        &[
            "an evicted prefix is computed from what took its place",
            "nothing of an evicted prefix is found again",
        ],
    ),
    (
        "preemption",
        &["a request whose blocks were taken goes on otherwise", "one goes on otherwise twice"],
    ),
    (
        "restart",
        &["an engine that was started anew answers otherwise", "it finds the prefixes of before"],
    ),
    ("context_edge", &["a prompt over the context is cut and answered"]),
    ("context_length", &["a long prompt loses its first half"]),
    (
        "long_context",
        &[
            "logits are too large in the last eighth of the context",
            "what was said early is not recalled behind the middle of the context",
        ],
    ),
    (
        "full_cache",
        &["a full cache refuses what would only have to wait", "it changes the answer that waited"],
    ),
    ("soak", &["each request leaves a KiB behind", "blocks of cancelled requests never come back"]),
];

/// The faults of the check with this id; none for a check of another build.
pub fn of(check: &str) -> &'static [&'static str] {
    FAULTS.iter().find(|(id, _)| *id == check).map_or(&[], |(_, faults)| faults)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checks::ALL;
    use crate::testing::planted_faults::planted_for;

    #[test]
    fn every_planted_fault_is_told() {
        for check in ALL {
            assert_eq!(of(check.id).len(), planted_for(check.id).len(), "{}", check.id);
        }
        assert_eq!(FAULTS.len(), ALL.len());
    }
}
