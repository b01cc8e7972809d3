//! The integer products, once per instruction set.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx2_bytes;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "x86_64")]
mod avx_vnni;
#[cfg(target_arch = "aarch64")]
mod neon;
mod portable;
#[cfg(test)]
mod tests;

#[cfg(target_arch = "x86_64")]
pub(super) use avx_vnni::HalfVnni;
#[cfg(target_arch = "x86_64")]
pub(super) use avx2::Words;
#[cfg(target_arch = "x86_64")]
pub(super) use avx2_bytes::ByteProduct;
#[cfg(target_arch = "x86_64")]
pub(super) use avx512::Vnni;
#[cfg(target_arch = "aarch64")]
pub(super) use neon::{DotProduct, Widening};
pub(super) use portable::Plain;
