//! `cresset models`: the releases of the data folder, as documents and as text for people.

use super::support::text;
use crate::catalogue::{
    Catalogue, CatalogueEntry, Error, FetchOptions, FetchProgress, Manifest, NotQualified,
};
use crate::clock::UnixMillis;
use crate::config::Config;
use crate::ids::ModelId;
use cresset_qualification::{HostIdentity, Record};
use serde_json::{Value, json};
use std::fmt::Write;
use std::path::Path;

type Result<T = Value, E = Error> = std::result::Result<T, E>;

/// How the configuration says releases are fetched.
pub fn fetch_options(config: &Config) -> FetchOptions {
    let hub = &config.hub;
    FetchOptions {
        endpoint: hub.endpoint.clone(),
        token: hub.token.clone(),
        python: hub.python.clone(),
        ..FetchOptions::default()
    }
}

/// Where each release stands on this host. `loaded` are the models of the running node, if there is
/// one.
pub fn list(
    catalogue: &Catalogue,
    host: &HostIdentity,
    max_age_days: u64,
    now: UnixMillis,
    loaded: &[ModelId],
) -> Result {
    let entries = catalogue.entries(host, max_age_days, now)?;
    let rows =
        entries.iter().map(|entry| row(catalogue, entry, loaded)).collect::<Result<Vec<_>>>()?;
    Ok(json!({ "models": rows }))
}

fn row(catalogue: &Catalogue, entry: &CatalogueEntry, loaded: &[ModelId]) -> Result {
    let manifest = &entry.manifest;
    let record = match &entry.qualification {
        Ok(model) => catalogue
            .records(&manifest.name)?
            .into_iter()
            .find(|r| r.id.to_string() == model.record_id()),
        Err(_) => None,
    };
    let mut row = summary(manifest);
    row["pulled"] = entry.pulled.into();
    row["qualified"] = entry.qualification.is_ok().into();
    row["qualified_at"] = record.as_ref().map(|record| record.finished_at).into();
    row["qualified_context_tokens"] =
        record.as_ref().map(|record| record.qualified_context_tokens).into();
    row["record_id"] = record.map(|record| record.id.to_string()).into();
    row["not_qualified_because"] =
        entry.qualification.as_ref().err().map(NotQualified::to_string).into();
    row["loaded"] = loaded.contains(&manifest.id).into();
    Ok(row)
}

fn summary(manifest: &Manifest) -> Value {
    json!({
        "id": manifest.id,
        "name": manifest.name,
        "address": manifest.address,
        "publisher": manifest.publisher,
        "license": manifest.upstream.license,
        "release_id": manifest.release_id,
        "release_label": manifest.release_label,
        "bytes": manifest.bytes(),
    })
}

pub fn list_text(document: &Value) -> String {
    let mut out = String::new();
    for row in document["models"].as_array().into_iter().flatten() {
        let flag = |key: &str, word: &'static str| if row[key] == true { Some(word) } else { None };
        let states: Vec<&str> =
            [flag("pulled", "pulled"), flag("qualified", "qualified"), flag("loaded", "loaded")]
                .into_iter()
                .flatten()
                .collect();
        let states = if states.is_empty() { "known".to_owned() } else { states.join(", ") };
        let mib = row["bytes"].as_u64().unwrap_or_default() >> 20;
        let _ = writeln!(out, "{:<32} {:>7} MiB  {states}", words(&row["name"]), mib);
        if let Some(why) = row["not_qualified_because"].as_str().filter(|_| row["pulled"] == true) {
            let _ = writeln!(out, "  {why}");
        }
    }
    out
}

pub fn pull(
    catalogue: &Catalogue,
    wanted: &str,
    options: &FetchOptions,
    progress: &mut dyn FnMut(FetchProgress),
) -> Result {
    catalogue.pull(wanted, options, progress).map(|manifest| summary(&manifest))
}

