//! What the headers of a release's files say of its model, for those who choose one.

use super::Manifest;
use cresset_models::{FileLayout, ModelCard, ModelSource, inspect};

/// Where this build cannot read the headers, they say nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileFacts {
    pub format: &'static str,
    /// Size of all files.
    pub bytes: u64,
    /// As the files name it, such as `llama`.
    pub architecture: Option<String>,
    pub parameters: Option<u64>,
    /// The type that most parameters have, such as `Q4_K`.
    pub quantisation: Option<String>,
}

impl FileFacts {
    /// Blocking: it takes milliseconds.
    pub(super) fn of(manifest: &Manifest, source: &ModelSource) -> Self {
        let card = inspect(source).ok();
        let format = match source.layout() {
            FileLayout::Gguf(_) => "gguf",
            FileLayout::HfFolder(_) => "safetensors",
        };
        Self {
            format,
            bytes: manifest.bytes(),
            architecture: card.as_ref().map(|card| card.architecture.clone()),
            parameters: card.as_ref().map(ModelCard::parameters),
            quantisation: card.map(|card| card.main_type().to_owned()),
        }
    }
}
