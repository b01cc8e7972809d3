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
    let mut words: Vec<String> = request.read::<Value>(EFFORT).and_then(word).into_iter().collect();
    words.extend(SWITCHES.iter().filter_map(|name| word(request.read(name)?)));
    let budgets = ["reasoning", "thinking"].into_iter().filter(|name| {
        let switch: Value = request.read(name).unwrap_or_default();
        !switch["max_tokens"].is_null() || !switch["budget_tokens"].is_null()
    });
    budgets.for_each(|name| left_out.add_member(name, "budget"));
    if let Some(mut variables) = request.read::<JsonMembers>(VARIABLES) {
        words.extend(SWITCHES.iter().filter_map(|name| word(variables.read(name)?)));
        variables.0.retain(|(name, _)| !SWITCHES.contains(&name.as_str()));
        request.set(VARIABLES, &variables);
    }
    request.0.retain(|(name, value)| {
        let is_switch = name == EFFORT || SWITCHES.contains(&name.as_str());
        !is_switch && !(name == VARIABLES && EMPTY.contains(&value.get()))
    });
    words.into_iter().next()
}

/// The node's word for a switch. `None` where it leaves the choice to the model.
fn word(switch: Value) -> Option<String> {
    let word = match &switch {
        Value::Bool(true) => "high",
        Value::Bool(false) => "none",
        Value::String(word) => word,
        Value::Object(members) => {
            let nested = ["effort", "type", "enabled"].iter().find_map(|name| members.get(*name));
            return word(nested.filter(|value| !value.is_object())?.clone());
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
        for (asked, thinking, other, left_out) in [
            (
                json!({ "reasoning_effort": "low" }),
                json!({ "reasoning_effort": "low" }),
                json!({}),
                Some("thinking"),
            ),
            (
                json!({ "reasoning_effort": "none" }),
                json!({ "reasoning_effort": "none" }),
                json!({ "reasoning_effort": "none" }),
                None,
            ),
            (json!({ "reasoning_effort": null }), json!({}), json!({}), None),
            (
                json!({ "reasoning_effort": "max" }),
                json!({ "reasoning_effort": "xhigh" }),
                json!({}),
                Some("thinking"),
            ),
            (
                json!({ "reasoning": { "effort": "low" } }),
                json!({ "reasoning_effort": "low" }),
                json!({}),
                Some("thinking"),
            ),
            (
                json!({ "thinking": { "type": "disabled" } }),
                json!({ "reasoning_effort": "none" }),
                json!({ "reasoning_effort": "none" }),
                None,
            ),
            (json!({ "thinking": { "type": "adaptive" } }), json!({}), json!({}), None),
            (
                json!({ "enable_thinking": true }),
                json!({ "reasoning_effort": "high" }),
                json!({}),
                Some("thinking"),
            ),
            (
                json!({ "chat_template_kwargs": { "enable_thinking": false } }),
                json!({ "reasoning_effort": "none" }),
                json!({ "reasoning_effort": "none" }),
                None,
            ),
            (
                json!({ "chat_template_kwargs": { "thinking": true, "x": 1 } }),
                json!({ "chat_template_kwargs": { "x": 1 }, "reasoning_effort": "high" }),
                json!({}),
                Some("chat_template_kwargs, thinking"),
            ),
            (json!({ "chat_template_kwargs": {} }), json!({}), json!({}), None),
            (
                json!({ "thinking_budget": 5, "seed": 1 }),
                json!({ "seed": 1 }),
                json!({ "seed": 1 }),
                Some("thinking_budget"),
            ),
            (
                json!({ "thinking": { "type": "enabled", "budget_tokens": 9 } }),
                json!({ "reasoning_effort": "high" }),
                json!({}),
                Some("thinking.budget, thinking"),
            ),
            (
                json!({ "messages": [{ "content": "a", "reasoning": "b" }] }),
                json!({ "messages": [{ "content": "a", "reasoning": "b" }] }),
                json!({ "messages": [{ "content": "a" }] }),
                Some("messages[].reasoning"),
            ),
        ] {
            let mut told = None;
            for (thinks, expect) in [(true, thinking), (false, other)] {
                let mut request = serde_json::from_str(&asked.to_string()).unwrap();
                let mut left_out = LeftOut::default();
                settle(&mut request, thinks, "thinking", &mut left_out);
                assert_eq!(serde_json::to_value(&request).unwrap(), expect, "{asked} {thinks}");
                told = left_out.shown();
            }
            assert_eq!(told.as_deref(), left_out, "{asked}");
        }
    }
}
