//! Requests for chat completions as other services take them, translated to the node's own form.
//! What has no effect there is left out or mapped, and named in the answer; what would have one and
//! cannot be honoured is refused here with a way out, or by the node.

use super::json_members::{EMPTY, JsonMembers};
use super::left_out::LeftOut;
use super::{CONTINUES, PROMPT, thinking, tools};
use serde::de::IgnoredAny;
use serde_json::Value;
use serde_json::value::RawValue;

/// Members that clients send always, and that do not change the text: about caches, accounts and
/// logs of the service, about how a model is run, or about samplers that are off.
const HARMLESS: [&str; 39] = [
    "betas",
    "cache_control",
    "cache_prompt",
    "client_metadata",
    "context_management",
    "dry_allowed_length",
    "dry_base",
    "dry_penalty_last_n",
    "dry_sequence_breakers",
    "dynatemp_exponent",
    "id_slot",
    "include",
    "keep_alive",
    "metadata",
    "mirostat_eta",
    "mirostat_tau",
    "n_keep",
    "num_ctx",
    "post_sampling_probs",
    "priority",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "repeat_last_n",
    "repetition_penalty_range",
    "request_id",
    "return_progress",
    "return_tokens",
    "safety_identifier",
    "service_tier",
    "slot_id",
    "smoothing_curve",
    "timings_per_token",
    "truncation_length",
    "ttl",
    "usage",
    "user",
    "user_id",
    "xtc_threshold",
];
/// Values by which clients say that something is as it is here anyway.
const AS_IT_IS: [(&str, &str); 31] = [
    (BEGINS, "true"),
    ("ban_eos_token", "false"),
    ("best_of", "1"),
    (CONTINUES, "false"),
    ("detokenize", "true"),
    ("dry_multiplier", "0"),
    ("dynatemp_range", "0"),
    ("early_stopping", "false"),
    ("echo", "false"),
    ("include_stop_str_in_output", "false"),
    ("length_penalty", "1"),
    ("mirostat", "0"),
    ("mirostat_mode", "0"),
    ("n_probs", "0"),
    ("no_repeat_ngram_size", "0"),
    ("repeat_penalty", "1"),
    ("return_token_ids", "false"),
    ("return_token_strs", "false"),
    ("skip_special_tokens", "true"),
    ("smoothing_factor", "0"),
    ("spaces_between_special_tokens", "true"),
    ("store", "false"),
    ("tfs", "1"),
    ("tfs_z", "1"),
    ("top_a", "0"),
    ("top_logprobs", "0"),
    ("typical", "1"),
    ("typical_p", "1"),
    ("use_beam_search", "false"),
    ("verbosity", "\"medium\""),
    ("xtc_probability", "0"),
];
/// Names of the most output tokens.
const MOST_TOKENS: [&str; 2] = ["max_tokens", "max_completion_tokens"];
/// Members of messages, with the role that alone may have them.
const OF_MESSAGES: [(&str, &str); 8] = [
    ("role", ""),
    ("content", ""),
    ("name", ""),
    ("tool_calls", "assistant"),
    ("tool_call_id", "tool"),
    ("reasoning_content", "assistant"),
    ("reasoning", "assistant"),
    (PREFIX, "assistant"),
];
/// Whether a new answer begins, in vLLM's words.
const BEGINS: &str = "add_generation_prompt";
/// Marks the last message as one to go on with. In earlier ones it belongs to the past.
const PREFIX: &str = "prefix";
/// The longest name that the node takes.
const MAX_NAME: usize = 64;

