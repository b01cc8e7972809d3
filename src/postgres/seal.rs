//! What audits have found sound: the end of each account's chain.

use super::failure::Failure;
use super::rows::content;
use super::session::{Ask, DatabaseSession};
use cresset_base::{AccountId, UnixMillis};
use cresset_ledger::audit::{JournalChain, JournalHeads};
use cresset_ledger::{JournalHead, StateResult};
use cresset_store::codec::encode;
use cresset_store::{Seal, row};

const KEY: &str = "seal";
const READ: &str = "select row from meta where key = $1";
/// Another node may have found the ledger broken meanwhile.
const WRITE: &str = "insert into meta (key, row) select $1::text, $2::bytea \
    where not exists (select 1 from meta where key = 'distrust') on conflict (key) do update set row = excluded.row";
const REMOVE: &str = "delete from meta where key = $1";

/// The end of one account's chain.
#[derive(Clone, Debug, PartialEq)]
struct SealedChain {
    account: AccountId,
    head: JournalHead,
}

#[derive(Clone, Debug, PartialEq)]
struct SealedChains {
    chains: Vec<SealedChain>,
    /// The time of the last audit of everything; 0 when one is owed.
    fully_audited_at: UnixMillis,
}

row!(SealedChain { account, head });
row!(SealedChains { chains, fully_audited_at });

pub(super) async fn read(session: &DatabaseSession) -> StateResult<Option<Seal>> {
    let answer = session.ask(Ask::new(READ).with(KEY)).await?;
    let Some(row) = answer.rows.first() else { return Ok(None) };
    let SealedChains { chains, fully_audited_at } = content(row, 0, KEY.as_bytes())?;
    let heads: JournalHeads = chains
        .into_iter()
        .map(|sealed| (JournalChain::Account(sealed.account), sealed.head))
        .collect();
    Ok(Some(Seal { heads, fully_audited_at }))
}

pub(super) async fn write(session: &DatabaseSession, seal: Option<&Seal>) -> Result<(), Failure> {
    let ask = match seal {
        None => Ask::new(REMOVE).with(KEY),
        Some(Seal { heads, fully_audited_at }) => {
            let mut chains: Vec<_> = heads
                .iter()
                .filter_map(|(chain, head)| match chain {
                    JournalChain::Account(account) => Some(SealedChain { account, head }),
                    JournalChain::Shared => None,
                })
                .collect();
            chains.sort_by_key(|sealed| sealed.account);
            let row = SealedChains { chains, fully_audited_at: *fully_audited_at };
            Ask::new(WRITE).with(KEY).with(encode(KEY.as_bytes(), &row))
        }
    };
    session.ask(ask).await.map(drop)
}
