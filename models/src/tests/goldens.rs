//! Every family against transformers: tiny random models, whose logits are stored with the other
//! goldens. Their weights follow from the tensors' names; their GGUF files are, byte for byte in
//! the tensors, what llama.cpp's converter writes.

use super::*;
use crate::arch;
use crate::goldens::{FORMATS, blocks, kernel_errors, logits};
use crate::loader::gguf::Value;
use crate::loader::names;
use crate::testing::{GgufWriter, interleaved, little_endian};
use candle_transformers::models::{gemma2, gemma3, mistral, qwen2, qwen3};
use cresset_kernels::Compute;
use cresset_kernels::linear::{Weight, WeightType};
use sha2::{Digest, Sha256};
use std::collections::{BTreeMap, HashMap};

pub use crate::goldens::{ConvertedModel, GoldenModel as Case, goldens};

/// The families whose rows of Q and K the converter permutes.
const PERMUTED: [&str; 8] = [
    "granite",
    "granitemoe",
    "granitemoehybrid",
    "llama",
    "ministral3",
    "mistral",
    "mixtral",
    "smollm3",
];

impl Case {
    fn head_dim(&self) -> usize {
        let size = |key: &str| self.config[key].as_u64().map(|size| size as usize);
        let heads = size("num_attention_heads").unwrap();
        size("head_dim").unwrap_or_else(|| size("hidden_size").unwrap() / heads)
    }

    fn folder(&self, config: &serde_json::Value) -> CpuModel {
        self.in_folder(config, |source| self.load(source))
    }

    /// Calls `load` with the folder of its files, which exist during the call.
    pub fn in_folder<T>(
        &self,
        config: &serde_json::Value,
        load: impl FnOnce(&ModelSource) -> T,
    ) -> T {
        let folder = tempfile::tempdir().unwrap();
        self.write(folder.path(), config).unwrap();
        load(&ModelSource::hf_folder(folder.path().to_owned()))
    }

    fn gguf(&self, converted: &ConvertedModel) -> CpuModel {
        self.load(&ModelSource::gguf(self.gguf_file(converted).path().to_owned()))
    }

    /// The model from a GGUF file as llama.cpp's quantiser writes them, without outer dimensions
    /// of one, if that makes a difference.
    fn quantiser_gguf(&self, converted: &ConvertedModel) -> Option<CpuModel> {
        let mut writer = self.gguf_writer(converted);
        let mut differs = false;
        for (_, shape, ..) in &mut writer.tensors {
            while shape.len() > 1 && shape[0] == 1 {
                shape.remove(0);
                differs = true;
            }
        }
        differs.then(|| self.load(&ModelSource::gguf(written(&writer).path().to_owned())))
    }

    /// The model from a GGUF file of the converter's first form for Qwen3-Next, which keeps the
    /// fused tensors, if it has some.
    fn fused_gguf(&self, converted: &ConvertedModel) -> Option<CpuModel> {
        let mut writer = self.gguf_writer(converted);
        let fused: Vec<_> =
            self.tensors.iter().filter(|(name, _)| name.ends_with("qkvz.weight")).collect();
        for (name, shape) in &fused {
            let layer = name.split('.').nth(2).unwrap();
            let apart = ["attn_qkv", "attn_gate"].map(|part| format!("blk.{layer}.{part}.weight"));
            writer.tensors.retain(|(name, ..)| !apart.contains(name));
            let data = self.weights(name, shape);
            writer.f32(&format!("blk.{layer}.ssm_in.weight"), shape, &data);
        }
        let load = || self.load(&ModelSource::gguf(written(&writer).path().to_owned()));
        (!fused.is_empty()).then(load)
    }

    pub fn gguf_file(&self, converted: &ConvertedModel) -> tempfile::NamedTempFile {
        written(&self.gguf_writer(converted))
    }

