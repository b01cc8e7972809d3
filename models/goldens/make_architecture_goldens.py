"""Makes the goldens of the architectures: logits of tiny random models of every family.

Transformers computes them in f32.

    PYTHONPATH=LLAMA_CPP/gguf-py:LLAMA_CPP python make_architecture_goldens.py OUT_FOLDER [NAME…]

LLAMA_CPP is `vendor/llama.cpp` of the unpacked sdist llama_cpp_python==0.3.36: its converter says
what each family's GGUF file looks like. Weights are not stored: they follow from the tensors' names
(see `weights`), here and in the tests. With names, only those cases are made; others stay.
"""

import hashlib
import json
import pathlib
import platform
import sys
import tempfile

import gguf
import numpy
import safetensors.torch
import torch
import transformers
from conversion import get_model_class
from conversion.mistral3 import Mistral3Model
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Mistral4ForCausalLM,
)

TOKENS, VOCABULARY = 40, 48
SHAPE = dict(
    vocab_size=VOCABULARY,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
)


# Some families' usual ids are outside of the vocabulary.
NO_IDS = dict(pad_token_id=None, bos_token_id=None, eos_token_id=None)


def rope(kind, theta=10_000.0, **more):
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **more}}


def long_rope(original, pairs=8):
    short, long = [[1.0 + by * i for i in range(pairs)] for by in (0.05, 0.9)]
    return rope(
        "longrope",
        short_factor=short,
        long_factor=long,
        original_max_position_embeddings=original,
        factor=4.0,
    )


QWEN_TOWER = dict(
    depth=1, hidden_size=16, intermediate_size=24, num_heads=2, out_hidden_size=64, patch_size=4
)
QWEN3_TOWER = dict(QWEN_TOWER, deepstack_visual_indexes=[0], num_position_embeddings=16)


def experts(count, chosen, width=32):
    return dict(num_experts=count, num_experts_per_tok=chosen, moe_intermediate_size=width)


def delta_rule(key_heads, value_heads, dims=(16, 16), taps=4):
    return dict(
        linear_num_key_heads=key_heads,
        linear_num_value_heads=value_heads,
        linear_key_head_dim=dims[0],
        linear_value_head_dim=dims[1],
        linear_conv_kernel_dim=taps,
    )


def mamba(heads, groups, **more):
    return dict(
        mamba_n_heads=heads,
        mamba_d_head=2 * SHAPE["hidden_size"] // heads,
        mamba_n_groups=groups,
        mamba_d_state=16,
        mamba_chunk_size=8,
        **more,
    )


def layer_types(*types):
    return dict(layer_types=list(types))


def latent(query_rank, plain=16, rotated=8, value=12, rank=32):
    return dict(
        q_lora_rank=query_rank,
        kv_lora_rank=rank,
        qk_nope_head_dim=plain,
        qk_rope_head_dim=rotated,
        v_head_dim=value,
        num_key_value_heads=SHAPE["num_attention_heads"],
    )


def deep_experts(count, chosen, groups, kept, shared=1, width=32, **more):
    return dict(
        n_routed_experts=count,
        num_experts_per_tok=chosen,
        n_group=groups,
        topk_group=kept,
        n_shared_experts=shared,
        moe_intermediate_size=width,
        **more,
    )


def deep_yarn(mscale, all_dim, **more):
    return rope(
        "yarn",
        factor=4.0,
        original_max_position_embeddings=16,
        beta_fast=32.0,
        beta_slow=1.0,
        mscale=mscale,
        mscale_all_dim=all_dim,
        **more,
    )


# The sections are those of the axes of images.
MROPE = rope("default", partial_rotary_factor=0.25, mrope_section=[2, 1, 1], mrope_interleaved=True)
GRANITE = dict(
    embedding_multiplier=6.0,
    residual_multiplier=0.22,
    attention_multiplier=0.2,
    logits_scaling=3.0,
)
PHI = dict(original_max_position_embeddings=16, partial_rotary_factor=0.75) | NO_IDS
# A tiny tower for images. Their tokens are outside of the vocabulary.
TOWER = dict(
    vision_config=dict(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=28,
        patch_size=14,
    ),
    mm_tokens_per_image=4,
    image_token_index=50,
    boi_token_index=51,
    eoi_token_index=52,
)
# Settings beside the shape; every other layer has a window.
GPT_OSS = (
    dict(
        intermediate_size=32,
        num_hidden_layers=4,
        head_dim=16,
        sliding_window=8,
        num_local_experts=6,
        num_experts_per_tok=3,
    )
    | NO_IDS
)
GPT_OSS_ROPE = rope(
    "yarn",
    150_000.0,
    factor=4.0,
    beta_fast=32.0,
    beta_slow=1.0,
    truncate=False,
    original_max_position_embeddings=16,
)
GEMMA3_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1_000_000.0},
}

OLMO3_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 500_000.0},
    "full_attention": {
        "rope_type": "yarn",
        "rope_theta": 500_000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "attention_factor": 1.2,
    },
}

