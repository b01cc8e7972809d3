//! Every packed format against the dequantised weights in f32, in awkward sizes; bits that do not
//! depend on the batch; and planted faults, which these comparisons must find.

use super::*;
use crate::gpu::Buffer;
use crate::linear::WeightType;
use crate::linear::{Linear, LinearArgs, linear_reference, packed_types};
use crate::operand::{MatrixBuffer, MatrixPart, OpMemory};
use crate::testing::{
    Packed, dense_weight, downloaded, gpu, poisoned_buffer, random, rounded, upload, values,
};
use candle_core::{Device, Tensor};

/// The exact product of the dequantised weights with activations that bf16 holds, and the largest
/// error that weights rounded to bf16 make of it. Where these are exact, it is that of sums in f32.
fn expected(packed: &Packed, x: &[f32], bias: &[f32]) -> (Vec<f32>, f32) {
    let product = |weights: &[f32]| {
        let weights = Tensor::from_slice(weights, (packed.rows, packed.cols), &Device::Cpu);
        linear_reference(&dense_weight(&weights.unwrap()), Some(bias), x)
    };
    let (want, by_bf16) = (product(&packed.values), product(&rounded(Kind::Bf16, &packed.values)));
    let errors = want.iter().zip(&by_bf16).map(|(want, got)| (want - got).abs());
    let largest = want.iter().fold(0.0f32, |most, want| most.max(want.abs()));
    let error = errors.fold(1e-5 * largest, f32::max);
    (want, error)
}

/// Operands of a product on a device.
struct Case {
    gpu: DeviceOps,
    packed: Packed,
    x: Vec<f32>,
    bias: Vec<f32>,
    buffers: [Buffer; 3],
    scratch: Buffer,
    sums: Buffer,
}

impl Case {
    fn new(dtype: WeightType, n: usize, rows: usize, cols: usize) -> Self {
        Self::of(Packed::new(dtype, rows, cols), n)
    }

    fn of(packed: Packed, n: usize) -> Self {
        let gpu = gpu();
        let [x, bias] = [n * packed.cols, packed.rows]
            .map(|len| rounded(Kind::Bf16, &values(&random(&[len], len as u64))));
        let [x_buffer, bias_buffer] = [&x, &bias].map(|values| upload(&gpu, Kind::Bf16, values));
        let w = Buffer::from_slice(&gpu, &packed.bytes).unwrap();
        // There is room for one band and for part of the next one.
        let scratch = poisoned_buffer(&gpu, Kind::Bf16, 40 * packed.cols);
        let sums = poisoned_buffer(&gpu, Kind::F32, 3 * n * packed.rows);
        Self { gpu, packed, x, bias, buffers: [x_buffer, w, bias_buffer], scratch, sums }
    }

    /// The first `n` rows, in f32, as part of a wider output.
    fn run(&self, n: usize, algorithm: &PackedAlgorithm) -> Vec<f32> {
        let &Packed { ref format, rows, cols, .. } = &self.packed;
        let stride = rows + 3;
        let out = poisoned_buffer(&self.gpu, Kind::F32, n * stride);
        let [x, w, bias] = self.buffers.each_ref().map(Buffer::view);
        let product = Gemm {
            x: x.slice(0..n * cols),
            x_stride: cols,
            w,
            bias: Some(bias).filter(|_| adds_bias(algorithm)),
            out: out.view().slice(2..n * stride),
            out_stride: stride,
            n,
            rows,
            cols,
            scales: None,
        };
        check(&product, format).unwrap();
        run_by(&*self.gpu, &product, format, algorithm).unwrap();
        let all = downloaded(&out);
        let outside = |row: &[f32]| row[..2].iter().chain(&row[2 + rows..]).all(|x| x.is_nan());
        assert!(all.chunks(stride).all(outside), "a product writes its own columns only");
        all.chunks(stride).flat_map(|row| row[2..2 + rows].to_vec()).collect()
    }