    fn gguf_writer(&self, converted: &ConvertedModel) -> GgufWriter {
        let mut writer = GgufWriter::default();
        writer
            .metadata
            .extend(converted.metadata.iter().map(|(key, value)| (key.clone(), metadata(value))));
        let names = arch::from_hf(Path::new("config.json"), self.config.to_string().as_bytes())
            .unwrap()
            .options
            .names;
        let mut stacks: BTreeMap<String, Vec<(usize, &String)>> = BTreeMap::new();
        for (name, shape) in &self.tensors {
            if self.put_in_parts(name, shape, names.gguf, &mut writer) {
                continue;
            }
            // The usual name of a tensor, and of which expert it is.
            let usual = self.usual_name(name, names.hf);
            if let Some((module, expert)) = usual.split_once(".experts.")
                && let Some((expert, part)) = expert.split_once('.')
                && let Ok(expert) = expert.parse()
            {
                let whole = format!("{module}.experts.{part}");
                stacks.entry(whole).or_default().push((expert, name));
                continue;
            }
            if self.kind().starts_with("granitemoe") && usual.contains("gate_up_proj") {
                self.put_halves(name, shape, &usual, &mut writer);
                continue;
            }
            if name.ends_with("A_log") {
                // The converter stores what is computed from it, which is among the added tensors.
                continue;
            }
            let mut data = self.tiled(name, shape, self.weights(name, shape));
            let shape = self.converted_shape(name, shape);
            let plain = name.ends_with("linear_attn.norm.weight");
            if names.norms_less_one && usual.ends_with("norm.weight") && !plain {
                data = data.into_iter().map(|x| x + 1.0).collect();
            }
            if PERMUTED.contains(&self.kind())
                && (name.contains("q_proj") || name.contains("k_proj"))
            {
                data = interleaved(&data, shape.get(1).map_or(1, |cols| *cols), self.head_dim());
            }
            writer.f32(&names::gguf(&usual, names.gguf).unwrap(), &shape, &data);
        }
        for (name, mut experts) in stacks {
            experts.sort_unstable();
            let shape = [&[experts.len()][..], &self.tensors[experts[0].1]].concat();
            let of_expert = |(_, name): &(usize, &String)| self.weights(name, &shape[1..]);
            let data: Vec<f32> = experts.iter().flat_map(of_expert).collect();
            writer.f32(&names::gguf(&name, names.gguf).unwrap(), &shape, &data);
        }
        for (name, data) in &converted.extra {
            writer.f32(name, &[data.len()], data);
        }
        let digest = |data: &[u8]| hex::encode(&Sha256::digest(data)[..8]);
        let digests = writer.tensors.iter().map(|(name, .., data)| (name.clone(), digest(data)));
        assert_eq!(digests.collect::<BTreeMap<_, _>>(), converted.digests, "{}", self.name);
        writer
    }

    /// Writes a tensor that the converter divides, if it is one.
    fn put_in_parts(
        &self,
        name: &str,
        shape: &[usize],
        own: &[(&str, &str)],
        writer: &mut GgufWriter,
    ) -> bool {
        if self.kind() == "gpt_oss" && name.contains(".experts.") {
            self.put_experts_apart(name, shape, writer);
        } else if name.ends_with("kv_b_proj.weight") {
            self.put_latent_heads(name, shape, writer);
        } else if name.ends_with("in_proj_qkvz.weight") {
            self.put_delta_matrices(name, shape, own, writer);
        } else {
            // Towers are in a file of their own.
            return name.contains("visual.");
        }
        true
    }

    /// The usual name of a tensor whose family has a name of its own for it.
    fn usual_name(&self, name: &str, own: &[(&str, &str)]) -> String {
        if let Some(apart) = name.strip_prefix("mtp.") {
            return self.usual_name_of_head(apart, own);
        }
        let name = &name.replace("model.language_model.", "model.");
        let replace = |name: String, (to, from): &(&str, &str)| name.replace(from, to);
        let usual = own.iter().fold(name.to_owned(), replace);
        let stacked = self.kind() == "mistral4" && usual.contains(".experts.");
        if stacked { usual + ".weight" } else { usual }
    }

    /// The same of a tensor of a head that is apart from the model's layers: the converter puts it
    /// behind them.
    fn usual_name_of_head(&self, apart: &str, own: &[(&str, &str)]) -> String {
        let behind = format!("model.layers.{}.", self.config["num_hidden_layers"]);
        let usual = match apart {
            "fc.weight" => "eh_proj.weight",
            "pre_fc_norm_embedding.weight" => "enorm.weight",
            "pre_fc_norm_hidden.weight" => "hnorm.weight",
            "norm.weight" => "shared_head.norm.weight",
            of_layer => of_layer.strip_prefix("layers.0.").unwrap(),
        };
        self.usual_name(&(behind + usual), own)
    }

    /// The shape that the converter gives a tensor.
    fn converted_shape(&self, name: &str, shape: &[usize]) -> Vec<usize> {
        match *shape {
            // A convolution's taps lose the axis of its one input.
            [channels, 1, taps] => vec![channels, taps],
            [heads] if name.ends_with("mamba.D") => vec![heads, 1],
            [inner] if name.ends_with("mamba.norm.weight") => {
                let groups = self.config["mamba_n_groups"].as_u64().unwrap() as usize;
                vec![groups, inner / groups]
            }
            _ => shape.to_vec(),
        }
    }

    /// Writes the matrices that make keys and values of a latent vector apart, those of keys
    /// transposed.
    fn put_latent_heads(&self, name: &str, shape: &[usize], writer: &mut GgufWriter) {
        let size = |key: &str| self.config[key].as_u64().unwrap() as usize;
        let (heads, plain) = (size("num_attention_heads"), size("qk_nope_head_dim"));
        let (rank, value) = (shape[1], size("v_head_dim"));
        let values = self.weights(name, shape);
        let (mut keys, mut rest) = (Vec::new(), Vec::new());
        for head in values.chunks((plain + value) * rank) {
            let (own, values) = head.split_at(plain * rank);
            keys.extend((0..rank).flat_map(|col| own[col..].iter().step_by(rank)));
            rest.extend_from_slice(values);
        }
        let name = |part: &str| names::gguf(&name.replace("kv_b_proj", part), &[]).unwrap();
        writer.f32(&name("k_b_proj"), &[heads, rank, plain], &keys);
        writer.f32(&name("v_b_proj"), &[heads, value, rank], &rest);
    }

