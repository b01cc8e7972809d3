//! Launches the kernels of `recurrence.cu` on a device.

use super::args::{DELTA, SCAN};
use super::{
    ConvForm, DeltaRuleArgs, DeltaShape, GateOrder, GatedNormArgs, HeadMap, Recurrence, ScanShape,
    SelectiveScanArgs, ShortConvArgs, StateMoves,
};
use crate::error::unsupported;
use crate::gpu::{Arg, Launch, View};
use crate::operand::DeviceOps;
use crate::{Result, args};

/// Threads of a block of the convolution, each with a channel, and the rows that it takes of one
/// sequence. No state has more inputs than a block has rows, because `taps` is at most 65.
const CHANNELS: usize = 128;
const CHUNK_ROWS: usize = 64;
/// Columns of a head's state that a block has, and the most rows of states.
const COLUMNS: usize = 32;
const MOST_ROWS: usize = 256;
/// Threads of a block of the norm. A warp of it takes a part of up to `WARP_WIDTH` values.
const NORM_THREADS: usize = 128;
const WARP_WIDTH: usize = 256;

impl Recurrence for DeviceOps {
    fn short_conv(&self, args: &ShortConvArgs<View>) -> Result<()> {
        let taps = args.check()?;
        let &ShortConvArgs { form, x, weight, bias, width, states, moves, out } = args;
        if taps > CHUNK_ROWS + 1 {
            let most = format!("{taps} taps, where {} are the most", CHUNK_ROWS + 1);
            return Err(unsupported("short_conv", most));
        }
        let rows = out.len() / width;
        if rows == 0 {
            return Ok(());
        }
        let chunks = rows / CHUNK_ROWS + moves.reads.len();
        let blocks = [chunks as u32, width.div_ceil(CHANNELS) as u32, 1];
        let kernel = x.kind().kernel("short_conv_f32", "short_conv_bf16");
        let launch = Launch { kernel, blocks, threads: CHANNELS as u32, shared_bytes: 0 };
        let slots = states.len() / ((taps - 1) * width);
        let moves = move_params(&moves, rows, slots);
        let gated = u32::from(form == ConvForm::Gated);
        let params = [&args![x, weight, bias, states, out][..], &moves, &args![width, taps, gated]];
        self.launch(&launch, &params.concat())
    }

    fn delta_rule(&self, args: &DeltaRuleArgs<View>) -> Result<()> {
        args.check()?;
        let &DeltaRuleArgs { shape, qkv, gates, decay, decay_bias, states, moves, out } = args;
        let DeltaShape { key_heads, value_heads, key_dim, value_dim, head_map } = shape;
        let rows = qkv.len() / shape.width();
        if rows == 0 {
            return Ok(());
        }
        let kernel = match key_dim {
            0..=128 => qkv.kind().kernel("delta_rule_128_f32", "delta_rule_128_bf16"),
            129..=MOST_ROWS => qkv.kind().kernel("delta_rule_256_f32", "delta_rule_256_bf16"),
            _ => return Err(too_many_rows(DELTA, key_dim)),
        };
        let launch = state_launch(kernel, moves.reads.len() * value_heads, value_dim);
        let slots = states.len() / shape.state_len();
        let moves = move_params(&moves, rows, slots);
        let tiled = u32::from(head_map == HeadMap::Tiled);
        let operands = args![qkv, gates, decay, decay_bias, states, out];
        let sizes = args![key_heads, value_heads, key_dim, value_dim, tiled];
        self.launch(&launch, &[&operands[..], &moves, &sizes].concat())
    }

    fn selective_scan(&self, args: &SelectiveScanArgs<View>) -> Result<()> {
        args.check()?;
        let &SelectiveScanArgs { shape, xbc, steps, decay, step_bias, skip, .. } = args;
        let &SelectiveScanArgs { step_limits: [least, most], states, ref moves, out, .. } = args;
        let ScanShape { heads, head_dim, groups, state_dim } = shape;
        let rows = xbc.len() / shape.width();
        if rows == 0 {
            return Ok(());
        }
        let kernel = match state_dim {
            0..=128 => xbc.kind().kernel("selective_scan_128_f32", "selective_scan_128_bf16"),
            129..=MOST_ROWS => {
                xbc.kind().kernel("selective_scan_256_f32", "selective_scan_256_bf16")
            }
            _ => return Err(too_many_rows(SCAN, state_dim)),
        };
        let launch = state_launch(kernel, moves.reads.len() * heads, head_dim);
        let moves = move_params(moves, rows, states.len() / shape.state_len());
        let operands = args![xbc, steps, decay, step_bias, skip, states, out];
        let sizes = args![heads, head_dim, groups, state_dim, least, most];
        self.launch(&launch, &[&operands[..], &moves, &sizes].concat())
    }

    fn gated_norm(&self, args: &GatedNormArgs<View>) -> Result<()> {
        args.check()?;
        let &GatedNormArgs { order, groups, x, gate, weight, eps, out } = args;
        if x.is_empty() {
            return Ok(());
        }
        let width = weight.len() / groups;
        let parts = x.len() / width;
        let warps = if width <= WARP_WIDTH { NORM_THREADS / 32 } else { 1 };
        let blocks = [parts.div_ceil(warps) as u32, 1, 1];
        let kernel = x.kind().kernel("gated_norm_f32", "gated_norm_bf16");
        let launch = Launch { kernel, blocks, threads: NORM_THREADS as u32, shared_bytes: 0 };
        let gate_first = u32::from(order == GateOrder::BeforeNorm);
        let params = args![x, gate, weight, out, parts, width, groups, gate_first, eps];
        self.launch(&launch, &params)
    }
}

/// The launch of a kernel whose blocks have columns of the states of heads, `width` of each.
fn state_launch(kernel: &'static str, heads: usize, width: usize) -> Launch {
    let blocks = [heads as u32, width.div_ceil(COLUMNS) as u32, 1];
    Launch { kernel, blocks, threads: 256, shared_bytes: 0 }
}

/// The arguments for `MOVE_PARAMETERS` of `recurrence.cu`.
fn move_params(moves: &StateMoves<View>, rows: usize, slots: usize) -> Vec<Arg> {
    let &StateMoves { starts, reads, writes } = moves;
    args![starts, reads, writes, rows, reads.len(), slots].to_vec()
}

fn too_many_rows(op: &'static str, rows: usize) -> crate::Error {
    unsupported(op, format!("states of {rows} rows on a device, where {MOST_ROWS} are the most"))
}

#[cfg(test)]
mod tests;
