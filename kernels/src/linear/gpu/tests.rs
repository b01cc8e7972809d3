//! The kernels against the reference, against each other bit by bit, and the choice between them.

use super::*;
use crate::gpu::{Buffer, Emulator};
use crate::linear::linear_reference;
use crate::linear::{HeadLinearArgs, Linear};
use crate::operand::MatrixView;
use crate::testing::{
    KINDS, assert_close, dense_weight, downloaded, gpu, poisoned_buffer, random, rounded, upload,
    values,
};
use candle_core::{Device, Tensor};
use std::sync::Arc;

/// Operands on a device, and the expected results.
struct Case {
    gpu: Arc<dyn Gpu>,
    operands: [Buffer; 3],
    n: usize,
    rows: usize,
    cols: usize,
    want: [Vec<f32>; 2],
}

impl Case {
    fn new(kind: Kind, n: usize, rows: usize, cols: usize) -> Self {
        let gpu = gpu();
        let [x, w, bias] = [n * cols, rows * cols, rows]
            .map(|len| rounded(kind, &values(&random(&[len], len as u64))));
        let weight = Tensor::from_slice(&w, (rows, cols), &Device::Cpu).unwrap();
        let weight = dense_weight(&weight);
        let want = [None, Some(&bias[..])].map(|bias| linear_reference(&weight, bias, &x));
        let operands = [x, w, bias].map(|values| upload(&gpu, kind, &values));
        Self { gpu, operands, n, rows, cols, want }
    }

    fn product(&self, n: usize, biased: bool, out: View) -> Gemm {
        let [x, w, bias] = [0, 1, 2].map(|i| self.operands[i].view());
        let (rows, cols) = (self.rows, self.cols);
        let (x, bias) = (x.slice(0..n * cols), biased.then_some(bias));
        Gemm { x, x_stride: cols, w, bias, out, out_stride: rows, n, rows, cols, scales: None }
    }

    /// Computes the first `n` rows.
    fn run(&self, n: usize, biased: bool, out: Kind, algorithm: &Algorithm) -> Vec<f32> {
        let out = poisoned_buffer(&self.gpu, out, n * self.rows);
        run(&*self.gpu, &self.product(n, biased, out.view()), algorithm).unwrap();
        downloaded(&out)
    }

    fn check(&self, kind: Kind, tolerance: f32, algorithm: &Algorithm) {
        for (biased, out) in [(false, kind), (true, kind), (true, Kind::F32)] {
            let what =
                format!("{algorithm:?} {out:?} of {kind:?} {} {}x{}", self.n, self.rows, self.cols);
            let tolerance = if out == Kind::F32 { 1e-5 } else { tolerance };
            let got = self.run(self.n, biased, out, algorithm);
            assert_close(&got, &self.want[usize::from(biased)], tolerance, &what);
        }
    }
}

/// Every kernel of bf16 that takes any number of rows and fits the device.
fn tiles(gpu: &Arc<dyn Gpu>) -> impl Iterator<Item = Algorithm> {
    let most = gpu.properties().shared_bytes;
    let groups: &[GroupKernel] = if gpu.properties().warp_groups { &GROUP_KERNELS } else { &[] };
    let plain = GEMM_KERNELS.iter().filter(move |tile| tile.shared_bytes() <= most);
    plain.map(Algorithm::Gemm).chain(groups.iter().map(Algorithm::GroupGemm))
}

/// Every kernel of bf16 for `n` rows that fits the device.
fn algorithms(gpu: &Arc<dyn Gpu>, n: usize) -> impl Iterator<Item = Algorithm> {
    let most = gpu.properties().shared_bytes;
    let fits = move |gemv: &&GemvKernel| n <= gemv.tokens && gemv.shared_bytes() <= most;
    GEMV_KERNELS.iter().filter(fits).map(Algorithm::Gemv).chain(tiles(gpu))
}

