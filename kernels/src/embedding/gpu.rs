//! Rows by their numbers on a device. `embedding.cu` says how.

use crate::gpu::{Arg, Gpu, Kind, Launch, View};
use crate::storage::ensure;
use crate::{Result, args};

const THREADS: usize = 256;

pub struct Gather {
    /// `[vocab_size, width]`, f32 or bf16.
    pub table: View,
    pub width: usize,
    /// `[n]` u32.
    pub ids: View,
    /// Where the i-th value is not `u32::MAX`, it is the index into `previous` of the i-th id,
    /// instead of `ids[i]`: `[n]` u32 each.
    pub feedback: View,
    /// The tokens of the step before; its length is free.
    pub previous: View,
    /// `[n]` u32: places in `history`, where the i-th id is noted.
    pub slots: View,
    /// u32; its length is free.
    pub history: View,
    /// What every value is multiplied with.
    pub scale: f32,
    /// `[n, width]` of the table's kind.
    pub out: View,
}

pub fn gather(gpu: &dyn Gpu, args: &Gather) -> Result<()> {
    let &Gather { table, width, ids, feedback, previous, slots, history, scale, out } = args;
    let words =
        [ids, feedback, previous, slots, history].iter().all(|view| view.kind() == Kind::U32);
    ensure(
        "embedding",
        words && [feedback, slots].iter().all(|view| view.len() == ids.len()),
        || format!("{ids:?}, {feedback:?}, {previous:?}, {slots:?} and {history:?}"),
    )?;
    let (previous, history) =
        (args![feedback, previous, previous.len()], args![slots, history, history.len()]);
    launch(gpu, "embedding", [table, ids, out], width, scale, previous, history)
}

/// `out[i] = from[rows[i]]`, `width` values each, of one kind; `rows` u32.
pub fn gather_rows(gpu: &dyn Gpu, from: View, width: usize, rows: View, out: View) -> Result<()> {
    let none = [Arg::Null, Arg::Null, 0usize.into()];
    launch(gpu, "row gather", [from, rows, out], width, 1.0, none, none)
}

fn launch(
    gpu: &dyn Gpu,
    op: &'static str,
    [table, ids, out]: [View; 3],
    width: usize,
    scale: f32,
    [feedback, previous, previous_len]: [Arg; 3],
    history: [Arg; 3],
) -> Result<()> {
    let (kernel, lanes) = match table.kind() {
        Kind::Bf16 => ("gather_bf16", 8),
        _ => ("gather_f32", 4),
    };
    let kinds = matches!(table.kind(), Kind::Bf16 | Kind::F32)
        && out.kind() == table.kind()
        && ids.kind() == Kind::U32;
    let sizes = width > 0 && table.len().is_multiple_of(width) && out.len() == ids.len() * width;
    ensure(op, kinds && sizes, || {
        format!("{table:?}, {ids:?} and {out:?} for a width of {width}")
    })?;
    if ids.is_empty() {
        return Ok(());
    }
    let parts = width.div_ceil(THREADS * lanes) as u32;
    let launch = Launch {
        kernel,
        blocks: [ids.len() as u32, parts, 1],
        threads: THREADS as u32,
        shared_bytes: 0,
    };
    let rows = table.len() / width;
    let fixed = args![table, rows, width, ids, feedback, previous, previous_len, scale, out];
    gpu.launch(&launch, &[&fixed[..], &history].concat())
}

#[cfg(test)]
mod tests;
