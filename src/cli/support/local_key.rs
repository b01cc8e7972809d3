//! The key that `quickstart`, `chat` and `bench` use. `quickstart` makes an account with trial
//! credits and keeps its key in a file that only its owner may read. The other commands make that
//! account only with a node of their own on an unused ledger: elsewhere credits come from the
//! operator alone.

use super::context::Context;
use super::listing;
use super::output::{CommandError, CommandResult};
use cresset_base::durable_file;
use cresset_client::ApiClient;
use cresset_commands::AdminCommand;
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use uuid::Uuid;

/// Name of the account, by which it is found again when its key is lost.
const ACCOUNT: &str = "quickstart";

pub(crate) fn path(data_dir: &Path) -> PathBuf {
    data_dir.join("quickstart.key")
}

/// The key to use.
#[derive(Clone, Debug)]
pub(crate) enum KeyChoice {
    /// That of the account `quickstart`, which is made if it is not there.
    Quickstart,
    /// This one or, without one, the kept key of `quickstart`.
    Given(Option<String>),
}

/// A client of the node at `base` with a working key. `own_node` says that this command started the
/// node.
pub(crate) async fn client(
    context: &Context,
    base: &str,
    model: &str,
    key: &KeyChoice,
    own_node: bool,
) -> CommandResult<ApiClient> {
    let node = context.node_address(base)?;
    let client = |secret: String| ApiClient {
        node: node.clone(),
        secret,
        model: model.to_owned(),
        session: Uuid::new_v4(),
    };
    if let KeyChoice::Given(Some(secret)) = key {
        return Ok(client(secret.clone()));
    }
    if let Some(secret) = kept(context) {
        let kept = client(secret);
        if kept.get("/v1/me").await.is_ok() {
            return Ok(kept);
        }
    }
    if let KeyChoice::Given(None) = key {
        let accounts =
            context.admin(AdminCommand::AccountList { after: None, matching: None }).await?;
        let unused = accounts["data"].as_array().is_some_and(Vec::is_empty);
        if !(own_node && unused) {
            return Err(no_key());
        }
    }
    let account = account(context).await?;
    let label = Some(ACCOUNT.to_owned());
    let key = context
        .admin(AdminCommand::KeyCreate { account: id(&account)?, label, expires_at: None })
        .await?;
    let secret = key["secret"]
        .as_str()
        .ok_or_else(|| CommandError::new("the node issued a key without a secret"))?;
    let owner_alone = Permissions::from_mode(0o600);
    durable_file::replace(&path(&context.data_dir), secret.as_bytes(), Some(owner_alone))?;
    Ok(client(secret.to_owned()))
}

fn no_key() -> CommandError {
    CommandError::new("no key was given, and this node is in use").remedy(
        "give the key of one with --key or in CRESSET_KEY; \
         `cresset keys create --account ACCOUNT` makes one",
    )
}

/// The kept key, as a client sends it.
pub(crate) fn kept(context: &Context) -> Option<String> {
    let kept = std::fs::read_to_string(path(&context.data_dir)).ok()?;
    Some(kept.trim().to_owned()).filter(|key| !key.is_empty())
}

/// The account of `quickstart`, if there is one that is active.
pub(crate) async fn existing_account(context: &Context) -> CommandResult<Option<Value>> {
    let mut found = None;
    let active = |account: &&Value| account["name"] == ACCOUNT && account["status"] == "active";
    let search = listing::pages(
        context,
        |after| AdminCommand::AccountList { after, matching: None },
        |page| {
            found = page["data"].as_array().into_iter().flatten().find(active).cloned();
            Ok(found.is_none())
        },
    );
    search.await?;
    Ok(found)
}

async fn account(context: &Context) -> CommandResult<Value> {
    if let Some(found) = existing_account(context).await? {
        return Ok(found);
    }
    let trial = context.config.quickstart.trial_units;
    let create = AdminCommand::AccountCreate {
        name: ACCOUNT.to_owned(),
        plan: None,
        trial,
        premium: 0,
        reference: None,
    };
    context.admin(create).await
}

/// The id that an operator's document shows.
pub(crate) fn id<T: DeserializeOwned>(document: &Value) -> CommandResult<T> {
    serde_json::from_value(document["id"].clone()).map_err(CommandError::new)
}
