//! The log of what operators did: a file of the data folder with a line for each command that
//! changes something, written before the command is executed (write-ahead), and another line where
//! it failed. It is only ever added to.

use super::command::AdminCommand;
use super::error::AdminError;
use super::role::Role;
use super::roles::{Actor, Need};
use cresset_base::UnixMillis;
use parking_lot::Mutex;
use serde_json::{Value, json};
use std::collections::VecDeque;
use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader, ErrorKind, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use uuid::Uuid;

/// Name of the file in the data folder.
pub const ACTS: &str = "operator-acts.jsonl";

pub(super) struct ActLog {
    path: PathBuf,
    /// One line is written at a time.
    turn: Mutex<()>,
}

impl ActLog {
    /// Ends a line that was cut off when the machine stopped, so that the next one is apart.
    pub(super) fn open(data_dir: &Path) -> io::Result<Self> {
        let path = data_dir.join(ACTS);
        if let Ok(mut file) = OpenOptions::new().read(true).append(true).open(&path) {
            let mut last = [b'\n'];
            if file.seek(SeekFrom::End(-1)).is_ok() {
                file.read_exact(&mut last)?;
            }
            if last != [b'\n'] {
                file.write_all(b"\n")?;
            }
        }
        Ok(Self { path, turn: Mutex::new(()) })
    }

    /// Writes down what is about to be done; the id names it. A command that only reads has none.
    pub(super) fn begin(
        &self,
        actor: &Actor,
        command: &AdminCommand,
        now: UnixMillis,
    ) -> Result<Option<Uuid>, AdminError> {
        if command.need() == Need::Role(Role::Read) {
            return Ok(None);
        }
        let id = Uuid::new_v4();
        let line = json!({ "id": id, "at": now.seconds(), "by": actor.name, "did": command });
        self.write(&line).map(|()| Some(id))
    }

    /// Adds that the command failed, and so changed nothing.
    pub(super) fn failed(&self, id: Uuid, error: &AdminError, now: UnixMillis) {
        let line = json!({ "id": id, "at": now.seconds(), "failed": error.to_string() });
        if let Err(error) = self.write(&line) {
            tracing::error!(%error, "an operator's command failed, and that could not be logged");
        }
    }

    fn write(&self, line: &Value) -> Result<(), AdminError> {
        let _turn = self.turn.lock();
        let file = OpenOptions::new().create(true).append(true).open(&self.path);
        let written = file.and_then(|mut file| {
            file.write_all(format!("{line}\n").as_bytes())?;
            file.sync_data()
        });
        written.map_err(|error| {
            let file = self.path.display();
            AdminError::Unavailable(format!(
                "nothing was done, because {file} cannot be written: {error}"
            ))
        })
    }

    /// The latest `limit` acts, oldest first, each with its failure. A line that was cut off when
    /// the machine stopped is passed over.
    pub(super) fn latest(&self, limit: usize) -> Result<Value, AdminError> {
        let unable = |error: io::Error| {
            AdminError::Unavailable(format!("{} cannot be read: {error}", self.path.display()))
        };
        let mut acts: VecDeque<Value> = VecDeque::new();
        let file = match File::open(&self.path) {
            Ok(file) => file,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(super::view::list([])),
            Err(error) => return Err(unable(error)),
        };
        for line in BufReader::new(file).split(b'\n') {
            let Ok(line) = serde_json::from_slice::<Value>(&line.map_err(unable)?) else {
                continue;
            };
            if line["failed"].is_null() {
                acts.push_back(line);
                if acts.len() > limit {
                    acts.pop_front();
                }
            } else if let Some(act) = acts.iter_mut().rfind(|act| act["id"] == line["id"]) {
                act["failed"] = line["failed"].clone();
            }
        }
        Ok(super::view::list(acts))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn acts_are_kept_with_their_failures_and_reads_are_not() {
        let folder = tempfile::tempdir().unwrap();
        let open = || ActLog::open(folder.path()).unwrap();
        let (log, actor) = (open(), Actor::node_user());
        assert_eq!(log.latest(9).unwrap()["data"], json!([]));
        let price = |input| AdminCommand::ModelPrice {
            name: "a".into(),
            input,
            cached_input: None,
            output: None,
        };
        for reads in [AdminCommand::Status, price(None)] {
            assert_eq!(log.begin(&actor, &reads, UnixMillis(0)).unwrap(), None);
        }
        assert_eq!(price(Some(1)).need(), Need::Role(Role::Money));
        let begin =
            |at| open().begin(&actor, &AdminCommand::Reload, UnixMillis(at)).unwrap().unwrap();
        let first = begin(1_000);
        begin(2_000);
        log.failed(first, &AdminError::Invalid("why".into()), UnixMillis(1_500));
        OpenOptions::new()
            .append(true)
            .open(folder.path().join(ACTS))
            .and_then(|mut file| file.write_all(b"{\"id\":"))
            .unwrap();
        let log = open();
        begin(3_000);
        let acts = log.latest(9).unwrap();
        let told = |index: usize, name: &str| acts["data"][index][name].clone();
        assert_eq!([told(0, "at"), told(0, "failed")], [json!(1), json!("why")]);
        assert_eq!([told(1, "at"), told(1, "failed")], [json!(2), Value::Null]);
        assert_eq!(told(1, "did"), json!({ "command": "reload" }));
        assert_eq!(told(2, "at"), json!(3), "it is apart from a line that was cut off");
        assert_eq!(log.latest(1).unwrap()["data"].as_array().unwrap().len(), 1);
        std::fs::remove_dir_all(folder.path()).unwrap();
        assert!(log.begin(&actor, &AdminCommand::Reload, UnixMillis(0)).is_err());
    }
}
