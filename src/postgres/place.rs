//! A ledger in a database as the store opens, inspects and takes it over.

use super::scratch::ScratchSchema;
use super::{
    PostgresBackend, PostgresConfig, own_tools, schema, server, taking_over, with_session,
};
use cresset_base::{BootId, UnixMillis};
use cresset_ledger::audit;
use cresset_store::{
    AuditReport, Backend, DatabasePlace, LedgerReader, MoveHooks, MoveReport, MoveSource, Store,
    StoreConfig, StoreError, StoreOpening, StoreResult,
};
use std::any::Any;
use std::path::Path;
use std::sync::Arc;

impl DatabasePlace for PostgresConfig {
    fn folder(&self) -> Option<&Path> {
        self.folder.as_deref()
    }

    fn init(&self) -> StoreResult {
        with_session(self, async |session| {
            server::check(session, self.standbys()).await?;
            schema::create(session).await
        })
    }

    fn init_scratch(&self) -> StoreResult<(StoreConfig, Box<dyn Any + Send>)> {
        let scratch = ScratchSchema::make(self)?;
        let place = Self { folder: None, ..scratch.place.clone() };
        Ok((StoreConfig::Database(Arc::new(place)), Box::new(scratch)))
    }

    fn open(&self, opening: StoreOpening<'_>) -> StoreResult<Store> {
        let is_for_node = opening.is_for_node();
        let open = if is_for_node { PostgresBackend::open } else { PostgresBackend::open_beside };
        let backend = Arc::new(open(self)?);
        let clock = backend.keep_time(Arc::clone(&opening.clock))?;
        opening.start(&backend, clock)
    }

    fn stored_time(&self) -> StoreResult<UnixMillis> {
        Ok(PostgresBackend::open_beside(self)?.stored_time()?)
    }

    fn inspect(&self) -> StoreResult<AuditReport> {
        let backend = PostgresBackend::open_beside(self)?;
        let source = backend.audit_source()?;
        Ok(audit::everything(&*source, &audit::unpaced)?)
    }

    fn own_tools(&self) -> StoreError {
        own_tools()
    }

    fn moved_from(&self) -> StoreResult<Option<BootId>> {
        taking_over::moved_from(self)
    }

    fn take_over(
        &self,
        from: (&dyn MoveSource, &AuditReport),
        now: UnixMillis,
        hooks: &MoveHooks<'_>,
    ) -> StoreResult<MoveReport> {
        taking_over::take_over(self, from, now, hooks)
    }
}
