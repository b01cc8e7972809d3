//! Makes a `QualifiedModel`, the only kind of model that may be served, from a manifest and a
//! matching record.

use super::{Catalogue, Error, Manifest, Result, folder};
use crate::clock::UnixMillis;
use crate::ids::ModelId;
use crate::ledger::Prices;
use cresset_models::ModelSource;
use cresset_qualification::record::POLICY_VERSION;
use cresset_qualification::{HostIdentity, Record, Verdict};
use std::fs;
use std::path::{Path, PathBuf};

/// Records kept per release; saving another one deletes the oldest.
const KEPT_RECORDS: usize = 16;

/// A release that was proven on this hardware with this build. It can only be made from a matching
/// record.
#[derive(Clone, Debug)]
pub struct QualifiedModel {
    manifest: Manifest,
    source: ModelSource,
    qualified_context_tokens: u32,
    record_id: String,
}

/// Why a release may not be served here. Each message names the command that resolves it.
#[derive(Debug, thiserror::Error)]
pub enum NotQualified {
    #[error(transparent)]
    Files(#[from] Error),
    #[error("{name} was never qualified on this node: run `cresset qualify {name}`")]
    NoRecord { name: String },
    #[error(
        "{name} was qualified with another {part} (then {recorded}, now {present}): run `cresset qualify {name}`"
    )]
    Differs { name: String, part: &'static str, recorded: String, present: String },
    #[error(
        "{name} did not qualify ({why}): run `cresset qualify {name} --report FILE` and read the report"
    )]
    Failed { name: String, why: String },
    #[error(
        "the qualification of {name} is {age_days} days old, over the limit of {max_age_days}: run `cresset qualify {name}`"
    )]
    Expired { name: String, age_days: u64, max_age_days: u64 },
}

impl QualifiedModel {
    pub fn id(&self) -> ModelId {
        self.manifest.id
    }
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }
    pub fn source(&self) -> &ModelSource {
        &self.source
    }
    /// Context verified by the qualification run, tokens.
    pub fn qualified_context_tokens(&self) -> u32 {
        self.qualified_context_tokens
    }
    pub fn record_id(&self) -> &str {
        &self.record_id
    }
    pub fn prices(&self) -> Prices {
        self.manifest.prices
    }
}

impl Catalogue {
    /// The qualified model, if the newest record that fits release, build, hardware and settings
    /// says so.
    pub fn qualified(
        &self,
        manifest: &Manifest,
        host: &HostIdentity,
        max_age_days: u64,
        now: UnixMillis,
    ) -> Result<QualifiedModel, NotQualified> {
        let source = self.source(manifest)?;
        let record = self.deciding_record(manifest, host)?;
        let name = || manifest.name.clone();
        if record.verdict != Verdict::Qualified {
            return Err(NotQualified::Failed { name: name(), why: reason(&record) });
        }
        let age_days = now.seconds().saturating_sub(record.finished_at) / 86_400;
        if age_days > max_age_days {
            return Err(NotQualified::Expired { name: name(), age_days, max_age_days });
        }
        let limit = manifest.limits.model_context_tokens;
        Ok(QualifiedModel {
            manifest: manifest.clone(),
            source,
            qualified_context_tokens: record.qualified_context_tokens.min(limit),
            record_id: record.id.to_string(),
        })
    }

    fn deciding_record(
        &self,
        manifest: &Manifest,
        host: &HostIdentity,
    ) -> Result<Record, NotQualified> {
        let name = || manifest.name.clone();
        let present = self.identity(manifest, host);
        let mut newest_difference = None;
        for record in self.records(&manifest.name)? {
            let difference = match record.identity.difference(&present) {
                None if record.policy_version == POLICY_VERSION => return Ok(record),
                None => {
                    ("suite policy", record.policy_version.to_string(), POLICY_VERSION.to_string())
                }
                Some(d) => (d.part, d.recorded, d.present),
            };
            newest_difference.get_or_insert(difference);
        }
        Err(match newest_difference {
            None => NotQualified::NoRecord { name: name() },
            Some((part, recorded, present)) => {
                NotQualified::Differs { name: name(), part, recorded, present }
            }
        })
    }
}

