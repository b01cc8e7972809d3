//! Products whose activations are rounded to eight bits, with weights of E4M3. `rounded_rows.cuh`
//! tells how rows are rounded. The library multiplies many rows by their codes; other products take
//! the rounded rows in bf16, which holds them exactly. So both compute the same but for the order
//! of sums, and a row's rounded values do not depend on other rows.

use super::by_parts;
use super::packed::uses_scratch;
use crate::error::ensure;
use crate::gpu::{Arg, Gemm, GemmScales, Gpu, Kind, Launch, SCALED_COLUMNS, View};
use crate::linear::{BAND_ROWS, DeviceFormat, LinearArgs};
use crate::operand::{DeviceOps, MatrixPart, RoundedInputs};
use crate::{Result, args};

/// The most rows for which there should be memory: more are multiplied in parts, and for each the
/// weights are unpacked anew. On an H200, a part of this size is estimated to take 20 times as long
/// as the unpacking.
pub const ROUNDED_ROWS: usize = 8192;
/// Columns that a block takes to unpack codes.
const UNPACKED_COLUMNS: usize = 4 * 64;
/// Rows of a matrix whose products a block scales.
const SCALED_ROWS: usize = 256 * 8;

/// Rounds and multiplies as many of the `n` rows at a time as there is memory for.
/// `rounded_before`: whether the rows are rounded already.
pub(super) fn multiply(
    gpu: &DeviceOps,
    args: &LinearArgs<View>,
    n: usize,
    rounded: RoundedInputs<View>,
    rounded_before: bool,
) -> Result<()> {
    check(args, rounded.memory)?;
    let &LinearArgs { x, w, out, .. } = args;
    let (cols, memory, by_rows) = (w.cols, rounded.memory, rounded.scaled_by_rows);
    let most = memory.len() / cols;
    let rows = |from: usize, to: usize| LinearArgs {
        x: x.slice(from * cols..to * cols),
        out: out.slice(from * w.rows..to * w.rows),
        ..*args
    };
    for first in (0..n).step_by(most) {
        let end = n.min(first + most);
        let mut coded = first;
        if let Some(scratch) = scratch_for_codes(&**gpu, args, end - first, by_rows) {
            coded = if by_rows { end } else { end - (end - first) % 4 };
            by_codes(&**gpu, &rows(first, coded), coded - first, rounded, scratch)?;
        }
        if end > coded {
            let mut rest = rows(coded, end);
            if !rounded_before {
                let x = memory.slice(0..rest.x.len());
                launch_rows(&**gpu, "round_rows_bf16", end - coded, &args![rest.x, x, cols])?;
                rest.x = x;
            }
            by_parts(gpu, &rest, end - coded)?;
        }
    }
    Ok(())
}

fn check(args: &LinearArgs<View>, memory: View) -> Result<()> {
    let &LinearArgs { x, w, .. } = args;
    let taken = |rows: View| rows.kind() == Kind::Bf16 && rows.address().is_multiple_of(16);
    let whole = |part: MatrixPart<View>, format: &DeviceFormat| {
        format.is_e4m3() && part.values.len() == format.bytes(part.rows, w.cols)
    };
    let fits = w.parts().all(|part| part.format.is_some_and(|format| whole(part, &format)))
        && taken(x)
        && taken(memory)
        && memory.len() >= w.cols;
    ensure("linear", fits, || {
        format!("{x:?} and {memory:?} for rounded rows of {} columns, and codes of E4M3", w.cols)
    })
}

/// A block for each of `n` rows.
fn launch_rows(gpu: &dyn Gpu, kernel: &'static str, n: usize, args: &[Arg]) -> Result<()> {
    gpu.launch(&Launch { kernel, blocks: [n as u32, 1, 1], threads: 256, shared_bytes: 0 }, args)
}

/// The memory in which the library finds the codes of the weights, if it multiplies `n` rows by
/// them. It takes scales of groups of columns for fours of rows alone, and on sm_90 alone; those of
/// rows can be applied to its product.
fn scratch_for_codes(
    gpu: &dyn Gpu,
    args: &LinearArgs<View>,
    n: usize,
    scaled_by_rows: bool,
) -> Option<View> {
    let &LinearArgs { w, bias, out, mode, .. } = args;
    let grouped = |part: MatrixPart<View>| {
        part.rows.is_multiple_of(16)
            && part.format.is_some_and(|format| format.group() == SCALED_COLUMNS)
    };
    let takes = uses_scratch(mode, n)
        && gpu.properties().multiplies_codes()
        && (gpu.properties().scales_codes() || (scaled_by_rows && out.kind() == Kind::Bf16))
        && w.parts().all(grouped)
        && out.address().is_multiple_of(16)
        && (bias.is_none() || out.kind() == Kind::Bf16);
    w.scratch.filter(|scratch| takes && rows_of_codes(*scratch, w.cols) > 0)
}

