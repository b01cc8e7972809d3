//! `cresset run`: one command from the name of a model to its answer, or to a conversation.

use super::chat::{self, TalkArguments};
use super::support::context::Context;
use super::support::local_key::KeyChoice;
use super::support::node_client::{self, NodeClient};
use super::support::output::{CommandError, CommandResult, note};
use super::support::{shutdown, text};
use crate::{models, qualify, reload};
use clap::Args;
use cresset_catalogue::{Manifest, NotQualified};
use cresset_node::ledger;
use cresset_store::Store;
use std::io::{BufRead, IsTerminal, Write};
use std::path::Path;

#[derive(Args, Debug)]
#[command(after_help = "Examples:
  cresset run                                          the default model, a conversation
  cresset run qwen2.5-coder-1.5b-instruct 'Reverse a list in Python.'
  cresset run OWNER/REPOSITORY:Q4_K_M --yes
  cresset run ./model.gguf
It makes what is missing: data folder, model, qualification, account and key. It asks the node \
that runs on the data folder, or starts one that ends with it.")]
pub(super) struct Arguments {
    /// A release's name, a file or folder of this machine, or a repository of the hub as
    /// `cresset models pull` takes it [default: the default release]
    model: Option<String>,
    /// Question to ask; without one a conversation begins
    question: Option<String>,
    /// Serve a model without reference outputs, and do not ask first
    #[arg(long, short)]
    yes: bool,
    #[command(flatten)]
    talk: TalkArguments,
}

pub(super) async fn run(context: Context, arguments: Arguments) -> CommandResult {
    let shutdown = shutdown::on_signal()?;
    let client = shutdown::unless_interrupted(
        &shutdown,
        prepare(&context, arguments.model.as_deref(), arguments.yes),
    )
    .await?;
    let talked = match &arguments.question {
        None => chat::talk(&context, &client.api, &arguments.talk, &shutdown).await,
        Some(question) => {
            let asked = chat::ask_once(&context, &client.api, &arguments.talk, question);
            shutdown::unless_interrupted(&shutdown, asked).await
        }
    };
    client.close().await;
    talked
}

/// Makes or finds the folder, the model with its proof, the node, the account and the key.
pub(super) async fn prepare(
    context: &Context,
    model: Option<&str>,
    yes: bool,
) -> CommandResult<NodeClient> {
    if !Store::exists(&ledger::place(&context.data_dir, &context.config)?) {
        ledger::create(&context.data_dir, &context.config)?;
        note(&format!("made {}", context.data_dir.display()));
    }
    let manifest = match model {
        Some(wanted) => obtain(context, wanted).await?,
        None => Manifest::default_release(),
    };
    let name = &manifest.name;
    if let Err(why) = qualify::ensure_qualified(context, context.assembly()?, name).await {
        accept(context, &manifest, yes, why).await?;
    }
    node_client::open(context, Some(name), &KeyChoice::Quickstart).await
}

/// The release that a user means: one that is known or was pulled from there before, or else what
/// is at this path or in this repository, which is added or fetched.
async fn obtain(context: &Context, wanted: &str) -> CommandResult<Manifest> {
    let catalogue = context.assembly()?.catalogue();
    if let Some(known) = catalogue.known_as(wanted)? {
        if !catalogue.is_pulled(&known) {
            let bytes = known.files.iter().map(|file| file.bytes).sum();
            note(&format!("{} has {} to fetch", known.name, text::mebibytes(bytes)));
        }
        return Ok(known);
    }
    let path = Path::new(wanted);
    if path.exists() {
        return models::add(context, path.to_owned(), None).await;
    }
    models::pull(context, wanted.to_owned()).await
}

/// Has a release served that qualified without reference outputs, if the user wants it; any other
/// failure stands.
async fn accept(
    context: &Context,
    manifest: &Manifest,
    yes: bool,
    why: CommandError,
) -> CommandResult {
    let assembly = context.assembly()?;
    let name = &manifest.name;
    let standing = assembly.qualified(manifest, &assembly.host());
    if !matches!(standing, Err(NotQualified::NotAccepted { .. })) {
        return Err(why);
    }
    if !yes && !confirmed(name)? {
        return Err(why);
    }
    let reason = if yes { "cresset run --yes" } else { "confirmed at `cresset run`" };
    models::accept(assembly, name, reason, true)?;
    reload::after_change(context, Some(manifest.id), name).await;
    Ok(())
}

/// Asks on a terminal; elsewhere nobody can answer.
fn confirmed(name: &str) -> CommandResult<bool> {
    if !std::io::stdin().is_terminal() {
        let what = format!("{name} has no reference outputs, so it is served only if you want it");
        return Err(CommandError::new(what).remedy("give --yes"));
    }
    let question = format!(
        "{name} passed every check that needs no reference outputs. None were found to compare its \
         answers with. Serve it? [y/N] "
    );
    write!(std::io::stderr().lock(), "{question}")?;
    let mut answer = String::new();
    std::io::stdin().lock().read_line(&mut answer)?;
    Ok(matches!(answer.trim().to_ascii_lowercase().as_str(), "y" | "yes"))
}
