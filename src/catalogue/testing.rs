//! A release that counts as qualified without any check, for tests with scripted engines.

use super::{Catalogue, DoorRules, QualifiedModel, describe_host};
use cresset_base::{Clock, SystemClock};
use cresset_qualification::testing::records;
use cresset_qualification::{CheckState, Grade, Record, Verdict};
use std::path::Path;

/// Adds a release of one GGUF file to the folder's catalogue, with a record that says it was
/// qualified here.
pub fn qualified(folder: &Path, name: &str, gguf: &[u8], context_tokens: u32) -> QualifiedModel {
    qualified_but(folder, name, gguf, context_tokens, &[])
}

/// As `qualified`, with a record in which these checks withhold what they prove.
pub fn qualified_but(
    folder: &Path,
    name: &str,
    gguf: &[u8],
    context_tokens: u32,
    withheld: &[&str],
) -> QualifiedModel {
    let file = folder.join(format!("{name}.gguf"));
    std::fs::write(&file, gguf).expect("the folder can be written to");
    let catalogue = Catalogue::new(folder);
    let manifest =
        catalogue.add(&file, Some(name), &|_| Ok(()), &mut |_| {}).expect("the file is a model");
    let host = describe_host(None, 1, records::settings());
    let now = SystemClock.now();
    let mut identity = catalogue.identity(&manifest, &host);
    identity.release.blake3 = catalogue.digests(&manifest).expect("the files are here").blake3;
    let mut record = Record {
        started_at: now.seconds(),
        finished_at: now.seconds(),
        qualified_context_tokens: context_tokens,
        ..records::with(identity, Verdict::Qualified)
    };
    for check in record.checks.iter_mut().filter(|check| withheld.contains(&check.id.as_str())) {
        check.state = CheckState::Withheld;
    }
    catalogue.save_record(&record).expect("the record can be saved");
    let rules = DoorRules { max_age_days: 90, require: Grade::SelfOnly, any_tool_choice: false };
    catalogue.qualified(&manifest, &host, rules, now).expect("the record is valid")
}
