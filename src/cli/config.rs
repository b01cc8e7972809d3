//! `cresset config`: every key with its value and where it came from, whether a file is right, and
//! its schema.

use super::support::context::{Globals, data_dir, load_config};
use super::support::logging;
use super::support::output::{CommandResult, Output, Style, style};
use clap::Subcommand;
use cresset_api::openapi::document;
use cresset_node::config::{Config, LoadedConfig};
use serde_json::{Value, json};
use std::fmt::Write;

#[derive(Debug, Subcommand)]
#[command(
    after_help = "Precedence: flags, then CRESSET_… variables, then the file, then the defaults.
  CRESSET_ENGINE__KV_MIB=512 cresset config show"
)]
pub(super) enum ConfigCommand {
    /// Show every key: what it is for, its value, and where that came from
    Show,
    /// Check the configuration without starting anything
    Check,
    /// Print the JSON Schema of the configuration file
    Schema,
    /// Print the OpenAPI document of the public HTTP surface, as this configuration makes it
    Openapi,
}

pub(super) fn run(globals: &Globals, command: &ConfigCommand) -> CommandResult {
    let output = Output { json: globals.json };
    if let ConfigCommand::Schema = command {
        return output.result(&Config::schema(), |schema| format!("{schema:#}\n"));
    }
    let loaded = load_config(globals, &data_dir(globals)?, &[])?;
    match command {
        ConfigCommand::Openapi => {
            output.result(&document(&loaded.config.api()), |document| format!("{document:#}\n"))
        }
        ConfigCommand::Check => {
            output.result(&check(&loaded)?, |_| "the configuration is sound\n".to_owned())
        }
        _ => output.result(&json!({ "object": "list", "data": loaded.rows() }), listing),
    }
}

fn check(loaded: &LoadedConfig) -> CommandResult<Value> {
    logging::filter(&loaded.config.log)?;
    Ok(json!({ "ok": true, "keys_set": loaded.origins.len() }))
}

fn listing(document: &Value) -> String {
    let rows = document["data"].as_array().map_or(&[][..], Vec::as_slice);
    let word = |row: &Value, name: &str| row[name].as_str().unwrap_or_default().to_owned();
    rows.iter().fold(String::new(), |mut out, row| {
        let about = word(row, "description").replace('\n', "\n# ");
        let comment = style(Style::Dim, &format!("# {about}"));
        let _ = writeln!(
            out,
            "{comment}\n{} = {}  ({})\n",
            word(row, "key"),
            row["value"],
            word(row, "origin")
        );
        out
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_line_of_a_description_is_a_comment() {
        let row = json!({ "key": "a", "value": 1, "origin": "default", "description": "one\ntwo" });
        let text = listing(&json!({ "data": [row] }));
        assert_eq!(text, "# one\n# two\na = 1  (default)\n\n");
    }
}
