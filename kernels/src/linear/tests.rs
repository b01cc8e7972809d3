//! Compared with: candle's dequantisation for the values, the reference for the products, and
//! bitwise equality for results that may not depend on batch, threads or stacking. The goldens of
//! `models` have the values of the types that candle lacks.

use super::cpu::linear_slices;
use super::*;
use crate::simd::Isa;
use crate::testing::dense_weight;
use crate::{Compute, Error};
use candle_core::quantized::QTensor;
use candle_core::{DType, Device, Tensor};
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;

const DTYPES: [WeightType; 33] = [
    WeightType::F32,
    WeightType::F16,
    WeightType::BF16,
    WeightType::Q4_0,
    WeightType::Q4_1,
    WeightType::Q5_0,
    WeightType::Q5_1,
    WeightType::Q8_0,
    WeightType::Q2K,
    WeightType::Q3K,
    WeightType::Q4K,
    WeightType::Q5K,
    WeightType::Q6K,
    WeightType::IQ4NL,
    WeightType::IQ4XS,
    WeightType::IQ3S,
    WeightType::IQ3XXS,
    WeightType::IQ2S,
    WeightType::IQ2XS,
    WeightType::IQ2XXS,
    WeightType::IQ1S,
    WeightType::IQ1M,
    WeightType::MXFP4,
    WeightType::TQ1_0,
    WeightType::TQ2_0,
    WeightType::Int4By32,
    WeightType::Int4By64,
    WeightType::Int4By128,
    WeightType::Int8By32,
    WeightType::Int8By128,
    WeightType::E4M3By32,
    WeightType::E4M3By128,
    WeightType::E5M2By32,
];
const ROWS: [usize; 4] = [1, 16, 17, 99];
const COLS: [usize; 6] = [32, 64, 96, 256, 576, 1536];
const BATCHES: [usize; 9] = [1, 2, 3, 5, 8, 17, 64, 199, 200];

/// Error allowed of a sum of `cols` products, relative to the sum of their magnitudes.
fn tolerance(cols: usize) -> f32 {
    2.0 * f32::EPSILON * (cols as f32).sqrt()
}

fn linear(c: &Compute, w: &Weight, bias: Option<&Tensor>, x: &Tensor, out: &Tensor) -> Result<()> {
    let (bias, mode) = (bias.map(Into::into), Mode::Fast);
    c.linear(&LinearArgs { x: x.into(), w, bias, out: out.into(), mode })
}

/// Fresh values in (-1, 1) on every run.
fn random(count: usize) -> Vec<f32> {
    let mut state = RandomState::new().hash_one(count) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..count).map(|_| next()).collect()
}

fn shapes(dtype: WeightType) -> impl Iterator<Item = (usize, usize)> {
    let whole = move |cols: &usize| cols.is_multiple_of(dtype.block_size());
    ROWS.into_iter()
        .flat_map(move |rows| COLS.into_iter().filter(whole).map(move |cols| (rows, cols)))
}

struct Case {
    weight: Weight,
    /// candle's dequantisation of the same bytes, `[rows, cols]`, where it has the type, or the
    /// values of Hugging Face's formats.
    values: Option<Vec<f32>>,
    file_bytes: usize,
}

fn case(dtype: WeightType, rows: usize, cols: usize) -> Case {
    weight_of(dtype, random(rows * cols), rows, cols)
}

fn weight_of(dtype: WeightType, values: Vec<f32>, rows: usize, cols: usize) -> Case {
    let (raw, values) = if let Some(dtype) = dtype.in_candle() {
        let dense = Tensor::from_vec(values, (rows, cols), &Device::Cpu).unwrap();
        let q = QTensor::quantize(&dense, dtype).unwrap();
        let values = q.dequantize(&Device::Cpu).unwrap().flatten_all().unwrap();
        (q.data().unwrap().into_owned(), Some(values.to_vec1().unwrap()))
    } else {
        let raw = blocks_of(dtype, &values);
        let values = dtype.gguf_id().is_none().then(|| values_of(dtype, &raw));
        (raw, values)
    };
    let weight = Weight::from_ggml(dtype, &raw, rows, cols).unwrap();
    Case { weight, values, file_bytes: raw.len() }
}

