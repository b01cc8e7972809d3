//! How far an audit has come, and its caller's say in how fast it goes on.

use crate::state::StateResult;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AuditProgress {
    /// Rows read so far.
    pub done: u64,
    /// Rows to read in all, as far as that is known. A second reading, which names what differs,
    /// comes on top.
    pub total: u64,
}

/// Called before each row that an audit reads. An error ends the audit, which returns it. So the
/// caller shows progress, sets the pace and stops an audit; the audit itself knows no clock.
pub type AuditPace<'a> = &'a dyn Fn(AuditProgress) -> StateResult;

/// Lets an audit go on as fast as it can.
pub fn unpaced(_: AuditProgress) -> StateResult {
    Ok(())
}
