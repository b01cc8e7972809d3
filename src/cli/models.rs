//! `cresset models`: the releases of the data folder.

use super::reload;
use super::support::context::Context;
use super::support::output::{CommandError, CommandResult, Render};
use super::support::progress::TaskProgress;
use super::support::{text, values};
use clap::{Args, Subcommand};
use cresset_base::{Clock, ModelId, SystemClock};
use cresset_catalogue::{
    self, Catalogue, FailedContext, FetchOptions, FetchPhase, FetchProgress, HubSettings, Manifest,
    NotQualified, QualifiedModel,
};
use cresset_commands::AdminCommand;
use cresset_engine::EngineSettings;
use cresset_node::{Assembly, GpuMemory, cpu_context_bytes, inspect};
use cresset_qualification::{Grade, Record};
use serde_json::{Value, json};
use std::fmt::Write;
use std::path::PathBuf;

#[derive(Debug, Subcommand)]
#[command(after_help = "Examples:
  cresset models list
  cresset models pull smollm2-135m-instruct
  cresset models add --path ./model.gguf --name mine && cresset qualify mine
  cresset models price mine --output 500_000
  cresset models accept mine --reason 'compared by hand on 50 questions'")]
pub(super) enum ModelsCommand {
    /// List releases: known, pulled, qualified, loaded
    List,
    /// Fetch a known release, or a repository of the model hub, and check its digests
    Pull {
        /// A release's name, or a repository of the hub: `OWNER/REPOSITORY`, then `/FILE.gguf` or
        /// `:Q4_K_M` for one of several files, `@REVISION` for a version; or the address of its
        /// page
        #[arg(value_name = "NAME")]
        release: String,
    },
    /// Add a GGUF file or a folder in Hugging Face layout from this machine
    Add {
        /// The file or folder
        #[arg(long)]
        path: PathBuf,
        /// Name for the command line [default: from the file's name]
        #[arg(long)]
        name: Option<String>,
    },
    /// Have a release served that qualified without any reference outputs
    Accept {
        /// The release, by name or id
        #[arg(value_name = "NAME")]
        release: String,
        /// Why it is to be served; kept with the date in a signed statement. It holds for these
        /// files, this build, hardware and settings
        #[arg(
            long,
            allow_hyphen_values = true,
            value_name = "TEXT",
            required_unless_present = "revoke"
        )]
        reason: Option<String>,
        /// Have it served no more
        #[arg(long)]
        revoke: bool,
    },
    /// Remove a release's files and records
    Remove {
        /// The release, by name or id
        #[arg(value_name = "NAME")]
        release: String,
    },
    /// Change what tokens cost, for requests from now on; without amounts, show it
    Price(PriceArguments),
    /// Load a served model into the running node's memory now
    Load {
        /// The model, by name or id
        #[arg(value_name = "NAME")]
        release: String,
    },
    /// Take a model without requests out of the running node's memory; the next request loads it
    Unload {
        /// The model, by name or id
        #[arg(value_name = "NAME")]
        release: String,
    },
    /// Show a release's manifest and its records
    Show {
        /// The release, by name or id
        #[arg(value_name = "NAME")]
        release: String,
    },
}

pub(super) async fn run(context: &Context, command: ModelsCommand) -> CommandResult {
    let catalogue = Catalogue::new(&context.data_dir);
    let output = context.output;
    match command {
        ModelsCommand::List => {
            let assembly = context.assembly()?;
            let loaded = running_models(context, |model| model["state"] == "loaded").await?;
            output.result(&list(assembly, &loaded)?, list_text)
        }
        ModelsCommand::Pull { release } => {
            let document = with_card(context, &catalogue, &pull(context, release).await?);
            changed(context, document, pulled_text).await
        }
        ModelsCommand::Add { path, name } => {
            let added = add(context, path, name).await?;
            let document = with_card(context, &catalogue, &added);
            changed(context, document, added_text).await
        }
        ModelsCommand::Accept { release, reason, revoke } => {
            let reason = reason.unwrap_or_else(|| "revoked".to_owned());
            let document = accept(context.assembly()?, &release, &reason, !revoke)?;
            changed(context, document, accepted_text).await
        }
        ModelsCommand::Remove { release } => {
            changed(context, remove(&catalogue, &release)?, removed_text).await
        }
        ModelsCommand::Price(arguments) => price(context, arguments).await,
        ModelsCommand::Load { release } => {
            context.show(AdminCommand::ModelLoad { name: release }, text::fields).await
        }
        ModelsCommand::Unload { release } => {
            context.show(AdminCommand::ModelUnload { name: release }, text::fields).await
        }
        ModelsCommand::Show { release } => {
            output.result(&show(&catalogue, &release, &context.config.engine)?, show_text)
        }
    }
}

