//! The operator's own account and key, for `quickstart` and `chat`: made once, kept in a file that
//! only its owner may read.

use super::api_client::ApiClient;
use super::context::Context;
use super::listing;
use super::output::{CommandError, CommandResult};
use crate::server::operator::AdminCommand;
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use uuid::Uuid;

/// Name of the account, by which it is found again when its key is lost.
const ACCOUNT: &str = "quickstart";

pub(crate) fn path(data_dir: &Path) -> PathBuf {
    data_dir.join("quickstart.key")
}

/// A client of the node at `base` with a working key: the kept one, or a new one under the same
/// account.
pub(crate) async fn client(context: &Context, base: &str, model: &str) -> CommandResult<ApiClient> {
    let client = |secret: String| ApiClient {
        base: base.to_owned(),
        secret,
        model: model.to_owned(),
        session: Uuid::new_v4(),
    };
    if let Ok(secret) = std::fs::read_to_string(path(&context.data_dir)) {
        let kept = client(secret.trim().to_owned());
        if kept.get("/v1/me").await.is_ok() {
            return Ok(kept);
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
    keep(&path(&context.data_dir), secret)?;
    Ok(client(secret.to_owned()))
}

async fn account(context: &Context) -> CommandResult<Value> {
    let mut found = None;
    let active = |account: &&Value| account["name"] == ACCOUNT && account["status"] == "active";
    let search = listing::pages(
        context,
        |after| AdminCommand::AccountList { after },
        |page| {
            found = page["data"].as_array().into_iter().flatten().find(active).cloned();
            Ok(found.is_none())
        },
    );
    search.await?;
    if let Some(found) = found {
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

fn keep(path: &Path, secret: &str) -> CommandResult {
    let unfinished = path.with_extension("key.new");
    let mut file = std::fs::OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(&unfinished)?;
    file.write_all(secret.as_bytes())?;
    file.sync_all()?;
    std::fs::rename(&unfinished, path)?;
    Ok(())
}
