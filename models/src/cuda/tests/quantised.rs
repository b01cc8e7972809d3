//! Weights that stay quantised on a device: their values, their memory, and whole models.

use super::*;
use crate::cuda::cache::{BlockCost, Budget};
use crate::goldens::blocks;
use crate::loader::gguf::Value;
use crate::loader::store::{Raw, WeightStore};
use crate::testing::GgufWriter;
use crate::tests::goldens::case_of;
use crate::tests::quantised::{QuantisedCase, quantised_case, quantised_cases, scattered_folder};
use cresset_kernels::embedding::{Embedding, GatherArgs};
use cresset_kernels::linear::{BAND_ROWS, WeightType};
use cresset_kernels::operand::{MatrixBuffer, OpMemory};
use half::bf16;
use std::path::Path;

/// All rows of a matrix, as an embedding reads them.
fn all_rows(gpu: &DeviceOps, matrix: MatrixBuffer) -> Vec<bf16> {
    let MatrixBuffer { parts, cols, mut order, .. } = matrix;
    let rows_of = |part| {
        let part = MatrixBuffer {
            parts: vec![part],
            cols,
            scratch: None,
            order: order.take(),
            rounded: None,
        };
        let table = DeviceOps::matrix(&part);
        let ids: Vec<u32> = (0..table.rows as u32).collect();
        let (ids, out) = (
            Buffer::from_slice(gpu, &ids).unwrap(),
            Buffer::new(gpu, Kind::Bf16, table.rows * cols).unwrap(),
        );
        let args = GatherArgs { table, ids: ids.view(), device: None, scale: 1.0, out: out.view() };
        gpu.gather(&args).unwrap();
        out.to_vec::<bf16>().unwrap()
    };
    parts.into_iter().flat_map(rows_of).collect()
}

#[test]
fn every_format_of_the_files_is_kept_or_widened() {
    let blocks = blocks();
    let options = options(Kind::Bf16);
    let gpu = options.gpu.as_ref().unwrap();
    for (name, dtype, packed) in [
        ("Q4_0", WeightType::Q4_0, true),
        ("Q5_1", WeightType::Q5_1, true),
        ("Q8_0", WeightType::Q8_0, true),
        ("Q4_K", WeightType::Q4K, true),
        ("Q6_K", WeightType::Q6K, true),
        ("IQ4_XS", WeightType::IQ4XS, false),
        ("IQ2_XXS", WeightType::IQ2XXS, false),
        ("MXFP4", WeightType::MXFP4, true),
        ("INT4_128", WeightType::Int4By128, true),
        ("INT8_32", WeightType::Int8By32, true),
        ("F8_E4M3_128", WeightType::E4M3By128, true),
        ("F8_E5M2_32", WeightType::E5M2By32, true),
        ("F16", WeightType::F16, false),
        ("BF16", WeightType::BF16, false),
    ] {
        let bytes = blocks[&format!("{name}.raw")].flatten_all().unwrap().to_vec1::<u8>().unwrap();
        let want = rows(&blocks[&format!("{name}.values")]);
        let (rows, cols) = (want.len(), want[0].len());
        let raw = Raw { dtype, bytes: &bytes, rows, cols, order: None };
        let twice = [want.concat(), want.concat()].concat();
        let store = |kind| DeviceStore::new(gpu, kind, Compute::new(1), false, 0).unwrap();
        let mut exact = store(Kind::F32).matrix(&[raw, raw]).unwrap().parts;
        assert_eq!(exact.remove(0).values.to_vec::<f32>().unwrap(), twice, "{name}");
        let mut rounded = store(Kind::Bf16);
        let matrix = rounded.matrix(&[raw, raw]).unwrap();
        assert_eq!(DeviceOps::is_quantised(&matrix), packed, "{name}");
        let twice: Vec<bf16> = twice.into_iter().map(bf16::from_f32).collect();
        let check = |got: Vec<bf16>, want: &[bf16]| {
            // A folder's scales that are neither f16 nor bf16 are rounded to eleven bits.
            let most = if packed && dtype.gguf_id().is_none() { 1.0 / 128.0 } else { 0.0 };
            assert_eq!(got.len(), want.len(), "{name}");
            let [got, want] = [&got[..], want].map(|all| all.iter().map(|x| x.to_f32()));
            for (got, want) in got.zip(want) {
                assert!((got - want).abs() <= most * want.abs(), "{name}: {got}, {want} stored");
            }
        };
        check(all_rows(gpu, matrix), &twice);
        // Columns in another order are put back.
        let order = (0..cols as u32).rev().collect();
        let turned = rounded.matrix(&[Raw { order: Some(&order), ..raw }]).unwrap();
        assert_eq!(DeviceOps::is_quantised(&turned), packed, "{name}");
        let back = want.iter().flat_map(|row| row.iter().rev().copied().map(bf16::from_f32));
        check(all_rows(gpu, turned), &back.collect::<Vec<_>>());
        // Kernels find the matrices of experts where each is made of whole bands.
        let whole_bands = rows.is_multiple_of(BAND_ROWS);
        let experts = rounded.experts(&[raw, raw]).unwrap();
        assert_eq!(DeviceOps::is_quantised(&experts), packed && whole_bands, "{name}");
        check(all_rows(gpu, experts), &twice);
    }
}