#[derive(Args, Debug)]
pub(super) struct PriceArguments {
    /// The release, by name or id
    #[arg(value_name = "NAME")]
    release: String,
    /// Microcredits for a million prompt tokens
    #[arg(long, value_name = "UNITS", value_parser = values::units)]
    input: Option<u64>,
    /// Microcredits for a million prompt tokens that were found in the prefix cache
    #[arg(long, value_name = "UNITS", value_parser = values::units)]
    cached_input: Option<u64>,
    /// Microcredits for a million output tokens
    #[arg(long, value_name = "UNITS", value_parser = values::units)]
    output: Option<u64>,
    /// Show the prices that the release has had, with the times from which they counted here
    #[arg(long, conflicts_with_all = ["input", "cached_input", "output"])]
    history: bool,
}

const PRICE_COLUMNS: &[&str] = &["noted_at", "revision", "input", "cached_input", "output"];

async fn price(context: &Context, arguments: PriceArguments) -> CommandResult {
    let PriceArguments { release: name, input, cached_input, output, history } = arguments;
    if history {
        let command = AdminCommand::ModelPriceHistory { name };
        return context.show(command, |document| text::table(document, PRICE_COLUMNS)).await;
    }
    let command = AdminCommand::ModelPrice { name, input, cached_input, output };
    let document = context.admin(command).await?;
    context.output.result(&document, |document| {
        let change = |name: &str| {
            let [before, now] = [&document["before"][name], &document[name]];
            if before == now { now.to_string() } else { format!("{before} -> {now}") }
        };
        let rows = ["input", "cached_input", "output", "revision"];
        cresset_base::text_table::align(&rows.map(|name| vec![name.to_owned(), change(name)]))
    })?;
    let failed = document["problems"].as_array().is_some_and(|problems| !problems.is_empty());
    if failed { Err(CommandError::Negative) } else { Ok(()) }
}

/// Ids of the running node's models that match `filter`; empty when no node runs.
async fn running_models(
    context: &Context,
    filter: impl Fn(&Value) -> bool,
) -> CommandResult<Vec<ModelId>> {
    let status = context.ask_node(&AdminCommand::Status).await?.unwrap_or_default();
    let models = status["models"].as_array().into_iter().flatten().filter(|model| filter(model));
    Ok(models.filter_map(|model| model["id"].as_str()?.parse().ok()).collect())
}

/// Shows the result of a command that changed a release, after the running node took it over. A
/// release without a readable manifest has no id, and no node serves it.
async fn changed(context: &Context, mut document: Value, render: Render) -> CommandResult {
    let id = document["id"].as_str().and_then(|id| id.parse().ok());
    let outcome = reload::after_change(context, id, &words(&document["name"])).await;
    outcome.add_to(&mut document);
    context
        .output
        .result(&document, |document| format!("{}{}\n", render(document), outcome.sentence))
}

/// A running node goes on with what it has in memory until it is told.
fn remove(catalogue: &Catalogue, wanted: &str) -> CommandResult<Value> {
    // A manifest that cannot be read leaves the name.
    let found = catalogue.find(wanted).ok();
    let name = catalogue.remove(wanted)?;
    Ok(found.as_ref().map_or_else(|| json!({ "name": name }), summary))
}

