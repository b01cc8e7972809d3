//! The witness against transformers' logits, and our own path against the witness with one thing
//! wrong.

use super::*;
use crate::ModelOptions;
use crate::cpu::CpuModel;
use crate::goldens::{goldens, logits};
use crate::testing::TinyLlama;
use crate::tests::goldens::Case;
use crate::tests::quantised::quantised_case;
use crate::tests::{alone, options, rows};
use cresset_kernels::linear::WeightType;
use half::f16;
use serde_json::json;
use std::path::Path;

/// The positions whose logits the witness gives, with them.
fn witnessed(source: &ModelSource, tokens: &[u32]) -> Result<Vec<(usize, Vec<f32>)>, String> {
    computed(Witness::load(source, tokens.len(), 1 << 30, None), tokens)
}

/// The same of a witness that holds one layer at a time.
fn by_layer(source: &ModelSource, tokens: &[u32]) -> Result<Vec<(usize, Vec<f32>)>, String> {
    let facts = facts::read(source);
    computed(facts.and_then(|facts| Witness::by_layer(source, facts, 1 << 30, Device::Cpu)), tokens)
}

fn computed(
    witness: WitnessResult<Witness>,
    tokens: &[u32],
) -> Result<Vec<(usize, Vec<f32>)>, String> {
    let mut witness = match witness {
        Ok(witness) => witness,
        Err(Absence::Unknown(why)) => return Err(why),
        Err(Absence::Failed(error)) => panic!("{error}"),
    };
    let mut found = Vec::new();
    let mut row = |position, logits: &[f32]| found.push((position, logits.to_vec()));
    witness.logits(tokens, WantedRows { wanted: &|_| true, row: &mut row }).unwrap();
    Ok(found)
}

fn log_softmax(logits: &[f32]) -> Vec<f64> {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|x| f64::from(x - max).exp()).sum();
    logits.iter().map(|x| f64::from(x - max) - sum.ln()).collect()
}

/// The largest difference of a log-probability.
fn difference(witness: &[(usize, Vec<f32>)], ours: &[Vec<f32>]) -> f64 {
    let row = |(position, logits): &(usize, Vec<f32>)| {
        let (theirs, ours) = (log_softmax(logits), log_softmax(&ours[*position]));
        theirs.iter().zip(ours).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max)
    };
    witness.iter().map(row).fold(0.0, f64::max)
}

#[test]
fn the_witness_computes_what_transformers_does() {
    let logits = logits();
    let mut known = Vec::new();
    for case in &goldens().cases {
        let want = rows(&logits[&case.name]);
        let mut check = |source: &ModelSource, kind: &str| {
            let Ok(found) = witnessed(source, &case.tokens) else { return };
            assert!(found.len() >= case.tokens.len() / 8, "{}", case.name);
            let worst = difference(&found, &want);
            assert!(worst < 1e-3, "{} as {kind}: {worst}", case.name);
            known.push(format!("{} {kind}", case.name));
        };
        case.in_folder(&case.config, |source| check(source, "folder"));
        case.in_folder(&case.older_config, |source| check(source, "folder"));
        if let Some(converted) = &case.gguf {
            let file = case.gguf_file(converted);
            check(&ModelSource::gguf(file.path().to_owned()), "gguf");
        }
    }
    known.sort_unstable();
    known.dedup();
    let expected = [
        "gemma2 folder",
        "gemma2 gguf",
        "gemma3 folder",
        "gemma3 gguf",
        "llama folder",
        "llama gguf",
        "llama-biased-tied folder",
        "llama-head-size folder",
        "llama-head-size gguf",
        "llama-llama3 folder",
        "mistral folder",
        "mistral gguf",
        "mistral-window folder",
        "qwen2 folder",
        "qwen2 gguf",
        "qwen3 folder",
        "qwen3 gguf",
    ];
    assert_eq!(known, expected);
}

