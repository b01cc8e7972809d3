//! `cresset config`: every key with its value and where it came from, whether a file is right, and
//! its schema.

use super::Globals;
use super::context::{data_dir, load_config};
use super::logging;
use super::output::{Output, Result, Style, style};
use crate::config::{Config, LoadedConfig, ValueOrigin};
use crate::server::openapi::document;
use clap::Subcommand;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fmt::Write;

#[derive(Debug, Subcommand)]
#[command(
    after_help = "Precedence: flags, then CRESSET_… variables, then the file, then the defaults.
  CRESSET_ENGINE__KV_MIB=512 cresset config show"
)]
pub enum Settings {
    /// Show every key: what it is for, its value, and where that came from
    Show,
    /// Check the configuration without starting anything
    Check,
    /// Print the JSON Schema of the configuration file
    Schema,
    /// Print the OpenAPI document of the public HTTP surface, as this configuration makes it
    Openapi,
}

pub fn run(globals: &Globals, command: &Settings) -> Result {
    let output = Output { json: globals.json };
    if let Settings::Schema = command {
        return output.result(&Config::schema(), |schema| format!("{schema:#}\n"));
    }
    let loaded = load_config(globals, &data_dir(globals)?, &[])?;
    match command {
        Settings::Openapi => {
            output.result(&document(&loaded.config), |document| format!("{document:#}\n"))
        }
        Settings::Check => {
            output.result(&check(&loaded)?, |_| "the configuration is sound\n".to_owned())
        }
        _ => output.result(&show(&loaded), listing),
    }
}

fn check(loaded: &LoadedConfig) -> Result<Value> {
    logging::filter(&loaded.config.log)?;
    Ok(json!({ "ok": true, "keys_set": loaded.origins.len() }))
}

/// Every key there is, the ones without a value included. Secrets are named but not shown.
fn show(loaded: &LoadedConfig) -> Value {
    let schema = Config::schema();
    let mut values: BTreeMap<String, Value> = BTreeMap::new();
    leaves(&schema, &schema, "", &mut |key| {
        let hidden = loaded.origins.contains_key(key).then(|| json!("(set, not shown)"));
        values.insert(key.to_owned(), hidden.unwrap_or_default());
    });
    values.extend(loaded.entries().into_iter().map(|(key, value, _)| (key, json!(value))));
    let rows = values.into_iter().map(|(key, value)| {
        let origin = loaded.origins.get(&key).unwrap_or(&ValueOrigin::Default);
        json!({ "key": key, "value": value, "origin": shown_origin(origin), "description": description(&schema, &key) })
    });
    json!({ "object": "list", "data": rows.collect::<Vec<_>>() })
}

/// Visits the dotted key of every setting of the schema. What a map's own keys are is for its
/// values to say.
fn leaves(schema: &Value, at: &Value, prefix: &str, visit: &mut impl FnMut(&str)) {
    for (name, property) in at["properties"].as_object().into_iter().flatten() {
        let (key, property) = (format!("{prefix}{name}"), resolve(schema, property));
        if property.get("properties").is_some() {
            leaves(schema, property, &format!("{key}."), visit);
        } else if property.get("additionalProperties").is_none() {
            visit(&key);
        }
    }
}

fn shown_origin(origin: &ValueOrigin) -> String {
    match origin {
        ValueOrigin::Default => "default".to_owned(),
        ValueOrigin::File(path) => path.display().to_string(),
        ValueOrigin::Variable(name) => name.clone(),
        ValueOrigin::Flag => "flag".to_owned(),
    }
}

/// The text of a dotted key: each part is a property, or any name where a section is a map.
fn description(schema: &Value, key: &str) -> Option<String> {
    let found = key.split('.').try_fold(schema, |at, part| {
        let at = resolve(schema, at);
        at["properties"].get(part).or_else(|| at.get("additionalProperties"))
    })?;
    let text =
        found["description"].as_str().or_else(|| resolve(schema, found)["description"].as_str());
    text.map(str::to_owned)
}

fn resolve<'a>(schema: &'a Value, at: &'a Value) -> &'a Value {
    let target =
        at["$ref"].as_str().and_then(|reference| schema.pointer(reference.trim_start_matches('#')));
    target.unwrap_or(at)
}

fn listing(document: &Value) -> String {
    let rows = document["data"].as_array().map_or(&[][..], Vec::as_slice);
    let word = |row: &Value, name: &str| row[name].as_str().unwrap_or_default().to_owned();
    rows.iter().fold(String::new(), |mut out, row| {
        let comment = style(Style::Dim, &format!("# {}", word(row, "description")));
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
