//! The default release as a user gets it: fetched, qualified, served. It is fetched once into the
//! build folder.

use super::process::Folder;
use cresset_base::AccountId;
use cresset_catalogue::{Catalogue, FetchOptions};
use cresset_engine::{
    EngineHandle, EngineOptions, GenerateRequest, ModelRunner, SamplingParams, SequenceEvent,
};
use cresset_models::{ModelOptions, ModelSource};
use cresset_node::inspect;
use cresset_qualification::Goldens;
use cresset_qualification::goldens::Case;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::OnceLock;

const NAME: &str = "smollm2-135m-instruct";

/// A data folder with releases that is kept between runs.
pub fn kept() -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join("releases")
}

/// The file of a release, fetched unless it is there.
pub fn fetch(name: &str) -> PathBuf {
    std::fs::create_dir_all(kept()).unwrap();
    let catalogue = Catalogue::new(&kept());
    let manifest = catalogue.find(name).unwrap();
    if !catalogue.is_pulled(&manifest) {
        catalogue.pull(name, &inspect, &FetchOptions::default(), &mut |_| ()).unwrap();
    }
    kept().join("models").join(name).join(&manifest.files[0].name)
}

/// The default release's GGUF file.
pub fn default_gguf() -> PathBuf {
    static FETCHED: OnceLock<PathBuf> = OnceLock::new();
    FETCHED.get_or_init(|| fetch(NAME)).clone()
}

/// A data folder with a ledger and the default release, which comes from a local folder as on a
/// machine without a network.
pub fn with_release() -> Folder {
    let folder = Folder::initialised();
    let place = folder.path().join("models").join(NAME);
    std::fs::create_dir_all(&place).unwrap();
    std::fs::copy(default_gguf().with_file_name("manifest.toml"), place.join("manifest.toml"))
        .unwrap();
    std::os::unix::fs::symlink(default_gguf(), place.join("SmolLM2-135M-Instruct.Q4_1.gguf"))
        .unwrap();
    folder
}

/// An engine over a GGUF file; `dequantise` turns its weights into f32 first.
fn engine(file: &Path, dequantise: bool) -> EngineHandle {
    let runner = ModelOptions {
        threads: 2,
        dequantise,
        kv_bytes: 512 << 20,
        block_size: 16,
        max_batched_tokens: 512,
        max_context: Some(2048),
        ..ModelOptions::default()
    };
    let (runner, info) = ModelRunner::load(&ModelSource::gguf(file.to_owned()), &runner).unwrap();
    let options = EngineOptions {
        max_batched_tokens: 512,
        background_tokens: 16,
        max_rows: 64,
        max_waiting: 64,
        block_size: 16,
        num_blocks: info.num_blocks,
        cache: info.cache.clone(),
        max_context: 2048,
        speculative_tokens: 16,
    };
    EngineHandle::start(Box::new(runner), options)
}

/// The greedy continuation of `prompt`, end-of-text ignored.
fn greedy(
    engine: &EngineHandle,
    prompt: &[u32],
    max_tokens: u32,
) -> tokio::sync::mpsc::Receiver<SequenceEvent> {
    let request = GenerateRequest {
        account: AccountId::generate(),
        application: None,
        priority: 0,
        background: false,
        prompt: Arc::new(prompt.to_vec()),
        sampling: SamplingParams { temperature: 0.0, ..SamplingParams::default() },
        max_tokens,
        min_tokens: 0,
        eos_ids: [].into(),
        grammar: None,
        deadline: None,
    };
    engine.submit(request).unwrap().1
}

/// Reads a sequence to its end; `at_token` is called when each token arrives.
pub fn run_tokens(
    mut events: tokio::sync::mpsc::Receiver<SequenceEvent>,
    mut at_token: impl FnMut(),
) -> Vec<u32> {
    let mut ids = Vec::new();
    while let Some(event) = events.blocking_recv() {
        if let SequenceEvent::Token { id, .. } = event {
            at_token();
            ids.push(id);
        }
    }
    ids
}