/// Matrices of quantised folders have their codes on a device, and the same bits in any company.
#[test]
fn quantised_folders_stay_quantised() {
    for case in quantised_cases() {
        case.in_folder(|source| check_folder(&case, &case.name, source));
    }
    let case = quantised_case("gptq-int4");
    let (_folder, source) = scattered_folder(&case);
    check_folder(&case, "in the order of activations", &source);
}

fn check_folder(case: &QuantisedCase, name: &str, source: &ModelSource) {
    let len = case.tokens.len();
    let sizes = |kind| ModelOptions { max_rows: len, gpu_graph_rows: 0, ..options(kind) };
    let mut exact = load_from(source, &sizes(Kind::F32)).unwrap();
    assert_close(&alone(&mut exact, 0, &case.tokens, len), &case.logits(), name);
    let deterministic = ModelOptions { deterministic: true, ..sizes(Kind::Bf16) };
    let mut model = load_from(source, &deterministic).unwrap();
    let card = crate::inspect(source).unwrap();
    let (taken, told) = (model.weight_bytes(), card.gpu_bytes as usize);
    // The order of columns is not told by the headers.
    assert!(taken.abs_diff(told) < 4 << 10, "{name}: {taken}, {told} foretold");
    // Matrices are so small that tiles and bands are not full.
    let widened = exact.weight_bytes() / 2;
    assert!(taken * 10 < widened * 7, "{name}: {taken}, {widened} in bf16");
    let got = alone(&mut model, 0, &case.tokens, len);
    assert_eq!(alone(&mut model, 0, &case.tokens, 1), got, "{name} token by token");
    assert!(error(&got, &case.logits()) < 0.05, "{name} in bf16");
}

/// Rounding activations to eight bits beside weights of E4M3 costs little, and the same in any
/// company. Activations beside other weights, and those of experts, stay as they are.
#[test]
fn activations_of_eight_bits_are_nearly_as_exact() {
    for case in quantised_cases() {
        let len = case.tokens.len();
        let (plain, mut eight) = case.in_folder(|source| {
            let sizes = ModelOptions { max_rows: len, gpu_graph_rows: 0, ..options(Kind::Bf16) };
            let load = |byte_activations| {
                let own = ModelOptions { deterministic: true, byte_activations, ..sizes.clone() };
                load_from(source, &own).unwrap()
            };
            (alone(&mut load(false), 0, &case.tokens, len), load(true))
        });
        let got = alone(&mut eight, 0, &case.tokens, len);
        assert_eq!(alone(&mut eight, 0, &case.tokens, 1), got, "{} token by token", case.name);
        let error = error(&got, &plain);
        let rounds = ["fp8-blocks", "fp8-whole", "fp8-rows", "fp8-experts"].contains(&&*case.name);
        let expected = if rounds { 0.005..0.15 } else { 0.0..f32::MIN_POSITIVE };
        assert!(expected.contains(&error), "{}: {error}", case.name);
    }
}

/// The types of a file that is called Q4_K_M.
fn q4_k_m(name: &str) -> WeightType {
    let finer = ["attn_v", "ffn_down", "output.weight"].iter().any(|part| name.contains(part));
    if finer { WeightType::Q6K } else { WeightType::Q4K }
}

