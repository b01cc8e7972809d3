//! State that the handles, the writer and the auditor have in common: the backend as they read it,
//! the queue, and whether the ledger can be reached and trusted.

use super::backend::{LedgerReader, Seal};
use super::queue::Queue;
use super::stats::{self, BudgetNotice};
use super::{AuditReport, StoreResult};
use cresset_base::{BootId, Clock, Recent, UnixMillis, failpoint};
use cresset_ledger::audit::{self, AuditPace, AuditSource, JournalHeads};
use cresset_ledger::{BudgetAlert, ReleaseCause};
use parking_lot::{Mutex, RwLock};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

const SPACE_LOW: &str = "less space is free where the data folder is than requests.min_free_mib, \
                         and new requests are refused: make room. `cresset doctor` names \
                         what pulls left, `cresset models list` what models take";
const MOVED: &str = "the files of the data folder were removed or replaced while the node runs, and \
                     what it writes would be lost: stop it, put the folder in order, start it again";

pub(super) struct StoreShared {
    pub reader: Arc<dyn LedgerReader>,
    pub clock: Arc<dyn Clock>,
    /// The id of this start, until other nodes declare it ended and the node begins anew.
    boot: RwLock<BootId>,
    /// Other nodes have declared this boot ended.
    is_ended: AtomicBool,
    /// The node asks to begin anew.
    wants_anew: AtomicBool,
    pub queue: Queue,
    pub health: Health,
    /// Releases since the start of the node, by cause.
    pub releases: Mutex<BTreeMap<&'static str, u64>>,
    /// Alerts of budgets since the start of the node, by owner and period.
    pub budget_alerts: Mutex<BTreeMap<&'static str, u64>>,
    /// For the status.
    pub budget_notices: Recent<BudgetNotice, 16>,
    pub min_free_bytes: u64,
    /// The latest time stored when the ledger was opened, milliseconds since 1970.
    floor: AtomicU64,
    audited: Mutex<AuditedParts>,
    /// Another node that shares the ledger audits it.
    others_audit: AtomicBool,
}

/// What audits found sound.
#[derive(Clone, Debug, Default)]
struct AuditedParts {
    /// The heads up to which the journal was found sound; `None` before the first audit.
    heads: Option<JournalHeads>,
    /// The time of the last audit of everything; `None` before the first one, 0 when one is owed.
    fully_at: Option<UnixMillis>,
    /// The seal that is stored.
    sealed: Option<Seal>,
}

impl StoreShared {
    pub(super) fn new(
        reader: Arc<dyn LedgerReader>,
        lanes: usize,
        clock: Arc<dyn Clock>,
        min_free_bytes: u64,
    ) -> Self {
        Self {
            reader,
            clock,
            boot: RwLock::new(BootId::generate()),
            is_ended: AtomicBool::new(false),
            wants_anew: AtomicBool::new(false),
            queue: Queue::new(lanes),
            health: Health::default(),
            releases: Mutex::default(),
            budget_alerts: Mutex::default(),
            budget_notices: Recent::default(),
            min_free_bytes,
            floor: AtomicU64::new(0),
            audited: Mutex::default(),
            others_audit: AtomicBool::new(false),
        }
    }

    pub(super) fn boot(&self) -> BootId {
        *self.boot.read()
    }

    /// Whether other nodes have declared this boot ended, so that it admits nothing.
    pub(super) fn is_ended(&self) -> bool {
        self.is_ended.load(Ordering::Acquire)
    }

    pub(super) fn note_ended(&self) {
        self.is_ended.store(true, Ordering::Release);
    }

    /// Asks the writer for another boot, once what ran under this one has ended.
    pub(super) fn request_new_boot(&self) {
        self.wants_anew.store(true, Ordering::Release);
    }

    pub(super) fn new_boot_requested(&self) -> bool {
        self.wants_anew.load(Ordering::Acquire)
    }

    pub(super) fn set_boot(&self, boot: BootId) {
        *self.boot.write() = boot;
        self.is_ended.store(false, Ordering::Release);
        self.wants_anew.store(false, Ordering::Release);
    }

