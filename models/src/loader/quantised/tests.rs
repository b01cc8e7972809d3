//! Every value of every layout against its definition, which is written here once more and can have
//! one thing wrong; and files that are refused.

use super::*;
use crate::loader::safetensors::Checkpoint;
use crate::loader::store::Raw;
use crate::{ModelSource, Result};
use half::{bf16, f16};
use safetensors::tensor::TensorView;

/// A tensor of a file: the end of its name, its type and its bytes.
struct Part(&'static str, Dtype, Vec<usize>, Vec<u8>);

/// Writes a file with the tensors and reads the matrix `m.weight`, row by row.
fn read(quantisation: &Quantisation, parts: &[Part]) -> Result<(String, Vec<f32>)> {
    let folder = tempfile::tempdir().unwrap();
    let views: Vec<(String, TensorView)> = parts
        .iter()
        .map(|Part(end, dtype, shape, bytes)| {
            (format!("m.{end}"), TensorView::new(*dtype, shape.clone(), bytes).unwrap())
        })
        .collect();
    let path = folder.path().join("model.safetensors");
    safetensors::serialize_to_file(views, None, &path).unwrap();
    let source = ModelSource::hf_folder(folder.path().to_owned());
    let mut files = Checkpoint::open(&source, folder.path(), Some(quantisation))?;
    let dtype = files.dtype("m.weight").unwrap();
    let cols = *files.shape("m.weight").unwrap().last().unwrap();
    let rows = files.shape("m.weight").unwrap().iter().product::<usize>() / cols;
    let (bytes, order) = files.take("m.weight")?;
    let values = Raw { dtype, bytes: &bytes, rows, cols, order: order.as_ref() }.values()?;
    files.finish()?;
    Ok((dtype.name().to_owned(), values))
}

/// What is wrong in a definition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wrong {
    Nothing,
    /// The codes of a word in the opposite order.
    Nibbles,
    /// Each zero one too large.
    Zero,
    /// The scale and the zero of the next group.
    Group,
    /// Scale and zero of the next row.
    Row,
}

/// Random bytes: SplitMix64.
fn bytes(seed: u64, count: usize) -> Vec<u8> {
    let word = |i: u64| {
        let mut mixed = (seed << 32).wrapping_add(i.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb) >> 40
    };
    (1..=count as u64).map(|i| word(i) as u8).collect()
}

/// Random positive scales in f16, around a hundredth.
fn scales(count: usize) -> Vec<u8> {
    let value = |byte: u8| f16::from_f32(0.01 + f32::from(byte) / 7919.0);
    bytes(3, count).into_iter().flat_map(|byte| value(byte).to_le_bytes()).collect()
}

fn f16_at(scales: &[u8], i: usize) -> f32 {
    f16::from_le_bytes([scales[2 * i], scales[2 * i + 1]]).to_f32()
}

fn word(words: &[u8], i: usize) -> u32 {
    u32::from_le_bytes(words[4 * i..4 * i + 4].try_into().unwrap())
}

/// A matrix of integers in one of the layouts of words.
struct Integers {
    quantisation: Quantisation,
    rows: usize,
    cols: usize,
    codes: Vec<u8>,
    zeros: Vec<u8>,
    scales: Vec<u8>,
    /// The group of each column.
    groups: Vec<usize>,
}

impl Integers {
    fn new(
        layout: CodeLayout,
        bits: usize,
        [rows, cols]: [usize; 2],
        group: Option<usize>,
    ) -> Self {
        let groups = cols / group.unwrap_or(cols);
        let mut zeros = bytes(2, rows * groups * bits / 8);
        if layout == (CodeLayout::Gptq { zeros_less_one: true }) {
            // The largest one is refused.
            for byte in &mut zeros {
                *byte &= 0xee;
            }
        }
        Self {
            quantisation: Quantisation { layout, bits, block: None, group },
            rows,
            cols,
            codes: bytes(1, rows * cols * bits / 8),
            zeros,
            scales: scales(rows * groups),
            groups: (0..cols).map(|col| col / group.unwrap_or(cols)).collect(),
        }
    }

