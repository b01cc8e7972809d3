//! `cresset qualify`: proves a release on this machine, and writes the report.

use super::support::context::Context;
use super::support::output::{CommandError, CommandResult, note};
use super::support::progress::TaskProgress;
use super::support::values;
use super::{models, reload};
use crate::catalogue::{Catalogue, Manifest};
use crate::node::Assembly;
use clap::Args;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use cresset_qualification::{Record, Suite, SuiteProgress, Verdict, report};
use serde_json::Value;
use std::fmt::Write;
use std::path::{Path, PathBuf};

#[derive(Args, Debug)]
#[command(after_help = "Example:
  cresset qualify smollm2-135m-instruct --suite full --report report.html")]
pub(super) struct Arguments {
    /// Name or id of a pulled release
    #[arg(value_name = "MODEL")]
    release: String,
    /// Quick takes seconds, full takes minutes and runs the whole context
    #[arg(long, default_value = "quick", value_parser = suite_parser())]
    suite: Suite,
    /// Write a report: HTML, Markdown or JSON, as the file's extension says
    #[arg(long, value_name = "FILE", value_parser = values::report)]
    report: Option<PathBuf>,
}

fn suite_parser() -> impl TypedValueParser<Value = Suite> {
    let names = PossibleValuesParser::new(["quick", "full"]);
    names.map(|name| if name == "full" { Suite::Full } else { Suite::Quick })
}

/// A release that does not qualify is printed as a result, and the exit code says that it failed.
pub(super) async fn run(context: &Context, arguments: Arguments) -> CommandResult {
    let manifest = Catalogue::new(&context.data_dir).find(&arguments.release)?;
    let (id, name) = (manifest.id, manifest.name.clone());
    let record = qualify(context.assembly()?.clone(), manifest, arguments.suite).await?;
    if let Some(file) = &arguments.report {
        write_report(&record, file).map_err(|error| {
            CommandError::new(format!("the report {}: {error}", file.display()))
        })?;
    }
    let outcome = reload::after_change(context, Some(id), &name).await;
    let mut document = json(&record);
    outcome.add_to(&mut document);
    let text = |_: &Value| format!("{}{}\n", verdict_text(&record), outcome.sentence);
    context.output.result(&document, text)?;
    if record.verdict == Verdict::Qualified { Ok(()) } else { Err(CommandError::Negative) }
}

/// Runs the suite on a thread that may block, and shows its progress.
async fn qualify(assembly: Assembly, manifest: Manifest, suite: Suite) -> CommandResult<Record> {
    let blocking = tokio::task::spawn_blocking(move || {
        let mut progress = TaskProgress::steps(format!("qualifying {}", manifest.name));
        let mut on_check = |at: SuiteProgress| progress.at(at.done as u64, at.total as u64);
        let record = assembly.qualify(&manifest, suite, &mut on_check);
        progress.clear();
        record
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
    if assembly.qualified(&manifest, &assembly.host()).is_ok() {
        return Ok(());
    }
    let id = manifest.id;
    let record = qualify(assembly.clone(), manifest, Suite::Quick).await?;
    note(&format!("{release} is {} on this machine", record.verdict.words()));
    if record.verdict == Verdict::Qualified {
        // A running node serves it from now on, and without one there is nobody to tell.
        reload::after_change(context, Some(id), release).await;
        return Ok(());
    }
    note(&verdict_text(&record));
    Err(CommandError::new(format!("{release} did not qualify on this machine and is not served"))
        .remedy(format!("cresset qualify {release} --report report.html shows the evidence")))
}

/// Writes HTML, Markdown or JSON, as the file's extension says.
fn write_report(record: &Record, file: &Path) -> std::io::Result<()> {
    let content = match file.extension().and_then(|ext| ext.to_str()) {
        Some("html" | "htm") => report::html(record),
        Some("json") => format!("{:#}\n", json(record)),
        _ => report::markdown(record),
    };
    std::fs::write(file, content)
}

fn json(record: &Record) -> Value {
    let mut document =
        serde_json::to_value(record).expect("invariant: a record is representable in JSON");
    document["qualified"] = (record.verdict == Verdict::Qualified).into();
    document
}

/// The verdict with its evidence, one line a check.
fn verdict_text(record: &Record) -> String {
    let name = &record.identity.release.name;
    let mut out = String::new();
    for check in &record.checks {
        let _ = writeln!(
            out,
            "{:<8} {:<22} {:>6.2} s  {}",
            check.state.words(),
            check.id,
            check.seconds,
            check.value
        );
    }
    for note in &record.notes {
        let _ = writeln!(out, "note: {note}");
    }
    let _ = writeln!(
        out,
        "{name} is {}, {} context tokens",
        record.verdict.words(),
        record.qualified_context_tokens
    );
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

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
            .add(&file, Some("tiny"), &crate::node::inspect, &mut |_| {})
            .unwrap();
        let record = assembly.qualify(&manifest, Suite::Quick, &mut |_| {}).unwrap();
        assert!(verdict_text(&record).contains("Self-consistency only"));
        let written = |name: &str| {
            let path = data.path().join(name);
            write_report(&record, &path).unwrap();
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