    /// The later of the clock and the latest time stored: the time that the next command gets.
    pub(super) fn now(&self) -> UnixMillis {
        self.clock.now().max(UnixMillis(self.floor.load(Ordering::Relaxed)))
    }

    pub(super) fn set_floor(&self, stored: UnixMillis) {
        self.floor.store(stored.0, Ordering::Relaxed);
    }

    /// Why new requests are refused now although the ledger works. Free space that cannot be
    /// measured counts as enough.
    pub(super) fn admission_block(&self) -> Option<&'static str> {
        if !self.reader.is_in_place() {
            return Some(MOVED);
        }
        let low = self.reader.free_bytes().is_some_and(|free| free < self.min_free_bytes);
        low.then_some(SPACE_LOW)
    }

    /// Goes on from the stored seal. After a stop that was not orderly an audit of everything is
    /// owed, however often the ledger is opened before one ends.
    pub(super) fn resume(&self, seal: Option<Seal>, crashed: bool) {
        let mut audited = self.audited.lock();
        audited.sealed.clone_from(&seal);
        if let Some(Seal { heads, fully_audited_at }) = seal {
            audited.heads = Some(heads);
            audited.fully_at = Some(if crashed { UnixMillis(0) } else { fully_audited_at });
        }
    }

    /// Whether another node that shares the ledger audits what is new, and everything once a day.
    pub(super) fn others_audit(&self) -> bool {
        self.others_audit.load(Ordering::Relaxed)
    }

    pub(super) fn set_others_audit(&self, do_they: bool) {
        self.others_audit.store(do_they, Ordering::Relaxed);
    }

    /// Takes over what the audits of another node found sound. An audit that this node owes after a
    /// crash stays owed.
    pub(super) fn learn(&self, seal: Seal) {
        let mut audited = self.audited.lock();
        let before = audited.heads.take().unwrap_or_default();
        audited.heads = Some(before.later(&seal.heads));
        if audited.fully_at != Some(UnixMillis(0)) {
            audited.fully_at = audited.fully_at.max(Some(seal.fully_audited_at));
        }
        audited.sealed = Some(seal);
    }

    /// Checks a ledger that was just opened: what came after its seal, or everything when it has
    /// none.
    pub(super) fn audit_at_start(&self, pace: AuditPace<'_>) -> StoreResult<AuditReport> {
        let Some(Seal { heads, .. }) = self.audited.lock().sealed.clone() else {
            return self.audit(pace);
        };
        let source = self.reader.audit_source()?;
        Ok(self.note(audit::at_start(&*source, heads, pace)?, false))
    }

    /// Checks everything stored; a violation stops admissions.
    pub(super) fn audit(&self, pace: AuditPace<'_>) -> StoreResult<AuditReport> {
        let source = self.reader.audit_source()?;
        Ok(self.note(audit::everything(&*source, pace)?, true))
    }

    /// Checks what was written after the last audit that found nothing wrong, and everything when
    /// there was none.
    pub(super) fn audit_news(
        &self,
        source: &dyn AuditSource,
        pace: AuditPace<'_>,
    ) -> StoreResult<AuditReport> {
        let audited = self.audited.lock().heads.clone();
        let whole = audited.is_none();
        let report = match audited {
            Some(heads) => audit::since(source, heads, pace)?,
            None => audit::everything(source, pace)?,
        };
        Ok(self.note(report, whole))
    }

    /// Records the findings of an audit of everything, with `whole`, or of a part.
    fn note(&self, report: AuditReport, whole: bool) -> AuditReport {
        report.violations.iter().for_each(|violation| self.health.distrust(violation));
        if report.ok {
            let mut audited = self.audited.lock();
            // An audit of everything takes long, and new entries are audited meanwhile.
            let before = audited.heads.take().unwrap_or_default();
            audited.heads = Some(before.later(&report.heads));
            if whole {
                audited.fully_at = Some(self.now());
            }
        }
        report
    }

    /// Whether everything was not audited for `interval_ms`, or never since a crash. What is due
    /// without a crash is left to the node that audits.
    pub(super) fn owes_full_audit(&self, interval_ms: u64) -> bool {
        let (now, owed) = (self.now(), UnixMillis(0));
        let audits = !self.others_audit();
        let due =
            |at: UnixMillis| at == owed || audits && (at > now || now.0 - at.0 >= interval_ms);
        self.audited.lock().fully_at.is_none_or(due)
    }

    /// When everything was last audited; `None` where that was never, or before a crash.
    pub(super) fn fully_audited_at(&self) -> Option<UnixMillis> {
        self.audited.lock().fully_at.filter(|at| at.0 > 0)
    }

    /// What the ledger's seal should be. A ledger that is not trusted has none, so that its next
    /// start audits everything.
    pub(super) fn due_seal(&self) -> Option<Seal> {
        self.health.trusted().ok()?;
        let audited = self.audited.lock();
        let (heads, fully_audited_at) = (audited.heads.clone()?, audited.fully_at?);
        Some(Seal { heads, fully_audited_at })
    }

    /// The seal that is stored.
    pub(super) fn stored_seal(&self) -> Option<Seal> {
        self.audited.lock().sealed.clone()
    }

    pub(super) fn note_seal(&self, seal: Option<Seal>) {
        self.audited.lock().sealed = seal;
    }

    /// Whether an audit of what is new knows where to begin.
    pub(super) fn knows_audited_part(&self) -> bool {
        self.audited.lock().heads.is_some()
    }

    pub(super) fn released(&self, cause: ReleaseCause, count: u64) {
        let mut releases = self.releases.lock();
        *releases.entry(stats::label(cause)).or_default() += count;
    }

    /// Tells operators of a budget: in the log, a metric and the status.
    pub(super) fn tell_budget(&self, alert: &BudgetAlert) {
        let BudgetAlert { owner, period, limit, spent } = alert;
        tracing::warn!(
            %owner, period = period.name(), %spent, budget = %limit.units,
            percent = limit.alert_percent, "a budget is nearly spent"
        );
        let mut counts = self.budget_alerts.lock();
        *counts.entry(stats::budget_label(alert)).or_default() += 1;
        self.budget_notices.note(BudgetNotice { at: self.now(), alert: *alert });
    }
}

