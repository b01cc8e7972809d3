//! Makes a `QualifiedModel`, the only kind of model that may be served, from a manifest and a
//! matching record.

use super::file_facts::FileFacts;
use super::records::{CLOCK_SLACK_SECONDS, StoredRecord};
use super::{
    Acceptance, Catalogue, Error, FailedContext, FileStamp, Manifest, ProvenContext, Result,
    node_key, receipts,
};
use cresset_base::{ModelId, UnixMillis};
use cresset_ledger::{Prices, ReceiptProof};
use cresset_models::ModelSource;
use cresset_qualification::record::POLICY_VERSION;
use cresset_qualification::statement::key_id;
use cresset_qualification::{CanaryCase, Grade, HostIdentity, Identity, Record, Suite, Verdict};
use std::collections::BTreeSet;

/// The check that proves calls of tools.
const CALLS_CHECK: &str = "tool_calls";

/// The check that proves when a model calls by its own choice.
const CHOICE_CHECK: &str = "tool_choice";

/// A release that was proven on this hardware with this build. It can only be made from a matching
/// record.
#[derive(Clone, Debug)]
pub struct QualifiedModel {
    manifest: Manifest,
    source: ModelSource,
    facts: FileFacts,
    /// Stamps of the files, in the manifest's order, as they were when this value was made.
    stamps: Vec<FileStamp>,
    context: ProvenContext,
    /// When the newest of its records was made, Unix seconds.
    proven_at: u64,
    proof_ends_at: u64,
    evidence: Evidence,
    /// None while it is being qualified.
    receipt_proof: Option<ReceiptProof>,
    canary: Vec<CanaryCase>,
    products: BTreeSet<String>,
    calls: ProvenCalls,
}

/// The record that proves a model, in short, for clients and operators.
#[derive(Clone, Debug)]
pub struct Evidence {
    pub grade: Grade,
    /// The sister release whose reference outputs were used.
    pub like: Option<String>,
    pub record: String,
    pub suite: String,
    /// The type of keys and values in the cache.
    pub kv_dtype: String,
    /// Unix seconds.
    pub qualified_at: u64,
    /// The name of the node's public key: hex SHA-256 of its 32 bytes.
    pub key: String,
    /// The operator's acceptance of a model without reference outputs.
    pub acceptance: Option<Acceptance>,
}

/// The demands of a node on a record that holds.
#[derive(Clone, Copy, Debug)]
pub struct DoorRules {
    pub max_age_days: u64,
    /// The weakest grade that opens.
    pub require: Grade,
    /// Whether models that choose their calls badly may choose them all the same.
    pub any_tool_choice: bool,
}

/// The calls of tools that a model's record proves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ProvenCalls {
    None,
    /// Those that a request demands: they are what the template writes and the schemas allow.
    Forced,
    /// Those that the model chooses, too: it calls where a question needs it, and only there.
    Chosen,
}

impl ProvenCalls {
    fn of(record: &Record, rules: DoorRules) -> Self {
        match record.has_passed(CALLS_CHECK) {
            false => Self::None,
            true if rules.any_tool_choice || record.has_passed(CHOICE_CHECK) => Self::Chosen,
            true => Self::Forced,
        }
    }
}

/// Why a release may not be served here. Each message names the command that resolves it.
#[derive(Debug, thiserror::Error)]
pub enum NotQualified {
    #[error(transparent)]
    Files(#[from] Error),
    #[error("{name} was never qualified on this node: run `cresset qualify {name}`")]
    NoRecord { name: String },
    #[error(
        "{name} has a qualification record, {file}, that counts for nothing: {why}: run `cresset qualify {name}`"
    )]
    Untrusted { name: String, file: String, why: String },
    #[error(
        "{name} {outcome} with another {part} (then {recorded}, now {present}): run `cresset qualify {name}`"
    )]
    Differs {
        name: String,
        /// The verdict of the record, in words.
        outcome: &'static str,
        part: &'static str,
        recorded: String,
        present: String,
    },
    #[error(
        "{name} did not qualify ({why}): run `cresset qualify {name} --report FILE` and read the report"
    )]
    Failed { name: String, why: String },
    #[error(
        "the qualification of {name} is {age_days} days old, over the limit of {max_age_days}: run `cresset qualify {name}`"
    )]
    Expired { name: String, age_days: u64, max_age_days: u64 },
    #[error(
        "{name} qualified with the grade {grade}, and qualification.require asks for {required}: lower that setting, or run `cresset qualify {name}` with reference outputs"
    )]
    BelowBar { name: String, grade: &'static str, required: &'static str },
    #[error(
        "{name} qualified without any reference outputs (grade self), so it is served only once you accept it: run `cresset models accept {name} --reason TEXT`"
    )]
    NotAccepted { name: String },
}

