//! `cresset qualify`: proves a release on this machine, and writes the report.

mod compare;
#[cfg(feature = "self-test")]
mod self_test;

use super::support::context::Context;
use super::support::output::{CommandError, CommandResult, note};
use super::support::progress::TaskProgress;
use super::support::{text, values};
use super::{models, reload};
use clap::Args;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use cresset_catalogue::{Catalogue, Manifest, NotQualified};
use cresset_node::Assembly;
use cresset_node::config;
use cresset_prover::{Endpoint, Prover};
use cresset_qualification::checks::ALL;
use cresset_qualification::report::Report;
use cresset_qualification::{
    CheckResult, CheckState, EndpointReport, Record, Suite, SuiteProgress, Verdict, report,
};
use serde_json::{Value, json};
use std::fmt::Write;
use std::path::{Path, PathBuf};

#[derive(Args, Debug)]
#[command(after_help = "Examples:
  cresset qualify smollm2-135m-instruct --suite full --report report.html
  cresset qualify smollm2-135m-instruct --show
  cresset qualify smollm2-135m-instruct --only usage,stop_string
  cresset qualify my-tuned-smollm2 --like smollm2-135m-instruct
  cresset qualify --all --suite full
  cresset qualify --compare before.json after.json
  cresset qualify smollm2-135m-instruct --url http://127.0.0.1:8000/v1 --key-env ENGINE_KEY

A run that was interrupted goes on after its last check, if release, build, hardware and settings
are the same; what it found stands, failed checks too.
With --url the checks over HTTP alone are run against that endpoint; what it does not offer is not
run, and no record is made.
With --compare the exit code is 0 when no check that both ran has another result, and 10 otherwise.
Exit codes: 0 qualified, 10 failed, 11 inconclusive, 12 stale (with --show: the record is too old,
or of another build, hardware, release or setting), 13 bad signature (with --show: the record was
not signed by this node or was changed), 1 the run or its files could not be used, 2 wrong usage.")]
pub(super) struct Arguments {
    /// Name or id of a pulled release; with --url, of the one that is expected there
    #[arg(value_name = "MODEL", required_unless_present_any = ["url", "compare", "all"])]
    release: Option<String>,
    /// Prove every release whose files are here, each as it was proven before: after an upgrade,
    /// with the new executable while the old one still serves
    #[arg(long, conflicts_with_all = ["release", "show", "url", "compare", "only", "report", "like"])]
    all: bool,
    /// Quick takes seconds, full takes minutes and runs the whole context
    #[arg(long, default_value = "quick", value_parser = suite_parser())]
    suite: Suite,
    /// Write a report: HTML, Markdown or JSON, as the file's extension says
    #[arg(long, value_name = "FILE", value_parser = values::report)]
    report: Option<PathBuf>,
    /// Compare with the goldens of this sister release: of another quantisation or tuning
    #[arg(long, value_name = "RELEASE", conflicts_with_all = ["show", "url", "compare"])]
    like: Option<String>,
    /// Go on after the last check of a run that was interrupted [this is the default]
    #[arg(long, overrides_with = "no_resume")]
    resume: bool,
    /// Begin anew, also where a run was interrupted
    #[arg(long)]
    no_resume: bool,
    /// Run behind everything else on this machine
    #[arg(long)]
    low_priority: bool,
    /// Run these checks alone, and write no record
    #[arg(long, value_name = "CHECK", value_delimiter = ',', value_parser = check_parser())]
    #[arg(conflicts_with_all = ["report", "resume", "no_resume"])]
    only: Vec<String>,
    /// Run nothing: show the record that decides now, and whether it still counts
    #[arg(long, conflicts_with_all = ["only", "resume", "no_resume", "suite"])]
    show: bool,
    /// Check an OpenAI-compatible endpoint instead, such as http://127.0.0.1:8080/v1
    #[arg(long, value_name = "URL", conflicts_with_all = ["show", "resume", "no_resume"])]
    url: Option<String>,
    /// The environment variable that holds the endpoint's key
    #[arg(long, value_name = "NAME")]
    key_env: Option<String>,
    /// The endpoint's name for the model [default: the only one it lists]
    #[arg(long, value_name = "NAME")]
    model: Option<String>,
    /// Show two results side by side: releases, record ids, JSON reports or endpoints' addresses
    #[arg(long, value_names = ["A", "B"], num_args = 2)]
    #[arg(conflicts_with_all = ["show", "url", "only", "report", "resume", "no_resume"])]
    compare: Vec<String>,
    /// Plant faults in a copy of the release, in its engine and in front of its surface, and tell
    /// whether the check that has to name each of them does
    #[cfg(feature = "self-test")]
    #[arg(long)]
    #[arg(conflicts_with_all = ["all", "show", "url", "compare", "only", "like", "suite"])]
    self_test: bool,
}