#[derive(Default)]
pub(super) struct Health {
    /// True after a failure of the storage, until it was reopened.
    disconnected: AtomicBool,
    /// The first violation found. It is never cleared, because a person has to look into it.
    distrusted: OnceLock<String>,
    violations: AtomicU64,
}

impl Health {
    /// False after a failure of the storage, until it was reopened.
    pub(super) fn reachable(&self) -> bool {
        !self.disconnected.load(Ordering::Acquire)
    }

    pub(super) fn set_reachable(&self) {
        self.disconnected.store(false, Ordering::Release);
    }

    /// Stops writing: after a failure the backend must not be written to. It still serves reads
    /// until it is reopened.
    pub(super) fn disconnect(&self, why: &str) {
        tracing::error!(why, "the ledger's storage failed");
        self.disconnected.store(true, Ordering::Release);
    }

    /// Fails with the reason if a rule of the ledger was found broken.
    pub(super) fn trusted(&self) -> Result<(), String> {
        failpoint!("store::distrusted", |_| Err("a rule is broken".into()));
        match self.distrusted.get() {
            None => Ok(()),
            Some(why) => Err(format!("it failed its own checks: {why}")),
        }
    }

    /// Violations found since the start of the node.
    pub(super) fn violations(&self) -> u64 {
        self.violations.load(Ordering::Relaxed)
    }

    pub(super) fn distrust(&self, why: &str) {
        tracing::error!(why, "the ledger breaks its own rules: nothing new is admitted");
        self.violations.fetch_add(1, Ordering::Relaxed);
        self.distrusted.get_or_init(|| why.to_owned());
    }
}
