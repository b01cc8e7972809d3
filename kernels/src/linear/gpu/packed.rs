//! Products with packed weights on a device. `packed.cu` and `packed_rounded.cu` describe the
//! kernels.

use crate::error::ensure;
use crate::gpu::{Gemm, Gpu, Kind, Launch, Properties, View};
use crate::linear::{BAND_ROWS, DeviceFormat, Mode};
use crate::operand::DeviceOps;
use crate::{Result, args};
use std::ops::RangeInclusive;

/// From this many rows of `x` on, weights are dequantised for the library, which multiplies the
/// faster the more rows there are. For one row less, dequantising alone takes as long as GEMM on an
/// H200.
const LIBRARY_ROWS: usize = GEMM_SIDE + 1;
/// Rows of `w` and of `x` that a block of GEMM takes.
const GEMM_SIDE: usize = 64;
/// Bytes of the memory for that. It stays in the second-level cache of large devices.
pub const SCRATCH_BYTES: usize = 32 << 20;
/// Rows of `x` for which blocks round the weights that they multiply, in the fast mode and where
/// warp groups multiply. On an H200, GEMV is faster for fewer rows, and the library is about as
/// fast for 512.
const ROUNDED_ROWS: RangeInclusive<usize> = 33..=512;
/// Rows of `x` of a block, and of `w`; and the blocks for which a multiprocessor has registers.
const ROUNDED_TOKENS: [usize; 2] = [64, 128];
const ROUNDED_SIDE: usize = 4 * BAND_ROWS;
const ROUNDED_RESIDENT: [usize; 2] = [2, 1];
/// The most parts into which the columns are cut, and columns of a part.
const ROUNDED_PARTS: usize = 8;
const PART_COLUMNS: usize = 1024;

/// Whether products with at most `n` rows of `x` may use scratch memory.
pub const fn uses_scratch(mode: Mode, n: usize) -> bool {
    matches!(mode, Mode::Fast) && n >= LIBRARY_ROWS
}