#[test]
fn dot_equals_the_reference() {
    for (n, rows, cols) in [(1, 1, 1), (1, 5, 64), (8, 4, 7), (19, 33, 100)] {
        for (kind, tolerance) in KINDS {
            Case::new(kind, n, rows, cols).check(kind, tolerance, &Algorithm::Dot);
        }
    }
}

#[test]
fn tensor_core_kernels_equal_the_reference() {
    for (n, rows, cols) in [
        (1, 1, 8),
        (2, 17, 64),
        (3, 48, 1096),
        (7, 30, 520),
        (8, 128, 2056),
        (9, 40, 64),
        (19, 129, 1544),
        (32, 15, 512),
        (33, 65, 136),
        (130, 132, 72),
    ] {
        let case = Case::new(Kind::Bf16, n, rows, cols);
        algorithms(&case.gpu, n).for_each(|algorithm| case.check(Kind::Bf16, 1e-2, &algorithm));
    }
}

#[test]
fn blocks_of_gemv_go_on_from_tile_to_tile() {
    let case = Case::new(Kind::Bf16, 2, 9000, 8);
    for algorithm in algorithms(&case.gpu, 2) {
        case.check(Kind::Bf16, 1e-2, &algorithm);
    }
}

#[test]
fn many_tiles_are_all_computed() {
    let case = Case::new(Kind::Bf16, 330, 100, 8);
    tiles(&case.gpu).for_each(|algorithm| case.check(Kind::Bf16, 1e-2, &algorithm));
}

#[test]
fn a_row_has_the_same_bits_in_any_batch_and_by_any_kernel() {
    for cols in [64, 712, 1160, 2056] {
        let case = Case::new(Kind::Bf16, 140, 36, cols);
        let crowd = case.run(140, true, Kind::F32, &tiles(&case.gpu).next().unwrap());
        for n in [1, 5, 8, 16, 31, 100, 140] {
            for algorithm in algorithms(&case.gpu, n) {
                assert_eq!(
                    case.run(n, true, Kind::F32, &algorithm)[..],
                    crowd[..n * 36],
                    "{n} {algorithm:?}"
                );
            }
        }
    }
    let case = Case::new(Kind::F32, 20, 9, 70);
    let crowd = case.run(20, true, Kind::F32, &Algorithm::Dot);
    for n in 1..20 {
        assert_eq!(case.run(n, true, Kind::F32, &Algorithm::Dot)[..], crowd[..n * 9], "{n}");
    }
}

#[test]
fn the_op_equals_the_reference_in_both_modes() {
    for mode in [Mode::Fast, Mode::Invariant] {
        for (kind, tolerance) in KINDS {
            for n in [0, 1, 8, 9, 40] {
                let case = Case::new(kind, n, 48, 72);
                let out = poisoned_buffer(&case.gpu, kind, n * 48);
                let Gemm { x, w, bias, out: view, rows, cols, .. } =
                    case.product(n, true, out.view());
                let w = MatrixView::dense(w, rows, cols);
                case.gpu.linear(&LinearArgs { x, w, bias, out: view, mode }).unwrap();
                assert_close(
                    &downloaded(&out),
                    &case.want[1],
                    tolerance,
                    &format!("{mode:?} {kind:?} {n}"),
                );
            }
        }
    }
}

fn h200() -> Properties {
    Emulator::card("h200", 1 << 30).unwrap()
}