fn write(writer: &GgufWriter, folder: &Path) -> ModelSource {
    let path = folder.join("tiny.gguf");
    std::fs::write(&path, writer.to_bytes()).unwrap();
    ModelSource::gguf(path)
}

/// A small model that has columns for every format, and its file as Q4_K_M.
fn small_model() -> (TinyLlama, GgufWriter) {
    let sizes = TinyLlama { hidden: 256, intermediate: 512, tied: false, ..TinyLlama::default() };
    let mut file = sizes.gguf();
    file.quantise(|name| Some(q4_k_m(name))).unwrap();
    (sizes, file)
}

/// A model in bf16 computes what the file's weights give in f32, and the same bits in any company.
#[test]
fn a_quantised_model_is_as_exact_as_a_widened_one() {
    let folder = tempfile::tempdir().unwrap();
    let (_, file) = small_model();
    let source = write(&file, folder.path());
    let tokens = tokens(11, 3);
    let load = |kind| {
        let sizes = ModelOptions { max_rows: 11, gpu_graph_rows: 0, ..options(kind) };
        load_from(&source, &ModelOptions { deterministic: kind == Kind::Bf16, ..sizes }).unwrap()
    };
    let exact = alone(&mut load(Kind::F32), 0, &tokens, 11);
    let mut model = load(Kind::Bf16);
    let matrices = file.tensors.iter().filter(|(_, shape, ..)| shape.len() == 2);
    let on_disk: usize = matrices.map(|(.., data)| data.len()).sum();
    let vectors = 4 * 256 * 5;
    // The vocabulary does not fill its last band of 32 rows.
    let allowed = on_disk * 103 / 100 + 2 * 32 * 256;
    let taken = model.weight_bytes() - vectors;
    assert!((on_disk..allowed).contains(&taken), "{taken} of {on_disk} on disk");

    let prompt = alone(&mut model, 0, &tokens, 11);
    let error = error(&prompt, &exact);
    assert!(error < 0.03, "{error}");
    let (begin, rest) = tokens.split_at(7);
    let mut in_parts = alone(&mut model, 0, begin, 3);
    in_parts.extend(alone(&mut model, 7, rest, 1));
    assert_eq!(in_parts, prompt, "bits by chunks and token by token");
}

#[test]
fn a_quantised_model_fits_where_a_widened_one_does_not() {
    let folder = tempfile::tempdir().unwrap();
    let (sizes, file) = small_model();
    let load_on = |source: &ModelSource, bytes| {
        let gpu = Some(Emulator::of(Emulator::card("rtx-3060", bytes).unwrap()));
        let own = ModelOptions { gpu_memory_share: 1.0, gpu_kv_mib: 1, ..options(Kind::Bf16) };
        load_from(source, &ModelOptions { gpu, ..own })
    };
    let source = write(&file, folder.path());
    let card = load_on(&source, 64 << 20).unwrap().memory_bytes() + (64 << 10);
    assert!(load_on(&source, card).is_ok());
    let widened = write(&sizes.gguf(), folder.path());
    assert!(load_on(&widened, 64 << 20).is_ok());
    let error = load_on(&widened, card).err().unwrap().to_string();
    assert!(error.contains("memory") || error.contains("no room"), "{error}");
}

