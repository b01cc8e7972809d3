//! The layout of weights in memory. The block formats of GGUF are one scheme with parameters: codes
//! of 2 to 8 bits, and a scale (and perhaps a minimum) per group, which the k-quants quantise in
//! turn under a super-block's f16 scale.
//!
//! A panel holds sixteen outputs. Its super-blocks follow each other along the columns, each made
//! of `header: d × 16 [, m f16 × 16] [, zero u8 × 16]`, then per 32 columns `per group: scales × 16
//! [, mins × 16]`, `low plane`, `high plane`.
//! A plane of b bits is b rows of sixteen u32, one per output. Byte j of a u32 holds the fields of
//! columns j, j + 4, j + 8, …, lowest bits first, so one shift and one mask give four consecutive
//! columns of sixteen outputs as bytes.
//! Codes are unsigned: Q8_0's are stored with 128 added, and those of the I-quants and MXFP4 stand
//! for numbers in a table of sixteen. The panels take as many bytes as the file, except for the
//! k-quants' scales (6 bits become 8), MXFP4's (8 become 16) and the I-quants of fewer than four
//! bits, whose codes are three or four bits here.
//!
//! Integers from Hugging Face's files (AWQ, GPTQ, compressed-tensors) have a code that means zero
//! for every group of columns and output. Scales are f32 here, which holds what all files have.

use crate::linear::WeightType;
use crate::simd::LANES;

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

/// The type of the scale in a header.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum HeaderScale {
    F16,
    /// Its exponents have eight bits.
    Bf16,
    F32,
}

#[derive(Clone, Copy)]
pub(super) struct Format {
    /// Bits of a code in the low plane.
    pub low: usize,
    /// Bits of a code in the high plane.
    pub high: usize,
    /// The code that means zero.
    pub zero: i32,
    /// Whether the header has the code that means zero for each output, instead.
    pub zeros: bool,
    /// Columns per header.
    pub super_cols: usize,
    /// Columns per scale.
    pub group: usize,
    pub min: bool,
    pub scales: Scales,
    /// The numbers, plus `zero`, that codes stand for; `None`: each stands for itself. The first
    /// is 0.
    pub table: Option<[u8; 16]>,
    /// A factor of the header's scale: a power of two.
    pub unit: f32,
    pub header: HeaderScale,
}

impl Format {
    /// The largest number that a code stands for, plus `zero`.
    #[cfg(target_arch = "x86_64")]
    pub(super) const fn largest_code(&self) -> u8 {
        let Some(table) = self.table else { return u8::MAX >> (8 - self.low - self.high) };
        let (mut largest, mut i) = (0, 0);
        while i < table.len() {
            largest = if table[i] > largest { table[i] } else { largest };
            i += 1;
        }
        largest
    }

    pub(super) const fn header_bytes(&self) -> usize {
        self.zeros_offset() + LANES * self.zeros as usize
    }

    /// The offset, in bytes of a header, of the codes that mean zero.
    pub(super) const fn zeros_offset(&self) -> usize {
        LANES * (self.scale_bytes() + 2 * self.min as usize)
    }

