//! Closing an account: its credentials are revoked, what it runs is cancelled, and what is left of
//! its credits is taken back. Its statement and its requests stay; stored answers are erased where
//! that is asked for, as on demand.

use super::error::AdminError;
use super::lists;
use super::operator::Operator;
use super::view;
use cresset_base::{AccountId, RequestId};
use cresset_ledger::{AccountStatus, Bucket, Command, Credential, Refusal};
use serde_json::{Value, json};
use std::time::Duration;

/// Between two looks at the requests that are being cancelled, and the number of looks: 30 s in
/// all.
const LOOKS: (Duration, u32) = (Duration::from_millis(50), 600);

type Result<T = Value, E = AdminError> = std::result::Result<T, E>;

impl Operator<'_> {
    /// Closes the account. A repeat does what is left to do.
    pub(super) async fn close_account(
        &self,
        id: AccountId,
        keep_credits: bool,
        erase_answers: bool,
    ) -> Result {
        self.set_status(id, AccountStatus::Suspended).await?;
        let valid = |row: &Credential| row.account == id && row.revoked_at.is_none();
        let valid = lists::credentials(&*self.store.read().await?, valid).await?;
        for credential in &valid {
            self.store.submit(Command::RevokeCredential { id: credential.id }).await?;
        }
        self.wait_for_requests(id).await?;
        let taken = if keep_credits { [0; 2] } else { self.take_credits(id).await? };
        let erased = if erase_answers { self.erase(id, None).await? } else { 0 };
        let done = json!({
            "erased_answers": erased,
            "revoked_credentials": valid.len(),
            "takenTrialUnits": taken[0].to_string(),
            "takenPremiumUnits": taken[1].to_string(),
        });
        Ok(view::merged(self.show_account(id).await?, done))
    }

    /// Erases the stored answers of an account, or of its requests with one id. Their requests
    /// answer as after retention, and are never run again.
    pub(super) async fn erase_answers(&self, id: AccountId, request: Option<RequestId>) -> Result {
        lists::find_account(&*self.store.read().await?, id).await?;
        if let Some(request) = request {
            let found = lists::requests_by_id(self.store.clone(), request, Some(id)).await?;
            found.first().map(drop).ok_or(Refusal::RequestNotFound)?;
        }
        let erased = self.erase(id, request).await?;
        let done = json!({ "erased_answers": erased, "request_id": request });
        Ok(view::merged(self.show_account(id).await?, done))
    }

    async fn erase(&self, id: AccountId, request: Option<RequestId>) -> Result<u64> {
        let store = self.store.clone();
        Ok(self.long_commands().run(move || store.erase_answers(id, request)).await??)
    }

    async fn wait_for_requests(&self, id: AccountId) -> Result<()> {
        let (pause, looks) = LOOKS;
        for _ in 0..looks {
            let account = self.store.read().await?.account(id).await?;
            if account.ok_or(Refusal::AccountNotFound)?.in_flight == 0 {
                return Ok(());
            }
            tokio::time::sleep(pause).await;
        }
        let text = "requests of the account are still ending: repeat the command in a while";
        Err(AdminError::Unavailable(text.into()))
    }

    /// Takes all credits back, and returns the microcredits of each kind.
    async fn take_credits(&self, id: AccountId) -> Result<[u64; 2]> {
        let balances = self.store.read().await?.balances(id).await?;
        // An account that was opened again and is closed once more has debits of its own.
        let reference = format!("account closed at {}", self.store.now());
        let buckets = [(Bucket::Trial, balances.trial), (Bucket::Premium, balances.premium)];
        let mut taken = [0; 2];
        for ((bucket, balance), taken) in buckets.into_iter().zip(&mut taken) {
            let Some(units) = balance.available().filter(|units| units.get() > 0) else { continue };
            let reference = format!("{reference}, {bucket:?}");
            self.store.submit(Command::Debit { account: id, bucket, units, reference }).await?;
            *taken = units.get();
        }
        Ok(taken)
    }
}
