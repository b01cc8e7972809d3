//! Releases added from a folder, and the choice of files in a repository.

use super::hub::repository_files;
use super::*;
use crate::fetch::{HubTarget, Listing};
use cresset_models::loader::gguf::Value;
use cresset_models::testing::{GgufWriter, TinyLlama};
use cresset_models::{ModelOptions, ModelSource};
use std::collections::BTreeMap;
use std::fs;

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
    let manifest = catalogue.add(&folder, None, &|_| Ok(()), &mut |_| {}).unwrap();
    assert_eq!((manifest.name.as_str(), manifest.files.len()), ("my-model", 4));
    assert_eq!((manifest.generation.temperature, manifest.generation.top_k), (0.6, 20));
    assert_eq!(
        manifest.limits,
        ManifestLimits { model_context_tokens: 512, max_output_tokens: 512 }
    );
    assert_eq!(
        catalogue.add(&folder, None, &|_| Ok(()), &mut |_| {}).unwrap().id,
        manifest.id,
        "adding twice changes nothing"
    );
    let elsewhere =
        Catalogue::new(other_node.path()).add(&folder, None, &|_| Ok(()), &mut |_| {}).unwrap();
    assert_eq!((elsewhere.id, elsewhere.release_id), (manifest.id, manifest.release_id));
    assert!(!manifest.id.0.is_nil() && manifest.id.0 != manifest.release_id);
}

#[test]
fn a_name_keeps_its_meaning() {
    let data = tempfile::tempdir().unwrap();
    let catalogue = Catalogue::new(data.path());
    catalogue
        .add(&hf_folder(data.path(), "weights"), Some("one"), &|_| Ok(()), &mut |_| {})
        .unwrap();
    let other = hf_folder(&data.path().join("other"), "other weights");
    for name in ["one", "smollm2-135m-instruct"] {
        let error = catalogue.add(&other, Some(name), &|_| Ok(()), &mut |_| {}).unwrap_err();
        assert!(matches!(error, Error::NameTaken(_)), "{error}");
    }
    let error =
        catalogue.add(&other, Some("../x"), &|_| Ok(()), &mut |_| {}).unwrap_err().to_string();
    assert!(error.contains("--name"), "{error}");
}

