//! The JSON Schema of a completion request's body. `ChatRequest` reads bodies; that both agree is
//! tested here value by value, and by a property-based client over HTTP.
//!
//! `null` means absent, under any name: every optional member may be null, and so may unknown
//! members.

#![expect(dead_code, reason = "of these types only the schemas are used")]

use super::answer_format;
use super::chat_request as body;
use super::messages;
use super::tools;
use cresset_engine::{NumberField, SAMPLING_NUMBERS, SamplingNumber};
use schemars::JsonSchema;
use schemars::transform::RecursiveTransform;
use schemars::{Schema, json_schema};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use uuid::Uuid;

/// The only form of a UUID that is read.
pub const UUID: &str = "^[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$";

/// The change that the generator of request schemas makes to each object.
pub fn unknown_members_are_null() -> RecursiveTransform<fn(&mut Schema)> {
    RecursiveTransform(|schema| {
        if schema.get("type").is_some() && schema.get("properties").is_some() {
            schema.insert("additionalProperties".into(), json!({ "type": "null" }));
        }
    })
}

/// The body of a completion request. `null` means absent. Everything that is not named here is
/// refused. Whole numbers are written without fraction or exponent.
#[derive(JsonSchema)]
#[schemars(rename = "ChatCompletionRequest")]
#[schemars(extend(
    "if" = { "required": ["top_logprobs"], "properties": { "top_logprobs": { "type": "integer" } } },
    "then" = { "required": ["logprobs"], "properties": { "logprobs": { "const": true } } },
))]
pub struct CompletionBody {
    /// Id of a model, as `GET /v1/models` lists it.
    #[schemars(regex(pattern = UUID))]
    model: Uuid,
    #[schemars(length(min = 1, max = messages::MAX_MESSAGES))]
    messages: Vec<MessageSchema>,
    /// Answer with server-sent events instead of one object.
    stream: Option<bool>,
    stream_options: Option<StreamOptions>,
    /// One answer is made.
    #[schemars(range(min = 1, max = 1))]
    n: Option<u32>,
    /// Output tokens at most, within the model's `max_output_tokens`. Absent: 512, or as many as
    /// the context has room for.
    #[schemars(range(min = 1, max = body::MAX_COUNT))]
    max_tokens: Option<u32>,
    /// Another name for `max_tokens`. Both given must agree.
    #[schemars(range(min = 1, max = body::MAX_COUNT))]
    max_completion_tokens: Option<u32>,
    /// Output tokens before the answer may end; not above `max_tokens`.
    #[schemars(range(max = body::MAX_COUNT))]
    min_tokens: Option<u32>,
    /// Goes on after an end-of-text token.
    ignore_eos: Option<bool>,
    /// The answer ends before the first of these texts.
    stop: Option<Stop>,
    #[schemars(flatten)]
    sampling: SamplingSchema,
    /// The same input with the same seed gives the same answer.
    #[schemars(range(min = i64::MIN, max = i64::MAX))]
    seed: Option<i64>,
    /// Additions to the logits of tokens, by token id.
    #[schemars(extend(
        "maxProperties" = body::MAX_LOGIT_BIASES,
        "propertyNames" = { "pattern": "^(0|[1-9][0-9]{0,9})$" },
        "additionalProperties" = { "type": "number", "minimum": -100, "maximum": 100 },
    ))]
    logit_bias: Option<BTreeMap<String, f64>>,
    logprobs: Option<bool>,
    /// Needs `logprobs: true`.
    #[schemars(range(min = 0, max = 20))]
    top_logprobs: Option<u8>,
    /// Has no effect.
    #[schemars(length(max = body::MAX_LABEL))]
    user: Option<String>,
    /// Has no effect.
    #[schemars(length(max = body::MAX_LABEL))]
    safety_identifier: Option<String>,
    /// Has no effect.
    #[schemars(extend(
        "maxProperties" = body::MAX_METADATA,
        "propertyNames" = { "maxLength": body::MAX_METADATA_KEY },
        "additionalProperties" = { "type": "string", "maxLength": body::MAX_LABEL },
    ))]
    metadata: Option<BTreeMap<String, String>>,
    /// Whether one answer may call several tools. Absent: true. Without tools it has no effect.
    parallel_tool_calls: Option<bool>,
    /// Has no effect.
    #[schemars(extend("enum" = [false, null]))]
    store: Option<bool>,
    /// Has no effect.
    #[schemars(extend("enum" = ["auto", null]))]
    service_tier: Option<String>,
    /// Without tools `none` and `auto` alone are taken, and have no effect.
    tool_choice: Option<ToolChoiceSchema>,
    /// Functions that the model may call. A model without the capability `tools` refuses them; an
    /// empty list has no effect.
    #[schemars(length(max = tools::MAX_TOOLS))]
    tools: Option<Vec<ToolSchema>>,
    /// Variables of the model's chat template, such as `enable_thinking`. One that the template
    /// does not read is refused.
    #[schemars(extend(
        "maxProperties" = body::MAX_VARIABLES,
        "propertyNames" = { "pattern": "^[A-Za-z0-9_]{0,64}$" },
        "additionalProperties" = { "type": ["boolean", "integer", "string"] },
    ))]
    chat_template_kwargs: Option<BTreeMap<String, Value>>,
    /// How much the model thinks, where its chat template has a switch for it.
    #[schemars(extend("enum" = ["none", "minimal", "low", "medium", "high", "xhigh", null]))]
    reasoning_effort: Option<String>,
    /// Functions are not supported; an empty list has no effect.
    #[schemars(length(max = 0))]
    functions: Option<Vec<serde_json::Value>>,
    /// Has no effect.
    #[schemars(length(max = 1))]
    modalities: Option<Vec<Text>>,
    /// What the answer keeps to. One request has one format.
    response_format: Option<ResponseFormat>,
    /// The same in vLLM's words.
    structured_outputs: Option<StructuredOutputs>,
    /// The same as `structured_outputs.json`.
    guided_json: Option<SchemaText>,
    /// The same as `structured_outputs.regex`.
    #[schemars(length(min = 1, max = answer_format::MAX_FORMAT))]
    guided_regex: Option<String>,
    /// The same as `structured_outputs.choice`.
    #[schemars(length(min = 1, max = answer_format::MAX_CHOICES))]
    guided_choice: Option<Vec<String>>,
    /// The same as `structured_outputs.grammar`.
    #[schemars(length(min = 1, max = answer_format::MAX_FORMAT))]
    guided_grammar: Option<String>,
}

