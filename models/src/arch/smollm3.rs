//! SmolLM3: Llama's block, whose every fourth layer does not rotate queries and keys. Bakouch et
//! al. 2025; Yang et al. 2025, "Rope to Nope and Back Again".

use super::gguf_config::GgufConfigKeys;
use super::hf_keys::HfConfigKeys;
use super::llama;
use crate::Result;
use crate::spec::{ArchSpec, LayerOptions};
use cresset_kernels::rope::RopeStyle;

/// Every layer of this number is not rotated.
const INTERVAL: usize = 4;
/// The rotation's base if the config has none.
const THETA: f32 = 2_000_000.0;

/// GGUF does not name the layers. The converter permutes the rows of Q and K for interleaved
/// rotation, also in layers without one.
pub(super) fn from_gguf(keys: &mut GgufConfigKeys) -> Result<ArchSpec> {
    let mut config = keys.decoder()?;
    config.unrotated = every(INTERVAL, config.layers);
    Ok(ArchSpec { config, options: LayerOptions::plain(RopeStyle::Interleaved) })
}

fn every(interval: usize, layers: usize) -> Vec<usize> {
    (0..layers).filter(|layer| (layer + 1).is_multiple_of(interval)).collect()
}

pub(super) fn from_hf(keys: &mut HfConfigKeys) -> Result<ArchSpec> {
    keys.default("rope_theta", THETA);
    let options = llama::hf_options(keys)?;
    let mut config = keys.decoder(true)?;
    let interval = keys.take("no_rope_layer_interval")?.unwrap_or(INTERVAL).max(1);
    // In spite of its name the list has a 1 for each layer that is rotated.
    config.unrotated = match keys.take::<Vec<u8>>("no_rope_layers")? {
        // It may go on for layers that a smaller model does not have.
        Some(rotated) if rotated.len() < config.layers => {
            return Err(keys.bad("`no_rope_layers` does not have a number for each layer"));
        }
        Some(rotated) => (0..config.layers).filter(|layer| rotated[*layer] == 0).collect(),
        None => every(interval, config.layers),
    };
    let window = keys.switched_window()?;
    let unrotated = config.unrotated.clone();
    config.sliding = keys.sliding(&config, window, |layer| unrotated.contains(&layer))?;
    Ok(ArchSpec { config, options })
}
