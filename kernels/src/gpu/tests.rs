//! Views, buffers, staging memory and the arguments of products stay inside their bounds.

use super::*;
use crate::args;
use half::bf16;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};

#[path = "../../build/nvcc.rs"]
mod nvcc;

fn view(address: u64, len: usize, kind: Kind) -> View {
    View::new(address, len, kind)
}

fn panics<T>(work: impl FnOnce() -> T) -> bool {
    catch_unwind(AssertUnwindSafe(work)).is_err()
}

#[test]
fn a_slice_stays_inside_its_view() {
    let whole = view(4096, 10, Kind::Bf16);
    let check = |range: Range<usize>, expect: Option<(u64, usize)>| {
        let found = (!panics(|| whole.slice(range.clone()))).then(|| whole.slice(range.clone()));
        assert_eq!(found.map(|view| (view.address(), view.len())), expect, "{range:?}");
    };
    check(0..10, Some((4096, 10)));
    check(3..7, Some((4102, 4)));
    check(10..10, Some((4116, 0)));
    check(9..11, None);
    check(11..11, None);
    check(Range { start: 7, end: 3 }, None);
    check(usize::MAX..usize::MAX, None);
    // A slice of a slice cannot reach the rest of the whole.
    assert!(panics(|| whole.slice(2..4).slice(0..3)));
}

#[test]
fn a_cast_keeps_the_bytes_or_is_refused() {
    let check = |from: View, to: Kind, expect: Option<usize>| {
        let found = (!panics(|| from.cast(to))).then(|| from.cast(to));
        assert!(found.is_none_or(|to| to.bytes() == from.bytes()), "{from:?}");
        assert_eq!(found.map(View::len), expect, "{from:?} as {to:?}");
    };
    check(view(4096, 16, Kind::U8), Kind::U64, Some(2));
    check(view(4096, 3, Kind::U64), Kind::F32, Some(6));
    check(view(4096, 0, Kind::U8), Kind::U64, Some(0));
    check(view(4096, 6, Kind::U8), Kind::F32, None);
    check(view(4098, 8, Kind::U8), Kind::F32, None);
    check(view(4100, 4, Kind::Bf16), Kind::U64, None);
}

fn check_values<T: DeviceElement + PartialEq + Debug>(gpu: &Arc<dyn Gpu>, values: &[T]) {
    let buffer = Buffer::from_slice(gpu, values).unwrap();
    assert_eq!((buffer.view().len(), buffer.view().kind()), (values.len(), T::KIND));
    assert_eq!(buffer.to_vec::<T>().unwrap(), values);
}

#[test]
fn buffers_return_the_values_that_they_were_given() {
    let gpu = Emulator::new();
    check_values(&gpu, &[1.5f32, -0.0, f32::MAX, f32::MIN_POSITIVE]);
    check_values(&gpu, &[bf16::from_f32(-2.5), bf16::MAX, bf16::ZERO]);
    check_values(&gpu, &[0u32, 1, 1 << 31, u32::MAX]);
    check_values(&gpu, &[0u64, 1 << 40, u64::MAX]);
    check_values(&gpu, &[0u8, 255]);
    check_values::<f32>(&gpu, &[]);
    assert_eq!(Buffer::zeros(&gpu, Kind::U32, 3).unwrap().to_vec::<u32>().unwrap(), [0; 3]);
    let error = Buffer::zeros(&gpu, Kind::U32, 1).unwrap().to_vec::<f32>().unwrap_err();
    assert!(error.to_string().contains("F32 values of a U32 buffer"), "{error}");
}

#[test]
fn a_dropped_buffer_gives_its_memory_back_once_its_work_is_done() {
    let gpu = Emulator::with(1 << 20, 4);
    let free = || gpu.memory().unwrap().0;
    let all = free();
    let buffer = Buffer::zeros(&gpu, Kind::U8, 1000).unwrap();
    assert_eq!(free(), all - 1000);
    gpu.fill(buffer.view(), 7).unwrap();
    drop(buffer);
    gpu.synchronise().unwrap();
    assert_eq!(free(), all);
}