fn reason(record: &Record) -> String {
    let red: Vec<&str> = record.failed_checks().map(|check| check.id.as_str()).collect();
    if red.is_empty() {
        record.verdict.words().to_owned()
    } else {
        format!("failed: {}", red.join(", "))
    }
}

pub(super) fn save(root: &Path, record: &Record) -> Result<PathBuf> {
    let folder = root.join(&record.identity.release.name);
    fs::create_dir_all(&folder).map_err(Error::io("create", &folder))?;
    let path = folder.join(format!("{}.json", record.id));
    let text = serde_json::to_vec_pretty(record).expect("a record is representable in JSON");
    folder::write_whole(&path, &text)?;
    for old in record_files(&folder)?.into_iter().skip(KEPT_RECORDS) {
        fs::remove_file(&old).map_err(Error::io("remove", &old))?;
    }
    Ok(path)
}

pub(super) fn records(root: &Path, name: &str) -> Result<Vec<Record>> {
    let mut records = Vec::new();
    for path in record_files(&root.join(name))? {
        let text = fs::read(&path).map_err(Error::io("read", &path))?;
        match serde_json::from_slice::<Record>(&text) {
            Ok(record) => records.push(record),
            Err(error) => {
                tracing::warn!(path = %path.display(), %error, "passing over a qualification record");
            }
        }
    }
    Ok(records)
}

