//! Subjects for tests: one that needs no model, and one that adds a planted fault to another; and
//! records that no suite wrote.

#[cfg(test)]
pub(crate) mod fake;
pub mod planted_faults;
pub mod records;