/// Translates the members of a request; the error is a sentence for the client.
pub(super) fn translate(request: &mut JsonMembers, left_out: &mut LeftOut) -> Result<(), String> {
    continuation(request)?;
    // The node takes no zero here. Either value leaves the likeliest token alone.
    if request.read::<f64>("top_p") == Some(0.0) {
        request.set("top_p", &1e-6);
    }
    request.retain("", left_out, |name, value| {
        let as_it_is = AS_IT_IS.iter().any(|(own, usual)| *own == name && is_equal(value, usual));
        // A negative number asks for as many as there is room for.
        let unbounded = MOST_TOKENS.contains(&name) && value.get().starts_with('-');
        let is_empty = !is_known_to_node(name) && EMPTY.contains(&value.get());
        !(HARMLESS.contains(&name) || as_it_is || unbounded || is_empty)
    });
    tools::translate(request, left_out)?;
    let mut behind = request.read::<Vec<IgnoredAny>>("messages").unwrap_or_default().len();
    request.change_each("messages", |message| {
        behind = behind.saturating_sub(1);
        self::message(message, behind == 0, left_out);
    });
    Ok(())
}

/// Clients that want the last message to be continued say also that no answer begins.
fn continuation(request: &mut JsonMembers) -> Result<(), String> {
    let continues = request.read(CONTINUES) == Some(true);
    match request.read(BEGINS) {
        Some(true) if continues => Err(format!(
            "{CONTINUES} and {BEGINS} cannot both be true: the first goes on with the last \
             message, the second begins another."
        )),
        Some(false) if continues => {
            request.0.retain(|(name, _)| name != BEGINS);
            Ok(())
        }
        Some(false) => Err(format!("{BEGINS} can only be false with {CONTINUES}: true.")),
        _ => Ok(()),
    }
}

/// Empty values of these say something, or are refused.
fn is_known_to_node(name: &str) -> bool {
    ["messages", "model", "stop", "tools", PROMPT, thinking::EFFORT].contains(&name)
}

/// Whether a value is the usual one, however its number is written.
fn is_equal(value: &RawValue, usual: &str) -> bool {
    let number = |text: &str| text.parse::<f64>().ok();
    let same_number = number(value.get()).zip(number(usual)).is_some_and(|(a, b)| a == b);
    value.get() == usual || same_number
}

/// Lowers the most output tokens to `most`; whether they were above it.
pub(super) fn lower_tokens(request: &mut JsonMembers, most: u64) -> bool {
    let is_above = |name: &&str| request.read::<u64>(name).is_some_and(|asked| asked > most);
    let above: Vec<&str> = MOST_TOKENS.into_iter().filter(is_above).collect();
    for name in &above {
        request.set(name, &most);
    }
    !above.is_empty()
}

fn message(message: &mut JsonMembers, is_last: bool, left_out: &mut LeftOut) {
    const PLACE: &str = "messages[]";
    let role = message.text("role").unwrap_or_default();
    if role == "developer" {
        message.set("role", "system");
    }
    let thought = message.text("reasoning_content").is_some_and(|thought| !thought.is_empty());
    message.retain(PLACE, left_out, |name, value| {
        let known = OF_MESSAGES.iter().find(|(own, _)| *own == name);
        let is_taken = known.is_some_and(|(_, owner)| owner.is_empty() || *owner == role);
        let is_name = || {
            serde_json::from_str(value.get())
                .is_ok_and(|name: String| name.chars().count() <= MAX_NAME)
        };
        let says = name == "content" || !EMPTY.contains(&value.get());
        // Both names of a thought may come, with two texts.
        let is_second = name == "reasoning" && thought;
        let is_past = name == PREFIX && (!is_last || value.get() == "false");
        is_taken && says && !is_second && !is_past && (name != "name" || is_name())
    });
    message.change_each("tool_calls", |call| {
        let place = "messages[].tool_calls[]";
        call.retain(place, left_out, |name, _| ["id", "type", "function"].contains(&name));
        if !call.0.iter().any(|(name, _)| name == "type") {
            call.add("type", "function");
        }
        let Some(mut function) = call.read::<JsonMembers>("function") else { return };
        let place = "messages[].tool_calls[].function";
        function.retain(place, left_out, |name, _| ["name", "arguments"].contains(&name));
        // Some clients keep the arguments as the object that their text is.
        if let Some(arguments) = function.read::<Box<RawValue>>("arguments")
            && arguments.get().starts_with('{')
        {
            function.set("arguments", arguments.get());
        }
        call.set("function", &function);
    });
    message.change_each("content", |part| {
        let is_text = part.text("type").is_some_and(|kind| kind == "text");
        let stays = |name: &str| !is_text || ["type", "text"].contains(&name);
        part.retain("messages[].content[]", left_out, |name, _| stays(name));
    });
    complete_content(message);
}