    /// The largest error, in units of the largest that rounding weights to bf16 makes.
    fn error(&self, n: usize, algorithm: &PackedAlgorithm) -> f32 {
        let nothing = vec![0.0; self.bias.len()];
        let bias = if adds_bias(algorithm) { &self.bias } else { &nothing };
        let (want, allowed) = expected(&self.packed, &self.x[..n * self.packed.cols], bias);
        let got = self.run(n, algorithm);
        let errors = got.iter().zip(&want).map(|(got, want)| (got - want).abs());
        let larger = |most: f32, error| if most.is_nan() || error <= most { most } else { error };
        errors.fold(0.0, larger) / allowed
    }

    fn algorithms(&self, n: usize) -> impl Iterator<Item = PackedAlgorithm> {
        let kernels = Kernels::of(&self.packed.format);
        (0..GEMVS.len())
            .filter(move |gemv| kernels.takes(*gemv, n, self.gpu.properties()))
            .map(PackedAlgorithm::Gemv)
            .chain([PackedAlgorithm::Gemm])
    }

    /// Those that multiply by weights that are rounded to bf16.
    fn rounding(&self, n: usize) -> Vec<PackedAlgorithm> {
        let mut all = vec![PackedAlgorithm::Library(self.scratch.view())];
        if self.gpu.properties().warp_groups {
            for tile in 0..ROUNDED_TOKENS.len() {
                all.push(PackedAlgorithm::Rounded { tile, sums: None });
                let sums = self.sums.view().slice(0..3 * n * self.packed.rows);
                all.push(PackedAlgorithm::Rounded { tile, sums: Some(sums) });
            }
        }
        all
    }
}

/// The library adds no bias to an output in f32.
fn adds_bias(algorithm: &PackedAlgorithm) -> bool {
    !matches!(algorithm, PackedAlgorithm::Library(_))
}

/// Sizes in which rows do not fill a band, columns no tile or header, or ranges of columns are
/// empty; those of 256 columns for all formats.
const SIZES: [(usize, usize, usize); 9] = [
    (1, 1, 256),
    (3, 33, 768),
    (8, 64, 32),
    (9, 30, 96),
    (17, 40, 608),
    (35, 70, 512),
    (5, 37, 384),
    (2, 50, 320),
    (70, 140, 256),
];

fn sizes(dtype: WeightType) -> impl Iterator<Item = (usize, usize, usize)> {
    SIZES.into_iter().filter(move |size| size.2.is_multiple_of(dtype.block_size()))
}

#[test]
fn products_are_at_least_as_exact_as_those_of_bf16() {
    for dtype in packed_types() {
        for (n, rows, cols) in sizes(dtype) {
            let case = Case::new(dtype, n, rows, cols);
            // The f32 scales of a folder's floats are rounded to eleven bits.
            let by_scales = if case.packed.format.is_float() { 0.3 } else { 0.0 };
            for algorithm in case.algorithms(n) {
                let error = case.error(n, &algorithm);
                assert!(
                    error < 0.2 + by_scales,
                    "{dtype:?} {algorithm:?} {n} {rows}x{cols}: {error}"
                );
            }
            for algorithm in case.rounding(n) {
                let error = case.error(n, &algorithm);
                assert!(
                    error < 1.01 + by_scales,
                    "{dtype:?} {algorithm:?} {n} {rows}x{cols}: {error}"
                );
            }
        }
    }
}

#[test]
fn a_row_has_the_same_bits_in_any_batch_and_by_any_kernel() {
    for dtype in packed_types() {
        let case = Case::new(dtype, 67, 40, 768);
        let crowd = case.run(67, &PackedAlgorithm::Gemm);
        for n in [1, 4, 8, 9, 32] {
            for algorithm in case.algorithms(n) {
                let got = case.run(n, &algorithm);
                assert_eq!(got[..], crowd[..n * 40], "{dtype:?} {n} {algorithm:?}");
            }
        }
    }
}

#[test]
fn blocks_of_gemv_go_on_from_band_to_band() {
    let case = Case::new(WeightType::Q4_0, 2, 5 * 4 * 32 + 7, 64);
    let error = case.error(2, &PackedAlgorithm::Gemv(0));
    assert!(error < 0.2, "{error}");
}