#[test]
fn copies_stay_inside_a_staging_buffer() {
    let gpu = Emulator::new();
    let buffer = Buffer::zeros(&gpu, Kind::U8, 8).unwrap();
    let staging = gpu.staging(8).unwrap();
    let check = |offset: usize, bytes: usize, fits: bool| {
        let part = buffer.view().slice(0..bytes);
        for outcome in [gpu.upload(&staging, offset, part), gpu.download(part, &staging, offset)] {
            assert_eq!(outcome.is_ok(), fits, "{bytes} bytes at {offset}: {outcome:?}");
        }
    };
    check(0, 8, true);
    check(3, 5, true);
    check(8, 0, true);
    check(1, 8, false);
    check(9, 0, false);
    check(usize::MAX, 1, false);
    gpu.synchronise().unwrap();
}

#[test]
fn the_words_of_a_staging_buffer_leave_out_its_last_bytes() {
    let mut staging = Emulator::new().staging(11).unwrap();
    staging.words_mut().copy_from_slice(&[1, u32::MAX]);
    assert_eq!(staging.bytes(), [1, 0, 0, 0, 255, 255, 255, 255, 0, 0, 0]);
}

#[test]
fn copies_between_views_want_one_kind_and_length() {
    let gpu = Emulator::new();
    let buffer = Buffer::zeros(&gpu, Kind::F32, 8).unwrap();
    let (first, second) = (buffer.view().slice(0..4), buffer.view().slice(4..8));
    gpu.copy(first, second).unwrap();
    assert!(gpu.copy(first, second.slice(0..3)).is_err());
    assert!(gpu.copy(first, second.cast(Kind::U32)).is_err());
}

/// A product whose views are exactly as long as they must be.
fn product() -> Gemm {
    Gemm {
        x: View::new(4096, 2 * 10 + 6, Kind::Bf16),
        x_stride: 10,
        w: View::new(8192, 5 * 6, Kind::Bf16),
        bias: Some(View::new(12_288, 5, Kind::Bf16)),
        out: View::new(16_384, 2 * 8 + 5, Kind::F32),
        out_stride: 8,
        n: 3,
        rows: 5,
        cols: 6,
        scales: None,
    }
}

#[test]
fn products_stay_inside_their_views() {
    let check = |gemm: Gemm, fits: bool| assert_eq!(gemm.check().is_ok(), fits, "{gemm:?}");
    let shorter = |view: View| view.slice(0..view.len() - 1);
    let Gemm { x, w, bias, out, .. } = product();
    check(product(), true);
    check(Gemm { n: 0, ..product() }, true);
    check(Gemm { bias: None, ..product() }, true);
    check(Gemm { x: shorter(x), ..product() }, false);
    check(Gemm { w: shorter(w), ..product() }, false);
    check(Gemm { out: shorter(out), ..product() }, false);
    check(Gemm { bias: bias.map(shorter), ..product() }, false);
    check(Gemm { n: 4, ..product() }, false);
    check(Gemm { x_stride: 5, n: 1, ..product() }, false);
    check(Gemm { out_stride: 4, n: 1, ..product() }, false);
    check(Gemm { w: View::new(8192, 30, Kind::F32), ..product() }, false);
    check(Gemm { bias: Some(View::new(12_288, 5, Kind::F32)), ..product() }, false);
    check(Gemm { out: View::new(16_384, 21, Kind::U32), ..product() }, false);
}

/// A product of codes with scales for groups of 128 columns, which the library takes.
fn product_of_codes() -> Gemm {
    let f32s = |len| View::new(1 << 20, len, Kind::F32);
    Gemm {
        x: View::new(4096, 4 * 256, Kind::U8),
        x_stride: 256,
        w: View::new(8192, 8 * 256, Kind::U8),
        bias: Some(View::new(16_384, 8, Kind::Bf16)),
        out: View::new(20_480, 4 * 8, Kind::Bf16),
        out_stride: 8,
        n: 4,
        rows: 8,
        cols: 256,
        scales: Some(GemmScales { x: f32s(2 * 4), w: f32s(2 * 8) }),
    }
}

