//! The layout of the rows that only this backend has. A change here is a new row version with a
//! reader for the old one.

use crate::row;
use cresset_base::{BootId, UnixMillis};
use cresset_ledger::JournalHead;

/// The identity of a file. It is the same in both files of a ledger, so that two that do not belong
/// together are noticed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FileIdentity {
    /// From 1; 0 for a file of the formats before.
    pub schema: u32,
    /// Raised by every restore.
    pub epoch: u64,
}

/// The process that used the ledger last, and whether it stopped in good order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CleanMarker {
    pub boot: BootId,
    /// True from the last write of an orderly stop until the next start.
    pub clean: bool,
}

/// The end of the journal, and the latest time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct JournalPosition {
    pub head: JournalHead,
    /// The latest time that was given to any command.
    pub clock: UnixMillis,
}

/// The end of the journal up to which audits found everything sound.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SealedPosition {
    pub head: JournalHead,
    /// The time of the last audit of everything; 0 when one is owed.
    pub fully_audited_at: UnixMillis,
}

row!(FileIdentity { schema, epoch });
row!(CleanMarker { boot, clean });
row!(JournalPosition { head, clock });
row!(SealedPosition { head, fully_audited_at });