    /// Writes what a delta rule convolves and its gates as tensors of their own. In one tensor each
    /// key head has rows of a query, a key, and its heads' values and gates.
    fn put_delta_matrices(
        &self,
        name: &str,
        shape: &[usize],
        own: &[(&str, &str)],
        writer: &mut GgufWriter,
    ) {
        let size = |key: &str| self.config[key].as_u64().unwrap() as usize;
        let (heads, key) = (size("linear_num_key_heads"), size("linear_key_head_dim"));
        let value = size("linear_num_value_heads") / heads * size("linear_value_head_dim");
        let (values, cols, mut first) = (self.weights(name, shape), shape[1], 0);
        let [query, key, value, gate] = [key, key, value, value].map(|rows| {
            let at = first;
            first += rows * cols;
            let heads = values.chunks(shape[0] / heads * cols);
            heads.flat_map(|head| &head[at..][..rows * cols]).copied().collect::<Vec<f32>>()
        });
        for (part, data) in [("qkv", [query, key, value].concat()), ("z", gate)] {
            let name = names::gguf(&name.replace("qkvz", part), own).unwrap();
            writer.f32(&name, &[data.len() / cols, cols], &data);
        }
    }

    /// Writes the two halves of each matrix of a tensor, gate and up, as tensors of their own.
    fn put_halves(&self, name: &str, shape: &[usize], usual: &str, writer: &mut GgufWriter) {
        let [experts @ .., rows, cols] = shape else { panic!("{name} of {shape:?}") };
        let values = self.weights(name, shape);
        for (half, part) in ["gate_proj", "up_proj"].into_iter().enumerate() {
            let matrices = values.chunks(rows * cols);
            let data: Vec<f32> = matrices
                .flat_map(|matrix| matrix.chunks(rows / 2 * cols).nth(half).unwrap())
                .copied()
                .collect();
            let name = names::gguf(&usual.replace("gate_up_proj", part), &[]).unwrap();
            writer.f32(&name, &[experts, &[rows / 2, *cols]].concat(), &data);
        }
    }

    /// Writes a tensor of GPT-OSS's experts: gate and up, whose rows take turns, in tensors of
    /// their own, dense matrices transposed, and codes of MXFP4 with their scales.
    fn put_experts_apart(&self, name: &str, shape: &[usize], writer: &mut GgufWriter) {
        let (layer, part) = name.split_once(".mlp.experts.").unwrap();
        let (part, form) = part.split_once("_proj").unwrap();
        let (rows, cols, dtype) = match (form, shape) {
            ("_scales", _) => return,
            ("_blocks", &[.., blocks, _]) => {
                (block_rows(name, shape), vec![32 * blocks], WeightType::MXFP4)
            }
            ("_bias", _) => {
                let values = self.weights(name, shape);
                (values.iter().map(|x| little_endian(&[*x])).collect(), vec![], WeightType::F32)
            }
            (_, &[_, cols, rows]) => {
                let values = self.weights(name, shape);
                let row = |at: usize| {
                    let first = at / rows * cols * rows + at % rows;
                    (0..cols).flat_map(|col| little_endian(&[values[first + col * rows]])).collect()
                };
                ((0..shape[0] * rows).map(row).collect(), vec![cols], WeightType::F32)
            }
            _ => panic!("{name} of {shape:?}"),
        };
        let rows: Vec<Vec<u8>> = rows;
        let parts: &[&str] = if part == "gate_up" { &["gate", "up"] } else { &[part] };
        for (turn, own) in parts.iter().enumerate() {
            let data = rows.iter().skip(turn).step_by(parts.len()).flatten().copied().collect();
            let height = rows.len() / shape[0] / parts.len();
            let end = if form == "_bias" { "bias" } else { "weight" };
            let name = format!("{layer}.mlp.experts.{own}_proj.{end}");
            let shape = [&[shape[0], height], &cols[..]].concat();
            writer.tensors.push((names::gguf(&name, &[]).unwrap(), shape, dtype, data));
        }
    }

