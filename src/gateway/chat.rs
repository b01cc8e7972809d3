//! Requests for chat completions as other services take them, translated to the node's own form.
//! What has no effect there is left out or mapped; what would have one and cannot be honoured is
//! refused here with a way out, or by the node.

use super::json_members::{JsonMembers, raw};
use serde_json::value::RawValue;

/// Names a cache, which the node's clients may not choose. Some clients send it always.
const CACHE_KEY: &str = "prompt_cache_key";
/// Members of earlier answers that clients send back. They are left out where they say nothing.
const OF_ANSWERS: [&str; 6] =
    ["annotations", "audio", "function_call", "reasoning", "reasoning_content", "refusal"];
/// Values that say nothing.
const EMPTY: [&str; 4] = ["null", "[]", "{}", "\"\""];
/// Values that ask a model not to think. Those that can be served do not.
const WITHOUT_THOUGHT: [&str; 3] =
    ["\"none\"", "{\"enable_thinking\":false}", "{\"thinking\":false}"];
/// Members that switch how a model thinks, and what the client has to turn off.
const THINKING: [(&str, &str); 2] =
    [("reasoning_effort", "reasoning effort"), ("chat_template_kwargs", "template arguments")];

/// Translates the members of a request; the error is a sentence for the client.
pub(super) fn translate(request: &mut JsonMembers) -> Result<(), String> {
    for (name, what) in THINKING {
        let given = request.0.iter().find(|(own, _)| own == name);
        let says_nothing = |value: &RawValue| {
            let value: String = value.get().split_whitespace().collect();
            EMPTY.contains(&value.as_str()) || WITHOUT_THOUGHT.contains(&value.as_str())
        };
        if given.is_some_and(|(_, value)| !says_nothing(value)) {
            return Err(format!("{name} is not supported: turn {what} off in the client."));
        }
    }
    let dropped =
        |name: &str| name == CACHE_KEY || THINKING.iter().any(|(thinking, _)| *thinking == name);
    request.0.retain(|(name, _)| !dropped(name));
    for (_, messages) in request.0.iter_mut().filter(|(name, _)| name == "messages") {
        // Whatever is no list of messages is refused by the node.
        if let Ok(mut all) = serde_json::from_str::<Vec<JsonMembers>>(messages.get()) {
            all.iter_mut().for_each(message);
            *messages = raw(&all);
        }
    }
    Ok(())
}

fn message(message: &mut JsonMembers) {
    let says_nothing =
        |name: &str, value: &RawValue| OF_ANSWERS.contains(&name) && EMPTY.contains(&value.get());
    message.0.retain(|(name, value)| !says_nothing(name, value));
    if message.text("role").as_deref() == Some("developer") {
        message.set("role", "system");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn translated(request: &str) -> Result<String, String> {
        let mut members = serde_json::from_str(request).unwrap();
        translate(&mut members).map(|()| serde_json::to_string(&members).unwrap())
    }

    #[test]
    fn only_what_says_nothing_changes() {
        let check = |request: &str, expect: &str| {
            assert_eq!(translated(request).as_deref(), Ok(expect), "{request}");
        };
        let kept = r#"{"seed":1.50,"seed":2,"messages":[{"role":"user","content":"\u0041"}]}"#;
        check(kept, kept);
        check(
            r#"{"messages":[{"role":"developer","content":"x"}]}"#,
            r#"{"messages":[{"role":"system","content":"x"}]}"#,
        );
        check(
            r#"{"messages":[{"role":"assistant","refusal":null,"annotations":[],"content":"x"}]}"#,
            r#"{"messages":[{"role":"assistant","content":"x"}]}"#,
        );
        check(r#"{"prompt_cache_key":"k","stream":true}"#, r#"{"stream":true}"#);
        check(r#"{"reasoning_effort":null,"chat_template_kwargs":{}}"#, "{}");
        check(r#"{"reasoning_effort":"none"}"#, "{}");
        check(r#"{"chat_template_kwargs":{"enable_thinking": false}}"#, "{}");
        let reasoned = r#"{"messages":[{"role":"assistant","reasoning":"x"}]}"#;
        check(reasoned, reasoned);
        check(r#"{"messages":"none"}"#, r#"{"messages":"none"}"#);
    }

    #[test]
    fn what_would_change_the_answer_is_refused() {
        for request in [
            r#"{"reasoning_effort":"high"}"#,
            r#"{"reasoning_effort":"minimal"}"#,
            r#"{"chat_template_kwargs":{"enable_thinking":true}}"#,
            r#"{"chat_template_kwargs":{"enable_thinking":false,"x":1}}"#,
        ] {
            assert!(translated(request).is_err_and(|why| why.contains("turn")), "{request}");
        }
    }
}
