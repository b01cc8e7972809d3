//! Records that no suite wrote.

use crate::checks::ALL;
use crate::identity::{
    EngineBuild, Hardware, HostIdentity, Identity, Origin, Release, ServingSettings,
};
use crate::record::{CheckResult, CheckState, Grade, POLICY_VERSION, Record, Verdict};
use crate::suite::{Suite, SuiteScope};
use std::collections::{BTreeMap, BTreeSet};
use uuid::Uuid;

/// An operator's release on a machine of this name with that verdict.
pub fn of(verdict: Verdict) -> Record {
    let release = Release {
        name: "fake".into(),
        release_id: Uuid::nil(),
        origin: Origin::Operator,
        files: BTreeMap::from([("weights".to_owned(), "00".to_owned())]),
        blake3: BTreeMap::from([("weights".to_owned(), "11".to_owned())]),
        terms: serde_json::Value::Null,
    };
    let engine = EngineBuild {
        version: "1".into(),
        lockfile_sha256: "l".into(),
        executable_sha256: "e".into(),
    };
    let hardware = Hardware {
        kind: "cpu".into(),
        vendor: "v".into(),
        model: "m".into(),
        features: Vec::new(),
        threads: 2,
    };
    let products = BTreeSet::new();
    let host = HostIdentity { engine, hardware, settings: settings(), products };
    with(Identity { release, host }, verdict)
}

/// A small extent of that suite.
pub fn scope(suite: Suite) -> SuiteScope {
    SuiteScope {
        suite,
        context_tokens: 300,
        golden_prompt_tokens: 80,
        witness_tokens: 512,
        text_tokens: 128,
        document_tokens: 128,
        soak_seconds: 120,
    }
}

/// Settings under which the tests' releases are served.
pub fn settings() -> ServingSettings {
    ServingSettings {
        dtype: "f32".into(),
        kv_dtype: "f32".into(),
        dequantise: false,
        weights: String::new(),
        instruction_set: "avx2".into(),
        block_size: 16,
        max_batched_tokens: 512,
        max_rows: 8,
        max_context: 0,
        kv_mib: 64,
        gpu_graph_rows: 0,
        tensor_parallel: 0,
    }
}

/// A record of this identity whose checks lead to the verdict. An inconclusive one needs a
/// published release.
pub fn with(identity: Identity, verdict: Verdict) -> Record {
    let state = match verdict {
        Verdict::Qualified => CheckState::Passed,
        Verdict::Failed => CheckState::Failed,
        Verdict::Inconclusive => CheckState::NotRun,
    };
    let checks = ALL.iter().map(|check| CheckResult {
        id: check.id.into(),
        stage: check.stage.into(),
        proves: check.proves.into(),
        state,
        value: "v".into(),
        gate: "g".into(),
        seconds: 0.1,
        series: Vec::new(),
    });
    let checks: Vec<CheckResult> = checks.collect();
    Record {
        id: Uuid::now_v7(),
        policy_version: POLICY_VERSION,
        suite: "quick".into(),
        identity,
        started_at: 1_699_999_999,
        finished_at: 1_700_000_000,
        verdict,
        grade: Grade::of(&checks, None),
        like: None,
        goldens: None,
        speed: Vec::new(),
        notes: Vec::new(),
        qualified_context_tokens: if verdict == Verdict::Qualified { 300 } else { 0 },
        checks,
        canary: Vec::new(),
        memory: Vec::new(),
        self_test: Vec::new(),
    }
}

/// The record as it is where there are no reference outputs.
#[must_use]
pub fn without_reference(mut record: Record) -> Record {
    for check in &mut record.checks {
        if check.id.ends_with("goldens") {
            check.state = CheckState::NotRun;
        }
    }
    record.grade = Grade::of(&record.checks, None);
    record
}