    /// A tensor with the value heads of a delta rule in the order of GGUF: those of all first value
    /// heads of a key head come first.
    fn tiled(&self, name: &str, shape: &[usize], data: Vec<f32>) -> Vec<f32> {
        let size = |key: &str| self.config[key].as_u64().map_or(0, |size| size as usize);
        let (keys, dim) = (size("linear_num_key_heads"), size("linear_value_head_dim"));
        let each = size("linear_num_value_heads").checked_div(keys).unwrap_or(1);
        let is_tiled = each > 1 && self.kind() != "qwen3_next";
        let Some((_, part)) = name.split_once("linear_attn.").filter(|_| is_tiled) else {
            return data;
        };
        // So many values belong to one head, and so many before those of the values' heads.
        let cols: usize = shape[1..].iter().product();
        let head_keys = 2 * keys * size("linear_key_head_dim") * cols;
        let (rows, unit, first) = match part {
            "in_proj_qkv.weight" | "conv1d.weight" => (1, dim * cols, head_keys),
            "in_proj_z.weight" => (1, dim * cols, 0),
            "in_proj_a.weight" | "in_proj_b.weight" | "dt_bias" => (1, cols, 0),
            "out_proj.weight" => (shape[0], dim, 0),
            _ => return data,
        };
        let tile = |row: &[f32]| {
            let (keys_of, values) = row.split_at(first);
            let head = |at: usize| &values[(at % keys * each + at / keys) * unit..][..unit];
            let heads = (0..keys * each).flat_map(head);
            keys_of.iter().chain(heads).copied().collect::<Vec<f32>>()
        };
        data.chunks(data.len() / rows).flat_map(tile).collect()
    }

    /// The longest context is the prompt's length, so LongRoPE chooses as for one pass over it.
    fn load(&self, source: &ModelSource) -> CpuModel {
        self.load_as(source, self.is_quantised())
    }

    fn load_as(&self, source: &ModelSource, dequantise: bool) -> CpuModel {
        let max_context = Some(self.tokens.len());
        let options = ModelOptions { max_context, dequantise, ..options() };
        load(source, &options).unwrap_or_else(|error| panic!("{}: {error}", self.name))
    }

    fn check(&self, mut model: CpuModel, want: &[Vec<f32>]) {
        for chunk in [1, 7, self.tokens.len()] {
            let got = alone(&mut model, &self.tokens, chunk);
            assert_close(&got, want, &self.name);
            assert_eq!(greedy(&got), greedy(want), "{}", self.name);
        }
    }
}

/// The most likely token of each row.
fn greedy(rows: &[Vec<f32>]) -> Vec<Option<usize>> {
    let best = |row: &Vec<f32>| (0..row.len()).max_by(|a, b| row[*a].total_cmp(&row[*b]));
    rows.iter().map(best).collect()
}

/// The rows of a tensor in MXFP4 as GGUF has them.
fn block_rows(name: &str, shape: &[usize]) -> Vec<Vec<u8>> {
    let codes = Case::blocks(name, shape).unwrap();
    let scales = name.replace("_blocks", "_scales");
    let scales = Case::blocks(&scales, &shape[..3]).unwrap();
    let block = |(codes, scale): (&[u8], &u8)| {
        let values: Vec<u8> = codes.iter().flat_map(|byte| [byte % 16, byte / 16]).collect();
        let pairs = values[..16].iter().zip(&values[16..]).map(|(low, high)| low + 16 * high);
        [*scale].into_iter().chain(pairs).collect::<Vec<u8>>()
    };
    let blocks: Vec<Vec<u8>> = codes.chunks(16).zip(&scales).map(block).collect();
    blocks.chunks(shape[2]).map(<[_]>::concat).collect()
}

fn metadata(value: &serde_json::Value) -> Value {
    match value {
        serde_json::Value::String(text) => Value::String(text.clone()),
        serde_json::Value::Bool(flag) => Value::Bool(*flag),
        serde_json::Value::Array(values) => Value::Array(values.iter().map(metadata).collect()),
        number if number.is_u64() => Value::U32(number.as_u64().unwrap().try_into().unwrap()),
        number => Value::F32(number.as_f64().unwrap() as f32),
    }
}

fn written(writer: &GgufWriter) -> tempfile::NamedTempFile {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), writer.to_bytes()).unwrap();
    file
}

#[test]
fn every_family_equals_transformers() {
    let goldens = goldens();
    let logits = logits();
    assert_eq!(goldens.cases.len(), logits.len());
    for case in &goldens.cases {
        let want = rows(&logits[&case.name]);
        case.check(case.folder(&case.config), &want);
        case.check(case.folder(&case.older_config), &want);
        if let Some(converted) = &case.gguf {
            case.check(case.gguf(converted), &want);
            let further = [case.quantiser_gguf(converted), case.fused_gguf(converted)];
            for model in further.into_iter().flatten() {
                case.check(model, &want);
            }
        }
    }
}

pub fn case_of(name: &str) -> Case {
    goldens().cases.into_iter().find(|case| case.name == name).unwrap()
}

