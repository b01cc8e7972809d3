//! Sixteen f32 lanes over AVX-512, AVX2 + FMA, NEON, or plain arrays, chosen at run time.
//!
//! Kernels are generic over [`Lanes`] and `#[inline(always)]`; [`vectorised!`] instantiates them
//! inside functions that enable the instruction set. Sums differ between instruction sets in
//! rounding only; within one they never depend on a batch.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod lanes;
#[cfg(target_arch = "aarch64")]
mod neon;
mod portable;

#[cfg(target_arch = "x86_64")]
pub(crate) use avx2::Avx2;
#[cfg(target_arch = "x86_64")]
pub(crate) use avx512::Avx512;
pub(crate) use lanes::{E4M3_UNIT, LANES, Lanes, e4m3, e5m2};
#[cfg(target_arch = "aarch64")]
pub(crate) use neon::Neon;
pub(crate) use portable::Portable;

use std::sync::OnceLock;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Isa {
    /// AVX-512 with the byte and VNNI instructions, which all but the oldest such machines have.
    #[cfg(target_arch = "x86_64")]
    Avx512,
    /// AVX2 with the integer products of AVX-VNNI.
    #[cfg(target_arch = "x86_64")]
    AvxVnni,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// NEON, which all such machines have, with the integer products of the features `i8mm` or
    /// `dotprod` where the machine has them, which changes no bit of a result.
    #[cfg(target_arch = "aarch64")]
    Neon,
    Portable,
}

impl Isa {
    /// The instruction sets that this machine has, fastest first.
    pub(crate) fn available() -> impl Iterator<Item = Self> {
        #[cfg(target_arch = "x86_64")]
        let avx2 = is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c");
        [
            #[cfg(target_arch = "x86_64")]
            (
                Self::Avx512,
                is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512vnni"),
            ),
            #[cfg(target_arch = "x86_64")]
            (Self::AvxVnni, avx2 && is_x86_feature_detected!("avxvnni")),
            #[cfg(target_arch = "x86_64")]
            (Self::Avx2, avx2),
            #[cfg(target_arch = "aarch64")]
            (Self::Neon, true),
            (Self::Portable, true),
        ]
        .into_iter()
        .filter_map(|(isa, runs)| runs.then_some(isa))
    }

    /// The instruction set of this process: the fastest that this machine has, unless
    /// [`use_instruction_set`] chose another.
    pub(crate) fn best() -> Self {
        *CHOSEN.get_or_init(|| Self::available().next().unwrap_or(Self::Portable))
    }

    /// Whether products with activations of eight bits are faster than those of sixteen.
    pub(crate) fn has_byte_products(self) -> bool {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 | Self::AvxVnni | Self::Avx2 => true,
            // All machines with `i8mm` have it.
            #[cfg(target_arch = "aarch64")]
            Self::Neon => std::arch::is_aarch64_feature_detected!("dotprod"),
            Self::Portable => false,
        }
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => "avx512",
            #[cfg(target_arch = "x86_64")]
            Self::AvxVnni => "avx_vnni",
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => "avx2",
            #[cfg(target_arch = "aarch64")]
            Self::Neon => "neon",
            Self::Portable => "portable",
        }
    }
}

static CHOSEN: OnceLock<Isa> = OnceLock::new();

/// The instruction set that the kernels of this process use: `avx512` (with the byte and VNNI
/// instructions), `avx2` (with FMA and F16C), `avx_vnni` (`avx2` with AVX-VNNI), `neon` (with the
/// products of bytes that the machine has) or `portable`.
pub fn instruction_set() -> &'static str {
    Isa::best().name()
}

/// Has the kernels of this process use the instruction set of this name.
///
/// # Errors
/// When the machine does not have it, or a kernel of this process already runs on another one.
pub fn use_instruction_set(name: &str) -> Result<(), InstructionSetError> {
    let wanted = Isa::available().find(|isa| isa.name() == name).ok_or_else(|| {
        let has = Isa::available().map(Isa::name).collect::<Vec<_>>().join(", ");
        InstructionSetError::Absent { wanted: name.to_owned(), has }
    })?;
    match *CHOSEN.get_or_init(|| wanted) {
        chosen if chosen == wanted => Ok(()),
        chosen => Err(InstructionSetError::Chosen(chosen.name())),
    }
}

#[derive(Debug, thiserror::Error)]
pub enum InstructionSetError {
    #[error("this machine has no instruction set {wanted}, it has: {has}")]
    Absent { wanted: String, has: String },
    #[error("the kernels of this process already run on {0}")]
    Chosen(&'static str),
    #[error(
        "activations of eight bits are faster with the instruction sets avx512, avx_vnni, avx2 and \
         neon (on machines with products of bytes) alone, and the kernels of this process run on \
         {0}"
    )]
    NoBytes(&'static str),
}

