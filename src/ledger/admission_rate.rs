//! The rate of admissions that a plan allows.

/// How often requests of an account may be admitted, by its plan, where several nodes share the
/// ledger: the generic cell rate algorithm (ITU-T I.371), whose one number stands in the account's
/// row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AdmissionRate {
    pub per_minute: u32,
    /// Admissions that may come at once after a pause.
    pub burst: u32,
}

impl Default for AdmissionRate {
    /// No limit.
    fn default() -> Self {
        Self { per_minute: u32::MAX, burst: u32::MAX }
    }
}
