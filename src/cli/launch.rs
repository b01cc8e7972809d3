//! `cresset launch`: starts a tool with a key of its own that has a budget, and says what it cost.

use super::connect::{self, LaunchSettings, Tool, first_model, gateway_root, tools};
use super::support::context::Context;
use super::support::output::{CommandError, CommandResult};
use super::support::values::AccountArgument;
use super::support::{listing, local_key, text, values};
use clap::Args;
use cresset_base::{AccountId, CredentialId};
use cresset_client::HttpCall;
use cresset_commands::AdminCommand;
use cresset_ledger::BudgetPeriod;
use http_body_util::BodyExt;
use rustix::fs::Mode;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::time::Duration;
use tokio::process::Command;
use tokio::signal::unix::{SignalKind, signal};

/// A key whose command was killed ends after this time.
const KEY_LIFE: Duration = Duration::from_hours(7 * 24);
/// Requests that run on after their client has gone are waited for: 20 s in all.
const LAST_REQUESTS: (u32, Duration) = (40, Duration::from_millis(500));

#[derive(Args, Debug)]
#[command(after_help = "Examples:
  cresset launch claude
  cresset launch codex --budget 2_000_000 -- exec 'Fix the failing test'

The tool gets a key of its own, which ends with it, and keeps its settings in a folder of its own \
below the data folder. The receipts of its requests are put there, too.")]
pub(super) struct Arguments {
    /// The tool: claude, codex, opencode, qwen, cline, aider or open-webui
    tool: String,
    /// The account that pays, by id or name [default: that of quickstart, else the only one]
    #[arg(long, value_name = "ACCOUNT", value_parser = values::account)]
    account: Option<AccountArgument>,
    /// The most that the tool may spend in a month (UTC), microcredits
    #[arg(long, value_name = "UNITS", default_value = "5_000_000", value_parser = values::units)]
    budget: u64,
    /// The gateway, as http://host:port [default: that of the node on the data folder]
    #[arg(long, value_name = "URL")]
    gateway: Option<String>,
    /// The model's name [default: the first that can call tools, else the first]
    #[arg(long, value_name = "NAME")]
    model: Option<String>,
    /// Arguments for the tool itself
    #[arg(last = true, value_name = "ARGUMENTS")]
    for_tool: Vec<String>,
}

/// What the tool runs with.
struct Session {
    root: String,
    account: AccountId,
    key: CredentialId,
    secret: String,
    folder: PathBuf,
    /// Entries of the account's journal that were there before.
    earlier: u64,
}

pub(super) async fn run(context: &Context, arguments: Arguments) -> CommandResult {
    let known = tools();
    let (tool, launch) = find(&known, &arguments.tool)?;
    installed(tool, launch)?;
    let root = gateway_root(context, arguments.gateway.as_deref()).await;
    reached(context, &root).await?;
    let account = account(context, arguments.account).await?;
    let session = begin(context, tool, root, account, arguments.budget).await?;
    let worked = work(context, &session, tool, launch, arguments.model, arguments.for_tool).await;
    let bill = bill(context, &session).await;
    context.admin(AdminCommand::KeyRevoke { id: session.key }).await?;
    let (status, model) = worked?;
    let mut document = bill?;
    (document["tool"], document["model"]) = (tool.name.as_str().into(), model.into());
    context.output.result(&document, told)?;
    match status.code().and_then(|code| u8::try_from(code).ok()) {
        Some(0) => Ok(()),
        code => Err(CommandError::NegativeCode(code.unwrap_or(1))),
    }
}

/// The tool, and how it is started.
fn find<'a>(known: &'a [Tool], name: &str) -> CommandResult<(&'a Tool, &'a LaunchSettings)> {
    let mut all = known.iter().filter_map(|tool| Some((tool, tool.launch.as_ref()?)));
    let names = all.clone().map(|(tool, _)| tool.name.as_str()).collect::<Vec<_>>().join(", ");
    all.find(|(tool, _)| tool.name == name).ok_or_else(|| {
        CommandError::new(format!("{name} is not among the tools that can be started: {names}"))
            .remedy("`cresset connect` prints the settings of others")
    })
}

