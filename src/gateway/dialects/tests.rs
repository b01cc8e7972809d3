//! Every dialect's requests and answers, as their clients send and read them.

use super::*;
use ApiDialect::{
    Anthropic, Completions, LlamaCppCompletion, LlamaCppInfill, OllamaChat, OllamaGenerate,
    Responses,
};

const MODEL: &str = "small";

/// The chat request that `body` becomes, or the sentence that refuses it.
fn read(dialect: ApiDialect, body: &Value) -> Result<(Value, bool), String> {
    match dialect.read(body.to_string().as_bytes())? {
        Asked::Question(question) => {
            Ok((serde_json::to_value(&question.chat).unwrap(), question.is_streamed))
        }
        Asked::Echo(answer) => Ok((answer, false)),
    }
}

/// Members of the two objects are compared without their order.
fn check(dialect: ApiDialect, body: &Value, mut expect: Value) {
    let (mut chat, _) = read(dialect, body).unwrap();
    for object in [&mut chat, &mut expect] {
        object.sort_all_objects();
    }
    assert_eq!(chat, expect, "{dialect:?} {body}");
}

#[test]
fn a_request_becomes_the_nodes_own() {
    let user = |text: &str| json!({ "role": "user", "content": text });
    let system = |text: &str| json!({ "role": "system", "content": text });
    let text = |text: &str| json!({ "type": "text", "text": text });
    check(
        Completions,
        &json!({ "model": MODEL, "prompt": ["Hi"], "echo": false, "best_of": 1, "suffix": null,
                "temperature": 0.5, "stop": "x", "n": 1, "user": "u" }),
        json!({ "model": MODEL, "prompt": "Hi", "max_tokens": 16, "temperature": 0.5,
                "stop": "x", "n": 1, "user": "u" }),
    );
    check(
        Anthropic,
        &json!({ "model": MODEL, "max_tokens": 9, "top_k": 3, "stop_sequences": ["x"], "tools": [],
                "metadata": { "user_id": "u" }, "thinking": { "type": "disabled" },
                "system": [{ "type": "text", "text": "Be brief.", "cache_control": {} }],
                "messages": [user("Hi"), { "role": "assistant", "content": [
                    { "type": "thinking", "thinking": "…", "signature": "" }, text("Yes?")] },
                    user("Go on.")] }),
        json!({ "model": MODEL, "max_tokens": 9, "top_k": 3, "stop": ["x"],
                "reasoning_effort": "none", "messages": [
                { "role": "system", "content": [text("Be brief.")] }, user("Hi"),
                { "role": "assistant", "content": [text("Yes?")] }, user("Go on.")] }),
    );
    let schema = json!({ "type": "object", "properties": { "a": { "type": "integer" } } });
    check(
        Anthropic,
        &json!({ "model": MODEL, "max_tokens": 9, "messages": [user("Hi")],
                "output_config": { "format": { "type": "json_schema", "schema": schema } } }),
        json!({ "model": MODEL, "max_tokens": 9, "messages": [user("Hi")],
                "structured_outputs": { "json": schema } }),
    );
    check(
        OllamaChat,
        &json!({ "model": MODEL, "messages": [user("Hi")], "keep_alive": "5m", "format": schema,
                "think": false, "options": { "num_ctx": 4096, "num_predict": 7, "mirostat": 0,
                "repeat_penalty": 1.1, "temperature": 0, "seed": 5 } }),
        json!({ "model": MODEL, "messages": [user("Hi")], "structured_outputs": { "json": schema },
                "reasoning_effort": "none", "max_tokens": 7, "repetition_penalty": 1.1, "temperature": 0, "seed": 5 }),
    );
    check(
        OllamaGenerate,
        &json!({ "model": MODEL, "system": "Be brief.", "prompt": "Hi", "format": "json",
                "options": { "num_predict": -1 } }),
        json!({ "model": MODEL, "messages": [system("Be brief."), user("Hi")],
                "response_format": { "type": "json_object" } }),
    );
    let part = |kind: &str, text: &str| json!({ "type": kind, "text": text });
    check(
        Responses,
        &json!({ "model": MODEL, "instructions": "A", "max_output_tokens": 5, "store": false,
                "include": [], "prompt_cache_key": "k", "reasoning": { "effort": null },
                "text": { "format": { "type": "json_schema", "name": "n", "schema": schema,
                "strict": true } }, "truncation": "disabled", "input": [
                { "role": "developer", "content": [part("input_text", "B")] },
                { "type": "reasoning", "summary": [] },
                { "type": "message", "role": "assistant", "content": [part("output_text", "C")] },
                user("Hi")] }),
        json!({ "model": MODEL, "max_tokens": 5, "messages": [system("A\n\nB"),
                { "role": "assistant", "content": [text("C")] }, user("Hi")],
                "response_format": { "type": "json_schema",
                "json_schema": { "name": "n", "schema": schema, "strict": true } } }),
    );
}

