//! Executes operator commands, on a store alone or beside a running node: the answers are the same.

use super::command::{AdminCommand, RequestScope};
use super::error::AdminError;
use super::lists::{self, RequestFilter, find_account};
use super::operator::Operator;
use super::{
    Actor, LongCommands, OperatorFiles, budgets, receipt_check, status, view, written_names,
};
use cresset_base::{AccountId, ApplicationId, CredentialId, RequestId, UnixMillis};
use cresset_ledger::{
    AccountChange, AccountStatus, BucketAmounts, BudgetOwner, Budgets, CalendarUse, Command,
    Credential, CredentialKind, Microcredits, Outcome, Refusal, RequestRecord, secret,
};
use cresset_store::{BackupScope, StoreError};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use std::path::PathBuf;
use tokio::sync::oneshot;

type Result<T = Value, E = AdminError> = std::result::Result<T, E>;

/// Characters of a note on an account at most.
const MAX_NOTE: usize = 1_000;

impl Operator<'_> {
    /// Executes the command if `actor` may give it, and logs it unless it only reads.
    pub async fn execute_for(&self, actor: &Actor, command: AdminCommand) -> Result {
        actor.may(&command)?;
        let command = match command {
            AdminCommand::ModelJobStart { job } if !actor.is_node_user() => {
                AdminCommand::ModelJobStart { job: job.within(&self.settings.folders)? }
            }
            command => command,
        };
        let acts = &self.files()?.acts;
        let act = acts.begin(actor, &command, self.store.now())?;
        let result = self.execute(command).await;
        if let (Some(id), Err(error)) = (act, &result) {
            acts.failed(id, error, self.store.now());
        }
        result
    }

    pub async fn execute(&self, command: AdminCommand) -> Result {
        written_names::check(&command)?;
        self.execute_checked(command).await
    }

    async fn execute_checked(&self, command: AdminCommand) -> Result {
        use AdminCommand as C;
        match command {
            C::AccountCreate { name, plan, trial, premium, reference } => {
                self.create_account(name, plan, [trial, premium], reference).await
            }
            C::AccountList { after, matching } => {
                self.read(lists::accounts(self.store.clone(), after, matching)).await
            }
            C::AccountFind { name } => Ok(json!({ "id": self.account_named(name).await? })),
            C::AccountShow { id } => self.show_account(id).await,
            C::KeyCreate { account, label, expires_at } => {
                let (kind, budgets) = (CredentialKind::ApiKey, Budgets::default());
                self.issue(kind, account, None, label, expires_at, budgets).await
            }
            C::KeyRotate { id, old_until, expires_at } => {
                self.rotate(id, old_until, expires_at).await
            }
            C::KeyList { account, after } => {
                self.read(lists::keys(self.store.clone(), account, after)).await
            }
            C::KeyRevoke { id } => self.revoke(id, CredentialKind::ApiKey).await,
            C::ApplicationCreate { account, name } => self.create_application(account, name).await,
            C::NodeList => {
                let nodes = self.store.nodes().await?;
                Ok(view::list(nodes.iter().map(|node| json!(node))))
            }
            C::ApplicationList { account, after } => {
                self.read(lists::applications(self.store.clone(), account, after)).await
            }
            C::ApplicationToken { application, expires_at } => {
                self.issue_token(application, expires_at).await
            }
            C::TokenRevoke { id } => self.revoke(id, CredentialKind::AccessToken).await,
            C::CreditGrant { account, bucket, units: amount, reference } => {
                let units = adjusted(amount, &reference)?;
                let grant = Command::Grant { account, bucket, units, reference: reference.clone() };
                self.adjust(account, grant, view::adjustment(bucket, units, &reference)).await
            }
            C::CreditDebit { account, bucket, units: amount, reference } => {
                let units = adjusted(amount, &reference)?;
                let debit = Command::Debit { account, bucket, units, reference: reference.clone() };
                self.adjust(account, debit, view::adjustment(bucket, units, &reference)).await
            }
            C::CreditShow { account } => self.show_credits(account).await,
            C::CreditStatement { account, after, limit, from, until } => {
                let period = from.unwrap_or(UnixMillis(0))..until.unwrap_or(UnixMillis(u64::MAX));
                self.read(lists::statement(self.store.clone(), account, after, limit, period)).await
            }
            C::RequestList { account, state, after, since } => {
                let filter = RequestFilter { state, since };
                self.read(lists::requests(self.store.clone(), account, filter, after)).await
            }
            C::RequestShow { request, scope } => self.show_request(request, scope).await,
            C::RequestUnblock { request, scope } => self.unblock(request, scope).await,
            C::RequestCancel { request, scope } => self.cancel(request, scope).await,
            C::ReceiptCheck { receipt } => {
                // Boxed, because it is far larger than the other commands.
                let check = Box::pin(receipt_check::check(self.store.clone(), receipt));
                self.read(check).await
            }
            C::Reload => self.reload().await,
            C::LedgerAudit => self.audit().await,
            C::LedgerBackup { to } => self.backup(BackupScope::Ledger, "ledger", to).await,
            C::Backup { to, files } => self.backup(BackupScope::Node(files), "node", to).await,
            C::Status => Ok(view::merged(self.status(), view::files(&self.store.stats().await))),
            // Boxed, so that the future of every command is no larger than it needs to be.
            command => Box::pin(self.execute_on_account(command)).await,
        }
    }

    /// Changes of what an account is and may do.
    async fn execute_on_account(&self, command: AdminCommand) -> Result {
        use AdminCommand as C;
        match command {
            C::AccountChange { id, name, plan, note, stores_answers } => {
                let change = AccountChange { name, plan, note, stores_answers };
                self.change_account(id, change).await
            }
            C::AccountBudget { id, period, units, alert_percent } => {
                self.set_budget(BudgetOwner::Account(id), period, units, alert_percent).await
            }
            C::KeyBudget { id, period, units, alert_percent } => {
                self.set_budget(BudgetOwner::Key(id), period, units, alert_percent).await
            }
            C::AccountEraseAnswers { id, request } => self.erase_answers(id, request).await,
            C::AccountSuspend { id } => self.set_status(id, AccountStatus::Suspended).await,
            C::AccountResume { id } => self.set_status(id, AccountStatus::Active).await,
            C::AccountClose { id, keep_credits, erase_answers } => {
                self.close_account(id, keep_credits, erase_answers).await
            }
            command => self.execute_on_node(command).await,
        }
    }

    pub(super) fn files(&self) -> Result<&OperatorFiles> {
        self.files.ok_or_else(|| AdminError::Unavailable("there is no data folder".into()))
    }

    /// Reads what may be many rows when the turn comes.
    pub(super) async fn read<T: Send + 'static>(
        &self,
        reads: impl Future<Output = Result<T>> + Send + 'static,
    ) -> Result<T> {
        self.long_commands().read(reads).await
    }

    /// A command without a node is the only one of its process.
    pub(super) fn long_commands(&self) -> LongCommands {
        self.live.map(|live| live.long_commands.clone()).unwrap_or_default()
    }

    // --- accounts

    async fn create_account(
        &self,
        name: String,
        plan: Option<String>,
        [trial, premium]: [u64; 2],
        reference: Option<String>,
    ) -> Result {
        let plan = plan.unwrap_or_else(|| "default".to_owned());
        self.require_plan(&plan)?;
        let opening = BucketAmounts { trial: units(trial)?, premium: units(premium)? };
        let id = reference.as_deref().map_or_else(AccountId::generate, referenced_account);
        let called = name.clone();
        let create = Command::CreateAccount { id, name, plan, opening };
        let outcome = self.store.submit(create).await.map_err(|error| match (error, reference) {
            (StoreError::Refused(Refusal::IdTaken), Some(reference)) => {
                AdminError::Refused(format!(
                    "the reference {reference:?} was used for account {id} with another name, plan or opening balance: \
                     repeat it as it was, or choose another --reference"
                ))
            }
            (error, _) => error.into(),
        })?;
        let mut others = self.read(lists::accounts_named(self.store.clone(), called)).await?;
        others.retain(|other| *other != id);
        let shown = view::merged(self.show_account(id).await?, repeated(&outcome));
        Ok(view::merged(shown, json!({ "same_name": others })))
    }

    fn require_plan(&self, plan: &str) -> Result<()> {
        let of_config = || self.settings.plans.keys().cloned().collect();
        let known = self.live.map_or_else(of_config, |live| live.node.plans.names());
        if known.iter().any(|name| name == plan) {
            return Ok(());
        }
        let known = known.join(", ");
        let place = match self.live {
            None => "in the configuration",
            Some(_) => "in force (`cresset reload` takes over one that was added)",
        };
        Err(AdminError::Invalid(format!("no plan {plan:?} {place}; there are: {known}")))
    }

    pub(super) async fn show_account(&self, id: AccountId) -> Result {
        let snapshot = self.store.read().await?;
        let account = find_account(&*snapshot, id).await?;
        let (now, quotas) = (self.store.now(), self.quotas_of(&account));
        let more = json!({
            "stored_answer_bytes": snapshot.answer_bytes(id).await?,
            "spending": budgets::spending(&account.budgets, &account.used, quotas, now),
        });
        Ok(view::merged(view::account(&account, snapshot.balances(id).await?, now), more))
    }

    /// A new plan counts from the account's next request on.
    async fn change_account(&self, id: AccountId, change: AccountChange) -> Result {
        change.plan.as_deref().map_or(Ok(()), |plan| self.require_plan(plan))?;
        if change.note.as_ref().is_some_and(|note| note.chars().count() > MAX_NOTE) {
            return Err(AdminError::Invalid(format!("a note has at most {MAX_NOTE} characters")));
        }
        self.store.submit(Command::ChangeAccount { id, change }).await?;
        self.show_account(id).await
    }

    pub(super) async fn set_status(&self, id: AccountId, status: AccountStatus) -> Result {
        self.store.submit(Command::SetAccountStatus { id, status }).await?;
        if let (Some(live), AccountStatus::Suspended) = (self.live, status) {
            live.node.live.cancel_account(id);
        }
        self.show_account(id).await
    }

    // --- credentials

    async fn issue_token(
        &self,
        application: ApplicationId,
        expires_at: Option<UnixMillis>,
    ) -> Result {
        let found = self.store.read().await?.application(application).await?;
        let found = found.ok_or(Refusal::ApplicationNotFound)?;
        let (kind, budgets) = (CredentialKind::AccessToken, Budgets::default());
        self.issue(kind, found.account, Some(application), None, expires_at, budgets).await
    }

    /// Mints a secret and shows it this once; the ledger keeps its digest.
    async fn issue(
        &self,
        kind: CredentialKind,
        account: AccountId,
        application: Option<ApplicationId>,
        label: Option<String>,
        expires_at: Option<UnixMillis>,
        budgets: Budgets,
    ) -> Result {
        let prefix = &self.settings.prefix;
        let mut random = [0; 32];
        getrandom::fill(&mut random)
            .map_err(|error| AdminError::Unavailable(format!("no randomness: {error}")))?;
        let minted = secret::mint(prefix, kind, &random);
        let digest =
            secret::digest(prefix, &minted).expect("invariant: a minted secret is well formed");
        let id = CredentialId::generate();
        let hint = secret::hint(&minted).to_owned();
        let credential = Credential {
            id,
            kind,
            account,
            application,
            label,
            digest,
            hint,
            created_at: UnixMillis::default(),
            expires_at,
            revoked_at: None,
            budgets,
            used: CalendarUse::default(),
        };
        self.store.submit(Command::IssueCredential { credential }).await?;
        Ok(view::merged(json!({ "id": id, "secret": minted }), self.show_credential(id).await?))
    }

    /// The new key is made first, so that a stop between the two leaves the account with a key.
    async fn rotate(
        &self,
        id: CredentialId,
        old_until: UnixMillis,
        expires_at: Option<UnixMillis>,
    ) -> Result {
        let old = self.store.read().await?.credential(id).await?;
        let old = old.filter(|credential| credential.kind == CredentialKind::ApiKey);
        let old = old.ok_or(Refusal::CredentialNotFound)?;
        if old.revoked_at.is_some() {
            let text = format!("key {id} is revoked: make a new one with `cresset keys create`");
            return Err(AdminError::Refused(text));
        }
        let Credential { kind, account, label, budgets, .. } = old;
        let new = self.issue(kind, account, None, label, expires_at, budgets).await?;
        self.store.submit(Command::ExpireCredential { id, at: old_until }).await?;
        let shown = self.show_credential(id).await?;
        let old = json!({ "replaces": id, "replaced_until": shown["expires_at"] });
        Ok(view::merged(new, old))
    }

    pub(super) async fn show_credential(&self, id: CredentialId) -> Result {
        let found = self.store.read().await?.credential(id).await?;
        let found = found.ok_or(Refusal::CredentialNotFound)?;
        Ok(view::credential(&found, self.store.now()))
    }

    /// Revokes a credential. It takes effect on the next request, and cancels running requests of
    /// the credential.
    async fn revoke(&self, id: CredentialId, kind: CredentialKind) -> Result {
        let found = self.store.read().await?.credential(id).await?;
        found.filter(|credential| credential.kind == kind).ok_or(Refusal::CredentialNotFound)?;
        self.store.submit(Command::RevokeCredential { id }).await?;
        if let Some(live) = self.live {
            live.node.live.cancel_credential(id);
        }
        self.show_credential(id).await
    }

    // --- applications

    async fn create_application(&self, account: AccountId, name: String) -> Result {
        let id = ApplicationId::generate();
        self.store.submit(Command::CreateApplication { id, account, name }).await?;
        let created = self.store.read().await?.application(id).await?;
        Ok(view::application(&created.ok_or(Refusal::ApplicationNotFound)?, &[], self.store.now()))
    }

    // --- credits

    async fn adjust(&self, account: AccountId, command: Command, shown: Value) -> Result {
        let outcome = self.store.submit(command).await?;
        let shown = view::merged(shown, self.show_credits(account).await?);
        Ok(view::merged(shown, repeated(&outcome)))
    }

    async fn show_credits(&self, account: AccountId) -> Result {
        let snapshot = self.store.read().await?;
        let found = find_account(&*snapshot, account).await?;
        let more = json!({ "last_sequence": snapshot.last_sequence(account).await? });
        Ok(view::merged(view::credits(&found, snapshot.balances(account).await?), more))
    }

    // --- requests

    async fn show_request(&self, request: RequestId, scope: RequestScope) -> Result {
        let record = self.find_request(request, scope).await?;
        let snapshot = self.store.read().await?;
        let crashes = snapshot.crashes(record.key.account, &record.fingerprint).await?;
        let block = self.settings.requests.crash_block_ms();
        Ok(view::merged(view::request(&record), view::crashes(crashes, block)))
    }

    /// Lets the input of a request run again that was running in two crashes of the node.
    async fn unblock(&self, request: RequestId, scope: RequestScope) -> Result {
        let record = self.find_request(request, scope).await?;
        let (account, fingerprint) = (record.key.account, record.fingerprint);
        let outcome = self.store.submit(Command::ForgetCrashes { account, fingerprint }).await?;
        let forgotten = matches!(outcome, Outcome::Done);
        let shown = self.show_request(request, scope).await?;
        Ok(view::merged(shown, json!({ "crashes_forgotten": forgotten })))
    }

    async fn find_request(&self, request: RequestId, scope: RequestScope) -> Result<RequestRecord> {
        let reads = lists::requests_by_id(self.store.clone(), request, scope.account);
        // One account is a look-up; all of them may be many.
        let mut found =
            if scope.account.is_some() { reads.await? } else { self.read(reads).await? };
        // An account alone means the request made with the account's own key, if its applications
        // used the id too.
        let own = scope.account.is_some() && found.len() > 1;
        found.retain(|record| match scope.application {
            Some(id) => record.key.application == Some(id),
            None => !own || record.key.application.is_none(),
        });
        only_one(found)
    }

    /// Without a node no request runs: opening the ledger ended those that an earlier process left
    /// behind.
    async fn cancel(&self, request: RequestId, scope: RequestScope) -> Result {
        let record = self.find_request(request, scope).await?;
        let Some(live) = self.live else { return Ok(view::request(&record)) };
        let unavailable =
            |_| AdminError::Unavailable("the ledger cannot be reached now: try again".to_owned());
        Ok(view::request(&cresset_request::cancel(&live.node, record).await.map_err(unavailable)?))
    }

    // --- the ledger and the node

    async fn audit(&self) -> Result {
        let store = self.store.clone();
        Ok(view::audit(&self.long_commands().run(move || store.audit()).await??))
    }

    async fn backup(&self, scope: BackupScope, kind: &str, to: PathBuf) -> Result {
        if to.exists() {
            let text = format!("{} exists and is left as it is: name a new file", to.display());
            return Err(AdminError::Refused(text));
        }
        let (store, path) = (self.store.clone(), to.clone());
        self.long_commands().run(move || store.backup(&scope, &path)).await??;
        let bytes = std::fs::metadata(&to).map_or(0, |file| file.len());
        if let Some(files) = self.files {
            files.backups.note(kind, bytes, self.store.now());
        }
        Ok(json!({ "path": to, "bytes": bytes }))
    }

    /// Has the node take over what changed in its data folder and its configuration.
    pub(super) async fn reload(&self) -> Result {
        let unable = |_| AdminError::Unavailable("this node cannot take over changes now".into());
        let Some(live) = self.live else { return Ok(status::stopped()) };
        let (answer, told) = oneshot::channel();
        live.reloads.send(answer).await.map_err(|error| unable(error.to_string()))?;
        told.await.map_err(|error| unable(error.to_string()))
    }

    fn status(&self) -> Value {
        self.live.map_or_else(status::stopped, status::of)
    }
}

