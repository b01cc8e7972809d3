//! Granite 4: Granite 3's layer, where most layers have Mamba-2's selective scan in place of
//! attention, which is not rotated. The larger ones have experts, and beside them an MLP that
//! computes every token. IBM Research 2025.

use super::gguf_config::GgufConfigKeys;
use super::hf_keys::HfConfigKeys;
use super::{granite, llama};
use crate::config::{MixtureConfig, Recurrent, RecurrentKind, ScanConfig, SharedConfig};
use crate::spec::{ArchSpec, LayerOptions, NameMap, Presence};
use crate::{ModelConfig, Result};
use cresset_kernels::recurrence::ScanShape;
use cresset_kernels::rope::RopeStyle;

const NAMES: NameMap = NameMap {
    gguf: &[
        ("mamba.in_proj", "ssm_in"),
        ("mamba.conv1d", "ssm_conv1d"),
        ("mamba.dt_bias", "ssm_dt.bias"),
        ("mamba.A_log", "ssm_a"),
        ("mamba.D", "ssm_d"),
        ("mamba.norm", "ssm_norm"),
        ("mamba.out_proj", "ssm_out"),
    ],
    ..NameMap::USUAL
};

const DENSE_NAMES: NameMap = NameMap {
    hf: &[
        ("mlp.gate_up_proj", "shared_mlp.input_linear"),
        ("mlp.down_proj", "shared_mlp.output_linear"),
    ],
    ..NAMES
};

const MOE_NAMES: NameMap = NameMap {
    hf: &[
        ("mlp.gate.", "block_sparse_moe.router.layer."),
        ("mlp.experts.gate_up_proj", "block_sparse_moe.input_linear"),
        ("mlp.experts.down_proj", "block_sparse_moe.output_linear"),
        ("mlp.shared_expert.gate_up_proj", "shared_mlp.input_linear"),
        ("mlp.shared_expert.down_proj", "shared_mlp.output_linear"),
    ],
    ..NAMES
};

/// The limits of steps if a config has none.
const STEP_LIMITS: [f32; 2] = [0.0, f32::INFINITY];

/// Puts the scan, if there is one, in its layers, and takes the rotation from the others.
fn with_scan(config: &mut ModelConfig, scan: Option<ScanConfig>, layers: Vec<bool>, rotated: bool) {
    let scan = scan.filter(|_| layers.contains(&true)).map(RecurrentKind::SelectiveScan);
    config.recurrent = scan.map(|kind| Recurrent { kind, layers });
    if !rotated {
        config.unrotated = (0..config.layers).collect();
    }
}

/// The MLP that computes every token, alone or, if it has a width of its own, beside experts.
fn with_mlp(
    config: &mut ModelConfig,
    width: Option<usize>,
    experts: Option<MixtureConfig>,
) -> NameMap {
    let Some(experts) = experts else {
        config.intermediate_size = width.unwrap_or(config.intermediate_size);
        return DENSE_NAMES;
    };
    let shared = width.map(|width| SharedConfig { width, gated: false });
    config.mixture = Some(MixtureConfig { shared, ..experts });
    MOE_NAMES
}

/// Files of Granite 3 and 4: llama.cpp's converter gives a model without a scan the names of
/// Granite 3, and still writes the settings of one.
pub(super) fn from_gguf(keys: &mut GgufConfigKeys) -> Result<ArchSpec> {
    let (mut config, layers) = keys.decoder_with_gaps()?;
    let rotated = keys.flag("rope.scaling.finetuned")?.unwrap_or(true);
    let has_scan = keys.has("ssm.time_step_rank") || layers.contains(&true);
    let scan = has_scan.then(|| gguf_scan(keys, &config)).transpose()?;
    with_scan(&mut config, scan, layers, rotated);
    granite::gguf_multipliers(keys)?.apply(&mut config);
    let width = keys.size("expert_shared_feed_forward_length")?;
    let experts = if keys.count("expert_count")?.unwrap_or(0) > 0 {
        Some(keys.mixture(&config, true)?)
    } else {
        keys.count("expert_used_count")?;
        None
    };
    let names = with_mlp(&mut config, width, experts);
    let options = LayerOptions {
        names,
        qkv_bias: Presence::Optional,
        output_bias: Presence::Optional,
        mlp_bias: Presence::Optional,
        ..LayerOptions::plain(RopeStyle::Interleaved)
    };
    Ok(ArchSpec { config, options })
}