/// Whichever experts the other rows of a step choose, and whatever states they have, a row's logits
/// have the same bits.
#[test]
fn rows_do_not_depend_on_the_batch() {
    let recurrent = [
        "lfm2",
        "lfm2-exact-width",
        "lfm2-moe",
        "qwen3.5",
        "qwen3.5-odd",
        "qwen3.5-moe",
        "qwen3-next",
        "granite-hybrid",
    ];
    let experts = ["qwen3-moe", "qwen2-moe", "mixtral", "gpt-oss", "gpt-oss-mxfp4", "glm4-moe"];
    let gemma4 = ["gemma4", "gemma4-inputs", "gemma4-experts", "gemma4-odd"];
    let latent = ["deepseek-v2", "deepseek-v3", "deepseek-v3-odd", "glm4-moe-lite", "mistral4"];
    let others = ["olmo2", "olmo3", "glm4-moe-groups"].into_iter().chain(gemma4).chain(latent);
    for name in experts.into_iter().chain(recurrent).chain(others) {
        let case = case_of(name);
        let mut model = case.in_folder(&case.config, |source| case.load_as(source, false));
        let whole = alone(&mut model, &case.tokens, 40);
        for chunk in [1, 7] {
            assert_eq!(alone(&mut model, &case.tokens, chunk), whole, "{name} by {chunk}");
        }
        let (own, other) = ([0, 2, 4], [1, 3]);
        let spans = [
            Span { tokens: &case.tokens[..25], cached: 0, blocks: &other },
            Span { tokens: &case.tokens, cached: 0, blocks: &own },
        ];
        let step = batch(&spans, BLOCK_SIZE, false);
        let mut step = step.spread(model.cache_kinds(), BLOCK_SIZE);
        let together = rows(&model.forward(&step).unwrap());
        assert_eq!(together[..25], whole[..25], "{name}");
        assert_eq!(together[25..], whole[..], "{name}");
        step.logits_indices = vec![24, 64];
        let last = rows(&model.forward(&step).unwrap());
        assert_eq!(last, [whole[24].clone(), whole[39].clone()], "{name}");
        step.logits_indices.clear();
        assert_eq!(model.forward(&step).unwrap().dims()[0], 0, "{name}");
    }
}

/// Products with MXFP4 round their activations to sixteen bits, and the cache is f16 beside them.
/// From the folder and from GGUF the blocks are the same, and so are all bits.
#[test]
fn blocks_are_close_to_their_values_and_the_same_in_both_files() {
    let case = case_of("gpt-oss-mxfp4");
    let compute = |source: &ModelSource| alone(&mut case.load_as(source, false), &case.tokens, 40);
    let folder = case.in_folder(&case.config, compute);
    let file = case.gguf_file(case.gguf.as_ref().unwrap());
    assert_eq!(compute(&ModelSource::gguf(file.path().to_owned())), folder);
    for (got, want) in folder.iter().zip(rows(&logits()["gpt-oss-mxfp4"])) {
        let largest = want.iter().fold(0.0f32, |most, x| most.max(x.abs()));
        let error = got.iter().zip(&want).fold(0.0f32, |most, (a, b)| most.max((a - b).abs()));
        assert!(error <= 5e-3 * largest, "{error} of {largest}");
    }
}

/// The cards of both files count the same parameters.
#[test]
fn codes_and_scales_count_as_the_values_they_stand_for() {
    let case = case_of("gpt-oss-mxfp4");
    let card = |source: &ModelSource| crate::inspect(source).unwrap();
    let folder = case.in_folder(&case.config, card);
    let file = case.gguf_file(case.gguf.as_ref().unwrap());
    let gguf = card(&ModelSource::gguf(file.path().to_owned()));
    assert_eq!(folder.parameters(), gguf.parameters());
    assert_eq!(folder.types["MXFP4"], gguf.types["MXFP4"]);
    // Of 4 layers, 6 experts of 3 matrices of 32 by 64.
    assert_eq!(folder.types["MXFP4"], 4 * 6 * 3 * 32 * 64);
}

/// A state from which one sequence went on is as it was: another goes on from it too.
#[test]
fn a_state_goes_on_as_often_as_it_is_read() {
    for name in ["lfm2", "qwen3.5", "granite-hybrid-dense"] {
        let case = case_of(name);
        let mut model = case.folder(&case.config);
        let whole = alone(&mut model, &case.tokens, 40);
        let mut part = |range: std::ops::Range<usize>, write| {
            let tokens = &case.tokens[range.clone()];
            let span = Span { tokens, cached: range.start, blocks: &[7, 8, 9] };
            let step = batch(&[span], BLOCK_SIZE, false);
            let mut step = step.spread(model.cache_kinds(), BLOCK_SIZE);
            step.state_writes = vec![write];
            rows(&model.forward(&step).unwrap())
        };
        assert_eq!(part(0..17, 7), whole[..17], "{name}");
        for write in [1, 2, 7] {
            assert_eq!(part(17..40, write), whole[17..], "{name} into {write}");
        }
    }
}

