//! A release that counts as qualified without any check, for tests with scripted engines.

use super::{Catalogue, QualifiedModel, describe_host};
use crate::clock::{Clock, SystemClock};
use cresset_qualification::record::POLICY_VERSION;
use cresset_qualification::{Record, ServingSettings, Verdict};
use std::path::Path;

/// Adds a release of one GGUF file to the folder's catalogue, with a record that says it was
/// qualified here.
pub fn qualified(folder: &Path, name: &str, gguf: &[u8], context_tokens: u32) -> QualifiedModel {
    let file = folder.join(format!("{name}.gguf"));
    std::fs::write(&file, gguf).expect("the folder can be written to");
    let catalogue = Catalogue::new(folder);
    let manifest =
        catalogue.add(&file, Some(name), &|_| Ok(()), &mut |_| {}).expect("the file is a model");
    let settings = ServingSettings {
        dtype: "f32".into(),
        kv_dtype: "f32".into(),
        dequantise: false,
        block_size: 16,
        max_batched_tokens: 256,
        max_rows: 64,
        max_context: 0,
    };
    let host = describe_host(None, 1, settings);
    let now = SystemClock.now();
    let record = Record {
        id: uuid::Uuid::now_v7(),
        policy_version: POLICY_VERSION,
        suite: "quick".into(),
        identity: catalogue.identity(&manifest, &host),
        started_at: now.seconds(),
        finished_at: now.seconds(),
        verdict: Verdict::Qualified,
        notes: Vec::new(),
        qualified_context_tokens: context_tokens,
        checks: Vec::new(),
    };
    catalogue.save_record(&record).expect("the record can be saved");
    catalogue.qualified(&manifest, &host, 90, now).expect("the record is valid")
}