#[test]
fn products_of_codes_have_their_scales_and_are_aligned() {
    let check = |gemm: Gemm, fits: bool, taken: bool| {
        let found = (gemm.check().is_ok(), gemm.check_library().is_ok());
        assert_eq!(found, (fits, taken), "{gemm:?}");
    };
    let (product, f32s) = (product_of_codes(), |len| View::new(1 << 20, len, Kind::F32));
    let scaled = |x, w| Some(GemmScales { x: f32s(x), w: f32s(w) });
    check(product, true, true);
    check(Gemm { scales: scaled(4, 8), ..product }, true, true);
    check(Gemm { scales: None, ..product }, true, true);
    for scales in [scaled(4, 16), scaled(8, 15)] {
        assert!(Gemm { scales, ..product }.check().is_err(), "{scales:?}");
    }
    let wide = View::new(4096, 4 * 256, Kind::Bf16);
    check(Gemm { x: wide, ..product }, false, true);
    check(Gemm { out: View::new(20_480, 4 * 8, Kind::F32), ..product }, true, false);
    // Three rows are taken with a scale for each.
    check(Gemm { n: 3, scales: scaled(6, 16), ..product }, true, false);
    check(Gemm { n: 3, scales: scaled(3, 8), ..product }, true, true);
    for scales in [product.scales, None] {
        let w = View::new(8200, 8 * 256, Kind::U8);
        check(Gemm { w, scales, ..product }, true, false);
    }
    let stride = Gemm { out: View::new(20_480, 4 * 9, Kind::Bf16), out_stride: 9, ..product };
    check(stride, true, false);
}

#[test]
fn sizes_of_arguments_are_32_bits() {
    assert!(matches!(args![u32::MAX as usize], [Arg::U32(u32::MAX)]));
    assert!(panics(|| Arg::from(1usize << 32)));
    assert!(matches!(Arg::from(None::<View>), Arg::Null));
}

#[test]
fn a_device_that_is_too_old_is_told_in_one_sentence() {
    let check = |capability, expect: Option<&str>| {
        let device = Emulator::card("rtx-3060", 1 << 20).unwrap();
        let found = Properties { capability, name: "A card".into(), ..device }.check_architecture();
        let said = found.err().map(|error| error.to_string());
        assert_eq!(said.as_deref(), expect, "{capability:?}");
    };
    check((8, 0), None);
    check((12, 0), None);
    check(
        (7, 5),
        Some(
            "no GPU can be used: A card is too old: it is sm_75, and the kernels need sm_80 or later",
        ),
    );
}

#[test]
fn events_and_graphs_belong_to_their_device() {
    let gpu = Emulator::new();
    let text = |result: Result<()>| result.unwrap_err().to_string();
    assert!(text(gpu.wait(&StreamEvent(Box::new("other")))).contains("another device"));
    assert!(text(gpu.replay(&Graph(Box::new("other")))).contains("another device"));
}

#[cfg(not(feature = "cuda"))]
#[test]
fn a_build_without_cuda_says_how_to_build_with_it() {
    let options = DeviceOptions::default();
    let outcomes = [probe(0).map(drop), open(0).map(drop), open_with(0, &options).map(drop)];
    for outcome in outcomes {
        let error = outcome.unwrap_err();
        assert!(matches!(error, Error::NoDevice(_)), "{error}");
        assert!(error.to_string().contains("--features cuda"), "{error}");
    }
    const { assert!(!BUILT) };
}

#[test]
fn later_cards_find_code_that_overlaps() {
    let codes = |architectures: &str| -> Vec<String> {
        let all = nvcc::arguments(architectures).unwrap().into_iter();
        all.filter_map(|one| Some(one.split_once(",code=")?.1.to_owned())).collect()
    };
    let check = |architectures: &str, expect: &[&str]| {
        assert_eq!(codes(architectures), expect, "{architectures}");
    };
    check(nvcc::DEFAULT, &["sm_80", "sm_90a", "compute_80", "compute_90"]);
    check("80", &["sm_80", "compute_80"]);
    check("90", &["sm_90a", "compute_90"]);
    check("86, 120", &["sm_86", "sm_120", "compute_86", "compute_90"]);
    check("100,120a", &["sm_100", "sm_120a", "compute_100"]);
    // The instructions of warp groups are in machine code alone: no PTX of them runs elsewhere.
    let all = nvcc::arguments(nvcc::DEFAULT).unwrap();
    assert!(all.contains(&"-gencode=arch=compute_90,code=compute_90".to_owned()), "{all:?}");
    let wrong = nvcc::arguments("80,new").unwrap_err();
    assert!(wrong.starts_with(nvcc::ARCHITECTURES) && wrong.contains("\"new\""), "{wrong}");
}

#[test]
fn a_kernel_that_spills_is_named() {
    let report = |bytes: u32| {
        format!(
            "ptxas info    : Function properties for scan\n    \
             0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n\
             ptxas info    : Function properties for norm\n    \
             8 bytes stack frame, {bytes} bytes spill stores, {bytes} bytes spill loads\n"
        )
    };
    assert_eq!(nvcc::spilling(&report(0)), None);
    assert_eq!(nvcc::spilling(&report(36)), Some("norm"));
}