/// The members that `SAMPLING_NUMBERS` lists.
struct SamplingSchema;

impl JsonSchema for SamplingSchema {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "Sampling".into()
    }

    fn json_schema(_: &mut schemars::SchemaGenerator) -> Schema {
        let member = |number: &SamplingNumber| (number.name.to_owned(), sampling_member(number));
        let members = SAMPLING_NUMBERS.iter().map(member);
        json_schema!({ "type": "object", "properties": members.collect::<Map<_, _>>() })
    }
}

fn sampling_member(number: &SamplingNumber) -> Value {
    let whole = |bound: f64| match bound as i64 {
        whole if (whole as f64 - bound).abs() <= 0.0 => json!(whole),
        _ => json!(bound),
    };
    let (kind, format) = match number.field {
        NumberField::Count(_) => ("integer", "int64"),
        NumberField::Real(_) | NumberField::RealAbove(_) => ("number", "double"),
    };
    let mut member = json!({ "type": [kind, "null"], "format": format });
    let mut add = |name: &str, value: Value| member[name] = value;
    number.about.into_iter().for_each(|about| add("description", json!(about)));
    if let NumberField::RealAbove(_) = number.field {
        add("maximum", whole(number.most));
        add("exclusiveMinimum", whole(number.least));
    } else {
        add("minimum", whole(number.least));
        add("maximum", whole(number.most));
    }
    member
}

#[derive(JsonSchema)]
struct StreamOptions {
    /// A chunk of its own at the end carries the usage.
    include_usage: Option<bool>,
    /// Has no effect.
    continuous_usage_stats: Option<bool>,
    /// Has no effect.
    include_obfuscation: Option<bool>,
}

