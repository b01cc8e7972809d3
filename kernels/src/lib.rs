//! Numeric kernels: one folder per op. `mod.rs` holds the op's trait; `args.rs` its one argument
//! struct, which states shapes, dtypes and aliasing and checks them for every path; `reference.rs`
//! is the specification in plain f32 loops; `cpu.rs` is the fast path, which is compared with it;
//! `gpu.rs` launches the kernels of `<op>.cu`. The caller owns the outputs.

#![allow(unsafe_code, reason = "instructions of processors, shared outputs, device libraries")]
#![cfg_attr(
    test,
    allow(
        clippy::disallowed_methods,
        unreachable_pub,
        reason = "tests measure time, start threads and share helpers"
    )
)]

#[cfg(not(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64"))))]
compile_error!(
    "Cresset is built for Linux on x86_64 (proven) or aarch64: build it there, or with --target \
     x86_64-unknown-linux-gnu"
);

pub mod activation;
pub mod attention;
pub mod compute;
mod element;
pub mod embedding;
mod error;
pub mod experts;
pub mod factors;
#[cfg_attr(
    not(any(feature = "cuda", feature = "emulator")),
    expect(dead_code, reason = "only devices use some items")
)]
pub mod gpu;
pub mod linear;
mod memory;
pub mod norm;
pub mod operand;
mod parts;
pub mod ranks;
pub mod recurrence;
pub mod rope;
pub mod sampling;
mod simd;
mod storage;
pub mod stored_as_bf16;
#[cfg(test)]
mod testing;

pub use compute::Compute;
pub use error::{Error, Result};
pub use operand::{DeviceOps, OpMemory};
pub use simd::{InstructionSetError, instruction_set, use_instruction_set};

use activation::{Gated, SoftCap};
use attention::Attention;
use embedding::Embedding;
use experts::Experts;
use factors::Factors;
use linear::Linear;
use norm::Norm;
use ranks::Ranks;
use recurrence::Recurrence;
use rope::Rope;

/// All ops of a model. The two implementations are [`Compute`] (the CPU) and [`DeviceOps`].
pub trait Ops:
    Norm
    + Linear
    + Rope
    + Attention
    + Recurrence
    + Gated
    + SoftCap
    + Embedding
    + Experts
    + Factors
    + Ranks
    + Send
    + Sync
    + 'static
{
}

impl<T> Ops for T where
    T: Norm
        + Linear
        + Rope
        + Attention
        + Recurrence
        + Gated
        + SoftCap
        + Embedding
        + Experts
        + Factors
        + Ranks
        + Send
        + Sync
        + 'static
{
}
