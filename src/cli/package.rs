//! `cresset package`: this program as files for other machines, with a script that installs it.

use super::support::context::Context;
use super::support::output::{CommandError, CommandResult};
use clap::Args;
use serde_json::json;
use sha2::{Digest, Sha256};
use std::env::consts::{ARCH, OS};
use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

const INSTALLER: &str = include_str!("package/install.sh");

#[derive(Args, Debug)]
#[command(after_help = "Example:
  cresset package /srv/www/cresset
  sh /srv/www/cresset/install.sh                      installs it on this machine
The folder can be copied to another machine, or served: sh install.sh --from https://…")]
pub(super) struct Arguments {
    /// The folder; it is made if it is not there
    #[arg(value_name = "DIR")]
    to: PathBuf,
}

pub(super) fn run(context: &Context, arguments: &Arguments) -> CommandResult {
    let to = &arguments.to;
    let failed = |error| CommandError::new(format!("{}: {error}", to.display()));
    let program = std::fs::read(std::env::current_exe()?)?;
    let (name, digest) = (format!("cresset-{ARCH}-{OS}"), hex::encode(Sha256::digest(&program)));
    let sums = format!("{digest}  {name}\n");
    let files: [(&str, &[u8], u32); 3] = [
        (&name, &program, 0o755),
        ("SHA256SUMS", sums.as_bytes(), 0o644),
        ("install.sh", INSTALLER.as_bytes(), 0o755),
    ];
    std::fs::create_dir_all(to).map_err(failed)?;
    let mut written = Vec::new();
    for (name, content, mode) in files {
        let file = to.join(name);
        // A file of the name may be a program that runs, which cannot be written into.
        let fresh = to.join(format!(".{name}"));
        std::fs::write(&fresh, content).map_err(failed)?;
        // Nothing in it is secret, and others install from it.
        std::fs::set_permissions(&fresh, Permissions::from_mode(mode)).map_err(failed)?;
        std::fs::rename(&fresh, &file).map_err(failed)?;
        written.push(file.display().to_string());
    }
    let document = json!({ "written": written, "sha256": digest });
    context
        .output
        .result(&document, |_| format!("{}\nSHA-256 of the program: {digest}", written.join("\n")))
}
