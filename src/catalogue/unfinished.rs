//! Qualifications that were interrupted, so that another run goes on after their last check. They
//! are signed as records are: a result that was not measured here is not taken over.

use super::records::folder_of;
use super::{Catalogue, Error, Result, folder, node_key};
use cresset_base::UnixMillis;
use cresset_qualification::envelope::{self, EnvelopeFault};
use cresset_qualification::{Suite, UnfinishedRun};
use std::fs;
use std::io::ErrorKind;
use std::path::PathBuf;

const PAYLOAD_TYPE: &str = "application/vnd.cresset.unfinished-qualification+json";

impl Catalogue {
    /// The run that was interrupted after `not_before` and can go on as `begun` would, or `begun`.
    /// A run whose record was written already is over.
    pub fn unfinished_run(
        &self,
        begun: UnfinishedRun,
        not_before: UnixMillis,
        now: UnixMillis,
    ) -> Result<UnfinishedRun> {
        let (name, suite) = (&begun.identity.release.name, begun.scope.suite);
        let Some(run) = self.kept_run(name, suite)? else { return Ok(begun) };
        let in_time = (not_before.seconds()..=now.seconds()).contains(&run.started_at);
        let written = self
            .records(name)?
            .iter()
            .any(|record| record.suite == suite.name() && record.started_at == run.started_at);
        Ok(if in_time && !written && run.goes_on(&begun) { run } else { begun })
    }

    pub(super) fn kept_run(&self, name: &str, suite: Suite) -> Result<Option<UnfinishedRun>> {
        let path = self.unfinished_path(name, suite);
        let stored = match fs::read(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            read => read.map_err(Error::io("read", &path))?,
        };
        let Some(key) = node_key::find(&self.data)? else { return Ok(None) };
        let opened = envelope::open_json(&stored, PAYLOAD_TYPE, &key.verifying_key());
        let pass_over = |why: &EnvelopeFault| {
            tracing::warn!(path = %path.display(), %why, "passing over an unfinished run");
        };
        Ok(opened.inspect_err(pass_over).ok())
    }

    /// Keeps a run in place of what was kept of one before it.
    pub fn keep_unfinished_run(&self, run: &UnfinishedRun) -> Result<()> {
        let path = self.unfinished_path(&run.identity.release.name, run.scope.suite);
        path.parent().map_or(Ok(()), |folder| {
            fs::create_dir_all(folder).map_err(Error::io("create", folder))
        })?;
        let key = node_key::find_or_make(&self.data)?;
        folder::write_whole(&path, &envelope::seal_json(PAYLOAD_TYPE, run, &key))
    }

    /// Removes what is kept of a run, because its record is written or the run shall begin anew.
    pub fn forget_unfinished_run(&self, name: &str, suite: Suite) -> Result<()> {
        let path = self.unfinished_path(name, suite);
        match fs::remove_file(&path) {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                Err(Error::io("remove", &path)(error))
            }
            _ => Ok(()),
        }
    }

    fn unfinished_path(&self, name: &str, suite: Suite) -> PathBuf {
        folder_of(&self.data, name).join(format!("{}.unfinished", suite.name()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cresset_qualification::Verdict;
    use cresset_qualification::testing::records;

    /// Seconds.
    const NOW: u64 = 1_700_000_000;

    fn run() -> UnfinishedRun {
        let record = records::of(Verdict::Qualified);
        let mut run = UnfinishedRun::begin(record.identity, records::scope(Suite::Quick), None);
        run.started_at = NOW - 100;
        run.checks = record.checks[..3].to_vec();
        run
    }

    fn found(catalogue: &Catalogue, like: &UnfinishedRun) -> Option<UnfinishedRun> {
        let times = [NOW - 3_600, NOW].map(|seconds| UnixMillis(seconds * 1_000));
        let begun = UnfinishedRun { started_at: NOW, checks: Vec::new(), ..like.clone() };
        let run = catalogue.unfinished_run(begun.clone(), times[0], times[1]).unwrap();
        Some(run).filter(|run| *run != begun)
    }

    #[test]
    fn a_run_is_kept_until_it_is_forgotten() {
        let data = tempfile::tempdir().unwrap();
        let (catalogue, run) = (Catalogue::new(data.path()), run());
        assert_eq!(found(&catalogue, &run), None);
        catalogue.keep_unfinished_run(&run).unwrap();
        assert_eq!(found(&catalogue, &run), Some(run.clone()));
        assert_eq!(catalogue.records("fake").unwrap(), [], "it is no record");
        catalogue.forget_unfinished_run("fake", Suite::Quick).unwrap();
        catalogue.forget_unfinished_run("fake", Suite::Quick).unwrap();
        assert_eq!(found(&catalogue, &run), None);
    }

    #[test]
    fn what_was_not_measured_here_is_not_taken_over() {
        let data = tempfile::tempdir().unwrap();
        let (catalogue, run) = (Catalogue::new(data.path()), run());
        let other = tempfile::tempdir().unwrap();
        Catalogue::new(other.path()).keep_unfinished_run(&run).unwrap();
        catalogue.keep_unfinished_run(&run).unwrap();
        let path = catalogue.unfinished_path("fake", Suite::Quick);
        let own = fs::read(&path).unwrap();
        let foreign = fs::read(Catalogue::new(other.path()).unfinished_path("fake", Suite::Quick));
        let half = own[..own.len() / 2].to_vec();
        for planted in [foreign.unwrap(), half, serde_json::to_vec(&run).unwrap()] {
            fs::write(&path, planted).unwrap();
            assert_eq!(found(&catalogue, &run), None);
        }
        fs::write(&path, own).unwrap();
        let mut elsewhere = run.clone();
        elsewhere.identity.host.hardware.threads += 1;
        assert_eq!(found(&catalogue, &elsewhere), None);
        let mut old = run.clone();
        old.started_at = NOW - 3_601;
        catalogue.keep_unfinished_run(&old).unwrap();
        assert_eq!(found(&catalogue, &old), None, "it is too old");
        old.started_at = NOW + 1;
        catalogue.keep_unfinished_run(&old).unwrap();
        assert_eq!(found(&catalogue, &old), None, "it is dated ahead");
    }

    #[test]
    fn a_run_whose_record_is_written_does_not_go_on() {
        let data = tempfile::tempdir().unwrap();
        let (catalogue, run) = (Catalogue::new(data.path()), run());
        catalogue.keep_unfinished_run(&run).unwrap();
        let mut record = records::of(Verdict::Qualified);
        record.started_at = run.started_at;
        catalogue.save_record(&record).unwrap();
        assert_eq!(found(&catalogue, &run), None);
    }
}
