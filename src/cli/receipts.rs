//! `cresset receipts`: checks the receipts of completed requests.

use super::support::context::Context;
use super::support::output::{CommandError, CommandResult};
use super::support::text;
use clap::{Args, Subcommand};
use cresset_catalogue::{Catalogue, NodePublicKey, claimed};
use cresset_commands::AdminCommand;
#[cfg(feature = "prover")]
use cresset_prover::{Prover, RerunOutcome};
use cresset_request::ReceiptStatement;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// A receipt has about 3 KB; a body that clients may send at most 256 KiB by default.
const MAX_FILE_BYTES: u64 = 16 << 20;

#[derive(Debug, Subcommand)]
pub(super) enum ReceiptsCommand {
    /// Check a receipt: its signature, what the ledger says, and with --rerun the answer itself
    Verify(VerifyArguments),
}

#[derive(Args, Debug)]
#[command(after_help = "Examples:
  cresset receipts verify receipt.json                      on the node: the journal, too
  cresset receipts verify receipt.json --key FINGERPRINT    anywhere: signature and arithmetic
  cresset receipts verify receipt.json --rerun --request body.json

A client gets the receipt with GET /v1/requests/ID/receipt. FINGERPRINT is `evidence.key` of the \
node's models and `key` in `cresset status`; keys that were replaced stay listed there.

--rerun loads the release whose files the receipt names and computes the answer again from the \
body that the client sent, with the seed and the parameters of the receipt. On the CPU, and on a \
GPU with engine.deterministic, the same build on the same hardware gives the same tokens, \
whatever runs beside it. Another build, another kind of CPU or GPU, engine.dequantise, or a GPU \
without engine.deterministic may choose another of two tokens that are nearly equally likely; the \
command says which of these differ here.")]
pub(super) struct VerifyArguments {
    /// The receipt, as the node sent it
    file: PathBuf,
    /// Trust this key: hex SHA-256 of its bytes [default: the keys of the data folder's node]
    #[arg(long, value_name = "FINGERPRINT")]
    key: Option<String>,
    /// Compute the answer again and compare its tokens
    #[arg(long, requires = "request")]
    rerun: bool,
    /// The JSON body that the client sent
    #[arg(long, value_name = "FILE", requires = "rerun")]
    request: Option<PathBuf>,
}

pub(super) async fn run(context: &Context, command: ReceiptsCommand) -> CommandResult {
    let ReceiptsCommand::Verify(arguments) = command;
    let receipt = read(&arguments.file)?;
    let own = Catalogue::new(&context.data_dir).keys()?;
    let (key, statement) = signed(&receipt, &own, arguments.key.as_deref())?;
    if let Some(fault) = statement.fault() {
        return Err(refused(&fault));
    }
    let journal = if own.contains(&key) { ledger(context, &statement).await? } else { Value::Null };
    let rerun = match arguments.request {
        Some(body) => rerun(context, statement.clone(), read(&body)?).await?,
        None => Value::Null,
    };
    let document = json!({
        "valid": true,
        "key": key.id(),
        "key_of": if own.last() == Some(&key) { "this node" } else if own.contains(&key) { "this node, earlier" } else { "another node" },
        "journal": journal,
        "rerun": rerun,
        "statement": statement,
    });
    context.output.result(&document, told)
}

/// The statement and the key that signed it, which is the named one or one of the node's own.
fn signed(
    receipt: &[u8],
    own: &[NodePublicKey],
    named: Option<&str>,
) -> CommandResult<(NodePublicKey, ReceiptStatement)> {
    let claim: ReceiptStatement = claimed(receipt).ok_or_else(|| {
        refused("it is no receipt").remedy("give the whole answer of GET /v1/requests/ID/receipt")
    })?;
    let key = NodePublicKey::parse(&claim.predicate.key.ed25519);
    let trusted = |key: &NodePublicKey| match named {
        Some(named) => key.id().eq_ignore_ascii_case(named),
        None => own.contains(key),
    };
    let Some(key) = key.filter(trusted) else {
        let what =
            format!("it names the key {}, which is not trusted here", claim.predicate.key.id);
        return Err(refused(&what).remedy(
            "compare that key with `evidence.key` of the node's models, and give it with --key if it is the same",
        ));
    };
    let statement = key.open(receipt).map_err(|fault| refused(&fault.to_string()))?;
    Ok((key, statement))
}