/// Newest first: record ids are time-ordered.
fn record_files(folder: &Path) -> Result<Vec<PathBuf>> {
    if !folder.exists() {
        return Ok(Vec::new());
    }
    let entries = fs::read_dir(folder).map_err(Error::io("list", folder))?;
    let mut paths: Vec<PathBuf> =
        entries.filter_map(|entry| entry.ok().map(|e| e.path())).collect();
    paths.retain(|path| path.extension().is_some_and(|ext| ext == "json"));
    paths.sort_unstable_by(|a, b| b.cmp(a));
    Ok(paths)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalogue::describe_host;
    use cresset_qualification::{CheckResult, CheckState, ServingSettings};
    use uuid::Uuid;

    const DAY: u64 = 86_400;
    const FINISHED: u64 = 1_700_000_000;

    /// A data folder with one added release.
    struct Place {
        data: tempfile::TempDir,
        manifest: Manifest,
        host: HostIdentity,
    }

    impl Place {
        fn new() -> Self {
            let data = tempfile::tempdir().unwrap();
            let folder = data.path().join("original");
            fs::create_dir(&folder).unwrap();
            fs::write(folder.join("config.json"), r#"{"max_position_embeddings": 512}"#).unwrap();
            fs::write(folder.join("model.safetensors"), "weights").unwrap();
            fs::write(folder.join("tokenizer.json"), "{}").unwrap();
            let manifest = Catalogue::new(data.path())
                .add(&folder, Some("own"), &|_| Ok(()), &mut |_| {})
                .unwrap();
            let settings = ServingSettings {
                dtype: "f32".into(),
                kv_dtype: "f32".into(),
                dequantise: false,
                block_size: 16,
                max_batched_tokens: 512,
                max_rows: 8,
                max_context: 0,
            };
            Self { data, manifest, host: describe_host(None, 2, settings) }
        }

        fn catalogue(&self) -> Catalogue {
            Catalogue::new(self.data.path())
        }

        fn record(&self, verdict: Verdict) -> Record {
            let state =
                if verdict == Verdict::Failed { CheckState::Failed } else { CheckState::Passed };
            let check = CheckResult {
                id: "stop_string".into(),
                stage: "S6".into(),
                proves: "stops".into(),
                state,
                value: "v".into(),
                gate: "g".into(),
                seconds: 0.1,
            };
            Record {
                id: Uuid::now_v7(),
                policy_version: POLICY_VERSION,
                suite: "quick".into(),
                identity: self.catalogue().identity(&self.manifest, &self.host),
                started_at: FINISHED - 1,
                finished_at: FINISHED,
                verdict,
                notes: Vec::new(),
                qualified_context_tokens: 300,
                checks: vec![check],
            }
        }

        fn save(&self, record: &Record) {
            self.catalogue().save_record(record).unwrap();
        }

        fn ask(&self, days_later: u64) -> Result<QualifiedModel, NotQualified> {
            let now = UnixMillis((FINISHED + days_later * DAY) * 1_000);
            self.catalogue().qualified(&self.manifest, &self.host, 90, now)
        }

        fn refusal(&self, days_later: u64) -> String {
            let error = self.ask(days_later).unwrap_err().to_string();
            assert!(error.contains("cresset "), "it names the command that mends it: {error}");
            error
        }
    }

    #[test]
    fn a_matching_record_makes_a_model() {
        let place = Place::new();
        assert!(place.refusal(0).contains("never qualified"));
        let record = place.record(Verdict::Qualified);
        place.save(&record);
        let model = place.ask(90).unwrap();
        assert_eq!(
            (model.qualified_context_tokens(), model.record_id()),
            (300, record.id.to_string().as_str())
        );
        assert_eq!(model.prices().input, place.manifest.prices.input);
    }

    #[test]
    fn old_and_failed_records_open_nothing() {
        let place = Place::new();
        place.save(&place.record(Verdict::Qualified));
        assert!(place.refusal(91).contains("91 days old"));
        place.save(&place.record(Verdict::Inconclusive));
        assert!(place.refusal(0).contains("inconclusive"), "the newest matching record decides");
        place.save(&place.record(Verdict::Failed));
        assert!(place.refusal(0).contains("failed: stop_string"));
    }

    #[test]
    fn the_part_that_differs_is_named() {
        type Change = fn(&mut Record);
        let place = Place::new();
        let changes: &[(&str, Change)] = &[
            ("another suite policy", |r| r.policy_version += 1),
            ("another executable", |r| r.identity.host.engine.executable_sha256 = "0".into()),
            ("another hardware", |r| r.identity.host.hardware.model = "other".into()),
            ("another serving setting (then max_rows 9, now max_rows 8)", |r| {
                r.identity.host.settings.max_rows = 9;
            }),
            ("another release files", |r| r.identity.release.files.clear()),
        ];
        for (part, change) in changes {
            let mut record = place.record(Verdict::Qualified);
            change(&mut record);
            place.save(&record);
            assert!(place.refusal(0).contains(part), "{part}");
        }
        place.save(&place.record(Verdict::Qualified));
        place.ask(0).unwrap();
    }

    #[test]
    fn a_changed_file_withdraws_the_model() {
        let place = Place::new();
        place.save(&place.record(Verdict::Qualified));
        let file = place.data.path().join("models/own/model.safetensors");
        fs::remove_file(&file).unwrap();
        assert!(place.refusal(0).contains("not here"));
        fs::write(&file, "weight").unwrap();
        assert!(place.refusal(0).contains("6 bytes, expected 7"));
        // A change that keeps the size is found where the file is read.
        fs::write(&file, "WEIGHTS").unwrap();
        let error = place.ask(0).unwrap().source().read("model.safetensors").unwrap_err();
        assert!(error.to_string().contains("model.safetensors is not the file that was released"));
        fs::write(&file, "weights").unwrap();
        place.ask(0).unwrap().source().read("model.safetensors").unwrap();
    }

    #[test]
    fn records_are_bounded_and_unreadable_ones_prove_nothing() {
        let place = Place::new();
        (0..KEPT_RECORDS + 3).for_each(|_| place.save(&place.record(Verdict::Qualified)));
        fs::write(place.data.path().join("qualification/own/zzz.json"), "{").unwrap();
        assert_eq!(place.catalogue().records("own").unwrap().len(), KEPT_RECORDS);
        place.ask(0).unwrap();
    }
}
