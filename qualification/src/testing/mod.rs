//! Subjects for tests: one that needs no model, and one that adds a planted fault to another; and
//! records that no suite wrote.

pub mod api_faults;
pub mod archives;
#[cfg(test)]
pub(crate) mod fake;
#[cfg(test)]
pub(crate) mod fake_api;
pub mod own_goldens;
pub mod planted_faults;
pub mod records;