impl DoorRules {
    fn check(self, name: &str, grade: Grade, accepted: bool) -> Result<(), NotQualified> {
        let name = name.to_owned();
        if grade > self.require {
            let (grade, required) = (grade.name(), self.require.name());
            return Err(NotQualified::BelowBar { name, grade, required });
        }
        if grade == Grade::SelfOnly && !accepted {
            return Err(NotQualified::NotAccepted { name });
        }
        Ok(())
    }
}

impl NotQualified {
    /// Whether a file is another one than the one that was qualified.
    pub fn is_about_bytes(&self) -> bool {
        matches!(self, Self::Files(Error::WrongSize { .. } | Error::WrongDigest { .. }))
    }
}

impl QualifiedModel {
    pub fn id(&self) -> ModelId {
        self.manifest.id
    }
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }
    /// The files, whose digests every reading compares with those of the record.
    pub fn source(&self) -> &ModelSource {
        &self.source
    }
    pub fn facts(&self) -> &FileFacts {
        &self.facts
    }
    pub fn stamps(&self) -> &[FileStamp] {
        &self.stamps
    }
    /// The same proof for another manifest of the same terms.
    #[must_use]
    pub fn described_by(self, manifest: &Manifest) -> Self {
        Self { manifest: manifest.clone(), ..self }
    }
    /// Context verified by the qualification run, or while the model was served, tokens.
    pub fn qualified_context_tokens(&self) -> u32 {
        self.context.tokens
    }
    /// The length beyond it that failed, if one did.
    pub fn failed_context(&self) -> Option<&FailedContext> {
        self.context.failed.as_ref()
    }
    /// When it was proven last, Unix seconds. A quick record that is younger than the full one that
    /// decides takes its place once that is too old.
    pub fn proven_at(&self) -> u64 {
        self.proven_at
    }
    /// When its proof ends unless it is renewed, Unix seconds.
    pub fn proof_ends_at(&self) -> u64 {
        self.proof_ends_at
    }
    pub fn record_id(&self) -> &str {
        &self.evidence.record
    }
    /// Prompts with the tokens that the model computed for them when it was qualified.
    pub fn canary(&self) -> &[CanaryCase] {
        &self.canary
    }
    /// The algorithms of a device's products that the model was proven with.
    pub fn products(&self) -> &BTreeSet<String> {
        &self.products
    }
    pub fn proven_calls(&self) -> ProvenCalls {
        self.calls
    }
    pub fn evidence(&self) -> &Evidence {
        &self.evidence
    }
    /// What the receipts of its answers tell of it; they have none while it is being qualified.
    pub fn receipt_proof(&self) -> Option<&ReceiptProof> {
        self.receipt_proof.as_ref()
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
        rules: DoorRules,
        now: UnixMillis,
    ) -> Result<QualifiedModel, NotQualified> {
        let max_age_days = rules.max_age_days;
        let folder = self.folder(&manifest.name);
        let stamps = folder.check_complete(manifest)?;
        let fitting = self.fitting_records(manifest, host, now)?;
        let age_days = |record: &Record| now.seconds().saturating_sub(record.finished_at) / 86_400;
        let record = deciding(&fitting, |record| age_days(record) <= max_age_days);
        let name = || manifest.name.clone();
        if record.verdict != Verdict::Qualified {
            return Err(NotQualified::Failed { name: name(), why: reason(record) });
        }
        let age_days = age_days(record);
        if age_days > max_age_days {
            return Err(NotQualified::Expired { name: name(), age_days, max_age_days });
        }
        let mut present = self.identity(manifest, host);
        present.host.products.clone_from(&record.identity.host.products);
        let evidence = self.evidence(&present, record, rules, now)?;
        let not_before = now.seconds().saturating_sub(max_age_days * 86_400);
        let mut context = self.proven_context(&present, &fitting, record, not_before, now)?;
        context.tokens = context.tokens.min(manifest.limits.model_context_tokens);
        let source = folder.source(manifest);
        Ok(QualifiedModel {
            manifest: manifest.clone(),
            facts: FileFacts::of(manifest, &source),
            source: source.with_digests(record.identity.release.blake3.clone()),
            stamps,
            context,
            proven_at: fitting[0].finished_at,
            proof_ends_at: fitting[0].finished_at.saturating_add(max_age_days * 86_400),
            evidence,
            receipt_proof: receipts::proof(record),
            canary: record.canary.clone(),
            products: record.identity.host.products.clone(),
            calls: ProvenCalls::of(record, rules),
        })
    }

    /// Summarises a qualified record. Fails when it does not meet the node's demands.
    fn evidence(
        &self,
        present: &Identity,
        record: &Record,
        rules: DoorRules,
        now: UnixMillis,
    ) -> Result<Evidence, NotQualified> {
        let (name, grade) = (present.release.name.clone(), record.grade);
        let acceptance = self.acceptance(present, now)?;
        let acceptance = acceptance.filter(|_| grade == Grade::SelfOnly);
        rules.check(&name, grade, acceptance.is_some())?;
        let key = node_key::find(&self.data)?.ok_or(NotQualified::NoRecord { name })?;
        Ok(Evidence {
            grade,
            like: record.like.clone(),
            record: record.id.to_string(),
            suite: record.suite.clone(),
            kv_dtype: record.identity.host.settings.kv_dtype.clone(),
            qualified_at: record.finished_at,
            key: key_id(&key.verifying_key()),
            acceptance,
        })
    }

    /// The release while it is being qualified: for the surface that its checks ask, which no
    /// client reaches, and for nothing else.
    pub fn candidate(&self, manifest: &Manifest, context: usize) -> Result<QualifiedModel> {
        let folder = self.folder(&manifest.name);
        let source = folder.source(manifest);
        Ok(QualifiedModel {
            manifest: manifest.clone(),
            stamps: folder.check_complete(manifest)?,
            facts: FileFacts::of(manifest, &source),
            source,
            context: ProvenContext {
                tokens: u32::try_from(context).unwrap_or(u32::MAX),
                failed: None,
            },
            proven_at: 0,
            proof_ends_at: u64::MAX,
            evidence: Evidence {
                grade: Grade::SelfOnly,
                like: None,
                record: "none: it is being qualified".into(),
                suite: String::new(),
                kv_dtype: String::new(),
                qualified_at: 0,
                key: String::new(),
                acceptance: None,
            },
            receipt_proof: None,
            canary: Vec::new(),
            products: BTreeSet::new(),
            // Its checks ask for calls.
            calls: ProvenCalls::Chosen,
        })
    }

    /// The records that fit release, build, hardware and settings, newest first: at least one.
    fn fitting_records(
        &self,
        manifest: &Manifest,
        host: &HostIdentity,
        now: UnixMillis,
    ) -> Result<Vec<Record>, NotQualified> {
        let name = || manifest.name.clone();
        let present = self.identity(manifest, host);
        let mut fitting = Vec::new();
        let (mut newest_difference, mut newest_untrusted) = (None, None);
        for StoredRecord { file, content } in self.stored_records(&manifest.name)? {
            let record = match content.and_then(|record| dated(record, now)) {
                Ok(record) => record,
                Err(why) => {
                    newest_untrusted.get_or_insert((file, why));
                    continue;
                }
            };
            let difference = match record.identity.difference(&present) {
                None if record.policy_version != POLICY_VERSION => {
                    ("suite policy", record.policy_version.to_string(), POLICY_VERSION.to_string())
                }
                None => match self.lost_goldens(&record) {
                    None => {
                        fitting.push(record);
                        continue;
                    }
                    Some((recorded, present)) => ("reference", recorded, present),
                },
                Some(d) => (d.part, d.recorded, d.present),
            };
            let qualified = record.verdict == Verdict::Qualified;
            let outcome =
                if qualified { "was qualified" } else { "was checked and did not qualify" };
            newest_difference.get_or_insert((outcome, difference));
        }
        if !fitting.is_empty() {
            return Ok(fitting);
        }
        Err(match (newest_untrusted, newest_difference) {
            (Some((file, why)), _) => NotQualified::Untrusted { name: name(), file, why },
            (None, None) => NotQualified::NoRecord { name: name() },
            (None, Some((outcome, (part, recorded, present)))) => {
                NotQualified::Differs { name: name(), outcome, part, recorded, present }
            }
        })
    }
}

