//! Quantised folders of Hugging Face's formats against transformers, which computed what their
//! numbers stand for (`goldens/make_quantised_goldens.py`).

use super::*;
use crate::witness::tensor_stats;
use safetensors::SafeTensors;
use safetensors::tensor::TensorView;
use serde::Deserialize;
use std::collections::BTreeMap;
use tempfile::TempDir;

const CASES: &str = include_str!("../../goldens/quantised.json");
const TENSORS: &[u8] = include_bytes!("../../goldens/quantised.safetensors");

#[derive(Deserialize)]
struct QuantisedCases {
    cases: Vec<QuantisedCase>,
}

/// A tiny checkpoint and the logits of its tokens.
#[derive(Deserialize)]
pub struct QuantisedCase {
    pub name: String,
    pub config: serde_json::Value,
    pub tokens: Vec<u32>,
}

pub fn quantised_cases() -> Vec<QuantisedCase> {
    serde_json::from_str::<QuantisedCases>(CASES).unwrap().cases
}

pub fn quantised_case(name: &str) -> QuantisedCase {
    quantised_cases().into_iter().find(|case| case.name == name).unwrap()
}

impl QuantisedCase {
    pub fn tensors(&self) -> BTreeMap<String, TensorView<'static>> {
        let all = SafeTensors::deserialize(TENSORS).unwrap().tensors();
        let own = |(name, view): (String, TensorView<'static>)| {
            Some((name.strip_prefix(&format!("{}:", self.name))?.to_owned(), view))
        };
        all.into_iter().filter_map(own).collect()
    }

    pub fn logits(&self) -> Vec<Vec<f32>> {
        let view = &self.tensors()["logits"];
        rows(&Tensor::from_raw_buffer(view.data(), DType::F32, view.shape(), &Device::Cpu).unwrap())
    }

    /// Calls `load` with the folder of its files, which exist during the call.
    pub fn in_folder<T>(&self, load: impl FnOnce(&ModelSource) -> T) -> T {
        let folder = tempfile::tempdir().unwrap();
        let tensors = self.tensors().into_iter().filter(|(name, _)| name != "logits");
        let path = folder.path().join("model.safetensors");
        safetensors::serialize_to_file(tensors, None, &path).unwrap();
        std::fs::write(folder.path().join("config.json"), self.config.to_string()).unwrap();
        load(&ModelSource::hf_folder(folder.path().to_owned()))
    }

    fn load(&self, source: &ModelSource, dequantise: bool) -> CpuModel {
        load(source, &ModelOptions { dequantise, ..options() })
            .unwrap_or_else(|error| panic!("{}: {error}", self.name))
    }
}

#[test]
fn quantised_folders_equal_transformers() {
    for case in quantised_cases() {
        let want = case.logits();
        case.in_folder(|source| {
            let mut exact = case.load(source, true);
            assert_close(&alone(&mut exact, &case.tokens, 7), &want, &case.name);
            let mut model = case.load(source, false);
            let got = alone(&mut model, &case.tokens, 40);
            for chunk in [1, 7] {
                assert_eq!(alone(&mut model, &case.tokens, chunk), got, "{} by {chunk}", case.name);
            }
            // Activations have sixteen bits beside integers, and the cache is in f16.
            for (got, want) in got.iter().zip(&want) {
                let largest = want.iter().fold(0.0f32, |most, x| most.max(x.abs()));
                let error = got.iter().zip(want).fold(0.0f32, |m, (a, b)| m.max((a - b).abs()));
                assert!(error <= 5e-3 * largest, "{}: {error} of {largest}", case.name);
            }
        });
    }
}

