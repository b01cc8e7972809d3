//! Qualification: checks that prove a model release on this hardware with this build, and the
//! record of the proof.
//!
//! The crate is generic over a [`Subject`], so it depends on no engine. `testing::planted_faults`
//! lists for every check the faults that it must find; the tests of this crate plant each of them.
//! `README.md` says how checks and goldens are added.

#![cfg_attr(
    test,
    allow(
        clippy::disallowed_methods,
        unreachable_pub,
        reason = "tests measure time, start threads and share helpers"
    )
)]

pub mod canary;
pub mod checks;
pub mod context_proof;
pub mod envelope;
pub mod goldens;
pub mod http;
pub mod identity;
pub(crate) mod policy;
pub mod record;
pub mod report;
pub mod speed;
pub mod statement;
pub mod subject;
pub mod suite;

#[cfg(any(test, feature = "testing"))]
pub mod testing;

pub use canary::CanaryCase;
pub use goldens::{Goldens, GoldensFault, GoldensOrigin};
pub use http::EndpointReport;
pub use identity::{
    Difference, EngineBuild, Hardware, HostIdentity, Identity, Origin, Release, ServingSettings,
};
pub use record::{CheckResult, CheckState, Grade, Record, SelfTestLine, Series, Verdict};
pub use subject::{
    ApiAnswer, ApiManner, ChatTurn, Finish, Generation, PositionLogprob, Request, Subject,
    SubjectError,
};
pub use suite::{Suite, SuiteEvent, SuiteProgress, SuiteScope, UnfinishedRun, run, run_only};