#[test]
fn a_last_message_of_the_assistant_is_continued_where_the_interface_says_so() {
    let user = json!({ "role": "user", "content": "Hi" });
    let begun = |content: Value| json!({ "role": "assistant", "content": content });
    let parts = |text: &str| json!([{ "type": "text", "text": text }]);
    for (dialect, content, continues) in [
        (Anthropic, json!("1,"), true),
        (Anthropic, parts("1,"), true),
        (OllamaChat, json!("1,"), true),
        (Responses, json!("1,"), false),
    ] {
        let name = if dialect == Responses { "input" } else { "messages" };
        let mut expect = json!({ "model": MODEL, "messages": [user, begun(content.clone())] });
        if continues {
            expect["continue_final_message"] = true.into();
        }
        check(dialect, &json!({ "model": MODEL, name: [user, begun(content)] }), expect);
    }
    for (dialect, content) in
        [(Anthropic, json!(" ")), (Anthropic, parts("")), (OllamaChat, json!(""))]
    {
        let asked = json!({ "model": MODEL, "messages": [user, begun(content)] });
        check(dialect, &asked, json!({ "model": MODEL, "messages": [user] }));
    }
}

#[test]
fn bare_texts_and_gaps_become_raw_prompts() {
    let gap = |prefix: &str, suffix: &str, files: Value| json!({ "prefix": prefix, "suffix": suffix, "files": files });
    let none = json!([]);
    for (dialect, asked, expect) in [
        (Completions, json!({ "prompt": [1, 2] }), json!({ "prompt": [1, 2], "max_tokens": 16 })),
        (
            Completions,
            json!({ "prompt": [[1, 2]], "max_tokens": 9 }),
            json!({ "prompt": [1, 2], "max_tokens": 9 }),
        ),
        (
            Completions,
            json!({ "prompt": "", "suffix": "" }),
            json!({ "prompt": "", "max_tokens": 16 }),
        ),
        (
            Completions,
            json!({ "prompt": ["a"], "suffix": "b", "logprobs": 2, "echo": false }),
            json!({ "prompt": gap("a", "b", none.clone()), "logprobs": true, "top_logprobs": 2, "max_tokens": 16 }),
        ),
        (
            Completions,
            json!({ "prompt": "a", "max_tokens": 1, "add_special_tokens": false }),
            json!({ "prompt": { "text": "a", "add_special": false }, "max_tokens": 1 }),
        ),
        (OllamaGenerate, json!({ "prompt": "a", "raw": true }), json!({ "prompt": "a" })),
        (OllamaGenerate, json!({ "suffix": "b" }), json!({ "prompt": gap("", "b", none.clone()) })),
        (
            OllamaGenerate,
            json!({ "prompt": "a", "suffix": "b", "raw": true, "options": { "num_predict": 4 } }),
            json!({ "prompt": gap("a", "b", none.clone()), "max_tokens": 4 }),
        ),
        (
            LlamaCppCompletion,
            json!({ "prompt": "a", "n_predict": -1, "seed": -1, "repeat_penalty": 1.5, "id_slot": 1 }),
            json!({ "prompt": "a", "repetition_penalty": 1.5, "id_slot": 1 }),
        ),
        (
            LlamaCppInfill,
            json!({ "input_prefix": "a\n", "prompt": "b", "input_suffix": "c", "n_predict": 5,
                "input_extra": [{ "filename": "x.rs", "text": "d" }, { "text": "e" }], "n_indent": 2 }),
            json!({ "max_tokens": 5, "prompt": gap("a\nb", "c",
                json!([{ "name": "x.rs", "text": "d" }, { "name": "snippet", "text": "e" }])) }),
        ),
        (LlamaCppInfill, json!({}), json!({ "prompt": gap("", "", none.clone()) })),
    ] {
        check(dialect, &asked, expect);
    }
    let (nothing, _) =
        read(LlamaCppInfill, &json!({ "input_prefix": "a", "n_predict": 0 })).unwrap();
    assert_eq!((&nothing["content"], &nothing["stop"]), (&json!(""), &json!(true)));
}

#[test]
fn tools_and_their_history_become_the_nodes_own() {
    let user = json!({ "role": "user", "content": "Hi" });
    let schema = json!({ "type": "object" });
    let function = json!({ "name": "f", "description": "d", "parameters": schema });
    let tools = json!([{ "type": "function", "function": function }]);
    let call = |id: &str| json!({ "id": id, "type": "function", "function": { "name": "f", "arguments": "{\"a\":1}" } });
    let history = |id: &str, content: Value| {
        json!([user, { "role": "assistant", "content": content, "tool_calls": [call(id)] },
            { "role": "tool", "tool_call_id": id, "content": "r" }])
    };
    let only = json!({ "type": "function", "function": { "name": "f" } });
    check(
        Anthropic,
        &json!({ "model": MODEL, "tools": [{ "name": "f", "description": "d", "input_schema": schema }],
            "tool_choice": { "type": "tool", "name": "f", "disable_parallel_tool_use": true },
            "thinking": { "type": "enabled", "budget_tokens": 1024 }, "messages": [user,
            { "role": "assistant", "content": [{ "type": "thinking", "thinking": "hm" },
                { "type": "tool_use", "id": "c1", "name": "f", "input": { "a": 1 } }] },
            { "role": "user", "content": [{ "type": "tool_result", "tool_use_id": "c1",
                "content": [{ "type": "text", "text": "r" }] }] }] }),
        json!({ "model": MODEL, "tools": tools, "tool_choice": only, "parallel_tool_calls": false,
            "reasoning_effort": "high", "messages": history("c1", Value::Null) }),
    );
    check(
        OllamaChat,
        &json!({ "model": MODEL, "tools": tools, "think": "low", "messages": [user,
            { "role": "assistant", "content": "", "tool_calls": [
                { "function": { "name": "f", "arguments": { "a": 1 } } }] },
            { "role": "tool", "tool_name": "f", "content": "r" }] }),
        json!({ "model": MODEL, "tools": tools, "reasoning_effort": "low",
            "messages": history("call00000", "".into()) }),
    );
    check(
        Responses,
        &json!({ "model": MODEL, "tools": [{ "type": "function", "name": "f", "description": "d",
            "parameters": schema }], "tool_choice": { "type": "function", "name": "f" },
            "parallel_tool_calls": true, "reasoning": { "effort": "low", "summary": "auto" },
            "input": [user, { "type": "reasoning", "summary": [] },
            { "type": "function_call", "call_id": "c1", "name": "f", "arguments": "{\"a\":1}" },
            { "type": "function_call_output", "call_id": "c1", "output": "r" }] }),
        json!({ "model": MODEL, "tools": tools, "tool_choice": only, "parallel_tool_calls": true,
            "reasoning_effort": "low", "messages": history("c1", Value::Null) }),
    );
}

