//! Releases on the disk, from outside: what is added, changed behind the node's back, or damaged.

use crate::process::{Finished, Folder, MODEL};
use cresset_models::loader::gguf::Value as Metadata;
use cresset_models::testing::{GgufWriter, TinyLlama};
use std::fs::{self, File};
use std::path::{Path, PathBuf};

/// The weights of the model of a ready folder.
fn weights(folder: &Folder) -> PathBuf {
    let files = fs::read_dir(folder.path().join("models").join(MODEL)).unwrap();
    let mut paths = files.map(|entry| entry.unwrap().path());
    paths.find(|path| path.extension().is_some_and(|ext| ext == "gguf")).unwrap()
}

/// Changes a file in place and keeps its size and its time of change.
fn tamper(path: &Path, at: usize) {
    let modified = fs::metadata(path).unwrap().modified().unwrap();
    let mut bytes = fs::read(path).unwrap();
    bytes[at] ^= 0x10;
    fs::write(path, bytes).unwrap();
    File::options().write(true).open(path).unwrap().set_modified(modified).unwrap();
}

fn refused(finished: &Finished, parts: &[&str]) {
    let all = format!("{}{}", finished.stdout, finished.stderr);
    assert_eq!(finished.code, Some(1), "{all}");
    for part in parts {
        assert!(all.contains(part), "{part:?} is not in {all}");
    }
}

/// Such a node served and billed.
#[test]
fn weights_changed_with_size_and_time_kept_are_refused_by_name() {
    let folder = Folder::ready();
    let file = weights(&folder);
    let name = file.file_name().unwrap().to_str().unwrap().to_owned();
    let len = usize::try_from(fs::metadata(&file).unwrap().len()).unwrap();
    for at in [len - 1, len / 2] {
        tamper(&file, at);
        let serve = folder.run(&["serve", "--listen", "127.0.0.1:0", "--operator", "127.0.0.1:0"]);
        refused(&serve, &[&name, "BLAKE3", "fetch it again"]);
        refused(&folder.run(&["qualify", MODEL]), &[&name]);
        tamper(&file, at);
    }
    let node = folder.serve();
    drop(node);
}

#[test]
fn a_file_that_was_cut_short_is_said_in_a_sentence() {
    let folder = Folder::ready();
    let file = weights(&folder);
    File::options().write(true).open(&file).unwrap().set_len(10_000).unwrap();
    let said = folder.unserved();
    for part in ["10000 bytes, expected", "cresset models pull tiny"] {
        assert!(said.contains(part), "{part:?} is not in {said}");
    }
}

/// An empty manifest, as a power loss leaves one, kept every command from working.
#[test]
fn one_empty_manifest_stops_nothing() {
    let folder = Folder::ready();
    let broken = folder.path().join("models/zzz");
    fs::create_dir(&broken).unwrap();
    fs::write(broken.join("manifest.toml"), "").unwrap();
    let list = folder.run(&["models", "list"]);
    assert_eq!(list.code, Some(0), "{list:?}");
    assert!(list.stdout.contains(MODEL), "{list:?}");
    assert!(list.stderr.contains("zzz") && list.stderr.contains("models remove zzz"), "{list:?}");
    drop(folder.serve());
    assert_eq!(folder.json(&["models", "remove", "zzz"])["name"], "zzz");
    assert!(!broken.exists());
}

#[test]
fn a_part_of_a_pull_is_named_by_every_command_and_can_be_removed() {
    let folder = Folder::initialised();
    let part = folder.path().join("models/huge/.incoming/abc/huge.gguf");
    std::fs::create_dir_all(part.parent().unwrap()).unwrap();
    std::fs::write(&part, vec![0; 3 << 20]).unwrap();
    assert_eq!(folder.json(&["models", "list"])["parts"]["huge"], 3 << 20);
    assert_eq!(folder.json(&["status"])["model_parts"]["huge"], 3 << 20);
    for command in [&["models", "list"][..], &["status"]] {
        let told = folder.run(command).stdout;
        assert!(told.contains("cresset models remove huge"), "{told}");
    }
    assert_eq!(folder.json(&["models", "remove", "huge"])["name"], "huge");
    assert!(!part.exists());
    assert!(folder.json(&["models", "list"])["parts"].as_object().unwrap().is_empty());
}

#[test]
fn what_cannot_run_here_is_not_added() {
    let folder = Folder::initialised();
    let file = folder.path().join("given.gguf");
    let check = |change: &dyn Fn(&mut GgufWriter), parts: &[&str]| {
        let mut gguf = TinyLlama::default().gguf();
        change(&mut gguf);
        fs::write(&file, gguf.to_bytes()).unwrap();
        let path = file.to_str().unwrap();
        refused(&folder.run(&["models", "add", "--path", path, "--name", "given"]), parts);
        assert!(!folder.path().join("models/given").exists());
    };
    let text = |value: &str| Metadata::String(value.into());
    check(
        &|w| w.set("general.architecture", text("mamba")),
        &["\"mamba\" is not supported", "llama", "Nothing was added"],
    );
    check(&|w| w.set("general.type", text("adapter")), &["LoRA adapter"]);
    check(
        &|w| w.metadata.retain(|(key, _)| key != "tokenizer.chat_template"),
        &["no chat template", "instruction-tuned"],
    );
    check(
        &|w| w.set("llama.feed_forward_length", Metadata::U32(128)),
        &["blk.0.ffn_down.weight has shape [64, 96] instead of [64, 128]"],
    );
    check(&|w| w.tensors.truncate(3), &["is missing"]);
}

#[test]
fn folders_that_cannot_run_here_are_not_added() {
    let folder = Folder::initialised();
    let given = folder.path().join("given");
    fs::create_dir(&given).unwrap();
    let tiny = TinyLlama::default();
    let check = |config: serde_json::Value, parts: &[&str]| {
        tiny.write_safetensors(&given).unwrap();
        fs::write(given.join("config.json"), config.to_string()).unwrap();
        let added = folder.run(&["models", "add", "--path", given.to_str().unwrap()]);
        refused(&added, parts);
    };
    check(
        serde_json::json!({ "model_type": "gpt2", "n_positions": 1024 }),
        &["\"gpt2\" is not supported", "qwen2"],
    );
    for method in ["hqq", "bitsandbytes"] {
        let mut config = tiny.hf_config();
        config["quantization_config"] = serde_json::json!({ "quant_method": method, "bits": 4 });
        check(config, &[&format!("quantised by {method}"), "GGUF"]);
    }
    fs::remove_file(given.join("config.json")).unwrap();
    fs::write(given.join("adapter_config.json"), "{}").unwrap();
    let added = folder.run(&["models", "add", "--path", given.to_str().unwrap()]);
    refused(&added, &["LoRA adapter", "merge"]);
}

#[test]
fn names_of_other_programs_get_the_right_spelling() {
    let folder = Folder::initialised();
    refused(&folder.run(&["models", "pull", "llama3.2:3b"]), &["OWNER/llama3.2-GGUF:Q4_K_M"]);
    let mut pull = folder.command(&["models", "pull", "hf.co/owner/repo:Q4_K_M"]);
    let pulled =
        Finished::of(pull.env("CRESSET_HUB__ENDPOINT", "http://127.0.0.1:9").output().unwrap());
    refused(&pulled, &["owner/repo", "http://127.0.0.1:9 cannot be reached", "check the network"]);
}
