//! The settings of the ledger, of requests as they are kept, and of the clock.

use cresset_base::section;
use std::path::PathBuf;

section! {
/// Timing and limits of a request from its admission to its end.
pub struct RequestSettings {
    /// Time that a stream without a listener goes on before it is cancelled, seconds.
    #[schemars(range(min = 0, max = 3_600))]
    pub disconnect_grace_seconds: u64 = 15,
    /// Longest life of a request from admission to its end, seconds.
    #[schemars(range(min = 1, max = 86_400))]
    pub deadline_seconds: u64 = 600,
    /// How long DELETE waits for the request's end before it answers 202, milliseconds.
    #[schemars(range(min = 0, max = 60_000))]
    pub cancel_wait_milliseconds: u64 = 2_000,
    /// Connections that may listen to one running request.
    #[schemars(range(min = 1, max = 1_024))]
    pub max_subscribers: usize = 4,
    /// How long answers are kept for replay, hours.
    #[schemars(range(min = 1, max = 24 * 365))]
    pub body_retention_hours: u64 = 24,
    /// Answers of one account that are kept for replay, MiB. A request whose answer might not fit
    /// beside them and those of the account's running requests is refused. A token takes a few
    /// bytes, with `top_logprobs` 20 about 290.
    #[schemars(range(min = 1, max = 1 << 24))]
    pub max_stored_mib_per_account: u64 = 4_096,
    /// How long a finished request's id stays taken, days. Later the id is free, and a request with
    /// it is a new one.
    #[schemars(range(min = 1, max = 3_650))]
    pub tombstone_days: u64 = 30,
    /// How long an input is refused that was running in two crashes of the node, counted from the
    /// last one, hours. Crashes that lie further apart do not add up. A completed run or
    /// `cresset requests unblock` ends it earlier.
    #[schemars(range(min = 1, max = 24 * 365))]
    pub crash_block_hours: u64 = 24,
    /// Time running work gets to finish at shutdown, seconds.
    #[schemars(range(min = 0, max = 86_400))]
    pub drain_grace_seconds: u64 = 30,
    /// Longest time from the start of another program by `upgrade` until it takes over, seconds. It
    /// loads its models in it. Later it is ended, and the node that ran goes on.
    #[schemars(range(min = 1, max = 86_400))]
    pub upgrade_seconds: u64 = 1_800,
    /// Free disk space below which new requests are refused, so that running ones can still be
    /// ended, MiB. It is measured where the data folder is.
    #[schemars(range(min = 128, max = 1 << 24))]
    pub min_free_mib: u64 = 512,
}
}

impl RequestSettings {
    /// How long answers are kept for replay, milliseconds.
    pub fn replay_ms(&self) -> u64 {
        self.body_retention_hours * 3_600_000
    }

    /// How long an input is refused that was running in two crashes, milliseconds.
    pub fn crash_block_ms(&self) -> u64 {
        self.crash_block_hours * 3_600_000
    }

    /// How long a finished request's id stays taken, milliseconds.
    pub fn tombstone_ms(&self) -> u64 {
        self.tombstone_days * 24 * 3_600_000
    }
}

section! {
/// Where the ledger is, and how it is looked after while the node serves.
pub struct LedgerSettings {
    /// PostgreSQL database that keeps the ledger in place of the data folder:
    /// `postgres://USER@HOST,HOST/DATABASE`, without a password. Connections to other machines
    /// speak TLS, with a certificate of a public authority or one of `tls.trusted`, unless the
    /// address ends in `?sslmode=disable`.
    pub url: Option<String> = None,
    /// File with the password of the database's user.
    pub password_file: Option<PathBuf> = None,
    /// Connections to the database that answer reads, at most; as many, up to 8, write. A few more
    /// look after it.
    #[schemars(range(min = 1, max = 1_000))]
    pub connections: usize = 4,
    /// Synchronous standbys that a commit in the database waits for. It must be written where `url`
    /// is, and the server's `synchronous_standby_names` must name as many. With 0 a failover may
    /// lose what was acknowledged.
    #[schemars(range(min = 0, max = 100))]
    pub standbys: Option<u32> = None,
    /// How long a node that the database does not hear of counts as alive, seconds.
    #[schemars(range(min = 1, max = 600))]
    pub lease_seconds: u64 = 10,
    /// Rows that the background audit of everything reads in a second. It runs once a day and after
    /// a stop that was not orderly, on a thread of the lowest priority. A ledger with 30 days of
    /// 100 000 requests each has about ten million rows besides its older journal.
    #[schemars(range(min = 1_000, max = 1 << 30))]
    pub audit_rows_per_second: u64 = 50_000,
    /// Memory that each of the ledger's two files may use for pages that were read or wait to be
    /// written, MiB. The kernel caches the files besides.
    #[schemars(range(min = 1, max = 65_536))]
    pub cache_mib: u32 = 8,
}
}

section! {
/// What this machine's clock may show when the ledger is opened. Beyond it a node does not start
/// and a command does not run, unless it is given `--accept-clock`.
pub struct ClockSettings {
    /// How far the clock may be ahead of the latest time stored in the ledger, days.
    #[schemars(range(min = 1, max = 3_650))]
    pub max_gap_days: u64 = 30,
    /// How far it may be behind, minutes.
    #[schemars(range(min = 1, max = 1_440))]
    pub max_behind_minutes: u64 = 5,
    /// Set by `--accept-clock` alone.
    #[serde(skip)]
    pub accepted: bool = false,
}
}
