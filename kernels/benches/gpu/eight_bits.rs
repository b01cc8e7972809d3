//! Products with weights of E4M3: with activations in bf16, and with activations rounded to eight
//! bits, where the weights have a scale for each row or for each 128 columns of a row.
//!
//! Predicted for an H200, whose tensor cores multiply 1979 TFLOP/s of codes, twice as many as of
//! bf16: the library reaches 65 % of that with scales of rows, and 55 % with those of groups, whose
//! sums it has to scale as they grow. Codes are unpacked at 3.5 TB/s. 8192 rows by gate-up then
//! take 1.6 and 1.9 ms where activations in bf16 take 2.6, and 512 rows 150 to 170 us in place of
//! 300. Up to 64 rows, rounding adds 2 us to the same kernels.

use crate::case::{Case, TOLERANCE};
use crate::data::{bf16s, in_parts, output, value};
use crate::packed::copies;
use crate::{Model, Result};
use cresset_kernels::gpu::{Gpu, Kind};
use cresset_kernels::linear::{
    BAND_ROWS, DeviceFormat, Linear, LinearArgs, Mode, Weight, WeightType, rounded_to_e4m3,
};
use cresset_kernels::operand::{DeviceOps, MatrixBuffer, OpMemory, RoundedInputs};
use std::sync::Arc;

const TYPE: WeightType = WeightType::E4M3By128;

/// How activations are multiplied.
#[derive(Clone, Copy, PartialEq, Eq)]
enum By {
    Bf16,
    EightBits { scaled_by_rows: bool },
}

impl By {
    const ALL: [Self; 3] = [
        Self::Bf16,
        Self::EightBits { scaled_by_rows: true },
        Self::EightBits { scaled_by_rows: false },
    ];

    fn name(self) -> &'static str {
        match self {
            Self::Bf16 => "E4M3, bf16",
            Self::EightBits { scaled_by_rows: true } => "E4M3, eight bits, rows",
            Self::EightBits { scaled_by_rows: false } => "E4M3, eight bits, groups",
        }
    }
}

type Shape = (&'static str, usize, usize);

pub fn cases<'a>(
    gpu: &'a Arc<dyn Gpu>,
    model: &'a Model,
) -> impl Iterator<Item = Result<Case>> + 'a {
    // Columns are whole blocks of 128.
    let [hidden, ffn] = [model.hidden, model.ffn].map(|columns| columns.next_multiple_of(128));
    let shapes = [("gate-up", 2 * model.ffn, hidden), ("down", model.hidden, ffn)];
    let all = shapes.into_iter().flat_map(|shape| By::ALL.map(|by| (shape, by)));
    all.flat_map(move |(shape, by)| {
        let made = matrices(gpu, shape, by, model).map_err(|error| error.to_string());
        model.products.iter().map(move |n| case(gpu, made.clone()?, *n, shape, by))
    })
}

/// The blocks of a row: codes of finite numbers, and scales that follow from their places.
fn row_blocks(row: usize, cols: usize, by: By) -> Vec<u8> {
    let bytes = cols / TYPE.block_size() * TYPE.type_size();
    let byte = |i: usize| (value(2, row * bytes + i) * 128.0 + 127.5) as u8 & 0xfe;
    let mut raw: Vec<u8> = (0..bytes).map(byte).collect();
    for (group, block) in raw.chunks_exact_mut(TYPE.type_size()).enumerate() {
        let of_group = if by == (By::EightBits { scaled_by_rows: true }) { 0 } else { group % 3 };
        let scale = 1e-3 * (1 + row % 2 + of_group) as f32;
        block[..4].copy_from_slice(&scale.to_le_bytes());
    }
    raw
}

type Matrices = Arc<Vec<MatrixBuffer>>;

fn matrices(gpu: &Arc<dyn Gpu>, (_, rows, cols): Shape, by: By, model: &Model) -> Result<Matrices> {
    let format = DeviceFormat::of(TYPE).ok_or("a device has no packed form of this type")?;
    let band = format.bytes(BAND_ROWS, cols);
    let mut bytes = vec![0; format.bytes(rows, cols)];
    in_parts(&mut bytes, band, |first, part| {
        let from = first / band * BAND_ROWS;
        let own = from..(from + part.len() / band * BAND_ROWS).min(rows);
        let raw: Vec<u8> = own.flat_map(|row| row_blocks(row, cols, by)).collect();
        format.pack(&raw, cols, part).expect("the sizes are those of the format");
    });
    let mut copies = copies(gpu, &bytes, format, [rows, cols], model.spread)?;
    if let By::EightBits { scaled_by_rows } = by {
        let most = model.products.iter().max().copied().unwrap_or(0);
        let memory = output(gpu, Kind::Bf16, most * cols)?;
        for copy in &mut copies {
            copy.rounded = Some(RoundedInputs { memory: memory.clone(), scaled_by_rows });
        }
    }
    Ok(Arc::new(copies))
}

fn case(
    gpu: &Arc<dyn Gpu>,
    matrices: Matrices,
    n: usize,
    shape @ (name, rows, cols): Shape,
    by: By,
) -> Result<Case> {
    let x = bf16s(gpu, 0, n * cols)?;
    let out = output(gpu, Kind::Bf16, n * rows)?;
    let (on, written) = (gpu.clone(), out.clone());
    let packed_bytes = matrices[0].parts[0].values.view().bytes();
    let launch = move |i: usize| {
        let w = DeviceOps::matrix(&matrices[i % matrices.len()]);
        let (x, out) = (x.view(), written.view());
        on.linear(&LinearArgs { x, w, bias: None, out, mode: Mode::Fast })
    };
    Ok(Case {
        op: by.name(),
        shape: format!("{name} {rows} × {cols}"),
        n,
        bytes: packed_bytes + n * (rows + cols) * 2,
        flops: 2 * n * rows * cols,
        tolerance: TOLERANCE,
        out,
        want: Box::new(move |i| expected(i, shape, by)),
        launch: Box::new(launch),
    })
}

/// The product of a row of activations with one of weights.
fn expected(i: usize, (_, rows, cols): Shape, by: By) -> f64 {
    let (token, row) = (i / rows, i % rows);
    let mut x: Vec<f32> = (0..cols).map(|c| value(0, token * cols + c) as f32).collect();
    if by != By::Bf16 {
        x = rounded_to_e4m3(&x, cols);
    }
    let mut weights = vec![0.0; cols];
    let one = Weight::from_ggml(TYPE, &row_blocks(row, cols, by), 1, cols);
    one.map_or(f64::NAN, |one| {
        one.row_f32(0, &mut weights);
        x.iter().zip(&weights).map(|(x, w)| f64::from(*x) * f64::from(*w)).sum()
    })
}
