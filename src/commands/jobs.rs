//! Long work on models beside the node: each job is this program's own command in a process of its
//! own, so that its faults and its memory end with it, and it does what the command line does.

use super::error::AdminError;
use cresset_base::UnixMillis;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::collections::VecDeque;
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::Arc;
use tokio::io::{AsyncBufReadExt, AsyncRead, BufReader};
use tokio::process::{Child, Command};
use tokio_util::sync::CancellationToken;

/// Jobs that are shown, the running one among them.
const KEPT_JOBS: usize = 10;
/// Lines of a job that are kept, the latest ones.
const KEPT_LINES: usize = 200;

/// What can be done with models from afar. Names are those of releases.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "job", rename_all = "snake_case")]
pub enum ModelJob {
    /// Fetches a known release, or a repository of the model hub.
    Pull {
        release: String,
    },
    /// Adds a file or folder of the node's machine.
    Add {
        path: PathBuf,
        name: Option<String>,
    },
    Qualify {
        release: String,
        full: bool,
    },
    Accept {
        release: String,
        reason: String,
    },
    Remove {
        release: String,
    },
}

impl ModelJob {
    /// The job as somebody else than the node's own user may give it: what it adds lies in one of
    /// `folders`, links followed. The refusal tells nothing of the file.
    pub(super) fn within(self, folders: &[PathBuf]) -> Result<Self, AdminError> {
        let Self::Add { path, name } = self else { return Ok(self) };
        let whole = path.canonicalize().ok().filter(|path| {
            let mut all = folders.iter().filter_map(|folder| folder.canonicalize().ok());
            all.any(|folder| path.starts_with(folder))
        });
        let text = "models are added from the page or another machine only from the folders of \
                    listen.operator_folders, which the node's user sets, or by `cresset models \
                    add` on the node's machine";
        let path = whole.ok_or_else(|| AdminError::Forbidden(text.into()))?;
        Ok(Self::Add { path, name })
    }

    /// The command line that does it. A name that looks like a flag is refused, not obeyed.
    fn arguments(&self) -> Vec<String> {
        let line: Vec<&str> = match self {
            Self::Pull { release } => vec!["models", "pull", "--", release],
            Self::Add { path, name } => {
                let path = path.to_str().unwrap_or_default();
                let path = format!("--path={path}");
                let name = name.as_ref().map(|name| format!("--name={name}"));
                let words = ["models".to_owned(), "add".to_owned(), path];
                return words.into_iter().chain(name).collect();
            }
            Self::Qualify { release, full } => {
                let suite = if *full { "full" } else { "quick" };
                vec!["qualify", "--suite", suite, "--low-priority", "--", release]
            }
            Self::Accept { release, reason } => {
                let reason = format!("--reason={reason}");
                return ["models", "accept", &reason, "--", release].map(str::to_owned).to_vec();
            }
            Self::Remove { release } => vec!["models", "remove", "--", release],
        };
        line.into_iter().map(str::to_owned).collect()
    }
}

/// How this program is called for the node's data folder.
#[derive(Clone, Debug, Default)]
pub struct OwnProgram {
    pub data_dir: PathBuf,
    /// The configuration file, where it is not the data folder's own.
    pub config: Option<PathBuf>,
}

struct ModelJobRun {
    number: u64,
    job: ModelJob,
    began: UnixMillis,
    lines: VecDeque<String>,
    /// The exit code, 0 for success; `None` while it runs.
    ended: Option<i32>,
    stop: CancellationToken,
}

#[derive(Clone, Default)]
pub struct ModelJobs(Arc<Mutex<VecDeque<ModelJobRun>>>);

impl ModelJobs {
    /// Begins a job. One runs at a time: two would slow each other, and the node, down.
    pub(super) fn start(
        &self,
        program: &OwnProgram,
        job: ModelJob,
        now: UnixMillis,
    ) -> Result<Value, AdminError> {
        let mut runs = self.0.lock();
        if let Some(run) = runs.iter().find(|run| run.ended.is_none()) {
            let text = format!("job {} still runs: wait for its end, or stop it", run.number);
            return Err(AdminError::Refused(text));
        }
        let child = spawn(program, &job)
            .map_err(|error| AdminError::Unavailable(format!("the job did not start: {error}")))?;
        let number = runs.back().map_or(1, |run| run.number + 1);
        let (lines, stop) = (VecDeque::new(), CancellationToken::new());
        let run = ModelJobRun { number, job, began: now, lines, ended: None, stop: stop.clone() };
        let told = run.view();
        runs.push_back(run);
        while runs.len() > KEPT_JOBS {
            runs.pop_front();
        }
        tokio::spawn(self.clone().follow(number, child, stop));
        Ok(told)
    }