    /// Bytes of a header's scale of one output.
    pub(super) const fn scale_bytes(&self) -> usize {
        match self.header {
            HeaderScale::F16 | HeaderScale::Bf16 => 2,
            HeaderScale::F32 => 4,
        }
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
    Format { super_cols: 32, ..k_quant(low, high, zero, 32, Scales::Direct) }
}

const fn k_quant(low: usize, high: usize, zero: i32, group: usize, scales: Scales) -> Format {
    Format {
        low,
        high,
        zero,
        zeros: false,
        super_cols: 256,
        group,
        min: zero == 0,
        scales,
        table: None,
        unit: 1.0,
        header: HeaderScale::F16,
    }
}

/// Integers with a scale and a zero for each `super_cols` columns.
const fn integers(bits: usize, super_cols: usize) -> Format {
    let format = k_quant(bits, 0, 0, BLOCK, Scales::Direct);
    Format { super_cols, zeros: true, min: false, header: HeaderScale::F32, ..format }
}

/// Codes that rise with the values: the negative ones of some magnitudes, then the positive ones.
const fn signed<const N: usize>(magnitudes: [u8; N], group: usize, unit: f32) -> Format {
    let (zero, half) = (magnitudes[N - 1], N.next_power_of_two());
    let mut table = [0; 16];
    let mut i = 0;
    while i < N {
        table[half + i] = zero + magnitudes[i];
        table[half - 1 - i] = zero - magnitudes[i];
        i += 1;
    }
    let (low, high) = if half == 8 { (4, 0) } else { (2, 1) };
    let format = k_quant(low, high, zero as i32, group, Scales::Bytes);
    Format { table: Some(table), unit, ..format }
}

/// The values of IQ4_NL and IQ4_XS, which lie closer together around zero, plus 127.
const UNEVEN: Option<[u8; 16]> =
    Some([0, 23, 44, 62, 78, 92, 105, 117, 128, 140, 152, 165, 180, 196, 216, 240]);

/// Nine times -1, 0 and 1 without an eighth and with one, plus 9: see `i_quants`.
const fn ternary(group: usize) -> Format {
    let table = [0, 2, 8, 10, 16, 18, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    Format { table: Some(table), unit: 0.125, ..k_quant(2, 1, 9, group, Scales::Bytes) }
}

const IQ2: [u8; 3] = [8, 25, 43];
const IQ3: [u8; 8] = [1, 3, 5, 7, 9, 11, 13, 15];
const IQ3_FINE: [u8; 8] = [4, 12, 20, 28, 36, 44, 52, 62];
/// Twice the values of a float of two bits of exponent and one of mantissa.
const E2M1: [u8; 8] = [0, 1, 2, 3, 4, 6, 8, 12];

macro_rules! formats {
    ($($name:ident: $format:expr;)*) => {
        $(
            pub(super) struct $name;
            impl Quant for $name {
                const FORMAT: Format = $format;
            }
        )*
        pub(super) const TYPES: &[WeightType] = &[$(WeightType::$name),*];

        /// The packed form of integer codes; `None` for other types and those not supported.
        pub(super) fn of(dtype: WeightType) -> Option<Format> {
            match dtype {
                $(WeightType::$name => Some($format),)*
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
    IQ4NL: Format { table: UNEVEN, ..legacy(4, 0, 127) };
    IQ4XS: Format { table: UNEVEN, ..k_quant(4, 0, 127, 32, Scales::Bytes) };
    IQ3S: signed(IQ3, 32, 1.0);
    IQ3XXS: signed(IQ3_FINE, 32, 0.25);
    IQ2S: signed(IQ2, 16, 0.125);
    IQ2XS: signed(IQ2, 16, 0.125);
    IQ2XXS: signed(IQ2, 32, 0.125);
    IQ1S: ternary(32);
    IQ1M: ternary(16);
    MXFP4: Format {
        super_cols: 32,
        scales: Scales::Direct,
        header: HeaderScale::Bf16,
        ..signed(E2M1, 32, 1.0)
    };
    TQ1_0: k_quant(2, 0, 1, 32, Scales::Direct);
    TQ2_0: k_quant(2, 0, 1, 32, Scales::Direct);
    Int4By32: integers(4, 32);
    Int4By64: integers(4, 64);
    Int4By128: integers(4, 128);
    Int8By32: integers(8, 32);
    Int8By128: integers(8, 128);
}

impl WeightType {
    /// The bytes that `count` values, in whole blocks, take in the memory of a CPU.
    pub fn cpu_bytes(self, count: usize) -> usize {
        of(self).map_or(count / self.block_size() * self.type_size(), |format| {
            format.panel_bytes(count) / LANES
        })
    }
}

/// Runs `$call` with the type `$quant` standing for the format of a `WeightType`.
macro_rules! with_format {
    ($dtype:expr, $quant:ident => $call:expr) => {
        with_format!($dtype, $quant => $call, Q4_0 Q4_1 Q5_0 Q5_1 Q8_0
            Q2K Q3K Q4K Q5K Q6K IQ4NL IQ4XS IQ3S IQ3XXS IQ2S IQ2XS IQ2XXS IQ1S IQ1M MXFP4 TQ1_0
            TQ2_0 Int4By32 Int4By64 Int4By128 Int8By32 Int8By128)
    };
    ($dtype:expr, $quant:ident => $call:expr, $($name:ident)*) => {
        match $dtype {
            $(crate::linear::WeightType::$name => {
                type $quant = crate::linear::format::$name;
                $call
            })*
            other => unreachable!("no weight is packed as {other:?}"),
        }
    };
}
pub(super) use with_format;