/// Defines `fn name(isa, args…)` that runs `kernel::<L>(args…)` with the lanes of `isa`; `fn
/// name<E: Bound>` runs `kernel::<L, E>`.
macro_rules! vectorised {
    (
        $(#[$meta:meta])*
        $vis:vis fn $name:ident$(<$element:ident: $bound:path>)?(
            $($arg:ident: $ty:ty),* $(,)?
        ) $(-> $result:ty)? = $kernel:ident
    ) => {
        $(#[$meta])*
        $vis fn $name$(<$element: $bound>)?(
            isa: $crate::simd::Isa,
            $($arg: $ty),*
        ) $(-> $result)? {
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
            fn avx512$(<$element: $bound>)?($($arg: $ty),*) $(-> $result)? {
                $kernel::<$crate::simd::Avx512 $(, $element)?>($($arg),*)
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c")]
            fn avx2$(<$element: $bound>)?($($arg: $ty),*) $(-> $result)? {
                $kernel::<$crate::simd::Avx2 $(, $element)?>($($arg),*)
            }
            match isa {
                // SAFETY: these variants exist only where `Isa::available` found the features.
                #[cfg(target_arch = "x86_64")]
                $crate::simd::Isa::Avx512 => unsafe { avx512($($arg),*) },
                // SAFETY: as above.
                #[cfg(target_arch = "x86_64")]
                $crate::simd::Isa::Avx2 | $crate::simd::Isa::AvxVnni => unsafe { avx2($($arg),*) },
                #[cfg(target_arch = "aarch64")]
                $crate::simd::Isa::Neon => {
                    $kernel::<$crate::simd::Neon $(, $element)?>($($arg),*)
                }
                $crate::simd::Isa::Portable => {
                    $kernel::<$crate::simd::Portable $(, $element)?>($($arg),*)
                }
            }
        }
    };
}
pub(crate) use vectorised;

/// `cap · tanh(s / cap)` as `cap - 2·cap / (e^(2s/cap) + 1)`.
#[inline(always)]
pub(crate) fn soft_cap<L: Lanes>(s: L, cap: f32) -> L {
    let grown = s.mul(L::splat(2.0 / cap)).exp().add(L::splat(1.0));
    L::splat(-2.0 * cap).div(grown).add(L::splat(cap))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::element::load_some;

    #[inline(always)]
    fn exp_all<L: Lanes>(data: &mut [f32]) {
        for chunk in data.chunks_mut(LANES) {
            let y = load_some::<L, f32>(chunk).exp().to_array();
            chunk.copy_from_slice(&y[..chunk.len()]);
        }
    }
    vectorised!(fn exp_slice(data: &mut [f32]) = exp_all);

    #[inline(always)]
    fn floats_of_eight_bits<L: Lanes>(codes: &[u8; LANES], out: &mut [[f32; LANES]; 2]) {
        L::load_e4m3(codes).mul(L::splat(E4M3_UNIT)).store(&mut out[0]);
        L::load_e5m2(codes).store(&mut out[1]);
    }
    vectorised!(
        fn eight_bits(codes: &[u8; LANES], out: &mut [[f32; LANES]; 2]) = floats_of_eight_bits
    );

    /// The value by the definition of a float of eight bits, `mantissa` of which are its mantissa.
    fn float_of(code: u8, mantissa: i32, bias: i32) -> f64 {
        let sign = if code >> 7 == 1 { -1.0 } else { 1.0 };
        let (exponent, rest) =
            (i32::from(code & 127) >> mantissa, i32::from(code) % (1 << mantissa));
        let part = f64::from(rest) / f64::from(1 << mantissa);
        let (leading, power) = if exponent == 0 { (0.0, 1 - bias) } else { (1.0, exponent - bias) };
        sign * (leading + part) * 2f64.powi(power)
    }

    #[test]
    fn every_float_of_eight_bits_has_its_value() {
        let codes: Vec<u8> = (0..=255).collect();
        for isa in Isa::available() {
            for codes in codes.as_chunks::<LANES>().0 {
                let mut got = [[f32::NAN; LANES]; 2];
                eight_bits(isa, codes, &mut got);
                for (i, code) in codes.iter().copied().enumerate() {
                    let want = [float_of(code, 3, 7), float_of(code, 2, 15)];
                    assert_eq!(f64::from(got[0][i]), want[0], "{isa:?}: E4M3 {code:#x}");
                    // The highest exponent of E5M2 stands for infinity and for no number.
                    let finite = code & 0x7c != 0x7c;
                    assert!(!finite || f64::from(got[1][i]) == want[1], "{isa:?}: E5M2 {code:#x}");
                    assert_eq!(got[1][i].is_finite(), finite, "{isa:?}: E5M2 {code:#x}");
                }
            }
        }
    }

    #[test]
    fn exp_is_close_everywhere_it_matters() {
        for isa in Isa::available() {
            let x: Vec<f32> = (-8700..=8830).map(|i| i as f32 * 0.01).collect();
            let mut y = x.clone();
            exp_slice(isa, &mut y);
            for (x, y) in x.iter().zip(&y) {
                let want = f64::from(*x).exp();
                let error = (f64::from(*y) - want).abs() / want;
                assert!(error < 2.5e-7, "{isa:?}: exp({x}) = {y}, want {want}");
            }
        }
    }

    #[test]
    fn exp_at_the_ends() {
        for isa in Isa::available() {
            let mut y = [f32::NEG_INFINITY, -1e30, -100.0, 0.0, 200.0, f32::INFINITY, f32::NAN];
            exp_slice(isa, &mut y);
            assert_eq!(y[..4], [0.0, 0.0, 0.0, 1.0], "{isa:?}");
            assert_eq!(y[4..6], [f32::INFINITY; 2], "{isa:?}");
            assert!(y[6].is_nan(), "{isa:?}");
        }
    }
}
