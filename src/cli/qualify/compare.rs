//! `cresset qualify --compare A B`: two results side by side. Each is a release's newest record, a
//! record by its id, a report's JSON file, or the address of an endpoint, which is checked now.

use super::{Arguments, endpoint_report};
use crate::support::context::Context;
use crate::support::output::{CommandError, CommandResult};
use crate::support::text;
use cresset_catalogue::Catalogue;
use cresset_qualification::{CheckResult, CheckState, Verdict};
use serde::Deserialize;
use serde_json::{Value, json};
use std::fmt::Write;
use std::path::Path;

/// Largest report that is read, bytes.
const MAX_REPORT: u64 = 64 << 20;

/// What records and reports of endpoints have in common.
#[derive(Deserialize)]
struct ComparedResult {
    verdict: Verdict,
    suite: String,
    #[serde(default)]
    qualified_context_tokens: u32,
    checks: Vec<CheckResult>,
}

/// One check in both results; `None` where it was not in the suite.
struct Row<'a> {
    id: &'a str,
    sides: [Option<&'a CheckResult>; 2],
}

impl Row<'_> {
    /// Whether both ran the check, and one alone failed.
    fn differs(&self) -> bool {
        let [Some(a), Some(b)] = self.sides else { return false };
        a.state != b.state && a.state != CheckState::NotRun && b.state != CheckState::NotRun
    }
}

pub(super) async fn run(
    context: &Context,
    names: &[String],
    arguments: &Arguments,
) -> CommandResult {
    let [a, b] = names else { unreachable!("invariant: the option takes two values") };
    let results = [read(context, a, arguments).await?, read(context, b, arguments).await?];
    let rows = rows(&results);
    let differ = rows.iter().any(Row::differs);
    let document = document([a, b], &results, &rows);
    context.output.result(&document, |_| table([a, b], &results, &rows))?;
    if differ { Err(CommandError::NegativeCode(10)) } else { Ok(()) }
}

async fn read(
    context: &Context,
    name: &str,
    arguments: &Arguments,
) -> CommandResult<ComparedResult> {
    let found: Value = if name.starts_with("http://") || name.starts_with("https://") {
        let report = endpoint_report(context, name, arguments).await?;
        serde_json::to_value(report).map_err(CommandError::new)?
    } else if Path::new(name).is_file() {
        let size = std::fs::metadata(name)?.len();
        if size > MAX_REPORT {
            return Err(CommandError::new(format!("{name} has {size} bytes: it is no report")));
        }
        serde_json::from_slice(&std::fs::read(name)?).map_err(|error| unreadable(name, error))?
    } else {
        stored(&Catalogue::new(&context.data_dir), name)?
    };
    serde_json::from_value(found).map_err(|error| unreadable(name, error))
}

fn unreadable(name: &str, error: impl std::fmt::Display) -> CommandError {
    CommandError::new(format!("{name} is no report: {error}"))
        .remedy("give a file that `cresset qualify --report FILE.json` wrote")
}

/// The record with this id, or the newest one of the release with this name.
fn stored(catalogue: &Catalogue, name: &str) -> CommandResult<Value> {
    let releases = match name.parse::<uuid::Uuid>() {
        Ok(_) => catalogue.manifests()?,
        Err(_) => vec![catalogue.find(name)?],
    };
    for release in releases {
        let mut records = catalogue.records(&release.name)?.into_iter();
        let wanted = |id: &str| release.name == name || id == name;
        if let Some(record) = records.find(|record| wanted(&record.id.to_string())) {
            return serde_json::to_value(record).map_err(CommandError::new);
        }
    }
    Err(CommandError::new(format!("there is no record of {name} on this node")))
}

/// The checks of both, in the first one's order.
fn rows(results: &[ComparedResult; 2]) -> Vec<Row<'_>> {
    let [a, b] = results;
    let find = |all: &'_ [CheckResult], id: &str| all.iter().position(|check| check.id == id);
    let mut rows: Vec<Row> = a
        .checks
        .iter()
        .map(|check| {
            let other = find(&b.checks, &check.id).map(|at| &b.checks[at]);
            Row { id: &check.id, sides: [Some(check), other] }
        })
        .collect();
    let missing = b.checks.iter().filter(|check| find(&a.checks, &check.id).is_none());
    rows.extend(missing.map(|check| Row { id: &check.id, sides: [None, Some(check)] }));
    rows
}

fn document(names: [&str; 2], results: &[ComparedResult; 2], rows: &[Row]) -> Value {
    let side = |at: usize| {
        let ComparedResult { verdict, suite, qualified_context_tokens, .. } = &results[at];
        json!({ "name": names[at], "verdict": verdict, "suite": suite,
                "qualified_context_tokens": qualified_context_tokens })
    };
    let cell = |check: Option<&CheckResult>| {
        check.map(|c| json!({ "state": c.state, "value": c.value, "seconds": c.seconds }))
    };
    let checks = rows.iter().map(|row| {
        json!({ "id": row.id, "differs": row.differs(), "a": cell(row.sides[0]),
                "b": cell(row.sides[1]) })
    });
    json!({ "a": side(0), "b": side(1), "checks": checks.collect::<Vec<_>>() })
}

fn table(names: [&str; 2], results: &[ComparedResult; 2], rows: &[Row]) -> String {
    let mut out = String::new();
    for (label, name, result) in [("A", names[0], &results[0]), ("B", names[1], &results[1])] {
        let tokens = match result.qualified_context_tokens {
            0 => String::new(),
            tokens => format!(", {tokens} context tokens"),
        };
        let (words, suite) = (result.verdict.words(), text::plain(&result.suite));
        let _ = writeln!(out, "{label}  {}: {words}, suite {suite}{tokens}", text::plain(name));
    }
    for row in rows {
        let mark = if row.differs() { "≠" } else { " " };
        let _ = writeln!(out, "{mark} {}", text::plain(row.id));
        for (label, check) in ["A", "B"].iter().zip(row.sides) {
            let told = check.map_or_else(
                || "not in the suite".to_owned(),
                |c| {
                    format!(
                        "{:<8} {:>6.2} s  {}",
                        c.state.words(),
                        c.seconds,
                        text::plain(&c.value)
                    )
                },
            );
            let _ = writeln!(out, "    {label}  {told}");
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use cresset_qualification::testing::records;

    fn result(verdict: Verdict) -> ComparedResult {
        serde_json::from_value(serde_json::to_value(records::of(verdict)).unwrap()).unwrap()
    }

    #[test]
    fn a_check_differs_where_both_ran_it_and_one_failed() {
        let mut results = [result(Verdict::Qualified), result(Verdict::Qualified)];
        assert!(!rows(&results).iter().any(Row::differs));
        results[1].checks[0].state = CheckState::NotRun;
        results[1].checks[1].state = CheckState::Failed;
        let last = results[1].checks.pop().unwrap();
        let rows = rows(&results);
        let differing: Vec<&str> =
            rows.iter().filter(|row| row.differs()).map(|row| row.id).collect();
        assert_eq!(differing, [results[0].checks[1].id.as_str()]);
        let told = table(["one", "two"], &results, &rows);
        assert!(told.contains("A  one: qualified") && told.contains("not in the suite"), "{told}");
        let document = document(["one", "two"], &results, &rows);
        assert_eq!(document["checks"][1]["differs"], true);
        assert!(rows.iter().any(|row| row.id == last.id && row.sides[1].is_none()));
    }
}
