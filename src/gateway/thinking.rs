//! How much a model thinks, in the spellings of all clients. A model that thinks is told in the
//! node's words; for any other one such members are left out.

use super::json_members::{EMPTY, JsonMembers};
use super::left_out::LeftOut;
use serde_json::Value;

/// The node's own switch.
pub(super) const EFFORT: &str = "reasoning_effort";
/// Variables of the model's template.
const VARIABLES: &str = "chat_template_kwargs";
/// Other spellings of the switch: as a member, and as a variable of a template.
const SWITCHES: [&str; 4] = ["reasoning", "thinking", "enable_thinking", "think"];
/// Limits of a thought, and in which form it is told. Answers do not depend on them here.
const WITHOUT_EFFECT: [&str; 9] = [
    "thinking_budget",
    "thinking_budget_tokens",
    "thinking_token_budget",
    "reasoning_budget",
    "max_thinking_tokens",
    "include_reasoning",
    "separate_reasoning",
    "parse_reasoning",
    "reasoning_format",
];
/// What models thought before, in messages.
const THOUGHTS: [&str; 2] = ["reasoning_content", "reasoning"];

/// Whether a request has to do with thinking.
pub(super) fn is_asked(request: &JsonMembers) -> bool {
    let asks = |name: &str| name == EFFORT || name == VARIABLES || SWITCHES.contains(&name);
    request.0.iter().any(|(name, _)| asks(name))
}

/// Puts what a request says of thinking into the node's words, if its model `thinks`. `called` is
/// what the client calls the effort.
pub(super) fn settle(
    request: &mut JsonMembers,
    thinks: bool,
    called: &str,
    left_out: &mut LeftOut,
) {
    request.leave_out(&WITHOUT_EFFECT, left_out);
    let effort = take_effort(request, left_out);
    if !thinks {
        request.leave_out(&[VARIABLES], left_out);
        request.change_each("messages", |message| {
            message.retain("messages[]", left_out, |name, _| !THOUGHTS.contains(&name));
        });
    }
    match effort.as_deref() {
        None => {}
        // One that never thinks does as it is told, and a plan may hide that a model thinks.
        Some(effort) if thinks || effort == "none" => request.add(EFFORT, &effort),
        Some(_) => left_out.add(called),
    }
}

/// Takes every spelling out. The node's own counts first.
fn take_effort(request: &mut JsonMembers, left_out: &mut LeftOut) -> Option<String> {
    let mut words: Vec<String> = request.read(EFFORT).as_ref().and_then(word).into_iter().collect();
    words.extend(SWITCHES.iter().filter_map(|name| word(&request.read(name)?)));
    let budgets = ["reasoning", "thinking"].into_iter().filter(|name| {
        let switch: Value = request.read(name).unwrap_or_default();
        !switch["max_tokens"].is_null() || !switch["budget_tokens"].is_null()
    });
    budgets.for_each(|name| left_out.add_member(name, "budget"));
    if let Some(mut variables) = request.read::<JsonMembers>(VARIABLES) {
        words.extend(SWITCHES.iter().filter_map(|name| word(&variables.read(name)?)));
        variables.0.retain(|(name, _)| !SWITCHES.contains(&name.as_str()));
        request.set(VARIABLES, &variables);
    }
    request.0.retain(|(name, value)| {
        let is_switch = name == EFFORT || SWITCHES.contains(&name.as_str());
        let is_empty = name == VARIABLES && EMPTY.contains(&value.get());
        !is_switch && !is_empty
    });
    words.into_iter().next()
}

/// The node's word for a switch. `None` where it leaves the choice to the model.
fn word(switch: &Value) -> Option<String> {
    let word = match switch {
        Value::Bool(true) => "high",
        Value::Bool(false) => "none",
        Value::String(word) => word,
        Value::Object(members) => {
            let nested = ["effort", "type", "enabled"].iter().find_map(|name| members.get(*name));
            return word(nested.filter(|value| !value.is_object())?);
        }
        _ => return None,
    };
    let own = match word {
        "" | "auto" | "default" | "adaptive" => return None,
        "enabled" => "high",
        "disabled" => "none",
        "max" => "xhigh",
        word => word,
    };
    Some(own.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn every_spelling_reaches_models_that_think_and_no_others() {
        let (high, low, off) = (Some("high"), Some("low"), Some("none"));
        for (asked, effort, left_out) in [
            (json!({ "reasoning_effort": "low" }), low, "thinking"),
            (json!({ "reasoning_effort": "none" }), off, ""),
            (json!({ "reasoning_effort": null }), None, ""),
            (json!({ "reasoning_effort": "max" }), Some("xhigh"), "thinking"),
            (json!({ "reasoning_effort": "low", "think": true }), low, "thinking"),
            (json!({ "reasoning": { "effort": "low" } }), low, "thinking"),
            (json!({ "reasoning": { "enabled": false } }), off, ""),
            (json!({ "thinking": { "type": "disabled" } }), off, ""),
            (json!({ "thinking": { "type": "adaptive" } }), None, ""),
            (json!({ "enable_thinking": true }), high, "thinking"),
            (json!({ "chat_template_kwargs": { "enable_thinking": false } }), off, ""),
            (json!({ "chat_template_kwargs": {} }), None, ""),
            (json!({ "chat_template_kwargs": { "thinking": true } }), high, "thinking"),
            (json!({ "thinking_budget": 5 }), None, "thinking_budget"),
            (
                json!({ "thinking": { "type": "enabled", "budget_tokens": 9 } }),
                high,
                "thinking.budget, thinking",
            ),
        ] {
            for thinks in [true, false] {
                let (request, told) = settled(&asked, thinks);
                let expect = effort.filter(|effort| thinks || *effort == "none");
                let expect =
                    expect.map_or(json!({}), |effort| json!({ "reasoning_effort": effort }));
                assert_eq!(request, expect, "{asked} {thinks}");
                assert!(thinks || told == left_out, "{asked}: {told}");
            }
        }
    }

    #[test]
    fn only_models_that_think_are_told_of_thoughts() {
        for (asked, other, left_out) in [
            (json!({ "chat_template_kwargs": { "x": 1 } }), json!({}), "chat_template_kwargs"),
            (
                json!({ "messages": [{ "content": "a", "reasoning": "b" }] }),
                json!({ "messages": [{ "content": "a" }] }),
                "messages[].reasoning",
            ),
        ] {
            assert_eq!(settled(&asked, true), (asked.clone(), String::new()));
            assert_eq!(settled(&asked, false), (other, left_out.to_owned()));
        }
    }

    /// The request as it goes on, and what was left out.
    fn settled(asked: &Value, thinks: bool) -> (Value, String) {
        let mut request = serde_json::from_str(&asked.to_string()).unwrap();
        let mut left_out = LeftOut::default();
        settle(&mut request, thinks, "thinking", &mut left_out);
        (serde_json::to_value(&request).unwrap(), left_out.shown().unwrap_or_default())
    }
}
