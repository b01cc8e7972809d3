//! `cresset qualify NAME --self-test`: plants faults and tells which check named each of them.

use super::{ExitReason, exit, write_report};
use crate::catalogue::Manifest;
use crate::cli::support::context::Context;
use crate::cli::support::output::{CommandError, CommandResult, note};
use crate::cli::support::text;
use crate::node::SelfTestLine;
use cresset_qualification::report::Report;
use cresset_qualification::{CheckResult, CheckState, Verdict};
use serde_json::json;
use std::path::Path;

pub(super) async fn run(
    context: &Context,
    manifest: Manifest,
    report: Option<&Path>,
) -> CommandResult {
    let (assembly, name) = (context.assembly()?.clone(), manifest.name.clone());
    let blocking = tokio::task::spawn_blocking(move || {
        assembly.self_test(&manifest, &mut |line| note(&told(line)))
    });
    let lines = blocking.await.map_err(CommandError::new)??;
    let document = json!({ "data": lines });
    let checks: Vec<CheckResult> = lines.iter().map(as_check).collect();
    write_report(&page(&name, &checks), || document.clone(), report)?;
    let columns = ["place", "fault", "found_by", "right"];
    context.output.result(&document, |shown| text::table(shown, &columns))?;
    exit(ExitReason::of(verdict(&checks)))
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
        stage: line.place.into(),
        proves: line.fault.clone(),
        state: if line.right { CheckState::Passed } else { CheckState::Failed },
        value: line.told.clone(),
        gate: if line.check.is_empty() { "nothing is found" } else { "it is found" }.into(),
        seconds: 0.0,
        series: Vec::new(),
    }
}

fn verdict(checks: &[CheckResult]) -> Verdict {
    let all = checks.iter().all(|check| check.state == CheckState::Passed);
    if all { Verdict::Qualified } else { Verdict::Failed }
}

fn page<'a>(name: &str, checks: &'a [CheckResult]) -> Report<'a> {
    let command = format!("cresset qualify {name} --self-test");
    Report {
        title: format!("Faults planted in {name}"),
        verdict: verdict(checks),
        facts: vec![("Reproduce", command.clone())],
        checks,
        command,
        grade: None,
        memory: Vec::new(),
    }
}