/// One group's scale, one header, one code: each changes a product by more than rounding does.
#[test]
fn planted_faults_are_found() {
    for (dtype, [code, scale, header]) in [
        (WeightType::Q4K, [0, 1024, 4 * 1152 + 1]),
        (WeightType::Q6K, [40, 1536, 4 * 1664 + 1]),
        (WeightType::Q5_1, [1100, 1281, 1409]),
        (WeightType::Q8_0, [70, 2049, 2113]),
        (WeightType::Int4By32, [3, 4 * 1024 + 1, 4 * 1024 + 64]),
        (WeightType::Int4By128, [3, 4 * 1024 + 1, 4 * 1024 + 80 + 66]),
        (WeightType::Int8By128, [5, 4 * 2048 + 3, 4 * 2048 + 64]),
        (WeightType::MXFP4, [3, 1024, 1024 + 33]),
        (WeightType::E4M3By128, [3, 4 * 2048 + 1, 4 * 2048 + 64 + 3]),
    ] {
        // The first byte is changed that is of a kind: a large code must become a small one.
        let faults: [(&str, usize, fn(u8) -> bool, fn(u8) -> u8); 3] = [
            ("swapped nibbles", code, |byte| byte & 0x74 == 0x70, |byte| byte.rotate_left(4)),
            ("scale", scale, |_| true, |byte| byte ^ 0x08),
            ("header, minimum, zero or other scale", header, |_| true, |byte| byte ^ 0x04),
        ];
        for (what, first, is_meant, change) in faults {
            let mut packed = Packed::new(dtype, 20, 256);
            let mut bytes = packed.bytes[first..].iter_mut();
            let byte = bytes.find(|byte| is_meant(**byte)).unwrap();
            *byte = change(*byte);
            let case = Case::of(packed, 3);
            for algorithm in case.algorithms(3).chain(case.rounding(3)) {
                let error = case.error(3, &algorithm);
                assert!(error > 1.2, "{dtype:?}: {what} makes {error} by {algorithm:?}");
            }
        }
    }
}

/// Parts of a format each, and a dense one, in one matrix; and the choice between the kernels.
#[test]
fn parts_of_several_formats_are_one_matrix() {
    let gpu = gpu();
    let (cols, n) = (256, 10);
    let parts = [Packed::new(WeightType::Q4K, 32, cols), Packed::new(WeightType::Q6K, 17, cols)];
    let dense = rounded(Kind::Bf16, &values(&random(&[8 * cols], 5)));
    let mut buffers: Vec<MatrixPart<Buffer>> = Vec::new();
    for part in &parts {
        let values = Buffer::from_slice(&gpu, &part.bytes).unwrap();
        buffers.push(MatrixPart { values, rows: part.rows, format: Some(part.format) });
    }
    let values_of = upload(&gpu, Kind::Bf16, &dense);
    buffers.push(MatrixPart { values: values_of, rows: 8, format: None });
    let matrix = MatrixBuffer { parts: buffers, cols, scratch: None, order: None, rounded: None };
    assert!(DeviceOps::is_quantised(&matrix));
    let x = rounded(Kind::Bf16, &values(&random(&[n * cols], 9)));
    let all = [&parts[0].values[..], &parts[1].values, &dense].concat();
    let weights = Tensor::from_slice(&all, (57, cols), &Device::Cpu).unwrap();
    let want = linear_reference(&dense_weight(&weights), None, &x);
    let on_device = upload(&gpu, Kind::Bf16, &x);
    for mode in [Mode::Fast, Mode::Invariant] {
        let out = poisoned_buffer(&gpu, Kind::F32, n * 57);
        let w = DeviceOps::matrix(&matrix);
        let args = LinearArgs { x: on_device.view(), w, bias: None, out: out.view(), mode };
        gpu.linear(&args).unwrap();
        crate::testing::assert_close(&downloaded(&out), &want, 1e-5, &format!("{mode:?}"));
    }
    let f32s = upload(&gpu, Kind::F32, &x);
    let out = poisoned_buffer(&gpu, Kind::F32, n * 57);
    let w = DeviceOps::matrix(&matrix);
    let args = LinearArgs { x: f32s.view(), w, bias: None, out: out.view(), mode: Mode::Fast };
    assert!(gpu.linear(&args).is_err(), "activations in f32");
}