/// What the ledger says, if there is one here. Fails where it differs.
async fn ledger(context: &Context, statement: &ReceiptStatement) -> CommandResult<Value> {
    cresset_node::ledger::require(&context.data_dir, &context.config)?;
    let receipt = Box::new(statement.clone());
    let found = context.admin(AdminCommand::ReceiptCheck { receipt }).await?;
    let differences = found["differences"].as_array().map_or(&[][..], Vec::as_slice);
    let sentences: Vec<&str> = differences.iter().filter_map(Value::as_str).collect();
    if sentences.is_empty() { Ok(found) } else { Err(refused(&sentences.join("; "))) }
}

#[cfg(not(feature = "prover"))]
#[expect(clippy::unused_async, reason = "with the feature it waits")]
async fn rerun(_: &Context, _: ReceiptStatement, _: Vec<u8>) -> CommandResult<Value> {
    Err(crate::without::refused("--rerun is given", "prover"))
}

#[cfg(feature = "prover")]
async fn rerun(
    context: &Context,
    statement: ReceiptStatement,
    body: Vec<u8>,
) -> CommandResult<Value> {
    let assembly = context.assembly()?.clone();
    let running = tokio::task::spawn_blocking(move || Prover(&assembly).rerun(&statement, &body));
    let RerunOutcome { release, tokens, equal, differs } =
        running.await.map_err(CommandError::new)??;
    if equal {
        return Ok(json!({ "release": release, "tokens": tokens, "differs": differs }));
    }
    let what = format!("{release} computed other tokens now than the receipt's answer has");
    let why = if differs.is_empty() {
        "build, hardware and settings are those of the receipt: the answer was not computed as it says".into()
    } else {
        format!("what can differ: {}", differs.join("; "))
    };
    Err(refused(&what).remedy(why))
}

fn refused(why: &str) -> CommandError {
    CommandError::new(format!("the receipt is not proven: {why}"))
}

fn read(path: &Path) -> CommandResult<Vec<u8>> {
    let failed = |why: String| CommandError::new(format!("{}: {why}", path.display()));
    let size = std::fs::metadata(path).map_err(|error| failed(error.to_string()))?.len();
    if size > MAX_FILE_BYTES {
        return Err(failed(format!("it has {size} bytes, and no receipt or body has so many")));
    }
    std::fs::read(path).map_err(|error| failed(error.to_string()))
}

fn told(document: &Value) -> String {
    let said = &document["statement"]["predicate"];
    let word = |value: &Value| value.as_str().map_or_else(|| value.to_string(), text::plain);
    let journal = told_of_journal(&document["journal"]);
    let rerun = match &document["rerun"] {
        Value::Null => "not asked for (--rerun)".to_owned(),
        found => format!("{} tokens, all the same", found["tokens"]),
    };
    let usage = &said["usage"];
    format!(
        "the receipt is genuine\nrequest   {}\nkey       {} of {}\nmodel     release {}, grade {}\nusage     {} + {} tokens, {} microcredits\njournal   {journal}\nrerun     {rerun}\n",
        word(&said["request"]["id"]),
        word(&document["key"]),
        word(&document["key_of"]),
        word(&said["release"]["id"]),
        word(&said["verdict"]["grade"]),
        usage["prompt_tokens"],
        usage["completion_tokens"],
        word(&said["charge"]["chargedUnits"]),
    )
}

fn told_of_journal(journal: &Value) -> String {
    match journal {
        Value::Null => "not compared: this is not the node that signed it".to_owned(),
        found => {
            let rest = if found["row_kept"] == true {
                ", usage, fingerprint and charge agree"
            } else {
                ": its charge agrees, the rest is no longer kept"
            };
            format!("entry {}{rest}", found["entry"]["sequence"])
        }
    }
}
