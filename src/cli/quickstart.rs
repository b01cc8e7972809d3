//! `cresset quickstart`: from nothing to an answer. It skips every step that is done already.

use super::run::prepare;
use super::serve::lost_device;
use super::support::context::Context;
use super::support::output::{CommandResult, Style, note, print, print_generated, style};
use super::support::{local_key, node_client, shutdown, text};
use clap::Args;
use cresset_client::{ApiClient, ChatAnswer};
use cresset_node::RunningNode;
use serde_json::{Value, json};

const QUESTION: &str = "What is the capital of France? Answer in one sentence.";
const MAX_TOKENS: u32 = 128;

#[derive(Args, Debug)]
#[command(after_help = "Examples:
  cresset quickstart
  cresset quickstart --model qwen2.5-coder-1.5b-instruct
  cresset quickstart --once --data-dir /tmp/try --question 'Why is the sky blue?'")]
pub(super) struct Arguments {
    /// Stop after the answer
    #[arg(long)]
    once: bool,
    /// Model, as `cresset models pull` names it [default: the default release]
    #[arg(long, value_name = "NAME")]
    model: Option<String>,
    /// Question to ask the model
    #[arg(long, value_name = "TEXT", default_value = QUESTION)]
    question: String,
}

pub(super) async fn run(context: Context, arguments: Arguments) -> CommandResult {
    let shutdown = shutdown::on_signal_or_hangup()?;
    let mut client = shutdown::unless_interrupted(
        &shutdown,
        prepare(&context, arguments.model.as_deref(), false),
    )
    .await?;
    if !arguments.once {
        open_gateway(&mut client).await?;
    }
    let mut outcome =
        shutdown::unless_interrupted(&shutdown, show(&context, &client, &arguments)).await;
    if outcome.is_ok()
        && !arguments.once
        && let Some(node) = &client.own
    {
        note("\nserving until Ctrl-C");
        tokio::select! {
            () = shutdown.cancelled() => {}
            () = node.all_devices_lost() => outcome = Err(lost_device()),
        }
    }
    client.close().await;
    outcome
}

#[cfg(not(feature = "gateway"))]
#[expect(clippy::unused_async, reason = "with the feature it waits")]
async fn open_gateway(_: &mut node_client::NodeClient) -> CommandResult {
    Ok(())
}

/// Opens a gateway on the node of this command, with the key that it asks with, unless the
/// configuration has one.
#[cfg(feature = "gateway")]
async fn open_gateway(client: &mut node_client::NodeClient) -> CommandResult {
    use std::net::Ipv4Addr;
    use tokio::net::TcpListener;

    /// The port that `cresset relay` listens on, too.
    const PORT: u16 = 11_435;
    let Some(node) = client.own.as_mut().filter(|node| node.gateway_url().is_none()) else {
        return Ok(());
    };
    let listener = match TcpListener::bind((Ipv4Addr::LOCALHOST, PORT)).await {
        Ok(listener) => listener,
        Err(_) => TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?,
    };
    node.open_gateway(listener, Some(client.api.secret.clone()))?;
    Ok(())
}

async fn show(
    context: &Context,
    client: &node_client::NodeClient,
    arguments: &Arguments,
) -> CommandResult {
    let api = &client.api;
    let json = context.output.json;
    let messages = [json!({ "role": "user", "content": arguments.question })];
    let options = json!({ "max_tokens": MAX_TOKENS, "temperature": 0 });
    let stream = |text: &str| if json { Ok(()) } else { print_generated(text) };
    if !json {
        print(&format!("\n> {}\n", arguments.question))?;
    }
    let answer = api.ask(&messages, &options, stream).await?;
    let (me, credits) = (api.get("/v1/me").await?, api.get("/v1/credits").await?);
    let gateway = client.own.as_ref().and_then(RunningNode::gateway_url);
    let mut document = summary(context, api, &answer, &me, &credits);
    document["gateway"] = gateway.map(|url| format!("{url}/v1")).into();
    let configured = &context.config.gateway;
    let has_key = configured.listen.is_none() || configured.key_file.is_some();
    document["gateway_has_key"] = has_key.into();
    context.output.result(&document, |document| {
        let snippets = snippets(context, api);
        let stops = arguments.once && client.own.is_some();
        let first = if stops { "Start the node with `cresset serve`, then:\n\n" } else { "" };
        format!("\n\n{}\n\n{first}{snippets}", facts(document))
    })
}

