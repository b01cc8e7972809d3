//! candle's library of kernels for quantised weights and for mixtures of experts takes 14 MB, runs
//! on devices of one architecture only, and is never called here, because the witness computes in
//! plain f32. The linker finds functions of ours under its names, so it takes nothing from it.

macro_rules! not_linked {
    ($($function:ident)*) => {
        $(
            // SAFETY: candle's function of this name is not in the program.
            #[unsafe(no_mangle)]
            extern "C" fn $function() {
                panic!(concat!(
                    "candle's ", stringify!($function), " was called, which is not in this program"
                ))
            }
        )*
    };
}

// All of them, since one that is missing here has the linker take the library's.
not_linked! {
    launch_mmq_gguf_q2_k launch_mmq_gguf_q3_k launch_mmq_gguf_q4_0 launch_mmq_gguf_q4_1
    launch_mmq_gguf_q4_k launch_mmq_gguf_q5_0 launch_mmq_gguf_q5_1 launch_mmq_gguf_q5_k
    launch_mmq_gguf_q6_k launch_mmq_gguf_q8_0 launch_mmq_quantize_q8_1_D2S6
    launch_mmq_quantize_q8_1_D4 launch_mmq_quantize_q8_1_DS4
    launch_mmvq_gguf_q2_k_bf16_plain launch_mmvq_gguf_q2_k_f16_plain
    launch_mmvq_gguf_q2_k_f32_plain launch_mmvq_gguf_q3_k_bf16_plain
    launch_mmvq_gguf_q3_k_f16_plain launch_mmvq_gguf_q3_k_f32_plain
    launch_mmvq_gguf_q4_0_bf16_plain launch_mmvq_gguf_q4_0_f16_plain
    launch_mmvq_gguf_q4_0_f32_plain launch_mmvq_gguf_q4_1_bf16_plain
    launch_mmvq_gguf_q4_1_f16_plain launch_mmvq_gguf_q4_1_f32_plain
    launch_mmvq_gguf_q4_k_bf16_plain launch_mmvq_gguf_q4_k_f16_plain
    launch_mmvq_gguf_q4_k_f32_plain launch_mmvq_gguf_q5_0_bf16_plain
    launch_mmvq_gguf_q5_0_f16_plain launch_mmvq_gguf_q5_0_f32_plain
    launch_mmvq_gguf_q5_1_bf16_plain launch_mmvq_gguf_q5_1_f16_plain
    launch_mmvq_gguf_q5_1_f32_plain launch_mmvq_gguf_q5_k_bf16_plain
    launch_mmvq_gguf_q5_k_f16_plain launch_mmvq_gguf_q5_k_f32_plain
    launch_mmvq_gguf_q6_k_bf16_plain launch_mmvq_gguf_q6_k_f16_plain
    launch_mmvq_gguf_q6_k_f32_plain launch_mmvq_gguf_q8_0_bf16_plain
    launch_mmvq_gguf_q8_0_f16_plain launch_mmvq_gguf_q8_0_f32_plain
    launch_mmvq_gguf_quantize_q8_1_bf16 launch_mmvq_gguf_quantize_q8_1_f16
    launch_mmvq_gguf_quantize_q8_1_f32 moe_gemm_gguf moe_gemm_gguf_prefill moe_gemm_wmma
}
