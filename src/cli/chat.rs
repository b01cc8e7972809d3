//! `cresset chat`: a conversation in the terminal, with a running node or one of our own.

use super::support::context::Context;
use super::support::local_key::KeyChoice;
use super::support::output::{CommandError, CommandResult, Style, note, print_generated, style};
use super::support::{node_client, shutdown, text};
use clap::Args;
use cresset_client::ApiClient;
use cresset_node::config::client_key;
use serde_json::{Value, json};
use std::io::{BufRead, IsTerminal, Write};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

#[derive(Args, Debug)]
#[command(after_help = "Examples:
  cresset chat
  echo 'Name three rivers.' | cresset chat smollm2-135m-instruct --max-tokens 100
An empty line is skipped, /new begins a new conversation, Ctrl-D ends.")]
pub(super) struct Arguments {
    /// Model, by name or id [default: the default release if it is served, else the first model]
    model: Option<String>,
    /// The same, as other programs have it
    #[arg(long = "model", value_name = "NAME", hide = true, conflicts_with = "model")]
    model_option: Option<String>,
    /// Key to use [default: CRESSET_KEY, or the one that `cresset quickstart` made]
    #[arg(long)]
    key: Option<String>,
    #[command(flatten)]
    talk: TalkArguments,
}

/// What a conversation begins with.
#[derive(Args, Debug)]
pub(super) struct TalkArguments {
    /// Longest answer, tokens
    #[arg(long, default_value_t = 512, value_parser = clap::value_parser!(u32).range(1..))]
    max_tokens: u32,
    /// System prompt: instructions for the model before the conversation
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,
}

pub(super) async fn run(context: Context, arguments: Arguments) -> CommandResult {
    let shutdown = shutdown::on_signal()?;
    let key = KeyChoice::Given(arguments.key.clone().or_else(client_key));
    let model = arguments.model.as_deref().or(arguments.model_option.as_deref());
    let opening = node_client::open(&context, model, &key);
    let client = shutdown::unless_interrupted(&shutdown, opening).await?;
    let talked = talk(&context, &client.api, &arguments.talk, &shutdown).await;
    client.close().await;
    talked
}

/// Asks one question.
pub(super) async fn ask_once(
    context: &Context,
    api: &ApiClient,
    arguments: &TalkArguments,
    question: &str,
) -> CommandResult {
    Conversation::begin(api.clone(), arguments).turn(context, question).await
}

pub(super) async fn talk(
    context: &Context,
    api: &ApiClient,
    arguments: &TalkArguments,
    shutdown: &CancellationToken,
) -> CommandResult {
    let mut conversation = Conversation::begin(api.clone(), arguments);
    let mut lines = read_lines();
    loop {
        prompt();
        let line = tokio::select! {
            line = lines.recv() => line,
            () = shutdown.cancelled() => None,
        };
        match line.as_deref().map(str::trim) {
            None => return Ok(()),
            Some("") => {}
            Some("/new") => conversation = Conversation::begin(api.clone(), arguments),
            Some(question) => {
                let turn = conversation.turn(context, question);
                shutdown::unless_interrupted(shutdown, turn).await?;
            }
        }
    }
}

struct Conversation {
    api: ApiClient,
    messages: Vec<Value>,
    max_tokens: u32,
}

impl Conversation {
    fn begin(api: ApiClient, arguments: &TalkArguments) -> Self {
        let system =
            arguments.system.iter().map(|text| json!({ "role": "system", "content": text }));
        let api = ApiClient { session: uuid::Uuid::new_v4(), ..api };
        Self { api, messages: system.collect(), max_tokens: arguments.max_tokens }
    }

    /// A refused question leaves the conversation as it was; it ends one that no person has.
    async fn turn(&mut self, context: &Context, question: &str) -> CommandResult {
        self.messages.push(json!({ "role": "user", "content": question }));
        let json = context.output.json;
        let show = |text: &str| if json { Ok(()) } else { print_generated(text) };
        match self.api.ask(&self.messages, &json!({ "max_tokens": self.max_tokens }), show).await {
            Ok(answer) => {
                self.messages.push(json!({ "role": "assistant", "content": answer.text }));
                let document = json!({ "request_id": answer.request, "answer": answer.text, "usage": answer.usage,
                                       "chargedUnits": answer.charged.to_string() });
                context.output.line(&document, "")?;
                let tokens = &answer.usage["total_tokens"];
                let cost = format!("{tokens} tokens, {} credits", text::credits(answer.charged));
                note(&style(Style::Dim, &cost));
                Ok(())
            }
            Err(failure @ CommandError::OutputClosed) => Err(failure),
            Err(failure) if !std::io::stdin().is_terminal() => Err(failure),
            Err(failure) => {
                self.messages.pop();
                context.output.fail(&failure);
                Ok(())
            }
        }
    }
}

fn prompt() {
    if std::io::stdin().is_terminal() {
        let _ = write!(std::io::stderr().lock(), "> ");
    }
}

/// Reads lines of stdin on a thread of its own, because a blocked read must not delay a signal.
fn read_lines() -> mpsc::Receiver<String> {
    let (sender, receiver) = mpsc::channel(1);
    #[expect(
        clippy::disallowed_methods,
        reason = "it waits for the terminal and ends with the process"
    )]
    std::thread::spawn(move || {
        for line in std::io::stdin().lock().lines().map_while(Result::<_, std::io::Error>::ok) {
            if sender.blocking_send(line).is_err() {
                return;
            }
        }
    });
    receiver
}