    /// The same with columns of all groups between one another.
    fn scattered(self) -> Self {
        let other = |col: usize| (col * 7 + 5) % self.cols;
        Self { groups: (0..self.cols).map(|col| self.groups[other(col)]).collect(), ..self }
    }

    fn group(&self) -> usize {
        self.quantisation.group.unwrap_or(self.cols)
    }

    fn parts(&self) -> Vec<Part> {
        let Self { rows, cols, .. } = *self;
        let (per, groups) = (32 / self.quantisation.bits, cols / self.group());
        let part = |end, dtype, shape: [usize; 2], bytes: &Vec<u8>| {
            Part(end, dtype, shape.to_vec(), bytes.clone())
        };
        match self.quantisation.layout {
            CodeLayout::Rows => vec![
                part("weight_packed", Dtype::I32, [rows, cols / per], &self.codes),
                part("weight_zero_point", Dtype::I32, [rows / per, groups], &self.zeros),
                part("weight_scale", Dtype::F16, [rows, groups], &self.scales),
                Part("weight_shape", Dtype::I64, vec![2], vec![0; 16]),
                self.order("weight_g_idx"),
            ],
            layout => {
                let codes =
                    if layout == CodeLayout::Awq { [cols, rows / per] } else { [cols / per, rows] };
                let mut all = vec![
                    part("qweight", Dtype::I32, codes, &self.codes),
                    part("qzeros", Dtype::I32, [groups, rows / per], &self.zeros),
                    part("scales", Dtype::F16, [groups, rows], &self.scales),
                ];
                if layout != CodeLayout::Awq {
                    all.push(self.order("g_idx"));
                }
                all
            }
        }
    }

    fn order(&self, name: &'static str) -> Part {
        let bytes = self.groups.iter().flat_map(|group| (*group as i32).to_le_bytes());
        Part(name, Dtype::I32, vec![self.cols], bytes.collect())
    }

    /// The value by the definition of its format.
    fn value(&self, wrong: Wrong, row: usize, col: usize) -> f32 {
        let bits = self.quantisation.bits;
        let (per, groups) = (32 / bits, self.cols / self.group());
        let shift = |word: u32, place: usize| {
            let place = if wrong == Wrong::Nibbles { per - 1 - place } else { place };
            (word >> (place * bits)) & (u32::MAX >> (32 - bits))
        };
        let group = (self.groups[col] + usize::from(wrong == Wrong::Group)) % groups;
        let other = (row + usize::from(wrong == Wrong::Row)) % self.rows;
        // Of the outputs 0 to 7, the codes from the lowest bits on are 0, 2, 4, 6, 1, 3, 5, 7.
        let awq = |output: usize| output % 8 / 2 + output % 2 * 4;
        let (codes, zeros) = (&self.codes, &self.zeros);
        let (code, zero, scale) = match self.quantisation.layout {
            CodeLayout::Rows => (
                shift(word(codes, row * (self.cols / per) + col / per), col % per),
                shift(word(zeros, other / per * groups + group), other % per),
                f16_at(&self.scales, other * groups + group),
            ),
            CodeLayout::Awq => (
                shift(word(codes, (col * self.rows + row) / 8), awq(row)),
                shift(word(zeros, (group * self.rows + other) / 8), awq(other)),
                f16_at(&self.scales, group * self.rows + other),
            ),
            _ => (
                shift(word(codes, col / per * self.rows + row), col % per),
                shift(word(zeros, (group * self.rows + other) / per), other % per),
                f16_at(&self.scales, group * self.rows + other),
            ),
        };
        let first = self.quantisation.layout == CodeLayout::Gptq { zeros_less_one: true };
        let more = u32::from(first) + u32::from(wrong == Wrong::Zero);
        (code as i32 - (zero + more) as i32) as f32 * scale
    }

    fn values(&self, wrong: Wrong) -> Vec<f32> {
        let row = |row| (0..self.cols).map(move |col| self.value(wrong, row, col));
        (0..self.rows).flat_map(row).collect()
    }
}