/// The layers that are written here know more than candle's models: biases in the MLP, a size of
/// heads of its own beside another rotation, and logits of every position.
#[test]
fn layer_by_layer_comes_out_what_transformers_computes() {
    let logits = logits();
    let mut known = Vec::new();
    for case in &goldens().cases {
        let want = rows(&logits[&case.name]);
        let mut check = |source: &ModelSource, kind: &str| {
            let Ok(found) = by_layer(source, &case.tokens) else { return };
            let positions = found.iter().map(|(position, _)| *position);
            assert!(positions.eq(0..case.tokens.len()), "{}", case.name);
            let worst = difference(&found, &want);
            assert!(worst < 1e-3, "{} as {kind}: {worst}", case.name);
            known.push(format!("{} {kind}", case.name));
        };
        case.in_folder(&case.config, |source| check(source, "folder"));
        if let Some(converted) = &case.gguf {
            let file = case.gguf_file(converted);
            check(&ModelSource::gguf(file.path().to_owned()), "gguf");
        }
    }
    known.sort_unstable();
    let expected = [
        "gemma2 folder, gemma2 gguf, gemma3 folder, gemma3 gguf, llama folder, llama gguf",
        "llama-biased-tied folder, llama-head-size folder, llama-head-size gguf",
        "llama-llama3 folder, mistral folder, mistral gguf, mistral-window folder",
        "qwen2 folder, qwen2 gguf, qwen3 folder, qwen3 gguf",
    ];
    assert_eq!(known.join(", "), expected.join(", "));
}

#[test]
fn what_candle_does_not_know_is_said() {
    let check = |name: &str, why: &str| {
        let cases = goldens().cases;
        let case = cases.iter().find(|case| case.name == name).unwrap();
        let told = case.in_folder(&case.config, |source| witnessed(source, &case.tokens));
        assert!(told.clone().is_err_and(|told| told.contains(why)), "{name}: {told:?}");
    };
    check("llama-yarn", "RoPE scaling");
    check("qwen2-window", "windows");
    check("gemma3-odd", "attention scale");
    check("qwen3-moe", "\"qwen3_moe\"");
    let cases = goldens().cases;
    let mixtral = cases.iter().find(|case| case.name == "mixtral").unwrap();
    let file = mixtral.gguf_file(mixtral.gguf.as_ref().unwrap());
    let told = witnessed(&ModelSource::gguf(file.path().to_owned()), &mixtral.tokens);
    assert!(told.clone().is_err_and(|told| told.contains("mixture of experts")), "{told:?}");
    let load = |source: &ModelSource| Witness::load(source, 8, 1000, None).err();
    let large = cases[0].in_folder(&cases[0].config, load);
    assert!(matches!(large, Some(Absence::Unknown(why)) if why.contains("witness_memory_mib")));
}

/// A window is kept over a whole text in one pass.
#[test]
fn a_window_in_every_layer_is_kept() {
    let cases = goldens().cases;
    let case = cases.iter().find(|case| case.name == "mistral").unwrap();
    let mut config = case.older_config.clone();
    config["sliding_window"] = json!(8);
    let (theirs, ours) = case.in_folder(&config, |source| {
        let ours = alone(&mut CpuModel::load(source, &options()).unwrap(), &case.tokens, 7);
        (witnessed(source, &case.tokens).unwrap(), ours)
    });
    assert!(difference(&theirs, &ours) < 1e-3);
    case.in_folder(&case.older_config, |source| {
        let free = alone(&mut CpuModel::load(source, &options()).unwrap(), &case.tokens, 7);
        assert!(difference(&theirs, &free) > 1e-2, "a window that is ignored shows");
    });
}

type Spoil = fn(&mut serde_json::Value, &mut HashMap<String, Tensor>);

/// Our model of a case whose folder was changed.
fn spoiled(case: &Case, spoil: Spoil) -> Vec<Vec<f32>> {
    let folder = tempfile::tempdir().unwrap();
    let file = |folder: &Path| folder.join("model.safetensors");
    let mut config = case.older_config.clone();
    let mut tensors = case.in_folder(&config, |source| {
        let crate::FileLayout::HfFolder(from) = source.layout() else { unreachable!() };
        candle_core::safetensors::load(file(from), &Device::Cpu).unwrap()
    });
    spoil(&mut config, &mut tensors);
    candle_core::safetensors::save(&tensors, file(folder.path())).unwrap();
    std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    let options = ModelOptions { max_context: Some(case.tokens.len()), ..options() };
    let source = ModelSource::hf_folder(folder.path().to_owned());
    alone(&mut CpuModel::load(&source, &options).unwrap(), &case.tokens, 7)
}

