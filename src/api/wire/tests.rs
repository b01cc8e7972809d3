//! Request bodies: each bound and each refusal, with the parameter it names.

use super::chat_request::ChatRequest;
use super::json::JsonTree;
use crate::error::ApiError;
use crate::settings::ChatBounds;
use cresset_engine::SamplingParams;
use cresset_request::{AnswerFormat, RequestError, ToolChoice};
use cresset_text::{ProjectFile, RawPrompt, ThinkingEffort};
use serde_json::Value;

const MODEL: &str = "0197a0b1-c2d3-7e4f-8a5b-6c7d8e9f0a1b";

/// A minimal body with `extra` members in it.
fn body(extra: &str) -> String {
    let comma = if extra.is_empty() { "" } else { "," };
    format!(r#"{{"model":"{MODEL}","messages":[{{"role":"user","content":"hi"}}]{comma}{extra}}}"#)
}

fn with_messages(messages: &str) -> String {
    format!(r#"{{"model":"{MODEL}","messages":{messages}}}"#)
}

fn parse(body: &str) -> Result<ChatRequest, ApiError> {
    ChatRequest::parse(&JsonTree::parse(body.as_bytes()).unwrap())
}

fn accepted(body: &str) -> ChatRequest {
    parse(body).unwrap_or_else(|error| panic!("{body}: {error}"))
}

fn check_refused(body: &str, param: &str) {
    match parse(body) {
        Err(ApiError::InvalidRequest { param: named, message }) => {
            assert_eq!(named.as_deref(), Some(param), "{body}: {message}");
        }
        other => panic!("{body}: {other:?}"),
    }
}

#[test]
fn fields_with_an_effect_arrive() {
    let request = accepted(&body(
        r#""stream":true,"stream_options":{"include_usage":true},"max_tokens":7,"min_tokens":2,"ignore_eos":true,
           "temperature":0.5,"top_p":0.9,"top_k":40,"min_p":0.1,"frequency_penalty":-1,"presence_penalty":1.5,
           "repetition_penalty":1.1,"seed":-1,"stop":["a","b"],"logprobs":true,"top_logprobs":3,
           "logit_bias":{"5":-100},"n":1"#,
    ));
    assert!(request.input.stream && request.include_usage && request.input.ignore_eos);
    assert_eq!((request.input.max_tokens, request.input.min_tokens), (Some(7), 2));
    assert_eq!(request.input.stop, ["a", "b"]);
    let sampling = &request.input.sampling;
    let expect = SamplingParams {
        temperature: 0.5,
        top_p: 0.9,
        top_k: 40,
        min_p: 0.1,
        frequency_penalty: -1.0,
        presence_penalty: 1.5,
        repetition_penalty: 1.1,
        seed: u64::MAX,
        logit_bias: [(5, -100.0)].into(),
        logprobs: Some(3),
    };
    assert_eq!(sampling.resolve(&SamplingParams::default(), 0), expect);
    assert_eq!((sampling.seed, sampling.logprobs), (Some(u64::MAX), Some(3)));
    assert_eq!(sampling.logit_bias, [(5, -100.0)]);
    assert!(request.ignored.is_empty());
}

#[test]
fn null_means_absent_and_aliases_agree() {
    let request = accepted(&body(
        r#""max_tokens":null,"max_completion_tokens":9,"stop":null,"tools":null,"seed":null"#,
    ));
    assert_eq!(request.input.max_tokens, Some(9));
    assert!(request.input.stop.is_empty() && request.ignored.is_empty());
    assert_eq!(
        accepted(&body(r#""max_tokens":9,"max_completion_tokens":9"#)).input.max_tokens,
        Some(9)
    );
    assert_eq!(accepted(&body(r#""stop":"x""#)).input.stop, ["x"]);
    let unlimited = accepted(&body(r#""top_k":-1"#)).input.sampling;
    let defaults = SamplingParams { top_k: 7, ..SamplingParams::default() };
    assert_eq!(unlimited.resolve(&defaults, 0).top_k, 0);
    assert_eq!(accepted(&body(r#""logprobs":true"#)).input.sampling.logprobs, Some(0));
}

#[test]
fn fields_without_effect_are_named() {
    let check =
        |extra: &str, name: &str| assert_eq!(accepted(&body(extra)).ignored, [name], "{extra}");
    check(r#""user":"u-1""#, "user");
    check(r#""metadata":{"a":"b"}"#, "metadata");
    check(r#""store":false"#, "store");
    check(r#""service_tier":"auto""#, "service_tier");
    check(r#""safety_identifier":"x""#, "safety_identifier");
    check(r#""parallel_tool_calls":true"#, "parallel_tool_calls");
    check(r#""response_format":{"type":"text"}"#, "response_format");
    check(r#""tools":[]"#, "tools");
    check(r#""tool_choice":"none""#, "tool_choice");
    check(r#""tool_choice":"auto""#, "tool_choice");
    check(r#""modalities":["text"]"#, "modalities");
    check(
        r#""stream_options":{"continuous_usage_stats":true}"#,
        "stream_options.continuous_usage_stats",
    );
    check(
        r#""stream_options":{"include_obfuscation":false}"#,
        "stream_options.include_obfuscation",
    );
    let reply =
        r#"[{"role":"user","content":"a"},{"role":"assistant","content":"b","refusal":null}]"#;
    assert_eq!(accepted(&with_messages(reply)).ignored, ["messages[1].refusal"]);
}

#[test]
fn parameters_out_of_bounds() {
    let check = |extra: &str, param: &str| check_refused(&body(extra), param);
    for (name, values) in [
        ("n", vec!["0", "2", "\"1\""]),
        ("stream", vec!["1", "\"true\""]),
        ("max_tokens", vec!["0", "-1", "1.5", "1e2", "\"5\"", "99999999999"]),
        ("max_completion_tokens", vec!["0"]),
        ("min_tokens", vec!["-1"]),
        ("temperature", vec!["-0.1", "2.1", "1e400", "\"1\""]),
        ("top_p", vec!["0", "1.01"]),
        ("top_k", vec!["-2", "1.5"]),
        ("min_p", vec!["-1", "1.5"]),
        ("frequency_penalty", vec!["2.5"]),
        ("presence_penalty", vec!["-2.5"]),
        ("repetition_penalty", vec!["0", "0.009", "3"]),
        ("seed", vec!["1.5", "99999999999999999999"]),
        ("stop", vec!["\"\"", "[1]", "[\"1\",\"2\",\"3\",\"4\",\"5\",\"6\",\"7\",\"8\",\"9\"]"]),
        ("logprobs", vec!["1"]),
        ("top_logprobs", vec!["21", "1"]),
        ("logit_bias", vec!["[]", "{\"x\":1}", "{\"-1\":1}", "{\"+5\":1}", "{\"05\":1}"]),
        ("stream_options", vec!["true"]),
        ("store", vec!["true"]),
        ("service_tier", vec!["\"flex\""]),
        ("tool_choice", vec!["\"required\"", "{}"]),
        ("modalities", vec!["[\"audio\"]", "[\"text\",\"audio\"]"]),
        ("response_format", vec!["\"json_object\"", "[]"]),
        ("functions", vec!["[{\"name\":\"f\"}]"]),
        ("cache_salt", vec!["\"x\""]),
        ("cache_namespace", vec!["\"x\""]),
        ("prompt_cache_key", vec!["\"x\""]),
        ("no_such_field", vec!["1", "{}"]),
        ("audio", vec!["{}"]),
        ("adapter", vec!["\"x\""]),
    ] {
        for value in values {
            let path = if name == "stop" && value == "[1]" { "stop[0]" } else { name };
            check(&format!(r#""{name}":{value}"#), path);
        }
    }
    check(r#""max_tokens":1,"max_completion_tokens":2"#, "max_completion_tokens");
    check(r#""max_tokens":1,"min_tokens":2"#, "min_tokens");
    check(r#""logit_bias":{"1":101}"#, "logit_bias.1");
    check(r#""stream_options":{"other":1}"#, "stream_options.other");
    check(r#""metadata":{"a":1}"#, "metadata.a");
    check("\"no\\nsuch\":1", "*");
}

#[test]
fn a_last_message_is_continued_or_refused() {
    const USER: &str = r#"{"role":"user","content":"a"}"#;
    const CONTINUES: &str = r#","continue_final_message":true"#;
    let begun = |more: &str| format!(r#"{{"role":"assistant","content":"b"{more}}}"#);
    let prefix = begun(r#","prefix":true"#);
    let with = |last: &str, more: &str| with_messages(&format!("[{USER},{last}]{more}"));
    for (body, continues) in [
        (with(&begun(""), CONTINUES), true),
        (with(&prefix, ""), true),
        (with(&prefix, CONTINUES), true),
        (with(&begun(""), ""), false),
        (with(&begun(r#","prefix":false"#), r#","continue_final_message":false"#), false),
        (with(USER, r#","continue_final_message":null"#), false),
    ] {
        assert_eq!(accepted(&body).input.continues, continues, "{body}");
    }
    let call = r#"{"id":"c","type":"function","function":{"name":"f","arguments":"{}"}}"#;
    for (body, param) in [
        (with(USER, CONTINUES), "continue_final_message"),
        (with(&begun(""), r#","continue_final_message":1"#), "continue_final_message"),
        (with(&begun(r#","prefix":"yes""#), ""), "messages[1].prefix"),
        (with(&format!("{prefix},{USER}"), ""), "messages[1].prefix"),
        (with(r#"{"role":"user","content":"a","prefix":true}"#, ""), "messages[1].prefix"),
        (with(&begun(&format!(r#","tool_calls":[{call}]"#)), CONTINUES), "messages[1].tool_calls"),
        (with(r#"{"role":"assistant","content":" \n","prefix":true}"#, ""), "messages[1].content"),
        (with(&prefix, r#","response_format":{"type":"json_object"}"#), "response_format"),
    ] {
        check_refused(&body, param);
    }
}

#[test]
fn raw_prompts_are_the_gateways_alone() {
    let of = |members: &str| {
        JsonTree::parse(format!(r#"{{"model":"{MODEL}",{members}}}"#).as_bytes()).unwrap()
    };
    let bounds = ChatBounds::from([("files", 1), ("token_ids", 2)]);
    let text = |add_special, parse_special| RawPrompt::Text {
        text: "a".into(),
        add_special,
        parse_special,
    };
    let gap = |files| RawPrompt::FillIn { prefix: "a".into(), suffix: "b".into(), files };
    let file = ProjectFile { name: "n".into(), text: "t".into() };
    for (members, expect) in [
        (r#""prompt":"a""#, text(true, true)),
        (r#""prompt":{"text":"a","add_special":false}"#, text(false, true)),
        (r#""prompt":{"text":"a","parse_special":false}"#, text(true, false)),
        (r#""prompt":[0,4294967295]"#, RawPrompt::Tokens(vec![0, u32::MAX])),
        (r#""prompt":{"prefix":"a","suffix":"b"}"#, gap(vec![])),
        (
            r#""prompt":{"prefix":"a","suffix":"b","files":[{"name":"n","text":"t"}]}"#,
            gap(vec![file]),
        ),
    ] {
        let read = ChatRequest::parse_within(&of(members), &bounds).unwrap();
        assert_eq!(read.input.raw, Some(expect), "{members}");
        let strict = ChatRequest::parse(&of(members)).unwrap_err();
        let told = "prompt is not supported: messages may be what is meant.";
        assert_eq!(strict, ApiError::invalid("prompt", told), "{members}");
    }
    let files = r#""prompt":{"prefix":"a","suffix":"b","files":[1,2]}"#;
    let messages = r#""prompt":"a","messages":[{"role":"user","content":"a"}]"#;
    let tools = r#""prompt":"a","tools":[{"type":"function","function":{"name":"f"}}]"#;
    for (members, param) in [
        (r#""stream":true"#, "messages"),
        (r#""prompt":null"#, "messages"),
        (r#""prompt":1"#, "prompt"),
        (r#""prompt":[-1]"#, "prompt[0]"),
        (r#""prompt":["a"]"#, "prompt[0]"),
        (r#""prompt":[1,2,3]"#, "prompt"),
        (r#""prompt":{"prefix":"a"}"#, "prompt.suffix"),
        (r#""prompt":{"text":"a","suffix":"b"}"#, "prompt.suffix"),
        (files, "prompt.files"),
        (messages, "messages"),
        (tools, "tools"),
        (r#""prompt":"a","continue_final_message":true"#, "continue_final_message"),
    ] {
        let refused = ChatRequest::parse_within(&of(members), &bounds).unwrap_err();
        let ApiError::InvalidRequest { param: Some(told), .. } = &refused else {
            panic!("{members}: {refused:?}")
        };
        assert_eq!(told, param, "{members}: {refused:?}");
    }
    let template = r#""prompt":"a","reasoning_effort":"low","chat_template_kwargs":{"x":true}"#;
    let read = ChatRequest::parse_within(&of(template), &bounds).unwrap();
    assert_eq!(read.ignored, ["reasoning_effort", "chat_template_kwargs"]);
}

#[test]
fn tools_are_bounded_whatever_the_model_is() {
    let long = "x".repeat(20_000);
    let check =
        |tools: String, param: &str| check_refused(&body(&format!(r#""tools":{tools}"#)), param);
    check(format!("[{}]", vec!["{}"; 65].join(",")), "tools");
    check(format!(r#"[{{"function":{{"name":"{}"}}}}]"#, &long[..65]), "tools[0].function.name");
    check(
        format!(r#"[{{"function":{{"description":"{}"}}}}]"#, &long[..4097]),
        "tools[0].function.description",
    );
    check(
        format!(r#"[{{"function":{{"parameters":{{"a":"{long}"}}}}}}]"#),
        "tools[0].function.parameters",
    );
}

/// What is wrong with definitions is told by the models that have tools.
#[test]
fn definitions_of_tools_are_read() {
    let asked = |members: &str| accepted(&body(members)).input.tools.unwrap();
    let param = |members: &str| match asked(members).unwrap_err() {
        RequestError::FieldRefused { field, .. } => field,
        other => panic!("{other}"),
    };
    let tool = |function: &str| format!(r#""tools":[{{"type":"function","function":{function}}}]"#);
    let good = asked(&tool(r#"{"name":"f","description":null,"parameters":{"type":"object"}}"#));
    let good = good.unwrap();
    assert_eq!(good.definitions[0].parameters, r#"{"type":"object"}"#);
    let shown = r#"[{"type":"function","function":{"name":"f","parameters":{"type":"object"}}}]"#;
    assert_eq!(good.shown, serde_json::from_str::<Value>(shown).unwrap());
    assert_eq!((good.choice, good.parallel), (ToolChoice::Auto, true));
    for (function, path) in [
        ("{}", "tools[0].function.name"),
        (r#"{"name":""}"#, "tools[0].function.name"),
        (r#"{"name":"a b"}"#, "tools[0].function.name"),
        (r#"{"name":"f","more":1}"#, "tools[0].function.more"),
        (r#"{"name":"f","strict":1}"#, "tools[0].function.strict"),
        (r#"{"name":"f","parameters":{"type":"array"}}"#, "tools[0].function.parameters"),
    ] {
        assert_eq!(param(&tool(function)), path, "{function}");
    }
    let two = r#""tools":[{"function":{"name":"f"}},{"name":"f"}]"#;
    assert_eq!(param(two), "tools[1]");
    let named = |name: &str| {
        format!(
            r#"{},"tool_choice":{{"type":"function","function":{{"name":"{name}"}}}}"#,
            tool(r#"{"name":"f"}"#)
        )
    };
    assert_eq!(asked(&named("f")).unwrap().choice, ToolChoice::Named(0));
    assert_eq!(param(&named("g")), "tool_choice");
    let more = |more: &str| format!("{},{more}", tool(r#"{"name":"f"}"#));
    let required = asked(&more(r#""tool_choice":"required","parallel_tool_calls":false"#));
    let required = required.unwrap();
    assert_eq!((required.choice, required.parallel), (ToolChoice::Required, false));
    assert!(!asked(&more(r#""tool_choice":"required""#)).unwrap().parallel);
    let several = more(r#""tool_choice":"required","parallel_tool_calls":true"#);
    assert!(asked(&several).unwrap().parallel);
    check_refused(&body(&more(r#""tool_choice":"any""#)), "tool_choice");
    check_refused(&body(&more(r#""ignore_eos":true"#)), "tools");
    check_refused(&body(&more(r#""response_format":{"type":"json_object"}"#)), "response_format");
    check_refused(&body(r#""tool_choice":"required""#), "tool_choice");
}

#[test]
fn variables_of_templates_are_bounded() {
    let seen = accepted(&body(
        r#""chat_template_kwargs":{"enable_thinking":false,"budget":3,"mode":"x"},"reasoning_effort":"low""#,
    ));
    assert_eq!(
        Value::Object(seen.input.template_variables),
        serde_json::json!({ "enable_thinking": false, "budget": 3, "mode": "x" })
    );
    assert_eq!(seen.input.effort, ThinkingEffort::of("low"));
    for (members, param) in [
        (r#""chat_template_kwargs":1"#.to_owned(), "chat_template_kwargs"),
        (r#""chat_template_kwargs":{"a-b":1}"#.into(), "chat_template_kwargs"),
        (r#""chat_template_kwargs":{"a":[]}"#.into(), "chat_template_kwargs.a"),
        (
            format!(r#""chat_template_kwargs":{{"a":"{}"}}"#, "x".repeat(65)),
            "chat_template_kwargs.a",
        ),
        (r#""reasoning_effort":"much""#.into(), "reasoning_effort"),
        (r#""reasoning_effort":1"#.into(), "reasoning_effort"),
    ] {
        check_refused(&body(&members), param);
    }
    let many: Vec<String> = (0..17).map(|n| format!(r#""v{n}":1"#)).collect();
    let many = format!(r#""chat_template_kwargs":{{{}}}"#, many.join(","));
    check_refused(&body(&many), "chat_template_kwargs");
}

#[test]
fn messages_in_every_accepted_form() {
    let check = |messages: &str, expect: &[(&str, Option<&str>)]| {
        let seen = accepted(&with_messages(messages)).input.messages;
        let seen: Vec<_> = seen.iter().map(|m| (m.role.as_str(), m.content.as_deref())).collect();
        assert_eq!(seen, expect, "{messages}");
    };
    check(r#"[{"role":"user","content":""}]"#, &[("user", Some(""))]);
    check(
        r#"[{"role":"system","content":[{"type":"text","text":"a"},{"type":"text","text":"b"}]}]"#,
        &[("system", Some("ab"))],
    );
    check(r#"[{"role":"user","name":"ann","content":"x"}]"#, &[("user", Some("x"))]);
    let call = r#"{"id":"c","type":"function","function":{"name":"f","arguments":"{}"}}"#;
    check(
        &format!(
            r#"[{{"role":"assistant","content":null,"tool_calls":[{call}]}},{{"role":"tool","tool_call_id":"c","content":"r"}}]"#
        ),
        &[("assistant", None), ("tool", Some("r"))],
    );
}

#[test]
fn messages_that_are_refused() {
    let check = |messages: &str, param: &str| check_refused(&with_messages(messages), param);
    check("[]", "messages");
    check("{}", "messages");
    check(&format!("[{}]", vec![r#"{"role":"user","content":"x"}"#; 65].join(",")), "messages");
    check("[1]", "messages[0]");
    check(r#"[{"content":"x"}]"#, "messages[0].role");
    check(r#"[{"role":"developer","content":"x"}]"#, "messages[0].role");
    check(r#"[{"role":"user"}]"#, "messages[0].content");
    check(r#"[{"role":"user","content":null}]"#, "messages[0].content");
    check(r#"[{"role":"user","content":1}]"#, "messages[0].content");
    check(
        r#"[{"role":"user","content":[{"type":"image_url","image_url":{}}]}]"#,
        "messages[0].content[0].type",
    );
    check(r#"[{"role":"user","content":[{"type":"text"}]}]"#, "messages[0].content[0].text");
    check(
        r#"[{"role":"user","content":[{"type":"text","text":"a","cache":1}]}]"#,
        "messages[0].content[0].cache",
    );
    let parts = vec![r#"{"type":"text","text":"a"}"#; 65].join(",");
    check(&format!(r#"[{{"role":"user","content":[{parts}]}}]"#), "messages[0].content");
    check(r#"[{"role":"user","content":"x","weight":1}]"#, "messages[0].weight");
    check(r#"[{"role":"tool","content":"x"}]"#, "messages[0].tool_call_id");
    check(r#"[{"role":"user","content":"x","tool_call_id":"c"}]"#, "messages[0].tool_call_id");
    check(r#"[{"role":"user","content":"x","tool_calls":[]}]"#, "messages[0].tool_calls");
    check(r#"[{"role":"assistant","content":null}]"#, "messages[0].content");
    check(r#"[{"role":"assistant","content":null,"tool_calls":[]}]"#, "messages[0].content");
    check(
        &format!(r#"[{{"role":"user","content":"x","name":"{}"}}]"#, "n".repeat(65)),
        "messages[0].name",
    );
}

#[test]
fn model_and_messages_are_required() {
    check_refused(r#"{"messages":[{"role":"user","content":"x"}]}"#, "model");
    check_refused(&format!(r#"{{"model":"{MODEL}"}}"#), "messages");
    check_refused(r#"{"model":"smollm2","messages":[]}"#, "messages");
    check_refused(r#"{"model":"smollm2","messages":[{"role":"user","content":"x"}]}"#, "model");
    assert!(matches!(parse("[]"), Err(ApiError::InvalidRequest { param: None, .. })));
}

#[test]
fn refusals_say_what_must_be() {
    let check = |extra: &str, message: &str| {
        assert_eq!(parse(&body(extra)).unwrap_err().to_string(), message);
    };
    check(r#""n":2"#, "n must be 1.");
    check(r#""top_logprobs":21"#, "top_logprobs must be a whole number from 0 to 20.");
    check(r#""":1"#, "* is not supported.");
}

#[test]
fn bounds_of_a_nodes_own_gateway_replace_those_of_the_surface() {
    let bounds = [("messages", 70), ("tools", 70), ("description", 5_000), ("schema", 17_000)];
    let bounds = bounds.into_iter().chain([("arguments", 17_000)]).collect();
    let within =
        |body: &str| ChatRequest::parse_within(&JsonTree::parse(body.as_bytes()).unwrap(), &bounds);
    let messages = |count: usize| {
        with_messages(&format!("[{}]", vec![r#"{"role":"user","content":"x"}"#; count].join(",")))
    };
    let parts = |count: usize| {
        let parts = vec![r#"{"type":"text","text":"a"}"#; count].join(",");
        with_messages(&format!(r#"[{{"role":"user","content":[{parts}]}}]"#))
    };
    let tools = |count: usize| body(&format!(r#""tools":[{}]"#, vec!["{}"; count].join(",")));
    let tool = |member: &str, length: usize| {
        let text = "x".repeat(length);
        body(&format!(r#""tools":[{{"function":{{"name":"f",{}}}}}]"#, member.replace('*', &text)))
    };
    let description = |length| tool(r#""description":"*""#, length);
    let schema = |length| tool(r#""parameters":{"type":"object","title":"*"}"#, length);
    let call = |length: usize| {
        let function = format!(r#"{{"name":"f","arguments":"{}"}}"#, "x".repeat(length));
        let call = format!(r#"{{"id":"c","type":"function","function":{function}}}"#);
        with_messages(&format!(r#"[{{"role":"assistant","tool_calls":[{call}]}}]"#))
    };
    for (request, wide, beyond) in [
        (&messages as &dyn Fn(usize) -> String, 70, 71),
        (&parts, 70, 71),
        (&tools, 70, 71),
        (&description, 5_000, 5_001),
        (&schema, 16_900, 17_001),
        (&call, 17_000, 17_001),
    ] {
        assert!(within(&request(wide)).is_ok(), "{wide}");
        assert!(within(&request(beyond)).is_err(), "{beyond}");
        assert!(parse(&request(wide)).is_err(), "{wide}");
    }
}

/// A schema of a tool advises a model, unless it is strict.
#[test]
fn schemas_of_tools_are_loosened_and_formats_are_not() {
    let place = "tools[0].function.parameters.properties.a";
    for (member, left_out) in [
        (r#"{"type":"object","propertyNames":{"type":"string"}}"#, ""),
        (r#"{"type":"string","format":"uri-reference"}"#, ".format"),
        (r#"{"not":{"pattern":"x"}}"#, ".not"),
        (r#"{"type":"array","items":{"type":"string"},"uniqueItems":true}"#, ".uniqueItems"),
        (r#"{"type":"string","nullable":true}"#, ""),
        (r#"{"if":{"minimum":1},"then":{"maximum":2}}"#, ".if"),
        (r#"{"oneOf":[{"minimum":1},{"maximum":9}]}"#, ".oneOf"),
        (r#"{"oneOf":[{"type":"string"},{"type":"null"}]}"#, ""),
        (r#"{"$ref":"https://example.org/schema"}"#, ".*"),
        (r#"{"type":"string","pattern":"a(?=b)"}"#, ".pattern"),
        (r#"{"type":"array","contains":{}}"#, ".contains"),
    ] {
        let of = |strict: bool| {
            let schema = format!(
                r#"{{"type":"object","properties":{{"a":{member}}},"required":["a"],
                    "additionalProperties":false}}"#
            );
            let function = format!(r#"{{"name":"f","strict":{strict},"parameters":{schema}}}"#);
            accepted(&body(&format!(r#""tools":[{{"type":"function","function":{function}}}]"#)))
        };
        let loosened = of(false);
        assert!(matches!(loosened.input.tools, Some(Ok(_))), "{member}");
        let expect: Vec<String> =
            (!left_out.is_empty()).then(|| format!("{place}{left_out}")).into_iter().collect();
        assert_eq!(loosened.ignored, expect, "{member}");
        let is_refused = matches!(of(true).input.tools, Some(Err(_)));
        // A format only describes, and which schemas of a oneOf hold is told with the model.
        let passes = ["", ".format", ".oneOf"].contains(&left_out);
        assert_eq!(is_refused, !passes, "{member}");
    }
    let asked = |schema: &str| body(&format!(r#""guided_json":{schema}"#));
    let named = accepted(&asked(r#"{"items":{"type":"string","format":"password"}}"#));
    assert_eq!(named.ignored, ["guided_json.items.format"]);
    check_refused(&asked(r#"{"items":{"not":{"pattern":"x"}}}"#), "guided_json.items.not");
    check_refused(&asked(r#"{"anyOf":[{"pattern":"(?=x)"}]}"#), "guided_json.anyOf[0].pattern");
}

#[test]
fn white_space_of_json_can_be_chosen() {
    let asked = |members: &str| body(&format!(r#""structured_outputs":{{{members}}}"#));
    for (members, expect) in [
        (r#""json":{},"disable_any_whitespace":true"#, Some(String::new())),
        (r#""json":{},"whitespace_pattern":" ?""#, Some(" ?".to_owned())),
        (r#""json":{},"disable_any_whitespace":false"#, None),
    ] {
        let spaced = match accepted(&asked(members)).input.format.unwrap().format {
            AnswerFormat::Schema(schema) => schema.white_space,
            other => panic!("{other:?}"),
        };
        assert_eq!(spaced, expect, "{members}");
    }
    let path = "structured_outputs.whitespace_pattern";
    check_refused(&asked(r#""regex":"a","whitespace_pattern":" ""#), path);
    check_refused(&asked(r#""json":{},"whitespace_pattern":1"#), path);
    check_refused(&asked(r#""whitespace_pattern":" ""#), "structured_outputs");
    let object = r#""response_format":{"type":"json_object","schema":{"not":{"pattern":"a"}}}"#;
    check_refused(&body(object), "response_format.schema.not");
}