# name, model type, dtype of the weights, whether a GGUF file can say all of it, settings
CASES = [
    ("llama", "llama", "F32", True, {}),
    (
        "llama-biased-tied",
        "llama",
        "F32",
        False,
        dict(attention_bias=True, mlp_bias=True, tie_word_embeddings=True, num_key_value_heads=4),
    ),
    (
        "llama-head-size",
        "llama",
        "F16",
        True,
        dict(head_dim=24, num_key_value_heads=1, rms_norm_eps=1e-5),
    ),
    ("llama-linear", "llama", "F32", True, rope("linear", factor=4.0)),
    (
        "llama-llama3",
        "llama",
        "BF16",
        True,
        rope(
            "llama3",
            500_000.0,
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=16,
        ),
    ),
    (
        "llama-yarn",
        "llama",
        "F32",
        True,
        rope("yarn", factor=4.0, original_max_position_embeddings=16),
    ),
    (
        "llama-yarn-odd",
        "llama",
        "F32",
        False,
        rope(
            "yarn",
            factor=4.0,
            original_max_position_embeddings=16,
            beta_fast=2.0,
            beta_slow=0.5,
            attention_factor=1.3,
            truncate=False,
        ),
    ),
    (
        "llama-dynamic",
        "llama",
        "F32",
        False,
        rope("dynamic", factor=2.0) | dict(max_position_embeddings=24),
    ),
    ("llama-long", "llama", "F32", False, long_rope(16)),
    ("llama-short", "llama", "F32", False, long_rope(TOKENS)),
    ("mistral", "mistral", "F32", True, dict(sliding_window=None)),
    ("mistral-window", "mistral", "F16", False, dict(sliding_window=8, head_dim=32)),
    (
        "ministral",
        "ministral",
        "F32",
        False,
        dict(
            head_dim=16,
            sliding_window=8,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        ),
    ),
    (
        "ministral3",
        "ministral3",
        "F32",
        True,
        dict(head_dim=24) | deep_yarn(1.0, 1.0, llama_4_scaling_beta=0.1),
    ),
    ("qwen2", "qwen2", "BF16", True, dict(tie_word_embeddings=True) | rope("default", 1_000_000.0)),
    (
        "qwen2-window",
        "qwen2",
        "F32",
        False,
        dict(use_sliding_window=True, sliding_window=8, max_window_layers=1),
    ),
    (
        "qwen3",
        "qwen3",
        "BF16",
        True,
        dict(head_dim=32, tie_word_embeddings=True) | rope("default", 1_000_000.0),
    ),
    (
        "qwen3-yarn-window",
        "qwen3",
        "F32",
        False,
        dict(
            head_dim=16,
            attention_bias=True,
            use_sliding_window=True,
            sliding_window=8,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        )
        | rope("yarn", factor=4.0, original_max_position_embeddings=16),
    ),
    (
        "qwen3-moe",
        "qwen3_moe",
        "BF16",
        True,
        dict(head_dim=16, norm_topk_prob=True, **experts(8, 2)) | rope("default", 1_000_000.0),
    ),
    (
        "qwen3-moe-odd",
        "qwen3_moe",
        "F32",
        False,
        dict(head_dim=16, mlp_only_layers=[1], attention_bias=True, **experts(5, 3, 40)),
    ),
    (
        "qwen2-moe",
        "qwen2_moe",
        "F32",
        True,
        dict(shared_expert_intermediate_size=48, **experts(6, 2)),
    ),
    (
        "mixtral",
        "mixtral",
        "F16",
        True,
        dict(num_local_experts=4, num_experts_per_tok=2, num_hidden_layers=2),
    ),
    ("phi3", "phi3", "F32", True, dict(sliding_window=8) | rope("default") | PHI),
    ("phi3-long", "phi3", "BF16", True, dict(num_key_value_heads=4) | long_rope(16, 6) | PHI),
    ("granite", "granite", "F32", True, dict(tie_word_embeddings=True) | GRANITE),
    (
        "granite-moe",
        "granitemoe",
        "BF16",
        True,
        dict(num_local_experts=6, num_experts_per_tok=2, attention_bias=True) | GRANITE,
    ),
    ("smollm3", "smollm3", "F32", True, dict(num_hidden_layers=5) | NO_IDS),
    (
        "smollm3-window",
        "smollm3",
        "F32",
        False,
        dict(no_rope_layers=[0, 1, 0], use_sliding_window=True, sliding_window=8) | NO_IDS,
    ),
    (
        "gemma2",
        "gemma2",
        "F32",
        True,
        dict(
            head_dim=16,
            query_pre_attn_scalar=16,
            sliding_window=8,
            attn_logit_softcapping=5.0,
            final_logit_softcapping=3.0,
        ),
    ),
    (
        "gemma3",
        "gemma3_text",
        "BF16",
        True,
        dict(
            head_dim=32,
            query_pre_attn_scalar=32,
            sliding_window=8,
            num_hidden_layers=7,
            num_key_value_heads=1,
        ),
    ),
    (
        "gemma3-odd",
        "gemma3_text",
        "F32",
        False,
        dict(
            head_dim=16,
            query_pre_attn_scalar=24,
            sliding_window=8,
            attention_bias=True,
            final_logit_softcapping=3.0,
            tie_word_embeddings=False,
            layer_types=["full_attention", "sliding_attention", "full_attention"],
            rope_parameters=GEMMA3_ROPE,
        ),
    ),
    (
        "lfm2",
        "lfm2",
        "F32",
        True,
        dict(num_hidden_layers=4, block_multiple_of=32)
        | layer_types("conv", "full_attention", "conv", "conv"),
    ),
    (
        "lfm2-exact-width",
        "lfm2",
        "BF16",
        True,
        dict(conv_L_cache=5, block_auto_adjust_ff_dim=False, tie_word_embeddings=False)
        | layer_types("full_attention", "conv", "full_attention"),
    ),
    ("lfm2-recurrent", "lfm2", "F32", False, layer_types(*["conv"] * 3)),
    (
        "qwen3.5",
        "qwen3_5_text",
        "F32",
        True,
        dict(num_hidden_layers=4, head_dim=32, **delta_rule(2, 4)) | MROPE,
    ),
    (
        "qwen3.5-odd",
        "qwen3_5_text",
        "BF16",
        False,
        dict(head_dim=16, tie_word_embeddings=True, **delta_rule(3, 3, (8, 24), 3))
        | layer_types("full_attention", "linear_attention", "linear_attention")
        | rope("default", partial_rotary_factor=0.5),
    ),
    (
        "qwen3.5-biased",
        "qwen3_5_text",
        "F32",
        False,
        dict(head_dim=16, attention_bias=True, **delta_rule(2, 2))
        | layer_types("full_attention", "linear_attention", "full_attention")
        | rope("default", partial_rotary_factor=0.5),
    ),
    (
        "qwen3.5-moe",
        "qwen3_5_moe_text",
        "BF16",
        True,
        dict(
            num_hidden_layers=4,
            head_dim=32,
            shared_expert_intermediate_size=48,
            **delta_rule(2, 4),
            **experts(6, 2),
        )
        | MROPE,
    ),
    (
        "qwen3-next",
        "qwen3_next",
        "BF16",
        True,
        dict(
            num_hidden_layers=4,
            head_dim=32,
            shared_expert_intermediate_size=48,
            **delta_rule(2, 4, (16, 16)),
            **experts(6, 2),
        )
        | rope("default", 1_000_000.0, partial_rotary_factor=0.25),
    ),
    (
        "qwen3-next-dense",
        "qwen3_next",
        "F32",
        False,
        dict(
            head_dim=16,
            mlp_only_layers=[1],
            norm_topk_prob=False,
            shared_expert_intermediate_size=24,
            **delta_rule(3, 3, (8, 24), 3),
            **experts(5, 3),
        )
        | layer_types("linear_attention", "full_attention", "linear_attention")
        | rope("default", partial_rotary_factor=0.5),
    ),
    (
        "lfm2-moe",
        "lfm2_moe",
        "F32",
        True,
        dict(num_hidden_layers=4, num_dense_layers=1, **experts(8, 3))
        | layer_types("conv", "full_attention", "conv", "conv"),
    ),
    (
        "lfm2-moe-scaled",
        "lfm2_moe",
        "BF16",
        False,
        dict(
            conv_L_cache=4,
            num_dense_layers=0,
            routed_scaling_factor=1.5,
            norm_topk_prob=False,
            tie_word_embeddings=False,
            **experts(4, 2),
        )
        | layer_types("full_attention", "conv", "full_attention"),
    ),
    (
        "glm4-moe",
        "glm4_moe",
        "BF16",
        True,
        dict(
            head_dim=16,
            use_qk_norm=True,
            attention_bias=True,
            routed_scaling_factor=1.5,
            n_routed_experts=8,
            num_experts_per_tok=3,
            moe_intermediate_size=32,
        )
        | rope("default", 1_000_000.0, partial_rotary_factor=0.5),
    ),
    (
        "glm4-moe-groups",
        "glm4_moe",
        "F32",
        True,
        dict(
            head_dim=32,
            n_group=4,
            topk_group=2,
            n_shared_experts=2,
            norm_topk_prob=False,
            first_k_dense_replace=2,
            n_routed_experts=12,
            num_experts_per_tok=4,
            moe_intermediate_size=24,
            num_hidden_layers=4,
        )
        | rope("default", partial_rotary_factor=0.5),
    ),
    (
        "granite-hybrid",
        "granitemoehybrid",
        "F32",
        True,
        dict(
            num_hidden_layers=4,
            num_local_experts=6,
            num_experts_per_tok=2,
            shared_intermediate_size=48,
            position_embedding_type="nope",
            **mamba(8, 2),
        )
        | layer_types("mamba", "mamba", "attention", "mamba")
        | GRANITE,
    ),
    (
        "granite-hybrid-dense",
        "granitemoehybrid",
        "BF16",
        True,
        dict(
            num_local_experts=0,
            shared_intermediate_size=96,
            tie_word_embeddings=True,
            **mamba(4, 1, mamba_conv_bias=False, mamba_d_conv=3),
        )
        | layer_types("attention", "mamba", "mamba")
        | GRANITE,
    ),
    (
        "granite-hybrid-rotated",
        "granitemoehybrid",
        "F32",
        False,
        dict(
            num_local_experts=4,
            num_experts_per_tok=3,
            shared_intermediate_size=40,
            attention_bias=True,
            position_embedding_type="rope",
            **mamba(2, 2),
        )
        | layer_types("mamba", "attention", "attention")
        | GRANITE,
    ),
    (
        "granite-hybrid-attention",
        "granitemoehybrid",
        "F32",
        True,
        dict(
            num_local_experts=0,
            num_experts_per_tok=0,
            shared_intermediate_size=72,
            position_embedding_type="rope",
            **mamba(8, 2),
        )
        | layer_types("attention", "attention", "attention")
        | GRANITE,
    ),
    (
        "deepseek-v2",
        "deepseek_v2",
        "F32",
        True,
        dict(
            topk_method="group_limited_greedy",
            routed_scaling_factor=2.0,
            first_k_dense_replace=1,
            **latent(None),
            **deep_experts(12, 4, 4, 2, shared=2, width=24, scoring_func="softmax"),
        )
        | deep_yarn(0.707, 0.707),
    ),
    (
        "deepseek-v2-greedy",
        "deepseek_v2",
        "BF16",
        False,
        dict(
            topk_method="greedy",
            tie_word_embeddings=True,
            **latent(32, plain=8, rotated=4, value=16, rank=16),
            **deep_experts(6, 2, None, None),
        )
        | deep_yarn(1.0, 0.5),
    ),
    (
        "deepseek-v3",
        "deepseek_v3",
        "BF16",
        True,
        dict(
            topk_method="noaux_tc",
            first_k_dense_replace=1,
            **latent(32),
            **deep_experts(12, 4, 4, 2, scoring_func="sigmoid"),
        )
        | deep_yarn(1.0, 1.0),
    ),
    (
        "deepseek-v3-odd",
        "deepseek_v3",
        "F32",
        False,
        dict(
            first_k_dense_replace=2,
            norm_topk_prob=False,
            rope_interleave=False,
            rms_norm_eps=1e-5,
            **latent(None, plain=8, rotated=16, value=8, rank=48),
            **deep_experts(6, 3, 1, 1),
        )
        | rope("default", 500_000.0),
    ),
    (
        "glm4-moe-lite",
        "glm4_moe_lite",
        "BF16",
        True,
        dict(
            first_k_dense_replace=1,
            **latent(40, plain=12, rotated=8, value=20),
            **deep_experts(8, 3, 1, 1, scoring_func="sigmoid"),
        )
        | rope("default", 1_000_000.0),
    ),
    (
        "glm4-moe-lite-biased",
        "glm4_moe_lite",
        "F32",
        False,
        dict(
            attention_bias=True,
            mlp_layer_types=["sparse", "dense", "sparse"],
            **latent(24, plain=8, rotated=4, value=16, rank=16),
            **deep_experts(6, 2, 1, 1),
        )
        | rope("default", 500_000.0),
    ),
    (
        "mistral4",
        "mistral4",
        "F32",
        True,
        dict(**latent(32), **deep_experts(8, 2, 1, 1, routed_scaling_factor=1.5))
        | deep_yarn(1.0, 1.0, llama_4_scaling_beta=0.1),
    ),
    ("olmo2", "olmo2", "F32", True, rope("default", 500_000.0) | NO_IDS),
    (
        "olmo2-odd",
        "olmo2",
        "BF16",
        False,
        dict(attention_bias=True, tie_word_embeddings=True, num_key_value_heads=1)
        | rope("linear", factor=2.0)
        | NO_IDS,
    ),
    (
        "olmo3",
        "olmo3",
        "BF16",
        True,
        dict(num_hidden_layers=5, sliding_window=8, rope_parameters=OLMO3_ROPE) | NO_IDS,
    ),
    (
        "olmo3-odd",
        "olmo3",
        "F32",
        False,
        dict(sliding_window=6, attention_bias=True, num_key_value_heads=4)
        | layer_types("full_attention", "sliding_attention", "sliding_attention")
        | NO_IDS,
    ),
    ("gpt-oss", "gpt_oss", "F32", True, GPT_OSS | GPT_OSS_ROPE),
    ("gpt-oss-mxfp4", "gpt_oss", "BF16", True, GPT_OSS | GPT_OSS_ROPE),
    (
        "gpt-oss-odd",
        "gpt_oss",
        "BF16",
        False,
        GPT_OSS
        | dict(attention_bias=False, swiglu_alpha=1.3, swiglu_limit=1.5, num_hidden_layers=3)
        | layer_types("full_attention", "sliding_attention", "sliding_attention")
        | rope("linear", factor=2.0),
    ),
    (
        "gemma3-tower",
        "gemma3",
        "F32",
        False,
        dict(
            text_config=SHAPE
            | dict(
                head_dim=16,
                query_pre_attn_scalar=16,
                sliding_window=8,
                layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            ),
            **TOWER,
        ),
    ),
]