/// Blocks of a type that candle lacks, made of the values in (-1, 1) as bytes, with small scales.
fn blocks_of(dtype: WeightType, values: &[f32]) -> Vec<u8> {
    let bytes = dtype.type_size();
    let count = values.len() / dtype.block_size() * bytes;
    let byte = |value: &f32| (128.0 + 128.0 * value) as u8;
    let mut raw: Vec<u8> = values.iter().cycle().take(count).map(byte).collect();
    for block in raw.chunks_exact_mut(bytes) {
        let from_folder = dtype.gguf_id().is_none();
        // The byte with the sign and the upper bits of the exponent.
        let (at, upper) = match dtype {
            _ if from_folder => (3, block[3] & 0x80 | 0x3c),
            WeightType::MXFP4 => (0, 120 + block[0] % 8),
            WeightType::IQ1M => (55, block[55] & 0x8f | 0x10),
            WeightType::TQ1_0 | WeightType::TQ2_0 => (bytes - 1, block[bytes - 1] & 0x8f | 0x10),
            _ => (1, block[1] & 0x8f | 0x10),
        };
        block[at] = upper;
        if from_folder && dtype.name().starts_with("F8") {
            // Neither infinite nor NaN.
            block[4..].iter_mut().for_each(|code| *code &= 0xfb);
        } else if from_folder {
            // A zero far from the codes where all are the largest or the smallest.
            block[4] = !block[5];
        }
    }
    raw
}

/// The values of blocks of Hugging Face's formats, as they are defined.
fn values_of(dtype: WeightType, raw: &[u8]) -> Vec<f32> {
    let value = |block: &[u8], column: usize| {
        let scale = f32::from_le_bytes(block[..4].try_into().unwrap());
        let four = i32::from(block[5 + column / 2 % (block.len() - 5)]) >> (column % 2 * 4) & 15;
        let float = |mantissa: i32, bias: i32| {
            let code = i32::from(block[4 + column]);
            let (sign, exponent, rest) =
                (1 - 2 * (code >> 7), (code & 127) >> mantissa, code & ((1 << mantissa) - 1));
            let whole = if exponent == 0 { rest } else { rest | 1 << mantissa };
            (sign * whole) as f32 * 2f32.powi(exponent.max(1) - bias - mantissa) * scale
        };
        match &dtype.name()[..5] {
            "INT4_" => (four - i32::from(block[4])) as f32 * scale,
            "INT8_" => (i32::from(block[5 + column]) - i32::from(block[4])) as f32 * scale,
            _ if dtype.name().contains("E4M3") => float(3, 7),
            _ => float(2, 15),
        }
    };
    let columns = dtype.block_size();
    let blocks = raw.chunks_exact(dtype.type_size());
    blocks.flat_map(|block| (0..columns).map(move |column| value(block, column))).collect()
}

