//! Products with packed experts have the bits of those that `linear` computes for each choice
//! alone.

use super::*;
use crate::experts::Experts;
use crate::experts::gpu::tests::Routed;
use crate::experts::tests::scores;
use crate::gpu::{Buffer, Emulator};
use crate::linear::{Linear, LinearArgs, Mode, WeightType, packed_types};
use crate::operand::{MatrixBuffer, MatrixPart, MatrixView, OpMemory};
use crate::testing::{Packed, downloaded, poisoned_buffer, random, rounded, upload, values};

const BOTH: [ExpertKernel; 2] = [ExpertKernel::Gemv, ExpertKernel::Gemm];

fn matrix(gpu: &DeviceOps, packed: &Packed, bytes: &[u8], rows: usize) -> MatrixBuffer {
    let values = Buffer::from_slice(gpu, bytes).unwrap();
    let parts = vec![MatrixPart { values, rows, format: Some(packed.format) }];
    MatrixBuffer { parts, cols: packed.cols, scratch: None, order: None, rounded: None }
}

/// The choices of some rows, and the matrices of experts.
struct Case {
    routed: Routed,
    packed: Packed,
    size: [usize; 3],
    rows: usize,
    /// Those of all rows, for each choice its own.
    x: Vec<f32>,
    bias: Vec<f32>,
}

impl Case {
    fn new(dtype: WeightType, size: [usize; 3], [rows, cols]: [usize; 2]) -> Self {
        let [n, experts, chosen] = size;
        let routed = Routed::new(&scores(n, experts), size, true);
        let packed = Packed::new(dtype, experts * rows, cols);
        let [x, bias] = [n * chosen * cols, experts * rows]
            .map(|len| rounded(Kind::Bf16, &values(&random(&[len], 1 + len as u64))));
        Self { routed, packed, size, rows, x, bias }
    }

    fn sizes(&self, choices_per_row: usize) -> ExpertSizes {
        let choices = self.size[0] * self.size[2];
        ExpertSizes { choices, choices_per_row, rows: self.rows, cols: self.packed.cols }
    }

    /// The rows that choices read, of which some may share one.
    fn inputs(&self, choices_per_row: usize) -> &[f32] {
        &self.x[..self.x.len() / choices_per_row]
    }

    fn run(&self, choices_per_row: usize, kernel: ExpertKernel) -> Vec<f32> {
        let (gpu, sizes) = (&self.routed.gpu, self.sizes(choices_per_row));
        let [x, bias] = [self.inputs(choices_per_row), &self.bias]
            .map(|values| upload(gpu, Kind::Bf16, values));
        let matrix = matrix(gpu, &self.packed, &self.packed.bytes, self.packed.rows);
        let out = poisoned_buffer(gpu, Kind::Bf16, sizes.choices * self.rows);
        let (w, bias, routes) =
            (DeviceOps::matrix(&matrix), Some(bias.view()), self.routed.routes());
        let args = ExpertLinearArgs { x: x.view(), w, bias, routes, out: out.view() };
        check_packed(&args, &sizes, &self.packed.format).unwrap();
        run_by(&**gpu, &args, &sizes, Some(&self.packed.format), kernel).unwrap();
        downloaded(&out)
    }

    /// The product of each choice alone.
    fn alone(&self, choices_per_row: usize) -> Vec<f32> {
        let (gpu, rows, cols) = (&self.routed.gpu, self.rows, self.packed.cols);
        let inputs = self.inputs(choices_per_row);
        let ids = self.routed.plan.to_vec::<u32>().unwrap();
        let expert_bytes = self.packed.format.bytes(rows, cols);
        let product = |choice: usize| {
            let expert = ids[choice] as usize;
            let bytes = &self.packed.bytes[expert * expert_bytes..][..expert_bytes];
            let matrix = matrix(gpu, &self.packed, bytes, rows);
            let x = &inputs[choice / choices_per_row * cols..][..cols];
            let (x, out) = (upload(gpu, Kind::Bf16, x), poisoned_buffer(gpu, Kind::Bf16, rows));
            let bias = upload(gpu, Kind::Bf16, &self.bias[expert * rows..][..rows]);
            let (w, bias) = (DeviceOps::matrix(&matrix), Some(bias.view()));
            let mode = Mode::Invariant;
            gpu.linear(&LinearArgs { x: x.view(), w, bias, out: out.view(), mode }).unwrap();
            downloaded(&out)
        };
        (0..self.sizes(1).choices).flat_map(product).collect()
    }
}

#[test]
fn each_choice_has_the_bits_of_its_product_alone() {
    for dtype in packed_types() {
        for (size, sizes) in [([1, 8, 2], [32, 256]), ([19, 6, 2], [96, 768])] {
            let case = Case::new(dtype, size, sizes);
            for per_row in [1, size[2]] {
                let want = case.alone(per_row);
                for kernel in BOTH {
                    let got = case.run(per_row, kernel);
                    assert_eq!(got, want, "{dtype:?} {size:?} {sizes:?} {per_row} {kernel:?}");
                }
            }
        }
    }
}