/// The id of the account that is created under a reference. It follows from the reference alone, so
/// that a repeat finds the account.
fn referenced_account(reference: &str) -> AccountId {
    let digest: [u8; 32] = Sha256::digest(["cresset account ", reference].concat()).into();
    let (first, _) = digest.split_first_chunk().expect("invariant: 32 bytes are more than 16");
    AccountId(uuid::Builder::from_custom_bytes(*first).into_uuid())
}

/// Tells a command that was done before from one that is done now.
fn repeated(outcome: &Outcome) -> Value {
    json!({ "repeated": matches!(outcome, Outcome::Repeated) })
}

/// The amount of a grant or debit.
fn adjusted(amount: u64, reference: &str) -> Result<Microcredits> {
    if amount == 0 || reference.trim().is_empty() {
        let text = "an amount of at least one unit and a reference that is not empty are needed";
        return Err(AdminError::Invalid(text.into()));
    }
    units(amount)
}

fn units(amount: u64) -> Result<Microcredits> {
    Microcredits::new(amount).ok_or_else(|| {
        AdminError::Invalid(format!(
            "{amount} microcredits are more than the largest amount, {}",
            Microcredits::MAX
        ))
    })
}

fn only_one(mut found: Vec<RequestRecord>) -> Result<RequestRecord> {
    let last = found.pop().ok_or(Refusal::RequestNotFound)?;
    if found.is_empty() {
        return Ok(last);
    }
    found.push(last);
    let scope = |record: &RequestRecord| match record.key.application {
        Some(application) => {
            format!("--account {} --application {application}", record.key.account)
        }
        None => format!("--account {}", record.key.account),
    };
    let scopes = found.iter().map(scope).collect::<Vec<_>>().join("\n  ");
    Err(AdminError::Invalid(format!("several requests have this id; name one of:\n  {scopes}")))
}
