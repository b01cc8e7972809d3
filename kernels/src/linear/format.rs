//! The layout of weights in memory. The block formats of GGUF are one scheme with parameters: codes
//! of 2 to 8 bits, and a scale (and perhaps a minimum) per group, which the k-quants quantise in
//! turn under a super-block's f16 scale.
//!
//! A panel holds sixteen outputs. Its super-blocks follow each other along the columns, each made
//! of `header: d f16 × 16 [, m f16 × 16]`, then per 32 columns `per group: scales × 16 [, mins ×
//! 16]`, `low plane`, `high plane`.
//! A plane of b bits is b rows of sixteen u32, one per output. Byte j of a u32 holds the fields of
//! columns j, j + 4, j + 8, …, lowest bits first, so one shift and one mask give four consecutive
//! columns of sixteen outputs as bytes.
//! Codes are unsigned: Q8_0's are stored with 128 added. The panels take as many bytes as the file,
//! except for the k-quants' scales (6 bits become 8).

use crate::simd::LANES;
use candle_core::quantized::GgmlDType;

/// Columns whose activations share a scale.
pub(super) const BLOCK: usize = 32;

/// The form in which a group's scale and minimum are stored.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Scales {
    /// The scale and the minimum of the header.
    Direct,
    /// Those of the header, each multiplied by a signed byte.
    Bytes,
    /// Those of the header, multiplied by the low (scale) and the high (minimum) half of one byte.
    Nibbles,
}

#[derive(Clone, Copy)]
pub(super) struct Format {
    /// Bits of a code in the low plane.
    pub low: usize,
    /// Bits of a code in the high plane.
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
    pub(super) const fn header_bytes(&self) -> usize {
        2 * LANES * (1 + self.min as usize)
    }

    pub(super) const fn group_bytes(&self) -> usize {
        match self.scales {
            Scales::Direct => 0,
            Scales::Bytes => LANES * (1 + self.min as usize),
            Scales::Nibbles => LANES,
        }
    }

    pub(super) const fn codes_offset(&self) -> usize {
        BLOCK / self.group * self.group_bytes()
    }

    pub(super) const fn block_bytes(&self) -> usize {
        self.codes_offset() + 4 * LANES * (self.low + self.high)
    }

    pub(super) const fn super_bytes(&self) -> usize {
        self.header_bytes() + self.super_cols / BLOCK * self.block_bytes()
    }

    pub(super) const fn panel_bytes(&self, cols: usize) -> usize {
        cols / self.super_cols * self.super_bytes()
    }
}

/// A format known at compile time.
pub(super) trait Quant {
    const FORMAT: Format;
}

const fn legacy(low: usize, high: usize, zero: i32) -> Format {
    Format { low, high, zero, super_cols: 32, group: 32, min: zero == 0, scales: Scales::Direct }
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
        pub(super) const TYPES: &[GgmlDType] = &[$(GgmlDType::$name),*];

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
    Q8_0: legacy(8, 0, 128);
    Q2K: k_quant(2, 0, 0, 16, Scales::Nibbles);
    Q3K: k_quant(2, 1, 4, 16, Scales::Bytes);
    Q4K: k_quant(4, 0, 0, 32, Scales::Bytes);
    Q5K: k_quant(4, 1, 0, 32, Scales::Bytes);
    Q6K: k_quant(4, 2, 32, 16, Scales::Bytes);
}

/// Runs `$call` with the type `$quant` standing for the format of a `GgmlDType`.
macro_rules! with_format {
    ($dtype:expr, $quant:ident => $call:expr) => {
        with_format!($dtype, $quant => $call, Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2K Q3K Q4K Q5K Q6K)
    };
    ($dtype:expr, $quant:ident => $call:expr, $($name:ident)*) => {
        match $dtype {
            $(candle_core::quantized::GgmlDType::$name => {
                type $quant = crate::linear::format::$name;
                $call
            })*
            other => unreachable!("no weight is packed as {other:?}"),
        }
    };
}
pub(super) use with_format;
