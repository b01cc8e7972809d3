//! What runs here: this build and this hardware, as verdicts are bound to them.

use cresset_qualification::{EngineBuild, Hardware, Host, ServingSettings};
use sha2::{Digest, Sha256};
use std::path::Path;
use std::sync::OnceLock;

/// `threads` is the number of compute threads. The executable is read once per process.
pub fn host(threads: usize, settings: ServingSettings) -> Host {
    Host { engine: engine_build(), hardware: cpu(threads), settings }
}

fn engine_build() -> EngineBuild {
    static EXECUTABLE: OnceLock<String> = OnceLock::new();
    EngineBuild {
        version: env!("CARGO_PKG_VERSION").into(),
        lockfile_sha256: hex::encode(Sha256::digest(include_bytes!("../../Cargo.lock"))),
        executable_sha256: EXECUTABLE.get_or_init(executable_digest).clone(),
    }
}

/// A build that cannot read itself is never equal to a recorded one.
fn executable_digest() -> String {
    let read = |path: &Path| super::folder::sha256(path, |_| {}).ok();
    let digest = std::env::current_exe().ok().and_then(|path| read(&path));
    digest.unwrap_or_else(|| format!("unreadable {}", uuid::Uuid::now_v7()))
}

fn cpu(threads: usize) -> Hardware {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let field = |name: &str| cpuinfo(&info, name).unwrap_or(std::env::consts::ARCH).to_owned();
    let features = features().into_iter().map(str::to_owned).collect();
    Hardware { kind: "cpu".into(), vendor: field("vendor_id"), model: field("model name"), features, threads }
}

fn cpuinfo<'a>(info: &'a str, name: &str) -> Option<&'a str> {
    let line = info.lines().find(|line| line.starts_with(name))?;
    line.split_once(':').map(|(_, value)| value.trim())
}

macro_rules! detected {
    ($detect:ident: $($name:tt)+) => {{
        let mut found: Vec<&'static str> = Vec::new();
        $(if std::arch::$detect!($name) { found.push($name); })+
        found
    }};
}

#[cfg(target_arch = "x86_64")]
fn features() -> Vec<&'static str> {
    detected!(is_x86_feature_detected: "avx" "avx2" "fma" "f16c" "avx512f" "avx512bw" "avx512dq" "avx512vl" "avx512vnni" "avx512bf16" "avxvnni")
}

#[cfg(target_arch = "aarch64")]
fn features() -> Vec<&'static str> {
    detected!(is_aarch64_feature_detected: "neon" "fp16" "dotprod" "bf16" "i8mm" "sve")
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn features() -> Vec<&'static str> {
    Vec::new()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_processor_is_named() {
        let info = "processor\t: 0\nvendor_id\t: GenuineIntel\nmodel name\t: Xeon: fast\n";
        assert_eq!(cpuinfo(info, "vendor_id"), Some("GenuineIntel"));
        assert_eq!(cpuinfo(info, "model name"), Some("Xeon: fast"));
        assert_eq!(cpuinfo(info, "flags"), None);
    }

    #[test]
    fn the_build_is_told_by_its_executable() {
        let build = engine_build();
        assert_eq!(build, engine_build());
        assert_eq!((build.executable_sha256.len(), build.lockfile_sha256.len()), (64, 64));
    }
}
