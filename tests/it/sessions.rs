//! Sessions of coding agents: a long system prompt with tools, calls and results in the history.
//! What a session has in the cache is not computed again, and is shared with nobody else.

use super::capabilities::{CALLER, REPLIES, node, tool, with_tools};
use super::support::{World, account, application, issue};
use futures_util::{StreamExt, stream};
use serde_json::{Value, json};
use std::sync::Arc;
use uuid::Uuid;

/// Tokens of a block in these tests' engines.
const BLOCK: u64 = 16;
const SESSIONS: usize = 16;
const TURNS: usize = 6;

/// Tokens of a turn, as its answer's `usage` tells them.
#[derive(Clone, Copy, Debug, Default)]
struct Turn {
    prompt: u64,
    cached: u64,
    completion: u64,
}

impl Turn {
    fn of(answer: &Value) -> Self {
        let usage = &answer["usage"];
        let [prompt, completion] =
            ["prompt_tokens", "completion_tokens"].map(|name| usage[name].as_u64().unwrap());
        let cached = usage["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
        Self { prompt, cached, completion }
    }

    /// Tokens that the next turn finds in whole blocks. The answer's last token is not computed.
    fn leaves(self) -> u64 {
        (self.prompt + self.completion).saturating_sub(1) / BLOCK * BLOCK
    }
}

/// A conversation that sends back what it is answered.
struct Session {
    messages: Vec<Value>,
    last: Turn,
}

impl Session {
    fn new(system: Option<&str>, ask: &str) -> Self {
        let system = system.map(|content| json!({ "role": "system", "content": content }));
        let ask = json!({ "role": "user", "content": ask });
        Self { messages: system.into_iter().chain([ask]).collect(), last: Turn::default() }
    }

    /// A session of its own task, for the agent with many tools.
    fn of_task(number: usize) -> Self {
        Self::new(Some("You are an agent."), &format!("Task {number}: switch the lamp on."))
    }