fn gguf_scan(keys: &mut GgufConfigKeys, config: &ModelConfig) -> Result<ScanConfig> {
    let heads = keys.needed("ssm.time_step_rank")?;
    let shape = ScanShape {
        heads,
        head_dim: keys.needed("ssm.inner_size")? / heads,
        groups: keys.needed("ssm.group_count")?,
        state_dim: keys.needed("ssm.state_size")?,
    };
    Ok(ScanConfig {
        shape,
        taps: keys.needed("ssm.conv_kernel")?,
        conv_bias: keys.has_tensor_ending("ssm_conv1d.bias"),
        step_limits: STEP_LIMITS,
        norm_eps: config.rms_norm_eps,
    })
}

pub(super) fn from_hf(keys: &mut HfConfigKeys) -> Result<ArchSpec> {
    let rotated = is_rotated(keys)?;
    let norm = keys.take::<String>("normalization_function")?;
    if norm.is_some_and(|norm| norm != "rmsnorm") {
        return Err(keys.unsupported("`normalization_function` is not \"rmsnorm\""));
    }
    keys.take::<String>("init_method")?;
    let ArchSpec { mut config, options } = llama::from_hf(keys)?;
    let scan = hf_scan(keys, &config)?;
    let layers = keys.recurrent_layers(config.layers, &["linear_attention", "mamba"], |_| true)?;
    with_scan(&mut config, Some(scan), layers, rotated);
    granite::hf_multipliers(keys)?.apply(&mut config);
    let width = Some(keys.required("shared_intermediate_size")?);
    let count: usize = keys.take("num_local_experts")?.unwrap_or(0);
    let experts = if count > 0 {
        keys.default("num_experts", count);
        Some(keys.mixture(config.intermediate_size, config.layers)?)
    } else {
        keys.take::<usize>("num_experts_per_tok")?;
        None
    };
    let names = with_mlp(&mut config, width, experts);
    Ok(ArchSpec { config, options: LayerOptions { names, ..options } })
}

fn is_rotated(keys: &mut HfConfigKeys) -> Result<bool> {
    match keys.take::<String>("position_embedding_type")?.as_deref() {
        None | Some("nope") => Ok(false),
        Some("rope") => Ok(true),
        Some(other) => Err(keys.unsupported(&format!("positions by {other:?} are not supported"))),
    }
}

fn hf_scan(keys: &mut HfConfigKeys, config: &ModelConfig) -> Result<ScanConfig> {
    // The size of the chunks in which the reference computes a prompt does not change its results.
    keys.take::<usize>("mamba_chunk_size")?;
    if keys.flag("mamba_proj_bias")? {
        return Err(keys.unsupported("`mamba_proj_bias` is on, which is not supported"));
    }
    Ok(ScanConfig {
        shape: hf_shape(keys, config.hidden_size)?,
        taps: keys.take("mamba_d_conv")?.unwrap_or(4),
        conv_bias: keys.take("mamba_conv_bias")?.unwrap_or(true),
        step_limits: step_limits(keys)?,
        norm_eps: config.rms_norm_eps,
    })
}

/// Heads may have the size "auto", which follows from the others.
fn hf_shape(keys: &mut HfConfigKeys, hidden_size: usize) -> Result<ScanShape> {
    let heads: usize = keys.required("mamba_n_heads")?;
    let inner = keys.take("mamba_expand")?.unwrap_or(2) * hidden_size;
    let stated = keys.take::<serde_json::Value>("mamba_d_head")?;
    let head_dim = stated.as_ref().and_then(serde_json::Value::as_u64).map(|dim| dim as usize);
    let head_dim = head_dim.or(inner.checked_div(heads)).unwrap_or(0);
    if head_dim.checked_mul(heads) != Some(inner) {
        return Err(keys.bad("`mamba_n_heads` of `mamba_d_head` are not `mamba_expand` times wide"));
    }
    let groups = keys.take("mamba_n_groups")?.unwrap_or(1);
    Ok(ScanShape { heads, head_dim, groups, state_dim: keys.required("mamba_d_state")? })
}

/// JSON has no infinity: a config has another thing in place of it.
fn step_limits(keys: &mut HfConfigKeys) -> Result<[f32; 2]> {
    let Some(stated) = keys.take::<[serde_json::Value; 2]>("time_step_limit")? else {
        return Ok(STEP_LIMITS);
    };
    let [least, most] = stated.each_ref().map(|limit| limit.as_f64().map(|limit| limit as f32));
    Ok([least.unwrap_or(STEP_LIMITS[0]), most.unwrap_or(STEP_LIMITS[1])])
}
