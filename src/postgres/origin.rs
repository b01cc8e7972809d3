//! Where a ledger was moved from. The entries of a moved ledger were chained anew, each account's
//! by themselves, so what the old chain ended with is told here.

use super::rows::content;
use super::session::{Ask, DatabaseSession};
use cresset_base::{AccountId, BootId, UnixMillis};
use cresset_ledger::audit::JournalChain;
use cresset_ledger::{JournalHead, StateResult};
use cresset_store::codec::encode;
use cresset_store::{StoreResult, row};

const KEY: &str = "moved";
const READ: &str = "select row from meta where key = $1";
const WRITE: &str = "insert into meta (key, row) values ($1, $2)";

/// A place in an account's chain: after its entry of this number.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct ChainPlace {
    pub account: AccountId,
    pub sequence: u64,
}

#[derive(Clone, Debug, PartialEq)]
pub(super) struct MoveOrigin {
    /// The process that used the moved ledger last.
    pub boot: BootId,
    /// The end of the one chain that it had.
    pub head: JournalHead,
    pub moved_at: UnixMillis,
    /// Where an operator had set the time back, so that the next entry has an earlier time.
    pub set_back: Vec<ChainPlace>,
}

row!(ChainPlace { account, sequence });
row!(MoveOrigin { boot, head, moved_at, set_back });

impl MoveOrigin {
    pub(super) fn set_back_after(&self, chain: JournalChain) -> Vec<u64> {
        let own = |place: &&ChainPlace| JournalChain::Account(place.account) == chain;
        self.set_back.iter().filter(own).map(|place| place.sequence).collect()
    }
}

pub(super) async fn read(session: &DatabaseSession) -> StateResult<Option<MoveOrigin>> {
    let answer = session.ask(Ask::new(READ).with(KEY)).await?;
    answer.rows.first().map(|row| content(row, 0, KEY.as_bytes())).transpose()
}

pub(super) async fn write(session: &DatabaseSession, origin: &MoveOrigin) -> StoreResult {
    let row = encode(KEY.as_bytes(), origin);
    session.ask(Ask::new(WRITE).with(KEY).with(row)).await?;
    Ok(())
}