/// Computes `linear` into an output poisoned beforehand.
fn product(isa: Isa, c: &Compute, w: &Weight, bias: Option<&[f32]>, x: &[f32]) -> Vec<f32> {
    let n = x.len() / w.cols();
    let mut out = vec![f32::NAN; n * w.rows()];
    linear_slices(isa, c, w, bias, x, n, &mut out).unwrap();
    out
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

fn check_against_reference(isa: Isa, w: &Weight, bias: Option<&[f32]>, n: usize, what: &str) {
    check_product(isa, w, bias, &random(n * w.cols()), what);
}

fn check_product(isa: Isa, w: &Weight, bias: Option<&[f32]>, x: &[f32], what: &str) {
    check_product_by(&Compute::new(2), isa, w, bias, x, what);
}

fn check_product_by(
    c: &Compute,
    isa: Isa,
    w: &Weight,
    bias: Option<&[f32]>,
    x: &[f32],
    what: &str,
) {
    let (n, got) = (x.len() / w.cols(), product(isa, c, w, bias, x));
    let want = reference::linear(w, bias, x);
    let mut weights = vec![0.0; w.cols()];
    for row in 0..w.rows() {
        w.row_f32(row, &mut weights);
        for (token, x) in x.chunks_exact(w.cols()).enumerate() {
            let magnitude: f32 = x.iter().zip(&weights).map(|(x, w)| (x * w).abs()).sum();
            let allowed = tolerance(w.cols()) * (magnitude + 1.0);
            let [got, want] = [&got, &want].map(|all| all[token * w.rows() + row]);
            assert!(
                (got - want).abs() <= allowed,
                "{what} {isa:?} n={n} token {token} row {row}: {got} is not {want}"
            );
        }
    }
}

#[test]
fn values_equal_the_formats_definition() {
    for dtype in DTYPES {
        for (rows, cols) in shapes(dtype) {
            let Case { weight, values, .. } = case(dtype, rows, cols);
            let Some(values) = values else { continue };
            let dequantised = weight.to_f32().unwrap();
            let mut got = vec![f32::NAN; cols];
            for (row, want) in values.chunks_exact(cols).enumerate() {
                weight.row_f32(row, &mut got);
                assert_eq!(got, want, "{dtype:?} [{rows}, {cols}] row {row}");
                dequantised.row_f32(row, &mut got);
                assert_eq!(got, want, "{dtype:?} [{rows}, {cols}] row {row} dequantised");
            }
        }
    }
}

#[test]
fn products_equal_the_reference() {
    for dtype in DTYPES {
        for (rows, cols) in shapes(dtype) {
            let weight = case(dtype, rows, cols).weight;
            let bias = random(rows);
            let what = format!("{dtype:?} [{rows}, {cols}]");
            for isa in Isa::available() {
                check_against_reference(isa, &weight, None, 1, &what);
                check_against_reference(isa, &weight, Some(&bias), 7, &what);
                check_against_reference(isa, &weight, Some(&bias), 13, &what);
            }
        }
    }
}

#[test]
fn dense_columns_need_no_alignment() {
    for dtype in [WeightType::F32, WeightType::F16, WeightType::BF16] {
        for cols in [1, 19, 65, 577] {
            let weight = case(dtype, 17, cols).weight;
            for isa in Isa::available() {
                check_against_reference(
                    isa,
                    &weight,
                    None,
                    3,
                    &format!("{dtype:?} {cols} columns"),
                );
                check_against_reference(
                    isa,
                    &weight,
                    None,
                    9,
                    &format!("{dtype:?} {cols} columns"),
                );
            }
        }
    }
}

/// A row has the same bits alone and in any batch, on any number of threads.
#[test]
fn bits_depend_on_the_row_alone() {
    let threads = [1, 2, 3].map(Compute::new);
    for dtype in DTYPES {
        // A last piece of one block, where the type has such.
        let cols = if dtype.block_size() == 32 { 800 } else { 768 };
        let weight = case(dtype, 99, cols).weight;
        let bias = random(99);
        let x = random(200 * cols);
        for isa in Isa::available() {
            let alone = |x: &[f32]| product(isa, &threads[0], &weight, Some(&bias), x);
            let want: Vec<f32> = x.chunks_exact(cols).flat_map(alone).collect();
            for n in BATCHES {
                let (x, want) = (&x[..n * cols], bits(&want[..n * 99]));
                for c in &threads {
                    let got = product(isa, c, &weight, Some(&bias), x);
                    assert_eq!(bits(&got), want, "{dtype:?} {isa:?} n={n} threads {}", c.threads());
                }
            }
        }
    }
}

/// More rows than take a piece of the columns by turns.
#[test]
fn rows_in_several_turns_have_the_same_bits() {
    let (rows, cols, n) = (40, 288, 1040);
    let weight = case(WeightType::Q5_1, rows, cols).weight;
    let (bias, x) = (random(rows), random(n * cols));
    for isa in Isa::available() {
        let bytes = Compute::new(2).with_byte_activations();
        for c in bytes.into_iter().filter(|_| isa.has_byte_products()).chain([Compute::new(3)]) {
            let product = |x: &[f32]| product(isa, &c, &weight, Some(&bias), x);
            let want: Vec<f32> = x.chunks_exact(cols).flat_map(product).collect();
            assert_eq!(bits(&product(&x)), bits(&want), "{isa:?}");
        }
    }
}

/// Weights and activations have the largest codes: no sum of integers may wrap.
#[test]
fn the_largest_products_fit() {
    let (rows, cols) = (16, 256);
    for dtype in DTYPES {
        for sign in [1.0, -1.0] {
            let weight = weight_of(dtype, vec![sign * 3.0; rows * cols], rows, cols).weight;
            for isa in Isa::available() {
                check_product(
                    isa,
                    &weight,
                    None,
                    &vec![1e4; 5 * cols],
                    &format!("{dtype:?} of {sign}"),
                );
            }
        }
    }
}

#[test]
fn rounding_keeps_sixteen_bits_of_each_block() {
    for exponent in [-40, -3, 0, 30] {
        let scale = 10f32.powi(exponent);
        let x: Vec<f32> = random(96).iter().map(|x| x * scale).collect();
        for (x, rounded) in x.chunks(32).zip(reference::rounded(&x).chunks(32)) {
            let largest = x.iter().fold(0f32, |m, x| m.max(x.abs()));
            // Half a step, and a hundredth of that for what f32 rounds on the way.
            let allowed = if largest > 1e-30 { largest / 65_278.0 * 1.01 } else { largest };
            assert!(
                x.iter().zip(rounded).all(|(x, r)| (x - r).abs() <= allowed),
                "{x:?} became {rounded:?}"
            );
        }
    }
    assert_eq!(reference::rounded(&[0.0; 32]), [0.0; 32]);
}

/// Activations that eight bits hold give the products of sixteen; others give other bits, alone the
/// same ones as in company. Only some machines have such products.
#[test]
fn activations_of_eight_bits_are_rounded_once() {
    let Ok(c) = Compute::new(2).with_byte_activations() else { return };
    for isa in Isa::available().filter(|isa| isa.has_byte_products()) {
        for dtype in DTYPES {
            check_eight_bits(&c, isa, dtype);
        }
    }
}

fn check_eight_bits(c: &Compute, isa: Isa, dtype: WeightType) {
    let Case { weight, .. } = case(dtype, 35, 512);
    let x = random(195 * 512);
    let code = |x: &f32| (127.0 * x / 3.0).round().clamp(-127.0, 127.0);
    let held: Vec<f32> = x
        .chunks(32)
        .flat_map(|block| [127.0].into_iter().chain(block[1..].iter().map(code)))
        .map(|code| code * 0.25)
        .collect();
    check_product_by(c, isa, &weight, None, &held, "eight bits");
    let got = product(isa, c, &weight, None, &x);
    let sixteen = product(isa, &Compute::new(2), &weight, None, &x);
    assert_eq!(bits(&got) != bits(&sixteen), weight.rounds_activations(), "{isa:?} {dtype:?}");
    for (row, got) in x.chunks(512).zip(got.chunks(35)) {
        assert_eq!(bits(&product(isa, c, &weight, None, row)), bits(got), "{isa:?} {dtype:?}");
    }
}

/// Inputs that are not finite give outputs that are not finite, in their own row alone.
#[test]
fn values_that_are_not_finite_show() {
    let weight = case(WeightType::Q4_0, 17, 64).weight;
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut x = random(3 * 64);
        x[64 + 40] = bad;
        for isa in Isa::available() {
            let got = product(isa, &Compute::new(1), &weight, None, &x);
            let shown: Vec<bool> = got.iter().map(|v| !v.is_finite()).collect();
            assert_eq!(shown, [[false; 17], [true; 17], [false; 17]].concat(), "{bad} {isa:?}");
        }
    }
}

