//! What other nodes of a shared ledger decide about the requests that run here: cancellations,
//! revoked credentials, suspended accounts, and that this node has ended.

use super::live::{LiveRequest, StopRequest};
use super::services::Services;
use cresset_base::{AccountId, CredentialId};
use cresset_ledger::{AccountStatus, Command};
use cresset_pool::ServedModel;
use cresset_store::{Snapshot, StoreResult};
use futures_util::future::try_join_all;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

/// Looks into the ledger again and again, until the future is dropped.
pub async fn follow_cluster(services: &Services, interval: Duration) {
    loop {
        tell_models(services);
        tokio::time::sleep(interval).await;
        if services.store.was_ended_by_others() {
            new_boot(services, interval).await;
        } else if let Err(error) = heed(services).await {
            tracing::warn!(%error, "what other nodes decided could not be read");
        }
    }
}

/// Other nodes pass on requests for models that they do not serve themselves. A node that is
/// draining admits none.
fn tell_models(services: &Services) {
    let offered = if services.is_draining() { Vec::new() } else { services.offered() };
    let named = |model: &Arc<ServedModel>| {
        let qualified = &model.qualified;
        (qualified.id().0, qualified.manifest().name.clone())
    };
    services.store.tell(|facts| facts.models = offered.iter().map(named).collect());
}

/// Ends what runs here, uncharged: others have released what it had reserved. Then this node admits
/// again.
async fn new_boot(services: &Services, interval: Duration) {
    let running = services.live.all();
    services.live.shut_down();
    for live in &running {
        // The ledger has how it ended, so the answer itself is not needed.
        drop(live.ended().await);
    }
    let boot = services.store.boot();
    services.store.request_new_boot();
    while services.store.was_ended_by_others() {
        tokio::time::sleep(interval).await;
    }
    // Others took the silence for a crash.
    for live in running {
        let (account, fingerprint) = (live.key.account, live.fingerprint);
        services.store.submit_detached(Command::TakeBackCrash { account, fingerprint, boot });
    }
}

async fn heed(services: &Services) -> StoreResult {
    let running = services.live.all();
    if running.is_empty() {
        return Ok(());
    }
    let ledger = services.store.read().await?;
    for id in revoked(&*ledger, &running).await? {
        services.live.cancel_credential(id);
    }
    for id in suspended(&*ledger, &running).await? {
        services.live.cancel_account(id);
    }
    let records = running.iter().map(|live| ledger.request(&live.key));
    for (live, record) in running.iter().zip(try_join_all(records).await?) {
        if record.is_some_and(|record| record.latest().cancel_requested) {
            live.ask_to_stop(StopRequest::Cancelled);
        }
    }
    Ok(())
}

async fn revoked(
    ledger: &dyn Snapshot,
    running: &[Arc<LiveRequest>],
) -> StoreResult<Vec<CredentialId>> {
    let ids: BTreeSet<_> = running.iter().flat_map(|live| live.credentials()).collect();
    let found = try_join_all(ids.into_iter().map(|id| ledger.credential(id))).await?;
    let revoked = found.into_iter().flatten().filter(|row| row.revoked_at.is_some());
    Ok(revoked.map(|row| row.id).collect())
}

async fn suspended(
    ledger: &dyn Snapshot,
    running: &[Arc<LiveRequest>],
) -> StoreResult<Vec<AccountId>> {
    let ids: BTreeSet<_> = running.iter().map(|live| live.key.account).collect();
    let found = try_join_all(ids.into_iter().map(|id| ledger.account(id))).await?;
    let suspended = found.into_iter().flatten();
    let suspended = suspended.filter(|row| row.status == AccountStatus::Suspended);
    Ok(suspended.map(|row| row.id).collect())
}
