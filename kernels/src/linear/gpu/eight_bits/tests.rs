//! Rounding against its specification, bit by bit; products with rounded rows against the
//! reference, by the library and by kernels; and the same bits in any company.

use super::*;
use crate::gpu::{Buffer, Emulator};
use crate::linear::{Linear, Mode, WeightType, linear_reference, rounded_to_e4m3};
use crate::operand::{MatrixBuffer, OpMemory};
use crate::testing::{
    Packed, assert_close, dense_weight, downloaded, gpu, poisoned_buffer, random, random_blocks,
    rounded, upload, values,
};
use candle_core::{Device, Tensor};
use std::sync::Arc;

fn bf16s(count: usize, seed: u64) -> Vec<f32> {
    rounded(Kind::Bf16, &values(&random(&[count], seed)))
}

/// Rows that lie in ranges of their own: of ordinary values, of some far apart, of codes and their
/// midpoints, of the smallest and largest numbers, and of zeros.
fn rows(cols: usize) -> Vec<Vec<f32>> {
    let random = |seed| bf16s(cols, seed);
    let scaled = |seed, by: f32| random(seed).iter().map(|x| x * by).collect::<Vec<_>>();
    let spread: Vec<f32> =
        (0..cols).map(|i| random(4)[i] * 2f32.powi(-((i * 7 % 23) as i32))).collect();
    // Eighths of a step between numbers of E4M3, beside the largest of them.
    let mut steps: Vec<f32> = (0..cols).map(|i| (i as f32 / 64.0 + 1.0) * 4.0).collect();
    steps[0] = 448.0;
    let small: Vec<f32> = (0..cols).map(|i| i as f32 * 2f32.powi(-12)).collect();
    let beside = |largest: f32| [vec![largest], small[1..].to_vec()].concat();
    let all = vec![
        random(1),
        spread,
        steps,
        beside(448.0),
        beside(-450.0),
        scaled(2, 2f32.powi(120)),
        scaled(3, 2f32.powi(-120)),
        vec![0.0; cols],
    ];
    all.into_iter().map(|row| rounded(Kind::Bf16, &row)).collect()
}

#[test]
fn rows_are_rounded_as_the_reference_rounds_them() {
    let gpu = gpu();
    for cols in [32, 96, 608, 4224] {
        let rows = rows(cols);
        let (n, x) = (rows.len(), rows.concat());
        let want = rounded_to_e4m3(&x, cols);
        let out = poisoned_buffer(&gpu, Kind::Bf16, x.len());
        for from in [upload(&gpu, Kind::Bf16, &x), upload(&gpu, Kind::Bf16, &want)] {
            let sizes = args![from.view(), out.view(), cols];
            launch_rows(&*gpu, "round_rows_bf16", n, &sizes).unwrap();
            assert_eq!(downloaded(&out), want, "{cols}");
        }
        let groups = cols.div_ceil(SCALED_COLUMNS);
        let [codes, scales] = [(Kind::U8, x.len()), (Kind::F32, n * groups)]
            .map(|(kind, len)| Buffer::new(&gpu, kind, len).unwrap());
        let from = upload(&gpu, Kind::Bf16, &x);
        let sizes = args![from.view(), codes.view(), scales.view(), cols, groups];
        launch_rows(&*gpu, "code_rows_bf16", n, &sizes).unwrap();
        let scales = downloaded(&scales);
        let of_codes = codes.to_vec::<u8>().unwrap().into_iter().enumerate().map(|(i, code)| {
            let (row, group) = (i / cols, i % cols / SCALED_COLUMNS);
            crate::simd::e4m3(code) * crate::simd::E4M3_UNIT * scales[group * n + row]
        });
        assert_eq!(of_codes.collect::<Vec<_>>(), want, "codes of {cols}");
    }
}

#[test]
fn infinity_and_nan_become_nan_and_stay_in_their_row() {
    let gpu = gpu();
    let mut x = bf16s(2 * 64, 1);
    (x[3], x[5]) = (f32::INFINITY, f32::NAN);
    let (from, out) = (upload(&gpu, Kind::Bf16, &x), poisoned_buffer(&gpu, Kind::Bf16, 128));
    launch_rows(&*gpu, "round_rows_bf16", 2, &args![from.view(), out.view(), 64usize]).unwrap();
    let got = downloaded(&out);
    let lost: Vec<usize> = (0..128).filter(|i| got[*i].is_nan()).collect();
    assert_eq!(lost, [3, 5]);
    assert_eq!(got[64..], rounded_to_e4m3(&x[64..], 64));
}

/// A matrix on a device whose products round activations, and what it is made of.
struct Case {
    gpu: DeviceOps,
    parts: Vec<Packed>,
    matrix: MatrixBuffer,
    bias: Vec<f32>,
}

