//! Error messages for releases with something wrong in them.

use super::*;
use crate::testing::{GgufWriter, TinyLlama};
use crate::{Error, Model, ModelOptions, load};
use candle_core::{DType, Device, Tensor};
use gguf::Value;
use serde_json::json;

fn options() -> ModelOptions {
    let options = crate::tests::options();
    ModelOptions { threads: 1, max_batched_tokens: 8, max_context: Some(64), ..options }
}

/// The message must contain every part.
fn check(result: Result<Box<dyn Model>>, parts: &[&str]) {
    let error = result.err().unwrap_or_else(|| panic!("loaded, expected {parts:?}")).to_string();
    for part in parts {
        assert!(error.contains(part), "{error:?} does not say {part:?}");
    }
}

fn gguf(change: impl Fn(&mut GgufWriter)) -> Result<Box<dyn Model>> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tiny.gguf");
    let mut writer = TinyLlama::default().gguf();
    change(&mut writer);
    std::fs::write(&path, writer.to_bytes()).unwrap();
    load(&ModelSource::gguf(path), &options())
}

fn folder(change: impl Fn(&Path, &mut serde_json::Value)) -> Result<Box<dyn Model>> {
    let folder = tempfile::tempdir().unwrap();
    let tiny = TinyLlama::default();
    tiny.write_safetensors(folder.path()).unwrap();
    let mut config = tiny.hf_config();
    change(folder.path(), &mut config);
    if !config.is_null() {
        std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    }
    load(&ModelSource::hf_folder(folder.path().to_owned()), &options())
}

fn set(writer: &mut GgufWriter, key: &str, value: Value) {
    writer.set(key, value);
}

#[test]
fn one_error_names_every_missing_and_left_over_tensor() {
    let result = gguf(|w| {
        w.tensors.retain(|t| t.0 != "blk.0.attn_v.weight" && t.0 != "blk.1.ffn_norm.weight");
        let mut extra = w.tensors[0].clone();
        extra.0 = "blk.1.attn_gate.weight".into();
        w.tensors.push(extra);
    });
    check(
        result,
        &[
            "blk.0.attn_v.weight is missing",
            "blk.1.ffn_norm.weight is missing",
            "blk.1.attn_gate.weight is left over",
        ],
    );
}

#[test]
fn a_shape_that_contradicts_the_config_is_named() {
    let result = gguf(|w| set(w, "llama.feed_forward_length", Value::U32(128)));
    check(result, &["blk.0.ffn_down.weight has shape [64, 96] instead of [64, 128]"]);
}

#[test]
fn gguf_settings_that_are_not_understood_are_refused() {
    let text = |t: &str| Value::String(t.into());
    check(
        gguf(|w| set(w, "llama.expert_group_count", Value::U32(8))),
        &["does not know", "llama.expert_group_count"],
    );
    check(gguf(|w| set(w, "general.type", text("adapter"))), &["LoRA adapter", "merge"]);
    check(gguf(|w| set(w, "general.type", text("mmproj"))), &["mmproj", "no language model"]);
    check(gguf(|w| set(w, "split.count", Value::U16(2))), &["split.count"]);
    check(gguf(|w| set(w, "general.architecture", text("quokka"))), &["\"quokka\"", "llama"]);
    check(gguf(|w| set(w, "llama.rope.scaling.type", text("yarn"))), &["yarn"]);
    check(gguf(|w| set(w, "llama.attention.head_count", Value::U32(0))), &["head_count"]);
    check(gguf(|w| set(w, "llama.attention.head_count_kv", Value::U32(3))), &["cannot share"]);
    check(gguf(|w| set(w, "llama.context_length", Value::F32(9.0))), &["llama.context_length"]);
    check(
        gguf(|w| w.metadata.retain(|(k, _)| k != "llama.block_count")),
        &["llama.block_count is missing", "fetch"],
    );
    check(
        gguf(|w| set(w, "llama.block_count", Value::U32(u32::MAX))),
        &["beyond any model's", "fetch"],
    );
    check(gguf(|w| w.metadata.clear()), &["general.architecture is missing"]);
}

