//! Calls of tools: the template tells of them as the reference does, calls that it writes are read
//! back, and answers of the engine are calls where one is asked for.

use super::{CheckFinding, CheckInput};
use crate::goldens::ToolConversation;
use crate::policy::policy;
use crate::subject::{CalledTool, Result, SubjectError, ToolCase};
use serde_json::{Value, json};

/// Functions with the arguments that they have beside an `id`.
const FUNCTIONS: [(&str, &str); 8] = [
    ("get_weather", "city"),
    ("find_train", "destination"),
    ("send_message", "text"),
    ("run_command", "command"),
    ("open-file", "path"),
    ("search.web", "query"),
    ("translate", "sentence"),
    ("set_reminder", "note"),
];

/// Texts that are easily lost on the way into a prompt, or back out of one.
const ARGUMENTS: [&str; 5] = [
    "Oslo",
    "Zürich, 東京 and 😀",
    "she said \"no\" \\ and left {\"a\": [1]}",
    "first line\n  second line\n\nlast line",
    "a <b> & c </d> 'e'",
];

/// Calls that the engine is asked for. Their schemas leave nothing open that a random model would
/// fill without end.
const GENERATED: usize = 4;

pub(super) fn calls(input: &mut CheckInput) -> Result<CheckFinding> {
    const GATE: &str = "told, read back and generated as the schemas demand";
    let cases = cases();
    let mut wrong = Vec::new();
    for case in &cases {
        let Some(written) = input.subject.write_call(case)? else {
            return Ok(CheckFinding::not_run("its template has no known form of calls", GATE));
        };
        let untold = case.words().find(|word| !written.prompt.contains(*word));
        if let Some(word) = untold {
            wrong.push(format!("the prompt does not tell of {word:?}"));
        }
        if written.calls != [case.call.clone()] {
            wrong.push(format!("{:?} was read as {:?}", case.call, written.calls));
        }
    }
    let told = input.goldens.map_or(&[][..], |goldens| &goldens.tool_conversations);
    for conversation in told {
        wrong.extend(told_otherwise(input, conversation)?);
    }
    for number in 0..GENERATED {
        wrong.extend(generated(input, number)?);
    }
    Ok(CheckFinding::from_wrong(&wrong, cases.len() + told.len() + GENERATED, GATE))
}

/// Compares the prompt of a conversation with the one that the reference made of it, and says what
/// is wrong.
fn told_otherwise(
    input: &mut CheckInput,
    conversation: &ToolConversation,
) -> Result<Option<String>> {
    let ToolConversation { id, request, prompt } = conversation;
    match input.subject.encode_request(request) {
        Err(SubjectError::Refused(why)) => Ok(Some(format!("{id:?} is refused: {why}"))),
        ids => {
            let equal = ids? == input.subject.encode(prompt, true)?;
            Ok((!equal).then(|| format!("the prompt of {id:?} is not the reference's")))
        }
    }
}

/// Conversations with one to three tools, of which one is called.
pub(super) fn cases() -> Vec<ToolCase> {
    let mut cases = Vec::new();
    for (at, (name, argument)) in FUNCTIONS.iter().enumerate() {
        for (number, value) in ARGUMENTS.iter().enumerate() {
            let offered = FUNCTIONS.iter().cycle().skip(at).take(1 + number % 3);
            let tools = offered.map(|(name, argument)| function(name, argument));
            cases.push(ToolCase {
                tools: tools.collect(),
                question: format!("Please do number {number}."),
                call: CalledTool {
                    name: (*name).into(),
                    arguments: json!({ *argument: value, "id": number }),
                },
            });
        }
    }
    cases
}

fn function(name: &str, argument: &str) -> Value {
    json!({ "type": "function", "function": {
        "name": name,
        "description": format!("What {name} does."),
        "parameters": {
            "type": "object",
            "properties": { argument: { "type": "string" }, "id": { "type": "integer" } },
            "required": [argument, "id"],
        },
    } })
}

impl ToolCase {
    /// The words that a prompt has to tell.
    fn words(&self) -> impl Iterator<Item = &str> {
        self.tools.iter().flat_map(|tool| {
            let function = &tool["function"];
            let named = [&function["name"], &function["description"]];
            let properties = function["parameters"]["properties"].as_object();
            let properties = properties.into_iter().flat_map(|all| all.keys().map(String::as_str));
            named.into_iter().filter_map(Value::as_str).chain(properties)
        })
    }
}

/// The values of the only argument.
const STATES: [&str; 2] = ["on", "off"];

/// A request that demands a call: of any function, or of one.
fn demand(number: usize) -> Value {
    let parameters = json!({
        "type": "object",
        "properties": { "state": { "type": "string", "enum": STATES } },
        "required": ["state"],
        "additionalProperties": false,
    });
    let tool = |name: &str| json!({ "type": "function", "function": { "name": name, "parameters": parameters } });
    let named = json!({ "type": "function", "function": { "name": "lamp" } });
    let choice = if number.is_multiple_of(2) { json!("required") } else { named };
    json!({
        "messages": [{ "role": "user", "content": format!("Switch lamp {number}.") }],
        "tools": [tool("lamp"), tool("fan")],
        "tool_choice": choice,
        "parallel_tool_calls": false,
        "temperature": 0.0,
        "max_tokens": policy().tools.call_tokens.value as u32,
    })
}

/// Asks for a call and returns what is wrong with the answer, if anything is.
fn generated(input: &mut CheckInput, number: usize) -> Result<Option<String>> {
    let answer = input.subject.call_api(&demand(number))?;
    let answer: Value = serde_json::from_slice(&answer.body).unwrap_or_default();
    let choice = &answer["choices"][0];
    let function = &choice["message"]["tool_calls"][0]["function"];
    let arguments = function["arguments"].as_str().unwrap_or_default();
    let arguments: Value = serde_json::from_str(arguments).unwrap_or_default();
    let names: &[&str] = if number.is_multiple_of(2) { &["lamp", "fan"] } else { &["lamp"] };
    let follows = choice["finish_reason"] == "tool_calls"
        && names.iter().any(|name| function["name"] == *name)
        && STATES.iter().any(|state| arguments == json!({ "state": state }));
    Ok((!follows).then(|| format!("no call was generated: {answer}").chars().take(300).collect()))
}