/// A message without a text and without calls is an empty one.
fn complete_content(message: &mut JsonMembers) {
    let calls: Vec<Value> = message.read("tool_calls").unwrap_or_default();
    let content: Value = message.read("content").unwrap_or_default();
    if calls.is_empty() && content.is_null() {
        message.0.retain(|(name, _)| name != "content");
        message.add("content", "");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn translated(request: &str) -> Result<(String, String), String> {
        let mut members = serde_json::from_str(request).unwrap();
        let mut left_out = LeftOut::default();
        translate(&mut members, &mut left_out)?;
        let text = serde_json::to_string(&members).unwrap();
        Ok((text, left_out.shown().unwrap_or_default()))
    }

    #[test]
    fn what_has_no_effect_is_left_out_and_named() {
        let kept = r#"{"seed":1.50,"seed":2,"messages":[{"role":"user","content":"\u0041"}]}"#;
        let reasoned = r#"{"messages":[{"role":"assistant","content":"","reasoning":"x"}]}"#;
        let tool = r#"{"type":"function","function":{"name":"f","parameters":{"x":1.50}}}"#;
        let tools = format!(r#"{{"tools":[{tool}]}}"#);
        for (request, expect, named) in [
            (kept, kept, ""),
            (reasoned, reasoned, ""),
            (r#"{"messages":"none"}"#, r#"{"messages":"none"}"#, ""),
            (
                r#"{"unknown":1,"n":2,"best_of":2,"top_p":0.5}"#,
                r#"{"unknown":1,"n":2,"best_of":2,"top_p":0.5}"#,
                "",
            ),
            (r#"{"store":true,"typical_p":0.9}"#, r#"{"store":true,"typical_p":0.9}"#, ""),
            (
                r#"{"messages":[{"role":"developer","content":"x"}]}"#,
                r#"{"messages":[{"role":"system","content":"x"}]}"#,
                "",
            ),
            (
                r#"{"messages":[{"role":"assistant","refusal":null,"annotations":[],"content":"x"}]}"#,
                r#"{"messages":[{"role":"assistant","content":"x"}]}"#,
                "",
            ),
            (
                r#"{"messages":[{"role":"user","content":"a","timestamp":1,"id":"m"},{"role":"assistant","content":null,"reasoning_details":[1]},{"role":"assistant"}]}"#,
                r#"{"messages":[{"role":"user","content":"a"},{"role":"assistant","content":""},{"role":"assistant","content":""}]}"#,
                "messages[].timestamp, messages[].id, messages[].reasoning_details",
            ),
            (
                r#"{"messages":[{"role":"assistant","content":null,"tool_calls":[{"index":0,"id":"c","function":{"name":"f","arguments":{"a":1.0}}}]},{"role":"tool","tool_call_id":"c","content":"r","tool_calls":[1]}]}"#,
                r#"{"messages":[{"role":"assistant","content":null,"tool_calls":[{"id":"c","function":{"name":"f","arguments":"{\"a\":1.0}"},"type":"function"}]},{"role":"tool","tool_call_id":"c","content":"r"}]}"#,
                "messages[].tool_calls[].index, messages[].tool_calls",
            ),
            (
                r#"{"messages":[{"role":"user","name":7,"content":[{"type":"text","text":"a","cache_control":{"type":"ephemeral"}}]}]}"#,
                r#"{"messages":[{"role":"user","content":[{"type":"text","text":"a"}]}]}"#,
                "messages[].name, messages[].content[].cache_control",
            ),
            (
                r#"{"prompt_cache_key":"k","user":"u","metadata":{"a":1},"service_tier":"flex","stream":true}"#,
                r#"{"stream":true}"#,
                "prompt_cache_key, user, metadata, service_tier",
            ),
            (
                r#"{"best_of":1,"echo":false,"add_generation_prompt":true,"skip_special_tokens":true,"typical_p":1.0,"store":false,"stop_token_ids":[]}"#,
                "{}",
                "best_of, echo, add_generation_prompt, skip_special_tokens, typical_p, store",
            ),
            (r#"{"max_tokens":-1,"top_p":0}"#, r#"{"top_p":1e-6}"#, "max_tokens"),
            (
                &format!(
                    r#"{{"tools":[{},{{"type":"web_search"}}],"tool_choice":"auto"}}"#,
                    tool.replace("\"type\"", "\"cache_control\":{\"a\":1},\"type\"")
                ),
                &format!(r#"{{"tools":[{tool}],"tool_choice":"auto"}}"#),
                "tools[].web_search, tools[].cache_control",
            ),
            (&tools, &tools, ""),
            (
                r#"{"tools":[{"type":"custom","custom":{"name":"x"}}]}"#,
                r#"{"tools":[]}"#,
                "tools[].custom",
            ),
        ] {
            let expect = Ok((expect.to_owned(), named.to_owned()));
            assert_eq!(translated(request), expect, "{request}");
        }
    }

    #[test]
    fn the_last_message_is_continued_where_a_client_says_so() {
        let (user, begun) = (
            r#"{"role":"user","content":"a"}"#,
            r#"{"role":"assistant","content":"b","prefix":true}"#,
        );
        let plain = begun.replace(r#","prefix":true"#, "");
        let continued = format!(r#"{{"messages":[{user},{plain}],"continue_final_message":true"#);
        for (request, expect, named) in [
            (format!("{continued}}}"), format!("{continued}}}"), ""),
            (
                format!(r#"{continued},"add_generation_prompt":false}}"#),
                format!("{continued}}}"),
                "",
            ),
            (
                format!(r#"{{"messages":[{user},{begun}]}}"#),
                format!(r#"{{"messages":[{user},{begun}]}}"#),
                "",
            ),
            (
                format!(r#"{{"messages":[{user},{begun},{user}]}}"#),
                format!(r#"{{"messages":[{user},{plain},{user}]}}"#),
                "messages[].prefix",
            ),
            (
                r#"{"continue_final_message":false,"add_generation_prompt":true}"#.into(),
                "{}".into(),
                "continue_final_message, add_generation_prompt",
            ),
        ] {
            assert_eq!(translated(&request), Ok((expect, named.to_owned())), "{request}");
        }
        for (request, why) in [
            (format!(r#"{continued},"add_generation_prompt":true}}"#), "cannot both be true"),
            (r#"{"add_generation_prompt":false}"#.into(), "only be false with"),
        ] {
            assert!(translated(&request).is_err_and(|found| found.contains(why)), "{request}");
        }
    }

    #[test]
    fn a_tool_that_must_be_called_is_not_left_out() {
        for choice in [
            r#""required""#,
            r#"{"type":"web_search"}"#,
            r#"{"type":"custom","custom":{"name":"x"}}"#,
        ] {
            let tools = r#"[{"type":"web_search"},{"type":"custom","custom":{"name":"x"}}]"#;
            let refused = translated(&format!(r#"{{"tools":{tools},"tool_choice":{choice}}}"#));
            assert!(refused.is_err_and(|why| why.contains("turn them off")), "{choice}");
        }
    }

    #[test]
    fn output_tokens_are_lowered_to_the_models() {
        for (asked, expect) in [
            (
                r#"{"max_tokens":32000,"max_completion_tokens":9}"#,
                r#"{"max_tokens":2048,"max_completion_tokens":9}"#,
            ),
            (r#"{"max_tokens":99999999999}"#, r#"{"max_tokens":2048}"#),
            (r#"{"max_tokens":0}"#, r#"{"max_tokens":0}"#),
            (r#"{"max_tokens":"many"}"#, r#"{"max_tokens":"many"}"#),
        ] {
            let mut request = serde_json::from_str(asked).unwrap();
            lower_tokens(&mut request, 2048);
            assert_eq!(serde_json::to_string(&request).unwrap(), expect);
        }
    }
}
