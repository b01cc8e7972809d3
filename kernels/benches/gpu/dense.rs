//! The products of a decoder: in the fast mode, in the batch-invariant one, by the library where
//! the fast mode uses a kernel of ours, and by each kernel among which the batch-invariant mode
//! chooses.

use crate::case::{Case, TOLERANCE};
use crate::data::{bf16s, output, value};
use crate::{Model, Result};
use cresset_kernels::args;
use cresset_kernels::gpu::{Arg, Buffer, Gemm, Gpu, Kind, Launch};
use cresset_kernels::linear::{Linear, LinearArgs, Mode};
use cresset_kernels::operand::MatrixView;
use std::sync::Arc;

/// Name, rows, columns and element type of the result.
fn shapes(m: &Model) -> [(&'static str, usize, usize, Kind); 5] {
    let qkv = (m.heads + 2 * m.kv_heads) * m.head_dim;
    [
        ("qkv", qkv, m.hidden, Kind::Bf16),
        ("o", m.hidden, m.heads * m.head_dim, Kind::Bf16),
        ("gate-up", 2 * m.ffn, m.hidden, Kind::Bf16),
        ("down", m.hidden, m.ffn, Kind::Bf16),
        ("head", m.vocab_size, m.hidden, Kind::F32),
    ]
}

type Weights = Arc<Vec<Arc<Buffer>>>;

#[derive(Clone, Copy)]
enum By {
    Op(Mode),
    Library,
    Kernel(&'static Kernel),
}

/// A kernel, its tile (rows of weights by rows of activations), threads and shared memory.
struct Kernel(&'static str, [usize; 2], u32, u32);

static KERNELS: [Kernel; 6] = [
    Kernel("gemm_128x128_bf16", [128, 128], 256, 128 << 10),
    Kernel("gemm_group_192x128_bf16", [192, 128], 256, 200 << 10),
    Kernel("gemm_group_128x128_bf16", [128, 128], 256, 192 << 10),
    Kernel("gemm_group_128x64_bf16", [128, 64], 128, 96 << 10),
    Kernel("gemm_group_64x64_bf16", [64, 64], 512, 208 << 10),
    Kernel("gemm_group_32x64_bf16", [32, 64], 512, 200 << 10),
];

impl Kernel {
    /// Those whose names begin with "gemm_group" are for sm_90 only. Their blocks stay and go from
    /// tile to tile: one on a multiprocessor, or two where there is room.
    fn launch(&self, gpu: &dyn Gpu, n: usize, rows: usize) -> Option<Launch> {
        let &Self(kernel, [tile_rows, columns], threads, shared_bytes) = self;
        let properties = gpu.properties();
        let tiles = (rows.div_ceil(tile_rows) * n.div_ceil(columns)) as u32;
        let stays = kernel.starts_with("gemm_group");
        let resident = if shared_bytes <= 113 << 10 { 2 } else { 1 };
        let most = if stays { properties.multiprocessors * resident } else { tiles };
        let runs = !stays || properties.capability == (9, 0);
        let blocks = [tiles.min(most), 1, 1];
        (runs && shared_bytes <= properties.shared_bytes).then_some(Launch {
            kernel,
            blocks,
            threads,
            shared_bytes,
        })
    }
}

/// The ways to compute a product of `n` rows with a matrix of this name.
fn ways(name: &str, n: usize) -> impl Iterator<Item = By> {
    let library = (n <= 32).then_some(By::Library);
    let compared = n >= 64 && matches!(name, "o" | "gate-up");
    let kernels = if compared { KERNELS.iter() } else { [].iter() }.map(By::Kernel);
    [By::Op(Mode::Fast), By::Op(Mode::Invariant)].into_iter().chain(library).chain(kernels)
}

pub fn cases<'a>(
    gpu: &'a Arc<dyn Gpu>,
    model: &'a Model,
) -> impl Iterator<Item = Result<Case>> + 'a {
    shapes(model).into_iter().flat_map(move |shape| {
        let made = weights(gpu, shape.1 * shape.2, model.spread).map_err(|error| error.to_string());
        let many = if shape.0 == "o" { model.many_rows } else { &[] };
        let steps = model.steps.iter().chain(many);
        let steps = steps.flat_map(move |n| ways(shape.0, *n).map(|by| (*n, by)));
        let steps = steps.filter(move |(n, by)| match by {
            By::Kernel(kernel) => kernel.launch(&**gpu, *n, shape.1).is_some(),
            _ => true,
        });
        steps.map(move |(n, by)| case(gpu, made.clone()?, n, shape, by))
    })
}

/// Makes as many copies of a matrix as repeated launches need so that they find none of it in a
/// cache.
fn weights(gpu: &Arc<dyn Gpu>, len: usize, spread: usize) -> Result<Weights> {
    let first = bf16s(gpu, 1, len)?;
    let mut copies = vec![first.clone()];
    for _ in 1..spread.div_ceil(len * 2) {
        let copy = output(gpu, Kind::Bf16, len)?;
        gpu.copy(first.view(), copy.view())?;
        copies.push(copy);
    }
    Ok(Arc::new(copies))
}

fn case(
    gpu: &Arc<dyn Gpu>,
    weights: Weights,
    n: usize,
    (name, rows, cols, kind): (&str, usize, usize, Kind),
    by: By,
) -> Result<Case> {
    let x = bf16s(gpu, 0, n * cols)?;
    let out = output(gpu, kind, n * rows)?;
    let (on, written) = (gpu.clone(), out.clone());
    let launch = move |i: usize| {
        let (x, w, out) = (x.view(), weights[i % weights.len()].view(), written.view());
        match by {
            By::Op(mode) => {
                let w = MatrixView::dense(w, rows, cols);
                on.linear(&LinearArgs { x, w, bias: None, out, mode })
            }
            By::Kernel(kernel) => {
                let launch = kernel.launch(&*on, n, rows).expect("only those that run are timed");
                let [bias, f32_out] = [Arg::Null, Arg::U32(u32::from(kind == Kind::F32))];
                on.launch(&launch, &args![x, w, bias, out, f32_out, n, rows, cols, rows])
            }
            By::Library => on.gemm(&Gemm::contiguous(x, w, out, [n, rows, cols])),
        }
    };
    let want = move |i: usize| {
        let (token, row) = (i / rows, i % rows);
        (0..cols).map(|c| value(0, token * cols + c) * value(1, row * cols + c)).sum()
    };
    Ok(Case {
        op: match by {
            By::Op(Mode::Fast) => "linear",
            By::Op(Mode::Invariant) => "linear, invariant",
            By::Library => "linear, library",
            By::Kernel(kernel) => kernel.0,
        },
        shape: format!("{name} {rows} × {cols}"),
        n,
        bytes: (rows + n) * cols * 2 + n * rows * kind.bytes(),
        flops: 2 * n * rows * cols,
        tolerance: TOLERANCE,
        out,
        want: Box::new(want),
        launch: Box::new(launch),
    })
}
