//! `cresset upgrade`: another program takes the place of the running node.

use super::support::context::Context;
use super::support::output::{CommandError, CommandResult};
use super::support::progress::TaskProgress;
use super::support::text;
use clap::Args;
use cresset_commands::AdminCommand;
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Between two looks at the nodes.
const BETWEEN_LOOKS: Duration = Duration::from_millis(200);

#[derive(Args, Debug)]
#[command(after_help = "Example:
  ./cresset-new qualify --all --suite full --low-priority && ./cresset-new upgrade

The new program starts with the arguments of the running node and loads its models while that one \
serves, so that the machine needs memory for both. Then it takes the listening sockets: requests \
that arrive from then on wait until the old process has settled what it ran (at most \
requests.drain_grace_seconds), and none is refused. Streams that run longer end as a drain ends \
them; sent again with the same key they are run by the new process. If the new program cannot \
take over, the running node goes on as if nothing had happened.")]
pub(super) struct Arguments {
    /// The new program [default: the one that this command is of]
    #[arg(long, value_name = "FILE")]
    program: Option<PathBuf>,
}

pub(super) async fn run(context: &Context, arguments: Arguments) -> CommandResult {
    let program = match &arguments.program {
        Some(program) => std::path::absolute(program)?,
        None => std::env::current_exe()?,
    };
    let mut progress = TaskProgress::steps("the new program loads its models");
    let answer = context.ask_node(&AdminCommand::Upgrade { program }).await?;
    let Some(answer) = answer else {
        return Err(no_node(&context.data_dir));
    };
    progress.phase("the old process ends what it runs".to_owned());
    let status = ready(context, &answer["pid"]).await?;
    drop(progress);
    context.output.result(&status, |status| {
        let [version, listen] = ["version", "listen"].map(|name| shown(&status[name]));
        format!("version {version} serves at {listen} now, as process {}\n", status["pid"])
    })
}

fn shown(value: &Value) -> String {
    value.as_str().map(text::plain).unwrap_or_default()
}

fn no_node(data_dir: &Path) -> CommandError {
    CommandError::new(format!("no node runs on {}", data_dir.display()))
        .remedy("start the new program with `cresset serve`")
}

/// The status of the process once it serves.
async fn ready(context: &Context, pid: &Value) -> CommandResult<Value> {
    let process = PathBuf::from("/proc").join(pid.to_string());
    loop {
        let status = context.ask_node(&AdminCommand::Status).await.ok().flatten();
        let new = status.filter(|status| status["pid"] == *pid && status["ready"] == true);
        if let Some(status) = new {
            return Ok(status);
        }
        if !process.exists() {
            let what = "the new process took over and has ended";
            return Err(CommandError::new(what)
                .remedy("its log says why; start a node with `cresset serve`"));
        }
        tokio::time::sleep(BETWEEN_LOOKS).await;
    }
}