/// The type of most parameters, and how many have it.
#[test]
fn the_cards_of_quantised_folders_tell_their_types_and_memory() {
    let types = [
        ("fp8-blocks", "F8_E4M3_32"),
        ("fp8-whole", "F8_E4M3_32"),
        ("fp8-experts", "F8_E4M3_32"),
        ("fp8-rows", "F8_E4M3_32"),
        ("fp8-e5m2", "F8_E5M2_32"),
        ("int4-groups", "INT4_32"),
        ("int4-zeros", "INT4_32"),
        ("int8-fused", "INT8_32"),
        ("int8-rows", "INT8_32"),
        ("gptq-int4", "INT4_32"),
        ("gptq-int8", "INT8_32"),
        ("awq-int4", "INT4_32"),
    ];
    let cases = quantised_cases();
    assert_eq!(cases.len(), types.len());
    for (case, (name, wanted)) in cases.iter().zip(types) {
        assert_eq!(case.name, name);
        let (card, held) = case.in_folder(|source| {
            (crate::inspect(source).unwrap(), case.load(source, false).weight_bytes())
        });
        assert_eq!(card.main_type(), wanted, "{name}");
        assert_eq!(card.config.kv_kind, Kind::F16, "{name}");
        // Norms and biases are no matrices, which alone are counted as held, in rows of sixteen.
        let told = card.cpu_bytes as usize;
        assert!(held * 9 < told * 10 && told < held * 11 / 10, "{name}: {told}, {held} held");
        // No parameter is wider than in the files, but for the scales.
        let files: usize = case
            .tensors()
            .iter()
            .filter(|(tensor, _)| *tensor != "logits")
            .map(|(_, view)| view.data().len())
            .sum();
        assert!(told * 4 < files * 5, "{name}: {told} of {files} in the files");
    }
}

/// The witness computes them from the values that the kernels decode, and every matrix has
/// statistics. A folder in MXFP4 had none.
#[test]
fn quantised_folders_have_statistics() {
    for case in quantised_cases() {
        let stats = case.in_folder(|source| tensor_stats(source).unwrap());
        let parameters = case.in_folder(|source| crate::inspect(source).unwrap().parameters());
        assert!(stats.iter().all(|t| t.finite && t.max < 4.0), "{}: {stats:?}", case.name);
        let q = stats.iter().find(|t| t.name.contains("layers.1.") && t.name.contains("v_proj.w"));
        assert!(q.is_none_or(|t| (0.1..0.3).contains(&t.rms)), "{}: {q:?}", case.name);
        assert!(parameters > 50_000, "{}: {parameters}", case.name);
    }
    let case = super::goldens::case_of("gpt-oss-mxfp4");
    let stats = case.in_folder(&case.config, |source| tensor_stats(source).unwrap());
    assert!(stats.iter().any(|t| t.name.ends_with("experts.down_proj") && t.finite));
}

/// Tensors by name: their types, shapes and bytes.
type OwnedTensors = BTreeMap<String, (safetensors::Dtype, Vec<usize>, Vec<u8>)>;

/// Codes of four bits, one in a byte, and back.
fn nibbles(bytes: &[u8]) -> Vec<u8> {
    bytes.iter().flat_map(|byte| [byte & 15, byte >> 4]).collect()
}

fn packed(codes: &[u8]) -> Vec<u8> {
    codes.chunks_exact(2).map(|pair| pair[0] | pair[1] << 4).collect()
}

/// `[rows, cols]` items of so many bytes, of which the result has those of other rows and columns.
fn moved(bytes: &[u8], size: usize, rows: &[usize], cols: &[usize]) -> Vec<u8> {
    let item = |row: usize, col: usize| &bytes[(row * cols.len() + col) * size..][..size];
    rows.iter().flat_map(|row| cols.iter().flat_map(move |col| item(*row, *col))).copied().collect()
}

