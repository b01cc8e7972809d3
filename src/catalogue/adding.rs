//! New releases: from a path on this machine or from a hub repository that has no manifest yet.
//! Digests are computed here and pinned; ids follow from the digests, so the same files get the
//! same ids on every node.

use super::fetch::{self, FetchOptions, HubTarget, Listing, Progress};
use super::folder::{Folder, is_gguf, remove_all, sha256};
use super::manifest::check_name;
use super::{
    Catalogue, Error, GenerationDefaults, Manifest, ManifestLimits, ManifestPrices, ReleaseFile,
    Result, Source, Upstream,
};
use crate::ids::ModelId;
use cresset_models::loader::gguf::{GgufFile, Value};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};
use uuid::Uuid;

/// SPDX's word for a licence that nobody stated.
const NO_LICENSE: &str = "NOASSERTION";
/// Output limit of releases that do not come with one, tokens.
const MAX_OUTPUT: u32 = 4096;
/// Of releases that an operator adds; edit the manifest to change them.
const PRICES: ManifestPrices =
    ManifestPrices { revision: 1, input: 100_000, cached_input: 25_000, output: 400_000 };

/// What a node reads of a folder in Hugging Face layout, beside the weights.
const HF_FILES: [&str; 7] = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "model.safetensors.index.json",
];

/// Without these there is no model.
const NEEDED: [&str; 2] = ["config.json", "tokenizer.json"];

/// What is known of a release before its files are hashed.
struct Draft {
    name: String,
    publisher: String,
    upstream: Upstream,
    sources: Vec<Source>,
}