#[test]
fn the_algorithm_is_chosen_by_kind_rows_and_mode() {
    let view = |kind, shift: u64| View::new(4096 + shift, 1 << 30, kind);
    let product = |kind, n, cols, shift| {
        let [x, w, out] = [shift, 0, 0].map(|shift| view(kind, shift));
        Gemm::contiguous(x, w, out, [n, 4096, cols])
    };
    let check = |kind, n, cols, shift, fast, invariant| {
        let product = product(kind, n, cols, shift);
        assert_eq!(choose_algorithm(&product, Mode::Fast, &h200()), fast, "{product:?}");
        assert_eq!(choose_algorithm(&product, Mode::Invariant, &h200()), invariant, "{product:?}");
    };
    let gemv = |i: usize| Algorithm::Gemv(&GEMV_KERNELS[i]);
    check(Kind::Bf16, 1, 4096, 0, gemv(0), gemv(0));
    check(Kind::Bf16, 8, 4096, 0, gemv(0), gemv(0));
    check(Kind::Bf16, 9, 4096, 0, gemv(2), gemv(2));
    check(Kind::Bf16, 16, 4096, 0, gemv(2), gemv(2));
    check(Kind::Bf16, 17, 4096, 0, Algorithm::Library, gemv(3));
    check(Kind::Bf16, 32, 4096, 0, Algorithm::Library, gemv(3));
    check(Kind::Bf16, 33, 4096, 0, Algorithm::Library, Algorithm::GroupGemm(&GROUP_KERNELS[4]));
    check(Kind::Bf16, 512, 4096, 0, Algorithm::Library, Algorithm::GroupGemm(&GROUP_KERNELS[1]));
    check(Kind::Bf16, 1, 4092, 0, Algorithm::Dot, Algorithm::Dot);
    check(Kind::Bf16, 1, 4096, 2, Algorithm::Dot, Algorithm::Dot);
    check(Kind::Bf16, 9, 4096, 2, Algorithm::Library, Algorithm::Dot);
    check(Kind::F32, 1, 4096, 0, Algorithm::Dot, Algorithm::Dot);
    check(Kind::F32, 9, 4096, 0, Algorithm::Library, Algorithm::Dot);
}

#[test]
fn tiles_are_large_where_all_multiprocessors_have_one() {
    let check = |rows, expect: [usize; 5]| {
        let got = [33, 64, 128, 256, 512].map(|n| choose_tile(n, rows, &h200()).kernel);
        assert_eq!(got, expect.map(|i| GEMM_KERNELS[i].kernel), "{rows}");
    };
    check(512, [2, 2, 2, 2, 2]);
    check(4096, [2, 2, 1, 1, 0]);
    check(6144, [2, 2, 1, 1, 0]);
    check(28_672, [1, 1, 0, 0, 0]);
    check(128_256, [1, 1, 0, 0, 0]);
}

#[test]
fn tiles_of_warp_groups_leave_the_busiest_multiprocessor_the_fewest_copies() {
    let check = |rows, expect: [usize; 6]| {
        let got = [33, 64, 128, 256, 512, 8192].map(|n| choose_group_tile(n, rows, &h200()).kernel);
        assert_eq!(got, expect.map(|i| GROUP_KERNELS[i].kernel), "{rows}");
    };
    check(512, [4, 4, 4, 4, 4, 1]);
    check(4096, [4, 4, 3, 2, 1, 0]);
    check(6144, [3, 3, 2, 1, 0, 0]);
    check(28_672, [2, 2, 1, 0, 0, 0]);
    check(128_256, [2, 2, 0, 0, 0, 0]);
}

#[test]
fn only_cards_with_warp_groups_take_their_kernels() {
    let case = Case::new(Kind::Bf16, 40, 8, 8);
    let out = poisoned_buffer(&case.gpu, Kind::Bf16, 8 * 40);
    let product = case.product(40, false, out.view());
    for (card, takes) in [
        ("a100", false),
        ("rtx-3060", false),
        ("rtx-4090", false),
        ("h200", true),
        ("rtx-5090", false),
    ] {
        let properties = Emulator::card(card, 1 << 30).unwrap();
        let chosen = choose_algorithm(&product, Mode::Invariant, &properties);
        assert_eq!(matches!(chosen, Algorithm::GroupGemm(_)), takes, "{card}: {chosen:?}");
        assert_eq!(choose_algorithm(&product, Mode::Fast, &properties), Algorithm::Library);
    }
}

