//! From packed panels to f32 columns `[cols][16]`. Every value equals the block format's definition bit for bit: scale times
//! code is exact in f32 for all formats (11 + 8 + 5 bits at most), so the fused multiply-add rounds once, as the definition does.

use super::format::{BLOCK, Format, Quant, Scales};
use super::lanes::{LANES, Lanes};

/// Columns unpacked together: as many as the widest plane keeps in one word.
pub(super) const RUN: usize = 8;

/// Columns `from..to` of one panel, both multiples of `BLOCK`.
pub(super) struct Columns {
    pub panel: *const u8,
    pub from: usize,
    pub to: usize,
}

/// How a panel's bytes become f32 columns.
///
/// # Safety
/// Every function needs the instructions of `L` and a column within the panel.
pub(super) trait Codec {
    /// Columns that share a scale; divides `BLOCK`.
    const GROUP: usize;
    /// Scale and minimum of the group that starts at `column`.
    unsafe fn scale<L: Lanes>(panel: *const u8, column: usize) -> (L::F, L::F);
    /// Columns `column..column + RUN`.
    unsafe fn run<L: Lanes>(panel: *const u8, column: usize, scale: (L::F, L::F)) -> [L::F; RUN];
}

/// Calls `$call` with the type parameter `$codec` standing for the codec of a `GgmlDType`.
macro_rules! with_codec {
    ($dtype:expr, $codec:ident => $call:expr) => {
        with_codec!($dtype, $codec => $call,
            F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2K Q3K Q4K Q5K Q6K)
    };
    ($dtype:expr, $codec:ident => $call:expr, $($name:ident)*) => {
        match $dtype {
            $(candle_core::quantized::GgmlDType::$name => {
                type $codec = crate::linear::format::$name;
                $call
            })*
            other => unreachable!("no weight is packed as {other:?}"),
        }
    };
}
pub(super) use with_codec;

/// Writes `[to - from][16]` f32.
///
/// # Safety
/// `columns` lies within a panel of this codec, `out` has room, and the machine has `L`'s instructions.
#[inline(always)]
pub(super) unsafe fn decode<L: Lanes, C: Codec>(columns: &Columns, out: *mut f32) {
    for group in (columns.from..columns.to).step_by(C::GROUP) {
        // SAFETY: the group's columns lie in the panel, and in `out` counted from the first column.
        unsafe {
            let scale = C::scale::<L>(columns.panel, group);
            for column in (group..group + C::GROUP).step_by(RUN) {
                let out = out.add((column - columns.from) * LANES);
                let values = C::run::<L>(columns.panel, column, scale);
                for (i, value) in values.into_iter().enumerate() {
                    L::store(out.add(i * LANES), value);
                }
            }
        }
    }
}

macro_rules! dense_codec {
    ($name:ident, $bytes:literal, $load:ident) => {
        impl Codec for super::format::$name {
            const GROUP: usize = BLOCK;

            #[inline(always)]
            unsafe fn scale<L: Lanes>(_: *const u8, _: usize) -> (L::F, L::F) {
                // SAFETY: the caller's contract.
                unsafe { (L::splat(1.0), L::splat(0.0)) }
            }

            #[inline(always)]
            unsafe fn run<L: Lanes>(panel: *const u8, column: usize, _: (L::F, L::F)) -> [L::F; RUN] {
                // SAFETY: the columns lie in the panel.
                unsafe {
                    let at = panel.add(column * LANES * $bytes);
                    std::array::from_fn(|i| L::$load(at.add(i * LANES * $bytes).cast()))
                }
            }
        }
    };
}
dense_codec!(F32, 4, load);
dense_codec!(F16, 2, load_f16);
dense_codec!(BF16, 2, load_bf16);

impl<Q: Quant> Codec for Q {
    const GROUP: usize = Q::FORMAT.group;

    #[inline(always)]
    unsafe fn scale<L: Lanes>(panel: *const u8, column: usize) -> (L::F, L::F) {
        let f = Q::FORMAT;
        // SAFETY: the block lies in the panel.
        unsafe {
            let (header, block) = block_of(&f, panel, column);
            let group = column % BLOCK / f.group;
            group_scale::<L>(&f, header, block.add(group * f.group_bytes()))
        }
    }

