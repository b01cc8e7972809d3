//! Writes results for people: as Markdown, or as one HTML page without any other file.

mod faults;
mod figures;
mod html;

pub use faults::of as planted;
pub use html::html;

use crate::goldens::GoldensOrigin;
use crate::http::EndpointReport;
use crate::identity::Hardware;
use crate::record::{CheckResult, CheckState, Grade, Record, Verdict};
use std::fmt::Write;

impl Verdict {
    pub fn words(self) -> &'static str {
        match self {
            Self::Qualified => "qualified",
            Self::Failed => "NOT qualified",
            Self::Inconclusive => "inconclusive, so not qualified",
        }
    }
}

impl CheckState {
    pub fn words(self) -> &'static str {
        match self {
            Self::Passed => "passed",
            Self::Failed => "FAILED",
            Self::NotRun => "not run",
            Self::Withheld => "withheld",
        }
    }
}

/// What a report shows.
pub struct Report<'a> {
    pub title: String,
    pub verdict: Verdict,
    /// Facts about the verdict as pairs of label and value.
    pub facts: Vec<(&'static str, String)>,
    pub checks: &'a [CheckResult],
    /// The command that runs everything again.
    pub command: String,
    /// What the proof rests on, where that is told.
    pub grade: Option<String>,
    /// Bytes in use by parts of the engine.
    pub memory: Vec<(String, u64)>,
}

impl Report<'_> {
    /// The command that runs one check again.
    pub(crate) fn reproduce(&self, check: &CheckResult) -> String {
        format!("{} --only {}", self.command, check.id)
    }
}

impl<'a> From<&'a Record> for Report<'a> {
    fn from(record: &'a Record) -> Self {
        let name = &record.identity.release.name;
        let like = record.like.as_ref().map(|sister| format!(" --like {sister}"));
        let like = like.unwrap_or_default();
        let command = format!("cresset qualify {name} --suite {}{like}", record.suite);
        Self {
            title: format!("Qualification of {name}"),
            verdict: record.verdict,
            facts: facts(record, &command),
            checks: &record.checks,
            command,
            grade: Some(grade(record)),
            memory: record.memory.clone(),
        }
    }
}

impl<'a> From<&'a EndpointReport> for Report<'a> {
    fn from(report: &'a EndpointReport) -> Self {
        let release = report.release.as_deref().map(|name| format!(" {name}"));
        let command = format!(
            "cresset qualify{} --url {} --model {} --suite {}",
            release.as_deref().unwrap_or_default(),
            report.url,
            report.model,
            report.suite
        );
        let mut facts = vec![
            ("Endpoint", report.url.clone()),
            ("Model", report.model.clone()),
            ("Compared with", report.release.clone().unwrap_or_else(|| "no release".into())),
            ("Suite", format!("{}, policy {}", report.suite, report.policy_version)),
            ("Finished", format!("{} (Unix seconds)", report.finished_at)),
            ("Reproduce", command.clone()),
        ];
        facts.extend(report.notes.iter().map(|note| ("Note", note.clone())));
        let title = format!("Checks of {}", report.url);
        Self {
            title,
            verdict: report.verdict,
            facts,
            checks: &report.checks,
            command,
            grade: None,
            memory: Vec::new(),
        }
    }
}

fn facts(record: &Record, command: &str) -> Vec<(&'static str, String)> {
    let (release, host) = (&record.identity.release, &record.identity.host);
    let engine = &host.engine;
    let engine = format!("{}, executable sha256 {}", engine.version, engine.executable_sha256);
    let mut facts = vec![
        ("Release", format!("{} ({})", release.name, release.release_id)),
        ("Qualified context", format!("{} tokens", record.qualified_context_tokens)),
        ("Suite", format!("{}, policy {}", record.suite, record.policy_version)),
        ("Engine", engine),
        ("Hardware", hardware(&host.hardware)),
        ("Features", host.hardware.features.join(" ")),
        ("Settings", settings(record)),
        ("Record", record.id.to_string()),
        ("Finished", format!("{} (Unix seconds)", record.finished_at)),
        ("Reproduce", command.to_owned()),
    ];
    facts.extend(record.goldens.as_ref().map(|goldens| ("Reference", reference(goldens))));
    let speed = |(what, rate): &(String, f64)| ("Speed", format!("{what}: {rate:.0} tokens/s"));
    facts.extend(record.speed.iter().map(speed));
    let file = |(name, digest)| ("File", format!("{name}, sha256 {digest}"));
    facts.extend(release.files.iter().map(file));
    facts.extend(planted_faults(record).map(|told| ("Planted faults", told)));
    facts.extend(record.notes.iter().map(|note| ("Note", note.clone())));
    facts
}

/// How many of the planted faults were found, and which were not.
fn planted_faults(record: &Record) -> Option<String> {
    let lines = &record.self_test;
    let missed = lines.iter().filter(|line| !line.right);
    let missed: Vec<_> = missed.map(|line| format!("{}: {}", line.place, line.fault)).collect();
    let right = lines.len() - missed.len();
    let told = format!("{right} of {} told right", lines.len());
    let missed =
        if missed.is_empty() { told } else { format!("{told}; not {}", missed.join(", ")) };
    (!lines.is_empty()).then_some(missed)
}

fn reference(goldens: &GoldensOrigin) -> String {
    let GoldensOrigin { release, sha256, made_by, made_at, positions, .. } = goldens;
    format!("of {release}, {positions} positions, made by {made_by} on {made_at}, sha256 {sha256}")
}

fn grade(record: &Record) -> String {
    let name = record.grade.name();
    match (record.grade, &record.like) {
        (Grade::Reference, _) => format!("{name}: compared with the release's own reference"),
        (Grade::Like, Some(sister)) => format!("{name}: compared with the reference of {sister}"),
        _ => format!("{name}: compared with no reference"),
    }
}

fn hardware(hardware: &Hardware) -> String {
    let Hardware { kind, vendor, model, threads, .. } = hardware;
    let units = if kind == "cpu" { "threads" } else { "multiprocessors" };
    format!("{vendor} {model}, {threads} {units}")
}

fn settings(record: &Record) -> String {
    let s = &record.identity.host.settings;
    let weights = match (s.dequantise, &*s.weights) {
        (true, _) => "dequantised",
        (false, "") => "as stored",
        (false, forms) => forms,
    };
    format!(
        "weights {weights}, activations {}, KV {}, blocks of {}, {} tokens and {} rows a step",
        s.dtype, s.kv_dtype, s.block_size, s.max_batched_tokens, s.max_rows
    )
}

const COLUMNS: [&str; 7] =
    ["Stage", "Check", "Result", "Measured", "Required", "Proves", "Reproduce"];

pub fn markdown(report: &Report) -> String {
    let mut out = format!("# {}\n\n**{}**\n\n", report.title, report.verdict.words());
    for (label, value) in &report.facts {
        let _ = writeln!(out, "- **{label}**: {value}");
    }
    let row = |cells: &[String]| format!("| {} |\n", cells.join(" | "));
    let head = [COLUMNS.map(str::to_owned), COLUMNS.map(|_| "---".to_owned())];
    let _ = write!(out, "\n{}", head.map(|cells| row(&cells)).concat());
    for check in report.checks {
        let cells = [
            check.stage.clone(),
            check.id.clone(),
            check.state.words().to_owned(),
            check.value.clone(),
            check.gate.clone(),
            check.proves.clone(),
            format!("`{}`", report.reproduce(check)),
        ];
        out.push_str(&row(&cells.map(|cell| cell.replace('|', "\\|").replace('\n', " "))));
    }
    out
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}