#[test]
fn hf_settings_that_are_not_understood_are_refused() {
    check(folder(|_, c| c["layer_scale"] = json!(1.0)), &["layer_scale"]);
    check(
        folder(|_, c| c["quantization_config"] = json!({"quant_method": "hqq"})),
        &["quantised by hqq", "quantization_config", "GGUF"],
    );
    check(folder(|_, c| c["hidden_act"] = json!("relu")), &["hidden_act"]);
    check(folder(|_, c| c["sliding_window"] = json!(64)), &["sliding_window"]);
    check(folder(|_, c| c["model_type"] = json!("quokka")), &["\"quokka\"", "mistral"]);
    check(
        folder(|_, c| c["rope_scaling"] = json!({"rope_type": "mrope", "factor": 2.0})),
        &["mrope"],
    );
    check(
        folder(|_, c| {
            c["rope_scaling"] = json!({"rope_type": "linear", "factor": 2.0, "beta_fast": 1});
        }),
        &["beta_fast"],
    );
    check(
        folder(|_, c| c["rope_scaling"] = json!({"rope_type": "linear", "factor": 0})),
        &["must be positive"],
    );
    check(folder(|_, c| c["rope_scaling"] = json!({"type": "linear"})), &["factor"]);
    check(folder(|_, c| c["attention_bias"] = json!(true)), &["self_attn.q_proj.bias is missing"]);
    check(
        folder(|_, c| c["rope_interleaved"] = json!(true)),
        &["does not know", "rope_interleaved"],
    );
    check(folder(|_, c| c["tie_word_embeddings"] = json!(false)), &["lm_head.weight is missing"]);
    check(
        folder(|_, c| c["num_hidden_layers"] = json!(1)),
        &["model.layers.1.input_layernorm.weight is left over"],
    );
    check(folder(|_, c| c["hidden_size"] = json!(1u64 << 60)), &["beyond any model's"]);
    check(
        folder(|_, c| {
            c["model_type"] = json!("mistral");
            c["num_hidden_layers"] = json!(1u64 << 60);
        }),
        &["beyond any model's"],
    );
    check(folder(|_, c| c["hidden_size"] = json!(-1)), &["config.json", "fetch it again"]);
}

#[test]
fn impossible_windows_are_refused() {
    let qwen = |types: serde_json::Value, window: serde_json::Value| {
        folder(move |_, c| {
            c["model_type"] = json!("qwen2");
            c["use_sliding_window"] = json!(true);
            c["sliding_window"] = window.clone();
            c["layer_types"] = types.clone();
        })
    };
    check(qwen(json!(["chunked_attention", "full_attention"]), json!(8)), &["chunked_attention"]);
    check(
        qwen(json!(["sliding_attention", "full_attention"]), json!(null)),
        &["sliding_window", "missing"],
    );
    check(qwen(json!(["sliding_attention"]), json!(8)), &["8 tokens over 1 of 2 layers"]);
    check(
        qwen(json!(["sliding_attention", "full_attention"]), json!(0)),
        &["0 tokens over 2 of 2 layers"],
    );
}

#[test]
fn ignorable_settings_and_mistrals_window_are_accepted() {
    folder(|_, c| c["use_cache"] = json!(true)).unwrap();
    let mistral = folder(|_, c| {
        c["model_type"] = json!("mistral");
        c["sliding_window"] = json!(16);
    });
    let sliding = mistral.unwrap().config().sliding.clone();
    assert_eq!(sliding.map(|s| (s.window, s.layers)), Some((16, vec![true; 2])));
}