/// A state that a part of a sequence left is the one that a step of its tokens would have left.
#[test]
fn a_sequence_in_parts_leaves_the_state_after_each() {
    for name in ["lfm2", "qwen3.5", "granite-hybrid-dense"] {
        let case = case_of(name);
        let mut model = case.folder(&case.config);
        let whole = alone(&mut model, &case.tokens, 40);
        let mut step = |range: std::ops::Range<usize>, moves: &[[u32; 3]]| {
            let tokens = &case.tokens[range.clone()];
            let span = Span { tokens, cached: range.start, blocks: &[7, 8, 9] };
            let mut step = batch(&[span], BLOCK_SIZE, false);
            step.part_starts = moves.iter().map(|[start, ..]| *start).collect();
            step.part_starts.push(tokens.len() as u32);
            let mut step = step.spread(model.cache_kinds(), BLOCK_SIZE);
            step.state_reads = moves.iter().map(|[_, read, _]| *read).collect();
            step.state_writes = moves.iter().map(|[.., write]| *write).collect();
            rows(&model.forward(&step).unwrap())
        };
        step(0..17, &[[0, u32::MAX, 7]]);
        assert_eq!(step(17..21, &[[0, 7, 7], [1, 7, 4], [2, 4, 5], [3, 5, 6]]), whole[17..21]);
        // The last two tokens were wrong ones.
        assert_eq!(step(19..40, &[[0, 4, 4]]), whole[19..], "{name}");
    }
}

#[test]
fn states_that_contradict_the_batch_are_refused() {
    let case = case_of("lfm2");
    let mut model = case.folder(&case.config);
    let span = Span { tokens: &case.tokens[20..], cached: 20, blocks: &[1, 2, 3] };
    let good = batch(&[span], BLOCK_SIZE, true).spread(model.cache_kinds(), BLOCK_SIZE);
    alone(&mut model, &case.tokens[..20], 20);
    model.forward(&good).unwrap();
    let breaks: [fn(&mut ForwardBatch); 6] = [
        |b| b.state_reads = vec![u32::MAX],
        |b| b.part_starts = vec![0],
        |b| {
            b.part_starts = vec![0, 1, 20];
            (b.state_reads, b.state_writes) = (vec![1, 1], vec![2, 3]);
        },
        |b| b.state_reads = vec![BLOCKS as u32],
        |b| b.state_writes = vec![BLOCKS as u32],
        |b| b.state_writes.clear(),
    ];
    for break_it in breaks {
        let mut bad = good.clone();
        break_it(&mut bad);
        assert!(matches!(model.forward(&bad), Err(Error::Batch(_))), "{bad:?}");
    }
}

/// Some checkpoints have the matrices of all experts of a layer in one tensor. Their cards count
/// the same parameters.
#[test]
fn experts_may_be_stacked_in_one_tensor() {
    let case = case_of("qwen3-moe");
    let parameters: usize =
        case.tensors.values().map(|shape| shape.iter().product::<usize>()).sum();
    let count = |source: &ModelSource| crate::inspect(source).unwrap().parameters() as usize;
    let folder = tempfile::tempdir().unwrap();
    case.write(folder.path(), &case.config).unwrap();
    let source = ModelSource::hf_folder(folder.path().to_owned());
    let apart = alone(&mut case.load(&source), &case.tokens, 40);
    assert_eq!(count(&source), parameters);
    let path = folder.path().join("model.safetensors");
    let mut tensors = candle_core::safetensors::load(&path, &Device::Cpu).unwrap();
    for layer in 0..3 {
        let mut experts = |part: &str| {
            let name = |expert| format!("model.layers.{layer}.mlp.experts.{expert}.{part}.weight");
            let parts: Vec<Tensor> = (0..8).map(|i| tensors.remove(&name(i)).unwrap()).collect();
            Tensor::stack(&parts, 0).unwrap()
        };
        let [gate, up, down] = ["gate_proj", "up_proj", "down_proj"].map(&mut experts);
        let name = |part: &str| format!("model.layers.{layer}.mlp.experts.{part}");
        tensors.insert(name("gate_up_proj"), Tensor::cat(&[gate, up], 1).unwrap());
        tensors.insert(name("down_proj"), down);
    }
    candle_core::safetensors::save(&tensors, &path).unwrap();
    assert_eq!(alone(&mut case.load(&source), &case.tokens, 40), apart);
    assert_eq!(count(&source), parameters);
    let file = case.gguf_file(case.gguf.as_ref().unwrap());
    assert_eq!(count(&ModelSource::gguf(file.path().to_owned())), parameters);
}

