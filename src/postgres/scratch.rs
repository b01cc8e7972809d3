//! A ledger for a measurement, in a schema of its own beside whatever the database has.

use super::{PostgresConfig, with_session};
use cresset_store::{DatabasePlace, StoreResult};
use uuid::Uuid;

/// The schema is removed when this is dropped.
pub(super) struct ScratchSchema {
    /// The place of the ledger in it.
    pub place: PostgresConfig,
    name: String,
}

impl ScratchSchema {
    pub(super) fn make(place: &PostgresConfig) -> StoreResult<Self> {
        let name = format!("bench_{}", Uuid::new_v4().simple());
        with_session(place, async |session| {
            Ok(session.script(&format!("create schema {name}")).await?)
        })?;
        let mut own = place.clone();
        let before = own.server.get_options().unwrap_or_default();
        let options = format!("{before} -csearch_path={name}");
        own.server.options(options.trim_start());
        let scratch = Self { place: own, name };
        scratch.place.init()?;
        Ok(scratch)
    }
}

impl Drop for ScratchSchema {
    fn drop(&mut self) {
        let drop = format!("drop schema {} cascade", self.name);
        let dropped = with_session(&self.place, async |session| Ok(session.script(&drop).await?));
        if let Err(error) = dropped {
            tracing::warn!(%error, schema = self.name, "the schema of a measurement is left");
        }
    }
}