const LAYOUTS: [(CodeLayout, usize); 7] = [
    (CodeLayout::Rows, 4),
    (CodeLayout::Rows, 8),
    (CodeLayout::Gptq { zeros_less_one: true }, 4),
    (CodeLayout::Gptq { zeros_less_one: true }, 8),
    (CodeLayout::Gptq { zeros_less_one: false }, 4),
    (CodeLayout::Gptq { zeros_less_one: false }, 8),
    (CodeLayout::Awq, 4),
];

#[test]
fn integers_have_the_values_of_their_definition() {
    for (layout, bits) in LAYOUTS {
        for (shape, group, width) in [
            ([8, 32], Some(32), 32),
            ([24, 96], Some(32), 32),
            ([24, 192], Some(64), 64),
            ([40, 256], Some(128), 128),
            ([8, 512], Some(256), 128),
            ([16, 384], None, 128),
            ([8, 320], None, 64),
            ([8, 96], None, 32),
        ] {
            let matrix = Integers::new(layout, bits, shape, group);
            let (name, values) = read(&matrix.quantisation, &matrix.parts()).unwrap();
            assert_eq!(values, matrix.values(Wrong::Nothing), "{layout:?} {bits} {shape:?}");
            // Of eight bits there are blocks of 32 and of 128 columns.
            let width = if bits == 8 && width == 64 { 32 } else { width };
            assert_eq!(name, format!("INT{bits}_{width}"), "{layout:?} {shape:?} {group:?}");
        }
    }
}

/// Each column keeps its own group (`desc_act`, `actorder`).
#[test]
fn columns_may_be_in_the_order_of_their_activations() {
    for (layout, bits) in LAYOUTS.into_iter().filter(|(layout, _)| *layout != CodeLayout::Awq) {
        for (shape, group) in [([8, 64], 32), ([24, 192], 64), ([40, 256], 128), ([8, 512], 256)] {
            let matrix = Integers::new(layout, bits, shape, Some(group)).scattered();
            let (name, values) = read(&matrix.quantisation, &matrix.parts()).unwrap();
            assert_eq!(values, matrix.values(Wrong::Nothing), "{layout:?} {bits} {shape:?}");
            assert!(name.starts_with(&format!("INT{bits}_")), "{name}");
        }
    }
}

/// What readers have got wrong shows in the values.
#[test]
fn faults_of_readers_show() {
    for (layout, bits) in LAYOUTS {
        let matrix = Integers::new(layout, bits, [24, 128], Some(32));
        let (_, values) = read(&matrix.quantisation, &matrix.parts()).unwrap();
        for wrong in [Wrong::Nibbles, Wrong::Zero, Wrong::Group, Wrong::Row] {
            let other = matrix.values(wrong);
            let same = values.iter().zip(&other).filter(|(a, b)| a == b).count();
            assert!(same * 4 < values.len(), "{wrong:?} of {layout:?} {bits}: {same} are equal");
        }
    }
}

/// The value of a float of eight bits.
fn float(code: u8, mantissa: i32, bias: i32) -> f32 {
    let (sign, magnitude) = (if code > 127 { -1.0 } else { 1.0 }, i32::from(code & 127));
    let (exponent, rest) = (magnitude >> mantissa, magnitude & ((1 << mantissa) - 1));
    let whole = if exponent == 0 { rest } else { rest + (1 << mantissa) };
    sign * whole as f32 * 2f32.powi(exponent.max(1) - bias - mantissa)
}

const fn eight_bits(block: Option<[usize; 2]>, group: Option<usize>) -> Quantisation {
    Quantisation { layout: CodeLayout::Bytes, bits: 8, block, group }
}