impl Arguments {
    /// Gives this process the lowest priority, if that was asked for. It must have one thread,
    /// whose priority later ones inherit.
    pub(super) fn lower_priority(&self) {
        const LOWEST: i32 = 19;
        if self.low_priority
            && let Err(error) = rustix::process::nice(LOWEST)
        {
            note(&format!("it runs at the usual priority: {error}"));
        }
    }
}

fn suite_parser() -> impl TypedValueParser<Value = Suite> {
    let names = PossibleValuesParser::new(["quick", "full"]);
    names.map(|name| if name == "full" { Suite::Full } else { Suite::Quick })
}

fn check_parser() -> PossibleValuesParser {
    PossibleValuesParser::new(ALL.iter().map(|check| check.id))
}

/// A release that does not qualify is printed as a result, and the exit code says so.
pub(super) async fn run(context: &Context, arguments: Arguments) -> CommandResult {
    if !arguments.compare.is_empty() {
        return compare::run(context, &arguments.compare, &arguments).await;
    }
    if arguments.all {
        return qualify_all(context, &arguments).await;
    }
    let catalogue = Catalogue::new(&context.data_dir);
    let found = arguments.release.as_ref().map(|name| catalogue.find(name)).transpose()?;
    let assembly = context.assembly()?;
    let manifest = match (&arguments.url, found) {
        (Some(url), _) => return check_endpoint(context, url, &arguments).await,
        (None, Some(manifest)) => manifest,
        (None, None) => unreachable!("invariant: a release or an address is required"),
    };
    if arguments.show {
        return show(context, &standing(assembly, &manifest)?, arguments.report.as_deref());
    }
    #[cfg(feature = "self-test")]
    if arguments.self_test {
        return self_test::run(context, manifest, arguments.report.as_deref()).await;
    }
    if !arguments.only.is_empty() {
        return run_only(context, manifest, arguments).await;
    }
    let (id, name) = (manifest.id, manifest.name.clone());
    if arguments.no_resume {
        assembly.catalogue().forget_unfinished_run(&name, arguments.suite)?;
    }
    let (suite, like) = (arguments.suite, arguments.like);
    let record = run_suite(assembly.clone(), manifest, suite, like).await?;
    write_report(&(&record).into(), || document(&record), arguments.report.as_deref())?;
    let outcome = reload::after_change(context, Some(id), &name).await;
    let mut document = document(&record);
    outcome.add_to(&mut document);
    let manifest = assembly.catalogue().find(&name)?;
    let next = match assembly.qualified(&manifest, &assembly.host()) {
        Err(why @ NotQualified::NotAccepted { .. }) => format!("{why}\n"),
        _ => String::new(),
    };
    document["accepted"] = next.is_empty().into();
    let text = |_: &Value| format!("{}{}\n{next}", verdict_text(&record), outcome.sentence);
    context.output.result(&document, text)?;
    exit(ExitReason::of(record.verdict))
}

/// Qualifies each release, with the sister release that its newest record was compared with. The
/// exit code is that of the worst verdict.
async fn qualify_all(context: &Context, arguments: &Arguments) -> CommandResult {
    let assembly = context.assembly()?;
    let catalogue = assembly.catalogue();
    let (mut rows, mut worst) = (Vec::new(), ExitReason::Qualified);
    for manifest in catalogue.manifests()?.into_iter().filter(|one| catalogue.is_pulled(one)) {
        let (id, name) = (manifest.id, manifest.name.clone());
        if arguments.no_resume {
            catalogue.forget_unfinished_run(&name, arguments.suite)?;
        }
        let like = former_sister(&catalogue, &name)?;
        let record = run_suite(assembly.clone(), manifest, arguments.suite, like).await?;
        let outcome = reload::after_change(context, Some(id), &name).await;
        note(&format!("{name} is {}. {}", record.verdict.words(), outcome.sentence));
        worst = worst.max(ExitReason::of(record.verdict));
        let mut row = document(&record);
        outcome.add_to(&mut row);
        rows.push(row);
    }
    context.output.result(&json!({ "data": rows }), |shown| {
        let columns =
            ["identity.release.name", "verdict", "grade", "qualified_context_tokens", "suite"];
        text::table(shown, &columns)
    })?;
    exit(worst)
}