/// The kernels for codes of some bits, which are integers or floats.
#[derive(Debug)]
pub(crate) struct Kernels {
    bits: usize,
    floats: bool,
    /// Those of `GEMVS`.
    gemv: [&'static str; 4],
    gemm: &'static str,
    /// Those of `ROUNDED_TOKENS`.
    rounded: [&'static str; 2],
    dequantise: &'static str,
    /// For experts, as the GEMV for eight rows and the GEMM.
    pub expert_gemv: &'static str,
    pub expert_gemm: &'static str,
    /// Bytes of a tile in shared memory, with its scales and header.
    slot_bytes: usize,
}

/// A GEMV, for up to `tokens` rows of `x`.
#[derive(Debug)]
struct Gemv {
    tokens: usize,
    /// Tiles of `w` for which a warp has room.
    slots: usize,
    /// Warps of a block, each with one of the ranges of columns. Where shared memory has no room
    /// for so many, there are eight, with several ranges each.
    warps: usize,
}

static GEMVS: [Gemv; 4] = [
    Gemv { tokens: 4, slots: 4, warps: 16 },
    Gemv { tokens: 8, slots: 3, warps: 16 },
    Gemv { tokens: 16, slots: 2, warps: 16 },
    Gemv { tokens: 32, slots: 2, warps: 8 },
];
/// The ranges of columns.
const SEGMENTS: usize = 16;
const FEW_WARPS: usize = 8;
/// The GEMV for experts, and the rows that it takes.
const EXPERT_GEMV: usize = 1;
pub(crate) const EXPERT_TOKENS: usize = 8;

macro_rules! kernels {
    ($bits:literal, $floats:literal, $name:literal, $slot_bytes:expr) => {
        Kernels {
            bits: $bits,
            floats: $floats,
            gemv: [
                concat!("gemv_4_", $name, "_bf16"),
                concat!("gemv_8_", $name, "_bf16"),
                concat!("gemv_16_", $name, "_bf16"),
                concat!("gemv_32_", $name, "_bf16"),
            ],
            gemm: concat!("gemm_64x64_", $name, "_bf16"),
            rounded: [
                concat!("rounded_gemm_64_", $name, "_bf16"),
                concat!("rounded_gemm_128_", $name, "_bf16"),
            ],
            dequantise: concat!("dequantise_", $name, "_bf16"),
            expert_gemv: concat!("expert_gemv_", $name, "_bf16"),
            expert_gemm: concat!("expert_gemm_", $name, "_bf16"),
            slot_bytes: $slot_bytes,
        }
    };
}

static KERNELS: [Kernels; 6] = [
    kernels!(4, false, "q4", 1024 + 256),
    kernels!(5, false, "q5", 1280 + 256),
    kernels!(6, false, "q6", 1536 + 256),
    kernels!(8, false, "q8", 2048 + 192),
    kernels!(4, true, "f4", 1024 + 256),
    kernels!(8, true, "f8", 2048 + 192),
];

/// Bytes of a row of `x` in a slot.
const X_BYTES: usize = 128;

impl Kernels {
    pub(crate) fn of(format: &DeviceFormat) -> &'static Self {
        let fits = |own: &&Self| own.bits == format.bits() && own.floats == format.is_float();
        let found = KERNELS.iter().find(fits);
        found.expect("invariant: every packed format has its kernels")
    }

    /// Warps of a block of a GEMV, and its shared memory: each warp has its slots, and each range
    /// of columns its sums. `None`: there is no room for it.
    fn gemv_block(&self, gemv: usize, properties: &Properties) -> Option<(usize, usize)> {
        let &Gemv { tokens, slots, warps } = &GEMVS[gemv];
        let sums = SEGMENTS * BAND_ROWS * tokens * 4;
        let bytes = |warps| warps * slots * (self.slot_bytes + tokens * X_BYTES) + sums;
        let all = [warps, FEW_WARPS].map(|warps| (warps, bytes(warps)));
        all.into_iter().find(|(_, bytes)| *bytes <= properties.shared_bytes as usize)
    }

    /// The same of the kernel for experts.
    pub(crate) fn expert_gemv_block(&self, properties: &Properties) -> Option<(usize, usize)> {
        self.gemv_block(EXPERT_GEMV, properties)
    }

    /// The first GEMV that takes `n` rows and fits the device.
    fn gemv(&self, n: usize, properties: &Properties) -> Option<usize> {
        (0..GEMVS.len()).find(|gemv| self.takes(*gemv, n, properties))
    }

    fn takes(&self, gemv: usize, n: usize, properties: &Properties) -> bool {
        n <= GEMVS[gemv].tokens && self.gemv_block(gemv, properties).is_some()
    }

    /// Four slots for each of two warp groups, of rows of `x` and of `w`.
    const fn rounded_bytes(&self, tile: usize) -> usize {
        2 * 4 * (ROUNDED_TOKENS[tile] * X_BYTES + ROUNDED_SIDE / BAND_ROWS * self.slot_bytes)
    }

    /// The product by blocks that round their weights, if the device can run it. Where there are
    /// too few tiles to keep all multiprocessors busy, the columns are cut into parts, for whose
    /// sums `scratch` must have room.
    fn rounded(
        &self,
        product: &Gemm,
        scratch: Option<View>,
        properties: &Properties,
    ) -> Option<PackedAlgorithm> {
        let &Gemm { n, rows, cols, .. } = product;
        let tile = usize::from(n > ROUNDED_TOKENS[0]);
        let bytes = self.rounded_bytes(tile);
        if !properties.warp_groups || bytes > properties.shared_bytes as usize {
            return None;
        }
        let resident = properties.resident(bytes as u32).clamp(1, ROUNDED_RESIDENT[tile]);
        let wanted = properties.multiprocessors as usize * resident / rounded_tiles(tile, n, rows);
        let room = scratch.map_or(0, |scratch| scratch.bytes() / (n * rows * 4));
        let parts = wanted.min(ROUNDED_PARTS).min(cols / PART_COLUMNS).min(room).max(1);
        let sums = scratch.map(|scratch| View::new(scratch.address(), parts * n * rows, Kind::F32));
        Some(PackedAlgorithm::Rounded { tile, sums: sums.filter(|_| parts > 1) })
    }

    /// Four slots of two tiles and 64 rows of `x`.
    pub(crate) fn gemm_bytes(&self) -> usize {
        4 * (2 * self.slot_bytes + 64 * X_BYTES)
    }
}

const fn rounded_tiles(tile: usize, n: usize, rows: usize) -> usize {
    n.div_ceil(ROUNDED_TOKENS[tile]) * rows.div_ceil(ROUNDED_SIDE)
}

#[derive(Debug, PartialEq, Eq)]
enum PackedAlgorithm {
    Gemv(usize),
    Gemm,
    /// One of `ROUNDED_TOKENS`, and memory for the sums of the parts into which the columns are
    /// cut, `[parts, n, rows]`, if they are several.
    Rounded {
        tile: usize,
        sums: Option<View>,
    },
    /// The library, with weights in bf16 in the scratch memory.
    Library(View),
}

/// `w` of the product has the bytes of the format.
pub(super) fn run(
    gpu: &DeviceOps,
    product: &Gemm,
    format: &DeviceFormat,
    mode: Mode,
    scratch: Option<View>,
) -> Result<()> {
    check(product, format)?;
    let kernels = Kernels::of(format);
    let algorithm = choose(kernels, product, mode, scratch, gpu.properties());
    run_by(&**gpu, product, format, &algorithm)
}

fn check(product: &Gemm, format: &DeviceFormat) -> Result<()> {
    let &Gemm { x, w, rows, cols, .. } = product;
    let fits = x.kind() == Kind::Bf16
        && w.kind() == Kind::U8
        && w.len() == format.bytes(rows, cols)
        && x.address().is_multiple_of(16)
        && w.address().is_multiple_of(16);
    ensure("linear", fits, || {
        format!("{x:?} and {w:?} for {rows} by {cols} of {format:?}: it takes bf16, aligned to 16")
    })
}

fn choose(
    kernels: &Kernels,
    product: &Gemm,
    mode: Mode,
    scratch: Option<View>,
    properties: &Properties,
) -> PackedAlgorithm {
    let &Gemm { n, rows, .. } = product;
    if mode == Mode::Fast
        && ROUNDED_ROWS.contains(&n)
        && let Some(rounded) = kernels.rounded(product, scratch, properties)
    {
        return rounded;
    }
    // Where GEMM has too few blocks for all multiprocessors, GEMV reads the weights twice instead.
    let enough = properties.multiprocessors as usize * 3 / 4;
    let twice = n <= GEMM_SIDE && rows.div_ceil(GEMM_SIDE) < enough;
    let gemv = kernels.gemv(if twice { n.div_ceil(n.div_ceil(32)) } else { n }, properties);
    match (gemv, scratch) {
        (Some(gemv), _) => PackedAlgorithm::Gemv(gemv),
        (None, Some(scratch)) if uses_scratch(mode, n) && product.library_takes() => {
            PackedAlgorithm::Library(scratch)
        }
        (None, _) => PackedAlgorithm::Gemm,
    }
}

fn run_by(
    gpu: &dyn Gpu,
    product: &Gemm,
    format: &DeviceFormat,
    algorithm: &PackedAlgorithm,
) -> Result<()> {
    let &Gemm { x, x_stride, w, bias, out, out_stride, n, rows, cols, .. } = product;
    let kernels = Kernels::of(format);
    let (kernel, blocks, threads, shared_bytes, most_rows) = match *algorithm {
        PackedAlgorithm::Library(scratch) => return by_library(gpu, product, format, scratch),
        PackedAlgorithm::Rounded { tile, sums } => {
            return by_rounding(gpu, product, format, tile, sums);
        }
        PackedAlgorithm::Gemv(gemv) => {
            let properties = gpu.properties();
            let block = kernels.gemv_block(gemv, properties);
            let (warps, bytes) = block.expect("invariant: a GEMV is chosen if there is room");
            // Blocks that run at once: as many warps as have registers.
            let most = if warps == FEW_WARPS && gemv <= EXPERT_GEMV { 2 } else { 1 };
            let resident = properties.resident(bytes as u32).clamp(1, most);
            let most = properties.multiprocessors as usize * resident;
            let blocks = rows.div_ceil(BAND_ROWS).min(most);
            (kernels.gemv[gemv], blocks, 32 * warps as u32, bytes, GEMVS[gemv].tokens)
        }
        PackedAlgorithm::Gemm => {
            let blocks = rows.div_ceil(GEMM_SIDE) * n.div_ceil(GEMM_SIDE);
            (kernels.gemm, blocks, 128, kernels.gemm_bytes(), n)
        }
    };
    let blocks = [blocks as u32, 1, 1];
    let launch = Launch { kernel, blocks, threads, shared_bytes: shared_bytes as u32 };
    let f32_out = u32::from(out.kind() == Kind::F32);
    for first in (0..n).step_by(most_rows) {
        let (x, out) =
            (x.slice(first * x_stride..x.len()), out.slice(first * out_stride..out.len()));
        let sizes =
            args![x, w, bias, out, f32_out, most_rows.min(n - first), rows, cols, out_stride];
        gpu.launch(&launch, &[&sizes[..], &format.numbers()].concat())?;
    }
    Ok(())
}

/// Multiplies by blocks that round their weights. If the columns are cut into parts, a second
/// launch adds the sums of the parts.
fn by_rounding(
    gpu: &dyn Gpu,
    product: &Gemm,
    format: &DeviceFormat,
    tile: usize,
    sums: Option<View>,
) -> Result<()> {
    let &Gemm { x, w, bias, out, out_stride, n, rows, cols, .. } = product;
    let parts = sums.map_or(1, |sums| sums.len() / (n * rows));
    let kernels = Kernels::of(format);
    let blocks = [(parts * rounded_tiles(tile, n, rows)) as u32, 1, 1];
    let shared_bytes = kernels.rounded_bytes(tile) as u32;
    let launch = Launch { kernel: kernels.rounded[tile], blocks, threads: 256, shared_bytes };
    let (own_bias, to, stride) = match sums {
        Some(sums) => (None, sums, rows),
        None => (bias, out, out_stride),
    };
    let f32_out = u32::from(to.kind() == Kind::F32);
    let sizes = args![x, w, own_bias, to, f32_out, n, rows, cols, stride];
    gpu.launch(&launch, &[&sizes[..], &format.numbers(), &args![parts][..]].concat())?;
    let Some(sums) = sums else { return Ok(()) };
    let most = gpu.properties().multiprocessors as usize * 8;
    let blocks = [(n * rows).div_ceil(256).min(most) as u32, 1, 1];
    let kernel = out.kind().kernel("add_parts_f32", "add_parts_bf16");
    let launch = Launch { kernel, blocks, threads: 256, shared_bytes: 0 };
    gpu.launch(&launch, &args![sums, bias, out, n, rows, out_stride, parts])
}

/// Dequantises as many rows at a time as the scratch memory holds, and multiplies by them.
fn by_library(gpu: &dyn Gpu, product: &Gemm, format: &DeviceFormat, scratch: View) -> Result<()> {
    let &Gemm { w, bias, out, rows, cols, .. } = product;
    let most = scratch.len() / cols / BAND_ROWS * BAND_ROWS;
    let fits = scratch.kind() == Kind::Bf16 && most > 0;
    ensure("linear", fits, || format!("{scratch:?} has no room for {BAND_ROWS} rows of {cols}"))?;
    for first in (0..rows).step_by(most) {
        let count = most.min(rows - first);
        let begin = first / BAND_ROWS * format.band_bytes(cols);
        let packed = w.slice(begin..begin + format.bytes(count, cols));
        let wide = scratch.slice(0..count * cols);
        dequantise(gpu, packed, wide, [count, cols], format)?;
        gpu.gemm(&Gemm {
            w: wide,
            bias: bias.map(|bias| bias.slice(first..first + count)),
            out: out.slice(first..out.len()),
            rows: count,
            ..*product
        })?;
    }
    Ok(())
}

fn dequantise(
    gpu: &dyn Gpu,
    w: View,
    out: View,
    [rows, cols]: [usize; 2],
    format: &DeviceFormat,
) -> Result<()> {
    let blocks = [rows.div_ceil(BAND_ROWS) as u32, cols.div_ceil(4 * 64) as u32, 1];
    let kernel = Kernels::of(format).dequantise;
    let launch = Launch { kernel, blocks, threads: 128, shared_bytes: 0 };
    gpu.launch(&launch, &[&args![w, out, rows, cols][..], &format.numbers()].concat())
}

#[cfg(test)]
mod tests;
