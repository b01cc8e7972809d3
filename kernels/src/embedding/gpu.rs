//! Looks up rows by their numbers on a device. `embedding.cu` has the kernel.

use super::{DeviceTokens, Embedding, GatherArgs, SelectRowsArgs};
use crate::error::shape;
use crate::gpu::{Arg, Kind, Launch, View};
use crate::operand::{DeviceOps, MatrixPart, MatrixView};
use crate::{Result, args};

const THREADS: usize = 256;

impl Embedding for DeviceOps {
    fn gather(&self, args: &GatherArgs<View>) -> Result<()> {
        const OP: &str = "embedding";
        args.check(OP)?;
        let &GatherArgs { table, ids, device, scale, out } = args;
        let [mut feedback, mut history] = [NO_WORDS; 2];
        if let Some(device) = device {
            let DeviceTokens { feedback: from, previous, slots, history: noted } = device;
            feedback = args![from, previous, previous.len()];
            history = args![slots, noted, noted.len()];
        }
        launch(self, OP, table, [ids, out], scale, [feedback, history])
    }

    fn select_rows(&self, args: &SelectRowsArgs<View>) -> Result<()> {
        const OP: &str = "row selection";
        args.check(OP)?;
        let &SelectRowsArgs { x, width, rows, out } = args;
        let table = MatrixView::dense(x, x.len() / width, width);
        launch(self, OP, table, [rows, out], 1.0, [NO_WORDS; 2])
    }
}

/// The arguments (two addresses and a length) of a call without tokens to feed back or to record.
const NO_WORDS: [Arg; 3] = [Arg::Null, Arg::Null, Arg::U32(0)];

fn launch(
    gpu: &DeviceOps,
    op: &'static str,
    table: MatrixView,
    [ids, out]: [View; 2],
    scale: f32,
    [feedback, history]: [[Arg; 3]; 2],
) -> Result<()> {
    let MatrixView { rows, cols, .. } = table;
    let fits = |part: &MatrixPart<View>| match part.format {
        None => part.values.kind() == out.kind() && part.values.len() == rows * cols,
        Some(format) => out.kind() == Kind::Bf16 && part.values.len() == format.bytes(rows, cols),
    };
    let whole = table.whole().filter(fits).ok_or_else(|| {
        shape(
            op,
            format!("a table {table:?} of {rows} by {cols}, in several parts or not for {out:?}"),
        )
    })?;
    if ids.is_empty() {
        return Ok(());
    }
    let (kernel, lanes) = match (whole.format, out.kind()) {
        (Some(_), _) => ("gather_packed_bf16", 1),
        (None, Kind::Bf16) => ("gather_bf16", 8),
        (None, _) => ("gather_f32", 4),
    };
    let parts = cols.div_ceil(THREADS * lanes) as u32;
    let blocks = [ids.len() as u32, parts, 1];
    let launch = Launch { kernel, blocks, threads: THREADS as u32, shared_bytes: 0 };
    let [from, previous, previous_len] = feedback;
    let fixed = args![whole.values, rows, cols, ids, from, previous, previous_len, scale, out];
    let mut all = [&fixed[..], &history].concat();
    if let Some(format) = whole.format {
        all.extend(args![table.order().map(|order| order.inputs), format.bits()]);
        all.extend(format.numbers());
    }
    gpu.launch(&launch, &all)
}

#[cfg(test)]
mod tests;
