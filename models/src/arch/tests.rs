//! Hugging Face configs as its own tools write them, in every layout that has been in use.

use super::from_hf;
use crate::config::{KvHeads, QueryGrowth, RopeScaling, RouterScoring};
use crate::loader::quantised::{CodeLayout, Quantisation};
use crate::{ModelConfig, Result};
use serde_json::{Value, json};
use std::path::Path;

/// The usual config with the members of `more` in place of its own; `"absent"` removes one.
fn usual(more: &Value) -> Value {
    let mut config = json!({
        "model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8, "hidden_act": "silu", "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0, "max_position_embeddings": 2048, "tie_word_embeddings": false, "torch_dtype": "float32",
    });
    for (key, value) in more.as_object().unwrap() {
        config[key] = value.clone();
    }
    config.as_object_mut().unwrap().retain(|_, value| value != "absent");
    config
}

fn parse(config: &Value) -> Result<ModelConfig> {
    from_hf(Path::new("config.json"), config.to_string().as_bytes()).map(|spec| spec.config)
}

fn read(more: &Value) -> Result<ModelConfig> {
    parse(&usual(more))
}

/// The config that the publisher's releases have, and the same without what they leave to be usual.
#[test]
fn the_config_of_gpt_oss_is_understood() {
    let mut release = json!({
        "architectures": ["GptOssForCausalLM"], "attention_bias": true, "attention_dropout": 0.0,
        "eos_token_id": 200_002, "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu",
        "hidden_size": 2880, "initial_context_length": 4096, "initializer_range": 0.02,
        "intermediate_size": 2880,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "max_position_embeddings": 131_072, "model_type": "gpt_oss", "num_attention_heads": 64,
        "num_experts_per_tok": 4, "num_hidden_layers": 3, "num_key_value_heads": 8,
        "num_local_experts": 32, "output_router_logits": false, "pad_token_id": 199_999,
        "quantization_config": { "modules_to_not_convert": ["lm_head"], "quant_method": "mxfp4" },
        "rms_norm_eps": 1e-5, "router_aux_loss_coef": 0.9, "sliding_window": 128,
        "swiglu_limit": 7.0,
        "rope_scaling": { "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0,
            "rope_type": "yarn", "original_max_position_embeddings": 4096, "truncate": false },
        "rope_theta": 150_000, "tie_word_embeddings": false, "use_cache": true,
        "vocab_size": 201_088,
    });
    let config = parse(&release).unwrap();
    let sliding = config.sliding.clone().unwrap();
    assert_eq!((sliding.window, sliding.layers), (128, vec![true, false, true]));
    let mixture = config.mixture.clone().unwrap();
    assert_eq!((mixture.experts, mixture.chosen, mixture.normalise), (32, 4, true));
    assert_eq!(config.max_positions, 131_072);
    for key in ["layer_types", "rope_scaling", "rope_theta", "sliding_window", "attention_bias"] {
        release.as_object_mut().unwrap().remove(key);
        assert_eq!(parse(&release).unwrap(), config, "without {key}");
    }
    let refused = |key: &str, value: Value| {
        let mut config = release.clone();
        config[key] = value;
        parse(&config).unwrap_err().to_string()
    };
    assert!(refused("experts_per_token", json!(2)).contains("differs from `num_experts_per_tok`"));
    assert!(refused("swiglu_limit", json!(-1.0)).contains("must be positive"));
    assert!(refused("quantization_config", json!({"quant_method": "hqq"})).contains("by hqq"));
    assert!(read(&json!({"quantization_config": {"quant_method": "mxfp4"}})).is_err());
}

#[test]
fn one_model_may_be_described_in_many_ways() {
    let check = |one: Value, other: Value| {
        assert_eq!(read(&one).unwrap(), read(&other).unwrap(), "{one} and {other}");
    };
    for same in [
        json!({ "head_dim": "absent" }),
        json!({ "head_dim": null }),
        json!({ "num_key_value_heads": "absent" }),
        json!({ "num_key_value_heads": null }),
        json!({ "tie_word_embeddings": "absent" }),
        json!({ "rms_norm_eps": "absent" }),
        json!({ "hidden_act": "absent" }),
        json!({ "rope_theta": "absent" }),
        json!({ "rope_scaling": null }),
        json!({ "rope_scaling": { "type": "default" } }),
        json!({ "rope_parameters": null }),
        json!({ "rope_theta": "absent", "rope_parameters": { "rope_type": "default", "rope_theta": 10000.0 } }),
        json!({ "rope_theta": "absent", "rope_parameters": { "rope_type": "default" } }),
        json!({ "torch_dtype": "absent", "dtype": "bfloat16" }),
        json!({ "dtype": "float16" }),
        json!({ "sliding_window": null }),
        json!({ "pad_token_id": null, "eos_token_id": [1, 2], "use_cache": true, "attention_bias": false }),
    ] {
        check(json!({}), same);
    }
    let scaled = json!({
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    });
    let mut newer = scaled.clone();
    newer["rope_theta"] = json!(500_000.0);
    check(
        json!({ "rope_theta": 500_000.0, "rope_scaling": scaled }),
        json!({ "rope_theta": "absent", "rope_parameters": newer }),
    );
    check(
        json!({ "rope_theta": 7.0 }),
        json!({ "rope_theta": 9.0, "rope_parameters": { "rope_theta": 7.0 } }),
    );
    let windowed = |more: Value| {
        let mut config = json!({ "model_type": "mistral" });
        config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        config
    };
    check(windowed(json!({})), windowed(json!({ "sliding_window": 4096 })));
    check(windowed(json!({ "sliding_window": null })), json!({}));
}

