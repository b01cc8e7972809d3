//! `cresset connect`: what a tool has to be told so that it asks a node through its gateway.

use super::support::context::Context;
use super::support::local_key;
use super::support::output::{CommandError, CommandResult, note};
use clap::Args;
use cresset_client::{HttpCall, json};
use cresset_commands::AdminCommand;
use cresset_tls::NodeAddress;
use hyper::StatusCode;
use serde::Deserialize;
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// Where quickstart opens its gateway.
const USUAL_GATEWAY: &str = "http://127.0.0.1:11435";
const TOOLS: &str = include_str!("connect/tools.toml");

#[derive(Args, Debug)]
#[command(after_help = "Example:
  cresset connect openai-python
Without a tool, the tools that are known are listed.")]
pub(super) struct Arguments {
    /// The tool
    tool: Option<String>,
    /// The gateway, as http://host:port: that of `cresset quickstart`, `serve --gateway` or `relay`
    /// [default: that of the node on the data folder, else http://127.0.0.1:11435]
    #[arg(long, value_name = "URL")]
    gateway: Option<String>,
    /// The model's name [default: the first that the gateway lists]
    #[arg(long, value_name = "NAME")]
    model: Option<String>,
    /// The client's key. A gateway with a key of its own, as quickstart's, takes any text
    /// [default: that of quickstart, else the word any]
    #[arg(long, value_name = "TEXT")]
    key: Option<String>,
}

