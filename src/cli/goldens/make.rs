//! Runs the scripts that make goldens, in a Python environment of their own.

use crate::support::context::Context;
use crate::support::output::{CommandError, CommandResult, note};
use clap::Args;
use cresset_qualification::goldens::{MAKER, REQUIREMENTS};
use serde_json::json;
use std::ffi::OsStr;
use std::fs;
use std::io::{BufRead, BufReader, ErrorKind};
use std::path::{Path, PathBuf, absolute};
use std::process::{Command, Stdio};

#[derive(Args, Debug)]
pub(crate) struct Arguments {
    /// A GGUF file, or a folder in Hugging Face layout
    #[arg(value_name = "GGUF_OR_FOLDER")]
    model: PathBuf,
    /// The release's name [default: that of the file]
    #[arg(long)]
    name: Option<String>,
    /// A folder with the publisher's tokenizer.json [default: made from the GGUF file]
    #[arg(long, value_name = "FOLDER")]
    tokenizer: Option<PathBuf>,
    /// Who makes them; the record of a qualification says so
    #[arg(long, value_name = "TEXT")]
    by: Option<String>,
    /// Positions of texts whose distributions are kept
    #[arg(long, value_name = "NUMBER", value_parser = clap::value_parser!(u32).range(384..=65_536))]
    positions: Option<u32>,
    /// The folder for the archives
    #[arg(long, value_name = "FOLDER", default_value = ".")]
    out: PathBuf,
    /// The Python to use, 3.11 or later
    #[arg(long, value_name = "PROGRAM", default_value = "python3")]
    python: PathBuf,
}

pub(crate) async fn run(context: &Context, arguments: Arguments) -> CommandResult {
    let place = context.data_dir.join("goldens").join("maker");
    let out = absolute(&arguments.out)?;
    let made = tokio::task::spawn_blocking(move || make(&place, &arguments));
    made.await.map_err(CommandError::new)??;
    let document = json!({ "folder": out });
    context.output.result(&document, |_| {
        format!("The archives are in {}. Next: cresset goldens import FILE\n", out.display())
    })
}

fn make(place: &Path, arguments: &Arguments) -> CommandResult {
    let model = absolute(&arguments.model)?;
    if !model.exists() {
        return Err(CommandError::new(format!("{} does not exist", model.display())));
    }
    fs::create_dir_all(&arguments.out)?;
    let python = environment(place, &arguments.python)?;
    let mut script = Command::new(python);
    script.arg(place.join("goldens/make_goldens.py")).args([model, absolute(&arguments.out)?]);
    let tokenizer = arguments.tokenizer.as_ref().map(absolute).transpose()?;
    let positions = arguments.positions.map(|number| number.to_string());
    for (flag, value) in [
        ("--name", arguments.name.as_deref().map(OsStr::new)),
        ("--by", arguments.by.as_deref().map(OsStr::new)),
        ("--tokenizer", tokenizer.as_deref().map(Path::as_os_str)),
        ("--positions", positions.as_deref().map(OsStr::new)),
    ] {
        script.args(value.into_iter().flat_map(|value| [OsStr::new(flag), value]));
    }
    follow(&mut script, "the reference was not computed")
}

/// Writes the scripts, makes the environment unless an earlier run made it with the same packages,
/// and returns its Python.
fn environment(place: &Path, python: &Path) -> CommandResult<PathBuf> {
    for (name, content) in MAKER {
        let path = place.join(name);
        path.parent().map_or(Ok(()), fs::create_dir_all)?;
        fs::write(path, content)?;
    }
    let (venv, ready) = (place.join("venv"), place.join("venv/ready"));
    let own = venv.join("bin/python");
    let wanted = REQUIREMENTS.map(|name| fs::read_to_string(place.join(name)).unwrap_or_default());
    let wanted = wanted.concat();
    if fs::read_to_string(&ready).is_ok_and(|installed| installed == wanted) {
        return Ok(own);
    }
    install(place, &venv, python)?;
    fs::write(ready, wanted)?;
    Ok(own)
}

fn install(place: &Path, venv: &Path, python: &Path) -> CommandResult {
    note("installing the reference's packages, about 3 GiB: this happens once");
    let own = venv.join("bin/python");
    let failed = "the reference's packages could not be installed";
    follow(Command::new(python).args(["-m", "venv", "--clear"]).arg(venv), failed)?;
    for name in REQUIREMENTS {
        let mut pip = Command::new(&own);
        pip.args(["-m", "pip", "install", "--quiet", "--no-deps", "-r"]).arg(place.join(name));
        // llama.cpp is compiled here; what reads images is left out.
        pip.env("CMAKE_ARGS", "-DLLAVA_BUILD=OFF");
        follow(&mut pip, failed)?;
    }
    follow(Command::new(&own).arg(place.join("goldens/stub_cuda.py")), failed)
}

/// Runs a program to its end and shows its lines.
fn follow(command: &mut Command, failed: &str) -> CommandResult {
    let program = command.get_program().to_string_lossy().into_owned();
    let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().map_err(|why| {
        let error = CommandError::new(format!("{failed}: {program}: {why}"));
        match why.kind() {
            ErrorKind::NotFound => error.remedy("install Python 3.11, or name it with --python"),
            _ => error,
        }
    })?;
    let output = child.stdout.take().expect("invariant: it is piped");
    for line in BufReader::new(output).lines().map_while(Result::ok) {
        note(&line);
    }
    let status = child.wait()?;
    if status.success() {
        return Ok(());
    }
    Err(CommandError::new(format!("{failed}: {program} ended with {status}"))
        .remedy("its last lines above say why"))
}
