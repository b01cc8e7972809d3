//! Reads rotary embeddings from a Hugging Face `config.json`, in the older layout (`rope_theta`,
//! `rope_scaling`) and the newer (`rope_parameters`).

use super::hf_keys::HfConfigKeys;
use crate::config::{RopeConfig, RopeScaling, Yarn};
use crate::{ModelConfig, Result};

const THETA: f32 = 10_000.0;
/// A divisor of frequencies with which no position is turned, as GGUF's converter writes it.
const UNTURNED: f32 = 1e30;

/// The values used if the parameters give none, and the length that a scaling is relative to.
#[derive(Clone, Copy)]
struct Base {
    theta: f32,
    head_dim: usize,
    /// The part of each head that is rotated.
    part: f32,
    /// `max_position_embeddings`.
    max_positions: usize,
}

/// Reads one rotation for all layers, of a part of each head, and how many positions it reaches.
pub(super) fn shared(
    keys: &mut HfConfigKeys,
    head_dim: usize,
    part: f32,
    max_positions: usize,
) -> Result<(RopeConfig, usize)> {
    let theta = keys.take("rope_theta")?.unwrap_or(THETA);
    let base = Base { theta, head_dim, part, max_positions };
    let original = keys.take("original_max_position_embeddings")?;
    let (older, newer) = (keys.object("rope_scaling")?, keys.object("rope_parameters")?);
    rope(older.or(newer), base, original)
}

/// The rotations of full and of sliding layers: their parameters, and the base to use if those give
/// none.
pub(super) type RopesByKind = [(Option<HfConfigKeys>, f32); 2];

/// Takes the parameters of both kinds of layers. In the older layout only full layers have some.
pub(super) fn by_kind(keys: &mut HfConfigKeys, thetas: [f32; 2]) -> Result<RopesByKind> {
    let older = keys.object("rope_scaling")?;
    let (full, sliding) = match keys.object("rope_parameters")? {
        None => (None, None),
        Some(mut nested) => {
            let kinds = (nested.object("full_attention")?, nested.object("sliding_attention")?);
            nested.finish()?;
            kinds
        }
    };
    Ok([(older.or(full), thetas[0]), (sliding, thetas[1])])
}

/// Gives a config the rotation of its full layers, and returns that of its sliding ones.
pub(super) fn apply_by_kind(ropes: RopesByKind, config: &mut ModelConfig) -> Result<RopeConfig> {
    let (head_dim, max_positions) = (config.head_dim, config.max_positions);
    let [full, sliding] = ropes.map(|(parameters, theta)| {
        let mut found = rope(parameters, Base { theta, head_dim, part: 1.0, max_positions }, None)?;
        // transformers looks for `truncate` beside the two objects of parameters, where none is,
        // and so rounds even where the parameters say otherwise.
        if let RopeScaling::Yarn(yarn) = &mut found.0.scaling {
            yarn.truncate = true;
        }
        Ok(found)
    });
    (config.rope, config.max_positions) = full?;
    sliding.map(|(rope, _)| rope)
}

/// Reads a rotation from an object of parameters, if there is one. `original` overrides the
/// training length that the object gives.
fn rope(
    parameters: Option<HfConfigKeys>,
    base: Base,
    original: Option<usize>,
) -> Result<(RopeConfig, usize)> {
    let rotary_dim = (base.head_dim as f32 * base.part) as usize;
    let Some(mut keys) = parameters else {
        return Ok((
            RopeConfig { theta: base.theta, rotary_dim, scaling: RopeScaling::None },
            base.max_positions,
        ));
    };
    let theta = keys.take("rope_theta")?.unwrap_or(base.theta);
    let (newer, older) = (keys.take::<String>("rope_type")?, keys.take::<String>("type")?);
    let inside = keys.take("original_max_position_embeddings")?;
    let original = original.or(inside).unwrap_or(base.max_positions);
    let kind = newer.or(older);
    let scaling = match kind.as_deref() {
        None | Some("default") => RopeScaling::None,
        Some("linear") => RopeScaling::Linear { factor: keys.required("factor")? },
        Some("dynamic") => RopeScaling::Dynamic {
            factor: keys.required("factor")?,
            original_max_positions: base.max_positions,
        },
        Some("llama3") => RopeScaling::Llama3 {
            factor: keys.required("factor")?,
            low_freq_factor: keys.required("low_freq_factor")?,
            high_freq_factor: keys.required("high_freq_factor")?,
            original_max_positions: original,
        },
        Some("yarn") => RopeScaling::Yarn(yarn(&mut keys, base.max_positions, original)?),
        Some("proportional") => {
            let factor = keys.take("factor")?.unwrap_or(1.0);
            let part: f32 = keys.take("partial_rotary_factor")?.unwrap_or(1.0);
            let turned = (part * base.head_dim as f32) as usize / 2;
            let factors = |pair| if pair < turned { factor } else { UNTURNED };
            RopeScaling::Factors((0..base.head_dim / 2).map(factors).collect())
        }
        Some("longrope" | "su") => long_rope(&mut keys, base.max_positions, original)?,
        Some(other) => {
            return Err(keys.unsupported(&format!("RoPE scaling {other:?} is not supported")));
        }
    };
    keys.finish()?;
    let reach = match &scaling {
        RopeScaling::Dynamic { factor, .. } => (base.max_positions as f32 * factor) as usize,
        RopeScaling::Yarn(yarn) => (yarn.original_max_positions as f32 * yarn.factor) as usize,
        _ => base.max_positions,
    };
    Ok((RopeConfig { theta, rotary_dim, scaling }, reach.max(base.max_positions)))
}

fn yarn(keys: &mut HfConfigKeys, max_positions: usize, original: usize) -> Result<Yarn> {
    let factor = keys.take("factor")?.unwrap_or(max_positions as f32 / original as f32);
    let grown = |mscale: f32| if factor > 1.0 { 0.1 * mscale * factor.ln() + 1.0 } else { 1.0 };
    let mscales @ (_, all_dim) = (keys.take("mscale")?, keys.take("mscale_all_dim")?);
    let usual = match mscales {
        (Some(mscale), Some(all_dim)) if mscale != 0.0 && all_dim != 0.0 => {
            grown(mscale) / grown(all_dim)
        }
        _ => grown(1.0),
    };
    Ok(Yarn {
        factor,
        attention_factor: keys.take("attention_factor")?.unwrap_or(usual),
        beta_fast: keys.take("beta_fast")?.unwrap_or(32.0),
        beta_slow: keys.take("beta_slow")?.unwrap_or(1.0),
        original_max_positions: original,
        truncate: keys.take("truncate")?.unwrap_or(true),
        mscale_all_dim: all_dim.unwrap_or(0.0),
    })
}

fn long_rope(
    keys: &mut HfConfigKeys,
    max_positions: usize,
    original: usize,
) -> Result<RopeScaling> {
    let factor = keys.take("factor")?.unwrap_or(max_positions as f32 / original as f32);
    let usual =
        if factor > 1.0 { (1.0 + factor.ln() / (original as f32).ln()).sqrt() } else { 1.0 };
    Ok(RopeScaling::LongRope {
        short: keys.required("short_factor")?,
        long: keys.required("long_factor")?,
        attention_factor: keys.take("attention_factor")?.unwrap_or(usual),
        original_max_positions: original,
    })
}