/// Gives every block the scale of the first one of its row.
fn scale_by_rows(raw: &mut [u8], row_bytes: usize, block_bytes: usize) {
    for row in raw.chunks_exact_mut(row_bytes) {
        let (first, others) = row.split_at_mut(block_bytes);
        others.chunks_exact_mut(block_bytes).for_each(|own| own[..4].copy_from_slice(&first[..4]));
    }
}

impl Case {
    /// There is memory for 70 rows, and scratch memory for two bands and part of a third.
    fn new(gpu: DeviceOps, dtype: WeightType, rows: &[usize], cols: usize, by_rows: bool) -> Self {
        let part = |(i, rows): (usize, &usize)| {
            let mut raw = random_blocks(dtype, (rows + i) * cols / dtype.block_size());
            let block_bytes = dtype.type_size();
            let row_bytes = cols / dtype.block_size() * block_bytes;
            if by_rows {
                scale_by_rows(&mut raw, row_bytes, block_bytes);
            }
            Packed::of(dtype, &raw[i * row_bytes..], *rows, cols)
        };
        let parts: Vec<Packed> = rows.iter().enumerate().map(part).collect();
        let on_device = |part: &Packed| MatrixPart {
            values: Buffer::from_slice(&gpu, &part.bytes).unwrap(),
            rows: part.rows,
            format: Some(part.format),
        };
        let memory = Arc::new(poisoned_buffer(&gpu, Kind::Bf16, 70 * cols));
        let matrix = MatrixBuffer {
            parts: parts.iter().map(on_device).collect(),
            cols,
            scratch: Some(Arc::new(poisoned_buffer(&gpu, Kind::Bf16, 45 * cols))),
            order: None,
            rounded: Some(RoundedInputs { memory, scaled_by_rows: by_rows }),
        };
        let bias = bf16s(rows.iter().sum(), 7);
        Self { gpu, parts, matrix, bias }
    }

    fn run(&self, x: &[f32], mode: Mode) -> Vec<f32> {
        self.run_by(x, mode, |args| self.gpu.linear(args))
    }

    fn run_by(
        &self,
        x: &[f32],
        mode: Mode,
        multiply: impl Fn(&LinearArgs<View>) -> Result<()>,
    ) -> Vec<f32> {
        let [x, bias] = [x, &self.bias].map(|values| upload(&self.gpu, Kind::Bf16, values));
        let len = x.view().len() / self.matrix.cols * self.bias.len();
        let out = poisoned_buffer(&self.gpu, Kind::Bf16, len);
        let w = DeviceOps::matrix(&self.matrix);
        let args = LinearArgs { x: x.view(), w, bias: Some(bias.view()), out: out.view(), mode };
        multiply(&args).unwrap();
        downloaded(&out)
    }

    fn want(&self, x: &[f32]) -> Vec<f32> {
        let cols = self.matrix.cols;
        let weights: Vec<f32> = self.parts.iter().flat_map(|part| part.values.clone()).collect();
        let weights = Tensor::from_vec(weights, (self.bias.len(), cols), &Device::Cpu).unwrap();
        linear_reference(&dense_weight(&weights), Some(&self.bias), &rounded_to_e4m3(x, cols))
    }

    /// Whether the library multiplies `n` rows by their codes.
    fn by_library(&self, n: usize, mode: Mode) -> bool {
        let x = View::new(4096, n * self.matrix.cols, Kind::Bf16);
        let out = View::new(4096, n * self.bias.len(), Kind::Bf16);
        let w = DeviceOps::matrix(&self.matrix);
        let args = LinearArgs { x, w, bias: None, out, mode };
        let by_rows = self.matrix.rounded.as_ref().is_some_and(|own| own.scaled_by_rows);
        scratch_for_codes(&*self.gpu, &args, n, by_rows).is_some()
    }
}

/// The library of an RTX 4090 and an RTX 5090 multiplies codes and leaves the scales to a kernel.
/// That of an RTX 3060 multiplies none, so that weights are rounded to bf16 for it.
#[test]
fn products_are_those_of_rounded_rows() {
    products_are_those_of_rounded_rows_on(&gpu());
    for card in ["rtx-3060", "rtx-4090", "rtx-5090"] {
        products_are_those_of_rounded_rows_on(&on_card(card));
    }
}

fn on_card(name: &str) -> DeviceOps {
    Emulator::of(Emulator::card(name, 1 << 26).unwrap())
}

