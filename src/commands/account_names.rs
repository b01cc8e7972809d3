//! Accounts by name, where commands ask for an id.

use super::lists;
use super::{AdminError, Operator};
use cresset_base::AccountId;
use serde_json::{Value, json};

impl Operator<'_> {
    /// Puts the id of an account into a command that has its name there.
    pub async fn resolve_names(&self, mut command: Value) -> Result<Value, AdminError> {
        let is_of_account =
            command["command"].as_str().is_some_and(|name| name.starts_with("account_"));
        let own: &[&str] = if is_of_account { &["/id"] } else { &[] };
        for place in ["/account", "/scope/account"].iter().chain(own) {
            let Some(member) = command.pointer_mut(place) else { continue };
            if let Some(name) = member.as_str().filter(|text| text.parse::<AccountId>().is_err()) {
                *member = json!(self.account_named(name.to_owned()).await?);
            }
        }
        Ok(command)
    }

    /// The only account with this name.
    pub(super) async fn account_named(&self, name: String) -> Result<AccountId, AdminError> {
        let found = self.read(lists::accounts_named(self.store.clone(), name.clone())).await?;
        match found[..] {
            [id] => Ok(id),
            [] => Err(AdminError::NotFound(format!(
                "no account is called {name:?}: `cresset accounts list` shows those there are"
            ))),
            _ => {
                let all = found.iter().map(AccountId::to_string).collect::<Vec<_>>().join(", ");
                Err(AdminError::Invalid(format!(
                    "{} accounts are called {name:?}: name one by its id: {all}",
                    found.len()
                )))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::AdminCommand;
    use cresset_base::SystemClock;
    use cresset_store::{Limits, RequestSettings, Store, StoreConfig};
    use std::sync::Arc;

    #[tokio::test]
    async fn a_name_stands_for_the_only_account_that_has_it() {
        let folder = tempfile::tempdir().unwrap();
        let config = StoreConfig::folder(folder.path());
        Store::init(&config).unwrap();
        let settings = RequestSettings { min_free_mib: 0, ..RequestSettings::default() };
        let limits = Limits { requests: settings, ..Limits::default() };
        let store = Store::open_briefly(&config, Arc::new(SystemClock), limits).unwrap();
        let settings = crate::test_settings();
        let operator = Operator::of_store(&store, &settings);
        let mut ids = Vec::new();
        for name in ["acme", "twin", "twin"] {
            let create = AdminCommand::AccountCreate {
                name: name.into(),
                plan: None,
                trial: 0,
                premium: 0,
                reference: None,
            };
            ids.push(operator.execute(create).await.unwrap()["id"].take());
        }
        let id = &ids[0];
        for (said, meant) in [
            (
                json!({ "command": "account_show", "id": "acme" }),
                json!({ "command": "account_show", "id": id }),
            ),
            (
                json!({ "command": "key_list", "account": "acme", "after": null }),
                json!({ "command": "key_list", "account": id, "after": null }),
            ),
            (
                json!({ "command": "request_show", "scope": { "account": "acme" } }),
                json!({ "command": "request_show", "scope": { "account": id } }),
            ),
            (
                json!({ "command": "key_revoke", "id": "acme" }),
                json!({ "command": "key_revoke", "id": "acme" }),
            ),
            (
                json!({ "command": "credit_show", "account": id }),
                json!({ "command": "credit_show", "account": id }),
            ),
        ] {
            assert_eq!(operator.resolve_names(said).await, Ok(meant));
        }
        let refused = async |name: &str| {
            let said = json!({ "command": "credit_show", "account": name });
            operator.resolve_names(said).await.unwrap_err().to_string()
        };
        assert!(refused("nobody").await.contains("cresset accounts list"));
        let told = refused("twin").await;
        assert!(ids[1..].iter().all(|id| told.contains(id.as_str().unwrap())), "{told}");
    }
}
