//! Reads any bytes as a request's body or as its id: the result is an answer, never a panic, and
//! nothing out of bounds is accepted.

mod json;

use super::chat_request::ChatRequest;
use super::json::JsonTree;
use crate::error::ApiError;
use crate::headers;
use crate::settings::ChatBounds;
use axum::http::{HeaderMap, HeaderValue};
use cresset_base::{Mutation, mutated};
use cresset_engine::SamplingParams;

const BODIES: &[&[u8]] = &[
    b"",
    br#"{"model":"0197a0b1-c2d3-7e4f-8a5b-6c7d8e9f0a1b","messages":[{"role":"user","content":"hi"}]}"#,
    br#"{"model":"0197a0b1-c2d3-7e4f-8a5b-6c7d8e9f0a1b","messages":[{"role":"system","content":[{"type":"text","text":"a"}]},
        {"role":"assistant","content":null,"tool_calls":[{"id":"1","type":"function","function":{"name":"f","arguments":"{}"}}]},
        {"role":"tool","content":"b","tool_call_id":"1","name":null}],"stream":true,"stream_options":{"include_usage":true},
        "n":1,"max_tokens":5,"min_tokens":1,"ignore_eos":true,"stop":["a"],"temperature":0.5,"top_p":0.9,"top_k":-1,"min_p":0,
        "frequency_penalty":-2,"presence_penalty":2,"repetition_penalty":1.1,"seed":-1,"logit_bias":{"5":-100},
        "logprobs":true,"top_logprobs":20,"user":"u","metadata":{"a":"b"},"store":false,"service_tier":"auto","tools":[],
        "tool_choice":"none","modalities":["text"],"response_format":{"type":"text"},"parallel_tool_calls":true}"#,
    br#"{"model":"0197a0b1-c2d3-7e4f-8a5b-6c7d8e9f0a1b","prompt":{"prefix":"a","suffix":"b","files":[{"name":"n","text":"t"}]}}"#,
    br#"{"model":"0197a0b1-c2d3-7e4f-8a5b-6c7d8e9f0a1b","prompt":[1,2]}"#,
    br#"{"tools":[{"type":"function","function":{"name":"f","description":"d","parameters":{"type":"object"}}}]}"#,
];

const MAX_MESSAGES: usize = 64;
const MAX_STOPS: usize = 8;
/// Longest sentence of a refusal, in characters: texts do not grow with what they refuse.
const LONGEST_REFUSAL: usize = 600;

#[test]
fn bodies() {
    bolero::check!().with_iterations(10_000).with_type().for_each(|mutation: &Mutation| {
        let body = mutated(BODIES, mutation);
        let Ok(tree) = JsonTree::parse(&body) else { return };
        // With these bounds a request may have a raw prompt.
        match ChatRequest::parse_within(&tree, &ChatBounds::from([("files", 1), ("token_ids", 2)]))
        {
            Ok(request) => {
                let is_raw = request.input.raw.is_some();
                let messages = request.input.messages.len();
                assert!(is_raw == (messages == 0) && messages <= MAX_MESSAGES);
                assert!(request.input.model.is_some() && !(is_raw && request.input.continues));
                assert!(
                    request.input.stop.len() <= MAX_STOPS
                        && request.input.stop.iter().all(|stop| !stop.is_empty())
                );
                let sampling = &request.input.sampling;
                let sampling = sampling.resolve(&SamplingParams::default(), 0);
                assert!((0.0..=2.0).contains(&sampling.temperature));
                assert!(sampling.top_p > 0.0 && sampling.top_p <= 1.0);
                assert!(sampling.repetition_penalty > 0.0 && sampling.repetition_penalty <= 2.0);
                assert!(
                    sampling.logit_bias.iter().all(|(_, bias)| (-100.0..=100.0).contains(bias))
                );
            }
            Err(ApiError::InvalidRequest { message, .. }) => {
                assert!(message.chars().count() <= LONGEST_REFUSAL);
            }
            Err(other) => panic!("{other:?}"),
        }
    });
}

const IDS: &[&[u8]] = &[
    b"",
    b"0197a0b1-c2d3-7e4f-8a5b-6c7d8e9f0a1b",
    b"\"0197A0B1-C2D3-7E4F-8A5B-6C7D8E9F0A1B\"",
    b"00000000-0000-0000-0000-000000000000",
    b"ffffffff-ffff-ffff-ffff-ffffffffffff",
    b"urn:uuid:0197a0b1-c2d3-7e4f-8a5b-6c7d8e9f0a1b",
];

/// The rule for ids, character by character.
fn names_a_request(value: &[u8]) -> bool {
    let quoted = value.len() >= 2 && value.starts_with(b"\"") && value.ends_with(b"\"");
    let id = if quoted { &value[1..value.len() - 1] } else { value };
    let hyphen = |place: usize| [8, 13, 18, 23].contains(&place);
    let formed = id
        .iter()
        .enumerate()
        .all(|(at, byte)| if hyphen(at) { *byte == b'-' } else { byte.is_ascii_hexdigit() });
    let only =
        |letter: u8| id.iter().all(|byte| *byte == b'-' || byte.eq_ignore_ascii_case(&letter));
    id.len() == 36 && formed && !only(b'0') && !only(b'f')
}

#[test]
fn ids() {
    bolero::check!().with_iterations(10_000).with_type().for_each(|mutation: &Mutation| {
        let value = mutated(IDS, mutation);
        let Ok(header) = HeaderValue::from_bytes(&value) else { return };
        let headers = HeaderMap::from_iter([(headers::IDEMPOTENCY_KEY.parse().unwrap(), header)]);
        assert_eq!(
            headers::idempotency_key(&headers).is_ok(),
            names_a_request(&value),
            "{:?}",
            value.escape_ascii()
        );
    });
}
