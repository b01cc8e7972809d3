//! Adds a release from a path on this machine.

use super::files::{self, Preferred, digest, is_gguf_path};
use super::metadata::gguf_text;
use super::{Draft, NO_LICENSE, slug, stem};
use crate::fetch::FetchProgress;
use crate::folder::source_of;
use crate::{Catalogue, Error, Inspect, Manifest, Result, Source, Upstream};
use cresset_models::loader::gguf::ShardName;
use std::fs;
use std::path::{Path, PathBuf};

impl Catalogue {
    /// Adds a GGUF file with its other shards, if it has some, or a folder with one or in Hugging
    /// Face layout, if `inspect` finds nothing against it. The files are copied. Files that are
    /// exactly a built-in release become that release.
    pub fn add(
        &self,
        path: &Path,
        name: Option<&str>,
        inspect: Inspect,
        progress: &mut dyn FnMut(FetchProgress),
    ) -> Result<Manifest> {
        let path = path.canonicalize().map_err(Error::io("find", path))?;
        let files = model_files(&path)?;
        inspect(&source_of(&files)).map_err(Error::CannotRun)?;
        let digested =
            files.iter().map(|file| digest(file, progress)).collect::<Result<Vec<_>>>()?;
        let known = |m: &Manifest| {
            m.files.len() == 1 && digested.len() == 1 && m.files[0].sha256 == digested[0].sha256
        };
        let manifest = match Manifest::built_in().into_iter().find(known) {
            Some(built_in) if name.is_none_or(|name| name == built_in.name) => built_in,
            _ => draft_of(&path, &files, name)?.manifest(&files, digested)?,
        };
        self.install(&manifest, &files, files::copy)?;
        Ok(manifest)
    }
}

fn draft_of(path: &Path, files: &[PathBuf], name: Option<&str>) -> Result<Draft> {
    let own_name = path.file_name().and_then(|n| n.to_str()).unwrap_or_default();
    let given = |key: &str| gguf_text(&files[0], key);
    let (mut publisher, mut license) = (None, None);
    if is_gguf_path(&files[0]) {
        (publisher, license) = (given("general.organization")?, given("general.license")?);
    }
    Ok(Draft {
        name: name.map_or_else(|| slug(stem(own_name).unwrap_or(own_name)), str::to_owned),
        publisher: publisher.unwrap_or_else(|| "operator".into()),
        upstream: Upstream {
            name: own_name.to_owned(),
            url: None,
            revision: None,
            license: license.unwrap_or_else(|| NO_LICENSE.into()),
        },
        sources: vec![Source::Local { path: path.to_owned() }],
    })
}

/// Returns the files of a model at a path: a GGUF file with its other shards, or the parts of a
/// Hugging Face folder.
fn model_files(path: &Path) -> Result<Vec<PathBuf>> {
    let refuse = |why: String| Error::NotAModel { path: path.to_owned(), why };
    let (folder, chosen) = if path.is_file() {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        if !is_gguf_path(path) {
            return Err(refuse("a model file must be a .gguf".into()));
        }
        let folder = path.parent().unwrap_or(path);
        let names = if ShardName::parse(name).is_some() { names_in(folder)? } else { vec![] };
        (folder, files::with_shards(name, &names))
    } else {
        let names = names_in(path)?;
        (path, files::choose(&names, Preferred::Gguf, "give the path of one"))
    };
    Ok(chosen.map_err(refuse)?.iter().map(|name| folder.join(name)).collect())
}

/// The names of a folder's files, sorted.
fn names_in(folder: &Path) -> Result<Vec<String>> {
    let entries = fs::read_dir(folder).map_err(Error::io("list", folder))?;
    let paths = entries.filter_map(|entry| Some(entry.ok()?.path())).filter(|path| path.is_file());
    let mut names: Vec<String> =
        paths.filter_map(|path| Some(path.file_name()?.to_str()?.to_owned())).collect();
    names.sort();
    Ok(names)
}
