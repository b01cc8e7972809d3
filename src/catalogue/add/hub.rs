//! Adds a release from a hub repository that has no manifest yet.

use super::files::{self, Preferred};
use super::{Draft, NO_LICENSE, slug, stem};
use crate::fetch::{
    self, FetchOptions, FetchPhase, FetchProgress, HubTarget, Listing, PartFile, SourceFailure,
};
use crate::folder::{ReleaseFolder, remove_all, source_of};
use crate::manifest::check_name;
use crate::{Catalogue, Error, Inspect, Manifest, ReleaseFile, Result, Source, Upstream};
use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

impl Catalogue {
    pub(crate) fn pull_from_hub(
        &self,
        target: &HubTarget,
        inspect: Inspect,
        options: &FetchOptions,
        progress: &mut dyn FnMut(FetchProgress),
    ) -> Result<Manifest> {
        let name = target.file.as_deref().and_then(stem).unwrap_or(&target.repo);
        let name =
            target.quantisation.iter().fold(slug(name), |name, tag| slug(&format!("{name}-{tag}")));
        let refuse = |why| Error::NotAModel { path: target.repo.clone().into(), why };
        check_name(&name).map_err(refuse)?;
        let folder = self.folder(&name);
        let listing = fetch::describe(target, options).map_err(|why| no_source(target, &why))?;
        let wanted = repository_files(&listing, target)?;
        let (files, digested) = fetch_all(target, &listing, &wanted, &folder, options, progress)?;
        inspect(&source_of(&files)).map_err(Error::CannotRun)?;
        let sources = wanted.iter().zip(&digested);
        let sources = sources.map(|(path, file)| (file.name.clone(), path.clone())).collect();
        let manifest = hub_draft(name, target, listing, sources).manifest(&files, digested)?;
        self.install(&manifest, &files, files::move_to)?;
        remove_all(&folder.incoming())?;
        Ok(manifest)
    }
}

fn no_source(target: &HubTarget, why: &str) -> Error {
    Error::NoSource { name: target.repo.clone(), account: format!(" {why}") }
}

/// Fetches files of a repository into a folder of their commit, so that parts of another commit are
/// never taken for theirs. Together they have at most `max_bytes`.
fn fetch_all(
    target: &HubTarget,
    listing: &Listing,
    wanted: &[String],
    folder: &ReleaseFolder,
    options: &FetchOptions,
    progress: &mut dyn FnMut(FetchProgress),
) -> Result<(Vec<PathBuf>, Vec<ReleaseFile>)> {
    let place = folder.incoming().join(&listing.revision);
    let (mut files, mut digested, mut left) = (Vec::new(), Vec::new(), options.max_bytes);
    for path in wanted {
        let name = path.rsplit('/').next().unwrap_or(path).to_owned();
        let to = place.join(&name);
        let mut part = PartFile::open(&to, left, folder.reserve())?;
        let expected = listing.digests.get(path);
        if expected.is_none() {
            // Nothing would tell that what is here is damaged.
            part.restart()?;
        }
        let phase = FetchPhase::Transfer;
        let mut report = |done, total| progress(FetchProgress { file: path, done, total, phase });
        fetch::download(&target.repo, &listing.revision, path, &mut part, options, &mut report)
            .map_err(|failure| match failure {
                SourceFailure::Here(error) => error,
                SourceFailure::Source(why) => no_source(target, &format!("{path}: {why}")),
                SourceFailure::TooLong(_) => {
                    Error::TooLarge { name: target.repo.clone(), mib: options.max_bytes >> 20 }
                }
            })?;
        let (sha256, bytes) = part.finish()?;
        if expected.is_some_and(|expected| *expected != sha256) {
            fs::remove_file(&to).map_err(Error::io("remove", &to))?;
            return Err(no_source(target, &format!("{path} arrived damaged: pull it again")));
        }
        left -= bytes;
        files.push(to);
        digested.push(ReleaseFile { name, sha256, bytes });
    }
    Ok((files, digested))
}

fn hub_draft(
    name: String,
    target: &HubTarget,
    listing: Listing,
    files: BTreeMap<String, String>,
) -> Draft {
    Draft {
        name,
        publisher: target.repo.split('/').next().unwrap_or_default().to_owned(),
        upstream: Upstream {
            name: target.repo.clone(),
            url: Some(format!("https://huggingface.co/{}", target.repo)),
            revision: Some(listing.revision.clone()),
            license: listing.license.unwrap_or_else(|| NO_LICENSE.into()),
        },
        sources: vec![Source::Hub { repo: target.repo.clone(), revision: listing.revision, files }],
    }
}

/// Returns the files of a repository that make a release: the one asked for, or those that a model
/// needs.
pub(super) fn repository_files(listing: &Listing, target: &HubTarget) -> Result<Vec<String>> {
    let chosen = match &target.file {
        Some(wanted) if listing.files.contains(wanted) => {
            files::with_shards(wanted, &listing.files)
        }
        Some(wanted) => Err(format!("it has no file {wanted}")),
        None if target.quantisation.is_some() => {
            let tag = target.quantisation.as_deref().unwrap_or_default();
            files::choose_quantised(&listing.files, tag)
        }
        None => {
            let name_one = format!("ask for one as {}/FILE", target.repo);
            files::choose(&listing.files, Preferred::Safetensors, &name_one)
        }
    };
    chosen.map_err(|why| Error::NotAModel { path: target.repo.clone().into(), why })
}
