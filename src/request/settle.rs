//! Commands of a request's life sent to the ledger, and its end made durable.

#![expect(clippy::disallowed_methods, reason = "an end waits for the ledger for a limited time")]

use super::services::Services;
use crate::clock::UnixMillis;
use crate::ledger::{Command, Microcredits, Outcome, RequestKey, RequestRecord};
use crate::store::StoreError;
use bytes::Bytes;
use std::time::{Duration, Instant};

/// The longest wait of an end for a ledger that cannot be reached, after which the request fails
/// uncharged. The ledger reopens a failed file within seconds.
const LEDGER_PATIENCE: Duration = Duration::from_secs(30);
/// Pause between two tries: short beside the patience, long beside a commit.
const LEDGER_PAUSE: Duration = Duration::from_millis(100);

/// Applies one command durably and measures how long that takes.
pub(super) async fn commit(services: &Services, command: Command) -> Result<Outcome, StoreError> {
    let began = Instant::now();
    let outcome = services.store.submit(command).await;
    services.metrics.commit_time.observe(began.elapsed().as_secs_f64());
    outcome
}

/// Sends the command that ends an attempt until the ledger has it. Sending it twice ends the
/// attempt once. Returns the record as the ledger then has it.
pub(super) async fn resolve(
    services: &Services,
    command: &Command,
) -> Result<RequestRecord, StoreError> {
    match patiently(|| commit(services, command.clone())).await? {
        Outcome::Request(record) | Outcome::AlreadyResolved(record) => Ok(record),
        _ => Err(StoreError::Unavailable("an end had no record".into())),
    }
}

/// Stores the rendered body of an answer for replays, durably.
pub(super) async fn store_body(
    services: &Services,
    key: RequestKey,
    body: &Bytes,
) -> Result<(), StoreError> {
    let retention = services.config.requests.replay_ms();
    let expires_at = || UnixMillis(services.clock.now().0.saturating_add(retention));
    patiently(|| services.store.put_body(key, body.clone(), expires_at())).await
}

/// Tries again while the ledger cannot be reached, up to `LEDGER_PATIENCE`.
async fn patiently<T, F>(attempt: impl Fn() -> F) -> Result<T, StoreError>
where
    F: Future<Output = Result<T, StoreError>>,
{
    let until = Instant::now() + LEDGER_PATIENCE;
    loop {
        match attempt().await {
            Err(StoreError::Unavailable(_)) if Instant::now() < until => {
                tokio::time::sleep(LEDGER_PAUSE).await;
            }
            other => return other,
        }
    }
}

/// Whether the ledger booked exactly the charge that the stored body tells. The body is stored
/// before the settlement, so the two are compared after it.
pub(super) fn is_booked_as_told(record: &RequestRecord, told: Microcredits) -> bool {
    record.latest().charged.checked_total() == Some(told)
}