#[test]
fn damaged_safetensors_are_refused() {
    let weights = |f: &Path| f.join("model.safetensors");
    let damage = |change: fn(&mut Vec<u8>)| {
        folder(|f, _| {
            let mut bytes = std::fs::read(weights(f)).unwrap();
            change(&mut bytes);
            std::fs::write(weights(f), bytes).unwrap();
        })
    };
    check(damage(|b| b.truncate(b.len() - 1)), &["model.safetensors is damaged", "fetch it again"]);
    check(damage(|b| b.truncate(4)), &["model.safetensors is damaged"]);
    check(damage(Vec::clear), &["model.safetensors is damaged", "empty"]);
    check(damage(|b| b[7] = 0xff), &["model.safetensors is damaged"]);
    check(damage(|b| b[9] = b'!'), &["model.safetensors is damaged"]);
    check(folder(|f, _| std::fs::remove_file(weights(f)).unwrap()), &["model.safetensors"]);
    check(
        folder(|f, c| {
            std::fs::remove_file(f.join("config.json")).unwrap();
            *c = serde_json::Value::Null;
        }),
        &["config.json"],
    );
}

/// A folder whose model is a tiny llama with a tensor of bytes more.
fn with_bytes(name: &str, shape: &[usize]) -> Result<Box<dyn Model>> {
    folder(|folder, _| {
        let path = folder.join("model.safetensors");
        let mut tensors = candle_core::safetensors::load(&path, &Device::Cpu).unwrap();
        let bytes = Tensor::zeros(shape, DType::U8, &Device::Cpu).unwrap();
        tensors.insert(name.to_owned(), bytes);
        candle_core::safetensors::save(&tensors, &path).unwrap();
    })
}

#[test]
fn bytes_are_codes_with_scales_or_refused() {
    check(with_bytes("model.more", &[32]), &["\"model.more\" has the dtype U8"]);
    check(with_bytes("model.more_scales", &[32]), &["\"model.more_scales\" has the dtype U8"]);
    check(with_bytes("model.more_blocks", &[2, 1, 16]), &["\"model.more\" has no scales"]);
    for (codes, scales, shape) in [
        (&[4usize, 2, 16][..], &[4usize, 2][..], Some(vec![4, 64])),
        (&[4, 2, 16], &[4, 1], None),
        (&[4, 2, 8], &[4, 2], None),
        (&[4, usize::MAX, 16], &[4, usize::MAX], None),
        (&[16], &[], None),
        (&[], &[], None),
    ] {
        assert_eq!(mxfp4::shape(codes, scales), shape, "{codes:?} {scales:?}");
    }
}

#[test]
fn an_index_is_checked() {
    let index = |map: serde_json::Value| {
        folder(move |f, _| {
            std::fs::write(
                f.join("model.safetensors.index.json"),
                json!({"weight_map": map}).to_string(),
            )
            .unwrap();
        })
    };
    check(index(json!({"a": "../model.safetensors"})), &["outside the folder"]);
    check(index(json!({"a": "/etc/passwd"})), &["outside the folder"]);
    check(index(json!({"a": "model.safetensors"})), &["\"a\" is in none of its shards"]);
    check(index(json!(3)), &["index.json is damaged"]);
}

/// The digests of all files of a folder.
fn digests(folder: &Path) -> std::collections::BTreeMap<String, String> {
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap());
    let digest = |entry: std::fs::DirEntry| {
        let blake3 = blake3::hash(&std::fs::read(entry.path()).unwrap()).to_hex();
        (entry.file_name().into_string().unwrap(), blake3.to_string())
    };
    entries.map(digest).collect()
}

/// Changes one byte and keeps size and time of change.
fn flip(path: &Path, at: usize) {
    let modified = std::fs::metadata(path).unwrap().modified().unwrap();
    let mut bytes = std::fs::read(path).unwrap();
    bytes[at] ^= 1;
    std::fs::write(path, bytes).unwrap();
    std::fs::File::options().write(true).open(path).unwrap().set_modified(modified).unwrap();
}

