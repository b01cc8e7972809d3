//! Figures of the ledger for the node's metrics.

use super::Store;
use cresset_base::UnixMillis;
use cresset_ledger::{BudgetAlert, BudgetOwner, BudgetPeriod, FailureCode, ReleaseCause};
use std::collections::BTreeMap;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StoreStats {
    /// Violations found since the start of the node.
    pub violations: u64,
    /// Age of the oldest open reservation, milliseconds; 0 when there is none, or none can be read.
    pub oldest_reservation_ms: u64,
    /// Attempts that ended uncharged since the start of the node, by cause.
    pub releases: BTreeMap<&'static str, u64>,
    /// Budgets whose charges reached the part at which operators are told, since the start of the
    /// node, by owner and period.
    pub budget_alerts: BTreeMap<&'static str, u64>,
    /// Free where the ledger is kept; `None` where that cannot be told.
    pub free_bytes: Option<u64>,
    /// Bytes that the files take, by what they hold.
    pub file_bytes: BTreeMap<&'static str, u64>,
}

/// A budget of which operators were told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BudgetNotice {
    pub at: UnixMillis,
    pub alert: BudgetAlert,
}

impl Store {
    /// The figures as they are now.
    pub async fn stats(&self) -> StoreStats {
        let shared = &self.inner.shared;
        let live = match shared.reader.snapshot().await {
            Ok(snapshot) => snapshot.live_requests().await.unwrap_or_default(),
            Err(_) => Vec::new(),
        };
        let oldest = live.iter().map(|record| record.latest().created_at.0).min();
        StoreStats {
            violations: shared.health.violations(),
            oldest_reservation_ms: oldest
                .map_or(0, |created| shared.clock.now().0.saturating_sub(created)),
            releases: shared.releases.lock().clone(),
            budget_alerts: shared.budget_alerts.lock().clone(),
            free_bytes: shared.reader.free_bytes(),
            file_bytes: shared.reader.file_bytes(),
        }
    }
}

/// The label of a budget in the metrics.
pub(super) fn budget_label(alert: &BudgetAlert) -> &'static str {
    match (alert.owner, alert.period) {
        (BudgetOwner::Account(_), BudgetPeriod::Day) => "account_day",
        (BudgetOwner::Account(_), BudgetPeriod::Month) => "account_month",
        (BudgetOwner::Key(_), BudgetPeriod::Day) => "key_day",
        (BudgetOwner::Key(_), BudgetPeriod::Month) => "key_month",
    }
}

/// The label of a cause in the metrics.
pub(super) fn label(cause: ReleaseCause) -> &'static str {
    match cause {
        ReleaseCause::CancelledInQueue => "cancelled_in_queue",
        ReleaseCause::Failed(code) | ReleaseCause::TurnedAway(code) => match code {
            FailureCode::GenerationFailed => "generation_failed",
            FailureCode::NodeRestarted => "node_restarted",
            FailureCode::DeadlineExceeded => "deadline_exceeded",
            FailureCode::Overloaded => "overloaded",
            FailureCode::Draining => "draining",
            FailureCode::ControlPlaneUnavailable => "control_plane_unavailable",
            FailureCode::FormatTooCostly => "format_too_costly",
        },
    }
}
