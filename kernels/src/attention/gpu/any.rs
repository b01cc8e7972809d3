//! The kernels of `any.cu`: for heads of sizes that have no kernels of their own, and for values
//! that are parts of keys.

use super::super::OP;
use super::super::plan::TILE;
use crate::Result;
use crate::error::unsupported;
use crate::gpu::{Gpu, Kind};

/// The most dimensions of values, in f32 and in the kernels of `any.cu`.
pub(super) const MOST_VALUES: usize = 512;

/// Threads of a block.
pub(super) const THREADS: u32 = 256;

/// The kernels whose blocks compute `rows` rows: heads of queries that read one KV head.
pub(super) struct AnyKernels {
    pub rows: usize,
    pub decode: &'static str,
    pub prefill: &'static str,
}

const MANY_ROWS: AnyKernels = AnyKernels {
    rows: 64,
    decode: "attention_decode_any_64_bf16",
    prefill: "attention_prefill_any_64_bf16",
};
const FEW_ROWS: AnyKernels = AnyKernels {
    rows: 16,
    decode: "attention_decode_any_16_bf16",
    prefill: "attention_prefill_any_16_bf16",
};

/// The kernels for keys of `dim` dimensions, and blocks of `wanted` rows, and what shared memory
/// their blocks have, in bytes.
///
/// # Errors
/// When values have too many dimensions, or keys too many for the device's shared memory.
pub(super) fn kernels(
    gpu: &dyn Gpu,
    [dim, values]: [usize; 2],
    wanted: usize,
) -> Result<(u32, &'static AnyKernels)> {
    let most = gpu.properties().shared_bytes;
    let many = (wanted > FEW_ROWS.rows).then_some(&MANY_ROWS);
    let sized = many.into_iter().chain([&FEW_ROWS]).map(|one| (shared_bytes(one.rows, dim), one));
    let found = sized.into_iter().find(|(bytes, _)| *bytes <= most);
    found.filter(|_| values <= MOST_VALUES).ok_or_else(|| {
        let has = format!("blocks of this GPU have {} KiB of shared memory", most >> 10);
        let limit = format!("values have at most {MOST_VALUES} dimensions, and {has}");
        unsupported(OP, format!("heads of {dim} with values of {values}: {limit}"))
    })
}

/// Queries and a tile of keys, and for each row its scores, its weights and two numbers, as
/// `Shared` of `any.cu` has them.
fn shared_bytes(rows: usize, head_dim: usize) -> u32 {
    let stride = head_dim.next_multiple_of(32) + 8;
    let (scores, weights) = (TILE + 4, TILE + 8);
    let (bf16, f32) = (Kind::Bf16.bytes(), Kind::F32.bytes());
    ((rows + TILE) * stride * bf16 + rows * ((scores + 2) * f32 + weights * bf16)) as u32
}
