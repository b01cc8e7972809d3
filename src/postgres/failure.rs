//! What went wrong in the database, and what may be done about it.

use cresset_ledger::StateError;
use cresset_store::{BatchFailure, StoreError};
use std::error::Error;
use std::io::{self, ErrorKind};
use tokio_postgres::Config;
use tokio_postgres::error::SqlState;

/// What is said of a proxy that gives each transaction to any session of the database.
pub(super) const POOLED: &str = "a proxy in between hands transactions to other sessions, which lose \
    what this one set and prepared; name the database itself in ledger.url, or let the proxy pool \
    sessions";
/// A prepared statement is gone, or somebody else's.
const LOST_STATEMENTS: [SqlState; 2] =
    [SqlState::INVALID_SQL_STATEMENT_NAME, SqlState::DUPLICATE_PSTATEMENT];

/// Why a statement has no answer.
#[derive(Clone, Debug)]
pub(super) struct Failure {
    /// What the database answered; `None` where the connection failed.
    code: Option<SqlState>,
    what: String,
    /// A setting has to be changed before another try can succeed.
    is_setting: bool,
}

impl Failure {
    /// The connection is of no use.
    pub(super) fn lost(what: &str) -> Self {
        Self { code: None, what: what.to_owned(), is_setting: false }
    }

    /// Why no connection could be made, with the setting to change where that would help.
    pub(super) fn connecting(error: tokio_postgres::Error, config: &Config) -> Self {
        let (code, io) = (error.code().cloned(), io_error(&error));
        let mut failure = Self::from(error);
        if let Some(remedy) = remedy(code.as_ref(), io, &failure.what, config) {
            let said = failure.what;
            failure.what = format!("the database of the ledger cannot be used: {said}; {remedy}");
            failure.is_setting = true;
        }
        failure
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
        let is_pooled = code.as_ref().is_some_and(|code| LOST_STATEMENTS.contains(code));
        if is_pooled {
            what = format!("{what}: {POOLED}");
        }
        Self { code, what, is_setting: is_pooled }
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
        let variant = if failure.is_setting { Self::Unusable } else { Self::Unavailable };
        variant(failure.what)
    }
}

impl From<Failure> for BatchFailure {
    fn from(failure: Failure) -> Self {
        Self::InDoubt(failure.what)
    }
}

fn io_error(error: &tokio_postgres::Error) -> Option<ErrorKind> {
    Some(error.source()?.downcast_ref::<io::Error>()?.kind())
}

/// What to change after a failure to connect; `None` where another try may succeed as it is.
fn remedy(
    code: Option<&SqlState>,
    io: Option<ErrorKind>,
    what: &str,
    config: &Config,
) -> Option<&'static str> {
    match code {
        Some(&SqlState::INVALID_PASSWORD | &SqlState::INVALID_AUTHORIZATION_SPECIFICATION) => {
            Some("check the user in ledger.url, ledger.password_file and the server's pg_hba.conf")
        }
        Some(&SqlState::INVALID_CATALOG_NAME) => Some("check the database's name in ledger.url"),
        None if what.contains("password missing") => {
            Some("name a file with the user's password in ledger.password_file")
        }
        None if what.contains("does not support TLS") => {
            Some("set ssl on there, or end ledger.url in ?sslmode=disable")
        }
        // A connection that breaks during the handshake may come about the next time.
        None if what.contains("TLS handshake") && io == Some(ErrorKind::InvalidData) => Some(
            "name the authority of its certificate in tls.trusted, and the host in ledger.url as the certificate does",
        ),
        // Where there are several hosts one of them may be about to become the primary.
        None if what.contains("does not allow writes") && config.get_hosts().len() == 1 => {
            Some("it is a standby: name the primary in ledger.url, alone or beside its standbys")
        }
        _ => None,
    }
}