/// Loads a tiny model whose digests are known, then once more for each change, which is undone.
fn check_changes(folder: &Path, source: &ModelSource, changes: &[(&str, usize)]) {
    load(source, &options()).unwrap();
    for (name, at) in changes {
        let path = folder.join(name);
        let sound = std::fs::read(&path).unwrap();
        flip(&path, if *at == 0 { sound.len() - 1 } else { *at });
        check(load(source, &options()), &[name, "BLAKE3", "fetch it again"]);
        let error = source.check(u64::MAX).unwrap_err();
        assert!(matches!(&error, Error::Changed(why) if why.contains(name)), "{error}");
        std::fs::write(&path, sound).unwrap();
    }
    load(source, &options()).unwrap();
    source.check(u64::MAX).unwrap();
}

#[test]
fn a_change_that_keeps_size_and_time_is_refused_by_name_at_every_load() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tiny.gguf");
    TinyLlama::default().write_gguf(&path).unwrap();
    let len = std::fs::metadata(&path).unwrap().len() as usize;
    let source = ModelSource::gguf(path).with_digests(digests(folder.path()));
    check_changes(folder.path(), &source, &[("tiny.gguf", 0), ("tiny.gguf", len / 2)]);

    let folder = tempfile::tempdir().unwrap();
    let tiny = TinyLlama::default();
    tiny.write_safetensors(folder.path()).unwrap();
    std::fs::write(folder.path().join("config.json"), tiny.hf_config().to_string()).unwrap();
    std::fs::write(folder.path().join("tokenizer_config.json"), "{ }").unwrap();
    let source =
        ModelSource::hf_folder(folder.path().to_owned()).with_digests(digests(folder.path()));
    let files = ["model.safetensors", "tokenizer_config.json", "config.json"];
    check_changes(folder.path(), &source, &files.map(|name| (name, 0)));
}

#[test]
fn files_beside_a_release_are_not_read() {
    let folder = tempfile::tempdir().unwrap();
    let tiny = TinyLlama::default();
    tiny.write_safetensors(folder.path()).unwrap();
    std::fs::write(folder.path().join("config.json"), tiny.hf_config().to_string()).unwrap();
    let known = digests(folder.path());
    std::fs::write(folder.path().join("model.safetensors.index.json"), "{}").unwrap();
    let plain = ModelSource::hf_folder(folder.path().to_owned());
    check(load(&plain, &options()), &["index.json is damaged"]);
    load(&plain.clone().with_digests(known.clone()), &options()).unwrap();
    let mut missing = known;
    missing.insert("chat_template.jinja".into(), "0".repeat(64));
    check(load(&plain.with_digests(missing), &options()), &["chat_template.jinja"]);
}

#[test]
fn a_header_other_than_the_tokenizers_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tiny.gguf");
    TinyLlama::default().write_gguf(&path).unwrap();
    let source = ModelSource::gguf(path.clone()).with_digests(digests(folder.path()));
    let header = gguf::GgufFile::open(&path).unwrap().header_blake3;
    load(&source.clone().with_header(Some(header)), &options()).unwrap();
    let other = source.with_header(Some("0".repeat(64)));
    check(load(&other, &options()), &["tiny.gguf is not the file", "its header"]);
}

/// A mapped file ended the process here with SIGBUS.
#[test]
fn a_file_that_is_cut_while_it_is_read_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tiny.gguf");
    TinyLlama::default().write_gguf(&path).unwrap();
    let mut reader = file::FileReader::open(&path, None).unwrap();
    let header = gguf::GgufFile::read(&mut reader).unwrap();
    let mut tensors = header.tensors_in(vec![reader]);
    std::fs::File::options().write(true).open(&path).unwrap().set_len(4096).unwrap();
    let error = header.tensors.keys().find_map(|name| tensors.take(name).err()).unwrap();
    assert!(error.to_string().contains("cut short while it was read"), "{error}");
}

