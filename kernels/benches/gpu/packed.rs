//! Products with quantised weights in the packed form, in the fast mode and in the batch-invariant
//! one.

use crate::case::{Case, TOLERANCE};
use crate::data::{bf16s, in_parts, output, value};
use crate::{Model, Result};
use cresset_kernels::gpu::{Buffer, Gpu, Kind};
use cresset_kernels::linear::{
    BAND_ROWS, DeviceFormat, Linear, LinearArgs, Mode, Weight, WeightType,
};
use cresset_kernels::operand::{DeviceOps, MatrixBuffer, MatrixPart, OpMemory};
use half::f16;
use std::sync::Arc;

/// Bytes of the memory to which weights are dequantised.
const SCRATCH: usize = cresset_kernels::linear::gpu::SCRATCH_BYTES;

/// Name, format, and the places of the f16 scales in its blocks.
pub type Shape = (&'static str, WeightType, &'static [usize], usize, usize);

fn shapes(m: &Model) -> [Shape; 5] {
    // Columns are whole blocks of 256.
    let [hidden, ffn] = [m.hidden, m.ffn].map(|columns| columns.next_multiple_of(256));
    let qkv = (m.heads + 2 * m.kv_heads) * m.head_dim;
    [
        ("qkv", WeightType::Q4K, &[0, 2], qkv, hidden),
        ("gate-up", WeightType::Q4K, &[0, 2], 2 * m.ffn, hidden),
        ("down", WeightType::Q4K, &[0, 2], m.hidden, ffn),
        ("down", WeightType::Q6K, &[208], m.hidden, ffn),
        ("gate-up", WeightType::Q8_0, &[0], 2 * m.ffn, hidden),
    ]
}

pub fn cases<'a>(
    gpu: &'a Arc<dyn Gpu>,
    model: &'a Model,
) -> impl Iterator<Item = Result<Case>> + 'a {
    shapes(model).into_iter().flat_map(move |shape| {
        let made = matrices(gpu, shape, model.spread).map_err(|error| error.to_string());
        let modes = [Mode::Fast, Mode::Invariant];
        let steps = model.steps.iter().flat_map(move |n| modes.map(|mode| (*n, mode)));
        steps.map(move |(n, mode)| case(gpu, made.clone()?, n, shape, mode))
    })
}

/// The blocks of a row: codes and small scales that follow from its number.
pub fn row_blocks(&(_, dtype, scales, _, cols): &Shape, row: usize) -> Vec<u8> {
    let bytes = cols / dtype.block_size() * dtype.type_size();
    let byte = |i: usize| (value(2, row * bytes + i) * 128.0 + 127.5) as u8;
    let mut raw: Vec<u8> = (0..bytes).map(byte).collect();
    for block in raw.chunks_exact_mut(dtype.type_size()) {
        for at in scales {
            block[*at..][..2].copy_from_slice(&f16::from_f32(1e-3).to_le_bytes());
        }
    }
    raw
}

/// The whole matrix in the packed form.
pub fn packed(shape: &Shape, format: DeviceFormat) -> Vec<u8> {
    let &(.., rows, cols) = shape;
    let band = format.bytes(BAND_ROWS, cols);
    let mut bytes = vec![0; format.bytes(rows, cols)];
    in_parts(&mut bytes, band, |first, part| {
        let from = first / band * BAND_ROWS;
        let own = from..(from + part.len() / band * BAND_ROWS).min(rows);
        let raw: Vec<u8> = own.flat_map(|row| row_blocks(shape, row)).collect();
        format.pack(&raw, cols, part).expect("the sizes are those of the format");
    });
    bytes
}

type Matrices = Arc<Vec<MatrixBuffer>>;

fn matrices(gpu: &Arc<dyn Gpu>, shape: Shape, spread: usize) -> Result<Matrices> {
    let (_, dtype, _, rows, cols) = shape;
    let format = DeviceFormat::of(dtype).ok_or("a device has no packed form of this type")?;
    Ok(Arc::new(copies(gpu, &packed(&shape, format), format, [rows, cols], spread)?))
}

/// Makes as many copies of a matrix as repeated launches need so that they find none of it in a
/// cache.
pub fn copies(
    gpu: &Arc<dyn Gpu>,
    bytes: &[u8],
    format: DeviceFormat,
    [rows, cols]: [usize; 2],
    spread: usize,
) -> Result<Vec<MatrixBuffer>> {
    let first = Buffer::from_slice(gpu, bytes)?;
    let scratch = Some(output(gpu, Kind::Bf16, SCRATCH / Kind::Bf16.bytes())?);
    let mut copies = Vec::new();
    for _ in 0..spread.div_ceil(bytes.len()).max(1) {
        let values = Buffer::new(gpu, Kind::U8, bytes.len())?;
        gpu.copy(first.view(), values.view())?;
        let parts = vec![MatrixPart { values, rows, format: Some(format) }];
        let (scratch, order, rounded) = (scratch.clone(), None, None);
        copies.push(MatrixBuffer { parts, cols, scratch, order, rounded });
    }
    gpu.synchronise()?;
    Ok(copies)
}

fn case(
    gpu: &Arc<dyn Gpu>,
    matrices: Matrices,
    n: usize,
    shape: Shape,
    mode: Mode,
) -> Result<Case> {
    let (name, dtype, _, rows, cols) = shape;
    let x = bf16s(gpu, 0, n * cols)?;
    let out = output(gpu, Kind::Bf16, n * rows)?;
    let (on, written) = (gpu.clone(), out.clone());
    let packed_bytes = matrices[0].parts[0].values.view().bytes();
    let launch = move |i: usize| {
        let w = DeviceOps::matrix(&matrices[i % matrices.len()]);
        on.linear(&LinearArgs { x: x.view(), w, bias: None, out: written.view(), mode })
    };
    let want = move |i: usize| {
        let (token, row) = (i / rows, i % rows);
        let mut weights = vec![0.0; cols];
        let one = Weight::from_ggml(dtype, &row_blocks(&shape, row), 1, cols);
        one.map_or(f64::NAN, |one| {
            one.row_f32(0, &mut weights);
            let products = weights.iter().enumerate();
            products.map(|(c, w)| value(0, token * cols + c) * f64::from(*w)).sum()
        })
    };
    Ok(Case {
        op: match mode {
            Mode::Fast => "packed",
            Mode::Invariant => "packed, invariant",
        },
        shape: format!("{name} {dtype:?} {rows} × {cols}"),
        n,
        bytes: packed_bytes + n * (rows + cols) * 2,
        flops: 2 * n * rows * cols,
        tolerance: TOLERANCE,
        out,
        want: Box::new(want),
        launch: Box::new(launch),
    })
}
