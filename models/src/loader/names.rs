//! Tensor names: architectures ask by Hugging Face's names; GGUF has its own for the same tensors.

/// Divisors of the rotary frequencies, if the file has them.
pub(crate) const ROPE_FACTORS: &str = "rope_freqs.weight";
/// The two tables of LongRoPE in GGUF files.
pub(crate) const LONG_FACTORS: &str = "rope_factors_long.weight";
pub(crate) const SHORT_FACTORS: &str = "rope_factors_short.weight";

/// HF name → GGUF name. Layer names keep their suffix (`.weight`, `.bias`). `own` comes before the
/// modules' usual names.
pub(crate) fn gguf(hf: &str, own: &[(&str, &str)]) -> Option<String> {
    let whole = own.iter().find(|(name, _)| *name == hf).map(|(_, gguf)| *gguf);
    let whole = whole.or_else(|| whole_name(hf));
    whole.map(str::to_owned).or_else(|| layer(hf, own))
}

fn whole_name(hf: &str) -> Option<&'static str> {
    match hf {
        "model.embed_tokens.weight" => Some("token_embd.weight"),
        "model.norm.weight" => Some("output_norm.weight"),
        "lm_head.weight" => Some("output.weight"),
        _ => None,
    }
}

fn layer(hf: &str, own: &[(&str, &str)]) -> Option<String> {
    let (index, rest) = hf.strip_prefix("model.layers.")?.split_once('.')?;
    if let Some((_, gguf)) = own.iter().find(|(hf, _)| *hf == rest) {
        return Some(format!("blk.{index}.{gguf}"));
    }
    let (module, suffix) = rest.rsplit_once('.')?;
    let own = own.iter().find(|(hf, _)| *hf == module).map(|(_, gguf)| *gguf);
    let module = own.or_else(|| usual(module)).map(str::to_owned).or_else(|| one_expert(module))?;
    Some(format!("blk.{index}.{module}.{suffix}"))
}

/// The first files with experts have a tensor for each of them.
fn one_expert(module: &str) -> Option<String> {
    let (expert, part) = module.strip_prefix("mlp.experts.")?.split_once('.')?;
    Some(format!("{}.{expert}", usual(&format!("mlp.{part}"))?))
}

fn usual(module: &str) -> Option<&'static str> {
    Some(match module {
        "input_layernorm" => "attn_norm",
        "post_attention_layernorm" | "pre_feedforward_layernorm" => "ffn_norm",
        "post_feedforward_layernorm" => "post_ffw_norm",
        "self_attn.q_proj" => "attn_q",
        "self_attn.k_proj" => "attn_k",
        "self_attn.v_proj" => "attn_v",
        "self_attn.o_proj" => "attn_output",
        "self_attn.q_a_proj" => "attn_q_a",
        "self_attn.q_a_layernorm" => "attn_q_a_norm",
        "self_attn.q_b_proj" => "attn_q_b",
        "self_attn.kv_a_proj_with_mqa" => "attn_kv_a_mqa",
        "self_attn.kv_a_layernorm" => "attn_kv_a_norm",
        "self_attn.kv_b_proj" => "attn_kv_b",
        "self_attn.k_b_proj" => "attn_k_b",
        "self_attn.v_b_proj" => "attn_v_b",
        "self_attn.q_norm" => "attn_q_norm",
        "self_attn.k_norm" => "attn_k_norm",
        "mlp.gate_proj" => "ffn_gate",
        "mlp.up_proj" => "ffn_up",
        "mlp.down_proj" => "ffn_down",
        "mlp.gate" => "ffn_gate_inp",
        "mlp.experts.gate_proj" => "ffn_gate_exps",
        "mlp.experts.up_proj" => "ffn_up_exps",
        "mlp.experts.gate_up_proj" => "ffn_gate_up_exps",
        "mlp.experts.down_proj" => "ffn_down_exps",
        "mlp.shared_expert_gate" => "ffn_gate_inp_shexp",
        "mlp.shared_expert.gate_proj" => "ffn_gate_shexp",
        "mlp.shared_expert.up_proj" => "ffn_up_shexp",
        "mlp.shared_expert.down_proj" => "ffn_down_shexp",
        "eh_proj" => "nextn.eh_proj",
        "enorm" => "nextn.enorm",
        "hnorm" => "nextn.hnorm",
        "shared_head.norm" => "nextn.shared_head_norm",
        "shared_head.head" => "nextn.shared_head_head",
        "embed_tokens" => "nextn.embed_tokens",
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    #[test]
    fn hf_names_become_gguf_names() {
        for (hf, gguf) in [
            ("model.embed_tokens.weight", Some("token_embd.weight")),
            ("lm_head.weight", Some("output.weight")),
            ("model.layers.11.self_attn.q_proj.bias", Some("blk.11.attn_q.bias")),
            ("model.layers.0.mlp.down_proj.weight", Some("blk.0.ffn_down.weight")),
            ("model.layers.0.mlp.experts.weight", None),
            ("model.layers.0.mlp.experts.up_proj.weight", Some("blk.0.ffn_up_exps.weight")),
            ("model.layers.0.mlp.experts.7.up_proj.weight", Some("blk.0.ffn_up.7.weight")),
            ("something.else", None),
        ] {
            assert_eq!(super::gguf(hf, &[]).as_deref(), gguf, "{hf}");
        }
        let own = super::gguf(
            "model.layers.3.post_attention_layernorm.weight",
            &[("post_attention_layernorm", "own")],
        );
        assert_eq!(own.as_deref(), Some("blk.3.own.weight"));
    }
}
