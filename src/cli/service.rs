//! `cresset service`: the node under a service manager.

use super::support::context::Context;
use super::support::output::{CommandError, CommandResult};
use clap::{Args, Subcommand};
use cresset_engine::DeviceSetting;
use serde_json::json;
use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// Names and texts of the units. What stands between two @ is filled in.
const UNITS: [(&str, &str); 3] = [
    ("cresset.service", include_str!("service/cresset.service")),
    ("cresset-backup.service", include_str!("service/cresset-backup.service")),
    ("cresset-backup.timer", include_str!("service/cresset-backup.timer")),
];
/// Time that the end of a node takes beside the requests that it waits for, seconds.
const STOP_SECONDS: u64 = 60;

/// On the CPU nothing of `/dev` is needed, and no memory is both written and executed.
const WITHOUT_DEVICES: &str = "PrivateDevices=yes\nMemoryDenyWriteExecute=yes";
/// The driver compiles device code into memory of the process.
const WITH_GPU: &str = "DevicePolicy=closed\nDeviceAllow=char-nvidia-frontend rw\n\
                        DeviceAllow=char-nvidia rw\nDeviceAllow=char-nvidia-uvm rw\n\
                        DeviceAllow=char-nvidia-caps rw";

#[derive(Debug, Subcommand)]
#[command(after_help = "Example:
  sudo cresset --data-dir /var/lib/cresset service install --backups /var/backups/cresset
  sudo systemctl daemon-reload
  sudo systemctl enable --now cresset cresset-backup.timer")]
pub(super) enum ServiceCommand {
    /// Write systemd's units for a node on this data folder, and for a daily backup of it
    Install(InstallArguments),
}

#[derive(Args, Debug)]
pub(super) struct InstallArguments {
    /// The user that the node runs as, by name or number [default: the data folder's owner]
    #[arg(long)]
    user: Option<String>,
    /// Folder of the daily backups; it is made if it is not there
    #[arg(long, value_name = "DIR")]
    backups: PathBuf,
    /// Backups to keep; older ones are removed after a new one was written and checked
    #[arg(
        long,
        value_name = "COUNT",
        default_value_t = 14,
        value_parser = clap::value_parser!(u32).range(1..),
    )]
    keep: u32,
    /// The folder that the units are written to
    #[arg(long, value_name = "DIR", default_value = "/etc/systemd/system")]
    units: PathBuf,
}

pub(super) fn run(context: &Context, command: ServiceCommand) -> CommandResult {
    let ServiceCommand::Install(arguments) = command;
    let data = std::path::absolute(&context.data_dir)?;
    let owner = fs::metadata(&data).map_err(|error| {
        CommandError::new(format!("{}: {error}", data.display())).remedy("cresset init")
    })?;
    let user = arguments.user.unwrap_or_else(|| owner.uid().to_string());
    let backups = std::path::absolute(&arguments.backups)?;
    fs::create_dir_all(&backups)?;
    let config = match context.named_config() {
        Some(path) => format!(" --config {}", word(&std::path::absolute(path)?)?),
        None => String::new(),
    };
    let stop = context.config.requests.drain_grace_seconds + STOP_SECONDS;
    let is_cpu = context.config.engine.device == DeviceSetting::Cpu;
    let has_gpu = !is_cpu && Path::new("/dev/nvidiactl").exists();
    let filled = [
        ("@EXECUTABLE@", word(&std::env::current_exe()?)?),
        ("@DATA@", word(&data)?),
        ("@BACKUPS@", word(&backups)?),
        ("@CONFIG@", config),
        ("@USER@", user.clone()),
        ("@KEEP@", arguments.keep.to_string()),
        ("@STOP@", stop.to_string()),
        ("@DEVICES@", if has_gpu { WITH_GPU } else { WITHOUT_DEVICES }.to_owned()),
    ];
    let mut written = Vec::new();
    for (name, text) in UNITS {
        let fill = |text: String, (place, value): &(&str, String)| text.replace(place, value);
        let unit = arguments.units.join(name);
        let failed = |error| CommandError::new(format!("{}: {error}", unit.display()));
        fs::write(&unit, filled.iter().fold(text.to_owned(), fill)).map_err(failed)?;
        fs::set_permissions(&unit, Permissions::from_mode(0o644)).map_err(failed)?;
        written.push(unit.display().to_string());
    }
    let document = json!({ "written": written, "user": user, "backups": backups });
    context.output.result(&document, |_| {
        format!(
            "{}\nThe node runs as user {user}, who must own {} and {}. Next:\n  systemctl \
             daemon-reload\n  systemctl enable --now cresset cresset-backup.timer",
            written.join("\n"),
            data.display(),
            backups.display()
        )
    })
}

/// A path as a unit takes it: in the commands and lists of units, spaces separate and % begins a
/// name.
fn word(path: &Path) -> CommandResult<String> {
    let text = path.to_str().filter(|text| !text.contains([' ', '\t', '\n', '"', '\'', '\\', '$']));
    let text = text.ok_or_else(|| {
        let what = format!(
            "{} cannot stand in a unit: it has a space or a quotation mark",
            path.display()
        );
        CommandError::new(what).remedy("move it to a path without them")
    })?;
    Ok(text.replace('%', "%%"))
}