/// Writes down that a release without reference outputs is to be served, or is no more.
pub(super) fn accept(
    assembly: &Assembly,
    wanted: &str,
    reason: &str,
    accepted: bool,
) -> CommandResult<Value> {
    let (catalogue, host) = (assembly.catalogue(), assembly.host());
    let manifest = catalogue.find(wanted)?;
    let name = &manifest.name;
    check_acceptable(assembly, &manifest, accepted)?;
    let present = catalogue.identity(&manifest, &host);
    let fits = |record: &Record| record.identity.difference(&present).is_none();
    let record = catalogue.records(name)?.into_iter().find(fits);
    let record = record.ok_or_else(|| CommandError::new(format!("{name} has no record")))?;
    let statement = catalogue.accept(&record, accepted, reason, SystemClock.now())?;
    let mut document = summary(&manifest);
    document["accepted"] = accepted.into();
    document["reason"] = statement.reason.into();
    document["at"] = statement.at.into();
    document["record_id"] = record.id.to_string().into();
    Ok(document)
}

/// Refuses to accept, or to revoke, where that would change nothing.
fn check_acceptable(assembly: &Assembly, manifest: &Manifest, accepted: bool) -> CommandResult {
    let name = &manifest.name;
    match assembly.qualified(manifest, &assembly.host()) {
        Ok(model) if model.evidence().grade != Grade::SelfOnly => {
            let grade = model.evidence().grade.name();
            let what = format!("{name} qualified with the grade {grade} and needs no acceptance");
            Err(CommandError::new(what))
        }
        Err(NotQualified::NotAccepted { .. }) if !accepted => {
            Err(CommandError::new(format!("{name} is not accepted")))
        }
        Ok(_) | Err(NotQualified::NotAccepted { .. }) => Ok(()),
        Err(why) => Err(CommandError::new(why)),
    }
}

fn accepted_text(document: &Value) -> String {
    let now = if document["accepted"] == true { "is accepted" } else { "is accepted no more" };
    format!("{} {now}\n", words(&document["name"]))
}

/// Fetches a release as the configuration says.
pub(super) async fn pull(context: &Context, release: String) -> CommandResult<Manifest> {
    let HubSettings { endpoint, token, python, max_download_mib } = context.config.hub.clone();
    let max_bytes = max_download_mib << 20;
    let options = FetchOptions { endpoint, token, python, max_bytes, ..FetchOptions::default() };
    with_bytes(context, format!("fetching {release}"), move |catalogue, on_bytes| {
        catalogue.pull(&release, &inspect, &options, on_bytes)
    })
    .await
}

/// Adds a file or folder of this machine.
pub(super) async fn add(
    context: &Context,
    path: PathBuf,
    name: Option<String>,
) -> CommandResult<Manifest> {
    let what = format!("reading {}", path.display());
    with_bytes(context, what, move |catalogue, on_bytes| {
        catalogue.add(&path, name.as_deref(), &inspect, on_bytes)
    })
    .await
}

type OnProgress<'a> = &'a mut dyn FnMut(FetchProgress);

/// Runs blocking work on the catalogue with a bar over its bytes.
async fn with_bytes<T: Send + 'static>(
    context: &Context,
    what: String,
    work: impl FnOnce(&Catalogue, OnProgress) -> cresset_catalogue::Result<T> + Send + 'static,
) -> CommandResult<T> {
    let reserve = context.config.requests.min_free_mib << 20;
    let catalogue = Catalogue::new(&context.data_dir).leaving_free(reserve);
    let blocking = tokio::task::spawn_blocking(move || {
        let mut progress = TaskProgress::bytes(what.clone());
        work(&catalogue, &mut |at: FetchProgress| {
            let FetchProgress { file, done, total, phase } = at;
            match phase {
                FetchPhase::Transfer => progress.phase(what.clone()),
                FetchPhase::Anew => progress.phase(format!("fetching {file} from its beginning")),
                FetchPhase::Check => progress.phase(format!("checking {file}")),
            }
            progress.at(done, total);
        })
    });
    Ok(blocking.await.map_err(CommandError::new)??)
}

/// The state of each release on this machine. `loaded` are the models that the running node has in
/// memory, if there is one.
fn list(assembly: &Assembly, loaded: &[ModelId]) -> CommandResult<Value> {
    let (catalogue, host) = (assembly.catalogue(), assembly.host());
    let rows = catalogue
        .manifests()?
        .iter()
        .map(|manifest| row(&catalogue, manifest, assembly.qualified(manifest, &host), loaded))
        .collect::<Result<Vec<_>, cresset_catalogue::Error>>()?;
    Ok(json!({ "models": rows, "parts": catalogue.parts()? }))
}

