//! Takes the ledger of a data folder over into a database. The move is one transaction there, so
//! one that was interrupted leaves nothing behind and is begun anew. From before its commit on the
//! configuration names the database, so that no process goes on with the folder's ledger meanwhile.

use super::backend::MoveSource;
use super::embedded::Disk;
use super::{
    AuditPolicy, AuditReport, DatabasePlace, EmbeddedBackend, EmbeddedConfig, Limits, MoveHooks,
    MoveReport, OpenProgress, Store, StoreError, StoreResult, embedded,
};
use cresset_base::{Clock, failpoint};
use cresset_ledger::audit;
use std::sync::Arc;

/// Moves a ledger that no process has open.
pub(super) fn run(
    from: &EmbeddedConfig,
    to: &dyn DatabasePlace,
    clock: Arc<dyn Clock>,
    limits: Limits,
    hooks: &MoveHooks<'_>,
) -> StoreResult<MoveReport> {
    let disk = embedded::lock(from)?;
    let now = clock.now();
    if let Some(boot) = to.moved_from()?
        && embedded::last_boot(&disk)? == Some(boot)
    {
        (hooks.configure)()?;
        return Ok(MoveReport { files: embedded::put_away(from)?, ..MoveReport::default() });
    }
    embedded::check_free_names(from)?;
    end_in_order(&disk, clock, limits)?;
    let report = embedded::read_whole(&disk, |source| {
        let audited = check(source, hooks)?;
        to.take_over((source, &audited), now, hooks)
    })?;
    failpoint!("store::move_committed");
    Ok(MoveReport { files: embedded::put_away(from)?, ..report })
}

/// Releases the reservations of a process that was killed, as a start does, and closes the files.
fn end_in_order(disk: &Arc<dyn Disk>, clock: Arc<dyn Clock>, limits: Limits) -> StoreResult {
    let backend = Arc::new(EmbeddedBackend::open_on(Arc::clone(disk))?);
    let (policy, progress) = (AuditPolicy::AfterCrash, OpenProgress::default());
    Store::start(&backend, clock, limits, policy, &progress).map(drop)
}

fn check(source: &dyn MoveSource, hooks: &MoveHooks<'_>) -> StoreResult<AuditReport> {
    let pace = |progress| {
        (hooks.progress)("auditing the ledger of the folder", progress);
        Ok(())
    };
    let report = audit::everything(source, &pace)?;
    match report.violations.first() {
        None => Ok(report),
        Some(violation) => Err(StoreError::Unusable(format!(
            "the ledger breaks its own rules and is not moved: {violation}; `cresset ledger audit` names every \
             violation"
        ))),
    }
}
