//! Qualification: checks that prove a model release on this hardware with this build, and the
//! record that says so.
//!
//! Generic over a [`Subject`], so it knows no engine. Every check names the planted faults
//! ([`Fault`]) that must turn it red; the tests of this crate plant each of them and look.

pub mod checks;
pub mod faults;
pub mod goldens;
pub mod identity;
pub mod record;
pub mod report;
pub mod subject;
pub mod suite;

#[cfg(test)]
mod fake;

pub use faults::{Fault, Faulty};
pub use goldens::Goldens;
pub use identity::{
    Difference, EngineBuild, Hardware, Host, Identity, Origin, Release, ServingSettings,
};
pub use record::{CheckResult, Record, State, Verdict};
pub use subject::{Finish, Generation, Message, Request, Subject, SubjectError, TokenLogprob};
pub use suite::{Progress, Scope, Suite, run};