#[test]
fn an_algorithm_without_room_is_not_chosen() {
    let shared: Vec<u32> = GEMV_KERNELS
        .iter()
        .map(GemvKernel::shared_bytes)
        .chain(GEMM_KERNELS.iter().map(GemmKernel::shared_bytes))
        .chain(GROUP_KERNELS.iter().map(GroupKernel::shared_bytes))
        .collect();
    assert!(shared.iter().all(|bytes| *bytes <= h200().shared_bytes), "{shared:?}");
    let small = Emulator::card("rtx-3060", 1 << 20).unwrap();
    assert_eq!(choose_tile(512, 28_672, &small).kernel, "gemm_64x64_bf16");
    let chosen = |n| {
        let case = Case::new(Kind::Bf16, n, 8, 8);
        let out = poisoned_buffer(&case.gpu, Kind::Bf16, 8 * n);
        choose_algorithm(&case.product(n, false, out.view()), Mode::Invariant, &small)
    };
    assert_eq!(chosen(8), Algorithm::Gemv(&GEMV_KERNELS[1]), "two slots fit");
    assert_eq!(chosen(9), Algorithm::Gemm(&GEMM_KERNELS[2]));
}

/// Products of `n` rows with the matrix of each head.
fn heads_of(kind: Kind, [n, heads, rows, cols]: [usize; 4]) -> (Vec<f32>, Vec<f32>) {
    let gpu = gpu();
    let [x, w] = [(n * heads * cols, 1), (heads * rows * cols, 2)]
        .map(|(len, seed)| rounded(kind, &values(&random(&[len], seed))));
    let mut want = Vec::new();
    for (i, x) in x.chunks(cols).enumerate() {
        let matrix = &w[i % heads * rows * cols..][..rows * cols];
        let dot = |w: &[f32]| x.iter().zip(w).map(|(x, w)| x * w).sum::<f32>();
        want.extend(matrix.chunks(cols).map(dot));
    }
    let [x, w] = [&x, &w].map(|values| upload(&gpu, kind, values));
    let out = poisoned_buffer(&gpu, kind, n * heads * rows);
    let w = MatrixView::dense(w.view(), heads * rows, cols);
    let args = HeadLinearArgs { x: x.view(), w, heads, out: out.view() };
    gpu.head_linear(&args).unwrap();
    assert!(n == 0 || gpu.head_linear(&HeadLinearArgs { heads: heads + 1, ..args }).is_err());
    (downloaded(&out), want)
}

#[test]
fn products_of_heads_equal_the_reference_and_do_not_depend_on_other_rows() {
    for (kind, tolerance) in KINDS {
        for [n, heads, rows, cols] in
            [[1, 4, 64, 128], [70, 3, 40, 16], [13, 5, 17, 12], [9, 2, 130, 520], [0, 1, 8, 8]]
        {
            let what = format!("{kind:?} {n} rows, {heads} heads of {rows} by {cols}");
            let (got, want) = heads_of(kind, [n, heads, rows, cols]);
            assert_close(&got, &want, tolerance, &what);
            let first = heads_of(kind, [n.min(1), heads, rows, cols]).0;
            assert_eq!(got[..first.len()], first, "{what}: the first row alone");
        }
    }
}

#[test]
fn wrong_operands_are_refused() {
    let gpu = gpu();
    let view = |kind, len| poisoned_buffer(&gpu, kind, len).view();
    let f32 = Kind::F32;
    for (x, w, bias, rows, out) in [
        (view(f32, 8), view(f32, 12), None, 4, view(f32, 8)),
        (view(f32, 8), view(f32, 16), None, 4, view(f32, 9)),
        (view(f32, 9), view(f32, 16), None, 4, view(f32, 8)),
        (view(f32, 8), view(Kind::Bf16, 16), None, 4, view(f32, 8)),
        (view(f32, 8), view(f32, 16), Some(view(f32, 3)), 4, view(f32, 8)),
        (view(f32, 8), view(f32, 16), None, 4, view(Kind::Bf16, 8)),
        (view(f32, 8), view(f32, 0), None, 0, view(f32, 0)),
    ] {
        let w = MatrixView::dense(w, rows, 4);
        assert!(gpu.linear(&LinearArgs { x, w, bias, out, mode: Mode::Fast }).is_err());
    }
}
