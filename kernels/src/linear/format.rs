//! How weights lie in memory. Block formats of GGUF are one scheme with parameters: codes of 2 to 8 bits, a scale (and perhaps
//! a minimum) per group, themselves quantised under a super-block's f16 scale in the k-quants.
//!
//! A panel holds sixteen outputs. Its super-blocks follow each other along the columns, each made of
//! `header: d f16 × 16 [, m f16 × 16]`, then per 32 columns
//! `per group: scales × 16 [, mins × 16]`, `low plane`, `high plane`.
//! A plane of b bits is b rows of sixteen u32, one per output; each u32 holds 32 / b consecutive columns, lowest bits first.
//! Codes of 8 bits are signed bytes `[32][16]`. The bytes held equal the file's but for the k-quants' scales (6 bits become 8).

use super::lanes::LANES;
use candle_core::quantized::GgmlDType;

/// Columns decoded at a time.
pub(super) const BLOCK: usize = 32;

/// A group's scale and minimum.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Scales {
    /// The header's, as they are.
    Direct,
    /// The header's times a signed byte each.
    Bytes,
    /// The header's times the low (scale) and high (minimum) half of one byte.
    Nibbles,
}

#[derive(Clone, Copy)]
pub(super) struct Format {
    /// Bits of a code's low and high plane.
    pub low: usize,
    pub high: usize,
    /// The code that means zero.
    pub zero: i32,
    /// Columns per header.
    pub super_cols: usize,
    /// Columns per scale.
    pub group: usize,
    pub min: bool,
    pub scales: Scales,
}

impl Format {
    pub const fn header_bytes(&self) -> usize {
        2 * LANES * (1 + self.min as usize)
    }

    pub const fn group_bytes(&self) -> usize {
        match self.scales {
            Scales::Direct => 0,
            Scales::Bytes => LANES * (1 + self.min as usize),
            Scales::Nibbles => LANES,
        }
    }

    pub const fn codes_offset(&self) -> usize {
        BLOCK / self.group * self.group_bytes()
    }

    pub const fn block_bytes(&self) -> usize {
        self.codes_offset() + 4 * LANES * (self.low + self.high)
    }

    pub const fn super_bytes(&self) -> usize {
        self.header_bytes() + self.super_cols / BLOCK * self.block_bytes()
    }

    pub const fn panel_bytes(&self, cols: usize) -> usize {
        cols / self.super_cols * self.super_bytes()
    }
}

/// A format known at compile time.
pub(super) trait Quant {
    const FORMAT: Format;
}

/// Dense panels: `[cols][16]`.
pub(super) struct F32;
pub(super) struct F16;
pub(super) struct BF16;

const fn legacy(low: usize, high: usize, zero: i32) -> Format {
    Format { low, high, zero, super_cols: 32, group: 32, min: zero == 0 && low < 8, scales: Scales::Direct }
}

const fn k_quant(low: usize, high: usize, zero: i32, group: usize, scales: Scales) -> Format {
    Format { low, high, zero, super_cols: 256, group, min: zero == 0, scales }
}

macro_rules! formats {
    ($($name:ident: $format:expr;)*) => {
        $(
            pub(super) struct $name;
            impl Quant for $name {
                const FORMAT: Format = $format;
            }
        )*
        /// The packed form of a GGUF block type; `None` for the dense ones and those not supported.
        pub(super) fn of(dtype: GgmlDType) -> Option<Format> {
            match dtype {
                $(GgmlDType::$name => Some($format),)*
                _ => None,
            }
        }
    };
}

formats! {
    Q4_0: legacy(4, 0, 8);
    Q4_1: legacy(4, 0, 0);
    Q5_0: legacy(4, 1, 16);
    Q5_1: legacy(4, 1, 0);
    Q8_0: legacy(8, 0, 0);
    Q2K: k_quant(2, 0, 0, 16, Scales::Nibbles);
    Q3K: k_quant(2, 1, 4, 16, Scales::Bytes);
    Q4K: k_quant(4, 0, 0, 32, Scales::Bytes);
    Q5K: k_quant(4, 1, 0, 32, Scales::Bytes);
    Q6K: k_quant(4, 2, 32, 16, Scales::Bytes);
}