/// Floats of all codes; `[experts, rows, cols]` with scales of each kind.
#[test]
fn floats_have_the_values_of_their_definition() {
    for (dtype, mantissa, bias) in [(Dtype::F8_E4M3, 3, 7), (Dtype::F8_E5M2, 2, 15)] {
        for (experts, rows, cols, tall, wide) in
            [(1, 8, 32, 8, 32), (1, 40, 160, 16, 128), (3, 24, 256, 16, 128), (2, 5, 64, 1, 64)]
        {
            let mut codes = bytes(5, experts * rows * cols);
            for code in &mut codes {
                *code ^= u8::from(*code & 0x7f == 0x7f);
            }
            if dtype == Dtype::F8_E5M2 {
                for code in &mut codes {
                    *code &= 0xfb;
                }
            }
            let [high, width] = [rows.div_ceil(tall), cols.div_ceil(wide)];
            let count = experts * high * width;
            let scale = |i: usize| 0.01 + i as f32 / 64.0;
            let stored: Vec<u8> = (0..count).flat_map(|i| scale(i).to_le_bytes()).collect();
            let shape = if experts == 1 { vec![rows, cols] } else { vec![experts, rows, cols] };
            let of = if experts == 1 { vec![high, width] } else { vec![experts, high, width] };
            let parts = [
                Part("weight", dtype, shape, codes.clone()),
                Part("weight_scale_inv", Dtype::F32, of, stored),
                Part("input_scale", Dtype::F32, vec![], vec![0; 4]),
            ];
            let value = |i: usize| {
                let (expert, row, col) = (i / cols / rows, i / cols % rows, i % cols);
                let at = (expert * high + row / tall) * width + col / wide;
                float(codes[i], mantissa, bias) * scale(at)
            };
            let want: Vec<f32> = (0..experts * rows * cols).map(value).collect();
            let (name, values) = read(&eight_bits(Some([tall, wide]), None), &parts).unwrap();
            assert_eq!(values, want, "{dtype:?} [{experts}, {rows}, {cols}] by [{tall}, {wide}]");
            let blocks = if cols == 256 && mantissa == 3 { "128" } else { "32" };
            assert_eq!(name, format!("{dtype:?}_{blocks}"));
        }
    }
}

/// One scale for all, one for each row, and powers of two.
#[test]
fn scales_have_several_shapes_and_types() {
    let codes: Vec<u8> = bytes(6, 4 * 32).into_iter().map(|code| code & 0xfb).collect();
    let (one, four) = (bf16::from_f32(0.5), [0.25, 0.5, 1.0, 2.0]);
    let rows: Vec<u8> = four.iter().flat_map(|x| f16::from_f32(*x).to_le_bytes()).collect();
    let exponents = vec![125, 126, 127, 128];
    for (end, dtype, shape, bytes, scales) in [
        ("weight_scale_inv", Dtype::BF16, vec![], one.to_le_bytes().to_vec(), [0.5; 4]),
        ("weight_scale", Dtype::BF16, vec![1], one.to_le_bytes().to_vec(), [0.5; 4]),
        ("weight_scale", Dtype::F16, vec![4, 1], rows.clone(), four),
        ("weight_scale", Dtype::F16, vec![4], rows, four),
        ("weight_scale_inv", Dtype::F8_E8M0, vec![4, 1], exponents, four),
    ] {
        let parts = [
            Part("weight", Dtype::F8_E4M3, vec![4, 32], codes.clone()),
            Part(end, dtype, shape, bytes),
        ];
        let (_, values) = read(&eight_bits(None, None), &parts).unwrap();
        let want = |i: usize| float(codes[i], 3, 7) * scales[i / 32];
        assert_eq!(values, (0..4 * 32).map(want).collect::<Vec<_>>(), "{end} {dtype:?}");
    }
}

/// Signed integers of eight bits, with and without zeros.
#[test]
fn signed_bytes_have_the_values_of_their_definition() {
    let (rows, cols) = (3, 64);
    let codes = bytes(7, rows * cols);
    let zeros = vec![0, 0x81, 0x7f, 3, 0xff, 0x80];
    for (group, zeros) in [(None, None), (Some(32), None), (Some(32), Some(zeros))] {
        let groups = cols / group.unwrap_or(cols);
        let scales = scales(rows * groups);
        let mut parts = vec![
            Part("weight", Dtype::I8, vec![rows, cols], codes.clone()),
            Part("weight_scale", Dtype::F16, vec![rows, groups], scales.clone()),
        ];
        let zero = |at: usize| zeros.as_ref().map_or(0, |zeros: &Vec<u8>| zeros[at] as i8);
        let value = |i: usize| {
            let at = i / cols * groups + i % cols / group.unwrap_or(cols);
            (i32::from(codes[i] as i8) - i32::from(zero(at))) as f32 * f16_at(&scales, at)
        };
        let want: Vec<f32> = (0..rows * cols).map(value).collect();
        if let Some(zeros) = &zeros {
            parts.push(Part("weight_zero_point", Dtype::I8, vec![rows, groups], zeros.clone()));
        }
        assert_eq!(read(&eight_bits(None, group), &parts).unwrap().1, want, "{group:?}");
    }
}

