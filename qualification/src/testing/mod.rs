//! Subjects for tests: one that needs no model, and one that spoils another with a planted fault.

#[cfg(test)]
pub(crate) mod fake;
pub mod planted_faults;
