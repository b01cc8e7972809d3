//! The embedded backend: two redb files in one folder of this machine.

mod audit_source;
pub(super) mod backup;
pub(super) mod bodies;
mod codec;
pub(super) mod disk;
pub(super) mod files;
pub(super) mod metered;
pub(super) mod retention;
pub(super) mod rows;
mod schema;
pub(super) mod snapshot;
pub(super) mod state;
pub(super) mod tables;
#[cfg(test)]
mod tests;