fn refusal(quantisation: &Quantisation, parts: &[Part], words: &[&str]) {
    let error = read(quantisation, parts).err().unwrap_or_else(|| panic!("{words:?}: it was read"));
    let text = error.to_string();
    let all = ["m.weight"].iter().chain(words).all(|word| text.contains(word));
    assert!(all && text.lines().count() == 1, "{text:?} without {words:?}");
}

/// Each file with one thing wrong is refused in a sentence.
#[test]
fn bad_matrices_are_refused() {
    let gptq = |change: &dyn Fn(&mut Vec<Part>), words: &[&str]| {
        let layout = CodeLayout::Gptq { zeros_less_one: true };
        let matrix = Integers::new(layout, 4, [16, 64], Some(32));
        let mut parts = matrix.parts();
        change(&mut parts);
        refusal(&matrix.quantisation, &parts, words);
    };
    gptq(&|parts| drop(parts.remove(2)), &["has no scales", "fetch it again"]);
    gptq(&|parts| drop(parts.remove(1)), &["has no zeros"]);
    gptq(&|parts| parts[2].2 = vec![16, 2], &["[16, 64] has scales of shape [16, 2]", "[2, 16]"]);
    gptq(&|parts| parts[1].2 = vec![4, 1], &["has zeros of shape [4, 1]", "[2, 2]"]);
    gptq(&|parts| parts[1].1 = Dtype::F32, &["has zeros of the type F32"]);
    gptq(&|parts| parts[2].1 = Dtype::I16, &["has scales of the type I16"]);
    gptq(&|parts| parts[2].3[1] = 0x7c, &["has a scale that is not finite"]);
    gptq(&|parts| parts[1].3[5] = 0x3f, &["has a zero that is stored as 15", "16 to others"]);
    gptq(&|parts| parts[3].3[0] = 7, &["has a column of the group 7, and there are 2"]);
    gptq(&|parts| parts[3].3[3] = 0x80, &["has a column of the group -2147483648"]);
    gptq(&|parts| parts[3].3[0] = 1, &["has 31 columns in the group 0", "32", "GGUF"]);
    gptq(&|parts| parts[0] = Part("qweight", Dtype::I32, vec![128], vec![0; 512]), &["[128]"]);
    gptq(
        &|parts| parts[0] = Part("qweight", Dtype::I32, vec![0, 16], Vec::new()),
        &["has the shape [16, 0]"],
    );

    let rows = |cols, group| Integers::new(CodeLayout::Rows, 4, [8, cols], Some(group));
    for (cols, group, words) in [
        (64, 16, ["every 16 of its 64 columns", "whole groups of 32"]),
        (48, 48, ["every 48 of its 48 columns", "whole groups of 32"]),
    ] {
        let matrix = rows(cols, group);
        refusal(&matrix.quantisation, &matrix.parts(), &words);
    }
    let mut matrix = rows(96, 32);
    let parts = matrix.parts();
    matrix.quantisation.group = Some(64);
    refusal(&matrix.quantisation, &parts, &["96 columns, which are no whole groups of 64"]);

    let fp8 = |codes: Vec<u8>, scales: Part, words: &[&str]| {
        let codes = Part("weight", Dtype::F8_E4M3, vec![4, 32], codes);
        refusal(&eight_bits(Some([2, 32]), None), &[codes, scales], words);
    };
    let scales = |count| Part("weight_scale_inv", Dtype::F32, vec![count, 1], vec![0; 4 * count]);
    fp8(vec![0xff; 128], scales(2), &["stands for no number"]);
    fp8(vec![0; 128], scales(4), &["has scales of shape [4, 1] instead of [2, 1]"]);
    let other = Part("weight_zero_point", Dtype::I8, vec![2, 1], vec![0; 2]);
    fp8(vec![0; 128], other, &["has no scales", "m.weight"]);
}
