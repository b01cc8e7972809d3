//! `cresset qualify NAME --self-test`: plants faults and tells which check named each of them.

use super::{ExitReason, exit, write_report};
use crate::support::context::Context;
use crate::support::output::{CommandError, CommandResult, note};
use crate::support::text;
use cresset_catalogue::Manifest;
use cresset_prover::Prover;
use cresset_qualification::report::Report;
use cresset_qualification::{CheckResult, CheckState, Record, SelfTestLine};
use serde_json::json;
use std::path::Path;

pub(super) async fn run(
    context: &Context,
    manifest: Manifest,
    report: Option<&Path>,
) -> CommandResult {
    let assembly = context.assembly()?.clone();
    let blocking = tokio::task::spawn_blocking(move || {
        Prover(&assembly).self_test(&manifest, &mut |line| note(&told(line)))
    });
    let record = blocking.await.map_err(CommandError::new)??;
    let document = json!({ "record_id": record.id, "data": record.self_test });
    let checks: Vec<CheckResult> = record.self_test.iter().map(as_check).collect();
    write_report(&page(&record, &checks), || document.clone(), report)?;
    let columns = ["place", "fault", "found_by", "right"];
    context.output.result(&document, |shown| text::table(shown, &columns))?;
    exit(ExitReason::of(record.verdict))
}

fn told(line: &SelfTestLine) -> String {
    let found = match (&line.found_by, line.right) {
        (Some(finder), true) => format!("found by {finder}"),
        (None, true) => "harmless, and nothing was found".to_owned(),
        (Some(finder), false) => format!("HARMLESS, BUT FOUND BY {finder}"),
        (None, false) if line.check.is_empty() => "HARMLESS, BUT A CHECK NO LONGER PASSES".into(),
        (None, false) => format!("NOT FOUND by {}", line.check),
    };
    format!("{}: {}: {found}", line.place, line.fault)
}

fn as_check(line: &SelfTestLine) -> CheckResult {
    CheckResult {
        id: line.check.clone(),
        stage: line.place.clone(),
        proves: line.fault.clone(),
        state: if line.right { CheckState::Passed } else { CheckState::Failed },
        value: line.told.clone(),
        gate: if line.check.is_empty() { "nothing is found" } else { "it is found" }.into(),
        seconds: 0.0,
        series: Vec::new(),
    }
}

fn page<'a>(record: &Record, checks: &'a [CheckResult]) -> Report<'a> {
    let name = &record.identity.release.name;
    let command = format!("cresset qualify {name} --self-test");
    Report {
        title: format!("Faults planted in {name}"),
        verdict: record.verdict,
        facts: vec![("Reproduce", command.clone())],
        checks,
        command,
        grade: None,
        memory: Vec::new(),
    }
}