fn products_are_those_of_rounded_rows_on(gpu: &DeviceOps) {
    let own = gpu.properties();
    for (rows, cols, by_rows) in [
        (&[80, 16][..], 384, false),
        (&[80, 16], 384, true),
        (&[48], 128, true),
        (&[112], 128, false),
        // The library takes no such numbers of rows.
        (&[37], 256, false),
    ] {
        let case = Case::new(gpu.clone(), WeightType::E4M3By128, rows, cols, by_rows);
        let scaled = own.scales_codes() || (by_rows && own.multiplies_codes());
        let codes = scaled && rows != [37];
        // Otherwise weights are rounded to bf16, or products before they are scaled.
        let tolerance = if codes && own.scales_codes() { 4e-3 } else { 1e-2 };
        assert_eq!(case.by_library(65, Mode::Fast), codes, "{rows:?}");
        assert!(!case.by_library(64, Mode::Fast) && !case.by_library(65, Mode::Invariant));
        let x = bf16s(143 * cols, 3);
        let want = case.want(&x);
        let whole = rows.iter().sum::<usize>();
        for mode in [Mode::Fast, Mode::Invariant] {
            for n in [1, 3, 9, 40, 65, 68, 70, 143] {
                let got = case.run(&x[..n * cols], mode);
                let what = format!("{n} by {rows:?} by {cols}, by rows: {by_rows}, {mode:?}");
                assert_close(&got, &want[..n * whole], tolerance, &what);
            }
        }
    }
}

/// Rows that are rounded already are not rounded again where few are multiplied: others are
/// multiplied as they are.
#[test]
fn rows_can_be_rounded_before() {
    let case = Case::new(gpu(), WeightType::E4M3By128, &[48], 256, true);
    let x = bf16s(80 * 256, 3);
    let before = |x: &[f32]| case.run_by(x, Mode::Fast, |args| case.gpu.rounded_linear(args));
    for n in [1, 80] {
        let x = &x[..n * 256];
        assert_eq!(before(&rounded_to_e4m3(x, 256)), case.run(x, Mode::Fast), "{n}");
    }
    assert_ne!(before(&x[..256]), case.run(&x[..256], Mode::Fast));
}

/// Rounding changes the result by more than the comparison above allows, so that it finds a product
/// that does not round.
#[test]
fn products_of_rows_as_they_are_differ() {
    let case = Case::new(gpu(), WeightType::E4M3By128, &[48], 128, true);
    let x = bf16s(70 * 128, 3);
    let rounded = case.want(&x);
    let weights = Tensor::from_slice(&case.parts[0].values, (48, 128), &Device::Cpu).unwrap();
    let exact = linear_reference(&dense_weight(&weights), Some(&case.bias), &x);
    let largest = exact.iter().fold(0f32, |most, x| most.max(x.abs()));
    let errors = rounded.iter().zip(&exact).map(|(a, b)| (a - b).abs());
    assert!(errors.fold(0.0, f32::max) > 2e-2 * largest);
}

/// Scales for 32 columns are not the library's; they are multiplied in bf16.
#[test]
fn groups_of_32_columns_are_multiplied_too() {
    let case = Case::new(gpu(), WeightType::E4M3By32, &[48], 96, false);
    assert!(!case.by_library(80, Mode::Fast));
    let x = bf16s(80 * 96, 3);
    assert_close(&case.run(&x, Mode::Fast), &case.want(&x), 1e-2, "by 32");
}

#[test]
fn a_row_has_the_same_bits_in_any_batch() {
    let case = Case::new(gpu(), WeightType::E4M3By128, &[48], 384, false);
    let x = bf16s(143 * 384, 5);
    let crowd = case.run(&x, Mode::Invariant);
    for n in [1, 9, 33, 71] {
        let alone = case.run(&x[..n * 384], Mode::Invariant);
        assert_eq!(alone, crowd[..n * 48], "{n}");
    }
    let last = case.run(&x[142 * 384..], Mode::Invariant);
    assert_eq!(last, crowd[142 * 48..]);
}

#[test]
fn other_operands_are_refused() {
    let gpu = gpu();
    let mut case = Case::new(gpu.clone(), WeightType::E4M3By128, &[48], 128, true);
    let run = |case: &Case, kind: Kind| {
        let [x, out] = [128, 48].map(|len| Buffer::zeros(&gpu, kind, len).unwrap());
        let w = DeviceOps::matrix(&case.matrix);
        let (x, out) = (x.view(), out.view());
        gpu.linear(&LinearArgs { x, w, bias: None, out, mode: Mode::Fast })
    };
    run(&case, Kind::Bf16).unwrap();
    assert!(run(&case, Kind::F32).is_err());
    let memory = Arc::new(Buffer::new(&gpu, Kind::Bf16, 127).unwrap());
    case.matrix.rounded = Some(RoundedInputs { memory, scaled_by_rows: true });
    assert!(run(&case, Kind::Bf16).is_err(), "no memory for a row");
    let case = Case::new(gpu.clone(), WeightType::E5M2By32, &[48], 128, false);
    assert!(run(&case, Kind::Bf16).is_err(), "codes of another type");
}
