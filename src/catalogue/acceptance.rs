//! An operator's statements that a release without reference outputs is to be served. They are
//! signed as records are, and each holds for the identity that it names alone: other files, another
//! build or another setting need another one.

use super::records::{CLOCK_SLACK_SECONDS, files_ending, folder_of};
use super::{Catalogue, Error, Result, folder, node_key};
use cresset_base::UnixMillis;
use cresset_qualification::{Identity, Record, envelope};
use serde::{Deserialize, Serialize};
use std::fs;
use std::path::{Path, PathBuf};
use uuid::Uuid;

const PAYLOAD_TYPE: &str = "application/vnd.cresset.acceptance+json";
/// The ending of the files' names.
const ENDING: &str = "acceptance";
/// Statements kept per release; another one deletes the oldest.
const KEPT_STATEMENTS: usize = 64;

/// A statement that a release is to be served, or is no more.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Acceptance {
    pub id: Uuid,
    pub identity: Identity,
    pub accepted: bool,
    /// The operator's own words.
    pub reason: String,
    /// Unix seconds.
    pub at: u64,
}

impl Catalogue {
    /// Writes down that the release of this record is to be served, or is no more.
    pub fn accept(
        &self,
        record: &Record,
        accepted: bool,
        reason: &str,
        now: UnixMillis,
    ) -> Result<Acceptance> {
        let identity = record.identity.clone();
        let (id, reason) = (Uuid::now_v7(), reason.to_owned());
        let acceptance = Acceptance { id, identity, accepted, reason, at: now.seconds() };
        let place = folder_of(&self.data, &acceptance.identity.release.name);
        fs::create_dir_all(&place).map_err(Error::io("create", &place))?;
        let key = node_key::find_or_make(&self.data)?;
        let sealed = envelope::seal_json(PAYLOAD_TYPE, &acceptance, &key);
        folder::write_whole(&place.join(format!("{id}.{ENDING}")), &sealed)?;
        for old in files(&place)?.into_iter().skip(KEPT_STATEMENTS) {
            fs::remove_file(&old).map_err(Error::io("remove", &old))?;
        }
        Ok(acceptance)
    }

    /// The statements about a release that were signed here, newest first. Others are passed over
    /// with a warning: they accept nothing.
    pub fn acceptances(&self, name: &str) -> Result<Vec<Acceptance>> {
        let Some(key) = node_key::find(&self.data)? else { return Ok(Vec::new()) };
        let mut found = Vec::new();
        for path in files(&folder_of(&self.data, name))? {
            let sealed = fs::read(&path).map_err(Error::io("read", &path))?;
            match envelope::open_json(&sealed, PAYLOAD_TYPE, &key.verifying_key()) {
                Ok(acceptance) => found.push(acceptance),
                Err(why) => {
                    tracing::warn!(path = %path.display(), %why, "passing over an acceptance");
                }
            }
        }
        Ok(found)
    }

    /// The acceptance that holds for this identity now.
    pub(super) fn acceptance(
        &self,
        present: &Identity,
        now: UnixMillis,
    ) -> Result<Option<Acceptance>> {
        let latest = now.seconds() + CLOCK_SLACK_SECONDS;
        let mut all = self.acceptances(&present.release.name)?.into_iter();
        let newest =
            all.find(|found| found.at <= latest && found.identity.difference(present).is_none());
        Ok(newest.filter(|found| found.accepted))
    }
}

/// Newest first: ids are time-ordered.
fn files(place: &Path) -> Result<Vec<PathBuf>> {
    files_ending(place, ENDING)
}
