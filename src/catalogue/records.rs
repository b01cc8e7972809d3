//! The records of releases on disk: one file each, signed, the newest last by name.

use super::{Error, Result, folder, node_key};
use cresset_qualification::{Identity, Record, Verdict, statement};
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// Seconds that a record may be ahead of the clock: clocks are set right while a node runs.
pub(super) const CLOCK_SLACK_SECONDS: u64 = 300;

/// Records kept per release; saving another one deletes the oldest of those that decide nothing.
const KEPT_RECORDS: usize = 16;
/// Records kept per release at most, whatever they decide.
const MOST_RECORDS: usize = 64;

/// A file of a release's records: the record, or why it counts for nothing.
pub(super) struct StoredRecord {
    pub file: String,
    pub content: Result<Record, String>,
}

pub(super) fn save(data: &Path, record: &Record) -> Result<PathBuf> {
    let folder = folder_of(data, &record.identity.release.name);
    fs::create_dir_all(&folder).map_err(Error::io("create", &folder))?;
    let path = folder.join(format!("{}.json", record.id));
    folder::write_whole(&path, &statement::sign(record, &node_key::find_or_make(data)?))?;
    let all = stored(data, &record.identity.release.name)?;
    for old in needless(&all) {
        let old = folder.join(old);
        fs::remove_file(&old).map_err(Error::io("remove", &old))?;
    }
    Ok(path)
}

/// The files that go, of all of a release, newest first. What decides for a build or a setting
/// stays, so that a node goes on with its own records while another build qualifies beside it.
fn needless(all: &[StoredRecord]) -> Vec<&str> {
    let (mut seen, mut gone) = (Vec::new(), Vec::new());
    for (place, StoredRecord { file, content }) in all.iter().enumerate() {
        let decides = content.as_ref().is_ok_and(|record| decides(record, &mut seen));
        if place >= MOST_RECORDS || (place >= KEPT_RECORDS && !decides) {
            gone.push(file.as_str());
        }
    }
    gone
}

/// Whether a record may decide about its identity: it is the newest of its suite, and none that did
/// not qualify came after it.
fn decides<'a>(record: &'a Record, seen: &mut Vec<(&'a Identity, BTreeSet<&'a str>)>) -> bool {
    let known = seen.iter().position(|(id, _)| id.difference(&record.identity).is_none());
    let at = known.unwrap_or_else(|| {
        seen.push((&record.identity, BTreeSet::new()));
        seen.len() - 1
    });
    let suites = &mut seen[at].1;
    if suites.contains(CLOSED) {
        return false;
    }
    if record.verdict != Verdict::Qualified {
        suites.insert(CLOSED);
    }
    suites.insert(&record.suite)
}

/// Stands beside the names of suites for: older records of this identity decide nothing.
const CLOSED: &str = "closed";

/// All records of a release, newest first.
pub(super) fn stored(data: &Path, name: &str) -> Result<Vec<StoredRecord>> {
    let key = node_key::find(data)?.map(|key| key.verifying_key());
    let files = record_files(&folder_of(data, name))?.into_iter();
    files
        .map(|path| {
            let text = fs::read(&path).map_err(Error::io("read", &path))?;
            let content = match &key {
                Some(key) => statement::verify(&text, key).map_err(|why| why.to_string()),
                None => Err("this node has signed none yet".into()),
            };
            let file = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            if let Err(why) = &content {
                tracing::warn!(path = %path.display(), why, "passing over a qualification record");
            }
            Ok(StoredRecord { file, content })
        })
        .collect()
}

pub(super) fn folder_of(data: &Path, name: &str) -> PathBuf {
    data.join("qualification").join(name)
}

/// Newest first: record ids are time-ordered.
pub(super) fn record_files(folder: &Path) -> Result<Vec<PathBuf>> {
    files_ending(folder, "json")
}

/// The files of a folder whose names end so, the last names first.
pub(super) fn files_ending(folder: &Path, ending: &str) -> Result<Vec<PathBuf>> {
    if !folder.exists() {
        return Ok(Vec::new());
    }
    let entries = fs::read_dir(folder).map_err(Error::io("list", folder))?;
    let mut paths: Vec<PathBuf> =
        entries.filter_map(|entry| entry.ok().map(|e| e.path())).collect();
    paths.retain(|path| path.extension().is_some_and(|ext| ext == ending));
    paths.sort_unstable_by(|a, b| b.cmp(a));
    Ok(paths)
}

#[cfg(test)]
mod tests {
    use super::*;
    use cresset_qualification::testing::records;

    /// Saves records of one release and returns how many of each build are left.
    fn left(runs: &[(&str, &str, Verdict)]) -> Vec<(String, String)> {
        let data = tempfile::tempdir().unwrap();
        for (build, suite, verdict) in runs {
            let mut record = records::of(*verdict);
            (*build).clone_into(&mut record.identity.host.engine.executable_sha256);
            (*suite).clone_into(&mut record.suite);
            save(data.path(), &record).unwrap();
        }
        let all = stored(data.path(), "fake").unwrap().into_iter();
        all.map(|stored| stored.content.unwrap())
            .map(|record| (record.identity.host.engine.executable_sha256, record.suite))
            .collect()
    }

    #[test]
    fn another_builds_runs_leave_the_records_that_decide_for_this_one() {
        let mut runs = vec![
            ("old", "full", Verdict::Qualified),
            ("old", "quick", Verdict::Qualified),
            ("failed", "full", Verdict::Qualified),
            ("failed", "quick", Verdict::Failed),
        ];
        runs.extend([("new", "quick", Verdict::Qualified); KEPT_RECORDS + 3]);
        let left = left(&runs);
        let of = |build: &str| -> Vec<&str> {
            left.iter().filter(|(of, _)| of == build).map(|(_, suite)| suite.as_str()).collect()
        };
        assert_eq!(of("old"), ["quick", "full"]);
        assert_eq!(of("failed"), ["quick"], "what came before a failure decides nothing");
        assert_eq!(of("new").len(), KEPT_RECORDS);
    }

    /// Sixteen quick runs took the full one's limits away.
    #[test]
    fn quick_runs_leave_the_full_one_before_them() {
        let mut runs = vec![("own", "full", Verdict::Qualified)];
        runs.extend([("own", "quick", Verdict::Qualified); KEPT_RECORDS + 3]);
        assert_eq!(left(&runs).last().unwrap().1, "full");
    }
}
