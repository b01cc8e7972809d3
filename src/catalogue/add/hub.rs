//! Adds a release from a hub repository that has no manifest yet.

use super::files::{self, Preferred, digest, named};
use super::{Draft, NO_LICENSE, slug, stem};
use crate::catalogue::fetch::{self, FetchOptions, FetchProgress, HubTarget, Listing};
use crate::catalogue::folder::remove_all;
use crate::catalogue::{Catalogue, Error, Manifest, ReleaseFile, Result, Source, Upstream};
use std::collections::BTreeMap;

impl Catalogue {
    pub(in crate::catalogue) fn pull_from_hub(
        &self,
        target: &HubTarget,
        options: &FetchOptions,
        progress: &mut dyn FnMut(FetchProgress),
    ) -> Result<Manifest> {
        let name = slug(target.file.as_deref().and_then(stem).unwrap_or(&target.repo));
        let folder = self.folder(&name);
        let cache = folder.incoming().join("hub");
        let no_source =
            |why: String| Error::NoSource { name: target.repo.clone(), account: format!(" {why}") };
        let listing = fetch::describe(target, &cache, options).map_err(no_source)?;
        let mut files = Vec::new();
        for file in repository_files(&listing, target)? {
            let mut report = |done| progress(FetchProgress { file: &file, done, total: 0 });
            let got = fetch::download(
                &target.repo,
                &listing.revision,
                &file,
                &cache,
                options,
                &mut report,
            );
            let got = got.map_err(|error| match error {
                fetch::Download::DiskFull => Error::DiskFull { path: cache.clone() },
                fetch::Download::Failed(why) => no_source(format!("{file}: {why}")),
            })?;
            files.push(named(&folder, &got, &file)?);
        }
        let digested =
            files.iter().map(|file| digest(file, progress)).collect::<Result<Vec<_>>>()?;
        let manifest = hub_draft(name, target, listing, &digested).manifest(&files, digested)?;
        self.install(&manifest, &files)?;
        remove_all(&folder.incoming())?;
        Ok(manifest)
    }
}

fn hub_draft(
    name: String,
    target: &HubTarget,
    listing: Listing,
    digested: &[ReleaseFile],
) -> Draft {
    let in_repository =
        |file: &ReleaseFile| target.file.clone().unwrap_or_else(|| file.name.clone());
    let files: BTreeMap<String, String> =
        digested.iter().map(|file| (file.name.clone(), in_repository(file))).collect();
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
        Some(wanted) if listing.files.contains(wanted) => Ok(vec![wanted.clone()]),
        Some(wanted) => Err(format!("it has no file {wanted}")),
        None => {
            let name_one = format!("ask for one as {}/FILE", target.repo);
            files::choose(&listing.files, Preferred::Safetensors, &name_one)
        }
    };
    chosen.map_err(|why| Error::NotAModel { path: target.repo.clone().into(), why })
}
