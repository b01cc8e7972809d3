//! Tells the program its date, so that it can refuse a clock that shows an earlier time: that of
//! `SOURCE_DATE_EPOCH`, or else of the last commit, or of this build where its clock is behind the
//! commit's. It is not looked up again after every commit, because an older date refuses less and
//! nothing wrongly.

#![expect(
    clippy::disallowed_methods,
    reason = "cargo gives a build script its settings in the environment"
)]

use std::process::Command;
use std::time::{SystemTime, UNIX_EPOCH};

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-env-changed=SOURCE_DATE_EPOCH");
    let given = std::env::var("SOURCE_DATE_EPOCH").ok();
    let seconds = given.and_then(|text| text.trim().parse().ok()).or_else(last_commit);
    println!("cargo:rustc-env=BUILT_AT_SECONDS={}", seconds.unwrap_or(0));
}

/// The time of the last commit, or of this build if that is earlier, seconds since 1970; `None`
/// outside a repository.
fn last_commit() -> Option<u64> {
    let output = Command::new("git").args(["log", "-1", "--format=%ct"]).output().ok()?;
    let committed: u64 = String::from_utf8(output.stdout).ok()?.trim().parse().ok()?;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).ok()?.as_secs();
    Some(committed.min(now))
}