fn row(
    catalogue: &Catalogue,
    manifest: &Manifest,
    qualification: Result<QualifiedModel, NotQualified>,
    loaded: &[ModelId],
) -> Result<Value, cresset_catalogue::Error> {
    let evidence = qualification.as_ref().ok().map(QualifiedModel::evidence);
    let (grade, acceptance) =
        (evidence.map(|e| e.grade), evidence.and_then(|e| e.acceptance.clone()));
    let record = match &qualification {
        Ok(model) => catalogue
            .records(&manifest.name)?
            .into_iter()
            .find(|r| r.id.to_string() == model.record_id()),
        Err(_) => None,
    };
    let mut row = summary(manifest);
    row["pulled"] = catalogue.is_pulled(manifest).into();
    row["qualified"] = qualification.is_ok().into();
    row["qualified_at"] = record.as_ref().map(|record| record.finished_at).into();
    if let Ok(model) = &qualification {
        row["qualified_context_tokens"] = model.qualified_context_tokens().into();
        row["context_failure"] = model.failed_context().map(FailedContext::to_string).into();
        row["proof_ends_at"] = model.proof_ends_at().into();
    }
    row["grade"] = json!(grade);
    row["accepted_at"] = json!(acceptance.as_ref().map(|found| found.at));
    row["accepted_because"] = json!(acceptance.map(|found| found.reason));
    row["record_id"] = record.map(|record| record.id.to_string()).into();
    row["not_qualified_because"] = qualification.err().map(|why| why.to_string()).into();
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
        "claimed_by_file": !manifest.is_published(),
        "release_id": manifest.release_id,
        "release_label": manifest.release_label,
        "bytes": manifest.bytes(),
        "model_context_tokens": manifest.limits.model_context_tokens,
    })
}

fn with_card(context: &Context, catalogue: &Catalogue, manifest: &Manifest) -> Value {
    let mut document = summary(manifest);
    document["card"] = card(catalogue, manifest, &context.config.engine);
    document
}

/// The release's description from the headers of its files; null while they are not here.
/// Its figures for a GPU follow from the engine's settings.
fn card(catalogue: &Catalogue, manifest: &Manifest, engine: &EngineSettings) -> Value {
    let source = catalogue.source(manifest).ok();
    let Some(card) = source.and_then(|source| cresset_node::card(&source).ok()) else {
        return Value::Null;
    };
    let gpu = GpuMemory::of(&card, engine);
    json!({
        "architecture": card.architecture,
        "parameters": card.parameters(),
        "quantisation": card.main_type(),
        "parameters_by_type": card.types,
        "layers": card.config.layers,
        "vocabulary": card.config.vocab_size,
        "context_tokens": card.config.max_positions,
        "chat_template": "in its files",
        "cpu_weight_bytes": card.cpu_bytes,
        "cpu_cache_bytes_per_token": card.config.block_bytes(1),
        "cpu_cache_bytes_of_context": cpu_context_bytes(&card, engine),
        "cpu_state_bytes_per_sequence": card.config.state_bytes(),
        "gpu_weight_bytes": gpu.weight_bytes,
        "gpu_cache_bytes_per_token": gpu.token_bytes,
        "gpu_cache_bytes_of_context": gpu.context_bytes,
        "gpu_kv_dtype": gpu.kv_dtype,
    })
}

