//! What went wrong in the database, and what may be done about it.

use crate::ledger::state::StateError;
use crate::store::StoreError;
use crate::store::backend::BatchFailure;
use std::error::Error;
use tokio_postgres::error::SqlState;

/// Why a statement has no answer.
#[derive(Clone, Debug)]
pub(super) struct Failure {
    /// What the database answered; `None` where the connection failed.
    code: Option<SqlState>,
    what: String,
}

impl Failure {
    /// The connection is of no use.
    pub(super) fn lost(what: &str) -> Self {
        Self { code: None, what: what.to_owned() }
    }

    /// Whether another transaction came first, so that the whole batch may be tried again: two
    /// wrote one row, waited for each other, waited too long, or wrote one key. The keys of the
    /// journal are among those.
    pub(super) fn is_race(&self) -> bool {
        let races = [
            SqlState::T_R_SERIALIZATION_FAILURE,
            SqlState::T_R_DEADLOCK_DETECTED,
            SqlState::LOCK_NOT_AVAILABLE,
            SqlState::UNIQUE_VIOLATION,
        ];
        self.code.as_ref().is_some_and(|code| races.contains(code))
    }
}

impl From<tokio_postgres::Error> for Failure {
    fn from(error: tokio_postgres::Error) -> Self {
        let code = error.code().cloned();
        let mut what = match error.as_db_error() {
            Some(said) => format!("{} ({})", said.message(), said.code().code()),
            None => error.to_string(),
        };
        let cause = error.source().filter(|_| code.is_none());
        if let Some(cause) = cause.filter(|cause| !what.contains(&cause.to_string())) {
            what = format!("{what}: {cause}");
        }
        if code == Some(SqlState::INVALID_SQL_STATEMENT_NAME) {
            what += ": a proxy in between hands transactions to other sessions; connect to the database itself, or \
                     let the proxy pool sessions";
        }
        Self { code, what }
    }
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.what)
    }
}

impl From<Failure> for StateError {
    fn from(failure: Failure) -> Self {
        Self::Io(failure.what)
    }
}

impl From<Failure> for StoreError {
    fn from(failure: Failure) -> Self {
        Self::Unavailable(failure.what)
    }
}

impl From<Failure> for BatchFailure {
    fn from(failure: Failure) -> Self {
        Self::InDoubt(failure.what)
    }
}
