//! `cresset goldens`: reference outputs of releases, beside those that are built in.

mod make;

use super::support::context::Context;
use super::support::output::CommandResult;
use super::support::text;
use clap::Subcommand;
use cresset_catalogue::Catalogue;
use cresset_qualification::{Goldens, GoldensOrigin};
use serde_json::{Value, json};
use std::path::PathBuf;

#[derive(Debug, Subcommand)]
#[command(after_help = "Examples:
  cresset goldens make ./model.gguf --name my-release --by 'ACME, Berlin' --out .
  cresset goldens import my-release.goldens && cresset qualify my-release --suite full
  cresset goldens list")]
pub(super) enum GoldensCommand {
    /// Compute a release's reference outputs with transformers and llama.cpp, both in f32
    Make(make::Arguments),
    /// Have `cresset qualify` compare with the reference outputs of this archive
    Import {
        /// A file that `cresset goldens make` wrote
        #[arg(value_name = "FILE")]
        archive: PathBuf,
    },
    /// Show the reference outputs that are at hand
    List,
}

pub(super) async fn run(context: &Context, command: GoldensCommand) -> CommandResult {
    let catalogue =
        Catalogue::new(&context.data_dir).leaving_free(context.config.requests.min_free_mib << 20);
    match command {
        GoldensCommand::Make(arguments) => make::run(context, arguments).await,
        GoldensCommand::Import { archive } => {
            let origin = catalogue.import_goldens(&archive)?;
            context.output.result(&describe(&origin), |shown| {
                let release = &origin.release;
                format!("{}compare with: cresset qualify {release}\n", text::fields(shown))
            })
        }
        GoldensCommand::List => {
            let all = Goldens::built_in().chain(catalogue.imported_goldens()?);
            let all: Vec<Value> = all.map(|goldens| describe(&goldens.origin)).collect();
            let columns = ["release", "positions", "made_by", "made_at", "built_in", "sha256"];
            context.output.result(&json!({ "data": all }), |shown| text::table(shown, &columns))
        }
    }
}

fn describe(origin: &GoldensOrigin) -> Value {
    serde_json::to_value(origin).expect("invariant: it has only names and numbers")
}