/// The layers behind a model's own, which its files have beside it, change nothing.
#[test]
fn layers_that_predict_further_tokens_are_left_out() {
    let case = case_of("glm4-moe");
    assert_eq!(case.config["num_nextn_predict_layers"], 1);
    let folder = tempfile::tempdir().unwrap();
    case.write(folder.path(), &case.config).unwrap();
    let source = ModelSource::hf_folder(folder.path().to_owned());
    let without = alone(&mut case.load(&source), &case.tokens, 40);
    let path = folder.path().join("model.safetensors");
    let mut tensors = candle_core::safetensors::load(&path, &Device::Cpu).unwrap();
    let further = Tensor::zeros(64, DType::F32, &Device::Cpu).unwrap();
    tensors.insert("model.layers.3.enorm.weight".to_owned(), further.clone());
    candle_core::safetensors::save(&tensors, &path).unwrap();
    assert_eq!(alone(&mut case.load(&source), &case.tokens, 40), without);
    tensors.insert("model.layers.4.enorm.weight".to_owned(), further);
    candle_core::safetensors::save(&tensors, &path).unwrap();
    let error = load(&source, &options()).err().unwrap().to_string();
    assert!(error.contains("model.layers.4.enorm.weight is left over"), "{error}");

    let file = case.gguf_file(case.gguf.as_ref().unwrap());
    let mut writer = GgufWriter::read(file.path()).unwrap();
    writer.set("glm4moe.block_count", Value::U32(4));
    writer.set("glm4moe.nextn_predict_layers", Value::U32(1));
    writer.f32("blk.3.nextn.enorm.weight", &[64], &[0.0; 64]);
    std::fs::write(file.path(), writer.to_bytes()).unwrap();
    let source = ModelSource::gguf(file.path().to_owned());
    assert_eq!(alone(&mut case.load(&source), &case.tokens, 40), without);
}

/// GGUF files may list the sliding layers instead of relying on the family's pattern.
#[test]
fn listed_sliding_layers_are_obeyed() {
    let mut case = case_of("gemma3");
    let want = rows(&logits()["gemma3"]);
    let mut converted = case.gguf.take().unwrap();
    let mut with = |full: usize| {
        let list: Vec<bool> = (0..7).map(|layer| layer != full).collect();
        converted.metadata.insert("gemma3.attention.sliding_window_pattern".into(), list.into());
        alone(&mut case.gguf(&converted), &case.tokens, 40)
    };
    assert_close(&with(5), &want, "the family's pattern");
    assert_ne!(with(2), with(5));
}

type Step = Box<dyn FnMut(&Tensor, usize) -> candle_core::Result<Tensor>>;

/// candle-transformers' model of a case: computes the logits of a token from its position.
fn candle(case: &Case) -> candle_core::Result<Step> {
    let weights = |(name, shape): (&String, &Vec<usize>)| {
        Ok((name.clone(), Tensor::from_vec(case.weights(name, shape), &shape[..], &Device::Cpu)?))
    };
    let weights =
        case.tensors.iter().map(weights).collect::<candle_core::Result<HashMap<_, _>>>()?;
    let weights = VarBuilder::from_tensors(weights, DType::F32, &Device::Cpu);
    let mut config = case.older_config.clone();
    if case.kind() == "qwen2" {
        config["sliding_window"] = 4096.into();
    }
    Ok(match case.kind() {
        "mistral" => {
            let mut model = mistral::Model::new(&serde_json::from_value(config).unwrap(), weights)?;
            Box::new(move |token, position| model.forward(token, position))
        }
        "qwen2" => {
            let mut model =
                qwen2::ModelForCausalLM::new(&serde_json::from_value(config).unwrap(), weights)?;
            Box::new(move |token, position| model.forward(token, position))
        }
        "qwen3" => {
            let mut model =
                qwen3::ModelForCausalLM::new(&serde_json::from_value(config).unwrap(), weights)?;
            Box::new(move |token, position| model.forward(token, position))
        }
        "gemma2" => {
            let mut model =
                gemma2::Model::new(false, &serde_json::from_value(config).unwrap(), weights)?;
            Box::new(move |token, position| model.forward(token, position))
        }
        _ => {
            let mut model =
                gemma3::Model::new(false, &serde_json::from_value(config).unwrap(), weights)?;
            Box::new(move |token, position| model.forward(token, position))
        }
    })
}

/// The second reference, for models that candle has. Its Gemma 2 ignores the window, so it is
/// compared only within the window.
#[test]
fn candles_models_agree() {
    for (name, tokens) in
        [("mistral", 40), ("qwen2", 40), ("qwen3", 40), ("gemma2", 8), ("gemma3", 40)]
    {
        let goldens = goldens();
        let case = goldens.cases.iter().find(|case| case.name == name).unwrap();
        let mut candle = candle(case).unwrap();
        let step = |(position, token): (usize, &u32)| {
            let token = Tensor::new(&[[*token]], &Device::Cpu).unwrap();
            candle(&token, position).unwrap().flatten_all().unwrap().to_vec1().unwrap()
        };
        let want: Vec<Vec<f32>> = case.tokens[..tokens].iter().enumerate().map(step).collect();
        let mut ours = case.folder(&case.config);
        assert_close(&alone(&mut ours, &case.tokens[..tokens], 1), &want, name);
    }
}