/// Each of a mixture's products has the same bits in any company, and its experts stay as they are.
#[test]
fn experts_stay_quantised() {
    let case = case_of("qwen3-moe");
    let stored = case.gguf_file(case.gguf.as_ref().unwrap());
    let mut file = GgufWriter::read(stored.path()).unwrap();
    file.quantise(|name| match name.split_once("_exps") {
        Some((part, _)) if part.ends_with("down") => Some(WeightType::Q8_0),
        Some(_) => Some(WeightType::Q4_0),
        None => None,
    })
    .unwrap();
    let folder = tempfile::tempdir().unwrap();
    let source = write(&file, folder.path());
    let len = case.tokens.len();
    let load = |source: &ModelSource, kind| {
        let sizes = ModelOptions { max_rows: len, gpu_graph_rows: 0, ..options(kind) };
        load_from(source, &ModelOptions { deterministic: kind == Kind::Bf16, ..sizes }).unwrap()
    };
    let exact = alone(&mut load(&source, Kind::F32), 0, &case.tokens, len);
    let mut model = load(&source, Kind::Bf16);
    let card = crate::inspect(&source).unwrap();
    assert!(model.weight_bytes().abs_diff(card.gpu_bytes as usize) < 1 << 10);
    let widened = load(&ModelSource::gguf(stored.path().to_owned()), Kind::Bf16).weight_bytes();
    // Of 3 layers, 8 experts of 2 matrices of 32 by 64 in Q4_0; rows of 32 in Q8_0 fill a half of
    // their tiles.
    assert!(model.weight_bytes() + 3 * 8 * 2 * 32 * 64 < widened, "{widened} in bf16");
    let got = alone(&mut model, 0, &case.tokens, len);
    for chunk in [1, 7] {
        assert_eq!(alone(&mut model, 0, &case.tokens, chunk), got, "by {chunk}");
    }
    // Rounding may give a token another expert, of almost the same score.
    assert!(error(&got, &exact) < 0.2);
}

/// Llama 3.1 8B as Q4_K_M: its header alone is written, and tells what it will take.
#[test]
fn a_model_of_8b_with_its_cache_fits_a_card_with_12_gb() {
    let folder = tempfile::tempdir().unwrap();
    let (hidden, inner, kv, vocab, layers) = (4096, 14_336, 1024, 128_256, 32);
    let mut file = TinyLlama::default().gguf();
    let size = |value: usize| Value::U32(value as u32);
    for (key, value) in [
        ("block_count", layers),
        ("context_length", 131_072),
        ("embedding_length", hidden),
        ("feed_forward_length", inner),
        ("attention.head_count", 32),
        ("attention.head_count_kv", 8),
        ("rope.dimension_count", 128),
        ("vocab_size", vocab),
    ] {
        file.set(&format!("llama.{key}"), size(value));
    }
    file.tensors.clear();
    let mut add = |name: String, shape: &[usize]| {
        let dtype = if shape.len() == 1 { WeightType::F32 } else { q4_k_m(&name) };
        file.tensors.push((name, shape.to_vec(), dtype, Vec::new()));
    };
    add("token_embd.weight".into(), &[vocab, hidden]);
    add("output.weight".into(), &[vocab, hidden]);
    add("output_norm.weight".into(), &[hidden]);
    for layer in 0..layers {
        for (name, shape) in [
            ("attn_norm", &[hidden][..]),
            ("ffn_norm", &[hidden]),
            ("attn_q", &[hidden, hidden]),
            ("attn_k", &[kv, hidden]),
            ("attn_v", &[kv, hidden]),
            ("attn_output", &[hidden, hidden]),
            ("ffn_gate", &[inner, hidden]),
            ("ffn_up", &[inner, hidden]),
            ("ffn_down", &[hidden, inner]),
        ] {
            add(format!("blk.{layer}.{name}.weight"), shape);
        }
    }
    let path = folder.path().join("header.gguf");
    let (header, len) = file.header();
    std::fs::write(&path, header).unwrap();
    std::fs::File::options().write(true).open(&path).unwrap().set_len(len as u64).unwrap();
    let card = crate::inspect(&ModelSource::gguf(path)).unwrap();
    let taken = card.gpu_bytes as usize;
    assert!((len * 99 / 100..len * 103 / 100).contains(&taken), "{taken} of {len}");

    let total = Emulator::card("rtx-3060", 12 << 30).unwrap().memory_bytes;
    let blocks = |own: usize| {
        let free = total.saturating_sub(own);
        let budget = Budget {
            total,
            free,
            own,
            share: 0.9,
            reserve: 512 << 20,
            most: None,
            state_share: 0.0,
        };
        let bytes = 2 * 2 * layers * 1024 * BLOCK;
        budget.blocks(BlockCost { bytes, tokens: BLOCK, least: 2, most: 1 << 20 }, 0)
    };
    let workspace = 512 << 20;
    let tokens = blocks(taken + workspace).unwrap() * BLOCK;
    assert!(tokens > 32_768, "room for {tokens} tokens");
    let widened = 2 * card.parameters() as usize + workspace;
    assert!(blocks(widened).is_err(), "in bf16 it needs more than the card has");
}