/// Whole bands of codes with all of their scales for which there is room.
fn rows_of_codes(memory: View, cols: usize) -> usize {
    let row_bytes = cols + cols / SCALED_COLUMNS * Kind::F32.bytes();
    memory.bytes() / row_bytes / BAND_ROWS * BAND_ROWS
}

/// Rows of codes, and the scales of each row's groups of columns.
struct CodedRows {
    codes: View,
    scales: View,
}

impl CodedRows {
    fn new(memory: View, [rows, cols, groups]: [usize; 3]) -> Self {
        let bytes = memory.cast(Kind::U8);
        let (codes, end) = (rows * cols, rows * (cols + groups * Kind::F32.bytes()));
        Self { codes: bytes.slice(0..codes), scales: bytes.slice(codes..end).cast(Kind::F32) }
    }
}

/// Unpacks as many rows of the matrix at a time as `scratch` holds.
fn by_codes(
    gpu: &dyn Gpu,
    args: &LinearArgs<View>,
    n: usize,
    rounded: RoundedInputs<View>,
    scratch: View,
) -> Result<()> {
    let &LinearArgs { x, w, bias, out, .. } = args;
    let (cols, most) = (w.cols, rows_of_codes(scratch, w.cols));
    let groups = if rounded.scaled_by_rows { 1 } else { cols / SCALED_COLUMNS };
    let coded = CodedRows::new(rounded.memory, [n, cols, groups]);
    launch_rows(gpu, "code_rows_bf16", n, &args![x, coded.codes, coded.scales, cols, groups])?;
    let mut first = 0;
    for part in w.parts() {
        for from in (0..part.rows).step_by(most) {
            let count = most.min(part.rows - from);
            let unpacked = CodedRows::new(scratch, [count, cols, groups]);
            unpack(gpu, &part, from, &unpacked, [count, cols, groups])?;
            let gemm = Gemm {
                x: coded.codes,
                x_stride: cols,
                w: unpacked.codes,
                bias: bias.map(|bias| bias.slice(first..first + count)),
                out: out.slice(first..out.len()),
                out_stride: w.rows,
                n,
                rows: count,
                cols,
                scales: Some(GemmScales { x: coded.scales, w: unpacked.scales }),
            };
            if gpu.properties().scales_codes() { gpu.gemm(&gemm) } else { scale_after(gpu, gemm) }?;
            first += count;
        }
    }
    Ok(())
}

/// The same product by a library that applies no scales of rows.
fn scale_after(gpu: &dyn Gpu, gemm: Gemm) -> Result<()> {
    gpu.gemm(&Gemm { bias: None, scales: None, ..gemm })?;
    let Gemm { bias, out, out_stride, n, rows, .. } = gemm;
    let [of_x, of_w] = gemm.scales.map(|own| [own.x, own.w]).expect("invariant: codes have scales");
    let blocks = [n as u32, rows.div_ceil(SCALED_ROWS) as u32, 1];
    let launch = Launch { kernel: "scale_rows_bf16", blocks, threads: 256, shared_bytes: 0 };
    gpu.launch(&launch, &args![out, of_x, of_w, bias, rows, out_stride])
}

/// Unpacks rows of a part of a matrix from row `from` on, which begins a band.
fn unpack(
    gpu: &dyn Gpu,
    part: &MatrixPart<View>,
    from: usize,
    to: &CodedRows,
    [rows, cols, groups]: [usize; 3],
) -> Result<()> {
    let format = part.format.expect("invariant: parts of codes have a format");
    let begin = from / BAND_ROWS * format.band_bytes(cols);
    let packed = part.values.slice(begin..begin + format.bytes(rows, cols));
    let blocks = [rows.div_ceil(BAND_ROWS), cols.div_ceil(UNPACKED_COLUMNS), 1];
    let blocks = blocks.map(|blocks| blocks as u32);
    let launch = Launch { kernel: "unpack_u8", blocks, threads: 128, shared_bytes: 0 };
    gpu.launch(&launch, &args![packed, to.codes, to.scales, rows, cols, groups])
}

#[cfg(test)]
mod tests;