# Heads of K with a window and without one differ in number and in size.
GEMMA4 = (
    layer_types(*["sliding_attention"] * 3, "full_attention")
    | dict(
        num_hidden_layers=4,
        head_dim=16,
        num_key_value_heads=4,
        global_head_dim=32,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        hidden_size_per_layer_input=0,
        sliding_window=8,
        final_logit_softcapping=8.0,
    )
    | NO_IDS
)
# The last layers have no K and V of their own, and an MLP of twice the width.
GEMMA4_INPUTS = (
    layer_types(*(["sliding_attention"] * 3 + ["full_attention"]) * 2)
    | dict(
        num_hidden_layers=8,
        head_dim=16,
        num_key_value_heads=2,
        global_head_dim=32,
        num_kv_shared_layers=4,
        use_double_wide_mlp=True,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=VOCABULARY,
        sliding_window=8,
    )
    | NO_IDS
)
GEMMA4_EXPERTS = dict(
    enable_moe_block=True, num_experts=6, top_k_experts=2, moe_intermediate_size=32
)
# One layer of each kind shares the K and V of the only other; the rotation turns a third.
GEMMA4_ODD = (
    layer_types("full_attention", "sliding_attention", "sliding_attention", "full_attention")
    | dict(
        num_hidden_layers=4,
        head_dim=8,
        num_key_value_heads=2,
        global_head_dim=24,
        num_kv_shared_layers=2,
        hidden_size_per_layer_input=12,
        vocab_size_per_layer_input=VOCABULARY + 3,
        sliding_window=5,
        tie_word_embeddings=False,
        rope_parameters={
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": 50_000.0,
                "partial_rotary_factor": 0.34,
                "factor": 2.0,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        },
        **GEMMA4_EXPERTS,
    )
    | NO_IDS
)
# Neither width of K, 40 with a window and 24 without one, divides the other.
GEMMA4_UNEVEN = (
    layer_types(*("full_attention" if at in (2, 4) else "sliding_attention" for at in range(5)))
    | dict(
        num_hidden_layers=5,
        head_dim=20,
        global_head_dim=24,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        attention_bias=True,
        hidden_size_per_layer_input=0,
        sliding_window=8,
    )
    | NO_IDS
)
GEMMA4_TOWERS = dict(
    vision_config=dict(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        position_embedding_size=8,
    ),
    audio_config=None,
)
CASES += [
    ("gemma4", "gemma4_text", "BF16", True, GEMMA4),
    ("gemma4-inputs", "gemma4_text", "F32", True, GEMMA4_INPUTS),
    ("gemma4-experts", "gemma4_text", "F32", True, GEMMA4 | GEMMA4_EXPERTS),
    ("gemma4-odd", "gemma4_text", "F32", False, GEMMA4_ODD),
    ("gemma4-uneven", "gemma4_text", "F32", False, GEMMA4_UNEVEN),
    (
        "gemma4-unified",
        "gemma4_unified_text",
        "F32",
        False,
        {key: value for key, value in GEMMA4.items() if "per_layer" not in key},
    ),
    (
        "gemma4-tower",
        "gemma4",
        "F32",
        False,
        dict(text_config=SHAPE | GEMMA4 | dict(pad_token_id=0), **GEMMA4_TOWERS),
    ),
    (
        "qwen2.5-vl",
        "qwen2_5_vl",
        "BF16",
        True,
        dict(
            text_config=SHAPE | NO_IDS | rope("default", 1_000_000.0, mrope_section=[2, 3, 3]),
            vision_config=dict(QWEN_TOWER, fullatt_block_indexes=[0], window_size=28),
        ),
    ),
    (
        "qwen3-vl",
        "qwen3_vl",
        "F32",
        True,
        dict(
            text_config=SHAPE
            | NO_IDS
            | dict(head_dim=32)
            | rope("default", 5_000_000.0, mrope_section=[6, 5, 5], mrope_interleaved=True),
            vision_config=QWEN3_TOWER,
        ),
    ),
    (
        "qwen3-vl-moe",
        "qwen3_vl_moe",
        "BF16",
        False,
        dict(
            text_config=SHAPE
            | NO_IDS
            | dict(decoder_sparse_step=2, **experts(4, 2))
            | rope("default", mrope_section=[4, 2, 2]),
            vision_config=QWEN3_TOWER,
        ),
    ),
    (
        # As the releases are stored, by versions of transformers before 5.
        "qwen3-vl-moe-transposed",
        "qwen3_vl_moe",
        "BF16",
        False,
        dict(
            text_config=SHAPE
            | NO_IDS
            | dict(head_dim=16, norm_topk_prob=False, decoder_sparse_step=2, **experts(6, 2, 48))
            | rope("default", 5_000_000.0, mrope_section=[4, 2, 2], mrope_interleaved=True),
            vision_config=QWEN3_TOWER,
        ),
    ),
]


