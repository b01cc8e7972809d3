//! `cresset serve --requalify`: proves again what was proven for another build or setting. The
//! quick suite runs before the node starts, so that it serves soon, and the full one beside the
//! running node, which then serves with its limits.

use super::qualify;
use super::support::context::Context;
use super::support::output::{CommandResult, note};
use cresset_catalogue::NotQualified;
use cresset_node::Assembly;
use cresset_qualification::Suite;
use std::io;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;
use tokio::task::JoinHandle;

/// Between two looks at a run: short beside a suite, which takes minutes.
const BETWEEN_LOOKS: Duration = Duration::from_millis(500);

/// Runs the quick suite over every release whose record is too old and, with `all`, over those
/// whose record is of another build, hardware or setting. One that does not pass is named and stays
/// unserved; the others are not kept waiting.
pub(super) async fn quick(assembly: &Assembly, all: bool) -> CommandResult {
    let (catalogue, host) = (assembly.catalogue(), assembly.host());
    for manifest in catalogue.manifests()? {
        match assembly.qualified(&manifest, &host) {
            Err(NotQualified::Expired { .. }) => {}
            Err(NotQualified::Differs { .. }) if all => {}
            _ => continue,
        }
        let name = manifest.name.clone();
        let like = qualify::former_sister(&catalogue, &name)?;
        match qualify::run_suite(assembly.clone(), manifest, Suite::Quick, like).await {
            Ok(record) => {
                let (words, tokens) = (record.verdict.words(), record.qualified_context_tokens);
                note(&format!("{name} is {words} by the quick suite, for {tokens} context tokens"));
            }
            Err(why) => note(&format!("{name} could not be qualified: {why}")),
        }
    }
    Ok(())
}

/// The full suites that run beside a node.
pub(super) struct FullSuites(JoinHandle<()>);

impl FullSuites {
    /// Ends the one that runs. It goes on after its last check the next time.
    pub(super) async fn end(self) {
        self.0.abort();
        // It was aborted or has ended.
        let _ = self.0.await;
    }
}

/// Begins the full suite over each release that is served by a quick record, one after the other.
pub(super) fn full(context: &Context) -> CommandResult<FullSuites> {
    let assembly = context.assembly()?;
    let (catalogue, host) = (assembly.catalogue(), assembly.host());
    let mut runs = Vec::new();
    for manifest in catalogue.manifests()? {
        let proven = assembly.qualified(&manifest, &host);
        if let Ok(model) = proven
            && model.evidence().suite != Suite::Full.name()
        {
            let like = model.evidence().like.as_deref();
            runs.push((manifest.name.clone(), command(context, &manifest.name, like)?));
        }
    }
    Ok(FullSuites(tokio::spawn(run_all(runs))))
}

async fn run_all(runs: Vec<(String, Command)>) {
    for (name, command) in runs {
        tracing::info!(name, "the full suite begins, at the lowest priority");
        match run(command).await {
            Ok(status) if status.success() => tracing::info!(name, "the full suite has passed"),
            Ok(status) => {
                let text = "the full suite did not pass: see `cresset qualify NAME --show`";
                tracing::warn!(name, %status, "{text}");
            }
            Err(why) => tracing::warn!(name, %why, "the full suite could not be run"),
        }
    }
}

/// The command that qualifies a release in a process of its own, which tells the node when it is
/// done. A fault of the suite then ends the suite alone.
fn command(context: &Context, name: &str, like: Option<&str>) -> io::Result<Command> {
    let mut command = Command::new(std::env::current_exe()?);
    command.arg("--data-dir").arg(&context.data_dir);
    if let Some(file) = context.named_config() {
        command.arg("--config").arg(file);
    }
    command.args(["qualify", name, "--suite", "full", "--low-priority"]);
    if let Some(sister) = like {
        command.args(["--like", sister]);
    }
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    Ok(command)
}

async fn run(mut command: Command) -> io::Result<ExitStatus> {
    struct EndedWhenDropped(Child);
    impl Drop for EndedWhenDropped {
        fn drop(&mut self) {
            // It may have ended by itself.
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }
    let mut child = EndedWhenDropped(command.spawn()?);
    loop {
        if let Some(status) = child.0.try_wait()? {
            return Ok(status);
        }
        tokio::time::sleep(BETWEEN_LOOKS).await;
    }
}