fn summary(
    context: &Context,
    api: &ApiClient,
    answer: &ChatAnswer,
    me: &Value,
    credits: &Value,
) -> Value {
    json!({
        "listen": api.node.url,
        "data_dir": context.data_dir,
        "model": api.model,
        "account_id": me["id"],
        "key_file": local_key::path(&context.data_dir),
        "request_id": answer.request,
        "answer": answer.text,
        "usage": answer.usage,
        "chargedUnits": answer.charged.to_string(),
        "credits": credits,
    })
}

fn facts(document: &Value) -> String {
    let credits = |value: &Value| format!("{} credits", text::credits(text::amount(value)));
    let usage = &document["usage"];
    let (prompt, completion) = (&usage["prompt_tokens"], &usage["completion_tokens"]);
    let rows = [
        ("tokens", format!("{prompt} prompt + {completion} completion")),
        ("charged", credits(&document["chargedUnits"])),
        ("balance", credits(&document["credits"]["processingEligibleUnits"])),
        ("address", document["listen"].as_str().unwrap_or_default().to_owned()),
        ("key", format!("in {}", document["key_file"].as_str().unwrap_or_default())),
    ];
    let gateway = document["gateway"].as_str();
    let key = if document["gateway_has_key"] == true { "any key" } else { "this key" };
    let tools = gateway.map(|url| ("tools", format!("{url}, {key}, models by name")));
    let line = |(name, value): &(&str, String)| {
        format!("{}  {value}", style(Style::Dim, &format!("{name:8}")))
    };
    rows.iter().chain(&tools).map(line).collect::<Vec<_>>().join("\n")
}

/// Examples that work as pasted: the key is read from its file, and every call makes a new request
/// id.
fn snippets(context: &Context, api: &ApiClient) -> String {
    let key = local_key::path(&context.data_dir);
    let (base, model, key) = (&api.node.url, &api.model, key.display());
    let session = format!("X-{}-Session-Id", context.config.service_name);
    format!(
        r#"With curl:

curl -N {base}/v1/chat/completions \
  -H "Authorization: Bearer $(cat '{key}')" \
  -H "Idempotency-Key: $({UUID})" -H "{session}: $({UUID})" \
  -H "Content-Type: application/json" \
  -d '{{"model": "{model}", "stream": true, "messages": [{{"role": "user", "content": "Why is the sky blue?"}}]}}'

With Python (pip install openai):

import uuid, openai

class Cresset(openai.OpenAI):  # one request id per call, kept over the client's own retries
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._idempotency_header = "Idempotency-Key"
    def _idempotency_key(self):
        return str(uuid.uuid4())

client = Cresset(base_url="{base}/v1", api_key=open("{key}").read().strip(),
                 default_headers={{"{session}": str(uuid.uuid4())}})
answer = client.chat.completions.create(
    model="{model}", messages=[{{"role": "user", "content": "Why is the sky blue?"}}])
print(answer.choices[0].message.content)
"#
    )
}

/// A shell command that prints a fresh UUID.
const UUID: &str = if cfg!(target_os = "linux") {
    "cat /proc/sys/kernel/random/uuid"
} else {
    "uuidgen | tr A-Z a-z"
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tools_are_told_whether_the_gateway_has_a_key() {
        for (has_key, expect) in
            [(true, "http://g/v1, any key,"), (false, "http://g/v1, this key,")]
        {
            let told = facts(&json!({ "gateway": "http://g/v1", "gateway_has_key": has_key }));
            assert!(told.contains(expect), "{told}");
        }
    }
}
