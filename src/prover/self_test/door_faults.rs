//! Faults in what proves a release: its record, its manifest and its files. Each is planted in a
//! copy of what the data folder holds of the release, and the model must not load there.

use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use cresset_base::{Clock, SystemClock};
use cresset_catalogue::{Catalogue, Manifest};
use cresset_node::{Assembly, NodeError};
use cresset_qualification::{CheckState, Grade, Record, SelfTestLine, Verdict};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};

/// What finds these faults, in place of a check.
const DOOR: &str = "the door";

/// A record, a manifest or a file that is not what was proven.
struct DoorFault {
    what: &'static str,
    /// A part of the refusal; empty where nothing is wrong.
    refusal: &'static str,
    plant: Plant,
}

enum Plant {
    /// A record that this node signs.
    Signed(fn(&mut Record)),
    /// Signed by another node.
    Foreign,
    /// The signed file, changed.
    Edited(fn(Value) -> Value),
    /// A record of this manifest, changed after the record was made.
    Manifest(fn(&mut Manifest)),
    /// A byte of the weights, with their size and time of change kept.
    Weights,
}

const DAY: u64 = 86_400;

const DOOR_FAULTS: &[DoorFault] = &[
    DoorFault { what: "the record as it was signed", refusal: "", plant: Plant::Signed(|_| {}) },
    DoorFault {
        what: "the record is not signed",
        refusal: "not signed",
        plant: Plant::Edited(|signed| payload(&signed)),
    },
    DoorFault {
        what: "another node signed the record",
        refusal: "another key",
        plant: Plant::Foreign,
    },
    DoorFault {
        what: "the record promises a context that was never tried",
        refusal: "changed after it was signed",
        plant: Plant::Edited(promise_more),
    },
    DoorFault {
        what: "the record has no checks",
        refusal: "not those of the suite",
        plant: Plant::Signed(|record| record.checks.clear()),
    },
    DoorFault {
        what: "a check of the record failed",
        refusal: "another verdict",
        plant: Plant::Signed(|record| record.checks[0].state = CheckState::Failed),
    },
    DoorFault {
        what: "a planted fault was not found",
        refusal: "another verdict",
        plant: Plant::Signed(miss_a_fault),
    },
    DoorFault {
        what: "the record claims a better grade",
        refusal: "another grade",
        plant: Plant::Signed(claim_a_grade),
    },
    DoorFault {
        what: "the record says that the release failed",
        refusal: "did not qualify",
        plant: Plant::Signed(fail),
    },
    DoorFault {
        what: "the record comes from the year 5138",
        refusal: "in the future",
        plant: Plant::Signed(|record| record.finished_at = 99_999_999_999),
    },
    DoorFault {
        what: "the record is too old",
        refusal: "days old",
        plant: Plant::Signed(|record| {
            record.started_at -= 10_000 * DAY;
            record.finished_at -= 10_000 * DAY;
        }),
    },
    DoorFault {
        what: "the record is of an earlier suite",
        refusal: "suite policy",
        plant: Plant::Signed(|record| record.policy_version -= 1),
    },
    DoorFault {
        what: "the record is of another build",
        refusal: "another executable",
        plant: Plant::Signed(|record| {
            record.identity.host.engine.executable_sha256 = "0".repeat(64);
        }),
    },
    DoorFault {
        what: "the record is of another machine",
        refusal: "another hardware",
        plant: Plant::Signed(|record| record.identity.host.hardware.model.push('X')),
    },
    DoorFault {
        what: "the record is of another setting",
        refusal: "another serving setting",
        plant: Plant::Signed(|record| record.identity.host.settings.block_size *= 2),
    },
    DoorFault {
        what: "the record is of another release",
        refusal: "another release",
        plant: Plant::Signed(|record| record.identity.release.release_id = uuid::Uuid::nil()),
    },
    DoorFault {
        what: "the record is of other files",
        refusal: "another release files",
        plant: Plant::Signed(|record| {
            record.identity.release.files.values_mut().for_each(|digest| *digest = "0".repeat(64));
        }),
    },
    DoorFault {
        what: "the record lacks the digests that a load compares",
        refusal: "both digests",
        plant: Plant::Signed(|record| record.identity.release.blake3.clear()),
    },
    DoorFault {
        what: "the record has no positions for a load to compute",
        refusal: "no canary",
        plant: Plant::Signed(|record| record.canary.clear()),
    },
    DoorFault {
        what: "a load computes other tokens than the record has",
        refusal: "canary",
        plant: Plant::Signed(other_tokens),
    },
    DoorFault {
        what: "the manifest promises a longer context",
        refusal: "another release terms",
        plant: Plant::Manifest(|manifest| manifest.limits.model_context_tokens *= 2),
    },
    DoorFault {
        what: "a byte of the weights is another, their size and time are kept",
        refusal: "BLAKE3",
        plant: Plant::Weights,
    },
];

/// What a DSSE envelope holds.
fn payload(signed: &Value) -> Value {
    let payload = signed["payload"].as_str().unwrap_or_default();
    serde_json::from_slice(&BASE64.decode(payload).unwrap_or_default()).unwrap_or_default()
}

fn promise_more(mut signed: Value) -> Value {
    let mut statement = payload(&signed);
    raise(&mut statement);
    signed["payload"] = BASE64.encode(statement.to_string()).into();
    signed
}