fn scale(tensors: &mut HashMap<String, Tensor>, part: &str, by: f64) {
    for (_, tensor) in tensors.iter_mut().filter(|(name, _)| name.contains(part)) {
        *tensor = (&*tensor * by).unwrap();
    }
}

/// Faults of a serving path, planted in ours: the witness reads the right file.
#[test]
fn planted_faults_stand_far_above_the_noise() {
    let cases = goldens().cases;
    let case = cases.iter().find(|case| case.name == "llama").unwrap();
    let theirs =
        case.in_folder(&case.older_config, |source| witnessed(source, &case.tokens)).unwrap();
    assert!(difference(&theirs, &spoiled(case, |_, _| {})) < 1e-4, "the right model");
    let faults: &[(&str, Spoil)] = &[
        ("RoPE base", |config, _| config["rope_theta"] = json!(11_000.0)),
        ("epsilon", |config, _| config["rms_norm_eps"] = json!(1e-3)),
        ("attention scale", |_, tensors| scale(tensors, "q_proj", 1.02)),
        ("output head", |_, tensors| scale(tensors, "lm_head", 1.1)),
        ("gate and up", |_, tensors| {
            let names: Vec<String> =
                tensors.keys().filter(|name| name.contains("gate_proj")).cloned().collect();
            for gate in names {
                let up = gate.replace("gate_proj", "up_proj");
                let [a, b] = [&gate, &up].map(|name| tensors[name].clone());
                tensors.extend([(gate, b), (up, a)]);
            }
        }),
    ];
    for (name, fault) in faults {
        let worst = difference(&theirs, &spoiled(case, *fault));
        assert!(worst > 1e-3, "{name}: {worst}");
    }
}

/// candle reads no codes of folders, and computes the models all the same.
#[test]
fn quantised_folders_are_read_for_candle() {
    for name in ["fp8-blocks", "int4-groups", "gptq-int4", "awq-int4"] {
        let case = quantised_case(name);
        let theirs = case.in_folder(|source| witnessed(source, &case.tokens).unwrap());
        let worst = difference(&theirs, &case.logits());
        assert!(worst < 1e-3, "{name}: {worst}");
    }
}

#[test]
fn statistics_of_tensors_are_those_of_their_values() {
    let cases = goldens().cases;
    let stats = cases[0].in_folder(&cases[0].config, |source| tensor_stats(source).unwrap());
    let norm = stats.iter().find(|t| t.name == "model.norm.weight").unwrap();
    assert!(norm.finite && (0.9..1.1).contains(&norm.rms) && norm.max < 1.3, "{norm:?}");
}

/// Q4_0's blocks, read as those of IQ4_NL, whose codes mean about sixteen times as much: candle
/// cannot read the file, and computes it all the same.
#[test]
fn blocks_that_candle_lacks_are_read_for_it() {
    let mut file = TinyLlama::default().gguf();
    file.quantise(|_| Some(WeightType::Q4_0)).unwrap();
    for (.., dtype, data) in
        file.tensors.iter_mut().filter(|(.., dtype, _)| *dtype == WeightType::Q4_0)
    {
        *dtype = WeightType::IQ4NL;
        for block in data.chunks_exact_mut(dtype.type_size()) {
            let scale = f16::from_le_bytes([block[0], block[1]]).to_f32() / 16.0;
            block[..2].copy_from_slice(&f16::from_f32(scale).to_le_bytes());
        }
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tiny.gguf");
    std::fs::write(&path, file.to_bytes()).unwrap();
    let source = ModelSource::gguf(path);
    let tokens: Vec<u32> = (0..40).map(|i| i * 7 % 100).collect();
    let mut ours = CpuModel::load(&source, &options()).unwrap();
    let whole = alone(&mut ours, &tokens, tokens.len());
    assert_eq!(alone(&mut ours, &tokens, 1), whole, "token by token");
    let worst = difference(&witnessed(&source, &tokens).unwrap(), &whole);
    assert!(worst < 5e-2, "{worst}");
    let names = tensor_stats(&source).unwrap();
    assert_eq!(names.len(), file.tensors.len());
    assert!(names.iter().all(|stats| stats.finite));
    assert!(hyper_parameters(&source).unwrap().contains_key("llama.block_count"));
}
