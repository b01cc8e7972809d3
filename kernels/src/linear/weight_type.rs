//! The types in which files keep weights: their names, their ids in GGUF files, and their blocks.
//!
//! Those of Hugging Face's files are blocks that a reader puts together of tensors of codes, scales
//! and zeros: `scale f32 [, zero u8], codes`. The number in their names is that of columns.

use candle_core::quantized::GgmlDType;

macro_rules! weight_types {
    ($($variant:ident $(= $id:literal)?, $name:literal: $columns:literal in $bytes:literal;)*) => {
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum WeightType {
            $($variant,)*
        }

        impl WeightType {
            /// The type that has this id in GGUF files.
            pub fn from_gguf(id: u32) -> Option<Self> {
                match id {
                    $($($id => Some(Self::$variant),)?)*
                    _ => None,
                }
            }

            /// Its id in GGUF files; `None`: they do not have it.
            pub fn gguf_id(self) -> Option<u32> {
                match self {
                    $($(Self::$variant => Some($id),)?)*
                    _ => None,
                }
            }

            /// Its name, such as `Q4_K`.
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $name,)*
                }
            }

            /// The columns of a block.
            pub const fn block_size(self) -> usize {
                match self {
                    $(Self::$variant => $columns,)*
                }
            }

            /// The bytes of a block.
            pub fn type_size(self) -> usize {
                match self {
                    $(Self::$variant => $bytes,)*
                }
            }
        }
    };
}

weight_types! {
    F32 = 0, "F32": 1 in 4;
    F16 = 1, "F16": 1 in 2;
    Q4_0 = 2, "Q4_0": 32 in 18;
    Q4_1 = 3, "Q4_1": 32 in 20;
    Q5_0 = 6, "Q5_0": 32 in 22;
    Q5_1 = 7, "Q5_1": 32 in 24;
    Q8_0 = 8, "Q8_0": 32 in 34;
    Q8_1 = 9, "Q8_1": 32 in 36;
    Q2K = 10, "Q2_K": 256 in 84;
    Q3K = 11, "Q3_K": 256 in 110;
    Q4K = 12, "Q4_K": 256 in 144;
    Q5K = 13, "Q5_K": 256 in 176;
    Q6K = 14, "Q6_K": 256 in 210;
    Q8K = 15, "Q8_K": 256 in 292;
    IQ2XXS = 16, "IQ2_XXS": 256 in 66;
    IQ2XS = 17, "IQ2_XS": 256 in 74;
    IQ3XXS = 18, "IQ3_XXS": 256 in 98;
    IQ1S = 19, "IQ1_S": 256 in 50;
    IQ4NL = 20, "IQ4_NL": 32 in 18;
    IQ3S = 21, "IQ3_S": 256 in 110;
    IQ2S = 22, "IQ2_S": 256 in 82;
    IQ4XS = 23, "IQ4_XS": 256 in 136;
    IQ1M = 29, "IQ1_M": 256 in 56;
    BF16 = 30, "BF16": 1 in 2;
    TQ1_0 = 34, "TQ1_0": 256 in 54;
    TQ2_0 = 35, "TQ2_0": 256 in 66;
    MXFP4 = 39, "MXFP4": 32 in 17;
    Int4By32, "INT4_32": 32 in 21;
    Int4By64, "INT4_64": 64 in 37;
    Int4By128, "INT4_128": 128 in 69;
    Int8By32, "INT8_32": 32 in 37;
    Int8By128, "INT8_128": 128 in 133;
    E4M3By32, "F8_E4M3_32": 32 in 36;
    E4M3By128, "F8_E4M3_128": 128 in 132;
    E5M2By32, "F8_E5M2_32": 32 in 36;
}

impl WeightType {
    /// Whether each value stands for itself.
    pub fn is_dense(self) -> bool {
        self.block_size() == 1
    }

    /// The same type in candle, which can quantise to it. It has the k-quants and what is older.
    pub fn in_candle(self) -> Option<GgmlDType> {
        Some(match self {
            Self::F32 => GgmlDType::F32,
            Self::F16 => GgmlDType::F16,
            Self::BF16 => GgmlDType::BF16,
            Self::Q4_0 => GgmlDType::Q4_0,
            Self::Q4_1 => GgmlDType::Q4_1,
            Self::Q5_0 => GgmlDType::Q5_0,
            Self::Q5_1 => GgmlDType::Q5_1,
            Self::Q8_0 => GgmlDType::Q8_0,
            Self::Q8_1 => GgmlDType::Q8_1,
            Self::Q2K => GgmlDType::Q2K,
            Self::Q3K => GgmlDType::Q3K,
            Self::Q4K => GgmlDType::Q4K,
            Self::Q5K => GgmlDType::Q5K,
            Self::Q6K => GgmlDType::Q6K,
            Self::Q8K => GgmlDType::Q8K,
            _ => return None,
        })
    }
}
