//! Goldens beside those of the executable: archives that an operator made or was given, each under
//! the SHA-256 of its content.

use super::records::files_ending;
use super::{Catalogue, Error, Manifest, Result, folder};
use cresset_qualification::{Goldens, GoldensOrigin, Record};
use std::fs;
use std::path::{Path, PathBuf};

const ENDING: &str = "goldens";
/// Largest archive that is read, bytes.
const MAX_ARCHIVE_BYTES: u64 = 64 << 20;

impl Catalogue {
    /// Copies an archive into the data folder and returns what it is about.
    pub fn import_goldens(&self, archive: &Path) -> Result<GoldensOrigin> {
        let content = read(archive)?;
        let goldens = parse(archive, &content)?;
        let place = self.goldens_path(&goldens.origin.sha256);
        fs::create_dir_all(self.goldens_folder())
            .map_err(Error::io("create", &self.goldens_folder()))?;
        self.reserve.check(&place, content.len() as u64)?;
        folder::write_whole(&place, &content)?;
        Ok(goldens.origin)
    }

    /// The goldens of the data folder. Each one that cannot be used is passed over with a warning.
    pub fn imported_goldens(&self) -> Result<Vec<Goldens>> {
        let mut found = Vec::new();
        for path in files_ending(&self.goldens_folder(), ENDING)? {
            match read(&path).and_then(|content| parse(&path, &content)) {
                Ok(goldens) if path == self.goldens_path(&goldens.origin.sha256) => {
                    found.push(goldens);
                }
                Ok(_) => tracing::warn!(path = %path.display(), "passing over changed goldens"),
                Err(why) => tracing::warn!(%why, "passing over goldens"),
            }
        }
        Ok(found)
    }

    /// The goldens with the most positions that were made from the release's files.
    pub fn goldens_of(&self, manifest: &Manifest) -> Result<Option<Goldens>> {
        let files = manifest.digests();
        let all = self.imported_goldens()?.into_iter().filter(|goldens| goldens.are_about(&files));
        let all = Goldens::of_files(&files).into_iter().chain(all);
        Ok(all.max_by_key(|goldens| goldens.origin.positions))
    }

    /// The goldens with the most positions of the release with this name, which need not be here.
    pub fn goldens_named(&self, release: &str) -> Result<Goldens> {
        let imported = self.imported_goldens()?;
        let known = Goldens::built_in().chain(imported).collect::<Vec<_>>();
        let names = known.iter().map(|goldens| goldens.origin.release.clone()).collect::<Vec<_>>();
        let wanted = known.into_iter().filter(|goldens| goldens.origin.release == release);
        wanted.max_by_key(|goldens| goldens.origin.positions).ok_or_else(|| Error::NoGoldens {
            release: release.to_owned(),
            known: names.join(", "),
        })
    }

    /// The digests of the goldens that a record rests on and of what is in their place; `None` when
    /// they are there.
    pub(super) fn lost_goldens(&self, record: &Record) -> Option<(String, String)> {
        let recorded = record.goldens.as_ref().filter(|origin| !origin.built_in)?.sha256.clone();
        let found = folder::sha256(&self.goldens_path(&recorded), |_| {});
        let present = found.unwrap_or_else(|_| "none".into());
        (present != recorded).then_some((recorded, present))
    }

    fn goldens_folder(&self) -> PathBuf {
        self.data.join("goldens")
    }

    fn goldens_path(&self, sha256: &str) -> PathBuf {
        self.goldens_folder().join(format!("{sha256}.{ENDING}"))
    }
}

fn read(path: &Path) -> Result<Vec<u8>> {
    let bytes = fs::metadata(path).map_err(Error::io("read", path))?.len();
    if bytes > MAX_ARCHIVE_BYTES {
        let why = format!("it has more than {} MiB", MAX_ARCHIVE_BYTES >> 20);
        return Err(Error::BadGoldens { path: path.to_owned(), why });
    }
    fs::read(path).map_err(Error::io("read", path))
}

fn parse(path: &Path, content: &[u8]) -> Result<Goldens> {
    Goldens::read(content)
        .map_err(|why| Error::BadGoldens { path: path.to_owned(), why: why.to_string() })
}