    /// Asks, and takes the answer and the results of its calls into the conversation. Returns what
    /// the turn before had left in the cache, and this turn.
    async fn turn(&mut self, world: &World, key: &str, extra: &Value) -> (u64, Turn) {
        let mut body = world.ask(with_tools(extra));
        body["messages"] = json!(self.messages);
        let answer = world.post_as(key, Uuid::new_v4(), &body).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
        let answer = answer.json();
        let message = answer["choices"][0]["message"].clone();
        let calls = message["tool_calls"].as_array().cloned().unwrap_or_default();
        self.messages.push(message);
        let result =
            |call: &Value| json!({ "role": "tool", "tool_call_id": call["id"], "content": "done" });
        self.messages.extend(calls.iter().map(result));
        if calls.is_empty() {
            self.messages.push(json!({ "role": "user", "content": "Go on." }));
        }
        let left = std::mem::replace(&mut self.last, Turn::of(&answer)).leaves();
        (left, self.last)
    }
}

/// Families whose templates tell this answer in other words when it comes back: without its empty
/// thought or its words before the call, with a word in place of no text, with other quotes, or
/// with the id that the client was given. Their prompts are found, without that answer.
const RETOLD: [&str; 7] = [
    "GLM-4.6",
    "mistralai-Mistral-Nemo-Instruct-2407",
    "llama-cpp-deepseek-r1",
    "GLM-4.7-Flash",
    "google-gemma-4-31B-it",
    "LFM2.5-8B-A1B",
    "openai-gpt-oss-120b",
];

/// An answer with a call is found in the cache to its end when it comes back with the result.
#[tokio::test(flavor = "multi_thread")]
async fn a_call_that_comes_back_is_found_in_the_cache() {
    let mut retold = Vec::new();
    for (name, reply, _) in REPLIES {
        let world = node(name, reply, |setup| setup.context_tokens = 8192).await;
        let mut session = Session::new(None, "hello");
        for _ in 0..3 {
            // The words with which an answer begins may be part of its prompt alone.
            let before = session.last.prompt.saturating_sub(BLOCK) / BLOCK * BLOCK;
            let (left, found) = session.turn(&world, &world.key, &json!({})).await;
            assert!(found.cached >= before, "{name}: {found:?} of {before}");
            if found.cached < left && !retold.contains(&name) {
                retold.push(name);
            }
        }
        world.close().await;
    }
    assert_eq!(retold, RETOLD);
}

/// An agent's tools, of more than 9 000 tokens: the tiny model has one for each byte.
fn agent_tools() -> Value {
    let mut tools = vec![tool("lamp")];
    for name in ["read", "write", "edit", "search", "run", "ask"] {
        let mut tool = tool(name);
        tool["function"]["description"] = format!("It can {name}. ").repeat(130).into();
        tools.push(tool);
    }
    json!({ "tools": tools })
}

/// Calls a tool twice and then tells of it, again and again.
fn agent_answer(prompt: &str) -> String {
    let turns = prompt.matches("<|im_start|>assistant").count();
    if turns.is_multiple_of(3) {
        return format!("The lamp is on, as turn {turns} shows.");
    }
    let call = r#"{"name": "lamp", "arguments": {"state": "on"}}"#;
    format!("Turn {turns} begins.\n<tool_call>\n{call}\n</tool_call>")
}

async fn agent_node(num_blocks: usize) -> World {
    node(CALLER, "", |setup| {
        setup.answer = Some(Arc::new(agent_answer));
        (setup.context_tokens, setup.num_blocks) = (30_000, num_blocks);
        (setup.trial, setup.max_batched_tokens) = (1_000_000_000, 2048);
    })
    .await
}

/// Runs the sessions, so many of them at once. No turn computes what the turn before has left.
/// Returns the blocks that hold all of them at their ends, with what they share once.
async fn run_sessions(num_blocks: usize, at_once: usize) -> usize {
    let (world, tools) = (agent_node(num_blocks).await, agent_tools());
    let mut sessions: Vec<_> = (0..SESSIONS).map(Session::of_task).collect();
    let mut shared = 0;
    for turn in 0..TURNS {
        let asked = sessions.iter_mut().map(|session| session.turn(&world, &world.key, &tools));
        let turns: Vec<_> = stream::iter(asked).buffered(at_once).collect().await;
        for (left, found) in turns {
            assert!(found.cached >= left, "turn {turn}: {found:?} of {left} that were left");
            shared = if turn == 0 { found.cached } else { shared };
        }
    }
    assert!(shared > 9_000, "{shared} tokens of the system prompt were found");
    assert_eq!(world.status()["models"][0]["preemptions"], 0);
    world.close().await;
    let ends = sessions.iter().map(|session| session.last.prompt + session.last.completion);
    let own: u64 = ends.map(|end| end.div_ceil(BLOCK) - shared / BLOCK).sum();
    (own + shared / BLOCK) as usize
}

#[tokio::test(flavor = "multi_thread")]
async fn no_turn_computes_what_its_session_has_in_the_cache() {
    let just_enough = run_sessions(30_000, 1).await;
    for (num_blocks, at_once) in [(30_000, SESSIONS), (just_enough, 1), (just_enough, SESSIONS)] {
        run_sessions(num_blocks, at_once).await;
    }
}

/// The system prompt and the tools are computed once for all sessions of an account's keys, and
/// once for those of each application connection. Nobody else finds them.
#[tokio::test(flavor = "multi_thread")]
async fn a_system_prompt_is_shared_within_a_connection_alone() {
    let (world, tools) = (agent_node(30_000).await, agent_tools());
    let stranger = account(&world.node, 1_000_000_000, 0).await;
    let [one, other] = [
        application(&world.node, world.account).await,
        application(&world.node, world.account).await,
    ];
    let foreign = application(&world.node, stranger).await;
    for (task, (who, account, application, shares)) in [
        ("an account's key", world.account, None, false),
        ("another key of it", world.account, None, true),
        ("an application of it", world.account, Some(one), false),
        ("another token of the application", world.account, Some(one), true),
        ("another application of it", world.account, Some(other), false),
        ("another account", stranger, None, false),
        ("another key of the other account", stranger, None, true),
        ("its application", stranger, Some(foreign), false),
        ("the first account again", world.account, None, true),
    ]
    .into_iter()
    .enumerate()
    {
        let (_, key) = issue(&world.node, account, application).await;
        let (_, found) = Session::of_task(task).turn(&world, &key, &tools).await;
        let expect = if shares { found.prompt - 200..found.prompt } else { 0..1 };
        assert!(expect.contains(&found.cached), "{who}: {found:?}");
    }
    world.close().await;
}
