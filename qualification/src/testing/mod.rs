//! Subjects for tests: one that needs no model, and one that adds a planted fault to another.

#[cfg(test)]
pub(crate) mod fake;
pub mod planted_faults;
