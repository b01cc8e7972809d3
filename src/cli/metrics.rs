//! `cresset metrics`: what a monitoring system needs beside the metrics themselves.

use super::support::context::Context;
use super::support::output::{CommandError, CommandResult};
use clap::Subcommand;
use serde_json::json;
use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

/// Names and texts of the files.
const FILES: [(&str, &str); 2] = [
    ("cresset-board.json", include_str!("metrics/board.json")),
    ("cresset-alerts.yml", include_str!("metrics/alerts.yml")),
];

#[derive(Debug, Subcommand)]
#[command(after_help = "Example:
  cresset metrics dashboards /etc/cresset
Prometheus reads the metrics at /metrics of the operator's address.")]
pub(super) enum MetricsCommand {
    /// Write a Grafana board and Prometheus alerts into a folder
    Dashboards {
        /// The folder; it is made if it is not there
        #[arg(value_name = "DIR")]
        to: PathBuf,
    },
}

pub(super) fn run(context: &Context, command: MetricsCommand) -> CommandResult {
    let MetricsCommand::Dashboards { to } = command;
    let failed = |error| CommandError::new(format!("{}: {error}", to.display()));
    std::fs::create_dir_all(&to).map_err(failed)?;
    let mut written = Vec::new();
    for (name, text) in FILES {
        let file = to.join(name);
        std::fs::write(&file, text).map_err(failed)?;
        // Nothing in it is secret, and the monitoring system runs as another user.
        std::fs::set_permissions(&file, Permissions::from_mode(0o644)).map_err(failed)?;
        written.push(file.display().to_string());
    }
    context.output.result(&json!({ "written": written }), |_| {
        format!(
            "{}\nimport the first in Grafana, and name the second under rule_files of Prometheus\n",
            written.join("\n")
        )
    })
}
