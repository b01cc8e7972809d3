//! All integer products are compared with those in plain integers.

use super::*;
use crate::linear::format::{BLOCK, Quant, TYPES, with_format};
use crate::linear::integer::IntegerProduct;
use crate::simd::{LANES, Lanes};
use std::array::from_fn;

/// The products of sixteen outputs with a block, whose planes of codes are made of some bytes.
fn products<M: IntegerProduct, Q: Quant>(
    bytes: &[u8; 8 * BLOCK * LANES],
    x: &[f32; BLOCK],
) -> [[f32; LANES]; 2] {
    let x = M::round(x);
    // SAFETY: the callers look for the instructions, and no code has more than eight bits.
    unsafe {
        let offset = x.offsets[2];
        let starts = [M::start(offset * (77 - M::BIAS)), M::start_each(bytes.as_ptr(), offset)];
        starts.map(|mut sums| {
            macro_rules! add {
                ($($step:literal)*) => {$(
                    sums = M::dot::<Q, $step>(sums, M::codes::<Q, $step>(bytes.as_ptr()), &x);
                )*};
            }
            add!(0 1 2 3 4 5 6 7);
            M::finish(sums).to_array()
        })
    }
}

/// Codes that differ, and the largest ones with activations whose bytes are the largest of either
/// sign.
fn check<Q: Quant>() {
    let differing = from_fn(|i| (i * i / 7 + i) as u8);
    check_of::<Q>(&differing, &from_fn(|i| (i as f32 * 0.7).cos() - 0.1));
    for others in [32_639.0, 32_384.0, -32_639.0, -32_385.0] {
        check_of::<Q>(&[u8::MAX; _], &from_fn(|i| if i == 0 { 32_639.0 } else { others }));
    }
}

#[cfg(target_arch = "aarch64")]
fn check_of<Q: Quant>(bytes: &[u8; 8 * BLOCK * LANES], x: &[f32; BLOCK]) {
    use std::arch::is_aarch64_feature_detected;
    let want = products::<Plain, Q>(bytes, x);
    assert_eq!(products::<Widening, Q>(bytes, x), want);
    if is_aarch64_feature_detected!("dotprod") {
        assert_eq!(products::<DotProduct<false, 2>, Q>(bytes, x), want);
    }
    if is_aarch64_feature_detected!("i8mm") {
        assert_eq!(products::<DotProduct<true, 2>, Q>(bytes, x), want);
        let one_byte = products::<DotProduct<false, 1>, Q>(bytes, x);
        assert_eq!(products::<DotProduct<true, 1>, Q>(bytes, x), one_byte);
    }
}

#[cfg(target_arch = "x86_64")]
fn check_of<Q: Quant>(bytes: &[u8; 8 * BLOCK * LANES], x: &[f32; BLOCK]) {
    use crate::simd::Isa;
    let want = products::<Plain, Q>(bytes, x);
    let one_byte = || products::<Words<1>, Q>(bytes, x);
    for isa in Isa::available() {
        match isa {
            Isa::Avx512 => {
                assert_eq!(products::<Vnni<2>, Q>(bytes, x), want);
                assert_eq!(products::<Vnni<1>, Q>(bytes, x), one_byte());
            }
            Isa::AvxVnni => {
                assert_eq!(products::<HalfVnni<2>, Q>(bytes, x), want);
                assert_eq!(products::<HalfVnni<1>, Q>(bytes, x), one_byte());
            }
            Isa::Avx2 => {
                assert_eq!(products::<Words<2>, Q>(bytes, x), want);
                if Q::FORMAT.largest_code() < 128 {
                    assert_eq!(products::<ByteProduct<2>, Q>(bytes, x), want);
                    assert_eq!(products::<ByteProduct<1>, Q>(bytes, x), one_byte());
                }
            }
            Isa::Portable => {}
        }
    }
}

#[test]
fn all_products_are_the_same_integers() {
    for dtype in TYPES {
        with_format!(*dtype, Q => check::<Q>());
    }
}