#[test]
fn stacking_changes_no_bits() {
    let c = Compute::new(2);
    let cols = 256;
    let dtypes = [WeightType::Q4K, WeightType::F16, WeightType::Q6K];
    let rows = [17, 40, 3];
    let parts: Vec<Case> = dtypes.into_iter().zip(rows).map(|(d, r)| case(d, r, cols)).collect();
    let xs = [1, 6, 14].map(|n| random(n * cols));
    let separate = xs
        .each_ref()
        .map(|x| parts.iter().map(|p| product(Isa::best(), &c, &p.weight, None, x)).collect());
    let stacked = Weight::stack(parts.into_iter().map(|p| p.weight).collect()).unwrap();
    for (x, separate) in xs.iter().zip::<[Vec<Vec<f32>>; 3]>(separate) {
        let got = product(Isa::best(), &c, &stacked, None, x);
        for (token, got) in got.chunks_exact(60).enumerate() {
            let row: Vec<f32> = separate
                .iter()
                .zip(rows)
                .flat_map(|(out, rows)| out[token * rows..][..rows].to_vec())
                .collect();
            assert_eq!(bits(got), bits(&row), "n={} token {token}", x.len() / cols);
        }
        check_product(Isa::best(), &stacked, Some(&random(60)), x, "mixed stack");
    }
}

