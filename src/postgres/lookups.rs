//! Look-ups of credentials. Every request begins with one, so those that wait at the same time
//! share one query. Nothing is remembered between two queries.

use super::failure::Failure;
use super::rows::{AccountRow, content, fixed};
use super::session::{Ask, Connector, DatabaseSession, SessionKind};
use cresset_ledger::{Account, Credential, StateResult};
use cresset_store::StoreResult;
use std::collections::HashMap;
use std::sync::Arc;
use tokio::sync::{mpsc, oneshot};
use uuid::Uuid;

/// Look-ups that share a query, at most.
const TOGETHER: usize = 512;
/// Look-ups that may wait before callers do.
const WAITING: usize = 4_096;

/// One statement, so credential and account are of one state.
const FIND: &str = "select c.digest, c.id, c.row, a.id, a.row from credentials c \
    join accounts a on a.id = c.account where c.digest = any($1::bytea[])";

type FoundPair = StateResult<Option<(Credential, Account)>>;

struct Lookup {
    digest: [u8; 32],
    reply: oneshot::Sender<Result<FoundPair, Failure>>,
}

pub(super) struct Lookups {
    sender: mpsc::Sender<Lookup>,
}

impl Lookups {
    pub(super) fn start(connector: Arc<Connector>) -> Self {
        let (sender, receiver) = mpsc::channel(WAITING);
        let handle = connector.handle.clone();
        handle.spawn(answer_all(receiver, connector));
        Self { sender }
    }

    /// The credential with this digest and its account.
    pub(super) async fn find(
        &self,
        digest: [u8; 32],
    ) -> StoreResult<Option<(Credential, Account)>> {
        let gone = || Failure::lost("the node is stopping");
        let (reply, answer) = oneshot::channel();
        self.sender.send(Lookup { digest, reply }).await.map_err(|_| gone())?;
        Ok(answer.await.map_err(|_| gone())???)
    }
}

/// Answers look-ups until the backend is dropped.
async fn answer_all(mut waiting: mpsc::Receiver<Lookup>, connector: Arc<Connector>) {
    let mut session: Option<DatabaseSession> = None;
    let mut taken = Vec::new();
    while waiting.recv_many(&mut taken, TOGETHER).await > 0 {
        let connected = match session.take().filter(|session| !session.is_closed()) {
            Some(session) => Ok(session),
            None => connector.connect(SessionKind::Reader).await,
        };
        let found = match connected {
            Ok(connected) => find(session.insert(connected), &taken).await,
            Err(failure) => Err(failure),
        };
        for Lookup { digest, reply } in taken.drain(..) {
            let answer = match &found {
                Ok(found) => Ok(found.get(&digest).cloned().unwrap_or(Ok(None))),
                Err(failure) => Err(failure.clone()),
            };
            // A caller that has gone needs no answer.
            let _ = reply.send(answer);
        }
    }
}

async fn find(
    session: &DatabaseSession,
    lookups: &[Lookup],
) -> Result<HashMap<[u8; 32], FoundPair>, Failure> {
    let digests: Vec<_> = lookups.iter().map(|lookup| lookup.digest.to_vec()).collect();
    let answer = session.ask(Ask::new(FIND).with(digests)).await?;
    let mut found = HashMap::new();
    for row in &answer.rows {
        let pair = || {
            let credential: Credential = content(row, 2, row.get::<_, Uuid>(1).as_bytes())?;
            let account: AccountRow = content(row, 4, row.get::<_, Uuid>(3).as_bytes())?;
            Ok(Some((credential, account.account)))
        };
        if let Some(digest) = fixed(row, 0) {
            found.insert(digest, pair());
        }
    }
    Ok(found)
}