/// A product with an output in f32.
fn sized(n: usize, rows: usize, bias: Option<View>) -> Gemm {
    let [x, w] = [Kind::Bf16, Kind::U8].map(|kind| View::new(4096, 1 << 30, kind));
    let (cols, out) = (4096, View::new(4096, 1 << 30, Kind::F32));
    Gemm { x, x_stride: cols, w, bias, out, out_stride: rows, n, rows, cols, scales: None }
}

#[test]
fn the_algorithm_is_chosen_by_rows_mode_and_card() {
    let scratch = View::new(4096, 1 << 20, Kind::Bf16);
    let h200 = Properties {
        shared_bytes: 227 * 1024,
        multiprocessors: 132,
        warp_groups: true,
        ..gpu().properties().clone()
    };
    let small = Properties { shared_bytes: 99 * 1024, ..h200.clone() };
    for kernels in &KERNELS {
        let check_rows = |rows, n, mode, card: &Properties, expect| {
            let product = sized(n, rows, None);
            let found = choose(kernels, &product, mode, Some(scratch), card);
            assert_eq!(found, expect, "{n} {rows} {mode:?}");
        };
        let check = |n, mode, card: &Properties, expect| {
            check_rows(1 << 14, n, mode, card, expect);
        };
        for mode in [Mode::Fast, Mode::Invariant] {
            for (n, gemv) in [(1, 0), (4, 0), (5, 1), (8, 1), (9, 2), (16, 2), (17, 3), (32, 3)] {
                check(n, mode, &h200, PackedAlgorithm::Gemv(gemv));
            }
            check(8, mode, &small, PackedAlgorithm::Gemv(1));
        }
        let old = Properties { warp_groups: false, ..h200.clone() };
        check(64, Mode::Fast, &old, PackedAlgorithm::Gemm);
        check(65, Mode::Fast, &old, PackedAlgorithm::Library(scratch));
        // As many parts of the columns as there is room for, where there are few tiles.
        for (n, rows, tile, parts) in [
            (33, 1 << 14, 0, 1),
            (64, 1 << 14, 0, 1),
            (65, 1 << 14, 1, 1),
            (64, 4096, 0, 2),
            (512, 1 << 14, 1, 1),
        ] {
            let sums = View::new(4096, parts * n * rows, Kind::F32);
            let sums = Some(sums).filter(|_| parts > 1);
            check_rows(rows, n, Mode::Fast, &h200, PackedAlgorithm::Rounded { tile, sums });
        }
        for mode in [Mode::Fast, Mode::Invariant] {
            check(17, mode, &small, PackedAlgorithm::Gemm);
        }
        check(64, Mode::Invariant, &h200, PackedAlgorithm::Gemm);
        // With few blocks for GEMM, GEMV is launched twice.
        check_rows(4096, 48, Mode::Invariant, &h200, PackedAlgorithm::Gemv(3));
        check_rows(4096, 65, Mode::Invariant, &h200, PackedAlgorithm::Gemm);
        check(513, Mode::Fast, &h200, PackedAlgorithm::Library(scratch));
        check(65, Mode::Invariant, &h200, PackedAlgorithm::Gemm);
        let choose = |product: &Gemm, scratch| choose(kernels, product, Mode::Fast, scratch, &h200);
        assert_eq!(choose(&sized(999, 1 << 14, None), None), PackedAlgorithm::Gemm);
        let biased = sized(999, 1 << 14, Some(View::new(4096, 1 << 14, Kind::Bf16)));
        assert_eq!(choose(&biased, Some(scratch)), PackedAlgorithm::Gemm, "a bias and f32");
        assert!(kernels.gemm_bytes() <= small.shared_bytes as usize);
        let warps = |card| kernels.gemv_block(1, card).map(|(warps, _)| warps);
        assert_eq!((warps(&h200), warps(&small)), (Some(16), Some(8)));
    }
}

