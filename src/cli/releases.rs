//! `cresset models` and `cresset qualify`, and the releases that may be served.

use super::load::load;
use super::support::context::Context;
use super::support::output::{Failure, Result, note};
use super::support::progress::Progress;
use super::support::values;
use super::{models, qualify};
use crate::catalogue::{self, Catalogue, Manifest, NotQualified, QualifiedModel};
use crate::clock::{Clock, SystemClock};
use crate::ids::ModelId;
use crate::server::operator::AdminCommand;
use clap::{Args, Subcommand, ValueEnum};
use cresset_qualification::{HostIdentity, Record, Suite, Verdict};
use serde_json::Value;
use std::fmt::Display;
use std::path::PathBuf;

#[derive(Debug, Subcommand)]
#[command(after_help = "Examples:
  cresset models list
  cresset models pull smollm2-135m-instruct
  cresset models add --path ./model.gguf --name mine && cresset qualify mine")]
pub enum Models {
    /// List releases: known, pulled, qualified, loaded
    List,
    /// Fetch a known release, or a repository of the model hub, and check its digests
    Pull {
        /// A release's name, or a repository of the hub: `OWNER/REPOSITORY[/FILE.gguf][@REVISION]`
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
    /// Remove a release's files and records
    Remove {
        /// The release, by name or id
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

#[derive(Args, Debug)]
#[command(after_help = "Example:
  cresset qualify smollm2-135m-instruct --suite full --report report.html")]
pub struct Arguments {
    /// Name or id of a pulled release
    #[arg(value_name = "MODEL")]
    release: String,
    /// Quick takes seconds, full takes minutes and runs the whole context
    #[arg(long, default_value = "quick")]
    suite: SuiteName,
    /// Write a report: HTML, Markdown or JSON, as the file's extension says
    #[arg(long, value_name = "FILE", value_parser = values::report)]
    report: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum SuiteName {
    Quick,
    Full,
}

impl From<SuiteName> for Suite {
    fn from(name: SuiteName) -> Self {
        match name {
            SuiteName::Quick => Self::Quick,
            SuiteName::Full => Self::Full,
        }
    }
}

impl From<catalogue::Error> for Failure {
    fn from(error: catalogue::Error) -> Self {
        Self::new(error)
    }
}

pub async fn run_models(context: &Context, command: Models) -> Result {
    let catalogue = Catalogue::new(&context.data_dir);
    let output = context.output;
    match command {
        Models::List => output.result(&list(context, &catalogue).await?, models::list_text),
        Models::Pull { release } => {
            output.result(&pull(context, release).await?, models::pulled_text)
        }
        Models::Add { path, name } => {
            output.result(&add(context, path, name).await?, models::pulled_text)
        }
        Models::Remove { release } => {
            output.result(&remove(context, &catalogue, &release).await?, models::removed_text)
        }
        Models::Show { release } => {
            output.result(&models::show(&catalogue, &release)?, models::show_text)
        }
    }
}

async fn list(context: &Context, catalogue: &Catalogue) -> Result<Value> {
    let host = qualify::host_of(&context.config)?;
    let max_age = context.config.qualification.max_age_days;
    let loaded = served(context, |model| model["state"] == "loaded").await?;
    Ok(models::list(catalogue, &host, max_age, SystemClock.now(), &loaded)?)
}

/// Models of the running node that are `so`; none where no node runs.
async fn served(context: &Context, so: impl Fn(&Value) -> bool) -> Result<Vec<ModelId>> {
    let status = context.ask_node(&AdminCommand::Status).await?.unwrap_or_default();
    let models = status["models"].as_array().into_iter().flatten().filter(|model| so(model));
    Ok(models.filter_map(|model| model["id"].as_str()?.parse().ok()).collect())
}

/// Not under a node that offers the release to its clients and may load it again.
async fn remove(context: &Context, catalogue: &Catalogue, wanted: &str) -> Result<Value> {
    let manifest = catalogue.find(wanted)?;
    if served(context, |_| true).await?.contains(&manifest.id) {
        let what = format!("{} is served by the node that runs on this data folder", manifest.name);
        return Err(Failure::new(what).remedy("stop the node, then remove the release"));
    }
    Ok(models::remove(catalogue, wanted)?)
}

async fn pull(context: &Context, release: String) -> Result<Value> {
    let options = models::fetch_options(&context.config);
    with_bytes(context, format!("fetching {release}"), move |catalogue, on_bytes| {
        models::pull(catalogue, &release, &options, on_bytes)
    })
    .await
}

async fn add(context: &Context, path: PathBuf, name: Option<String>) -> Result<Value> {
    with_bytes(context, format!("reading {}", path.display()), move |catalogue, on_bytes| {
        models::add(catalogue, &path, name.as_deref(), on_bytes)
    })
    .await
}

type OnProgress<'a> = &'a mut dyn FnMut(catalogue::FetchProgress);

/// Runs blocking work on the catalogue with a bar over its bytes.
async fn with_bytes<T: Send + 'static>(
    context: &Context,
    what: String,
    work: impl FnOnce(&Catalogue, OnProgress) -> Result<T, catalogue::Error> + Send + 'static,
) -> Result<T> {
    let catalogue = Catalogue::new(&context.data_dir);
    let blocking = tokio::task::spawn_blocking(move || {
        let mut progress = Progress::bytes(what);
        let done =
            work(&catalogue, &mut |at: catalogue::FetchProgress| progress.at(at.done, at.total));
        progress.clear();
        done
    });
    Ok(blocking.await.map_err(Failure::new)??)
}

/// A release that does not qualify is a result, and a negative one.
pub async fn run_qualify(context: &Context, arguments: Arguments) -> Result {
    let manifest = Catalogue::new(&context.data_dir).find(&arguments.release)?;
    let record = qualify_release(context, manifest, arguments.suite.into()).await?;
    if let Some(file) = &arguments.report {
        qualify::write_report(&record, file)
            .map_err(|error| Failure::new(format!("the report {}: {error}", file.display())))?;
    }
    context.output.result(&qualify::json(&record), |_| qualify::verdict_text(&record))?;
    if record.verdict == Verdict::Qualified { Ok(()) } else { Err(Failure::Negative) }
}

/// Loads the release's engine, runs the suite over it and keeps the record.
async fn qualify_release(context: &Context, manifest: Manifest, suite: Suite) -> Result<Record> {
    let (catalogue, config) = (Catalogue::new(&context.data_dir), context.config.clone());
    let blocking = tokio::task::spawn_blocking(move || {
        let source = catalogue.source(&manifest)?;
        let loaded = load(&source, &config).map_err(|why| cannot_load(&manifest.name, why))?;
        let mut progress = Progress::steps(format!("qualifying {}", manifest.name));
        let mut on_check =
            |at: cresset_qualification::SuiteProgress| progress.at(at.done as u64, at.total as u64);
        let engine = loaded.engine.clone();
        let record =
            qualify::run(&catalogue, &manifest, &config, suite, engine, loaded.text, &mut on_check);
        progress.clear();
        loaded.engine.shutdown();
        record
    });
    blocking.await.map_err(Failure::new)?
}

pub fn cannot_load(name: &str, why: impl Display) -> Failure {
    Failure::new(format!("cannot load {name}: {why}"))
        .remedy("if its files are damaged, pull or add it again")
}

/// Fetches and qualifies the release where that was not done yet.
pub async fn ensure_qualified(context: &Context, release: &str) -> Result {
    let catalogue = Catalogue::new(&context.data_dir);
    let manifest = catalogue.find(release)?;
    if !catalogue.is_pulled(&manifest) {
        pull(context, release.to_owned()).await?;
        note(&format!("fetched {release}, its digests are right"));
    }
    if qualified(context, &manifest, &qualify::host_of(&context.config)?).is_ok() {
        return Ok(());
    }
    let record = qualify_release(context, manifest, Suite::Quick).await?;
    note(&format!("{release} is {} on this machine", record.verdict.words()));
    if record.verdict == Verdict::Qualified {
        return Ok(());
    }
    note(&qualify::verdict_text(&record));
    Err(Failure::new(format!("{release} did not qualify on this machine and is not served"))
        .remedy(format!("cresset qualify {release} --report report.html shows the evidence")))
}

fn qualified(
    context: &Context,
    manifest: &Manifest,
    host: &HostIdentity,
) -> Result<QualifiedModel, NotQualified> {
    let max_age = context.config.qualification.max_age_days;
    Catalogue::new(&context.data_dir).qualified(manifest, host, max_age, SystemClock.now())
}

/// Every release that is qualified here: first the named ones, which have to be, in their order.
pub fn servable(context: &Context, names: &[String]) -> Result<Vec<QualifiedModel>> {
    let catalogue = Catalogue::new(&context.data_dir);
    let host = qualify::host_of(&context.config)?;
    let prove =
        |name: &String| qualified(context, &catalogue.find(name)?, &host).map_err(Failure::new);
    let mut proven = names.iter().map(prove).collect::<Result<Vec<_>>>()?;
    let mut refused = Vec::new();
    for manifest in
        catalogue.manifests()?.into_iter().filter(|manifest| catalogue.is_pulled(manifest))
    {
        match qualified(context, &manifest, &host) {
            Ok(model) if proven.iter().any(|known| known.id() == model.id()) => {}
            Ok(model) => proven.push(model),
            Err(why) => refused.push(why.to_string()),
        }
    }
    match (proven.is_empty(), refused.as_slice()) {
        (true, []) => Err(Failure::new("there is no model to serve").remedy(
            "fetch one with `cresset models pull NAME` and prove it with `cresset qualify NAME`",
        )),
        (true, all) => Err(Failure::new(format!("there is no model to serve: {}", all.join("; ")))),
        (false, all) => {
            // Who names models knows of the others.
            all.iter()
                .filter(|_| names.is_empty())
                .for_each(|why| note(&format!("not served: {why}")));
            Ok(proven)
        }
    }
}