/// The sister release that the release's newest record was compared with.
pub(super) fn former_sister(catalogue: &Catalogue, name: &str) -> CommandResult<Option<String>> {
    Ok(catalogue.records(name)?.into_iter().next().and_then(|record| record.like))
}

/// The reasons that exit codes of this command tell apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum ExitReason {
    Qualified,
    Inconclusive,
    Failed,
    /// The record is of another build, hardware, release, setting or policy, or too old.
    Stale,
    BadSignature,
}

impl ExitReason {
    fn of(verdict: Verdict) -> Self {
        match verdict {
            Verdict::Qualified => Self::Qualified,
            Verdict::Failed => Self::Failed,
            Verdict::Inconclusive => Self::Inconclusive,
        }
    }

    fn code(self) -> u8 {
        match self {
            Self::Qualified => 0,
            Self::Failed => 10,
            Self::Inconclusive => 11,
            Self::Stale => 12,
            Self::BadSignature => 13,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Qualified => "qualified",
            Self::Failed => "failed",
            Self::Inconclusive => "inconclusive",
            Self::Stale => "stale",
            Self::BadSignature => "bad_signature",
        }
    }
}

fn exit(reason: ExitReason) -> CommandResult {
    match reason.code() {
        0 => Ok(()),
        code => Err(CommandError::NegativeCode(code)),
    }
}

/// What is known of a release without a run.
struct RecordStanding {
    release: String,
    reason: ExitReason,
    /// Why the release is not served; `None` when it is.
    why: Option<String>,
    /// The record that decides; `None` when none of this node fits.
    record: Option<Record>,
}

fn standing(assembly: &Assembly, manifest: &Manifest) -> CommandResult<RecordStanding> {
    let (catalogue, host) = (assembly.catalogue(), assembly.host());
    let present = catalogue.identity(manifest, &host);
    let mut records = catalogue.records(&manifest.name)?.into_iter();
    let fits = |record: &Record| record.identity.difference(&present).is_none();
    let (reason, why, record) = match assembly.qualified(manifest, &host) {
        Ok(model) => {
            let id = model.record_id();
            (ExitReason::Qualified, None, records.find(|record| record.id.to_string() == id))
        }
        Err(why) => {
            let (reason, record) = match &why {
                NotQualified::Failed { .. } => {
                    let record = records.find(|r| fits(r) && r.verdict != Verdict::Qualified);
                    let verdict = record.as_ref().map_or(Verdict::Failed, |found| found.verdict);
                    (ExitReason::of(verdict), record)
                }
                NotQualified::Differs { .. } => (ExitReason::Stale, records.next()),
                NotQualified::NotAccepted { .. } | NotQualified::BelowBar { .. } => {
                    (ExitReason::Qualified, records.find(fits))
                }
                NotQualified::Expired { .. } => (ExitReason::Stale, records.find(fits)),
                NotQualified::Untrusted { .. } => (ExitReason::BadSignature, None),
                _ => return Err(CommandError::new(why)),
            };
            (reason, Some(why.to_string()), record)
        }
    };
    Ok(RecordStanding { release: manifest.name.clone(), reason, why, record })
}

fn show(context: &Context, standing: &RecordStanding, report: Option<&Path>) -> CommandResult {
    let RecordStanding { release, reason, why, record } = standing;
    if let Some(record) = record {
        write_report(&record.into(), || document(record), report)?;
    }
    let mut document = record.as_ref().map_or_else(|| serde_json::json!({}), document);
    document["release"] = release.as_str().into();
    document["standing"] = reason.name().into();
    document["why"] = why.as_deref().into();
    document["qualified"] = (*reason == ExitReason::Qualified).into();
    context.output.result(&document, |_| {
        let evidence = record.as_ref().map(verdict_text).unwrap_or_default();
        let why = why.as_ref().map(|why| format!("{why}\n")).unwrap_or_default();
        format!("{evidence}{why}standing: {}\n", reason.name().replace('_', " "))
    })?;
    exit(*reason)
}