def random(name, count):
    """Uniform in [-1, 1): SplitMix64 (Steele, Lea, Flood 2014) seeded by the FNV-1a hash of the name, 24 bits of each."""
    seed = 0xCBF29CE484222325
    for byte in name.encode():
        seed = (seed ^ byte) * 0x100000001B3 % 2**64
    mixed = numpy.arange(1, count + 1, dtype=numpy.uint64) * numpy.uint64(
        0x9E3779B97F4A7C15
    ) + numpy.uint64(seed)
    mixed = (mixed ^ (mixed >> numpy.uint64(30))) * numpy.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> numpy.uint64(27))) * numpy.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> numpy.uint64(31)
    return ((mixed >> numpy.uint64(40)).astype(numpy.float64) / 2**23 - 1).astype(numpy.float32)


def weights(name, shape, dtype, family):
    """Activations keep their size and attention is not flat; norms are around one, which Gemma stores as zero."""
    if name.endswith(("_blocks", "_scales")):
        values = ((random(name, numpy.prod(shape)) + 1) * 128).astype(numpy.uint8)
        if name.endswith("_scales"):
            values = 121 + values % 4  # powers of two that are of use
        return torch.from_numpy(values.reshape(shape))
    if name.endswith("q_a_proj.weight"):
        # Small beside the epsilon of the norm behind it.
        scale, shift = numpy.float32(0.05) / numpy.sqrt(numpy.float32(shape[1])), numpy.float32(0)
    elif name.endswith("_proj.weight"):
        scale, shift = numpy.float32(2.5) / numpy.sqrt(numpy.float32(shape[1])), numpy.float32(0)
    elif family.startswith("gemma4") and name.endswith(
        ("norm.weight", "norm_1.weight", "norm_2.weight", "layer_scalar", "scale")
    ):
        scale, shift = numpy.float32(0.2), numpy.float32(1)
    elif name.endswith("norm.weight"):
        less_one = family.startswith("gemma") or (
            family.startswith(("qwen3_5", "qwen3_next"))
            and not name.endswith("linear_attn.norm.weight")
        )
        scale, shift = numpy.float32(0.2), numpy.float32(0 if less_one else 1)
    elif name.endswith("A_log"):
        scale, shift = numpy.float32(1), numpy.float32(-3)  # a state lasts for some ten tokens
    elif name.endswith("sinks"):
        scale, shift = numpy.float32(2), numpy.float32(0)
    else:
        scale, shift = numpy.float32(0.5), numpy.float32(0)
    values = random(name, numpy.prod(shape)) * scale + shift
    return torch.from_numpy(values.reshape(shape)).to(
        {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[dtype]
    )


def in_mxfp4(shapes):
    """The shapes of the same tensors, where those of experts are [experts, rows, columns / 32, 16] codes and as many scales."""
    found = {}
    for name, shape in shapes.items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, columns, rows = shape
            found[f"{name}_blocks"] = [experts, rows, columns // 32, 16]
            found[f"{name}_scales"] = [experts, rows, columns // 32]
        else:
            found[name] = shape
    return found


def older_lfm2(config):
    types = config.pop("layer_types")
    return config | dict(
        full_attn_idxs=[at for at, kind in enumerate(types) if kind == "full_attention"],
        block_ff_dim=config.pop("intermediate_size"),
        tie_embedding=config.pop("tie_word_embeddings"),
        block_dim=config["hidden_size"],
        conv_dim=config["hidden_size"],
        num_heads=config["num_attention_heads"],
        block_norm_eps=config["norm_eps"],
        block_use_swiglu=True,
        block_mlp_init_scale=1.0,
    )


def older_gemma4(config):
    full = list(config.pop("per_layer_config").values())[0]
    return config | dict(
        global_head_dim=full["head_dim"],
        num_global_key_value_heads=full.get("num_key_value_heads"),
    )


# The words that versions before 5 had for the types of layers.
OLDER_TYPES = {"linear_attention": "mamba", "full_attention": "attention"}


def older_hybrid(config):
    config.pop("time_step_limit", None)
    return config | dict(layer_types=[OLDER_TYPES[kind] for kind in config["layer_types"]])


def older(config):
    """The same settings as versions of transformers before 5 wrote them."""
    config = dict(config)
    if "dtype" in config:
        config["torch_dtype"] = config.pop("dtype")
    if "text_config" in config:
        text = older(config["text_config"])
        if config["model_type"] in ("qwen2_vl", "qwen2_5_vl"):
            # One object had all settings.
            text["rope_scaling"]["type"] = "mrope"
            return text | {key: value for key, value in config.items() if key != "text_config"}
        return config | {"text_config": text}
    if config["model_type"] == "lfm2":
        config = older_lfm2(config)
    if config["model_type"] == "granitemoehybrid":
        config = older_hybrid(config)
    if config["model_type"].startswith("gemma4"):
        return older_gemma4(config)  # its rotations have one layout
    parameters = config.pop("rope_parameters")
    nested = "full_attention" in parameters
    if nested:
        theta, parameters = (
            parameters["sliding_attention"]["rope_theta"],
            parameters["full_attention"],
        )
        if config["model_type"] != "olmo3":  # its layers have one base
            config["rope_local_base_freq"] = theta
    config["rope_theta"] = parameters["rope_theta"]
    scaling = {
        key: value for key, value in parameters.items() if key not in ("rope_theta", "rope_type")
    }
    if "partial_rotary_factor" in scaling and config["model_type"] != "phi3":
        config["partial_rotary_factor"] = scaling.pop("partial_rotary_factor")
    kind = "rope_type" if nested else "type"
    config["rope_scaling"] = {kind: parameters["rope_type"], **scaling} if scaling else None
    if (
        "max_window_layers" in config
        and config["layer_types"] == ["full_attention"] + ["sliding_attention"] * 2
    ):
        del config["layer_types"]
    if pattern := config.pop("_sliding_window_pattern", None):
        config["sliding_window_pattern"] = pattern
        if config["num_hidden_layers"] >= pattern:
            del config["layer_types"]
    return config


def class_of(kind):
    if kind == "mistral4":
        return Mistral4ForCausalLM  # releases have it only inside of a model that reads images
    return AutoModelForImageTextToText if "_vl" in kind else AutoModelForCausalLM


def model_of(folder):
    """The model in f32; transformers' own initial values must not survive anywhere."""
    kind = json.loads((folder / "config.json").read_text())["model_type"]
    model, report = class_of(kind).from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"], report
    return model.float().eval()  # MXFP4 becomes bf16, which is exact


def logits(model, tokens):
    with torch.inference_mode():
        return model(torch.tensor([tokens]), use_cache=False).logits[0].float()


def step_by_step(model, tokens):
    cache = transformers.DynamicCache(config=model.config)
    with torch.inference_mode():
        return torch.stack(
            [
                model(torch.tensor([[token]]), past_key_values=cache).logits[0, 0].float()
                for token in tokens
            ]
        )


def converted(folder, heads=False):
    """The output of the converter: metadata of the architecture, tensors it adds, digests of all tensors. `heads`: whether the model has heads that predict further tokens."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "tokenizer.json").write_text(
        json.dumps({"model": {"vocab": {str(n): n for n in range(VOCABULARY)}}, "added_tokens": []})
    )
    written = json.dumps(config)
    if config["model_type"] == "granitemoehybrid":
        # The converter knows the older words only.
        (folder / "config.json").write_text(json.dumps(older_hybrid(config)))
    if config["model_type"] == "mistral4":
        converter = Mistral3Model.Mistral4Model
    elif config["model_type"] == "ministral3":
        converter = Mistral3Model.Ministral3Model
    else:
        converter = get_model_class(config["architectures"][0], mmproj=False)
    converter.no_mtp = not heads
    out = folder / "model.gguf"
    writer = type(
        "Writer", (converter,), {"set_vocab": lambda self: None, "model_arch": converter.model_arch}
    )(folder, gguf.LlamaFileType.ALL_F32, out)
    writer.write()
    (folder / "config.json").write_text(written)
    reader = gguf.GGUFReader(out)
    metadata = {
        key: field.contents()
        for key, field in reader.fields.items()
        if not key.startswith(("GGUF.", "general.")) or key == "general.architecture"
    }
    tensors = {tensor.name: tensor.data for tensor in reader.tensors}
    extra = {
        name: data.reshape(-1).tolist()
        for name, data in tensors.items()
        if name.startswith("rope") or name.endswith("ssm_a")
    }
    digests = {
        name: hashlib.sha256(data.tobytes()).hexdigest()[:16] for name, data in tensors.items()
    }
    return {"metadata": metadata, "extra": extra, "digests": digests}


def case(name, kind, dtype, in_gguf, settings, folder):
    shape = {} if "text_config" in settings else dict(SHAPE)
    if kind == "qwen3_5_moe_text":
        del shape["intermediate_size"]  # no layer has a dense MLP
    config = AutoConfig.for_model(kind, **(shape | settings))
    config.dtype = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}[dtype]
    empty = class_of(kind)(config) if kind == "mistral4" else class_of(kind).from_config(config)
    empty.save_pretrained(folder)
    shapes = {
        key: list(value.shape)
        for key, value in safetensors.torch.load_file(folder / "model.safetensors").items()
    }
    if name.endswith("mxfp4"):
        shapes = in_mxfp4(shapes)
    if name.endswith("transposed"):
        shapes = {
            key: [shape[0], shape[2], shape[1]] if ".experts." in key else shape
            for key, shape in shapes.items()
        }
    tensors = {key: weights(key, shape, dtype, kind) for key, shape in shapes.items()}
    safetensors.torch.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    written = json.loads((folder / "config.json").read_text())
    if name.endswith("mxfp4"):
        written["quantization_config"] = {
            "quant_method": "mxfp4",
            "modules_to_not_convert": [
                "model.layers.*.self_attn",
                "model.layers.*.mlp.router",
                "model.embed_tokens",
                "lm_head",
            ],
        }
        (folder / "config.json").write_text(json.dumps(written))
    tokens = [(n * 31 + 5 + n // 7) % VOCABULARY for n in range(TOKENS)]
    gguf = converted(folder) if in_gguf else None
    # These rotations depend on the length: "NTK" changes as it grows, LongRoPE is as in one pass
    # over the whole.
    compute = step_by_step if "dynamic" in name else logits
    want = compute(model_of(folder), tokens)
    # The reference's cache asks for a layer with attention.
    if not any(kind in name for kind in ("dynamic", "long", "recurrent")):
        assert (
            step_by_step(model_of(folder), tokens) - want
        ).abs().max() < 1e-5 * want.abs().max(), name
    (folder / "config.json").write_text(json.dumps(older(written)))
    assert torch.equal(
        compute(model_of(folder), tokens), want
    ), f"{name}: the older config says something else"
    return want, {
        "name": name,
        "dtype": dtype,
        "config": written,
        "older_config": older(written),
        "tensors": shapes,
        "tokens": tokens,
        "gguf": gguf,
    }


# Bytes of a block, and where its 16-bit floats are.
BLOCKS = dict(
    Q4_0=(18, [0]),
    Q4_1=(20, [0, 2]),
    Q5_0=(22, [0]),
    Q5_1=(24, [0, 2]),
    Q8_0=(34, [0]),
    Q2_K=(84, [80, 82]),
    Q3_K=(110, [108]),
    Q4_K=(144, [0, 2]),
    Q5_K=(176, [0, 2]),
    Q6_K=(210, [208]),
    IQ4_NL=(18, [0]),
    IQ4_XS=(136, [0]),
    IQ3_S=(110, [0]),
    IQ3_XXS=(98, [0]),
    IQ2_S=(82, [0]),
    IQ2_XS=(74, [0]),
    IQ2_XXS=(66, [0]),
    IQ1_S=(50, [0]),
    IQ1_M=(56, []),
    MXFP4=(17, []),
    TQ1_0=(54, [52]),
    TQ2_0=(66, [64]),
    F16=(2, [0]),
    BF16=(2, []),
)
ROWS, COLUMNS = 3, 512


def blocks():
    """Random blocks of every format, with the values that the `gguf` package reads in them."""
    found = {}
    for name, (size, floats) in BLOCKS.items():
        kind = gguf.GGMLQuantizationType[name]
        per_block, type_size = gguf.GGML_QUANT_SIZES[kind]
        assert type_size == size
        count = ROWS * COLUMNS // per_block
        raw = ((random(name, count * size) + 1) * 128).astype(numpy.uint8).reshape(count, size)
        if name == "BF16":
            raw[:, 1] &= 0xBF  # neither infinite nor NaN
        if name == "IQ1_M":
            raw[:, 55] &= 0xBF  # the same of its 16-bit float
        if name == "MXFP4":
            raw[:, 0] = 120 + raw[:, 0] % 8  # powers of two that are of use
        for at in floats:
            raw[:, at : at + 2] = (
                random(f"{name}.{at}", count).astype(numpy.float16)[:, None].view(numpy.uint8)
            )
        raw = raw.reshape(ROWS, -1)
        found[f"{name}.raw"] = torch.from_numpy(raw.copy())
        found[f"{name}.values"] = torch.from_numpy(
            gguf.dequantize(raw, kind).astype(numpy.float32).reshape(ROWS, COLUMNS)
        )
    return found


def main(out, names):
    torch.use_deterministic_algorithms(True)
    wanted, cases, kept = {}, [], {}
    if names:
        wanted = safetensors.torch.load_file(out / "architectures.safetensors")
        stored = json.loads((out / "architectures.json").read_text())["cases"]
        kept = {case["name"]: case for case in stored if case["name"] not in names}
    for settings in CASES:
        if settings[0] in kept:
            cases.append(kept[settings[0]])
            continue
        with tempfile.TemporaryDirectory() as folder:
            wanted[settings[0]], described = case(*settings, pathlib.Path(folder))
            cases.append(described)
    made_with = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "llama_cpp_python": "0.3.36",
    }
    safetensors.torch.save_file(wanted, out / "architectures.safetensors")
    safetensors.torch.save_file(blocks(), out / "blocks.safetensors")
    lines = ",\n".join(json.dumps(described, separators=(",", ":")) for described in cases)
    (out / "architectures.json").write_text(
        f'{{"made_with":{json.dumps(made_with)},"cases":[\n{lines}\n]}}\n'
    )


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), sys.argv[2:])
