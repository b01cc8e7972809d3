//! Clients send back conversations in which an assistant called tools.

use super::support::World;
use serde_json::{Value, json};
use uuid::Uuid;

/// A template that prints the arguments of a call in its own way, and the result under its id.
const TEMPLATE: &str = "{% for m in messages %}<|im_start|>{{ m.role }}\n\
    {% for call in m.tool_calls or [] %}{{ call.function.name }}({% for name, value in call.function.arguments.items() %}\
    {{ name }}={{ value }};{% endfor %}){% endfor %}{% if m.tool_call_id %}{{ m.tool_call_id }}: {% endif %}\
    {{ m.content or '' }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

/// A conversation with a question, two calls and their results.
fn conversation(arguments: &str) -> Value {
    let call = |id: &str, arguments: &str| json!({ "id": id, "type": "function", "function": { "name": "weather", "arguments": arguments } });
    let calls = [call("a", arguments), call("b", r#"{"city":"Rome","days":3}"#)];
    json!([
        { "role": "user", "content": "hello" },
        { "role": "assistant", "content": null, "tool_calls": calls },
        { "role": "tool", "tool_call_id": "a", "content": "rain" },
        { "role": "tool", "tool_call_id": "b", "content": [{ "type": "text", "text": "sun" }] },
    ])
}

#[tokio::test(flavor = "multi_thread")]
async fn calls_and_results_reach_the_model_as_its_template_writes_them() {
    let world = World::with(|setup| setup.template = Some(TEMPLATE)).await;
    let prompt = "<|im_start|>user\nhello<|im_end|>\n\
                  <|im_start|>assistant\nweather(city=Oslo;)weather(city=Rome;days=3;)<|im_end|>\n\
                  <|im_start|>tool\na: rain<|im_end|>\n<|im_start|>tool\nb: sun<|im_end|>\n<|im_start|>assistant\n";
    let tokens = world.node.pool.models()[0].text.tokenizer.encode(prompt, true).unwrap();
    for stream in [false, true] {
        let messages = conversation(r#"{"city":"Oslo"}"#);
        let body = world.ask(json!({ "messages": messages, "stream": stream }));
        let id = Uuid::new_v4();
        let (answer, again) = (world.post(id, &body).await, world.post(id, &body).await);
        assert_eq!(
            (answer.status, again.header("idempotent-replayed")),
            (200, "true"),
            "{}",
            answer.text()
        );
        let request = world.request(id).await;
        assert_eq!(
            (&request["state"], &request["usage"]["prompt_tokens"]),
            (&json!("completed"), &json!(tokens.len()))
        );
    }
    world.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn conversations_a_template_cannot_render_are_refused_and_reserve_nothing() {
    let world = World::with(|setup| setup.template = Some(TEMPLATE)).await;
    let plain = World::new().await;
    for (world, arguments) in
        [(&world, "no object"), (&world, "[1]"), (&plain, r#"{"city":"Oslo"}"#)]
    {
        let id = Uuid::new_v4();
        let answer =
            world.post(id, &world.ask(json!({ "messages": conversation(arguments) }))).await;
        assert_eq!(answer.error(), (400, "invalid_request".into()), "{arguments}");
        assert_eq!(answer.json()["error"]["param"], "messages");
        assert_eq!(world.request(id).await["error"]["code"], "request_not_found");
        assert_eq!(world.balances().await, [1_000_000, 1_000_000, 0]);
    }
    world.close().await;
    plain.close().await;
}
