//! The identity of this host: this build, this hardware and these settings, to which verdicts are
//! bound.

use cresset_kernels::gpu::Properties;
use cresset_qualification::{EngineBuild, Hardware, HostIdentity, ServingSettings};
use sha2::{Digest, Sha256};
use std::collections::BTreeSet;
use std::path::Path;
use std::sync::OnceLock;

/// The build, hardware and settings that a qualification is valid for. `threads` counts compute
/// threads of the CPU and is ignored with a GPU. The executable is read once per process.
pub fn describe_host(
    gpu: Option<&Properties>,
    threads: usize,
    settings: ServingSettings,
) -> HostIdentity {
    let hardware = gpu.map_or_else(|| cpu(threads), cuda);
    HostIdentity { engine: engine_build(), hardware, settings, products: BTreeSet::new() }
}

fn engine_build() -> EngineBuild {
    static EXECUTABLE: OnceLock<String> = OnceLock::new();
    EngineBuild {
        version: env!("CARGO_PKG_VERSION").into(),
        lockfile_sha256: hex::encode(Sha256::digest(include_bytes!("../../Cargo.lock"))),
        executable_sha256: EXECUTABLE.get_or_init(executable_digest).clone(),
    }
}

/// Hex SHA-256 of the running executable. A build that cannot read itself gets a fresh value, so
/// that it never equals a recorded one.
fn executable_digest() -> String {
    let read = |path: &Path| super::folder::sha256(path, |_| {}).ok();
    let digest = std::env::current_exe().ok().and_then(|path| read(&path));
    digest.unwrap_or_else(|| format!("unreadable {}", uuid::Uuid::now_v7()))
}

fn cpu(threads: usize) -> Hardware {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let field = |name: &str| cpuinfo(&info, name).unwrap_or(std::env::consts::ARCH).to_owned();
    let features = features().into_iter().map(str::to_owned).collect();
    Hardware {
        kind: "cpu".into(),
        vendor: field("vendor_id"),
        model: field("model name"),
        features,
        threads,
    }
}

/// The class of a GPU, with all that an answer may depend on: another device, driver or library
/// counts as other hardware.
fn cuda(found: &Properties) -> Hardware {
    let (major, minor) = found.capability;
    let memory = format!("{} MiB", found.memory_bytes >> 20);
    Hardware {
        kind: "cuda".into(),
        vendor: "NVIDIA".into(),
        model: found.name.clone(),
        features: vec![format!("sm_{major}{minor}"), memory, found.versions.clone()],
        threads: found.multiprocessors as usize,
    }
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
    fn a_verdict_holds_for_one_device() {
        let settings = || ServingSettings {
            dtype: "bf16".into(),
            kv_dtype: "bf16".into(),
            dequantise: false,
            weights: String::new(),
            instruction_set: "avx2".into(),
            block_size: 16,
            max_batched_tokens: 512,
            max_rows: 256,
            max_context: 0,
            kv_mib: 0,
            gpu_graph_rows: 512,
            tensor_parallel: 1,
        };
        let found = Properties {
            name: "NVIDIA H200".into(),
            capability: (9, 0),
            multiprocessors: 132,
            shared_bytes: 232_448,
            memory_bytes: 140 << 30,
            versions: "driver 580.82.07 CUDA 13.0 cuBLASLt 130002".into(),
            warp_groups: false,
        };
        let here = describe_host(Some(&found), 2, settings());
        assert_eq!(
            here,
            describe_host(Some(&found), 8, settings()),
            "the CPU does not matter there"
        );
        let others = [
            Properties { name: "NVIDIA H100".into(), ..found.clone() },
            Properties { capability: (9, 1), ..found.clone() },
            Properties { memory_bytes: 80 << 30, ..found.clone() },
            Properties {
                versions: "driver 590.1 CUDA 13.1 cuBLASLt 130002".into(),
                ..found.clone()
            },
        ];
        for other in others.iter().map(Some).chain([None]) {
            assert_ne!(here.hardware, describe_host(other, 2, settings()).hardware, "{other:?}");
        }
    }

    #[test]
    fn the_build_is_told_by_its_executable() {
        let build = engine_build();
        assert_eq!(build, engine_build());
        assert_eq!((build.executable_sha256.len(), build.lockfile_sha256.len()), (64, 64));
    }
}