pub fn add(
    catalogue: &Catalogue,
    path: &Path,
    name: Option<&str>,
    progress: &mut dyn FnMut(FetchProgress),
) -> Result {
    catalogue.add(path, name, progress).map(|manifest| summary(&manifest))
}

pub fn remove(catalogue: &Catalogue, wanted: &str) -> Result {
    catalogue.remove(wanted).map(|manifest| summary(&manifest))
}

pub fn pulled_text(document: &Value) -> String {
    let name = words(&document["name"]);
    format!("{name} is here, its digests are right. Next: cresset qualify {name}\n")
}

pub fn removed_text(document: &Value) -> String {
    format!("{} is removed, files and records\n", words(&document["name"]))
}

/// The whole manifest, and the records there are of it, newest first.
pub fn show(catalogue: &Catalogue, wanted: &str) -> Result {
    let manifest = catalogue.find(wanted)?;
    let records: Vec<Value> = catalogue.records(&manifest.name)?.iter().map(record_line).collect();
    let mut document =
        serde_json::to_value(&manifest).expect("a manifest is representable in JSON");
    document["pulled"] = catalogue.is_pulled(&manifest).into();
    document["records"] = records.into();
    Ok(document)
}

fn record_line(record: &Record) -> Value {
    json!({
        "id": record.id,
        "verdict": record.verdict,
        "suite": record.suite,
        "finished_at": record.finished_at,
        "qualified_context_tokens": record.qualified_context_tokens,
        "failed": record.failed_checks().map(|check| check.id.as_str()).collect::<Vec<_>>(),
    })
}

pub fn show_text(document: &Value) -> String {
    let mut out = String::new();
    let mut line = |label: &str, value: &Value| {
        let _ = writeln!(out, "{label:<18} {}", words(value));
    };
    line("name", &document["name"]);
    line("id", &document["id"]);
    line("release", &document["release_label"]);
    line("publisher", &document["publisher"]);
    line("upstream", &document["upstream"]["name"]);
    line("license", &document["upstream"]["license"]);
    line("context tokens", &document["limits"]["model_context_tokens"]);
    line("pulled", &document["pulled"]);
    for file in document["files"].as_array().into_iter().flatten() {
        line("file", &format!("{} sha256 {}", words(&file["name"]), words(&file["sha256"])).into());
    }
    for record in document["records"].as_array().into_iter().flatten() {
        line(
            "record",
            &format!(
                "{} {} {}",
                words(&record["id"]),
                words(&record["suite"]),
                words(&record["verdict"])
            )
            .into(),
        );
    }
    out
}

/// Strings without their quotes.
fn words(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), text::plain)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::qualify::host_of;

    #[test]
    fn a_fresh_data_folder_knows_the_default_release() {
        let data = tempfile::tempdir().unwrap();
        let catalogue = Catalogue::new(data.path());
        let document =
            list(&catalogue, &host_of(&Config::default()).unwrap(), 90, UnixMillis(0), &[])
                .unwrap();
        let rows = document["models"].as_array().unwrap();
        let row = rows.iter().find(|row| row["name"] == "smollm2-135m-instruct").unwrap();
        assert_eq!([&row["pulled"], &row["qualified"], &row["loaded"]], [false, false, false]);
        assert!(
            row["not_qualified_because"]
                .as_str()
                .unwrap()
                .contains("cresset models pull smollm2-135m-instruct")
        );
        assert!(list_text(&document).contains("known"));
        let shown = show_text(&show(&catalogue, "smollm2-135m-instruct").unwrap());
        assert!(shown.contains("Apache-2.0") && shown.contains("b179c952"), "{shown}");
    }

    #[test]
    fn an_unknown_name_lists_the_known_ones() {
        let data = tempfile::tempdir().unwrap();
        let error = show(&Catalogue::new(data.path()), "gpt").unwrap_err().to_string();
        assert!(error.contains("\"gpt\"") && error.contains("smollm2-135m-instruct"), "{error}");
    }
}