/// The keys that `save_pretrained` of transformers 5.23 writes beside the sizes.
#[test]
fn configs_as_transformers_writes_them_are_understood() {
    let default = json!({ "rope_theta": 10000.0, "rope_type": "default" });
    let qwen = json!({
        "layer_types": ["full_attention", "sliding_attention"], "max_window_layers": 1, "sliding_window": 8,
        "use_sliding_window": true,
    });
    let gemma = json!({
        "attention_bias": false, "hidden_act": "absent", "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 256, "sliding_window": 8,
        "use_bidirectional_attention": null, "tie_word_embeddings": true,
    });
    let softcaps = json!({ "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0 });
    let no_softcaps = json!({ "attn_logit_softcapping": null, "final_logit_softcapping": null });
    let both = json!({
        "_sliding_window_pattern": 6, "use_bidirectional_attention": false,
        "rope_parameters": { "full_attention": { "rope_theta": 1e6, "rope_type": "default" }, "sliding_attention": default },
    });
    let biases = json!({ "attention_bias": false, "mlp_bias": false, "pretraining_tp": 1 });
    for (kind, parts, window) in [
        ("llama", vec![&biases], None),
        ("mistral", vec![&json!({ "sliding_window": 8 })], Some(vec![true, true])),
        ("qwen2", vec![&json!({ "head_dim": "absent" }), &qwen], Some(vec![false, true])),
        ("qwen3", vec![&json!({ "attention_bias": false }), &qwen], Some(vec![false, true])),
        ("gemma2", vec![&gemma, &softcaps], Some(vec![true, false])),
        ("gemma3_text", vec![&gemma, &no_softcaps, &both], Some(vec![true, false])),
    ] {
        let mut config = json!({
            "model_type": kind, "architectures": ["OfThisKind"], "attention_dropout": 0.0, "bos_token_id": null,
            "dtype": "float32", "torch_dtype": "absent", "eos_token_id": 2, "initializer_range": 0.02,
            "pad_token_id": null, "rope_theta": "absent", "rope_parameters": default,
            "transformers_version": "5.23.0", "use_cache": true,
        });
        for part in parts {
            config.as_object_mut().unwrap().extend(part.as_object().unwrap().clone());
        }
        let read = read(&config).unwrap_or_else(|error| panic!("{kind}: {error}"));
        let sliding = read.sliding.as_ref().map(|sliding| (sliding.window, sliding.layers.clone()));
        assert_eq!(sliding, window.map(|layers| (8, layers)), "{kind}");
        assert_eq!(read.rope.theta, if kind == "gemma3_text" { 1e6 } else { 1e4 }, "{kind}");
        assert_eq!(read.tied_embeddings, kind.starts_with("gemma"), "{kind}");
    }
}

/// A model that reads images keeps the settings of its text model in an object of their own.
#[test]
fn the_text_part_of_a_larger_model_is_read() {
    let whole = |text: Value, more: Value| {
        let mut config = json!({
            "model_type": "larger", "text_config": usual(&text), "vision_config": { "hidden_size": 7 },
            "image_token_index": 10, "dtype": "bfloat16",
        });
        config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        parse(&config)
    };
    let alone = read(&json!({})).unwrap();
    assert_eq!(whole(json!({}), json!({})).unwrap(), alone);
    let tied = json!({ "tie_word_embeddings": true });
    let untold = json!({ "tie_word_embeddings": "absent" });
    // The head is the whole's: what it says of it holds, if it says something.
    for (text, more, is_tied) in [
        (untold.clone(), tied.clone(), true),
        (json!({}), tied.clone(), true),
        (tied.clone(), json!({ "tie_word_embeddings": false }), false),
        (tied.clone(), json!({ "tie_word_embeddings": null }), true),
        (tied, json!({}), true),
        (untold, json!({}), false),
    ] {
        assert_eq!(whole(text.clone(), more.clone()).unwrap().tied_embeddings, is_tied, "{text}");
    }
    let scheme = json!({ "quantization_config": { "quant_method": "fp8" } });
    let other = json!({ "quantization_config": { "quant_method": "gptq" } });
    for (text, more, part) in [
        (json!({}), json!({ "depth": 3 }), "depth"),
        (scheme, other, "contradicts its quantization_config"),
    ] {
        let error = whole(text, more).unwrap_err().to_string();
        assert!(error.contains(part), "{error}");
    }
}

/// The list has a number for each layer at least.
#[test]
fn layers_without_rotation_may_be_listed_beyond_the_last() {
    let listed = |list: Value| read(&json!({ "model_type": "smollm3", "no_rope_layers": list }));
    assert_eq!(listed(json!([1, 0, 1, 0])).unwrap(), listed(json!([1, 0])).unwrap());
    assert_eq!(listed(json!([1, 0])).unwrap().unrotated, [1]);
    assert!(listed(json!([1])).unwrap_err().to_string().contains("no_rope_layers"));
}

/// As in transformers, which reads `truncate` of parameters that hold for all layers alone.
#[test]
fn parameters_of_a_kind_of_layers_do_not_keep_yarn_from_rounding() {
    let with = |truncate: bool| {
        let yarn = json!({
            "rope_type": "yarn", "rope_theta": 5e5, "factor": 8.0, "truncate": truncate,
            "original_max_position_embeddings": 16,
        });
        let by_kind = json!({
            "full_attention": yarn, "sliding_attention": { "rope_type": "default" },
        });
        let olmo3 = json!({
            "model_type": "olmo3", "sliding_window": 16, "rope_parameters": by_kind,
            "layer_types": ["sliding_attention", "full_attention"],
        });
        let llama = json!({ "rope_parameters": yarn });
        [&olmo3, &llama].map(|more| read(more).unwrap().rope)
    };
    let ([rounded, of_all], [same, other]) = (with(true), with(false));
    assert_eq!(rounded, same);
    assert_ne!(of_all, other);
}

/// In the older layout, transformers gives the config's base to full layers alone.
#[test]
fn sliding_layers_of_an_older_olmo3_config_have_the_usual_base() {
    let config = read(&json!({
        "model_type": "olmo3", "sliding_window": 16, "rope_theta": 2e5,
        "layer_types": ["sliding_attention", "full_attention"],
    }))
    .unwrap();
    let sliding = config.sliding.unwrap().rope.unwrap();
    assert_eq!((config.rope.theta, sliding.theta), (2e5, 5e5));
}

/// Configs leave keys out whose values are those of their family's class in transformers.
#[test]
fn keys_that_are_left_out_have_the_familys_usual_values() {
    for (kind, key, usual_value) in [
        ("mixtral", "rms_norm_eps", json!(1e-5)),
        ("phi3", "rms_norm_eps", json!(1e-5)),
        ("gpt_oss", "rms_norm_eps", json!(1e-5)),
        ("lfm2", "norm_eps", json!(1e-5)),
        ("gemma2", "attn_logit_softcapping", json!(50.0)),
        ("gemma2", "final_logit_softcapping", json!(30.0)),
        ("gemma2", "head_dim", json!(256)),
        ("qwen3", "head_dim", json!(128)),
        ("mistral", "num_key_value_heads", json!(8)),
    ] {
        let mut more = json!({ "model_type": kind, "num_attention_heads": 32 });
        match kind {
            "mixtral" | "gpt_oss" => {
                (more["num_local_experts"], more["num_experts_per_tok"]) = (8.into(), 2.into());
            }
            "lfm2" => {
                more["layer_types"] = json!(["conv", "full_attention"]);
                more["hidden_act"] = "absent".into();
            }
            _ => {}
        }
        if key != "num_key_value_heads" {
            more["num_key_value_heads"] = 4.into();
        }
        if key.ends_with("norm_eps") {
            more["rms_norm_eps"] = "absent".into();
        }
        more[key] = usual_value;
        let told = read(&more).unwrap();
        more[key] = "absent".into();
        assert_eq!(read(&more).unwrap(), told, "{kind}: {key}");
        if key.ends_with("softcapping") {
            more[key] = Value::Null;
            assert_ne!(read(&more).unwrap(), told, "{kind}: null in place of {key}");
        }
    }
}

/// Keys that older versions wrote into every config, most of them about generation.
#[test]
fn keys_of_generation_say_nothing_about_the_model() {
    let written = json!({
        "is_encoder_decoder": false, "add_cross_attention": false, "gradient_checkpointing": false,
        "cross_attention_hidden_size": null, "temperature": 0.7, "top_k": 50, "top_p": 0.9,
        "max_length": 20, "do_sample": false, "num_beams": 1, "repetition_penalty": 1.0,
        "forced_eos_token_id": 2, "early_stopping": false, "use_bfloat16": false,
    });
    assert_eq!(read(&written).unwrap(), read(&json!({})).unwrap());
    assert!(read(&json!({ "is_encoder_decoder": true })).is_err());
}

/// The config of a published model with 34 layers.
#[test]
fn the_first_gemma_3_leaves_usual_values_out() {
    let config = parse(&json!({
        "architectures": ["Gemma3ForConditionalGeneration"], "boi_token_index": 255_999,
        "eoi_token_index": 256_000, "eos_token_id": [1, 106], "image_token_index": 262_144,
        "initializer_range": 0.02, "mm_tokens_per_image": 256, "model_type": "gemma3",
        "text_config": {
            "hidden_size": 2560, "intermediate_size": 10_240, "model_type": "gemma3_text",
            "num_hidden_layers": 34, "rope_scaling": { "factor": 8.0, "rope_type": "linear" },
            "sliding_window": 1024,
        },
        "torch_dtype": "bfloat16", "vision_config": { "hidden_size": 1152 },
    }))
    .unwrap();
    assert_eq!((config.heads, config.kv_heads, config.head_dim), (8, 4, 256));
    assert_eq!((config.vocab_size, config.max_positions), (262_208, 131_072));
    let sliding = config.sliding.unwrap();
    let full: Vec<usize> = (0..34).filter(|layer| !sliding.layers[*layer]).collect();
    assert_eq!((sliding.window, full), (1024, vec![5, 11, 17, 23, 29]));
}

/// The config of the 1.2B release, with the values that it repeats in further keys.
/// The smallest published Gemma 4, in the layout of its first releases.
fn gemma4() -> Value {
    let sliding = ["sliding_attention"; 4];
    let types: Vec<_> =
        (0..35).map(|at| sliding.get(at % 5).unwrap_or(&"full_attention")).collect();
    json!({
        "model_type": "gemma4_text", "vocab_size": 262_144, "hidden_size": 1536,
        "intermediate_size": 6144, "num_hidden_layers": 35, "num_attention_heads": 8,
        "num_key_value_heads": 1, "head_dim": 256, "global_head_dim": 512,
        "max_position_embeddings": 131_072, "sliding_window": 512, "layer_types": types,
        "hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262_144,
        "num_kv_shared_layers": 20, "use_double_wide_mlp": true, "final_logit_softcapping": 30.0,
        "hidden_activation": "gelu_pytorch_tanh", "use_bidirectional_attention": "vision",
    })
}

#[test]
fn gemma_4_is_read_in_both_layouts() {
    let older = gemma4();
    let config = parse(&older).unwrap();
    let heads = [0, 4, 34].map(|layer| config.kv_heads_of(layer));
    let [window, full] = [256, 512].map(|dim| KvHeads { count: 1, dim });
    assert_eq!(heads, [window, full, full]);
    assert_eq!(
        [14, 15, 19, 33, 34].map(|layer| config.donor(layer)),
        [None, Some(13), Some(14), Some(13), Some(14)]
    );
    assert_eq!((config.attention_scale, config.kv_width()), (1.0, 512));
    let mut newer = older.clone();
    newer["global_head_dim"] = Value::Null;
    let full: Vec<usize> = (4..35).step_by(5).collect();
    let own: Value = full.iter().map(|at| (at.to_string(), json!({ "head_dim": 512 }))).collect();
    newer["per_layer_config"] = own.clone();
    assert_eq!(parse(&newer).unwrap(), config);
    // If the heads of all layers have one size, no layer needs parameters of its own.
    let mut alike = older.clone();
    alike["global_head_dim"] = 256.into();
    let want = parse(&alike).unwrap();
    alike["global_head_dim"] = Value::Null;
    alike["per_layer_config"] = json!({});
    assert_eq!(parse(&alike).unwrap(), want);
    let mut wrong = newer.clone();
    wrong["per_layer_config"]["3"] = json!({ "head_dim": 512 });
    let mut mixed = newer.clone();
    mixed["per_layer_config"]["9"] = json!({ "head_dim": 256 });
    for (key, value, part) in [
        ("per_layer_config", wrong["per_layer_config"].clone(), "without a window"),
        ("per_layer_config", mixed["per_layer_config"].clone(), "different heads"),
        ("use_bidirectional_attention", "all".into(), "use_bidirectional_attention"),
        ("num_kv_shared_layers", 31.into(), "find no K and V"),
        ("num_kv_shared_layers", 99.into(), "find no K and V"),
        ("vocab_size_per_layer_input", 7.into(), "vocab_size_per_layer_input"),
        ("enable_moe_block", true.into(), "num_experts"),
    ] {
        let mut config = newer.clone();
        config[key] = value;
        let error = parse(&config).unwrap_err().to_string();
        assert!(error.contains(part), "{key}: {error}");
    }
}

fn lfm2() -> Value {
    json!({
        "architectures": ["Lfm2ForCausalLM"], "block_auto_adjust_ff_dim": true, "block_dim": 2048,
        "block_ff_dim": 12288, "block_ffn_dim_multiplier": 1.0, "block_mlp_init_scale": 1.0,
        "block_multiple_of": 256, "block_norm_eps": 1e-5, "block_out_init_scale": 1.0,
        "block_use_swiglu": true, "block_use_xavier_init": true, "bos_token_id": 1,
        "conv_L_cache": 3, "conv_bias": false, "conv_dim": 2048, "conv_dim_out": 2048,
        "conv_use_xavier_init": true, "eos_token_id": 7, "full_attn_idxs": [2, 5, 8, 10, 12, 14],
        "hidden_size": 2048, "initializer_range": 0.02, "max_position_embeddings": 128_000,
        "model_type": "lfm2", "norm_eps": 1e-5, "num_attention_heads": 32, "num_heads": 32,
        "num_hidden_layers": 16, "num_key_value_heads": 8, "pad_token_id": 0,
        "rope_theta": 1_000_000.0, "torch_dtype": "bfloat16", "use_cache": true,
        "use_pos_enc": true, "vocab_size": 65536,
    })
}

/// The config of a dense Qwen 3.5, whose vision tower is left out.
fn qwen3_5() -> Value {
    json!({
        "architectures": ["Qwen3_5ForConditionalGeneration"], "image_token_id": 248_056,
        "model_type": "qwen3_5", "tie_word_embeddings": false, "video_token_id": 248_057,
        "text_config": {
            "attention_bias": false, "attn_output_gate": true, "dtype": "bfloat16",
            "eos_token_id": 248_044, "full_attention_interval": 4, "head_dim": 256,
            "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 12288,
            "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16,
            "linear_num_value_heads": 32, "linear_value_head_dim": 128,
            "mamba_ssm_dtype": "float32", "max_position_embeddings": 262_144,
            "mlp_only_layers": [], "model_type": "qwen3_5_text", "mtp_num_hidden_layers": 1,
            "mtp_use_dedicated_embeddings": false, "num_attention_heads": 16,
            "num_hidden_layers": 32, "num_key_value_heads": 4, "rms_norm_eps": 1e-6,
            "rope_parameters": {
                "mrope_interleaved": true, "mrope_section": [11, 11, 10],
                "partial_rotary_factor": 0.25, "rope_theta": 10_000_000.0, "rope_type": "default",
            },
            "tie_word_embeddings": false, "use_cache": true, "vocab_size": 248_320,
        },
        "vision_config": { "hidden_size": 1152 }, "vision_end_token_id": 248_054,
        "vision_start_token_id": 248_053,
    })
}

#[test]
fn states_are_as_large_as_the_releases_ask() {
    let config = parse(&lfm2()).unwrap();
    assert_eq!((config.intermediate_size, config.attention_layers()), (8192, 6));
    // Ten layers of two inputs each.
    assert_eq!((config.state_bytes(), config.kv_block_bytes(1)), (10 * 2 * 2048 * 4, 6 * 4096));
    let config = parse(&qwen3_5()).unwrap();
    assert_eq!((config.rope.rotary_dim, config.attention_layers()), (64, 8));
    // In 24 layers the last inputs of 8 192 channels, and 32 heads of 128 by 128.
    assert_eq!(config.state_bytes(), 24 * (3 * 8192 + 32 * 128 * 128) * 4);
}

#[test]
fn releases_with_experts_beside_states_are_read() {
    let qwen3_next = json!({
        "architectures": ["Qwen3NextForCausalLM"], "attention_bias": false,
        "attention_dropout": 0.0, "bos_token_id": 151_643, "decoder_sparse_step": 1,
        "eos_token_id": 151_645, "full_attention_interval": 4, "head_dim": 256,
        "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
        "intermediate_size": 5120, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
        "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_value_head_dim": 128,
        "max_position_embeddings": 262_144, "mlp_only_layers": [], "model_type": "qwen3_next",
        "moe_intermediate_size": 512, "norm_topk_prob": true, "num_attention_heads": 16,
        "num_experts": 512, "num_experts_per_tok": 10, "num_hidden_layers": 48,
        "num_key_value_heads": 2, "output_router_logits": false, "partial_rotary_factor": 0.25,
        "rms_norm_eps": 1e-6, "rope_scaling": null, "rope_theta": 10_000_000,
        "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 512,
        "tie_word_embeddings": false, "torch_dtype": "bfloat16", "use_cache": true,
        "use_sliding_window": false, "vocab_size": 151_936,
    });
    let config = parse(&qwen3_next).unwrap();
    let mixture = config.mixture.as_ref().unwrap();
    assert_eq!((config.rope.rotary_dim, config.attention_layers()), (64, 12));
    assert_eq!((mixture.experts, mixture.chosen, mixture.normalise), (512, 10, true));
    assert_eq!(mixture.shared.map(|shared| (shared.width, shared.gated)), Some((512, true)));

    let kind = |layer| {
        if [2, 6, 10, 14, 18, 21].contains(&layer) { "full_attention" } else { "conv" }
    };
    let types: Vec<_> = (0..24).map(kind).collect();
    let mut lfm2_moe = json!({
        "architectures": ["Lfm2MoeForCausalLM"], "bos_token_id": 1, "conv_L_cache": 3,
        "conv_bias": false, "dtype": "bfloat16", "eos_token_id": 7, "hidden_size": 2048,
        "initializer_range": 0.02, "intermediate_size": 7168, "layer_types": types,
        "max_position_embeddings": 128_000, "model_type": "lfm2_moe",
        "moe_intermediate_size": 1792, "norm_eps": 1e-5, "norm_topk_prob": true,
        "num_attention_heads": 32, "num_dense_layers": 2, "num_experts": 32,
        "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 8,
        "pad_token_id": 0, "rope_theta": 1_000_000.0, "routed_scaling_factor": 1.0,
        "use_cache": true, "use_expert_bias": true, "vocab_size": 65536,
    });
    let config = parse(&lfm2_moe).unwrap();
    let mixture = config.mixture.as_ref().unwrap();
    assert_eq!((config.intermediate_size, config.attention_layers()), (7168, 6));
    assert_eq!(mixture.layers.iter().filter(|has_experts| **has_experts).count(), 22);
    lfm2_moe["use_expert_bias"] = false.into();
    let error = parse(&lfm2_moe).unwrap_err().to_string();
    assert!(error.contains("use_expert_bias"), "{error}");
}

#[test]
fn the_text_of_qwens_readers_of_images_is_read() {
    let flat = json!({
        "architectures": ["Qwen2_5_VLForConditionalGeneration"], "attention_dropout": 0.0,
        "bos_token_id": 151_643, "eos_token_id": 151_645, "vision_start_token_id": 151_652,
        "vision_end_token_id": 151_653, "vision_token_id": 151_654, "image_token_id": 151_655,
        "video_token_id": 151_656, "hidden_act": "silu", "hidden_size": 3584,
        "initializer_range": 0.02, "intermediate_size": 18944,
        "max_position_embeddings": 128_000, "max_window_layers": 28,
        "model_type": "qwen2_5_vl", "num_attention_heads": 28, "num_hidden_layers": 28,
        "num_key_value_heads": 4, "rms_norm_eps": 1e-6, "rope_theta": 1_000_000.0,
        "sliding_window": 32768, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
        "use_cache": true, "use_sliding_window": false, "vision_config": { "depth": 32 },
        "rope_scaling": { "type": "mrope", "mrope_section": [16, 24, 24] },
        "vocab_size": 152_064,
    });
    let config = parse(&flat).unwrap();
    assert_eq!((config.rope.theta, &config.rope.scaling), (1e6, &RopeScaling::None));
    assert_eq!((config.heads, config.sliding), (28, None));

    let nested = json!({
        "architectures": ["Qwen3VLMoeForConditionalGeneration"], "image_token_id": 151_655,
        "model_type": "qwen3_vl_moe", "text_config": {
            "attention_bias": false, "attention_dropout": 0.0, "bos_token_id": 151_643,
            "decoder_sparse_step": 1, "dtype": "bfloat16", "eos_token_id": 151_645,
            "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048,
            "initializer_range": 0.02, "intermediate_size": 6144,
            "max_position_embeddings": 262_144, "mlp_only_layers": [],
            "model_type": "qwen3_vl_moe_text", "moe_intermediate_size": 768,
            "norm_topk_prob": true, "num_attention_heads": 32, "num_experts": 128,
            "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4,
            "rms_norm_eps": 1e-6, "rope_scaling": {
                "mrope_interleaved": true, "mrope_section": [24, 20, 20], "rope_type": "default",
            },
            "rope_theta": 5_000_000, "use_cache": true, "vocab_size": 151_936,
        },
        "tie_word_embeddings": false, "video_token_id": 151_656,
        "vision_config": { "depth": 27 }, "vision_end_token_id": 151_653,
        "vision_start_token_id": 151_652,
    });
    let config = parse(&nested).unwrap();
    assert_eq!((config.rope.theta, config.mixture.unwrap().chosen), (5e6, 8));
}

/// A config of a Granite 4 with experts, whose keys are those of the release.
fn granite_hybrid() -> Value {
    json!({
        "architectures": ["GraniteMoeHybridForCausalLM"], "attention_bias": false,
        "attention_multiplier": 0.007_812_5, "embedding_multiplier": 12, "hidden_act": "silu",
        "hidden_size": 1536, "init_method": "mup", "intermediate_size": 512,
        "layer_types": ["mamba", "mamba", "attention", "mamba"], "logits_scaling": 6,
        "mamba_chunk_size": 256, "mamba_conv_bias": true, "mamba_d_conv": 4, "mamba_d_head": 64,
        "mamba_d_state": 128, "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 48,
        "mamba_proj_bias": false, "max_position_embeddings": 131_072,
        "model_type": "granitemoehybrid", "normalization_function": "rmsnorm",
        "num_attention_heads": 12, "num_experts_per_tok": 6, "num_hidden_layers": 4,
        "num_key_value_heads": 4, "num_local_experts": 64, "output_router_logits": false,
        "position_embedding_type": "nope", "residual_multiplier": 0.22, "rms_norm_eps": 1e-5,
        "rope_scaling": null, "rope_theta": 10_000, "router_aux_loss_coef": 0.01,
        "shared_intermediate_size": 1024, "tie_word_embeddings": true, "vocab_size": 100_352,
    })
}

#[test]
fn a_hybrid_of_scans_and_attention_is_read() {
    let config = parse(&granite_hybrid()).unwrap();
    assert_eq!((config.unrotated.len(), config.attention_layers()), (4, 1));
    let mixture = config.mixture.clone().unwrap();
    assert_eq!((mixture.experts, mixture.chosen, mixture.normalise), (64, 6, true));
    assert_eq!(mixture.shared.map(|shared| (shared.width, shared.gated)), Some((1024, false)));
    // Three layers of the last inputs of 3 328 channels, and 48 heads of 64 by 128.
    assert_eq!(config.state_bytes(), 3 * (3 * 3328 + 48 * 64 * 128) * 4);
    let refused = |key: &str, value: Value| {
        let mut config = granite_hybrid();
        config[key] = value;
        parse(&config).expect_err(key).to_string()
    };
    assert!(refused("position_embedding_type", json!("alibi")).contains("alibi"));
    assert!(refused("normalization_function", json!("layernorm")).contains("rmsnorm"));
    assert!(refused("mamba_proj_bias", json!(true)).contains("mamba_proj_bias"));
    assert!(refused("mamba_d_head", json!(32)).contains("mamba_expand"));
    assert!(refused("mamba_n_groups", json!(5)).contains("recurrent"));
    assert!(refused("time_step_limit", json!([2.0, 1.0])).contains("recurrent"));
    let mut auto = granite_hybrid();
    auto["mamba_d_head"] = json!("auto");
    assert_eq!(parse(&auto).unwrap(), config);
}

/// The keys and numbers of a published config of GLM-4.5, with fewer layers.
#[test]
fn experts_routed_by_sigmoids_are_read() {
    let release = json!({
        "architectures": ["Glm4MoeForCausalLM"], "attention_bias": true, "attention_dropout": 0.0,
        "eos_token_id": [151_329, 151_336, 151_338], "first_k_dense_replace": 1, "head_dim": 128,
        "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
        "intermediate_size": 10_944, "max_position_embeddings": 131_072, "model_type": "glm4_moe",
        "moe_intermediate_size": 1408, "n_group": 1, "n_routed_experts": 128,
        "n_shared_experts": 1, "norm_topk_prob": true, "num_attention_heads": 96,
        "num_experts_per_tok": 8, "num_hidden_layers": 3, "num_key_value_heads": 8,
        "num_nextn_predict_layers": 1, "pad_token_id": 151_329, "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-5, "rope_scaling": null, "rope_theta": 1_000_000,
        "routed_scaling_factor": 1.0, "tie_word_embeddings": false, "topk_group": 1,
        "torch_dtype": "bfloat16", "use_cache": true, "use_qk_norm": false,
        "vocab_size": 151_552,
    });
    let config = parse(&release).unwrap();
    assert_eq!((config.rope.rotary_dim, config.head_dim), (64, 128));
    let mixture = config.mixture.unwrap();
    assert_eq!(mixture.layers, [false, true, true]);
    assert_eq!(mixture.scoring, RouterScoring::Sigmoid { groups: 1, kept: 1 });
    for (key, value, part) in [
        ("n_group", json!(5), "1 of 5 groups"),
        ("topk_group", json!(2), "2 of 1 groups"),
        ("n_group", json!(64), "8 of 128 experts in 1 of 64"),
        ("routed_scaling_factor", json!(0.0), "factor"),
    ] {
        let mut config = release.clone();
        config[key] = value;
        let error = parse(&config).expect_err(key).to_string();
        assert!(error.contains(part), "{error}");
    }
}

/// The keys and numbers of the published config of DeepSeek-V3, with fewer layers.
fn deepseek_v3() -> Value {
    let config = r#"{
        "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": false,
        "attention_dropout": 0.0, "auto_map": {}, "aux_loss_alpha": 0.001, "bos_token_id": 0,
        "eos_token_id": 1, "ep_size": 1, "first_k_dense_replace": 3, "hidden_act": "silu",
        "hidden_size": 7168, "initializer_range": 0.02, "intermediate_size": 18432,
        "kv_lora_rank": 512, "max_position_embeddings": 163840, "model_type": "deepseek_v3",
        "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256,
        "n_shared_experts": 1, "norm_topk_prob": true, "num_attention_heads": 128,
        "num_experts_per_tok": 8, "num_hidden_layers": 4, "num_key_value_heads": 128,
        "num_nextn_predict_layers": 1, "pretraining_tp": 1, "q_lora_rank": 1536,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-6,
        "rope_scaling": { "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0,
            "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096, "type": "yarn" },
        "rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid",
        "seq_aux": true, "tie_word_embeddings": false, "topk_group": 4,
        "topk_method": "noaux_tc", "torch_dtype": "bfloat16", "use_cache": true,
        "v_head_dim": 128, "vocab_size": 129280
    }"#;
    serde_json::from_str(config).unwrap()
}

#[test]
fn latent_attention_is_read() {
    let release = deepseek_v3();
    let config = parse(&release).unwrap();
    assert_eq!((config.heads, config.kv_heads, config.head_dim), (128, 1, 576));
    assert_eq!(config.rope.rotary_dim, 64);
    let longer = 0.1 * 40f32.ln() + 1.0;
    assert!((config.attention_scale - longer * longer / 192f32.sqrt()).abs() < 1e-7);
    // Bytes of a token in f32, and 70 272 in sixteen bits with all 61 layers.
    assert_eq!(config.kv_block_bytes(1), 4 * 576 * 4);
    let mixture = config.mixture.clone().unwrap();
    assert_eq!(mixture.layers, [false, false, false, true]);
    assert_eq!(mixture.scoring, RouterScoring::Sigmoid { groups: 8, kept: 4 });
    assert_eq!((mixture.normalise, mixture.scale), (true, 2.5));
    // What transformers 5 adds, and what it leaves out of the rotation's settings.
    let mut newer = release.clone();
    for (key, value) in [("head_dim", json!(64)), ("qk_head_dim", json!(192))] {
        newer[key] = value;
    }
    assert_eq!(parse(&newer).unwrap(), config);
    for key in ["n_group", "topk_group", "first_k_dense_replace", "routed_scaling_factor"] {
        newer.as_object_mut().unwrap().remove(key);
        assert_eq!(parse(&newer).unwrap(), config, "without {key}");
    }
    for (key, value, part) in [
        ("q_lora_rank", json!("absent"), "q_lora_rank is missing"),
        ("kv_lora_rank", json!(0), "latent attention of the sizes"),
        ("v_head_dim", json!(null), "v_head_dim is missing"),
        ("head_dim", json!(100), "`head_dim` is 100, where heads have 192"),
        ("scoring_func", json!("softmax"), "`scoring_func` is \"softmax\""),
        ("topk_method", json!("greedy"), "`topk_method`"),
        ("moe_layer_freq", json!(2), "`moe_layer_freq` is 2, where 1 is supported"),
        ("partial_rotary_factor", json!(0.5), "`partial_rotary_factor`"),
        ("n_shared_experts", json!(u64::MAX), "experts"),
        ("quantization_config", json!({ "quant_method": "hqq" }), "which this build cannot read"),
    ] {
        let mut config = release.clone();
        config[key] = value;
        config.as_object_mut().unwrap().retain(|_, value| value != "absent");
        let error = parse(&config).expect_err(key).to_string();
        assert!(error.contains(part), "{key}: {error}");
    }
}

/// The differences of the published configs of DeepSeek-V2-Lite and V2.
#[test]
fn experts_routed_by_a_softmax_in_groups_are_read() {
    let mut lite = deepseek_v3();
    for (key, value) in [
        ("model_type", json!("deepseek_v2")),
        ("q_lora_rank", json!(null)),
        ("n_group", json!(1)),
        ("topk_group", json!(1)),
        ("topk_method", json!("greedy")),
        ("scoring_func", json!("softmax")),
        ("norm_topk_prob", json!(false)),
        ("routed_scaling_factor", json!(1.0)),
        ("n_shared_experts", json!(2)),
        ("num_nextn_predict_layers", json!(null)),
    ] {
        lite[key] = value;
    }
    let config = parse(&lite).unwrap();
    assert_eq!(config.latent.unwrap().query_rank, None);
    let mixture = config.mixture.unwrap();
    assert_eq!((mixture.scoring, mixture.normalise), (RouterScoring::Softmax, false));
    assert_eq!(mixture.shared.unwrap().width, 2 * 2048);
    let with = |key: &str, value: Value| {
        let mut config = lite.clone();
        config["topk_method"] = json!("group_limited_greedy");
        config["n_group"] = json!(8);
        config["topk_group"] = json!(3);
        config[key] = value;
        parse(&config).map(|config| config.mixture.unwrap().scoring)
    };
    let groups = RouterScoring::GroupedSoftmax { groups: 8, kept: 3 };
    assert_eq!(with("n_group", json!(8)).unwrap(), groups);
    for (key, value, part) in [
        ("norm_topk_prob", json!(true), "`norm_topk_prob` is true"),
        ("topk_method", json!("noaux_tc"), "`topk_method` \"noaux_tc\""),
        ("n_group", json!(7), "3 of 7 groups"),
    ] {
        let error = with(key, value).expect_err(key).to_string();
        assert!(error.contains(part), "{key}: {error}");
    }
}

#[test]
fn dense_layers_may_be_listed() {
    let mut glm = deepseek_v3();
    for (key, value) in [
        ("model_type", json!("glm4_moe_lite")),
        ("rope_scaling", json!(null)),
        ("n_group", json!(1)),
        ("topk_group", json!(1)),
        ("first_k_dense_replace", json!(1)),
        ("v_head_dim", json!(256)),
    ] {
        glm[key] = value;
    }
    let layers = |config: &Value| parse(config).map(|config| config.mixture.unwrap().layers);
    assert_eq!(layers(&glm).unwrap(), [false, true, true, true]);
    glm["mlp_layer_types"] = json!(["dense", "sparse", "sparse", "sparse"]);
    assert_eq!(layers(&glm).unwrap(), [false, true, true, true]);
    for (types, part) in [
        (json!(["dense", "dense", "sparse", "sparse"]), "differ"),
        (json!(["dense", "sparse", "thick", "sparse"]), "thick"),
    ] {
        glm["mlp_layer_types"] = types;
        let error = layers(&glm).expect_err(part).to_string();
        assert!(error.contains(part), "{error}");
    }
}

#[test]
fn queries_that_grow_are_read() {
    let mut release = deepseek_v3();
    for (key, value) in [
        ("model_type", json!("mistral4")),
        ("n_group", json!(1)),
        ("topk_group", json!(1)),
        ("first_k_dense_replace", json!(0)),
        ("head_dim", json!(192)),
        ("scoring_func", json!(null)),
        ("topk_method", json!(null)),
        ("num_nextn_predict_layers", json!(null)),
        ("rope_scaling", json!(null)),
        (
            "rope_parameters",
            json!({ "beta_fast": 32.0, "beta_slow": 1.0, "factor": 128.0, "rope_theta": 10_000.0,
                "llama_4_scaling_beta": 0.2, "max_position_embeddings": 1_048_576, "mscale": 1.0,
                "mscale_all_dim": 1.0, "original_max_position_embeddings": 8192,
                "partial_rotary_factor": 1.0 / 3.0, "type": "yarn" }),
        ),
    ] {
        release[key] = value;
    }
    let growth = parse(&release).unwrap().query_growth;
    assert_eq!(growth, Some(QueryGrowth { beta: 0.2, length: 8192 }));
    for (key, value, part) in
        [("n_group", json!(2), "n_group"), ("rope_parameters", json!(null), "YaRN")]
    {
        let mut config = release.clone();
        config[key] = value;
        let error = parse(&config).expect_err(key).to_string();
        assert!(error.contains(part), "{key}: {error}");
    }
}

#[test]
fn recurrent_layers_that_are_not_understood_are_refused() {
    let check = |mut config: Value, at: &str, value: Value, part: &str| {
        let (parent, key) = at.rsplit_once('/').unwrap();
        let object = config.pointer_mut(parent).unwrap().as_object_mut().unwrap();
        object.insert(key.to_owned(), value);
        let error = parse(&config).expect_err(at).to_string();
        assert!(error.contains(part), "{at}: {error}");
    };
    for (at, value, part) in [
        ("/conv_dim", json!(1024), "conv_dim"),
        ("/conv_bias", json!(true), "conv_bias"),
        ("/use_pos_enc", json!(false), "use_pos_enc"),
        ("/conv_L_cache", json!(1), "recurrent"),
        ("/layer_types", json!(["conv", "spiral"]), "spiral"),
        ("/layer_types", json!(["conv", "full_attention"]), "which layers"),
    ] {
        check(lfm2(), at, value, part);
    }
    for (key, value, part) in [
        ("linear_num_value_heads", json!(null), "linear_num_value_heads is missing"),
        ("linear_num_value_heads", json!(24), "recurrent"),
        ("linear_num_key_heads", json!(0), "recurrent"),
        ("attn_output_gate", json!(false), "attn_output_gate"),
        ("mamba_ssm_dtype", json!("bfloat16"), "mamba_ssm_dtype"),
        ("mlp_only_layers", json!([1]), "mlp_only_layers"),
        ("linear_further_key", json!(1), "linear_further_key"),
    ] {
        check(qwen3_5(), &format!("/text_config/{key}"), value, part);
    }
}

#[test]
fn keys_that_are_missing_or_wrong_are_named() {
    for (change, part) in [
        (json!({ "vocab_size": "absent" }), "vocab_size is missing"),
        (json!({ "max_position_embeddings": null }), "max_position_embeddings is missing"),
        (json!({ "hidden_size": 32.5 }), "hidden_size"),
        (json!({ "num_key_value_heads": 3 }), "3"),
        (json!({ "num_attention_heads": 0 }), "zero"),
        (json!({ "head_dim": 7 }), "7"),
        (
            json!({ "rope_parameters": { "rope_type": "default", "rope_theta": "fast" } }),
            "rope_theta",
        ),
        (json!({ "rope_parameters": { "rope_type": "spiral" } }), "spiral"),
        (json!({ "partial_rotary_factor": 0.5 }), "partial_rotary_factor"),
    ] {
        let error = read(&change).expect_err(&change.to_string()).to_string();
        assert!(error.contains("config.json") && error.contains(part), "{change}: {error}");
    }
}

/// What a config says of its weights, or why it is refused.
fn quantised(config: &Value) -> Result<Option<Quantisation>> {
    let json = usual(&json!({ "quantization_config": config })).to_string();
    from_hf(Path::new("config.json"), json.as_bytes())?;
    super::quantisation(Path::new("config.json"), json.as_bytes())
}

/// A config of compressed-tensors, as its own tools write it, for weights in a format.
fn compressed(format: &str, weights: &Value) -> Value {
    let mut own = json!({
        "num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": true,
        "dynamic": false, "observer": "minmax", "observer_kwargs": {}, "actorder": null,
        "block_structure": null,
    });
    for (key, value) in weights.as_object().unwrap() {
        own[key] = value.clone();
    }
    json!({
        "quant_method": "compressed-tensors", "format": format, "ignore": ["lm_head"],
        "quantization_status": "compressed", "global_compression_ratio": 1.5,
        "kv_cache_scheme": null, "sparsity_config": {}, "transform_config": {}, "version": "0.9",
        "config_groups": { "group_0": { "targets": ["Linear"], "weights": own,
            "input_activations": { "num_bits": 8, "dynamic": true }, "output_activations": null } },
    })
}

#[test]
fn quantisations_of_releases_are_understood() {
    let of = |layout, bits, block, group| Quantisation { layout, bits, block, group };
    let bytes = |block, group| of(CodeLayout::Bytes, 8, block, group);
    let gptq =
        |zeros_less_one, bits, group| of(CodeLayout::Gptq { zeros_less_one }, bits, None, group);
    let row = json!({"num_bits": 8, "strategy": "channel", "group_size": null, "type": "float"});
    let whole = json!({"num_bits": 8, "strategy": "tensor", "group_size": null, "type": "int"});
    let block = json!({"num_bits": 8, "strategy": "block", "group_size": null, "type": "float",
        "block_structure": [128, 128]});
    for (config, want) in [
        (
            json!({"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
                "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head"]}),
            bytes(Some([128, 128]), None),
        ),
        (
            json!({"activation_scheme": "static", "dequantize": false, "quant_method": "fp8",
                "weight_block_size": null, "modules_to_not_convert": []}),
            bytes(None, None),
        ),
        (compressed("float-quantized", &row), bytes(None, None)),
        (compressed("float-quantized", &block), bytes(Some([128, 128]), None)),
        (compressed("int-quantized", &whole), bytes(None, None)),
        (compressed("pack-quantized", &json!({})), of(CodeLayout::Rows, 4, None, Some(128))),
        (
            json!({"bits": 4, "damp_percent": 0.1, "desc_act": true, "group_size": 128,
                "model_file_base_name": "model", "model_name_or_path": null, "static_groups": false,
                "quant_method": "gptq", "sym": true, "true_sequential": true,
                "is_marlin_format": false}),
            gptq(true, 4, Some(128)),
        ),
        (
            json!({"bits": 8, "checkpoint_format": "gptq_v2", "group_size": -1, "lm_head": false,
                "meta": {"quantizer": ["gptqmodel:1.2"]}, "pack_dtype": "int32",
                "quant_method": "gptq", "dynamic": null}),
            gptq(false, 8, None),
        ),
        (
            json!({"bits": 4, "group_size": 64, "modules_to_not_convert": null, "version": "gemm",
                "quant_method": "awq", "zero_point": true}),
            of(CodeLayout::Awq, 4, None, Some(64)),
        ),
    ] {
        assert_eq!(quantised(&config).unwrap(), Some(want), "{config}");
    }
    assert_eq!(quantised(&Value::Null).unwrap(), None);
}

/// What is not understood is refused in a sentence that names the key.
#[test]
fn other_quantisations_are_refused() {
    let refused = |config: Value, words: &[&str]| {
        let text = quantised(&config).unwrap_err().to_string();
        assert!(words.iter().all(|word| text.contains(word)), "{config}: {text}");
    };
    let gptq = |key: &str, value: Value| {
        let mut config = json!({"quant_method": "gptq", "bits": 4, "group_size": 128});
        config[key] = value;
        config
    };
    let files = "use the release's bf16, f16 or f32 files, or a GGUF file";
    refused(json!({"quant_method": "hqq"}), &["by hqq (quantization_config)", files]);
    refused(json!({"quant_method": "mxfp4"}), &["by mxfp4", files]);
    refused(json!({"bits": 4}), &["by an unnamed method", files]);
    refused(gptq("bits", json!(3)), &["`bits` 3", "[4, 8]", files]);
    refused(gptq("bits", Value::Null), &["bits is missing"]);
    refused(gptq("group_size", json!(0)), &["`group_size` must be positive or -1"]);
    refused(gptq("checkpoint_format", json!("marlin")), &["`checkpoint_format` \"marlin\"", files]);
    refused(gptq("is_marlin_format", json!(true)), &["`is_marlin_format`", files]);
    refused(gptq("dynamic", json!({"+:.*": {"bits": 8}})), &["`dynamic`", files]);
    refused(gptq("twisted", json!(1)), &["with the unknown keys twisted", files]);
    let awq = json!({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemv"});
    refused(awq, &["`version` \"gemv\" in place of gemm", files]);
    let whole = json!({"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": false});
    refused(whole, &["`zero_point` false", files]);
    let zero = json!({"quant_method": "fp8", "weight_block_size": [0, 128]});
    refused(zero, &["`weight_block_size` must be positive"]);
    refused(json!({"quant_method": "fp8", "fmt": "e3m4"}), &["`fmt` \"e3m4\"", files]);

    let more = |weights: Value| compressed("pack-quantized", &weights);
    refused(more(json!({"num_bits": 3})), &["`num_bits` 3", files]);
    refused(more(json!({"dynamic": true})), &["`dynamic`", files]);
    refused(more(json!({"strategy": "tensor_group"})), &["`strategy` \"tensor_group\"", files]);
    refused(more(json!({"group_size": null})), &["group_size is missing"]);
    refused(more(json!({"rounds": 3})), &["unknown keys rounds", files]);
    refused(compressed("nvfp4-pack-quantized", &json!({})), &["`format` \"nvfp4", files]);
    let changed = |key: &str, value: Value| {
        let mut config = more(json!({}));
        config[key] = value;
        config
    };
    refused(changed("transform_config", json!({"config_groups": {}})), &["`transform_config`"]);
    refused(changed("sparsity_config", json!({"format": "sparse-24"})), &["`sparsity_config`"]);
    refused(changed("config_groups", Value::Null), &["config_groups is missing"]);
    refused(changed("config_groups", json!({})), &["config_groups is empty"]);
    let mut two = more(json!({}));
    two["config_groups"]["group_1"] =
        compressed("", &json!({"num_bits": 8}))["config_groups"]["group_0"].clone();
    refused(two, &["with several formats (`config_groups`)", files]);
}