#[expect(clippy::disallowed_methods, reason = "PATH is no setting: it says where programs are")]
fn installed(tool: &Tool, launch: &LaunchSettings) -> CommandResult {
    let path = std::env::var_os("PATH").unwrap_or_default();
    if std::env::split_paths(&path).any(|folder| folder.join(&tool.name).is_file()) {
        return Ok(());
    }
    Err(CommandError::new(format!("{} is not installed", tool.name)).remedy(&launch.install))
}

/// Fails where no gateway answers, before a key is made for it.
async fn reached(context: &Context, root: &str) -> CommandResult {
    let sent = HttpCall::get("/v1/models").send(&context.node_address(root)?).await;
    let remedy = "start a node with one: `cresset serve --gateway 127.0.0.1:11435`";
    Ok(sent.map(drop).map_err(|error| error.remedy(remedy))?)
}

/// The account that pays.
async fn account(context: &Context, named: Option<AccountArgument>) -> CommandResult<AccountId> {
    if let Some(account) = named {
        return context.account(account).await;
    }
    if let Some(account) = local_key::existing_account(context).await? {
        return local_key::id(&account);
    }
    let list = AdminCommand::AccountList { after: None, matching: None };
    let accounts = context.admin(list).await?;
    match accounts["data"].as_array().map(Vec::as_slice) {
        Some([only]) => local_key::id(only),
        _ => Err(CommandError::new("it is not clear which account pays")
            .remedy("name it with --account; `cresset accounts list` shows them")),
    }
}

/// Makes the key with its budget, and the folder.
async fn begin(
    context: &Context,
    tool: &Tool,
    root: String,
    account: AccountId,
    budget: u64,
) -> CommandResult<Session> {
    let before = context.admin(AdminCommand::CreditShow { account }).await?;
    let earlier = before["last_sequence"].as_u64().unwrap_or_default();
    let label = Some(format!("launch {}", tool.name));
    let expires_at = Some(values::from_now(KEY_LIFE));
    let made = context.admin(AdminCommand::KeyCreate { account, label, expires_at }).await?;
    let key = local_key::id(&made)?;
    let limit = AdminCommand::KeyBudget {
        id: key,
        period: BudgetPeriod::Month,
        units: Some(budget),
        alert_percent: None,
    };
    context.admin(limit).await?;
    let secret = made["secret"].as_str().unwrap_or_default().to_owned();
    let folder = context.data_dir.join("launch").join(&tool.name);
    std::fs::create_dir_all(&folder)?;
    Ok(Session { root, account, key, secret, folder, earlier })
}