/// The node's stream of a thought, a text and two calls.
fn node_stream_of_calls() -> String {
    let chunk = |delta: &str| {
        format!(
            r#"data: {{"id":"r1","created":1790000000,"choices":[{{"delta":{delta},"finish_reason":null}}]}}"#
        )
    };
    let begun = |at: usize, id: &str| {
        chunk(&format!(
            r#"{{"tool_calls":[{{"index":{at},"id":"{id}","type":"function","function":{{"name":"f","arguments":""}}}}]}}"#
        ))
    };
    let more = |at: usize, text: &str| {
        let text = Value::from(text);
        chunk(&format!(r#"{{"tool_calls":[{{"index":{at},"function":{{"arguments":{text}}}}}]}}"#))
    };
    let chunks = [
        BEGIN.to_owned(),
        chunk(r#"{"reasoning_content":"h"}"#),
        chunk(r#"{"reasoning_content":"m"}"#),
        chunk(r#"{"content":"So"}"#),
        begun(0, "c1"),
        more(0, "{\"a\""),
        more(0, ":1}"),
        begun(1, "c2"),
        more(1, "{}"),
        format!(
            r#"data: {{"id":"r1","choices":[{{"delta":{{}},"finish_reason":"tool_calls"}}],{USAGE}}}"#
        ),
    ];
    chunks.map(|chunk| chunk + "\n\n").concat()
}

#[test]
fn thoughts_and_calls_are_told_in_each_dialects_words() {
    let node = node_stream_of_calls();
    let thinking = || {
        let body =
            json!({ "messages": [message("user", "Hi")], "thinking": { "type": "enabled" } });
        match Anthropic.read(body.to_string().as_bytes()) {
            Ok(Asked::Question(question)) => question.writer,
            _ => panic!("it is a question"),
        }
    };
    let streamed = |writer: Box<dyn AnswerWriter>| {
        let mut stream = TranslatedStream::new(writer, MODEL.to_owned());
        events(std::str::from_utf8(&stream.take(node.as_bytes())).unwrap())
    };
    let whole = |writer| whole(writer, MODEL.into(), node.as_bytes()).unwrap();
    let block = |kind: &str, id: &str, input: Value| json!({ "type": kind, "id": id, "name": "f", "input": input });
    let message = whole(thinking());
    assert_eq!(message["stop_reason"], "tool_use");
    let expect = json!([
        { "type": "thinking", "thinking": "hm", "signature": "" },
        { "type": "text", "text": "So" },
        block("tool_use", "c1", json!({ "a": 1 })),
        block("tool_use", "c2", json!({})),
    ]);
    assert_eq!(message["content"], expect);
    let stream = streamed(thinking());
    let started: Vec<&Value> =
        stream.iter().filter(|e| e["type"] == "content_block_start").collect();
    let kinds: Vec<&str> =
        started.iter().map(|e| e["content_block"]["type"].as_str().unwrap()).collect();
    assert_eq!(kinds, ["thinking", "text", "tool_use", "tool_use"]);
    let places: Vec<u64> = started.iter().map(|e| e["index"].as_u64().unwrap()).collect();
    assert_eq!(places, [0, 1, 2, 3]);
    let json = stream.iter().filter_map(|e| e["delta"]["partial_json"].as_str());
    assert_eq!(json.collect::<String>(), "{\"a\":1}{}");
    // Thoughts that were not asked for are left out.
    let silent = streamed(writer(Anthropic));
    assert!(silent.iter().all(|event| event["content_block"]["type"] != "thinking"));

    let response = whole(writer(Responses));
    let output = response["output"].as_array().unwrap();
    let kinds: Vec<&str> = output.iter().map(|item| item["type"].as_str().unwrap()).collect();
    assert_eq!(kinds, ["reasoning", "message", "function_call", "function_call"]);
    assert_eq!([&output[2]["call_id"], &output[2]["arguments"]], ["c1", "{\"a\":1}"]);
    let last = streamed(writer(Responses)).pop().unwrap();
    assert_eq!(last["response"]["output"], response["output"]);

    let line = whole(writer(OllamaChat));
    let calls = json!([
        { "function": { "name": "f", "arguments": { "a": 1 } } },
        { "function": { "name": "f", "arguments": {} } },
    ]);
    assert_eq!([&line["message"]["thinking"], &line["done_reason"]], ["hm", "stop"]);
    assert_eq!(line["message"]["tool_calls"], calls);
    let lines = streamed(writer(OllamaChat));
    assert_eq!(lines[lines.len() - 2]["message"]["tool_calls"], calls);
    assert_eq!([&lines[0]["message"]["thinking"], &lines[1]["message"]["thinking"]], ["h", "m"]);
}

#[test]
fn streams_are_asked_for_as_in_each_dialect() {
    for (dialect, body, expect) in [
        (Completions, json!({ "prompt": "Hi" }), false),
        (Responses, json!({ "input": "Hi", "stream": true }), true),
        (OllamaChat, json!({ "messages": [{ "role": "user", "content": "Hi" }] }), true),
        (OllamaGenerate, json!({ "prompt": "Hi", "stream": false }), false),
    ] {
        assert_eq!(read(dialect, &body).unwrap().1, expect, "{dialect:?}");
    }
}

#[test]
fn raw_prompts_that_cannot_be_read_are_refused_with_a_way_out() {
    for (dialect, body, expect) in [
        (Completions, json!({}), "prompt is required"),
        (Completions, json!({ "prompt": [] }), "has 0"),
        (Completions, json!({ "prompt": ["a", "b"] }), "a batch size of 1"),
        (Completions, json!({ "prompt": [[1], [2]] }), "of token ids, and has 2"),
        (Completions, json!({ "prompt": [-1] }), "a list of token ids"),
        (Completions, json!({ "prompt": 1 }), "a list of token ids"),
        (Completions, json!({ "prompt": [1], "echo": true }), "echo needs"),
        (Completions, json!({ "prompt": "a", "echo": true, "logprobs": 0 }), "echo cannot"),
        (Completions, json!({ "prompt": [1], "suffix": "b" }), "suffix needs"),
        (Completions, json!({ "prompt": "a", "best_of": 2 }), "best_of"),
        (
            Completions,
            json!({ "prompt": "a", "suffix": "b", "add_special_tokens": false }),
            "cannot go with suffix",
        ),
        (LlamaCppInfill, json!({ "input_extra": [{ "filename": "a" }] }), "filename and text"),
        (LlamaCppInfill, json!({ "input_suffix": 1 }), "input_suffix must be a text"),
        (LlamaCppCompletion, json!({ "prompt": null }), "prompt is required"),
    ] {
        let why = read(dialect, &body).expect_err("it is refused");
        assert!(why.contains(expect), "{dialect:?} {body}: {why}");
    }
}

#[test]
fn what_no_model_here_does_is_refused_with_a_way_out() {
    let image = json!([{ "role": "user", "content": [{ "type": "image", "source": {} }] }]);
    for (dialect, body, expect) in [
        (Anthropic, json!({ "messages": image }), "text only"),
        (
            Anthropic,
            json!({ "messages": [], "tools": [{ "type": "bash_1", "name": "bash" }],
                "tool_choice": { "type": "tool", "name": "bash" } }),
            "bash_1",
        ),
        (
            Anthropic,
            json!({ "messages": [], "tools": [{ "type": "bash_1" }],
                "tool_choice": { "type": "any" } }),
            "bash_1",
        ),
        (Anthropic, json!({ "messages": [], "mcp_servers": [{}], "container": "c" }), "container"),
        (Anthropic, json!({ "messages": [], "mcp_servers": [{}], "container": "c" }), "servers"),
        (Anthropic, json!({ "messages": [], "thinking": { "type": "deep" } }), "thinking"),
        (Anthropic, json!({ "messages": [], "output_config": { "other": 1 } }), "other"),
        (Anthropic, json!({}), "messages is required"),
        (OllamaChat, json!({ "messages": [{ "role": "user", "images": ["x"] }] }), "text only"),
        (OllamaChat, json!({ "messages": [], "options": { "mirostat": 1 } }), "mirostat"),
        (OllamaChat, json!({ "messages": [], "options": { "new": 1 } }), "options.new"),
        (OllamaChat, json!({ "messages": [], "options": { "new": 1, "b": 2 } }), "options.b"),
        (OllamaGenerate, json!({ "prompt": "a", "context": [1] }), "/api/chat"),
        (OllamaGenerate, json!({ "prompt": "a", "suffix": "b", "system": "s" }), "system"),
        (OllamaGenerate, json!({ "prompt": "a", "raw": true, "system": "s" }), "into prompt"),
        (OllamaGenerate, json!({ "prompt": "a", "raw": true, "template": "t" }), "template"),
        (Responses, json!({}), "input is required"),
        (Responses, json!({ "input": "a", "store": true }), "store"),
        (Responses, json!({ "input": "a", "previous_response_id": "r" }), "whole conversation"),
        (Responses, json!({ "input": "a", "background": true }), "background"),
        (
            Responses,
            json!({ "input": "a", "tools": [{ "type": "web_search" }],
                "tool_choice": { "type": "web_search" } }),
            "web_search",
        ),
        (
            Responses,
            json!({ "input": "a", "tools": [{ "type": "custom", "name": "patch" }],
                "tool_choice": "required" }),
            "custom",
        ),
        (Responses, json!({ "input": "a", "truncation": "auto" }), "truncation"),
        (Responses, json!({ "input": "a", "text": { "verbosity": "low" } }), "verbosity"),
        (Responses, json!({ "input": [{ "type": "item_reference" }] }), "item_reference"),
        (Responses, json!([]), "JSON object"),
    ] {
        let why = read(dialect, &body).expect_err("it is refused");
        assert!(why.contains(expect), "{dialect:?} {body}: {why}");
    }
}

/// Checks what becomes of a request, and the members that are named as left out.
fn check_left_out(dialect: ApiDialect, body: &Value, mut chat: Value, named: &str) {
    let Ok(Asked::Question(question)) = dialect.read(body.to_string().as_bytes()) else {
        panic!("{dialect:?} {body}");
    };
    let mut own = serde_json::to_value(&question.chat).unwrap();
    [&mut own, &mut chat].into_iter().for_each(Value::sort_all_objects);
    assert_eq!(own, chat, "{dialect:?} {body}");
    assert_eq!(question.left_out.shown().as_deref(), Some(named), "{dialect:?} {body}");
}

#[test]
fn what_has_no_effect_for_a_message_is_left_out_and_named() {
    let user = json!([{ "role": "user", "content": "Hi" }]);
    let text = |more: &str| {
        let mut block = json!({ "type": "text", "text": "Hi" });
        block[more] = json!({ "type": "ephemeral" });
        block
    };
    let hosted = json!([{ "type": "web_search_20250305", "name": "web_search" },
        { "type": "bash_20250124", "name": "bash" }, { "type": "computer_20250124", "name": "c" },
        { "type": "text_editor_20250728", "name": "e" }]);
    let own =
        json!({ "name": "f", "input_schema": {}, "cache_control": {}, "defer_loading": true });
    for (body, chat, named) in [
        (
            json!({ "messages": user, "metadata": { "user_id": "u" }, "betas": ["b"],
                "context_management": { "edits": [] }, "service_tier": "auto", "tools": hosted,
                "thinking": { "type": "adaptive" }, "output_config": { "effort": "high" } }),
            json!({ "messages": user, "reasoning_effort": "high" }),
            "metadata, betas, context_management, service_tier, tools[].web_search_20250305, \
             tools[].bash_20250124, tools[].computer_20250124, tools[].text_editor_20250728",
        ),
        (
            json!({ "messages": [{ "role": "user", "content": [text("cache_control")] }],
                "tools": [own], "output_config": { "effort": "low" },
                "thinking": { "type": "disabled", "budget_tokens": 7 } }),
            json!({ "messages": [{ "role": "user", "content": [{ "type": "text", "text": "Hi" }] }],
                "reasoning_effort": "none", "tools": [{ "type": "function",
                "function": { "name": "f", "description": null, "parameters": {} } }] }),
            "tools[].cache_control, tools[].defer_loading, thinking.budget_tokens, \
             output_config.effort, messages[].content[].cache_control",
        ),
        (
            json!({ "messages": [{ "role": "assistant", "content": [
                { "type": "server_tool_use", "id": "s", "name": "web_search", "input": {} },
                { "type": "web_search_tool_result", "content": [] },
                { "type": "text", "text": "Hi" }] }] }),
            json!({ "continue_final_message": true, "messages": [
                { "role": "assistant", "content": [{ "type": "text", "text": "Hi" }] }] }),
            "messages[].content[].server_tool_use, messages[].content[].web_search_tool_result",
        ),
    ] {
        check_left_out(Anthropic, &body, chat, named);
    }
}

#[test]
fn what_has_no_effect_elsewhere_is_left_out_and_named() {
    let user = json!([{ "role": "user", "content": "Hi" }]);
    for (dialect, body, chat, named) in [
        (
            Responses,
            json!({ "input": [{ "role": "user", "content": "Hi" }, { "type": "local_shell_call", "call_id": null },
                { "type": "custom_tool_call", "call_id": "c", "name": "patch", "input": "x" },
                { "type": "custom_tool_call_output", "call_id": "c", "output": "y" }],
                "store": false, "include": ["reasoning.encrypted_content"], "user": "u",
                "reasoning": { "summary": "auto" },
                "client_metadata": { "a": "b" }, "prompt_cache_key": "k", "service_tier": "auto",
                "metadata": {}, "tool_choice": "auto", "parallel_tool_calls": true, "tools": [
                { "type": "namespace", "name": "n", "tools": [] }, { "type": "local_shell" },
                { "type": "custom", "name": "patch" }, { "type": "web_search" },
                { "type": "function", "name": "f", "parameters": {}, "strict": false }] }),
            json!({ "messages": user, "tool_choice": "auto", "parallel_tool_calls": true, "tools": [
                { "type": "function",
                    "function": { "name": "f", "parameters": {}, "strict": false } }] }),
            "include, user, client_metadata, prompt_cache_key, service_tier, tools[].namespace, \
             tools[].local_shell, tools[].custom, tools[].web_search, reasoning.summary, \
             input[].local_shell_call, \
             input[].custom_tool_call, input[].custom_tool_call_output",
        ),
        (
            OllamaChat,
            json!({ "messages": user, "keep_alive": "5m", "logprobs": true, "top_logprobs": 2,
                "options": { "num_ctx": 9, "mirostat": 0, "mirostat_tau": 5.0, "seed": 1 } }),
            json!({ "messages": user, "logprobs": true, "top_logprobs": 2, "seed": 1 }),
            "keep_alive, options.num_ctx, options.mirostat, options.mirostat_tau",
        ),
    ] {
        check_left_out(dialect, &body, chat, named);
    }
}

#[test]
fn twice_the_same_member_is_refused() {
    for (dialect, body) in [
        (Completions, r#"{"prompt":"a","prompt":"b"}"#),
        (Responses, r#"{"input":"a","input":"b"}"#),
        (Anthropic, r#"{"messages":[],"messages":[]}"#),
        (OllamaChat, r#"{"messages":[],"stream":true,"stream":false}"#),
    ] {
        let refusal = dialect.read(body.as_bytes()).err();
        assert!(refusal.is_some_and(|why| why.contains("twice")), "{body}");
    }
}

#[test]
fn a_request_without_a_text_costs_nothing() {
    for (dialect, body) in [
        (OllamaChat, json!({ "model": MODEL, "messages": [] })),
        (OllamaGenerate, json!({ "model": MODEL, "keep_alive": 0 })),
        (OllamaGenerate, json!({ "model": MODEL, "system": "s" })),
    ] {
        let (answer, _) = read(dialect, &body).unwrap();
        assert_eq!([&answer["done_reason"], &answer["model"]], ["load", MODEL], "{body}");
    }
}

const BEGIN: &str = r#"data: {"id":"r1","created":1790000000,"choices":[{"delta":{"role":"assistant","content":""},"finish_reason":null}]}"#;
const DELTAS: [&str; 2] = [
    r#"data: {"id":"r1","created":1790000000,"choices":[{"delta":{"content":"Grün"},"finish_reason":null}]}"#,
    r#"data: {"id":"r1","created":1790000000,"choices":[{"delta":{"content":" \"x\""},"finish_reason":null}]}"#,
];
const USAGE: &str = r#""usage":{"prompt_tokens":9,"completion_tokens":2,"total_tokens":11,"prompt_tokens_details":{"cached_tokens":4}},"credits":{"unit":"microcredit","chargedUnits":"5"}"#;

/// The node's stream of two texts, with this end.
fn node_stream(end: &str) -> String {
    let [first, second] = DELTAS;
    format!("{BEGIN}\n\n{first}\n\n: keep-alive\n\n{second}\n\n{end}\n\ndata: [DONE]\n\n")
}

fn finished(reason: &str) -> String {
    node_stream(&format!(
        r#"data: {{"id":"r1","created":1790000000,"choices":[{{"delta":{{}},"finish_reason":"{reason}"}}],{USAGE}}}"#
    ))
}

fn failed() -> String {
    node_stream(
        r#"data: {"error":{"code":"generation_failed","message":"It failed.","type":"server_error","request_id":"r1"}}"#,
    )
}

fn writer(dialect: ApiDialect) -> Box<dyn AnswerWriter> {
    let body = json!({ "prompt": "Hi", "input": "Hi", "messages": [message("user", "Hi")] });
    let wanted = |name: &str| match dialect {
        Completions | OllamaGenerate | LlamaCppCompletion | LlamaCppInfill => name == "prompt",
        Responses => name == "input",
        Anthropic | OllamaChat => name == "messages",
    };
    let mut own = body;
    own.as_object_mut().unwrap().retain(|name, _| wanted(name));
    match dialect.read(own.to_string().as_bytes()) {
        Ok(Asked::Question(question)) => question.writer,
        _ => panic!("{dialect:?}"),
    }
}

/// The node's stream in the dialect, given in pieces of `size` bytes.
fn translated(dialect: ApiDialect, node: &str, size: usize) -> String {
    let mut stream = TranslatedStream::new(writer(dialect), MODEL.to_owned());
    let pieces = node.as_bytes().chunks(size).map(|piece| stream.take(piece));
    String::from_utf8(pieces.collect::<Vec<_>>().concat()).unwrap()
}

/// The events or lines of a stream, without comments and without times.
fn events(text: &str) -> Vec<Value> {
    let data = text.lines().map(|line| line.strip_prefix("data: ").unwrap_or(line));
    let mut events: Vec<Value> = data.filter_map(|line| serde_json::from_str(line).ok()).collect();
    for event in &mut events {
        for time in ["total_duration", "prompt_eval_duration", "eval_duration", "timings"] {
            event.as_object_mut().unwrap().shift_remove(time);
        }
    }
    events
}

/// The texts of a stream, in order, and its events' types where it names them.
fn texts_and_types(dialect: ApiDialect, node: &str) -> (String, String) {
    let events = events(&translated(dialect, node, node.len()));
    let text = |event: &Value| {
        let places = [
            &event["choices"][0]["text"],
            &event["delta"]["text"],
            &event["delta"],
            &event["message"]["content"],
            &event["response"],
            &event["content"],
        ];
        places.iter().find_map(|place| place.as_str()).unwrap_or_default().to_owned()
    };
    let kinds = events.iter().filter_map(|event| event["type"].as_str());
    (events.iter().map(text).collect(), kinds.collect::<Vec<_>>().join(" "))
}

#[test]
fn a_stream_holds_the_nodes_text_however_its_bytes_arrive() {
    let node = finished("stop");
    for dialect in [Completions, Responses, Anthropic, OllamaChat, OllamaGenerate, LlamaCppInfill] {
        let whole = events(&translated(dialect, &node, node.len()));
        for size in 1..node.len() {
            assert_eq!(events(&translated(dialect, &node, size)), whole, "{dialect:?} {size}");
        }
        assert_eq!(texts_and_types(dialect, &node).0, "Grün \"x\"", "{dialect:?}");
    }
}

#[test]
fn events_come_in_the_order_that_clients_expect() {
    let (stop, length, failure) = (finished("stop"), finished("length"), failed());
    for (dialect, node, expect) in [
        (
            Anthropic,
            &stop,
            "message_start content_block_start content_block_delta ping content_block_delta \
             content_block_stop message_delta message_stop",
        ),
        (
            Anthropic,
            &failure,
            "message_start content_block_start content_block_delta ping content_block_delta error",
        ),
        (
            Responses,
            &stop,
            "response.created response.in_progress response.output_item.added \
             response.content_part.added response.output_text.delta response.output_text.delta \
             response.output_text.done response.content_part.done response.output_item.done \
             response.completed",
        ),
        (
            Responses,
            &failure,
            "response.created response.in_progress response.output_item.added \
             response.content_part.added response.output_text.delta response.output_text.delta \
             response.failed",
        ),
    ] {
        assert_eq!(texts_and_types(dialect, node).1, expect, "{dialect:?}");
    }
    let last = |dialect, node: &String| events(&translated(dialect, node, 64)).pop().unwrap();
    let numbers = events(&translated(Responses, &stop, 64));
    assert!(numbers.iter().enumerate().all(|(n, event)| event["sequence_number"] == n));
    let cut = last(Responses, &length)["response"].clone();
    assert_eq!(cut["incomplete_details"]["reason"], "max_output_tokens");
    assert_eq!(last(Responses, &stop)["response"]["status"], "completed");
    assert_eq!(last(OllamaChat, &failure), json!({ "error": "It failed." }));
    assert_eq!(last(OllamaGenerate, &length)["done_reason"], "length");
    assert_eq!(last(Completions, &failure)["error"]["code"], "generation_failed");
}

fn scores(text: &str) -> Value {
    json!([{ "token": text, "logprob": -0.5, "bytes": [1],
        "top_logprobs": [{ "token": "x", "logprob": -0.25 }] }])
}

/// The node's stream of the text `ab`, with the scores of three tokens.
fn scored() -> String {
    let chunk = |text: &str, told: &str, end: Value| {
        let choice = json!({ "delta": { "content": text }, "finish_reason": end,
            "logprobs": { "content": scores(told) } });
        format!("data: {}\n\n", json!({ "id": "r1", "created": 1, "choices": [choice] }))
    };
    let held_back = chunk("", "a", Value::Null);
    [held_back, chunk("ab", "b", Value::Null), chunk("", "c", "stop".into())].concat()
}

#[test]
fn completions_tell_log_probabilities_in_lists() {
    let node = scored();
    let top = json!({ "x": -0.25 });
    let lists = |tokens: &[&str], first: usize| {
        let places: Vec<usize> = (first..).take(tokens.len()).collect();
        json!({ "tokens": tokens, "token_logprobs": vec![-0.5; tokens.len()],
            "top_logprobs": vec![&top; tokens.len()], "text_offset": places })
    };
    let stream = events(&translated(Completions, &node, node.len()));
    let told: Vec<&Value> = stream.iter().map(|event| &event["choices"][0]["logprobs"]).collect();
    assert_eq!(told, [&lists(&["a", "b"], 0), &lists(&["c"], 2)]);
    let whole = whole(writer(Completions), MODEL.into(), node.as_bytes()).unwrap();
    assert_eq!(whole["choices"][0]["logprobs"], lists(&["a", "b", "c"], 0));
}

#[test]
fn an_echo_comes_before_the_answer() {
    let writer = || match Completions.read(br#"{"prompt":"Hi ","echo":true}"#) {
        Ok(Asked::Question(question)) => question.writer,
        _ => panic!("it is a question"),
    };
    let node = finished("stop");
    let stream = TranslatedStream::new(writer(), MODEL.to_owned()).take(node.as_bytes());
    let texts = events(std::str::from_utf8(&stream).unwrap());
    let texts = texts.iter().filter_map(|event| event["choices"][0]["text"].as_str());
    assert_eq!(texts.collect::<Vec<_>>(), ["Hi ", "Grün", " \"x\"", ""]);
    let whole = whole(writer(), MODEL.into(), node.as_bytes()).unwrap();
    assert_eq!(whole["choices"][0]["text"], "Hi Grün \"x\"");
}

#[test]
fn ollama_tells_log_probabilities_beside_their_text() {
    let node = scored();
    for dialect in [OllamaChat, OllamaGenerate] {
        let lines = events(&translated(dialect, &node, node.len()));
        let told: Vec<&Value> = lines.iter().map(|line| &line["logprobs"]).collect();
        let both = json!([scores("a")[0], scores("b")[0]]);
        assert_eq!(told, [&both, &scores("c")], "{dialect:?}");
        let whole = whole(writer(dialect), MODEL.into(), node.as_bytes()).unwrap();
        let all = json!([scores("a")[0], scores("b")[0], scores("c")[0]]);
        assert_eq!(whole["logprobs"], all, "{dialect:?}");
    }
    let plain = translated(OllamaChat, &finished("stop"), 64);
    assert!(!plain.contains("logprobs"), "{plain}");
}

#[test]
fn a_message_begins_with_its_prompts_tokens() {
    for tokens in [0, 9] {
        let stream = TranslatedStream::new(writer(Anthropic), MODEL.to_owned());
        let text = stream.with_prompt(tokens).take(finished("stop").as_bytes());
        let begun = &events(std::str::from_utf8(&text).unwrap())[0];
        assert_eq!(begun["message"]["usage"]["input_tokens"], tokens);
    }
}

#[test]
fn lines_of_ollama_hold_nothing_but_json() {
    let text = translated(OllamaChat, &finished("stop"), 50);
    assert!(text.lines().all(|line| serde_json::from_str::<Value>(line).is_ok()), "{text}");
}

#[test]
fn a_whole_answer_tells_text_end_and_cost() {
    let expect = |dialect, expect: Value, pointer: &str| {
        let answer = whole(writer(dialect), MODEL.into(), finished("length").as_bytes()).unwrap();
        assert_eq!(answer.pointer(pointer), Some(&expect), "{dialect:?} {answer}");
        let credits = answer.pointer("/credits/chargedUnits");
        assert_eq!(credits, Some(&"5".into()), "{dialect:?}");
        assert_eq!(answer["model"], MODEL);
    };
    let text = "Grün \"x\"";
    expect(Completions, text.into(), "/choices/0/text");
    expect(Completions, "length".into(), "/choices/0/finish_reason");
    expect(Completions, 11.into(), "/usage/total_tokens");
    expect(Responses, text.into(), "/output/0/content/0/text");
    expect(Responses, "incomplete".into(), "/status");
    expect(Responses, 4.into(), "/usage/input_tokens_details/cached_tokens");
    expect(Anthropic, text.into(), "/content/0/text");
    expect(Anthropic, "max_tokens".into(), "/stop_reason");
    expect(Anthropic, json!(5), "/usage/input_tokens");
    expect(OllamaChat, text.into(), "/message/content");
    expect(OllamaGenerate, text.into(), "/response");
    expect(OllamaGenerate, 2.into(), "/eval_count");
    expect(LlamaCppInfill, text.into(), "/content");
    expect(LlamaCppInfill, "limit".into(), "/stop_type");
    expect(LlamaCppInfill, 9.into(), "/tokens_evaluated");
    expect(LlamaCppInfill, 5.into(), "/timings/prompt_n");
    for dialect in [Completions, Responses, Anthropic, OllamaChat] {
        let error = whole(writer(dialect), MODEL.into(), failed().as_bytes()).unwrap_err();
        assert_eq!(error.code, "generation_failed");
    }
}

#[test]
fn errors_have_each_dialects_shape() {
    let body = r#"{"error":{"code":"insufficient_credits","message":"Too few.","type":"x","param":null,"request_id":"r1"}}"#;
    let (head, ()) = hyper::Response::builder()
        .status(StatusCode::UNAUTHORIZED)
        .header("x-request-id", "r2")
        .body(())
        .unwrap()
        .into_parts();
    let error = UpstreamError::of_answer(&head, body.as_bytes());
    let refusal = |dialect: ApiDialect, status: u16| {
        let (status, body) = dialect.refusal(StatusCode::from_u16(status).unwrap(), &error);
        (status.as_u16(), body)
    };
    let own: Value = serde_json::from_str(body).unwrap();
    assert_eq!(refusal(Completions, 402), (402, own));
    assert_eq!(refusal(OllamaChat, 402), (402, json!({ "error": "Too few." })));
    for (status, expect, kind) in [
        (400, 400, "invalid_request_error"),
        (401, 401, "authentication_error"),
        (402, 402, "billing_error"),
        (403, 403, "permission_error"),
        (404, 404, "not_found_error"),
        (413, 413, "request_too_large"),
        (422, 422, "invalid_request_error"),
        (429, 429, "rate_limit_error"),
        (500, 500, "api_error"),
        (503, 529, "overloaded_error"),
        (504, 504, "timeout_error"),
    ] {
        let (status, body) = refusal(Anthropic, status);
        assert_eq!((status, body["error"]["type"].as_str()), (expect, Some(kind)));
        assert_eq!([&body["error"]["message"], &body["request_id"]], ["Too few.", "r1"]);
    }
    // The node's own says nothing but its code.
    let wrong = UpstreamError::of_answer(&head, br#"{"error":{"code":"invalid_credential"}}"#);
    for dialect in [Completions, Responses, Anthropic, OllamaChat] {
        let (status, body) = dialect.refusal(head.status, &wrong);
        assert!(status == 401 && body.to_string().contains("x-api-key"), "{dialect:?}: {body}");
        assert!(dialect == OllamaChat || body.to_string().contains("r2"), "{dialect:?}: {body}");
    }
    let (head, ()) = hyper::Response::new(()).into_parts();
    assert!(!UpstreamError::of_answer(&head, b"<html>").message.is_empty());
}