fn card_text(card: &Value) -> String {
    if card.is_null() {
        return String::new();
    }
    let number = |name: &str| card[name].as_u64().unwrap_or(0);
    let millions = number("parameters") as f64 / 1e6;
    let memory = |device: &str, kept: &str| {
        let a_token = number(&format!("{device}_cache_bytes_per_token"));
        format!(
            "{} of weights, {:.1} KiB of cache a token{kept}, up to {} at its context",
            text::mebibytes(number(&format!("{device}_weight_bytes"))),
            a_token as f64 / 1024.0,
            text::mebibytes(number(&format!("{device}_cache_bytes_of_context"))),
        )
    };
    let rows = [
        ("architecture", format!("{}, {} layers", words(&card["architecture"]), number("layers"))),
        ("parameters", format!("{millions:.1} million, mostly {}", words(&card["quantisation"]))),
        ("context", format!("{} tokens", number("context_tokens"))),
        ("chat template", words(&card["chat_template"])),
        ("memory on a CPU", memory("cpu", "")),
        ("memory on a GPU", memory("gpu", &format!(" in {}", words(&card["gpu_kv_dtype"])))),
    ];
    rows.iter().fold(String::new(), |out, (label, value)| out + &format!("{label:<18} {value}\n"))
}

/// How far the context of a qualified release is proven, and what failed beyond that.
fn context(row: &Value) -> String {
    let Some(proven) = row["qualified_context_tokens"].as_u64() else { return String::new() };
    let own = row["model_context_tokens"].as_u64().filter(|own| *own > proven);
    let own = own.map(|own| format!(" of {own}")).unwrap_or_default();
    let failed = row["context_failure"].as_str().map(|why| format!("; {why}")).unwrap_or_default();
    format!(", context {proven}{own}{failed}")
}

fn list_text(document: &Value) -> String {
    let mut out = String::new();
    for row in document["models"].as_array().into_iter().flatten() {
        let states = ["pulled", "qualified", "loaded"].into_iter().filter(|key| row[*key] == true);
        let states: Vec<&str> = states.collect();
        let states = if states.is_empty() { "known".to_owned() } else { states.join(", ") };
        let grade = row["grade"].as_str().map(|grade| format!(", grade {grade}"));
        let states = states + &grade.unwrap_or_default() + &context(row);
        let mib = row["bytes"].as_u64().unwrap_or_default() >> 20;
        let _ = writeln!(out, "{:<32} {:>7} MiB  {states}", words(&row["name"]), mib);
        if let Some(why) = row["not_qualified_because"].as_str().filter(|_| row["pulled"] == true) {
            let _ = writeln!(out, "  {why}");
        }
    }
    for (name, bytes) in document["parts"].as_object().into_iter().flatten() {
        let mib = bytes.as_u64().unwrap_or_default() >> 20;
        let _ = writeln!(out, "{name:<32} {mib:>7} MiB  part of a pull that was interrupted");
        let _ = writeln!(out, "  pull it again to go on, or free it: cresset models remove {name}");
    }
    out
}

fn pulled_text(document: &Value) -> String {
    let name = words(&document["name"]);
    let card = card_text(&document["card"]);
    format!("{card}{name} is here, its digests are right. Next: cresset qualify {name}\n")
}

fn added_text(document: &Value) -> String {
    let name = words(&document["name"]);
    let card = card_text(&document["card"]);
    format!("{card}{name} is added. Next: cresset qualify {name}\n")
}

fn removed_text(document: &Value) -> String {
    format!("{} is removed, files and records\n", words(&document["name"]))
}

/// The release's whole manifest and its records, newest first.
fn show(catalogue: &Catalogue, wanted: &str, engine: &EngineSettings) -> CommandResult<Value> {
    let manifest = catalogue.find(wanted)?;
    let records: Vec<Value> = catalogue.records(&manifest.name)?.iter().map(record_line).collect();
    let mut document =
        serde_json::to_value(&manifest).expect("invariant: a manifest is representable in JSON");
    document["pulled"] = catalogue.is_pulled(&manifest).into();
    document["card"] = card(catalogue, &manifest, engine);
    document["records"] = records.into();
    document["claimed_by_file"] = (!manifest.is_published()).into();
    let acceptances = catalogue.acceptances(&manifest.name)?;
    document["acceptances"] = acceptances
        .iter()
        .map(|a| json!({ "accepted": a.accepted, "reason": a.reason, "at": a.at }))
        .collect();
    Ok(document)
}

fn record_line(record: &Record) -> Value {
    json!({
        "id": record.id,
        "verdict": record.verdict,
        "suite": record.suite,
        "grade": record.grade,
        "like": record.like,
        "finished_at": record.finished_at,
        "qualified_context_tokens": record.qualified_context_tokens,
        "failed": record.failed_checks().map(|check| check.id.as_str()).collect::<Vec<_>>(),
    })
}