    pub(super) fn stop(&self, number: u64) -> Result<Value, AdminError> {
        let runs = self.0.lock();
        let found = runs.iter().find(|run| run.number == number && run.ended.is_none());
        let Some(run) = found else {
            return Err(AdminError::NotFound(format!("no job {number} runs")));
        };
        run.stop.cancel();
        Ok(run.view())
    }

    /// The latest first.
    pub(super) fn list(&self) -> Value {
        super::view::list(self.0.lock().iter().rev().map(ModelJobRun::view))
    }

    /// Keeps what the process prints until it ends.
    async fn follow(self, number: u64, mut child: Child, stop: CancellationToken) {
        let (out, err) = (child.stdout.take(), child.stderr.take());
        let printed = async {
            tokio::join!(self.keep_lines(number, out), self.keep_lines(number, err));
        };
        if stop.run_until_cancelled(printed).await.is_none() {
            self.change(number, |run| run.lines.push_back("stopped by an operator".into()));
            // It may have ended by itself.
            let _ = child.start_kill();
        }
        let code = child.wait().await.ok().and_then(|status| status.code()).unwrap_or(-1);
        self.change(number, |run| run.ended = Some(code));
    }

    async fn keep_lines(&self, number: u64, source: Option<impl AsyncRead + Unpin>) {
        let Some(source) = source else { return };
        let mut lines = BufReader::new(source).lines();
        while let Ok(Some(line)) = lines.next_line().await {
            self.change(number, |run| {
                if run.lines.len() == KEPT_LINES {
                    run.lines.pop_front();
                }
                run.lines.push_back(line);
            });
        }
    }

    fn change(&self, number: u64, change: impl FnOnce(&mut ModelJobRun)) {
        if let Some(run) = self.0.lock().iter_mut().find(|run| run.number == number) {
            change(run);
        }
    }
}

impl ModelJobRun {
    fn view(&self) -> Value {
        json!({
            "number": self.number,
            "job": self.job,
            "began_at": self.began.seconds(),
            "running": self.ended.is_none(),
            "exit_code": self.ended,
            "lines": self.lines,
        })
    }
}

fn spawn(program: &OwnProgram, job: &ModelJob) -> std::io::Result<Child> {
    let mut command = Command::new(std::env::current_exe()?);
    command.arg("--data-dir").arg(&program.data_dir);
    if let Some(config) = &program.config {
        command.arg("--config").arg(config);
    }
    command.args(job.arguments()).env("NO_COLOR", "1");
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command.kill_on_drop(true).spawn()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_never_flags() {
        let release = || "--json".to_owned();
        for job in [
            ModelJob::Pull { release: release() },
            ModelJob::Qualify { release: release(), full: true },
            ModelJob::Accept { release: release(), reason: "-x".into() },
            ModelJob::Remove { release: release() },
        ] {
            let arguments = job.arguments();
            let end = arguments.iter().position(|word| word == "--").unwrap();
            assert_eq!(arguments[end + 1..], ["--json"], "{arguments:?}");
            assert!(!arguments.contains(&"-x".to_owned()), "{arguments:?}");
        }
        let add = ModelJob::Add { path: "--x".into(), name: Some("--y".into()) };
        assert_eq!(add.arguments(), ["models", "add", "--path=--x", "--name=--y"]);
    }

    #[test]
    fn others_add_only_from_the_folders_that_are_set() {
        let dir = tempfile::tempdir().unwrap();
        let [here, elsewhere] = ["here", "elsewhere"].map(|name| dir.path().join(name));
        for folder in [&here, &elsewhere] {
            std::fs::create_dir(folder).unwrap();
            std::fs::write(folder.join("a.gguf"), "").unwrap();
        }
        std::os::unix::fs::symlink(elsewhere.join("a.gguf"), here.join("link.gguf")).unwrap();
        let add = |path: PathBuf| ModelJob::Add { path, name: None };
        let may = |path| add(path).within(std::slice::from_ref(&here)).is_ok();
        assert!(may(here.join("a.gguf")));
        for path in [
            elsewhere.join("a.gguf"),
            here.join("../elsewhere/a.gguf"),
            here.join("link.gguf"),
            here.join("none.gguf"),
            dir.path().into(),
        ] {
            assert!(!may(path.clone()), "{path:?}");
        }
        assert!(add(here.join("a.gguf")).within(&[]).is_err(), "none is set");
        let pull = ModelJob::Pull { release: "a".into() };
        assert_eq!(pull.clone().within(&[]).unwrap(), pull);
    }
}