/// Twice the bytes that the columns of a block take in files: integers have scales of two bytes,
/// with zeros in the bits of a code or without.
fn on_disk(dtype: WeightType) -> Vec<usize> {
    let columns = dtype.block_size();
    match dtype.name() {
        name if name.starts_with("INT4") => vec![columns + 4, columns + 5],
        name if name.starts_with("INT8") => vec![2 * columns + 4, 2 * columns + 6],
        name if name.starts_with('F') => vec![2 * columns],
        _ => vec![2 * dtype.type_size()],
    }
}

/// The shapes of Llama 3.1 8B and of Qwen 2.5 7B: at most 3 % more than the file takes.
#[test]
fn a_matrix_takes_on_a_device_what_it_takes_on_disk() {
    use WeightType::{F16, IQ1M, IQ3S, IQ4NL, IQ4XS, Q2K, Q3K, Q8K, TQ2_0};
    let shapes = [
        (4096, 4096),
        (1024, 4096),
        (14_336, 4096),
        (4096, 14_336),
        (128_256, 4096),
        (3584, 3584),
        (512, 3584),
        (18_944, 3584),
        (3584, 18_944),
        (152_064, 3584),
    ];
    for dtype in packed_types() {
        let format = DeviceFormat::of(dtype).unwrap();
        // A folder's floats have a scale for each block or row, which takes nothing there.
        let most = if dtype.name().ends_with("E5M2_32") || dtype == WeightType::E4M3By32 {
            1.07
        } else {
            1.03
        };
        for (rows, cols) in shapes {
            let blocks = rows * cols / dtype.block_size();
            for block_bytes in on_disk(dtype) {
                let ratio = format.bytes(rows, cols) as f64 / (blocks * block_bytes / 2) as f64;
                assert!((1.0..most).contains(&ratio), "{dtype:?} {rows}x{cols}: {ratio}");
            }
        }
    }
    for dtype in [F16, Q2K, Q3K, Q8K, IQ4NL, IQ4XS, IQ3S, IQ1M, TQ2_0] {
        assert_eq!(DeviceFormat::of(dtype), None);
    }
}

#[test]
fn bytes_that_are_not_whole_rows_are_refused() {
    let format = DeviceFormat::of(WeightType::Q4K).unwrap();
    let mut out = vec![0; format.bytes(32, 256)];
    format.pack(&[0; 144], 256, &mut out).unwrap();
    assert!(format.pack(&[0; 144], 255, &mut out).is_err());
    assert!(format.pack(&[0; 143], 256, &mut out).is_err());
    assert!(format.pack(&[0; 33 * 144], 256, &mut out).is_err());
    assert!(format.pack(&[], 0, &mut []).is_err());
}

#[test]
fn values_that_a_device_has_not_are_refused() {
    for (dtype, code, scale, fits) in [
        (WeightType::Int4By32, 0xff, 15.9f32, true),
        (WeightType::Int4By32, 0xff, -15.9, true),
        (WeightType::Int4By32, 0xff, 16.0, false),
        (WeightType::Int4By32, 0xff, f32::NAN, false),
        (WeightType::E4M3By32, 0xfe, 1.0, true),
        (WeightType::E4M3By32, 0xff, 1.0, false),
        (WeightType::E4M3By128, 0x7f, 1.0, false),
        (WeightType::E5M2By32, 0x7b, 1.0, true),
        (WeightType::E5M2By32, 0xfc, 1.0, false),
    ] {
        let mut raw = vec![code; dtype.type_size()];
        raw[..4].copy_from_slice(&scale.to_le_bytes());
        if dtype == WeightType::Int4By32 {
            raw[4] = 8;
        }
        let format = DeviceFormat::of(dtype).unwrap();
        let cols = dtype.block_size();
        let packed = format.pack(&raw, cols, &mut vec![0; format.bytes(1, cols)]);
        assert_eq!(packed.is_ok(), fits, "{dtype:?} {code} {scale}");
    }
}
