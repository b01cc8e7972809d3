//! The products of a decoder: in the fast mode, in the batch-invariant one, and by the library
//! where the fast mode uses a kernel of ours.

use crate::case::{Case, TOLERANCE};
use crate::data::{bf16s, output, value};
use crate::{Model, Result};
use cresset_kernels::gpu::{Buffer, Gemm, Gpu, Kind};
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
}

/// The ways to compute a product of `n` rows.
fn ways(n: usize) -> impl Iterator<Item = By> {
    let library = (n <= 32).then_some(By::Library);
    [By::Op(Mode::Fast), By::Op(Mode::Invariant)].into_iter().chain(library)
}

pub fn cases<'a>(
    gpu: &'a Arc<dyn Gpu>,
    model: &'a Model,
) -> impl Iterator<Item = Result<Case>> + 'a {
    shapes(model).into_iter().flat_map(move |shape| {
        let made = weights(gpu, shape.1 * shape.2, model.spread).map_err(|error| error.to_string());
        let steps = model.steps.iter().flat_map(|n| ways(*n).map(|by| (*n, by)));
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
            By::Library => on.gemm(&Gemm {
                x,
                x_stride: cols,
                w,
                bias: None,
                out,
                out_stride: rows,
                n,
                rows,
                cols,
                scales: None,
            }),
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