/// The bits are those of a plain weight whose inputs were put into the columns' order before.
#[test]
fn columns_may_be_stored_in_another_order() {
    let (c, rows, cols) = (Compute::new(2), 35, 96);
    let order: Arc<[u32]> = (0..cols as u32).map(|i| (i * 35 + 7) % cols as u32).collect();
    for dtype in [WeightType::F32, WeightType::Q4_0, WeightType::Int4By32, WeightType::E4M3By32] {
        let values = random(rows * cols);
        let weight = || weight_of(dtype, values.clone(), rows, cols).weight;
        let (plain, ordered) = (weight(), weight().with_order(order.clone()).unwrap());
        for x in [1, 5, 17].map(|n| random(n * cols)) {
            let gathered = x.chunks_exact(cols).flat_map(|x| order.iter().map(|i| x[*i as usize]));
            let gathered: Vec<f32> = gathered.collect();
            for isa in [Isa::best(), Isa::Portable] {
                let want = product(isa, &c, &plain, None, &gathered);
                assert_eq!(bits(&product(isa, &c, &ordered, None, &x)), bits(&want), "{dtype:?}");
            }
            check_product(Isa::best(), &ordered, Some(&random(rows)), &x, "another order");
        }
        let exact = ordered.to_f32().unwrap();
        for row in 0..rows {
            let [mut stored, mut read, mut widened] = [(); 3].map(|()| vec![0.0; cols]);
            plain.row_f32(row, &mut stored);
            ordered.row_f32(row, &mut read);
            exact.row_f32(row, &mut widened);
            let gathered: Vec<f32> = order.iter().map(|i| read[*i as usize]).collect();
            assert_eq!((gathered, &read), (stored, &widened), "{dtype:?} {row}");
        }
        let pair = Weight::stack(vec![ordered, weight().with_order(order.clone()).unwrap()]);
        assert!(pair.is_ok() && Weight::stack(vec![pair.unwrap(), plain]).is_err());
        for wrong in [vec![0; cols], (1..=cols as u32).collect(), vec![0]] {
            assert!(weight().with_order(wrong.into()).is_err());
        }
    }
}

#[test]
fn memory_is_close_to_the_files() {
    for dtype in DTYPES {
        let Case { weight, file_bytes, .. } = case(dtype, 512, 1024);
        assert_eq!(weight.bytes(), dtype.cpu_bytes(512 * 1024), "{dtype:?}");
        let share = weight.bytes() as f64 / file_bytes as f64;
        let most = match dtype {
            // Codes of three and four bits instead of points of a grid, scales of eight.
            WeightType::IQ3S => 1.26,
            WeightType::IQ3XXS | WeightType::IQ2S => 1.41,
            WeightType::IQ2XS | WeightType::IQ2XXS => 1.61,
            WeightType::IQ1S | WeightType::IQ1M => 2.12,
            // Codes of two bits instead of five in a byte.
            WeightType::TQ1_0 => 1.23,
            _ => 1.1,
        };
        assert!(share <= most, "{dtype:?} takes {share:.3} of the file's bytes");
    }
}

#[test]
fn wrong_sizes_are_errors() {
    let refused = |dtype, bytes: usize, rows, cols| {
        let error = Weight::from_ggml(dtype, &vec![0; bytes], rows, cols).err();
        error.unwrap_or_else(|| panic!("{dtype:?} [{rows}, {cols}] of {bytes} bytes was taken"))
    };
    for (dtype, bytes, rows, cols) in [
        (WeightType::Q4_0, 17, 1, 32),
        (WeightType::Q4_0, 36, 1, 32),
        (WeightType::Q4_0, 18, 1, 31),
        (WeightType::Q4K, 144, 1, 255),
        (WeightType::Q4K, 324, 2, 288),
        (WeightType::F32, 0, usize::MAX, usize::MAX),
        (WeightType::F16, 5, 1, 3),
    ] {
        assert!(
            matches!(refused(dtype, bytes, rows, cols), Error::Shape { .. }),
            "{dtype:?} {bytes}"
        );
    }
    let q8k = WeightType::Q8K;
    assert!(matches!(refused(q8k, q8k.type_size(), 1, 256), Error::Unsupported { .. }));

    let w = case(WeightType::F32, 3, 4).weight;
    let c = Compute::new(1);
    for (x, n, bias, out) in [(4, 2, 3, 6), (8, 2, 3, 5), (8, 2, 2, 6)] {
        let (x, bias, mut out) = (vec![0.0; x], vec![0.0; bias], vec![0.0; out]);
        assert!(linear_slices(Isa::best(), &c, &w, Some(&bias), &x, n, &mut out).is_err());
    }
    let narrow = case(WeightType::F32, 3, 5).weight;
    assert!(Weight::stack(vec![w, narrow]).is_err());
}