/// Headers alone tell what a load would refuse, whatever the size of the weights.
#[test]
fn headers_tell_what_cannot_be_loaded() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tiny.gguf");
    let refusal = |change: &dyn Fn(&mut GgufWriter)| {
        let mut writer = TinyLlama::default().gguf();
        change(&mut writer);
        std::fs::write(&path, writer.to_bytes()).unwrap();
        crate::inspect(&ModelSource::gguf(path.clone())).err().map(|error| error.to_string())
    };
    assert_eq!(refusal(&|_| {}), None);
    let missing = refusal(&|w| w.tensors.retain(|t| t.0 != "blk.1.ffn_norm.weight")).unwrap();
    assert!(missing.contains("blk.1.ffn_norm.weight is missing"), "{missing}");
    let shape = refusal(&|w| set(w, "llama.feed_forward_length", Value::U32(128))).unwrap();
    assert!(shape.contains("has shape [64, 96] instead of [64, 128]"), "{shape}");
    let unknown = refusal(&|w| set(w, "general.architecture", Value::String("mamba".into())));
    assert!(unknown.unwrap().contains("\"mamba\" is not supported"));

    let tiny = TinyLlama::default();
    tiny.write_safetensors(folder.path()).unwrap();
    std::fs::write(folder.path().join("config.json"), tiny.hf_config().to_string()).unwrap();
    let card = crate::inspect(&ModelSource::hf_folder(folder.path().to_owned())).unwrap();
    let layer = 2 * 64 * (64 + 32) + 3 * 64 * 96 + 2 * 64;
    let parameters = (crate::testing::vocab_size() * 64 + 2 * layer + 64) as u64;
    assert_eq!((card.architecture.as_str(), card.parameters()), ("llama", parameters));
    assert_eq!((card.main_type(), card.cpu_bytes), ("F32", 4 * parameters));
    assert_eq!((card.config.max_positions, card.config.kv_block_bytes(1)), (2048, 2 * 2 * 32 * 4));
}

/// A piece that several threads read, between others, has the file's bytes and its digest.
#[test]
fn large_pieces_are_read_whole_or_not_at_all() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("large");
    let bytes: Vec<u8> =
        (0..36_000_003u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    std::fs::write(&path, &bytes).unwrap();
    let digest = blake3::hash(&bytes).to_hex();
    let mut reader = file::FileReader::open(&path, Some(&digest)).unwrap();
    for range in [35_000_006..36_000_003, 0..5, 5..35_000_006] {
        assert!(reader.read(range.clone()).unwrap()[..] == bytes[range]);
    }
    reader.finish().unwrap();
    let mut reader = file::FileReader::open(&path, None).unwrap();
    std::fs::File::options().write(true).open(&path).unwrap().set_len(35_000_000).unwrap();
    let error = reader.read(0..36_000_000).unwrap_err();
    assert!(error.to_string().contains("cut short while it was read"), "{error}");
}

/// Ranges in any order have the file's bytes and its digest, whatever was peeked and left out.
#[test]
fn ranges_are_read_in_any_order() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file");
    for len in [1usize, 16_384, 16_385, 32_768, 70_000, 600_000] {
        let bytes: Vec<u8> = (0..len as u32).map(|i| (i.wrapping_mul(40_503) >> 8) as u8).collect();
        std::fs::write(&path, &bytes).unwrap();
        let digest = blake3::hash(&bytes).to_hex();
        for (peeked, step) in [(0, 1000), (1, 16_384), (len / 2, 30_000), (len, 50_000)] {
            let mut reader = file::FileReader::open(&path, Some(&digest)).unwrap();
            assert_eq!(reader.peek(peeked).unwrap(), &bytes[..peeked]);
            // The last range first, and every third one left out.
            let starts = (0..len).step_by(step).rev().enumerate().filter(|(i, _)| i % 3 != 1);
            for (_, start) in starts {
                let range = start..len.min(start + step);
                assert_eq!(reader.read(range.clone()).unwrap()[..], bytes[range]);
            }
            reader.finish().unwrap();
        }
        let mut changed = bytes.clone();
        changed[len / 2] ^= 1;
        std::fs::write(&path, &changed).unwrap();
        let reader = file::FileReader::open(&path, Some(&digest)).unwrap();
        assert!(reader.finish().is_err(), "{len} bytes");
    }
}