#[test]
fn files_that_are_no_model_are_refused_with_the_reason() {
    let data = tempfile::tempdir().unwrap();
    let catalogue = Catalogue::new(data.path());
    let check = |path: &Path, expect: &str| {
        let error = catalogue.add(path, None, &|_| Ok(()), &mut |_| {}).unwrap_err().to_string();
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
    let manifest = catalogue.add(&folder, None, &|_| Ok(()), &mut |_| {}).unwrap();
    catalogue.remove(&manifest.id.to_string()).unwrap();
    assert!(matches!(catalogue.find("my-model"), Err(Error::Unknown { .. })));
    assert!(folder.join("model.safetensors").exists(), "the original stays");
    assert!(matches!(catalogue.remove("smollm2-135m-instruct"), Err(Error::NotPulled { .. })));
}

#[test]
fn a_repository_with_several_ggufs_asks_for_one() {
    let files = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
    let listing = |names: &[&str]| Listing {
        revision: "c".into(),
        files: files(names),
        digests: BTreeMap::default(),
        license: None,
    };
    let check = |names: &[&str], target: &str, expect: Result<&[&str], &str>| {
        let chosen = repository_files(&listing(names), &HubTarget::parse(target).unwrap());
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
    let quantised = ["w-Q4_K_M.gguf", "w-Q4_K_S.gguf", "x.IQ4_K_M.gguf"];
    check(&quantised, "hf.co/o/r:q4_k_m", Ok(&["w-Q4_K_M.gguf"]));
    check(&quantised, "o/r:Q8_0", Err("no .gguf file that ends with Q8_0; it has these: w-Q4_K_M"));
    let [first, second] = ["q/w-Q8_0-00001-of-00002.gguf", "q/w-Q8_0-00002-of-00002.gguf"];
    check(&[second, first], "o/r", Ok(&[first, second]));
    check(&[first, second, "w-Q4_K_M.gguf"], "o/r:q8_0", Ok(&[first, second]));
    check(&[first, second], &format!("o/r/{second}"), Ok(&[first, second]));
    check(&[first], "o/r", Err("split into 2 files, of which q/w-Q8_0-00002-of-00002.gguf"));
    let missing = Err("split into 2 files, of which q/w-Q8_0-00001-of-00002.gguf is missing");
    for target in ["o/r", "o/r:q8_0", &format!("o/r/{second}")] {
        check(&[second, "README.md"], target, missing);
    }
    check(&["adapter_config.json", "adapter_model.safetensors"], "o/r", Err("LoRA adapter"));
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

/// A hard link let a writer to the operator's own file change the release.
#[test]
fn the_release_shares_no_file_with_the_original() {
    let data = tempfile::tempdir().unwrap();
    let catalogue = Catalogue::new(data.path());
    let folder = hf_folder(data.path(), "weights");
    let manifest = catalogue.add(&folder, None, &|_| Ok(()), &mut |_| {}).unwrap();
    fs::write(folder.join("model.safetensors"), "WEIGHTS").unwrap();
    let own = data.path().join("models/my-model/model.safetensors");
    assert_eq!(fs::read_to_string(&own).unwrap(), "weights");
    assert_eq!(std::os::unix::fs::MetadataExt::nlink(&fs::metadata(own).unwrap()), 1);
    catalogue.folder(&manifest.name).verify(&manifest).unwrap();
}

/// All shards of a model are copied and digested, whichever of them was named.
#[test]
fn the_shards_of_a_model_are_added_together() {
    let data = tempfile::tempdir().unwrap();
    let catalogue = Catalogue::new(data.path());
    let folder = data.path().join("split");
    fs::create_dir(&folder).unwrap();
    let names = ["Tiny-00001-of-00002.gguf", "Tiny-00002-of-00002.gguf"];
    let whole = TinyLlama { seed: 3, ..TinyLlama::default() }.gguf();
    for (shard, name) in names.into_iter().enumerate() {
        let mut part = GgufWriter::default();
        if shard == 0 {
            part.metadata.clone_from(&whole.metadata);
        }
        part.set("split.no", Value::U16(shard as u16));
        part.set("split.count", Value::U16(2));
        part.tensors = whole.tensors.iter().skip(shard).step_by(2).cloned().collect();
        fs::write(folder.join(name), part.to_bytes()).unwrap();
    }
    let inspect = |source: &ModelSource| {
        let card = cresset_models::inspect(source).map_err(|error| error.to_string())?;
        assert_eq!(card.architecture, "llama");
        Ok(())
    };
    let manifest = catalogue.add(&folder.join(names[1]), None, &inspect, &mut |_| {}).unwrap();
    assert_eq!(manifest.name, "tiny");
    let added: Vec<&str> = manifest.files.iter().map(|file| file.name.as_str()).collect();
    assert_eq!(added, names);
    assert_eq!(catalogue.add(&folder, None, &inspect, &mut |_| {}).unwrap().files, manifest.files);
    let release = catalogue.folder(&manifest.name);
    let digests = release.verify(&manifest).unwrap();
    let source = release.source(&manifest).with_digests(digests.blake3);
    source.check(u64::MAX).unwrap();
    let options = ModelOptions { threads: 1, kv_bytes: 1 << 20, ..ModelOptions::default() };
    cresset_models::load(&source, &options).unwrap();
    fs::remove_file(folder.join(names[0])).unwrap();
    for given in [folder.join(names[1]), folder] {
        let error = catalogue.add(&given, Some("x"), &inspect, &mut |_| {}).unwrap_err();
        let error = error.to_string();
        assert!(error.contains("Tiny-00001-of-00002.gguf is missing"), "{error}");
    }
}

#[test]
fn a_model_that_cannot_run_here_is_not_added() {
    let data = tempfile::tempdir().unwrap();
    let catalogue = Catalogue::new(data.path());
    let folder = hf_folder(data.path(), "weights");
    let mut hashed = 0;
    let refuse = |source: &ModelSource| Err(format!("{:?} is no model", source.layout()));
    let error = catalogue.add(&folder, None, &refuse, &mut |_| hashed += 1).unwrap_err();
    assert!(error.to_string().contains("is no model. Nothing was added"), "{error}");
    assert_eq!(hashed, 0);
    assert!(!data.path().join("models").exists());
}

/// One such file kept every release from being listed, removed and served.
#[test]
fn a_bad_manifest_is_passed_over_by_name_and_can_be_removed() {
    let data = tempfile::tempdir().unwrap();
    let catalogue = Catalogue::new(data.path());
    let good = catalogue.add(&hf_folder(data.path(), "w"), None, &|_| Ok(()), &mut |_| {}).unwrap();
    let known = catalogue.manifests().unwrap();
    let other = good.to_toml().replace("\"my-model\"", "\"another\"");
    for (name, text) in [("empty", ""), ("half", "id = "), ("other", &other), ("long", "\0\0")] {
        let folder = data.path().join("models").join(name);
        fs::create_dir(&folder).unwrap();
        fs::write(folder.join("manifest.toml"), text).unwrap();
        assert_eq!(catalogue.manifests().unwrap(), known, "{name}");
        let error = catalogue.find(name).unwrap_err().to_string();
        assert!(error.contains(&format!("cresset models remove {name}")), "{error}");
        assert_eq!(catalogue.find("my-model").unwrap(), good);
        assert_eq!(catalogue.remove(name).unwrap(), name);
        assert!(!folder.exists());
    }
}

#[test]
fn a_built_in_release_survives_its_bad_manifest() {
    let data = tempfile::tempdir().unwrap();
    let name = Manifest::default_release().name;
    let folder = data.path().join("models").join(&name);
    fs::create_dir_all(&folder).unwrap();
    fs::write(folder.join("manifest.toml"), "").unwrap();
    assert_eq!(Catalogue::new(data.path()).find(&name).unwrap(), Manifest::default_release());
}

#[test]
fn a_config_that_leaves_out_its_context_has_that_of_its_family() {
    let data = tempfile::tempdir().unwrap();
    let folder = hf_folder(data.path(), "weights");
    let config = r#"{
        "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3",
        "text_config": {
            "model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240,
            "num_hidden_layers": 34, "sliding_window": 1024,
            "rope_scaling": { "factor": 8.0, "rope_type": "linear" }
        },
        "vision_config": { "hidden_size": 1152 }
    }"#;
    fs::write(folder.join("config.json"), config).unwrap();
    let catalogue = Catalogue::new(data.path());
    let added = catalogue.add(&folder, None, &|_| Ok(()), &mut |_| {}).unwrap();
    assert_eq!(added.limits.model_context_tokens, 131_072);
    fs::write(folder.join("config.json"), "{}").unwrap();
    let refused = catalogue.add(&folder, Some("other"), &|_| Ok(()), &mut |_| {});
    assert!(refused.unwrap_err().to_string().contains("does not say its context length"));
}