/// Puts a longer context wherever one stands.
fn raise(value: &mut Value) {
    match value {
        Value::Object(members) => members.iter_mut().for_each(|(name, value)| {
            if name == "qualified_context_tokens" {
                *value = 1_000_000.into();
            }
            raise(value);
        }),
        Value::Array(items) => items.iter_mut().for_each(raise),
        _ => {}
    }
}

fn miss_a_fault(record: &mut Record) {
    record.self_test.push(SelfTestLine {
        place: "file".into(),
        fault: "one byte is another".into(),
        check: "digests".into(),
        found_by: None,
        right: false,
        told: String::new(),
    });
}

fn claim_a_grade(record: &mut Record) {
    record.grade = if record.grade == Grade::SelfOnly { Grade::Reference } else { Grade::SelfOnly };
}

fn other_tokens(record: &mut Record) {
    for case in &mut record.canary {
        case.tokens.iter_mut().for_each(|token| *token ^= 1);
        case.margins.fill(f32::MAX);
    }
}

fn fail(record: &mut Record) {
    record.checks[0].state = CheckState::Failed;
    record.verdict = Verdict::Failed;
    record.qualified_context_tokens = 0;
}

/// A copy of what a data folder holds of a release.
pub(super) struct DoorBench<'a> {
    assembly: Assembly,
    manifest: &'a Manifest,
    record: &'a Record,
}

impl<'a> DoorBench<'a> {
    /// Copies the release and its record, and accepts it where that is needed.
    pub(super) fn new(
        assembly: &Assembly,
        manifest: &'a Manifest,
        record: &'a Record,
        folder: PathBuf,
    ) -> Result<Self, NodeError> {
        let from = assembly.data_dir.join("models").join(&manifest.name);
        let to = folder.join("models").join(&manifest.name);
        fs::create_dir_all(&to).map_err(NodeError::new)?;
        for file in &manifest.files {
            fs::copy(from.join(&file.name), to.join(&file.name)).map_err(NodeError::new)?;
        }
        let mut assembly = assembly.clone();
        assembly.data_dir = folder;
        let catalogue = assembly.catalogue();
        if record.grade == Grade::SelfOnly {
            let now = SystemClock.now();
            catalogue.accept(record, true, "self-test", now).map_err(NodeError::new)?;
        }
        Ok(Self { assembly, manifest, record })
    }

    pub(super) fn run(&self, on_line: &mut dyn FnMut(SelfTestLine)) -> Result<(), NodeError> {
        for fault in DOOR_FAULTS {
            let loaded = self.planted(&fault.plant)?;
            let harmless = fault.refusal.is_empty();
            let (told, right) = match loaded {
                Ok(()) => ("the model was loaded".to_owned(), harmless),
                Err(why) => {
                    let right = !harmless && why.contains(fault.refusal);
                    (why, right)
                }
            };
            on_line(SelfTestLine {
                place: "door".into(),
                fault: fault.what.into(),
                check: if harmless { String::new() } else { DOOR.into() },
                found_by: (right && !harmless).then(|| DOOR.into()),
                right,
                told,
            });
        }
        Ok(())
    }

    /// Whether the model loads with the fault, or why not.
    fn planted(&self, plant: &Plant) -> Result<Result<(), String>, NodeError> {
        let (mut record, mut manifest) = (self.record.clone(), self.manifest.clone());
        let mut weights = None;
        match plant {
            Plant::Signed(change) => change(&mut record),
            Plant::Manifest(change) => change(&mut manifest),
            Plant::Weights => weights = Some(self.weights()),
            Plant::Foreign | Plant::Edited(_) => {}
        }
        let stored = self.assembly.catalogue().save_record(&record).map_err(NodeError::new)?;
        if let Plant::Foreign = plant {
            self.sign_elsewhere(&stored)?;
        }
        if let Plant::Edited(change) = plant {
            let signed = fs::read(&stored).map_err(NodeError::new)?;
            let signed = serde_json::from_slice(&signed).map_err(NodeError::new)?;
            fs::write(&stored, change(signed).to_string()).map_err(NodeError::new)?;
        }
        weights.as_deref().map_or(Ok(()), flip_kept).map_err(NodeError::new)?;
        let loaded = self.assembly.load_qualified(&manifest);
        weights.as_deref().map_or(Ok(()), flip_kept).map_err(NodeError::new)?;
        Ok(loaded.map(|loaded| loaded.engine.shutdown()).map_err(|why| why.to_string()))
    }

    fn weights(&self) -> PathBuf {
        let folder = self.assembly.data_dir.join("models").join(&self.manifest.name);
        let largest = self.manifest.files.iter().max_by_key(|file| file.bytes);
        folder.join(largest.map_or("", |file| &file.name))
    }

    /// Puts another node's record of the same content in the place of this one.
    fn sign_elsewhere(&self, stored: &Path) -> Result<(), NodeError> {
        let elsewhere = self.assembly.data_dir.join("elsewhere");
        let foreign = Catalogue::new(&elsewhere).save_record(self.record);
        fs::copy(foreign.map_err(NodeError::new)?, stored).map_err(NodeError::new)?;
        Ok(())
    }
}

/// Changes a bit in the middle of a file, and keeps its time of change.
fn flip_kept(path: &Path) -> std::io::Result<()> {
    let modified = fs::metadata(path)?.modified()?;
    let mut bytes = fs::read(path)?;
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(path, bytes)?;
    fs::File::options().write(true).open(path)?.set_modified(modified)
}