/// Runs all cases at once: the tokens must be the reference's, and a first difference is allowed
/// only where the reference's two best logits lie within 1e-3.
pub fn check_greedy(file: &Path, cases: &[Case], dequantise: bool) {
    let engine = engine(file, dequantise);
    let run = |case: &Case| greedy(&engine, &case.prompt_ids, case.greedy_ids.len() as u32);
    let running: Vec<_> = cases.iter().map(run).collect();
    for (case, events) in cases.iter().zip(running) {
        let ids = run_tokens(events, || ());
        assert_eq!(ids.len(), case.greedy_ids.len(), "{}", case.id);
        if let Some(at) = ids.iter().zip(&case.greedy_ids).position(|(ours, theirs)| ours != theirs)
        {
            assert!(
                case.margin(at) <= 1e-3,
                "{} differs at {at} (dequantise = {dequantise})",
                case.id
            );
        }
    }
}

/// The release is run as served, and as the dequantised f32 model.
#[test]
fn greedy_tokens_equal_the_reference() {
    let digests = Catalogue::new(&kept()).find(NAME).unwrap().digests();
    let goldens = Goldens::of_files(&digests).unwrap();
    assert_eq!(goldens.cases.len(), 20);
    for dequantise in [false, true] {
        check_greedy(&default_gguf(), &goldens.cases, dequantise);
    }
}

#[test]
fn the_default_release_qualifies() {
    let folder = with_release();
    let verdict = folder.json(&["qualify", NAME]);
    assert_eq!(verdict["verdict"], "qualified", "{verdict}");
    let checks = verdict["checks"].as_array().unwrap();
    for id in ["tokenizer_goldens", "template_goldens", "greedy_goldens"] {
        let check = checks
            .iter()
            .find(|check| check["id"] == id)
            .unwrap_or_else(|| panic!("{id} is missing"));
        assert_eq!(check["state"], "passed", "{check}");
    }
}

/// Adds a copy of the default release to the folder after a change of its bytes.
fn add_altered(folder: &Folder, name: &str, change: impl FnOnce(&mut [u8])) {
    let mut content = std::fs::read(default_gguf()).unwrap();
    change(&mut content);
    let file = folder.path().join(format!("{name}.gguf"));
    std::fs::write(&file, content).unwrap();
    folder.json(&["models", "add", "--path", file.to_str().unwrap(), "--name", name]);
}

/// Where a text of the header begins.
fn place(content: &[u8], text: &str) -> usize {
    content.windows(text.len()).position(|bytes| bytes == text.as_bytes()).unwrap()
}

/// The checks that fail when the release is compared with the default one.
fn red_beside_the_default(folder: &Folder, name: &str) -> Vec<String> {
    let checks = "tokenizer_goldens,hyper_parameters,distributions,greedy_goldens";
    let finished = folder.run(&["qualify", name, "--like", NAME, "--only", checks, "--json"]);
    let document = finished.document();
    let checks = document["checks"].as_array().unwrap();
    assert!(checks.iter().all(|check| check["state"] != "not_run"), "{document}");
    let failed = checks.iter().filter(|check| check["state"] == "failed");
    failed.map(|check| check["id"].as_str().unwrap().to_owned()).collect()
}

#[test]
fn the_reference_of_a_sister_tells_a_changed_model_from_a_renamed_one() {
    let folder = Folder::initialised();
    add_altered(&folder, "renamed", |content| {
        // Behind a key stand four bytes of its type, before a text also eight of its length.
        let at = place(content, "general.name") + "general.name".len() + 12;
        content[at] = b'Z';
    });
    assert_eq!(red_beside_the_default(&folder, "renamed"), [""; 0]);
    add_altered(&folder, "turned", |content| {
        let at = place(content, "llama.rope.freq_base") + "llama.rope.freq_base".len() + 4;
        content[at..at + 4].copy_from_slice(&1e6f32.to_le_bytes());
    });
    let red = red_beside_the_default(&folder, "turned");
    assert!(red.contains(&"hyper_parameters".to_owned()), "{red:?}");
    add_altered(&folder, "swapped", |content| {
        let [a, b] = ["blk.3.attn_q", "blk.7.attn_q"].map(|name| place(content, name));
        (content[a + 4], content[b + 4]) = (b'7', b'3');
    });
    assert_eq!(red_beside_the_default(&folder, "swapped")[0], "distributions");
    let unknown = folder.run(&["qualify", "renamed", "--like", "nobody"]);
    assert!(unknown.stderr.contains("there are no goldens of \"nobody\""), "{unknown:?}");
}
