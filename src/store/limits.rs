//! The settings that the store works by.

use super::clock_check::ClockLimits;
use crate::settings::LedgerSettings;
use crate::settings::RequestSettings;

/// By default those of the configuration, with any clock.
#[derive(Clone, Debug, Default)]
pub struct Limits {
    pub requests: RequestSettings,
    pub ledger: LedgerSettings,
    pub clock: ClockLimits,
}