/// The same model with its hidden and its inner dimensions in other orders, which are told apart by
/// no output: so the columns of its matrices are in no order of groups.
fn scattered(case: &QuantisedCase) -> OwnedTensors {
    let order = |len: usize| (0..len).map(|i| (i * 29 + 11) % len).collect::<Vec<usize>>();
    let plain = |len: usize| (0..len).collect::<Vec<usize>>();
    let (hidden, inner) = (order(64), order(96));
    let sizes = |module: &str| match module.rsplit('.').next().unwrap() {
        "gate_proj" | "up_proj" => (inner.clone(), hidden.clone()),
        "down_proj" => (hidden.clone(), inner.clone()),
        "o_proj" => (hidden.clone(), plain(64)),
        "q_proj" => (plain(64), hidden.clone()),
        "k_proj" | "v_proj" => (plain(32), hidden.clone()),
        "embed_tokens" | "lm_head" => (plain(48), hidden.clone()),
        _ => (plain(1), hidden.clone()),
    };
    let tensors = case.tensors().into_iter().filter(|(name, _)| name != "logits");
    let change = |(name, view): (String, TensorView)| {
        let (module, kind) = name.rsplit_once('.').unwrap();
        let ((rows, cols), groups) = (sizes(module), plain(view.shape()[0]));
        let bytes = match kind {
            // Words `[cols / 8, rows]` of eight columns each.
            "qweight" => {
                let of = |col: usize, row: usize| (col / 8 * rows.len() + row) * 8 + col % 8;
                let old = nibbles(view.data());
                let mut new = old.clone();
                for (col, from) in cols.iter().enumerate() {
                    for (row, above) in rows.iter().enumerate() {
                        new[of(col, row)] = old[of(*from, *above)];
                    }
                }
                packed(&new)
            }
            "qzeros" => packed(&moved(&nibbles(view.data()), 1, &groups, &rows)),
            "scales" => moved(view.data(), 2, &groups, &rows),
            "g_idx" => moved(view.data(), 4, &[0], &cols),
            _ => moved(view.data(), 2, &rows, &cols),
        };
        (name, (view.dtype(), view.shape().to_vec(), bytes))
    };
    tensors.map(change).collect()
}

/// A folder with that model, and its source.
pub fn scattered_folder(case: &QuantisedCase) -> (TempDir, ModelSource) {
    let tensors = scattered(case);
    let idx = &tensors["model.layers.0.mlp.down_proj.g_idx"].2;
    assert!(!idx.as_chunks::<4>().0.iter().map(|i| i32::from_le_bytes(*i)).is_sorted());
    let folder = tempfile::tempdir().unwrap();
    let views = tensors.iter().map(|(name, (dtype, shape, bytes))| {
        (name, TensorView::new(*dtype, shape.clone(), bytes).unwrap())
    });
    let path = folder.path().join("model.safetensors");
    safetensors::serialize_to_file(views, None, &path).unwrap();
    std::fs::write(folder.path().join("config.json"), case.config.to_string()).unwrap();
    let source = ModelSource::hf_folder(folder.path().to_owned());
    (folder, source)
}

/// The codes stay codes, and each product gathers its inputs.
#[test]
fn folders_in_the_order_of_activations_equal_transformers() {
    let case = quantised_case("gptq-int4");
    let want = case.logits();
    let (_folder, source) = scattered_folder(&case);
    let mut exact = case.load(&source, true);
    assert_close(&alone(&mut exact, &case.tokens, 7), &want, "in f32");
    let mut model = case.load(&source, false);
    let plain = case.in_folder(|source| case.load(source, false).weight_bytes());
    assert_eq!(model.weight_bytes(), plain);
    let got = alone(&mut model, &case.tokens, 40);
    for (got, want) in got.iter().zip(&want) {
        let largest = want.iter().fold(0.0f32, |most, x| most.max(x.abs()));
        let error = got.iter().zip(want).fold(0.0f32, |m, (a, b)| m.max((a - b).abs()));
        assert!(error <= 5e-3 * largest, "{error} of {largest}");
    }
    assert_eq!(alone(&mut model, &case.tokens, 1), got);
    let stats = tensor_stats(&source).unwrap();
    assert!(stats.iter().all(|tensor| tensor.finite && tensor.max < 4.0), "{stats:?}");
}