/// Runs the checks over HTTP against any endpoint, of this program or of another.
async fn endpoint_report(
    context: &Context,
    url: &str,
    arguments: &Arguments,
) -> CommandResult<EndpointReport> {
    let catalogue = Catalogue::new(&context.data_dir);
    let release = arguments.release.as_ref().map(|name| catalogue.find(name)).transpose()?;
    let secret = arguments.key_env.as_deref().map(key_from).transpose()?;
    let endpoint =
        Endpoint { url: url.to_owned(), secret, model: arguments.model.clone(), release };
    let (assembly, suite) = (context.assembly()?.clone(), arguments.suite);
    let only = arguments.only.clone();
    let blocking = tokio::task::spawn_blocking(move || {
        let mut on_check = shown_progress(format!("checking {}", endpoint.url));
        Prover(&assembly).check_endpoint(&endpoint, suite, &only, &mut on_check)
    });
    Ok(blocking.await.map_err(CommandError::new)??)
}

async fn check_endpoint(context: &Context, url: &str, arguments: &Arguments) -> CommandResult {
    let report = endpoint_report(context, url, arguments).await?;
    let document =
        || serde_json::to_value(&report).expect("invariant: a report is representable in JSON");
    write_report(&(&report).into(), document, arguments.report.as_deref())?;
    context.output.result(&document(), |_| {
        let notes = report.notes.iter().map(|note| format!("note: {note}\n"));
        let told = match report.verdict {
            Verdict::Qualified => "no check failed",
            Verdict::Failed => "a check failed",
            Verdict::Inconclusive => "nothing could be checked",
        };
        let notes: String = notes.collect();
        format!("{}{notes}{}: {told}\n", checks_text(&report.checks), report.url)
    })?;
    exit(ExitReason::of(report.verdict))
}

/// Shows how many checks are done.
fn shown_progress(what: String) -> impl FnMut(SuiteProgress) {
    let mut progress = TaskProgress::steps(what);
    move |at| progress.at(at.done as u64, at.total as u64)
}

fn key_from(variable: &str) -> CommandResult<String> {
    config::key_in(variable).ok_or_else(|| {
        CommandError::new(format!("the environment variable {variable} holds no key"))
            .remedy("set it, or name another one with --key-env")
    })
}

/// Runs some checks and keeps nothing: a part of a suite proves nothing.
async fn run_only(context: &Context, manifest: Manifest, arguments: Arguments) -> CommandResult {
    let Arguments { suite, only: ids, like, .. } = arguments;
    let assembly = context.assembly()?.clone();
    let blocking = tokio::task::spawn_blocking(move || {
        let mut on_check = shown_progress(format!("checking {}", manifest.name));
        Prover(&assembly).run_checks(&manifest, suite, like.as_deref(), &ids, &mut on_check)
    });
    let checks = blocking.await.map_err(CommandError::new)??;
    let document = serde_json::json!({ "checks": checks, "record": null });
    let text = |_: &Value| format!("{}These checks alone make no record.\n", checks_text(&checks));
    context.output.result(&document, text)?;
    let any = |state| checks.iter().any(|check| check.state == state);
    exit(match (any(CheckState::Failed), any(CheckState::NotRun)) {
        (true, _) => ExitReason::Failed,
        (false, true) => ExitReason::Inconclusive,
        (false, false) => ExitReason::Qualified,
    })
}

/// Runs the suite on a thread that may block, and shows its progress.
pub(super) async fn run_suite(
    assembly: Assembly,
    manifest: Manifest,
    suite: Suite,
    like: Option<String>,
) -> CommandResult<Record> {
    let blocking = tokio::task::spawn_blocking(move || {
        let mut on_check = shown_progress(format!("qualifying {}", manifest.name));
        Prover(&assembly).qualify(&manifest, suite, like.as_deref(), &mut on_check)
    });
    Ok(blocking.await.map_err(CommandError::new)??)
}