#[derive(JsonSchema)]
#[schemars(untagged, inline)]
enum Stop {
    One(StopText),
    Many(#[schemars(length(max = body::MAX_STOPS))] Vec<StopText>),
}

#[derive(JsonSchema)]
#[schemars(inline)]
struct StopText(#[schemars(length(min = 1, max = body::MAX_STOP_CHARACTERS))] String);

#[derive(JsonSchema)]
#[schemars(inline)]
struct ResponseFormat {
    #[schemars(extend("enum" = ["text", "json_object", "json_schema"]))]
    r#type: String,
    json_schema: Option<DescribedSchema>,
}

#[derive(JsonSchema)]
#[schemars(inline)]
struct DescribedSchema {
    name: Option<String>,
    description: Option<String>,
    /// A JSON schema. One that cannot be kept to is refused.
    schema: Value,
    /// Every object must require all its properties and allow no others.
    strict: Option<bool>,
}

/// One of these.
#[derive(JsonSchema)]
#[schemars(inline)]
struct StructuredOutputs {
    json: Option<SchemaText>,
    /// A regular expression that matches the whole answer.
    #[schemars(length(min = 1, max = answer_format::MAX_FORMAT))]
    regex: Option<String>,
    /// The answer is one of these texts.
    #[schemars(length(min = 1, max = answer_format::MAX_CHOICES))]
    choice: Option<Vec<String>>,
    /// A grammar in Lark syntax.
    #[schemars(length(min = 1, max = answer_format::MAX_FORMAT))]
    grammar: Option<String>,
}

/// A JSON schema, or its text.
#[derive(JsonSchema)]
#[schemars(inline)]
struct SchemaText(Value);

#[derive(JsonSchema)]
#[schemars(untagged, inline)]
enum ToolChoiceSchema {
    Word(#[schemars(extend("enum" = ["none", "auto", "required"]))] String),
    Named(NamedTool),
}

#[derive(JsonSchema)]
#[schemars(inline)]
struct NamedTool {
    #[schemars(extend("const" = "function"))]
    r#type: String,
    function: ToolName,
}

#[derive(JsonSchema)]
#[schemars(inline)]
struct ToolName {
    #[schemars(length(max = tools::MAX_TOOL_NAME))]
    name: String,
}

/// A function that the model may call.
#[derive(JsonSchema)]
#[schemars(rename = "Tool")]
struct ToolSchema {
    #[schemars(extend("const" = "function"))]
    r#type: String,
    function: ToolFunction,
}

#[derive(JsonSchema)]
struct ToolFunction {
    #[schemars(regex(pattern = "^[A-Za-z0-9_.-]{1,64}$"))]
    name: String,
    #[schemars(length(max = tools::MAX_TOOL_DESCRIPTION))]
    description: Option<String>,
    /// The JSON schema of an object, of at most 16 KiB. One that cannot be kept to is refused.
    parameters: Option<serde_json::Map<String, Value>>,
    /// Every object must require all its properties and allow no others.
    strict: Option<bool>,
}

/// The one word `text`.
struct Text;

impl JsonSchema for Text {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> std::borrow::Cow<'static, str> {
        "Text".into()
    }

    fn json_schema(_: &mut schemars::SchemaGenerator) -> Schema {
        json_schema!({ "const": "text" })
    }
}

/// A turn of the conversation. Other members may be there when they are null, so that replies can
/// be sent back as they came.
#[derive(JsonSchema)]
#[schemars(untagged, rename = "Message")]
enum MessageSchema {
    /// What the system or the user says.
    #[schemars(title = "system or user")]
    Plain {
        #[schemars(extend("enum" = ["system", "user"]))]
        role: String,
        content: MessageContent,
        #[schemars(length(max = messages::MAX_NAME))]
        name: Option<String>,
    },
    /// What the assistant said.
    #[schemars(title = "assistant")]
    Said {
        #[schemars(extend("const" = "assistant"))]
        role: String,
        content: MessageContent,
        #[schemars(length(max = messages::MAX_TOOL_CALLS))]
        tool_calls: Option<Vec<ToolCall>>,
        #[schemars(length(max = messages::MAX_NAME))]
        name: Option<String>,
        /// What the model thought before; refused by a model that does not think.
        reasoning_content: Option<String>,
    },
    /// What the assistant called, with or without a text.
    #[schemars(title = "assistant with tool calls")]
    Called {
        #[schemars(extend("const" = "assistant"))]
        role: String,
        content: Option<MessageContent>,
        #[schemars(length(min = 1, max = messages::MAX_TOOL_CALLS))]
        tool_calls: Vec<ToolCall>,
        #[schemars(length(max = messages::MAX_NAME))]
        name: Option<String>,
        /// What the model thought before; refused by a model that does not think.
        reasoning_content: Option<String>,
    },
    /// What a tool answered.
    #[schemars(title = "tool")]
    Answered {
        #[schemars(extend("const" = "tool"))]
        role: String,
        content: MessageContent,
        #[schemars(length(max = messages::MAX_NAME))]
        tool_call_id: String,
        #[schemars(length(max = messages::MAX_NAME))]
        name: Option<String>,
    },
}

/// A text, whole or in parts. The size of the body bounds it.
#[derive(JsonSchema)]
#[schemars(untagged, rename = "Content")]
enum MessageContent {
    Whole(String),
    Parts(#[schemars(length(max = messages::MAX_PARTS))] Vec<TextPart>),
}

#[derive(JsonSchema)]
#[schemars(rename = "ContentPart")]
struct TextPart {
    r#type: Text,
    text: String,
}

#[derive(JsonSchema)]
struct ToolCall {
    #[schemars(length(max = messages::MAX_NAME))]
    id: String,
    #[schemars(extend("const" = "function"))]
    r#type: String,
    function: FunctionCall,
}

#[derive(JsonSchema)]
struct FunctionCall {
    #[schemars(length(max = messages::MAX_NAME))]
    name: String,
    #[schemars(length(max = messages::MAX_ARGUMENTS))]
    arguments: String,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::chat_request::ChatRequest;
    use crate::wire::json::JsonTree;

    /// Whether the parser takes a body with this member.
    fn accepts(name: &str, value: &Value) -> bool {
        let mut body = json!({ "model": Uuid::nil(), "messages": [{ "role": "user", "content": "hi" }], "logprobs": true });
        body[name] = value.clone();
        ChatRequest::parse(&JsonTree::parse(body.to_string().as_bytes()).unwrap()).is_ok()
    }

    /// Values at each bound of a schema and just beyond it, and whether they are inside.
    fn probes(schema: &Value) -> Vec<(Value, bool)> {
        let mut all: Vec<(Value, bool)> =
            schema["anyOf"].as_array().into_iter().flatten().flat_map(probes).collect();
        let is = |kind: &str| {
            schema["type"] == kind
                || schema["type"].as_array().is_some_and(|all| all.contains(&json!(kind)))
        };
        let mut put = |value: Value, inside: bool| all.push((value, inside));
        for (bound, step) in [("minimum", -1), ("maximum", 1)] {
            if let Some(bound) = schema[bound].as_i64().filter(|_| is("integer")) {
                put(json!(bound), true);
                bound.checked_add(step).into_iter().for_each(|beyond| put(json!(beyond), false));
            } else if let Some(bound) = schema[bound].as_f64() {
                put(json!(bound), true);
                put(json!(bound + step as f64 / 256.0), false);
            }
        }
        if let Some(bound) = schema["exclusiveMinimum"].as_f64() {
            put(json!(bound), false);
            put(json!(f64::from_bits(1)), true);
        }
        if let Some(most) = schema["maxLength"].as_u64() {
            put(json!("é".repeat(most as usize)), true);
            put(json!("é".repeat(most as usize + 1)), false);
            put(json!(""), schema["minLength"].is_null());
        }
        if let Some(most) = schema["maxItems"].as_u64() {
            let item = schema["items"].get("const").cloned().unwrap_or(json!("x"));
            put(json!(vec![item.clone(); most as usize]), true);
            put(json!(vec![item; most as usize + 1]), false);
        }
        if let Some(words) = schema["enum"].as_array() {
            for word in words {
                put(word.clone(), true);
            }
            put(json!("no such word"), false);
        } else if is("boolean") {
            put(json!(true), true);
            put(json!(false), true);
            put(json!(0), false);
        }
        if is("null") {
            put(Value::Null, true);
        }
        all
    }

    #[test]
    fn the_parser_keeps_every_bound() {
        let schema = schemars::schema_for!(CompletionBody).to_value();
        let mut probed = 0;
        for (name, property) in schema["properties"].as_object().unwrap() {
            let by_itself = ["messages", "tools", "tool_choice"].contains(&name.as_str());
            for (value, inside) in probes(property).into_iter().filter(|_| !by_itself) {
                assert_eq!(accepts(name, &value), inside, "{name}: {value}");
                probed += 1;
            }
        }
        assert!(probed > 100, "{probed}");
        assert!(accepts("no_such_member", &Value::Null) && !accepts("no_such_member", &json!(1)));
    }
}