#[test]
fn every_block_format_decodes_to_the_reference_values() {
    let blocks = blocks();
    for dtype in FORMATS {
        let name = dtype.name();
        let raw = blocks[&format!("{name}.raw")].flatten_all().unwrap().to_vec1::<u8>().unwrap();
        let want = rows(&blocks[&format!("{name}.values")]);
        let weight = Weight::from_ggml(dtype, &raw, want.len(), want[0].len()).unwrap();
        for (row, want) in want.iter().enumerate() {
            let mut got = vec![0.0; want.len()];
            weight.row_f32(row, &mut got);
            assert_eq!(&got, want, "{name}, row {row}");
        }
    }
}

/// The check of a machine's kernels, as qualification runs it.
#[test]
fn the_kernels_of_this_machine_are_close() {
    let scratch = tempfile::tempdir().unwrap();
    for threads in [1, 3] {
        let errors = kernel_errors(&Compute::new(threads), scratch.path()).unwrap();
        assert_eq!(errors.len(), 3 * goldens().cases.len() + FORMATS.len());
        for error in errors {
            assert!(error.most < 1e-3, "{error:?}");
            assert!(error.relative < if error.rounded { 1e-8 } else { 1e-9 }, "{error:?}");
        }
    }
}

/// The oldest files have one tensor that makes keys and values of latent vectors, which may be
/// quantised, and give the sizes of heads as those of keys and values.
#[test]
fn one_tensor_may_make_keys_and_values_of_latent_vectors() {
    let case = case_of("deepseek-v3");
    let file = case.gguf_file(case.gguf.as_ref().unwrap());
    let source = ModelSource::gguf(file.path().to_owned());
    let want = alone(&mut case.load(&source), &case.tokens, 40);
    let mut writer = GgufWriter::read(file.path()).unwrap();
    writer.metadata.retain(|(key, _)| !key.ends_with("_mla"));
    for (key, value) in [("key_length", 24), ("value_length", 12), ("head_count_kv", 4)] {
        writer.set(&format!("deepseek2.attention.{key}"), Value::U32(value));
    }
    let of_heads = |name: &str| name.contains("attn_k_b") || name.contains("attn_v_b");
    writer.tensors.retain(|(name, ..)| !of_heads(name));
    for (name, shape) in case.tensors.iter().filter(|(name, _)| name.contains("kv_b_proj")) {
        let data = case.weights(name, shape);
        writer.f32(&names::gguf(name, &[]).unwrap(), shape, &data);
    }
    let logits = |writer: &GgufWriter, dequantise| {
        std::fs::write(file.path(), writer.to_bytes()).unwrap();
        alone(&mut case.load_as(&source, dequantise), &case.tokens, 40)
    };
    assert_eq!(logits(&writer, false), want);
    let blocks = |name: &str| name.contains("attn_kv_b").then_some(WeightType::Q8_0);
    writer.quantise(blocks).unwrap();
    let (got, exact) = (logits(&writer, false), logits(&writer, true));
    assert_ne!(exact, want);
    for (got, exact) in got.iter().zip(&exact) {
        let largest = exact.iter().fold(0.0f32, |most, x| most.max(x.abs()));
        let error = got.iter().zip(exact).fold(0.0f32, |most, (a, b)| most.max((a - b).abs()));
        assert!(error <= 1e-3 * largest, "{error} of {largest}");
    }
}

/// Files of DeepSeek-V2 do not say how experts are routed; others that do not are refused.
#[test]
fn experts_of_unknown_routing_are_refused() {
    let without_function = |name: &str| {
        let case = case_of(name);
        let file = case.gguf_file(case.gguf.as_ref().unwrap());
        let mut writer = GgufWriter::read(file.path()).unwrap();
        writer.metadata.retain(|(key, _)| !key.ends_with("expert_gating_func"));
        std::fs::write(file.path(), writer.to_bytes()).unwrap();
        let source = ModelSource::gguf(file.path().to_owned());
        load(&source, &options()).map(|mut model| alone(&mut model, &case.tokens, 40))
    };
    assert_close(&without_function("deepseek-v2").unwrap(), &rows(&logits()["deepseek-v2"]), "V2");
    for name in ["deepseek-v3", "glm4-moe-lite"] {
        let error = without_function(name).err().unwrap().to_string();
        assert!(error.contains("expert_gating_func") && error.contains("scoring_func"), "{error}");
    }
}

/// A token takes one vector in each layer, and no more.
#[test]
fn latent_vectors_are_kept_once() {
    for (name, width) in [("deepseek-v3", 32 + 8), ("deepseek-v3-odd", 48 + 16)] {
        let case = case_of(name);
        let model = case.folder(&case.config);
        assert_eq!(model.config().kv_block_bytes(1), 3 * width * 4, "{name}");
        let blocks = model.num_blocks() * BLOCK_SIZE * 3 * width * 4;
        assert_eq!(model.memory_bytes() - model.weight_bytes(), blocks, "{name}");
    }
}