/// The record that decides, of records that fit, newest first. The newest one does, except that the
/// quick suite takes nothing away from a full one that came before: its date and limits stand.
fn deciding(fitting: &[Record], is_fresh: impl Fn(&Record) -> bool) -> &Record {
    let qualified = fitting.iter().take_while(|record| record.verdict == Verdict::Qualified);
    let mut full =
        qualified.filter(|record| record.suite == Suite::Full.name() && is_fresh(record));
    full.next().unwrap_or(&fitting[0])
}

/// The record, unless it was made at a time that has not come yet.
fn dated(record: Record, now: UnixMillis) -> Result<Record, String> {
    if record.finished_at > now.seconds() + CLOCK_SLACK_SECONDS {
        return Err("it is dated in the future".into());
    }
    Ok(record)
}

fn reason(record: &Record) -> String {
    let red: Vec<&str> = record.failed_checks().map(|check| check.id.as_str()).collect();
    if red.is_empty() {
        record.verdict.words().to_owned()
    } else {
        format!("failed: {}", red.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::describe_host;
    use crate::records::{files_ending, folder_of, record_files};
    use cresset_qualification::context_proof::ContextProof;
    use cresset_qualification::testing::records;
    use cresset_qualification::{CheckResult, CheckState, GoldensOrigin, Origin, statement};
    use sha2::{Digest, Sha256};
    use std::fs;
    use uuid::Uuid;

    const DAY: u64 = 86_400;
    const FINISHED: u64 = 1_700_000_000;

    /// A data folder with one added release.
    struct Place {
        data: tempfile::TempDir,
        manifest: Manifest,
        host: HostIdentity,
        rules: DoorRules,
    }

    const RULES: DoorRules =
        DoorRules { max_age_days: 90, require: Grade::SelfOnly, any_tool_choice: false };

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
            Self { data, manifest, host: describe_host(None, 2, records::settings()), rules: RULES }
        }

        fn catalogue(&self) -> Catalogue {
            Catalogue::new(self.data.path())
        }

        fn record(&self, verdict: Verdict) -> Record {
            let mut identity = self.catalogue().identity(&self.manifest, &self.host);
            identity.release.blake3 = self.catalogue().digests(&self.manifest).unwrap().blake3;
            records::with(identity, verdict)
        }

        fn save(&self, record: &Record) {
            self.catalogue().save_record(record).unwrap();
        }

        fn ask(&self, days_later: u64) -> Result<QualifiedModel, NotQualified> {
            let now = UnixMillis((FINISHED + days_later * DAY) * 1_000);
            self.catalogue().qualified(&self.manifest, &self.host, self.rules, now)
        }

        fn accept(&self, record: &Record, accepted: bool) {
            let now = UnixMillis(FINISHED * 1_000);
            self.catalogue().accept(record, accepted, "tried by hand", now).unwrap();
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
        assert_eq!(model.evidence().kv_dtype, "f32");
    }

    #[test]
    fn old_and_failed_records_open_nothing() {
        let place = Place::new();
        place.save(&place.record(Verdict::Qualified));
        assert!(place.refusal(91).contains("91 days old"));
        let mut failed = place.record(Verdict::Qualified);
        failed.verdict = Verdict::Failed;
        failed.qualified_context_tokens = 0;
        let red = failed.checks.iter_mut().find(|check| check.id == "stop_string").unwrap();
        red.state = CheckState::Failed;
        place.save(&failed);
        assert!(place.refusal(0).contains("failed: stop_string"), "the newest record decides");
    }

    #[test]
    fn a_longer_context_counts_while_its_proof_fits_and_nothing_failed_since() {
        let place = Place::new();
        let qualified = place.record(Verdict::Qualified);
        place.save(&qualified);
        let proof = |tokens: u32, state: CheckState, days: u64| {
            let is_one = |check: &&CheckResult| {
                ["context_length", "long_context"].contains(&check.id.as_str())
            };
            let checks = qualified.checks.iter().filter(is_one).cloned();
            ContextProof {
                id: Uuid::now_v7(),
                policy_version: POLICY_VERSION,
                identity: qualified.identity.clone(),
                context_tokens: tokens,
                finished_at: FINISHED + days * DAY,
                checks: checks.map(|check| CheckResult { state, ..check }).collect(),
            }
        };
        let keep = |proof: ContextProof| place.catalogue().keep_context_proof(&proof).unwrap();
        let context = |days| {
            let model = place.ask(days).unwrap();
            (model.qualified_context_tokens(), model.failed_context().map(|failed| failed.tokens))
        };
        let mut others = [(); 3].map(|()| proof(500, CheckState::Passed, 1));
        others[0].identity.host.hardware.threads += 1;
        others[1].policy_version += 1;
        others[2].checks.truncate(1);
        others.into_iter().for_each(keep);
        assert_eq!(context(1), (300, None), "each of these proves something else");
        keep(proof(400, CheckState::Passed, 1));
        assert_eq!((context(0), context(1)), ((300, None), (400, None)), "it is not dated ahead");
        keep(proof(450, CheckState::Failed, 2));
        keep(proof(500, CheckState::Passed, 2));
        assert_eq!(context(2), (400, Some(450)), "what failed bounds what passed");
        let again =
            Record { finished_at: FINISHED + 3 * DAY, id: Uuid::now_v7(), ..qualified.clone() };
        place.save(&again);
        assert_eq!(context(3), (500, None), "another qualification has it tried again");
        keep(proof(600, CheckState::Passed, 3));
        assert_eq!(context(3), (512, None), "the model has no more");
        assert_eq!(context(92), (512, None));
        assert_eq!(context(93), (512, None));
        place.save(&again.contradicted_by(&proof(300, CheckState::Failed, 4)));
        assert!(place.refusal(4).contains("failed: context_length"));
        place.save(&Record { finished_at: FINISHED + 5 * DAY, id: Uuid::now_v7(), ..again });
        assert_eq!(context(5), (300, None), "what came before the failure proves nothing");
    }

    #[test]
    fn a_quick_run_takes_nothing_from_a_full_one_and_a_failed_one_everything() {
        let place = Place::new();
        let save = |verdict, full: bool, days: u64, tokens: u32| {
            let mut record = place.record(verdict);
            record.finished_at += days * DAY;
            if full {
                Suite::Full.name().clone_into(&mut record.suite);
            }
            record.qualified_context_tokens = tokens;
            place.save(&record);
        };
        let tokens = |days| place.ask(days).unwrap().qualified_context_tokens();
        save(Verdict::Qualified, false, 0, 100);
        assert_eq!(tokens(0), 100);
        save(Verdict::Qualified, true, 1, 400);
        save(Verdict::Qualified, false, 50, 100);
        assert_eq!((tokens(50), tokens(91)), (400, 400));
        assert_eq!(tokens(92), 100, "the full one is too old, and the quick one is not");
        save(Verdict::Failed, false, 51, 0);
        assert!(place.refusal(51).contains("failed"));
        save(Verdict::Qualified, false, 52, 100);
        assert_eq!(tokens(52), 100, "a full one before a failure counts no more");
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
            ("another release files", |r| {
                r.identity.release.files.clear();
                r.identity.release.blake3.clear();
            }),
        ];
        for (part, change) in changes {
            let mut record = place.record(Verdict::Qualified);
            change(&mut record);
            place.save(&record);
            assert!(place.refusal(0).contains(part), "{part}");
        }
        let mut record = place.record(Verdict::Failed);
        record.identity.host.hardware.model = "other".into();
        place.save(&record);
        assert!(place.refusal(0).contains("did not qualify with another hardware"));
        place.save(&place.record(Verdict::Qualified));
        place.ask(0).unwrap();
    }

    /// A user who can write a record's file still cannot make the record count.
    #[test]
    fn only_what_this_node_signed_opens_the_door() {
        let place = Place::new();
        let other = Place::new();
        let file = |place: &Place, record: &Record| {
            place.save(record);
            let folder = folder_of(place.data.path(), "own");
            folder.join(format!("{}.json", record.id))
        };
        let record = place.record(Verdict::Qualified);
        let own = file(&place, &record);
        place.ask(0).unwrap();
        let planted = |text: Vec<u8>, expect: &str| {
            fs::write(&own, text).unwrap();
            let refusal = place.refusal(0);
            assert!(refusal.contains(expect) && refusal.contains(".json"), "{refusal}");
        };
        planted(serde_json::to_vec(&record).unwrap(), "not signed");
        planted(fs::read(file(&other, &record)).unwrap(), "another key");
        let key = node_key::find(place.data.path()).unwrap().unwrap();
        let mut ahead = record.clone();
        ahead.finished_at += 100_000_000_000;
        planted(statement::sign(&ahead, &key), "dated in the future");
        let mut empty = record.clone();
        empty.checks.clear();
        planted(statement::sign(&empty, &key), "not those of the suite");
        let mut published = record.clone();
        published.identity.release.origin = Origin::Published;
        published.checks.iter_mut().for_each(|check| check.state = CheckState::NotRun);
        planted(statement::sign(&published, &key), "another verdict");
        // A sound record beside one that counts for nothing still counts.
        place.save(&place.record(Verdict::Qualified));
        place.ask(0).unwrap();
        fs::remove_file(place.data.path().join("node.key")).unwrap();
        assert!(place.refusal(0).contains("has signed none"));
    }

    #[test]
    fn a_check_that_withholds_calls_keeps_the_rest() {
        use CheckState::{NotRun, Passed, Withheld};
        let mut place = Place::new();
        for (state, choice, any, calls) in [
            (Passed, Passed, false, ProvenCalls::Chosen),
            (Passed, Withheld, false, ProvenCalls::Forced),
            (Passed, NotRun, false, ProvenCalls::Forced),
            (Passed, Withheld, true, ProvenCalls::Chosen),
            (NotRun, NotRun, true, ProvenCalls::None),
        ] {
            let mut record = place.record(Verdict::Qualified);
            for (id, state) in [(CALLS_CHECK, state), (CHOICE_CHECK, choice)] {
                record.checks.iter_mut().find(|check| check.id == id).unwrap().state = state;
            }
            place.save(&record);
            place.rules.any_tool_choice = any;
            assert_eq!(place.ask(0).unwrap().proven_calls(), calls, "{state:?} {choice:?} {any}");
        }
    }

    #[test]
    fn without_a_reference_the_operator_decides() {
        let mut place = Place::new();
        let record = records::without_reference(place.record(Verdict::Qualified));
        place.save(&record);
        assert!(place.refusal(0).contains("cresset models accept own --reason"));
        place.accept(&record, true);
        let model = place.ask(0).unwrap();
        let Evidence { grade, acceptance, key, .. } = model.evidence();
        assert_eq!((*grade, key.len()), (Grade::SelfOnly, 64));
        assert_eq!(acceptance.as_ref().unwrap().reason, "tried by hand");
        place.accept(&record, false);
        assert!(place.refusal(0).contains("accept it"), "it was revoked");
        place.accept(&record, true);
        place.ask(0).unwrap();
        for require in [Grade::Like, Grade::Reference] {
            place.rules.require = require;
            assert!(place.refusal(0).contains("qualification.require"), "{require:?}");
        }
        place.save(&place.record(Verdict::Qualified));
        place.ask(0).unwrap();
    }

    #[test]
    fn an_acceptance_holds_for_its_identity_and_only_if_signed_here() {
        let mut place = Place::new();
        let other = Place::new();
        let record = records::without_reference(place.record(Verdict::Qualified));
        place.save(&record);
        other.save(&record);
        other.accept(&record, true);
        let folder = |place: &Place| folder_of(place.data.path(), "own");
        let foreign = files_ending(&folder(&other), "acceptance").unwrap().remove(0);
        let planted = folder(&place).join("0.acceptance");
        fs::copy(foreign, &planted).unwrap();
        assert!(place.refusal(0).contains("accept it"), "it was signed by another node");
        // A record is signed too, and it is no acceptance.
        fs::copy(&record_files(&folder(&place)).unwrap()[0], &planted).unwrap();
        assert!(place.refusal(0).contains("accept it"));
        place.accept(&record, true);
        place.ask(0).unwrap();
        let accepted = files_ending(&folder(&place), "acceptance").unwrap().remove(0);
        let text = fs::read_to_string(&accepted).unwrap();
        fs::write(&accepted, text.replacen("\"payload\": \"", "\"payload\": \"e30", 1)).unwrap();
        assert!(place.refusal(0).contains("accept it"), "it was edited");
        fs::write(&accepted, text).unwrap();
        place.ask(0).unwrap();
        place.host.engine.executable_sha256 = "another build".into();
        place.save(&records::without_reference(place.record(Verdict::Qualified)));
        assert!(place.refusal(0).contains("accept it"), "it holds for one build");
    }

    #[test]
    fn what_a_manifest_promises_is_part_of_the_verdict() {
        type Change = fn(&mut Manifest);
        let changes: &[Change] = &[
            |manifest| manifest.publisher = "somebody".into(),
            |manifest| manifest.upstream.license = "MIT".into(),
            |manifest| manifest.limits.model_context_tokens *= 2,
            |manifest| manifest.limits.max_output_tokens *= 2,
            |manifest| manifest.generation.temperature = 0.5,
        ];
        for change in changes {
            let mut place = Place::new();
            place.save(&place.record(Verdict::Qualified));
            change(&mut place.manifest);
            assert!(place.refusal(0).contains("another release terms"));
        }
        let mut place = Place::new();
        place.save(&place.record(Verdict::Qualified));
        place.manifest.prices.revision += 1;
        place.ask(0).unwrap();
    }

    #[test]
    fn a_record_holds_while_the_goldens_that_it_rests_on_are_here() {
        let place = Place::new();
        let mut record = place.record(Verdict::Qualified);
        let sha256 = hex::encode(Sha256::digest("goldens"));
        record.goldens = Some(GoldensOrigin { sha256: sha256.clone(), ..GoldensOrigin::default() });
        place.save(&record);
        assert!(place.refusal(0).contains("another reference"), "{}", place.refusal(0));
        let folder = place.data.path().join("goldens");
        fs::create_dir(&folder).unwrap();
        let archive = folder.join(format!("{sha256}.goldens"));
        fs::write(&archive, "goldens").unwrap();
        place.accept(&record, true);
        assert!(place.ask(0).is_ok());
        fs::write(&archive, "Goldens").unwrap();
        assert!(place.refusal(0).contains("another reference"), "{}", place.refusal(0));
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
        assert!(error.to_string().contains("model.safetensors is not the file that was qualified"));
        fs::write(&file, "weights").unwrap();
        place.ask(0).unwrap().source().read("model.safetensors").unwrap();
    }

    #[test]
    fn records_are_bounded_and_unreadable_ones_prove_nothing() {
        let place = Place::new();
        (0..19).for_each(|_| place.save(&place.record(Verdict::Qualified)));
        fs::write(place.data.path().join("qualification/own/zzz.json"), "{").unwrap();
        assert_eq!(place.catalogue().records("own").unwrap().len(), 16);
        place.ask(0).unwrap();
    }
}
