//! GLM-4.7-Flash: DeepSeek-V3's layer with other sizes. In GGUF files it has the name of
//! DeepSeek-V2. GLM-4.5 Team 2025.

use super::deepseek;
use super::hf_keys::HfConfigKeys;
use crate::Result;
use crate::spec::ArchSpec;

pub(super) fn from_hf(keys: &mut HfConfigKeys) -> Result<ArchSpec> {
    let types = keys.take::<Vec<String>>("mlp_layer_types")?;
    let dense = keys.take::<usize>("first_k_dense_replace")?;
    keys.default("first_k_dense_replace", dense.unwrap_or(1));
    let mut spec = deepseek::from_hf(keys, deepseek::sigmoid_mixture)?;
    if let (Some(types), Some(mixture)) = (types, &mut spec.config.mixture) {
        let is_sparse = |kind: &String| match kind.as_str() {
            "dense" => Ok(false),
            "sparse" => Ok(true),
            other => Err(keys.unsupported(&format!("`mlp_layer_types` has {other:?}"))),
        };
        let layers = types.iter().map(is_sparse).collect::<Result<_>>()?;
        if dense.is_some() && mixture.layers != layers {
            return Err(keys.bad("`mlp_layer_types` and `first_k_dense_replace` differ"));
        }
        mixture.layers = layers;
    }
    Ok(spec)
}