/// Fetches the release if it is not here, and qualifies it if it is not qualified yet.
pub(super) async fn ensure_qualified(
    context: &Context,
    assembly: &Assembly,
    release: &str,
) -> CommandResult {
    let catalogue = assembly.catalogue();
    let manifest = catalogue.find(release)?;
    if !catalogue.is_pulled(&manifest) {
        models::pull(context, release.to_owned()).await?;
        note(&format!("fetched {release}, its digests are right"));
    }
    match assembly.qualified(&manifest, &assembly.host()) {
        Ok(_) => return Ok(()),
        Err(why @ (NotQualified::NotAccepted { .. } | NotQualified::BelowBar { .. })) => {
            return Err(CommandError::new(why));
        }
        Err(_) => {}
    }
    let id = manifest.id;
    let record = run_suite(assembly.clone(), manifest.clone(), Suite::Quick, None).await?;
    note(&format!("{release} is {} on this machine", record.verdict.words()));
    if record.verdict == Verdict::Qualified {
        // A running node serves it from now on, and without one there is nobody to tell.
        reload::after_change(context, Some(id), release).await;
        assembly.qualified(&manifest, &assembly.host()).map_err(CommandError::new)?;
        return Ok(());
    }
    note(&verdict_text(&record));
    Err(CommandError::new(format!("{release} did not qualify on this machine and is not served"))
        .remedy(format!("cresset qualify {release} --report report.html shows the evidence")))
}

/// Writes HTML, Markdown or JSON, as the file's extension says.
fn write_report(
    report: &Report,
    document: impl FnOnce() -> Value,
    file: Option<&Path>,
) -> CommandResult {
    let Some(file) = file else { return Ok(()) };
    let content = match file.extension().and_then(|ext| ext.to_str()) {
        Some("html" | "htm") => report::html(report),
        Some("json") => format!("{:#}\n", document()),
        _ => report::markdown(report),
    };
    std::fs::write(file, content)
        .map_err(|error| CommandError::new(format!("the report {}: {error}", file.display())))
}

fn document(record: &Record) -> Value {
    let mut document =
        serde_json::to_value(record).expect("invariant: a record is representable in JSON");
    document["qualified"] = (record.verdict == Verdict::Qualified).into();
    document
}

/// The verdict with its evidence, one line a check.
fn verdict_text(record: &Record) -> String {
    let name = &record.identity.release.name;
    let mut out = checks_text(&record.checks);
    for note in &record.notes {
        let _ = writeln!(out, "note: {note}");
    }
    let _ = writeln!(
        out,
        "{name} is {}, grade {}, {} context tokens",
        record.verdict.words(),
        record.grade.name(),
        record.qualified_context_tokens
    );
    out
}

/// One line a check.
fn checks_text(checks: &[CheckResult]) -> String {
    checks.iter().fold(String::new(), |mut out, check| {
        let CheckResult { id, state, seconds, value, .. } = check;
        let _ = writeln!(out, "{:<8} {id:<22} {seconds:>6.2} s  {value}", state.words());
        out
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use cresset_node::config::Config;

    #[test]
    fn reports_are_written_in_the_format_of_their_name() {
        let (data, mut config) = (tempfile::tempdir().unwrap(), Config::default());
        (config.engine.kv_mib, config.engine.max_batched_tokens) = (128, 256);
        config.qualification.quick_context_tokens = 64;
        let file = data.path().join("<tiny>.gguf");
        cresset_models::testing::tiny_llama_gguf(&file, 8).unwrap();
        let assembly = Assembly::new(data.path().to_owned(), config).unwrap();
        let manifest = assembly
            .catalogue()
            .add(&file, Some("tiny"), &cresset_node::inspect, &mut |_| {})
            .unwrap();
        let record = Prover(&assembly).qualify(&manifest, Suite::Quick, None, &mut |_| {}).unwrap();
        assert!(verdict_text(&record).contains("Self-consistency only"));
        let written = |name: &str| {
            let path = data.path().join(name);
            write_report(&(&record).into(), || document(&record), Some(&path)).unwrap();
            std::fs::read_to_string(path).unwrap()
        };
        let (html, markdown, document) = (written("r.html"), written("r.md"), written("r.json"));
        assert!(
            html.starts_with("<!doctype html>")
                && html.contains("&lt;tiny&gt;.gguf")
                && !html.contains("<tiny>")
        );
        assert!(
            record
                .checks
                .iter()
                .all(|check| html.contains(&check.id) && markdown.contains(&check.id))
        );
        assert_eq!(serde_json::from_str::<Value>(&document).unwrap()["qualified"], true);
    }
}