/// Runs the tool to its end. The result is how it ended, and its model.
async fn work(
    context: &Context,
    session: &Session,
    tool: &Tool,
    launch: &LaunchSettings,
    model: Option<String>,
    arguments: Vec<String>,
) -> CommandResult<(ExitStatus, String)> {
    let model = if let Some(model) = model {
        model
    } else {
        let (gateway, calls) = (context.node_address(&session.root)?, tool.api.contains("tools"));
        first_model(&gateway, &session.secret, calls).await?
    };
    let mut command = command(session, tool, launch, &model)?;
    command.args(arguments);
    // Ctrl-C is for the tool, which shares the terminal; a service manager's signal ends it.
    let (_interrupt, mut terminate) =
        (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
    let mut child = as_the_user_set_it(|| command.spawn())?;
    let status = tokio::select! {
        status = child.wait() => status?,
        _ = terminate.recv() => {
            child.start_kill()?;
            child.wait().await?
        }
    };
    Ok((status, model))
}

/// Writes the tool's files, and makes its command line.
fn command(
    session: &Session,
    tool: &Tool,
    launch: &LaunchSettings,
    model: &str,
) -> CommandResult<Command> {
    let folder = session.folder.to_string_lossy();
    let filled = |text: &String| {
        connect::filled(text, &session.root, &session.secret, model).replace("FOLDER", &folder)
    };
    for (name, text) in &launch.files {
        let file = session.folder.join(name);
        std::fs::create_dir_all(file.parent().unwrap_or(&session.folder))?;
        std::fs::write(file, filled(text))?;
    }
    let mut command = Command::new(&tool.name);
    command.args(launch.arguments.iter().map(filled));
    command.envs(launch.environment.iter().map(|(name, text)| (name, filled(text))));
    Ok(command)
}

/// Does it with the file mode mask that this program was started with.
fn as_the_user_set_it<T>(act: impl FnOnce() -> T) -> T {
    let own = rustix::process::umask(*super::FORMER_MASK.get().unwrap_or(&Mode::empty()));
    let done = act();
    rustix::process::umask(own);
    done
}

/// What was spent with the key. The receipts are put into the session's folder.
async fn bill(context: &Context, session: &Session) -> CommandResult<Value> {
    let requests = ended(context, session).await?;
    let receipts = session.folder.join("receipts");
    std::fs::create_dir_all(&receipts)?;
    let mut kept = 0;
    for id in requests.iter().filter_map(|request| request["id"].as_str()) {
        kept += usize::from(keep_receipt(context, session, id, &receipts).await?);
    }
    let tokens = |request: &Value| request["usage"]["total_tokens"].as_u64().unwrap_or(0);
    Ok(json!({
        "requests": requests.len(),
        "total_tokens": requests.iter().map(tokens).sum::<u64>(),
        "chargedUnits": requests.iter().map(charged).sum::<u64>().to_string(),
        "receipts": kept,
        "receipt_folder": receipts,
    }))
}

fn charged(document: &Value) -> u64 {
    text::amount(&document["chargedUnits"])
}

/// The requests that were made with the key, once none of them runs any more.
async fn ended(context: &Context, session: &Session) -> CommandResult<Vec<Value>> {
    let (tries, pause) = LAST_REQUESTS;
    for _ in 0..tries {
        let requests = spent(context, session).await?;
        if requests.iter().all(|request| request["finished_at"].is_u64()) {
            return Ok(requests);
        }
        tokio::time::sleep(pause).await;
    }
    spent(context, session).await
}

/// The requests that were made with the key.
async fn spent(context: &Context, session: &Session) -> CommandResult<Vec<Value>> {
    let key = json!(session.key);
    let with_key = |request: &&Value| {
        let attempts = request["attempts"].as_array().map_or(&[][..], Vec::as_slice);
        attempts.iter().any(|attempt| attempt["credential_id"] == key)
    };
    let account = session.account;
    let page = |after: Option<u64>| {
        let after = after.unwrap_or(session.earlier);
        AdminCommand::RequestList { account, state: None, after, since: None }
    };
    let mut found = Vec::new();
    let all = listing::pages(context, page, |page| {
        found.extend(page["data"].as_array().into_iter().flatten().filter(with_key).cloned());
        Ok(true)
    });
    all.await?;
    Ok(found)
}

/// Puts a request's receipt into the folder, if it has one.
async fn keep_receipt(
    context: &Context,
    session: &Session,
    id: &str,
    folder: &Path,
) -> CommandResult<bool> {
    let call = HttpCall::get(&format!("/v1/requests/{id}/receipt")).bearer(&session.secret);
    let answer = call.send(&context.node_address(&session.root)?).await?;
    if !answer.status().is_success() {
        return Ok(false);
    }
    let receipt = answer.into_body().collect().await.map_err(CommandError::new)?;
    std::fs::write(folder.join(format!("{id}.json")), receipt.to_bytes())?;
    Ok(true)
}

fn told(document: &Value) -> String {
    format!(
        "{} with {}: {} requests, {} tokens, {} credits; {} receipts in {}\n",
        document["tool"].as_str().unwrap_or_default(),
        document["model"].as_str().unwrap_or_default(),
        document["requests"],
        document["total_tokens"],
        text::credits(charged(document)),
        document["receipts"],
        document["receipt_folder"].as_str().unwrap_or_default(),
    )
}