    #[inline(always)]
    unsafe fn run<L: Lanes>(panel: *const u8, column: usize, scale: (L::F, L::F)) -> [L::F; RUN] {
        // SAFETY: the block lies in the panel.
        unsafe {
            let (_, block) = block_of(&Q::FORMAT, panel, column);
            let codes = codes::<L, Q>(block.add(Q::FORMAT.codes_offset()), column % BLOCK);
            codes.map(|code| L::fma(code, scale.0, scale.1))
        }
    }
}

/// The header and the block that hold a column.
#[inline(always)]
unsafe fn block_of(f: &Format, panel: *const u8, column: usize) -> (*const u8, *const u8) {
    // SAFETY: the column lies in the panel.
    unsafe {
        let header = panel.add(column / f.super_cols * f.super_bytes());
        let index = column % f.super_cols / BLOCK;
        (header, header.add(f.header_bytes() + index * f.block_bytes()))
    }
}

/// The codes of columns `column..column + RUN` of a block, less what stands for zero.
#[inline(always)]
unsafe fn codes<L: Lanes, Q: Quant>(planes: *const u8, column: usize) -> [L::F; RUN] {
    let f = Q::FORMAT;
    // SAFETY: as for the block.
    unsafe {
        let mut values = [L::splat(0.0); RUN];
        if f.low == 8 {
            for (i, value) in values.iter_mut().enumerate() {
                *value = L::load_i8(planes.add((column + i) * LANES));
            }
            return values;
        }
        let table = L::load(const { &table(Q::FORMAT.low, 0, Q::FORMAT.zero) }.as_ptr());
        let mut word = word_from::<L>(planes, f.low, column);
        for value in &mut values {
            *value = L::lookup(table, word);
            word = L::shift_right(word, f.low as u32);
        }
        if f.high > 0 {
            let table = L::load(const { &self::table(Q::FORMAT.high, Q::FORMAT.low, 0) }.as_ptr());
            let mut word = word_from::<L>(planes.add(4 * LANES * f.low), f.high, column);
            for value in &mut values {
                *value = L::add(*value, L::lookup(table, word));
                word = L::shift_right(word, f.high as u32);
            }
        }
        values
    }
}

/// The word of a plane of `bits` bits that holds `column`, shifted down to it.
#[inline(always)]
unsafe fn word_from<L: Lanes>(plane: *const u8, bits: usize, column: usize) -> L::U {
    let per_word = 32 / bits;
    // SAFETY: a plane has BLOCK columns.
    unsafe {
        let word = L::load_u32(plane.add(column / per_word * 4 * LANES));
        L::shift_right(word, (column % per_word * bits) as u32)
    }
}

/// The value of each index whose low `bits` bits are a field worth `field << weight`, less `zero`.
const fn table(bits: usize, weight: usize, zero: i32) -> [f32; LANES] {
    let mut table = [0.0; LANES];
    let mut i = 0;
    while i < LANES {
        let field = i & ((1 << bits) - 1);
        table[i] = ((field << weight) as i32 - zero) as f32;
        i += 1;
    }
    table
}

/// Scale and minimum of a group: `value = scale * code + min`.
#[inline(always)]
unsafe fn group_scale<L: Lanes>(f: &Format, header: *const u8, group: *const u8) -> (L::F, L::F) {
    // SAFETY: `format` says what lies where.
    unsafe {
        let d = L::load_f16(header);
        let m = if f.min { L::load_f16(header.add(2 * LANES)) } else { L::splat(0.0) };
        match f.scales {
            Scales::Direct => (d, m),
            Scales::Bytes if f.min => (L::mul(d, L::load_i8(group)), L::mul(m, L::load_i8(group.add(LANES)))),
            Scales::Bytes => (L::mul(d, L::load_i8(group)), m),
            Scales::Nibbles => {
                let identity = L::load(const { &table(4, 0, 0) }.as_ptr());
                let both = L::load_u8(group);
                let scale = L::lookup(identity, both);
                let min = L::lookup(identity, L::shift_right(both, 4));
                (L::mul(d, scale), L::mul(m, min))
            }
        }
    }
}
