//! Undoes a request that ends early: by a refusal, an unreachable ledger or a panic.

use super::error::RequestError;
use super::live::{Admission, LiveRequest};
use super::services::Services;
use cresset_base::AttemptId;
use cresset_ledger::{Command, FailureCode, ReleaseCause};
use std::sync::Arc;

/// Holds a request's place among the live ones and its reservation. When it is dropped in any
/// state, it gives both back and ends the request uncharged. The sequence ends with its ticket.
pub(super) struct ReservationGuard {
    services: Arc<Services>,
    live: Arc<LiveRequest>,
    attempt: AttemptId,
    /// If dropped now, release the reservation for this cause; `None` when there is no reservation
    /// to release.
    release_as: Option<ReleaseCause>,
}

impl ReservationGuard {
    pub(super) fn new(
        services: &Arc<Services>,
        live: &Arc<LiveRequest>,
        attempt: AttemptId,
    ) -> Self {
        Self { services: services.clone(), live: live.clone(), attempt, release_as: None }
    }

    /// To be called before the admission is sent: from here on there may be a reservation.
    pub(super) fn arm(&mut self) {
        self.release_as = Some(ReleaseCause::Failed(FailureCode::GenerationFailed));
    }

    /// Ends a request that has no reservation.
    pub(super) fn not_admitted(mut self, admission: Admission) {
        self.release_as = None;
        self.decide(admission);
    }

    /// Ends a request that may have a reservation, which the drop releases.
    pub(super) fn in_doubt(mut self) {
        let cause = ReleaseCause::TurnedAway(FailureCode::ControlPlaneUnavailable);
        self.release_as = Some(cause);
        self.decide(Admission::Refused(RequestError::LedgerUnavailable));
    }

    /// Ends a request whose end the ledger cannot be told now: the store keeps trying to release
    /// the reservation.
    pub(super) fn end_unrecorded(&mut self) {
        self.release_as = Some(ReleaseCause::Failed(FailureCode::ControlPlaneUnavailable));
    }

    /// Records that the reservation has its end in the ledger.
    pub(super) fn resolved(&mut self) {
        self.release_as = None;
        self.services.live.remove(&self.live);
    }

    fn decide(&self, admission: Admission) {
        // The request is removed first, because a caller that waited for the admission searches the
        // live ones again.
        self.services.live.remove(&self.live);
        self.live.decide(admission);
    }
}

impl Drop for ReservationGuard {
    fn drop(&mut self) {
        if let Some(cause) = self.release_as {
            self.services.store.submit_detached(Command::Release {
                key: self.live.key,
                attempt: self.attempt,
                cause,
            });
        }
        self.services.live.remove(&self.live);
        self.live.end(Err(RequestError::GenerationFailed));
    }
}