fn show_text(document: &Value) -> String {
    let mut out = String::new();
    let line = |out: &mut String, label: &str, value: &Value| {
        let _ = writeln!(out, "{label:<18} {}", words(value));
    };
    line(&mut out, "name", &document["name"]);
    line(&mut out, "id", &document["id"]);
    line(&mut out, "release", &document["release_label"]);
    let claimed = document["claimed_by_file"] == true;
    let claimed = if claimed { " (claimed by the file)" } else { "" };
    let parties = [
        ("publisher", &document["publisher"]),
        ("upstream", &document["upstream"]["name"]),
        ("license", &document["upstream"]["license"]),
    ];
    for (label, value) in parties {
        line(&mut out, label, &format!("{}{claimed}", words(value)).into());
    }
    line(&mut out, "context tokens", &document["limits"]["model_context_tokens"]);
    line(&mut out, "pulled", &document["pulled"]);
    for file in document["files"].as_array().into_iter().flatten() {
        line(
            &mut out,
            "file",
            &format!("{} sha256 {}", words(&file["name"]), words(&file["sha256"])).into(),
        );
    }
    out.push_str(&card_text(&document["card"]));
    for record in document["records"].as_array().into_iter().flatten() {
        let [id, suite, verdict, grade] =
            ["id", "suite", "verdict", "grade"].map(|name| words(&record[name]));
        line(&mut out, "record", &format!("{id} {suite} {verdict}, grade {grade}").into());
    }
    for statement in document["acceptances"].as_array().into_iter().flatten() {
        let now = if statement["accepted"] == true { "accepted" } else { "revoked" };
        line(&mut out, now, &statement["reason"]);
    }
    out
}

/// A value as text; strings without their quotes.
fn words(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), text::plain)
}

#[cfg(test)]
mod tests {
    use super::*;
    use cresset_engine::KvTypeSetting;
    use cresset_models::testing::TinyLlama;
    use cresset_node::config::Config;

    #[test]
    fn a_fresh_data_folder_knows_the_default_release() {
        let data = tempfile::tempdir().unwrap();
        let assembly = Assembly::new(data.path().to_owned(), Config::default()).unwrap();
        let document = list(&assembly, &[]).unwrap();
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
        let shown = show_text(
            &show(&assembly.catalogue(), "smollm2-135m-instruct", &EngineSettings::default())
                .unwrap(),
        );
        assert!(shown.contains("Apache-2.0") && shown.contains("b179c952"), "{shown}");
    }

    #[test]
    fn a_card_tells_the_memory_that_the_settings_lead_to() {
        let data = tempfile::tempdir().unwrap();
        let (file, catalogue) = (data.path().join("tiny.gguf"), Catalogue::new(data.path()));
        std::fs::write(&file, TinyLlama::default().gguf().to_bytes()).unwrap();
        let manifest = catalogue.add(&file, None, &inspect, &mut |_| {}).unwrap();
        let text = |kv_dtype| {
            let engine = EngineSettings { kv_dtype, ..EngineSettings::default() };
            card_text(&card(&catalogue, &manifest, &engine))
        };
        let (auto, fp8) = (text(KvTypeSetting::Auto), text(KvTypeSetting::Fp8));
        let line =
            |text: &str, device| text.lines().find(|line| line.contains(device)).map(str::to_owned);
        assert!(auto.contains(" of cache a token in bf16, up to "), "{auto}");
        assert!(fp8.contains(" of cache a token in fp8 (e4m3), up to "), "{fp8}");
        assert_eq!(line(&auto, "on a CPU"), line(&fp8, "on a CPU"));
        assert_ne!(line(&auto, "on a GPU"), line(&fp8, "on a GPU"));
    }

    #[test]
    fn an_unknown_name_lists_the_known_ones() {
        let data = tempfile::tempdir().unwrap();
        let error = show(&Catalogue::new(data.path()), "gpt", &EngineSettings::default())
            .unwrap_err()
            .to_string();
        assert!(error.contains("\"gpt\"") && error.contains("smollm2-135m-instruct"), "{error}");
    }
}
