//! Writes the record for people: as Markdown, or as one HTML page without any other file.

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
        }
    }
}

/// The facts about the verdict as pairs of label and value.
fn facts(record: &Record) -> Vec<(&'static str, String)> {
    let (release, host) = (&record.identity.release, &record.identity.host);
    let mut facts = vec![
        ("Verdict", record.verdict.words().to_owned()),
        ("Grade", grade(record)),
        ("Release", format!("{} ({})", release.name, release.release_id)),
        ("Qualified context", format!("{} tokens", record.qualified_context_tokens)),
        ("Suite", format!("{}, policy {}", record.suite, record.policy_version)),
        (
            "Engine",
            format!("{}, executable sha256 {}", host.engine.version, host.engine.executable_sha256),
        ),
        ("Hardware", hardware(&host.hardware)),
        ("Features", host.hardware.features.join(" ")),
        ("Settings", settings(record)),
        ("Record", record.id.to_string()),
        ("Finished", format!("{} (Unix seconds)", record.finished_at)),
        ("Reproduce", format!("cresset qualify {} --suite {}", release.name, record.suite)),
    ];
    facts.extend(
        release.files.iter().map(|(name, digest)| ("File", format!("{name}, sha256 {digest}"))),
    );
    facts.extend(record.notes.iter().map(|note| ("Note", note.clone())));
    facts
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
    let weights = if s.dequantise { "dequantised" } else { "as stored" };
    format!(
        "weights {weights}, activations {}, KV {}, blocks of {}, {} tokens and {} rows a step",
        s.dtype, s.kv_dtype, s.block_size, s.max_batched_tokens, s.max_rows
    )
}

fn cells(check: &CheckResult) -> [String; 7] {
    let seconds = format!("{:.2}", check.seconds);
    let state = check.state.words().to_owned();
    [
        check.stage.clone(),
        check.id.clone(),
        state,
        check.value.clone(),
        check.gate.clone(),
        check.proves.clone(),
        seconds,
    ]
}

const COLUMNS: [&str; 7] =
    ["Stage", "Check", "Result", "Measured", "Required", "Proves", "Seconds"];

pub fn markdown(record: &Record) -> String {
    let mut out = format!("# Qualification of {}\n\n", record.identity.release.name);
    for (label, value) in facts(record) {
        let _ = writeln!(out, "- **{label}**: {value}");
    }
    let row = |cells: &[String]| format!("| {} |\n", cells.join(" | "));
    let _ = write!(
        out,
        "\n{}{}",
        row(&COLUMNS.map(str::to_owned)),
        row(&COLUMNS.map(|_| "---".to_owned()))
    );
    for check in &record.checks {
        out.push_str(&row(&cells(check).map(|cell| cell.replace('|', "\\|").replace('\n', " "))));
    }
    out
}

const STYLE: &str = "body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:70rem;padding:0 1rem;color:#1c1c1c}\
table{border-collapse:collapse;width:100%}td,th{text-align:left;vertical-align:top;padding:.35rem .6rem;border-bottom:1px solid #ddd;\
overflow-wrap:anywhere}.passed{color:#17703a}.failed{color:#b00020;font-weight:600}.not_run{color:#7a5b00}\
@media(prefers-color-scheme:dark){body{background:#161616;color:#e6e6e6}td,th{border-color:#333}.passed{color:#6fd08c}.failed{color:#ff7b88}.not_run{color:#e0b84c}}";

pub fn html(record: &Record) -> String {
    let title = format!("Qualification of {}", escape(&record.identity.release.name));
    let mut out = format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><meta name=\"viewport\" content=\"width=device-width\">\
         <title>{title}</title><style>{STYLE}</style></head><body>\n<h1>{title}</h1>\n<table>\n"
    );
    for (label, value) in facts(record) {
        let _ = writeln!(out, "<tr><th>{label}</th><td>{}</td></tr>", escape(&value));
    }
    let head = COLUMNS.map(|column| format!("<th>{column}</th>")).concat();
    let _ = writeln!(out, "</table>\n<h2>Checks</h2>\n<table>\n<tr>{head}</tr>");
    for check in &record.checks {
        let cells = cells(check).map(|cell| format!("<td>{}</td>", escape(&cell))).concat();
        let _ = writeln!(out, "<tr class=\"{}\">{cells}</tr>", class(check.state));
    }
    out + "</table>\n</body></html>\n"
}

fn class(state: CheckState) -> &'static str {
    match state {
        CheckState::Passed => "passed",
        CheckState::Failed => "failed",
        CheckState::NotRun => "not_run",
    }
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}
