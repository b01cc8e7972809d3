//! Gives any conversation to chat templates: the result is a prompt that has every word of system
//! and user in it, or a refusal, never a panic.

use super::{ChatMessage, ChatTemplate, Error, TemplateLimits};
use serde_json::json;

const CHATML: &str = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}\
                      {% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";
const WITH_TOOLS: &str = "{{ bos_token }}{% for m in messages %}\
    {% if m.role == 'tool' %}[result {{ m.tool_call_id }} {{ m.content | tojson }}]\
    {% elif m.tool_calls %}{% for c in m.tool_calls %}[call {{ c.function.name }} {{ c.function.arguments }}]{% endfor %}\
    {% elif m.role == 'system' %}[{{ m.content | trim }}]\
    {% else %}{{ m.name }}: {{ m.content.strip() | upper if m.role == 'assistant' else m.content }}{% endif %}\
    {% endfor %}";
const ALTERNATING: &str = "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}\
    {{ raise_exception('roles must alternate') }}{% endif %}{{ m['content'] }}</s>{% endfor %}";

/// Role, text, name, and whether the turn has tool calls.
type Turn = (u8, String, Option<String>, bool);

fn message((role, text, name, tools): &Turn) -> ChatMessage {
    let role = ["system", "user", "assistant", "tool"][usize::from(*role) % 4];
    let call =
        json!([{ "id": "1", "type": "function", "function": { "name": text, "arguments": "{}" } }]);
    let calls = *tools && role == "assistant";
    ChatMessage {
        role: role.into(),
        content: (!calls).then(|| text.clone()),
        name: name.clone(),
        tool_call_id: (role == "tool").then(|| "1".into()),
        tool_calls: calls.then_some(call),
        reasoning_content: None,
    }
}

#[test]
fn conversations() {
    let templates = [CHATML, WITH_TOOLS, ALTERNATING]
        .map(|source| ChatTemplate::new(source, "<s>", "</s>", TemplateLimits::default()).unwrap());
    let templates = std::panic::AssertUnwindSafe(templates);
    bolero::check!().with_iterations(2_000).with_type().for_each(|turns: &Vec<Turn>| {
        let messages: Vec<ChatMessage> = turns.iter().map(message).collect();
        for template in templates.iter() {
            match template.render(&messages, true) {
                Ok(prompt) => {
                    let said =
                        messages.iter().filter(|m| ["system", "user"].contains(&m.role.as_str()));
                    assert!(
                        said.filter_map(|m| m.content.as_deref())
                            .all(|text| prompt.contains(text.trim()))
                    );
                }
                Err(error) => assert!(matches!(error, Error::TemplateRefused(_)), "{error}"),
            }
        }
    });
}
