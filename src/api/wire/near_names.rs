//! The member that a client may have meant by a name that requests do not have.

use super::chat_schema::body_members;

/// Names of other services for members that are here.
const ELSEWHERE: [(&str, &str); 22] = [
    ("repeat_penalty", "repetition_penalty"),
    ("rep_pen", "repetition_penalty"),
    ("max_new_tokens", "max_tokens"),
    ("max_output_tokens", "max_tokens"),
    ("max_length", "max_tokens"),
    ("num_predict", "max_tokens"),
    ("n_predict", "max_tokens"),
    ("min_new_tokens", "min_tokens"),
    ("stop_sequences", "stop"),
    ("stop_strings", "stop"),
    ("random_seed", "seed"),
    ("n_probs", "top_logprobs"),
    ("enable_thinking", "reasoning_effort"),
    ("thinking", "reasoning_effort"),
    ("think", "reasoning_effort"),
    ("reasoning", "reasoning_effort"),
    ("json_schema", "response_format"),
    ("format", "response_format"),
    ("grammar", "guided_grammar"),
    ("ebnf", "guided_grammar"),
    ("regex", "guided_regex"),
    ("prompt", "messages"),
];

/// What is called so elsewhere, or is spelt nearly so.
pub(super) fn meant_by(name: &str) -> Option<&'static str> {
    let elsewhere = ELSEWHERE.iter().find(|(other, _)| *other == name).map(|(_, own)| *own);
    elsewhere.or_else(|| {
        let is_long = (5..=64).contains(&name.len());
        let own = body_members().as_object()?.keys().filter(|_| is_long);
        let away = own.map(|own| (strsim::osa_distance(own, name), own.as_str()));
        away.filter(|(distance, _)| *distance <= 2).min().map(|(_, own)| own)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_that_is_unknown_may_be_another_one() {
        for (name, expect) in [
            ("repeat_penalty", Some("repetition_penalty")),
            ("temprature", Some("temperature")),
            ("max_token", Some("max_tokens")),
            ("topp", None),
            ("best_of", None),
            ("logit_biases", Some("logit_bias")),
            ("no_such_field", None),
        ] {
            assert_eq!(meant_by(name), expect, "{name}");
        }
        for (_, own) in ELSEWHERE {
            assert!(!body_members()[own].is_null(), "{own}");
        }
    }
}