impl Catalogue {
    /// Adds a GGUF file, or a folder with one or in Hugging Face layout. The files are linked where
    /// the disk allows it, else copied. Files that are exactly a built-in release become that
    /// release.
    pub fn add(
        &self,
        path: &Path,
        name: Option<&str>,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<Manifest> {
        let path = path.canonicalize().map_err(Error::io("find", path))?;
        let files = model_files(&path)?;
        let digested =
            files.iter().map(|file| digest(file, progress)).collect::<Result<Vec<_>>>()?;
        let known = |m: &Manifest| {
            m.files.len() == 1 && digested.len() == 1 && m.files[0].sha256 == digested[0].sha256
        };
        let manifest = match Manifest::built_in().into_iter().find(known) {
            Some(built_in) if name.is_none_or(|name| name == built_in.name) => built_in,
            _ => draft_of(&path, &files, name)?.manifest(&files, digested)?,
        };
        self.install(&manifest, &files)?;
        Ok(manifest)
    }

    pub(super) fn pull_from_hub(
        &self,
        target: &HubTarget,
        options: &FetchOptions,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<Manifest> {
        let name = slug(target.file.as_deref().and_then(stem).unwrap_or(&target.repo));
        let folder = self.folder(&name);
        let cache = folder.incoming().join("hub");
        let no_source =
            |why: String| Error::NoSource { name: target.repo.clone(), account: format!(" {why}") };
        let listing = fetch::describe(target, &cache, options).map_err(no_source)?;
        let mut files = Vec::new();
        for file in choose(&listing, target)? {
            let mut report = |done| progress(Progress { file: &file, done, total: 0 });
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

    /// The manifest is written last: a folder without one is no release.
    fn install(&self, manifest: &Manifest, files: &[PathBuf]) -> Result<()> {
        let taken = |other: &Manifest| other.name == manifest.name && other.files != manifest.files;
        if self.manifests()?.iter().any(taken) {
            return Err(Error::NameTaken(manifest.name.clone()));
        }
        let folder = self.folder(&manifest.name);
        let _working = folder.lock()?;
        for (file, from) in manifest.files.iter().zip(files) {
            place(from, &folder, &file.name)?;
        }
        folder.verify(manifest)?;
        folder.write_manifest(manifest)
    }
}

impl Draft {
    fn manifest(self, files: &[PathBuf], digested: Vec<ReleaseFile>) -> Result<Manifest> {
        check_name(&self.name).map_err(|why| Error::NotAModel {
            path: files[0].clone(),
            why: format!("{why}; use --name"),
        })?;
        let context = context_tokens(files)?;
        Ok(Manifest {
            id: ModelId(content_id("model", &self.name, &digested)),
            release_id: content_id("release", &self.name, &digested),
            release_label: self.name.clone(),
            name: self.name,
            address: None,
            publisher: self.publisher,
            upstream: self.upstream,
            created: SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs(),
            files: digested,
            limits: ManifestLimits {
                model_context_tokens: context,
                max_output_tokens: MAX_OUTPUT.min(context),
            },
            generation: generation_defaults(files),
            prices: PRICES,
            sources: self.sources,
        })
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

/// The files of a repository that make a release: the one asked for, the only GGUF, or Hugging Face
/// layout.
fn choose(listing: &Listing, target: &HubTarget) -> Result<Vec<String>> {
    let refuse = |why: String| Error::NotAModel { path: target.repo.clone().into(), why };
    let ggufs: Vec<&String> = listing.files.iter().filter(|file| is_gguf(file)).collect();
    if let Some(wanted) = &target.file {
        let found = listing.files.iter().any(|file| file == wanted);
        return if found {
            Ok(vec![wanted.clone()])
        } else {
            Err(refuse(format!("it has no file {wanted}")))
        };
    }
    let wanted = |file: &&String| {
        HF_FILES.contains(&file.as_str()) || (is_safetensors(file) && !file.contains('/'))
    };
    let layout: Vec<String> = listing.files.iter().filter(wanted).cloned().collect();
    match ggufs.as_slice() {
        _ if layout.iter().any(|file| is_safetensors(file)) => match lacking(&layout) {
            Some(why) => Err(refuse(why)),
            None => Ok(layout),
        },
        [one] => Ok(vec![(*one).clone()]),
        [] => Err(refuse("it has neither safetensors nor GGUF files".into())),
        several => {
            let names: Vec<&str> = several.iter().map(|name| name.as_str()).collect();
            Err(refuse(format!(
                "it has several GGUF files; ask for one as {}/FILE: {}",
                target.repo,
                names.join(", ")
            )))
        }
    }
}

/// The files of a model at a path; a GGUF alone, or the parts of a Hugging Face folder.
fn model_files(path: &Path) -> Result<Vec<PathBuf>> {
    let refuse = |why: &str| Error::NotAModel { path: path.to_owned(), why: why.into() };
    if path.is_file() {
        return if is_gguf_path(path) {
            Ok(vec![path.to_owned()])
        } else {
            Err(refuse("a model file must be a .gguf"))
        };
    }
    let entries = fs::read_dir(path).map_err(Error::io("list", path))?;
    let mut files: Vec<PathBuf> =
        entries.filter_map(|entry| entry.ok().map(|e| e.path())).filter(|p| p.is_file()).collect();
    files.sort();
    let ggufs: Vec<PathBuf> = files.iter().filter(|file| is_gguf_path(file)).cloned().collect();
    let name =
        |file: &Path| file.file_name().and_then(|n| n.to_str()).unwrap_or_default().to_owned();
    files.retain(|file| HF_FILES.contains(&name(file).as_str()) || is_safetensors(&name(file)));
    match ggufs.len() {
        0 if files.iter().any(|file| is_safetensors(&name(file))) => {
            match lacking(&files.iter().map(|file| name(file)).collect::<Vec<_>>()) {
                Some(why) => Err(refuse(&why)),
                None => Ok(files),
            }
        }
        0 => Err(refuse("it holds neither a .gguf file nor config.json with *.safetensors")),
        1 => Ok(ggufs),
        _ => Err(refuse("it holds several .gguf files: give the path of one")),
    }
}

/// What a folder of weights lacks to be a model.
fn lacking(names: &[String]) -> Option<String> {
    let missing = NEEDED.iter().find(|needed| names.iter().all(|name| name != *needed))?;
    Some(format!("it has no {missing}, which a model needs beside its weights"))
}

fn is_safetensors(name: &str) -> bool {
    Path::new(name).extension().is_some_and(|ext| ext == "safetensors")
}

fn is_gguf_path(path: &Path) -> bool {
    path.file_name().and_then(|name| name.to_str()).is_some_and(is_gguf)
}

fn digest(path: &Path, progress: &mut dyn FnMut(Progress)) -> Result<ReleaseFile> {
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default().to_owned();
    let bytes = path.metadata().map_err(Error::io("read", path))?.len();
    let mut done = 0;
    let sha256 = sha256(path, |n| {
        done += n;
        progress(Progress { file: &name, done, total: bytes });
    })?;
    Ok(ReleaseFile { name, sha256, bytes })
}

/// A UUID of version 8 from the SHA-256 of the parts.
fn content_id(kind: &str, name: &str, files: &[ReleaseFile]) -> Uuid {
    let mut hasher = Sha256::new();
    hasher.update(format!("cresset {kind}\n{name}\n"));
    for file in files {
        hasher.update(format!("{} {}\n", file.sha256, file.name));
    }
    let digest: [u8; 32] = hasher.finalize().into();
    let (first, _) = digest.split_first_chunk::<16>().expect("SHA-256 has 32 bytes");
    uuid::Builder::from_custom_bytes(*first).into_uuid()
}

/// A name from a path or repository: lower case, runs of anything else become one dash.
fn slug(text: &str) -> String {
    let last = text.rsplit('/').next().unwrap_or(text).to_ascii_lowercase();
    let words = last.split(|c: char| !(c.is_ascii_alphanumeric() || "._".contains(c)));
    words.filter(|word| !word.is_empty()).collect::<Vec<_>>().join("-")
}

fn stem(name: &str) -> Option<&str> {
    if is_gguf(name) { Path::new(name).file_stem()?.to_str() } else { None }
}

/// Gives a downloaded blob the file's own name.
fn named(folder: &Folder, blob: &Path, file: &str) -> Result<PathBuf> {
    let base = file.rsplit('/').next().unwrap_or(file);
    let to = folder.incoming().join(base);
    fs::rename(blob, &to).map_err(Error::io("rename", blob))?;
    Ok(to)
}

fn place(from: &Path, folder: &Folder, name: &str) -> Result<()> {
    let to = folder.path().join(name);
    if to.exists() {
        fs::remove_file(&to).map_err(Error::io("remove", &to))?;
    }
    if fs::hard_link(from, &to).is_ok() {
        return Ok(());
    }
    let part = folder.path().join(format!(".{name}.part"));
    fs::copy(from, &part).map_err(Error::io("copy to", &part))?;
    fs::rename(&part, &to).map_err(Error::io("rename", &part))
}

fn context_tokens(files: &[PathBuf]) -> Result<u32> {
    let found =
        if is_gguf_path(&files[0]) { gguf_context(&files[0])? } else { config_context(files) };
    let refuse = || Error::NotAModel {
        path: files[0].clone(),
        why: "it does not say its context length".into(),
    };
    found.and_then(|n| u32::try_from(n).ok()).filter(|n| *n > 0).ok_or_else(refuse)
}

fn gguf(path: &Path) -> Result<BTreeMap<String, Value>> {
    // The error names the file itself.
    Ok(GgufFile::open(path).map_err(|error| Error::Unreadable(error.to_string()))?.metadata)
}

fn gguf_text(path: &Path, key: &str) -> Result<Option<String>> {
    Ok(gguf(path)?.remove(key).and_then(|value| match value {
        Value::String(text) if !text.is_empty() => Some(text),
        _ => None,
    }))
}

fn gguf_context(path: &Path) -> Result<Option<u64>> {
    let metadata = gguf(path)?;
    let Some(Value::String(architecture)) = metadata.get("general.architecture") else {
        return Ok(None);
    };
    Ok(match metadata.get(&format!("{architecture}.context_length")) {
        Some(Value::U32(n)) => Some(u64::from(*n)),
        Some(Value::U64(n)) => Some(*n),
        _ => None,
    })
}

fn config_context(files: &[PathBuf]) -> Option<u64> {
    json(files, "config.json")?["max_position_embeddings"].as_u64()
}

/// The publisher's own defaults, where the release carries them.
fn generation_defaults(files: &[PathBuf]) -> GenerationDefaults {
    let plain = GenerationDefaults::default();
    let Some(config) = json(files, "generation_config.json") else { return plain };
    if config["do_sample"].as_bool() == Some(false) {
        return GenerationDefaults { temperature: 0.0, ..plain };
    }
    let number = |key: &str, or: f32| config[key].as_f64().map_or(or, |n| n as f32);
    GenerationDefaults {
        temperature: number("temperature", plain.temperature),
        top_p: number("top_p", plain.top_p),
        top_k: config["top_k"].as_u64().and_then(|n| u32::try_from(n).ok()).unwrap_or(plain.top_k),
        min_p: number("min_p", plain.min_p),
        repetition_penalty: number("repetition_penalty", plain.repetition_penalty),
    }
}

fn json(files: &[PathBuf], name: &str) -> Option<serde_json::Value> {
    let path = files.iter().find(|file| file.ends_with(name))?;
    serde_json::from_slice(&fs::read(path).ok()?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hf_folder(root: &Path, weights: &str) -> PathBuf {
        let folder = root.join("My Model");
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("config.json"), r#"{"max_position_embeddings": 512}"#).unwrap();
        fs::write(
            folder.join("generation_config.json"),
            r#"{"temperature": 0.6, "top_k": 20, "top_p": 0.95}"#,
        )
        .unwrap();
        fs::write(folder.join("model.safetensors"), weights).unwrap();
        fs::write(folder.join("tokenizer.json"), "{}").unwrap();
        fs::write(folder.join("README.md"), "not part of the release").unwrap();
        folder
    }

    #[test]
    fn a_folder_becomes_a_release_with_ids_from_its_content() {
        let data = tempfile::tempdir().unwrap();
        let other_node = tempfile::tempdir().unwrap();
        let folder = hf_folder(data.path(), "weights");
        let catalogue = Catalogue::new(data.path());
        let manifest = catalogue.add(&folder, None, &mut |_| {}).unwrap();
        assert_eq!((manifest.name.as_str(), manifest.files.len()), ("my-model", 4));
        assert_eq!((manifest.generation.temperature, manifest.generation.top_k), (0.6, 20));
        assert_eq!(
            manifest.limits,
            ManifestLimits { model_context_tokens: 512, max_output_tokens: 512 }
        );
        assert_eq!(
            catalogue.add(&folder, None, &mut |_| {}).unwrap().id,
            manifest.id,
            "adding twice changes nothing"
        );
        let elsewhere = Catalogue::new(other_node.path()).add(&folder, None, &mut |_| {}).unwrap();
        assert_eq!((elsewhere.id, elsewhere.release_id), (manifest.id, manifest.release_id));
        assert!(!manifest.id.0.is_nil() && manifest.id.0 != manifest.release_id);
    }

    #[test]
    fn a_name_keeps_its_meaning() {
        let data = tempfile::tempdir().unwrap();
        let catalogue = Catalogue::new(data.path());
        catalogue.add(&hf_folder(data.path(), "weights"), Some("one"), &mut |_| {}).unwrap();
        let other = hf_folder(&data.path().join("other"), "other weights");
        for name in ["one", "smollm2-135m-instruct"] {
            let error = catalogue.add(&other, Some(name), &mut |_| {}).unwrap_err();
            assert!(matches!(error, Error::NameTaken(_)), "{error}");
        }
        let error = catalogue.add(&other, Some("../x"), &mut |_| {}).unwrap_err().to_string();
        assert!(error.contains("--name"), "{error}");
    }

    #[test]
    fn what_is_no_model_is_refused_with_the_reason() {
        let data = tempfile::tempdir().unwrap();
        let catalogue = Catalogue::new(data.path());
        let check = |path: &Path, expect: &str| {
            let error = catalogue.add(path, None, &mut |_| {}).unwrap_err().to_string();
            assert!(error.contains(expect), "{error}");
        };
        check(&data.path().join("missing"), "missing");
        let empty = data.path().join("empty");
        fs::create_dir(&empty).unwrap();
        check(&empty, "neither a .gguf file nor");
        fs::write(empty.join("a.gguf"), "not a GGUF").unwrap();
        check(&empty, "a.gguf");
        fs::write(empty.join("b.gguf"), "neither").unwrap();
        check(&empty, "several .gguf files");
        let text = data.path().join("text.txt");
        fs::write(&text, "x").unwrap();
        check(&text, "must be a .gguf");
        let folder = hf_folder(data.path(), "weights");
        fs::write(folder.join("config.json"), "{}").unwrap();
        check(&folder, "context length");
        fs::remove_file(folder.join("tokenizer.json")).unwrap();
        check(&folder, "no tokenizer.json");
    }

    #[test]
    fn removing_takes_files_and_records() {
        let data = tempfile::tempdir().unwrap();
        let catalogue = Catalogue::new(data.path());
        let folder = hf_folder(data.path(), "weights");
        let manifest = catalogue.add(&folder, None, &mut |_| {}).unwrap();
        catalogue.remove(&manifest.id.to_string()).unwrap();
        assert!(matches!(catalogue.find("my-model"), Err(Error::Unknown { .. })));
        assert!(folder.join("model.safetensors").exists(), "the original stays");
        assert!(matches!(catalogue.remove("smollm2-135m-instruct"), Err(Error::NotPulled { .. })));
    }

    #[test]
    fn a_repository_with_several_ggufs_asks_for_one() {
        let files = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        let listing =
            |names: &[&str]| Listing { revision: "c".into(), files: files(names), license: None };
        let check = |names: &[&str], target: &str, expect: Result<&[&str], &str>| {
            let chosen = choose(&listing(names), &HubTarget::parse(target).unwrap());
            match (chosen, expect) {
                (Ok(chosen), Ok(expect)) => assert_eq!(chosen, expect),
                (Err(error), Err(expect)) => assert!(error.to_string().contains(expect), "{error}"),
                (other, _) => panic!("{target}: {other:?}"),
            }
        };
        check(&["a.gguf"], "o/r", Ok(&["a.gguf"]));
        check(&["a.gguf", "b.gguf"], "o/r", Err("o/r/FILE: a.gguf, b.gguf"));
        check(&["a.gguf", "b.gguf"], "o/r/b.gguf", Ok(&["b.gguf"]));
        check(&["a.gguf"], "o/r/c.gguf", Err("no file c.gguf"));
        check(&["README.md"], "o/r", Err("neither"));
        check(&["config.json", "model.safetensors"], "o/r", Err("no tokenizer.json"));
        let hf = [
            "README.md",
            "config.json",
            "model.safetensors",
            "onnx/model.safetensors",
            "tokenizer.json",
        ];
        check(&hf, "o/r", Ok(&["config.json", "model.safetensors", "tokenizer.json"]));
    }
}
