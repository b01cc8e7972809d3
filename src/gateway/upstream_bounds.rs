//! What a relay says where the node at its other end meets a bound. A gateway in a node has bounds
//! of its own, so that node never says this to it.

use super::client_keys::key_of;
use super::json_members::JsonMembers;
use super::{CHAT, IDEMPOTENCY_KEY, chat};
use bytes::Bytes;
use hyper::StatusCode;
use hyper::http::request::Parts;
use serde_json::Value;

/// Which setting of a node's own gateway has more room: words of the node's refusal, and its name.
const SETTINGS: [(&str, &str); 5] = [
    ("body is larger", "gateway.max_body_mib"),
    ("messages must have at most", "gateway.max_messages"),
    ("tools must have at most", "gateway.max_tools"),
    ("description must have at most", "gateway.max_description_kib"),
    ("parameters must have at most", "gateway.max_description_kib"),
];

/// Whether an answer may tell of a bound.
pub(super) fn may_tell(status: StatusCode) -> bool {
    [StatusCode::BAD_REQUEST, StatusCode::PAYLOAD_TOO_LARGE].contains(&status)
}

/// The node's refusal with where there is more room, if it is about such a bound.
pub(super) fn explained(body: &Bytes) -> Option<Bytes> {
    let mut answer: Value = serde_json::from_slice(body).ok()?;
    let message = answer["error"]["message"].as_str()?;
    let (_, setting) = SETTINGS.iter().find(|(words, _)| message.contains(words))?;
    let more = format!(
        "{message} This is a bound of the node that the relay asks; the gateway in that node \
         (gateway.listen) has its own, {setting}."
    );
    answer["error"]["message"] = more.into();
    Some(answer.to_string().into())
}

/// The same request with as many output tokens as the node's refusal says are left. It is another
/// one to the node, so it has a key of its own, the same for every retry.
pub(super) fn fitted(head: &Parts, body: &Bytes, refusal: &Bytes) -> Option<(Parts, Bytes)> {
    let answer: Value = serde_json::from_slice(refusal).ok()?;
    let is_long = answer["error"]["code"] == "context_length_exceeded";
    let message = answer["error"]["message"].as_str().filter(|_| is_long)?;
    let most = number_after(message, "context length is ")?;
    let prompt = number_after(message, "too long: ")?;
    let left = most.checked_sub(prompt).filter(|left| *left > 0)?;
    let mut request: JsonMembers = serde_json::from_slice(body).ok()?;
    if head.uri.path() != CHAT || !chat::lower_tokens(&mut request, left) {
        return None;
    }
    let mut head = head.clone();
    let key = head.headers.get(IDEMPOTENCY_KEY)?;
    let key = super::header(key_of(&[b"fitted", key.as_bytes()]));
    head.headers.insert(IDEMPOTENCY_KEY, key);
    Some((head, serde_json::to_vec(&request).ok()?.into()))
}

fn number_after(text: &str, words: &str) -> Option<u64> {
    let (_, rest) = text.split_once(words)?;
    let end = rest.find(|digit: char| !digit.is_ascii_digit()).unwrap_or(rest.len());
    rest[..end].parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use hyper::Request;
    use serde_json::json;

    #[test]
    fn a_relay_says_where_there_is_more_room() {
        for (message, setting) in [
            ("The body is larger than 262144 bytes.", Some("gateway.max_body_mib")),
            ("messages must have at most 64 items.", Some("gateway.max_messages")),
            ("tools must have at most 64 items.", Some("gateway.max_tools")),
            (
                "tools[2].function.description must have at most 4096 characters.",
                Some("gateway.max_description_kib"),
            ),
            ("stop must have at most 8 items.", None),
        ] {
            let refusal = json!({ "error": { "code": "c", "message": message } });
            let told = explained(&refusal.to_string().into());
            let told = told.map(|told| String::from_utf8_lossy(&told).into_owned());
            assert_eq!(told.is_some(), setting.is_some(), "{message}");
            let told = told.unwrap_or_default();
            assert!(told.contains(setting.unwrap_or_default()), "{told}");
            assert!(setting.is_none() || told.contains(message), "{told}");
        }
        assert!(explained(&"<html>".into()).is_none());
    }

    #[test]
    fn output_tokens_fit_behind_the_prompt() {
        let refusal = |prompt: u32| {
            let message = format!(
                "This model's maximum context length is 2048 tokens, but the prompt is too long: \
                 {prompt} prompt + 1500 requested output tokens = 1. Shorten the messages."
            );
            json!({ "error": { "code": "context_length_exceeded", "message": message } })
        };
        let (mut head, ()) = Request::post(CHAT).body(()).unwrap().into_parts();
        head.headers.insert(IDEMPOTENCY_KEY, crate::header(key_of(&[b"own"])));
        for (body, prompt, expect) in [
            (r#"{"max_tokens":1500,"a":1.50}"#, 1000, Some(r#"{"max_tokens":1048,"a":1.50}"#)),
            (r#"{"max_completion_tokens":1500}"#, 2047, Some(r#"{"max_completion_tokens":1}"#)),
            (r#"{"max_tokens":1500}"#, 2048, None),
            (r#"{"max_tokens":1500}"#, 9000, None),
            ("{}", 1000, None),
        ] {
            let refusal = refusal(prompt).to_string().into();
            let fitted = fitted(&head, &Bytes::from(body), &refusal);
            let again = super::fitted(&head, &Bytes::from(body), &refusal);
            let keys = [&fitted, &again]
                .map(|it| it.as_ref().map(|(head, _)| head.headers[IDEMPOTENCY_KEY].clone()));
            assert!(keys[0] == keys[1] && keys[0].as_ref() != head.headers.get(IDEMPOTENCY_KEY));
            assert_eq!(fitted.map(|(_, body)| body), expect.map(Bytes::from), "{body}");
        }
    }
}