#[test]
fn empty_matrices_and_batches_do_nothing() {
    let c = Compute::new(2);
    let none = Weight::from_ggml(WeightType::Q4_1, &[], 0, 64).unwrap();
    assert_eq!(product(Isa::best(), &c, &none, None, &random(64)), [0f32; 0]);
    let w = case(WeightType::Q4_1, 5, 64).weight;
    assert_eq!(product(Isa::best(), &c, &w, None, &[]), [0f32; 0]);
    let flat = Weight::from_ggml(WeightType::F32, &[], 2, 0).unwrap();
    let mut out = [f32::NAN; 4];
    linear_slices(Isa::best(), &c, &flat, Some(&[1.0, 2.0]), &[], 2, &mut out).unwrap();
    assert_eq!(bits(&out), bits(&[1.0, 2.0, 1.0, 2.0]));
}

#[test]
fn tensors_are_written_in_place() {
    let c = Compute::new(2);
    let cpu = Device::Cpu;
    let (n, rows, cols) = (3, 20, 64);
    for (tensor_dtype, dtype) in [
        (DType::F32, WeightType::F32),
        (DType::F16, WeightType::F16),
        (DType::BF16, WeightType::BF16),
    ] {
        let dense = Tensor::from_vec(random(rows * cols), (rows, cols), &cpu).unwrap();
        let w = dense_weight(&dense.to_dtype(tensor_dtype).unwrap());
        assert_eq!(w.parts[0].dtype, dtype);
        let (x, bias) = (random((n + 2) * cols), random(rows));
        let want = product(Isa::best(), &c, &w, Some(&bias), &x[cols..(n + 1) * cols]);

        let x = Tensor::from_vec(x, (n + 2, cols), &cpu).unwrap().narrow(0, 1, n).unwrap();
        let bias = Tensor::from_vec(bias, rows, &cpu).unwrap();
        let workspace = Tensor::full(f32::NAN, (n + 8, rows), &cpu).unwrap().contiguous().unwrap();
        let out = workspace.narrow(0, 2, n).unwrap();
        linear(&c, &w, Some(&bias), &x, &out).unwrap();
        let got: Vec<f32> = workspace.flatten_all().unwrap().to_vec1().unwrap();
        assert_eq!(bits(&got[2 * rows..][..n * rows]), bits(&want));
        let untouched = got[..2 * rows].iter().chain(&got[(n + 2) * rows..]);
        assert!(untouched.into_iter().all(|v| v.is_nan()));

        let column = workspace.narrow(1, 0, rows - 1).unwrap();
        assert!(linear(&c, &w, None, &x, &column).is_err(), "a strided output");
        let square = workspace
            .flatten_all()
            .unwrap()
            .narrow(0, 0, n * cols)
            .unwrap()
            .reshape((n, cols))
            .unwrap();
        assert!(
            linear(&c, &w, None, &square, &out).is_err(),
            "an output that shares the input's storage"
        );
        let half = out.to_dtype(DType::F16).unwrap();
        assert!(linear(&c, &w, None, &x, &half).is_err(), "an f16 output");
    }
}

/// A head's product is the one with its own matrix, bit for bit, whatever other rows there are.
#[test]
fn heads_have_matrices_of_their_own() {
    let (heads, rows, cols, n) = (5, 17, 64, 13);
    for dtype in [WeightType::F32, WeightType::BF16, WeightType::Q8_0] {
        let own: Vec<Weight> = (0..heads).map(|_| case(dtype, rows, cols).weight).collect();
        let x = random(n * heads * cols);
        let of_head = |head: usize| -> Vec<f32> {
            let rows = x.chunks_exact(cols).skip(head).step_by(heads);
            rows.flatten().copied().collect()
        };
        let product = |(head, w)| product(Isa::best(), &Compute::new(1), w, None, &of_head(head));
        let want: Vec<Vec<f32>> = own.iter().enumerate().map(product).collect();
        let w = Weight::stack(own).unwrap();
        let input = Tensor::from_slice(&x, x.len(), &Device::Cpu).unwrap();
        let out = crate::testing::poisoned(&[n * heads * rows]);
        let args = HeadLinearArgs { x: (&input).into(), w: &w, heads, out: (&out).into() };
        for threads in [1, 3] {
            Compute::new(threads).head_linear(&args).unwrap();
            for (i, got) in crate::testing::values(&out).chunks_exact(rows).enumerate() {
                let (row, head) = (i / heads, i % heads);
                let want = &want[head][row * rows..(row + 1) * rows];
                assert_eq!(bits(got), bits(want), "{dtype:?} head {head}, row {row}");
            }
        }
        let one = HeadLinearArgs { heads: 1, ..args };
        assert!(matches!(Compute::new(1).head_linear(&one), Err(Error::Shape { .. })));
    }
}
