//! Statements about releases beside their records, signed as those are: one file each, under an id
//! that is ordered by time.

use super::records::{files_ending, folder_of};
use super::{Error, Result, folder, node_key};
use cresset_qualification::envelope;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::fs;
use std::path::Path;
use uuid::Uuid;

/// Statements kept of a kind and release; another one deletes the oldest.
const KEPT_STATEMENTS: usize = 64;

/// A kind of statement.
pub(super) struct SignedFiles {
    pub payload_type: &'static str,
    /// The ending of the files' names.
    pub ending: &'static str,
}

impl SignedFiles {
    /// Writes a statement about the release of this name.
    pub(super) fn keep<T: Serialize>(
        &self,
        data: &Path,
        name: &str,
        id: Uuid,
        statement: &T,
    ) -> Result<()> {
        let place = folder_of(data, name);
        fs::create_dir_all(&place).map_err(Error::io("create", &place))?;
        let key = node_key::find_or_make(data)?;
        let sealed = envelope::seal_json(self.payload_type, statement, &key);
        folder::write_whole(&place.join(format!("{id}.{}", self.ending)), &sealed)?;
        for old in files_ending(&place, self.ending)?.into_iter().skip(KEPT_STATEMENTS) {
            fs::remove_file(&old).map_err(Error::io("remove", &old))?;
        }
        Ok(())
    }

    /// The statements about a release that were signed here, newest first. Others are passed over
    /// with a warning: they count for nothing.
    pub(super) fn all<T: DeserializeOwned>(&self, data: &Path, name: &str) -> Result<Vec<T>> {
        let Some(key) = node_key::find(data)? else { return Ok(Vec::new()) };
        let mut found = Vec::new();
        for path in files_ending(&folder_of(data, name), self.ending)? {
            let sealed = fs::read(&path).map_err(Error::io("read", &path))?;
            match envelope::open_json(&sealed, self.payload_type, &key.verifying_key()) {
                Ok(statement) => found.push(statement),
                Err(why) => {
                    let kind = self.ending;
                    tracing::warn!(path = %path.display(), kind, %why, "passing over a statement");
                }
            }
        }
        Ok(found)
    }
}