/// More choices of an expert than a kernel takes at a time, and experts that nobody chose.
#[test]
fn all_choices_of_an_expert_are_computed() {
    for size in [[150, 2, 1], [140, 2, 2], [3, 40, 1]] {
        let case = Case::new(WeightType::Q4_0, size, [64, 64]);
        let want = case.alone(1);
        for kernel in BOTH {
            assert_eq!(case.run(1, kernel), want, "{size:?} {kernel:?}");
        }
    }
}

/// Dense experts have the bits of their products alone too.
#[test]
fn dense_experts_equal_products_alone() {
    for (size, [rows, cols]) in
        [([3, 40, 2], [40, 64]), ([150, 2, 1], [70, 136]), ([9, 5, 3], [33, 520])]
    {
        let [n, experts, chosen] = size;
        let routed = Routed::new(&scores(n, experts), size, true);
        let gpu = &routed.gpu;
        let [x, w, bias] = [n * cols, experts * rows * cols, experts * rows].map(|len| {
            upload(gpu, Kind::Bf16, &rounded(Kind::Bf16, &values(&random(&[len], 3 + len as u64))))
        });
        let choices = n * chosen;
        let sizes = ExpertSizes { choices, choices_per_row: chosen, rows, cols };
        let ids = routed.plan.to_vec::<u32>().unwrap();
        let alone = |choice: usize| {
            let (expert, row) = (ids[choice] as usize, choice / chosen);
            let own = w.view().slice(expert * rows * cols..(expert + 1) * rows * cols);
            let bias = bias.view().slice(expert * rows..(expert + 1) * rows);
            let out = poisoned_buffer(gpu, Kind::Bf16, rows);
            let x = x.view().slice(row * cols..(row + 1) * cols);
            let (w, bias, mode) = (MatrixView::dense(own, rows, cols), Some(bias), Mode::Invariant);
            gpu.linear(&LinearArgs { x, w, bias, out: out.view(), mode }).unwrap();
            downloaded(&out)
        };
        let want: Vec<f32> = (0..choices).flat_map(alone).collect();
        for kernel in BOTH {
            let out = poisoned_buffer(gpu, Kind::Bf16, choices * rows);
            let (w, bias) = (MatrixView::dense(w.view(), experts * rows, cols), Some(bias.view()));
            let routes = routed.routes();
            let args = ExpertLinearArgs { x: x.view(), w, bias, routes, out: out.view() };
            run_by(&**gpu, &args, &sizes, None, kernel).unwrap();
            assert_eq!(downloaded(&out), want, "{size:?} {kernel:?}");
        }
    }
}

#[test]
fn the_op_takes_whole_bands_and_bf16() {
    let op = |rows, kind: Kind, biases: usize| {
        let size @ [n, experts, chosen] = [5, 3, 2];
        let case = Case::new(WeightType::Q4K, size, [rows, 256]);
        let gpu = &case.routed.gpu;
        let matrix = matrix(gpu, &case.packed, &case.packed.bytes, experts * rows);
        let (x, bias) = (upload(gpu, kind, &case.x), upload(gpu, kind, &vec![0.5; biases]));
        let out = poisoned_buffer(gpu, kind, n * chosen * rows);
        let (w, bias) = (DeviceOps::matrix(&matrix), (biases > 0).then(|| bias.view()));
        let (routes, to) = (case.routed.routes(), out.view());
        gpu.expert_linear(&ExpertLinearArgs { x: x.view(), w, bias, routes, out: to })
    };
    op(32, Kind::Bf16, 0).unwrap();
    op(32, Kind::Bf16, 96).unwrap();
    assert!(op(32, Kind::Bf16, 95).is_err(), "a bias too few");
    assert!(op(32, Kind::F32, 0).is_err(), "activations in f32");
    assert!(op(48, Kind::Bf16, 0).is_err(), "experts that begin inside a band");
}

#[test]
fn the_kernel_is_chosen_by_the_choices_of_an_expert() {
    let card = Emulator::card("rtx-3060", 1 << 20).unwrap();
    let tiny = Properties { shared_bytes: 64 << 10, ..card.clone() };
    for dtype in packed_types() {
        let format = DeviceFormat::of(dtype).unwrap();
        let choose = |choices, card: &Properties| {
            ExpertKernels::of(Some(&format), card).choose(choices, 128)
        };
        assert_eq!(choose(8, &card), ExpertKernel::Gemv, "{dtype:?}");
        assert_eq!(choose(1024, &card), ExpertKernel::Gemv);
        assert_eq!(choose(1025, &card), ExpertKernel::Gemm);
        assert_eq!(choose(8, &tiny), ExpertKernel::Gemm);
        assert!(ExpertKernels::of(Some(&format), &tiny).gemm_bytes <= 64 << 10);
    }
}