/// The tools that are known, in the order of the file.
#[derive(Deserialize)]
struct ToolList {
    tool: Vec<Tool>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Tool {
    pub name: String,
    /// The interface that it uses, and what of it.
    pub api: String,
    text: String,
    /// How its program, which has the tool's name, is started.
    pub launch: Option<LaunchSettings>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct LaunchSettings {
    /// The command that installs it.
    pub install: String,
    #[serde(default)]
    pub arguments: Vec<String>,
    #[serde(default)]
    pub environment: BTreeMap<String, String>,
    /// Texts of files below the tool's folder, by name.
    #[serde(default)]
    pub files: BTreeMap<String, String>,
}

/// The text with the node's values in their places.
pub(super) fn filled(text: &str, root: &str, key: &str, model: &str) -> String {
    let base = format!("{root}/v1");
    let places = [("BASE", base.as_str()), ("ROOT", root), ("KEY", key), ("MODEL", model)];
    places.iter().fold(text.to_owned(), |text, (place, value)| replaced(&text, place, value))
}

/// `text` with `value` for the word `place`; a longer word such as `API_KEY` stays.
fn replaced(text: &str, place: &str, value: &str) -> String {
    let mut told = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find(place) {
        let (before, after) = (&rest[..at], &rest[at + place.len()..]);
        let goes_on = |letter: char| letter.is_ascii_uppercase() || letter == '_';
        let is_word = !before.ends_with(goes_on) && !after.starts_with(goes_on);
        told.push_str(before);
        told.push_str(if is_word { value } else { place });
        rest = after;
    }
    told + rest
}

pub(super) fn tools() -> Vec<Tool> {
    let list: ToolList =
        toml::from_str(TOOLS).expect("invariant: the built-in file is read by a test");
    list.tool
}

pub(super) async fn run(context: &Context, arguments: Arguments) -> CommandResult {
    let tools = tools();
    let Some(name) = &arguments.tool else {
        let rows = tools.iter().map(|tool| json!({ "tool": tool.name, "api": tool.api }));
        let document = json!({ "tools": rows.collect::<Vec<_>>() });
        return context.output.result(&document, |_| listed(&tools));
    };
    let tool = tools.iter().find(|tool| tool.name == *name);
    let tool = tool.ok_or_else(|| unknown(name, &tools))?;
    let root = gateway_root(context, arguments.gateway.as_deref()).await;
    // A gateway with a key of its own takes any text.
    let key = arguments.key.or_else(|| local_key::kept(context)).unwrap_or_else(|| "any".into());
    let model = match arguments.model {
        Some(model) => model,
        None => first_model(&context.node_address(&root)?, &key, false).await?,
    };
    let text = filled(tool.text.trim(), &root, &key, &model) + "\n";
    let document = json!({ "tool": tool.name, "api": tool.api, "model": model, "text": text });
    context.output.result(&document, |_| text.clone())
}

fn unknown(name: &str, tools: &[Tool]) -> CommandError {
    let names: Vec<_> = tools.iter().map(|tool| tool.name.as_str()).collect();
    let what = format!("{name} is not among the tools that are known: {}", names.join(", "));
    let remedy = "a tool that speaks OpenAI's interface takes the address as base URL, and a \
                  model's name";
    CommandError::new(what).remedy(remedy)
}

fn listed(tools: &[Tool]) -> String {
    let rows = tools.iter().map(|tool| format!("{:18}{}", tool.name, tool.api));
    rows.collect::<Vec<_>>().join("\n") + "\n"
}

/// The gateway's address without `/v1`: the named one, else that of the node on the data folder.
pub(super) async fn gateway_root(context: &Context, named: Option<&str>) -> String {
    let gateway = match named {
        Some(gateway) => gateway.to_owned(),
        None => gateway_of_node(context).await.unwrap_or_else(|| USUAL_GATEWAY.into()),
    };
    gateway.trim_end_matches('/').trim_end_matches("/v1").to_owned()
}

/// The gateway of the node that runs on the data folder, if it has one.
async fn gateway_of_node(context: &Context) -> Option<String> {
    let status = context.ask_node(&AdminCommand::Status).await.ok()??;
    status["gateway"].as_str().map(str::to_owned)
}

/// The first model that the gateway lists for this key; the first one with tools, if that is wanted
/// and there is one.
pub(super) async fn first_model(
    gateway: &NodeAddress,
    key: &str,
    with_tools: bool,
) -> CommandResult<String> {
    let remedy = "name the model with --model, or start a gateway: `cresset serve --gateway \
                  127.0.0.1:11435`";
    let call = HttpCall::get("/v1/models").bearer(key);
    let answer = call.send(gateway).await.map_err(|error| error.remedy(remedy))?;
    let (status, page): (_, Value) = json(answer).await?;
    if status == StatusCode::UNAUTHORIZED {
        let what = format!("{} has no key of its own, and does not accept this one", gateway.url);
        return Err(CommandError::new(what).remedy("give a key of an account with --key"));
    }
    let models = page["data"].as_array().map_or(&[][..], Vec::as_slice);
    let calls = |model: &&Value| {
        model["capabilities"].as_array().is_some_and(|all| all.contains(&json!("tools")))
    };
    let chosen = models.iter().find(|model| with_tools && calls(model)).or(models.first());
    if with_tools && !chosen.is_some_and(|model| calls(&model)) {
        note("no model here has the capability `tools`, which coding agents need");
    }
    let name = chosen.and_then(|model| model["id"].as_str()).map(str::to_owned);
    name.ok_or_else(|| CommandError::new(format!("{} lists no model", gateway.url)).remedy(remedy))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn every_tool_is_told_the_address() {
        let tools = tools();
        for tool in &tools {
            let launch = tool.launch.iter();
            let started = launch.flat_map(|launch| {
                let texts = launch.environment.values().chain(launch.files.values());
                texts.chain(&launch.arguments).cloned().collect::<Vec<_>>()
            });
            let started = started.collect::<Vec<_>>().join("\n");
            for text in [&tool.text, &started].into_iter().filter(|text| !text.is_empty()) {
                let told = filled(text, "http://127.0.0.1:1", "secret", "small");
                assert!(told.contains("http://127.0.0.1:1"), "{told}");
                for place in ["BASE", "ROOT", "MODEL", "KEY"] {
                    assert_eq!(replaced(&told, place, ""), told, "{}: {place} is left", tool.name);
                }
            }
        }
        let names: BTreeSet<_> = tools.iter().map(|tool| &tool.name).collect();
        assert_eq!(names.len(), tools.len(), "each has a name of its own");
    }

    #[test]
    fn only_whole_words_are_replaced() {
        assert_eq!(replaced("KEY=KEY API_KEY KEYS \"KEY\"", "KEY", "k"), "k=k API_KEY KEYS \"k\"");
    }
}
